"""Records of comparisons, invented."""

from __future__ import annotations

from typing import Any

from hotrow.support.records import ComparisonRecord, Figures

MIB = 1 << 20


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


def comparison(
    *strategies: Figures, device: str = "cuda", outcome: str = "finished", advice: str = ""
) -> ComparisonRecord:
    settings = {"run": {"device": device}, "data": {"batch_size": 2048}}
    return ComparisonRecord(
        name="kinds", started="", outcome=outcome, settings=settings,
        environment={"device": device, "threads": 1}, steps=100, repetitions=3, warm_up=10,
        baseline="hybrid", budget_bytes=2 * MIB, rows_bytes=40 * MIB,
        tolerance={"relative": 1e-4, "absolute": 1e-5, "outliers": 0.01}, notes=(),
        strategies=strategies, advice=advice,
    )  # fmt: skip
