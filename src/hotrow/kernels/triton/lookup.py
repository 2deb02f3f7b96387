"""Reading rows: one vector per bag, and the gradients of per-sample weights.

Knows slots and bags; nothing of ids, of how rows came to their slots, or of what follows. A
bag's bits depend on the bag alone: lookups are added one after the other, columns by halving,
and no multiply is fused with an add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

EXACT = {"enable_fp_fusion": False}  # of every launch: each operation rounds by itself


def pool(
    rows: Tensor,  # [C + 1, width] float32: the last is the null slot, zero
    slots: Tensor,  # [L] int32
    offsets: Tensor | None,  # [bags + 1]; None: one lookup per bag
    weights: Tensor | None,  # [L] float32
    divisor: Tensor | None,  # [bags, 1] float32
    dim: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """One vector per bag: the (weighted) sum of its lookups, divided where a mean is asked."""
    num_bags = slots.numel() if offsets is None else offsets.numel() - 1
    out = torch.empty(num_bags, dim, dtype=dtype, device=rows.device)
    if num_bags == 0:
        return out
    columns = triton.next_power_of_2(dim)
    if offsets is None:
        assert weights is None
        assert divisor is None
        tile = tile_rows(columns, elements=2048)
        _gather[(triton.cdiv(num_bags, tile),)](
            *(rows, rows.stride(0), slots, out, out.stride(0), num_bags),
            *(dim, columns, tile),
            num_warps=4,
            **EXACT,
        )
        return out
    tile = tile_rows(columns)
    _pool_bags[(triton.cdiv(num_bags, tile),)](
        *(rows, rows.stride(0), slots, offsets, weights, divisor),
        *(out, out.stride(0), num_bags),
        *(dim, columns, tile),
        num_warps=tile_warps(columns),
        **EXACT,
    )
    return out


def weight_grads(
    rows: Tensor,  # [C + 1, width] float32
    slots: Tensor,  # [L] int32
    bag_of: Tensor | None,  # [L]; None: the lookup is the bag
    grads: Tensor,  # [bags, dim] float32 or bfloat16
    dim: int,
) -> Tensor:
    """The gradient of each per-sample weight, [L] float32: its row times its bag's gradient."""
    num_lookups = slots.numel()
    out = torch.empty(num_lookups, dtype=torch.float32, device=rows.device)
    if num_lookups == 0:
        return out
    columns = triton.next_power_of_2(dim)
    tile = tile_rows(columns)
    _weight_grads[(triton.cdiv(num_lookups, tile),)](
        *(rows, rows.stride(0), slots, bag_of, grads.contiguous(), out, num_lookups),
        *(dim, columns, tile),
        num_warps=tile_warps(columns),
        **EXACT,
    )
    return out


def tile_rows(columns: int, elements: int = 256) -> int:
    """How many rows a program takes: small tiles, so that a long run holds up few others."""
    return max(1, elements // max(8, columns))


def tile_warps(columns: int) -> int:
    """One warp for a tile of `tile_rows`, unless a single row is wide."""
    return max(1, min(8, columns // 256))


@triton.jit
def sum_columns(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] -> [ROWS, 1] by halving: tl.sum would add in an order of its own."""
    for half in tl.static_range(COLUMNS.bit_length() - 1):
        values = tl.sum(tl.reshape(values, [ROWS, 2, COLUMNS >> (half + 1)]), axis=1)
    return tl.reshape(values, [ROWS, 1])


@triton.jit(do_not_specialize=["num_bags"])
def _gather(
    rows,
    width,
    slots,
    out,
    out_width,
    num_bags,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    bag = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, COLUMNS)[None, :]
    slot = tl.load(slots + bag, mask=bag < num_bags, other=0)
    vectors = _read(rows, width, slot, bag < num_bags, DIM, COLUMNS)
    to = out + bag.to(tl.int64)[:, None] * out_width + column
    mask = (bag < num_bags)[:, None] & (column < DIM)
    tl.store(to, vectors.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _read(rows, width, slot, is_there, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """The vectors at some slots, zero where there is none: [n, COLUMNS]."""
    column = tl.arange(0, COLUMNS)[None, :]
    at = rows + slot.to(tl.int64)[:, None] * width + column
    return tl.load(at, mask=is_there[:, None] & (column < DIM), other=0.0)


@triton.jit
def _times(vectors, weights, position, is_there):
    if weights is not None:
        vectors = vectors * tl.load(weights + position, mask=is_there, other=0.0)[:, None]
    return vectors


@triton.jit(do_not_specialize=["num_bags"])
def _pool_bags(
    rows,
    width,
    slots,
    offsets,
    weights,
    divisor,
    out,
    out_width,
    num_bags,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    bag = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_here = bag < num_bags
    start = tl.load(offsets + bag, mask=is_here, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=is_here, other=0).to(tl.int64)
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    # Four at a time, so that their loads are under way together; added one after the other.
    # Only a number is carried along: of tensors, the layout would be changed in every round.
    longest = tl.max(end - start, axis=0)
    done = 0
    while done < longest:
        at = start + done
        slot_a = tl.load(slots + at, mask=at < end, other=0)
        slot_b = tl.load(slots + at + 1, mask=at + 1 < end, other=0)
        slot_c = tl.load(slots + at + 2, mask=at + 2 < end, other=0)
        slot_d = tl.load(slots + at + 3, mask=at + 3 < end, other=0)
        a = _read(rows, width, slot_a, at < end, DIM, COLUMNS)
        b = _read(rows, width, slot_b, at + 1 < end, DIM, COLUMNS)
        c = _read(rows, width, slot_c, at + 2 < end, DIM, COLUMNS)
        d = _read(rows, width, slot_d, at + 3 < end, DIM, COLUMNS)
        total += _times(a, weights, at, at < end)
        total += _times(b, weights, at + 1, at + 1 < end)
        total += _times(c, weights, at + 2, at + 2 < end)
        total += _times(d, weights, at + 3, at + 3 < end)
        done += 4
    if divisor is not None:
        total = tl.div_rn(total, tl.load(divisor + bag, mask=is_here, other=1.0)[:, None])
    column = tl.arange(0, COLUMNS)[None, :]
    to = out + bag.to(tl.int64)[:, None] * out_width + column
    tl.store(to, total.to(out.dtype.element_ty), mask=is_here[:, None] & (column < DIM))


@triton.jit(do_not_specialize=["num_lookups"])
def _weight_grads(
    rows,
    width,
    slots,
    bag_of,
    grads,
    out,
    num_lookups,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    position = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_here = position < num_lookups
    column = tl.arange(0, COLUMNS)[None, :]
    mask = is_here[:, None] & (column < DIM)
    if bag_of is None:
        bag = position.to(tl.int64)
    else:
        bag = tl.load(bag_of + position, mask=is_here, other=0).to(tl.int64)
    grad = tl.load(grads + bag[:, None] * DIM + column, mask=mask, other=0.0).to(tl.float32)
    slot = tl.load(slots + position, mask=is_here, other=0)
    products = sum_columns(_read(rows, width, slot, is_here, DIM, COLUMNS) * grad, TILE, COLUMNS)
    tl.store(out + position[:, None], products, mask=is_here[:, None])
