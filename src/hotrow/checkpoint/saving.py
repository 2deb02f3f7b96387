"""Checkpoints written: at once by several threads, or by one thread while training goes on.

At once, rows are read where they lie. Beside training they are read from a snapshot of the store.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
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
from hotrow.checkpoint.parts import collections_of, dense_state, pack, rows_apart, tables_of
from hotrow.checkpoint.tensors import (
    RowSource,
    ShardRows,
    Where,
    cut_tables,
    packed,
    put,
    rows_at_once,
    table_records,
    write_shard,
)
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.store.snapshot import Snapshot, Waits
from hotrow.support.files import PARTIAL, Disk, make_durable, make_folder
from hotrow.support.messages import warn
from hotrow.support.numbers import whole
from hotrow.support.progress import bytes_bar
from hotrow.support.random_states import random_states
from hotrow.support.units import parse_bytes
from hotrow.support.version import __version__

LOG = "5%"  # of the bytes of rows
_WRITERS = 4  # also where cores are fewer: some wait for the disk
_NICE = 10
_PIECES_AT_ONCE = 4  # are read from a snapshot: each read searches the whole log

being_saved: dict[Path, Save] = {}  # by folder: the last one that was begun in the background


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
    """Save all that training needs to resume, as a new checkpoint in `folder`; return its folder.

    That is the model with all rows and their optimizer state, the `parts` (dense optimizers,
    schedulers, a GradScaler, a loader: whatever has `state_dict()` and `load_state_dict()`), all
    random states, the step, and `extra`: numbers, text, tensors, lists and tables of them.

        hotrow.save_checkpoint("checkpoints", model, step=step, optimizer=optimizer, keep=3)
        loaded = hotrow.load_checkpoint("checkpoints", model, optimizer=optimizer)

    A checkpoint gets its name, and `latest` names it, when all of it is on the disk. A failure
    removes what it has written and leaves earlier checkpoints. Afterwards all but the newest `keep`
    are removed. While another process saves into the same folder, an OSError is raised.
    With `full_every=10`, one in ten holds all rows. The others hold the rows that this process has
    written since then, if the strategy can tell (static-hybrid cannot): by a bit for each row, on
    the host and in a device's memory beside the budget. Beside those and the rows' own memory a
    save takes 4 MiB for each of 4 threads where rows are on a device or picked, and next to nothing
    otherwise.
    """
    return _begin(folder, model, parts, step, extra, keep, full_every, log=None).wait()


def begin_checkpoint(
    folder: str | Path,
    model: nn.Module,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
    full_every: int = 1,
    log: str | float = LOG,
    **parts: Any,
) -> Save:
    """Save like `save_checkpoint`, but in a thread while training goes on.

        save = hotrow.begin_checkpoint("checkpoints", model, step=step, optimizer=optimizer)
        ...
        save.wait()

    The checkpoint has the state of the moment of this call, to the bit. The call itself brings rows
    in fast memory to slow memory and copies everything that is no row. Afterwards a row that is
    replaced before it was written is copied to a log of `log` bytes, or of that share of the bytes
    of rows; while the log is full, training waits. One checkpoint is written at a time: this
    function, `save_checkpoint` and `load_checkpoint` wait for the one before, and so does the end
    of the program. Where rows cannot be read beside training, such as those of all-fast on a GPU,
    it is written at once, and `save.why_at_once` says why.
    """
    return _begin(folder, model, parts, step, extra, keep, full_every, log=log)


def _begin(
    folder: str | Path,
    model: nn.Module,
    parts: dict[str, Any],
    step: int,
    extra: Any,
    keep: int | None,
    full_every: int,
    *,
    log: str | float | None,
) -> Save:
    """Begin a checkpoint; `log=None`: it is written when this returns."""
    root, step = Path(folder), whole("step", step, least=0)
    full_every = whole("full_every", full_every, least=1)
    keep = None if keep is None else whole("keep", keep, least=1)
    collections = list(collections_of(model).values())
    _end_others(root, collections)
    begun, save = perf_counter(), Save(step)
    if log is not None:
        total = sum(collection.bytes_total for collection in collections)
        save.log_bytes = parse_bytes(log, total=max(10_000, total))
        reasons = (collection.row_access.why_no_snapshot() for collection in collections)
        save.why_at_once = next((why for why in reasons if why is not None), None)
    tensors: dict[str, Tensor] = {}
    state = json.dumps(pack(_state(model, parts, extra), tensors, "state")).encode()
    dense = dense_state(model)
    if save.why_at_once is None:  # training goes on and changes them
        tensors, dense = _copies(tensors), _copies(dense)
    make_folder(root)
    lock = Lock(root)
    try:
        clean(root, keep=None)
        name = next_name(root, step)
        since = _parent(root, model, name, full_every)
        is_parent = full_every > 1 and since is None
        for collection in collections:
            access = collection.row_access
            access.settle()
            if is_parent:  # the rows of this moment are those that are written
                access.changed_since = None
                access.note_changes()
    except BaseException:
        lock.release()
        raise
    save._start(
        _Prepared(root, lock, name, model, step, keep, since, is_parent, dense, state, tensors)
    )
    save.pause = perf_counter() - begun
    return save


def _end_others(root: Path, collections: list[EmbeddingBagCollection]) -> None:
    """Refuse collections that cannot be saved now; then wait for saves under way."""
    for collection in collections:
        # Otherwise rows and dense part would be of different steps.
        collection.pipeline.check_thread("saves a checkpoint")
        if collection.is_accumulating:
            raise RuntimeError(
                "save_checkpoint() inside of accumulate(), whose rows are not updated yet"
            )
    for collection in collections:
        before, collection.row_access.being_saved = collection.row_access.being_saved, None
        _end(before)
    end_save_in(root)


class Save:
    """A checkpoint on its way to the disk."""

    def __init__(self, step: int) -> None:
        self.step, self.log_bytes = step, 0
        # None: it is written while training goes on.
        self.why_at_once: str | None = "log is None"
        self.pause = 0.0  # seconds that `begin_checkpoint` has taken
        self.seconds = 0.0  # from then until all of it was on the disk
        self.error: BaseException | None = None
        self._path: Path | None = None
        self._is_reported, self._stop = False, threading.Event()
        self._thread: threading.Thread | None = None
        self._waits: list[Waits] = []

    @property
    def waited(self) -> float:
        """Seconds that training has waited for room in the log."""
        return sum(waits.seconds for waits in self._waits)

    @property
    def done(self) -> bool:
        """Whether `wait()` returns, or raises, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Return its folder when all of it is on the disk; raise the error of a failed save."""
        self.join()
        self._is_reported = True
        atexit.unregister(self._at_exit)
        if self.error is not None:
            raise self.error
        assert self._path is not None
        return self._path

    def join(self) -> None:
        """Wait until it is written or has failed; raise nothing."""
        while not self.done:
            assert self._thread is not None
            self._thread.join(0.5)  # not for ever: Ctrl-C would wait as long

    def abandon(self) -> None:
        """Stop it, and remove what was written so far."""
        self._is_reported = True
        self._stop.set()
        atexit.unregister(self._at_exit)

    def tell(self) -> None:
        """Warn of a failure that was not raised or warned of yet."""
        atexit.unregister(self._at_exit)
        if self.error is not None and not self._is_reported:
            self._is_reported = True
            warn(f"the checkpoint of step {self.step:,} was not saved: {self.error}")

    def _at_exit(self) -> None:
        self.join()
        self.tell()  # there is no next save to do it

    def _start(self, prepared: _Prepared) -> None:
        if self.why_at_once is not None:
            self._path = prepared.write(self._write_stored)
            return
        total = sum(collection.bytes_total for collection in prepared.collections)
        # A daemon, so that a program that has to leave at once can; any other waits for it.
        thread = threading.Thread(
            target=self._run, args=(prepared,), name="hotrow-checkpoint", daemon=True
        )
        try:
            for collection in prepared.collections:
                part = self.log_bytes * collection.bytes_total // max(1, total)
                snapshots = collection.row_access.take_snapshots(
                    part, only_changed=prepared.since is not None
                )
                self._waits += [snapshot.waits for snapshot in snapshots]
            thread.start()
        except BaseException:
            prepared.end_snapshots()
            prepared.lock.release()
            raise
        self._thread = thread
        being_saved[prepared.root.resolve()] = self
        for collection in prepared.collections:
            collection.row_access.being_saved = self
        atexit.register(self._at_exit)

    def _run(self, prepared: _Prepared) -> None:
        _lower_priority()
        begun = perf_counter()
        try:
            self._path = prepared.write(self._write_snapshots)
        except BaseException as error:
            self.error = error
        finally:
            prepared.end_snapshots()
            self.seconds = perf_counter() - begun

    def _write_snapshots(self, prepared: _Prepared, disk: Disk) -> tuple[CheckpointTable, ...]:
        tables = tables_of(prepared.model)
        # Tables of one width have one snapshot, which is read in the order of its ids.
        pieces = sorted(
            cut_tables(tables, with_state=True),
            key=lambda piece: _snapshot(piece)[1] + piece.first,
        )
        written = [
            (piece, write_shard(disk, piece, _snapshot_source(piece), self._check))
            for piece in pieces
        ]
        prepared.end_snapshots()
        return table_records(tables, written)

    def _check(self) -> None:
        if self._stop.is_set():
            why = "it was abandoned"
            if self.why_at_once is not None:
                why = "another part of the checkpoint was not written"
            raise InterruptedError(why)

    def _write_stored(self, prepared: _Prepared, disk: Disk) -> tuple[CheckpointTable, ...]:
        """Write rows from where they lie, in several threads, while training stands still."""
        tables, only_changed = tables_of(prepared.model), prepared.since is not None
        total, done = sum(4 * table.stored.numel() for table in tables.values()), 0

        def write(piece: ShardRows) -> Any:
            source = _stored_source(piece, only_changed=only_changed)
            return write_shard(disk, piece, source, self._check)

        written, pieces = [], list(cut_tables(tables, with_state=True))
        with bytes_bar("saving a checkpoint") as advance, ThreadPoolExecutor(_WRITERS) as pool:
            try:
                for piece, shard in zip(pieces, pool.map(write, pieces), strict=True):
                    written.append((piece, shard))
                    done += 0 if shard is None else shard.bytes
                    advance(min(done, total), total)
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return table_records(tables, written)


def end_save_in(root: Path) -> None:
    """Wait for a save into a folder: the next one removes what is not complete there."""
    _end(being_saved.pop(root.resolve(), None))


def _end(save: Save | None) -> None:
    if save is not None:
        save.join()
        save.tell()


def _lower_priority() -> None:
    """Let training have the cores first: on two of them a step took 2.2 times as long beside
    a save, and 1.3 times at this priority (benchmarks/LOG.md)."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


