"""Runs of `prepare` on small pieces, logs for them, and disks that stop or are full."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clicks import write
from hotrow.data.prepared import Manifest, Prepared, Schema
from hotrow.data.prepared.format import MANIFEST, TableRecord, to_json, write_shard
from hotrow.data.prepared.job import Disk, Settings, Sizes, Watch
from hotrow.data.prepared.sources import open_source
from hotrow.data.prepared.work import prepare

SMALL = Sizes(piece_bytes=9000, piece_samples=40, event_bytes=20_000, stretch_pieces=3)
IN_ORDER = ("train", "test", "validation")  # the order of lines, unless split at random
ONE_COLUMN = 'label = "y"\ncategories = ["user"]\n'


class Heard(Watch):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


def prepared(
    kind: str,
    out: Path,
    *paths: Path,
    toml: str = "",
    workers: int = 2,
    restart: bool = False,
    watch: Watch | None = None,
    disk: Disk | None = None,
    sizes: Sizes = SMALL,
    **options: Any,
) -> Prepared:
    """`toml` describes the columns; options are settings, or fields of `sizes`."""
    changed = {key: options.pop(key) for key in list(options) if hasattr(sizes, key)}
    sizes, settings = replace(sizes, **changed), Settings(**options)
    columns = out.with_suffix(".toml") if toml else None
    if columns:
        columns.write_text(toml)
    source = open_source(
        kind, list(paths), out=out, columns=columns, settings=settings, sizes=sizes
    )
    prepare(
        source, out, settings, workers=workers, restart=restart, watch=watch, disk=disk, sizes=sizes
    )
    return Prepared(out)


def all_of(data: Prepared, name: str, *splits: str) -> Any:
    """A column of all samples, in the order of their lines."""
    shards = [shard for split in splits or IN_ORDER for shard in data.shards(split)]
    return np.concatenate([getattr(shard, name) for shard in shards])


def lists_of(data: Prepared, name: str) -> list[list[int]]:
    """The lists of all samples, in the order of their lines."""
    shards = [shard.jagged[name] for split in IN_ORDER for shard in data.shards(split)]
    return [
        part.tolist() for lists in shards for part in np.split(lists.values, lists.offsets[1:-1])
    ]


def write_prepared(
    folder: Path,
    schema: Schema,
    splits: dict[str, list[dict[str, Any]]],
    counts: dict[str, NDArray[np.int64]],
) -> Path:
    """A folder as `hotrow prepare` leaves it: shards of these arrays, tables of these counts."""
    disk, tables = Disk(folder), []
    for place, (name, uses) in enumerate(counts.items()):
        file = disk.write(f"tables/{place:03}.counts", [uses.tobytes()])
        tables.append(TableRecord(name, len(uses), "hash", None, file, None))
    shards = {
        split: tuple(
            write_shard(disk, f"shards/{split}-{place:05}.bin", schema, arrays)
            for place, arrays in enumerate(every)
        )
        for split, every in splits.items()
    }
    manifest = Manifest(schema, tuple(tables), shards, source={}, settings={})
    disk.write(MANIFEST, [to_json(manifest).encode()])
    return folder


def total(data: Prepared) -> int:
    return sum(map(data.samples, IN_ORDER))


SMALL_LOG = """
label = "y"
dense = ["price"]
categories = ["user", "item", "seen"]
[tables]
seen = "item"
[lists]
seen = "|"
"""


def small_log(path: Path, count: int = 120) -> Path:
    """A CSV file of few columns: texts with hashes for keys, numbers, and lists."""
    draw = random.Random(0)
    rows = [["y", "price", "user", "item", "seen"]]
    for _ in range(count):
        seen = "|".join(str(draw.randrange(30)) for _ in range(draw.randrange(4)))
        user = f"user number {draw.randrange(20)}"
        rows += [[str(draw.randrange(2)), "1.5", user, str(draw.randrange(30)), seen]]
    return write(path, rows, separator=",")


class Stops(Disk):
    """Fails after so many files and lines of logs, and leaves half of the next one."""

    def __init__(self, folder: Path, after: int, stop: Callable[[], Any] | None = None) -> None:
        super().__init__(folder)
        self._left, self._stop = after, stop or self._exit

    def _exit(self) -> None:
        raise SystemExit("stopped")

    def write(self, name: str, parts: Any, *, durable: bool = True) -> Any:
        self._left -= 1
        if self._left < 0:
            path = self.folder / f"{name}.partial"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"half")
            self._stop()
        return super().write(name, parts, durable=durable)

    def append(self, name: str, record: object) -> None:
        self._left -= 1
        if self._left < 0:
            line = json.dumps(record).encode()
            self.extend(name, b"\n" + line[: len(line) // 2])
            self._stop()
        super().append(name, record)


class Full(Disk):
    """No room for one file."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder)
        self._name = name

    def open(self, path: Path) -> Any:
        file = super().open(path)
        if self._name in path.name:
            file.close()
            return Path("/dev/full").open("wb", buffering=0)
        return file
