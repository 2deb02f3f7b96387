"""Checkpoints written: at once by several threads, or by one thread while training goes on.

At once, rows are read where they lie. Beside training they are read from a snapshot of the store.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.checkpoint.manifest import Parent
from hotrow.checkpoint.own_state import digests_of, entries_of
from hotrow.checkpoint.parts import collections_of, dense_state, pack, rows_apart, tables_of
from hotrow.checkpoint.places import Where
from hotrow.checkpoint.tensors import (
    RowSource,
    ShardRows,
    by_table,
    cut_tables,
    rows_at_once,
    write_shard,
)
from hotrow.checkpoint.together import Team
from hotrow.checkpoint.wrapped import whole_tensors
from hotrow.checkpoint.writing import Prepared, Shards, State, changed_since, facts_of
from hotrow.distributed.ranks import RankError
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.store.snapshot import Snapshot, Waits
from hotrow.support.files import Disk
from hotrow.support.interrupts import uninterrupted
from hotrow.support.messages import warn
from hotrow.support.numbers import whole
from hotrow.support.progress import bytes_bar
from hotrow.support.random_states import random_states
from hotrow.support.units import parse_bytes

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
    root, begun = Path(folder), perf_counter()
    collections, team = list(collections_of(model).values()), Team(model)
    save, prepared = Save(0), Prepared(team, root, model)
    entries: dict[str, Any] = {}
    found: list[tuple[dict[str, Any], dict[str, Tensor]]] = []

    def begin() -> str:
        save.step = prepared.step = whole("step", step, least=0)
        prepared.full_every = whole("full_every", full_every, least=1)
        prepared.keep = None if keep is None else whole("keep", keep, least=1)
        _end_others(root, collections, team)
        if log is not None:
            total = sum(collection.bytes_total for collection in collections)
            save.log_bytes = parse_bytes(log, total=max(10_000, total))
            reasons = (collection.row_access.why_no_snapshot() for collection in collections)
            save.why_at_once = next((why for why in reasons if why is not None), None)
        _check_parts(parts)
        if team.ranks is None:
            return "{}"
        options = {"step": step, "keep": keep, "full_every": full_every, "log": log}
        return json.dumps({**options, **facts_of(model, parts)})

    def look() -> str:
        found.append((_state(model, parts, extra), dense_state(model)))
        return ""

    def collect() -> str:
        state, dense = whole_tensors(found.pop())
        if team.is_first:
            prepared.state = _packed_state(state, dense)
        if team.ranks is None:
            return ""
        entries.update(entries_of(state, dense))
        since = changed_since(model)
        return json.dumps({
            "digests": digests_of(entries),
            "why": save.why_at_once,
            "since": None if since is None else asdict(since),
            "has channel": team.ranks.saving is not None,
        })  # fmt: skip

    name = "save_checkpoint" if log is None else "begin_checkpoint"
    team.check_equal(name, [json.loads(text) for text in team.begin(name, begin)])
    # One after the other: ranks meet where tensors are cut among them, or all raise before.
    team.do(look)
    told = team.do(collect)
    since = changed_since(model)
    if team.ranks is not None:
        since = _agree(prepared, save, [json.loads(text) for text in told], entries)
    if save.why_at_once is None:
        prepared.state.copy()
    try:
        prepared.take_place(since)
        team.do(lambda: _settle(prepared, save))
    except BaseException:
        prepared.end_snapshots()
        prepared.drop()
        raise
    save._start(prepared)
    save.pause = perf_counter() - begun
    return save


def _agree(
    prepared: Prepared, save: Save, told: list[Any], entries: dict[str, Any]
) -> Parent | None:
    """Let all ranks save alike: return the parent that they have in common, if any."""
    team = prepared.team
    assert team.ranks is not None
    save.why_at_once = next((x["why"] for x in told if x["why"] is not None), None)
    if not team.is_first:
        first, mine = told[0]["digests"], told[team.rank]["digests"]
        own = {key: value for key, value in entries.items() if mine[key] != first[key]}
        prepared.state = State({}, b"", {})
        if own:
            packed_own = json.dumps(pack(own, prepared.state.tensors, "own"))
            prepared.state.state = packed_own.encode()
    # Opened by the thread that trains; anew after a save that lost a rank.
    if save.why_at_once is None and not all(x["has channel"] for x in told):
        team.ranks.open_saving()
    since = told[0]["since"]
    is_common = since is not None and all(x["since"] == since for x in told)
    return Parent(**since) if is_common else None


def _settle(prepared: Prepared, save: Save) -> str:
    """Bring rows to rest, and take snapshots if they are to be read beside training."""
    prepared.settle()
    if save.why_at_once is None:
        total = sum(collection.bytes_total for collection in prepared.collections)
        for collection in prepared.collections:
            part = save.log_bytes * collection.bytes_total // max(1, total)
            snapshots = collection.row_access.take_snapshots(
                part, only_changed=prepared.since is not None
            )
            save._waits += [snapshot.waits for snapshot in snapshots]
    return ""


def _end_others(root: Path, collections: list[EmbeddingBagCollection], team: Team) -> None:
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
    if team.ranks is not None:  # threads that save share a channel, whatever they save
        for other in list(being_saved):
            end_save_in(other)


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
        # Set: no thread writes it. A thread that Ctrl-C stops from being joined looks ended (3.11).
        self._ended, self._process = threading.Event(), os.getpid()
        self._ended.set()
        self._waits: list[Waits] = []

    @property
    def waited(self) -> float:
        """Seconds that training has waited for room in the log."""
        return sum(waits.seconds for waits in self._waits)

    @property
    def done(self) -> bool:
        """Whether `wait()` returns, or raises, at once."""
        return self._ended.is_set() or os.getpid() != self._process  # forks have no such thread

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
            self._ended.wait(0.5)  # not for ever: Ctrl-C would wait as long

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

    def _start(self, prepared: Prepared) -> None:
        if self.why_at_once is not None:
            self._path = prepared.write(self._write_stored, None)
            return
        # A daemon, so that a program that has to leave at once can; any other waits for it.
        thread = threading.Thread(
            target=self._run, args=(prepared,), name="hotrow-checkpoint", daemon=True
        )
        with uninterrupted():  # else it may run, and cannot be waited for or abandoned
            self._ended.clear()
            try:
                thread.start()
            except BaseException:
                self._ended.set()
                prepared.end_snapshots()
                prepared.drop()
                raise
            being_saved[prepared.root.resolve()] = self
            for collection in prepared.collections:
                collection.row_access.being_saved = self
            atexit.register(self._at_exit)

    def _run(self, prepared: Prepared) -> None:
        _lower_priority()
        begun, ranks = perf_counter(), prepared.team.ranks
        try:
            channel = None if ranks is None else ranks.saving
            self._path = prepared.write(self._write_snapshots, channel)
        except BaseException as error:
            self.error = error
            if ranks is not None and isinstance(error, RankError):
                ranks.saving = None  # messages of this save may still be under way
        finally:
            prepared.end_snapshots()
            self.seconds = perf_counter() - begun
            self._ended.set()

    def _write_snapshots(self, prepared: Prepared, disk: Disk) -> Shards:
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
        return by_table(written)

    def _check(self) -> None:
        if self._stop.is_set():
            why = "it was abandoned"
            if self.why_at_once is not None:
                why = "another part of the checkpoint was not written"
            raise InterruptedError(why)

    def _write_stored(self, prepared: Prepared, disk: Disk) -> Shards:
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
        return by_table(written)


def end_save_in(root: Path) -> None:
    """Wait for a save into a folder: the next one removes what is not complete there."""
    _end(being_saved.pop(root.resolve(), None))


def abandon_save_in(root: Path) -> None:
    """Stop a save into a folder, also one whose `begin_checkpoint` was interrupted."""
    save = being_saved.get(root.resolve())
    if save is not None:
        save.abandon()


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


def _check_parts(parts: dict[str, Any]) -> None:
    for name, part in parts.items():
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise TypeError(
                f"{name} has the type {type(part).__name__}, which has no state_dict() and "
                "load_state_dict(); plain values go into extra="
            )


def _state(model: nn.Module, parts: dict[str, Any], extra: Any) -> dict[str, Any]:
    rows = {name: each.optimizer.settings_dict() for name, each in collections_of(model).items()}
    with rows_apart(model):  # torch's optimizers may have the state of rows
        states = {name: part.state_dict() for name, part in parts.items()}
    return {
        "rows": rows,
        "parts": states,
        "random": random_states(),
        "extra": extra,
    }


def _packed_state(state: dict[str, Any], dense: dict[str, Tensor]) -> State:
    tensors: dict[str, Tensor] = {}
    return State(dense, json.dumps(pack(state, tensors, "state")).encode(), tensors)
