"""What is remembered of each row while a trace goes by: of all rows, or of as many as fit.

Where memory is short, rows are sampled by a hash of their ids, so that all accesses of a row are
seen or none (spatial sampling, as SHARDS has it: Waldspurger et al., FAST 2015). The rows that the
first batches read most are followed besides, each for itself: what is left to estimate is the many
rows with few accesses. The sample is made of several smaller ones, whose spread tells the error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.popularity import Scatter
from hotrow.sizing.reuse import NEVER
from hotrow.study.skew import CountedRows, Counts
from hotrow.support.hashing import key_of

# 21 while counting; at the end, when rows are ranked, up to so many if every row was read.
BYTES_PER_ROW = 48
_SAMPLED_BYTES = 96  # of each row where not all are followed: its id, and what weighs it
GROUPS = 8

Ids = NDArray[Any]  # int32 or int64
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Choice:
    """Which rows are followed."""

    num_rows: int
    certain: NDArray[np.int64] | None = None  # ids followed for themselves; None: all rows
    sampled: int = 0  # of all rows, this many positions of a permutation are followed besides
    seed: int = 0

    @property
    def is_exact(self) -> bool:
        return self.certain is None

    @property
    def weight(self) -> float:
        """Rows that a sampled one stands for."""
        return 1.0 if self.certain is None else self.num_rows / self.sampled

    @property
    def num_followed(self) -> int:
        return self.num_rows if self.certain is None else len(self.certain) + self.sampled


def fitting_rows(memory_bytes: int, num_rows: int) -> int:
    """How many rows can be followed."""
    if num_rows * BYTES_PER_ROW <= memory_bytes:
        return num_rows
    return min(num_rows - 1, memory_bytes // _SAMPLED_BYTES)


def choose(num_rows: int, most: int, ids: Ids, counts: Counts, *, seed: int = 0) -> Choice:
    """All rows, or `most` of them: half of these the ones counted most in the first batches."""
    if most >= num_rows:
        return Choice(num_rows)
    if most < 16 * GROUPS:
        raise ValueError(
            f"--memory has room for {most:,} of {num_rows:,} rows, too few to estimate from; give "
            f"{16 * GROUPS * _SAMPLED_BYTES:,} bytes at least"
        )
    hottest = np.argsort(-counts, kind="stable")[: most // 2]
    hottest = hottest[counts[hottest] > 1]
    return Choice(num_rows, np.sort(ids[hottest]).astype(np.int64), most - len(hottest), seed)


@dataclass(frozen=True)
class Read:
    """Some lookups: the different rows among them that are followed, ascending by their ids."""

    places: Places | Ids  # [n]: where what is remembered of each lies
    counts: Counts  # [n]: how often it was read
    weights: NDArray[np.float64] | None  # [n]: rows that each stands for; None: itself
    edges: NDArray[np.int64]  # [tables + 1]: where the rows of each table begin
    accesses: NDArray[np.int64]  # [tables]: of all rows, whether they are followed or not
    unique: NDArray[np.int64]  # [tables]: likewise

    def by_table(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sums of values that these rows have."""
        return between(values, self.edges)


def between(values: NDArray[Any], edges: NDArray[np.int64]) -> NDArray[Any]:
    """Sums of the values from each edge to the next."""
    sums = np.concatenate([[0], np.cumsum(values)])
    found: NDArray[Any] = sums[edges[1:]] - sums[edges[:-1]]
    return found


def unique(ids: Ids) -> tuple[Ids, Counts]:
    """Different ids, ascending, and how often each is there; padding is left out."""
    ids = np.sort(ids)
    ids = ids[np.searchsorted(ids, 0) :]
    is_new = np.ones(len(ids), dtype=bool)
    np.not_equal(ids[1:], ids[:-1], out=is_new[1:])
    starts = np.flatnonzero(is_new)
    return ids[starts], np.diff(starts, append=len(ids))


class Followed:
    """The rows of a choice, by their places."""

    def __init__(self, choice: Choice, sizes: NDArray[np.int64]) -> None:
        """`sizes`: rows of each table."""
        self.choice = choice
        self.bases = np.concatenate([[0], sizes.cumsum()])
        size = choice.num_followed
        self.last_use = np.full(size, NEVER, dtype=np.int32)
        self.counts = np.zeros(size, dtype=np.int64)
        self.uses = np.zeros(size, dtype=np.int32)  # batches that read it
        self.period = np.zeros(size, dtype=np.uint32)  # accesses in the period under way
        self.hot = np.zeros(size, dtype=np.uint8)  # one bit for each hot set that is looked at
        self._ids: NDArray[np.int64] | None = None
        if choice.certain is not None:
            self._ids = np.full(size, -1, dtype=np.int64)
            self._ids[: len(choice.certain)] = choice.certain
            self._scatter = Scatter(choice.num_rows, key=key_of(choice.seed, "followed", 0))

    def read(self, lookups: Ids) -> Read:
        """What some lookups read; any order, any number of times."""
        ids, counts = unique(lookups)
        edges = np.searchsorted(ids, self.bases)
        if edges[-1] < len(ids):
            raise ValueError(f"there is an id {ids[-1]:,}; the tables have {self.bases[-1]:,} rows")
        accesses, different = between(counts, edges), np.diff(edges)
        certain = self.choice.certain
        if certain is None or self._ids is None:
            return Read(ids, counts, None, edges, accesses, different)
        at = np.searchsorted(certain, ids)
        known = np.take(certain, at, mode="clip") == ids if len(certain) else at < 0
        drawn = self._scatter(ids.astype(np.int64))
        is_in = known | (drawn < self.choice.sampled)
        places = np.where(known, at, len(certain) + drawn)[is_in]
        ids, counts = ids[is_in], counts[is_in]
        self._ids[places] = ids
        edges = np.searchsorted(ids, self.bases)
        return Read(places, counts, self.weights_of(places), edges, accesses, different)

    def groups_of(self, places: Places) -> NDArray[np.int8]:
        """0 for a row that stands for itself, else the number of its sample."""
        certain = self.choice.certain
        assert certain is not None
        drawn = places - len(certain)
        return np.where(drawn < 0, 0, 1 + drawn % GROUPS).astype(np.int8)

    def weights_of(self, places: Places) -> NDArray[np.float64] | None:
        """Rows that each of them stands for; None: itself."""
        if self.choice.certain is None:
            return None
        return np.where(places < len(self.choice.certain), 1.0, self.choice.weight)

    def forget_uses(self) -> None:
        """What is not needed any more when the trace has ended."""
        empty = self.last_use[:0].copy()
        self.last_use, self.period, self.hot = empty, empty.view(np.uint32), empty.view(np.uint8)

    def read_rows(self, values: NDArray[Any]) -> tuple[Places, NDArray[np.int64]]:
        """The places where `values` is not 0, and their ids, in the order of these."""
        places = np.flatnonzero(values)
        if self._ids is None:
            return places, places
        ids = self._ids[places]
        order = np.argsort(ids)
        return places[order], ids[order]

    def counted(self, places: Places, accesses: int) -> CountedRows:
        """Of some rows: how often they were read, and how many rows they stand for."""
        counts = self.counts[places]
        if self.choice.is_exact:
            return CountedRows(counts, accesses)
        return CountedRows(counts, accesses, self.groups_of(places), self.choice.weight, GROUPS)
