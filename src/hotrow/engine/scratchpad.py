"""Slots in fast memory, and which row each of them holds.

Knows nothing about batches or strategies. The maps describe the plan: a planned row is mapped
before its bytes have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

FREE = -1


class DenseMap:
    """Row to slot: four bytes for every row of the tables. `lookup` gives -1 for an absent row."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._slots = torch.full((num_rows,), FREE, dtype=torch.int32, device=device)

    def lookup(self, ids: Tensor) -> Tensor:
        return self._slots.index_select(0, ids).long()

    def insert(self, ids: Tensor, slots: Tensor) -> None:
        self._slots.index_copy_(0, ids, slots.int())

    def remove(self, ids: Tensor) -> None:
        self._slots.index_fill_(0, ids, FREE)

    def count(self) -> int:
        return int((self._slots != FREE).sum())

    @property
    def num_bytes(self) -> int:
        return self._slots.numel() * 4


class HashMap:
    """Eight bytes for every slot: open addressing at half load, keys read from slot -> row.

    Deleting leaves a tombstone; when those pass a tenth of the places, everything is rebuilt
    from slot -> row. Every step below handles all ids at once. The
    number of places is prime, so that any stride visits all of them.
    """

    EMPTY, TOMBSTONE = -1, -2
    # Places read at once: a turn of the loop costs more than its reads. After the first turn few
    # ids are left, at half load one in sixteen, so that more places each cost little.
    _PROBES = (4, 16)

    def __init__(self, row_of_slot: Tensor) -> None:
        self._row_of_slot = row_of_slot
        self._size = _prime_below(2 * row_of_slot.numel())
        device = row_of_slot.device
        self._places = torch.full((self._size,), self.EMPTY, dtype=torch.int32, device=device)
        self._tombstones = 0

    def lookup(self, ids: Tensor) -> Tensor:
        turns = self._turns(ids)
        _, slots, _, _ = next(turns)
        for open_, more, _, _ in turns:
            slots.index_copy_(0, open_, more)
        return slots

    def _turns(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Look for ids, turn by turn: which of them a turn looks for, their slots (-1 where an id
        was not found yet), the places that were read, [probes, ids], and where the ids were hit."""
        open_ = torch.arange(ids.numel(), device=ids.device)
        probe, stride = self._probes(ids)
        for count in chain(self._PROBES, repeat(self._PROBES[-1])):
            turn = torch.arange(count, device=ids.device).unsqueeze(1)
            probes = torch.addcmul(probe, stride, turn).remainder_(self._size)
            found = self._places.index_select(0, probes.view(-1)).long()
            row = self._row_of_slot.index_select(0, found.clamp(min=0)).view(probes.shape)
            found = found.view(probes.shape)
            hit = (row == ids).logical_and_(found >= 0)
            slots = torch.where(hit, found, FREE).amax(dim=0)
            yield open_, slots, probes, hit
            # An id lies before the first empty place on its way, or nowhere.
            goes_on = (found != self.EMPTY).all(dim=0).logical_and_(slots == FREE)
            onward = goes_on.nonzero().squeeze(1)
            if not onward.numel():
                return
            open_, ids, stride, probe = (
                each.index_select(0, onward) for each in (open_, ids, stride, probe)
            )
            probe = torch.add(probe, stride, alpha=count).remainder_(self._size)

    def insert(self, ids: Tensor, slots: Tensor) -> None:
        """Map absent ids; slot -> row must already say so."""
        if self._tombstones > self._size // 10:
            self._rebuild()  # reads slot -> row, the new ids included
            return
        self._place(ids, slots)

    def _place(self, ids: Tensor, slots: Tensor) -> None:
        probe, stride = self._probes(ids)
        slots = slots.int()
        while slots.numel():
            empty = self._places.index_select(0, probe) == self.EMPTY
            # Several ids may want one place: the one that is found there has won.
            self._places[probe[empty]] = slots[empty]
            lost = (self._places.index_select(0, probe) != slots).nonzero().squeeze(1)
            slots, stride = slots[lost], stride[lost]
            probe = (probe[lost] + stride) % self._size

    def remove(self, ids: Tensor) -> None:
        """Unmap present ids; slot -> row must still say so."""
        for _, _, probes, hit in self._turns(ids):
            self._places[probes[hit]] = self.TOMBSTONE
        self._tombstones += ids.numel()

    def count(self) -> int:
        return int((self._places >= 0).sum())

    def _rebuild(self) -> None:
        self._places.fill_(self.EMPTY)
        self._tombstones = 0
        slots = (self._row_of_slot != FREE).nonzero().squeeze(1)
        self._place(self._row_of_slot[slots], slots)

    def _probes(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where to look first, and how far to go on from there."""
        x = ids ^ (ids >> 32)
        for factor in (0x7FEB352D, 0x846CA68B):
            x = ((x ^ (x >> 16)) * factor) & 0xFFFFFFFF
        x ^= x >> 16
        return x * self._size >> 32, 1 + ids % (self._size - 1)

    @property
    def num_bytes(self) -> int:
        return self._size * 4


def _prime_below(number: int) -> int:
    candidate = max(5, number - 1 - number % 2)
    while any(candidate % divisor == 0 for divisor in range(3, math.isqrt(candidate) + 1, 2)):
        candidate -= 2
    return candidate


class Scratchpad:
    """`num_slots` slots and one more that always reads zero, for padding."""

    def __init__(
        self, num_slots: int, width: int, num_rows: int, device: torch.device, *, dense_map: bool
    ) -> None:
        self.num_slots, self.num_rows = num_slots, num_rows
        self.slots = torch.zeros(num_slots + 1, width, device=device)
        self.row_of_slot = torch.full((num_slots,), FREE, dtype=torch.int64, device=device)
        self.map: Any = DenseMap(num_rows, device) if dense_map else HashMap(self.row_of_slot)

    @property
    def null_slot(self) -> int:
        return self.num_slots

    @property
    def has_every_row(self) -> bool:
        """Whether there is a slot for every row, so that none ever has to leave."""
        return self.num_slots >= self.num_rows

    def replace(self, slots: Tensor, ids: Tensor) -> Tensor:
        """Give `slots` to `ids`; returns the ids that had them, -1 for none."""
        leaving = self.row_of_slot[slots]
        self.map.remove(leaving[leaving != FREE])
        self.row_of_slot[slots] = ids
        self.map.insert(ids, slots)
        return leaving

    def clear(self) -> None:
        """Every slot is free again."""
        taken = (self.row_of_slot != FREE).nonzero().squeeze(1)
        self.map.remove(self.row_of_slot[taken])
        self.row_of_slot[taken] = FREE

    def check(self) -> None:
        """Prove that the two maps say the same."""
        taken = (self.row_of_slot != FREE).nonzero().squeeze(1)
        rows = self.row_of_slot[taken]
        assert rows.unique().numel() == rows.numel(), "a row has two slots"
        assert torch.equal(self.map.lookup(rows).long(), taken), "the maps disagree"
        assert self.map.count() == rows.numel(), "the maps disagree in number"
        assert not self.slots[self.null_slot].any(), "the padding slot was written to"
