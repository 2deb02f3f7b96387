"""Counters of rows while a trace is read, and what they tell: skew, working sets and drift.

All rows are tracked while they fit memory. Else rows are sampled by a hash of their ids, so that
all accesses of a row are seen or none (spatial sampling, as in SHARDS: Waldspurger et al., FAST
2015). The rows that the first batches read most are tracked as well, each for itself: only the many
rows with few accesses are estimated. The sample consists of several smaller ones, whose spread
gives the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.popularity import Scatter, Zipf
from hotrow.sizing.reuse import NEVER
from hotrow.support.hashing import key_of
from hotrow.systems.calibrate import student_t

# 21 while counting; at the end, when rows are ranked, up to so many if every row was read.
BYTES_PER_ROW = 48
_SAMPLED_BYTES = 96  # of each tracked row where rows are sampled: its id and weight as well
GROUPS = 8
_DEVIATIONS = 2.6  # of a normal distribution, to either side: they hold 99 %
WINDOWS = tuple(1 << power for power in range(9))  # batches whose rows are counted together

CONFIDENCE = 0.99  # of the stated errors
TOP = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # shares of the rows that are reported
_POINTS_PER_DECADE = 16
_CLEAR = 10  # accesses from which on a row's rank is not chance
_STEEPEST = 4.0

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]
Of = Callable[[Counts, Numbers, Numbers], Numbers]  # counts, rows and accesses each stands for
Ids = NDArray[Any]  # int32 or int64
Places = NDArray[np.int64]


def fitting_rows(memory_bytes: int, num_rows: int) -> int:
    """Return how many rows can be tracked."""
    if num_rows * BYTES_PER_ROW <= memory_bytes:
        return num_rows
    return min(num_rows - 1, memory_bytes // _SAMPLED_BYTES)


def choose(
    sizes: NDArray[np.int64], most: int, ids: Ids, counts: Counts, *, seed: int = 0
) -> TrackedRows:
    """Track `most` rows, half of them those that the first batches read most. `sizes`: rows of each
    table."""
    if most < 16 * GROUPS:
        raise ValueError(
            f"--memory has room for {most:,} of {sizes.sum():,} rows, too few to estimate from; "
            f"give {16 * GROUPS * _SAMPLED_BYTES:,} bytes at least"
        )
    hottest = np.argsort(-counts, kind="stable")[: most // 2]
    certain = np.sort(ids[hottest[counts[hottest] > 1]]).astype(np.int64)
    return TrackedRows(sizes, certain, most - len(certain), seed)


@dataclass(frozen=True)
class Read:
    """Some lookups: the different tracked rows among them, ascending by id."""

    places: Places | Ids  # [n]: of the rows among the tracked ones
    counts: Counts  # [n]: lookups of each row
    weights: NDArray[np.float64]  # [n]: rows that each one stands for
    edges: NDArray[np.int64]  # [tables + 1]: where the rows of each table begin
    accesses: NDArray[np.int64]  # [tables]: of all rows, tracked or not
    unique: NDArray[np.int64]  # [tables]: likewise

    def by_table(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sum values of these rows by table."""
        return _sums(values, self.edges)


def _sums(values: NDArray[Any], edges: NDArray[np.int64]) -> NDArray[Any]:
    """Sum the values from each edge to the next."""
    sums = np.concatenate([[0], np.cumsum(values)])
    between: NDArray[Any] = sums[edges[1:]] - sums[edges[:-1]]
    return between


def unique(ids: Ids) -> tuple[Ids, Counts]:
    """Return the different ids, ascending, and the count of each; padding is left out."""
    ids = np.sort(ids)
    ids = ids[np.searchsorted(ids, 0) :]
    is_new = np.ones(len(ids), dtype=bool)
    np.not_equal(ids[1:], ids[:-1], out=is_new[1:])
    starts = np.flatnonzero(is_new)
    return ids[starts], np.diff(starts, append=len(ids))


