"""Advice follows from figures, and says when they cannot tell."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from hotrow.report.charts import Bars
from hotrow.report.comparison import advise, comparison_document, remarks
from hotrow.report.page import Charts, Section, Table, page_of
from hotrow.report.terminal import show_parts
from hotrow.support.records import Figures
from report_builders import comparison, figures


def advice(*strategies: Figures, device: str = "cuda", outcome: str = "finished") -> str:
    return advise(comparison(*strategies, device=device, outcome=outcome))


ALL_FAST = figures("all-fast", 6000, is_within_budget=False, fast_bytes=40 << 20)
HYBRID = figures("hybrid", 1000, contract="exact up to rounding")


def repeated(strategy: str, rate: float, slow: float, fast: float, **others: Any) -> Figures:
    """Return figures of three repetitions, with steps whose speeds differ more than these."""
    steps = {"slow_samples_per_second": rate / 2, "fast_samples_per_second": 2 * rate}
    runs = {"slow_run": slow, "fast_run": fast, "repetitions": 3}
    return figures(strategy, rate, **steps, **runs, **others)


LOOKAHEAD, LRU = figures("lookahead", 5000, auc=0.75), figures("lru", 3000)
FAE = figures("fae", 5500, contract="changed", equal="no", auc=0.7)
NAN = float("nan")


@pytest.mark.parametrize(
    ("strategies", "options", "said"),
    [
        (
            (ALL_FAST, HYBRID, LRU, LOOKAHEAD),
            {},
            "^Take lookahead: with 5,000 samples/s, 5.00 times hybrid, the fastest that is exact "
            r"within the budget of 2.0 MiB\. all-fast is 1.20 times as fast, with 40.0 MiB of fast "
            r"memory\.$",
        ),
        (
            (ALL_FAST, figures("lru", 4900), LOOKAHEAD, figures("static", 10)),
            {},
            "Differences to lru are within the spread",
        ),
        (  # repetitions differ clearly, steps of one run vary more
            (
                repeated("all-fast", 13_400, 10_920, 14_161, is_within_budget=False),
                repeated("lru", 8_000, 7_928, 8_460),
                repeated("static", 7_950, 7_900, 8_000),
                repeated("lookahead", 8_020, 8_010, 8_030),
            ),
            {},
            r"Differences to lru are within the spread\. all-fast is 1.67 times as fast, with ",
        ),
        (
            (FAE, LOOKAHEAD),
            {},
            "^Take lookahead.* fae is 1.10 times as fast, and changes the training: AUC 0.7000 "
            "instead of 0.7500",
        ),
        ((ALL_FAST, HYBRID), {}, "^Take hybrid: with 1,000 samples/s the fastest that"),
        (
            (figures("lookahead", 5000, equal="no"), LRU),
            {},
            "^Do not use lookahead: exact by contract, but not equal.* Take lru",
        ),
        (
            (ALL_FAST, figures("lru", NAN, outcome="failed")),
            {},
            r"^No strategy with all-fast's results ran within the budget of 2.0 MiB\.$",
        ),
        ((ALL_FAST, figures("lru", 9, outcome="diverged")), {}, "^No strategy with all-fast's"),
        ((FAE,), {}, "^No strategy with all-fast's"),
        (
            (figures("all-fast", 9, outcome="diverged"), figures("lru", 9, outcome="diverged")),
            {},
            "^Every loss is NaN at the end",
        ),
        (
            (figures("lru", NAN, outcome="unfinished"),),
            {"outcome": "interrupted"},
            "before any strategy had ended",
        ),
        (
            (figures("lru", NAN, outcome="unfinished"), HYBRID),
            {"outcome": "interrupted"},
            "^Take hybrid",
        ),
        ((HYBRID,), {"device": "cpu"}, r"these speeds say nothing about a GPU\.$"),
    ],
)
def test_advice_follows_from_figures(
    strategies: tuple[Figures, ...], options: dict[str, str], said: str
) -> None:
    assert re.search(said, advice(*strategies, **options))


@pytest.mark.parametrize("has_charts", [False, True])
def test_bars_are_of_what_the_advice_is_of(has_charts: bool) -> None:
    """Whole runs, and not the median step, which says little where steps differ."""
    found = figures("lookahead", 5000, samples_per_second=7777, slow_run=4900, fast_run=5100)
    record = comparison(found, outcome="finished" if has_charts else "under way")
    document = comparison_document(record, has_library=True)
    assert "with 5,000 samples/s" in advise(record)
    assert isinstance(document.parts[1], Section)
    (charts,) = document.parts[1].parts
    assert isinstance(charts, Charts)
    assert charts.is_plain != has_charts
    (bars,) = charts.drawn[0].series
    assert isinstance(bars, Bars)
    assert (list(bars.values), list(bars.low), list(bars.high)) == ([5000], [4900], [5100])
    if not has_charts:
        text = page_of(document)
        assert "5,000</text>" in text
        assert "7,777" not in text


def test_strategies_worse_than_a_constant_prediction_are_named() -> None:
    worse = [figures(name, 1, normalised_entropy=1.2) for name in ("lru", "fae")]
    record = comparison(*worse, figures("static", 1, normalised_entropy=0.9))
    assert remarks(record)[-1] == (
        "lru, fae: worse than always predicting the share of clicks (normalised entropy above 1)"
    )
    assert remarks(comparison(figures("static", 1))) == []


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    run = {"samples": 96, "hit_rate": 0.9, "rows_per_sample": 2.0, "bytes_per_sample": 99.0}
    names = ("all-fast", "hybrid-plain", "hybrid", "lru")
    record = comparison(*(replace(figures(name, 123_456), **run) for name in names))
    shown = StringIO()
    show_parts(comparison_document(record).parts, Console(file=shown, width=80), quiet=True)
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for word in ("samples/s", "p20-p80", "speed-up", "memory", "hit rate", "log-loss"):
        assert word in text


def test_a_column_of_empty_cells_is_shown() -> None:
    shown = StringIO()
    show_parts([Table(("name", "note"), [("lru", ""), ("fae", "")])], Console(file=shown))
    assert "lru" in shown.getvalue()
