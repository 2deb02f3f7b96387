"""Popular samples first: a batch put in order, so that its first part needs no rows that arrive.

Sees ids and which rows are pinned. On a GPU the batch is classified and put in order there, beside
training, and how many samples are popular is read when it has long been known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from hotrow.embedding.ahead import features_of
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.engine.split_batch import Cut, Parted
from hotrow.inputs import samples
from hotrow.inputs.batch import compared, parse
from hotrow.inputs.hotset import HotSet, popular
from hotrow.inputs.samples import Take
from hotrow.inputs.tree import tensors_in
from hotrow.support.streams import Mark, lanes_of
from hotrow.systems.sorting import Sorter

# First parts come in so many sizes, so that steps of the same shapes come again and can be
# captured; popular samples beyond go with the others.
GRAIN = 16


@dataclass(frozen=True)
class Sorted:
    """A batch in order, and how many of its samples are popular."""

    parted: Parted
    popular: int
    by_collection: Mapping[str, int]  # as far as its rows go

    @property
    def samples(self) -> int:
        return self.parted.size


class Splitter:
    """Puts batches in order by what a model's collections have pinned."""

    def __init__(
        self,
        collections: Mapping[str, EmbeddingBagCollection],
        ids: Callable[[Any], Any] | None,
        *,
        take: Take | None = None,
        grain: int = GRAIN,
    ) -> None:
        """`take` is for batches that hotrow.inputs.samples does not know how to cut."""
        if grain < 1:
            raise ValueError(f"grain must be at least 1 size of first parts, not {grain}")
        self._collections, self._ids, self._take, self._grain = collections, ids, take, grain
        self._hot: dict[str, HotSet] = {}
        self._there: dict[tuple[str, torch.device], HotSet] = {}
        self._versions: dict[str, int] = {}
        self.lanes = lanes_of(next(iter(collections.values())).device)
        self._sorter: Sorter | None = None  # where the device is a GPU
        self._sizes: set[int] = set()  # of first parts so far
        self._minds_new_sizes = self.lanes.device.type == "cuda"

    def pin(self, hot: Mapping[str, HotSet]) -> None:
        """These rows of each collection are pinned now; those not named have all rows there."""
        is_new = hot.keys() != self._hot.keys()
        self._hot = {name: each.to("cpu") for name, each in hot.items()}
        self._versions = {name: self._collections[name].pins_version for name in hot}
        if is_new:
            self._there.clear()
            self._sorter = None
        # Where they are: what sorts on a device has been captured, and reads them there.
        with self.lanes.on("sort"):
            for (name, _), there in self._there.items():
                there.is_hot.copy_(self._hot[name].is_hot)
        if self._sorter is None and self.lanes.device.type == "cuda":
            self._sorter = Sorter(self.lanes, numbers=1 + len(hot), take=self._take)

    @property
    def holds(self) -> bool:
        """Whether what was pinned still is."""
        return all(
            self._collections[name].pins_version == version
            for name, version in self._versions.items()
        )

    @property
    def mask_bytes(self) -> int:
        """Of fast memory, to classify by: a byte for each row there is."""
        mine = [hot for (_, device), hot in self._there.items() if device.type != "cpu"]
        return sum(each.is_hot.numel() for each in mine)

    def sort(self, batch: Any) -> Callable[[], Sorted]:
        """Launch it; what is returned gives the outcome, and waits for it if it must."""
        features = self._features(batch)
        if self._sorter is not None and all(isinstance(x, Tensor) for x in features.values()):
            size = len(next(iter(features.values())))
            sorting = self._sorter.sort([batch], self._rule)

            def outcome() -> Sorted:
                total, *each = sorting.told()
                return self._sorted(sorting.batch, size, total, each, sorting.made)

            return outcome
        where = compared(next(iter(features.values())))[0].device
        both, counts = self._classified(features, where)
        size, (total, *each) = len(both), counts.tolist()
        if total >= self._least(size):
            order = both.logical_not().to(torch.uint8).argsort(stable=True)
            batch = self.taken(batch, order, size)
        made = self.lanes.mark("train") if where.type == "cuda" else None
        found = self._sorted(batch, size, total, each, made)
        return lambda: found

    def _rule(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self._classified(self._features(batch), self.lanes.device)

    def _classified(
        self, features: Mapping[str, Any], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Which samples are popular, [B] bool; how many are, in all and by each collection."""
        masks: list[Tensor] = []
        for name, mine in features.items():
            parsed = parse(mine, self._collections[name].features, None)
            masks.append(popular(parsed, self._hot_on(name, device)))
        both = reduce(torch.logical_and, masks)
        return both, torch.stack([both, *masks]).sum(1)

    def _sorted(
        self, batch: Any, size: int, total: int, each: Sequence[int], made: Mark | None
    ) -> Sorted:
        versions = dict(self._versions)
        holds = partial(_same_pins, self._collections, versions)
        parted = Parted(batch, self._first_of(total, size), size, self._cut(size), holds, made)
        return Sorted(parted, total, dict(zip(versions, each, strict=True)))

    def _first_of(self, popular: int, size: int) -> int:
        """Samples of the first part: on a GPU one size less than might be, if that one came before
        and the other did not, since a new one is compiled and captured anew. None is no such size.
        """
        least = self._least(size)
        first = popular // least * least
        is_new = first > least and first not in self._sizes
        if self._minds_new_sizes and is_new and first - least in self._sizes:
            first -= least
        self._sizes.add(first)
        return first

    def _least(self, size: int) -> int:
        """Sizes of first parts are multiples of this."""
        return max(1, size // self._grain)

    def taken(self, batch: Any, order: Tensor, size: int) -> Any:
        """Return the samples at some places of a batch of `size`, in that order."""
        if self._take is not None:
            return self._take(batch, order)
        return samples.take(batch, order, size=size)

    def _cut(self, size: int) -> Cut:
        if self._take is None:
            return partial(samples.cut, size=size)
        take = self._take

        def cut(batch: Any, low: int, high: int) -> Any:
            device = next((each.device for each in tensors_in(batch)), None)
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
    return all(collections[name].pins_version == each for name, each in versions.items())
