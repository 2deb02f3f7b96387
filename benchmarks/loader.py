"""How many samples a second `hotrow.data.Loader` puts together, in Criteo's layout.

    python benchmarks/loader.py
    python benchmarks/loader.py --workers 1 2 4 8 --samples 16000000

Writes shards as `hotrow prepare` does (26 ids, 13 numbers, a label: 157 bytes a sample), reads them
once so that they lie in memory, and then loads epochs of them, shuffled, into page-locked batches
where there is a GPU. Nothing else is done with the batches.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Session, Timing, parser, say

from hotrow.data import KAGGLE_ROWS, Loader
from hotrow.data.prepared import format as layout
from hotrow.support.files import Disk

BATCH, SHARD = 8192, 1 << 20
NUM_DENSE, WINDOWS = 13, 5
ROWS = tuple(min(rows, 100_000) for rows in KAGGLE_ROWS)


def write(folder: Path, samples: int) -> None:
    """Samples drawn at random; only their size matters here."""
    names = [f"C{place}" for place in range(1, len(ROWS) + 1)]
    schema = layout.Schema(
        label="label",
        dense=tuple(f"I{place}" for place in range(1, NUM_DENSE + 1)),
        features=tuple(layout.Feature(name, name) for name in names),
    )
    disk, draw, shards = Disk(folder), np.random.default_rng(0), []
    for number, first in enumerate(range(0, samples, SHARD)):
        count = min(SHARD, samples - first)
        arrays = {
            "ids": (draw.random((count, len(names)), np.float32) * ROWS).astype(np.int32),
            "dense": draw.random((count, NUM_DENSE), np.float32),
            "label": draw.integers(0, 2, count, np.uint8),
        }
        file = f"shards/train-{number:05}.bin"
        shards.append(layout.write_shard(disk, file, schema, arrays))
    tables = []
    for number, (name, rows) in enumerate(zip(names, ROWS, strict=True)):
        counts = disk.write(f"tables/{number:03}.counts", [np.ones(rows, np.int64).tobytes()])
        tables.append(layout.TableRecord(name, rows, "hash", None, counts, None))
    splits = {"train": tuple(shards), "validation": (), "test": ()}
    manifest = layout.Manifest(schema, tuple(tables), splits, {}, {}, "benchmarks/loader.py")
    (folder / layout.MANIFEST).write_text(layout.to_json(manifest), encoding="utf-8")


def measure(folder: Path, workers: int, seconds: float) -> dict[str, Any]:
    """Samples per second in windows of so many seconds, after an epoch: files are mapped then, and
    page-locked memory is there."""
    loader = Loader(folder, batch_size=BATCH, seed=0, epochs=10**6, workers=workers)
    batches = loader.batches()
    rates = []
    try:
        for _ in itertools.islice(batches, loader.batches_per_epoch):
            pass
        for _ in range(WINDOWS):
            started, taken = time.perf_counter(), 0
            while (passed := time.perf_counter() - started) < seconds:
                taken += sum(len(batch.label) for batch in itertools.islice(batches, 16))
            rates.append(taken / passed)
    finally:
        batches.close()
    milliseconds = [1000 * BATCH / rate for rate in rates]
    return {
        "workers": workers,
        "step_ms": asdict(Timing.of(milliseconds)),  # of a batch
        "samples_per_second": float(np.median(rates)),
        "page_locked": torch.cuda.is_available(),
    }


def one_line(measured: dict[str, Any]) -> str:
    return f"{measured['samples_per_second'] / 1e6:6.2f} M samples/s"


def main() -> None:
    made = parser(__doc__.split("\n")[0])
    made.add_argument("--samples", type=int, default=8_000_000)
    made.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 12])
    made.add_argument("--seconds", type=float, default=0.5, help="of each of five windows")
    arguments = made.parse_args()
    if arguments.smoke:
        arguments.samples, arguments.workers, arguments.seconds = 20_000, [1, 2], 0.01
    session = Session("loader", arguments)
    with tempfile.TemporaryDirectory() as name:
        say(f"writing {arguments.samples:,} samples")
        write(Path(name), arguments.samples)
        for workers in arguments.workers:
            session.attempt(
                f"workers-{workers}",
                "hotrow",
                lambda workers=workers: measure(Path(name), workers, arguments.seconds),
                one_line,
            )
    session.print_again()
    raise SystemExit(int(session.failed > 0))


if __name__ == "__main__":
    main()
