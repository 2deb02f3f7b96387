"""Are generated clicks read as often as real ones? At the full scale of Avazu's log.

    python benchmarks/counted.py value_counts.csv.zst

reads a CSV file with the columns Field and Total, a line for each value that was counted, draws
clicks over tables of the published sizes, and compares how often rows come with how often they were
counted. Values that are not in the file share evenly what is left of all samples.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from criteo_sample import read_bytes
from numpy.typing import NDArray

from hotrow.data import Counted, SyntheticClicks, SyntheticConfig
from hotrow.data.prepared.sources import Avazu
from hotrow.run.config import load

CONFIG = Path(__file__).parents[1] / "configs" / "rm4-avazu.toml"
BATCH = 16_384


@dataclass(frozen=True)
class Compared:
    """A table's counts beside what was drawn."""

    name: str
    num_rows: int
    counted: int  # rows that have a count
    share: float  # of all reads, that those have
    drawn_share: float
    top_share: float  # of the hottest hundredth of the rows
    drawn_top_share: float
    chi_squared: float  # over the counted rows, divided by their number: about 1 where alike


def read_counts(path: Path) -> dict[str, NDArray[np.int64]]:
    """Of each column the counts of its values, in the order of the file."""
    found: dict[str, list[int]] = {}
    for line in csv.DictReader(io.StringIO(read_bytes(path).decode())):
        if "Field" not in line or "Total" not in line:
            raise SystemExit(f"{path} has no columns Field and Total")
        found.setdefault(line["Field"], []).append(int(line["Total"]))
    return {name: np.array(counts) for name, counts in found.items()}


def popularity(
    counts: Mapping[str, NDArray[np.int64]], rows: Mapping[str, int]
) -> dict[str, Counted]:
    """Every sample reads one row of each table, so all have as many reads as the one whose values
    were all counted."""
    total = max(int(each.sum()) for each in counts.values())
    found = {}
    for name, num_rows in rows.items():
        uses = counts[name]
        is_whole = int(uses.sum()) == total
        found[name] = Counted(
            uses, np.arange(len(uses)), num_rows=num_rows, total=None if is_whole else total
        )
    return found


def compare(
    counts: Mapping[str, NDArray[np.int64]], rows: Mapping[str, int], *, batches: int
) -> list[Compared]:
    config = SyntheticConfig(
        rows=tuple(rows.values()), names=tuple(rows), batch_size=BATCH, num_dense=1
    )
    clicks = SyntheticClicks(config, counts=popularity(counts, rows))
    read = [np.zeros(num_rows, np.int64) for num_rows in rows.values()]
    for batch in clicks.batches(0, batches):
        for found, ids in zip(read, batch.sparse.T.numpy(), strict=True):
            np.add.at(found, ids, 1)
    draws, total = batches * BATCH, max(int(each.sum()) for each in counts.values())
    results = []
    for table, (name, num_rows) in enumerate(rows.items()):
        found, uses = read[table], counts[name]
        expected = draws * uses / total
        top = clicks.hottest(table, max(1, num_rows // 100)).numpy()
        results.append(
            Compared(
                name,
                num_rows,
                len(uses),
                float(uses.sum() / total),
                float(found[: len(uses)].sum() / draws),
                clicks.expected_share(table, len(top)),
                float(found[top].sum() / draws),
                float(((found[: len(uses)] - expected) ** 2 / expected).mean()),
            )
        )
    return results


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("path", type=Path, help="CSV, plain or .zst")
    options.add_argument("--batches", type=int, default=200, help=f"of {BATCH:,} samples")
    asked = options.parse_args()
    names = [each.name for each in Avazu.schema.features]
    rows = dict(zip(names, load(CONFIG).data.rows, strict=True))
    found = compare(read_counts(asked.path), rows, batches=asked.batches)
    print(f"{asked.batches * BATCH:,} samples drawn; shares are of all reads of a table")
    print(f"{'table':>16} {'rows':>9} {'counted':>8} {'their share':>11} {'drawn':>7} "
          f"{'hottest 1 %':>11} {'drawn':>7} {'chi2':>5}")  # fmt: skip
    for each in found:
        print(
            f"{each.name:>16} {each.num_rows:>9,} {each.counted:>8,} {each.share:>11.3%} "
            f"{each.drawn_share:>7.3%} {each.top_share:>11.3%} {each.drawn_top_share:>7.3%} "
            f"{each.chi_squared:>5.2f}"
        )


if __name__ == "__main__":
    main()
