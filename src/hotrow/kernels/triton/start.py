"""The starting rows of a table, written by the GPU where they lie.

A weight is a function of (seed, id, column): the integer hash of `hotrow.store`, so that uniform
and constant rows have the CPU's bits, and normal ones the CPU's values up to rounding. Knows
neither tables nor how a seed becomes the 64-bit words that are mixed with the ids.

`rows` is device memory, or page-locked host memory. Programs write its floats in order, whatever
the width, so that whole lines cross the link.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_NO_ROW = -1


def start_constant(
    rows: Tensor,  # [n, width] float32
    state: Tensor,  # [width - dim] float32, on the device: what each state column starts at
    *,
    value: float,
    padding: int = _NO_ROW,  # a row whose weights are zero
) -> None:
    """Weights that are all the same."""
    _start(rows, state, padding, kind="constant", first_id=0, words=(0, 0), a=value, b=0.0)


def start_uniform(
    rows: Tensor,  # [n, width] float32: of the ids first_id, first_id + 1, ...
    state: Tensor,
    *,
    first_id: int,
    word: int,
    low: float,
    high: float,
    padding: int = _NO_ROW,
) -> None:
    """Weights uniform between low and high."""
    _start(
        rows,
        state,
        padding,
        kind="uniform",
        first_id=first_id,
        words=(word, 0),
        a=low,
        b=high - low,
    )


def start_normal(
    rows: Tensor,  # [n, width] float32: of the ids first_id, first_id + 1, ...
    state: Tensor,
    *,
    first_id: int,
    words: tuple[int, int],
    mean: float,
    std: float,
    padding: int = _NO_ROW,
) -> None:
    """Weights from a normal distribution: `words` for the radius and for the angle."""
    _start(rows, state, padding, kind="normal", first_id=first_id, words=words, a=mean, b=std)


def _start(
    rows: Tensor,
    state: Tensor,
    padding: int,
    *,
    kind: str,
    first_id: int,
    words: tuple[int, int],
    a: float,
    b: float,
) -> None:
    assert rows.dtype is state.dtype is torch.float32
    assert rows.is_contiguous()
    width = rows.shape[1]
    if rows.numel() == 0:
        return
    # In tensors: the kernel would otherwise be compiled for each range of the integers' values.
    integers = torch.tensor([first_id, *map(_signed, words), padding])
    floats = torch.tensor([a, b], dtype=torch.float32)
    _start_rows[(triton.cdiv(rows.numel(), _BLOCK),)](
        rows,
        state,
        integers.to(state.device),
        floats.to(state.device),
        rows.numel(),
        KIND=kind,
        WIDTH=width,
        DIM=width - state.numel(),
        BLOCK=_BLOCK,
        # A fused multiply and add would round once where numpy rounds twice.
        enable_fp_fusion=False,
    )


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _unit_floats(ids, word, column):
    """Uniform floats in [0, 1), hashed from (word, id, column)."""
    key = _mix64(ids ^ word)
    x = key.to(tl.uint32) + ((key >> 32).to(tl.uint32) | 1) * column
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return (x >> 8).to(tl.float32) * (1.0 / (1 << 24))


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
    first_id, a, b = tl.load(integers).to(tl.uint64), tl.load(floats), tl.load(floats + 1)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    # Only the block's first float is divided in 64 bits.
    first_row = first // WIDTH
    place = (first - first_row * WIDTH).to(tl.int32) + tl.arange(0, BLOCK)
    row, column = first_row + place // WIDTH, place % WIDTH
    ids, hashed = row.to(tl.uint64) + first_id, column.to(tl.uint32)
    if KIND == "uniform":
        weights = a + _unit_floats(ids, tl.load(integers + 1).to(tl.uint64), hashed) * b
    elif KIND == "normal":
        # 1 - u is exact, u being a multiple of 2**-24, so that this is the CPU's log1p(-u).
        u = _unit_floats(ids, tl.load(integers + 1).to(tl.uint64), hashed)
        radius = tl.sqrt_rn(-2 * tl.log(1 - u))
        angle = 6.2831854820251465 * _unit_floats(ids, tl.load(integers + 2).to(tl.uint64), hashed)
        weights = a + b * radius * tl.cos(angle)
    else:
        weights = a
    weights = tl.where(row == tl.load(integers + 3), 0.0, weights)
    is_state = column >= DIM
    states = tl.load(state + (column - DIM), mask=is_state, other=0.0)
    float_ = first + tl.arange(0, BLOCK)
    tl.store(rows + float_, tl.where(is_state, states, weights), mask=float_ < total)
