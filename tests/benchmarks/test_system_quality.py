"""Quality beside the control: paired by seed, and whole whatever parts it was measured in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script(load: Any) -> Any:
    return load("system_quality")


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["system_quality.py", "--smoke", *words])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0


def test_the_study_in_small_and_in_parts(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    common = ["--targets", "0.5", "--results", str(tmp_path), "--systems", "random-drop"]
    for seed in ("0", "1"):
        run(script, monkeypatch, "--seeds", seed, *common)
    shown = capsys.readouterr().out
    written = (tmp_path / "system_quality.jsonl").read_text().splitlines()
    lines = {(line["run"], line["system"]): line for line in map(json.loads, written)}
    for seed in ("seed 0", "seed 1"):
        ours = lines[seed, "slipstream samples 0.5"]
        control = lines[seed, "random-drop as samples 0.5"]
        assert ours["dropped"] == control["dropped"] > 0.01
        assert ours["more"]["first_batch"] == control["more"]["first_batch"]
        rows = lines[seed, "slipstream rows 0.5"]
        assert rows["dropped"] == 0
        assert rows["more"]["stale_rows"] > 0
        plain = lines[seed, "all-fast"]
        assert len({each["auc"] for each in (ours, control, rows, plain)}) == 4
        assert all(len(each["part_aucs"]) == script.PARTS for each in (ours, plain))
    # The second part's table has the first part's seed in it.
    pairs = [
        lines[s, "slipstream samples 0.5"]["auc"] - lines[s, "all-fast"]["auc"]
        for s in ("seed 0", "seed 1")
    ]
    mean = sum(pairs) / 2
    half = 12.7062 * abs(pairs[0] - pairs[1]) / 2  # t of one degree of freedom
    assert script.Interval.of(pairs) == script.Interval(
        pytest.approx(mean), pytest.approx(half, rel=1e-4), 2
    )
    (line,) = [
        each
        for each in shown.split("\n\n")[-1].splitlines()
        if "slipstream samples" in each and "±" in each
    ]
    assert f"{mean:+.5f} ± {half:.5f}" in line


def test_one_seed_alone_has_no_interval(script: Any) -> None:
    found = script.Interval.of([0.5])
    assert (found.mean, found.seeds) == (0.5, 1)
    assert math.isnan(found.half)


def test_only_seeds_that_both_have_are_compared(script: Any) -> None:
    runs = {"x": {0: {"auc": 0.7}, 1: {"auc": 0.9}}, "y": {1: {"auc": 0.6}, 2: {"auc": 0.1}}}
    assert script.differences(runs, "x", "y", "auc").mean == pytest.approx(0.3)
    assert script.differences(runs, "x", "z", "auc") is None
