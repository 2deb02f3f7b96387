"""Read checkpoints: check them, then load rows in several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
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
from hotrow.checkpoint.own_state import merged, restore_random_of
from hotrow.checkpoint.parts import (
    collections_of,
    load_dense,
    load_part,
    names_for,
    refuse_other,
    rows_apart,
    tables_of,
    unpack,
)
from hotrow.checkpoint.places import Share, Where, in_order
from hotrow.checkpoint.saving import end_save_in
from hotrow.checkpoint.tensors import (
    ShardReader,
    open_shard,
    read_tensors,
    row_not_finite,
    rows_at_once,
)
from hotrow.checkpoint.together import Team
from hotrow.support.files import FileRecord, inside, why_wrong
from hotrow.support.manifests import read_json
from hotrow.support.messages import few
from hotrow.support.progress import bytes_bar

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

    Several ranks call this together. A checkpoint may have been saved by another number of ranks:
    then all of them get the parts, the dense model and `extra` of the first one.
    """
    team = Team(model)
    checkpoint = _open_together(Path(folder), team)
    checkpoint.load(model, parts, random=random)
    state, _ = checkpoint.state_of(team)
    return Loaded(checkpoint.folder, checkpoint.step, state.get("extra"))


def _open_together(folder: Path, team: Team) -> Checkpoint:
    """Open the checkpoint that rank 0 finds in a folder, on all ranks."""
    opened: list[Checkpoint] = []

    def find() -> str:
        end_save_in(folder)
        return str(find_checkpoint(folder).relative_to(folder)) if team.is_first else ""

    place = team.begin("load_checkpoint", find)[0]

    def open_here() -> str:
        opened.append(Checkpoint(folder / place))
        return opened[0].manifest.checksum

    sums = team.do(open_here)
    for rank, checksum in enumerate(sums):
        if checksum != sums[0]:
            raise ValueError(
                f"rank {rank} of {team.size} sees another checkpoint in {folder} than rank 0: all "
                "ranks must see the same folder"
            )
    return opened[0]


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
        self.state = self._state(self.manifest.state, self.manifest.state_tensors)
        _check_state(self.state, inside(self.folder, self.manifest.state.file))
        newest.check_tables(self._chain)

    @property
    def tables(self) -> tuple[CheckpointTable, ...]:
        return self.manifest.tables

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for link in self._chain for shard in link.manifest.shards)

    def _tensors(self, file: FileRecord) -> dict[str, Tensor]:
        return read_tensors(inside(self.folder, file.file), remedy=OTHER_COPY)

    def _state(self, file: FileRecord, tensors: FileRecord) -> Any:
        path = inside(self.folder, file.file)
        try:
            return unpack(read_json(path), self._tensors(tensors))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {error}; {OTHER_COPY}") from None

    def own_state(self, rank: int) -> dict[str, Any]:
        """Return what one of the ranks that saved it had of its own."""
        for own in self.manifest.own:
            if own.rank == rank:
                path, state = (
                    inside(self.folder, own.state.file),
                    self._state(own.state, own.tensors),
                )
                if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
                    raise ValueError(f"{path} cannot be read: it is no table; {OTHER_COPY}")
                return state
        return {}

    def state_of(self, team: Team) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state and the dense model of this rank: what it saved itself, if as many ranks
        load it as have saved it, or else what rank 0 saved."""
        if team.size == 1 or team.size != self.manifest.ranks:
            return self.state, self.dense
        with self._fitting():
            state, dense = merged(self.state, self.dense, self.own_state(team.rank))
        _check_state(state, self.folder)
        return state, dense

    def _restore_random(self, team: Team) -> None:
        """Give a rank the random states that it saved. A rank beyond those that saved draws a seed
        from rank 0's."""
        is_new = team.rank >= self.manifest.ranks
        own = {} if is_new else self.own_state(team.rank)
        restore_random_of(own.get("random", self.state["random"]), team.rank if is_new else None)

    def _names_for(self, model: nn.Module) -> Callable[[str], str]:
        return names_for(model, [*(table.key for table in self.tables), *self.dense])

    # -- loading -----------------------------------------------------------------------

    def check(self, model: nn.Module, parts: Mapping[str, Any]) -> None:
        """Compare names, shapes and optimizers with those here; a ValueError says what differs."""
        name_for = self._names_for(model)
        saved = {name_for(table.key): [table.rows, table.dim] for table in self.tables}
        saved |= {name_for(key): list(tensor.shape) for key, tensor in self.dense.items()}
        refuse_other(self.folder, saved, model)
        with self._fitting():
            rules = {name_for(key): x["rule"] for key, x in self.state["rows"].items()}
            tables = {name_for(key): {*x["steps"]} for key, x in self.state["rows"].items()}
        for name, collection in collections_of(model).items():
            rule, names = type(collection.optimizer.rule).__name__, collection.optimizer.names
            there = tables.get(name, set())
            if not there.issuperset(names):
                raise ValueError(
                    f"{self.folder} was saved with other collections: {name!r} has the tables "
                    f"{few(names)} here, and {few(sorted(there)) or 'none'} there; build or "
                    "convert the model as it was then"
                )
            if rules.get(name) != rule:
                raise ValueError(
                    f"{self.folder} has rows that {rules.get(name)} has trained, and {rule} cannot "
                    "go on with them: the state of its rows differs"
                )
        for table in self.tables:
            if (state := tables_of(model)[name_for(table.key)].state) != table.state:
                raise ValueError(f"{table.key} is saved with state {table.state}, not {state}")
        if self.state["parts"].keys() != parts.keys():
            raise ValueError(
                f"{self.folder} was saved with the parts {few(self.state['parts']) or 'none'}; "
                f"you passed {few(parts) or 'none'}"
            )

    def load(self, model: nn.Module, parts: Mapping[str, Any], *, random: bool = True) -> None:
        """Load it into a model and parts of the same shape; several ranks call this together."""
        team = Team(model)

        def check() -> str:
            self.check(model, parts)
            for collection in collections_of(model).values():
                collection.row_access.check_replacing()
            self.state_of(team)  # one that cannot be read is found before anything is replaced
            return ""

        team.begin("load_checkpoint", check)
        team.do(lambda: self._load_dense(model, parts, team))
        try:
            team.do(lambda: self._load_rows(model))
        except ValueError as error:
            raise RowsReplaced(error) from None
        if random:
            with self._fitting():
                self._restore_random(team)

    def _load_dense(self, model: nn.Module, parts: Mapping[str, Any], team: Team) -> str:
        """Load everything but rows and random states."""
        state, dense = self.state_of(team)
        name_for = self._names_for(model)
        with rows_apart(model), self._fitting():
            load_dense(model, dense)
            for name, part in parts.items():
                load_part(part, state["parts"][name])
        with self._fitting():
            rows = {name_for(name): settings for name, settings in state["rows"].items()}
            for name, collection in collections_of(model).items():
                collection.optimizer.load_settings_dict(rows[name])
        return ""

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Turn errors of a saved state, which may have any shape, into a ValueError."""
        try:
            yield
        except (ArithmeticError, LookupError, AttributeError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"the state in {self.folder} does not fit: {type(error).__name__} {error}"
            ) from error

    def _load_rows(self, model: nn.Module) -> str:
        name_for, by_name = self._names_for(model), tables_of(model)
        tables = {table.key: by_name[name_for(table.key)] for table in self.tables}
        here = {key: table.share for key, table in tables.items()}
        with ExitStack() as stack:
            for collection in collections_of(model).values():
                stack.enter_context(collection.row_access.replacing())

            def load(link: _Link, table: CheckpointTable, shard: Shard) -> None:
                saved, mine = link.shares[table.key][shard.rank], here[table.key]
                into, is_like = tables[table.key].stored, saved.is_like(mine)
                with link.open(table, shard) as reader:
                    if is_like and link.is_whole and into.device.type == "cpu":
                        reader.read_to(into[shard.first : shard.first + shard.span])
                        return
                    for where, rows in reader.pieces():
                        numbers = where
                        if not is_like:
                            places, numbers = mine.numbers_of(saved.rows_of(where))
                            rows = rows if places is None else rows[places]
                        if isinstance(numbers, slice):
                            into[numbers].copy_(rows)
                        else:
                            into.index_copy_(0, numbers.to(into.device), rows.to(into.device))

            def is_needed(link: _Link, table: CheckpointTable, shard: Shard) -> bool:
                saved, mine = link.shares[table.key][shard.rank], here[table.key]
                return saved.meets(mine) and mine.count > 0

            self._each_shard("loading a checkpoint", load, is_needed)
        return ""

    def _each_shard(
        self,
        title: str,
        work: Callable[[_Link, CheckpointTable, Shard], None],
        is_needed: Callable[[_Link, CheckpointTable, Shard], bool] = lambda *_: True,
    ) -> None:
        """Work on the needed shards in threads; a parent's before those of its children."""
        by_link = [
            [
                (table, shard)
                for table in link.manifest.tables
                for shard in table.shards
                if is_needed(link, table, shard)
            ]
            for link in self._chain
        ]
        done, total = 0, sum(shard.bytes for jobs in by_link for _, shard in jobs)
        with bytes_bar(title) as advance, ThreadPoolExecutor(_READERS) as pool:
            for link, jobs in zip(self._chain, by_link, strict=True):
                futures = [pool.submit(work, link, *job) for job in jobs]
                try:
                    for future, (_, shard) in zip(futures, jobs, strict=True):
                        future.result()
                        done += shard.bytes
                        advance(done, total)
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
            share = link.shares[table.key][shard.rank]
            with link.open(table, shard) as reader:
                for where, rows in reader.pieces():
                    if (row := row_not_finite(rows)) is not None:
                        at = int(share.rows_of(where)[row])
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
        for first, rows in whole.rows(whole.table(key)):
            for ids, order, changed in changes:  # later ones replace those before
                ends = torch.tensor([first, first + len(rows)])
                low, high = torch.searchsorted(ids, ends).tolist()
                if low < high:
                    places = slice(low, high) if order is None else order[low:high].numpy()
                    rows[ids[low:high] - first] = torch.from_numpy(np.array(changed[places]))
            yield first, rows


