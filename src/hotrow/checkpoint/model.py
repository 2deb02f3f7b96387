"""Save and load the weights of a model. Rows are written and read in pieces."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO

import torch
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
from hotrow.checkpoint.parts import dense_state, refuse_other, rows_apart, tables_of
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
from hotrow.support.files import Disk, FileRecord, inside, why_wrong
from hotrow.support.progress import bytes_bar
from hotrow.support.version import __version__


def save_model(folder: str | Path, model: nn.Module) -> None:
    """Save a model's weights, including all rows, as a new folder of safetensors.

    Rows are streamed into shards of 256 MiB. The manifest is written last: a folder without it is
    no model. A failure removes what it has written. The state of optimizers is not saved.
    """
    folder = Path(folder)
    if (folder / MODEL_FILE).exists():
        raise ValueError(
            f"{folder} holds a model already, which is not replaced; save to another folder"
        )
    names: list[str] = []
    try:
        _write(Disk(folder), names, model)
    except BaseException:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        for path in (folder / "rows", folder):
            with suppress(OSError):  # not there, or with files of others in it
                path.rmdir()
        raise


def load_model(folder: str | Path, model: nn.Module) -> None:
    """Load weights that `save_model` has saved into a model of the same shape.

    Sizes, checksums, names and shapes are checked before any weight is replaced; a ValueError says
    what is wrong. The state of optimizers stays as it is.
    """
    saved = SavedModel(folder)
    saved.check(model)
    saved.verify()
    saved.load(model)


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a saved model, up to a few kilobytes."""
    tables = sum(4 * table.rows * table.dim for table in tables_of(model).values())
    return tables + sum(tensor.nbytes for tensor in dense_state(model).values())


# -- saving ----------------------------------------------------------------------------


def _write(disk: Disk, names: list[str], model: nn.Module) -> None:
    """Write all files, the manifest last; their names are added to `names`."""
    total, done = bytes_of(model), 0
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

        dense, tables = write(DENSE, packed(dense_state(model))), tables_of(model)
        shards: dict[str, list[ModelShard]] = {key: [] for key in tables}
        for piece in cut_tables(tables, with_state=False):
            shape = (piece.span, piece.width)
            parts = table_parts(WEIGHTS, shape, _weights(piece), metadata=piece.metadata)
            shards[piece.key].append(
                ModelShard(**vars(write(piece.file, parts)), first=piece.first, rows=piece.span)
            )
        records = tuple(
            ModelTable(key, table.rows, table.dim, tuple(shards[key]))
            for key, table in tables.items()
        )
        manifest = ModelManifest(dense, records, made_by=f"hotrow {__version__}")
        write(MODEL_FILE, [to_json(manifest)])


def _weights(piece: ShardRows) -> Iterator[Tensor]:
    table = piece.table
    for part in spans(piece.first, piece.last, rows_at_once(piece.width)):
        rows = torch.arange(part.start, part.stop)
        for _, weights in table.collection.weights_at(table.name, rows):
            yield weights


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

    def verify(self) -> None:
        """Compare the checksums of all files and the shapes of shards; a ValueError says what is
        wrong."""
        files, done = self._manifest.files, 0
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
            for shard in table.shards:
                with self._open(shard) as (_, sections):
                    self._weights(sections, shard, table)

    def check(self, model: nn.Module) -> None:
        """Compare names and shapes with a model's; a ValueError says what differs."""
        saved = {table.key: [table.rows, table.dim] for table in self.tables}
        with self._open(self._manifest.dense) as (_, sections):
            saved |= {name: list(section.shape) for name, section in sorted(sections.items())}
        refuse_other(self.folder, saved, model)

    def load(self, model: nn.Module) -> None:
        """Replace all weights of a model that was checked."""
        done, total = 0, bytes_of(model)
        with bytes_bar("loading the model") as advance:
            with rows_apart(model):
                model.load_state_dict(self.dense)
            tables = tables_of(model)
            for saved in self.tables:
                into = tables[saved.key]
                for first, piece in self.weights(saved.key):
                    into.collection.load_weights(into.name, first, piece)
                    done += 4 * piece.numel()
                    advance(done, total)

    @property
    def dense(self) -> dict[str, Tensor]:
        """Everything but rows."""
        path = inside(self.folder, self._manifest.dense.file)
        return dict(sorted(read_tensors(path, remedy=OTHER_MODEL).items()))

    def weights(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of a table in pieces: (first row, [n, dim]). Only `verify()` finds shards
        that have changed."""
        table = next(table for table in self.tables if table.key == key)
        for shard in table.shards:
            with self._open(shard) as (file, sections):
                for first, rows in read_rows(file, self._weights(sections, shard, table)):
                    yield shard.first + first, rows

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
