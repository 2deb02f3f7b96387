"""Planning on the device: from ids to sorted segments, hits, victims and slots.

Every launch depends on shapes the host knows; how many rows are unique or missing is known to
the device alone. Order is kept wherever it decides anything, so equal inputs give equal plans.
Sees ids and counters, never a row's bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.triton.maps import DeviceMap, find_slots, insert, remove
from hotrow.kernels.triton.ranking import last_known_use
from hotrow.kernels.triton.segments import Segments

from hotrow.kernels.triton.words import (  # isort: skip
    AGAIN, BAD_ID, BLOCK_AGAIN, BLOCK_FIRSTS, BLOCK_MISSING, BLOCK_WORDS, CLOCK, COUNT_WORDS, END,
    EVICTED, FIRST_BAD, FIRST_USE, FLOOR, HALT, HEAD, KNOWN, LAST_USE, MISSING, MOVES, NEVER,
    NO_BAD_ID, NO_ROOM, NOT_PLANNED, OUTCOME, PLANNED, SOONEST, TOMBSTONES, UNIQUE,
)  # fmt: skip

BLOCK = 1024
# Rows of a program that searches the map. Training's matrix products want whole multiprocessors and
# wait for whatever runs there, so a program that lasts long costs them more than many short ones.
LANES = 64
_WARPS = 2


@triton.jit
def _cannot_plan(state, counts):
    """Whether a plan before this one has failed, or this batch has an id that no table has."""
    return (tl.load(state + HALT) != 0) | (tl.load(counts + FIRST_BAD) != NO_BAD_ID)


@triton.jit
def _firsts(keys, place, inside):
    """Sorted keys, and whether each is the first of its run."""
    key = tl.load(keys + place, mask=inside, other=0)
    before = tl.load(keys + place - 1, mask=inside & (place > 0), other=-1)
    return key, inside & (key != before)


@triton.jit
def _prefix(per_block, program, num_blocks, word, BLOCKS: tl.constexpr):
    """The sum of a counter over the blocks before this one, and over all of them."""
    block = tl.arange(0, BLOCKS)
    counts = tl.load(per_block + block * BLOCK_WORDS + word, mask=block < num_blocks, other=0)
    return tl.sum(tl.where(block < program, counts, 0), axis=0), tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["num_lookups"])
def _classify(
    keys, found, per_block, state, counts, last_use, uses, table, row_of_slot, num_lookups,
    num_rows, num_slots, size, bits, past, HASHED: tl.constexpr, REFETCH: tl.constexpr,
    BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Look each unique row up, once; use the slots of those that are there.

    `per_block` is zero before; PER_BLOCK programs add to each of its counts.
    """
    program = tl.program_id(0)
    if _cannot_plan(state, counts):
        return
    number = tl.load(state + CLOCK)
    place = program * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_lookups
    key, is_first = _firsts(keys, place, inside)
    real = is_first & (key != num_rows)
    slot = find_slots(key, real, table, row_of_slot, size, bits, HASHED)
    hit = real & (slot >= 0)
    last = tl.load(last_use + slot, mask=hit, other=0)
    tl.store(last_use + slot, tl.maximum(last, number), mask=hit)
    used = tl.load(uses + slot, mask=hit, other=0)
    tl.store(uses + slot, tl.minimum(used + 1, 32767).to(tl.int16), mask=hit)
    # Fetched anew, unless a batch in flight has just done so.
    again = hit & REFETCH & (last < number - past)
    # Hits: the slot; rows to fetch anew: -2 - slot; missing ones -1; padding: the null slot.
    code = tl.where(again, -2 - slot, slot)
    code = tl.where(is_first & (key == num_rows), num_slots, code)
    tl.store(found + place, code, mask=inside)
    missing = real & (slot < 0)
    mine = per_block + program // PER_BLOCK * BLOCK_WORDS
    firsts = tl.sum(is_first.to(tl.int32), axis=0)
    if firsts > 0:
        tl.atomic_add(mine + BLOCK_FIRSTS, firsts)
    misses = tl.sum(missing.to(tl.int32), axis=0)
    if misses > 0:
        tl.atomic_add(mine + BLOCK_MISSING, misses)
    if REFETCH:
        tl.atomic_add(mine + BLOCK_AGAIN, tl.sum(again.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_lookups", "room", "num_blocks"])
def _segment(
    keys, order64, found, per_block, state, counts, order, rank, starts, ids, row_slots,
    missing_rank, entering, leaving, move_slots, num_lookups, room, num_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Number the unique rows and the missing ones, in the order of ids.

    There is `room` for so many: a plan with more fails later, and writes no further here.
    """
    program = tl.program_id(0)
    if _cannot_plan(state, counts):
        return
    firsts, num_unique = _prefix(per_block, program, num_blocks, BLOCK_FIRSTS, BLOCKS)
    misses, num_missing = _prefix(per_block, program, num_blocks, BLOCK_MISSING, BLOCKS)
    agains, num_again = _prefix(per_block, program, num_blocks, BLOCK_AGAIN, BLOCKS)
    place = program * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_lookups
    key, is_first = _firsts(keys, place, inside)
    code = tl.load(found + place, mask=is_first, other=0)
    my_rank = firsts + tl.cumsum(is_first.to(tl.int32), axis=0) - 1
    tl.store(rank + place, my_rank, mask=inside)
    position = tl.load(order64 + place, mask=inside, other=0)
    tl.store(order + place, position.to(tl.int32), mask=inside)
    is_first = is_first & (my_rank < room)
    tl.store(starts + my_rank, place, mask=is_first)
    tl.store(ids + my_rank, key, mask=is_first)
    missing = is_first & (code == -1)
    miss = misses + tl.cumsum(missing.to(tl.int32), axis=0) - 1
    tl.store(missing_rank + miss, my_rank, mask=missing)
    tl.store(entering + miss, key, mask=missing)
    again = is_first & (code < -1)
    slot = tl.where(again, -2 - code, code)
    tl.store(row_slots + my_rank, slot, mask=is_first & ~missing)
    # Rows fetched anew stand behind the missing ones among the moves.
    move = num_missing + agains + tl.cumsum(again.to(tl.int32), axis=0) - 1
    again = again & (move < room)
    tl.store(entering + move, key, mask=again)
    tl.store(leaving + move, key, mask=again)
    tl.store(move_slots + move, slot, mask=again)
    if program == 0:
        tl.store(starts + tl.minimum(num_unique, room), num_lookups)
        tl.store(counts + UNIQUE, num_unique)
        tl.store(counts + MISSING, num_missing)
        tl.store(counts + AGAIN, num_again)


@triton.jit
def _may_leave(
    queue, state, last_use, next_use, row_of_slot, num_slots, place, limit, KNOWN_USE: tl.constexpr
):  # fmt: skip
    """Return slots of the queue, and whether each is still unused and not known to be used."""
    head = tl.load(state + HEAD)
    asked = (place < limit) & (head + place < tl.load(state + END))
    slot = tl.load(queue + head + place, mask=asked, other=0)
    last = tl.load(last_use + slot, mask=asked, other=NEVER)
    valid = asked & (last < tl.load(state + FLOOR))
    if KNOWN_USE == FIRST_USE:
        soon = tl.load(next_use + slot, mask=valid, other=0)
        valid = valid & ((soon == NEVER) | (soon <= tl.load(state + KNOWN)))
    elif KNOWN_USE == LAST_USE:
        row = tl.load(row_of_slot + slot, mask=valid, other=-1)
        valid = valid & (last_known_use(next_use, num_slots, row, valid) < tl.load(state + CLOCK))
    return slot, valid


@triton.jit(do_not_specialize=["spread"])
def _count_victims(
    queue, state, counts, last_use, next_use, per_block, row_of_slot, num_slots, spread,
    KNOWN_USE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if _cannot_plan(state, counts):
        return
    limit = tl.load(counts + MISSING) * 4 + spread
    mine = per_block + program * BLOCK_WORDS + BLOCK_FIRSTS
    if program * BLOCK >= limit:
        tl.store(mine, 0)
        return
    place = program * BLOCK + tl.arange(0, BLOCK)
    _, valid = _may_leave(
        queue, state, last_use, next_use, row_of_slot, num_slots, place, limit, KNOWN_USE
    )  # fmt: skip
    tl.store(mine, tl.sum(valid.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["spread", "room", "spare_places", "num_blocks"])
def _take_victims(
    queue, state, counts, last_use, next_use, per_block, row_of_slot, num_slots, move_slots,
    leaving, new_head, spread, room, spare_places, num_blocks, HASHED: tl.constexpr,
    KNOWN_USE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The first slots of the queue that may still leave, one for each missing row."""
    program = tl.program_id(0)
    if _cannot_plan(state, counts):
        if program == 0:
            tl.store(counts + MOVES, 0)
            bad = tl.load(counts + FIRST_BAD) != NO_BAD_ID
            bad = bad & (tl.load(state + HALT) == 0)
            tl.store(counts + OUTCOME, tl.where(bad, BAD_ID, NOT_PLANNED))
        return
    num_missing = tl.load(counts + MISSING)
    if program > 0 and program * BLOCK >= num_missing * 4 + spread:
        return
    num_moves = num_missing + tl.load(counts + AGAIN)
    valid_before, num_valid = _prefix(per_block, program, num_blocks, BLOCK_FIRSTS, BLOCKS)
    fits = (num_valid >= num_missing) & (tl.load(counts + UNIQUE) <= room)
    if HASHED:  # without an empty place in the map, a search would never end
        fits = fits & (tl.load(state + TOMBSTONES) + num_missing < spare_places)
    if program == 0:
        tl.store(counts + MOVES, tl.where(fits, num_moves, 0))
        tl.store(counts + OUTCOME, tl.where(fits, PLANNED, NO_ROOM))
        if num_missing == 0:
            tl.store(new_head, tl.load(state + HEAD))
    if fits:
        place = program * BLOCK + tl.arange(0, BLOCK)
        limit = num_missing * 4 + spread
        slot, valid = _may_leave(
            queue, state, last_use, next_use, row_of_slot, num_slots, place, limit, KNOWN_USE
        )  # fmt: skip
        move = valid_before + tl.cumsum(valid.to(tl.int32), axis=0) - 1
        taken = valid & (move < num_missing)
        row = tl.load(row_of_slot + slot, mask=taken, other=-1)
        tl.store(move_slots + move, slot, mask=taken)
        tl.store(leaving + move, row, mask=taken)
        evicted = tl.sum((taken & (row >= 0)).to(tl.int32), axis=0)
        if evicted > 0:
            tl.atomic_add(counts + EVICTED, evicted)
        if KNOWN_USE == FIRST_USE:
            # In how many batches the first of them is used again, as far as is known.
            soon = tl.load(next_use + slot, mask=taken, other=NEVER)
            ahead = tl.where(soon == NEVER, soon, soon - tl.load(state + CLOCK))
            soonest = tl.min(ahead, axis=0)
            if soonest < NEVER:
                tl.atomic_min(counts + SOONEST, soonest)
        last = taken & (move == num_missing - 1)
        head = tl.load(state + HEAD) + place + 1
        tl.store(new_head + tl.zeros(place.shape, tl.int32), head, mask=last)


@triton.jit
def _can_sort(counts, most):
    """How many victims there are to sort; 0: none, or too many."""
    count = tl.load(counts + MISSING)
    return tl.where((tl.load(counts + OUTCOME) == PLANNED) & (count <= most), count, 0)


@triton.jit(do_not_specialize=["most", "beyond"])
def _copy_victims(leaving, move_slots, rows, slots, counts, most, beyond, BLOCK: tl.constexpr):
    """Rows to sort by, and their slots; `beyond` is larger than any row."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < _can_sort(counts, most)
    row = tl.load(leaving + place, mask=mask, other=beyond)
    tl.store(rows + place, row, mask=place < most)
    tl.store(slots + place, tl.load(move_slots + place, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["most"])
def _put_victims(leaving, move_slots, rows, order, slots, counts, most, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < _can_sort(counts, most)
    before = tl.load(order + place, mask=mask, other=0)
    tl.store(leaving + place, tl.load(rows + place, mask=mask, other=0), mask=mask)
    tl.store(move_slots + place, tl.load(slots + before, mask=mask, other=0), mask=mask)


def sort_victims(
    leaving: Tensor, move_slots: Tensor, counts: Tensor, most: int, beyond: int, scratch: Tensor
) -> None:
    """Let rows leave in the order of ids, as they enter, if there are at most `most`.

    Which row enters which slot does not matter, and neighbours in host memory move faster.
    """
    grid = (triton.cdiv(most, BLOCK),)
    rows = torch.empty(most, dtype=leaving.dtype, device=leaving.device)
    _copy_victims[grid](
        leaving, move_slots, rows, scratch, counts, most, beyond, BLOCK=BLOCK
    )  # fmt: skip
    rows, order = torch.sort(rows)
    _put_victims[grid](leaving, move_slots, rows, order, scratch, counts, most, BLOCK=BLOCK)


@triton.jit
def _let_leave(
    move_slots, leaving, counts, state, table, size, bits, HASHED: tl.constexpr, BLOCK: tl.constexpr
):
    """Take the leaving rows out of the map."""
    if tl.load(counts + OUTCOME) != PLANNED:
        return
    move = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = move < tl.load(counts + MISSING)
    if tl.max(mask.to(tl.int32), axis=0) == 0:
        return
    slot = tl.load(move_slots + move, mask=mask, other=0)
    row = tl.load(leaving + move, mask=mask, other=-1)
    left = tl.sum(remove(row, slot, mask & (row >= 0), table, size, bits, HASHED), axis=0)
    if left > 0:
        tl.atomic_add(state + TOMBSTONES, left)


@triton.jit
def _let_enter(
    move_slots, entering, missing_rank, row_slots, counts, state, last_use, next_use, uses,
    row_of_slot, table, spare, size, bits, HASHED: tl.constexpr, KNOWN_USE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Put the entering rows into the map: it describes the future, bytes follow later."""
    if tl.load(counts + OUTCOME) != PLANNED:
        return
    move = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = move < tl.load(counts + MISSING)
    if tl.max(mask.to(tl.int32), axis=0) == 0:
        return
    slot = tl.load(move_slots + move, mask=mask, other=0)
    row = tl.load(entering + move, mask=mask, other=0)
    tl.store(row_of_slot + slot, row, mask=mask)
    taken_over = tl.sum(insert(row, slot, mask, table, spare, size, bits, HASHED), axis=0)
    if taken_over > 0:
        tl.atomic_add(state + TOMBSTONES, -taken_over)
    tl.store(last_use + slot, tl.zeros(slot.shape, tl.int32) + tl.load(state + CLOCK), mask=mask)
    if KNOWN_USE != LAST_USE:
        tl.store(next_use + slot, tl.full(slot.shape, NEVER, tl.int32), mask=mask)
    tl.store(uses + slot, tl.full(slot.shape, 1, tl.int16), mask=mask)
    rank = tl.load(missing_rank + move, mask=mask, other=0)
    tl.store(row_slots + rank, slot, mask=mask)


@triton.jit(do_not_specialize=["num_lookups"])
def _resolve(
    order, rank, row_slots, lookup_slots, counts, state, new_head, kept, status, entering, told,
    num_lookups, BLOCK: tl.constexpr,
):  # fmt: skip
    """The slot of every lookup; tells the host what enters; the first program moves the clock."""
    program = tl.program_id(0)
    outcome = tl.load(counts + OUTCOME)
    place = program * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_lookups
    if outcome == PLANNED:
        position = tl.load(order + place, mask=inside, other=0)
        my_rank = tl.load(rank + place, mask=inside, other=0)
        slot = tl.load(row_slots + my_rank, mask=inside, other=0)
        tl.store(lookup_slots + position, slot, mask=inside)
        if told is not None:
            moves = inside & (place < tl.load(counts + MOVES))
            tl.store(told + place, tl.load(entering + place, mask=moves, other=-1), mask=moves)
    if program == 0:
        if outcome == PLANNED:
            tl.store(state + CLOCK, tl.load(state + CLOCK) + 1)
            tl.store(state + HEAD, tl.load(new_head))
        else:
            tl.store(state + HALT, 1)
        word = tl.arange(0, COUNT_WORDS)
        tl.store(kept + word, tl.load(counts + word))
        tl.store(status + word, tl.load(counts + word))
        tl.store(status + COUNT_WORDS + word, tl.load(state + word))


def plan(
    ids: Tensor,  # [L], num_rows for padding
    segments: Segments,  # out
    row_slots: Tensor,  # out: [R] int32, as are the segments' ids: room for so many unique rows
    lookup_slots: Tensor,  # out: [L] int32
    moves: tuple[Tensor, Tensor, Tensor],  # out: slots, leaving, entering, [>= R] each
    counts: Tensor,  # [8] int32, FIRST_BAD set; the others are written
    kept: Tensor,  # out: [8] int32: the counts, for readers of the plan
    status: Tensor,  # out: [16] int32, page-locked: counts, then most of the state
    scratch: Tensor,  # [words] int32
    *,
    told: Tensor | None = None,  # out: [>= R], page-locked: what enters, for the host
    state: Tensor,  # [8] int32
    slot_facts: tuple[Tensor, Tensor, Tensor],  # last use, next use int32; uses int16
    queue: Tensor,
    row_map: DeviceMap,
    num_rows: int,
    past: int,
    refetch: bool,
    known_use: int,
    capacity: int = 0,  # lookups of the largest batch: for all up to it, kernels are the same
    sorts: int = 0,  # rows that leave are sorted if there are at most so many
) -> None:
    """Plan one batch; on failure `state` is halted and no map has changed."""
    count, num_slots = ids.numel(), row_map.row_of_slot.numel()
    last_use, next_use, uses = slot_facts
    move_slots, leaving, entering = moves
    blocks, victim_blocks = max(1, triton.cdiv(count, BLOCK)), _victim_blocks(count, queue.numel())
    found, missing_rank, new_head, per_block = _parts(scratch, count)
    keys, order64 = torch.sort(ids, stable=True)
    widest = _widest(max(count, capacity))
    widest_victims = triton.next_power_of_2(_victim_blocks(max(count, capacity), queue.numel()))
    per_block[: 4 * blocks].zero_()
    _classify[(max(1, triton.cdiv(count, LANES)),)](
        keys, found, per_block, state, counts, last_use, uses, row_map.table,
        row_map.row_of_slot, count, num_rows, num_slots, row_map.size, row_map.bits, past,
        HASHED=row_map.hashed, REFETCH=refetch, BLOCK=LANES, PER_BLOCK=BLOCK // LANES,
        num_warps=_WARPS,
    )  # fmt: skip
    _segment[(blocks,)](
        keys, order64, found, per_block, state, counts, segments.order, segments.rank,
        segments.starts, segments.ids, row_slots, missing_rank, entering, leaving, move_slots,
        count, segments.ids.numel(), blocks, BLOCK=BLOCK, BLOCKS=widest,
    )  # fmt: skip
    _count_victims[(victim_blocks,)](
        queue, state, counts, last_use, next_use, per_block, row_map.row_of_slot, num_slots, BLOCK,
        KNOWN_USE=known_use, BLOCK=BLOCK,
    )  # fmt: skip
    _take_victims[(victim_blocks,)](
        queue, state, counts, last_use, next_use, per_block, row_map.row_of_slot, num_slots,
        move_slots, leaving, new_head, BLOCK, segments.ids.numel(),
        row_map.size - num_slots, victim_blocks,
        HASHED=row_map.hashed, KNOWN_USE=known_use, BLOCK=BLOCK, BLOCKS=widest_victims,
    )  # fmt: skip
    if sorts:
        sort_victims(leaving, move_slots, counts, sorts, num_rows, found)
    move_blocks = max(1, triton.cdiv(count, LANES))
    _let_leave[(move_blocks,)](
        move_slots, leaving, counts, state, row_map.table, row_map.size, row_map.bits,
        HASHED=row_map.hashed, BLOCK=LANES, num_warps=_WARPS,
    )  # fmt: skip
    _let_enter[(move_blocks,)](
        move_slots, entering, missing_rank, row_slots, counts, state, last_use, next_use, uses,
        row_map.row_of_slot, row_map.table, row_map.spare, row_map.size, row_map.bits,
        HASHED=row_map.hashed, KNOWN_USE=known_use, BLOCK=LANES, num_warps=_WARPS,
    )  # fmt: skip
    _resolve[(blocks,)](
        segments.order, segments.rank, row_slots, lookup_slots, counts, state, new_head, kept,
        status, entering, told, count, BLOCK=BLOCK,
    )  # fmt: skip


def _widest(lookups: int) -> int:
    return int(triton.next_power_of_2(max(1, triton.cdiv(lookups, BLOCK))))


def _victim_blocks(lookups: int, queue: int) -> int:
    return max(1, -(-min(4 * lookups + BLOCK, queue) // BLOCK))


def scratch_words(lookups: int, queue: int) -> int:
    """How much scratch `plan` wants for so many lookups."""
    blocks = max(1, -(-lookups // BLOCK), _victim_blocks(lookups, queue))
    return 2 * _aligned(lookups) + 4 + 4 * blocks


def _aligned(count: int) -> int:
    """Places that end at a multiple of 16 bytes: kernels are compiled anew for other addresses."""
    return -(-count // 4) * 4


def _parts(scratch: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return room for slots and for ranks of `count` lookups, for a number, and for blocks."""
    room = _aligned(count)
    return (
        scratch[:count],
        scratch[room : room + count],
        scratch[2 * room :],
        scratch[2 * room + 4 :],
    )


# -- every row in fast memory ----------------------------------------------------------


@triton.jit(do_not_specialize=["num_lookups"])
def _count_firsts(keys, found, per_block, state, counts, num_lookups, BLOCK: tl.constexpr):
    """As `_classify` where row and slot are one: nothing is missing."""
    program = tl.program_id(0)
    if _cannot_plan(state, counts):
        return
    place = program * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_lookups
    key, is_first = _firsts(keys, place, inside)
    tl.store(found + place, key.to(tl.int32), mask=inside)
    mine = per_block + program * BLOCK_WORDS
    tl.store(mine + BLOCK_FIRSTS, tl.sum(is_first.to(tl.int32), axis=0))
    tl.store(mine + BLOCK_MISSING, 0)
    tl.store(mine + BLOCK_AGAIN, 0)


@triton.jit
def _nothing_moves(state, counts, new_head):
    bad = tl.load(counts + FIRST_BAD) != NO_BAD_ID
    halted = tl.load(state + HALT) != 0
    tl.store(counts + MOVES, 0)
    outcome = tl.where(halted, NOT_PLANNED, tl.where(bad, BAD_ID, PLANNED))
    tl.store(counts + OUTCOME, outcome)
    tl.store(new_head, 0)


def plan_everything(
    ids: Tensor,
    segments: Segments,
    row_slots: Tensor,
    lookup_slots: Tensor,
    moves: tuple[Tensor, Tensor, Tensor],
    counts: Tensor,
    kept: Tensor,
    status: Tensor,
    scratch: Tensor,
    *,
    state: Tensor,
    capacity: int = 0,
) -> None:
    """`plan` where every row has its slot: sorts, and checks ids."""
    count = ids.numel()
    move_slots, leaving, entering = moves
    blocks = max(1, triton.cdiv(count, BLOCK))
    found, missing_rank, new_head, per_block = _parts(scratch, count)
    keys, order64 = torch.sort(ids, stable=True)
    _count_firsts[(blocks,)](keys, found, per_block, state, counts, count, BLOCK=BLOCK)
    _segment[(blocks,)](
        keys, order64, found, per_block, state, counts, segments.order, segments.rank,
        segments.starts, segments.ids, row_slots, missing_rank, entering, leaving, move_slots,
        count, segments.ids.numel(), blocks, BLOCK=BLOCK, BLOCKS=_widest(max(count, capacity)),
    )  # fmt: skip
    _nothing_moves[(1,)](state, counts, new_head)
    _resolve[(blocks,)](
        segments.order, segments.rank, row_slots, lookup_slots, counts, state, new_head, kept,
        status, entering, None, count, BLOCK=BLOCK,
    )  # fmt: skip
