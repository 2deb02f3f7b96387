"""Pages open in a real browser: no complaint, no request, all points drawn, no sideways scrolling.

Screenshots are left in HOTROW_SCREENSHOTS, where that names a folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser, chromium
from commands import hotrow
from hotrow.report.comparison import comparison_document
from hotrow.report.curves import Curve
from hotrow.report.page import page_of
from hotrow.report.runs import RunView, runs_document
from hotrow.support.records import (
    EvalRecord,
    Limit,
    RankRecord,
    RunRecord,
    Span,
    StepRecord,
    Summary,
    TableRecord,
    Times,
)
from report_builders import MIB, comparison, figures

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]


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
    return RunView(name, record, Curve(step(n + 1) for n in range(steps)), spans)


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


def shared_run(name: str, steps: int) -> RunView:
    """A run of four ranks, the last of which is slower and has more rows to serve."""
    view = run(name, steps, "lookahead")
    first = RankRecord(
        rank=0, machine="trainer-a", device="cuda:0", owned_rows=51_038_240, num_slots=5_103_824,
        samples=512 * steps, lookups=4096 * steps, unique_rows=2300 * steps,
        served_rows=2310 * steps, fetched_rows=420 * steps, bytes_fetched=28_560 * steps,
        bytes_evicted=27_200 * steps, bytes_of_ids=6900 * steps, bytes_of_rows=441_600 * steps,
        bytes_of_grads=441_600 * steps, seconds=0.03 * steps, wait_seconds=0.011 * steps,
        fast_bytes=700 * MIB, host_bytes=16_500 * MIB,
    )  # fmt: skip
    ranks = [
        replace(
            first, rank=rank, machine="trainer-a" if rank < 2 else "trainer-b",
            device=f"cuda:{rank % 2}", served_rows=(2310, 2290, 2350, 2490)[rank] * steps,
            wait_seconds=(0.011, 0.0105, 0.012, 0.004)[rank] * steps,
        )
        for rank in range(4)
    ]  # fmt: skip
    stepped = (
        StepRecord(
            n + 1, 0.5, 2048, 0.03, 4096, 2300, 420, 400, 28_560, 27_200, waited=0.03,
            bytes_of_rows=441_600, rank_seconds=0.01 + 0.0001 * (n % 11),
        )
        for n in range(steps)
    )  # fmt: skip
    record = replace(view.record, ranks=tuple(ranks))
    record = replace(record, summary=replace(record.summary, bytes_sent=890_000 * 4 * steps))
    return replace(view, record=record, curve=Curve(stepped))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (800, False), (400, True)])
def test_a_page_of_several_ranks(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    page = tmp_path / "ranks.html"
    page.write_text(page_of(runs_document([shared_run("shared", 300)])))
    look(browser, page, width=width, dark=dark, name="ranks")
    waits, times, sent, link = drawn(browser)[4:8]
    assert waits == [300]
    assert times == link == [4] * 2
    assert sent == [4] * 3
    assert paths_in(browser, 6) == 12  # bars
    rows = browser.evaluate(
        "[...document.querySelectorAll('tr')].filter(x => x.innerText.startsWith('balance')).length"
    )
    assert rows == 1


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


@pytest.mark.parametrize(("width", "dark"), [(1280, True), (400, False)])
def test_a_page_of_a_comparison(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    counted = {"samples": 2048, "hit_rate": 0.9, "bytes_per_sample": 120.0, "auc": 0.75}
    names = {"all-fast": 6000, "hybrid": 1000, "lru": 3000, "lookahead": 5000}
    strategies = [
        replace(figures(name, rate), memory={"slots": MIB, "buffer": MIB // 4}, **counted)
        for name, rate in names.items()
    ]
    page = tmp_path / "compare.html"
    static = figures("static", float("nan"))
    record = comparison(*strategies, static, device="cpu", advice="Take lookahead.")
    page.write_text(page_of(comparison_document(record)))
    look(browser, page, width=width, dark=dark, name="compare")
    assert drawn(browser) == [[4], [4, 4], [4], [4]]
    assert browser.evaluate("document.querySelectorAll('tbody tr').length") == 5
    assert_theme(browser, dark=dark)


# -- pages that profile, simulate and size write ---------------------------------------------

RUN = (
    "[data]\nrows = [20000, 3000, 300, 10]\nbatch_size = 64\nsamples = 3840\n"
    "names = ['item <b>', 'user', 'city', 'day']\n"
)
FEW = ["--batches", "20", "--warm-up", "20", "--depths", "2,9"]
COMMANDS = {
    "profile": [],
    "simulate": [*FEW, "--slots", "3%,5%,10%", "--strategy", "lru,lookahead", "--machine", "h200"],
    "size": [*FEW, "--machine", "h200", "--dense-ms", "0.5"],
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "run.toml").write_text(RUN)
    found = {}
    for command, options in COMMANDS.items():
        found[command] = folder / f"{command}.html"
        result = hotrow(command, folder / "run.toml", *options, "--html", found[command])
        assert result.exit_code == 0, result.output
        assert f"page written to {found[command]}" in result.output.replace("\n", "")
    return found


@pytest.mark.parametrize(
    ("command", "width", "dark"),
    [("profile", 1280, False), ("simulate", 400, True), ("size", 1280, True), ("size", 400, False)],
)
def test_a_page_opens(
    browser: Browser, pages: dict[str, Path], command: str, width: int, dark: bool
) -> None:
    look(browser, pages[command], width=width, dark=dark, name=command)
    assert_theme(browser, dark=dark)
    found = drawn(browser)
    if command == "profile":
        coverage, hot, misses, windows, drift = found
        assert len(coverage) == 5  # all tables, and each
        assert [len(set(misses)), len(misses), len(windows), len(drift)] == [1, 3, 2, 3]
        assert hot == [10]
        assert drift == [8, 7, 7]
    elif command == "simulate":
        rows, hits, steps = found
        assert rows == hits == [3] * 4  # lru, look-ahead at two depths, belady
        assert steps == [3] * 3
    else:
        speeds, moved, parts = found
        assert len(speeds) == len(moved) + 1 == 5  # with what was asked for
        assert parts == [4] * 3
    assert browser.evaluate("document.querySelectorAll('tbody tr').length") >= 4
    assert "item <b>" in browser.evaluate("document.body.innerText") or command != "profile"
