"""Charts of many runs stay readable; curves of long ones are short, and lose nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hotrow.report.charts import Bars
from hotrow.report.curves import Curve
from hotrow.report.runs import RunView, runs_document, tables_hit
from hotrow.support.records import RunRecord, StepRecord, Summary, TableRecord

SUMMARY = Summary(1, 32, 0.1, 320.0, 0.5, 0.7, 0.6, 100, 0.75, 0.1, 1920)


def run(number: int, tables: dict[str, TableRecord]) -> RunView:
    name = f"run-{number}"
    return RunView(
        name, RunRecord(name, "", "finished", {}, {}, {}, SUMMARY, tables=tables), Curve()
    )


def tables(prefix: str) -> dict[str, TableRecord]:
    """26, with as many lookups each; the last ones are the largest."""
    return {f"{prefix}{n}": TableRecord(1000, 10 + n, 5, 5) for n in range(26)}


@pytest.mark.parametrize(("different", "shown"), [(1, 10), (2, 10), (15, 40)])
def test_hit_rates_of_many_runs_are_those_of_their_largest_tables(
    different: int, shown: int
) -> None:
    chart = tables_hit([run(number, tables(f"{number % different}-C")) for number in range(15)])
    assert chart.order[0].endswith("C25")
    assert len(chart.order) == shown
    assert chart.height <= 2500
    left = different * 26 - shown
    assert chart.note == f"The {shown} tables with most lookups; {left} more left out."
    for bars in chart.series:  # every run has a bar
        assert isinstance(bars, Bars)
        assert any(math.isfinite(value) for value in bars.values)


def test_runs_without_a_table_that_is_shown_take_no_room() -> None:
    small = [run(n, {f"{n % 7}-small": TableRecord(10, 5, 5, 5)}) for n in range(14)]
    chart = tables_hit([*small, run(14, tables("C"))])
    assert [(bars.name, bars.colour) for bars in chart.series] == [("run-14", 14)]
    assert chart.height < 400


def test_a_few_runs_show_all_their_tables() -> None:
    chart = tables_hit([run(number, tables("C")) for number in range(5)])
    assert len(chart.order) == 26
    assert not chart.note


# -- curves ------------------------------------------------------------------------------


def steps(count: int) -> Iterator[StepRecord]:
    """Losses fall by one, lookups and times grow."""
    for step in range(1, count + 1):
        yield StepRecord(
            step, loss=count - step, samples=10, seconds=0.5, lookups=step, unique_rows=1,
            fetched_rows=step // 2, evicted_rows=0, bytes_fetched=step, bytes_evicted=1,
            waited=0.1,
        )  # fmt: skip


@pytest.mark.parametrize("count", [5, 8, 9, 15, 16, 17, 33, 1000])
def test_a_long_run_has_bounded_points_and_loses_nothing(count: int) -> None:
    curve, whole = Curve(steps(count), most=8), list(steps(count))
    bins = [whole[first : first + curve.width] for first in range(0, count, curve.width)]
    assert 4 <= len(bins) <= 8
    assert curve.samples_per_second == [20] * len(bins)
    assert curve.step == [part[-1].step for part in bins]
    assert curve.middle == [(part[0].step + part[-1].step) / 2 for part in bins]
    assert curve.seconds[-1] == pytest.approx(0.5 * count)
    assert curve.loss == pytest.approx([sum(x.loss for x in part) / len(part) for part in bins])
    assert curve.least_loss == [part[-1].loss for part in bins]
    assert curve.largest_loss == [part[0].loss for part in bins]
    hits = [1 - sum(x.fetched_rows for x in p) / sum(x.lookups for x in p) for p in bins]
    assert curve.hit_rate == pytest.approx(hits)
    moved = [sum(x.bytes_fetched + x.bytes_evicted for x in p) / (0.5 * len(p)) for p in bins]
    assert curve.bytes_per_second == pytest.approx(moved)


def test_what_was_not_measured_is_no_number() -> None:
    empty = StepRecord(1, math.nan, 10, 0.0, 0, 0, 0, 0, 0, 0)
    found = Curve([empty])
    for values in (found.loss, found.hit_rate, found.samples_per_second, found.waited):
        assert [math.isnan(value) for value in values] == [True]
    found = Curve([*steps(3), empty], most=1)  # the mean is of those that were measured
    assert (*found.waited, found.mean_waited, *found.loss) == pytest.approx((0.1, 0.1, 1.0))
    assert math.isnan(Curve().mean_waited)


def test_bytes_sent_between_ranks_are_shown_if_there_are_any() -> None:
    alone, other = run(0, {}), run(1, {})
    record = replace(other.record, summary=replace(SUMMARY, bytes_sent=2048))
    ranked = replace(other, record=record)
    shown = ["2.0 KiB" in str(runs_document([view]).parts[1]) for view in (alone, ranked)]
    assert shown == [False, True]
