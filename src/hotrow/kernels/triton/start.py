"""The starting rows of a table, written by the GPU where they lie.

A weight is a function of (seed, table name, row, column): the integer hash of store/ram.py, so
that uniform and constant rows have the CPU's bits, and normal ones the CPU's values up to rounding.
These kernels get 64-bit words for each table, made from its name and the seed, and mix them with
the row's number within its table.

`rows` is device memory, or page-locked host memory. Programs write its floats in order, whatever
the width, so that whole lines cross the link.

A row that was never written still has its starting value: `start_moves` makes it in its slot, and
nothing crosses the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.triton.maps import count_ends

_BLOCK = 2048  # floats of a program
# Beside training: programs are short, since its kernels wait for those that are there.
_MOVED_FLOATS, _MOVE_WARPS, _MOST_BLOCKS = 512, 2, 1024
_NO_ROW = -1


@dataclass(frozen=True)
class Beginning:
    """How the rows of one table start: `kind`, its two numbers, and the row of zeros, if any."""

    kind: str  # constant, uniform, normal; or other: such rows have to be read
    numbers: tuple[float, float] = (0.0, 0.0)  # value; low and span; or mean and deviation
    padding: int = _NO_ROW


def start_rows(
    rows: Tensor,  # [n, width] float32: the rows first_row, first_row + 1, ... of a table
    state: Tensor,  # [width - dim] float32, on the device: what each state column starts at
    beginning: Beginning,
    words: Sequence[int],  # of the table: for uniform weights, normal radius and angle
    *,
    first_row: int = 0,
) -> None:
    """Start rows of one table. `padding` counts from the first of them."""
    assert rows.dtype is state.dtype is torch.float32
    assert rows.is_contiguous()
    assert beginning.kind != "other"
    width = rows.shape[1]
    if rows.numel() == 0:
        return
    # In tensors: the kernel would otherwise be compiled for each range of the integers' values.
    integers = torch.tensor([first_row, *map(_signed, words), beginning.padding])
    floats = torch.tensor(beginning.numbers, dtype=torch.float32)
    _start_rows[(triton.cdiv(rows.numel(), _BLOCK),)](
        rows,
        state,
        integers.to(state.device),
        floats.to(state.device),
        rows.numel(),
        KIND=beginning.kind,
        WIDTH=width,
        DIM=width - state.numel(),
        BLOCK=_BLOCK,
        # A fused multiply and add would round once where numpy rounds twice.
        enable_fp_fusion=False,
    )


_KINDS = ("constant", "uniform", "normal", "other")


class Unwritten:
    """A bit for each row of some tables that says whether it was written, and how rows start."""

    def __init__(
        self,
        bases: Sequence[int],  # the first id of each table, then the number of rows
        beginnings: Sequence[Beginning],
        words: Sequence[Sequence[int]],  # of each table: for uniform weights, radius and angle
        state: Sequence[float],  # what each state column starts at
        device: torch.device,
    ) -> None:
        self.bases = torch.tensor(bases, device=device)
        self.kinds = torch.tensor([_KINDS.index(each.kind) for each in beginnings], device=device)
        numbers = [each.numbers for each in beginnings]
        self.numbers = torch.tensor(numbers, dtype=torch.float32, device=device)
        padding = [
            base + each.padding if each.padding >= 0 else _NO_ROW
            for base, each in zip(bases, beginnings, strict=False)
        ]
        self.padding = torch.tensor(padding, device=device)
        self.words = torch.tensor([[*map(_signed, mine)] for mine in words], device=device)
        self.state = torch.tensor(state, dtype=torch.float32, device=device)
        self.written = torch.zeros(-(-bases[-1] // 32), dtype=torch.int32, device=device)
        self.made = torch.zeros(1, dtype=torch.int64, device=device)  # rows, so far
        for base, end, each in zip(bases, bases[1:], beginnings, strict=False):
            if each.kind == "other":
                for part in torch.arange(base, end, device=device).split(1 << 22):
                    self.note(part)

    def note(self, ids: Tensor) -> None:
        """These rows, -1 for none, are written."""
        note_written(self.written, ids)


def note_written(bits: Tensor, ids: Tensor, count: Tensor | None = None) -> None:
    """Set the bits of rows, -1 for none; `count`: of the first so many alone."""
    if ids.numel():
        grid = (triton.cdiv(ids.numel(), 1024),)
        _note_written[grid](bits, ids, ids.numel(), count, BLOCK=1024)


def start_moves(
    slots: Tensor,  # [C, width] float32
    move_slots: Tensor,  # [cap] int32
    entering: Tensor,  # [cap] int32 or int64, -1 for none
    count: Tensor,  # [1] int32: the moves there are
    unwritten: Unwritten,
) -> None:
    """Start the entering rows that were never written."""
    width, tables = slots.shape[1], unwritten.kinds.numel()
    columns = triton.next_power_of_2(width)
    rows = max(1, _MOVED_FLOATS // columns)
    _start_moves[(min(_MOST_BLOCKS, triton.cdiv(max(1, entering.numel()), rows)),)](
        slots,
        move_slots,
        entering,
        count,
        unwritten.written,
        unwritten.bases,
        unwritten.kinds,
        unwritten.numbers,
        unwritten.padding,
        unwritten.words,
        unwritten.state,
        unwritten.made,
        tables,
        SEARCH=tables.bit_length(),
        WIDTH=width,
        DIM=width - unwritten.state.numel(),
        ROWS=rows,
        COLUMNS=columns,
        enable_fp_fusion=False,  # as where all rows are started
        num_warps=_MOVE_WARPS,
    )


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _unit_floats(row, word, column):
    """Uniform floats in [0, 1), hashed from (word, row, column)."""
    key = _mix64(row ^ word)
    x = key.to(tl.uint32) + ((key >> 32).to(tl.uint32) | 1) * column
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return (x >> 8).to(tl.float32) * (1.0 / (1 << 24))


@triton.jit
def _normal(mean, std, row, radius_word, angle_word, column):
    # 1 - u is exact, u being a multiple of 2**-24, so that this is the CPU's log1p(-u).
    u = _unit_floats(row, radius_word, column)
    radius = tl.sqrt_rn(-2 * tl.log(1 - u))
    angle = 6.2831854820251465 * _unit_floats(row, angle_word, column)
    return mean + std * radius * tl.cos(angle)


@triton.jit
def _start_rows(
    rows,
    state,
    integers,
    floats,
    total,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offset, a, b = tl.load(integers).to(tl.uint64), tl.load(floats), tl.load(floats + 1)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    # Only the block's first float is divided in 64 bits.
    first_row = first // WIDTH
    place = (first - first_row * WIDTH).to(tl.int32) + tl.arange(0, BLOCK)
    row, column = first_row + place // WIDTH, place % WIDTH
    number, hashed = row.to(tl.uint64) + offset, column.to(tl.uint32)
    if KIND == "uniform":
        weights = a + _unit_floats(number, tl.load(integers + 1).to(tl.uint64), hashed) * b
    elif KIND == "normal":
        radius, angle = tl.load(integers + 2).to(tl.uint64), tl.load(integers + 3).to(tl.uint64)
        weights = _normal(a, b, number, radius, angle, hashed)
    else:
        weights = a
    weights = tl.where(row == tl.load(integers + 4), 0.0, weights)
    is_state = column >= DIM
    states = tl.load(state + (column - DIM), mask=is_state, other=0.0)
    float_ = first + tl.arange(0, BLOCK)
    tl.store(rows + float_, tl.where(is_state, states, weights), mask=float_ < total)


@triton.jit(do_not_specialize=["total"])
def _note_written(written, ids, total, count, BLOCK: tl.constexpr):
    if count is not None:
        total = tl.minimum(total, tl.load(count))
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + place, mask=place < total, other=-1).to(tl.int64)
    set_written(written, row, row >= 0)


@triton.jit
def set_written(written, row, mask):
    """Note that rows are written."""
    bit = tl.full(row.shape, 1, tl.int32) << (row & 31).to(tl.int32)
    tl.atomic_or(written + (row >> 5), bit, mask=mask, sem="relaxed")


@triton.jit
def is_written(written, row, mask):
    """Whether rows were written."""
    word = tl.load(written + (row >> 5), mask=mask, other=0)
    return mask & (((word >> (row & 31).to(tl.int32)) & 1) != 0)


@triton.jit
def _word(words, table, mask, place: tl.constexpr):
    """One of the three words of each table, [n, 1]."""
    return tl.load(words + 3 * table + place, mask=mask, other=0).to(tl.uint64)[:, None]


@triton.jit
def _start_moves(
    slots, move_slots, entering, count, written, bases, kinds, numbers, padding, words, state, made,
    num_tables, SEARCH: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    total = tl.load(count)
    column = tl.arange(0, COLUMNS)[None, :]
    first = tl.program_id(0) * ROWS
    while first < total:
        move = first + tl.arange(0, ROWS)
        there = move < total
        row = tl.load(entering + move, mask=there, other=-1).to(tl.int64)
        there = there & (row >= 0)
        there = there & (is_written(written, row, there) == 0)
        ended = count_ends(bases + 1, row, there, num_tables, SEARCH)
        table = tl.minimum(ended, num_tables - 1)
        kind = tl.load(kinds + table, mask=there, other=0)[:, None]
        a = tl.load(numbers + 2 * table, mask=there, other=0.0)[:, None]
        b = tl.load(numbers + 2 * table + 1, mask=there, other=0.0)[:, None]
        number = (row - tl.load(bases + table, mask=there, other=0)).to(tl.uint64)[:, None]
        word = _word(words, table, there, 0)
        hashed = tl.zeros([ROWS, COLUMNS], tl.uint32) + column.to(tl.uint32)
        weights = tl.zeros([ROWS, COLUMNS], tl.float32) + a
        weights = tl.where(kind == 1, a + _unit_floats(number, word, hashed) * b, weights)
        if tl.max((kind == 2).to(tl.int32)) > 0:
            radius, angle = _word(words, table, there, 1), _word(words, table, there, 2)
            normal = _normal(a, b, number, radius, angle, hashed)
            weights = tl.where(kind == 2, normal, weights)
        zeros = tl.load(padding + table, mask=there, other=-1) == row
        weights = tl.where(zeros[:, None], 0.0, weights)
        is_state = (column >= DIM) & (column < WIDTH)
        states = tl.load(state + (column - DIM), mask=is_state, other=0.0)
        slot = tl.load(move_slots + move, mask=there, other=0).to(tl.int64)
        mask = there[:, None] & (column < WIDTH)
        tl.store(
            slots + slot[:, None] * WIDTH + column, tl.where(is_state, states, weights), mask=mask
        )
        tl.atomic_add(made, tl.sum(there.to(tl.int64), axis=0))
        first += tl.num_programs(0) * ROWS
