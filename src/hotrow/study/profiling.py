"""What a trace is like: who is read how often, what batches need, and how long that stays so.

    profile = profile_lookups(OfFolder(Path("prepared/criteo"), batch_size=2048)).profile
    profile.total.coverage.top(0.01), profile.table("C3").zipf, profile.curve("lru").per_batch

One pass counts; a second one, when the hottest rows are known, asks which samples read nothing
else. Everything is exact while there is memory for all rows, else estimated, with its error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.engine.profile import Counts as TableCounts
from hotrow.sizing.reuse import LONGEST_HOLD, MissCurve, Reuse, belady, floor_of
from hotrow.study.drifting import Drift, Drifting
from hotrow.study.lookups import LookupBatch, Lookups
from hotrow.study.skew import (
    CountedRows,
    Coverage,
    Estimate,
    ZipfFit,
    coverage,
    distinct,
    mean_of,
    zipf_fit,
)
from hotrow.study.tracked_rows import GROUPS, Choice, Followed, Read, choose, fitting_rows, unique
from hotrow.study.working_sets import Windows, WorkingSet
from hotrow.support.messages import few
from hotrow.support.progress import no_progress

ALL = "all tables"
HOT_PARTS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SLOT_PARTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
MEMORY = 2 << 30
_PILOT_PART = 16  # of the memory is for ids that tell which rows are hot, if not all are followed
_NEXT_USES_PART = 8  # of the memory is for Belady's bound


@dataclass(frozen=True)
class AllHot:
    """Of the samples, the share that reads hot rows alone, by how many rows are hot; the least that
    it can be, where not all rows are followed."""

    rows: NDArray[np.int64]  # [n]
    samples: NDArray[np.float64]  # [n]; NaN: too few rows are followed to tell


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
    """All that was found."""

    data: str
    samples: int
    batches: int
    batch_size: int
    total: TableProfile
    tables: tuple[TableProfile, ...]
    all_hot: AllHot
    curves: tuple[MissCurve, ...]
    floors: tuple[int, ...]  # slots in which the rows of 1, 2 ... consecutive batches fit
    followed_rows: int
    sampled_part: float  # of the rows that are not followed for themselves; 1: all rows are
    notes: tuple[str, ...]
    seconds: float

    @property
    def is_exact(self) -> bool:
        return self.sampled_part == 1

    def table(self, name: str) -> TableProfile:
        for each in self.tables:
            if each.name == name:
                return each
        raise ValueError(
            f"there is no table {name!r}; there are {few(t.name for t in self.tables)}"
        )

    def curve(self, policy: str) -> MissCurve:
        for each in self.curves:
            if each.policy == policy:
                return each
        names = few(each.policy for each in self.curves)
        raise ValueError(f"there is no curve of {policy!r}; there are {names}")


@dataclass(frozen=True)
class Profiled:
    """What was found, and the counts behind it, as `profile=` of a collection takes them."""

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
    advance: Callable[[int], None] = no_progress,
) -> Profiled:
    """Reads a trace twice. `slots`: where misses are asked for, by default SLOT_PARTS of the rows;
    they are counted from batch `first` on. `hot_part` of the rows make the hot set whose drift is
    followed, over so many `periods` of equal length where samples have no times."""
    started = time.monotonic()
    num_rows = sum(lookups.rows.values())
    batches = iter(lookups.batches())
    for_next_uses = memory_bytes // _NEXT_USES_PART
    most = fitting_rows(memory_bytes - for_next_uses, num_rows)
    pilot: list[LookupBatch] = []
    choice = Choice(num_rows)
    if most < num_rows:
        pilot = _pilot(batches, memory_bytes // _PILOT_PART)
        ids, counts = unique(np.concatenate([each.ids for each in pilot]))
        choice = choose(num_rows, most, ids, counts, seed=seed)
        del ids, counts
    wanted = slots if slots is not None else (part * num_rows for part in SLOT_PARTS)
    counting = _Counting(
        lookups,
        Followed(choice, np.array(list(lookups.rows.values()), dtype=np.int64)),
        slots=[max(1, int(each)) for each in wanted],
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
    """The first batches, one at least."""
    found: list[LookupBatch] = []
    for batch in batches:
        found.append(batch)
        most_bytes -= batch.ids.nbytes
        if most_bytes <= 0:
            break
    return found


class _Counting:
    """One pass over a trace."""

    def __init__(
        self,
        lookups: Lookups,
        followed: Followed,
        *,
        slots: list[int],
        first: int,
        hot_part: float,
        period_batches: int,
        next_uses_bytes: int,
    ) -> None:
        self._names, self._followed = list(lookups.rows), followed
        self._first = first
        tables = len(self._names)
        self._accesses = np.zeros(tables, dtype=np.int64)
        self._unique = np.zeros(tables, dtype=np.int64)
        self._samples = self._batches = self._largest_batch = 0
        kinds = 1 if followed.choice.is_exact else GROUPS
        self._reuse = [
            Reuse(slots, first=first, next_uses_bytes=next_uses_bytes // kinds)
            for _ in range(kinds)
        ]
        self._windows = Windows(tables)
        self._drift = Drifting(followed, hot_part)
        self._period_batches = period_batches

    def add(self, batch: LookupBatch) -> None:
        state, read = self._followed, self._followed.read(batch.ids)
        self._accesses += read.accesses
        self._unique += read.unique
        self._largest_batch = max(self._largest_batch, int(read.unique.sum()))
        self._samples += batch.samples
        self._count_drift(batch, read)
        last_use = state.last_use[read.places]
        state.last_use[read.places] = self._batches
        state.counts[read.places] += read.counts
        if self._batches >= self._first:
            state.uses[read.places] += 1
        self._windows.add(last_use, read)
        self._add_reuse(last_use, read.places)
        self._batches += 1

    def _count_drift(self, batch: LookupBatch, read: Read) -> None:
        if batch.periods is None:
            self._drift.add(self._batches // self._period_batches, read)
            return
        edges = [0, *(np.flatnonzero(np.diff(batch.periods)) + 1).tolist(), batch.samples]
        for low, high in pairwise(edges):
            whole = high - low == batch.samples
            part = read if whole else self._followed.read(batch.ids_of(low, high))
            self._drift.add(int(batch.periods[low]), part)

    def _add_reuse(self, last_use: NDArray[np.int32], places: NDArray[Any]) -> None:
        if self._followed.choice.is_exact:
            self._reuse[0].add(last_use)
            return
        group = self._followed.groups_of(places)
        each = np.where(group == 0, 1.0, self._followed.choice.weight * GROUPS)
        for number, reuse in enumerate(self._reuse, start=1):
            mine = (group == 0) | (group == number)
            reuse.add(last_use[mine], each[mine])

    # -- results -----------------------------------------------------------------------

    def result(self, lookups: Lookups, advance: Callable[[int], None], started: float) -> Profiled:
        followed, bases = self._followed, self._followed.bases
        drift = self._drift.result()
        followed.forget_uses()
        places, ids = followed.read_rows(followed.counts)
        edges = np.searchsorted(ids, bases)
        parts = [places[low:high] for low, high in pairwise(edges.tolist())]
        windows = self._windows.result(followed.choice.weight)
        tables = tuple(
            self._table(
                name, int(size), int(accesses), float(unique), parts[number], windows[number],
                drift[number],
            )
            for number, (name, size, accesses, unique) in enumerate(
                zip(self._names, np.diff(bases), self._accesses, self._unique, strict=True)
            )
        )  # fmt: skip
        total = self._table(
            ALL,
            int(bases[-1]),
            int(self._accesses.sum()),
            float(self._unique.sum()),
            places,
            windows[-1],
            drift[-1],
        )
        order = np.argsort(-followed.counts[places], kind="stable")
        hottest = places[order]
        curves, notes = self._curves(hottest)
        if not followed.choice.is_exact:
            notes.append("drift and static misses are estimates with no error of their own")
        choice = followed.choice
        profile = DataProfile(
            data=lookups.name,
            samples=self._samples,
            batches=self._batches,
            batch_size=lookups.batch_size,
            total=total,
            tables=tables,
            all_hot=self._all_hot(lookups.batches(), hottest, advance),
            curves=tuple(curves),
            floors=self._floors(),
            followed_rows=choice.num_followed,
            sampled_part=1 / choice.weight,
            notes=tuple(notes),
            seconds=time.monotonic() - started,
        )
        return Profiled(profile, self._table_counts(ids, places, edges))

    def _table(
        self,
        name: str,
        rows: int,
        accesses: int,
        unique: float,
        places: NDArray[np.int64],
        windows: tuple[WorkingSet, ...],
        drift: Drift,
    ) -> TableProfile:
        counted: CountedRows = self._followed.counted(places, accesses)
        curve = coverage(counted, rows)
        return TableProfile(
            name=name,
            rows=rows,
            accesses=accesses,
            distinct=distinct(counted, rows),
            lookups_per_sample=accesses / max(1, self._samples),
            unique_rows=unique / max(1, self._batches),
            coverage=curve,
            zipf=zipf_fit(curve, counted),
            working_sets=windows,
            drift=drift,
        )

    def _floors(self) -> tuple[int, ...]:
        found = [floor_of(self._reuse, count) for count in range(1, LONGEST_HOLD + 1)]
        return (self._largest_batch, *found[1:])

    def _curves(self, hottest: NDArray[np.int64]) -> tuple[list[MissCurve], list[str]]:
        recent = [each.least_recent(largest=self._largest_batch) for each in self._reuse]
        found, notes = [_mean_curve(recent)], []
        found.append(self._static(hottest, found[0]))
        uses = [each.next_uses() for each in self._reuse]
        known = [each for each in uses if each is not None]
        if len(known) == len(uses):
            bounds = [
                belady(each, self._reuse[0].slots.tolist(), first=self._first) for each in known
            ]
            found.append(_mean_curve(bounds))
        else:
            notes.append(
                f"no bound by Belady: what {self._batches:,} batches use next does not fit into "
                f"1/{_NEXT_USES_PART} of the memory; give more of it, or fewer batches"
            )
        return found, notes

    def _static(self, hottest: NDArray[np.int64], beside: MissCurve) -> MissCurve:
        """Misses if the hottest rows stay, as many as leave room for the largest batch."""
        weights = self._followed.weights_of(hottest)
        uses = self._followed.uses[hottest]
        room = np.maximum(0, beside.slots - self._largest_batch)
        if weights is None:
            hits = np.concatenate([[0], uses.cumsum(dtype=np.int64)])
            saved = hits[np.minimum(room, len(uses))].astype(np.float64)
        else:
            ranks = np.concatenate([[0.0], weights.cumsum()])
            saved = np.interp(room, ranks, np.concatenate([[0.0], (uses * weights).cumsum()]))
        misses = np.maximum(0, beside.unique_rows - saved)
        misses = np.where(np.isnan(beside.misses), np.nan, misses)
        return replace(beside, policy="static", misses=misses, low=misses, high=misses)

    def _all_hot(
        self,
        batches: Iterator[LookupBatch],
        hottest: NDArray[np.int64],
        advance: Callable[[int], None],
    ) -> AllHot:
        num_rows = self._followed.choice.num_rows
        budgets = np.unique([max(1, int(part * num_rows)) for part in HOT_PARTS])
        ranked = _Ranks(self._followed, hottest)
        fewest = np.zeros(len(budgets) + 1, dtype=np.int64)
        for batch in batches:
            coldest = batch.per_sample(ranked.of(batch.ids))
            fewest += np.bincount(
                np.searchsorted(budgets, coldest, side="right"), minlength=len(fewest)
            )
            advance(1)
        share = fewest[:-1].cumsum() / max(1, self._samples)
        return AllHot(budgets, np.where(budgets <= ranked.known, share, np.nan))

    def _table_counts(
        self, ids: NDArray[np.int64], places: NDArray[np.int64], edges: NDArray[np.int64]
    ) -> dict[str, TableCounts]:
        found: dict[str, TableCounts] = {}
        for name, base, (low, high) in zip(
            self._names, self._followed.bases, pairwise(edges.tolist()), strict=False
        ):
            rows = torch.from_numpy(ids[low:high] - base)
            found[name] = rows, torch.from_numpy(self._followed.counts[places[low:high]])
        return found


class _Ranks:
    """How many rows are hotter than each; rows that are not followed for themselves are coldest."""

    def __init__(self, followed: Followed, hottest: NDArray[np.int64]) -> None:
        self._certain = followed.choice.certain
        size = followed.choice.num_rows if self._certain is None else len(self._certain)
        self.known = followed.choice.num_rows
        if self._certain is not None:
            hottest = hottest[hottest < size]
            self.known = len(hottest)
        self._coldest = np.int32(min(followed.choice.num_rows, 2**31 - 1))
        self._ranks = np.full(size + 1, self._coldest, dtype=np.int32)
        self._ranks[hottest] = np.arange(len(hottest), dtype=np.int32)
        self._ranks[-1] = -1  # of padding, whose id is -1

    def of(self, ids: NDArray[Any]) -> NDArray[np.int32]:
        if self._certain is None:
            found: NDArray[np.int32] = self._ranks[ids]
            return found
        at = np.searchsorted(self._certain, ids)
        known = np.take(self._certain, at, mode="clip") == ids if len(self._certain) else ids < -1
        ranks = np.where(known, self._ranks[at], self._coldest)
        return np.where(ids < 0, np.int32(-1), ranks)


def _mean_curve(curves: list[MissCurve]) -> MissCurve:
    """Of several samples; low and high hold the error besides what is open."""
    if len(curves) == 1:
        return curves[0]
    misses, error = mean_of([each.misses for each in curves])
    low = np.maximum(0, np.mean([each.low for each in curves], axis=0) - error)
    high = np.mean([each.high for each in curves], axis=0) + error
    unique = float(np.mean([each.unique_rows for each in curves]))
    return replace(curves[0], misses=misses, low=low, high=high, unique_rows=unique)
