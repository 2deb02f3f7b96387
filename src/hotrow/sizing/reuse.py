"""How many rows are fetched with any number of slots, from one pass over a trace.

The pass sees batch numbers only: for each row of a batch, the batch that used it last. All rows of
a batch are resident together. A row counts once in a batch, however many lookups it has.

Rows whose last use is the same batch are equally recent, so LRU does not say which of them leaves
first. Let a row's last use before batch b be batch a. S rows, last used between the two, are more
recent. L rows, the row itself among them, were last used by a and are equally recent. Of those L,
C - S are in C slots, if that is between 0 and L. With every order equally likely, the row is
resident with probability (C - S) / L. The order changes the sum over all rows only within known
bounds. So one pass that keeps the number of rows by their last batch serves any number of slots.

Belady's choice needs as little: residents differ only by the batch that uses them next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEVER = -1  # the last use of a row that no batch has used
LONGEST_HOLD = 8  # batches whose rows may have to be resident together
_ENTRY_BYTES = 40  # of next uses, while they are sorted
_BLOCK = 256
_ROUNDING = 1e-9  # of sums of weights

Batches = NDArray[np.int32]
Numbers = NDArray[np.int64]
Amounts = NDArray[np.float64]


@dataclass(frozen=True)
class MissCurve:
    """Rows fetched in all, by the number of slots. NaN: a batch does not fit."""

    policy: str
    slots: Numbers  # [n], ascending
    misses: Amounts  # [n]
    low: Amounts  # [n]: the least, over orders of equally recent rows and by sampling
    high: Amounts  # [n]
    batches: int  # that are counted
    unique_rows: float  # of these batches, together

    @property
    def per_batch(self) -> Amounts:
        return self.misses / max(1, self.batches)

    @property
    def ratio(self) -> Amounts:
        """The share of a batch's rows that is fetched."""
        return self.misses / max(1.0, self.unique_rows)


@dataclass(frozen=True)
class NextUses:
    """For each batch: which later batches use its rows next, and how many rows each of them."""

    sizes: Amounts  # [T]: rows of each batch
    starts: Numbers  # [T + 1]: batch a has the entries starts[a] to starts[a + 1]
    batch: Batches  # [entries]: the next user
    rows: NDArray[np.float32]  # [entries]: its rows


