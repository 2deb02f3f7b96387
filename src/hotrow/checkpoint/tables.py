"""Tables of a checkpoint or model to files that others read, and back. Rows pass in pieces.

    safetensors   a file for each table, its tensor named as in the model's state dict
    parquet       a file for each table: "row", and "weight", a list of as many numbers; its name
                  in the metadata as "table"
    npz           tables.npz, an array for each table

Beside them lie dense.safetensors, everything but rows, and export.json, which is written last: the
kind of export, tables with their shapes, every file with its size and SHA-256. Exports of earlier
versions have none: their files are read and their values checked, but bytes that have changed into
other numbers are not found.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from hotrow.checkpoint.folder import find_checkpoint
from hotrow.checkpoint.loading import Checkpoint
from hotrow.checkpoint.manifest import DENSE, MODEL_FILE, SavedTable
from hotrow.checkpoint.model import SavedModel
from hotrow.checkpoint.parts import tables_of
from hotrow.checkpoint.tensors import (
    packed,
    pieces_of,
    read_head,
    read_rows,
    read_tensors,
    row_not_finite,
    rows_at_once,
    table_parts,
)
from hotrow.support.files import Disk, FileRecord, checksum, inside, why_wrong
from hotrow.support.manifests import Count, check_files, check_format, converted, read_json
from hotrow.support.messages import few
from hotrow.support.progress import bytes_bar
from hotrow.support.version import __version__

TABLES = "tables.npz"
EXPORT = "export.json"
EXPORTED, SERVED = "exported tables", "model to serve"
_FORMAT = 1
_MODEL = "model.json"  # of a model to serve
_REMEDY = "export it again"
_NO_RECORD = (
    f"without {EXPORT}, as earlier versions wrote it: all values were read and are numbers, and "
    "rows and shapes fit, but there are no checksums to compare"
)
MODEL, RECORD = "model", "run.json"  # a run's
_HEADER_BYTES = 1 << 16  # of an array, more than any has
Pieces = Iterator[tuple[int, Tensor]]  # (first row, [n, dim])
Weights = SavedModel | Checkpoint


def open_weights(path: str | Path) -> Weights:
    """A checkpoint, a model, or a run's: of one that has finished its model, since checkpoints may
    be of earlier steps; of others the newest checkpoint, or else the model."""
    path = Path(path)
    if _has_saved_its_end(path):
        path = path / MODEL
    for folder in (path, path / MODEL):
        if (folder / MODEL_FILE).is_file() and not _has_checkpoint(path):
            model = SavedModel(folder)
            model.verify()
            return model
    if not _has_checkpoint(path):
        raise ValueError(
            f"{path} holds no checkpoint and no model; a run saves no model with run.save = false, "
            "or where its loss becomes NaN"
        )
    return Checkpoint(find_checkpoint(path))


def _has_saved_its_end(run: Path) -> bool:
    with suppress(OSError, ValueError, LookupError, TypeError):
        record = read_json(run / RECORD)
        is_last = record["outcome"] == "finished" and record["settings"]["run"]["save"]
        return bool(is_last) and (run / MODEL / MODEL_FILE).is_file()
    return False


def _has_checkpoint(path: Path) -> bool:
    with suppress(ValueError):
        return bool(find_checkpoint(path))
    return False


# -- out -------------------------------------------------------------------------------

_NO_NUMBERS = (
    "NaN or infinite values, as training that diverges leaves them; nothing was exported. Take "
    "an earlier checkpoint, or train again with lower learning rates"
)


def dense_numbers(weights: Weights) -> Mapping[str, Tensor]:
    """All but rows; an error where one is NaN. Infinity may be meant, as in a mask."""
    for key, each in weights.dense.items():
        if each.is_floating_point() and bool(each.isnan().any()):
            raise ValueError(f"{weights.folder}: {key} holds {_NO_NUMBERS}")
    return weights.dense


def row_numbers(weights: Weights, table: SavedTable) -> Pieces:
    """Yield the rows of a table; a ValueError names the first that is not finite."""
    for first, rows in weights.weights(table.key):
        if (row := row_not_finite(rows)) is not None:
            raise ValueError(
                f"{weights.folder}: row {first + row:,} of {table.key} holds {_NO_NUMBERS}"
            )
        yield first, rows


def export_tables(source: str | Path, folder: str | Path, *, to: str = "safetensors") -> None:
    """Write the tables of a checkpoint, model or run as files that need no hotrow.

    `to` is "safetensors", "parquet" or "npz". The folder must be empty or new; a failure leaves
    nothing in it, and so do weights that are not finite. Of a run that has finished its model is
    taken, of others the newest checkpoint, or else the model.
    """
    if to not in _WRITERS:
        raise ValueError(f"tables are written as {', '.join(_WRITERS)}, not as {to!r}")
    weights, folder = open_weights(source), Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give another folder, or empty it")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _export(weights, folder, to)
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        raise


def _export(weights: Weights, folder: Path, to: str) -> None:
    files = {DENSE: Disk(folder).write(DENSE, packed(dense_numbers(weights)))}
    total, done = sum(4 * each.rows * each.dim for each in weights.tables), 0

    with bytes_bar("exporting") as advance:

        def counted(table: SavedTable) -> Pieces:
            nonlocal done
            for first, piece in row_numbers(weights, table):
                yield first, piece
                done += 4 * piece.numel()
                advance(done, total)

        written = _WRITERS[to](folder, weights.tables, counted)
    tables = [
        ExportedTable(table.key, file.file, table.rows, table.dim)
        for table, file in zip(weights.tables, written, strict=True)
    ]
    files |= {file.file: file for file in written}  # npz: one for all
    write_export(folder, EXPORTED, tables, files.values())


Counted = Callable[[SavedTable], Pieces]


def _file_of(table: SavedTable, number: int) -> str:
    return f"{number:03}-" + re.sub(r"[^A-Za-z0-9_.-]", "_", table.key)[:100]


def _write_safetensors(
    folder: Path, tables: Sequence[SavedTable], pieces: Counted
) -> list[FileRecord]:
    return [
        Disk(folder).write(
            f"{_file_of(table, number)}.safetensors",
            table_parts(table.key, (table.rows, table.dim), (rows for _, rows in pieces(table))),
        )
        for number, table in enumerate(tables)
    ]


def _write_parquet(folder: Path, tables: Sequence[SavedTable], pieces: Counted) -> list[FileRecord]:
    written = []
    for number, table in enumerate(tables):
        fields = [("row", pa.int64()), ("weight", pa.list_(pa.float32(), table.dim))]
        schema = pa.schema(fields, metadata={"table": table.key, "rows": str(table.rows)})
        path = folder / f"{_file_of(table, number)}.parquet"
        with pq.ParquetWriter(path, schema) as writer:
            for first, piece in pieces(table):
                flat = pa.array(piece.contiguous().numpy().reshape(-1))
                lists = pa.FixedSizeListArray.from_arrays(flat, table.dim)
                rows = pa.array(np.arange(first, first + len(piece)))
                writer.write_table(pa.table([rows, lists], schema=schema))
        written.append(_record_of(path))
    return written


def _record_of(path: Path) -> FileRecord:
    return FileRecord(path.name, path.stat().st_size, checksum(path))


def _write_npz(folder: Path, tables: Sequence[SavedTable], pieces: Counted) -> list[FileRecord]:
    with zipfile.ZipFile(folder / TABLES, "w", zipfile.ZIP_STORED) as archive:
        for table in tables:
            with archive.open(f"{table.key}.npy", "w", force_zip64=True) as file:
                about = {"descr": "<f4", "fortran_order": False, "shape": (table.rows, table.dim)}
                np.lib.format.write_array_header_2_0(file, about)
                for _, piece in pieces(table):
                    for part in pieces_of(piece):
                        file.write(part)
    return [_record_of(folder / TABLES)] * len(tables)


_WRITERS = {"safetensors": _write_safetensors, "parquet": _write_parquet, "npz": _write_npz}


# -- in --------------------------------------------------------------------------------


def import_tables(source: str | Path, model: nn.Module) -> list[str]:
    """Load tables into a model from .safetensors, .parquet or .npz files, or a folder of them.

    A tensor or file belongs to the table whose state-dict name, or name alone, it has; what no
    table is named by is left aside. Gives the state-dict names of the tables that were loaded. Row
    state stays as it is; a state dict in memory is loaded by `model.load_state_dict`.
    """
    source, mine = Path(source), tables_of(model)
    if not source.exists():
        raise ValueError(f"there is no {source} to read tables from")
    names = {key: key for key in mine} | {table.name: key for key, table in mine.items()}
    names |= {f"{table.name}.weight": key for key, table in mine.items()}
    paths = sorted(source.iterdir()) if source.is_dir() else [source]
    found: list[str] = []
    for path in paths:
        if path.suffix not in _READERS:
            continue
        for name, shape, pieces in read_tables(path):
            if (key := names.get(name)) is None:
                continue
            table = mine[key]
            if list(shape) != [table.rows, table.dim]:
                raise ValueError(
                    f"{path} has {list(shape)} as {name}, and the table is "
                    f"[{table.rows}, {table.dim}]"
                )
            for first, piece in pieces:
                table.collection.load_weights(table.name, first, piece)
            found.append(key)
    if not found:
        raise ValueError(f"{source} has no table of this model: {few(mine)}")
    return found


Read = Iterator[tuple[str, Sequence[int], Pieces]]
Item = TypeVar("Item")


def read_tables(path: Path) -> Read:
    """The tables of a file: name, shape, and rows in pieces, which must be read before the next."""
    for name, shape, pieces in _readable(path, _READERS[path.suffix](path)):
        yield name, shape, _readable(path, pieces)


def _readable(path: Path, items: Iterator[Item]) -> Iterator[Item]:
    """What is read from a file. Each library has errors of its own for one that is damaged."""
    try:
        yield from items
    except Exception as error:
        what = str(error) or type(error).__name__
        raise ValueError(f"{path} cannot be read: {what}") from error


def _read_safetensors(path: Path) -> Read:
    with path.open("rb", buffering=0) as file:
        for name, section in read_head(file, path.stat().st_size)[1].items():
            yield name, section.shape, read_rows(file, section)


def _read_parquet(path: Path) -> Read:
    with pq.ParquetFile(path) as file:
        yield _table_of(path, file)


def _table_of(path: Path, file: Any) -> tuple[str, Sequence[int], Pieces]:
    schema = file.schema_arrow
    name = (schema.metadata or {}).get(b"table", path.stem.encode()).decode()
    kind: Any = schema.field("weight").type if "weight" in schema.names else None
    if "row" not in schema.names or not hasattr(kind, "list_size"):
        raise ValueError("it has no column row, or no weight that is a list of fixed size")

    def pieces() -> Pieces:
        step, first = rows_at_once(kind.list_size), 0
        for batch in file.iter_batches(batch_size=step, columns=["row", "weight"]):
            rows = batch.column(0).to_numpy(zero_copy_only=False)
            if not np.array_equal(rows, np.arange(first, first + len(rows))):
                raise ValueError("its rows are not all, in order")
            values = batch.column(1).flatten().to_numpy(zero_copy_only=False)
            weights = values.astype(np.float32).reshape(len(rows), kind.list_size)
            yield first, torch.from_numpy(weights)
            first += len(rows)

    return name, [file.metadata.num_rows, kind.list_size], pieces()


def _read_npz(path: Path) -> Read:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                shape, is_fortran, dtype = _npy_header(file)
                if len(shape) != 2 or is_fortran or dtype.hasobject or dtype.kind != "f":
                    continue
                yield name.removesuffix(".npy"), shape, _npy_pieces(file, shape, dtype)


def _npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    reading = np.lib.format
    begin = io.BytesIO(file.read(_HEADER_BYTES))  # numpy would believe how long it says it is
    version = reading.read_magic(begin)
    read = reading.read_array_header_1_0 if version == (1, 0) else reading.read_array_header_2_0
    found = read(begin)
    file.seek(begin.tell())
    return found


def _npy_pieces(file: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Pieces:
    step = rows_at_once(shape[1])
    for first in range(0, shape[0], step):
        count = min(step, shape[0] - first)
        data = file.read(count * shape[1] * dtype.itemsize)
        if len(data) < count * shape[1] * dtype.itemsize:
            raise ValueError("it ends before its last row")
        rows = np.frombuffer(data, dtype).astype(np.float32).reshape(count, shape[1])
        yield first, torch.from_numpy(rows)


_READERS = {".safetensors": _read_safetensors, ".parquet": _read_parquet, ".npz": _read_npz}
TABLE_FILES = tuple(_READERS)


# -- whether an export is as it was written ---------------------------------------------


@dataclass(frozen=True)
class ExportedTable:
    key: str  # its name in the file
    file: str
    rows: Count
    dim: Count


@dataclass(frozen=True)
class Export:
    """What export.json holds, beside the number of its format."""

    kind: str
    tables: tuple[ExportedTable, ...]
    files: tuple[FileRecord, ...]
    made_by: str = f"hotrow {__version__}"

    def __post_init__(self) -> None:
        check_files(file.file for file in self.files)
        _check_tables({table.file for table in self.tables})


@dataclass(frozen=True)
class _ServedTable:
    file: str
    embedding_dim: Count


@dataclass(frozen=True)
class _ServedModel:
    """What model.json holds that is needed here."""

    tables: tuple[_ServedTable, ...]

    def __post_init__(self) -> None:
        _check_tables({table.file for table in self.tables})


def _check_tables(files: set[str]) -> None:
    check_files(files)
    for name in files:
        if Path(name).suffix not in TABLE_FILES:
            raise ValueError(f"{name} is no file of tables")


@dataclass(frozen=True)
class VerifiedExport:
    kind: str
    files: int
    bytes: int
    note: str = ""  # what could not be checked


def write_export(
    folder: Path, kind: str, tables: Sequence[ExportedTable], files: Iterable[FileRecord]
) -> None:
    """Write the record of an export whose files are all in place."""
    export = Export(kind, tuple(tables), tuple(files))
    record = {"format": _FORMAT, **asdict(export)}
    Disk(folder).write(EXPORT, [json.dumps(record, indent=1).encode()])


def is_export(folder: Path) -> bool:
    """Whether a folder holds what `hotrow export` writes, with or without a record."""
    if (folder / EXPORT).is_file():
        return True
    return (folder / DENSE).is_file() and bool(_tables_in(folder) or _is_served(folder))


def _is_served(folder: Path) -> bool:
    return (folder / _MODEL).is_file() and (folder / "serve.py").is_file()


def _tables_in(folder: Path) -> list[Path]:
    found = (path for path in folder.iterdir() if path.suffix in TABLE_FILES)
    return sorted(path for path in found if path.name != DENSE)


def verify_export(folder: Path) -> VerifiedExport:
    """Compare an export with its record; a ValueError names what has changed."""
    if not (folder / EXPORT).is_file():
        return _verify_values(folder)
    where, record = str(folder / EXPORT), read_json(folder / EXPORT)
    check_format(record, _FORMAT, where=where, remedy=_REMEDY)
    export = converted(Export, record, where=where, remedy=_REMEDY)
    for file in export.files:
        if wrong := why_wrong(folder, file, contents=True):
            raise ValueError(f"{wrong}; {_REMEDY}")
    for table in export.tables:
        _check_shape(inside(folder, table.file), table)
    return VerifiedExport(export.kind, len(export.files), sum(file.bytes for file in export.files))


def _check_shape(path: Path, table: ExportedTable) -> None:
    shapes = {name: list(shape) for name, shape, _ in read_tables(path)}
    found, wanted = shapes.get(table.key), [table.rows, table.dim]
    if found != wanted:
        raise ValueError(f"{path} has {found} as {table.key}, and {wanted} was written; {_REMEDY}")


def _verify_values(folder: Path) -> VerifiedExport:
    """Read an export that has no record."""
    is_served = _is_served(folder)
    paths = _tables_of_served(folder) if is_served else _tables_in(folder)
    for path in paths:
        for name, shape, pieces in read_tables(path):
            rows = 0
            for first, piece in pieces:
                rows += len(piece)
                if (row := row_not_finite(piece)) is not None:
                    raise ValueError(
                        f"{path}: row {first + row:,} of {name} is not finite; {_REMEDY}"
                    )
            if rows != shape[0]:
                raise ValueError(f"{path} has {rows:,} of {shape[0]:,} rows of {name}; {_REMEDY}")
    dense = folder / DENSE
    for name, tensor in read_tensors(dense, remedy=_REMEDY).items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ValueError(f"{dense}: {name} holds NaN; {_REMEDY}")
    size = sum(path.stat().st_size for path in (*paths, dense))
    kind = SERVED if is_served else EXPORTED
    return VerifiedExport(kind, len(paths) + 1, size, _NO_RECORD)


def _tables_of_served(folder: Path) -> list[Path]:
    where, found = str(folder / _MODEL), read_json(folder / _MODEL)
    paths = []
    for table in converted(_ServedModel, found, where=where, remedy=_REMEDY).tables:
        path = inside(folder, table.file)
        if not path.is_file():
            raise ValueError(f"{path} is missing; {_REMEDY}")
        shapes = [shape for name, shape, _ in read_tables(path) if name == "weight"]
        if [math.prod(shape[1:]) for shape in shapes] != [table.embedding_dim]:
            raise ValueError(f"{path} holds no rows of {table.embedding_dim} numbers; {_REMEDY}")
        paths.append(path)
    return paths
