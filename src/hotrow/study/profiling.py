"""The profile of a trace: how often rows are read, what batches need, and how long that stays so.

    profile = profile_lookups(OfFolder(Path("prepared/criteo"), batch_size=2048)).profile
    profile.total.coverage.top(0.01), profile.table("C3").zipf, profile.curve("lru").per_batch

A first pass counts. A second one, when the hottest rows are known, counts the samples that read no
others. Everything is exact while all rows fit into memory, else estimated, with its error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.engine.profile import Counts as TableCounts
from hotrow.sizing.reuse import LONGEST_HOLD, MissCurve, Reuse, belady, floor_of
from hotrow.study.lookups import LookupBatch, Lookups
from hotrow.study.tracked_rows import (
    GROUPS,
    Coverage,
    Drift,
    Drifting,
    Estimate,
    Read,
    TrackedRows,
    WorkingSet,
    WorkingSets,
    ZipfFit,
    choose,
    coverage,
    distinct,
    fitting_rows,
    mean_of,
    unique,
    zipf_fit,
)
from hotrow.support.messages import few

ALL = "all tables"
HOT_PARTS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SLOT_PARTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
MEMORY = 2 << 30
_PILOT_PART = 16  # this part of the memory is for ids that show which rows are hot
_NEXT_USES_PART = 8  # this part of the memory is for Belady's bound

Advance = Callable[[int], None]  # called with the number of batches read


@dataclass(frozen=True)
class AllHot:
    """The share of samples that read hot rows only, by the number of hot rows; where rows are
    sampled, the least that it can be."""

    rows: NDArray[np.int64]  # [n]
    samples: NDArray[np.float64]  # [n]; NaN: too few rows are tracked


@dataclass(frozen=True)
class TableProfile:
    """One table, or all of them together."""

    name: str
    rows: int
    accesses: int
    distinct: Estimate
    lookups_per_sample: float
    unique_rows: float  # of a batch, on average
    coverage: Coverage
    zipf: ZipfFit
    working_sets: tuple[WorkingSet, ...]
    drift: Drift


@dataclass(frozen=True)
class DataProfile:
    """The profile of all tables."""

    data: str
    samples: int
    batches: int
    batch_size: int
    total: TableProfile
    tables: tuple[TableProfile, ...]
    all_hot: AllHot
    curves: tuple[MissCurve, ...]
    floors: tuple[int, ...]  # slots that hold the rows of 1, 2 ... consecutive batches
    followed_rows: int
    sampled_part: float  # share of the sampled rows; 1: all rows are counted
    notes: tuple[str, ...]
    seconds: float

    @property
    def is_exact(self) -> bool:
        return self.sampled_part == 1

    def table(self, name: str) -> TableProfile:
        return _named("table", name, {table.name: table for table in self.tables})

    def curve(self, policy: str) -> MissCurve:
        return _named("curve of", policy, {curve.policy: curve for curve in self.curves})


Part = TypeVar("Part")


def _named(what: str, name: str, parts: Mapping[str, Part]) -> Part:
    if name not in parts:
        raise ValueError(f"there is no {what} {name!r}; there are {few(parts)}")
    return parts[name]


@dataclass(frozen=True)
class Profiled:
    """A profile, and the counts behind it, as a collection takes them by `profile=`."""

    profile: DataProfile
    counts: dict[str, TableCounts]


def profile_lookups(
    lookups: Lookups,
    *,
    memory_bytes: int = MEMORY,
    slots: Iterable[int] | None = None,
    first: int = 0,
    hot_part: float = 0.01,
    periods: int = 8,
    seed: int = 0,
    advance: Advance = lambda count: None,
) -> Profiled:
    """Read a trace twice and profile it.

    Misses are counted from batch `first` on, with each number of `slots`, by default SLOT_PARTS of
    the rows. The hot set, whose drift is measured, is `hot_part` of the rows. Where samples have no
    times, the trace is divided into `periods` of equal length.
    """
    started = time.monotonic()
    num_rows = sum(lookups.rows.values())
    batches = iter(lookups.batches())
    for_next_uses = memory_bytes // _NEXT_USES_PART
    most = fitting_rows(memory_bytes - for_next_uses, num_rows)
    sizes = np.array(list(lookups.rows.values()), dtype=np.int64)
    pilot: list[LookupBatch] = []
    if most < num_rows:
        pilot = _pilot(batches, memory_bytes // _PILOT_PART)
        first_ids = unique(np.concatenate([batch.ids for batch in pilot]))
        rows = choose(sizes, most, *first_ids, seed=seed)
        del first_ids
    else:
        rows = TrackedRows(sizes)
    wanted = slots if slots is not None else (part * num_rows for part in SLOT_PARTS)
    counting = _Counting(
        rows,
        slots=[max(1, int(count)) for count in wanted],
        first=first,
        hot_part=hot_part,
        period_batches=max(1, math.ceil(lookups.num_batches / max(1, periods))),
        next_uses_bytes=for_next_uses,
    )
    for batch in chain(pilot, batches):
        counting.add(batch)
        advance(1)
    return counting.result(lookups, advance, started)


def _pilot(batches: Iterator[LookupBatch], most_bytes: int) -> list[LookupBatch]:
    """Take the first batches, one at least."""
    pilot: list[LookupBatch] = []
    for batch in batches:
        pilot.append(batch)
        most_bytes -= batch.ids.nbytes
        if most_bytes <= 0:
            break
    return pilot


class _Counting:
    """One pass over a trace."""

    def __init__(
        self,
        rows: TrackedRows,
        *,
        slots: list[int],
        first: int,
        hot_part: float,
        period_batches: int,
        next_uses_bytes: int,
    ) -> None:
        self._rows, self._first = rows, first
        tables = len(rows.bases) - 1
        self._accesses = np.zeros(tables, dtype=np.int64)
        self._unique = np.zeros(tables, dtype=np.int64)
        self._samples = self._batches = self._largest_batch = 0
        samples = 1 if rows.is_exact else GROUPS
        self._reuse = [
            Reuse(slots, first=first, next_uses_bytes=next_uses_bytes // samples)
            for _ in range(samples)
        ]
        self._working_sets = WorkingSets(tables)
        self._drift = Drifting(rows, hot_part)
        self._period_batches = period_batches

    def add(self, batch: LookupBatch) -> None:
        rows, read = self._rows, self._rows.read(batch.ids)
        self._accesses += read.accesses
        self._unique += read.unique
        self._largest_batch = max(self._largest_batch, int(read.unique.sum()))
        self._samples += batch.samples
        self._add_drift(batch, read)
        last_use = rows.last_use[read.places]
        rows.last_use[read.places] = self._batches
        rows.counts[read.places] += read.counts
        if self._batches >= self._first:
            rows.uses[read.places] += 1
        self._working_sets.add(last_use, read)
        self._add_reuse(last_use, read.places)
        self._batches += 1

    def _add_drift(self, batch: LookupBatch, read: Read) -> None:
        if batch.periods is None:
            self._drift.add(self._batches // self._period_batches, read)
            return
        edges = [0, *(np.flatnonzero(np.diff(batch.periods)) + 1).tolist(), batch.samples]
        for low, high in pairwise(edges):
            is_whole = high - low == batch.samples
            part = read if is_whole else self._rows.read(batch.ids_of(low, high))
            self._drift.add(int(batch.periods[low]), part)

    def _add_reuse(self, last_use: NDArray[np.int32], places: NDArray[Any]) -> None:
        if self._rows.is_exact:
            self._reuse[0].add(last_use)
            return
        group = self._rows.groups_of(places)
        weights = np.where(group == 0, 1.0, self._rows.weight * GROUPS)
        for number, reuse in enumerate(self._reuse, start=1):
            is_in = (group == 0) | (group == number)
            reuse.add(last_use[is_in], weights[is_in])

    # -- results -----------------------------------------------------------------------

    def result(self, lookups: Lookups, advance: Advance, started: float) -> Profiled:
        rows = self._rows
        drift = self._drift.result()
        rows.forget_uses()
        places, ids = rows.read_rows(rows.counts)
        spans = [*pairwise(np.searchsorted(ids, rows.bases).tolist())]
        working_sets = self._working_sets.result(rows.weight)
        # Each table, and last all of them together.
        accesses, per_batch = (
            [*counts.tolist(), int(counts.sum())] for counts in (self._accesses, self._unique)
        )
        sizes, names = np.diff(rows.bases).tolist(), [*lookups.rows, ALL]
        parts = [*(places[low:high] for low, high in spans), places]
        profiles = []
        for at, (name, size) in enumerate(zip(names, [*sizes, sum(sizes)], strict=True)):
            counted = rows.counted(parts[at], accesses[at])
            curve = coverage(counted, size)
            profiles.append(
                TableProfile(
                    name=name,
                    rows=size,
                    accesses=accesses[at],
                    distinct=distinct(counted, size),
                    lookups_per_sample=accesses[at] / max(1, self._samples),
                    unique_rows=per_batch[at] / max(1, self._batches),
                    coverage=curve,
                    zipf=zipf_fit(curve, counted),
                    working_sets=working_sets[at],
                    drift=drift[at],
                )
            )
        hottest = places[np.argsort(-rows.counts[places], kind="stable")]
        curves, notes = self._curves(hottest)
        if not rows.is_exact:
            notes.append("drift and static misses are estimates with no error of their own")
        floors = [floor_of(self._reuse, count) for count in range(2, LONGEST_HOLD + 1)]
        profile = DataProfile(
            data=lookups.name,
            samples=self._samples,
            batches=self._batches,
            batch_size=lookups.batch_size,
            total=profiles[-1],
            tables=tuple(profiles[:-1]),
            all_hot=self._all_hot(lookups.batches(), hottest, advance),
            curves=tuple(curves),
            floors=(self._largest_batch, *floors),
            followed_rows=len(rows.counts),
            sampled_part=1 / rows.weight,
            notes=tuple(notes),
            seconds=time.monotonic() - started,
        )
        counts: dict[str, TableCounts] = {
            name: (
                torch.from_numpy(ids[low:high] - base),
                torch.from_numpy(rows.counts[places[low:high]]),
            )
            for name, base, (low, high) in zip(lookups.rows, rows.bases, spans, strict=False)
        }
        return Profiled(profile, counts)

    def _curves(self, hottest: NDArray[np.int64]) -> tuple[list[MissCurve], list[str]]:
        lru = _mean_curve([each.least_recent(largest=self._largest_batch) for each in self._reuse])
        curves = [lru, self._static(hottest, lru)]
        uses = [each.next_uses() for each in self._reuse]
        known = [each for each in uses if each is not None]
        if len(known) < len(uses):
            return curves, [
                f"no bound by Belady: what {self._batches:,} batches use next does not fit into "
                f"1/{_NEXT_USES_PART} of the memory; give more of it, or fewer batches"
            ]
        bounds = [belady(each, lru.slots.tolist(), first=self._first) for each in known]
        return [*curves, _mean_curve(bounds)], []

    def _static(self, hottest: NDArray[np.int64], lru: MissCurve) -> MissCurve:
        """Return the misses if the hottest rows stay, as many as leave room for any batch."""
        uses = self._rows.uses[hottest]
        room = np.maximum(0, lru.slots - self._largest_batch)
        if self._rows.is_exact:  # in less memory
            hits = np.append(0, uses.cumsum(dtype=np.int64))
            saved = hits[np.minimum(room, len(uses))].astype(np.float64)
        else:
            weights = self._rows.weights_of(hottest)
            hits = np.append(0.0, (uses * weights).cumsum())
            saved = np.interp(room, np.append(0.0, weights.cumsum()), hits)
        misses = np.maximum(0, lru.unique_rows - saved)
        misses = np.where(np.isnan(lru.misses), np.nan, misses)
        return replace(lru, policy="static", misses=misses, low=misses, high=misses)

    def _all_hot(
        self, batches: Iterator[LookupBatch], hottest: NDArray[np.int64], advance: Advance
    ) -> AllHot:
        num_rows = self._rows.num_rows
        budgets = np.unique([max(1, int(part * num_rows)) for part in HOT_PARTS])
        ranks = _Ranks(self._rows, hottest)
        fewest = np.zeros(len(budgets) + 1, dtype=np.int64)
        for batch in batches:
            coldest = batch.per_sample(ranks.of(batch.ids))
            needed = np.searchsorted(budgets, coldest, side="right")
            fewest += np.bincount(needed, minlength=len(fewest))
            advance(1)
        share = fewest[:-1].cumsum() / max(1, self._samples)
        return AllHot(budgets, np.where(budgets <= ranks.known, share, np.nan))


class _Ranks:
    """Ranks of rows, the hottest first; sampled rows count as the coldest."""

    def __init__(self, rows: TrackedRows, hottest: NDArray[np.int64]) -> None:
        self._rows, self.known = rows, rows.num_rows
        size = rows.num_rows
        if rows.certain is not None:
            size = len(rows.certain)
            hottest = hottest[hottest < size]
            self.known = len(hottest)
        self._coldest = np.int32(min(rows.num_rows, 2**31 - 1))
        self._ranks = np.full(size + 1, self._coldest, dtype=np.int32)
        self._ranks[hottest] = np.arange(len(hottest), dtype=np.int32)
        self._ranks[-1] = -1  # of padding, whose id is -1

    def of(self, ids: NDArray[Any]) -> NDArray[np.int32]:
        if self._rows.is_exact:
            ranks: NDArray[np.int32] = self._ranks[ids]
            return ranks
        at, is_certain = self._rows.find(ids)
        ranks = np.where(is_certain, self._ranks[at], self._coldest)
        return np.where(ids < 0, np.int32(-1), ranks)


def _mean_curve(curves: list[MissCurve]) -> MissCurve:
    """Return the mean of several samples; low and high include the error."""
    if len(curves) == 1:
        return curves[0]
    misses, error = mean_of([curve.misses for curve in curves])
    low = np.maximum(0, np.mean([curve.low for curve in curves], axis=0) - error)
    high = np.mean([curve.high for curve in curves], axis=0) + error
    rows = float(np.mean([curve.unique_rows for curve in curves]))
    return replace(curves[0], misses=misses, low=low, high=high, unique_rows=rows)
