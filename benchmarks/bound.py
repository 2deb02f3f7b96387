"""How near look-ahead comes to Belady's bound on real logs.

    python benchmarks/bound.py --criteo train.txt.zst --globo clicks.parquet --movielens ml-1m.zip

plans the batches of each log, in the order of time and without rows, with a part of all rows in
slots and so many batches known ahead, and counts rows fetched against the fewest that anyone could
fetch who knows all. Batches have 1,024 samples, of MovieLens 64. Counting starts when slots have
been filled, or at half of the log. Where `depth` exceeds `useful`, slots over misses, knowing more
would change little. Rows of a batch in training may not leave for the next one's, which the second
bound obeys, too.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from harness import RESULTS, results_for
from numpy.typing import NDArray
from real import write_ratings
from skew import CATEGORIES, criteo_table

from hotrow.engine.strategy import STRATEGIES
from hotrow.sizing.reuse import NEVER, Reuse, RowReuse, belady
from hotrow.sizing.simulator import simulate
from hotrow.study.lookups import OfParquet
from hotrow.study.tracked_rows import unique

PARTS = (2.0, 5.0, 10.0)
DEPTHS = (50, 200, 400)
PAST_FULL = 1.25  # rows read before counting starts, over slots
BATCH = {"criteo": 1024, "globo": 1024, "movielens": 64}
GLOBO = ("user_id", "article_id", "environment", "deviceGroup", "os", "referrer_type")
MOVIELENS = ("user", "film", "genres", "gender", "occupation", "zip")


@dataclass(frozen=True)
class Log:
    """Different rows of each batch, and what is needed for the bound."""

    name: str
    num_rows: int
    batches: list[NDArray[np.int32]]
    reuse: Reuse
    read: NDArray[np.int64]  # [batches]: rows read until then

    def tensors(self, count: int) -> Iterator[torch.Tensor]:
        for rows in self.batches[:count]:
            yield torch.from_numpy(rows.astype(np.int64))


def opened(name: str, path: Path, scratch: Path) -> Log:
    categories = {"criteo": CATEGORIES, "globo": GLOBO, "movielens": MOVIELENS}[name]
    file = path if name == "globo" else scratch / f"{name}.parquet"
    if name == "criteo":
        pq.write_table(criteo_table(path), file)
    elif name == "movielens":
        write_ratings(path, file)
    lookups = OfParquet(file, categories=categories, batch_size=BATCH[name])
    batches = [unique(batch.ids)[0] for batch in lookups.batches()]
    num_rows = sum(lookups.rows.values())
    reuse, new = RowReuse(num_rows), []
    for rows in batches:
        new.append(np.count_nonzero(reuse.last_use[rows] == NEVER))
        reuse.add_rows(rows)
    return Log(name, num_rows, batches, reuse, np.cumsum(new))


Line = dict[str, Any]


def counted(log: Log, part: float, depths: Sequence[int], most: int) -> Iterator[tuple[str, Line]]:
    """Systems and their rows per batch, the bound first."""
    slots, last = int(part / 100 * log.num_rows), len(log.batches)
    first = min(int(np.searchsorted(log.read, PAST_FULL * slots)) + 1, last // 2)
    count = min(most, last - first)
    uses = log.reuse.next_uses()
    assert uses is not None
    held = STRATEGIES["lookahead"].hold.past
    least, with_hold = (
        float(belady(uses, [slots], first=first, counted=count, past=past).per_batch[0])
        for past in (0, held)
    )
    shared = {
        "slots": slots,
        "part": part / 100,
        "batch": BATCH[log.name],
        "warmup_batches": first,
        "counted_batches": count,
        "largest_batch": log.reuse.floor(1),
    }
    if np.isnan(least):
        yield "belady", shared | {"depth": None, "missing_rows_per_batch": None}
        return

    def line(depth: int | None, rows: float, chunked: int = 0) -> Line:
        found = {"depth": depth, "missing_rows_per_batch": rows, "over_belady": rows / least}
        return shared | {"useful_depth": slots / least, "chunked_batches": chunked} | found

    yield "belady", line(None, least)
    yield f"belady, {held + 1} batches held", line(None, with_hold)
    chosen = [replace(STRATEGIES["lookahead"], look_ahead=depth) for depth in depths]
    planned = simulate(
        log.tensors(first + count + max(depths)),
        num_rows=log.num_rows,
        choices=[(each, slots) for each in (*chosen, STRATEGIES["lru"])],
        warm_up=first,
        counted=count,
    )
    for each in planned:
        name = f"{each.strategy}-{each.depth}" if each.depth else each.strategy
        yield name, line(each.depth or None, each.rows_per_batch, each.chunked_batches)


def told(log: Log, part: float, system: str, line: Line) -> str:
    if line["missing_rows_per_batch"] is None:
        said = f"a batch has up to {line['largest_batch']:,} rows, which do not fit | | |"
        return f"| {log.name} | {part:g} % | {line['slots']:,} | {said} |"
    where = "| | | |"
    note = f"{line['chunked_batches']} chunked" if line["chunked_batches"] else ""
    if system == "belady":
        where = f"| {log.name} | {part:g} % | {line['slots']:,} |"
        note = f"useful {line['useful_depth']:,.0f}"
    rows, over = line["missing_rows_per_batch"], line["over_belady"]
    return f"{where} {system} | {rows:,.0f} | {over:.3f} | {note} |"


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in BATCH:
        made.add_argument(f"--{name}", type=Path)
    made.add_argument("--parts", type=float, nargs="+", default=PARTS, help="of all rows, in %%")
    made.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    made.add_argument("--counted", type=int, default=2000, help="batches at the most")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder for bound.jsonl")
    made.add_argument("--commit", default=os.environ.get("COMMIT"), help="of the code measured")
    asked = made.parse_args()
    given = {name: getattr(asked, name) for name in BATCH if getattr(asked, name) is not None}
    if not given:
        made.error(f"give one at least of {', '.join(f'--{name}' for name in BATCH)}")
    torch.set_num_threads(1)
    results = results_for("bound", asked)
    print(
        "| log | rows in slots | slots | | rows per batch | over the bound | |\n|---|" + "---|" * 6
    )
    with tempfile.TemporaryDirectory() as scratch:
        for name, path in given.items():
            log = opened(name, path, Path(scratch))
            for part in asked.parts:
                for system, line in counted(log, part, asked.depths, asked.counted):
                    results.write(f"{name}-{part:g}", system, line)
                    print(told(log, part, system, line), flush=True)


if __name__ == "__main__":
    main()
