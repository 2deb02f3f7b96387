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

Format 1 is that of one rank. Several ranks write format 2: each of them the rows that it owns, into
files rows/000-00001-00000.safetensors (table, rank, shard), where rows have the numbers that they
have at their rank. From the table's name, its size and the number of ranks, all of which the
manifest has, checkpoint/places.py computes which row has which number at which rank. What a rank
has of its own beside rows, such as its random states, is in state-00001.json and .safetensors.

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

from hotrow.checkpoint.places import MOST_RANKS, Share, shares_of
from hotrow.support.files import FileRecord
from hotrow.support.manifests import Count, check_files, check_format, converted, read_json

ONE_RANK, FORMAT = 1, 2  # FORMAT: the newest one, of several ranks
CHECKPOINT_FILE = "checkpoint.json"
MODEL_FILE = "manifest.json"
DENSE = "dense.safetensors"
STATE = "state.json"
STATE_TENSORS = "state.safetensors"
ROWS, IDS, WEIGHTS = "rows", "ids", "weights"
NAME = re.compile(r"(\d{5,})-step-(\d+)")  # of a folder: its number among its like, and its step
OTHER_COPY = "take a copy that is whole, or another checkpoint"
OTHER_MODEL = "take a copy that is whole, or train again"


def own_names(rank: int) -> tuple[str, str]:
    """Return the names of the state, and of its tensors, of a rank other than the first."""
    return f"state-{rank:05}.json", f"state-{rank:05}.safetensors"


class NewerFormat(ValueError):
    """Saved by a version of hotrow that is newer than this one."""


@dataclass(frozen=True)
class ModelShard(FileRecord):
    """Consecutive rows of a table, by the numbers that they have at a rank."""

    first: Count
    rows: Count
    rank: Count = 0

    @property
    def span(self) -> int:
        return self.rows


@dataclass(frozen=True)
class Shard:
    """Rows of a table between two of a rank's numbers: all of them, or those that had changed."""

    file: str  # relative to the folder
    bytes: Count
    sums: str  # as hotrow.support.files.BlockSums has them
    first: Count
    span: Count
    rows: Count
    rank: Count = 0


@dataclass(frozen=True)
class SavedTable:
    key: str  # of its weights in the model's state dict
    rows: Count
    dim: Count


@dataclass(frozen=True)
class ModelTable(SavedTable):
    shards: tuple[ModelShard, ...]
    name: str = ""  # in its collection; of several ranks alone, whose rows depend on it

    @property
    def width(self) -> int:
        return self.dim


@dataclass(frozen=True)
class CheckpointTable(SavedTable):
    state: dict[str, Count]  # numbers of each piece of state that follow a row's weights
    shards: tuple[Shard, ...]
    name: str = ""  # in its collection; of several ranks alone, whose rows depend on it

    @property
    def width(self) -> int:
        return self.dim + sum(self.state.values())


@dataclass(frozen=True)
class ModelManifest:
    dense: FileRecord
    tables: tuple[ModelTable, ...]
    made_by: str
    ranks: Count = 1

    def __post_init__(self) -> None:
        _check(self.tables, [self.dense], self.ranks, whole=True)

    def shares(self, table: ModelTable) -> list[Share]:
        """Return the rows of a table that each rank has saved."""
        return shares_of(table.name, table.rows, self.ranks)

    @property
    def files(self) -> list[FileRecord]:
        return [self.dense, *(shard for table in self.tables for shard in table.shards)]


@dataclass(frozen=True)
class Parent:
    name: str  # of its folder, beside this one
    checksum: str  # of its manifest


