"""The folder of a checkpoint, as records.

    checkpoint.json             every file with its size and SHA-256 (of rows: that of the CRC-32 of
                                each MiB), which rows it holds, and a checksum of all that itself
    dense.safetensors           all parameters and buffers but rows, by their state-dict names
    state.json                  everything else that training goes on with, as checkpoint/tree.py
    state.safetensors           has it, and the tensors that it names
    rows/000-00000.safetensors  rows of one table: "rows" [n, dim + state] float32; of a checkpoint
                                that has a parent also "ids" [n] int64, ascending

A checkpoint with a parent holds the rows that were written since that one; all others are the
parent's, which lies beside it. A key of the manifest that is not known is left aside; what readers
must not leave aside gets another format number.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hotrow.checkpoint.format import file_of
from hotrow.support.files import FileRecord
from hotrow.support.manifests import Reader, read_json

FORMAT = 1
MANIFEST = "checkpoint.json"
DENSE = "dense.safetensors"
STATE = "state.json"
STATE_TENSORS = "state.safetensors"
ROWS, IDS = "rows", "ids"
NAME = re.compile(r"(\d{5,})-step-(\d+)")  # of a folder: its number among its like, and its step
_REMEDY = "take a copy that is whole, or another checkpoint"


class NewerFormat(ValueError):
    """Saved by a version of hotrow that is newer than this one."""


@dataclass(frozen=True)
class Shard:
    """Rows of a table between two of its numbers: all of them, or those that had changed."""

    file: str  # relative to the folder
    bytes: int
    sums: str  # as hotrow.support.files.BlockSums has them
    first: int
    span: int
    rows: int


@dataclass(frozen=True)
class TableRecord:
    key: str  # of its weights in the model's state dict
    rows: int
    dim: int
    state: dict[str, int]  # numbers of each piece of state that follow a row's weights
    shards: tuple[Shard, ...]

    @property
    def width(self) -> int:
        return self.dim + sum(self.state.values())


@dataclass(frozen=True)
class Parent:
    name: str  # of its folder, beside this one
    checksum: str  # of its manifest


@dataclass(frozen=True)
class Manifest:
    step: int
    dense: FileRecord
    state: FileRecord
    state_tensors: FileRecord
    tables: tuple[TableRecord, ...]
    parent: Parent | None = None
    made_by: str = ""
    saved: str = ""  # when
    checksum: str = ""  # of all that is above

    @property
    def small_files(self) -> list[FileRecord]:
        """All but rows."""
        return [self.dense, self.state, self.state_tensors]

    @property
    def shards(self) -> list[Shard]:
        return [shard for table in self.tables for shard in table.shards]


def _checksum(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def with_checksum(manifest: Manifest) -> Manifest:
    return replace(manifest, checksum=_checksum(_body(manifest)))


def _body(manifest: Manifest) -> dict[str, Any]:
    body = {"format": FORMAT, **asdict(manifest)}
    del body["checksum"]
    return body


def to_json(manifest: Manifest) -> str:
    return json.dumps({**_body(manifest), "checksum": manifest.checksum}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, checked; a ValueError says what is wrong with it."""
    path = folder / MANIFEST
    try:
        found = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is no checkpoint: it has no {MANIFEST}") from None
    read = Reader(str(path), remedy=_REMEDY)
    top = read.table(found, "the manifest")
    version = read.number(top, "format")
    if version > FORMAT:
        raise NewerFormat(
            f"{path} was saved by a newer hotrow: its format is {version}, and this one reads "
            f"{FORMAT}; update hotrow"
        )
    if version < 1:
        raise read.wrong(f"there is no format {version}")
    told = read.text(top, "checksum")
    if _checksum({key: each for key, each in top.items() if key != "checksum"}) != told:
        raise read.wrong("its checksum is another: it has changed since it was written")
    manifest = Manifest(
        step=read.number(top, "step"),
        dense=file_of(read, top.get("dense")),
        state=file_of(read, top.get("state")),
        state_tensors=file_of(read, top.get("state_tensors")),
        tables=tuple(_table(read, each) for each in read.items(top, "tables")),
        parent=_parent(read, top.get("parent"), folder),
        made_by=read.text(top, "made_by"),
        saved=read.text(top, "saved"),
        checksum=told,
    )
    for table in manifest.tables:
        _check(table, read, whole=manifest.parent is None)
    files = [each.file for each in manifest.small_files]
    files += [each.file for each in manifest.shards]
    for names in (files, [each.key for each in manifest.tables]):
        if len(set(names)) != len(names):
            raise read.wrong("a file or a table is named twice")
    return manifest


def _shard(read: Reader, found: Any) -> Shard:
    found = read.table(found, "a shard")
    size, *numbers = (read.number(found, key) for key in ("bytes", "first", "span", "rows"))
    return Shard(read.path(found), size, read.text(found, "sums"), *numbers)


def _table(read: Reader, found: Any) -> TableRecord:
    found = read.table(found, "a table")
    state = read.table(found.get("state"), "the state of a table")
    return TableRecord(
        read.text(found, "key"),
        read.number(found, "rows"),
        read.number(found, "dim"),
        {name: read.number(state, name) for name in state},
        tuple(_shard(read, each) for each in read.items(found, "shards")),
    )


def _parent(read: Reader, found: Any, folder: Path) -> Parent | None:
    if found is None:
        return None
    found = read.table(found, "the parent")
    parent = Parent(read.text(found, "name"), read.text(found, "checksum"))
    match, mine = NAME.fullmatch(parent.name), NAME.fullmatch(folder.name)
    if match is None:
        raise read.wrong(f"{parent.name!r} is no name of a checkpoint")
    # So no checkpoint can be its own ancestor.
    if mine is not None and int(match[1]) >= int(mine[1]):
        raise read.wrong(f"its parent {parent.name} is not older than itself")
    return parent


def _check(table: TableRecord, read: Reader, *, whole: bool) -> None:
    """Numbers that contradict each other are found before they size anything."""
    expected = 0
    for shard in table.shards:
        if shard.first < expected or (whole and shard.first != expected):
            raise read.wrong(
                f"{shard.file} begins with row {shard.first:,} of {table.key}, and row "
                f"{expected:,} is next"
            )
        expected = shard.first + shard.span
        if shard.rows > shard.span or (whole and shard.rows != shard.span):
            raise read.wrong(
                f"{shard.file} has {shard.rows:,} rows of {shard.span:,} of {table.key}"
            )
        least = 4 * shard.rows * table.width + (0 if whole else 8 * shard.rows)
        if shard.bytes < least:
            raise read.wrong(
                f"{shard.file} has {shard.bytes:,} bytes, too few for {shard.rows:,} rows of "
                f"{table.width} numbers"
            )
    if expected > table.rows or (whole and expected != table.rows):
        raise read.wrong(f"{table.key} has {table.rows:,} rows, {expected:,} of them in shards")
