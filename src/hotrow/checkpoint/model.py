"""A model's weights to disk and back. Rows pass in pieces, however large their tables are.

The only module that needs safetensors, and only when it saves or loads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.checkpoint.format import (
    DENSE,
    MANIFEST,
    WEIGHTS,
    Manifest,
    RowShard,
    SavedTable,
    read_manifest,
    to_json,
)
from hotrow.checkpoint.tensors import head, packed, pieces_of
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.support.files import Disk, FileRecord, inside, why_wrong
from hotrow.support.progress import bytes_bar

SHARD_BYTES = 256 << 20
_PIECE_BYTES = 16 << 20  # that are loaded at once
_TOLD = 3  # differences that a message names
_DAMAGED = "the file is damaged: take a copy that is whole, or train again"


def save_model(folder: str | Path, model: nn.Module) -> None:
    """Save a model's weights, those of all rows among them, as a new folder of safetensors.

    Rows are streamed into shards of 256 MiB. The manifest comes last: a folder without it is no
    model. A failure takes away what it has written. The state of optimizers is not saved.
    """
    safetensors()
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        raise ValueError(f"{folder} holds a model already, and none is replaced: save to another")
    write_model(Disk(folder), model)


def load_model(folder: str | Path, model: nn.Module) -> None:
    """Load what `save_model` has saved into a model of the same shape.

    Sizes, checksums, names and shapes are checked before any weight is replaced; a ValueError says
    what is wrong. The state of optimizers stays as it is.
    """
    saved = SavedModel(folder)
    saved.check(model)
    saved.verify()
    saved.load(model)


def safetensors(module: str = "safetensors") -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            "models are saved and loaded with safetensors, which is not installed; "
            "pip install safetensors"
        ) from error


def bytes_of(model: nn.Module) -> int:
    """What saving a model takes on the disk, but for a few kilobytes."""
    tables = sum(4 * each.rows * each.dim for each in tables_of(model).values())
    return tables + sum(each.numel() * each.element_size() for each in dense_state(model).values())


@dataclass(frozen=True)
class Table:
    """A table of one of the model's collections."""

    collection: EmbeddingBagCollection
    name: str
    rows: int
    dim: int

    @property
    def stored(self) -> Tensor:
        """All of its rows where they lie, with their state."""
        return self.collection.stored(self.name)

    @property
    def state(self) -> dict[str, int]:
        """Numbers of each piece of state behind the weights of a row."""
        return self.collection.state_widths(self.name)


def collections_of(model: nn.Module) -> dict[str, EmbeddingBagCollection]:
    """All collections of a model by name."""
    return {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, EmbeddingBagCollection)
    }


def tables_of(model: nn.Module) -> dict[str, Table]:
    """All tables by the names that their weights have in a state dict."""
    return {
        f"{name}.{each.key_of(table.name)}".lstrip("."): Table(
            each, table.name, table.num_embeddings, table.embedding_dim
        )
        for name, each in collections_of(model).items()
        for table in each.tables
    }


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without rows, which would not fit one."""
    with rows_apart(model):
        state = model.state_dict()
    for name, each in state.items():
        if not isinstance(each, Tensor):
            raise ValueError(
                f"{name} is a {type(each).__name__}, and only tensors are saved; take it out of "
                "the module's extra state"
            )
    return dict(state)


def rows_apart(model: nn.Module) -> ExitStack:
    """Inside, the model's state dict is the dense part's."""
    stack = ExitStack()
    for each in collections_of(model).values():
        stack.enter_context(each.rows_apart())
    return stack


def refuse_other(
    folder: Path, saved: Mapping[str, list[int]], here: Mapping[str, list[int]]
) -> None:
    """Compare names and shapes with a model's; a ValueError says what differs."""
    found = [f"{key} {shape} is saved alone" for key, shape in saved.items() if key not in here]
    found += [f"{key} {shape} is not saved" for key, shape in here.items() if key not in saved]
    found += [
        f"{key} is saved as {saved[key]}, and the model's is {here[key]}"
        for key in saved
        if key in here and saved[key] != here[key]
    ]
    if found:
        more = f"; {len(found) - _TOLD} more" if len(found) > _TOLD else ""
        raise ValueError(f"{folder} is of another model: {'; '.join(found[:_TOLD])}{more}")


# -- saving ----------------------------------------------------------------------------


def write_model(disk: Disk, model: nn.Module) -> None:
    """Write all files, the manifest last; what an error leaves behind is taken away."""
    from hotrow.support.version import __version__  # here, because the package imports this

    with bytes_bar("saving the model") as advance:
        files = _Files(disk, lambda done: advance(done, total))
        total = bytes_of(model)
        try:
            dense = files.write(DENSE, packed(dense_state(model)))
            tables = tuple(
                _save_table(files, number, key, table)
                for number, (key, table) in enumerate(tables_of(model).items())
            )
            manifest = Manifest(dense, tables, made_by=f"hotrow {__version__}")
            files.write(MANIFEST, [to_json(manifest).encode()])
        except BaseException:
            files.take_away()
            raise


