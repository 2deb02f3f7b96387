"""Ranks as often as they were counted: the popularity of real tables, in place of Zipf's.

A table's counts are all that is known: how often each row is read, and nothing of which rows come
together or after one another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Counted:
    """Maps uniform numbers to ranks as `Zipf` does, and ranks to the rows that were counted.

    `counts` has one number for each row, or for those named in `rows`. Rows that are not named are
    as many as `num_rows` leaves, and share evenly what is left of `total` accesses; where that is
    nothing they never occur, and neither do rows whose count is 0.
    """

    def __init__(
        self,
        counts: ArrayLike,
        rows: ArrayLike | None = None,
        *,
        num_rows: int | None = None,
        total: int | None = None,
    ) -> None:
        uses = np.asarray(counts)
        named = np.arange(len(uses)) if rows is None else np.asarray(rows, dtype=np.int64)
        self.num_rows = len(uses) if num_rows is None else num_rows
        self._check(uses, named)
        hottest = np.argsort(-uses.astype(np.int64), kind="stable")
        hottest = hottest[: int(np.count_nonzero(uses))]
        self._ends = np.cumsum(uses[hottest], dtype=np.float64)  # accesses of the first 1, 2 ...
        counted = float(self._ends[-1]) if len(self._ends) else 0.0
        self._rest = 0.0 if total is None else total - counted
        if self._rest < 0:
            raise ValueError(f"the counts add up to {counted:,.0f}, which exceeds {total:,} in all")
        others = named[:0]
        if self._rest:
            is_other = np.ones(self.num_rows, dtype=bool)
            is_other[named] = False
            others = np.flatnonzero(is_other)
        if self._rest and not len(others):
            raise ValueError(
                f"{self._rest:,.0f} of {total:,} accesses are left for rows that are not named, "
                "and there are none"
            )
        self._total = counted + self._rest
        if not self._total:
            raise ValueError("all counts are 0: there is nothing to draw")
        self._row_of = np.concatenate([named[hottest], others])
        self.num_ranks = len(self._row_of)

    def _check(self, uses: NDArray[np.generic], named: NDArray[np.int64]) -> None:
        if uses.ndim != 1 or uses.shape != named.shape or not len(uses):
            raise ValueError(
                f"give one count for each row: {list(uses.shape)} counts, {list(named.shape)} rows"
            )
        if not np.issubdtype(uses.dtype, np.integer) or int(uses.min()) < 0:
            raise ValueError("counts must be whole numbers of at least 0")
        if int(named.min()) < 0 or int(named.max()) >= self.num_rows:
            raise ValueError(f"rows must be between 0 and {self.num_rows - 1:,}")
        if len(np.unique(named)) != len(named):
            raise ValueError("a row is named twice")

    def share(self, count: int) -> float:
        """Probability that a draw is among the `count` hottest ranks."""
        known = min(count, len(self._ends))
        weight = float(self._ends[known - 1]) if known else 0.0
        beyond = min(count, self.num_ranks) - known
        if beyond > 0:
            weight += self._rest * beyond / (self.num_ranks - len(self._ends))
        return weight / self._total

    def probabilities(self, count: int) -> NDArray[np.float64]:
        """Probability of each of the `count` hottest ranks, [count]."""
        found = np.diff(self._ends[:count], prepend=0.0)
        beyond = min(count, self.num_ranks) - len(found)
        if beyond > 0:
            each = self._rest / (self.num_ranks - len(self._ends))
            found = np.concatenate([found, np.full(beyond, each)])
        return found / self._total

    def ranks(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Rank (0 is the hottest) of each number in [0, 1], [n]."""
        target = uniform * self._total
        ranks = np.searchsorted(self._ends, target, side="right")
        known = len(self._ends)
        if self._rest:
            tail = np.flatnonzero(ranks == known)
            beyond = target[tail] - (self._ends[-1] if known else 0.0)
            ranks[tail] = known + (beyond / self._rest * (self.num_ranks - known)).astype(np.int64)
        # A number next to one may have been rounded up to it, and lies behind the last rank.
        np.minimum(ranks, self.num_ranks - 1, out=ranks)
        return ranks

    def rows(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of some ranks."""
        return self._row_of[ranks]
