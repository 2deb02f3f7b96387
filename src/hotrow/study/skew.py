"""How unevenly rows are read, from their counts: coverage, and the Zipf law nearest to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotrow.data.popularity import Zipf
from hotrow.systems.calibrate import student_t

CONFIDENCE = 0.99  # of the stated errors
TOP = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # shares of the rows that are reported
_POINTS_PER_DECADE = 16
_CLEAR = 10  # accesses from which on a row's rank is not chance
_STEEPEST = 4.0

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]
Of = Callable[[Counts, Numbers, Numbers], Numbers]  # counts, rows and accesses each stands for


@dataclass(frozen=True)
class Estimate:
    """A number and its error, which is 0 where it was counted."""

    value: float
    error: float = 0.0


@dataclass(frozen=True)
class Coverage:
    """The share of accesses by the number of rows, the hottest first."""

    num_rows: int  # of the table
    rows: NDArray[np.int64]  # [n], ascending
    share: Numbers  # [n]
    error: Numbers  # [n]

    def top(self, part: float) -> Estimate:
        """Return the share of this part of the table's rows; exact for the parts in TOP."""
        rows = max(1, math.floor(part * self.num_rows))
        share = np.interp(rows, self.rows, self.share)
        return Estimate(float(share), float(np.interp(rows, self.rows, self.error)))


@dataclass(frozen=True)
class ZipfFit:
    """The exponent whose coverage is nearest. `error`: the largest distance between the two, as a
    share of the accesses, over the ranks that were read often enough to be known."""

    skew: float
    error: float


@dataclass(frozen=True)
class CountedRows:
    """Counts of rows that were read, and how many rows each one stands for."""

    counts: Counts  # [n]
    accesses: int  # of all rows, tracked or not
    group: NDArray[np.int8] | None = None  # [n]: 0: it stands for itself; others: its sample
    weight: float = 1.0  # rows that a sampled one stands for, all groups together
    groups: int = 0

    def estimate(self, of: Of) -> tuple[Numbers, Numbers]:
        """Return `of(counts, rows each stands for, accesses each stands for)` and its error."""
        if self.group is None:
            ones = np.ones(len(self.counts))
            exact = of(self.counts, ones, ones)
            return exact, np.zeros_like(exact)
        numbers = range(1, self.groups + 1)
        whole = self._of_samples(of, numbers)
        mean, error = mean_of([self._of_samples(of, [number]) for number in numbers])
        # A bias that the smaller samples share is smaller in the whole one.
        return whole, error + np.abs(whole - mean)

    def _of_samples(self, of: Of, numbers: Sequence[int]) -> Numbers:
        assert self.group is not None
        is_in = (self.group == 0) | np.isin(self.group, numbers)
        counts, is_certain = self.counts[is_in], self.group[is_in] == 0
        rows = np.where(is_certain, 1.0, self.weight * self.groups / len(numbers))
        # All accesses are known, so a sample is scaled to those that are left.
        rest = self.accesses - int(counts[is_certain].sum())
        scale = np.where(is_certain, 1.0, rest / max(1, int(counts[~is_certain].sum())))
        return of(counts, rows, scale)


def mean_of(samples: Sequence[Numbers]) -> tuple[Numbers, Numbers]:
    """Return the mean of independent estimates, and half the width of its Student-t interval."""
    values = np.array(samples)
    quantile = student_t((1 + CONFIDENCE) / 2, len(values) - 1)
    return values.mean(0), quantile * values.std(0, ddof=1) / math.sqrt(len(values))


def coverage(counted: CountedRows, num_rows: int) -> Coverage:
    """Return the coverage at ranks evenly spaced in their logarithm, and at those of TOP."""
    num_rows = max(1, num_rows)  # a column without any value has none
    decades = max(1, math.ceil(_POINTS_PER_DECADE * math.log10(max(10, num_rows))))
    points = np.geomspace(1, num_rows, decades + 1).round().astype(np.int64)
    top = [max(1, math.floor(part * num_rows)) for part in TOP]
    points = np.unique(np.concatenate([points, top]))

    def shares(counts: Counts, rows: Numbers, accesses: Numbers) -> Numbers:
        order = np.argsort(-counts, kind="stable")
        ranks = np.concatenate([[0.0], rows[order].cumsum()])
        covered = np.concatenate([[0.0], (counts * accesses)[order].cumsum()])
        share: Numbers = np.interp(points, ranks, covered) / max(1, counted.accesses)
        return share

    if counted.group is None:  # the same, in less memory
        covered = np.concatenate([[0], np.sort(counted.counts)[::-1].cumsum()])
        share = covered[np.minimum(points, len(covered) - 1)] / max(1, counted.accesses)
        return Coverage(num_rows, points, share, np.zeros(len(points)))
    share, error = counted.estimate(shares)
    return Coverage(num_rows, points, share, error)


def distinct(counted: CountedRows, num_rows: int) -> Estimate:
    count, error = counted.estimate(lambda counts, rows, _: np.array([rows.sum()]))
    return Estimate(min(float(num_rows), float(count[0])), float(error[0]))


def zipf_fit(curve: Coverage, counted: CountedRows) -> ZipfFit:
    """Minimize the largest distance; NaN without two rows or any access."""
    clear, _ = counted.estimate(lambda counts, rows, _: np.array([rows[counts >= _CLEAR].sum()]))
    used = curve.rows <= (clear[0] if clear[0] > 1 else curve.num_rows)
    if curve.num_rows < 2 or not counted.accesses:
        return ZipfFit(math.nan, math.nan)
    rows, share = curve.rows[used].tolist(), curve.share[used]

    def apart(skew: float) -> float:
        law = Zipf(curve.num_rows, skew)
        return float(np.abs(share - [law.share(count) for count in rows]).max())

    grid = np.linspace(0, _STEEPEST, 41)
    nearest = int(np.argmin([apart(skew) for skew in grid.tolist()]))
    low, high = grid[max(0, nearest - 1)], grid[min(len(grid) - 1, nearest + 1)]
    for _ in range(24):
        third = (high - low) / 3
        left, right = low + third, high - third
        low, high = (low, right) if apart(float(left)) < apart(float(right)) else (left, high)
    skew = float(low + high) / 2
    return ZipfFit(skew, apart(skew))
