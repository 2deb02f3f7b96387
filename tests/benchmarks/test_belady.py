"""Look-ahead is counted against the least that any order of evictions can reach."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hotrow.data import ClickBatch
from hotrow.engine.strategy import STRATEGIES
from hotrow.sizing.reuse import belady as bound_of
from hotrow.sizing.reuse import next_uses_of
from hotrow.sizing.simulator import simulate


@pytest.fixture
def belady(load):
    return load("belady")


def test_hotrow_never_fetches_less_and_meets_the_bound_when_it_knows_everything(belady) -> None:
    generator = np.random.default_rng(0)
    batches = [np.unique(generator.zipf(1.3, 40) % 300).astype(np.int32) for _ in range(60)]
    least = bound_of(next_uses_of(batches, num_rows=300), [90]).misses[0]
    lookups = belady.Lookups(batches, None, 300, 0, len(batches))
    exact = replace(  # nothing pinned, no hold, and a ranking for each batch alone
        STRATEGIES["lookahead"],
        pinned_part=0.0,
        overlapped=False,
        eviction=replace(STRATEGIES["lookahead"].eviction, in_bulk=False),
    )
    for strategy, bound in ((exact, least), (STRATEGIES["lookahead"], None)):
        (found,) = simulate(lookups.tensors(60), num_rows=300, choices=[(strategy, 90)], depth=60)
        assert found.fetched_rows >= least
        assert bound is None or found.fetched_rows == bound


def test_slots_that_start_hot_hold_the_hottest_rows(belady) -> None:
    case = replace(belady.tiny(belady.CASES[-1]), slots=3000)
    assert case.starts_hot
    lookups = belady.lookups_of(case, counted=5)
    filling = sum(1 for _ in itertools.takewhile(lambda n: n < 3000, _rows_read(lookups.batches)))
    read_first = np.concatenate(lookups.batches[: filling + 1])
    assert np.array_equal(np.sort(read_first), np.sort(lookups.hottest.numpy()))
    assert filling + 1 < lookups.first < len(lookups.batches) - 5
    counts = np.bincount(np.concatenate(lookups.batches[filling + 1 :]), minlength=lookups.num_rows)
    order = lookups.hottest.numpy()
    assert counts[order[:300]].mean() > 2 * counts[order[-300:]].mean()


def _rows_read(batches: list[np.ndarray]) -> list[int]:
    return np.cumsum([len(each) for each in batches]).tolist()


def test_simulations_count_only_what_they_are_asked_for(belady) -> None:
    case = belady.tiny(belady.CASES[0])
    lookups = belady.lookups_of(case, counted=7)
    rows, _ = belady.planned(case, lookups, belady.Choice("lru", STRATEGIES["lru"]))
    unique = np.mean([len(each) for each in lookups.batches[lookups.first : lookups.first + 7]])
    assert 0 < rows < unique


def test_results_are_written_and_said(belady, load, tmp_path, capsys, monkeypatch) -> None:
    command = ["belady.py", "--smoke", "--only", "kaggle-2", "--depths", "1", "20", "--counted"]
    monkeypatch.setattr("sys.argv", [*command, "5", "--results", str(tmp_path)])
    belady.main()
    lines = load("harness").read_results(tmp_path / "belady.jsonl")
    assert [line["system"] for line in lines] == ["belady", "lookahead-1", "lookahead-20", "lru"]
    over = [line["over_belady"] for line in lines]
    assert over[0] == 1 <= over[2] < over[1]
    assert "kaggle-2   lru" in capsys.readouterr().out


def test_batches_are_those_of_the_benchmarks_trace(belady, load) -> None:
    case = belady.tiny(belady.CASES[0])
    lookups = belady.lookups_of(case, counted=3)
    setting = case.setting
    trace = load("traces").Trace(
        setting.rows, steps=2, batch=setting.batch, skew=setting.skew, lock=False
    )
    for batch, mine in zip(trace.batches(0, 2), lookups.batches, strict=False):
        assert isinstance(batch, ClickBatch)
        bases = np.cumsum([0, *setting.rows[:-1]])
        assert len(np.unique(batch.sparse.numpy() + bases)) == len(mine)
    trace.close()
