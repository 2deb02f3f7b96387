"""The part of every batch that a rank trains. A batch is global: its parts, in rank order, are the
batch of a single process.

Loaders that give a rank its parts can also give it whole batches: `whole_batches`. Systems that
order, split or skip samples need those, so that they decide the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from hotrow.inputs import samples
from hotrow.support.numbers import whole

Batch = TypeVar("Batch")
Batches = TypeVar("Batches", covariant=True)


@dataclass(frozen=True)
class RankPart:
    """The part of one rank among `ranks`. Parts differ by at most one sample; the larger ones are
    those of the first ranks, and the last ranks may have none."""

    rank: int = 0
    ranks: int = 1

    def of(self, size: int) -> tuple[int, int]:
        """Return the first sample of this rank in a batch of `size` samples, and the first one
        after its part."""
        small, larger = divmod(size, self.ranks)
        first = self.rank * small + min(self.rank, larger)
        return first, first + small + (self.rank < larger)

    def of_two(self, first: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the samples of this rank among the first ones of a batch, and among the others.

        Its samples in all are as many as `of` gives, and its parts of the first ones differ from
        those of other ranks by at most one sample, too."""
        low, high = self.of(size)
        begin, end = self.of(first)
        # What `of` gives to earlier ranks, without their part of the first samples.
        return (begin, end), (first + low - begin, first + high - end)

    def cut(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch, which shares the memory of its tensors."""
        if self.ranks == 1:
            return batch
        size = len(batch)  # type: ignore[arg-type]
        part: Batch = samples.cut(batch, *self.of(size), size=size)
        return part


def given_part(rank: Any, ranks: Any) -> RankPart | None:
    """Return the part that arguments name; None if they leave it to torch.distributed."""
    if rank is None and ranks is None:
        return None
    if rank is None or ranks is None:
        raise ValueError(f"give both rank and ranks, or neither; got rank={rank}, ranks={ranks}")
    ranks, rank = whole("ranks", ranks, least=1), whole("rank", rank, least=0)
    if rank >= ranks:
        raise ValueError(f"rank must be below ranks, {ranks}, got {rank}")
    return RankPart(rank, ranks)


def current_part() -> RankPart:
    """Return the part of this process in the default process group; all if there is none."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return RankPart(distributed.get_rank(), distributed.get_world_size())
    return RankPart()


# -- whole batches -----------------------------------------------------------------------


@runtime_checkable
class InParts(Protocol[Batches]):
    """A loader that gives a rank its parts of batches, and whole batches where they are wanted."""

    def whole_batches(self) -> Iterable[Batches]:
        """Return a loader of the same batches, whole on every rank."""


def whole_batches(loader: Iterable[Any]) -> Iterable[Any]:
    """Return a loader of whole batches; one that knows no parts as it is."""
    return loader.whole_batches() if isinstance(loader, InParts) else loader


class PartReader(Generic[Batch]):
    """An iterator over a rank's parts of batches; the rest of them can be read whole instead."""

    def __init__(self, read: Callable[[RankPart], Iterator[Batch]], part: RankPart) -> None:
        self._read, self._batches = read, read(part)
        self._done = 0  # batches that were read

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._done += 1
        return batch

    def close(self) -> None:
        """End reading, and the threads that read ahead."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def whole_batches(self) -> Iterator[Batch]:
        """Return an iterator over the batches that were not read, whole on every rank."""
        self.close()
        return islice(self._read(RankPart()), self._done, None)


class HeldBatches(Generic[Batch]):
    """Whole batches in memory, of which a rank reads its parts, any number of times."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return map(current_part().cut, self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def whole_batches(self) -> list[Batch]:
        """Return the whole batches."""
        return self._batches