@dataclass(frozen=True)
class OwnState:
    """The files of what one of several ranks has of its own, beside rows."""

    rank: Count
    state: FileRecord
    tensors: FileRecord


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
    checksum: str = ""  # of all else
    ranks: Count = 1
    own: tuple[OwnState, ...] = ()  # of ranks whose state is not all that of rank 0

    def __post_init__(self) -> None:
        _check(self.tables, self.small_files, self.ranks, whole=self.parent is None)
        if any(own.rank >= self.ranks for own in self.own):
            raise ValueError(f"a rank has a state, and there are {self.ranks}")

    def shares(self, table: CheckpointTable) -> list[Share]:
        """Return the rows of a table that each rank has saved."""
        return shares_of(table.name, table.rows, self.ranks)

    @property
    def small_files(self) -> list[FileRecord]:
        """All but rows."""
        own = [file for own in self.own for file in (own.state, own.tensors)]
        return [self.dense, self.state, self.state_tensors, *own]

    @property
    def shards(self) -> list[Shard]:
        return [shard for table in self.tables for shard in table.shards]


def _check(
    tables: Sequence[ModelTable | CheckpointTable],
    others: Iterable[FileRecord],
    ranks: int,
    *,
    whole: bool,
) -> None:
    """Refuse numbers that contradict each other, before they size anything."""
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"{ranks:,} ranks cannot have saved it")
    for table in tables:
        shares = shares_of(table.name, table.rows, ranks)
        by_rank: dict[int, list[ModelShard | Shard]] = {share.rank: [] for share in shares}
        for shard in table.shards:
            if shard.rank not in by_rank:
                raise ValueError(f"{shard.file} is of rank {shard.rank:,}, and there are {ranks}")
            by_rank[shard.rank].append(shard)
        for share in shares:
            _check_rows(table, share, by_rank[share.rank], whole=whole)
    check_files(each.file for each in (*others, *(s for table in tables for s in table.shards)))
    if len({table.key for table in tables}) != len(tables):
        raise ValueError("a table is named twice")


def _check_rows(
    table: ModelTable | CheckpointTable,
    share: Share,
    shards: Sequence[ModelShard | Shard],
    *,
    whole: bool,
) -> None:
    expected, whose = 0, "" if share.owners is None else f" at rank {share.rank}"
    for shard in shards:
        if shard.first < expected or (whole and shard.first != expected):
            raise ValueError(
                f"{shard.file} begins with row {shard.first:,} of {table.key}{whose}, and row "
                f"{expected:,} is next"
            )
        expected = shard.first + shard.span
        if shard.rows > shard.span or (whole and shard.rows != shard.span):
            raise ValueError(
                f"{shard.file} has {shard.rows:,} rows of {shard.span:,} of {table.key}{whose}"
            )
        if shard.bytes < shard.rows * (4 * table.width + (0 if whole else 8)):
            raise ValueError(
                f"{shard.file} has {shard.bytes:,} bytes, too few for {shard.rows:,} rows of "
                f"{table.width} numbers"
            )
    if expected > share.count or (whole and expected != share.count):
        raise ValueError(
            f"{table.key} has {share.count:,} rows{whose}, {expected:,} of them in shards"
        )


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
    values = asdict(manifest)
    if manifest.ranks > 1:
        return {"format": FORMAT, **values}
    # Format 1, which earlier versions read: it has no key of several ranks.
    values = {key: value for key, value in values.items() if key not in ("ranks", "own")}
    values["tables"] = [
        {**_without(table, "name"), "shards": [_without(x, "rank") for x in table["shards"]]}
        for table in values["tables"]
    ]
    return {"format": ONE_RANK, **values}


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def _check_ranks(record: dict[str, Any], ranks: int, path: Path) -> None:
    """Refuse a number of ranks that its format does not have."""
    if (record["format"] == ONE_RANK) != (ranks == 1):
        raise _wrong(path, f"its format is {record['format']}, and {ranks} ranks have saved it")


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
    manifest = converted(ModelManifest, record, where=str(path), remedy=OTHER_MODEL)
    _check_ranks(record, manifest.ranks, path)
    return manifest


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
    _check_ranks(record, manifest.ranks, path)
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
