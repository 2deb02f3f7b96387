"""Batches of sequences out of files: what was touched before, and what comes next.

A sample has one id of each feature, its target's, and for some of them a list of those before, the
oldest first. `hotrow prepare taobao` makes such data, and so does anybody whose columns are named
like its own: `item` with `history_item`, which read one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.data.loader import BatchReader, Columns
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.format import Schema
from hotrow.data.sequences import SequenceBatch, places
from hotrow.data.sources import Source
from hotrow.inputs.batch import KeyedJaggedTensor

_PREFIX = "history_"

Histories = Mapping[str, str | None]  # of a feature the one that lists its past, if it has one


def histories_of(schema: Schema) -> dict[str, str | None]:
    """The features of a step, and where their past is; empty where there are no sequences."""
    tables = {each.name: each.table for each in schema.features}
    lists = {each.name for each in schema.jagged}
    found: dict[str, str | None] = {}
    for feature in schema.single:
        past = _PREFIX + feature.name
        found[feature.name] = past if past in lists and tables[past] == feature.table else None
    return found if any(found.values()) else {}


def check_histories(schema: Schema, found: Histories) -> None:
    """Refuse lists that are no histories: no step would read them."""
    if others := sorted({each.name for each in schema.jagged} - set(found.values())):
        raise ValueError(
            f"lists are read as histories here, and {others[0]!r} is none: it would be named "
            f"{_PREFIX}x and read the table of a feature x"
        )


class SequenceLoader(BatchReader[SequenceBatch]):
    """Batches of sequences, in the order and by the threads of a `Loader`, whose options it takes.

    `histories` has the features of a step. One without a history is the same at all steps, as a
    user is. Histories of a sample are equally long; of longer ones the last `steps` count, shorter
    ones begin with the ids in `padding`. A step's numbers are its place, from 0 to 1 as in the TBSM
    reference, and then those of the sample, which are the target's: 0 at the steps before.
    """

    def __init__(
        self,
        source: Source | Prepared | str | Path,
        split: str = "train",
        *,
        steps: int,
        histories: Histories,
        padding: Mapping[str, int],
        **options: Any,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        lists = [past for past in histories.values() if past is not None]
        if not lists:
            raise ValueError("histories must name the list of one feature at least")
        super().__init__(source, split, features=[*histories, *lists], **options)
        self._steps, self._histories, self._lists = steps, dict(histories), lists
        self._padding = dict(padding)
        self._places = places(steps)

    def identity(self) -> str | None:
        mine = super().identity()
        return None if mine is None else f"{mine} {self._steps} {sorted(self._padding.items())}"

    def _batch(self, columns: Columns) -> SequenceBatch:
        size, steps = len(columns.label), self._steps
        lengths = self._new(size, torch.int64)
        np.minimum(self._equal_lengths(columns), steps, out=lengths.numpy())
        is_past = np.arange(steps) >= steps - lengths.numpy()[:, None]
        values = self._new((len(self._histories), size, steps + 1), columns.ids.dtype)
        for (name, past), ids in zip(self._histories.items(), values.numpy(), strict=True):
            target = columns.ids.numpy()[:, self._single.index(name)]
            ids[:, steps] = target
            ids[:, :steps] = self._padding[name]
            if past is None:
                np.copyto(ids[:, :steps], target[:, None], where=is_past)
            else:
                ids[:, :steps][is_past] = self._last(columns, past)
        offsets = self._new(values.numel() // (steps + 1) + 1, torch.int64)
        offsets.numpy()[:] = np.arange(0, values.numel() + 1, steps + 1)
        sparse = KeyedJaggedTensor(list(self._histories), values.view(-1), offsets=offsets)
        dense = self._new((size, steps + 1, 1 + columns.dense.shape[1]), torch.float32)
        numbers = dense.numpy()
        numbers[:, :, 0] = self._places
        numbers[:, :steps, 1:] = 0
        numbers[:, steps, 1:] = columns.dense.numpy()
        return SequenceBatch(dense, sparse, lengths, columns.label)

    def _equal_lengths(self, columns: Columns) -> NDArray[np.int64]:
        found = [np.diff(columns.jagged[name][0].numpy()) for name in self._lists]
        for name, lengths in zip(self._lists[1:], found[1:], strict=True):
            if len(bad := np.flatnonzero(lengths != found[0])):
                raise ValueError(
                    f"a sample has {found[0][bad[0]]:,} ids in {self._lists[0]} and "
                    f"{lengths[bad[0]]:,} in {name}; a step has one of each"
                )
        return found[0]

    def _last(self, columns: Columns, name: str) -> NDArray[Any]:
        """The values of a list that fit, sample by sample."""
        offsets, values = (each.numpy() for each in columns.jagged[name])
        lengths, ends = np.diff(offsets), offsets[1:] - offsets[0]
        if not len(lengths) or lengths.max() <= self._steps:
            return values
        firsts = np.repeat(ends - np.minimum(lengths, self._steps), lengths)
        return values[np.arange(len(values)) >= firsts]
