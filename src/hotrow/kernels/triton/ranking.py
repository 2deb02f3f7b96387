"""What planning knows of slots, and the order in which they leave. Sees ids and counters."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.triton.maps import BLOCK as LANES
from hotrow.kernels.triton.maps import DeviceMap, find_slots, first_place
from hotrow.kernels.triton.words import CLOCK, DOUBLED, FIRST_USE, LAST_USE, NEVER, NOTHING

BLOCK = 1024


@triton.jit
def last_known_use(next_use, num_slots, row, mask):
    """The last known batch that may use a row; those of other rows count as its own."""
    place = first_place(tl.maximum(row, 0), num_slots)
    return tl.load(next_use + place, mask=mask & (row >= 0), other=-2147483647)


@triton.jit(do_not_specialize=["capacity", "later", "first_row", "num_rings"])
def _expect(
    ids, next_use, table, row_of_slot, num_rows, num_slots, size, bits, capacity, first_number,
    later, first_row, num_rings, HASHED: tl.constexpr, KNOWN_USE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Note the first use of every resident row, or the last of any, by batches from a number on."""
    ahead = tl.program_id(1)
    number = tl.load(first_number) + later
    ring = (first_row + ahead) % num_rings
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < capacity
    id_ = tl.load(ids + ring.to(tl.int64) * capacity + place, mask=mask, other=num_rows)
    mask = mask & (id_ < num_rows)
    if KNOWN_USE == FIRST_USE:
        where = find_slots(id_, mask, table, row_of_slot, size, bits, HASHED)
        mask = mask & (where >= 0)
    else:
        where = first_place(id_, num_slots)
    # Most are known to be used sooner, or another lane has noted it: look before the atomic.
    known = tl.load(next_use + where, mask=mask, other=0)
    if KNOWN_USE == FIRST_USE:
        tl.atomic_min(next_use + where, number + ahead, mask=mask & (known > number + ahead))
    else:
        tl.atomic_max(next_use + where, number + ahead, mask=mask & (known < number + ahead))


@triton.jit(do_not_specialize=["count", "ahead"])
def _hold(
    ids, last_use, state, table, row_of_slot, num_rows, size, bits, count, ahead,
    HASHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep the resident rows of a later batch: as if it had used them."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    id_ = tl.load(ids + place, mask=mask, other=num_rows)
    mask = mask & (id_ < num_rows)
    slot = find_slots(id_, mask, table, row_of_slot, size, bits, HASHED)
    number = tl.load(state + CLOCK) + ahead
    tl.atomic_max(last_use + slot, number, mask=mask & (slot >= 0))


@triton.jit
def _rank_keys(
    keys, last_use, next_use, uses, row_of_slot, state, num_slots, past, ORDER: tl.constexpr,
    KNOWN_USE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The order in which slots leave, smallest first; the largest number: it may not."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = slot < num_slots
    number = tl.load(state + CLOCK)
    last = tl.load(last_use + slot, mask=mask, other=0)
    may_leave = last < number - past
    # The last use of an unused slot is near the smallest integer.
    age = number - tl.maximum(last, number - (1 << 30))
    if ORDER == 0:  # least recent
        key = (1 << 30) - age
    elif ORDER == 1:  # most recent
        key = age
    else:
        fresh = (1 << 20) - 1 - tl.minimum(age, (1 << 20) - 1)
        used = tl.load(uses + slot, mask=mask, other=0).to(tl.int32)
        if ORDER == 2:  # least frequent
            key = tl.minimum(used, 511) * (1 << 20) + fresh
        else:  # least worth
            bonus = tl.zeros(used.shape, tl.int32)
            for power in tl.static_range(15):
                over = tl.minimum(used, 2 << power) - (1 << power)
                bonus += (DOUBLED * tl.maximum(over, 0)) >> power
            key = fresh + bonus
        if KNOWN_USE == FIRST_USE:  # farthest next use; those of which none is known leave first
            soon = tl.load(next_use + slot, mask=mask, other=0)
            key = tl.where(soon == NEVER, key, (1 << 30) - (soon - number))
        elif KNOWN_USE == LAST_USE:  # those alone
            row = tl.load(row_of_slot + slot, mask=mask, other=-1)
            may_leave = may_leave & (last_known_use(next_use, num_slots, row, mask) < number)
    tl.store(keys + slot, tl.where(may_leave, key, NEVER), mask=mask)


ORDERS = {"least-recent": 0, "most-recent": 1, "least-frequent": 2, "farthest-next-use": 3}


def expect(
    window: Tensor,  # [rings, capacity] ids
    first_row: int,
    batches: int,
    number: Tensor,  # [1] int32: the first one's number is `later` more
    later: int,
    next_use: Tensor,
    row_map: DeviceMap,
    num_rows: int,
    known_use: int,
) -> None:
    """Note when rows are used, first or last, by batches whose ids begin at a row of the ring."""
    rings, capacity = window.shape
    if batches == 0 or capacity == 0:
        return
    _expect[(triton.cdiv(capacity, LANES), batches)](
        window, next_use, row_map.table, row_map.row_of_slot, num_rows, next_use.numel(),
        row_map.size, row_map.bits, capacity, number, later, first_row, rings,
        HASHED=row_map.hashed, KNOWN_USE=known_use, BLOCK=LANES,
    )  # fmt: skip


def hold(
    ids: Tensor, ahead: int, last_use: Tensor, state: Tensor, row_map: DeviceMap, num_rows: int
) -> None:
    """Rows of a later batch may not leave."""
    if ids.numel() == 0:
        return
    _hold[(triton.cdiv(ids.numel(), LANES),)](
        ids, last_use, state, row_map.table, row_map.row_of_slot, num_rows, row_map.size,
        row_map.bits, ids.numel(), ahead, HASHED=row_map.hashed, BLOCK=LANES,
    )  # fmt: skip


def rank_keys(
    slot_facts: tuple[Tensor, Tensor, Tensor],
    row_of_slot: Tensor,
    state: Tensor,
    past: int,
    order: str,
    known_use: int = NOTHING,
) -> Tensor:
    """A key per slot, [C] int32: the smallest leave first, the largest integer may not leave."""
    last_use, next_use, uses = slot_facts
    keys = torch.empty_like(last_use)
    _rank_keys[(triton.cdiv(keys.numel(), BLOCK),)](
        keys, last_use, next_use, uses, row_of_slot, state, keys.numel(), past, ORDER=ORDERS[order],
        KNOWN_USE=known_use, BLOCK=BLOCK,
    )  # fmt: skip
    return keys
