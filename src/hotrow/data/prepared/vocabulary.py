"""Which value has which row: counted and looked up, or hashed. Values are keys here, not texts.

    tally.add(keys)  ...  tally.vocabulary(...)  ->  Vocabulary.rows_of(keys)

Keys are multiplied by an odd number first, which spreads them evenly and loses nothing. So a table
of their leading bits finds a sorted key in a few steps, and the order of rows has nothing to do
with popularity or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared.arrow import EXACT, Checks
from hotrow.support.hashing import mixed

Keys = NDArray[Any]  # uint32 or uint64

_ODD = {4: np.uint32(0x9E3779B1), 8: np.uint64(0x9E3779B97F4A7C15)}
_MOST_COUNT = np.uint64(2**32 - 1)  # counts stop there; by then the order of values is clear
LEAST_PENDING = 1 << 18
_TOGETHER = 1 << 20  # keys or buckets that are looked at together
_MOST_STEPS = 8  # from the start of a bucket; a binary search finds what lies deeper


def spread(keys: Keys) -> Keys:
    """Spread keys evenly; different keys stay different."""
    multiplied: Keys = keys * _ODD[keys.itemsize]
    return multiplied


@dataclass(frozen=True)
class Counted:
    """Different keys, sorted, and how often each was seen."""

    keys: Keys
    counts: NDArray[np.uint32]

    @classmethod
    def of(cls, keys: Keys) -> Counted:
        different, counts = np.unique(spread(keys), return_counts=True)
        return cls(different, counts.astype(np.uint32))

    def __len__(self) -> int:
        return len(self.keys)


def bytes_per_value(key_dtype: str) -> int:
    """Return the memory that a different value takes while it is counted: its key and its count,
    twice, because a table is copied when new values come in. Looking values up takes less."""
    return 2 * (np.dtype(key_dtype).itemsize + 4)


class Tally:
    """Counts the values of a table. New ones wait until there are enough for a pass over all."""

    def __init__(
        self, key_dtype: str, *, pending: int = LEAST_PENDING, together: int = _TOGETHER
    ) -> None:
        self._least_pending, self._together = pending, together
        self._keys: Keys = np.empty(0, key_dtype)  # different ones, sorted
        self._counts = np.empty(0, np.uint32)
        self._pending: list[Counted] = []

    def add(self, counted: Counted) -> None:
        self._pending.append(counted)
        if sum(map(len, self._pending)) > max(self._least_pending, len(self._keys) // 8):
            self.settle()

    def __len__(self) -> int:
        """Return how many values are kept: different ones, and pending ones that may be known."""
        return len(self._keys) + sum(map(len, self._pending))

    def settle(self) -> None:
        """Add the pending values. Passes over all keys, but sorts only the pending ones."""
        if not self._pending:
            return
        new = joined(self._pending)
        self._pending = []
        places = np.searchsorted(self._keys, new.keys)
        known = np.zeros(len(new), np.bool_)
        within = places < len(self._keys)
        known[within] = self._keys[places[within]] == new.keys[within]
        at = places[known]
        sums = self._counts[at].astype(np.uint64) + new.counts[known]
        self._counts[at] = np.minimum(sums, _MOST_COUNT)
        del within, at, sums
        fresh = np.flatnonzero(~known)
        if len(fresh):
            is_old = np.ones(len(self._keys) + len(fresh), np.bool_)
            is_old[places[fresh] + np.arange(len(fresh))] = False
            del places, known
            # One after the other, so that only one of the two is in memory twice.
            self._keys = _woven(is_old, self._keys, new.keys[fresh])
            self._counts = _woven(is_old, self._counts, new.counts[fresh])

    def vocabulary(self, *, min_frequency: int, max_rows: int | None) -> tuple[Keys, int]:
        """Return the keys that get rows, sorted, and how many different ones there are."""
        self.settle()
        kept = self._counts >= min_frequency
        if max_rows is not None and np.count_nonzero(kept) >= max_rows:
            kept = self._most_frequent(max_rows - 1)
        return self._keys[kept], len(self._keys)

    def _most_frequent(self, most: int) -> NDArray[np.bool_]:
        """Keep the `most` frequent keys; ties: the smaller keys stay."""
        last = len(self._counts) - most
        least = np.partition(self._counts, last)[last]
        kept: NDArray[np.bool_] = self._counts > least
        left = most - np.count_nonzero(kept)
        for first in range(0, len(kept), self._together):
            same = np.flatnonzero(self._counts[first : first + self._together] == least)[:left]
            kept[first + same] = True
            left -= len(same)
        return kept


def _woven(is_old: NDArray[np.bool_], old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    woven = np.empty(len(is_old), old.dtype)
    woven[is_old] = old
    woven[~is_old] = new
    return woven


def joined(parts: list[Counted]) -> Counted:
    """Add up the counts of several parts."""
    parts = [part for part in parts if len(part)] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    keys = np.concatenate([part.keys for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    order = np.argsort(keys)
    keys, counts = keys[order], counts[order]
    del order
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    sums = np.add.reduceat(counts, starts, dtype=np.uint64)
    return Counted(keys[starts], np.minimum(sums, _MOST_COUNT).astype(np.uint32))


class Vocabulary:
    """Row i + 1 for the key at position i of the sorted keys; row 0 for all others."""

    how = "vocabulary"

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.rows = len(keys) + 1
        # One or two buckets for each key, so that the first step finds most keys.
        bits = keys.itemsize * 8
        leading_bits = min(bits - 1, max(1, len(keys).bit_length()))
        self._shift = keys.dtype.type(bits - leading_bits)
        small = np.int32 if len(keys) < 2**31 else np.int64
        self._starts = np.empty(1 << leading_bits, small)
        for first in range(0, len(self._starts), _TOGETHER):
            part = self._starts[first : first + _TOGETHER]
            bounds = np.arange(first, first + len(part), dtype=keys.dtype) << self._shift
            part[:] = np.searchsorted(keys, bounds)

    def rows_of(self, keys: Keys) -> NDArray[np.int64]:
        if not len(self.keys):
            return np.zeros(len(keys), np.int64)
        wanted = spread(keys)
        at = self._starts[(wanted >> self._shift).astype(np.int64)]
        known = np.take(self.keys, at, mode="clip")
        rows = np.where(known == wanted, at + 1, 0).astype(np.int64)
        rest = np.flatnonzero(known < wanted)
        at, wanted = at[rest], wanted[rest]
        for _ in range(_MOST_STEPS):
            if not len(rest):
                return rows
            at += 1
            known = np.take(self.keys, at, mode="clip")
            same = known == wanted
            rows[rest[same]] = at[same] + 1
            left = (known < wanted) & (at < len(self.keys))
            rest, at, wanted = rest[left], at[left], wanted[left]
        at = np.searchsorted(self.keys, wanted)  # keys that multiplying did not spread
        known = np.take(self.keys, at, mode="clip")
        rows[rest] = np.where(known == wanted, at + 1, 0)
        return rows


class RowChecks:
    """The check of the value of each row; 0: the row was not used yet.

    If keys are hashes, two values can have one key. Their checks differ, which `confirm` finds. The
    checks are in a file of 4 bytes per row, so that a resumed run has them, too.
    """

    def __init__(self, path: Path) -> None:
        self._checks = np.asarray(np.memmap(path, np.uint32, "r+"))
        self._lock = Lock()  # without it two threads could both find a row unused

    def confirm(self, rows: NDArray[np.int64], checks: Checks | None) -> bool:
        """Store the checks of values by row; return whether each row has one value only. Row 0 may
        have any number. Without `checks` all values are exact."""
        checks = np.full(len(rows), EXACT) if checks is None else checks
        with self._lock:
            known = self._checks[rows]
            new = np.flatnonzero(known == 0)
            if len(new):
                self._checks[rows[new]] = checks[new]
                known[new] = self._checks[rows[new]]
        return not ((known != checks) & (rows > 0)).any()


class Hashed:
    """Any key has a row; some keys share one. Needs no memory and no counting."""

    how = "hash"

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def rows_of(self, keys: Keys) -> NDArray[np.int64]:
        return (mixed(keys.astype(np.uint64)) % np.uint64(self.rows)).astype(np.int64)
