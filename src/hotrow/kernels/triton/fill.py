"""Rows between the store and the slots, read and written by the GPU where they lie.

The store is page-locked host memory that the GPU addresses directly, so a row crosses the link
once and nothing is staged. Knows rows by number; not which rows ought to move, nor when: how many
do, only the GPU knows.

A thread block takes a whole multiprocessor from training, so there are few of them, and each keeps
many rows in flight: a row from the host takes microseconds, whatever its size. Blocks take tiles of
pieces. A piece is a part of a row whose length is a power of two, as Triton wants, and divides the
row nearly: 192 floats are three pieces of 64, not one of 256 with a quarter of it idle.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.triton.start import is_written, set_written

# With so many threads a block has all registers of its multiprocessor, and nothing runs beside it:
# what did would wait with its loads behind those from the host, and the kernel it belongs to, too.
_WARPS = 32
_LOADS = 4  # per thread and way
_PACKED_FLOATS = 2048  # of a tile where rows stay on the device
_ALL_BLOCKS = 16  # saturate the link, when no training runs beside


class Span(NamedTuple):
    """Some of a plan's moves, by their numbers."""

    first: int
    end: int


ALL = Span(0, 2**31 - 1)


def fill(
    slots: Tensor,  # [C, width] float32, on the device
    store: Tensor,  # [N, width] float32, page-locked
    move_slots: Tensor,  # [cap] int32
    leaving: Tensor | None,  # [cap] int32 or int64, -1 for none; None: nothing is written back
    entering: Tensor,  # [cap] int32 or int64, -1 for none
    count: Tensor,  # [1] int32: the moves there are
    blocks: int = 2,
    *,
    written: Tensor | None = None,  # a bit for each row; None: every row is read
    span: Span = ALL,
) -> None:
    """Write leaving rows to the store and read entering rows from it.

    A row that leaves and enters the same slot is written back and stays. No slot may be named
    twice, and no row may leave one slot and enter another: moves are done in any order. With
    `written`, rows that leave are noted there, and rows that were never written are not read.
    """
    shape = _shape(slots, store, _tile_floats(slots.shape[1]))
    _fill[(blocks,)](
        slots, store, move_slots, leaving, entering, count, written, *span, **shape,
        num_warps=_WARPS,
    )  # fmt: skip


def pack(
    slots: Tensor,  # [C, width] float32
    move_slots: Tensor,  # [cap] int32
    count: Tensor,  # [1] int32
    out: Tensor,  # [most, width] float32
) -> None:
    """Copy the rows at the first `count` slots side by side, `most` at the most."""
    _repack(slots, move_slots, None, None, count, out)


def pack_more(
    slots: Tensor,  # [C, width] float32
    move_slots: Tensor,  # [cap] int32
    leaving: Tensor,  # [cap] int32 or int64, -1 for none
    count: Tensor,  # [1] int32
    rows: Tensor,  # [most, width] float32
    ids: Tensor,  # [most] int32 or int64
    taken: Tensor,  # [1] int32: how many of them are taken, and afterwards how many are
    written: Tensor | None,  # a bit for each row of the store, or None
    *,
    span: Span = ALL,
) -> None:
    """Copy leaving rows behind those that were packed before, and note them as written."""
    shape = _shape(slots, rows, _PACKED_FLOATS)
    most = min(rows.shape[0], move_slots.numel())
    _pack_more[(triton.cdiv(most * shape["PIECES"], shape["TILE"]),)](
        slots, move_slots, leaving, count, rows, ids, taken, written, rows.shape[0], *span, **shape
    )
    _take[(1,)](taken, count, *span)


def unpack(
    slots: Tensor,  # [C, width] float32
    move_slots: Tensor,  # [cap] int32
    leaving: Tensor,  # [cap] int32 or int64
    entering: Tensor,  # [cap] int32 or int64
    count: Tensor,  # [1] int32
    rows: Tensor,  # [most, width] float32
) -> None:
    """Copy rows that lie side by side to the first `count` slots, `most` at the most.

    A row that leaves and enters the same slot is there already, and stays.
    """
    _repack(slots, move_slots, leaving, entering, count, rows)


