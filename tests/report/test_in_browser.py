"""Pages open in a real browser: no complaint, no request, all points drawn, no sideways scrolling.

Screenshots are left in HOTROW_SCREENSHOTS, where that names a folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_advice import figures

from browser import CHROMIUM, Browser, chromium
from hotrow.report.comparison import comparison_document
from hotrow.report.curves import Curve
from hotrow.report.page import page_of
from hotrow.report.runs import RunView, runs_document
from hotrow.support.records import (
    ComparisonRecord,
    EvalRecord,
    Limit,
    RunRecord,
    Span,
    StepRecord,
    Summary,
    TableRecord,
    Times,
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
MIB = 1 << 20


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def run(name: str, steps: int, strategy: str) -> RunView:
    def step(number: int) -> StepRecord:
        loss = 0.45 + 0.4 / number**0.5 + 0.01 * (number * 7919 % 13 - 6) / 6
        return StepRecord(
            number, loss, samples=2048, seconds=0.03 + 0.0001 * (number % 7), lookups=16384,
            unique_rows=9000, fetched_rows=1600 + 4000 // number, evicted_rows=1500,
            bytes_fetched=108_800, bytes_evicted=102_000, read_seconds=0.004, plan_seconds=0.01,
            rows_seconds=0.001, waited=0.03,
        )  # fmt: skip

    summary = Summary(
        steps, 2048 * steps, 0.03 * steps, 66_000.0, 0.47, 0.7584, 0.4741, 16384 * steps, 0.896,
        0.06, 210_800 * steps, True,
    )  # fmt: skip
    record = RunRecord(
        name,
        "2026-11-16T08:00:00+00:00",
        "finished",
        settings={"run": {"name": name}, "embedding": {"strategy": strategy, "budget": "10%"}},
        environment={"device": "cpu", "versions": {"torch": "2.13.0"}},
        memory={"slots": 2 * MIB, "slot state": MIB // 2, "row-to-slot map": MIB // 5},
        summary=summary,
        evaluations=tuple(EvalRecord(n, 2048, 0.7 + n / 1e5, 0.48) for n in (10, 20, steps)),
        tables={f"cat_{n}": TableRecord(1000 * (9 - n), 800, 250 - 30 * n, 90) for n in range(8)},
        times=Times(steps, 0.03 * steps, 0.004 * steps, 0.01 * steps, 0.001 * steps, 0.03),
        limit=Limit("dense part", 0.5, "limited by the dense part: training took 50% of a step"),
    )
    stages = (("read", 0, 4), ("plan", 4, 10), ("fill", 14, 1), ("train", 15, 15))
    spans = [
        Span("host", stage, 0.03 * n + start / 1000, length / 1000)
        for n in range(6)
        for stage, start, length in stages
    ]
    return RunView(name, record, Curve.of(step(n + 1) for n in range(steps)), spans)


def drawn(browser: Browser) -> list[list[int]]:
    """Points of each trace of each chart, as the browser knows them."""
    found: list[list[int]] = browser.evaluate(
        "[...document.querySelectorAll('.chart')].map(each => each.data.map(t => t.x.length))"
    )
    return found


def look(browser: Browser, page: Path, *, width: int, dark: bool, name: str) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.errors() == []
    assert browser.requests() == []
    size = browser.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert size[0] <= size[1] == width
    browser.screenshot(page.with_suffix(".png"))
    assert page.with_suffix(".png").stat().st_size > 20_000
    if folder := os.environ.get("HOTROW_SCREENSHOTS"):
        where = Path(folder) / f"{name}-{width}-{'dark' if dark else 'light'}.png"
        where.write_bytes(page.with_suffix(".png").read_bytes())


def paths_in(browser: Browser, chart: int) -> int:
    count: int = browser.evaluate(
        f"document.querySelectorAll('.chart')[{chart}].querySelectorAll('.js-line, .point').length"
    )
    return count


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_a_page_of_two_runs(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    runs = [run("first", 50, "lookahead"), run("second", 900, "lru")]
    page = tmp_path / "report.html"
    page.write_text(page_of(runs_document(runs)))
    look(browser, page, width=width, dark=dark, name="report")
    loss, auc, speed, parts, hits, link, tables, waits, memory, *timelines = drawn(browser)
    assert loss == [50, 450, 450, 450]  # with the band of a run that has two steps for a point
    assert auc == [4, 4]  # with the gap before the test samples'
    assert speed == hits == link == waits == [50, 450]
    assert parts == [2] * 4
    assert tables == [8, 8]
    assert memory == [2] * 3
    assert timelines == [[4] * 4] * 2
    assert paths_in(browser, 0) == 4  # lines
    assert paths_in(browser, 6) == 16  # bars
    assert_theme(browser, dark=dark)


def assert_theme(browser: Browser, *, dark: bool) -> None:
    """Text is readable on its background, in the charts, too."""
    colours = browser.evaluate(
        "[getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('.xtick text')).fill]"
    )
    paper, ink = (sum(int(x) for x in each[4:-1].split(",")) / 3 for each in colours)
    assert (paper < 60 and ink > 200) if dark else (paper > 200 and ink < 60)


def test_a_legend_hides_a_run_and_shows_it_again(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(
        page_of(runs_document([run("first", 30, "lookahead"), run("second", 30, "lru")]))
    )
    browser.open(page, width=1280)
    for expected in (1, 2):
        browser.evaluate("document.querySelector('figure button').click()")
        assert paths_in(browser, 0) == expected
    assert browser.errors() == []


def comparison(strategies: Sequence[Any]) -> ComparisonRecord:
    return ComparisonRecord(
        name="kinds", started="", outcome="finished", environment={"device": "cpu", "threads": 1},
        settings={"run": {"device": "cpu"}, "data": {"batch_size": 2048}}, steps=100, repetitions=3,
        warm_up=10, baseline="hybrid", budget_bytes=2 * MIB, rows_bytes=40 * MIB,
        tolerance={"relative": 1e-4, "absolute": 1e-5, "outliers": 0.01}, notes=(),
        strategies=tuple(strategies), advice="Take lookahead.",
    )  # fmt: skip


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (400, False)])
def test_a_page_of_a_comparison(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    counted = {"samples": 2048, "hit_rate": 0.9, "bytes_per_sample": 120.0, "auc": 0.75}
    names = {"all-fast": 6000, "hybrid": 1000, "lru": 3000, "lookahead": 5000}
    strategies = [
        replace(figures(name, rate), memory={"slots": MIB, "buffer": MIB // 4}, **counted)
        for name, rate in names.items()
    ]
    page = tmp_path / "compare.html"
    record = comparison([*strategies, figures("static", float("nan"))])
    page.write_text(page_of(comparison_document(record)))
    look(browser, page, width=width, dark=dark, name="compare")
    assert drawn(browser) == [[4], [4, 4], [4], [4]]
    assert browser.evaluate("document.querySelectorAll('tbody tr').length") == 5
    assert_theme(browser, dark=dark)