class Reuse:
    """Counts of one trace, batch by batch; `RowReuse` keeps `last_use` as well.

    reuse = Reuse(slots=[1000, 5000])
    for rows in batches:              # no row twice in a batch
        reuse.add(last_use[rows])
        last_use[rows] = reuse.batches - 1
    reuse.least_recent().misses
    """

    def __init__(
        self, slots: Sequence[int] = (), *, first: int = 0, next_uses_bytes: int = 1 << 62
    ) -> None:
        """Count misses from batch `first` on; keep next uses while they fit `next_uses_bytes`."""
        self.slots = np.unique(np.asarray(slots, dtype=np.int64))
        self.first = first
        self._most_bytes = next_uses_bytes
        self._live = np.zeros(1024)  # rows by the batch that used them last
        self._hits = np.zeros((3, len(self.slots) + 1))  # expected, fewest, most
        self._sizes: list[float] = []
        self._apart: list[Amounts] = []  # rows whose last use is more than 0, 1 ... batches ago
        self._pairs: list[tuple[Batches, NDArray[np.float32]]] | None = []
        self._entries = 0

    @property
    def batches(self) -> int:
        return len(self._sizes)

    def add(self, last_use: Batches, weights: Amounts | None = None) -> None:
        """Add the next batch: for each of its rows the batch that used it last, or NEVER.

        `weights`: rows that each sampled row stands for.
        """
        number = self.batches
        counted = np.bincount(last_use + 1, weights, minlength=number + 1).astype(np.float64)
        size = float(counted.sum())
        used = np.flatnonzero(counted[1:])
        rows = counted[1:][used]
        if number >= self.first and len(self.slots):
            self._count_hits(used, rows, number)
        if number == len(self._live):
            self._live = np.concatenate([self._live, np.zeros(number)])
        self._live[used] -= rows
        self._live[number] = size
        self._sizes.append(size)
        recent = np.zeros(LONGEST_HOLD)
        nearest = counted[1:][-(LONGEST_HOLD - 1) :][::-1]
        recent[1 : len(nearest) + 1] = nearest
        self._apart.append(size - np.cumsum(recent))
        self._keep(used, rows)

    def _count_hits(self, used: Numbers, rows: Amounts, number: int) -> None:
        live = self._live[:number]
        as_recent = live[used]
        more_recent = live[::-1].cumsum()[::-1][used] - as_recent
        # With slots from `whole` on, all rows are resident; from `some` to `whole`, a part is.
        some = np.searchsorted(self.slots, more_recent, side="right")
        whole = np.searchsorted(self.slots, more_recent + as_recent, side="left")
        self._hits += np.bincount(whole, rows, minlength=len(self.slots) + 1)[None].cumsum(1)
        many = whole - some
        which = np.repeat(np.arange(len(used)), many)
        if not len(which):
            return
        place = np.arange(len(which)) - np.repeat(many.cumsum() - many, many) + some[which]
        left = self.slots[place] - more_recent[which]
        used_now, among = rows[which], as_recent[which]
        least = np.maximum(0, used_now - (among - left))
        for kind, hits in enumerate((used_now * left / among, least, np.minimum(used_now, left))):
            self._hits[kind] += np.bincount(place, hits, minlength=len(self.slots) + 1)

    def _keep(self, used: Numbers, rows: Amounts) -> None:
        if self._pairs is None:
            return
        kept = used.astype(np.int32), rows.astype(np.float32)  # exact below 2^24 rows in a batch
        self._entries += len(used)
        if self._entries * _ENTRY_BYTES > self._most_bytes:
            self._pairs = None
            return
        self._pairs.append(kept)

    def least_recent(self, *, largest: int | None = None) -> MissCurve:
        """Return LRU's misses. `largest`: rows of the largest batch, where rows are sampled."""
        sizes = np.array(self._sizes)
        unique = float(sizes[self.first :].sum())
        fits = self.slots >= (sizes.max(initial=0.0) if largest is None else largest)
        expected, high, low = np.where(fits, unique - self._hits[:, :-1], np.nan)
        counted = max(0, self.batches - self.first)
        return MissCurve("lru", self.slots, expected, low, high, counted, unique)

    def working_sets(self, batches: int) -> Amounts:
        """Return the different rows of every `batches` consecutive batches, [T - batches + 1]."""
        if not 1 <= batches <= LONGEST_HOLD:
            raise ValueError(f"batches must be 1 to {LONGEST_HOLD}, not {batches}")
        apart = np.array(self._apart).reshape(-1, LONGEST_HOLD)
        windows = max(0, len(apart) - batches + 1)
        rows = np.zeros(windows)
        for later in range(batches):  # rows that no earlier batch of the window has used
            rows += apart[later : later + windows, later]
        return rows

    def floor(self, hold_batches: int) -> int:
        """Return the fewest slots that hold the rows of so many consecutive batches together."""
        return floor_of([self], hold_batches)

    def next_uses(self) -> NextUses | None:
        """Return the next uses of each batch's rows; None: they did not fit."""
        if self._pairs is None:
            return None
        many = np.array([len(used) for used, _ in self._pairs], dtype=np.int64)
        empty = np.empty(0, np.int32), np.empty(0, np.float32)
        before = np.concatenate([empty[0], *(used for used, _ in self._pairs)])
        order = np.argsort(before, kind="stable")
        starts = np.zeros(self.batches + 1, dtype=np.int64)
        np.cumsum(np.bincount(before, minlength=self.batches), out=starts[1:])
        batch = np.repeat(np.arange(self.batches, dtype=np.int32), many)[order]
        rows = np.concatenate([empty[1], *(rows for _, rows in self._pairs)])[order]
        return NextUses(np.array(self._sizes), starts, batch, rows)


def floor_of(samples: Sequence[Reuse], hold_batches: int) -> int:
    """Return `Reuse.floor` of one trace, from several samples of its rows."""
    held = min(hold_batches, max(1, samples[0].batches))
    windows = np.mean([each.working_sets(held) for each in samples], axis=0)
    return math.ceil(float(windows.max(initial=0.0)))


def fewest_misses(uses: NextUses, slots: Sequence[int], *, past: int = 0) -> Amounts:
    """Return the rows that each batch must fetch if all batches are known, [slots, T]: Belady's
    bound.

    All rows of a batch must be resident together. Rows leave that the batch does not use and whose
    next use is farthest, rows never used again first. The residents whose next use is batch t are
    the hits of batch t. Rows of the `past` batches before may not leave, either. NaN: what must be
    resident together does not fit.
    """
    misses = [_fewest(uses, size, past) for size in slots]
    return np.array(misses).reshape(len(misses), len(uses.sizes))