def _repack(
    slots: Tensor, move_slots: Tensor, leaving: Any, entering: Any, count: Tensor, rows: Tensor
) -> None:
    shape = _shape(slots, rows, _PACKED_FLOATS)
    _pack[(triton.cdiv(rows.shape[0] * shape["PIECES"], shape["TILE"]),)](
        slots, move_slots, leaving, entering, count, rows, rows.shape[0], **shape
    )


def gather(
    store: Tensor,  # [N, width] float32, page-locked
    ids: Tensor,  # [cap] int32 or int64, -1 for none
    out: Tensor,  # [cap, width] float32, on the device
    blocks: int = _ALL_BLOCKS,
) -> None:
    """Copy the rows of `ids` into `out`; nothing is written where an id is -1."""
    _copy_rows(out, store, ids, blocks, to_store=False)


def scatter(
    store: Tensor,  # [N, width] float32, page-locked
    ids: Tensor,  # [cap] int32 or int64, -1 for none
    rows: Tensor,  # [cap, width] float32, on the device
    blocks: int = _ALL_BLOCKS,
) -> None:
    """Replace the rows of `ids`, each given once; -1 is skipped."""
    _copy_rows(rows, store, ids, blocks, to_store=True)


def _copy_rows(rows: Tensor, store: Tensor, ids: Tensor, blocks: int, *, to_store: bool) -> None:
    shape = _shape(rows, store, _tile_floats(rows.shape[1]))
    _copy[(blocks,)](rows, store, ids, ids.numel(), TO_STORE=to_store, **shape, num_warps=_WARPS)


