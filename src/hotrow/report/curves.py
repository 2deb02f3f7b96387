"""Steps of a run, of any number, as curves of a few hundred points. Reads each step once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hotrow.support.records import StepRecord

MOST_POINTS = 600


@dataclass
class Bin:
    """Some steps, one after the other, as one."""

    first: int = 0
    last: int = 0
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    lookups: int = 0
    fetched_rows: int = 0
    bytes_moved: int = 0
    read_seconds: float = 0.0
    plan_seconds: float = 0.0
    rows_seconds: float = 0.0
    losses: int = 0  # those that are numbers
    loss_sum: float = 0.0
    least_loss: float = math.inf
    largest_loss: float = -math.inf
    waits: int = 0
    waited_sum: float = 0.0

    def add(self, step: StepRecord) -> None:
        self.first = self.first or step.step
        self.last = step.step
        self.steps += 1
        self.samples += step.samples
        self.seconds += step.seconds
        self.lookups += step.lookups
        self.fetched_rows += step.fetched_rows
        self.bytes_moved += step.bytes_fetched + step.bytes_evicted
        self.read_seconds += step.read_seconds
        self.plan_seconds += step.plan_seconds
        self.rows_seconds += step.rows_seconds
        if math.isfinite(loss := step.loss):
            self.losses += 1
            self.loss_sum += loss
            self.least_loss, self.largest_loss = (
                min(self.least_loss, loss),
                max(self.largest_loss, loss),
            )
        if not math.isnan(step.waited):
            self.waits += 1
            self.waited_sum += step.waited

    def join(self, later: Bin) -> None:
        """What came after it is a part of it from now on."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.last = later.last
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


_SUMS = [
    name
    for name in Bin.__dataclass_fields__
    if name not in ("first", "last", "least_loss", "largest_loss")
]


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


@dataclass
class Curve:
    """Bins of as many steps each, but for the last; twice as many whenever there are too many."""

    most: int = MOST_POINTS
    width: int = 1  # steps in a bin
    bins: list[Bin] = field(default_factory=list)

    @classmethod
    def of(cls, steps: Iterable[StepRecord], *, most: int = MOST_POINTS) -> Curve:
        curve = cls(most)
        for step in steps:
            curve.add(step)
        return curve

    def add(self, step: StepRecord) -> None:
        if not self.bins or self.bins[-1].steps == self.width:
            if len(self.bins) == self.most:
                self._halve()
            if not self.bins or self.bins[-1].steps == self.width:
                self.bins.append(Bin())
        self.bins[-1].add(step)

    def _halve(self) -> None:
        for left, right in zip(self.bins[::2], self.bins[1::2], strict=False):
            left.join(right)
        self.bins, self.width = self.bins[::2], 2 * self.width

    @property
    def total(self) -> Bin:
        found = Bin()
        for each in self.bins:
            found.first = found.first or each.first
            found.join(each)
        return found

    def values(self, of: Callable[[Bin], float]) -> list[float]:
        return [of(each) for each in self.bins]

    @property
    def ends(self) -> list[float]:
        """Seconds of training until the end of each bin."""
        found, until = [], 0.0
        for each in self.bins:
            until += each.seconds
            found.append(until)
        return found
