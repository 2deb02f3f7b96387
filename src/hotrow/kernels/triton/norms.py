"""Squares of gradients, summed by table. Bits depend on ids and gradients alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.triton.lookup import EXACT, sum_columns, tile_rows, tile_warps

_BLOCK = 1024


def table_norms(
    ids: Tensor,  # [n], ascending
    grads: Tensor,  # [n, dim] float32
    valid: Tensor | None,  # [n] bool: others count as zeros; None: all
    bases: Tensor,  # [T + 1] int64: the first id of each table, and the number of rows
) -> Tensor:
    """Return the L2 norm of the gradients of each table, [T] float32."""
    count, dim = grads.shape
    tables = bases.numel() - 1
    norms = torch.zeros(tables, dtype=torch.float32, device=grads.device)
    if not count:
        return norms
    squares = torch.empty(count, dtype=torch.float32, device=grads.device)
    columns = triton.next_power_of_2(dim)
    tile = tile_rows(columns)
    _squares[(triton.cdiv(count, tile),)](
        grads, valid, squares, count, dim, columns, tile, num_warps=tile_warps(columns), **EXACT
    )
    search = count.bit_length()
    _norms[(tables,)](ids, squares, bases, norms, count, search, _BLOCK, **EXACT)
    return norms


@triton.jit(do_not_specialize=["count"])
def _squares(
    grads, valid, squares, count, DIM: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_there = row < count
    if valid is not None:
        is_there = is_there & (tl.load(valid + row, mask=is_there, other=0) != 0)
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
def _norms(ids, squares, bases, norms, count, SEARCH: tl.constexpr, BLOCK: tl.constexpr):
    table = tl.program_id(0)
    first = _first_at(ids, tl.load(bases + table), count, SEARCH)
    last = _first_at(ids, tl.load(bases + table + 1), count, SEARCH)
    # Each lane adds its own places one after the other, counted from the table's first row.
    total = tl.zeros([BLOCK], tl.float64)
    place = first
    while place < last:
        at = place + tl.arange(0, BLOCK)
        total += tl.load(squares + at, mask=at < last, other=0.0).to(tl.float64)
        place += BLOCK
    tl.store(norms + table, tl.sqrt(tl.sum(total, axis=0)).to(tl.float32))
