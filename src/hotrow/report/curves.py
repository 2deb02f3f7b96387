"""Steps of a run, of any number, as curves of a few hundred points. Each step is read once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from hotrow.support.records import StepRecord

MOST_POINTS = 600


@dataclass
class Bin:
    """Consecutive steps, added up."""

    first: int = 0
    last: int = 0
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    lookups: int = 0
    fetched_rows: int = 0
    bytes_moved: int = 0
    losses: int = 0  # finite ones
    loss_sum: float = 0.0
    waits: int = 0
    waited_sum: float = 0.0
    least_loss: float = math.inf
    largest_loss: float = -math.inf

    @classmethod
    def of(cls, step: StepRecord) -> Bin:
        has_loss, has_wait = math.isfinite(step.loss), not math.isnan(step.waited)
        return cls(
            step.step,
            step.step,
            1,
            step.samples,
            step.seconds,
            step.lookups,
            step.fetched_rows,
            step.bytes_fetched + step.bytes_evicted,
            has_loss,
            step.loss if has_loss else 0.0,
            has_wait,
            step.waited if has_wait else 0.0,
            *((step.loss, step.loss) if has_loss else ()),
        )

    def join(self, later: Bin) -> None:
        """Add the steps that follow."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.first, self.last = self.first or later.first, later.last
        self.least_loss = min(self.least_loss, later.least_loss)
        self.largest_loss = max(self.largest_loss, later.largest_loss)

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2

    @property
    def loss(self) -> float:
        return _over(self.loss_sum, self.losses)

    @property
    def samples_per_second(self) -> float:
        return _over(self.samples, self.seconds)

    @property
    def hit_rate(self) -> float:
        return 1 - _over(self.fetched_rows, self.lookups)

    @property
    def bytes_per_second(self) -> float:
        return _over(self.bytes_moved, self.seconds)

    @property
    def waited(self) -> float:
        return _over(self.waited_sum, self.waits)


_SUMS = list(Bin.__dataclass_fields__)[2:-2]


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


@dataclass
class Curve:
    """Bins of `width` steps, the last with fewer; the width doubles when there are too many."""

    most: int = MOST_POINTS
    width: int = 1
    bins: list[Bin] = field(default_factory=list)

    @classmethod
    def of(cls, steps: Iterable[StepRecord], *, most: int = MOST_POINTS) -> Curve:
        curve = cls(most)
        for step in steps:
            curve.add(step)
        return curve

    def add(self, step: StepRecord) -> None:
        if len(self.bins) == self.most and self.bins[-1].steps == self.width:
            for left, right in zip(self.bins[::2], self.bins[1::2], strict=False):
                left.join(right)
            self.bins, self.width = self.bins[::2], 2 * self.width
        if not self.bins or self.bins[-1].steps == self.width:
            self.bins.append(Bin())
        self.bins[-1].join(Bin.of(step))

    @property
    def total(self) -> Bin:
        total = Bin()
        for part in self.bins:
            total.join(part)
        return total

    def values(self, of: Callable[[Bin], float]) -> list[float]:
        return [of(part) for part in self.bins]

    @property
    def ends(self) -> list[float]:
        """Seconds of training until the end of each bin."""
        return list(accumulate(part.seconds for part in self.bins))