class TrackedRows:
    """Counters of rows, by their places among the tracked ones."""

    def __init__(
        self,
        sizes: NDArray[np.int64],
        certain: NDArray[np.int64] | None = None,
        sampled: int = 0,
        seed: int = 0,
    ) -> None:
        """`sizes`: rows of each table. `certain`: ids of rows that stand for themselves, by default
        all. `sampled` rows are tracked besides: so many positions of a permutation of all rows."""
        self.bases = np.concatenate([[0], sizes.cumsum()])
        self.num_rows = int(self.bases[-1])
        self.certain, self._sampled, self.is_exact = certain, sampled, certain is None
        size, self.weight = self.num_rows, 1.0  # rows that a sampled one stands for
        self._ids: NDArray[np.int64] | None = None
        if certain is not None:
            size, self.weight = len(certain) + sampled, self.num_rows / sampled
            self._ids = np.full(size, -1, dtype=np.int64)
            self._ids[: len(certain)] = certain
            self._scatter = Scatter(self.num_rows, key=key_of(seed, "followed", 0))
        self.last_use = np.full(size, NEVER, dtype=np.int32)
        self.counts = np.zeros(size, dtype=np.int64)
        self.uses = np.zeros(size, dtype=np.int32)  # batches that read it
        self.period = np.zeros(size, dtype=np.uint32)  # accesses in the current period
        self.hot = np.zeros(size, dtype=np.uint8)  # a bit for each hot set

    def find(self, ids: Ids) -> tuple[Places, NDArray[np.bool_]]:
        """Return the places of ids among the certain ones, and whether they are there."""
        assert self.certain is not None
        at = np.searchsorted(self.certain, ids)
        if not len(self.certain):
            return at, np.zeros(len(ids), np.bool_)
        return at, np.take(self.certain, at, mode="clip") == ids

    def read(self, lookups: Ids) -> Read:
        """Return what lookups read, in any order and with repetitions."""
        ids, counts = unique(lookups)
        edges = np.searchsorted(ids, self.bases)
        if edges[-1] < len(ids):
            raise ValueError(f"there is an id {ids[-1]:,}; the tables have {self.bases[-1]:,} rows")
        accesses, different = _sums(counts, edges), np.diff(edges)
        if self._ids is None:
            return Read(ids, counts, self.weights_of(ids), edges, accesses, different)
        at, is_certain = self.find(ids)
        drawn = self._scatter(ids.astype(np.int64))
        is_in = is_certain | (drawn < self._sampled)
        first_sampled = len(self._ids) - self._sampled
        places = np.where(is_certain, at, first_sampled + drawn)[is_in]
        ids, counts = ids[is_in], counts[is_in]
        self._ids[places] = ids
        edges = np.searchsorted(ids, self.bases)
        return Read(places, counts, self.weights_of(places), edges, accesses, different)

    def groups_of(self, places: Places) -> NDArray[np.int8]:
        """Return 0 for a row that stands for itself, else the number of its sample."""
        assert self.certain is not None
        drawn = places - len(self.certain)
        return np.where(drawn < 0, 0, 1 + drawn % GROUPS).astype(np.int8)

    def weights_of(self, places: Places) -> NDArray[np.float64]:
        """Return how many rows each of them stands for."""
        if self.certain is None:
            return np.broadcast_to(1.0, len(places))  # takes no memory
        return np.where(places < len(self.certain), 1.0, self.weight)

    def forget_uses(self) -> None:
        """Free what is not needed after the trace."""
        empty = self.last_use[:0].copy()
        self.last_use, self.period, self.hot = empty, empty.view(np.uint32), empty.view(np.uint8)

    def read_rows(self, values: NDArray[Any]) -> tuple[Places, NDArray[np.int64]]:
        """Return the places where `values` is not 0, and their ids, ascending by id."""
        places = np.flatnonzero(values)
        if self._ids is None:
            return places, places
        ids = self._ids[places]
        order = np.argsort(ids)
        return places[order], ids[order]

    def counted(self, places: Places, accesses: int) -> CountedRows:
        """Return how often some rows were read, and how many rows they stand for."""
        counts = self.counts[places]
        groups = None if self.is_exact else self.groups_of(places)
        return CountedRows(counts, accesses, groups, self.weight)


# -- skew ----------------------------------------------------------------------------------


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

    def estimate(self, of: Of) -> tuple[Numbers, Numbers]:
        """Return `of(counts, rows each stands for, accesses each stands for)` and its error."""
        if self.group is None:
            ones = np.ones(len(self.counts))
            exact = of(self.counts, ones, ones)
            return exact, np.zeros_like(exact)
        numbers = range(1, GROUPS + 1)
        whole = self._of_samples(of, numbers)
        mean, error = mean_of([self._of_samples(of, [number]) for number in numbers])
        # A bias that the smaller samples share is smaller in the whole one.
        return whole, error + np.abs(whole - mean)

    def _of_samples(self, of: Of, numbers: Sequence[int]) -> Numbers:
        assert self.group is not None
        is_in = (self.group == 0) | np.isin(self.group, numbers)
        counts, is_certain = self.counts[is_in], self.group[is_in] == 0
        rows = np.where(is_certain, 1.0, self.weight * GROUPS / len(numbers))
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


# -- working sets ------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkingSet:
    """Different rows of so many consecutive batches, in windows side by side."""

    batches: int
    mean: Estimate
    most: float