def _fewest(uses: NextUses, slots: int, past: int) -> Amounts:
    last = len(uses.sizes)
    resident, held = _Residents(last + 1), deque[_Held]()
    total, misses = 0.0, np.empty(last)  # total: all residents, held ones included
    for number, size in enumerate(uses.sizes.tolist()):
        hits = resident.take(number) + sum(each.take(number) for each in held)
        misses[number] = size - hits
        leaving = max(0.0, total - hits + size - slots)
        if leaving > resident.total + _ROUNDING * total:
            return np.full(last, np.nan)
        resident.drop_farthest(leaving)
        total += size - hits - leaving
        entries = slice(uses.starts[number], uses.starts[number + 1])
        next_rows = uses.rows[entries].astype(np.float64)
        held.append(_Held(uses.batch[entries], next_rows, size))
        if len(held) > past:
            resident.add(held.popleft())
    return misses


class _Held:
    """Rows of a batch, by the batch that uses them next."""

    def __init__(self, numbers: Batches, rows: Amounts, size: float) -> None:
        self.numbers, self.rows = numbers, rows  # ascending
        self.never = size - float(rows.sum())

    def take(self, number: int) -> float:
        """Remove and count the rows that batch `number` uses."""
        if not len(self.numbers) or self.numbers[0] != number:
            return 0.0
        count = float(self.rows[0])
        self.numbers, self.rows = self.numbers[1:], self.rows[1:]
        return count


class _Residents:
    """Rows in slots, counted by the batch that uses them next; the last number means never.

    Counts are in blocks with a sum each, so that the farthest are found without reading all.
    """

    def __init__(self, numbers: int) -> None:
        self._rows = np.zeros((-(-numbers // _BLOCK), _BLOCK))
        self._flat = self._rows.reshape(-1)
        self._sums = np.zeros(len(self._rows))
        self._never = numbers - 1

    @property
    def total(self) -> float:
        return float(self._sums.sum())

    def take(self, number: int) -> float:
        """Remove and count the rows that batch `number` uses; `add` counts them again."""
        rows = float(self._flat[number])
        self._flat[number] = 0
        self._sums[number // _BLOCK] -= rows
        return rows

    def add(self, rows: _Held) -> None:
        self._flat[rows.numbers] += rows.rows
        self._flat[self._never] += rows.never
        self._sums += np.bincount(rows.numbers // _BLOCK, rows.rows, minlength=len(self._sums))
        self._sums[-1] += rows.never

    def drop_farthest(self, count: float) -> None:
        if count <= 0:
            return
        from_end = self._sums[::-1].cumsum()
        whole = int(np.searchsorted(from_end, count, side="right"))  # blocks that leave entirely
        end = len(self._sums) - whole
        if whole:
            count -= float(from_end[whole - 1])
            self._rows[end + np.flatnonzero(self._sums[end:])] = 0
            self._sums[end:] = 0
        if end and count > 0:
            block = self._rows[end - 1]
            leaving = np.minimum(block[::-1].cumsum(), count)
            leaving[1:] -= leaving[:-1].copy()
            block -= leaving[::-1]
            self._sums[end - 1] -= count


def belady(
    uses: NextUses,
    slots: Sequence[int],
    *,
    first: int = 0,
    counted: int | None = None,
    past: int = 0,
) -> MissCurve:
    """Return the bound for `counted` batches from `first` on, by default for all; `past`: see
    fewest_misses."""
    ordered = np.unique(np.asarray(slots, dtype=np.int64))
    counts = slice(first, None if counted is None else first + counted)
    misses = fewest_misses(uses, ordered.tolist(), past=past)[:, counts].sum(1)
    sizes = uses.sizes[counts]
    return MissCurve("belady", ordered, misses, misses, misses, len(sizes), float(sizes.sum()))


class RowReuse(Reuse):
    """`Reuse` that remembers the last use of each row itself."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.last_use = np.full(num_rows, NEVER, dtype=np.int32)

    def add_rows(self, rows: NDArray[np.integer]) -> None:
        """Add a batch of different rows, numbered from 0 on."""
        self.add(self.last_use[rows])
        self.last_use[rows] = self.batches - 1


def next_uses_of(batches: Iterable[NDArray[np.integer]], *, num_rows: int) -> NextUses:
    """Return the next uses in a trace of different rows each, numbered from 0 to num_rows - 1."""
    reuse = RowReuse(num_rows)
    for rows in batches:
        reuse.add_rows(rows)
    uses = reuse.next_uses()
    assert uses is not None
    return uses
