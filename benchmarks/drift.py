"""Does the hot set keep up with a click log whose popular articles change by the hour?

    python benchmarks/drift.py clicks.parquet

reads the Globo.com click log (columns timestamp in seconds, article_id, environment, deviceGroup,
os, referrer_type; sorted by time) as a stream of batches, chooses hot rows from what went by, and
counts popular samples: those that read hot rows alone. Beside that stands an oracle that knows
each hour's own counts before the hour begins. Counted after the first learning phase, in hours
with 100 clicks or more. `--users` adds a table of the users. Without a file, as many generated
clicks do not drift (Zipf 0.8, 200,000 rows); an oracle of an hour then knows chance, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotrow import EmbeddingBagConfig
from hotrow.batch import Batch
from hotrow.calibrate import AccessCounts, top_k
from hotrow.hotset import HotSet, popular
from hotrow.loggers import DecayedCounts, Learning, Log, SrripLog

COLUMNS = ("article_id", "environment", "deviceGroup", "os", "referrer_type")
ROW_BYTES = 64
FEWEST_CLICKS = 100  # of an hour that is compared
POINTS = 0.05


@dataclass(frozen=True)
class Clicks:
    """A click log in the order of time."""

    tables: tuple[EmbeddingBagConfig, ...]
    ids: Tensor  # [clicks, tables] int64
    hours: Tensor  # [clicks] int64, rising

    @property
    def row_bytes(self) -> dict[str, int]:
        return {table.name: ROW_BYTES for table in self.tables}

    def batch(self, begin: int, end: int) -> Batch:
        ids = self.ids[begin:end]
        return Batch(ids, None, tuple(table.name for table in self.tables), len(ids))

    def batches(self, size: int) -> Iterator[tuple[int, Batch]]:
        """With the place of the first click of each."""
        for begin in range(0, len(self.ids), size):
            yield begin, self.batch(begin, begin + size)

    def by_hour(self) -> Iterator[tuple[slice, Batch]]:
        numbers = torch.arange(int(self.hours[-1]) + 2)
        edges = torch.searchsorted(self.hours, numbers).tolist()
        for begin, end in pairwise(edges):
            if end > begin:
                yield slice(begin, end), self.batch(begin, end)


def read(path: Path, columns: Sequence[str]) -> Clicks:
    import pyarrow.parquet as pq

    names = pq.read_schema(path).names
    missing = [name for name in ("timestamp", *columns) if name not in names]
    if missing:
        raise SystemExit(f"{path} has no column {missing[0]}; it has {', '.join(names)}")
    table = pq.read_table(path, columns=["timestamp", *columns])
    seconds = table["timestamp"].to_numpy()
    if len(seconds) == 0 or (np.diff(seconds) < 0).any():
        raise SystemExit(f"{path} must hold clicks, sorted by timestamp")
    numbered = [np.unique(table[name].to_numpy(), return_inverse=True) for name in columns]
    tables = tuple(
        EmbeddingBagConfig(name, len(values), ROW_BYTES // 4, [name])
        for name, (values, _) in zip(columns, numbered, strict=True)
    )
    ids = torch.stack([torch.from_numpy(numbers) for _, numbers in numbered], dim=1)
    return Clicks(tables, ids, torch.from_numpy((seconds - seconds[0]) // 3600))


def steady(num_clicks: int, num_rows: int, seed: int = 0) -> Clicks:
    """Clicks whose popularity stays; 8,000 in an hour."""
    draw = np.random.default_rng(seed)
    mass = np.arange(1, num_rows + 1) ** -0.8
    ranks = np.searchsorted(mass.cumsum() / mass.sum(), draw.random(num_clicks))
    ids = torch.from_numpy(draw.permutation(num_rows)[ranks]).unsqueeze(1)
    table = EmbeddingBagConfig("article_id", num_rows, ROW_BYTES // 4, ["article_id"])
    return Clicks((table,), ids, torch.arange(num_clicks) // 8000)


# -- ways to choose ----------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """Which clicks were popular, and what it took."""

    is_popular: Tensor  # [clicks] bool
    times_chosen: int
    rows_in: int


def chosen_by_hour(clicks: Clicks, budget: int, *, ahead: bool) -> Served:
    """By the counts of the hour itself, or of the last one before it that has any."""
    found = torch.zeros(len(clicks.ids), dtype=torch.bool)
    hot = HotSet.none(clicks.tables)
    times = rows_in = 0
    counts = AccessCounts(clicks.tables)
    for span, batch in clicks.by_hour():
        if not ahead:
            found[span] = popular(batch, hot)
        counts.clear()
        counts.add(batch)
        old, hot = hot, top_k(counts, clicks.row_bytes, budget).hot
        times, rows_in = times + 1, rows_in + int((hot.is_hot & ~old.is_hot).sum())
        if ahead:
            found[span] = popular(batch, hot)
    return Served(found, times, rows_in)


def chosen_once(clicks: Clicks, budget: int, *, part: float) -> Served:
    """By the counts of the first part of the log."""
    counts = AccessCounts(clicks.tables)
    counts.add(clicks.batch(0, math.ceil(part * len(clicks.ids))))
    hot = top_k(counts, clicks.row_bytes, budget).hot
    return Served(popular(clicks.batch(0, len(clicks.ids)), hot), 1, hot.num_rows)


def chosen_often(clicks: Clicks, budget: int, size: int, *, every: int) -> Served:
    """By decayed counts, every few batches, whatever the share of popular samples is."""
    log = DecayedCounts(clicks.tables, clicks.row_bytes, budget, every=max(1, 8192 // size))
    found = torch.zeros(len(clicks.ids), dtype=torch.bool)
    hot = log.hot()
    times = rows_in = 0
    for number, (begin, batch) in enumerate(clicks.batches(size)):
        found[begin : begin + size] = popular(batch, hot)
        log.add(batch)
        if number % every == every - 1:
            old, hot = hot, log.hot()
            times, rows_in = times + 1, rows_in + int((hot.is_hot & ~old.is_hot).sum())
    return Served(found, times, rows_in)


def learned(clicks: Clicks, size: int, log: Log, *, relearn: int = 0) -> Served:
    """As Hotline learns: one epoch, in the order of time."""
    found = torch.zeros(len(clicks.ids), dtype=torch.bool)
    learning = Learning(log, relearn=relearn)
    learning.begin_epoch(math.ceil(len(clicks.ids) / size))
    for begin, batch in clicks.batches(size):
        is_popular = popular(batch, learning.hot)
        found[begin : begin + size] = is_popular
        learning.told(int(is_popular.sum()), batch.num_samples)
        learning.add(batch)
    return Served(found, len(learning.history), sum(each.rows_in for each in learning.history))


# -- the table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A way to choose beside the oracle."""

    name: str
    share: float  # of popular samples
    below: float  # the oracle, in shares
    hours_near: float  # share of the hours that are within five points of the oracle
    p95_below: float  # in an hour: 95 of 100 are nearer
    times_chosen: int
    rows_in: int


