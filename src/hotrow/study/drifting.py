"""Whether what was hot stays hot."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hotrow.study.tracked_rows import Followed, Read

# Bits of a row's hot sets: of all tables or its own, of the period before or the first one.
_SETS = tuple((pooled, first) for pooled in (True, False) for first in (False, True))


@dataclass(frozen=True)
class Drift:
    """What share of a period's accesses goes to the rows that were hot before."""

    hot_rows: int
    own: NDArray[np.float64]  # [periods]: to the period's own hottest
    previous: NDArray[np.float64]  # [periods - 1]: from the second on, to those of the one before
    first: NDArray[np.float64]  # [periods - 1]: likewise, to those of the first


class Drifting:
    """The hottest rows of each period, and what they are worth in the next."""

    def __init__(self, followed: Followed, hot_part: float) -> None:
        self._followed, sizes = followed, np.diff(followed.bases)
        # By table, and at last in all.
        self._hot_rows = np.maximum(1, (hot_part * np.append(sizes, sizes.sum())).astype(np.int64))
        self._period: int | None = None
        shape = (len(sizes) + 1, 2)
        self._covered = np.zeros(shape)  # by the hot rows of the period before, and the first
        self._accesses = np.zeros(len(sizes) + 1)
        self._own: list[NDArray[np.float64]] = []
        self._found: list[NDArray[np.float64]] = []

    def add(self, period: int, read: Read) -> None:
        """Lookups of a period; another one than before ends that."""
        if self._period is not None and period != self._period:
            self._end()
        self._period = period
        self._accesses[:-1] += read.accesses
        self._followed.period[read.places] += read.counts.astype(np.uint32)
        if not self._own:
            return
        worth = read.counts if read.weights is None else read.counts * read.weights
        hot = self._followed.hot[read.places]
        for bit, (pooled, first) in enumerate(_SETS):
            mine = read.by_table(np.where(hot & (1 << bit), worth, 0))
            if pooled:
                self._covered[-1, int(first)] += mine.sum()
            else:
                self._covered[:-1, int(first)] += mine

    def _end(self) -> None:
        """Of a period: its own hot rows are those that the next one is held against."""
        followed, is_first = self._followed, not self._own
        self._accesses[-1] = self._accesses[:-1].sum()
        if not is_first:
            self._found.append(self._covered / np.maximum(1, self._accesses)[:, None])
        places, ids = followed.read_rows(followed.period)
        edges = np.searchsorted(ids, self._followed.bases)
        own = np.zeros(len(self._accesses))
        followed.hot &= sum(1 << bit for bit, (_, first) in enumerate(_SETS) if first)
        spans = [*pairwise(edges.tolist()), (0, len(places))]
        for table, (low, high) in enumerate(spans):
            pooled = table == len(spans) - 1
            mine = places[low:high]
            chosen = mine[self._hottest(mine, int(self._hot_rows[table]))]
            weights = followed.weights_of(chosen)
            uses = followed.period[chosen].astype(np.float64)
            own[table] = uses.sum() if weights is None else (uses * weights).sum()
            for bit, (of_all, first) in enumerate(_SETS):
                if of_all == pooled and (is_first or not first):
                    followed.hot[chosen] |= np.uint8(1 << bit)
        self._own.append(own / np.maximum(1, self._accesses))
        followed.period[:] = 0
        self._covered[:], self._accesses[:] = 0, 0

    def _hottest(self, places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Which of the places; of equally hot ones those with the smaller ids."""
        uses, weights = self._followed.period[places], self._followed.weights_of(places)
        if weights is not None:
            order = np.argsort(-uses.astype(np.int64), kind="stable")
            return order[: np.searchsorted(weights[order].cumsum(), count, side="right")]
        if len(uses) <= count:
            return np.arange(len(uses))
        least = np.partition(uses, len(uses) - count)[len(uses) - count]
        above = np.flatnonzero(uses > least)
        return np.concatenate([above, np.flatnonzero(uses == least)[: count - len(above)]])

    def result(self) -> list[Drift]:
        """Of each table, and at last of all."""
        if self._period is not None:
            self._end()
        own = np.array(self._own).reshape(-1, len(self._accesses))
        found = np.array(self._found).reshape(-1, len(self._accesses), 2)
        # By weights, more than everything may seem to be covered.
        own, found = np.minimum(own, 1), np.minimum(found, 1)
        return [
            Drift(int(rows), own[:, table], found[:, table, 0], found[:, table, 1])
            for table, rows in enumerate(self._hot_rows)
        ]
