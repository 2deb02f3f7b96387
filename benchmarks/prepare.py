"""How fast `hotrow prepare` is, and in how much memory, beside Polars reading the same file.

    python benchmarks/prepare.py --lines 23000000 --folder /tmp/prepare
    python benchmarks/prepare.py --kind csv --lines 8000000 --generate   # only writes a CSV of 2 GB

Writes a log in Criteo's form, or the same columns as CSV, with the cardinalities of Kaggle's log
and a Zipf law of 1.05, once. Then prepares it, and reads it with Polars (if that is installed) into
columns of categories, each in a process of its own. Polars writes nothing, and keeps everything in
memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from hotrow.data import KAGGLE_ROWS

SKEW = 1.05
PART = 200_000  # lines written at once
OFTEN_MISSING = (18, 19, 21, 24, 25)  # categories, as in the original
LABEL, NUMBERS = "label", [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
_HEX = np.frombuffer(b"".join(b"%02x" % i for i in range(256)), np.uint16)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--lines", type=int, default=23_000_000, help="23 million are 5.8 GB")
    options.add_argument("--folder", type=Path, default=Path("prepare-benchmark"))
    options.add_argument("--memory", default="4GiB")
    options.add_argument("--kind", choices=("criteo", "csv"), default="criteo")
    options.add_argument("--generate", action="store_true", help="only write the file")
    options.add_argument("--run", choices=("ours", "polars"), help=argparse.SUPPRESS)
    asked = options.parse_args()
    path = asked.folder / f"criteo-{asked.lines}.{'csv' if asked.kind == 'csv' else 'txt'}"
    if asked.run:
        started = time.perf_counter()
        {"ours": ours, "polars": polars}[asked.run](path, asked.folder / "out", asked.memory)
        report(asked.run, asked.lines, time.perf_counter() - started)
        return
    asked.folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        generate(path, asked.lines)
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")
    for name in () if asked.generate else ("ours", "polars"):
        shutil.rmtree(asked.folder / "out", ignore_errors=True)
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--run", name], check=False)


def ours(path: Path, out: Path, memory: str) -> None:
    from hotrow.cli import make_app

    words = ["prepare", "criteo", str(path), "--out", str(out), "--memory", memory]
    if path.suffix == ".csv":
        words[1:2] = ["csv", "--columns", str(path.with_suffix(".toml"))]
    make_app()(words, standalone_mode=False)


def polars(path: Path, out: Path, memory: str) -> None:
    import polars as pl

    is_csv = path.suffix == ".csv"
    numbers, categories = (
        dict.fromkeys(NUMBERS, pl.Int64),
        dict.fromkeys(CATEGORIES, pl.Categorical),
    )
    columns = pl.read_csv(
        path,
        separator="," if is_csv else "\t",
        has_header=is_csv,
        quote_char=None,
        schema={LABEL: pl.Int8, **numbers, **categories},
    )
    columns.with_columns([pl.col(name).fill_null(0).clip(0).log1p() for name in numbers])


def report(name: str, lines: int, seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    facts = {
        "what": name,
        "lines": lines,
        "seconds": round(seconds, 1),
        "lines_per_second": round(lines / seconds),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_rss_mib": used.ru_maxrss >> 10,
    }
    print(json.dumps(facts))


def generate(path: Path, lines: int) -> None:
    """Write a log; a name that ends in .csv makes it CSV, with the file for --columns beside it."""
    beside, is_csv = path.with_suffix(".partial"), path.suffix == ".csv"
    draw = np.random.default_rng(0)
    with beside.open("wb") as file:
        for done in range(0, lines, PART):
            columns = _columns(draw, min(PART, lines - done))
            options = pyarrow.csv.WriteOptions(
                include_header=is_csv and not done,
                delimiter="," if is_csv else "\t",
                quoting_style="none",
            )
            table = pa.table(columns, names=[LABEL, *NUMBERS, *CATEGORIES])
            pyarrow.csv.write_csv(table, file, options)
    if is_csv:
        lists = {"dense": NUMBERS, "log": NUMBERS, "categories": CATEGORIES}
        text = "".join(f"{key} = {json.dumps(names)}\n" for key, names in lists.items())
        path.with_suffix(".toml").write_text(f'label = "{LABEL}"\n{text}')
    beside.replace(path)


def _columns(draw: np.random.Generator, count: int) -> list[pa.Array]:
    columns = [pa.array((draw.random(count) < 0.25).astype(np.int8))]
    for place in range(13):
        values = np.floor(draw.exponential(3, count) ** (2 + place % 3)).astype(np.int64)
        missing = draw.random(count) < (0.2 if place % 3 else 0.02)
        columns.append(pa.array(values - (place == 1), mask=missing))
    for place, rows in enumerate(KAGGLE_ROWS):
        mass = 1 - draw.random(count) * (1 - rows ** (1 - SKEW))
        ranks = (mass ** (1 / (1 - SKEW))).astype(np.uint32)
        texts = _hexadecimal(ranks * np.uint32(2654435761) + np.uint32(place * 7919))
        if place in OFTEN_MISSING:
            missing = pa.array(draw.random(count) < 0.4)
            texts = pc.if_else(missing, pa.scalar(None, pa.string()), texts)
        columns.append(texts)
    return columns


def _hexadecimal(keys: NDArray[np.uint32]) -> pa.Array:
    offsets = np.arange(len(keys) + 1, dtype=np.int32) * 8
    digits = _HEX[keys.astype(">u4").view(np.uint8)]
    buffers = (pa.py_buffer(each.tobytes()) for each in (offsets, digits))
    return pa.StringArray.from_buffers(len(keys), *buffers)


if __name__ == "__main__":
    main()
