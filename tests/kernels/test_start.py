"""Rows that the GPU starts are the rows that the CPU starts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.inputs.tables import Init, group_by_width
from hotrow.kernels.triton.start import Beginning, start_rows
from hotrow.store.ram import host_rows, initialise, seed_words, start_weights

SEED = 5


def started(
    init: Init, shape: tuple[int, int], device: torch.device, first_row: int, seed: int = SEED
) -> Tensor:
    rows = torch.full(shape, torch.nan, device=device)
    words = seed_words(seed, "t", shape[1])
    state = torch.zeros(0, device=device)
    start_rows(rows, state, beginning(init), words, first_row=first_row)
    return rows.cpu()


def beginning(init: Init, padding: int = -1) -> Beginning:
    if isinstance(init, hotrow.Uniform):
        return Beginning("uniform", (init.low, init.high - init.low), padding)
    if isinstance(init, hotrow.Normal):
        return Beginning("normal", (init.mean, init.std), padding)
    assert isinstance(init, hotrow.Constant)
    return Beginning("constant", (init.value, 0.0), padding)


def same_bits(rows: Tensor, other: Tensor) -> bool:
    return torch.equal(rows.view(torch.int32), other.view(torch.int32))


FIRST_ROWS = [0, 1234, 2**31 - 3, 2**32 - 3, 2**40 + 7]
CASES = [
    *(
        (hotrow.Uniform(-0.37, 0.21), (n, dim), 1234)
        for n in (1, 100)
        for dim in (1, 3, 31, 64, 65)
    ),
    *((hotrow.Uniform(-1 / 3, 0.1), (8, 20), first) for first in FIRST_ROWS),
    # Many values, so that one rounding instead of two would show.
    *((hotrow.Uniform(-x, x / 3), (512, 64), 0) for x in (1e-42, 3e-5, 1 / 7, 2.4e38)),
    *((hotrow.Constant(x), (30, 7), 0) for x in (0.75, -0.0, 0.1, float("inf"))),
]


@pytest.mark.parametrize(("init", "shape", "first"), CASES)
def test_rows_have_the_cpus_bits(
    init: Init, shape: tuple[int, int], first: int, device: torch.device
) -> None:
    for seed in (SEED, SEED + 1):
        got = started(init, shape, device, first, seed)
        last = first + shape[0]
        assert same_bits(got, start_weights(init, shape[1], first, last, table="t", seed=seed))


def test_words_with_and_without_their_highest_bit_are_tried() -> None:
    assert {seed_words(seed, "t", 20)[0] >> 63 for seed in (SEED, SEED + 1)} == {0, 1}


@pytest.mark.parametrize("dim", [3, 64])
def test_normal_rows_have_the_cpus_values(dim: int, device: torch.device) -> None:
    init = hotrow.Normal(0.1, 2.0)
    got = started(init, (600, dim), device, 77)
    want = start_weights(init, dim, 77, 677, table="t", seed=SEED)
    # The cosine near its zeros has the angle's rounding, at most 2**-22, times the radius.
    torch.testing.assert_close(got, want, rtol=1e-6, atol=5e-6)


def test_a_table_among_others_starts_as_the_store_starts_it(device: torch.device) -> None:
    """With state columns, a padding row, and nothing written beside it."""
    inits = [hotrow.Uniform(-0.5, 0.25), None, hotrow.Constant(0.5)]
    tables = [
        hotrow.EmbeddingBagConfig(f"t{i}", 40 + i, 6, [f"f{i}"], init=init, padding_idx=9)
        for i, init in enumerate(inits)
    ]
    (group,) = group_by_width(tables)
    want = host_rows(group.num_rows, 9)
    initialise(want, group, [0.5, 7.0, -0.0], SEED)
    got = torch.full((group.num_rows, 9), torch.nan, device=device)
    state = torch.tensor([0.5, 7.0, -0.0], device=device)
    for table, base in zip(group.tables, group.bases, strict=True):
        rows, words = got[base : base + table.num_embeddings], seed_words(SEED, table.name, 6)
        start_rows(rows, state, beginning(table.start, padding=9), words)
        assert bool(got[base + table.num_embeddings :].isnan().all())
    assert same_bits(got.cpu(), want)
