"""CSV and Parquet files with columns of any name: a TOML file says what the columns are."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data.prepared.arrow import (
    NOTHING,
    column_keys,
    floats,
    is_lists,
    kind_of,
    lists_of,
    may_be_negative,
    may_be_numbers,
    none_if_empty,
    open_parquet,
    place_of,
    split_texts,
    value_type,
)
from hotrow.data.prepared.format import Feature, Schema
from hotrow.data.prepared.pieces import Piece, Place, Rows, Samples, Source, file_by_file
from hotrow.data.prepared.text import TextFiles, TextSource, first_line
from hotrow.support import toml
from hotrow.support.manifests import in_words

_LISTS = "lists of "
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Columns:
    """What the columns are.

    label = "clicked"
    dense = ["price", "age"]
    log = ["price"]
    categories = ["user", "item", "last_item"]
    separator = ","
    [tables]
    last_item = "item"
    [lists]
    tags = "|"
    """

    label: str = ""
    dense: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    separator: str = ","
    tables: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, str] = field(default_factory=dict)  # CSV: the separator of a list's values

    def __post_init__(self) -> None:
        if not self.label:
            raise ValueError('say which column is the label: label = "clicked"')
        if not self.categories:
            raise ValueError('say which columns are categories: categories = ["user", "item"]')
        names = [self.label, *self.dense, *self.categories]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"column {name!r} is named twice")
        for name in self.categories:
            if "." in (table := self.table(name)):
                raise ValueError(
                    f"a table's name must hold no '.', and {table!r} does; give column {name!r} "
                    f"another in [tables], such as {table.replace('.', '_')!r}"
                )
        for name in set(self.log) - set(self.dense):
            raise ValueError(f"log names {name!r}, which is none of the dense columns")
        for name in set(self.tables) - set(self.categories):
            raise ValueError(f"[tables] names {name!r}, which is none of the categories")
        for name in set(self.lists) - set(self.categories):
            raise ValueError(f"[lists] names {name!r}, which is none of the categories")
        for name, mark in (("separator", self.separator), *self.lists.items()):
            if len(mark) != 1 or not mark.isascii() or mark in '"\r\n':
                raise ValueError(f"{name}: one character separates values, not {mark!r}")
            if name in self.lists and mark == self.separator:
                raise ValueError(f"{name}: {mark!r} stands between columns already")

    def table(self, category: str) -> str:
        return self.tables.get(category, category)

    @property
    def used(self) -> list[str]:
        return [self.label, *self.dense, *self.categories]


def read_columns(path: Path) -> Columns:
    settings, known = toml.read(path), Columns.__dataclass_fields__
    for key in settings:
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}; there are {', '.join(known)}")
    try:
        return msgspec.convert(settings, Columns)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {in_words(error)}") from None


class Described(Source):
    """Makes samples of the columns that a `Columns` describes."""

    key_dtype = "uint64"
    first_line = 1  # of CSV and Parquet files alike, so that both are split alike
    _is_text = False  # whether columns are texts, as in CSV

    def _describe(
        self, columns: Columns, *, jagged: Collection[str], signed: Collection[str] = ()
    ) -> None:
        """`jagged` are the columns of lists; in CSV they are texts, which are split. `signed` are
        the tables whose columns may hold negative numbers."""
        self._columns, self._signed = columns, signed
        self.schema = Schema(
            columns.label,
            columns.dense,
            tuple(
                Feature(name, columns.table(name), name in jagged) for name in columns.categories
            ),
        )
        self.describes = {"columns": _plain(columns)}

    def samples(self, rows: Rows) -> Samples:
        columns = self._columns
        label = rows.labels(columns.label)
        dense = np.empty((len(rows), len(columns.dense)), np.float32)
        for place, name in enumerate(columns.dense):
            dense[:, place] = self._numbers(rows, name)
        for feature in self.schema.features:
            column, lengths = rows.columns[feature.name], None
            if feature.jagged and self._is_text:
                column, lengths = split_texts(column, columns.lists[feature.name])
            elif feature.jagged:
                column, lengths = lists_of(column)
            try:
                keys = column_keys(column, has_negative=feature.table in self._signed)
            except pa.ArrowInvalid as error:
                raise ValueError(
                    f"column {feature.name!r} of {column.type} has values that are too large: "
                    f"{error}; cast it to text where the file is written"
                ) from None
            rows.add_keys(feature.name, keys, lengths)
        return rows.samples(label, dense)

    def _numbers(self, rows: Rows, name: str) -> NDArray[np.float64]:
        column = rows.columns[name]
        values = floats(none_if_empty(column) if self._is_text else column)
        wrong = np.abs(values) > _LARGEST  # also infinity
        rows.refuse(wrong, name, "not a number, or too large for one of 32 bits")
        values = np.where(wrong | np.isnan(values), 0, values)
        if self._is_text:
            values += 0.0  # "-0" is 0
        return np.log1p(np.maximum(values, 0)) if name in self._columns.log else values


def _plain(columns: Columns) -> dict[str, Any]:
    settings = asdict(columns)
    if not columns.lists:
        del settings["lists"]  # folders made before this key existed stay the same
    return {key: list(held) if isinstance(held, tuple) else held for key, held in settings.items()}


class Csv(Described, TextSource):
    """CSV files whose header names the columns. Fields may be quoted, but no line end may stand
    within quotes."""

    name, quotes, _is_text = "csv", True, True

    def __init__(self, columns: Columns, paths: Sequence[Path], *, piece_bytes: int) -> None:
        TextFiles(paths)  # refuses missing files before the first line is read
        self.header = first_line(paths[0])
        self.separator = columns.separator
        names = self._names(paths[0], self.header)
        hint = (
            f"; the first line is to name the columns, with {columns.separator!r} between, or what "
            "`separator` is in the file of --columns"
        )
        self.width = len(names)
        self.places = {name: place_of(name, names, paths[0], hint) for name in columns.used}
        self._describe(columns, jagged=columns.lists)
        super().__init__(paths, piece_bytes=piece_bytes)

    def _names(self, path: Path, header: bytes) -> list[str]:
        try:
            text = header.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"{path} does not begin with a header in UTF-8") from None
        try:
            return next(csv.reader([text], delimiter=self.separator), [])
        except csv.Error as error:
            raise ValueError(f"{path} does not begin with a header: {error}") from None


class ParquetSource(Described):
    """Parquet files, by row groups. Columns of lists become jagged features."""

    name = "parquet"

    def __init__(self, columns: Columns, paths: Sequence[Path], *, piece_samples: int) -> None:
        self.paths, self._piece_samples = list(paths), piece_samples
        types = [_types(path, columns) for path in paths]
        kinds = [
            {name: _kind(path, name, held[name]) for name in columns.categories}
            for path, held in zip(paths, types, strict=True)
        ]
        for name in columns.lists:
            if any(kind[name] != NOTHING and not kind[name].startswith(_LISTS) for kind in kinds):
                raise ValueError(f"[lists] splits texts of CSV alone: {name!r} must hold lists")
        for name in columns.categories:
            held = {kind[name]: path for kind, path in zip(kinds, paths, strict=True)}
            held.pop(NOTHING, None)
            if len(held) > 1:
                raise ValueError(
                    f"one value of {name!r} would have two rows: it holds "
                    + " and ".join(f"{kind} in {path}" for kind, path in held.items())
                )
        _check_tables(columns, kinds)
        signed = {
            columns.table(name)
            for held in types
            for name in columns.categories
            if may_be_negative(value_type(held[name]))
        }
        jagged = {name for kind in kinds for name in kind if kind[name].startswith(_LISTS)}
        self._describe(columns, jagged=jagged, signed=signed)

    def pieces(self, start: Place | None = None) -> Iterator[Piece]:
        return file_by_file(len(self.paths), self._file, start or Place(line=self.first_line))

    def _file(self, place: Place) -> Iterator[Piece]:
        """Yield parts of row groups; `offset` counts row groups."""
        path = self.paths[place.file]
        with open_parquet(path) as file:
            size, total = path.stat().st_size, max(1, file.metadata.num_rows)
            at = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if at + rows <= place.file_line:
                    at += rows
                    continue
                for batch in self._batches(file, path, group):
                    first, at = at, at + len(batch)
                    if first < place.file_line:
                        continue  # a run before this one has read it
                    after = Place(place.file, group, at, place.line + len(batch))
                    yield Piece(place, after, batch, size * at // total)
                    place = after

    def _batches(self, file: Any, path: Path, group: int) -> Iterator[Any]:
        try:
            yield from file.iter_batches(
                batch_size=self._piece_samples, row_groups=[group], columns=self._columns.used
            )
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path}, row group {group}: cannot be read: {error}") from error

    def parse(self, piece: Piece) -> Samples:
        batch = piece.data
        columns = {name: batch.column(name) for name in self._columns.used}
        try:
            return self.samples(Rows(columns, np.arange(len(batch))))
        except ValueError as error:
            raise ValueError(f"{self.paths[piece.place.file]}: {error}") from error


def _types(path: Path, columns: Columns) -> dict[str, Any]:
    """Return the types of the columns; all but categories must hold numbers."""
    with open_parquet(path) as file:
        schema = file.schema_arrow
        for name in columns.used:
            place_of(name, schema.names, path)
        types = {name: schema.field(name).type for name in columns.used}
    for name in (columns.label, *columns.dense):
        if is_lists(types[name]):
            raise ValueError(f"{path}: {name!r} holds lists; only categories may")
        if not may_be_numbers(types[name]):
            raise ValueError(
                f"{path}: column {name!r} of {types[name]} does not hold numbers; cast it where "
                "the file is written"
            )
    return types


def _kind(path: Path, name: str, held: Any) -> str:
    """Return what a category holds, in words."""
    kind = kind_of(value_type(held))
    if kind is None:
        raise ValueError(
            f"{path}: column {name!r} of {held} cannot be a category: only whole numbers and texts "
            "can, and lists of them; cast it to int64 or to text where the file is written"
        )
    return _LISTS + kind if is_lists(held) else kind


def _check_tables(columns: Columns, kinds: list[dict[str, str]]) -> None:
    """Refuse columns of one table that hold different kinds of values."""
    held: dict[str, tuple[str, str]] = {}
    for name in columns.categories:
        for kinds_of_file in kinds:
            kind = kinds_of_file[name].removeprefix(_LISTS)
            if kind == NOTHING:
                continue
            other, before = held.setdefault(columns.table(name), (name, kind))
            if kind != before:
                raise ValueError(
                    f"{other!r} holds {before} and {name!r} {kind}, so one value would have two "
                    f"rows of their table {columns.table(name)!r}; write both alike, or give each "
                    "a table of its own"
                )
