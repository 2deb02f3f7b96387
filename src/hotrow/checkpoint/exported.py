"""Whether an export is as it was written.

    export.json   kind, tables with their shapes, every file with its size and SHA-256

It is written last. Exports of earlier versions have none: their files are read, and what is in
them is checked, but bytes that have changed into other numbers are not found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotrow.checkpoint.format import DENSE, file_of
from hotrow.checkpoint.tables import TABLE_FILES, read_tables
from hotrow.checkpoint.tensors import read_tensors
from hotrow.support.files import Disk, FileRecord, inside, why_wrong
from hotrow.support.manifests import Reader, read_json

EXPORT = "export.json"
TABLES, SERVED = "exported tables", "model to serve"
_FORMAT = 1
_MODEL = "model.json"  # of a model to serve
_REMEDY = "export it again"
_NO_RECORD = (
    f"without {EXPORT}, as earlier versions wrote it: all values were read and are numbers, and "
    "rows and shapes fit, but there are no checksums to compare"
)


@dataclass(frozen=True)
class ExportedTable:
    key: str  # its name in the file
    file: str
    rows: int
    dim: int


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
    from hotrow.support.version import __version__  # here, because the package imports this

    found = {
        "format": _FORMAT,
        "kind": kind,
        "tables": [asdict(table) for table in tables],
        "files": [asdict(file) for file in files],
        "made_by": f"hotrow {__version__}",
    }
    Disk(folder).write(EXPORT, [json.dumps(found, indent=1).encode()])


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
    read = Reader(str(folder / EXPORT), remedy=_REMEDY)
    top = read.table(read_json(folder / EXPORT), "the record")
    if (version := read.number(top, "format")) != _FORMAT:
        raise ValueError(
            f"{folder / EXPORT} has format {version}, and this hotrow reads {_FORMAT}; update "
            "hotrow"
        )
    files = [file_of(read, each) for each in read.items(top, "files")]
    for file in files:
        if wrong := why_wrong(folder, file, contents=True):
            raise ValueError(f"{wrong}; {_REMEDY}")
    for each in read.items(top, "tables"):
        table = _table(read, each)
        _check_shape(inside(folder, table.file), table)
    size = sum(file.bytes for file in files)
    return VerifiedExport(read.text(top, "kind"), len(files), size)


def _table(read: Reader, found: Any) -> ExportedTable:
    found = read.table(found, "a table")
    rows, dim = read.number(found, "rows"), read.number(found, "dim")
    table = ExportedTable(read.text(found, "key"), read.path(found), rows, dim)
    if Path(table.file).suffix not in TABLE_FILES:
        raise read.wrong(f"{table.file} is no file of tables")
    return table


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
                if not bool(piece.isfinite().all()):
                    row = first + int((~piece.isfinite().all(1)).nonzero()[0])
                    raise ValueError(f"{path}: row {row:,} of {name} is not finite; {_REMEDY}")
            if rows != shape[0]:
                raise ValueError(f"{path} has {rows:,} of {shape[0]:,} rows of {name}; {_REMEDY}")
    dense = folder / DENSE
    with dense.open("rb") as file:
        try:
            tensors = read_tensors(file, dense.stat().st_size)
        except ValueError as error:
            raise ValueError(f"{dense} cannot be read: {error}; {_REMEDY}") from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ValueError(f"{dense}: {name} holds NaN; {_REMEDY}")
    size = sum(path.stat().st_size for path in (*paths, dense))
    kind = SERVED if is_served else TABLES
    return VerifiedExport(kind, len(paths) + 1, size, _NO_RECORD)


def _tables_of_served(folder: Path) -> list[Path]:
    read = Reader(str(folder / _MODEL), remedy=_REMEDY)
    top = read.table(read_json(folder / _MODEL), "the model")
    paths = []
    for each in read.items(top, "tables"):
        about = read.table(each, "a table")
        path, dim = inside(folder, read.path(about)), read.number(about, "embedding_dim")
        if not path.is_file() or path.suffix not in TABLE_FILES:
            raise ValueError(f"{path} is missing or no file of tables; {_REMEDY}")
        shapes = [shape for name, shape, _ in read_tables(path) if name == "weight"]
        if [math.prod(shape[1:]) for shape in shapes] != [dim]:
            raise ValueError(f"{path} holds no rows of {dim} numbers; {_REMEDY}")
        paths.append(path)
    return paths
