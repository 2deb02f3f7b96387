"""Does the hot set keep up with a click log whose popular articles change by the hour?

    python benchmarks/drift.py clicks.parquet

reads the Globo.com click log (columns timestamp in seconds, article_id, environment, deviceGroup,
os, referrer_type; sorted by time) as a stream of batches, chooses hot rows from what went by, and
counts popular samples: those that read hot rows alone. Beside that stands an oracle that knows
each hour's own counts before the hour begins. Counted after the first learning phase, in hours
with 100 clicks or more. `--users` adds a table of the users. Without a file, as many generated
clicks do not drift (Zipf 0.8, 200,000 rows); an oracle of an hour then knows chance, too.

What is called hotline is `hotrow.Hotline` in a `Trainer`, with a small model; its decisions alone,
with nothing trained, take less time to try. Strategies that choose no hot samples train the same
batches with as many slots; for all that train, the share of lookups that caused no fetch is shown.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import RESULTS, results_for
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hotrow
from hotrow import EmbeddingBagConfig
from hotrow.engine.split_batch import Parted
from hotrow.inputs.batch import Batch
from hotrow.inputs.hotset import HotSet, popular
from hotrow.systems.calibrate import AccessCounts, top_k
from hotrow.systems.hotline.popularity import DecayedCounts, Learning, Log, SrripLog

COLUMNS = ("article_id", "environment", "deviceGroup", "os", "referrer_type")
ROW_BYTES = 64
FEWEST_CLICKS = 100  # of an hour that is compared
POINTS = 0.05
ORACLE, HOTLINE = "oracle: the hour's own counts", "hotline, counts halved by drift"


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

    is_popular: Tensor | None  # [clicks] bool; None: not counted
    times_chosen: int = 0
    rows_in: int = 0
    hits: Tensor | None = None  # [clicks]: of its batch's lookups, how many caused no fetch


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
    """Hotline's decisions alone: one epoch, in the order of time."""
    found = torch.zeros(len(clicks.ids), dtype=torch.bool)
    learning = Learning(log, relearn=relearn)
    learning.begin_epoch(math.ceil(len(clicks.ids) / size))
    for begin, batch in clicks.batches(size):
        is_popular = popular(batch, learning.hot)
        found[begin : begin + size] = is_popular
        learning.told(int(is_popular.sum()), batch.num_samples)
        learning.add(batch)
    return Served(found, len(learning.history), sum(each.rows_in for each in learning.history))


# -- trained -----------------------------------------------------------------------------


