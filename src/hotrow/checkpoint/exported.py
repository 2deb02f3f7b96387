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

from hotrow.checkpoint.manifest import DENSE
from hotrow.checkpoint.tables import TABLE_FILES, read_tables
from hotrow.checkpoint.tensors import read_tensors, row_not_finite
from hotrow.support.files import Disk, FileRecord, inside, why_wrong
from hotrow.support.manifests import Count, check_files, check_format, converted, read_json
from hotrow.support.version import __version__

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
    kind = SERVED if is_served else TABLES
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
