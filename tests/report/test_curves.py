"""Curves of long runs are short, and add up to what was recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from hotrow.report.curves import Curve
from hotrow.support.records import StepRecord


def steps(count: int) -> Iterator[StepRecord]:
    """Losses fall by one, lookups and times grow."""
    for step in range(1, count + 1):
        yield StepRecord(
            step, loss=count - step, samples=10, seconds=0.5, lookups=step, unique_rows=1,
            fetched_rows=step // 2, evicted_rows=0, bytes_fetched=step, bytes_evicted=1,
            waited=0.1,
        )  # fmt: skip


def test_a_short_run_has_a_point_for_each_step() -> None:
    curve = Curve.of(steps(5))
    assert curve.width == 1
    assert curve.values(lambda x: x.middle) == [1, 2, 3, 4, 5]
    assert curve.values(lambda x: x.loss) == [4, 3, 2, 1, 0]
    assert curve.values(lambda x: x.samples_per_second) == [20] * 5
    assert curve.ends == [0.5, 1, 1.5, 2, 2.5]


@pytest.mark.parametrize("count", [8, 9, 15, 16, 17, 33, 1000])
def test_a_long_run_has_bounded_points_and_loses_nothing(count: int) -> None:
    curve, whole = Curve.of(steps(count), most=8), list(steps(count))
    assert 4 <= len(curve.bins) <= 8
    assert {each.steps for each in curve.bins[:-1]} <= {curve.width}
    assert curve.bins[0].first == 1
    assert all(a.last + 1 == b.first for a, b in zip(curve.bins, curve.bins[1:], strict=False))
    total = curve.total
    assert (total.first, total.last, total.steps) == (1, count, count)
    assert total.lookups == sum(each.lookups for each in whole)
    assert total.bytes_moved == sum(each.bytes_fetched + each.bytes_evicted for each in whole)
    assert total.seconds == pytest.approx(0.5 * count)
    assert (total.least_loss, total.largest_loss) == (0, count - 1)
    first = curve.bins[0]
    losses = [each.loss for each in whole[: first.steps]]
    assert first.loss == pytest.approx(sum(losses) / len(losses))


def test_what_was_not_measured_is_no_number() -> None:
    empty = StepRecord(1, math.nan, 10, 0.0, 0, 0, 0, 0, 0, 0)
    (found,) = Curve.of([empty]).bins
    for value in (found.loss, found.hit_rate, found.samples_per_second, found.waited):
        assert math.isnan(value)
    (found,) = Curve.of([*steps(3), empty], most=1).bins
    assert (found.waited, found.loss) == pytest.approx((0.1, 1.0))  # of those that were measured
