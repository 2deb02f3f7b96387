"""Hotline's learning phases and loggers: which rows are popular, learned while training runs.

A log counts accesses and chooses hot rows; `Learning` decides when. This module sees ids, not rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hotrow.inputs.batch import Batch
from hotrow.inputs.hotset import HotSet, Places, RowBytes
from hotrow.inputs.tables import EmbeddingBagConfig
from hotrow.systems.calibrate import AccessCounts, top_k

LEARNED_PART = 0.05  # of an epoch's batches


class Log(Protocol):
    """Learns hot rows from the accesses of batches."""

    def add(self, batch: Batch) -> None: ...

    def decay(self) -> None: ...

    def hot(self) -> HotSet: ...

    def clear(self) -> None: ...


class DecayedCounts:
    """Exact counts of accesses, in which old ones lose weight.

    All counts are multiplied by `keep` when popularity has drifted, and every `every` batches, if
    that is not 0. The default decays by drift alone: without drift, more counts are better
    (benchmarks/drift.py has both).

    Counts are integers in units of 1/256 access, so that sums do not depend on the order in which
    a device adds. Eight bytes per row.
    """

    _UNIT = 1 << 8

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        row_bytes: RowBytes,
        budget_bytes: int,
        *,
        keep: float = 0.5,
        every: int = 0,
    ) -> None:
        if not 0 <= keep <= 1 or every < 0:
            raise ValueError(
                "keep must be 0 to 1, and every a number of batches, or 0; got "
                f"keep={keep} and every={every}"
            )
        self._row_bytes, self._budget_bytes = row_bytes, budget_bytes
        self._keep, self._every = round(keep * self._UNIT), every
        self._counts = AccessCounts(tables)
        self._num_batches = 0

    def add(self, batch: Batch) -> None:
        self._counts.add(batch, times=self._UNIT)
        self._num_batches += 1
        if self._every and self._num_batches % self._every == 0:
            self.decay()

    def decay(self) -> None:
        self._counts.scale(self._keep, self._UNIT)

    def of(self, table: str) -> Tensor:
        """Return the decayed accesses of a table's rows, float64."""
        return self._counts.of(table).double() / self._UNIT

    def hot(self) -> HotSet:
        """Return the most used rows, as many as the budget holds."""
        return top_k(self._counts, self._row_bytes, self._budget_bytes).hot

    def clear(self) -> None:
        self._counts.clear()
        self._num_batches = 0


