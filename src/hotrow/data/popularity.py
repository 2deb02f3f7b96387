"""How popular rows are: Zipf's law, or the counts of a real table; and which row has which rank."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotrow.support.hashing import mix

HEAD_RANKS = 1024
NEARLY_MINUS_ONE = np.nextafter(-1.0, 0.0)


class Zipf:
    """Maps uniform numbers to ranks 0..n-1; monotone, so a smaller number is a hotter rank.

    P(rank = r) is proportional to r^-s for r = 1..n, for every s >= 0 and any n, in memory that
    does not grow with n. The first h ranks have a table of cumulative weights. Beyond it, with
    y = r + 1/2 and e = h + 1/2, the midpoint form of the Euler-Maclaurin sum is

        weight(r) = weight(h) + (integral of x^-s from e to y) + s/24 (y^-(s+1) - e^-(s+1))

    Its next term is below 1e-11 of the weight of one rank for h = 1024, so the sum and its inverse
    are exact to rounding.
    """

    def __init__(self, num_ranks: int, skew: float) -> None:
        if num_ranks < 1:
            raise ValueError(f"a table needs at least one row, got {num_ranks}")
        if not (math.isfinite(skew) and skew >= 0):
            raise ValueError(f"Zipf skew must be zero or positive, got {skew}")
        self.num_ranks = num_ranks
        self.skew = skew
        head = np.arange(1, min(num_ranks, HEAD_RANKS) + 1, dtype=np.float64)
        self._head = np.cumsum(head**-skew)  # [h] weights of the first 1, 2 ... h ranks
        self._edge = len(self._head) + 0.5
        self._total = self.weight(num_ranks)

    def weight(self, count: int) -> float:
        """Return the sum of r^-s over the first `count` ranks."""
        if count <= len(self._head):
            return float(self._head[count - 1]) if count > 0 else 0.0
        end, power = count + 0.5, 1.0 - self.skew
        integral = math.log(end / self._edge)
        if power:
            integral = math.pow(self._edge, power) * math.expm1(power * integral) / power
        return float(self._head[-1]) + integral + self._correction(end)

    def share(self, count: int) -> float:
        """Return the probability that a draw is among the `count` hottest ranks."""
        return self.weight(min(count, self.num_ranks)) / self._total

    def probabilities(self, count: int) -> NDArray[np.float64]:
        """Return the probability of each of the `count` hottest ranks, [count]."""
        ranks = np.arange(1, min(count, self.num_ranks) + 1, dtype=np.float64)
        return np.power(ranks, -self.skew) / self._total

    def ranks(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the rank (0 is the hottest) of each number in [0, 1], [n]."""
        target = uniform * self._total
        ranks = np.searchsorted(self._head, target, side="right")
        if self.num_ranks > len(self._head):
            tail = np.flatnonzero(ranks == len(self._head))
            ranks[tail] = self._tail_ranks(target[tail])
        # A number next to 1 may have been rounded up to it.
        np.minimum(ranks, self.num_ranks - 1, out=ranks)
        return ranks

    def _tail_ranks(self, target: NDArray[np.float64]) -> NDArray[np.int64]:
        # Inverts the integral; the correction at `end` then shifts it by s/24/end ranks.
        integral = target - (self._head[-1] + self._correction(math.inf))
        power = 1.0 - self.skew
        if power:
            ratio_power = integral * (power * math.pow(self._edge, -power))
            integral = np.log1p(np.maximum(ratio_power, NEARLY_MINUS_ONE)) / power
        end = self._edge * np.exp(integral)
        end -= self.skew / 24 / end
        ranks: NDArray[np.int64] = (end - 0.5).astype(np.int64)
        return ranks

    def _correction(self, end: float) -> float:
        power = -1.0 - self.skew
        return self.skew / 24 * (math.pow(end, power) - math.pow(self._edge, power))


class Counted:
    """Ranks as often as they were counted: the popularity of a real table, in place of Zipf's.

    Maps uniform numbers to ranks as `Zipf` does, and ranks to the rows that were counted. Counts
    say how often each row is read, but not which rows come together or after one another.

    `counts` has one number for each row, or for each row in `rows`. The other rows, up to
    `num_rows`, share evenly what is left of `total` accesses; if nothing is left they never occur.
    Rows whose count is 0 never occur.
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
        """Return the probability that a draw is among the `count` hottest ranks."""
        known = min(count, len(self._ends))
        weight = float(self._ends[known - 1]) if known else 0.0
        beyond = min(count, self.num_ranks) - known
        if beyond > 0:
            weight += self._rest * beyond / (self.num_ranks - len(self._ends))
        return weight / self._total

    def probabilities(self, count: int) -> NDArray[np.float64]:
        """Return the probability of each of the `count` hottest ranks, [count]."""
        weights = np.diff(self._ends[:count], prepend=0.0)
        beyond = min(count, self.num_ranks) - len(weights)
        if beyond > 0:
            rest = self._rest / (self.num_ranks - len(self._ends))
            weights = np.concatenate([weights, np.full(beyond, rest)])
        return weights / self._total

    def ranks(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the rank (0 is the hottest) of each number in [0, 1], [n]."""
        target = uniform * self._total
        ranks = np.searchsorted(self._ends, target, side="right")
        known = len(self._ends)
        if self._rest:
            tail = np.flatnonzero(ranks == known)
            beyond = target[tail] - (self._ends[-1] if known else 0.0)
            ranks[tail] = known + (beyond / self._rest * (self.num_ranks - known)).astype(np.int64)
        # A number next to 1 may have been rounded up to it.
        np.minimum(ranks, self.num_ranks - 1, out=ranks)
        return ranks

    def rows(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of some ranks."""
        return self._row_of[ranks]


class Scatter:
    """A seeded permutation of 0..num_rows-1 without a table, for any number of rows.

    Multiplying by an odd number, adding, and xor with a right shift are each one-to-one on words of
    b bits, so their product permutes 0..2^b-1. A result past the last row is permuted again until
    it falls inside: this follows the cycle where it started, so no two positions meet. There are
    less than twice as many words as rows, hence at most two passes on average.
    """

    def __init__(self, num_rows: int, *, key: int) -> None:
        bits = (num_rows - 1).bit_length()
        self._num_rows = np.uint64(num_rows)
        self._mask = np.uint64((1 << bits) - 1)
        self._shift = np.uint64(bits // 2 + 1)
        keys = [mix(key + step) for step in range(8)]
        self._rounds = [
            (np.uint64(a | 1), np.uint64(b)) for a, b in zip(keys[::2], keys[1::2], strict=True)
        ]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        ids = self._permute(positions.astype(np.uint64))
        outside = np.flatnonzero(ids >= self._num_rows)
        while len(outside):
            moved = self._permute(ids[outside])
            ids[outside] = moved
            outside = outside[moved >= self._num_rows]
        return ids.view(np.int64)

    def _permute(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for factor, offset in self._rounds:
            words = (words * factor + offset) & self._mask
            words ^= words >> self._shift
        return words
