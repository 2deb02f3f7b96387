"""Row to slot on the device: a dense table, or a hash of the resident rows.

`table` is int32. Dense: the slot of every row. Hashed: places with linear probing, holding slots
whose rows stand in `row_of_slot`; a deleted slot leaves a tombstone, which the next insertion on
its way takes over. Knows ids and slots, never bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FREE = -1
EMPTY = tl.constexpr(-1)
TOMBSTONE = tl.constexpr(-2)
BLOCK = 256


@triton.jit
def first_place(ids, size):
    """Where a row is looked for first."""
    x = ids.to(tl.int64)
    x = (x ^ (x >> 32)) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    return (x * size) >> 32


@triton.jit
def _next_places(place, size, PROBES: tl.constexpr):
    """[n, PROBES]: where rows are looked for in one turn, which takes as long as one place."""
    places = place[:, None] + tl.arange(0, PROBES)[None, :]
    return tl.where(places >= size, places - size, places)


@triton.jit
def find_slots(ids, mask, table, row_of_slot, size, HASHED: tl.constexpr):
    """The slot of each id, -1 for none. `size` is the number of places of a hash."""
    if HASHED:
        PROBES: tl.constexpr = 4
        turn = tl.arange(0, PROBES)[None, :]
        place = first_place(ids, size)
        slot = tl.full(ids.shape, -1, tl.int32)
        looking = mask
        while tl.max(looking.to(tl.int32), axis=0) > 0:
            places = _next_places(place, size, PROBES)
            here = tl.load(table + places, mask=looking[:, None], other=EMPTY)
            row = tl.load(row_of_slot + here, mask=here >= 0, other=-1)
            # A row lies before the first empty place on its way, or nowhere.
            end = tl.min(tl.where(here == EMPTY, turn, PROBES), axis=1)
            match = (here >= 0) & (row == ids[:, None]) & (turn < end[:, None])
            slot = tl.maximum(slot, tl.max(tl.where(match, here, -1), axis=1))
            looking = looking & (slot < 0) & (end == PROBES)
            place = place + PROBES
            place = tl.where(place >= size, place - size, place)
        return slot
    else:
        return tl.load(table + ids.to(tl.int64), mask=mask, other=-1)


@triton.jit
def remove(ids, slots, mask, table, size, HASHED: tl.constexpr):
    """Forget resident rows, of which the slots are known."""
    if HASHED:
        PROBES: tl.constexpr = 4
        place = first_place(ids, size)
        looking = mask
        while tl.max(looking.to(tl.int32), axis=0) > 0:
            places = _next_places(place, size, PROBES)
            here = tl.load(table + places, mask=looking[:, None], other=EMPTY)
            found = looking[:, None] & (here == slots[:, None])
            tl.store(table + places, tl.full(here.shape, -2, tl.int32), mask=found)
            looking = looking & (tl.max(found.to(tl.int32), axis=1) == 0)
            place = place + PROBES
            place = tl.where(place >= size, place - size, place)
    else:
        tl.store(table + ids.to(tl.int64), tl.full(ids.shape, -1, tl.int32), mask=mask)


@triton.jit
def insert(ids, slots, mask, table, spare, size, HASHED: tl.constexpr):
    """Map absent rows; returns how many took over a tombstone.

    `spare` has a word for each lane: compare-and-swap takes no mask, and lanes that are done
    must not queue up at one address.
    """
    taken_over = tl.zeros(ids.shape, tl.int32)
    if HASHED:
        PROBES: tl.constexpr = 4
        turn = tl.arange(0, PROBES)[None, :]
        place = first_place(ids, size)
        lane = tl.arange(0, ids.shape[0])
        looking = mask
        while tl.max(looking.to(tl.int32), axis=0) > 0:
            places = _next_places(place, size, PROBES)
            here = tl.load(table + places, mask=looking[:, None], other=0)
            free = tl.min(tl.where(here < 0, turn, PROBES), axis=1)
            want = looking & (free < PROBES)
            there = tl.max(tl.where(turn == free[:, None], here, -3), axis=1)
            place = place + free
            place = tl.where(place >= size, place - size, place)
            target = tl.where(want, table + place, spare + lane)
            before = tl.atomic_cas(target, tl.where(want, there, -3), tl.where(want, slots, -3))
            won = want & (before == there)
            taken_over += tl.where(won & (there == TOMBSTONE), 1, 0)
            looking = looking & ~won
            # A lost place was taken by another row: on from there, where it is no longer free.
    else:
        tl.store(table + ids.to(tl.int64), slots, mask=mask)
    return taken_over


@triton.jit
def _lookup(ids, out, count, table, row_of_slot, size, HASHED: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    id_ = tl.load(ids + place, mask=mask, other=0)
    slot = find_slots(id_, mask, table, row_of_slot, size, HASHED)
    tl.store(out + place, slot, mask=mask)


@triton.jit
def _insert_all(row_of_slot, table, spare, num_slots, size, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of_slot + slot, mask=slot < num_slots, other=-1)
    insert(row, slot, row >= 0, table, spare, size, True)


class DeviceMap:
    """Row to slot; `size` is the number of places of a hash, 0 for a dense table."""

    def __init__(self, row_of_slot: Tensor, num_rows: int, *, dense: bool) -> None:
        self.row_of_slot = row_of_slot
        self.hashed = not dense
        self.size = max(8, 2 * row_of_slot.numel()) if self.hashed else 0
        device = row_of_slot.device
        self.table = torch.full((self.size or num_rows,), FREE, dtype=torch.int32, device=device)
        self.spare = torch.zeros(BLOCK, dtype=torch.int32, device=device)

    def lookup(self, ids: Tensor) -> Tensor:
        """The slot of each id, -1 for none."""
        out = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
        if ids.numel():
            grid = (triton.cdiv(ids.numel(), BLOCK),)
            _lookup[grid](
                ids, out, ids.numel(), self.table, self.row_of_slot, self.size,
                HASHED=self.hashed, BLOCK=BLOCK,
            )  # fmt: skip
        return out

    def rebuild(self) -> None:
        """Make the hash anew from slot -> row: no tombstone is left."""
        if self.hashed:
            self.table.fill_(FREE)
            slots = self.row_of_slot.numel()
            _insert_all[(triton.cdiv(slots, BLOCK),)](
                self.row_of_slot, self.table, self.spare, slots, self.size, BLOCK=BLOCK
            )

    def count(self) -> int:
        return int((self.table >= 0).sum())

    @property
    def num_bytes(self) -> int:
        return self.table.numel() * 4
