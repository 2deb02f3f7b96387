"""Zipf ranks by exact inversion. Knows nothing about tables, ids or clicks.

P(rank = r) is proportional to r^-s for r = 1..n, for every s >= 0 and any n, in memory that does
not grow with n. The first h ranks have a table of cumulative weights. Beyond it, with y = r + 1/2
and e = h + 1/2, the midpoint form of the Euler-Maclaurin sum is

    weight(r) = weight(h) + (integral of x^-s from e to y) + s/24 (y^-(s+1) - e^-(s+1))

Its next term is below 1e-11 of the weight of one rank for h = 1024, so the sum and its inverse
are exact to rounding.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

HEAD_RANKS = 1024
NEARLY_MINUS_ONE = np.nextafter(-1.0, 0.0)


class Zipf:
    """Maps uniform numbers to ranks 0..n-1; monotone, so a smaller number is a hotter rank."""

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
        """Sum of r^-s over the first `count` ranks."""
        if count <= len(self._head):
            return float(self._head[count - 1]) if count > 0 else 0.0
        end, power = count + 0.5, 1.0 - self.skew
        integral = math.log(end / self._edge)
        if power:
            integral = math.pow(self._edge, power) * math.expm1(power * integral) / power
        return float(self._head[-1]) + integral + self._correction(end)

    def share(self, count: int) -> float:
        """Probability that a draw is among the `count` hottest ranks."""
        return self.weight(min(count, self.num_ranks)) / self._total

    def probabilities(self, count: int) -> NDArray[np.float64]:
        """Probability of each of the `count` hottest ranks, [count]."""
        ranks = np.arange(1, min(count, self.num_ranks) + 1, dtype=np.float64)
        return np.power(ranks, -self.skew) / self._total

    def ranks(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Rank (0 is the hottest) of each number in [0, 1], [n]."""
        target = uniform * self._total
        ranks = np.searchsorted(self._head, target, side="right")
        if self.num_ranks > len(self._head):
            tail = np.flatnonzero(ranks == len(self._head))
            ranks[tail] = self._tail_ranks(target[tail])
        # A number next to one may have been rounded up to it, and lies behind the last rank.
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
