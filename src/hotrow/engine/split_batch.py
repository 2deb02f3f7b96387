"""Batches that are trained in two parts: the first samples need no rows that are still to arrive.

Knows which samples, lookups and bags belong to a part; nothing of how it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.inputs.batch import Batch, spans_of
from hotrow.inputs.tables import WidthGroup
from hotrow.support.streams import Mark

Cut = Callable[[Any, int, int], Any]  # a batch, from which sample on and up to which -> a batch


@dataclass(frozen=True, eq=False)
class Parted:
    """What a loader may give instead of a batch: the same, whose first samples go first."""

    batch: Any
    first: int  # samples of the first part
    size: int  # of the batch
    cut: Cut
    holds: Callable[[], bool]  # whether the rows of the first part still stay where they are
    made: Mark | None = None  # when a device has made it; None: it was there before
    given: Any = None  # the batch whose samples a device has sorted; None: the host did


@dataclass(eq=False)
class Split:
    """A batch that is trained in two parts, as the step sees it."""

    batch: Any
    first: int
    size: int
    cut: Cut
    # (a part's batch, its first sample) -> its ids, in each collection
    arrivals: Callable[[Any, int], Sequence[tuple[Any, Any]]]
    collections: Sequence[Any]
    wait: Callable[[], None]  # what training is given from now on comes after all rows' arrival
    # Several ranks call it before the first part: rows begin to travel between them.
    begin: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Place:
    """Where a part's lookups and bags stand among the whole batch's, in one width group."""

    first: int  # sample
    lookups: slice | Tensor
    bags: slice | Tensor


def place_of(whole: Batch, part: Batch, first: int, group: WidthGroup) -> Place:
    """Of a part that begins with the sample `first`; waits for a device if ids are jagged."""
    features = len(group.features)
    if whole.offsets is None:
        here = slice(first * features, (first + part.num_samples) * features)
        return Place(first, here, here)
    # Feature by feature, sample by sample: a part has a run of each feature's.
    size, end = whole.num_samples, first + part.num_samples
    edges = [
        whole.offsets[[key * size + first, key * size + end]].tolist()
        for key in (whole.keys.index(feature.key) for feature in group.features)
    ]
    lookups, bags, lookups_before, bags_before = [], [], 0, 0
    mine = zip(group.features, spans_of(whole, group), edges, strict=True)
    for feature, (low, high), (begin, stop) in mine:
        lookups.append(torch.arange(begin - low, stop - low) + lookups_before)
        lookups_before += high - low
        if feature.pooling == "none":  # each lookup is a bag
            bags.append(torch.arange(begin - low, stop - low) + bags_before)
            bags_before += high - low
        else:
            bags.append(torch.arange(first, end) + bags_before)
            bags_before += size
    device = whole.values.device
    return Place(first, torch.cat(lookups).to(device), torch.cat(bags).to(device))