class WorkingSets:
    """Counts the different rows of 1, 2, 4 ... batches, by table and in all."""

    def __init__(self, tables: int) -> None:
        shape = (len(WINDOWS), tables + 1)
        self._now = np.zeros(shape)  # in the current window
        self._sum, self._most = np.zeros(shape), np.zeros(shape)
        self._sampled = np.zeros(shape)  # sampled rows among those counted
        self._number = 0

    def add(self, last_use: NDArray[np.int32], read: Read) -> None:
        """Add a batch. `last_use`: the batch that used each of its rows last."""
        self._now[0, :-1] = read.unique  # of one batch, counted also where rows are sampled
        for place, size in enumerate(WINDOWS[1:], 1):
            is_first = last_use < self._number // size * size
            self._now[place, :-1] += read.by_table(is_first * read.weights)
            self._sampled[place, :-1] += read.by_table(is_first & (read.weights > 1))
        self._number += 1
        for place, size in enumerate(WINDOWS):
            if self._number % size == 0:
                self._now[place, -1] = self._now[place, :-1].sum()
                self._sum[place] += self._now[place]
                np.maximum(self._most[place], self._now[place], out=self._most[place])
                self._now[place] = 0

    def result(self, weight: float) -> list[tuple[WorkingSet, ...]]:
        """Return those of each table, and last those of all. A sampled row is `weight` rows."""
        self._sampled[:, -1] = self._sampled[:, :-1].sum(1)
        windows = self._number // np.array(WINDOWS)[:, None]
        mean, sampled = (total / np.maximum(1, windows) for total in (self._sum, self._sampled))
        # A row is in the sample or not. Windows share rows, so more windows tell little more.
        error = _DEVIATIONS * np.sqrt(sampled * (1 - 1 / weight)) * weight
        by_table = zip(mean.T.tolist(), error.T.tolist(), self._most.T.tolist(), strict=True)
        return [
            tuple(
                WorkingSet(size, Estimate(value, apart), most)
                for count, size, value, apart, most in zip(
                    windows.flat, WINDOWS, *columns, strict=True
                )
                if count
            )
            for columns in by_table
        ]


# -- drift -----------------------------------------------------------------------------

# Bits of a row's hot sets, of its own table and of all: of the period before, and of the first.
_PREVIOUS, _FIRST, _POOLED = 1, 2, 2  # those of all tables are shifted by _POOLED


@dataclass(frozen=True)
class Drift:
    """The share of a period's accesses that goes to rows that were hot before."""

    hot_rows: int
    own: NDArray[np.float64]  # [periods]: to the period's own hottest rows
    previous: NDArray[np.float64]  # [periods - 1]: from the second on, to those of the one before
    first: NDArray[np.float64]  # [periods - 1]: likewise, to those of the first


class Drifting:
    """Finds the hottest rows of each period, and their share of the next one's accesses."""

    def __init__(self, rows: TrackedRows, hot_part: float) -> None:
        self._rows, sizes = rows, np.diff(rows.bases)
        # By table, and last in all.
        self._hot_rows = np.maximum(1, (hot_part * np.append(sizes, sizes.sum())).astype(np.int64))
        self._period: int | None = None
        self._accesses = np.zeros(len(sizes))
        # [periods, tables + 1, 3]: shares of the period's own hot rows, and of those before.
        self._shares: list[NDArray[np.float64]] = []

    def add(self, period: int, read: Read) -> None:
        """Add lookups of a period. A new period ends the one before."""
        if self._period is not None and period != self._period:
            self._end()
        self._period = period
        self._accesses += read.accesses
        self._rows.period[read.places] += read.counts.astype(np.uint32)

    def _end(self) -> None:
        """End a period: its hot rows are what the next one is compared with."""
        rows = self._rows
        places, ids = rows.read_rows(rows.period)
        uses, before = rows.period[places] * rows.weights_of(places), rows.hot[places]
        rows.hot &= _FIRST | _FIRST << _POOLED
        spans = [*pairwise(np.searchsorted(ids, rows.bases).tolist()), (0, len(places))]
        shares = np.zeros((len(spans), 3))
        for table, (low, high) in enumerate(spans):
            shift = _POOLED if table == len(spans) - 1 else 0
            hottest = self._hottest(places[low:high], int(self._hot_rows[table]))
            shares[table, 0] = (rows.period[hottest] * rows.weights_of(hottest)).sum()
            for column, bit in ((1, _PREVIOUS), (2, _FIRST)):
                shares[table, column] = uses[low:high][before[low:high] & bit << shift > 0].sum()
            bits = _PREVIOUS if self._shares else _PREVIOUS | _FIRST
            rows.hot[hottest] |= np.uint8(bits << shift)
        accesses = np.append(self._accesses, self._accesses.sum())
        # Weights may add up to more than all accesses.
        self._shares.append(np.minimum(shares / np.maximum(1, accesses)[:, None], 1))
        rows.period[:], self._accesses[:] = 0, 0

    def _hottest(self, places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the hottest of the places; ties: the smaller ids."""
        uses = self._rows.period[places]
        if not self._rows.is_exact:
            order = np.argsort(-uses.astype(np.int64), kind="stable")
            weights = self._rows.weights_of(places[order])
            hottest: Places = order[: np.searchsorted(weights.cumsum(), count, side="right")]
            return places[hottest]
        if len(uses) <= count:
            return places
        least = np.partition(uses, len(uses) - count)[len(uses) - count]
        above = np.flatnonzero(uses > least)
        ties = np.flatnonzero(uses == least)[: count - len(above)]
        hottest = np.concatenate([above, ties])
        return places[hottest]

    def result(self) -> list[Drift]:
        """Return the drift of each table, and last of all together."""
        if self._period is not None:
            self._end()
        shares = np.array(self._shares).reshape(-1, len(self._hot_rows), 3)
        return [
            Drift(int(count), shares[:, table, 0], shares[1:, table, 1], shares[1:, table, 2])
            for table, count in enumerate(self._hot_rows)
        ]