class Clicked(nn.Module):
    """Rows of all tables, and one layer."""

    def __init__(self, tables: Sequence[EmbeddingBagConfig], strategy: str, slots: int) -> None:
        super().__init__()
        room = hotrow.Share(slots, buffer_rows=slots, dense_map=True)
        self.embedding = hotrow.EmbeddingBagCollection(
            tables,
            hotrow.SGD(lr=0.01),
            budget=hotrow.Budget((room,), window_bytes=1 << 24),
            strategy=strategy,
            seed=0,
        )
        self.layer = nn.Linear(sum(table.embedding_dim for table in tables), 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.layer(self.embedding(batch["ids"]).values()).squeeze(1)
        return found


class Watched(hotrow.Hotline):
    """Notes which clicks were popular, by where they stand in the log."""

    def __init__(self, size: int, clicks: int, **options: Any) -> None:
        # In first parts of every size, so that all popular samples of a batch go first.
        super().__init__(grain=size, **options)
        self.is_popular = torch.zeros(clicks, dtype=torch.bool)

    def passes(self, batches: Iterable[Any]) -> Generator[Iterable[Any]]:
        for each in super().passes(batches):
            yield self._noted(each)

    def _noted(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            if isinstance(batch, Parted):
                self.is_popular[batch.batch["place"][: batch.first]] = True
            yield batch


class Stream:
    """The log's batches as a Trainer takes them."""

    def __init__(self, clicks: Clicks, size: int) -> None:
        self._clicks, self._size = clicks, size

    def __len__(self) -> int:
        return math.ceil(len(self._clicks.ids) / self._size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        places = torch.arange(len(self._clicks.ids)).split(self._size)
        for ids, place in zip(self._clicks.ids.split(self._size), places, strict=True):
            yield {"ids": ids, "label": torch.ones(len(ids)), "place": place}


def trained(
    clicks: Clicks, size: int, strategy: str, slots: int, system: Watched | None = None
) -> Served:
    """One epoch, in the order of time."""
    torch.manual_seed(0)
    model = Clicked(clicks.tables, strategy, slots)
    trainer: hotrow.Trainer[dict[str, Tensor]] = hotrow.Trainer(
        model,
        binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.SGD(model.layer.parameters(), lr=0.01),
        ids=lambda batch: batch["ids"],
        labels=lambda batch: batch["label"],
        system=system,
    )
    hits = [each.hit_rate for each in trainer.run(Stream(clicks, size))]
    by_click = torch.tensor(hits).repeat_interleave(size)[: len(clicks.ids)]
    if system is None:
        return Served(None, hits=by_click)
    learned = system.record.learned
    rows_in = sum(each.rows_in for each in learned)
    return Served(system.is_popular, len(learned), rows_in, by_click)


def most_rows(clicks: Clicks, size: int) -> int:
    """Different rows of a batch, at the most."""
    bases = torch.tensor([0, *(table.num_embeddings for table in clicks.tables)]).cumsum(0)[:-1]
    return max(len(part.unique()) for part in (clicks.ids + bases).split(size))


# -- the table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A way to choose beside the oracle. None: it has no hot samples, or trains nothing."""

    name: str
    share: float | None = None  # of popular samples
    below: float | None = None  # the oracle, in shares
    hours_near: float | None = None  # share of the hours that are within five points of the oracle
    p95_below: float | None = None  # in an hour: 95 of 100 are nearer
    times_chosen: int = 0
    rows_in: int = 0
    hit_rate: float | None = None
    by_hour: tuple[float, ...] = ()  # share of popular samples


def compare(
    clicks: Clicks, hot_part: float, size: int, names: Sequence[str] = ()
) -> Iterator[Line]:
    """All ways, or those that are named, beside the oracle."""
    found = ways(clicks, hot_part, size)
    oracle = found[ORACLE]()
    assert oracle.is_popular is not None
    for name, serve in found.items():
        if not names or name in names:
            served = oracle if name == ORACLE else serve()
            yield _line(name, clicks, served, oracle.is_popular)


def ways(clicks: Clicks, hot_part: float, size: int) -> dict[str, Callable[[], Served]]:
    rows = sum(table.num_embeddings for table in clicks.tables)
    hot = int(hot_part * rows)
    budget, slots = hot * ROW_BYTES, hot + 2 * most_rows(clicks, size)

    def counts(every: int = 0) -> DecayedCounts:
        return DecayedCounts(clicks.tables, clicks.row_bytes, budget, every=every)

    def hotline(**options: Any) -> Served:
        system = Watched(size, len(clicks.ids), log=lambda _: counts(), **options)
        return trained(clicks, size, "static", slots, system)

    def alone(log: Callable[[], Log] = counts, relearn: int = 0) -> Served:
        return learned(clicks, size, log(), relearn=relearn)

    half_life, phase = max(1, 8192 // size), max(1, 4096 // size)
    hourly = {"relearn": 0, "floor": 0.99, "window": 2048}
    return {
        ORACLE: lambda: chosen_by_hour(clicks, budget, ahead=True),
        "the hour before's counts": lambda: chosen_by_hour(clicks, budget, ahead=False),
        "the whole log's counts": lambda: chosen_once(clicks, budget, part=1),
        "learned once, from 5 %": lambda: chosen_once(clicks, budget, part=0.05),
        "chosen anew every 2,048 clicks": lambda: chosen_often(
            clicks, budget, size, every=max(1, 2048 // size)
        ),
        HOTLINE: lambda: hotline(**hourly),
        "hotline, as it is by default": hotline,
        **{
            name: partial(trained, clicks, size, name, slots)
            for name in ("static", "lru", "lookahead")
        },
        f"hotline, learning phases of {phase} batches": lambda: hotline(
            **{**hourly, "relearn": phase}
        ),
        "decisions alone, counts halved by drift": alone,
        f"decisions alone, counts halved every {half_life} batches, too": lambda: alone(
            lambda: counts(half_life)
        ),
        f"decisions alone, learning phases of {phase} batches": lambda: alone(relearn=phase),
        "decisions alone, SRRIP": lambda: alone(
            lambda: SrripLog.within(clicks.tables, clicks.row_bytes, budget)
        ),
    }


def _line(name: str, clicks: Clicks, served: Served, oracle: Tensor) -> Line:
    begin = math.ceil(0.05 * len(clicks.ids))  # nothing is compared while Hotline learns
    hits = None if served.hits is None else float(served.hits[begin:].double().mean())
    if served.is_popular is None:
        return Line(name, hit_rate=hits)
    hours = clicks.hours[begin:]
    ours, best = served.is_popular[begin:].double(), oracle[begin:].double()
    totals = torch.bincount(hours)
    is_full = totals >= FEWEST_CLICKS
    missed, shares = (
        torch.bincount(hours, each)[is_full] / totals[is_full] for each in (best - ours, ours)
    )
    return Line(
        name,
        share=float(ours.mean()),
        below=float(best.mean() - ours.mean()),
        hours_near=float((missed <= POINTS).double().mean()),
        p95_below=float(missed.quantile(0.95)),
        times_chosen=served.times_chosen,
        rows_in=served.rows_in,
        hit_rate=hits,
        by_hour=tuple(round(each, 4) for each in shares.tolist()),
    )


def next_day(clicks: Clicks, hot_part: float) -> float:
    """Share of the second day's clicks that go to the first day's most clicked articles."""
    days, table = clicks.hours // 24, clicks.tables[0]
    first = torch.bincount(clicks.ids[days == 0, 0], minlength=table.num_embeddings)
    hot = first.sort(descending=True, stable=True)[1][: int(hot_part * table.num_embeddings)]
    return float(torch.isin(clicks.ids[days == 1, 0], hot).double().mean())


def _cells(line: Line) -> tuple[str, ...]:
    def percent(share: float | None, form: str = ".1f") -> str:
        return "-" if share is None else f"{100 * share:{form}} %"

    return (
        percent(line.share),
        "-" if line.below is None else f"{100 * line.below:.1f}",
        percent(line.hours_near, ".0f"),
        "-" if line.p95_below is None else f"{100 * line.p95_below:.1f}",
        f"{line.times_chosen:,}" if line.times_chosen else "-",
        f"{line.rows_in:,}" if line.times_chosen else "-",
        percent(line.hit_rate),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clicks", type=Path, nargs="?")
    parser.add_argument("--hot", type=float, default=0.01, help="part of all rows that is hot")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--users", action="store_true", help="with a table of the users")
    parser.add_argument("--only", nargs="+", default=(), help="of the ways, by name")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for drift.jsonl")
    parser.add_argument("--commit", help="of the code measured; else what git says")
    args = parser.parse_args()
    torch.set_num_threads(1)  # steps are small
    results = results_for("drift", args)
    columns = (*COLUMNS, "user_id") if args.users else COLUMNS
    clicks = read(args.clicks, columns) if args.clicks else steady(3_000_000, 200_000)
    run = "no drift" if args.clicks is None else "globo, users" if args.users else "globo"
    rows = sum(table.num_embeddings for table in clicks.tables)
    setting = {
        "clicks": len(clicks.ids),
        "batch": args.batch,
        "rows": rows,
        "tables": len(clicks.tables),
        "hot_rows": int(args.hot * rows),
        "slots": int(args.hot * rows) + 2 * most_rows(clicks, args.batch),
        "next_day": next_day(clicks, args.hot),
    }
    print(
        f"{len(clicks.ids):,} clicks, batches of {args.batch:,}, {rows:,} rows in "
        f"{len(clicks.tables)} tables, {setting['hot_rows']:,} of them hot; {setting['slots']:,} "
        f"slots where rows move\nday 1's most clicked {args.hot:.0%} of the first table have "
        f"{setting['next_day']:.1%} of day 2's clicks\n"
    )
    titles = (
        "popular", "points below", "hours within 5", "95 % of hours", "chosen", "rows in",
        "hit rate",
    )  # fmt: skip
    print("  ".join((f"{'':44}", *(f"{title:>14}" for title in titles))))
    for line in compare(clicks, args.hot, args.batch, args.only):
        print("  ".join((f"{line.name:44}", *(f"{c:>14}" for c in _cells(line)))), flush=True)
        results.write(run, line.name, {"setting": setting, "facts": asdict(line)})


if __name__ == "__main__":
    main()
