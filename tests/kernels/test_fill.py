"""Rows that the GPU moves itself are the rows that the specification moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hotrow.kernels import reference
from hotrow.kernels.reference import Moves
from hotrow.kernels.triton.fill import _pieces, fill, gather, scatter

NUM_ROWS, NUM_SLOTS = 700, 300
WIDTHS = [1, 3, 4, 31, 64, 65, 68, 129, 192, 384]


def host(rows: Tensor, device: torch.device) -> Tensor:
    """Rows where the kernels expect the store."""
    return rows.pin_memory() if device.type == "cuda" else rows.clone()


def bits(rows: Tensor) -> Tensor:
    return rows.cpu().view(torch.int32)


def any_bits(*shape: int) -> Tensor:
    """Every kind of float: payloads of NaN, -0.0, subnormal numbers."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int().view(torch.float32)


def some_moves(count: int, kinds: str = "mixed") -> Moves:
    """Each slot and each row once; of five moves one only leaves, one only enters, one stays."""
    slots = torch.randperm(NUM_SLOTS)[:count]
    rows = torch.randperm(NUM_ROWS)
    leaving, entering = rows[:count].clone(), rows[-count:].clone() if count else rows[:0].clone()
    if kinds == "mixed":
        leaving[0::5] = -1
        entering[1::5] = -1
        entering[2::5] = leaving[2::5]
        leaving[3::25] = entering[3::25] = -1
    return Moves(slots, leaving, entering)


def pad(values: Tensor, cap: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Capacity beyond what there is holds numbers that would do harm."""
    out = torch.randint(0, 100, (cap,), dtype=dtype)
    out[: values.numel()] = values
    return out.to(device)


def check_fill(
    moves: Moves, width: int, device: torch.device, *, ids: torch.dtype = torch.int32, **how: Any
) -> None:
    slots, store = any_bits(NUM_SLOTS + 1, width), any_bits(NUM_ROWS, width)
    got_slots, got_store = slots.to(device, copy=True), host(store, device)
    count, cap = moves.slots.numel(), moves.slots.numel() + 37
    fill(
        got_slots,
        got_store,
        pad(moves.slots, cap, torch.int32, device),
        pad(moves.leaving, cap, ids, device),
        pad(moves.entering, cap, ids, device),
        torch.tensor([count], dtype=torch.int32, device=device),
        **how,
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    want_slots, want_store = slots.view(torch.int32), store.view(torch.int32)
    reference.fill(want_slots, want_store, moves)
    assert torch.equal(bits(got_slots), want_slots)
    assert torch.equal(bits(got_store), want_store)


CASES = [
    *((257, width, {}) for width in WIDTHS),
    *((n, 192, {"blocks": b}) for n in (0, 1, 63, 300) for b in (1, 5)),
    (100, 16, {"ids": torch.int64}),
]


@pytest.mark.parametrize(("count", "width", "how"), CASES)
def test_fill_moves_what_the_specification_moves(
    count: int, width: int, how: dict[str, Any], device: torch.device
) -> None:
    check_fill(some_moves(count), width, device, **how)


def test_rows_lie_beyond_32_bits_of_bytes_and_of_floats(device: torch.device) -> None:
    """A store of 8 GiB of which two rows are touched."""
    width, far = 64, 34_000_000
    if device.type == "cuda":
        pytest.skip("page-locked memory is touched memory; the interpreter's is not")
    from hotrow.store.ram import host_rows

    store = host_rows(far + 1, width)
    store[far] = torch.arange(width)
    slots = torch.full((2, width), 7.0)
    one = torch.ones(1, dtype=torch.int32)
    fill(slots, store, one, one * (far - 1), one * far, one)
    assert torch.equal(slots[1], torch.arange(width).float())
    assert bool((store[far - 1] == 7).all())


# -- gather and scatter ------------------------------------------------------------------


@pytest.mark.parametrize("ids_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("width", [1, 5, 64, 65, 192])
def test_rows_are_copied_by_id(width: int, ids_type: torch.dtype, device: torch.device) -> None:
    store, rows = any_bits(NUM_ROWS, width), any_bits(200, width)
    ids = torch.randperm(NUM_ROWS)[:200].to(ids_type)
    ids[::7] = -1
    moves = ids >= 0
    out = rows.to(device, copy=True)
    gather(host(store, device), ids.to(device), out, blocks=3)
    want = torch.where(moves[:, None], bits(store)[ids.long()], bits(rows))
    assert torch.equal(bits(out), want)
    got, want = host(store, device), bits(store).clone()
    scatter(got, ids.to(device), rows.to(device), blocks=3)
    if device.type == "cuda":
        torch.cuda.synchronize()
    want[ids[moves].long()] = bits(rows)[moves]
    assert torch.equal(bits(got), want)


def test_pieces_cover_a_row_and_leave_little_idle() -> None:
    for width in range(1, 600):
        piece, pieces = _pieces(width)
        assert piece & (piece - 1) == 0
        assert width <= piece * pieces <= width * 9 / 8
        assert piece * (pieces - 1) < width
