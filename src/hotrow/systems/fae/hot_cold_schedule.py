"""FAE's order of samples: hot batches and cold ones in turn, at a rate that evaluations decide.

    order = HotColdOrder(separate(loader, popular, folder="sets"))
    for segment in order:                   # cold, hot, cold, ...
        ...                                 # a switch: hot rows are brought up to date
        for batch in segment:
            train(batch)
        if segment.ends_pair:
            order.note(test_loss())         # decides how long the next two segments are

Samples come in another order than the loader's, each once an epoch. Knows batches by their number
in a set alone; neither rows nor models, nor how samples were told apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Protocol

from hotrow.support.messages import warn

Kind = Literal["cold", "hot"]
KINDS: tuple[Kind, Kind] = ("cold", "hot")  # in this order

_MOST, _LEAST = 50.0, 1.0  # percent
_IMPROVED = 4  # so often running, and segments become longer


class ShuffleRate:
    """FAE's Shuffle Scheduler: how many percent of a set's batches make a segment.

    A test loss worse than the one before halves it, down to 1: hot and cold samples are mixed more.
    Four running that are not worse double it, up to 50: switches cost time.
    """

    def __init__(self, percent: float = _MOST) -> None:
        if not _LEAST <= percent <= _MOST:
            raise ValueError(f"the rate must be {_LEAST:g} to {_MOST:g} percent, got {percent:g}")
        self.percent = float(percent)
        self._before: float | None = None  # the last loss there was
        self._improved = 0
        self._told = False

    def note(self, test_loss: float | None) -> float:
        """Takes the loss after a pair of segments, None where nothing was evaluated; gives the rate
        of the next pair."""
        if test_loss is None or math.isnan(test_loss):
            self._tell_of_no_loss(test_loss)
            return self.percent
        before, self._before = self._before, float(test_loss)
        if before is None:
            return self.percent  # there is nothing to compare it with
        if test_loss > before:
            self.percent, self._improved = max(self.percent / 2, _LEAST), 0
            return self.percent
        self._improved += 1
        if self._improved == _IMPROVED:
            self.percent, self._improved = min(self.percent * 2, _MOST), 0
        return self.percent

    def _tell_of_no_loss(self, test_loss: float | None) -> None:
        if not self._told:
            what, needed = "the test loss is no number", ""
            if test_loss is None:
                what = "there is no test loss"
                needed = ". Samples to evaluate on the way are what it needs: test=, or a split"
            warn(
                f"{what}, by which hot and cold samples are mixed more or less: the rate stays at "
                f"{self.percent:g} %{needed}"
            )
        self._told = True

    def state(self) -> dict[str, Any]:
        """All there is to it, in plain values."""
        return {"percent": self.percent, "before": self._before, "improved": self._improved}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.percent, self._before = float(state["percent"]), state["before"]
        self._improved = int(state["improved"])


class BatchSet(Protocol):
    """Samples of one kind, cut into batches, in another order each epoch."""

    @property
    def samples(self) -> int: ...

    @property
    def batches_per_epoch(self) -> int: ...

    def batches(self, start: int = 0) -> Iterator[Any]:
        """From batch number `start` of all epochs on."""


class NoBatches:
    """A set without samples."""

    samples = batches_per_epoch = 0

    def batches(self, start: int = 0) -> Iterator[Any]:
        return iter(())


@dataclass(frozen=True)
class Separated:
    """Every sample of a loader, in one of two sets."""

    hot: BatchSet
    cold: BatchSet
    batch_size: int
    epochs: int
    reused: bool = False  # read again, instead of told apart

    @property
    def samples(self) -> int:
        return self.hot.samples + self.cold.samples

    def described(self) -> str:
        """How many there are, and what is unusual about it, for people."""
        sets = {"hot": self.hot, "cold": self.cold}
        counts = [
            f"{each.samples:,} {kind} ({each.samples / max(1, self.samples):.1%}, "
            f"{each.batches_per_epoch:,} batches)"
            for kind, each in sets.items()
        ]
        said = [f"{self.samples:,} samples are {' and '.join(counts)}"]
        if not self.hot.samples:
            said.append("none is hot, so all take the cold way and nothing ever switches")
        elif not self.cold.samples:
            said.append("all are hot, so nothing ever switches")
        said += [
            f"the {each.samples:,} {kind} ones do not fill a batch of {self.batch_size:,}, and are "
            "one short batch"
            for kind, each in sets.items()
            if 0 < each.samples < self.batch_size
        ]
        return "; ".join(said)


@dataclass(frozen=True)
class Segment:
    """Batches of one kind that are trained without a switch. Iterate to get them, once."""

    kind: Kind
    epoch: int
    first: int  # its first batch among those of its kind in the epoch
    last: int  # and one past its last
    ends_pair: bool  # after it the test loss is asked for
    ends_epoch: bool
    _order: HotColdOrder

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[Any]:
        return self._order._batches(self)


class HotColdOrder:
    """Segments of batches: `rate` percent of the cold ones, as many of the hot ones, and so on,
    until an epoch has had all; then the next one.

    Percents are counted over an epoch, so that both sets end together, and a pair of segments has
    at least one batch of each while there are any. The rate may change after every pair. Where one
    set is empty or has come to its end, the rest of the other is one segment, since nothing would
    switch; with `evaluates`, somebody wants to know the test loss all the same, and it goes on in
    segments at the rate.

    A segment is known when the one before it has been handed out, so a caller that reads ahead does
    so inside of a segment. Whoever leaves a segment finds the rest of it in the next one.
    """

    def __init__(
        self, sets: Separated, *, rate: ShuffleRate | None = None, evaluates: bool = False
    ) -> None:
        if not sets.samples:
            raise ValueError("there are no samples to order: both sets are empty")
        self.sets, self.rate, self._evaluates = sets, rate or ShuffleRate(), evaluates
        self.epoch = 0
        self._readers: dict[Kind, Iterator[Any]] = {}
        self._done: dict[Kind, int] = {}  # handed out in this epoch
        self._until: dict[Kind, int] = {}  # where this pair's segments end
        self._last: Kind | None = None  # whose batch was handed out last
        self._is_open = False  # a pair was begun, and nobody has gone on from it
        self._start_epoch()

    def __iter__(self) -> Iterator[Segment]:
        try:
            while self.epoch < self.sets.epochs:
                if self._is_open:
                    yield from self._rest_of_pair()
                elif self._done == self._totals:
                    self.epoch += 1
                    self._start_epoch()
                else:
                    self._next_pair()
        finally:
            self.close()

    def note(self, test_loss: float | None) -> None:
        """What was evaluated after a pair of segments; the rate follows it."""
        self.rate.note(test_loss)
        self._is_open = False

    def close(self) -> None:
        """Ends the threads that read ahead; iterating again starts them where it is needed."""
        readers, self._readers = self._readers, {}
        for each in readers.values():
            if hasattr(each, "close"):
                each.close()

    def state(self, *, ahead: int = 0) -> dict[str, Any]:
        """The place reached, in plain values. `ahead`: so many of the segment's batches were handed
        out, and are not trained yet."""
        done = dict(self._done)
        if ahead:
            if self._last is None or ahead > done[self._last]:
                raise ValueError(f"{ahead} batches were not handed out since the epoch began")
            done[self._last] -= ahead
        return {
            "epoch": self.epoch,
            "done": done,
            "until": dict(self._until),
            "last": self._last,
            "is_open": self._is_open,
            "share": [self._share.numerator, self._share.denominator],
            "rate": self.rate.state(),
            "batches": self._totals,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave, over the same sets."""
        if state["batches"] != self._totals:
            raise ValueError(
                f"the place was noted among {_counted(state['batches'])}, and there are "
                f"{_counted(self._totals)} now: the data, the hot rows or the batch size are others"
            )
        self.close()
        self.epoch = int(state["epoch"])
        self._done, self._until = dict(state["done"]), dict(state["until"])
        self._last, self._is_open = state["last"], bool(state["is_open"])
        self._share = Fraction(*state["share"])
        self.rate.load(state["rate"])

    @property
    def _totals(self) -> dict[Kind, int]:
        """Batches of an epoch."""
        return {
            "cold": self.sets.cold.batches_per_epoch,
            "hot": self.sets.hot.batches_per_epoch,
        }

    def _start_epoch(self) -> None:
        self._share = Fraction(0)  # of each set that the pairs so far take, in percent
        self._done, self._until = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        self._last, self._is_open = None, False

    def _unfinished(self) -> Kind | None:
        return next((kind for kind in KINDS if self._done[kind] < self._until[kind]), None)

    def _rest_of_pair(self) -> Iterator[Segment]:
        """What is left of it: no batch, maybe, but the question how well it went."""
        while self._is_open:
            kind = self._unfinished() or self._last
            assert kind is not None
            segment = self._segment(kind)
            yield segment
            if len(segment) and self._is_open and segment.first == self._done[kind]:
                raise ValueError(
                    f"nothing was read of a segment of {len(segment):,} {kind} batches, and there "
                    "is no next one before it was"
                )
            self._is_open = self._unfinished() is not None

    def _next_pair(self) -> None:
        self._is_open, totals = True, self._totals
        going = [kind for kind in KINDS if self._done[kind] < totals[kind]]
        if len(going) == 1 and not self._evaluates:
            self._until = totals
            return
        # Sums of rates are kept exactly: after so many pairs an epoch is over, not nearly over.
        step = Fraction(self.rate.percent)
        least = max(Fraction(100 * self._done[kind], totals[kind]) for kind in going)
        self._share += step
        if self._share <= least:  # a set so small that a pair would have none of it
            self._share += step * ((least - self._share) // step + 1)
        share = min(self._share / 100, Fraction(1))
        self._until = {kind: math.ceil(share * totals[kind]) for kind in KINDS}
        if self._until["cold"] == totals["cold"] and not self._evaluates:
            self._until = totals

    def _segment(self, kind: Kind) -> Segment:
        totals, first, last = self._totals, self._done[kind], self._until[kind]
        other = KINDS[kind == "cold"]
        is_last = self._done[other] == self._until[other]  # of its pair
        return Segment(
            kind,
            self.epoch,
            first,
            last,
            ends_pair=is_last and (self._evaluates or min(totals.values()) > 0),
            ends_epoch=is_last and self._until == totals,
            _order=self,
        )

    def _batches(self, segment: Segment) -> Iterator[Any]:
        """Of a segment, from where it was left."""
        kind = segment.kind
        if segment.epoch != self.epoch or not segment.first <= self._done[kind] <= segment.last:
            raise ValueError("a segment is read when it is given, and this one has gone by")
        while self._done[kind] < segment.last:
            batch = self._next(kind)
            self._done[kind] += 1
            self._last = kind
            yield batch

    def _next(self, kind: Kind) -> Any:
        mine: BatchSet = getattr(self.sets, kind)
        reader = self._readers.get(kind)
        if reader is None:
            place = self.epoch * mine.batches_per_epoch + self._done[kind]
            reader = self._readers[kind] = mine.batches(place)
        try:
            return next(reader)
        except StopIteration:
            raise ValueError(
                f"the {kind} samples ended after {self._done[kind]:,} of "
                f"{mine.batches_per_epoch:,} batches in epoch {self.epoch}"
            ) from None


def _counted(batches: Mapping[Kind, int]) -> str:
    return " and ".join(f"{count:,} {kind}" for kind, count in batches.items()) + " batches"