class SrripLog:
    """A cache of row tags that evicts by re-reference interval prediction (SRRIP).

    Each row belongs to one of `sets` of `ways` tags. A tag has a value from 0, expected soon, to
    3, expected late. A hit sets 0. A miss takes the first way at 3, after all values of the set
    were raised until there is one, and sets 2.

    9 bytes per tag, however many rows there are; `DecayedCounts` takes 8 per row, and covers more
    accesses with as many hot rows. Rows are read in the order of the batch's values, on the CPU.
    """

    _EMPTY, _LATE, _NEW = -1, 3, 2
    _LOOKED = 1 << 12  # approximate number of tags that are compared at once

    def __init__(self, tables: Sequence[EmbeddingBagConfig], *, sets: int, ways: int = 16) -> None:
        if sets < 1 or ways < 1:
            raise ValueError(f"a log needs sets and ways, not {sets} and {ways}")
        self._places = Places(tables)
        self.tags = torch.full((sets, ways), self._EMPTY, dtype=torch.int64)
        self.values = torch.full((sets, ways), self._LATE, dtype=torch.int8)

    @classmethod
    def within(
        cls, tables: Sequence[EmbeddingBagConfig], row_bytes: RowBytes, budget_bytes: int
    ) -> SrripLog:
        """Return a log with as many tags as rows of the widest table fit the budget."""
        rows = budget_bytes // max(row_bytes[table.name] for table in tables)
        if rows < 1:
            raise ValueError(
                f"a hot budget of {budget_bytes:,} bytes holds no row of the widest table, which "
                f"takes {max(row_bytes.values()):,}"
            )
        ways = min(16, rows)
        return cls(tables, sets=rows // ways, ways=ways)

    def add(self, batch: Batch) -> None:
        places = self._places.checked(batch).flatten()
        self.read(places[places < self._places.num_rows])

    def set_of(self, places: Tensor) -> Tensor:
        """Return the set of each row; neighbours are in different sets."""
        mixed = places * -7046029254386353131  # 2^64 over the golden ratio
        return ((mixed >> 32) & 0x7FFFFFFF) % len(self.tags)

    def read(self, places: Tensor) -> None:
        """Read rows by their places, as if one access followed the other.

        Sets are independent, so the first access of every set is done at once, then the second,
        and so on. Two shortcuts: consecutive accesses of a set to one row are one access and a
        hit; and hits before a set's next miss move no tag, so they are done together, as far as
        the look-ahead reaches, which is longer for fewer sets.
        """
        sets, order = torch.sort(self.set_of(places), stable=True)
        places, lengths = torch.unique_consecutive(places[order], return_counts=True)
        sets, is_again = sets[lengths.cumsum(0) - lengths], lengths > 1
        sets, counts = torch.unique_consecutive(sets, return_counts=True)
        ends = counts.cumsum(0)
        next_ = ends - counts  # access of each set
        while True:
            next_ = next_ + self._hits(sets, places, next_, ends)
            is_left = next_ < ends
            sets, next_, ends = sets[is_left], next_[is_left], ends[is_left]
            if not len(sets):
                return
            self._turn(sets, places[next_], is_again[next_])
            next_ = next_ + 1

    def _hits(self, sets: Tensor, places: Tensor, first: Tensor, ends: Tensor) -> Tensor:
        """Do the hits before the next miss of each set; return how many they were."""
        far = max(1, self._LOOKED // max(1, self.tags.shape[1] * len(sets)))
        here = first.unsqueeze(1) + torch.arange(far)
        coming = places[here.clamp(max=len(places) - 1)]
        is_here = self.tags[sets].unsqueeze(1) == coming.unsqueeze(2)
        is_hit = is_here.any(2) & (here < ends.unsqueeze(1))
        is_early = is_hit.cumprod(1).bool()
        rank, place = is_early.nonzero(as_tuple=True)
        self.values[sets[rank], is_here[rank, place].int().argmax(1)] = 0
        return is_early.sum(1)

    def _turn(self, sets: Tensor, places: Tensor, is_again: Tensor) -> None:
        """Do one access to each of several sets."""
        values = self.values[sets]
        is_here = self.tags[sets] == places.unsqueeze(1)
        is_hit = is_here.any(1)
        # The first of the ways with the largest value, by a key that is unique.
        ways = values.shape[1]
        ranked = values.int() * ways + torch.arange(ways - 1, -1, -1)
        victim = ranked.argmax(1)
        latest = values.gather(1, victim.unsqueeze(1))
        way = torch.where(is_hit, is_here.int().argmax(1), victim)
        values += torch.where(is_hit.unsqueeze(1), 0, self._LATE - latest).to(values.dtype)
        value = torch.where(is_hit | is_again, 0, self._NEW).to(values.dtype)
        self.values[sets] = values.scatter_(1, way.unsqueeze(1), value.unsqueeze(1))
        self.tags[sets, way] = places

    def decay(self) -> None:
        """Do nothing: the cache forgets by itself."""

    def hot(self) -> HotSet:
        """Return the rows that have a tag."""
        is_hot = torch.zeros(self._places.num_rows, dtype=torch.bool)
        is_hot[self.tags[self.tags != self._EMPTY]] = True
        return HotSet(self._places, is_hot)

    def clear(self) -> None:
        self.tags.fill_(self._EMPTY)
        self.values.fill_(self._LATE)


@dataclass(frozen=True)
class Learned:
    """A choice of hot rows, and its reason."""

    batch: int  # batches seen by then, over all epochs
    why: str  # "learned": a learning phase is over; "drift"; "none": no sample was popular
    popular_share: float  # just before; NaN without a hot set
    rows_in: int
    rows_out: int


class Learning:
    """Decides when hot rows are chosen: after the first batches of an epoch, and after drift.

    For each batch: classify its samples by `hot`, report the result by `told`, then `add` the
    batch. The share of popular samples is smoothed over `window` samples; its value one window
    after a choice is the reference. When the share falls below `floor` times the reference, by more
    than its standard error, the log decays and hot rows are chosen again. This is repeated, up to
    eight times, while the share is below nine tenths of the reference, because counts of a year
    outweigh those of a day. If no sample is popular, rows are chosen again after one window, then
    after two more, four, and so on.

    With `relearn=0` the log counts every batch, and choosing again takes no time. Otherwise it
    rests between learning phases, as published, and starts again with `relearn` batches, while the
    old hot rows stay. With `wakes` it rests until popularity has drifted, then learns from a few
    batches, counts every batch from there on, and uses a smaller window.
    """

    _LONGEST_WAIT = 1024  # windows
    _BACK, _MOST_TRIES = 0.9, 8
    # After waking. On a news site's clicks, whose popularity lasts for hours, these lose 3.8 points
    # of the samples that an hourly oracle has; a floor of 0.95 loses 7.4.
    _AWAKE_BATCHES, _AWAKE_FLOOR, _AWAKE_PART = 16, 0.99, 4
    _popular: float  # samples, smoothed
    _samples: float

    def __init__(
        self,
        log: Log,
        *,
        part: float = LEARNED_PART,
        floor: float = 0.99,
        window: int = 2048,
        relearn: int = 0,
        wakes: bool = False,
    ) -> None:
        self.log, self.hot = log, log.hot()
        self.version = 0  # of the hot set
        self.history: list[Learned] = []
        self._part, self._floor, self._window, self._relearn = part, floor, window, relearn
        self._wakes = wakes
        self._num_batches = 0
        self._to_learn, self._why = 0, "learned"
        self._wait = 1  # windows
        self._tries = 0
        self._share_at_learning = math.nan
        self._forget_share()

    def begin_epoch(self, num_batches: int) -> None:
        """Begin a learning phase, over a part of an epoch of so many batches."""
        self._tries, self._share_at_learning = 0, math.nan
        self._learn("learned", math.ceil(self._part * num_batches))

    @property
    def is_learning(self) -> bool:
        return self._to_learn > 0

    @property
    def looks(self) -> bool:
        """Return whether it needs the next batch's ids."""
        return self.is_learning or not self._relearn

    @property
    def popular_share(self) -> float:
        """The smoothed share of popular samples; NaN directly after a choice."""
        return self._popular / self._samples if self._samples else math.nan

    def told(self, popular: int, samples: int, *, version: int | None = None) -> None:
        """Report how many of a batch's samples were popular.

        A GPU's numbers may come late, to avoid waiting; `version` is then that of their hot rows,
        and numbers of an older version are ignored.
        """
        if not self.version or version not in (None, self.version) or not samples:
            return
        is_new = self._told < self._window
        kept = max(0.0, 1 - samples / self._window)
        self._told += samples
        self._popular = self._popular * kept + popular
        self._samples = self._samples * kept + samples
        if self._told >= self._window:
            if is_new and (self._is_back() or self._tries == self._MOST_TRIES):
                self._share_at_learning, self._tries = self.popular_share, 0
            if not self.is_learning or not self._relearn:
                self._watch()

    def add(self, batch: Batch) -> bool:
        """Learn from a batch; return whether the hot rows changed."""
        self._num_batches += 1
        if self.looks:
            self.log.add(batch)
        if not self.is_learning:
            return False
        self._to_learn -= 1
        return not self.is_learning and self._choose()

    def _watch(self) -> None:
        if self._is_worn_out():
            self._tries += 1
            self._learn_again("drift")
        elif self._popular > 0:
            self._wait = 1
        elif self._told >= self._wait * self._window:
            self._wait = min(2 * self._wait, self._LONGEST_WAIT)
            self._learn_again("none")

    def _is_back(self) -> bool:
        return not self.popular_share < self._BACK * self._share_at_learning  # True for NaN

    def _is_worn_out(self) -> bool:
        share = self._share_at_learning
        by_chance = math.sqrt(share * (1 - share) / self._samples)
        return self.popular_share < self._floor * share - by_chance

    def _learn_again(self, why: str) -> None:
        self.log.decay()
        if self._wakes and self._relearn and why == "drift":
            self._learn(why, min(self._relearn, self._AWAKE_BATCHES))
            self._relearn, self._floor = 0, max(self._floor, self._AWAKE_FLOOR)
            self._window = max(1, self._window // self._AWAKE_PART)
            return
        self._learn(why, self._relearn)

    def _learn(self, why: str, num_batches: int) -> None:
        if self._relearn:
            self.log.clear()
        self._why, self._to_learn = why, max(1, num_batches)

    def _choose(self) -> bool:
        old, self.hot = self.hot, self.log.hot()
        entered = int(torch.count_nonzero(self.hot.is_hot & ~old.is_hot))
        left = int(torch.count_nonzero(old.is_hot & ~self.hot.is_hot))
        self.history.append(
            Learned(self._num_batches, self._why, self.popular_share, entered, left)
        )
        self.version += 1
        self._forget_share()
        return bool(entered or left)

    def _forget_share(self) -> None:
        self._told = 0  # samples
        self._popular = 0.0
        self._samples = 0.0
