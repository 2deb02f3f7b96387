"""The folders of checkpoints and of saved models, as records. Nothing is pickled.

A checkpoint:
    checkpoint.json             every file with its size and SHA-256 (of rows: that of the CRC-32 of
                                each MiB), which rows it holds, and a checksum of all that itself
    dense.safetensors           all parameters and buffers but rows, by their state-dict names
    state.json                  everything else that training goes on with, as checkpoint/parts.py
    state.safetensors           has it, and the tensors that it names
    rows/000-00000.safetensors  rows of one table: "rows" [n, dim + state] float32; of a checkpoint
                                that has a parent also "ids" [n] int64, ascending

A model:
    manifest.json               every file with its size and SHA-256, and which rows it holds. Put
                                in place last: a folder without it is no model.
    dense.safetensors           as above
    rows/000-00000.safetensors  consecutive rows of one table: "weights" [rows, dim] float32

A checkpoint with a parent holds the rows that were written since that one; all others are the
parent's, which lies beside it. Readers of a model take the tensors they know out of a file, so that
row state can come to lie beside the weights. Keys of a manifest that are not known are ignored;
what readers must not ignore gets another format number.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hotrow.support.files import FileRecord
from hotrow.support.manifests import Count, check_files, check_format, converted, read_json

FORMAT = 1
CHECKPOINT_FILE = "checkpoint.json"
MODEL_FILE = "manifest.json"
DENSE = "dense.safetensors"
STATE = "state.json"
STATE_TENSORS = "state.safetensors"
ROWS, IDS, WEIGHTS = "rows", "ids", "weights"
NAME = re.compile(r"(\d{5,})-step-(\d+)")  # of a folder: its number among its like, and its step
OTHER_COPY = "take a copy that is whole, or another checkpoint"
OTHER_MODEL = "take a copy that is whole, or train again"


class NewerFormat(ValueError):
    """Saved by a version of hotrow that is newer than this one."""


@dataclass(frozen=True)
class ModelShard(FileRecord):
    """Consecutive rows of a table."""

    first: Count
    rows: Count

    @property
    def span(self) -> int:
        return self.rows


@dataclass(frozen=True)
class Shard:
    """Rows of a table between two of its numbers: all of them, or those that had changed."""

    file: str  # relative to the folder
    bytes: Count
    sums: str  # as hotrow.support.files.BlockSums has them
    first: Count
    span: Count
    rows: Count


@dataclass(frozen=True)
class SavedTable:
    key: str  # of its weights in the model's state dict
    rows: Count
    dim: Count


@dataclass(frozen=True)
class ModelTable(SavedTable):
    shards: tuple[ModelShard, ...]

    @property
    def width(self) -> int:
        return self.dim


@dataclass(frozen=True)
class CheckpointTable(SavedTable):
    state: dict[str, Count]  # numbers of each piece of state that follow a row's weights
    shards: tuple[Shard, ...]

    @property
    def width(self) -> int:
        return self.dim + sum(self.state.values())


@dataclass(frozen=True)
class ModelManifest:
    dense: FileRecord
    tables: tuple[ModelTable, ...]
    made_by: str

    def __post_init__(self) -> None:
        _check(self.tables, [self.dense], whole=True)

    @property
    def files(self) -> list[FileRecord]:
        return [self.dense, *(shard for table in self.tables for shard in table.shards)]


@dataclass(frozen=True)
class Parent:
    name: str  # of its folder, beside this one
    checksum: str  # of its manifest


@dataclass(frozen=True)
class CheckpointManifest:
    step: Count
    dense: FileRecord
    state: FileRecord
    state_tensors: FileRecord
    tables: tuple[CheckpointTable, ...]
    parent: Parent | None
    made_by: str
    saved: str  # when
    checksum: str = ""  # of all that is above

    def __post_init__(self) -> None:
        _check(self.tables, self.small_files, whole=self.parent is None)

    @property
    def small_files(self) -> list[FileRecord]:
        """All but rows."""
        return [self.dense, self.state, self.state_tensors]

    @property
    def shards(self) -> list[Shard]:
        return [shard for table in self.tables for shard in table.shards]


def _check(
    tables: Sequence[ModelTable | CheckpointTable], others: Iterable[FileRecord], *, whole: bool
) -> None:
    """Refuse numbers that contradict each other, before they size anything."""
    for table in tables:
        expected = 0
        for shard in table.shards:
            if shard.first < expected or (whole and shard.first != expected):
                raise ValueError(
                    f"{shard.file} begins with row {shard.first:,} of {table.key}, and row "
                    f"{expected:,} is next"
                )
            expected = shard.first + shard.span
            if shard.rows > shard.span or (whole and shard.rows != shard.span):
                raise ValueError(
                    f"{shard.file} has {shard.rows:,} rows of {shard.span:,} of {table.key}"
                )
            if shard.bytes < shard.rows * (4 * table.width + (0 if whole else 8)):
                raise ValueError(
                    f"{shard.file} has {shard.bytes:,} bytes, too few for {shard.rows:,} rows of "
                    f"{table.width} numbers"
                )
        if expected > table.rows or (whole and expected != table.rows):
            raise ValueError(f"{table.key} has {table.rows:,} rows, {expected:,} of them in shards")
    check_files(each.file for each in (*others, *(s for table in tables for s in table.shards)))
    if len({table.key for table in tables}) != len(tables):
        raise ValueError("a table is named twice")


def checksum_of(body: dict[str, Any]) -> str:
    """Return the checksum of a manifest's values, of which its own is left out."""
    body = {key: value for key, value in body.items() if key != "checksum"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def with_checksum(manifest: CheckpointManifest) -> CheckpointManifest:
    return replace(manifest, checksum=checksum_of(_values(manifest)))


def to_json(manifest: ModelManifest | CheckpointManifest) -> bytes:
    return json.dumps(_values(manifest), indent=1).encode()


def _values(manifest: ModelManifest | CheckpointManifest) -> dict[str, Any]:
    return {"format": FORMAT, **asdict(manifest)}


def read_model_manifest(folder: Path) -> ModelManifest:
    """Return the checked manifest of a model; a ValueError says what is wrong with it."""
    path = folder / MODEL_FILE
    try:
        record = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} holds no model: it has no {MODEL_FILE}, which is written when all else is"
        ) from None
    check_format(record, FORMAT, where=str(path), remedy=OTHER_MODEL)
    return converted(ModelManifest, record, where=str(path), remedy=OTHER_MODEL)


def read_manifest(folder: Path) -> CheckpointManifest:
    """Return the checked manifest of a checkpoint; a ValueError says what is wrong with it."""
    path = folder / CHECKPOINT_FILE
    try:
        record = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is no checkpoint: it has no {CHECKPOINT_FILE}") from None
    check_format(record, FORMAT, where=str(path), remedy=OTHER_COPY, newer=NewerFormat)
    if checksum_of(record) != record.get("checksum"):
        raise _wrong(path, "its checksum is another: it has changed since it was written")
    manifest = converted(CheckpointManifest, record, where=str(path), remedy=OTHER_COPY)
    if manifest.parent is not None:
        parent, name = NAME.fullmatch(manifest.parent.name), NAME.fullmatch(folder.name)
        if parent is None:
            raise _wrong(path, f"{manifest.parent.name!r} is no name of a checkpoint")
        # So no checkpoint can be its own ancestor.
        if name is not None and int(parent[1]) >= int(name[1]):
            raise _wrong(path, f"its parent {manifest.parent.name} is not older than itself")
    return manifest


def _wrong(path: Path, what: str) -> ValueError:
    return ValueError(f"{path}: {what}; the file is damaged: {OTHER_COPY}")
