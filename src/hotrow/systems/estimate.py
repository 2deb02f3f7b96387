"""The number of a table's rows with many accesses: counted, or estimated from some counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# A table's counts and a cut-off -> how many rows have at least that count; errs on the high side.
Estimate = Callable[[Tensor, float], float]


def exact_rows(counts: Tensor, cut_off: float) -> float:
    return float((counts >= cut_off).sum())


@dataclass(frozen=True)
class Interval:
    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class RandEmBox:
    """FAE's estimate from a few chunks of adjacent counters.

    The mean over the chunks, scaled to the table, has a Student-t interval; its upper end is the
    estimate. Small tables are counted.

    The estimate assumes that hot rows are spread over the table. Where they are adjacent (ids in
    the order of their first appearance) most chunks miss them and the estimate is far too small;
    `by_threshold`, which counts exactly at the end, corrects it.
    """

    chunks: int = 35
    chunk_rows: int = 1024
    confidence: float = 0.999
    seed: int = 0

    def __call__(self, counts: Tensor, cut_off: float) -> float:
        return self.interval(counts, cut_off).high

    def interval(self, counts: Tensor, cut_off: float) -> Interval:
        """Return the interval's ends and its middle, in rows of the table."""
        if len(counts) <= self.chunks * self.chunk_rows:
            exact = exact_rows(counts, cut_off)
            return Interval(exact, exact, exact)
        drawn = self._drawn(len(counts)).to(counts.device)
        hits = (counts[drawn] >= cut_off).sum(1).double()  # by chunk
        scale = len(counts) / self.chunk_rows
        mean = float(hits.mean())
        quantile = student_t((1 + self.confidence) / 2, self.chunks - 1)
        half = quantile * float(hits.std()) / math.sqrt(self.chunks)
        few = _poisson_high(float(hits.sum()), quantile) / self.chunks
        return Interval(
            low=max(0.0, mean - half) * scale,
            middle=mean * scale,
            high=min(float(len(counts)), max(mean + half, few) * scale),
        )

    def _drawn(self, num_rows: int) -> Tensor:
        """Return row numbers, [chunks, chunk_rows], the same for every cut-off."""
        draw = torch.Generator().manual_seed(self.seed)
        starts = torch.randint(num_rows, (self.chunks, 1), generator=draw)
        # Wraps around, so that all rows are equally likely.
        return (starts + torch.arange(self.chunk_rows)) % num_rows


def _poisson_high(count: float, quantile: float) -> float:
    """Return an upper bound for few hits. Without hits the published interval has no width."""
    return (math.sqrt(count + 1) + quantile / 2) ** 2


@cache
def student_t(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution, by bisection on its closed form."""
    if not 0 < probability < 1 or freedom < 1:
        raise ValueError(
            f"no quantile {probability} of Student's t with {freedom} degrees of freedom"
        )
    if probability < 0.5:
        return -student_t(1 - probability, freedom)
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(freedom)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _t_below(angle: float, freedom: int) -> float:
    """Return P(t < sqrt(freedom) tan(angle)) (Abramowitz and Stegun 26.7.3-4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for n in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (n - 1) / n
        total += term
    both_sides = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + both_sides / 2