def _shape(rows: Tensor, others: Tensor, tile_floats: int) -> dict[str, int]:
    """Return the constants of a kernel that moves such rows, a tile of so many floats at once."""
    for tensor in (rows, others):
        assert tensor.dtype is torch.float32
        assert tensor.is_contiguous()
    assert rows.shape[1] == others.shape[1]
    piece, pieces = _pieces(rows.shape[1])
    tile = max(1, tile_floats // piece)
    return {"WIDTH": rows.shape[1], "PIECE": piece, "PIECES": pieces, "TILE": tile}


def _pieces(width: int) -> tuple[int, int]:
    """Floats in a piece and pieces in a row, such that at most an eighth of them is idle."""
    piece = 64
    while piece > 1 and triton.cdiv(width, piece) * piece * 8 > width * 9:
        piece //= 2
    return piece, triton.cdiv(width, piece)


def _tile_floats(width: int) -> int:
    """64 KiB each way, half of a multiprocessor's registers, where rows divide into 16 bytes."""
    return _LOADS * _WARPS * 32 * math.gcd(width, 4)


@triton.jit
def _tile(
    first, total, WIDTH: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr
):
    """Of a tile of pieces: the rows' places and whether they are there, [TILE]; their columns and
    whether those are there, [TILE, PIECE]."""
    piece = first + tl.arange(0, TILE)
    column = (piece % PIECES * PIECE)[:, None] + tl.arange(0, PIECE)[None, :]
    return piece // PIECES, piece < total, column, column < WIDTH


@triton.jit(do_not_specialize=["begin", "end"])
def _fill(
    slots,
    store,
    move_slots,
    leaving,
    entering,
    count,
    written,
    begin,
    end,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
):
    total = (tl.minimum(tl.load(count), end) - begin) * PIECES
    first = tl.program_id(0) * TILE
    while first < total:  # Triton 3.6 interprets no `for` whose end is read from memory
        move, there, column, inside = _tile(first, total, WIDTH, PIECE, PIECES, TILE)
        move += begin
        slot = tl.load(move_slots + move, mask=there, other=0).to(tl.int64)
        in_slots = slots + slot[:, None] * WIDTH + column
        new = tl.load(entering + move, mask=there, other=-1).to(tl.int64)
        comes = new >= 0
        if leaving is not None:
            old = tl.load(leaving + move, mask=there, other=-1).to(tl.int64)
            comes = comes & (new != old)
        if written is not None:
            comes = is_written(written, new, comes)
            if leaving is not None:
                set_written(written, old, old >= 0)
        enters = comes[:, None] & inside
        # Both loads are under way before the first store waits for either.
        incoming = tl.load(store + new[:, None] * WIDTH + column, mask=enters)
        if leaving is not None:
            leaves = (old >= 0)[:, None] & inside
            outgoing = tl.load(in_slots, mask=leaves)
            tl.store(store + old[:, None] * WIDTH + column, outgoing, mask=leaves)
        tl.store(in_slots, incoming, mask=enters)
        first += tl.num_programs(0) * TILE


@triton.jit
def _pack(
    slots, move_slots, leaving, entering, count, packed, most, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    total = tl.minimum(tl.load(count), most) * PIECES
    first = tl.program_id(0) * TILE
    if first < total:
        move, there, column, inside = _tile(first, total, WIDTH, PIECE, PIECES, TILE)
        slot = tl.load(move_slots + move, mask=there, other=0).to(tl.int64)
        in_slots = slots + slot[:, None] * WIDTH + column
        in_packed = packed + move.to(tl.int64)[:, None] * WIDTH + column
        if leaving is None:
            mask = there[:, None] & inside
            tl.store(in_packed, tl.load(in_slots, mask=mask), mask=mask)
        else:
            old = tl.load(leaving + move, mask=there, other=-1)
            new = tl.load(entering + move, mask=there, other=-1)
            mask = (there & (new != old))[:, None] & inside
            tl.store(in_slots, tl.load(in_packed, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["begin", "end"])
def _pack_more(
    slots, move_slots, leaving, count, rows, ids, taken, written, most, begin, end,
    WIDTH: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    before = tl.load(taken)
    total = tl.minimum(tl.minimum(tl.load(count), end) - begin, most - before) * PIECES
    first = tl.program_id(0) * TILE
    if first < total:
        place, there, column, inside = _tile(first, total, WIDTH, PIECE, PIECES, TILE)
        move = begin + place
        slot = tl.load(move_slots + move, mask=there, other=0).to(tl.int64)
        row = tl.load(leaving + move, mask=there, other=-1)
        place += before
        tl.store(ids + place, row, mask=there)
        if written is not None:
            set_written(written, row.to(tl.int64), there & (row >= 0))
        mask = there[:, None] & inside
        found = tl.load(slots + slot[:, None] * WIDTH + column, mask=mask)
        tl.store(rows + place.to(tl.int64)[:, None] * WIDTH + column, found, mask=mask)


@triton.jit(do_not_specialize=["begin", "end"])
def _take(taken, count, begin, end):
    more = tl.minimum(tl.load(count), end) - begin
    tl.store(taken, tl.load(taken) + tl.maximum(more, 0))


@triton.jit(do_not_specialize=["count"])
def _copy(
    rows,
    store,
    ids,
    count,
    TO_STORE: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
):
    total = count * PIECES
    first = tl.program_id(0) * TILE
    while first < total:
        place, there, column, inside = _tile(first, total, WIDTH, PIECE, PIECES, TILE)
        row = tl.load(ids + place, mask=there, other=-1).to(tl.int64)
        moves = (row >= 0)[:, None] & inside
        in_rows = rows + place.to(tl.int64)[:, None] * WIDTH + column
        in_store = store + row[:, None] * WIDTH + column
        if TO_STORE:
            tl.store(in_store, tl.load(in_rows, mask=moves), mask=moves)
        else:
            tl.store(in_rows, tl.load(in_store, mask=moves), mask=moves)
        first += tl.num_programs(0) * TILE
