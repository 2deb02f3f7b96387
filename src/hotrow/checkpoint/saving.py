"""Checkpoints written: rows by several threads, in pieces, straight from where they lie."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hotrow.checkpoint.folder import Lock, clean, next_name, number_of, put_in_place, saved_in
from hotrow.checkpoint.manifest import (
    CHECKPOINT_FILE,
    DENSE,
    STATE,
    STATE_TENSORS,
    CheckpointManifest,
    CheckpointTable,
    Parent,
    read_manifest,
    to_json,
    with_checksum,
)
from hotrow.checkpoint.parts import collections_of, dense_state, tables_of
from hotrow.checkpoint.shards import (
    RowSource,
    RowWriter,
    ShardRows,
    Where,
    cut_tables,
    put,
    table_records,
)
from hotrow.checkpoint.tensors import packed, rows_at_once
from hotrow.checkpoint.tree import pack
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.support.files import PARTIAL, Disk, make_durable, make_folder
from hotrow.support.numbers import whole
from hotrow.support.progress import bytes_bar
from hotrow.support.random_states import random_states
from hotrow.support.version import __version__

_WRITERS = 4  # also where cores are fewer: some wait for the disk

being_saved: dict[Path, Any] = {}  # by folder: the last one that was begun in the background


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    full_every: int = 1,
    **parts: Any,
) -> Path:
    """Save all that training goes on with, as a new checkpoint in `folder`; gives its own folder.

    That is the model with all rows and their optimizer state, the `parts` (dense optimizers,
    schedulers, a GradScaler, a loader: whatever has `state_dict()` and `load_state_dict()`), all
    random states, the step, and `extra`: numbers, text, tensors, lists and tables of them.

        hotrow.save_checkpoint("checkpoints", model, step=step, optimizer=optimizer, keep=3)
        loaded = hotrow.load_checkpoint("checkpoints", model, optimizer=optimizer)

    A checkpoint has its name, and `latest` names it, when all of it is on the disk; a failure takes
    away what it has written, and leaves those before. Then all but the newest `keep` are removed.
    While another process saves into the same folder, an OSError says so.
    With `full_every=10`, one in ten holds all rows, and the others those that this process has
    written since then, where the strategy can tell (static-hybrid cannot): by a bit for each row,
    on the host and in a device's memory beside the budget. Beside those and the rows' own memory a
    save takes 4 MiB for each of 4 threads where rows are on a device or picked, and next to nothing
    otherwise.
    """
    found = prepare(folder, model, parts, step=step, extra=extra, keep=keep, full_every=full_every)
    return found.write(found.write_rows)


@dataclass(frozen=True)
class Prepared:
    """A checkpoint of which all but rows is known, and in memory."""

    root: Path
    lock: Lock  # of the root, until all is written
    name: str
    model: nn.Module
    step: int
    keep: int | None
    full_every: int
    since: Parent | None  # the rows that have changed since then are written; None: all
    dense: dict[str, Tensor]
    state: bytes
    state_tensors: dict[str, Tensor]

    @property
    def collections(self) -> list[EmbeddingBagCollection]:
        return list(collections_of(self.model).values())

    @property
    def is_parent(self) -> bool:
        """Whether others shall hold what has changed since this one."""
        return self.full_every > 1 and self.since is None

    def note_changes(self) -> None:
        """At the moment whose rows are written."""
        if self.is_parent:
            for each in self.collections:
                each.row_access.changed_since = None
                each.row_access.note_changes()

    def write(self, rows: Callable[[Disk], tuple[CheckpointTable, ...]]) -> Path:
        """All files, and then the folder's name; `rows` writes those of tables."""
        try:
            return self._write_folder(rows)
        finally:
            self.lock.release()

    def _write_folder(self, rows: Callable[[Disk], tuple[CheckpointTable, ...]]) -> Path:
        disk, path = Disk(self.root / (self.name + PARTIAL)), self.root / self.name
        try:
            manifest = self._write(disk, rows)
            put_in_place(disk, path)
        except BaseException:
            with suppress(OSError):
                path.rename(disk.folder)  # it had its name, and `latest` could not be replaced
            shutil.rmtree(disk.folder, ignore_errors=True)
            raise
        if self.is_parent:
            parent = Parent(self.name, manifest.checksum)
            for name, each in collections_of(self.model).items():
                each.row_access.changed_since = (
                    (parent, name) if each.row_access.notes_changes else None
                )
        clean(self.root, self.keep)
        return path

    def _write(
        self, disk: Disk, rows: Callable[[Disk], tuple[CheckpointTable, ...]]
    ) -> CheckpointManifest:
        """All files, the manifest last."""
        (disk.folder / "rows").mkdir(parents=True)
        tables = rows(disk)  # first: training need not keep old rows any more
        manifest = CheckpointManifest(
            step=self.step,
            dense=put(disk, DENSE, packed(self.dense)),
            state=put(disk, STATE, [self.state]),
            state_tensors=put(disk, STATE_TENSORS, packed(self.state_tensors)),
            tables=tables,
            parent=self.since,
            made_by=f"hotrow {__version__}",
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        manifest = with_checksum(manifest)
        make_durable(disk.folder / "rows")
        disk.write(CHECKPOINT_FILE, [to_json(manifest)])
        return manifest

    def write_rows(self, disk: Disk) -> tuple[CheckpointTable, ...]:
        """Write rows from where they lie, in several threads, while training stands still."""
        tables = tables_of(self.model)
        total, done = sum(4 * table.stored.numel() for table in tables.values()), 0
        written, stop = [], threading.Event()
        writer = RowWriter(
            disk, self._stored, stop, why_stopped="another part of the checkpoint was not written"
        )
        pieces = list(cut_tables(tables, with_state=True))
        with bytes_bar("saving a checkpoint") as advance, ThreadPoolExecutor(_WRITERS) as pool:
            try:
                for piece, shard in zip(pieces, pool.map(writer.write, pieces), strict=True):
                    written.append((piece, shard))
                    done += 0 if shard is None else shard.bytes
                    advance(min(done, total), total)
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return table_records(tables, written)

    def _stored(self, piece: ShardRows) -> RowSource:
        table, rows, ids = piece.table, piece.table.stored, None
        if self.since is not None:
            ids = table.collection.row_access.changed_rows(table.name, piece.first, piece.last)

        def read(where: Where) -> Tensor:
            return rows[where if isinstance(where, slice) else where.to(rows.device)]

        return ids, read, rows_at_once(piece.width)


def prepare(
    folder: str | Path,
    model: nn.Module,
    parts: dict[str, Any],
    *,
    step: int,
    extra: Any,
    keep: int | None,
    full_every: int,
    copied: bool = False,
) -> Prepared:
    """Bring all rows to the store. `copied`: all that is no row, since it will change."""
    root, step = Path(folder), whole("step", step, least=0)
    full_every = whole("full_every", full_every, least=1)
    if keep is not None:
        keep = whole("keep", keep, least=1)
    for each in collections_of(model).values():
        # Else rows and dense part would be of different steps.
        each.pipeline.check_thread("saves a checkpoint")
        if each.is_accumulating:
            raise RuntimeError(
                "save_checkpoint() inside of accumulate(), whose rows are not updated yet"
            )
        end_save_before(each)
    end_save_in(root)
    tensors: dict[str, Tensor] = {}
    state = json.dumps(pack(_state(model, parts, extra), tensors, "state")).encode()
    dense = dense_state(model)
    if copied:
        tensors, dense = _copies(tensors), _copies(dense)
    make_folder(root)
    lock = Lock(root)
    try:
        clean(root, keep=None)
        name = next_name(root, step)
        since = _parent(root, model, name, full_every)
        for each in collections_of(model).values():
            each.row_access.settle()
        found = Prepared(
            root, lock, name, model, step, keep, full_every, since, dense, state, tensors
        )
        found.note_changes()
    except BaseException:
        lock.release()
        raise
    return found


def end_save_before(collection: EmbeddingBagCollection) -> None:
    """One at a time."""
    before, collection.row_access.being_saved = collection.row_access.being_saved, None
    _end(before)


def end_save_in(root: Path) -> None:
    """One at a time in a folder, too: the next one takes away what is not whole there."""
    _end(being_saved.pop(root.resolve(), None))


def _end(save: Any) -> None:
    if save is not None:
        save.join()
        save.tell()


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach().to("cpu", copy=True) for name, each in tensors.items()}


