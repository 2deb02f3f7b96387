"""Row to slot on the device: a dense table, or a hash of the resident rows.

`table` is int32. Dense: the slot of every row. Hashed: buckets of eight places, read at once. A row
is in the first bucket on its way that had a free place when it came; a search ends at a bucket with
an empty one. A place holds a slot, whose row stands in `row_of_slot`, and above its bits a tag, the
rest of the row's hash: rows with another tag need not be compared.

A row that leaves a bucket with an empty place leaves an empty place: no search has gone past the
bucket. Otherwise it leaves a tombstone, which a later row takes over. So rows are removed by one
launch and inserted by the next: an insert could go past a bucket in which a place becomes empty.
Knows ids and slots, never bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FREE = -1
EMPTY = tl.constexpr(-1)
TOMBSTONE = tl.constexpr(-2)
PLACES = tl.constexpr(8)  # of a bucket: what the memory delivers at once
BLOCK = 256


@triton.jit
def count_ends(ends, value, mask, count, SEARCH: tl.constexpr):
    """How many of `count` ascending ends are at most each value; SEARCH: bits of `count`."""
    low = tl.zeros(value.shape, tl.int32)
    high = low + count
    for _ in tl.static_range(SEARCH):
        middle = (low + high) // 2
        # Where the search has ended, nothing may move on.
        end = tl.load(ends + middle, mask=mask & (low < high), other=1 << 62)
        low, high = tl.where(end <= value, middle + 1, low), tl.where(end <= value, high, middle)
    return low


@triton.jit
def _hash(ids):
    """32 bits, in int64."""
    x = ids.to(tl.int64)
    x = (x ^ (x >> 32)) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


@triton.jit
def first_place(ids, size):
    """One of `size` places for each id."""
    return (_hash(ids) * size) >> 32


@triton.jit
def _way(ids, size, bits):
    """The first bucket of each id, and its tag above the slot's bits."""
    x = _hash(ids)
    tag = (x & ((1 << (31 - bits)) - 1)).to(tl.int32) << bits
    return (x * (size // PLACES)) >> 32, tag


@triton.jit
def _places(bucket):
    return bucket[:, None] * PLACES + tl.arange(0, PLACES)[None, :]


@triton.jit
def _next(bucket, size):
    return tl.where(bucket + 1 < size // PLACES, bucket + 1, 0)


@triton.jit
def find_slots(ids, mask, table, row_of_slot, size, bits, HASHED: tl.constexpr):
    """The slot of each id, -1 for none. `size` is the number of places of a hash."""
    if HASHED:
        bucket, tag = _way(ids, size, bits)
        slot = tl.full(ids.shape, -1, tl.int32)
        looking = mask
        while tl.max(looking.to(tl.int32), axis=0) > 0:
            here = tl.load(table + _places(bucket), mask=looking[:, None], other=EMPTY)
            there = here - tag[:, None]
            alike = (here >= 0) & (there >= 0) & ((there >> bits) == 0)
            row = tl.load(row_of_slot + there, mask=alike, other=-1)
            found = tl.where(alike & (row == ids[:, None]), there, -1)
            slot = tl.maximum(slot, tl.max(found, axis=1))
            is_end = tl.max((here == EMPTY).to(tl.int32), axis=1) > 0
            looking = looking & (slot < 0) & ~is_end
            bucket = _next(bucket, size)
        return slot
    else:
        return tl.load(table + ids.to(tl.int64), mask=mask, other=-1)


@triton.jit
def remove(ids, slots, mask, table, size, bits, HASHED: tl.constexpr):
    """Forget resident rows, of which the slots are known; returns where a tombstone is left."""
    left = tl.zeros(ids.shape, tl.int32)
    if HASHED:
        bucket, tag = _way(ids, size, bits)
        looking = mask
        while tl.max(looking.to(tl.int32), axis=0) > 0:
            places = _places(bucket)
            here = tl.load(table + places, mask=looking[:, None], other=EMPTY)
            found = looking[:, None] & (here == (tag + slots)[:, None])
            is_full = tl.max((here == EMPTY).to(tl.int32), axis=1) == 0
            after = tl.where(is_full, TOMBSTONE, EMPTY)[:, None] + tl.zeros(here.shape, tl.int32)
            tl.store(table + places, after, mask=found)
            is_done = looking & (tl.max(found.to(tl.int32), axis=1) > 0)
            left += (is_done & is_full).to(tl.int32)
            looking = looking & ~is_done
            bucket = _next(bucket, size)
    else:
        tl.store(table + ids.to(tl.int64), tl.full(ids.shape, -1, tl.int32), mask=mask)
    return left


@triton.jit
def insert(ids, slots, mask, table, spare, size, bits, HASHED: tl.constexpr):
    """Map absent rows; returns where a tombstone was taken over. Not beside `remove`.

    `spare` has a word for each lane: compare-and-swap takes no mask, and lanes that are done
    must not queue up at one address.
    """
    taken_over = tl.zeros(ids.shape, tl.int32)
    if HASHED:
        bucket, tag = _way(ids, size, bits)
        turn = tl.arange(0, PLACES)[None, :]
        lane = tl.arange(0, ids.shape[0])
        looking = mask
        while tl.max(looking.to(tl.int32), axis=0) > 0:
            # Not from the multiprocessor's own cache: others write at the same time.
            here = tl.load(
                table + _places(bucket), mask=looking[:, None], other=0, cache_modifier=".cg"
            )
            free = tl.min(tl.where(here < 0, turn, PLACES), axis=1)
            want = looking & (free < PLACES)
            there = tl.max(tl.where(turn == free[:, None], here, -3), axis=1)
            target = tl.where(want, table + bucket * PLACES + free, spare + lane)
            new = tl.where(want, tag + slots, -3)
            before = tl.atomic_cas(target, tl.where(want, there, -3), new)
            won = want & (before == there)
            taken_over += (won & (there == TOMBSTONE)).to(tl.int32)
            looking = looking & ~won
            # A lost place was taken by another row: the bucket is looked at again.
            bucket = tl.where(free < PLACES, bucket, _next(bucket, size))
    else:
        tl.store(table + ids.to(tl.int64), slots, mask=mask)
    return taken_over


@triton.jit(do_not_specialize=["count"])
def _lookup(
    ids, out, count, table, row_of_slot, size, bits, HASHED: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    id_ = tl.load(ids + place, mask=mask, other=0)
    slot = find_slots(id_, mask, table, row_of_slot, size, bits, HASHED)
    tl.store(out + place, slot, mask=mask)


@triton.jit
def _insert_all(row_of_slot, table, spare, num_slots, size, bits, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of_slot + slot, mask=slot < num_slots, other=-1)
    insert(row, slot, row >= 0, table, spare, size, bits, True)


def places_for(slots: int) -> int:
    """Return the places of a hash: a bucket more than twice the slots, so that one stays empty,
    whatever comes and goes at once."""
    places = PLACES.value
    return int(places * (1 + -(-2 * slots // places)))


class DeviceMap:
    """Row to slot; `size` is the number of places of a hash, of which slots take `bits` bits."""

    def __init__(self, row_of_slot: Tensor, num_rows: int, *, dense: bool) -> None:
        self.row_of_slot = row_of_slot
        self.hashed = not dense
        slots = row_of_slot.numel()
        self.size = places_for(slots) if self.hashed else 0
        self.bits = slots.bit_length()
        device = row_of_slot.device
        self.table = torch.full((self.size or num_rows,), FREE, dtype=torch.int32, device=device)
        self.spare = torch.zeros(BLOCK, dtype=torch.int32, device=device)

    def lookup(self, ids: Tensor) -> Tensor:
        """The slot of each id, -1 for none."""
        out = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
        if ids.numel():
            grid = (triton.cdiv(ids.numel(), BLOCK),)
            _lookup[grid](
                ids, out, ids.numel(), self.table, self.row_of_slot, self.size, self.bits,
                HASHED=self.hashed, BLOCK=BLOCK,
            )  # fmt: skip
        return out

    def rebuild(self) -> None:
        """Make the hash anew from slot -> row: no tombstone is left."""
        if self.hashed:
            self.table.fill_(FREE)
            slots = self.row_of_slot.numel()
            _insert_all[(triton.cdiv(slots, BLOCK),)](
                self.row_of_slot, self.table, self.spare, slots, self.size, self.bits, BLOCK=BLOCK
            )

    def count(self) -> int:
        return int((self.table >= 0).sum())

    @property
    def num_bytes(self) -> int:
        return self.table.numel() * 4