def compare(clicks: Clicks, hot_part: float, size: int) -> Iterator[Line]:
    rows = sum(table.num_embeddings for table in clicks.tables)
    budget = int(hot_part * rows) * ROW_BYTES

    def counts(every: int = 0) -> DecayedCounts:
        return DecayedCounts(clicks.tables, clicks.row_bytes, budget, every=every)

    half_life, phase = max(1, 8192 // size), max(1, 4096 // size)
    ways: dict[str, Callable[[], Served]] = {
        "oracle: the hour's own counts": lambda: chosen_by_hour(clicks, budget, ahead=True),
        "the hour before's counts": lambda: chosen_by_hour(clicks, budget, ahead=False),
        "the whole log's counts": lambda: chosen_once(clicks, budget, part=1),
        "learned once, from 5 %": lambda: chosen_once(clicks, budget, part=0.05),
        "chosen anew every 2,048 clicks": lambda: chosen_often(
            clicks, budget, size, every=max(1, 2048 // size)
        ),
        "hotline, counts decayed by drift": lambda: learned(clicks, size, counts()),
        f"hotline, counts decayed every {half_life} batches": lambda: learned(
            clicks, size, counts(half_life)
        ),
        f"hotline, learning phases of {phase} batches": lambda: learned(
            clicks, size, counts(), relearn=phase
        ),
        "hotline, SRRIP": lambda: learned(
            clicks, size, SrripLog.within(clicks.tables, clicks.row_bytes, budget)
        ),
    }
    oracle: Tensor | None = None
    for name, serve in ways.items():
        served = serve()
        oracle = served.is_popular if oracle is None else oracle
        yield _line(name, clicks, served, oracle)


def _line(name: str, clicks: Clicks, served: Served, oracle: Tensor) -> Line:
    begin = math.ceil(0.05 * len(clicks.ids))  # nobody is compared while Hotline learns
    hours = clicks.hours[begin:]
    ours, best = served.is_popular[begin:], oracle[begin:]
    totals = torch.bincount(hours)
    is_full = totals >= FEWEST_CLICKS
    missed = torch.bincount(hours, best.double() - ours.double())[is_full] / totals[is_full]
    return Line(
        name,
        share=float(ours.double().mean()),
        below=float(best.double().mean() - ours.double().mean()),
        hours_near=float((missed <= POINTS).double().mean()),
        p95_below=float(missed.quantile(0.95)),
        times_chosen=served.times_chosen,
        rows_in=served.rows_in,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clicks", type=Path, nargs="?")
    parser.add_argument("--hot", type=float, default=0.01, help="part of all rows that is hot")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--users", action="store_true", help="with a table of the users")
    args = parser.parse_args()
    columns = (*COLUMNS, "user_id") if args.users else COLUMNS
    clicks = read(args.clicks, columns) if args.clicks else steady(3_000_000, 200_000)
    rows = sum(table.num_embeddings for table in clicks.tables)
    print(
        f"{len(clicks.ids):,} clicks, batches of {args.batch:,}, {rows:,} rows in "
        f"{len(clicks.tables)} tables, {int(args.hot * rows):,} of them hot\n"
    )
    titles = ("popular", "points below", "hours within 5", "95 % of hours", "chosen", "rows in")
    print("  ".join((f"{'':44}", *(f"{title:>14}" for title in titles))))
    for line in compare(clicks, args.hot, args.batch):
        cells = (
            f"{100 * line.share:.1f} %",
            f"{100 * line.below:.1f}",
            f"{100 * line.hours_near:.0f} %",
            f"{100 * line.p95_below:.1f}",
            f"{line.times_chosen:,}",
            f"{line.rows_in:,}",
        )
        print("  ".join((f"{line.name:44}", *(f"{cell:>14}" for cell in cells))), flush=True)


if __name__ == "__main__":
    main()
