"""Checkpoints written: rows by several threads, in pieces, straight from where they lie."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.checkpoint import manifest as records
from hotrow.checkpoint.folder import Lock, clean, next_name, number_of, put_in_place, saved_in
from hotrow.checkpoint.manifest import Manifest, Parent, Shard, TableRecord, read_manifest
from hotrow.checkpoint.model import Table, collections_of, dense_state, tables_of
from hotrow.checkpoint.tensors import PIECE_BYTES, head, packed, pieces_of
from hotrow.checkpoint.tree import pack
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.support.files import (
    PARTIAL,
    BlockSums,
    Digest,
    Disk,
    FileRecord,
    make_durable,
    make_folder,
)
from hotrow.support.numbers import whole
from hotrow.support.progress import bytes_bar
from hotrow.support.random_states import random_states

SHARD_BYTES = 256 << 20
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
                each.changed_since = None
                each.note_changes()

    def write(self, rows: Callable[[Disk], tuple[TableRecord, ...]]) -> Path:
        """All files, and then the folder's name; `rows` writes those of tables."""
        try:
            return self._write_folder(rows)
        finally:
            self.lock.release()

    def _write_folder(self, rows: Callable[[Disk], tuple[TableRecord, ...]]) -> Path:
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
                each.changed_since = (parent, name) if each.notes_changes else None
        clean(self.root, self.keep)
        return path

    def _write(self, disk: Disk, rows: Callable[[Disk], tuple[TableRecord, ...]]) -> Manifest:
        """All files, the manifest last."""
        from hotrow.support.version import __version__  # here, because the package imports this

        (disk.folder / "rows").mkdir(parents=True)
        tables = rows(disk)  # first: training need not keep old rows any more
        manifest = Manifest(
            step=self.step,
            dense=put(disk, records.DENSE, packed(self.dense)),
            state=put(disk, records.STATE, [self.state]),
            state_tensors=put(disk, records.STATE_TENSORS, packed(self.state_tensors)),
            tables=tables,
            parent=self.since,
            made_by=f"hotrow {__version__}",
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        manifest = records.with_checksum(manifest)
        make_durable(disk.folder / "rows")
        disk.write(records.MANIFEST, [records.to_json(manifest).encode()])
        return manifest

    def write_rows(self, disk: Disk) -> tuple[TableRecord, ...]:
        """From where they lie, by several threads, while nobody trains."""
        return _write_rows(disk, tables_of(self.model), only_changed=self.since is not None)


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
        each.check_thread("saves a checkpoint")  # rows and dense part would be of different steps
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
            each.settle()
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
    before, collection.being_saved = collection.being_saved, None
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
    parents = {since[0] for each in named.values() if (since := each.changed_since) is not None}
    parent: Parent | None = parents.pop() if len(parents) == 1 else None
    if any(each.changed_since != (parent, name) for name, each in named.items()):
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


def put(
    disk: Disk, name: str, parts: Iterable[bytes | memoryview], digest: Digest | None = None
) -> FileRecord:
    """A file that is on the disk; its name in the folder is when the folder is."""
    found = disk.write(name, parts, durable=False, digest=digest)
    make_durable(disk.folder / name)
    return found


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


@dataclass(frozen=True)
class Piece:
    """Rows that go into one shard."""

    number: int  # of their table
    place: int  # of the shard
    table: Table
    key: str
    first: int
    span: int

    @property
    def file(self) -> str:
        return f"rows/{self.number:03}-{self.place:05}.safetensors"

    def put(self, disk: Disk, parts: Iterable[bytes | memoryview], count: int) -> Shard:
        file = put(disk, self.file, parts, digest=BlockSums())
        return Shard(file.file, file.bytes, file.sha256, self.first, self.span, count)

    def head(self, width: int, ids: Tensor | None = None) -> bytes:
        """What its file begins with; `ids`: the rows that it holds, None: all."""
        count = self.span if ids is None else len(ids)
        rows = {records.ROWS: (torch.float32, [count, width])}
        tensors = rows if ids is None else {records.IDS: (torch.int64, [count]), **rows}
        return head(tensors, {"table": self.key, "first": str(self.first)})


def _write_rows(
    disk: Disk, tables: dict[str, Table], *, only_changed: bool
) -> tuple[TableRecord, ...]:
    total, done = sum(4 * table.stored.numel() for table in tables.values()), 0
    written = []
    with bytes_bar("saving a checkpoint") as advance:
        for piece, shard in _Writer(disk, only_changed).write_all(list(pieces_in(tables))):
            written.append((piece, shard))
            done += 0 if shard is None else shard.bytes
            advance(min(done, total), total)
    return records_of(tables, written)


def records_of(
    tables: dict[str, Table], written: Iterable[tuple[Piece, Shard | None]]
) -> tuple[TableRecord, ...]:
    """What became of all pieces, those of a table in their order; None: no row of it."""
    shards: dict[str, list[Shard]] = {key: [] for key in tables}
    for piece, shard in written:
        if shard is not None:
            shards[piece.key].append(shard)
    return tuple(
        TableRecord(key, table.rows, table.dim, table.state, tuple(shards[key]))
        for key, table in tables.items()
    )


def pieces_in(tables: dict[str, Table]) -> Iterator[Piece]:
    for number, (key, table) in enumerate(tables.items()):
        most = max(1, SHARD_BYTES // (4 * table.stored.shape[1]))
        for place, first in enumerate(range(0, table.rows, most)):
            yield Piece(number, place, table, key, first, min(most, table.rows - first))


class _Writer:
    def __init__(self, disk: Disk, only_changed: bool) -> None:
        self._disk, self._only_changed = disk, only_changed
        self._stop = threading.Event()

    def write_all(self, pieces: list[Piece]) -> Iterator[tuple[Piece, Shard | None]]:
        """What becomes of all pieces, in their order. Whoever waits can be interrupted."""
        with ThreadPoolExecutor(_WRITERS) as pool:
            try:
                yield from zip(pieces, pool.map(self._write, pieces), strict=True)
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _write(self, piece: Piece) -> Shard | None:
        """In a thread; None: no row of it has changed."""
        rows = piece.table.stored[piece.first : piece.first + piece.span]
        if not self._only_changed:
            parts, count = _all(rows, piece), piece.span
        else:
            table = piece.table
            ids = table.collection.changed_rows(table.name, piece.first, piece.first + piece.span)
            if not len(ids):
                return None
            parts, count = _some(rows, ids, piece), len(ids)
        return piece.put(self._disk, self._watched(parts), count)

    def _watched(self, parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for part in parts:
            if self._stop.is_set():
                raise InterruptedError("another part of the checkpoint was not written")
            yield part


def _all(rows: Tensor, piece: Piece) -> Iterator[bytes | memoryview]:
    yield piece.head(rows.shape[1])
    for part in rows.split(rows_at_once(rows)):
        yield from pieces_of(part)


def _some(rows: Tensor, ids: Tensor, piece: Piece) -> Iterator[bytes | memoryview]:
    yield piece.head(rows.shape[1], ids)
    yield from pieces_of(ids)
    for part in ids.split(rows_at_once(rows)):
        yield from pieces_of(rows[(part - piece.first).to(rows.device)])


def rows_at_once(rows: Tensor) -> int:
    return max(1, PIECE_BYTES // (4 * rows.shape[1]))
