"""Steps of a run, of any number, as curves of a few hundred points. Each step is read once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hotrow.support.records import StepRecord

MOST_POINTS = 600
_READ = (
    "step", "loss", "samples", "seconds", "lookups", "fetched_rows", "bytes_fetched",
    "bytes_evicted", "waited", "rank_seconds",
)  # fmt: skip

Numbers = NDArray[np.float64]


class Curve:
    """Bins of `width` consecutive steps, the last with fewer: a power of two, so that there are at
    most `most` bins. Lists have a number for each bin; NaN: it was not measured."""

    def __init__(self, steps: Iterable[StepRecord] = (), *, most: int = MOST_POINTS) -> None:
        rows = (tuple(getattr(step, name) for name in _READ) for step in steps)
        read = np.fromiter(rows, dtype=[(name, np.float64) for name in _READ])
        self.width = 1
        while most * self.width < len(read):
            self.width *= 2
        starts = np.arange(0, len(read), self.width)

        def total(values: Numbers) -> Numbers:
            return np.add.reduceat(values, starts)

        first, last = read["step"][starts], read["step"][self.width - 1 :: self.width]
        last = np.append(last, read["step"][-1:])[: len(starts)]
        self.step: list[int] = last.astype(np.int64).tolist()
        self.middle: list[float] = ((first + last) / 2).tolist()
        seconds = total(read["seconds"])
        self.seconds: list[float] = seconds.cumsum().tolist()  # of training, until the bin's end
        loss, is_finite = read["loss"], np.isfinite(read["loss"])
        self.loss = _over(total(np.where(is_finite, loss, 0)), total(is_finite * 1.0))
        least, largest = (np.where(is_finite, loss, limit) for limit in (math.inf, -math.inf))
        self.least_loss: list[float] = np.minimum.reduceat(least, starts).tolist()
        self.largest_loss: list[float] = np.maximum.reduceat(largest, starts).tolist()
        self.samples_per_second = _over(total(read["samples"]), seconds)
        missed = _over(total(read["fetched_rows"]), total(read["lookups"]))
        self.hit_rate = [1 - share for share in missed]
        moved = total(read["bytes_fetched"] + read["bytes_evicted"])
        self.bytes_per_second = _over(moved, seconds)
        shares = _over(total(read["rank_seconds"]), seconds)
        self.rank_waited = shares if any(read["rank_seconds"]) else [math.nan] * len(shares)
        is_timed, waited = ~np.isnan(read["waited"]), np.nan_to_num(read["waited"])
        self.waited = _over(total(waited), total(is_timed * 1.0))
        self.mean_waited = waited.sum() / is_timed.sum() if is_timed.any() else math.nan


def _over(part: Numbers, whole: Numbers) -> list[float]:
    shares = np.full(len(part), math.nan)
    np.divide(part, whole, out=shares, where=whole != 0)
    found: list[float] = shares.tolist()
    return found
