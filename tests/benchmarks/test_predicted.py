"""Predictions stay near what was measured, and the page shows what the script finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hotrow.sizing.machines import find_machine

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Load = Callable[[str], ModuleType]


def test_the_median_error_is_small_and_the_page_says_so(load: Load) -> None:
    script = load("predicted")
    machine = find_machine("h200")
    found = script.judged(script.read(), machine)
    settings = {(each.suite, each.run) for each in found}
    assert len(settings) >= 6
    assert script.median_error(found) <= 0.15
    assert script.error_of_most(found) <= machine.error + 0.005  # the interval that is told
    page = (ROOT / "docs" / "size.md").read_text()
    assert script.filled(page, found) == page, "run python benchmarks/predicted.py"


def test_lines_that_ceilings_come_from_are_not_judged(load: Load) -> None:
    script = load("predicted")
    lines = script.read()
    found = script.judged(lines, find_machine("h200"))
    names = {(each.commit, each.run, f"hotrow-{each.strategy}") for each in found}
    known = {(each["commit"], each["run"], each["system"]) for each in lines}
    assert not names & script.FITTED
    assert known >= script.FITTED


def test_the_machine_has_the_figures_of_the_results() -> None:
    machine = find_machine("h200")
    lines = [json.loads(line) for line in (RESULTS / "ceilings.jsonl").read_text().splitlines()]
    # As rows are moved on the host by threads of Python; later lines are of threads of C.
    lines = [line for line in lines if line["run"][:3] != "CPU" or line["commit"] == "3510a81"]
    value = {line["run"]: line["value"] for line in lines}
    assert machine.link_gb == pytest.approx(value["copy host to device"], rel=0.01)
    inside = value["copy inside the device, read + written"]
    assert machine.hbm_gb == pytest.approx(inside, rel=0.01)
    for gib, rate in machine.row_rates[-3:]:
        assert rate == pytest.approx(value[f"zero-copy both, over {gib:.3g} GiB"], rel=0.01)
    for way, points in machine.host_rows.items():
        for size, rate in points:
            assert rate == pytest.approx(value[f"CPU {way}, rows of {size} bytes"], rel=0.01)
