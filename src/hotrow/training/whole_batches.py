"""Batches of a system on several ranks: each reads whole ones, and trains its part of each.

A system decides from whole batches, and so alike on every rank, without a message. This rank's part
is cut out just before a batch is planned. A checksum of the whole batch travels with the header
that opens its step, so that ranks that read different batches raise. It is that of the batch as the
loader gave it: a device that sorts its samples beside training is not waited for. Where a loader
gives tensors of a device, ranks compare their types and shapes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow.distributed.whole_batches import checksum_of
from hotrow.engine.split_batch import Parted
from hotrow.inputs import samples
from hotrow.inputs.held_batches import parts_in
from hotrow.inputs.rank_part import RankPart, whole_batches
from hotrow.inputs.samples import Take
from hotrow.inputs.tree import tensors_in


class WholeBatches:
    """Whole batches of loaders, and this rank's parts of them. One rank alone trains all."""

    def __init__(self, part: RankPart, count: Callable[[Any], int], take: Take | None) -> None:
        """`count` returns a batch's number of samples; `take` is for batches that
        inputs/samples.py cannot cut."""
        self._part, self._count, self._take = part, count, take
        self._given: tuple[Iterable[Any], Iterable[Any]] | None = None  # a loader, read whole

    def of(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return a loader of whole batches: of the same loader the same one."""
        if self._part.ranks == 1:
            return loader
        if self._given is None or self._given[0] is not loader:
            self._given = loader, whole_batches(loader)
        return self._given[1]

    def part_of(self, batch: Any) -> Any:
        """Return this rank's part of a whole batch."""
        if self._part.ranks == 1:
            return batch
        if isinstance(batch, Parted):
            return self._part_of_two(batch) if batch.first else self.part_of(batch.batch)
        size = self._count(batch)
        low, high = self._part.of(size)
        if self._take is not None:
            return self._take(batch, torch.arange(low, high))
        return samples.cut(batch, low, high, size=size)

    def _part_of_two(self, parted: Parted) -> Parted:
        """Return this rank's samples of both parts of a batch, those of its first part first. Each
        rank has two parts, also one that has no sample of the first."""
        (low, high), others = self._part.of_two(parted.first, parted.size)
        where = next((x.device for x in tensors_in(parted.batch)), None)
        places = torch.cat([torch.arange(*x, device=where) for x in ((low, high), others)])
        part = samples.take(parted.batch, places, size=parted.size, by=self._take)
        size = len(places)
        cut = parted.cut if self._take is not None else partial(samples.cut, size=size)
        return Parted(part, high - low, size, cut, parted.holds)

    def parts(self, batches: Iterable[Any], checksums: deque[int]) -> Iterator[Any]:
        """Yield this rank's parts, and note the checksum of each whole batch."""
        for batch in batches:
            checksums.append(checksum_of(_tensors_of(_as_given(batch)), waits=False))
            yield self.part_of(batch)


def _as_given(batch: Any) -> Any:
    """Return a whole batch as the loader gave it, or as it is trained if that is on the host."""
    if not isinstance(batch, Parted):
        return batch
    return batch.batch if batch.given is None else batch.given


def _tensors_of(batch: Any) -> list[Tensor]:
    """Return what tells one batch from another."""
    parts = tensors_in(batch) or parts_in(batch)
    return [part if isinstance(part, Tensor) else _bytes_of(part) for part in parts]


def _bytes_of(array: Any) -> Tensor:
    """Return an array's bytes: it may hold what no tensor does, such as texts."""
    return torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
