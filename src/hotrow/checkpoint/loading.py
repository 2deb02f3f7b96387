"""Checkpoints read: checked before they are believed, rows by several threads into their places."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from hotrow.checkpoint.folder import find_checkpoint
from hotrow.checkpoint.manifest import (
    IDS,
    ROWS,
    Manifest,
    Shard,
    TableRecord,
    read_manifest,
)
from hotrow.checkpoint.model import collections_of, dense_state, refuse_other, rows_apart, tables_of
from hotrow.checkpoint.parts import load_part
from hotrow.checkpoint.saving import end_save_in
from hotrow.checkpoint.tensors import (
    PIECE_BYTES,
    Section,
    bytes_of,
    read_head,
    read_into,
    read_tensors,
)
from hotrow.checkpoint.tree import unpack
from hotrow.support.files import BlockSums, FileRecord, inside, why_wrong
from hotrow.support.manifests import read_json
from hotrow.support.messages import few
from hotrow.support.progress import bytes_bar
from hotrow.support.random_states import restore_random_states

_READERS = 4
_REMEDY = "take a copy that is whole, or another checkpoint"

Take = Callable[[int, Tensor], object]  # rows from a number on
TakeSome = Callable[[Tensor, Tensor], object]  # row numbers, and those rows


class RowsReplaced(ValueError):
    """A checkpoint was found to be damaged when some of its rows were in their places."""

    def __init__(self, why: ValueError) -> None:
        super().__init__(
            f"{why}. Some rows were replaced before this was found: load another checkpoint before "
            "going on"
        )
        self.why = why


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint says beside what it has put in place."""

    folder: Path
    step: int
    extra: Any


def load_checkpoint(
    folder: str | Path, model: nn.Module, *, random: bool = True, **parts: Any
) -> Loaded:
    """Load what `save_checkpoint` has saved into a model and parts of the same shape.

    `folder` is a checkpoint, the folder of several, whose latest is taken, or that of a run.
    Budget, strategy and device may be others. Names, shapes and sizes are checked before anything
    is replaced, checksums of all but rows, too; those of rows while they are read: a ValueError
    then says so, and the model is to be loaded again. `random=False` leaves random states alone.
    """
    end_save_in(Path(folder))
    found = Checkpoint(find_checkpoint(folder))
    found.load(model, parts, random=random)
    return Loaded(found.folder, found.step, found.state.get("extra"))


