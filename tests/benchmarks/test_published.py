"""Published systems beside their bars: the arithmetic by hand, and both benchmarks in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


def line(ms: float, **facts: Any) -> dict[str, Any]:
    return {"setting": {"batch": 1000}, "step_ms": {"p50": ms}, "facts": facts}


def test_ratios_stand_beside_what_was_published_and_what_is_possible(load) -> None:
    bars = load("bars")
    lines = {
        "hybrid-plain": line(40.0),
        "hybrid": line(4.0),
        "all-fast": line(1.0),
        "fae": line(4.0, hot_share=0.5, dropped_share=0.0),
        "static-hybrid": line(3.0),
        "scratchpipe": line(1.5, bound_ms=0.5),
        "slipstream-fae": line(3.2, dropped_share=0.2),
    }
    found = {(each.system, each.over): each for each in bars.ratios(lines)}
    assert found["fae", "hybrid"].value == 1
    assert found["fae", "hybrid"].bound == pytest.approx(4 / (0.5 * 1 + 0.5 * 4))
    assert found["fae", "hybrid-plain"].bound == pytest.approx(40 / 2.5)
    assert found["fae", "hybrid-plain"].published == 1.52
    assert str(found["fae", "hybrid-plain"]) == (
        "10.00 times hybrid-plain, published 1.52, bound 16.00"
    )
    assert ("fae", "cpu") not in found  # which was not measured
    assert found["scratchpipe", "static-hybrid"].value == 2
    assert found["scratchpipe", "static-hybrid"].bound == 3  # rows take less than all-fast does
    assert found["slipstream-fae", "fae"].value == pytest.approx(1.25)
    # What is left out is hot, and takes no longer than by all-fast.
    assert found["slipstream-fae", "fae"].bound == pytest.approx(4 / (4 - 0.2 * 1))
    assert found["static-hybrid", "hybrid"].bound == 4  # as fast as all-fast at the most
    lines["slipstream-fae"]["facts"]["below_ms"] = [3.6, 3.84]  # in turns with it
    found = {(each.system, each.over): each for each in bars.ratios(lines)}
    assert found["slipstream-fae", "fae"].value == pytest.approx(1.125)
    assert found["slipstream-fae", "fae"].bound == pytest.approx(3.6 / 3.4)
    lines |= {"hotline": line(2.0), "slipstream-hotline": line(1.8, dropped_share=0.2)}
    found = {(each.system, each.over): each for each in bars.ratios(lines)}
    assert found["slipstream-hotline", "hotline"].bound == pytest.approx(1.25)


@pytest.mark.parametrize("skew", [0.0, 0.8, 1.05])
def test_the_hottest_rows_are_those_that_are_drawn_most(load, skew: float) -> None:
    traces = load("traces")
    rows = (20_000, 20_000) if skew == 0 else (20_000, 3_000, 10)
    trace = traces.Trace(rows, steps=30, batch=4096, skew=skew, lock=False)
    ranks = traces.hottest_ranks(rows, skew, 1000)
    assert 0.98 * 1000 <= sum(ranks) <= 1000
    drawn, best = [], []
    for place, (ids, num_rows) in enumerate(
        zip(traces.hottest_rows(rows, skew, 1000), rows, strict=True)
    ):
        assert len(set(ids.tolist())) == ranks[place]
        counts = torch.bincount(trace.ids[:, :, place].flatten(), minlength=num_rows)
        hits = int(counts[torch.from_numpy(ids)].sum()) / int(counts.sum())
        expected = traces.share_of_lookups(num_rows, skew, ranks[place])
        assert hits == pytest.approx(expected, abs=0.01)
        drawn.append(int(counts[torch.from_numpy(ids)].sum()))
        best.append(counts)
    trace.close()
    if skew:  # what chance has drawn most is hardly more
        assert sum(drawn) > 0.97 * int(torch.cat(best).topk(1000)[0].sum())


def lines_of(folder: Path, suite: str = "published") -> dict[tuple[str, str], dict[str, Any]]:
    text = (folder / f"{suite}.jsonl").read_text().splitlines()
    return {(each["run"], each["system"]): each for each in map(json.loads, text)}


@pytest.mark.filterwarnings("ignore::UserWarning")  # few batches: nothing to mix, or to skip
def test_whole_runs_stand_beside_steps(load, tmp_path, monkeypatch, capsys) -> None:
    published = load("published")
    monkeypatch.setattr("sys.argv", ["published.py"])
    only = ["kaggle", "cpu", "hybrid*", "static-hybrid", "fae", "*fae", "*-hotline", "random-drop"]
    with pytest.raises(SystemExit) as ended:
        published.main(["--only", *only, "--smoke", "--results", str(tmp_path)])
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    found = {name.removeprefix("hotrow-"): each for (_, name), each in lines_of(tmp_path).items()}
    assert set(found) == {
        "cpu", "hybrid", "hybrid-plain", "static-hybrid", "fae", "slipstream-fae",
        "slipstream-hotline", "random-drop",
    }  # fmt: skip
    facts = {name: each["facts"] for name, each in found.items()}
    assert facts["fae"]["dropped_share"] == 0
    assert 0 < facts["fae"]["hot_share"] < 1
    assert facts["slipstream-hotline"]["hot_share"] > 0
    assert len(found["slipstream-fae"]["step_ms"]["medians"]) == 1
    assert "times hybrid-plain, published 1.52" in said


def test_what_has_to_run_before_is_asked_for(load, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["published.py"])
    with pytest.raises(SystemExit):
        load("published").main(
            ["--only", "kaggle/random-drop", "--smoke", "--results", str(tmp_path)]
        )
    assert "slipstream-fae, which says how many samples" in capsys.readouterr().out


def test_a_pause_is_spread_over_an_epoch(load) -> None:
    run = load("published").WholeRun((1.0, 2.0, 202.0, 3.0, 2.0), offered=50, trained=40)
    assert run.pauses == 200
    assert run.ms(10) == 42
    assert run.ms(10, epoch=1000) == pytest.approx((210 - 200) / 5 + 0.2)


def test_counts_by_rank_are_those_of_draws(load) -> None:
    """The power law of a trace's own ids, and nothing that draws could not give."""
    traces = load("traces")
    uniform = np.random.default_rng(0).random(200_000)
    drawn = np.bincount(traces.ranks(uniform, 500, 1.05), minlength=500)
    counts = traces.counts_by_rank(500, 1.05, 200_000, seed=1, device=torch.device("cpu")).numpy()
    assert counts.sum() == pytest.approx(200_000, rel=0.02)
    # Both are sums of chances: what lies between them is what lies between two such sums.
    assert (np.abs(counts - drawn) < 6 * np.sqrt(counts + drawn + 1)).all()


