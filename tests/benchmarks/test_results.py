"""Pages show the results beside them, predictions stay near them, and bars are computed rightly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from hotrow.sizing.machines import find_machine

ROOT = Path(__file__).parents[2]
TESTS, RESULTS = ROOT / "tests", ROOT / "benchmarks" / "results"
Load = Callable[[str], ModuleType]


def test_the_page_of_results_is_of_the_results_beside_it(load: Load) -> None:
    render = load("render")
    assert (render.HERE / "README.md").read_text() == render.page(render.read(RESULTS))


def test_the_page_of_systems_is_of_the_results(load: Load) -> None:
    script = load("systems_page")
    page = script.PAGE.read_text()
    assert page == script.filled(page, script.read(RESULTS))
    assert {name for _, name, _ in script._PLACE.findall(page)} == script.TABLES.keys()
    empty = script.filled("a\n<!-- table: targets -->\nold\n<!-- end -->\nb\n", {})
    assert "| terabyte | hotline | hybrid | 2.2 | not measured yet | - |" in empty


def test_the_median_error_is_small_and_the_page_says_so(load: Load) -> None:
    script, machine = load("predicted"), find_machine("h200")
    lines = script.read()
    found = script.judged(lines, machine)
    assert len({(each.suite, each.run) for each in found}) >= 6
    assert script.median_error(found) <= 0.15
    assert script.error_of_most(found) <= machine.error + 0.005  # the interval that is stated
    page = (ROOT / "docs" / "size.md").read_text()
    assert script.filled(page, found) == page, "run python benchmarks/predicted.py"
    # Lines that the ceilings come from are not judged.
    names = {(each.commit, each.run, f"hotrow-{each.strategy}") for each in found}
    assert not names & script.FITTED
    assert {(line["commit"], line["run"], line["system"]) for line in lines} >= script.FITTED


def test_the_machine_has_the_figures_of_the_results() -> None:
    machine = find_machine("h200")
    lines = [json.loads(line) for line in (RESULTS / "ceilings.jsonl").read_text().splitlines()]
    # As threads of Python move rows on the host; later lines are of threads of C.
    lines = [line for line in lines if line["run"][:3] != "CPU" or line["commit"] == "3510a81"]
    value = {line["run"]: line["value"] for line in lines}
    wanted = {
        "copy host to device": machine.link_gb,
        "copy inside the device, read + written": machine.hbm_gb,
        **{f"zero-copy both, over {gib:.3g} GiB": rate for gib, rate in machine.row_rates[-3:]},
        **{
            f"CPU {way}, rows of {size} bytes": rate
            for way, points in machine.host_rows.items()
            for size, rate in points
        },
    }
    assert {name: value[name] for name in wanted} == pytest.approx(wanted, rel=0.01)


def line(ms: float, **facts: Any) -> dict[str, Any]:
    return {"setting": {"batch": 1000}, "step_ms": {"p50": ms}, "facts": facts}


def test_ratios_stand_beside_what_was_published_and_what_is_possible(load: Load) -> None:
    lines = {
        "hybrid-plain": line(40.0),
        "hybrid": line(4.0),
        "all-fast": line(1.0),
        "fae": line(4.0, hot_share=0.5, dropped_share=0.0),
        "static-hybrid": line(3.0),
        "scratchpipe": line(1.5, bound_ms=0.5),
        "slipstream-fae": line(3.2, dropped_share=0.2),
        "hotline": line(2.0),
        "slipstream-hotline": line(1.8, dropped_share=0.2),
    }

    def ratios() -> dict[tuple[str, str], Any]:
        return {(each.system, each.over): each for each in load("bars").ratios(lines)}

    found = ratios()
    assert found["fae", "hybrid"].value == 1
    assert str(found["fae", "hybrid-plain"]) == (
        "10.00 times hybrid-plain, published 1.52, bound 16.00"
    )
    assert ("fae", "cpu") not in found  # which was not measured
    assert found["scratchpipe", "static-hybrid"].value == 2
    assert found["slipstream-fae", "fae"].value == pytest.approx(1.25)
    bounds = {
        ("fae", "hybrid"): 4 / (0.5 * 1 + 0.5 * 4),
        ("scratchpipe", "static-hybrid"): 3,  # rows take less than all-fast does
        ("slipstream-fae", "fae"): 4 / (4 - 0.2 * 1),  # skipped samples are hot, as by all-fast
        ("static-hybrid", "hybrid"): 4,  # as fast as all-fast at the most
        ("slipstream-hotline", "hotline"): 1.25,
    }
    assert {key: found[key].bound for key in bounds} == pytest.approx(bounds)
    lines["slipstream-fae"]["facts"]["below_ms"] = [3.6, 3.84]  # measured in turns with it
    assert ratios()["slipstream-fae", "fae"].value == pytest.approx(1.125)
    assert ratios()["slipstream-fae", "fae"].bound == pytest.approx(3.6 / 3.4)


def test_bounds_are_rows_over_the_rate_that_moves_them(load: Load) -> None:
    bound_ms = load("scratchpipe").bound_ms
    facts = {
        "fetched_rows_per_step": 3000, "made_rows_per_step": 1000, "evicted_rows_per_step": 1000,
    }  # fmt: skip
    known = {"link": 3e6, "read": 2e6, "write": 1e6}
    assert bound_ms("lookahead", facts, known) == pytest.approx(1)
    assert bound_ms("static-hybrid", facts, known) == pytest.approx(2)
    assert bound_ms("scratchpipe", facts, {"link": 3e6}) is None
    assert bound_ms("all-fast", dict.fromkeys(facts, 0), known) is None


def test_a_pause_is_spread_over_an_epoch(load: Load) -> None:
    run = load("published").WholeRun((1.0, 2.0, 202.0, 3.0, 2.0), offered=50, trained=40)
    assert (run.pauses, run.ms(10)) == (200, 42)
    assert run.ms(10, epoch=1000) == pytest.approx((210 - 200) / 5 + 0.2)


def test_the_fastest_window_counts(load: Load) -> None:
    timing = load("harness").Timing
    best = timing.best_of([[ms] * 10 for ms in (3.0, 1.0, 2.0)])
    assert (best.p50, best.medians, best.steps) == (1.0, (3.0, 1.0, 2.0), 10)
    assert (best.whole.mean, best.whole.longest, best.whole.steps) == (2.0, 3.0, 30)


def test_bytes_of_ranks_are_by_kind_of_batch(load: Load) -> None:
    sent = {"batches": 4, "ids": 1500.0, "rows": 2000.0, "early rows": 500.0, "grads": 0.0}
    about = {"data": "d", "name": "fae", "ranks": 2, "total": 1200, "auc": 0.75}
    line = about | {"auc_apart": -0.001, "same": True, "apart": 2e-7}
    hot, cold = load("systems_on_ranks").table([line | {"sent": {"hot": sent, "cold": sent}}])[::-1]
    assert hot[:5] == ("d", "fae", "2", "4", "hot")
    assert hot[5:] == (
        "1.5", "2.0", "0.0", "1,200", "0.75000", "-0.00100", "yes", "2e-07",
    )  # fmt: skip
    assert cold[4] == "cold"
    (alone,) = load("systems_on_ranks").table([line | {"ranks": 1, "steps": 8}])
    assert alone[3:] == ("8", "-", "-", "-", "-", "1,200", "0.75000", "-", "-", "-")


def test_differences_are_paired_by_seed(load: Load) -> None:
    def trained(system: str, seed: int, auc: float) -> dict[str, Any]:
        return {
            "data": "d", "base": "hotline", "when": "now", "system": system, "seed": seed,
            "auc": auc, "dropped": 5, "samples": 100,
        }  # fmt: skip

    lines = [
        trained("slipstream", 0, 0.7), trained("slipstream", 1, 0.8), trained("slipstream", 2, 0.9),
        trained("random-drop", 0, 0.6), trained("random-drop", 1, 0.9), trained("none", 0, 0.75),
    ]  # fmt: skip
    ((*about, drop, hot, everything),) = load("skip_control").table(lines)
    assert about == ["d", "hotline", "now", "slipstream", "3", "5.0%"]
    assert drop.startswith("+0.00000 ± 1.27")
    assert drop.endswith("(1/2)")
    assert (hot, everything) == ("-", "-0.05000 ± nan (0/1)")
    quality = load("system_quality")
    runs = {"x": {0: {"auc": 0.7}, 1: {"auc": 0.9}}, "y": {1: {"auc": 0.6}, 2: {"auc": 0.1}}}
    found = quality.differences(runs, "x", "y", "auc")
    assert (found.mean, found.seeds) == (pytest.approx(0.3), 1)
    assert math.isnan(found.half)
    assert quality.differences(runs, "x", "z", "auc") is None
    pair = quality.Interval.of([0.1, 0.3])
    assert (pair.mean, pair.half) == pytest.approx((0.2, 12.7062 * 0.1), rel=1e-4)  # t, 1 degree


# -- traces ----------------------------------------------------------------------------


@pytest.mark.parametrize("skew", [0.0, 1.05])
def test_the_hottest_rows_are_those_that_are_drawn_most(load: Load, skew: float) -> None:
    traces = load("traces")
    rows = (20_000, 20_000) if skew == 0 else (20_000, 3_000, 10)
    trace = traces.Trace(rows, steps=30, batch=4096, skew=skew, lock=False)
    ranks = traces.hottest_ranks(rows, skew, 1000)
    assert 0.98 * 1000 <= sum(ranks) <= 1000
    for place, ids in enumerate(traces.hottest_rows(rows, skew, 1000)):
        counts = torch.bincount(trace.ids[:, :, place].flatten(), minlength=rows[place])
        hits = int(counts[torch.from_numpy(ids)].sum()) / int(counts.sum())
        expected = traces.share_of_lookups(rows[place], skew, ranks[place])
        assert hits == pytest.approx(expected, abs=0.01)
        assert len(set(ids.tolist())) == ranks[place]
    trace.close()


def test_drawn_batches_are_those_of_the_law(load: Load) -> None:
    traces = load("traces")
    uniform = np.random.default_rng(0).random(200_000)
    drawn = np.bincount(traces.ranks(uniform, 500, 1.05), minlength=500)
    counts = traces.counts_by_rank(500, 1.05, 200_000, seed=1, device=torch.device("cpu")).numpy()
    # Both are sums of chances.
    assert (np.abs(counts - drawn) < 6 * np.sqrt(counts + drawn + 1)).all()
    rows = (200_000, 30_000, 10)
    steps = traces.steps_to_fill(20_000, rows, 1.05, 512)
    trace = traces.Trace(rows, steps=steps, batch=512, skew=1.05, lock=False)
    different = len(np.unique(trace.ids.numpy() + np.cumsum([0, *rows[:-1]])))
    trace.close()
    assert different == pytest.approx(20_000, rel=0.03)


def test_the_fuzzing_script_knows_every_fuzzed_reader(load: Load) -> None:
    found = {
        f"{path.relative_to(ROOT)}::{name}"
        for path in TESTS.rglob("test_*fuzz.py")
        for name in re.findall(r"@fuzzed\n(?:@.*\n)+def (\w+)", path.read_text())
    }
    assert set(load("fuzz").READERS.values()) == found
