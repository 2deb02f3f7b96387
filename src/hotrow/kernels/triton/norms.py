"""Norms of gradients by table, and what was done to them.

Bits depend on ids and gradients alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.triton.lookup import EXACT, sum_columns, tile_rows, tile_warps
from hotrow.kernels.triton.update import Place, _address

_BLOCK = 1024


def table_norms(
    ids: Tensor,  # [n], ascending; the number of rows is padding
    grads: Tensor,  # [n, dim] float32
    valid: Tensor | None,  # [n] bool: others count as zeros; None: all
    bases: Tensor,  # [T + 1] int64: the first id of each table, and the number of rows
    norms: Tensor,  # [all tables] float32, written to
    marked: Tensor,  # [all tables, 1, 2] float32, written to: each norm, and `mark`
    mark: float,
    places: Tensor,  # [T] int64: where each table stands among all
    frozen: Tensor | None = None,  # a bit for each id that counts as zeros: int32 words
    untrained: Tensor | None = None,  # [P] int64: ids that count as zeros, too
) -> None:
    """Write the L2 norm of the gradients of each table."""
    count, dim = grads.shape
    squares = torch.empty(count, dtype=torch.float32, device=grads.device)
    if count:
        columns = triton.next_power_of_2(dim)
        tile = tile_rows(columns)
        _squares[(triton.cdiv(count, tile),)](
            grads, Place(None, 0, None, ids, frozen, untrained),
            0 if untrained is None else untrained.numel(), valid, squares, count, dim, columns,
            tile, num_warps=tile_warps(columns), **EXACT,
        )  # fmt: skip
    _norms[(places.numel(),)](
        ids,
        squares,
        bases,
        norms,
        marked,
        mark,
        places,
        count,
        max(1, count.bit_length()),  # Triton cannot compile a loop that it knows to be empty
        _BLOCK,
        **EXACT,
    )


@triton.jit(do_not_specialize=["count"])
def _squares(
    grads, place, UNTRAINED: tl.constexpr, valid, squares, count, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_there = row < count
    if valid is not None:
        is_there = is_there & (tl.load(valid + row, mask=is_there, other=0) != 0)
    is_there = _address(place, row, is_there, -1, UNTRAINED) != -1
    column = tl.arange(0, COLUMNS)[None, :]
    mask = is_there[:, None] & (column < DIM)
    grad = tl.load(grads + row.to(tl.int64)[:, None] * DIM + column, mask=mask, other=0.0)
    total = sum_columns(grad * grad, TILE, COLUMNS)
    tl.store(squares + row[:, None], total, mask=(row < count)[:, None])


@triton.jit
def _first_at(ids, base, count, SEARCH: tl.constexpr):
    """The place of the first id that is not below `base`."""
    low = tl.zeros([], tl.int32)
    high = low + count
    for _ in tl.static_range(SEARCH):
        middle = (low + high) // 2
        is_open = low < high
        is_below = tl.load(ids + middle, mask=is_open, other=0).to(tl.int64) < base
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["count"])
def _norms(
    ids, squares, bases, norms, marked, mark, places, count, SEARCH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    table = tl.program_id(0)
    first = _first_at(ids, tl.load(bases + table), count, SEARCH)
    last = _first_at(ids, tl.load(bases + table + 1), count, SEARCH)
    # Each lane adds its own places one after the other, counted from the table's first row.
    total = tl.zeros([BLOCK], tl.float64)
    at = first
    while at < last:
        place = at + tl.arange(0, BLOCK)
        total += tl.load(squares + place, mask=place < last, other=0.0).to(tl.float64)
        at += BLOCK
    norm = tl.sqrt(tl.sum(total, axis=0)).to(tl.float32)
    to = tl.load(places + table)
    tl.store(norms + to, norm)
    tl.store(marked + 2 * to, norm)
    tl.store(marked + 2 * to + 1, mark)


def judge(
    marked: Tensor,  # [T, 2] float32: norms and marks as they are now
    norms: Tensor,  # [T] float32: as they were
    mark: float,
    close: float,  # how far a norm may be from what its mark says, relatively
    bad: Tensor,  # [1] int32: set to 1 if one is farther
) -> tuple[Tensor, Tensor]:
    """Return what each gradient was multiplied by, float32, and whether it is not all zeros."""
    count = norms.numel()
    factors = torch.empty(count, dtype=torch.float32, device=norms.device)
    kept = torch.empty(count, dtype=torch.bool, device=norms.device)
    _judge[(triton.cdiv(count, 256),)](
        marked, norms, 1 / mark, close, bad, factors, kept, count, 256
    )
    return factors, kept


@triton.jit
def _judge(marked, norms, back, close, bad, factors, kept, count, BLOCK: tl.constexpr):
    table = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = table < count
    now = tl.load(marked + 2 * table, mask=mask, other=0.0)
    found = tl.load(marked + 2 * table + 1, mask=mask, other=0.0)
    factor = found * back  # exact, as the mark is a power of two
    expected = tl.load(norms + table, mask=mask, other=0.0) * factor
    # NaN is not above anything: what became of it is torch's affair.
    is_bad = mask & (tl.abs(now - expected) > close * tl.abs(expected) + 1e-30)
    is_bad = is_bad & (tl.abs(now) < float("inf")) & (tl.abs(expected) < float("inf"))
    tl.store(bad + tl.zeros_like(table), 1, mask=is_bad)
    tl.store(factors + table, factor, mask=mask)
    tl.store(kept + table, (now != 0) | (found != 0), mask=mask)
