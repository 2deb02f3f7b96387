"""Advice follows from figures, and says when they cannot tell."""

from __future__ import annotations

from typing import Any

import pytest

from hotrow.report import comparison
from hotrow.report.advice import advise
from hotrow.report.charts import Bars
from hotrow.report.comparison import comparison_document, remarks
from hotrow.report.document import Charts, Section
from hotrow.report.page import page_of
from hotrow.support.records import ComparisonRecord, Figures


def figures(strategy: str, rate: float, **others: Any) -> Figures:
    """Of a strategy with a spread of 2 % to either side."""
    given: dict[str, Any] = {
        "contract": "exact",
        "outcome": "finished",
        "samples_per_second": rate,
        "whole_run": rate,
        "slow_samples_per_second": 0.98 * rate,
        "fast_samples_per_second": 1.02 * rate,
        "speed_up": rate / 1000,
        "equal": "bits",
    }
    return Figures(strategy=strategy, summary="", **(given | others))


def record_of(*strategies: Figures, device: str = "cuda", outcome: str) -> ComparisonRecord:
    settings = {"run": {"device": device}, "data": {"batch_size": 9}}
    return ComparisonRecord(
        name="x", started="", outcome=outcome, settings=settings,
        environment={"device": device, "threads": 1}, steps=100, repetitions=3, warm_up=10,
        baseline="hybrid", budget_bytes=2 << 20, rows_bytes=40 << 20,
        tolerance={"relative": 0.1, "absolute": 0.1, "outliers": 0.1}, notes=(),
        strategies=strategies,
    )  # fmt: skip


def advice(*strategies: Figures, device: str = "cuda", outcome: str = "finished") -> str:
    return advise(record_of(*strategies, device=device, outcome=outcome))


ALL_FAST = figures("all-fast", 6000, is_within_budget=False, fast_bytes=40 << 20)
HYBRID = figures("hybrid", 1000, contract="exact up to rounding")


def test_the_fastest_exact_one_within_the_budget_is_taken() -> None:
    assert advice(ALL_FAST, HYBRID, figures("lru", 3000), figures("lookahead", 5000)) == (
        "Take lookahead: with 5,000 samples/s, 5.00 times hybrid, the fastest that is exact within "
        "the budget of 2.0 MiB. all-fast is 1.20 times as fast, with 40.0 MiB of fast memory."
    )


def test_differences_within_the_spread_are_told() -> None:
    said = advice(ALL_FAST, figures("lru", 4900), figures("lookahead", 5000), figures("static", 10))
    assert "Differences to lru are within the spread." in said


def test_what_changes_the_training_is_told_with_its_quality() -> None:
    fae = figures("fae", 5500, contract="changed", equal="no", auc=0.7)
    assert "fae is 1.10 times as fast and changes" not in advice(fae)
    said = advice(fae, figures("lookahead", 5000, auc=0.75))
    assert "fae is 1.10 times as fast, and changes the training: AUC 0.7000 instead of" in said
    assert said.startswith("Take lookahead")


def test_rounding_is_taken_where_nothing_exact_ran() -> None:
    assert advice(ALL_FAST, HYBRID).startswith("Take hybrid: with 1,000 samples/s the fastest that")


def test_a_broken_promise_is_told_first_and_never_taken() -> None:
    said = advice(figures("lookahead", 5000, equal="no"), figures("lru", 3000))
    assert said.startswith("Do not use lookahead: exact by contract, but not equal")
    assert "Take lru" in said


@pytest.mark.parametrize(
    "strategy",
    [figures("lru", float("nan"), outcome="failed"), figures("lru", 9, outcome="diverged")],
)
def test_without_a_choice_it_says_so(strategy: Figures) -> None:
    assert advice(ALL_FAST, strategy) == (
        "No strategy with all-fast's results ran within the budget of 2.0 MiB."
    )


def test_where_every_loss_is_nan_nothing_is_said_of_budgets() -> None:
    said = advice(figures("all-fast", 9, outcome="diverged"), figures("lru", 9, outcome="diverged"))
    assert said.startswith("Every loss is NaN at the end")


def test_of_a_comparison_that_was_stopped_at_once_there_is_none() -> None:
    unfinished = figures("lru", float("nan"), outcome="unfinished")
    assert "before any strategy had ended" in advice(unfinished, outcome="interrupted")
    assert advice(unfinished, HYBRID, outcome="interrupted").startswith("Take hybrid")


def test_speeds_of_a_cpu_are_not_oversold() -> None:
    assert advice(HYBRID, device="cpu").endswith("these speeds say nothing about a GPU.")


@pytest.mark.parametrize("has_charts", [False, True])
def test_bars_are_of_what_the_advice_is_of(
    monkeypatch: pytest.MonkeyPatch, has_charts: bool
) -> None:
    """Whole runs, and not the median step, which says little where steps differ."""
    found = figures("lookahead", 5000, samples_per_second=7777, slow_run=4900, fast_run=5100)
    record = record_of(found, outcome="finished" if has_charts else "under way")
    monkeypatch.setattr(comparison, "library", lambda: "")
    document = comparison_document(record)
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
    record = record_of(*worse, figures("static", 1, normalised_entropy=0.9), outcome="finished")
    assert remarks(record)[-1] == (
        "lru, fae: worse than always predicting the share of clicks (normalised entropy above 1)"
    )
    assert remarks(record_of(figures("static", 1), outcome="finished")) == []