def _parent(root: Path, model: nn.Module, name: str, full_every: int) -> Parent | None:
    """Return the checkpoint since which all collections know what has changed; None: save all.

    It must hold the same tables, from the same collections under the same names.
    """
    named = collections_of(model)
    parents = {
        since[0] for each in named.values() if (since := each.row_access.changed_since) is not None
    }
    parent: Parent | None = parents.pop() if len(parents) == 1 else None
    if any(each.row_access.changed_since != (parent, name) for name, each in named.items()):
        return None
    if parent is None or root / parent.name not in saved_in(root):
        return None
    if number_of(name) - number_of(parent.name) >= full_every:
        return None
    with suppress(ValueError):  # damaged: nothing is to depend on it
        manifest = read_manifest(root / parent.name)
        same_tables = [each.key for each in manifest.tables] == list(tables_of(model))
        if manifest.checksum == parent.checksum and same_tables:
            return parent
    return None


def _state(model: nn.Module, parts: dict[str, Any], extra: Any) -> dict[str, Any]:
    for name, part in parts.items():
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise TypeError(
                f"{name} is a {type(part).__name__}, which has no state_dict() and "
                "load_state_dict(); plain values go into extra="
            )
    rows = {name: each.optimizer.settings_dict() for name, each in collections_of(model).items()}
    return {
        "rows": rows,
        "parts": {name: part.state_dict() for name, part in parts.items()},
        "random": random_states(),
        "extra": extra,
    }
