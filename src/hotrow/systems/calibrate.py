"""FAE's calibrator: rows worth a budget of fast memory, by counted accesses.

Sampler, access logger, threshold search, classifier and Rand-Em Box. This module sees ids and
counts, not rows.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.engine.profile import Profile, check_profile
from hotrow.inputs.batch import Batch, KeyedJaggedTensor, parse
from hotrow.inputs.hotset import HotSet, Places, RowBytes
from hotrow.inputs.samples import take
from hotrow.inputs.tables import EmbeddingBagConfig
from hotrow.store.writer import add_at

# A table's counts and a cut-off -> how many rows have at least that count; errs on the high side.
Estimate = Callable[[Tensor, float], float]

SAMPLED = 0.05
SMALL_TABLE_BYTES = 1 << 20
# Shares of a table's accesses. The published grid ends at 1e-3; only a tiny budget needs more.
GRID = tuple(10 ** (-step / 10) for step in range(71))
PUBLISHED_GRID_ENDS = 1e-3


# -- sampler and access logger -----------------------------------------------------------


def sampled(batches: Iterable[Batch], rate: float = SAMPLED, *, seed: int = 0) -> Iterator[Batch]:
    """Yield a random part of all samples; skip batches of which none is drawn.

    Each sample is drawn independently, without replacement, in one pass: the same samples at every
    batch size. The published code may draw a sample twice, and so counts its rows, which may be
    rare, twice.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate must be more than 0 and at most 1, not {rate}")
    draw = torch.Generator().manual_seed(seed)
    for batch in batches:
        is_in = torch.rand(batch.num_samples, generator=draw, dtype=torch.float64) < rate
        places = is_in.nonzero().squeeze(1)
        if len(places):
            yield batch if len(places) == batch.num_samples else _taken(batch, places)


