"""Suites name their runs, know how long they take, stop in time, and run on a CPU in small."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest


def arguments(folder: Path, **others: object) -> argparse.Namespace:
    given = {"minutes": 5, "results": folder, "commit": "abc", "smoke": False}
    return argparse.Namespace(**{**given, **others})


def test_the_target_comes_first_and_everything_fits_two_calls(load) -> None:
    suite = load("terabyte").SUITE
    runs = suite.runs([], [], False)
    assert [run.name for run in runs[:3]] == [
        "target/hotrow-lookahead",
        "target/hotrow-all-fast",
        "target/hotrow-lookahead-written",
    ]
    assert len({run.name for run in runs}) == len(runs) == 34
    assert sum(run.seconds for run in runs) < 2 * 9 * 60
    most = max(run.setting.total_bytes for run in runs)
    assert most < load("suite").MOST_ROW_BYTES


def test_patterns_choose_runs(load) -> None:
    suite = load("terabyte").SUITE
    chosen = suite.runs(["target/hotrow-*", "adam/fbgemm-uvm"], [], False)
    assert {run.system for run in chosen if run.setting.name == "target"} == {
        name for name in suite.systems if name.startswith("hotrow")
    }
    assert [run.name for run in chosen if run.setting.name != "target"] == ["adam/fbgemm-uvm"]


def test_steps_to_fill_are_those_of_drawn_batches(load) -> None:
    traces = load("traces")
    rows, batch, skew = (200_000, 30_000, 10), 512, 1.05
    steps = traces.steps_to_fill(20_000, rows, skew, batch)
    trace = traces.Trace(rows, steps=steps, batch=batch, skew=skew, lock=False)
    bases = np.cumsum([0, *rows[:-1]])
    different = len(np.unique(trace.ids.numpy() + bases))
    trace.close()
    assert different == pytest.approx(20_000, rel=0.03)


def test_what_fails_or_has_no_time_hinders_nothing_after_it(load, tmp_path, capsys) -> None:
    harness = load("harness")
    session = harness.Session("tried", arguments(tmp_path))

    def broken() -> dict:
        raise RuntimeError("a kernel is ill")

    def absent() -> dict:
        raise harness.Unavailable("no such library")

    session.attempt("a", "x", broken, str)
    session.attempt("b", "x", absent, str)
    session.attempt("c", "x", lambda: {"value": 1}, lambda found: f"{found['value']} ms")
    session.attempt("d", "x", broken, str, seconds=10**6)
    session.print_again()
    end = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
    assert [line.split(maxsplit=1)[1] for line in end] == [
        "FAILED: a kernel is ill",
        "left out: no such library",
        "1 ms",
        "not measured: the minutes are over",
    ]
    assert session.failed == 1
    (line,) = harness.read_results(tmp_path / "tried.jsonl")
    assert (line["run"], line["value"], line["commit"]) == ("c", 1, "abc")


def test_a_tiny_run_is_no_result(load, tmp_path, monkeypatch) -> None:
    harness = load("harness")
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    session = harness.Session("tried", arguments(tmp_path, smoke=True))
    session.attempt("a", "x", lambda: {"value": 1}, str)
    assert not list(tmp_path.iterdir())


def test_a_suite_runs_in_small_and_then_nothing_is_missing(
    load, tmp_path, monkeypatch, capsys
) -> None:
    multihot, suite = load("multihot"), load("suite")
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    only = ["--only", "sgd/hotrow-*", "adam-single/hotrow-lookahead"]
    command = ["multihot.py", *only, "--smoke", "--missing", "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        suite.main(multihot.SUITE)
    assert ended.value.code == 0, capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "multihot.jsonl").read_text().splitlines()]
    assert [line["run"] for line in lines] == ["sgd", "sgd", "adam-single"]
    assert [line["facts"]["hit_rate"] < 1 for line in lines] == [True, False, True]
    assert all(line["facts"]["unique_rows_per_step"] > 0 for line in lines)
    monkeypatch.setattr("sys.argv", [*command, "--list"])
    capsys.readouterr()
    suite.main(multihot.SUITE)
    assert capsys.readouterr().out.startswith("0 runs")


def test_settings_with_the_same_batches_share_them(load) -> None:
    suite, terabyte = load("suite"), load("terabyte")
    given = argparse.Namespace(
        smoke=True, timed=10, warmup=None, no_compile=True, no_graphs=False, interaction="plain",
        masters="plain", fill="auto",
    )  # fmt: skip
    by_name = {setting.name: setting for setting in terabyte.SETTINGS}
    target, wide, skewed = (
        suite.bench_for(by_name[name], given) for name in ("target", "dim-128", "zipf-0.9")
    )
    trace = target.trace
    target.hand_trace_to(skewed)
    target.hand_trace_to(wide)
    assert wide.trace is trace
    assert skewed.trace is not trace
    assert "trace" not in vars(target)
    for bench in (target, wide, skewed):
        bench.close()


def test_after_a_lost_gpu_another_process_goes_on(load, tmp_path, monkeypatch) -> None:
    multihot, suite = load("multihot"), load("suite")
    started: list[list[str]] = []
    monkeypatch.setattr(suite.os, "execv", lambda program, command: started.append(command))
    monkeypatch.setattr(suite, "_gpu_answers", lambda: False)
    command = ["multihot.py", "--systems", "hotrow-lookahead", "--minutes", "3", "--smoke"]
    monkeypatch.setattr("sys.argv", [*command, "--results", str(tmp_path)])
    with pytest.raises(SystemExit):
        suite.main(multihot.SUITE)
    (command,) = started
    assert command[1:3] == ["multihot.py", "--only"]
    names = [f"{setting}/hotrow-lookahead" for setting in ("adam", "sgd-single", "adam-single")]
    assert command[3:6] == names
    assert command[6] == "--minutes"
    assert 0 < float(command[7]) <= 3
    assert command[8:] == ["--smoke", "--results", str(tmp_path)]


def test_the_fastest_window_counts_and_the_others_are_told(load, monkeypatch) -> None:
    harness = load("harness")
    durations = iter([*[0.003] * 10, *[0.001] * 10, *[0.002] * 10])
    clock = [0.0]

    def steps():
        for each in durations:
            clock[0] += each
            yield

    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(harness, "PAUSE", 0)
    timing = harness.time_steps(
        steps(),
        warmup=0,
        timed=30,
        device=harness.torch.device("cpu"),
        deadline=harness.Deadline(5),
    )
    assert timing.p50 == pytest.approx(1.0)
    assert timing.medians == pytest.approx((3.0, 1.0, 2.0))
    assert timing.steps == 10


def test_the_loader_is_timed_in_small(load, tmp_path, monkeypatch, capsys) -> None:
    loader = load("loader")
    monkeypatch.setattr("sys.argv", ["loader.py", "--smoke", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        loader.main()
    assert ended.value.code == 0, capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "loader.jsonl").read_text().splitlines()]
    assert [line["workers"] for line in lines] == [1, 2]
    assert all(line["samples_per_second"] > 0 for line in lines)