@dataclass(frozen=True)
class _Link:
    """One checkpoint of a chain."""

    folder: Path
    manifest: CheckpointManifest

    @property
    def is_whole(self) -> bool:
        return self.manifest.parent is None

    @cached_property
    def shares(self) -> dict[str, list[Share]]:
        """Which rank has which rows, by the key of a table."""
        return {table.key: self.manifest.shares(table) for table in self.manifest.tables}

    @property
    def shapes(self) -> list[tuple[str, int, int, str, int]]:
        ranks = self.manifest.ranks
        return [(x.key, x.rows, x.width, x.name, ranks) for x in self.manifest.tables]

    def table(self, key: str) -> CheckpointTable:
        return next(table for table in self.manifest.tables if table.key == key)

    def check_tables(self, chain: list[_Link]) -> None:
        for link in chain:
            if link.shapes != self.shapes:
                raise ValueError(f"{self.folder} and its parent {link.folder} have other tables")

    def open(self, table: CheckpointTable, shard: Shard) -> AbstractContextManager[ShardReader]:
        return open_shard(inside(self.folder, shard.file), table, shard, whole=self.is_whole)

    def rows(self, table: CheckpointTable) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows of a table in order, of one that has no parent: (first row, rows)."""
        shares = self.shares[table.key]
        if len(shares) > 1:
            parts = [map(itemgetter(1), self._pieces(table, share.rank)) for share in shares]
            yield from in_order(shares, parts, table.width, rows_at_once(table.width))
            return
        for where, rows in self._pieces(table, 0):
            assert isinstance(where, slice)
            yield where.start, rows

    def _pieces(self, table: CheckpointTable, rank: int) -> Iterator[tuple[Where, Tensor]]:
        for shard in table.shards:
            if shard.rank == rank:
                with self.open(table, shard) as reader:
                    yield from reader.pieces()

    def changes(self, key: str) -> Iterator[tuple[Tensor, Tensor | None, Any]]:
        """Yield the rows that this one has beside its parent's: the rows of the table, ascending,
        their places (None: as they come), and what has them at these places."""
        table = self.table(key)
        for shard in table.shards:
            with self.open(table, shard) as reader:
                ids = [where for where, _ in reader.pieces() if isinstance(where, Tensor)]
                place = reader.section.first
            if ids:
                path, shape = inside(self.folder, shard.file), (shard.rows, table.width)
                rows, order = torch.cat(ids), None
                if self.manifest.ranks > 1:
                    rows, order = self.shares[key][shard.rank].rows_of(rows).sort()
                yield rows, order, np.memmap(path, np.float32, "r", place, shape)


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


def _check_state(state: Any, path: Path) -> None:
    """Refuse a state that lacks something that every state has."""
    wrong = None
    if not isinstance(state, dict) or not all(
        isinstance(state.get(key), dict) for key in ("rows", "parts", "random")
    ):
        wrong = "it lacks something"
    elif not all(isinstance(key, str) for key in (*state["rows"], *state["parts"])):
        wrong = "a part of it has no name"
    _refuse(wrong and f"{path} cannot be read: {wrong}")
