"""The folder of a saved model, as records.

    manifest.json               every file with its size and SHA-256, and which rows it holds. Put
                                in place last: a folder without it is no model.
    dense.safetensors           all parameters and buffers but rows, by their state-dict names
    rows/000-00000.safetensors  consecutive rows of one table: "weights" [rows, dim] float32

Of a file that holds more tensors, readers take those they know: so row state can come to lie beside
the weights. A key of the manifest that is not known is left aside, too; what readers must not leave
aside gets another format number. Nothing is pickled.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotrow.support.files import FileRecord
from hotrow.support.manifests import Reader, read_json

FORMAT = 1
MANIFEST = "manifest.json"
DENSE = "dense.safetensors"
WEIGHTS = "weights"
_REMEDY = "take a copy that is whole, or train again"


@dataclass(frozen=True)
class RowShard(FileRecord):
    """Consecutive rows of a table."""

    first: int
    rows: int


@dataclass(frozen=True)
class SavedTable:
    key: str  # of its weights in the model's state dict
    rows: int
    dim: int
    shards: tuple[RowShard, ...]

    @property
    def bytes(self) -> int:
        return 4 * self.rows * self.dim


@dataclass(frozen=True)
class Manifest:
    dense: FileRecord
    tables: tuple[SavedTable, ...]
    made_by: str = ""

    @property
    def files(self) -> list[FileRecord]:
        return [self.dense, *(shard for table in self.tables for shard in table.shards)]


def to_json(manifest: Manifest) -> str:
    return json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, checked; a ValueError says what is wrong with it."""
    path = folder / MANIFEST
    try:
        found = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} holds no model: it has no {MANIFEST}, which is written when all else is"
        ) from None
    read = Reader(str(path), remedy=_REMEDY)
    top = read.table(found, "the manifest")
    version = read.number(top, "format")
    if version > FORMAT:
        raise ValueError(
            f"{path} was saved by a newer hotrow: its format is {version}, and this one reads "
            f"{FORMAT}; update hotrow"
        )
    if version < 1:
        raise read.wrong(f"there is no format {version}")
    manifest = Manifest(
        dense=file_of(read, top.get("dense")),
        tables=tuple(_table(read, each) for each in read.items(top, "tables")),
        made_by=read.text(top, "made_by"),
    )
    _check(manifest, read)
    return manifest


def file_of(read: Reader, found: Any) -> FileRecord:
    found = read.table(found, "a file")
    return FileRecord(read.path(found), read.number(found, "bytes"), read.text(found, "sha256"))


def _shard(read: Reader, found: Any) -> RowShard:
    file = file_of(read, found)
    first, rows = read.number(found, "first"), read.number(found, "rows")
    return RowShard(file.file, file.bytes, file.sha256, first, rows)


def _table(read: Reader, found: Any) -> SavedTable:
    found = read.table(found, "a table")
    shards = tuple(_shard(read, each) for each in read.items(found, "shards"))
    rows, dim = read.number(found, "rows"), read.number(found, "dim")
    return SavedTable(read.text(found, "key"), rows, dim, shards)


def _check(manifest: Manifest, read: Reader) -> None:
    """Numbers that contradict each other are found before they size anything."""
    for table in manifest.tables:
        expected = 0
        for shard in table.shards:
            if shard.first != expected:
                raise read.wrong(
                    f"{shard.file} begins with row {shard.first:,} of {table.key}, and row "
                    f"{expected:,} is next"
                )
            expected += shard.rows
            if shard.bytes < 4 * shard.rows * table.dim:
                raise read.wrong(
                    f"{shard.file} has {shard.bytes:,} bytes, too few for {shard.rows:,} rows of "
                    f"{table.dim} numbers"
                )
        if expected != table.rows:
            raise read.wrong(f"{table.key} has {table.rows:,} rows, {expected:,} of them in shards")
    for names in ([each.file for each in manifest.files], [each.key for each in manifest.tables]):
        if len(set(names)) != len(names):
            raise read.wrong("a file or a table is named twice")
