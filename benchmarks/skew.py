"""Does `hotrow profile` find in real logs what plain counting finds?

    python benchmarks/skew.py --criteo train.txt.zst --globo clicks.parquet
    python benchmarks/skew.py --speed

The first reads a file in the format of Criteo's display-advertising challenge and the Globo.com
click log, profiles both as the command does, and compares with counts by pyarrow and numpy: what
share of Criteo's accesses the hottest ids have (missing values are no ids), and how much of the
clicks of a day go to the articles that were hot the day before. It ends with an error where they
differ. The second profiles a generated trace of Kaggle's shape, 101 M lookups, and tells the time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from criteo_sample import NUM_CATEGORIES, NUM_NUMBERS, read_bytes
from traces import Trace

from hotrow.data import KAGGLE_ROWS
from hotrow.data.prepared.vocabulary import spread
from hotrow.study.lookups import LookupBatch, OfParquet
from hotrow.study.profiling import DataProfile, profile_lookups
from hotrow.support.units import parse_bytes, show_bytes

CATEGORIES = [f"C{number}" for number in range(1, NUM_CATEGORIES + 1)]
PARTS = (0.01, 0.1)
HOT = 0.01
DAY = 86_400


def criteo_table(path: Path) -> Any:
    """The categories, as lists: a missing value is an empty one."""
    numbers = [f"I{number}" for number in range(1, NUM_NUMBERS + 1)]
    names = ["label", *numbers, *CATEGORIES]
    read = pa.csv.read_csv(
        pa.BufferReader(read_bytes(path)),
        pa.csv.ReadOptions(column_names=names),
        pa.csv.ParseOptions(delimiter="\t"),
        pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    )
    lists = []
    for name in CATEGORIES:
        column = read[name].combine_chunks()
        is_there = np.asarray(column.to_numpy(zero_copy_only=False)) != ""
        offsets = np.concatenate([[0], is_there.cumsum()]).astype(np.int32)
        lists.append(pa.ListArray.from_arrays(offsets, column.filter(pa.array(is_there))))
    return pa.table(lists, names=CATEGORIES)


def covered(table: Any, parts: Sequence[float]) -> tuple[int, list[float]]:
    """Different ids of all columns, and the share of the accesses that parts of them have."""
    counts = [
        table[name].combine_chunks().flatten().value_counts().field(1).to_numpy()
        for name in table.column_names
    ]
    ordered = np.sort(np.concatenate(counts))[::-1]
    ends = ordered.cumsum()
    return len(ordered), [float(ends[int(part * len(ordered)) - 1] / ends[-1]) for part in parts]


def next_days(table: Any) -> list[float]:
    """The share of each day's clicks, from the second on, that go to the hottest of the day
    before, where a day is one with clicks; of equally hot ones the first in the order of rows."""
    keys = spread(table["article_id"].to_numpy().astype(np.uint64))  # as rows are numbered
    articles = np.unique(keys, return_inverse=True)[1]
    seconds = table["timestamp"].to_numpy()
    days, size = (seconds - seconds[0]) // DAY, int(HOT * (articles.max() + 1))
    found, hot = [], None
    for day in np.unique(days):
        today = articles[days == day]
        if hot is not None:
            found.append(float(np.isin(today, hot).mean()))
        counts = np.bincount(today)
        hot = np.argsort(-counts, kind="stable")[: min(size, np.count_nonzero(counts))]
    return found


def profiled(path: Path, categories: Sequence[str], **options: Any) -> DataProfile:
    started, spent = time.perf_counter(), time.process_time()
    lookups = OfParquet(path, categories=categories, batch_size=1024, **options)
    found = profile_lookups(lookups, hot_part=HOT).profile
    wall, cpu = time.perf_counter() - started, time.process_time() - spent
    print(f"  {found.total.accesses:,} accesses in {wall:.1f} s, {cpu:.1f} s of a core")
    return found


def same(what: str, mine: Sequence[float], theirs: Sequence[float], *, within: float) -> None:
    print(f"  {what}: " + ", ".join(f"{each:.4f}" for each in mine))
    if len(mine) != len(theirs) or not np.allclose(mine, theirs, rtol=0, atol=within):
        raise SystemExit(f"{what} should be {theirs}")


def check_criteo(path: Path) -> None:
    table = criteo_table(path)
    num_ids, shares = covered(table, PARTS)
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(table, Path(folder) / "criteo.parquet", row_group_size=1 << 14)
        print(f"{path.name}: {table.num_rows:,} samples, {num_ids:,} different ids")
        found = profiled(Path(folder) / "criteo.parquet", CATEGORIES)
    assert found.total.rows == found.total.distinct.value == num_ids
    mine = [found.total.coverage.top(part).value for part in PARTS]
    same("accesses of the hottest 1 % and 10 %", mine, shares, within=1e-12)


def check_globo(path: Path) -> None:
    table = pq.read_table(path, columns=["timestamp", "article_id"])
    print(f"{path.name}: {table.num_rows:,} clicks")
    found = profiled(path, ["article_id"], time="timestamp", period=DAY)
    mine = found.total.drift.previous.tolist()
    same("clicks on the hottest of the day before", mine, next_days(table), within=1e-12)


class Generated:
    """Ids in a file, so that what is measured is counting."""

    name, batch_size = "generated", 2048

    def __init__(self, folder: Path, num_batches: int) -> None:
        self.rows = {f"cat_{table}": rows for table, rows in enumerate(KAGGLE_ROWS)}
        self.num_batches = num_batches
        trace = Trace(KAGGLE_ROWS, steps=num_batches, batch=self.batch_size, skew=1.05, lock=False)
        bases = np.cumsum([0, *KAGGLE_ROWS[:-1]])
        self._file = folder / "ids"
        with self._file.open("wb") as file:
            for ids in trace.ids:
                (ids.numpy() + bases).astype(np.int32).tofile(file)
        trace.close()

    def batches(self) -> Iterator[LookupBatch]:
        lookups = self.batch_size * len(self.rows)
        with self._file.open("rb") as file:
            for _ in range(self.num_batches):
                yield LookupBatch(np.fromfile(file, np.int32, lookups), self.batch_size)


def show_speed(num_batches: int, memory: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lookups = Generated(Path(folder), num_batches)
        started, spent = time.perf_counter(), time.process_time()
        tracemalloc.start()
        found = profile_lookups(lookups, memory_bytes=parse_bytes(memory), first=num_batches // 2)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        wall, cpu = time.perf_counter() - started, time.process_time() - spent
    profile = found.profile
    print(
        f"{profile.total.accesses:,} lookups in {wall:.1f} s, {cpu:.1f} s of a core, "
        f"{show_bytes(peak)}; {profile.followed_rows:,} rows followed"
    )
    top = profile.total.coverage.top(0.01)
    print(f"  accesses of the hottest 1 %: {top.value:.4f} ± {top.error:.4f}")
    for curve in profile.curves:
        error = (curve.high - curve.low) / 2 / curve.batches
        rows = zip(curve.slots, curve.per_batch, error, strict=True)
        told = (f"{slots:,}: {misses:,.0f} ± {spread:,.0f}" for slots, misses, spread in rows)
        print(f"  {curve.policy:7}", ", ".join(told))


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--criteo", type=Path, help="train.txt, or train.txt.zst")
    made.add_argument("--globo", type=Path, help="clicks.parquet")
    made.add_argument("--speed", action="store_true", help="measure on a generated trace")
    made.add_argument("--batches", type=int, default=1900, help="of the generated trace")
    made.add_argument("--memory", default="2GiB", help="for the generated trace")
    arguments = made.parse_args()
    if not (arguments.criteo or arguments.globo or arguments.speed):
        made.error("give --criteo, --globo or --speed")
    if arguments.speed:
        show_speed(arguments.batches, arguments.memory)
    if arguments.criteo is not None:
        check_criteo(arguments.criteo)
    if arguments.globo is not None:
        check_globo(arguments.globo)


if __name__ == "__main__":
    main()