class Checkpoint:
    """A checkpoint and its parents; all files are there, and as large as they should be.

    All but rows has been read, and is as it was written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._chain = list(_chain(self.folder))  # oldest first
        for link in self._chain:
            shards = [FileRecord(each.file, each.bytes, "") for each in link.manifest.shards]
            for file in (*link.manifest.small_files, *shards):
                _refuse(why_wrong(link.folder, file, contents=False))
        newest = self._chain[-1]
        self.manifest, self.step = newest.manifest, newest.manifest.step
        for file in newest.manifest.small_files:
            _refuse(why_wrong(self.folder, file, contents=True))
        self.dense = self._tensors(self.manifest.dense)
        self.state = self._state()
        newest.check_tables(self._chain)

    @property
    def tables(self) -> tuple[TableRecord, ...]:
        return self.manifest.tables

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for link in self._chain for shard in link.manifest.shards)

    def _tensors(self, file: FileRecord) -> dict[str, Tensor]:
        path = inside(self.folder, file.file)
        try:
            with path.open("rb", buffering=0) as opened:
                return read_tensors(opened, file.bytes)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}; {_REMEDY}") from None

    def _state(self) -> dict[str, Any]:
        path = inside(self.folder, self.manifest.state.file)
        tensors = self._tensors(self.manifest.state_tensors)
        try:
            found = unpack(read_json(path), tensors)
            if not isinstance(found, dict) or not all(
                isinstance(found.get(key), dict) for key in ("rows", "parts", "random")
            ):
                raise ValueError("it lacks something")
            if not all(isinstance(key, str) for key in (*found["rows"], *found["parts"])):
                raise ValueError("a part of it has no name")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {error}; {_REMEDY}") from None
        return found

    # -- loading -----------------------------------------------------------------------

    def check(self, model: nn.Module, parts: Mapping[str, Any]) -> None:
        """Compare names, shapes and optimizers with those here; a ValueError says what differs."""
        here, saved = _shapes(model), {each.key: [each.rows, each.dim] for each in self.tables}
        saved |= {key: list(each.shape) for key, each in self.dense.items()}
        refuse_other(self.folder, saved, here)
        with self._fitting():
            rules = {key: each["rule"] for key, each in self.state["rows"].items()}
        for name, each in collections_of(model).items():
            mine = type(each.optimizer.rule).__name__
            if rules.get(name) != mine:
                raise ValueError(
                    f"{self.folder} has rows that {rules.get(name)} has trained, and {mine} is "
                    "to go on with them; their state is another's"
                )
        for table in self.tables:
            if (state := tables_of(model)[table.key].state) != table.state:
                raise ValueError(f"{table.key} is saved with state {table.state}, not {state}")
        if self.state["parts"].keys() != parts.keys():
            raise ValueError(
                f"{self.folder} has the parts {few(self.state['parts']) or 'none'}; given are "
                f"{few(parts) or 'none'}"
            )

    def load(self, model: nn.Module, parts: Mapping[str, Any], *, random: bool = True) -> None:
        self.check(model, parts)
        with rows_apart(model):
            model.load_state_dict(self.dense)
        with self._fitting():
            for name, part in parts.items():
                load_part(part, self.state["parts"][name])
            for name, each in collections_of(model).items():
                each.optimizer.load_settings_dict(self.state["rows"][name])
        self._load_rows(model)
        if random:
            with self._fitting():
                restore_random_states(self.state["random"])

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """What was saved may be anybody's, and of any shape."""
        try:
            yield
        except (ArithmeticError, LookupError, AttributeError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"the state in {self.folder} does not fit: {type(error).__name__} {error}"
            ) from error

    def _load_rows(self, model: nn.Module) -> None:
        tables = tables_of(model)
        with ExitStack() as stack:
            for each in collections_of(model).values():
                stack.enter_context(each.replacing())

            def load(link: _Link, table: TableRecord, shard: Shard) -> None:
                into = tables[table.key].stored
                if link.manifest.parent is None and into.device.type == "cpu":
                    link.read_rows_to(table, shard, into)
                    return
                link.read_rows(
                    table, shard,
                    take=lambda first, rows: into[first : first + len(rows)].copy_(rows),
                    take_some=lambda ids, rows: into.index_copy_(
                        0, ids.to(into.device), rows.to(into.device)
                    ),
                )  # fmt: skip

            try:
                self._each_shard("loading a checkpoint", load)
            except ValueError as error:
                raise RowsReplaced(error) from None

    def _each_shard(self, title: str, work: Callable[[_Link, TableRecord, Shard], None]) -> None:
        """In threads; those of a parent before those of its children."""
        done = 0
        with bytes_bar(title) as advance, ThreadPoolExecutor(_READERS) as pool:
            for link in self._chain:
                jobs = [(t, shard) for t in link.manifest.tables for shard in t.shards]
                futures = [pool.submit(work, link, *job) for job in jobs]
                try:
                    for future, (_, shard) in zip(futures, jobs, strict=True):
                        future.result()
                        done += shard.bytes
                        advance(done, self.bytes)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise

    # -- looking -----------------------------------------------------------------------

    def verify(self) -> None:
        """Read everything: checksums, shapes, row numbers, and whether all numbers are numbers."""
        for key, each in self.dense.items():
            if each.is_floating_point() and not bool(each.isfinite().all()):
                raise ValueError(f"{self.folder}: {key} holds values that are no numbers")

        def check(link: _Link, table: TableRecord, shard: Shard) -> None:
            def finite(ids: Tensor | range, rows: Tensor) -> None:
                if not bool(rows.isfinite().all()):
                    at = int(ids[int((~rows.isfinite().all(1)).nonzero()[0])])
                    raise ValueError(
                        f"{link.folder / shard.file}: row {at:,} holds values that are no numbers"
                    )

            link.read_rows(
                table, shard, take_some=finite,
                take=lambda first, rows: finite(range(first, first + len(rows)), rows),
            )  # fmt: skip

        for link in self._chain[:-1]:
            for file in link.manifest.small_files:
                _refuse(why_wrong(link.folder, file, contents=True))
        self._each_shard("checking a checkpoint", check)

    def weights(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """All rows of a table without their state."""
        dim = next(each.dim for each in self.tables if each.key == key)
        for first, rows in self.rows(key):
            yield first, rows[:, :dim].contiguous()

    def rows(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """All rows of a table with their state, in pieces: (first row, [n, dim + state])."""
        table = next(each for each in self.tables if each.key == key)
        whole, *changes = self._chain
        later = [link.changes(key) for link in changes]
        for shard in whole.table(key).shards:
            for first, rows in whole.pieces(table, shard):
                for change in later:
                    change.put_on(first, rows)
                yield first, rows


@dataclass(frozen=True)
class _Link:
    """One checkpoint of a chain."""

    folder: Path
    manifest: Manifest

    def table(self, key: str) -> TableRecord:
        return next(each for each in self.manifest.tables if each.key == key)

    def check_tables(self, chain: list[_Link]) -> None:
        mine = [(each.key, each.rows, each.width) for each in self.manifest.tables]
        for link in chain:
            if [(each.key, each.rows, each.width) for each in link.manifest.tables] != mine:
                raise ValueError(f"{self.folder} and its parent {link.folder} have other tables")

    def read_rows(
        self, table: TableRecord, shard: Shard, *, take: Take, take_some: TakeSome
    ) -> None:
        """Hands rows on in pieces; says at the end if they were not those that were written."""
        with self._open(table, shard) as reader:
            ids = reader.ids()
            for first, rows in reader.pieces():
                if ids is None:
                    take(shard.first + first, rows)
                else:
                    take_some(ids[first : first + len(rows)], rows)
            reader.finish()

    def read_rows_to(self, table: TableRecord, shard: Shard, into: Tensor) -> None:
        """The same for all rows of a span, straight into their places."""
        with self._open(table, shard) as reader:
            memory = bytes_of(into[shard.first : shard.first + shard.span])
            for first in range(0, len(memory), PIECE_BYTES):
                reader.fill(memory[first : first + PIECE_BYTES])
            reader.finish()

    def pieces(self, table: TableRecord, shard: Shard) -> Iterator[tuple[int, Tensor]]:
        with self._open(table, shard) as reader:
            reader.ids()
            for first, rows in reader.pieces():
                yield shard.first + first, rows.clone()
            reader.finish()

    def changes(self, key: str) -> _Changes:
        table, found = self.table(key), []
        for shard in table.shards:
            with self._open(table, shard) as reader:
                ids = reader.ids()
                assert ids is not None
                for _ in reader.pieces():
                    pass
                reader.finish()
                where = reader.place_of_rows
            shape, path = (shard.rows, table.width), inside(self.folder, shard.file)
            rows = np.memmap(path, np.float32, "r", where, shape)
            found.append((ids, rows))
        return _Changes(found)

    def _open(self, table: TableRecord, shard: Shard) -> _ShardReader:
        return _ShardReader(self, table, shard)


class _Changes:
    """The rows of a table that a checkpoint has beside its parent's."""

    def __init__(self, found: list[tuple[Tensor, Any]]) -> None:
        self._found = found

    def put_on(self, first: int, rows: Tensor) -> None:
        last = first + len(rows)
        for ids, changed in self._found:
            low, high = torch.searchsorted(ids, torch.tensor([first, last])).tolist()
            if low < high:
                rows[ids[low:high] - first] = torch.from_numpy(np.array(changed[low:high]))


class _ShardReader:
    """One pass over a shard, from its first byte to its last."""

    def __init__(self, link: _Link, table: TableRecord, shard: Shard) -> None:
        self._path, self._shard, self._width = inside(link.folder, shard.file), shard, table.width
        self._digest = BlockSums()
        self._has_ids = link.manifest.parent is not None

    def __enter__(self) -> _ShardReader:
        self._file: IO[bytes] = self._path.open("rb", buffering=0)
        try:
            size = os.fstat(self._file.fileno()).st_size
            begin, sections = read_head(self._file, size)
            self._digest.update(begin)
            self._check(sections)
        except BaseException as error:
            self._file.close()
            if isinstance(error, ValueError):
                raise self._wrong(str(error)) from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _check(self, sections: dict[str, Section]) -> None:
        count = self._shard.rows
        expected: dict[str, Any] = {ROWS: ("F32", (count, self._width))}
        if self._has_ids:
            expected = {IDS: ("I64", (count,)), **expected}
        found = {name: (each.dtype, each.shape) for name, each in sections.items()}
        if found != expected:
            raise ValueError(f"it holds {found}, and by the manifest {expected}")
        in_order = sorted(sections, key=lambda name: sections[name].first)
        if in_order != list(expected):
            raise ValueError("its row numbers do not come first")
        self.place_of_rows = sections[ROWS].first

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"{self._path} is damaged: {what}; {_REMEDY}")

    def fill(self, memory: memoryview) -> None:
        try:
            read_into(self._file, memory)
        except ValueError as error:
            raise self._wrong(str(error)) from None
        self._digest.update(memory)

    def ids(self) -> Tensor | None:
        """The row numbers, which come before the rows; None: there are none, as rows are all."""
        if not self._has_ids:
            return None
        ids, shard = torch.empty(self._shard.rows, dtype=torch.int64), self._shard
        self.fill(bytes_of(ids))
        if len(ids) and (
            not bool((ids[1:] > ids[:-1]).all())
            or int(ids[0]) < shard.first
            or int(ids[-1]) >= shard.first + shard.span
        ):
            raise self._wrong("its row numbers are not those of the manifest, in order")
        return ids

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Rows in memory that is used again: (first, [n, width])."""
        most = max(1, PIECE_BYTES // (4 * self._width))
        room = torch.empty(min(most, self._shard.rows), self._width)
        for first in range(0, self._shard.rows, most):
            rows = room[: min(most, self._shard.rows - first)]
            self.fill(bytes_of(rows))
            yield first, rows

    def finish(self) -> None:
        if self._file.read(1) or self._digest.hexdigest() != self._shard.sums:
            raise self._wrong("it has changed since it was written: its checksum is another")


def _chain(folder: Path) -> Iterator[_Link]:
    """A checkpoint after its parents."""
    found = [_Link(folder, read_manifest(folder))]
    while (parent := found[-1].manifest.parent) is not None:
        place = found[-1].folder.resolve().parent / parent.name
        try:
            manifest = read_manifest(place)
        except ValueError as error:
            raise ValueError(
                f"{found[-1].folder} has rows of its parent alone, and {error}"
            ) from None
        if manifest.checksum != parent.checksum:
            raise ValueError(f"{place} is not the parent that {found[-1].folder} was saved with")
        found.append(_Link(place, manifest))
        if len(found) > 10_000:
            raise ValueError(f"{folder} has more parents than can be")
    return reversed(found)


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    here = {key: [table.rows, table.dim] for key, table in tables_of(model).items()}
    return here | {key: list(each.shape) for key, each in dense_state(model).items()}


def _refuse(wrong: str | None) -> None:
    if wrong:
        raise ValueError(f"{wrong}; {_REMEDY}")