def _taken(batch: Batch, places: Tensor) -> Batch:
    if batch.offsets is None:
        values = batch.values.index_select(0, places.to(batch.values.device))
        return replace(batch, values=values, num_samples=len(places))
    ids = KeyedJaggedTensor(batch.keys, batch.values, offsets=batch.offsets)
    return parse(take(ids, places, size=batch.num_samples), batch.keys, None)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the threads of this process: a forked child does not have its parent's."""
    return ThreadPoolExecutor(max(1, min(4, torch.get_num_threads() // 2)), "hotrow-counts")


class AccessCounts:
    """Exact numbers of accesses to each row. Eight bytes per row, on any device.

    Padding that bags skip is not counted. If the batches are `sampled`, shares of accesses are
    estimates.
    """

    _LARGE = 1 << 16  # lookups of a batch that are worth several threads
    _ALONE = (1 << 15) - 1  # lookups that one thread counts without torch's own threads

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], device: torch.device | str = "cpu"
    ) -> None:
        self.places = Places(tables)
        self.num_samples = 0
        self._counts = torch.zeros(self.places.size, dtype=torch.int64, device=device)

    @classmethod
    def of_profile(cls, tables: Sequence[EmbeddingBagConfig], profile: Profile) -> AccessCounts:
        """Return the counts of a profile, as `EmbeddingBagCollection(profile=)` takes it."""
        check_profile(profile, tables)
        counts = cls(tables)
        for name, given in profile.items():
            mine = counts.of(name)
            if isinstance(given, Tensor):
                mine.copy_(given)
            else:
                mine[given[0].long().cpu()] = given[1].to(mine)
        return counts

    def add(self, batch: Batch, *, times: int = 1) -> None:
        """Count a batch on the counts' device; a GPU is not synchronized."""
        parts = self._parts_of(batch)
        if len(parts) == 1:
            add_at(self._counts, self.places.checked(batch).flatten(), times)
        else:
            threads = _pool(os.getpid())
            places = list(threads.map(self._places_of, parts))
            if any(mine is None for mine in places):
                self.places.checked(batch)  # raises, naming the id
            list(threads.map(lambda mine: add_at(self._counts, mine, times), places))
        self.num_samples += batch.num_samples

    def _places_of(self, part: Batch) -> Tensor | None:
        """Return places to count; None: an id is in no table."""
        places = self.places.of(part).flatten()
        return None if bool((places == self.places.no_row).any()) else places

    def _parts_of(self, batch: Batch) -> list[Batch]:
        """Split a large batch for several threads, no two of which count the same table.

        Most of a thread's time is spent waiting for memory.
        """
        values = batch.values
        if values.device.type != "cpu" or batch.offsets is not None or values.numel() < self._LARGE:
            return [batch]
        wide = max(1, self._ALONE // max(1, batch.num_samples))
        by_table: dict[int, list[int]] = {}
        for column, table in enumerate(self.places.columns_of(batch).tables.tolist()):
            by_table.setdefault(table, []).append(column)
        parts: list[list[int]] = [[]]
        for columns in by_table.values():
            if parts[-1] and len(parts[-1]) + len(columns) > wide:
                parts.append([])
            parts[-1] += columns
        if len(parts) == 1:
            return [batch]
        return [
            replace(batch, keys=tuple(batch.keys[x] for x in columns), values=values[:, columns])
            for columns in parts
        ]

    @property
    def flat(self) -> Tensor:
        """Return the counts of all rows, [rows] int64, table by table; a view."""
        if int(self._counts[self.places.no_row]):
            raise ValueError(
                "some of the counted ids are in no table; count the batches on a CPU to get the "
                "first one named"
            )
        return self._counts[: self.places.num_rows]

    def of(self, table: str) -> Tensor:
        """Return the counts of a table's rows, int64; a view."""
        return self.flat[self.places.span(table)]

    def accesses(self) -> dict[str, int]:
        """Return the number of accesses to each table."""
        return {table.name: int(self.of(table.name).sum()) for table in self.places.tables}

    def covered(self, hot: HotSet) -> float:
        """Return the share of accesses that read hot rows; NaN without any."""
        total = int(self.flat.sum())
        served = int(self.flat[hot.is_hot[: self.places.num_rows]].sum())
        return served / total if total else math.nan

    def scale(self, numerator: int, denominator: int) -> None:
        """Multiply every count by a fraction, rounding down."""
        self._counts.mul_(numerator).div_(denominator, rounding_mode="floor")

    def clear(self) -> None:
        self._counts.zero_()
        self.num_samples = 0


# -- the number of a table's rows with many accesses -------------------------------------


def exact_rows(counts: Tensor, cut_off: float) -> float:
    return float((counts >= cut_off).sum())


@dataclass(frozen=True)
class RandEmBox:
    """FAE's estimate from a few chunks of adjacent counters.

    The mean over the chunks, scaled to the table, has a Student-t interval; its upper end is the
    estimate. Small tables are counted.

    The estimate assumes that hot rows are spread over the table. Where they are adjacent (ids in
    the order of their first appearance) most chunks miss them and the estimate is far too small;
    `by_threshold`, which counts exactly at the end, corrects it.
    """

    chunks: int = 35
    chunk_rows: int = 1024
    confidence: float = 0.999
    seed: int = 0

    def __call__(self, counts: Tensor, cut_off: float) -> float:
        if len(counts) <= self.chunks * self.chunk_rows:
            return exact_rows(counts, cut_off)
        drawn = self._drawn(len(counts)).to(counts.device)
        hits = (counts[drawn] >= cut_off).sum(1).double()  # by chunk
        quantile = student_t((1 + self.confidence) / 2, self.chunks - 1)
        high = float(hits.mean()) + quantile * float(hits.std()) / math.sqrt(self.chunks)
        # Few hits: without any, the published interval has no width. An upper bound of Poisson's.
        few = (math.sqrt(float(hits.sum()) + 1) + quantile / 2) ** 2 / self.chunks
        return min(float(len(counts)), max(high, few) * len(counts) / self.chunk_rows)

    def _drawn(self, num_rows: int) -> Tensor:
        """Return row numbers, [chunks, chunk_rows], the same for every cut-off."""
        draw = torch.Generator().manual_seed(self.seed)
        starts = torch.randint(num_rows, (self.chunks, 1), generator=draw)
        # Wraps around, so that all rows are equally likely.
        return (starts + torch.arange(self.chunk_rows)) % num_rows


@cache
def student_t(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution, by bisection on its closed form."""
    if not 0 < probability < 1 or freedom < 1:
        raise ValueError(
            f"no quantile {probability} of Student's t with {freedom} degrees of freedom"
        )
    if probability < 0.5:
        return -student_t(1 - probability, freedom)
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(freedom)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _t_below(angle: float, freedom: int) -> float:
    """Return P(t < sqrt(freedom) tan(angle)) (Abramowitz and Stegun 26.7.3-4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for n in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (n - 1) / n
        total += term
    both_sides = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + both_sides / 2


# -- choosing ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """Hot rows, and how many accesses they serve."""

    hot: HotSet
    rows: Mapping[str, int]  # hot rows by table
    hot_bytes: int
    covered: float  # share of the counted accesses that read hot rows; NaN without accesses
    threshold: float | None  # share of its table's accesses that makes a row hot
    notes: tuple[str, ...] = ()  # unusual facts, in sentences


def by_threshold(
    counts: AccessCounts,
    row_bytes: RowBytes,
    budget_bytes: int,
    *,
    estimate: Estimate = exact_rows,
    small_table_bytes: int = SMALL_TABLE_BYTES,
) -> Chosen:
    """Make a row hot by its share of its table's accesses; choose the smallest share that fits.

    Tables of at most `small_table_bytes` are hot as a whole, as published; 0: none is.
    """
    choice = _Choice(counts, row_bytes, budget_bytes, small_table_bytes)
    if choice.is_settled:
        return choice.done()
    # Bytes grow along the grid, as the share falls.
    sizes = partial(choice.estimated_bytes, estimate=estimate)
    fitting = bisect_right(GRID, float(choice.left_bytes), key=sizes) - 1
    # An estimate may be too small, so the result is counted exactly.
    while fitting >= 0 and choice.estimated_bytes(GRID[fitting], exact_rows) > choice.left_bytes:
        fitting -= 1
    if fitting < 0:
        choice.note(
            f"no share of a table's accesses up to {GRID[0]:g} leaves few enough rows for "
            f"{choice.left_bytes:,} bytes: no row is hot by its count; the most used ones within "
            "a budget are top_k's"
        )
        return choice.done()
    threshold = GRID[fitting]
    if threshold > PUBLISHED_GRID_ENDS:
        choice.note(
            f"the budget is small for these tables: a row must have {threshold:.2g} of its table's "
            f"accesses to be hot, where the published search ends at {PUBLISHED_GRID_ENDS:g}"
        )
    choice.add_above(threshold)
    return choice.done(threshold)


def top_k(
    counts: AccessCounts,
    row_bytes: RowBytes,
    budget_bytes: int,
    *,
    small_table_bytes: int = 0,
) -> Chosen:
    """Choose the most used rows of all tables within the budget; by uses per byte if widths differ.

    Rows without accesses stay cold. The published code fills its budget with them.
    """
    choice = _Choice(counts, row_bytes, budget_bytes, small_table_bytes)
    if not choice.is_settled:
        choice.add_most_used()
    return choice.done()


def most_used_first(
    embedding: EmbeddingBagCollection,
    hot: HotSet,
    uses_of: Callable[[str], Tensor] | None,
    room: Mapping[int, int] | None = None,
) -> dict[str, Tensor]:
    """Return hot rows by table, the most used first: for each width as many as can be pinned.

    `uses_of` gives the uses of a table's rows; None: unknown. `room` is the number of rows by
    width; None: all that the collection has room for.
    """
    room, chosen = room or embedding.room_for_pins(), dict[str, Tensor]()
    for group in embedding.pins.groups:
        names = [table.name for table in group.layout.tables]
        rows = [hot.rows(name).cpu() for name in names]
        uses = [
            torch.zeros(len(numbers)) if uses_of is None else uses_of(name).cpu()[numbers]
            for name, numbers in zip(names, rows, strict=True)
        ]
        table_of = torch.arange(len(names)).repeat_interleave(torch.tensor([*map(len, rows)]))
        every = torch.cat(rows)
        order = torch.cat(uses).sort(descending=True, stable=True)[1][: room[group.dim]]
        for place, name in enumerate(names):
            chosen[name] = every[order[table_of[order] == place]]
    return chosen


def row_bytes(embedding: EmbeddingBagCollection) -> RowBytes:
    """Return the bytes of a row of each table, with its optimizer state."""
    groups = embedding.pins.groups
    return {table.name: 4 * group.width for group in groups for table in group.layout.tables}


def bytes_of_rows(embedding: EmbeddingBagCollection) -> int:
    """Return the bytes of all rows with their state, on all ranks."""
    sizes = row_bytes(embedding)
    return sum(sizes[table.name] * table.num_embeddings for table in embedding.tables)


def room_for_pins(embedding: EmbeddingBagCollection) -> int:
    """Return the bytes of rows that can be pinned."""
    room = embedding.room_for_pins()
    return sum(4 * group.width * room[group.dim] for group in embedding.pins.groups)


class _Choice:
    """A hot set that is being chosen."""

    def __init__(
        self, counts: AccessCounts, row_bytes: RowBytes, budget_bytes: int, small_table_bytes: int
    ) -> None:
        self.counts, self.row_bytes, self._tables = counts, row_bytes, counts.places.tables
        for table in self._tables:
            if table.name not in row_bytes:
                raise ValueError(f"row_bytes does not say what a row of table {table.name!r} takes")
        for name, size in row_bytes.items():
            if size < 1:
                raise ValueError(f"row_bytes of table {name!r} must be at least 1, not {size}")
        if budget_bytes < 0:
            raise ValueError(f"a hot budget cannot be {budget_bytes:,} bytes")
        self._accesses = counts.accesses()
        self._notes: list[str] = []
        self._is_hot = torch.zeros_like(counts.flat, dtype=torch.bool)
        self._counted = self._tables  # tables whose rows are hot by their counts
        self.left_bytes = budget_bytes
        self.is_settled = self._is_settled_by_budget()
        if not self.is_settled:
            self._add_small(small_table_bytes)

    def _is_settled_by_budget(self) -> bool:
        everything = sum(self._table_bytes(table) for table in self._tables)
        smallest = min(self.row_bytes[table.name] for table in self._tables)
        if self.left_bytes >= everything:
            self._is_hot.fill_(True)
            self.note(
                f"the hot budget of {self.left_bytes:,} bytes holds every row ({everything:,} "
                "bytes): all rows are hot, and no sample is cold"
            )
            return True
        if self.left_bytes < smallest:
            self.note(
                f"the hot budget of {self.left_bytes:,} bytes holds no row (the smallest takes "
                f"{smallest:,}): no row is hot, and every sample that reads one is cold"
            )
            return True
        return False

    def _table_bytes(self, table: EmbeddingBagConfig) -> int:
        rows = table.num_embeddings - (table.skipped_idx is not None)
        return rows * self.row_bytes[table.name]

    def _add_small(self, limit: int) -> None:
        small = [table for table in self._tables if self._table_bytes(table) <= limit]
        need = sum(self._table_bytes(table) for table in small)
        if need > self.left_bytes:
            self.note(
                f"the {len(small)} tables of {limit:,} bytes at most take {need:,} together, more "
                f"than the hot budget of {self.left_bytes:,}: their rows are hot by their counts "
                "only"
            )
            small, need = [], 0
        for table in small:
            self._is_hot[self.counts.places.span(table.name)] = True
        self.left_bytes -= need
        self._counted = tuple(table for table in self._tables if table not in small)
        if self._counted and not any(self._accesses[table.name] for table in self._counted):
            self.note(
                "no access was counted"
                + " to a table that is not hot as a whole" * bool(small)
                + ": no row is hot by its count"
            )

    def note(self, sentence: str) -> None:
        self._notes.append(sentence)

    def estimated_bytes(self, threshold: float, estimate: Estimate) -> float:
        """Return the bytes of rows that would be hot, without tables that are hot as a whole."""
        return sum(
            estimate(self.counts.of(table.name), self._cut_off(table, threshold))
            * self.row_bytes[table.name]
            for table in self._counted
        )

    def _cut_off(self, table: EmbeddingBagConfig, threshold: float) -> float:
        # At least 1: a row without accesses is never hot.
        return max(1.0, threshold * self._accesses[table.name])

    def add_above(self, threshold: float) -> None:
        for table in self._counted:
            is_hot = self._is_hot[self.counts.places.span(table.name)]
            is_hot |= self.counts.of(table.name) >= self._cut_off(table, threshold)

    def add_most_used(self) -> None:
        rows, gains, sizes = [], [], []
        for table in self._counted:
            uses = self.counts.of(table.name)
            used = uses.nonzero().squeeze(1)
            rows.append(used + self.counts.places.span(table.name).start)
            gains.append(uses[used].double() / self.row_bytes[table.name])
            sizes.append(torch.full_like(used, self.row_bytes[table.name]))
        if not rows:
            return
        order = torch.sort(torch.cat(gains), descending=True, stable=True)[1]
        fits = torch.cat(sizes)[order].cumsum(0) <= self.left_bytes
        self._is_hot[torch.cat(rows)[order[fits]]] = True

    def done(self, threshold: float | None = None) -> Chosen:
        hot = HotSet(self.counts.places, self._is_hot)
        hot_bytes, covered = hot.num_bytes(self.row_bytes), self.counts.covered(hot)
        return Chosen(hot, hot.counts(), hot_bytes, covered, threshold, tuple(self._notes))
