"""Read checkpoints: check them, then load rows in several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotrow.checkpoint.folder import find_checkpoint
from hotrow.checkpoint.manifest import (
    OTHER_COPY,
    CheckpointManifest,
    CheckpointTable,
    Shard,
    read_manifest,
)
from hotrow.checkpoint.parts import (
    collections_of,
    load_part,
    refuse_other,
    rows_apart,
    tables_of,
    unpack,
)
from hotrow.checkpoint.saving import end_save_in
from hotrow.checkpoint.tensors import ShardReader, open_shard, read_tensors, row_not_finite
from hotrow.support.files import FileRecord, inside, why_wrong
from hotrow.support.manifests import read_json
from hotrow.support.messages import few
from hotrow.support.progress import bytes_bar
from hotrow.support.random_states import restore_random_states

_READERS = 4


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
    """What `load_checkpoint` returns."""

    folder: Path
    step: int
    extra: Any


def load_checkpoint(
    folder: str | Path, model: nn.Module, *, random: bool = True, **parts: Any
) -> Loaded:
    """Load what `save_checkpoint` has saved into a model and parts of the same shape.

    `folder` is a checkpoint, the folder of several (the latest is loaded), or that of a run.
    Budget, strategy and device may differ. Names, shapes, sizes and the checksums of everything but
    rows are checked before anything is replaced. Checksums of rows are checked while rows are read:
    if one is wrong, a ValueError says so, and the model must be loaded again. `random=False` leaves
    random states alone.
    """
    end_save_in(Path(folder))
    checkpoint = Checkpoint(find_checkpoint(folder))
    checkpoint.load(model, parts, random=random)
    return Loaded(checkpoint.folder, checkpoint.step, checkpoint.state.get("extra"))


class Checkpoint:
    """A checkpoint and its parents, opened: all files exist and have the right sizes.

    Everything but rows has been read, and its checksums are right.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._chain = list(_chain(self.folder))  # oldest first
        for link in self._chain:
            shards = [FileRecord(x.file, x.bytes, "") for x in link.manifest.shards]
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
    def tables(self) -> tuple[CheckpointTable, ...]:
        return self.manifest.tables

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for link in self._chain for shard in link.manifest.shards)

    def _tensors(self, file: FileRecord) -> dict[str, Tensor]:
        return read_tensors(inside(self.folder, file.file), remedy=OTHER_COPY)

    def _state(self) -> dict[str, Any]:
        path = inside(self.folder, self.manifest.state.file)
        tensors = self._tensors(self.manifest.state_tensors)
        try:
            state = unpack(read_json(path), tensors)
            if not isinstance(state, dict) or not all(
                isinstance(state.get(key), dict) for key in ("rows", "parts", "random")
            ):
                raise ValueError("it lacks something")
            if not all(isinstance(key, str) for key in (*state["rows"], *state["parts"])):
                raise ValueError("a part of it has no name")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {error}; {OTHER_COPY}") from None
        return state

    # -- loading -----------------------------------------------------------------------

    def check(self, model: nn.Module, parts: Mapping[str, Any]) -> None:
        """Compare names, shapes and optimizers with those here; a ValueError says what differs."""
        saved = {table.key: [table.rows, table.dim] for table in self.tables}
        saved |= {key: list(tensor.shape) for key, tensor in self.dense.items()}
        refuse_other(self.folder, saved, model)
        with self._fitting():
            rules = {key: settings["rule"] for key, settings in self.state["rows"].items()}
        for name, collection in collections_of(model).items():
            rule = type(collection.optimizer.rule).__name__
            if rules.get(name) != rule:
                raise ValueError(
                    f"{self.folder} has rows that {rules.get(name)} has trained, and {rule} cannot "
                    "go on with them: the state of its rows differs"
                )
        for table in self.tables:
            if (state := tables_of(model)[table.key].state) != table.state:
                raise ValueError(f"{table.key} is saved with state {table.state}, not {state}")
        if self.state["parts"].keys() != parts.keys():
            raise ValueError(
                f"{self.folder} was saved with the parts {few(self.state['parts']) or 'none'}; "
                f"you passed {few(parts) or 'none'}"
            )

    def load(self, model: nn.Module, parts: Mapping[str, Any], *, random: bool = True) -> None:
        self.check(model, parts)
        with rows_apart(model), self._fitting():
            model.load_state_dict(self.dense)
            for name, part in parts.items():
                load_part(part, self.state["parts"][name])
        with self._fitting():
            for name, collection in collections_of(model).items():
                collection.optimizer.load_settings_dict(self.state["rows"][name])
        self._load_rows(model)
        if random:
            with self._fitting():
                restore_random_states(self.state["random"])

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Turn errors of a saved state, which may have any shape, into a ValueError."""
        try:
            yield
        except (ArithmeticError, LookupError, AttributeError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"the state in {self.folder} does not fit: {type(error).__name__} {error}"
            ) from error

    def _load_rows(self, model: nn.Module) -> None:
        tables = tables_of(model)
        with ExitStack() as stack:
            for collection in collections_of(model).values():
                stack.enter_context(collection.row_access.replacing())

            def load(link: _Link, table: CheckpointTable, shard: Shard) -> None:
                into = tables[table.key].stored
                with link.open(table, shard) as reader:
                    if link.is_whole and into.device.type == "cpu":
                        reader.read_to(into[shard.first : shard.first + shard.span])
                        return
                    for where, rows in reader.pieces():
                        if isinstance(where, slice):
                            into[where].copy_(rows)
                        else:
                            into.index_copy_(0, where.to(into.device), rows.to(into.device))

            try:
                self._each_shard("loading a checkpoint", load)
            except ValueError as error:
                raise RowsReplaced(error) from None

    def _each_shard(
        self, title: str, work: Callable[[_Link, CheckpointTable, Shard], None]
    ) -> None:
        """Work on all shards in threads; a parent's before those of its children."""
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
        """Read everything and check sums, shapes, row numbers, and that all values are finite."""
        for key, tensor in self.dense.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"{self.folder}: {key} holds NaN or infinite values")

        def check(link: _Link, table: CheckpointTable, shard: Shard) -> None:
            with link.open(table, shard) as reader:
                for where, rows in reader.pieces():
                    if (row := row_not_finite(rows)) is not None:
                        at = where.start + row if isinstance(where, slice) else int(where[row])
                        raise ValueError(
                            f"{link.folder / shard.file}: row {at:,} holds NaN or infinite values"
                        )

        for link in self._chain[:-1]:
            for file in link.manifest.small_files:
                _refuse(why_wrong(link.folder, file, contents=True))
        self._each_shard("checking a checkpoint", check)

    def weights(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows of a table without their state."""
        dim = next(table.dim for table in self.tables if table.key == key)
        for first, rows in self.rows(key):
            yield first, rows[:, :dim].contiguous()

    def rows(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows of a table with their state: (first row, [n, dim + state])."""
        whole, *children = self._chain
        changes = [change for link in children for change in link.changes(key)]
        table = whole.table(key)
        for shard in table.shards:
            with whole.open(table, shard) as reader:
                for where, rows in reader.pieces():
                    assert isinstance(where, slice)
                    for ids, changed in changes:  # later ones replace those before
                        ends = torch.tensor([where.start, where.stop])
                        low, high = torch.searchsorted(ids, ends).tolist()
                        if low < high:
                            newer = torch.from_numpy(np.array(changed[low:high]))
                            rows[ids[low:high] - where.start] = newer
                    yield where.start, rows


@dataclass(frozen=True)
class _Link:
    """One checkpoint of a chain."""

    folder: Path
    manifest: CheckpointManifest

    @property
    def is_whole(self) -> bool:
        return self.manifest.parent is None

    def table(self, key: str) -> CheckpointTable:
        return next(table for table in self.manifest.tables if table.key == key)

    def check_tables(self, chain: list[_Link]) -> None:
        shapes = [(table.key, table.rows, table.width) for table in self.manifest.tables]
        for link in chain:
            if [(table.key, table.rows, table.width) for table in link.manifest.tables] != shapes:
                raise ValueError(f"{self.folder} and its parent {link.folder} have other tables")

    def open(self, table: CheckpointTable, shard: Shard) -> AbstractContextManager[ShardReader]:
        return open_shard(inside(self.folder, shard.file), table, shard, whole=self.is_whole)

    def changes(self, key: str) -> Iterator[tuple[Tensor, Any]]:
        """Yield the rows that this one has beside its parent's: their numbers, and the rows."""
        table = self.table(key)
        for shard in table.shards:
            with self.open(table, shard) as reader:
                ids = [where for where, _ in reader.pieces() if isinstance(where, Tensor)]
                place = reader.section.first
            if ids:
                path, shape = inside(self.folder, shard.file), (shard.rows, table.width)
                yield torch.cat(ids), np.memmap(path, np.float32, "r", place, shape)


def _chain(folder: Path) -> Iterator[_Link]:
    """Return a checkpoint and its parents, oldest first."""
    chain = [_Link(folder, read_manifest(folder))]
    while (parent := chain[-1].manifest.parent) is not None:
        child = chain[-1].folder
        place = child.resolve().parent / parent.name
        try:
            manifest = read_manifest(place)
        except ValueError as error:
            raise ValueError(f"{child} has rows of its parent alone, and {error}") from None
        if manifest.checksum != parent.checksum:
            raise ValueError(f"{place} is not the parent that {child} was saved with")
        chain.append(_Link(place, manifest))
        if len(chain) > 10_000:
            raise ValueError(f"{folder} has more parents than can be")
    return reversed(chain)


def _refuse(wrong: str | None) -> None:
    if wrong:
        raise ValueError(f"{wrong}; {OTHER_COPY}")
