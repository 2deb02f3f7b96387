"""Rows that take over slots in a GPU's map, by kernels that call the map's own functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.triton import maps


@triton.jit
def leave(slots, row_of_slot, table, left, count, size, bits, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + place, mask=place < count, other=0)
    row = tl.load(row_of_slot + slot, mask=place < count, other=-1)
    tombstones = maps.remove(row, slot, row >= 0, table, size, bits, True)
    tl.store(left + place, tombstones, mask=place < count)


@triton.jit
def enter(slots, rows, row_of_slot, table, spare, left, count, size, bits, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    slot = tl.load(slots + place, mask=mask, other=0)
    row = tl.load(rows + place, mask=mask, other=0)
    tl.store(row_of_slot + slot, row, mask=mask)
    taken_over = maps.insert(row, slot, mask, table, spare, size, bits, True)
    tl.store(left + place, tl.load(left + place, mask=mask, other=0) - taken_over, mask=mask)


def replace_rows(found: maps.DeviceMap, slots: Tensor, rows: Tensor) -> Tensor:
    """Other rows take over some slots; how many tombstones are left by each, or taken over."""
    left = torch.zeros_like(slots)
    grid, where = (triton.cdiv(len(slots), 32),), (found.row_of_slot, found.table)
    sizes = (len(slots), found.size, found.bits)
    leave[grid](slots, *where, left, *sizes, BLOCK=32)
    enter[grid](slots, rows, *where, found.spare, left, *sizes, BLOCK=32)
    return left
