"""FAE's order of samples: hot and cold batches in turn, at a rate that test losses decide.

    order = HotColdOrder(separate(loader, popular, folder="sets"))
    for segment in order:                   # cold, hot, cold, ...
        for batch in segment:
            train(batch)
        if segment.ends_pair:
            order.rate.note(test_loss())    # decides how long the next two segments are

The order of samples differs from the loader's; each sample comes once an epoch. This module knows
batches by their number in a set. It knows neither rows nor models, nor why a sample is hot.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, Literal, Protocol

from hotrow.support.messages import warn

Kind = Literal["cold", "hot"]
KINDS: tuple[Kind, Kind] = ("cold", "hot")  # in this order

_MOST, _LEAST = 50.0, 1.0  # percent
_IMPROVED = 4  # consecutive losses that are not worse before segments grow


class ShuffleRate:
    """FAE's Shuffle Scheduler: the percentage of a set's batches that make a segment.

    A test loss above the one before halves the rate, down to 1: hot and cold samples are mixed
    more. Four consecutive losses that are not worse double it, up to 50: switches cost time.
    """

    def __init__(self, percent: float = _MOST) -> None:
        if not _LEAST <= percent <= _MOST:
            raise ValueError(f"the rate must be {_LEAST:g} to {_MOST:g} percent, got {percent:g}")
        self.percent = float(percent)
        self._before: float | None = None  # the last loss
        self._improved = 0
        self._warned = False

    def note(self, test_loss: float | None) -> float:
        """Take the loss after a pair of segments (None: not evaluated); return the next rate."""
        if test_loss is None or math.isnan(test_loss):
            self._warn_once(test_loss)
            return self.percent
        before, self._before = self._before, float(test_loss)
        if before is None:
            return self.percent
        if test_loss > before:
            self.percent, self._improved = max(self.percent / 2, _LEAST), 0
            return self.percent
        self._improved += 1
        if self._improved == _IMPROVED:
            self.percent, self._improved = min(self.percent * 2, _MOST), 0
        return self.percent

    def _warn_once(self, test_loss: float | None) -> None:
        if not self._warned:
            what, remedy = "the test loss is NaN", ""
            if test_loss is None:
                what = "there is no test loss"
                remedy = ". Give samples to evaluate on during training: test=, or a split"
            warn(
                f"{what}, by which hot and cold samples are mixed more or less: the rate stays at "
                f"{self.percent:g} %{remedy}"
            )
        self._warned = True


class BatchSet(Protocol):
    """Samples of one kind, cut into batches, in another order each epoch."""

    @property
    def samples(self) -> int: ...

    @property
    def batches_per_epoch(self) -> int: ...

    def batches(self) -> Iterator[Any]:
        """Yield the batches of all epochs."""


class NoBatches:
    """A set without samples."""

    samples = batches_per_epoch = 0

    def batches(self) -> Iterator[Any]:
        return iter(())


@dataclass(frozen=True)
class Separated:
    """Every sample of a loader, in one of two sets."""

    hot: BatchSet
    cold: BatchSet
    epochs: int
    reused: bool = False  # read from an earlier run's files

    @property
    def samples(self) -> int:
        return self.hot.samples + self.cold.samples

    @property
    def batches_per_epoch(self) -> int:
        return self.hot.batches_per_epoch + self.cold.batches_per_epoch


@dataclass
class Segment:
    """Batches of one kind that are trained without a switch. Iterate once to get them."""

    kind: Kind
    epoch: int
    first: int  # number of its first batch among those of its kind in the epoch
    last: int  # one past its last
    ends_pair: bool  # the test loss is wanted after it
    _reader: Iterator[Any]
    read: int = 0  # batches that were handed out

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(self._reader, len(self) - self.read):
            self.read += 1
            yield batch


class HotColdOrder:
    """Segments of batches: `rate` percent of the cold ones, then as many of the hot ones, and so
    on until an epoch has had all batches; then the next epoch.

    Percentages are summed over an epoch, so that both sets end together. A pair of segments has at
    least one batch of each set that has any left. The rate may change after every pair. Where one
    set is empty or has ended, the rest of the other is one segment, since nothing would switch;
    with `evaluates` it still comes in segments at the rate, and each asks for a test loss.

    A segment must be read to its end before the next one is asked for.
    """

    def __init__(
        self, sets: Separated, *, rate: ShuffleRate | None = None, evaluates: bool = False
    ) -> None:
        if not sets.samples:
            raise ValueError("there are no samples to order: both sets are empty")
        self.sets, self.rate, self._evaluates = sets, rate or ShuffleRate(), evaluates
        self._totals: dict[Kind, int] = {
            "cold": sets.cold.batches_per_epoch,
            "hot": sets.hot.batches_per_epoch,
        }

    def __iter__(self) -> Generator[Segment]:
        """Yield segments. Closing this ends the threads that read ahead."""
        readers: dict[Kind, Any] = {
            "cold": self.sets.cold.batches(),
            "hot": self.sets.hot.batches(),
        }
        try:
            for epoch in range(self.sets.epochs):
                yield from self._epoch(epoch, readers)
        finally:
            for reader in readers.values():
                if hasattr(reader, "close"):
                    reader.close()

    def _epoch(self, epoch: int, readers: dict[Kind, Any]) -> Iterator[Segment]:
        done, share = dict.fromkeys(KINDS, 0), Fraction(0)
        mixes = min(self._totals.values()) > 0
        while done != self._totals:
            share, until = self._next_pair(done, share)
            kinds = [kind for kind in KINDS if done[kind] < until[kind]]
            for kind in kinds:
                ends_pair = kind == kinds[-1] and (self._evaluates or mixes)
                segment = Segment(kind, epoch, done[kind], until[kind], ends_pair, readers[kind])
                yield segment
                if segment.read < len(segment):
                    raise ValueError(
                        f"{segment.read:,} batches were read of a segment of {len(segment):,} "
                        f"{kind} ones in epoch {epoch}: all of them come before the next segment"
                    )
            done = until

    def _next_pair(
        self, done: dict[Kind, int], share: Fraction
    ) -> tuple[Fraction, dict[Kind, int]]:
        """Return the percentage that all pairs so far take of each set, and where this one ends."""
        totals = self._totals
        unfinished = [kind for kind in KINDS if done[kind] < totals[kind]]
        if len(unfinished) == 1 and not self._evaluates:
            return share, totals
        # Rates are summed as fractions, so that an epoch ends exactly.
        step = Fraction(self.rate.percent)
        least = max(Fraction(100 * done[kind], totals[kind]) for kind in unfinished)
        share += step
        if share <= least:  # a set so small that this pair would have none of it
            share += step * ((least - share) // step + 1)
        part = min(share / 100, Fraction(1))
        until: dict[Kind, int] = {kind: math.ceil(part * totals[kind]) for kind in KINDS}
        if until["cold"] == totals["cold"] and not self._evaluates:
            until = totals
        return share, until
