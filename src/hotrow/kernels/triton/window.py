"""Ids of the batches to come, on the device: a ring with a row for each of them.

Read and write positions are the device's own, so that a captured launch moves them. Sees ids,
never a row's bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.triton.maps import count_ends, first_place

from hotrow.kernels.triton.words import (  # isort: skip
    COME, COUNT_WORDS, EXPECTED, FEATURE_BASE, FEATURE_COLUMN, FEATURE_LIMIT, FEATURE_PADDING,
    FEATURE_WORDS, FIRST_BAD, NO_BAD_ID, ROW_IN, ROW_OUT,
)  # fmt: skip

BLOCK = 256  # short programs, see plan.py
COMPARED = 1024  # ids by a program of training's own lane


@triton.jit
def _id_of(value, feature, real, features, num_rows):
    """The id of a user's index, num_rows for padding and for none, and whether no table has it."""
    mine = features + feature * FEATURE_WORDS
    base, limit = tl.load(mine + FEATURE_BASE), tl.load(mine + FEATURE_LIMIT)
    padding = tl.load(mine + FEATURE_PADDING)
    bad = real & ((value < 0) | (value >= limit))
    return tl.where(real & ~bad & (value != padding), base + value, num_rows), bad


@triton.jit(do_not_specialize=["num_lookups", "capacity", "row_stride", "num_rings"])
def _globalise(
    values, ids, features, ends, lows, num_lookups, capacity, num_features, row_stride, num_rows,
    first_bad, state, next_use, num_slots, num_rings, JAGGED: tl.constexpr, SEARCH: tl.constexpr,
    IN_WINDOW: tl.constexpr, MARKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """User's indices -> ids; what is outside its table is noted, and read as padding.

    IN_WINDOW: ids go to the next row of the window. MARKS: their last known use is the new batch.
    """
    if IN_WINDOW:
        row, number = tl.load(state + ROW_IN), tl.load(state + EXPECTED)
        ids += row.to(tl.int64) * capacity
        first_bad += row * COUNT_WORDS
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # of 32 bits: they are divided faster
    if JAGGED:  # how many there are changes from batch to batch, and launches must not
        num_lookups = tl.load(ends + num_features - 1)
    real = place < num_lookups
    if JAGGED:
        ended = count_ends(ends, place, real, num_features, SEARCH)
        feature = tl.minimum(ended, num_features - 1)
        source = place + tl.load(lows + feature, mask=real, other=0)
    else:
        feature = place % num_features
        sample = (place // num_features).to(tl.int64)
        source = sample * row_stride + tl.load(features + feature * FEATURE_WORDS + FEATURE_COLUMN)
    value = tl.load(values + source, mask=real, other=0).to(tl.int64)
    id_, bad = _id_of(value, feature, real, features, num_rows)
    tl.store(ids + place, id_.to(ids.dtype.element_ty), mask=place < capacity)
    worst = tl.min(tl.where(bad, place, NO_BAD_ID), axis=0).to(tl.int32)
    if worst < NO_BAD_ID:
        tl.atomic_min(first_bad, worst)
    if MARKS:
        where = first_place(id_, num_slots)
        here = (place < capacity) & (id_ < num_rows)
        known = tl.load(next_use + where, mask=here, other=0)
        tl.atomic_max(next_use + where, number, mask=here & (known < number))
    if IN_WINDOW:
        # The last program to come here counts on: all others have read by now.
        come = tl.atomic_add(state + COME, 1)
        if come == tl.num_programs(0) - 1:
            tl.store(state + COME, 0)
            tl.store(state + ROW_IN, (row + 1) % num_rings)
            tl.store(state + EXPECTED, number + 1)


def globalise(
    values: Tensor,  # dense [B, columns], or [V]
    ids: Tensor,  # out: [capacity], padding beyond the lookups
    features: Tensor,  # [F, 4] int64: base, limit, padding index or -1, column
    spans: Tensor | None,  # jagged: [2, F] int64: end of each feature among ids; shift to values
    num_lookups: int,  # jagged: the last of the ends counts
    num_rows: int,
    first_bad: Tensor,  # [1] int32: lowered to the first position that no table has
    state: Tensor | None = None,  # `ids` is a window, [rings, capacity]
    next_use: Tensor | None = None,  # of LAST_USE
) -> None:
    """Indices of several tables -> ids of one width."""
    if not ids.numel():
        return
    count, capacity = features.shape[0], ids.shape[-1]
    _globalise[(triton.cdiv(capacity, BLOCK),)](
        values, ids, features, spans, None if spans is None else spans[1], num_lookups, capacity,
        count, values.shape[1] if values.dim() == 2 else 0, num_rows, first_bad, state, next_use,
        0 if next_use is None else next_use.numel(), len(ids), JAGGED=spans is not None,
        SEARCH=count.bit_length(), IN_WINDOW=state is not None, MARKS=next_use is not None,
        BLOCK=BLOCK,
    )  # fmt: skip


def announce(
    values: Tensor,
    window: Tensor,  # [rings, capacity] ids
    window_counts: Tensor,  # [>= rings, COUNT_WORDS] int32; fresh where no batch is
    features: Tensor,
    spans: Tensor | None,
    num_lookups: int,
    num_rows: int,
    state: Tensor,
    next_use: Tensor | None,  # of LAST_USE
) -> None:
    """`globalise` to the next row of the window: a batch is expected."""
    first_bad = window_counts.view(-1)[FIRST_BAD:]
    globalise(values, window, features, spans, num_lookups, num_rows, first_bad, state, next_use)


@triton.jit(do_not_specialize=["key", "num_planned", "num_values", "num_samples"])
def _compare(
    values, offsets, places, features, order, rank, planned, flag, key, num_planned, num_values,
    num_samples, num_features, row_stride, column_stride, num_rows, JAGGED: tl.constexpr,
    SORTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_planned
    if SORTED:
        position = tl.load(order + place, mask=inside, other=0).to(tl.int64)
        place = tl.load(rank + place, mask=inside, other=0)
    else:
        position = place.to(tl.int64)
    expected = tl.load(planned + place, mask=inside, other=0).to(tl.int64)
    end = tl.program_id(0).to(tl.int64) * 0
    if JAGGED:
        feature = tl.zeros(position.shape, tl.int32)
        source = tl.zeros(position.shape, tl.int64)
        for number in range(num_features):
            first = tl.load(places + number) * num_samples
            low = tl.load(offsets + first).to(tl.int64)
            start, end = end, end + tl.load(offsets + first + num_samples).to(tl.int64) - low
            here = (position >= start) & (position < end)
            feature = tl.where(here, number, feature)
            source = tl.where(here, position - start + low, source)
        real = inside & (position < end) & (source >= 0) & (source < num_values)
    else:
        feature = (position % num_features).to(tl.int32)
        column = tl.load(features + feature * FEATURE_WORDS + FEATURE_COLUMN)
        source = position // num_features * row_stride + column * column_stride
        real = inside
    value = tl.load(values + source, mask=real, other=0).to(tl.int64)
    id_, _ = _id_of(value, feature, real, features, num_rows)
    differs = tl.max((inside & (id_ != expected)).to(tl.int32), axis=0)
    if (differs != 0) | (end > num_planned):
        tl.store(flag, key)


def compare_ids(
    given: tuple[Tensor, ...],  # dense [B, columns] or [B]; or indices and offsets, of any int type
    places: Tensor | None,  # jagged: [F] int64, of each feature among the keys
    num_samples: int,
    features: Tensor,  # [F, 4] int64, as for `globalise`
    planned: Tensor,  # [L] ids in the order of lookups, or by `order` and `rank`
    sorted_by: tuple[Tensor, Tensor] | None,  # order and rank of segments
    num_rows: int,
    flag: Tensor,  # out: [1] int32, page-locked: `key` if ids are others than were planned
    key: int,
) -> None:
    """Compare what a user's tensors hold now with what was planned; launches alone."""
    values, count = given[0], planned.numel() if sorted_by is None else sorted_by[0].numel()
    if not count:
        return
    order, rank = (None, None) if sorted_by is None else sorted_by
    strides = (*values.stride(), 0)
    _compare[(triton.cdiv(count, COMPARED),)](
        values, given[1] if places is not None else None, places, features, order, rank, planned,
        flag, key, count, values.numel(), num_samples, features.shape[0], strides[0], strides[1],
        num_rows, JAGGED=places is not None, SORTED=sorted_by is not None, BLOCK=COMPARED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "num_rings"])
def _enter_window(
    ids, counts, window, window_counts, state, capacity, num_rings, BLOCK: tl.constexpr
):
    """Copy a batch's ids to the next row of the ring, which only the device counts."""
    row = tl.load(state + ROW_IN)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < capacity
    id_ = tl.load(ids + place, mask=mask, other=0)
    tl.store(window + row.to(tl.int64) * capacity + place, id_, mask=mask)
    if tl.program_id(0) == 0:
        word = tl.arange(0, COUNT_WORDS)
        tl.store(window_counts + row * COUNT_WORDS + word, tl.load(counts + word))


@triton.jit(do_not_specialize=["capacity", "num_rings"])
def _leave_window(
    ids, counts, window, window_counts, fresh_counts, state, capacity, num_rings,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(state + ROW_OUT)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < capacity
    id_ = tl.load(window + row.to(tl.int64) * capacity + place, mask=mask, other=0)
    tl.store(ids + place, id_, mask=mask)
    if tl.program_id(0) == 0:
        word = tl.arange(0, COUNT_WORDS)
        tl.store(counts + word, tl.load(window_counts + row * COUNT_WORDS + word))
        tl.store(window_counts + row * COUNT_WORDS + word, tl.load(fresh_counts + word))


@triton.jit(do_not_specialize=["num_rings"])
def _step_on(state, num_rings, WORD: tl.constexpr):
    """The next ring is read or written next; when one is written, a batch more is expected."""
    tl.store(state + WORD, (tl.load(state + WORD) + 1) % num_rings)
    if WORD == ROW_IN:
        tl.store(state + EXPECTED, tl.load(state + EXPECTED) + 1)


def enter_window(
    ids: Tensor, counts: Tensor, window: Tensor, window_counts: Tensor, state: Tensor
) -> None:
    """A batch is expected; `window` [rings, capacity] holds the ids of those that are."""
    rings, capacity = window.shape
    grid = (max(1, triton.cdiv(capacity, BLOCK)),)
    _enter_window[grid](ids, counts, window, window_counts, state, capacity, rings, BLOCK=BLOCK)
    _step_on[(1,)](state, rings, WORD=ROW_IN)


def leave_window(
    ids: Tensor,
    counts: Tensor,
    window: Tensor,
    window_counts: Tensor,
    fresh_counts: Tensor,
    state: Tensor,
) -> None:
    """The oldest batch of the window is planned; its counts are `fresh_counts` again."""
    rings, capacity = window.shape
    grid = (max(1, triton.cdiv(capacity, BLOCK)),)
    _leave_window[grid](
        ids, counts, window, window_counts, fresh_counts, state, capacity, rings, BLOCK=BLOCK
    )
    _step_on[(1,)](state, rings, WORD=ROW_OUT)
