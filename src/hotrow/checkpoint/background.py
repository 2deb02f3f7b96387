"""Checkpoints written by a thread while training goes on. Rows are read as they were at its begin:
what that takes is snapshot.py's business."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.checkpoint.manifest import CheckpointTable
from hotrow.checkpoint.parts import collections_of, tables_of
from hotrow.checkpoint.saving import Prepared, being_saved, end_save_before, end_save_in, prepare
from hotrow.checkpoint.shards import (
    RowSource,
    RowWriter,
    ShardRows,
    Where,
    cut_tables,
    table_records,
)
from hotrow.checkpoint.tensors import rows_at_once
from hotrow.store.snapshot import Snapshot, Waits
from hotrow.support.files import Disk
from hotrow.support.messages import warn
from hotrow.support.units import parse_bytes

LOG = "5%"  # of the bytes of rows
_NICE = 10
_PIECES_AT_ONCE = 4  # are read from the store: for each the whole log is looked through


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
    """As `save_checkpoint`, which see, but written in a thread while training goes on.

        save = hotrow.begin_checkpoint("checkpoints", model, step=step, optimizer=optimizer)
        ...
        save.wait()

    The checkpoint is that of the moment of this call, to the bit. The call itself brings rows in
    fast memory to slow memory and copies all that is no row. Afterwards a row that is replaced
    before it was written is copied to a log of `log` bytes, or so much of the bytes of rows; while
    that is full, training waits. One is written at a time: this, `save_checkpoint` and
    `load_checkpoint` wait for the one before, and so does the end of the program. Where rows cannot
    be read beside training, as those of all-fast on a GPU, it is written at once, and
    `save.why_at_once` says why.
    """
    for each in collections_of(model).values():
        end_save_before(each)
    end_save_in(Path(folder))
    begun = perf_counter()
    collections = list(collections_of(model).values())
    log_bytes = parse_bytes(log, total=max(10_000, sum(each.bytes_total for each in collections)))
    reasons = (each.row_access.why_no_snapshot() for each in collections)
    reason = next((each for each in reasons if each is not None), None)
    prepared = prepare(
        folder, model, parts, step=step, extra=extra, keep=keep, full_every=full_every,
        copied=reason is None,
    )  # fmt: skip
    save = Save(prepared, log_bytes, reason)
    if reason is None:
        save._start()
    else:
        save._path, save._prepared = prepared.write(prepared.write_rows), None
    save.pause = perf_counter() - begun
    return save


class Save:
    """A checkpoint on its way to the disk."""

    def __init__(self, prepared: Prepared, log_bytes: int, why_at_once: str | None) -> None:
        self.step, self.log_bytes = prepared.step, log_bytes
        self.why_at_once = why_at_once  # None: it is written while training goes on
        self.pause = 0.0  # seconds that its begin has taken
        self.seconds = 0.0  # from then until all of it was on the disk
        self.error: BaseException | None = None
        self._path: Path | None = None
        self._prepared: Prepared | None = prepared
        self._is_told, self._stop = False, threading.Event()
        self._thread: threading.Thread | None = None
        self._waits: list[Waits] = []

    @property
    def waited(self) -> float:
        """Seconds that training has waited for room in the log."""
        return sum(each.seconds for each in self._waits)

    @property
    def done(self) -> bool:
        """Whether `wait()` returns, or raises, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Its folder, when all of it is on the disk; raises what has kept it from there."""
        self.join()
        self._is_told = True
        atexit.unregister(self._at_exit)
        if self.error is not None:
            raise self.error
        assert self._path is not None
        return self._path

    def join(self) -> None:
        """`wait()`, and raise nothing."""
        while not self.done:
            assert self._thread is not None
            self._thread.join(0.5)  # not for ever: Ctrl-C would wait as long

    def abandon(self) -> None:
        """Leave it, and take away what was written so far."""
        self._is_told = True
        self._stop.set()
        atexit.unregister(self._at_exit)

    def tell(self) -> None:
        """Warn of a failure that was not raised or warned of yet."""
        atexit.unregister(self._at_exit)
        if self.error is not None and not self._is_told:
            self._is_told = True
            warn(f"the checkpoint of step {self.step:,} was not saved: {self.error}")

    def _at_exit(self) -> None:
        self.join()
        self.tell()  # there is no next save to do it

    def _start(self) -> None:
        prepared = self._prepared
        assert prepared is not None
        total = sum(each.bytes_total for each in prepared.collections)
        # A daemon, so that a program that has to leave at once can; any other waits for it.
        thread = threading.Thread(target=self._run, name="hotrow-checkpoint", daemon=True)
        try:
            for each in prepared.collections:
                part = self.log_bytes * each.bytes_total // max(1, total)
                snapshots = each.row_access.take_snapshots(
                    part, only_changed=prepared.since is not None
                )
                self._waits += [snapshot.waits for snapshot in snapshots]
            thread.start()
        except BaseException:
            self._end_snapshots()
            prepared.lock.release()
            raise
        self._thread = thread
        being_saved[prepared.root.resolve()] = self
        for each in prepared.collections:
            each.row_access.being_saved = self
        atexit.register(self._at_exit)

    def _run(self) -> None:
        _give_way()
        begun, prepared = perf_counter(), self._prepared
        assert prepared is not None
        try:
            self._path = prepared.write(self._write_rows)
        except BaseException as error:
            self.error = error
        finally:
            self._end_snapshots()
            self._prepared = None  # with copies of all that is no row
            self.seconds = perf_counter() - begun

    def _end_snapshots(self) -> None:
        assert self._prepared is not None
        for each in self._prepared.collections:
            each.row_access.end_snapshots()

    def _write_rows(self, disk: Disk) -> tuple[CheckpointTable, ...]:
        assert self._prepared is not None
        tables = tables_of(self._prepared.model)
        writer = RowWriter(disk, _source, self._stop, why_stopped="it was abandoned")
        # Tables of one width have one snapshot, which is read in the order of its ids.
        pieces = sorted(
            cut_tables(tables, with_state=True),
            key=lambda piece: _snapshot(piece)[1] + piece.first,
        )
        written = [(piece, writer.write(piece)) for piece in pieces]
        self._end_snapshots()
        return table_records(tables, written)


def _give_way() -> None:
    """Let training have the cores first: on two of them a step took 2.2 times as long beside
    a save, and 1.3 times if its thread gives way (benchmarks/LOG.md)."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _snapshot(piece: ShardRows) -> tuple[Snapshot, int]:
    return piece.table.collection.row_access.snapshot(piece.table.name)


def _source(piece: ShardRows) -> RowSource:
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
