"""Rows start by (seed, table name, row) alone, and the store keeps what it is given."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.inputs.tables import group_by_width
from hotrow.store.ram import Store, host_rows, initialise, start_weights

INITS: dict[str, Any] = {
    "uniform": hotrow.Uniform(-0.5, 0.25),
    "normal": hotrow.Normal(0.1, 2.0),
    "constant": hotrow.Constant(0.75),
    "function": lambda rows: rows[:, None] * torch.tensor([1.0, -1.0, 0.5]),
}


def rows_of(
    *sizes: int,
    init: Any = None,
    dim: int = 3,
    seed: int = 5,
    padding: int | None = None,
    chunk_floats: int = 1 << 20,
) -> Tensor:
    """The rows of tables that lie side by side, with two columns of state."""
    tables = [
        hotrow.EmbeddingBagConfig(f"t{i}", n, dim, [f"f{i}"], init=init, padding_idx=padding)
        for i, n in enumerate(sizes)
    ]
    (group,) = group_by_width(tables)
    rows = host_rows(group.num_rows, dim + 2)
    initialise(rows, group, [0.5, 7.0], seed, chunk_floats=chunk_floats)
    return rows


# -- a function of (seed, table name, row) ----------------------------------------------


@pytest.mark.parametrize("init", INITS)
def test_rows_do_not_depend_on_the_size_of_chunks_or_the_number_of_threads(init: str) -> None:
    whole, threads = rows_of(100, 57, init=INITS[init]), torch.get_num_threads()
    try:
        for floats, number in ((1, 1), (7, 4), (64, 4)):
            torch.set_num_threads(number)
            cut = rows_of(100, 57, init=INITS[init], chunk_floats=floats)
            assert torch.equal(cut, whole)
    finally:
        torch.set_num_threads(threads)


# -- what the starts look like -----------------------------------------------------------


def test_uniform_rows_fill_their_range_evenly() -> None:
    values = start_weights(hotrow.Uniform(-2.0, 6.0), 64, 0, 4000).flatten()
    assert float(values.min()) >= -2
    assert float(values.max()) <= 6
    shares = torch.histc(values, bins=16, min=-2, max=6) / values.numel()
    assert float((shares * 16 - 1).abs().max()) < 0.04  # five standard deviations


def test_normal_rows_have_the_mean_and_spread_asked_for() -> None:
    values = start_weights(hotrow.Normal(1.0, 2.0), 64, 0, 20_000).double().flatten()
    assert bool(values.isfinite().all())
    standard = (values - 1) / 2
    bound = 5 / values.numel() ** 0.5
    assert abs(float(standard.mean())) < bound
    assert abs(float(standard.std()) - 1) < bound
    assert abs(float((standard**3).mean())) < 4 * bound
    assert abs(float((standard**4).mean()) - 3) < 10 * bound


@pytest.mark.parametrize("init", [hotrow.Uniform(-1.0, 1.0), hotrow.Normal()], ids=str)
def test_neighbouring_rows_and_columns_have_nothing_in_common(init: Any) -> None:
    values = start_weights(init, 64, 0, 4000).double()
    values = (values - values.mean()) / values.std()
    bound = 5 / values.numel() ** 0.5
    for shift, along in ((1, 0), (1, 1), (2, 1), (64, 0)):
        assert abs(float((values * values.roll(shift, along)).mean())) < bound


def test_no_two_rows_start_alike() -> None:
    rows = start_weights(hotrow.Uniform(-1.0, 1.0), 4, 0, 50_000)
    assert rows.unique(dim=0).shape[0] == 50_000


def test_tables_start_as_their_settings_say() -> None:
    values = rows_of(10_000)[:, :3]
    assert 0.0099 < float(values.abs().max()) <= 0.01  # one over the root of its rows
    assert bool((rows_of(10, init=hotrow.Constant(0.25))[:, :3] == 0.25).all())
    rows = rows_of(50, 20, padding=7)
    assert (rows[:, :3] == 0).all(1).nonzero().flatten().tolist() == [7, 57]
    assert bool((rows[:, 3] == 0.5).all())
    assert bool((rows[:, 4] == 7.0).all())


def test_an_accumulator_starts_at_its_initial_value() -> None:
    embedding = hotrow.EmbeddingBagCollection(
        [hotrow.EmbeddingBagConfig("a", 20, 4, ["f"])],
        hotrow.Adagrad(initial_accumulator_value=0.1),
        strategy="all-fast",
    )
    assert bool((embedding.optimizer.state_dict()["state"]["a"]["sum"] == 0.1).all())


# -- a start the user writes -------------------------------------------------------------


def test_a_function_sees_row_numbers_within_its_table() -> None:
    rows = rows_of(4, 3, init=lambda numbers: numbers[:, None].double().expand(-1, 3) / 3)
    assert torch.equal(rows[:, 2], torch.tensor([0, 1, 2, 3, 0, 1, 2]) / 3)


@pytest.mark.parametrize(
    ("init", "got"),
    [
        (lambda rows: torch.zeros(len(rows), 4), r"torch.Size\(\[10, 4\]\)"),
        (lambda rows: torch.zeros(3), r"torch.Size\(\[3\]\)"),
        (lambda rows: [0.0] * len(rows), "list"),
    ],
    ids=["too wide", "one dimension", "no tensor"],
)
def test_a_function_that_returns_another_shape_is_refused(init: Any, got: str) -> None:
    with pytest.raises(ValueError, match=rf"init must return .* \[10, 3\] .* got {got}"):
        rows_of(10, init=init)


# -- read and write ----------------------------------------------------------------------


def test_rows_are_read_in_the_order_asked_and_written_to_their_places() -> None:
    rows = rows_of(20)
    before, out = rows.clone(), torch.empty(3, 5)
    assert Store(rows).read(torch.tensor([7, 0, 7]), out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, rows[[7, 0, 7]])
    Store(rows).write(torch.tensor([7, 2]), torch.full((2, 5), 3.0))
    assert (rows != before).any(1).nonzero().squeeze(1).tolist() == [2, 7]
    assert bool((rows[[2, 7]] == 3).all())
    assert torch.equal(host_rows(30, 4), torch.zeros(30, 4))


# -- memory ------------------------------------------------------------------------------


@pytest.mark.slow
def test_making_a_large_store_takes_no_second_copy() -> None:
    script = """
    import torch
    from hotrow import Uniform, EmbeddingBagConfig
    from hotrow.store.ram import host_rows, initialise
    from hotrow.inputs.tables import group_by_width

    def peak():
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def make(rows):
        (group,) = group_by_width([EmbeddingBagConfig("a", rows, 62, ["f"])])
        made = host_rows(rows, 64)
        initialise(made, group, [0.0, 0.0], 0)
        return made

    make(1000)  # whatever libraries load on their first use
    before = peak()
    rows = make(1 << 19)
    assert rows.numel() * 4 == 128 * 2**20
    print((peak() - before) / (128 * 2**10))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert 0.9 < float(done.stdout) < 1.5


def test_more_rows_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.support.host_memory.available_bytes", lambda: 10_000)
    tables = [hotrow.EmbeddingBagConfig("t", 1000, 16, ["f"])]
    message = r"1,000 rows of 32 floats need 125.0 KiB of host memory, and 9.8 KiB are available"
    for strategy in ("lookahead", "all-fast", "hybrid"):
        with pytest.raises(ValueError, match=message):
            hotrow.EmbeddingBagCollection(tables, hotrow.Adagrad(lr=0.1), "50%", strategy=strategy)