# -- where rows are read ---------------------------------------------------------------


def _stored_source(piece: ShardRows, *, only_changed: bool) -> RowSource:
    table, rows, ids = piece.table, piece.table.stored, None
    if only_changed:
        ids = table.collection.row_access.changed_rows(table.name, piece.first, piece.last)

    def read(where: Where) -> Tensor:
        return rows[where if isinstance(where, slice) else where.to(rows.device)]

    return ids, read, rows_at_once(piece.width)


def _snapshot(piece: ShardRows) -> tuple[Snapshot, int]:
    return piece.table.collection.row_access.snapshot(piece.table.name)


def _snapshot_source(piece: ShardRows) -> RowSource:
    snapshot, base = _snapshot(piece)
    ids, most = None, _PIECES_AT_ONCE * rows_at_once(piece.width)
    if snapshot.only is not None:
        ids = snapshot.only.between(base + piece.first, base + piece.last) - base
    out = torch.empty(min(most, piece.span if ids is None else len(ids)), piece.width)

    def read(where: Where) -> Tensor:
        if isinstance(where, slice):
            return snapshot.read(slice(base + where.start, base + where.stop), out)
        return snapshot.read(where + base, out)

    return ids, read, most


# -- everything but rows ---------------------------------------------------------------


@dataclass(frozen=True)
class _Prepared:
    """A checkpoint of which everything but rows is in memory."""

    root: Path
    lock: Lock  # of the root, until all is written
    name: str
    model: nn.Module
    step: int
    keep: int | None
    since: Parent | None  # rows that have changed since then are written; None: all rows
    is_parent: bool  # later ones hold the rows that have changed since this one
    dense: dict[str, Tensor]
    state: bytes
    state_tensors: dict[str, Tensor]

    @property
    def collections(self) -> list[EmbeddingBagCollection]:
        return list(collections_of(self.model).values())

    def end_snapshots(self) -> None:
        for collection in self.collections:
            collection.row_access.end_snapshots()

    def write(self, write_rows: Callable[[_Prepared, Disk], tuple[CheckpointTable, ...]]) -> Path:
        """Write all files, and then give the folder its name."""
        disk, path = Disk(self.root / (self.name + PARTIAL)), self.root / self.name
        with ExitStack() as stack:
            stack.callback(self.lock.release)
            try:
                (disk.folder / "rows").mkdir(parents=True)
                # First: then training need not keep old rows any more.
                manifest = self._write_files(disk, write_rows(self, disk))
                put_in_place(disk, path)
            except BaseException:
                with suppress(OSError):
                    path.rename(disk.folder)  # it had its name, and `latest` was not replaced
                shutil.rmtree(disk.folder, ignore_errors=True)
                raise
            if self.is_parent:
                parent = Parent(self.name, manifest.checksum)
                for name, collection in collections_of(self.model).items():
                    access = collection.row_access
                    access.changed_since = (parent, name) if access.notes_changes else None
            clean(self.root, self.keep)
        return path

    def _write_files(self, disk: Disk, tables: tuple[CheckpointTable, ...]) -> CheckpointManifest:
        """Write all files but rows, the manifest last."""
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


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _parent(root: Path, model: nn.Module, name: str, full_every: int) -> Parent | None:
    """Return the checkpoint since which all collections know what has changed; None: save all.

    It must hold the same tables, from the same collections under the same names.
    """
    named = collections_of(model)
    changes = {name: collection.row_access.changed_since for name, collection in named.items()}
    parents = {since[0] for since in changes.values() if since is not None}
    parent: Parent | None = parents.pop() if len(parents) == 1 else None
    if any(since != (parent, name) for name, since in changes.items()):
        return None
    if parent is None or root / parent.name not in saved_in(root):
        return None
    if number_of(name) - number_of(parent.name) >= full_every:
        return None
    with suppress(ValueError):  # damaged: nothing is to depend on it
        manifest = read_manifest(root / parent.name)
        same_tables = [table.key for table in manifest.tables] == list(tables_of(model))
        if manifest.checksum == parent.checksum and same_tables:
            return parent
    return None


def _state(model: nn.Module, parts: dict[str, Any], extra: Any) -> dict[str, Any]:
    for name, part in parts.items():
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise TypeError(
                f"{name} has the type {type(part).__name__}, which has no state_dict() and "
                "load_state_dict(); plain values go into extra="
            )
    rows = {name: each.optimizer.settings_dict() for name, each in collections_of(model).items()}
    with rows_apart(model):  # torch's optimizers may have the state of rows
        states = {name: part.state_dict() for name, part in parts.items()}
    return {
        "rows": rows,
        "parts": states,
        "random": random_states(),
        "extra": extra,
    }
