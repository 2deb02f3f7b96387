"""Joins two lists of gradients by row, each sorted by id, without sorting anything.

Where a row goes follows from two numbers: its place in its own list, and how many rows of the other
list come before it. The second list's rows that the first has as well are added there.
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
    those of the first list since they were summed.
    """
    a, b = first.ids.numel(), second.ids.numel()
    most, (device, dim) = min(a + b, padding + 1), (first.ids.device, first.grads.shape[1])
    ids = torch.full((most,), padding, dtype=first.ids.dtype, device=device)
    grads = torch.empty(most, dim, dtype=torch.float32, device=device)
    valid = None
    if first.valid is not None or second.valid is not None or tables is not None:
        valid = torch.zeros(most, dtype=torch.bool, device=device)
    is_new = torch.empty(b, dtype=torch.int32, device=device)
    if b:
        _find_new[(triton.cdiv(b, _BLOCK),)](first.ids, second.ids, is_new, a, b, padding, _BLOCK)
    new = is_new.cumsum(0, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32, device=device)
    columns = triton.next_power_of_2(dim)
    tile = tile_rows(columns)
    out = Pairs(ids, grads, valid)
    search = 0 if tables is None else tables.num_tables.bit_length()
    for own, other, is_second in ((first, second, False), (second, first, True)):
        if own.ids.numel():
            _place[(triton.cdiv(own.ids.numel(), tile),)](
                own, other, new, out, count, own.ids.numel(), other.ids.numel(), padding, most,
                None if is_second else tables, 0 if is_second else search,
                dim, columns, tile, is_second, num_warps=tile_warps(columns), **EXACT,
            )  # fmt: skip
    return out, count


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


@triton.jit(do_not_specialize=["a", "b", "padding"])
def _find_new(first, second, is_new, a, b, padding, BLOCK: tl.constexpr):
    """Notes the ids of the second list that the first does not have."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(second + place, mask=place < b, other=0).to(tl.int64)
    is_row = (place < b) & (own < padding)
    found = _is_at(first, _lower_bound(first, own, is_row, a), own, is_row, a)
    tl.store(is_new + place, (is_row & (found == 0)).to(tl.int32), mask=place < b)


@triton.jit(do_not_specialize=["own_count", "other_count", "padding", "most"])
def _place(
    own,  # the list whose rows are placed
    other,
    new,  # [b] int32: how many of the second list's ids up to here are not in the first
    out,
    count,
    own_count,
    other_count,
    padding,
    most,
    tables,
    SEARCH_TABLES: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    IS_SECOND: tl.constexpr,
):
    """Writes a list's rows to their places: the first's with sums, the second's that are new."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = row < own_count
    row_id = tl.load(own.ids + row, mask=mask, other=0).to(tl.int64)
    mask = mask & (row_id < padding)
    below = _lower_bound(other.ids, row_id, mask, other_count)
    has_twin = _is_at(other.ids, below, row_id, mask, other_count)
    if IS_SECOND:
        mask = mask & (has_twin == 0)
        to = below + tl.load(new + row, mask=mask, other=1) - 1
    else:
        to = row + tl.load(new + below - 1, mask=mask & (below > 0), other=0)
    column = tl.arange(0, COLUMNS)[None, :]
    valid = mask
    if own.valid is not None:
        valid = mask & (tl.load(own.valid + row, mask=mask, other=0) != 0)
    if tables is not None:
        valid, factor = factors_of(own.ids, row, valid, tables, SEARCH_TABLES)
    inside = valid[:, None] & (column < DIM)
    at = row.to(tl.int64)[:, None] * DIM + column
    grad = tl.load(own.grads + at, mask=inside, other=0.0)
    if tables is not None:
        grad = grad * factor[:, None]
    if not IS_SECOND:
        if other.valid is not None:
            has_twin = has_twin & (tl.load(other.valid + below, mask=has_twin, other=0) != 0)
        at = below.to(tl.int64)[:, None] * DIM + column
        grad += tl.load(other.grads + at, mask=has_twin[:, None] & (column < DIM), other=0.0)
        valid = valid | has_twin
    mask = mask & (to < most)
    tl.store(out.ids + to, row_id, mask=mask)
    is_next = row + 1 < own_count
    follower = tl.load(own.ids + row + 1, mask=is_next, other=0).to(tl.int64)
    is_last = mask & ((is_next == 0) | (follower >= padding))
    tl.atomic_max(count + tl.zeros_like(to), to + 1, mask=is_last)
    if out.valid is not None:
        tl.store(out.valid + to, valid, mask=mask)
    at = to.to(tl.int64)[:, None] * DIM + column
    tl.store(out.grads + at, grad, mask=mask[:, None] & (column < DIM))