class _Files:
    """The files of one model; tells how many bytes are written."""

    def __init__(self, disk: Disk, tell: Callable[[int], None]) -> None:
        self._disk, self._tell, self._done = disk, tell, 0
        self._names: list[str] = []

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> FileRecord:
        self._names.append(name)
        return self._disk.write(name, self._counted(parts))

    def _counted(self, parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for part in parts:
            yield part
            self._done += len(part)
            self._tell(self._done)

    def take_away(self) -> None:
        folder = self._disk.folder
        for name in self._names:
            (folder / name).unlink(missing_ok=True)
        for path in (folder / "rows", folder):
            with suppress(OSError):  # not there, or with files of others in it
                path.rmdir()


def _save_table(files: _Files, number: int, key: str, table: Table) -> SavedTable:
    weights = _Pieces(table.collection.weights(table.name))
    most = max(1, SHARD_BYTES // (4 * table.dim))
    shards = []
    for place, first in enumerate(range(0, table.rows, most)):
        rows = min(most, table.rows - first)
        name = f"rows/{number:03}-{place:05}.safetensors"
        file = files.write(name, _shard(key, first, rows, table.dim, weights))
        shards.append(RowShard(file.file, file.bytes, file.sha256, first, rows))
    return SavedTable(key, table.rows, table.dim, tuple(shards))


class _Pieces:
    """Rows that come in pieces of one size, and are taken in pieces of another."""

    def __init__(self, weights: Iterator[tuple[int, Tensor]]) -> None:
        self._weights = (piece for _, piece in weights)
        self._left: Tensor | None = None

    def take(self, count: int) -> Iterator[Tensor]:
        while count:
            piece = next(self._weights) if self._left is None else self._left
            self._left = piece[count:] if len(piece) > count else None
            yield piece[:count]
            count -= min(count, len(piece))


def _shard(
    key: str, first: int, rows: int, dim: int, weights: _Pieces
) -> Iterator[bytes | memoryview]:
    yield head({WEIGHTS: (torch.float32, [rows, dim])}, {"table": key, "first": str(first)})
    for piece in weights.take(rows):
        yield from pieces_of(piece)


# -- loading ---------------------------------------------------------------------------


class SavedModel:
    """A folder that `save_model` has made; its files are there, and as large as they should be."""

    def __init__(self, folder: str | Path) -> None:
        safetensors()
        self.folder = Path(folder)
        self._manifest = read_manifest(self.folder)
        for file in self._manifest.files:
            is_small = file is self._manifest.dense
            self._refuse(why_wrong(self.folder, file, contents=is_small))

    @property
    def tables(self) -> tuple[SavedTable, ...]:
        return self._manifest.tables

    def _refuse(self, wrong: str | None) -> None:
        if wrong:
            raise ValueError(f"{wrong}; take a copy of the model that is whole, or train again")

    def verify(self) -> None:
        """Read every file and compare checksums, then what shards say of themselves; a ValueError
        names what has changed."""
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
                with self._open(shard) as file:
                    self._weights(file, shard, table)

    def check(self, model: nn.Module) -> None:
        """Compare names and shapes with a model's; a ValueError says what differs."""
        here = {key: [table.rows, table.dim] for key, table in tables_of(model).items()}
        here |= {key: list(each.shape) for key, each in dense_state(model).items()}
        saved = {table.key: [table.rows, table.dim] for table in self.tables}
        saved |= self._dense_shapes()
        refuse_other(self.folder, saved, here)

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
        with self._open(self._manifest.dense) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def weights(self, key: str) -> Iterator[tuple[int, Tensor]]:
        """The rows of a table in pieces: (first row, [n, dim]). Of shards that were not verified
        nobody knows whether they have changed."""
        table = next(each for each in self.tables if each.key == key)
        for shard in table.shards:
            yield from self._pieces(shard, table)

    def _pieces(self, shard: RowShard, table: SavedTable) -> Iterator[tuple[int, Tensor]]:
        with self._open(shard) as file:
            weights = self._weights(file, shard, table)
            step = max(1, _PIECE_BYTES // (4 * table.dim))
            for first in range(0, shard.rows, step):
                yield shard.first + first, weights[first : first + step]

    def _weights(self, file: Any, shard: RowShard, table: SavedTable) -> Any:
        """Nothing of them is read yet."""
        found, expected = "nothing", f"F32 {[shard.rows, table.dim]}"
        if WEIGHTS in file.keys():  # noqa: SIM118
            weights = file.get_slice(WEIGHTS)
            found = f"{weights.get_dtype()} {weights.get_shape()}"
        if found != expected:
            raise ValueError(
                f"{self.folder / shard.file} holds {found} as {WEIGHTS}, and by the manifest "
                f"{expected}; {_DAMAGED}"
            )
        return weights

    def _dense_shapes(self) -> dict[str, list[int]]:
        with self._open(self._manifest.dense) as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118

    def _open(self, record: FileRecord) -> Any:
        path = inside(self.folder, record.file)
        library = safetensors()
        try:
            return library.safe_open(path, framework="pt")
        except library.SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file ({error}); {_DAMAGED}") from None
