"""How many rows have at least a count: Rand-Em Box beside exact counting."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hotrow.systems.estimate import RandEmBox, exact_rows, student_t


# From published tables of Student's t distribution; with many degrees of freedom it is normal.
@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [
        (0.975, 1, 12.7062047), (0.975, 2, 4.3026527), (0.95, 3, 2.3533634),
        (0.975, 10, 2.2281389), (0.9995, 10, 4.5868939), (0.99, 30, 2.4572615),
        (0.9995, 34, 3.6007), (0.9995, 40, 3.5509658), (0.5, 7, 0.0), (0.025, 10, -2.2281389),
        (0.975, 1000, 1.9623391),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(
    probability: float, freedom: int, quantile: float
) -> None:
    assert student_t(probability, freedom) == pytest.approx(quantile, abs=1e-4)


@pytest.mark.parametrize(("probability", "freedom"), [(0.0, 3), (1.0, 3), (0.9, 0)])
def test_there_is_no_such_quantile(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        student_t(probability, freedom)


def test_exact_counting_counts_the_rows_at_the_cut_off() -> None:
    assert exact_rows(torch.tensor([0, 1, 2, 3]), 2.0) == 2
    assert exact_rows(torch.tensor([0, 1, 2, 3]), 2.5) == 1


def scattered(part: float, num_rows: int = 200_000) -> Tensor:
    """Counts of which a part is 1, anywhere."""
    return (torch.rand(num_rows) < part).long()


# The rarest are 20 rows of 200,000, of which fewer than four are drawn on average.
@pytest.mark.parametrize("part", [1e-4, 0.01, 0.5])
def test_the_interval_holds_the_exact_count_in_99_of_100_trials(part: float) -> None:
    counts = scattered(part)
    exact = exact_rows(counts, 1)
    intervals = [RandEmBox(seed=seed).interval(counts, 1) for seed in range(400)]
    assert sum(each.low <= exact <= each.high for each in intervals) >= 396
    # And it tells something: neither all rows nor none.
    middle = sum(each.middle for each in intervals) / 400
    assert middle == pytest.approx(exact, rel=0.05 if part > 1e-4 else 0.1)
    high = sum(each.high for each in intervals) / 400
    assert high < exact + 5 * math.sqrt(exact * 200_000 / 35_840) + 60


def test_the_upper_end_is_the_estimate() -> None:
    counts, box = scattered(0.1), RandEmBox(seed=3)
    assert box(counts, 1) == box.interval(counts, 1).high > box.interval(counts, 1).middle


def test_none_found_is_not_none_there() -> None:
    counts = torch.zeros(10_000_000, dtype=torch.int64)
    counts[:20] = 5  # of 35,840 counters drawn, hardly ever one of these
    assert RandEmBox().interval(counts, 5).middle == 0
    assert RandEmBox()(counts, 5) > 20


def test_a_small_table_is_counted() -> None:
    counts = scattered(0.3, num_rows=35 * 1024)
    assert RandEmBox()(counts, 1) == exact_rows(counts, 1)


def test_stretches_go_around_the_end() -> None:
    drawn = RandEmBox(chunks=4000, chunk_rows=8)._drawn(40)
    assert (drawn.min(), drawn.max()) == (0, 39)
    assert torch.bincount(drawn.flatten()).float().std() < 80  # each row 800 times, or nearly
    steps = drawn.diff(dim=1)
    assert bool(((steps == 1) | (steps == -39)).all())


def test_rows_that_lie_together_are_missed() -> None:
    """The published estimate misses them, which is why `by_threshold` counts at the end."""
    counts = torch.zeros(4_000_000, dtype=torch.int64)
    counts[:20_000] = 1
    missed = [RandEmBox(seed=seed)(counts, 1) < 20_000 for seed in range(20)]
    assert sum(missed) > 10
