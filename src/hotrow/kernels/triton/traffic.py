"""Counting on the device: what a plan looks up and moves, table by table."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.triton.maps import count_ends
from hotrow.kernels.triton.plan import BLOCK
from hotrow.kernels.triton.segments import Segments

from hotrow.kernels.triton.words import (  # isort: skip
    MISSING, MOVES, OUTCOME, PLANNED, TABLE_EVICTED, TABLE_FETCHED, TABLE_LOOKUPS, TABLE_ROWS,
    TABLE_WORDS, UNIQUE,
)  # fmt: skip


@triton.jit
def _add(at, more, mask):
    tl.store(at, tl.load(at, mask=mask, other=0) + more, mask=mask)


@triton.jit
def _count_tables(bases, ids, starts, entering, counts, traffic, num_tables, TABLES: tl.constexpr):
    """Lookups, unique rows and rows fetched of each table.

    Six searches for each, side by side: where it begins and ends among the unique rows, the missing
    ones and those that are fetched anew, all of them sorted.
    """
    if tl.load(counts + OUTCOME) != PLANNED:
        return
    unique, missing = tl.load(counts + UNIQUE), tl.load(counts + MISSING)
    moves = tl.load(counts + MOVES)
    table = tl.program_id(0) * TABLES + tl.arange(0, TABLES)
    there = (table < num_tables)[:, None]
    edge = tl.arange(0, 8)[None, :]
    kind = tl.where(there, edge // 2, 3)
    value = tl.load(bases + table[:, None] + edge % 2, mask=there, other=0)
    sorted_ = tl.where(kind == 0, ids, entering)
    low = tl.where(kind == 2, missing, 0)
    high = tl.where(kind == 0, unique, tl.where(kind == 1, missing, 0))
    high = tl.where(kind == 2, moves, high)
    while tl.max(tl.max(high - low, axis=1), axis=0) > 0:
        open_ = low < high
        middle = (low + high) // 2
        is_below = tl.load(sorted_ + middle, mask=open_, other=0) < value
        low = tl.where(open_ & is_below, middle + 1, low)
        high = tl.where(open_ & ~is_below, middle, high)
    first = tl.sum(tl.where(edge == 0, low, 0), axis=1)
    end = tl.sum(tl.where(edge == 1, low, 0), axis=1)
    among_moves = (edge >= 2) & (edge < 6)
    fetched = tl.sum(tl.where(among_moves, tl.where(edge % 2 == 1, low, -low), 0), axis=1)
    mask = table < num_tables
    lookups = tl.load(starts + end, mask=mask, other=0) - tl.load(
        starts + first, mask=mask, other=0
    )
    mine = traffic + table * TABLE_WORDS
    _add(mine + TABLE_LOOKUPS, lookups, mask)
    _add(mine + TABLE_ROWS, end - first, mask)
    _add(mine + TABLE_FETCHED, fetched, mask)


@triton.jit
def _count_leaving(bases, leaving, counts, traffic, num_tables, BLOCK: tl.constexpr,
                   SEARCH: tl.constexpr, TABLES: tl.constexpr):  # fmt: skip
    move = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(counts + OUTCOME) != PLANNED:
        return
    mask = move < tl.load(counts + MOVES)
    if tl.max(mask.to(tl.int32), axis=0) == 0:
        return
    row = tl.load(leaving + move, mask=mask, other=-1)
    mask = mask & (row >= 0)
    found = count_ends(bases + 1, row, mask, num_tables, SEARCH)
    per_table = tl.histogram(tl.where(mask, found, TABLES - 1), TABLES)
    table = tl.arange(0, TABLES)
    wanted = (table < num_tables) & (per_table > 0)
    tl.atomic_add(
        traffic + table * TABLE_WORDS + TABLE_EVICTED, per_table.to(tl.int64), mask=wanted
    )


def count_traffic(
    bases: Tensor,  # [T + 1] int64: the first id of each table, then the number of rows
    segments: Segments,
    moves: tuple[Tensor, Tensor, Tensor],
    counts: Tensor,
    traffic: Tensor,  # [T, 4] int64: lookups, unique rows, fetched, evicted
) -> None:
    """Add a plan's numbers to those of each table."""
    tables = bases.numel() - 1
    _, leaving, entering = moves
    at_once = min(32, triton.next_power_of_2(tables))
    _count_tables[(triton.cdiv(tables, at_once),)](
        bases, segments.ids, segments.starts, entering, counts, traffic, tables, TABLES=at_once
    )
    # One bin more than there are tables: what is masked goes there.
    _count_leaving[(max(1, triton.cdiv(segments.order.numel(), BLOCK)),)](
        bases, leaving, counts, traffic, tables, BLOCK=BLOCK, SEARCH=tables.bit_length(),
        TABLES=triton.next_power_of_2(tables + 1),
    )  # fmt: skip