def test_one_table_fits_a_call_of_the_machine(load, capsys) -> None:
    published, scratchpipe = load("published"), load("scratchpipe")
    for setting in published.SETTINGS:
        runs = published.runs_of([setting.name])
        assert [run.system for run in runs] == list(load("bars").SYSTEMS)
        assert sum(run.seconds(400) for run in runs) < 9 * 60
    assert [run.name for run in published.runs_of(["kaggle/fae"])] == ["kaggle/fae"]
    scratchpipe.main(["--list"])
    *names, total = capsys.readouterr().out.splitlines()
    assert len(names) == 4 * (2 + 3 * 2)
    assert float(total.split()[0].lstrip("~")) < 9


def test_scratchpipes_experiment_runs_in_small(load, tmp_path, monkeypatch, capsys) -> None:
    scratchpipe = load("scratchpipe")
    monkeypatch.setattr("sys.argv", ["scratchpipe.py"])
    only = ["--only", "static-hybrid", "scratchpipe", "--budgets", "10"]
    with pytest.raises(SystemExit) as ended:
        scratchpipe.main(
            [*only, "--localities", "uniform", "high", "--smoke", "--results", str(tmp_path)]
        )
    said = capsys.readouterr().out
    assert ended.value.code == 0, said
    found = lines_of(tmp_path, "scratchpipe")
    systems = ("hotrow-static-hybrid", "hotrow-scratchpipe")
    assert set(found) == {(run, name) for run in ("uniform-10", "high-10") for name in systems}
    for run in ("uniform-10", "high-10"):
        facts = found[run, systems[0]]["facts"]
        # Of lookups that are no hits, several may read one row.
        assert facts["hit_rate"] > facts["hottest_have"] - 0.05
    low, high = (found[f"{each}-10", systems[0]]["facts"] for each in ("uniform", "high"))
    assert high["hit_rate"] > low["hit_rate"] + 0.3
    assert "scratchpipe over static-hybrid on the mean" in said


def test_bounds_are_rows_over_the_rate_of_who_moves_them(load) -> None:
    scratchpipe = load("scratchpipe")
    facts = {
        "fetched_rows_per_step": 3000, "made_rows_per_step": 1000, "evicted_rows_per_step": 1000,
    }  # fmt: skip
    known = {"link": 3e6, "read": 2e6, "write": 1e6}
    assert scratchpipe.bound_ms("lookahead", facts, known) == pytest.approx(1)
    assert scratchpipe.bound_ms("static-hybrid", facts, known) == pytest.approx(2)
    assert scratchpipe.bound_ms("scratchpipe", facts, {"link": 3e6}) is None
    nothing = dict.fromkeys(facts, 0)
    assert scratchpipe.bound_ms("all-fast", nothing, known) is None


def test_the_page_shows_both(load) -> None:
    render = load("render")
    environment = {
        "gpu": None, "driver": None, "cuda": None, "torch": "2", "triton": "3", "python": "3",
        "cores": 2, "hotrow": "0",
    }  # fmt: skip

    def full(run: str, system: str, ms: float, **facts: Any) -> dict[str, Any]:
        spread = {"p20": ms, "p50": ms, "p80": ms}
        return {
            **line(ms, **facts), "run": run, "system": system, "step_ms": spread, "commit": "abc",
            "environment": environment, "date": "2026-11-16",
        }  # fmt: skip

    page = render.published(
        [full("kaggle", "hotrow-hybrid", 4.0), full("kaggle", "hotrow-hotline", 1.0)]
    )
    assert "| kaggle | hotline | 1 (1-1) | 4.00 times hybrid, published 2.2 | abc |" in page
    shared = {"hit_rate": 0.5, "hottest_have": 0.25}
    page = render.scratchpipe(
        [
            full("low-2", "hotrow-static-hybrid", 30.0, bound_ms=None, **shared),
            full("low-2", "hotrow-scratchpipe", 10.0, bound_ms=5.0, **shared),
        ]
    )
    assert "| 3.00 | 50.0% | 25.0% | 5.00 (step: 2.00 times) | abc |" in page
