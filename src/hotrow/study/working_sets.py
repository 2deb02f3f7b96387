"""How many different rows consecutive batches read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotrow.study.skew import Estimate
from hotrow.study.tracked_rows import Read

_DEVIATIONS = 2.6  # of a normal distribution, to either side, hold 99 %
WINDOWS = tuple(1 << power for power in range(9))  # batches whose rows are counted together


@dataclass(frozen=True)
class WorkingSet:
    """Different rows of so many consecutive batches; windows lie side by side."""

    batches: int
    mean: Estimate
    most: float


class Windows:
    """Different rows of 1, 2, 4 ... batches, by table and in all."""

    def __init__(self, tables: int) -> None:
        shape = (len(WINDOWS), tables + 1)
        self._now = np.zeros(shape)  # in the window under way
        self._sum, self._most = np.zeros(shape), np.zeros(shape)
        self._sampled = np.zeros(shape)  # rows that were counted by sampled ones
        self._number = 0

    def add(self, last_use: NDArray[np.int32], read: Read) -> None:
        """A batch, and which batch used each of its rows last."""
        weights = read.weights
        self._now[0, :-1] = read.unique  # of a batch alone, counted also where rows are sampled
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
        """Of each table, and at last of all; a sampled row stands for `weight` rows."""
        self._sampled[:, -1] = self._sampled[:, :-1].sum(1)
        found = []
        for table in range(self._sum.shape[1]):
            sets = []
            for place, size in enumerate(WINDOWS):
                if not (windows := self._number // size):
                    continue
                mean = self._sum[place, table] / windows
                # Each row of a window is in the sample or not; windows share rows, so that many
                # of them tell little more than one.
                sampled = self._sampled[place, table] / windows
                error = _DEVIATIONS * math.sqrt(sampled * (1 - 1 / weight)) * weight
                sets.append(
                    WorkingSet(size, Estimate(float(mean), error), float(self._most[place, table]))
                )
            found.append(tuple(sets))
        return found
