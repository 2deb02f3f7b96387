"""Save and load the weights of a model. Rows are written and read in pieces."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from torch import Tensor, nn

from hotrow.checkpoint.manifest import (
    DENSE,
    MODEL_FILE,
    OTHER_MODEL,
    WEIGHTS,
    ModelManifest,
    ModelShard,
    ModelTable,
    read_model_manifest,
    to_json,
)
from hotrow.checkpoint.parts import (
    TableRows,
    collections_of,
    dense_state,
    load_dense,
    names_for,
    refuse_other,
    tables_of,
)
from hotrow.checkpoint.places import in_order
from hotrow.checkpoint.tensors import (
    Section,
    ShardRows,
    cut_tables,
    open_tensors,
    packed,
    read_rows,
    read_tensors,
    rows_at_once,
    spans,
    table_parts,
)
from hotrow.checkpoint.together import Team
from hotrow.checkpoint.wrapped import whole_tensors
from hotrow.support.files import Disk, FileRecord, inside, make_folder, why_wrong
from hotrow.support.progress import bytes_bar
from hotrow.support.version import __version__


def save_model(folder: str | Path, model: nn.Module) -> None:
    """Save a model's weights, including all rows, as a new folder of safetensors.

    Rows are streamed into shards of 256 MiB. The manifest is written last: a folder without it is
    no model. A failure removes what it has written. The state of optimizers is not saved.

    Several ranks call this together, and each writes the rows that it owns.
    """
    folder, team = Path(folder), Team(model)

    def begin() -> str:
        if team.is_first and (folder / MODEL_FILE).exists():
            raise ValueError(
                f"{folder} holds a model already, which is not replaced; save to another folder"
            )
        return ""

    team.begin("save_model", begin)
    names: list[str] = []
    try:
        if team.ranks is not None:
            team.do(lambda: _make(folder, team))
            team.check_folder(folder)
        _write(Disk(folder), names, model, team)
    except BaseException:
        if MODEL_FILE in names:  # first: without it, what others have written is no model
            (folder / MODEL_FILE).unlink(missing_ok=True)
        if (folder / MODEL_FILE).exists():  # rank 0 wrote it, and died before it could say so
            raise
        for name in names:
            (folder / name).unlink(missing_ok=True)
        for path in (folder / "rows", folder):
            with suppress(OSError):  # not there, or with files of others in it
                path.rmdir()
        raise


def _make(folder: Path, team: Team) -> str:
    if team.is_first:
        make_folder(folder)
    return ""


def _flush(model: nn.Module) -> None:
    for collection in collections_of(model).values():
        collection.row_access.flush()


def load_model(folder: str | Path, model: nn.Module) -> None:
    """Load weights that `save_model` has saved into a model of the same shape.

    Sizes, checksums, names and shapes are checked before any weight is replaced; a ValueError says
    what is wrong. The state of optimizers stays as it is. Several ranks call this together; as many
    as have saved it read their own rows alone.
    """
    team = Team(model)
    opened: list[SavedModel] = []

    def check() -> str:
        saved = SavedModel(folder)
        saved.check(model)
        saved.verify(model)
        opened.append(saved)
        return ""

    def load() -> str:
        if team.ranks is not None:  # the state of rows that all ranks have goes to their owners
            _flush(model)
        opened[0].load(model)
        return ""

    team.begin("load_model", check)
    team.do(load)
    for collection in collections_of(model).values():
        collection.row_access.refresh()


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a saved model, up to a few kilobytes."""
    tables = sum(4 * table.rows * table.dim for table in tables_of(model).values())
    return tables + sum(tensor.nbytes for tensor in dense_state(model).values())


# -- saving ----------------------------------------------------------------------------


