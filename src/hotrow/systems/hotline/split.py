"""Sorts a batch, popular samples first, so that its first part needs pinned rows alone.

Sees ids and which rows are pinned. A GPU classifies and sorts beside training; the number of
popular samples is read later, without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from hotrow.embedding.ahead import features_of
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.engine.split_batch import Cut, Parted
from hotrow.inputs import samples
from hotrow.inputs.batch import parse, parts_of
from hotrow.inputs.hotset import HotSet, popular
from hotrow.inputs.samples import Take
from hotrow.inputs.tree import tensors_in
from hotrow.support.streams import Mark, lanes_of
from hotrow.systems.sorting import Sorter

# First parts have so many sizes, so that steps of equal shapes repeat and can be captured. Popular
# samples beyond a size go with the others.
GRAIN = 16


@dataclass(frozen=True)
class Sorted:
    """A sorted batch, and how many of its samples are popular."""

    parted: Parted
    popular: int
    by_collection: Mapping[str, int]  # popular by the rows of each collection

    @property
    def samples(self) -> int:
        return self.parted.size


class Splitter:
    """Sorts batches by the pinned rows of a model's collections."""

    def __init__(
        self,
        collections: Mapping[str, EmbeddingBagCollection],
        ids: Callable[[Any], Any] | None,
        *,
        take: Take | None = None,
        grain: int = GRAIN,
    ) -> None:
        """`take` is for batches that inputs/samples.py cannot cut."""
        self._collections, self._ids, self._take, self._grain = collections, ids, take, grain
        self._hot: dict[str, HotSet] = {}
        self._there: dict[tuple[str, torch.device], HotSet] = {}
        self._versions: dict[str, int] = {}
        self.lanes = lanes_of(next(iter(collections.values())).device)
        self._sorter: Sorter | None = None  # on a GPU
        self._sizes: set[int] = set()  # first parts' sizes so far
        self._minds_new_sizes = self.lanes.device.type == "cuda"

    def pin(self, hot: Mapping[str, HotSet]) -> None:
        """Set the pinned rows. Collections that are not named have all rows in fast memory."""
        is_new = hot.keys() != self._hot.keys()
        self._hot = {name: rows.to("cpu") for name, rows in hot.items()}
        self._versions = {name: self._collections[name].pins_version for name in hot}
        if is_new:
            self._there.clear()
            self._sorter = None
        # In place: captured launches read the masks where they are.
        with self.lanes.on("sort"):
            for (name, _), there in self._there.items():
                there.is_hot.copy_(self._hot[name].is_hot)
        if self._sorter is None and self.lanes.device.type == "cuda":
            self._sorter = Sorter(self.lanes, numbers=1 + len(hot), take=self._take)

    @property
    def mask_bytes(self) -> int:
        """Return the bytes of fast memory for classification: one for each row."""
        return sum(
            hot.is_hot.numel() for (_, device), hot in self._there.items() if device.type != "cpu"
        )

    def sort(self, batch: Any) -> Callable[[], Sorted]:
        """Launch the sorting of a batch; return a function that waits for the result."""
        features = self._features(batch)
        if self._sorter is not None and all(isinstance(x, Tensor) for x in features.values()):
            size = len(next(iter(features.values())))
            sorting = self._sorter.sort([batch], self._rule)

            def outcome() -> Sorted:
                total, *counts = sorting.told()
                result = self._sorted(sorting.batch, size, total, counts, sorting.made)
                return replace(result, parted=replace(result.parted, given=batch))

            return outcome
        where = parts_of(next(iter(features.values())))[0].device
        both, numbers = self._classified(features, where)
        size, (total, *counts) = len(both), numbers.tolist()
        if total >= self._least(size):
            order = both.logical_not().to(torch.uint8).argsort(stable=True)
            batch = self.taken(batch, order, size)
        made = self.lanes.mark("train") if where.type == "cuda" else None
        result = self._sorted(batch, size, total, counts, made)
        return lambda: result

    def _rule(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self._classified(self._features(batch), self.lanes.device)

    def _classified(
        self, features: Mapping[str, Any], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return which samples are popular, [B] bool, and how many, in all and by collection."""
        masks: list[Tensor] = []
        for name, ids in features.items():
            parsed = parse(ids, self._collections[name].features, None)
            masks.append(popular(parsed, self._hot_on(name, device)))
        both = reduce(torch.logical_and, masks)
        return both, torch.stack([both, *masks]).sum(1)

    def _sorted(
        self, batch: Any, size: int, total: int, counts: Sequence[int], made: Mark | None
    ) -> Sorted:
        versions = dict(self._versions)
        holds = partial(_same_pins, self._collections, versions)
        parted = Parted(batch, self._first_of(total, size), size, self._cut(size), holds, made)
        return Sorted(parted, total, dict(zip(versions, counts, strict=True)))

    def _first_of(self, popular: int, size: int) -> int:
        """Return the size of the first part. On a GPU a new size is captured anew, so the next
        smaller one is taken if it came before and is not 0."""
        least = self._least(size)
        first = popular // least * least
        is_new = first > least and first not in self._sizes
        if self._minds_new_sizes and is_new and first - least in self._sizes:
            first -= least
        self._sizes.add(first)
        return first

    def _least(self, size: int) -> int:
        """Return the step between sizes of first parts."""
        return max(1, size // self._grain)

    def taken(self, batch: Any, order: Tensor, size: int) -> Any:
        """Return the samples at some places of a batch of `size`, in that order."""
        return samples.take(batch, order, size=size, by=self._take)

    def _cut(self, size: int) -> Cut:
        if self._take is None:
            return partial(samples.cut, size=size)
        take = self._take

        def cut(batch: Any, low: int, high: int) -> Any:
            device = next((tensor.device for tensor in tensors_in(batch)), None)
            return take(batch, torch.arange(low, high, device=device))

        return cut

    def _features(self, batch: Any) -> dict[str, Any]:
        features = batch if self._ids is None else self._ids(batch)
        return {name: features_of(features, name, self._collections) for name in self._hot}

    def _hot_on(self, name: str, device: torch.device) -> HotSet:
        if device.type == "cpu":
            return self._hot[name]
        if (name, device) not in self._there:
            self._there[name, device] = self._hot[name].to(device)
        return self._there[name, device]


def _same_pins(
    collections: Mapping[str, EmbeddingBagCollection], versions: Mapping[str, int]
) -> bool:
    return all(collections[name].pins_version == pins for name, pins in versions.items())
