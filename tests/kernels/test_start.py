"""Rows that the GPU starts are the rows that the CPU starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.inputs.tables import group_by_width
from hotrow.kernels.triton import start
from hotrow.kernels.triton.start import start_constant, start_normal, start_uniform
from hotrow.store.ram import host_rows, initialise, seed_words, start_weights

SEED = 5


def empty(num_rows: int, width: int, device: torch.device) -> Tensor:
    return torch.full((num_rows, width), torch.nan, device=device)


def state(device: torch.device, *values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def uniform(rows: Tensor, init: hotrow.Uniform, first_row: int, seed: int = SEED) -> Tensor:
    dim = rows.shape[1]
    start_uniform(
        rows,
        state(rows.device),
        first_row=first_row,
        word=seed_words(seed, "t", dim)[0],
        low=init.low,
        high=init.high,
    )
    return rows.cpu()


@pytest.mark.parametrize("dim", [1, 3, 16, 31, 64, 65])
@pytest.mark.parametrize("num_rows", [1, 100])
def test_uniform_rows_have_the_cpus_bits(dim: int, num_rows: int, device: torch.device) -> None:
    init = hotrow.Uniform(-0.37, 0.21)
    got = uniform(empty(num_rows, dim, device), init, 1234)
    want = start_weights(init, dim, 1234, 1234 + num_rows, table="t", seed=SEED)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("first_row", [0, 2**31 - 3, 2**32 - 3, 2**40 + 7])
@pytest.mark.parametrize("seed", range(4))  # half of the words have the highest bit
def test_uniform_rows_have_the_cpus_bits_for_any_row(
    first_row: int, seed: int, device: torch.device
) -> None:
    init = hotrow.Uniform(-1 / 3, 0.1)
    got = uniform(empty(8, 20, device), init, first_row, seed)
    want = start_weights(init, 20, first_row, first_row + 8, table="t", seed=seed)
    assert torch.equal(got, want)


def test_words_with_and_without_their_highest_bit_are_tried() -> None:
    assert {seed_words(seed, "t", 20)[0] >> 63 for seed in range(4)} == {0, 1}


@pytest.mark.parametrize("bound", [1e-42, 3e-5, 1 / 7, 2.4e38])
def test_uniform_rows_round_twice_as_on_the_cpu(bound: float, device: torch.device) -> None:
    """Many values, so that one rounding instead of two would show."""
    init = hotrow.Uniform(-bound, bound / 3)
    got = uniform(empty(512, 64, device), init, 0)
    assert torch.equal(got, start_weights(init, 64, 0, 512, table="t", seed=SEED))


@pytest.mark.parametrize("dim", [3, 64])
def test_normal_rows_have_the_cpus_values(dim: int, device: torch.device) -> None:
    rows = empty(600, dim, device)
    _, *words = seed_words(SEED, "t", dim)
    start_normal(rows, state(device), first_row=77, words=tuple(words), mean=0.1, std=2.0)
    want = start_weights(hotrow.Normal(0.1, 2.0), dim, 77, 677, table="t", seed=SEED)
    # The cosine near its zeros has the angle's rounding, at most 2**-22, times the radius.
    torch.testing.assert_close(rows.cpu(), want, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("value", [0.75, -0.0, 0.1, float("inf")])
def test_constant_rows_have_the_cpus_bits(value: float, device: torch.device) -> None:
    rows = empty(30, 7, device)
    start_constant(rows, state(device), value=value)
    want = start_weights(hotrow.Constant(value), 7, 0, 30)
    assert torch.equal(rows.cpu().view(torch.int32), want.view(torch.int32))


def test_a_table_among_others_starts_as_the_store_starts_it(device: torch.device) -> None:
    """With state columns, a padding row, and nothing written beside it."""
    inits: list[Any] = [hotrow.Uniform(-0.5, 0.25), None, hotrow.Constant(0.5)]
    tables = [
        hotrow.EmbeddingBagConfig(f"t{i}", 40 + i, 6, [f"f{i}"], init=init, padding_idx=9)
        for i, init in enumerate(inits)
    ]
    (group,) = group_by_width(tables)
    want = host_rows(group.num_rows, 9)
    initialise(want, group, [0.5, 7.0, -0.0], SEED)
    got = empty(group.num_rows, 9, device)
    for table, base in zip(group.tables, group.bases, strict=True):
        rows, first = got[base : base + table.num_embeddings], state(device, 0.5, 7.0, -0.0)
        init = table.start
        if isinstance(init, hotrow.Uniform):
            word = seed_words(SEED, table.name, 6)[0]
            start_uniform(rows, first, word=word, low=init.low, high=init.high, padding=9)
        else:
            start_constant(rows, first, value=init.value, padding=9)
        after = got[base + table.num_embeddings :]
        assert bool(after.isnan().all())
    assert torch.equal(got.cpu().view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("width", [1, 5, 64, 127])
def test_rows_do_not_depend_on_the_size_of_blocks(
    width: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = hotrow.Uniform(-1.0, 1.0)
    whole = uniform(empty(33, width, device), init, 3)
    for floats in (128, 1024):
        monkeypatch.setattr(start, "_BLOCK", floats)
        assert torch.equal(uniform(empty(33, width, device), init, 3), whole)