def _write(disk: Disk, names: list[str], model: nn.Module, team: Team) -> None:
    """Write all files, the manifest last; their names are added to `names`."""
    tables, dense = tables_of(model), list[FileRecord]()
    states: list[dict[str, Tensor]] = []
    total, done = sum(4 * table.share.count * table.dim for table in tables.values()), 0
    with bytes_bar("saving the model") as advance:

        def counted(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
            nonlocal done
            for part in parts:
                yield part
                done += len(part)
                advance(done, total)

        def write(name: str, parts: Iterable[bytes | memoryview]) -> FileRecord:
            names.append(name)
            return disk.write(name, counted(parts))

        def look() -> str:
            if team.ranks is not None:  # rows that all ranks have are brought to their owners
                _flush(model)
            states.append(dense_state(model))
            return ""

        def write_own() -> str:
            nonlocal total
            state = whole_tensors(states.pop())
            total += sum(tensor.nbytes for tensor in state.values())
            if team.is_first:
                dense.append(write(DENSE, packed(state)))
            shards: dict[str, list[dict[str, Any]]] = {key: [] for key in tables}
            for piece in cut_tables(tables, with_state=False):
                shape = (piece.span, piece.width)
                parts = table_parts(WEIGHTS, shape, _weights(piece), metadata=piece.metadata)
                file = vars(write(piece.file, parts))
                shard = ModelShard(**file, first=piece.first, rows=piece.span, rank=piece.rank)
                shards[piece.key].append(asdict(shard))
            return json.dumps(shards)

        def complete(by_rank: list[dict[str, list[Any]]]) -> str:
            if not team.is_first:
                return ""
            records = []
            for key, table in tables.items():
                shards = (ModelShard(**shard) for shards in by_rank for shard in shards[key])
                name = "" if team.ranks is None else table.name
                records.append(ModelTable(key, table.rows, table.dim, tuple(shards), name))
            made_by = f"hotrow {__version__}"
            manifest = ModelManifest(dense[0], tuple(records), made_by, team.size)
            write(MODEL_FILE, [to_json(manifest)])
            return ""

        team.do(look)  # before tensors that are cut among ranks are joined: there ranks meet
        by_rank = [json.loads(text) for text in team.do(write_own)]
        team.do(lambda: complete(by_rank))


def _weights(piece: ShardRows) -> Iterator[Tensor]:
    access = piece.table.collection.row_access
    for part in spans(piece.first, piece.last, rows_at_once(piece.width)):
        yield from access.own_weights(piece.table.name, part.start, part.stop)


# -- loading ---------------------------------------------------------------------------


class SavedModel:
    """A folder that `save_model` has written; all files exist and have the right sizes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._manifest = read_model_manifest(self.folder)
        for file in self._manifest.files:
            is_small = file is self._manifest.dense
            self._refuse(why_wrong(self.folder, file, contents=is_small))

    @property
    def tables(self) -> tuple[ModelTable, ...]:
        return self._manifest.tables

    def _refuse(self, wrong: str | None) -> None:
        if wrong:
            raise ValueError(f"{wrong}; {OTHER_MODEL}")

    def verify(self, model: nn.Module | None = None) -> None:
        """Compare the checksums of files and the shapes of shards; a ValueError says what is wrong.
        `model`: what will be loaded, so that files of other ranks are left out."""
        needed = {table.key: table.shards for table in self.tables}
        if model is not None:
            name_for, into = self._names_for(model), tables_of(model)
            needed = {x.key: self._needed(x, into[name_for(x.key)]) for x in self.tables}
        shards = [shard for of_table in needed.values() for shard in of_table]
        files, done = [self._manifest.dense, *shards], 0
        total = sum(file.bytes for file in files)
        with (
            bytes_bar("checking the model") as advance,
            ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        ):
            check = pool.map(lambda file: why_wrong(self.folder, file, contents=True), files)
            for file, wrong in zip(files, check, strict=True):
                if wrong:
                    pool.shutdown(cancel_futures=True)
                self._refuse(wrong)
                done += file.bytes
                advance(done, total)
        for table in self.tables:
            for shard in needed[table.key]:
                with self._open(shard) as (_, sections):
                    self._weights(sections, shard, table)

    def _names_for(self, model: nn.Module) -> Callable[[str], str]:
        return names_for(model, (table.key for table in self.tables))

    def _needed(self, table: ModelTable, into: TableRows) -> tuple[ModelShard, ...]:
        """Return the shards that may have rows of this rank."""
        shares, here = self._manifest.shares(table), into.share
        return tuple(shard for shard in table.shards if shares[shard.rank].meets(here))

    def check(self, model: nn.Module) -> None:
        """Compare names and shapes with a model's; a ValueError says what differs."""
        with self._open(self._manifest.dense) as (_, sections):
            dense = {name: list(section.shape) for name, section in sorted(sections.items())}
        tables = {table.key: [table.rows, table.dim] for table in self.tables}
        name_for = names_for(model, [*tables, *dense])
        saved = {name_for(name): shape for name, shape in (tables | dense).items()}
        refuse_other(self.folder, saved, model)

    def load(self, model: nn.Module) -> None:
        """Replace all weights of a model that was checked."""
        done, total = 0, bytes_of(model)
        with bytes_bar("loading the model") as advance:
            load_dense(model, self.dense)
            name_for, tables = self._names_for(model), tables_of(model)
            for saved in self.tables:
                into, shares = tables[name_for(saved.key)], self._manifest.shares(saved)
                for shard in self._needed(saved, into):
                    for numbers, piece in self._pieces(saved, shard):
                        rows = shares[shard.rank].rows_of(numbers)
                        into.collection.row_access.load_weights_at(into.name, rows, piece)
                        done += 4 * piece.numel()
                        advance(min(done, total), total)

    @property
    def dense(self) -> dict[str, Tensor]:
        """Everything but rows."""
        path = inside(self.folder, self._manifest.dense.file)
        return dict(sorted(read_tensors(path, remedy=OTHER_MODEL).items()))

    def weights(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a table in pieces: (first row, [n, dim]). Only `verify()` finds shards
        that have changed."""
        table = next(table for table in self.tables if table.key == key)
        shares = self._manifest.shares(table)
        if len(shares) > 1:
            parts = [self._of_rank(table, share.rank) for share in shares]
            yield from in_order(shares, parts, table.dim, rows_at_once(table.dim))
            return
        for shard in table.shards:
            for numbers, rows in self._pieces(table, shard):
                yield numbers.start, rows

    def _of_rank(self, table: ModelTable, rank: int) -> Iterator[Tensor]:
        for shard in table.shards:
            if shard.rank == rank:
                yield from (rows for _, rows in self._pieces(table, shard))

    def _pieces(self, table: ModelTable, shard: ModelShard) -> Iterator[tuple[slice, Tensor]]:
        with self._open(shard) as (file, sections):
            for place, rows in read_rows(file, self._weights(sections, shard, table)):
                first = shard.first + place
                yield slice(first, first + len(rows)), rows

    def _weights(
        self, sections: Mapping[str, Section], shard: ModelShard, table: ModelTable
    ) -> Section:
        found, expected = "nothing", f"F32 {[shard.rows, table.dim]}"
        if WEIGHTS in sections:
            found = f"{sections[WEIGHTS].dtype} {list(sections[WEIGHTS].shape)}"
        if found != expected:
            raise ValueError(
                f"{self.folder / shard.file} holds {found} as {WEIGHTS}, and by the manifest "
                f"{expected}; the file is damaged: {OTHER_MODEL}"
            )
        return sections[WEIGHTS]

    def _open(
        self, record: FileRecord
    ) -> AbstractContextManager[tuple[IO[bytes], dict[str, Section]]]:
        return open_tensors(inside(self.folder, record.file), remedy=OTHER_MODEL)
