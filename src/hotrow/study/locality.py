"""How the rows that batches read change: working sets of consecutive batches, and drift."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hotrow.study.skew import Estimate
from hotrow.study.tracked_rows import Read, TrackedRows

_DEVIATIONS = 2.6  # of a normal distribution, to either side: they hold 99 %
WINDOWS = tuple(1 << power for power in range(9))  # batches whose rows are counted together


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
        weights = read.weights
        self._now[0, :-1] = read.unique  # of one batch, counted also where rows are sampled
        for place, size in enumerate(WINDOWS[1:], 1):
            is_first = last_use < self._number // size * size
            rows = is_first if weights is None else is_first * weights
            self._now[place, :-1] += read.by_table(rows)
            if weights is not None:
                self._sampled[place, :-1] += read.by_table(is_first & (weights > 1))
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


# Bits of a row's hot sets: of all tables or its own, of the period before or the first one.
_SETS = tuple((pooled, first) for pooled in (True, False) for first in (False, True))


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
        # Accesses to the hot rows of the period before, and of the first.
        self._covered = np.zeros((len(sizes) + 1, 2))
        self._accesses = np.zeros(len(sizes) + 1)
        self._own: list[NDArray[np.float64]] = []
        self._later: list[NDArray[np.float64]] = []

    def add(self, period: int, read: Read) -> None:
        """Add lookups of a period. A new period ends the one before."""
        if self._period is not None and period != self._period:
            self._end()
        self._period = period
        self._accesses[:-1] += read.accesses
        self._rows.period[read.places] += read.counts.astype(np.uint32)
        if not self._own:
            return
        accesses = read.counts if read.weights is None else read.counts * read.weights
        hot = self._rows.hot[read.places]
        for bit, (pooled, first) in enumerate(_SETS):
            by_table = read.by_table(np.where(hot & (1 << bit), accesses, 0))
            if pooled:
                self._covered[-1, int(first)] += by_table.sum()
            else:
                self._covered[:-1, int(first)] += by_table

    def _end(self) -> None:
        """End a period: its hot rows are what the next one is compared with."""
        rows, is_first = self._rows, not self._own
        self._accesses[-1] = self._accesses[:-1].sum()
        if not is_first:
            self._later.append(self._covered / np.maximum(1, self._accesses)[:, None])
        places, ids = rows.read_rows(rows.period)
        edges = np.searchsorted(ids, rows.bases)
        own = np.zeros(len(self._accesses))
        rows.hot &= sum(1 << bit for bit, (_, first) in enumerate(_SETS) if first)
        spans = [*pairwise(edges.tolist()), (0, len(places))]
        for table, (low, high) in enumerate(spans):
            hottest = self._hottest(places[low:high], int(self._hot_rows[table]))
            weights = rows.weights_of(hottest)
            uses = rows.period[hottest].astype(np.float64)
            own[table] = uses.sum() if weights is None else (uses * weights).sum()
            for bit, (pooled, first) in enumerate(_SETS):
                if pooled == (table == len(spans) - 1) and (is_first or not first):
                    rows.hot[hottest] |= np.uint8(1 << bit)
        self._own.append(own / np.maximum(1, self._accesses))
        rows.period[:] = 0
        self._covered[:], self._accesses[:] = 0, 0

    def _hottest(self, places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the hottest of the places; ties: the smaller ids."""
        uses, weights = self._rows.period[places], self._rows.weights_of(places)
        hottest: NDArray[np.int64] = places
        if weights is not None:
            order = np.argsort(-uses.astype(np.int64), kind="stable")
            most = np.searchsorted(weights[order].cumsum(), count, side="right")
            hottest = places[order[:most]]
        elif len(uses) > count:
            least = np.partition(uses, len(uses) - count)[len(uses) - count]
            above = np.flatnonzero(uses > least)
            ties = np.flatnonzero(uses == least)[: count - len(above)]
            hottest = places[np.concatenate([above, ties])]
        return hottest

    def result(self) -> list[Drift]:
        """Return the drift of each table, and last of all together."""
        if self._period is not None:
            self._end()
        # Weights may add up to more than all accesses.
        own = np.minimum(np.array(self._own).reshape(-1, len(self._accesses)), 1)
        later = np.minimum(np.array(self._later).reshape(-1, len(self._accesses), 2), 1)
        return [
            Drift(int(count), own[:, table], later[:, table, 0], later[:, table, 1])
            for table, count in enumerate(self._hot_rows)
        ]
