"""Joins two lists of gradients by row, each sorted by id, without sorting anything.

Where a row goes follows from two numbers: how many rows with a gradient come before it in its own
list, and how many in the other. The second list's rows that the first has as well are added there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.triton.lookup import EXACT, tile_rows, tile_warps
from hotrow.kernels.triton.update import Tables, factors_of

_BLOCK = 512


class Pairs(NamedTuple):
    """Ids, ascending and each once, and a gradient for each. Ids from `padding` on are none."""

    ids: Tensor  # [n] int32 or int64
    grads: Tensor  # [n, dim] float32
    valid: Tensor | None = None  # [n] bool: others have no gradient; None: all have


def merge(
    first: Pairs, second: Pairs, padding: int, tables: Tables | None = None
) -> tuple[Pairs, Tensor]:
    """Return the sums of both by row, followed by padding, and how many rows there are: [1] int32.

    A row of both gets the sum of its two gradients, in this order. `tables` says what was done to
    those of the first list since they were summed. Rows without a gradient are left out.
    """
    a, b = first.ids.numel(), second.ids.numel()
    most, (device, dim) = min(a + b, padding + 1), (first.ids.device, first.grads.shape[1])
    ids = torch.full((most,), padding, dtype=first.ids.dtype, device=device)
    grads = torch.empty(most, dim, dtype=torch.float32, device=device)
    if a + b == 0:
        return Pairs(ids, grads), torch.zeros(1, dtype=torch.int32, device=device)
    search = 0 if tables is None else tables.num_tables.bit_length()
    # Of both lists, one behind the other: 1 for an entry that gets a place.
    marks = torch.empty(a + b, dtype=torch.int32, device=device)
    if a:
        grid = (triton.cdiv(a, _BLOCK),)
        _mark_first[grid](first.ids, first.valid, marks, a, padding, tables, search, _BLOCK)
    if b:
        grid = (triton.cdiv(b, _BLOCK),)
        _mark_second[grid](
            first.ids, second.ids, second.valid, marks, a, b, padding, _BLOCK
        )  # fmt: skip
    upto = marks.cumsum(0, dtype=torch.int32)
    columns = triton.next_power_of_2(dim)
    tile = tile_rows(columns)
    for own, other, start, is_second in ((first, second, 0, False), (second, first, a, True)):
        if own.ids.numel():
            _place[(triton.cdiv(own.ids.numel(), tile),)](
                own, other, marks, upto, ids, grads, start, 0 if is_second else a,
                own.ids.numel(), other.ids.numel(), most,
                None if is_second else tables, 0 if is_second else search,
                dim, columns, tile, is_second, num_warps=tile_warps(columns), **EXACT,
            )  # fmt: skip
    return Pairs(ids, grads), upto[-1:]


@triton.jit
def _lower_bound(ids, wanted, mask, count):
    """How many of the first `count` ids are below each of those wanted."""
    low = tl.zeros_like(wanted).to(tl.int32)
    high = low + count
    size = count
    while size > 0:
        middle = (low + high) // 2
        is_open = mask & (low < high)
        is_below = tl.load(ids + middle, mask=is_open, other=0).to(tl.int64) < wanted
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
        size = size // 2
    return low


@triton.jit
def _is_at(ids, place, wanted, mask, count):
    """Whether an id stands at its place."""
    there = mask & (place < count)
    return there & (tl.load(ids + place, mask=there, other=0).to(tl.int64) == wanted)


@triton.jit
def _has_grad(ids, valid, place, count, padding):
    """The ids at some places, and which of them are rows with a gradient."""
    mask = place < count
    own = tl.load(ids + place, mask=mask, other=0).to(tl.int64)
    mask = mask & (own < padding)
    if valid is not None:
        mask = mask & (tl.load(valid + place, mask=mask, other=0) != 0)
    return own, mask


@triton.jit(do_not_specialize=["a", "padding"])
def _mark_first(
    ids, valid, marks, a, padding, tables, SEARCH_TABLES: tl.constexpr, BLOCK: tl.constexpr
):
    """Marks the rows of the first list that have a gradient."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, mask = _has_grad(ids, valid, place, a, padding)
    if tables is not None:
        mask, _ = factors_of(ids, place, mask, tables, SEARCH_TABLES)
    tl.store(marks + place, mask.to(tl.int32), mask=place < a)


@triton.jit(do_not_specialize=["a", "b", "padding"])
def _mark_second(first, second, valid, marks, a, b, padding, BLOCK: tl.constexpr):
    """Marks the rows of the second list that have a gradient and no mark in the first."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, mask = _has_grad(second, valid, place, b, padding)
    below = _lower_bound(first, own, mask, a)
    has_twin = _is_at(first, below, own, mask, a)
    has_twin = has_twin & (tl.load(marks + below, mask=has_twin, other=0) != 0)
    tl.store(marks + a + place, (mask & (has_twin == 0)).to(tl.int32), mask=place < b)


@triton.jit
def _marks_to(upto, start, place, mask):
    """How many marks a list that begins at `start` has up to a place."""
    mask = mask & (place >= 0)
    before = tl.load(upto + start + tl.zeros_like(place) - 1, mask=mask & (start > 0), other=0)
    return tl.load(upto + start + place, mask=mask, other=0) - before


@triton.jit(
    do_not_specialize=["own_start", "other_start", "own_count", "other_count", "most"]
)  # fmt: skip
def _place(
    own,  # the list whose marked rows are placed
    other,
    marks,
    upto,  # [a + b] int32: how many marks there are up to each entry
    out_ids,
    out_grads,
    own_start,  # where the entries of each list begin in `marks`
    other_start,
    own_count,
    other_count,
    most,
    tables,
    SEARCH_TABLES: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    IS_SECOND: tl.constexpr,
):
    """Writes a list's marked rows to their places: the first's with sums."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = row < own_count
    mask = mask & (tl.load(marks + own_start + row, mask=mask, other=0) != 0)
    row_id = tl.load(own.ids + row, mask=mask, other=0).to(tl.int64)
    below = _lower_bound(other.ids, row_id, mask, other_count)
    to = _marks_to(upto, own_start, row, mask) + _marks_to(upto, other_start, below - 1, mask) - 1
    column = tl.arange(0, COLUMNS)[None, :]
    inside = mask[:, None] & (column < DIM)
    at = row.to(tl.int64)[:, None] * DIM + column
    grad = tl.load(own.grads + at, mask=inside, other=0.0)
    if tables is not None:
        _, factor = factors_of(own.ids, row, mask, tables, SEARCH_TABLES)
        grad = grad * factor[:, None]
    if not IS_SECOND:
        has_twin = _is_at(other.ids, below, row_id, mask, other_count)
        if other.valid is not None:
            has_twin = has_twin & (tl.load(other.valid + below, mask=has_twin, other=0) != 0)
        at = below.to(tl.int64)[:, None] * DIM + column
        grad += tl.load(other.grads + at, mask=has_twin[:, None] & (column < DIM), other=0.0)
    mask = mask & (to < most)
    tl.store(out_ids + to, row_id, mask=mask)
    at = to.to(tl.int64)[:, None] * DIM + column
    tl.store(out_grads + at, grad, mask=mask[:, None] & (column < DIM))
