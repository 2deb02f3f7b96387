"""A checkpoint of which everything but rows is in memory, on its way to the disk.

Each rank writes the rows that it owns. When all have said that theirs are on the disk, rank 0
writes everything else, the manifest last, and gives the folder its name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hotrow.checkpoint.folder import (
    Lock,
    clean,
    next_name,
    number_of,
    put_in_place,
    saved_in,
)
from hotrow.checkpoint.manifest import (
    CHECKPOINT_FILE,
    DENSE,
    STATE,
    STATE_TENSORS,
    CheckpointManifest,
    CheckpointTable,
    OwnState,
    Parent,
    Shard,
    own_names,
    read_manifest,
    to_json,
    with_checksum,
)
from hotrow.checkpoint.parts import collections_of, dense_state, tables_of
from hotrow.checkpoint.tensors import packed, put
from hotrow.checkpoint.together import Team
from hotrow.distributed.ranks import Channel
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.support.files import PARTIAL, Disk, FileRecord, make_durable, make_folder
from hotrow.support.version import __version__

Shards = dict[str, list[Shard]]  # by the key of their table


@dataclass
class State:
    """Everything but rows: on rank 0 all of it, on others what they have of their own."""

    dense: dict[str, Tensor]
    state: bytes
    tensors: dict[str, Tensor]

    def copy(self) -> None:
        """Copy tensors: training goes on and changes them."""
        self.dense, self.tensors = _copies(self.dense), _copies(self.tensors)


@dataclass
class Prepared:
    """A checkpoint before its rows are written."""

    team: Team
    root: Path
    model: nn.Module
    step: int = 0
    keep: int | None = None
    full_every: int = 1
    state: State = field(default_factory=lambda: State({}, b"", {}))
    name: str = ""
    partial: str = ""  # the folder's name until all of it is on the disk
    lock: Lock | None = None  # of the root, on rank 0, until all is written
    since: Parent | None = None  # rows that have changed since then are written; None: all rows
    # Later ones hold the rows that have changed since this one.
    is_parent: bool = field(default=False, init=False)
    _is_complete: bool = field(default=False, init=False)

    @property
    def collections(self) -> list[EmbeddingBagCollection]:
        return list(collections_of(self.model).values())

    def take_place(self, since: Parent | None) -> None:
        """Make the folder, and let all ranks know its name. `since`: the checkpoint after which all
        ranks have noted changes."""
        self.name, self.partial, parent = json.loads(
            self.team.do(lambda: self._make_place(since))[0]
        )
        self.since = None if parent is None else Parent(**parent)
        self.is_parent = self.full_every > 1 and self.since is None
        self.team.check_folder(self.root / self.partial)

    def _make_place(self, since: Parent | None) -> str:
        if not self.team.is_first:
            return ""
        make_folder(self.root)
        self.lock = Lock(self.root)
        clean(self.root, keep=None)
        name = next_name(self.root, self.step)
        partial = name + PARTIAL
        if self.team.ranks is not None:
            # Unlike any before: a rank of an earlier job, whose rank 0 has died, may still write.
            partial = self.team.unlike_others(name) + PARTIAL
            (self.root / partial / "rows").mkdir(parents=True)
        parent = self._usable(since, name)
        return json.dumps([name, partial, None if parent is None else asdict(parent)])

    def _usable(self, parent: Parent | None, name: str) -> Parent | None:
        """Return the parent if it may be one of this checkpoint."""
        if parent is None or self.root / parent.name not in saved_in(self.root):
            return None
        if number_of(name) - number_of(parent.name) >= self.full_every:
            return None
        with suppress(ValueError):  # damaged: nothing is to depend on it
            manifest = read_manifest(self.root / parent.name)
            same_tables = [table.key for table in manifest.tables] == list(tables_of(self.model))
            same_ranks = manifest.ranks == self.team.size
            if manifest.checksum == parent.checksum and same_tables and same_ranks:
                return parent
        return None

    def settle(self) -> None:
        """Bring rows to rest, and begin to note which ones change."""
        for collection in self.collections:
            access = collection.row_access
            access.settle()
            if self.is_parent:  # the rows of this moment are those that are written
                access.changed_since = None
                access.note_changes()

    def drop(self) -> None:
        """Give up before anything is written."""
        if self.team.is_first and self.partial and self.team.ranks is not None:
            shutil.rmtree(self.root / self.partial, ignore_errors=True)
        if self.lock is not None:
            self.lock.release()

    def end_snapshots(self) -> None:
        for collection in self.collections:
            collection.row_access.end_snapshots()

    # -- writing -----------------------------------------------------------------------

    def write(
        self, write_rows: Callable[[Prepared, Disk], Shards], channel: Channel | None
    ) -> Path:
        """Write all files, and then give the folder its name. `channel`: of the thread that calls
        this."""
        disk, path = Disk(self.root / self.partial), self.root / self.name
        try:
            try:
                # Rows first: then training need not keep old rows any more.
                written = self.team.do(lambda: self._write_own(disk, write_rows), channel)
                checksum = self.team.do(lambda: self._complete(disk, written), channel)[0]
            except BaseException:
                # One that is complete stays, though a rank that died cannot be told.
                if self.team.is_first and not self._is_complete:
                    with suppress(OSError):
                        path.rename(disk.folder)  # it had its name, and `latest` was not replaced
                    shutil.rmtree(disk.folder, ignore_errors=True)
                raise
            if self.is_parent:
                parent = Parent(self.name, checksum)
                for name, collection in collections_of(self.model).items():
                    access = collection.row_access
                    access.changed_since = (parent, name) if access.notes_changes else None
            if self.team.is_first:
                clean(self.root, self.keep)
        finally:
            if self.lock is not None:
                self.lock.release()
        return path

    def _write_own(self, disk: Disk, write_rows: Callable[[Prepared, Disk], Shards]) -> str:
        """Write what this rank alone has; return the records of its files."""
        (disk.folder / "rows").mkdir(parents=True, exist_ok=True)
        rows = write_rows(self, disk)
        records = {key: [asdict(shard) for shard in shards] for key, shards in rows.items()}
        own: list[FileRecord] = []
        if not self.team.is_first and self.state.state:
            state, tensors = own_names(self.team.rank)
            own = [
                put(disk, state, [self.state.state]),
                put(disk, tensors, packed(self.state.tensors)),
            ]
        return json.dumps([records, [asdict(file) for file in own]])

    def _complete(self, disk: Disk, written: list[str]) -> str:
        """Write all files that rank 0 writes, the manifest last; return its checksum."""
        if not self.team.is_first:
            return ""
        by_rank = [json.loads(text) for text in written]
        own = tuple(
            OwnState(rank, *(FileRecord(**file) for file in files))
            for rank, (_, files) in enumerate(by_rank)
            if files
        )
        tables = []
        for key, table in tables_of(self.model).items():
            shards = [Shard(**shard) for rows, _ in by_rank for shard in rows.get(key, ())]
            name = "" if self.team.ranks is None else table.name
            tables.append(
                CheckpointTable(key, table.rows, table.dim, table.state, tuple(shards), name)
            )
        manifest = CheckpointManifest(
            step=self.step,
            dense=put(disk, DENSE, packed(self.state.dense)),
            state=put(disk, STATE, [self.state.state]),
            state_tensors=put(disk, STATE_TENSORS, packed(self.state.tensors)),
            tables=tuple(tables),
            parent=self.since,
            made_by=f"hotrow {__version__}",
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
            ranks=self.team.size,
            own=own,
        )
        manifest = with_checksum(manifest)
        make_durable(disk.folder / "rows")
        disk.write(CHECKPOINT_FILE, [to_json(manifest)])
        put_in_place(disk, self.root / self.name)
        self._is_complete = True
        return manifest.checksum


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def changed_since(model: nn.Module) -> Parent | None:
    """Return the checkpoint since which all collections have noted changes, under the names that
    they have now; None: there is none."""
    named = collections_of(model)
    changes = {name: collection.row_access.changed_since for name, collection in named.items()}
    parents = {since[0] for since in changes.values() if since is not None}
    parent: Parent | None = parents.pop() if len(parents) == 1 else None
    if any(since != (parent, name) for name, since in changes.items()):
        return None
    return parent


def facts_of(model: nn.Module, parts: dict[str, Any]) -> dict[str, Any]:
    """Return what is the same on all ranks that save one model."""
    return {
        "tables": {key: [x.rows, x.dim] for key, x in tables_of(model).items()},
        "dense": {name: list(tensor.shape) for name, tensor in dense_state(model).items()},
        "parts": sorted(parts),
    }
