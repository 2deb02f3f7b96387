"""Charts of many runs stay readable."""

from __future__ import annotations

import math

import pytest

from hotrow.report.charts import Bars
from hotrow.report.curves import Curve
from hotrow.report.runs import RunView, tables_hit
from hotrow.support.records import RunRecord, Summary, TableRecord

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
