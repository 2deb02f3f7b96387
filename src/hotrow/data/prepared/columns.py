"""Columns of any name: a TOML file says what they are. CSV and Parquet become samples alike."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
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
    pyarrow,
    split_texts,
    value_type,
)
from hotrow.data.prepared.format import Feature, Schema
from hotrow.data.prepared.rows import Rows, Samples
from hotrow.support import toml

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
    lists: Mapping[str, str] = field(default_factory=dict)  # CSV: what stands between their values

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
    found = toml.read(path)
    tables = _of_columns(found, "tables", f"{path}: [tables] gives the name of a table")
    lists = _of_columns(found, "lists", f"{path}: [lists] gives what stands between values")
    known = {key: getattr(Columns, key, "") for key in Columns.__dataclass_fields__}
    for key in found:
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}; there are {', '.join(known)}")
        wants_text = isinstance(known[key], str)
        right = isinstance(found[key], str) if wants_text else _is_texts(found[key])
        if not right:
            raise ValueError(f"{path}: {key} must be {'text' if wants_text else 'a list of texts'}")
        found[key] = found[key] if wants_text else tuple(found[key])
    try:
        return Columns(**found, tables=tables, lists=lists)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _of_columns(found: dict[str, Any], key: str, what: str) -> dict[str, str]:
    texts = found.pop(key, {})
    if not isinstance(texts, dict) or not all(isinstance(each, str) for each in texts.values()):
        raise ValueError(f"{what} for a column")
    return texts


def _is_texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, str) for each in found)


class Described:
    """Columns as samples."""

    def __init__(self, columns: Columns, *, jagged: Sequence[str], is_text: bool) -> None:
        """`jagged`: the columns of lists; in CSV they are texts, which are split."""
        self._columns, self._is_text = columns, is_text
        self._signed: set[str] = set()  # tables whose columns may hold negative numbers
        self.schema = Schema(
            columns.label,
            columns.dense,
            tuple(
                Feature(name, columns.table(name), name in jagged) for name in columns.categories
            ),
        )
        self.describes: Mapping[str, Any] = {"columns": _plain(columns)}

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
            except pyarrow().ArrowInvalid as error:
                raise ValueError(
                    f"column {feature.name!r} of {column.type} has values that are too large: "
                    f"{error}; cast it to text where the file is written"
                ) from None
            rows.add_keys(feature.name, keys, lengths)
        return rows.samples(label, dense)

    def _numbers(self, rows: Rows, name: str) -> NDArray[np.float64]:
        column = rows.columns[name]
        values = floats(none_if_empty(column) if self._is_text else column)
        wrong = np.abs(values) > _LARGEST  # infinity, too
        rows.refuse(wrong, name, "not a number, or too large for one of 32 bits")
        values = np.where(wrong | np.isnan(values), 0, values)
        if self._is_text:
            values += 0.0  # "-0" is 0
        return np.log1p(np.maximum(values, 0)) if name in self._columns.log else values


def _plain(columns: Columns) -> dict[str, Any]:
    found = asdict(columns)
    if not columns.lists:
        del found["lists"]  # folders made before there were any are the same
    return {key: list(each) if isinstance(each, tuple) else each for key, each in found.items()}


class Csv(Described):
    """A layout of lines with a header, which names the columns. Quotes may be around fields; an
    end of line within them is not understood."""

    name, key_dtype, quotes = "csv", "uint64", True

    def __init__(self, columns: Columns, path: Path, first_line: bytes) -> None:
        super().__init__(columns, jagged=list(columns.lists), is_text=True)
        self.header: bytes | None = first_line
        self.separator = columns.separator
        try:
            text = first_line.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"{path} does not begin with a header in UTF-8") from None
        try:
            names = next(csv.reader([text], delimiter=columns.separator), [])
        except csv.Error as error:
            raise ValueError(f"{path} does not begin with a header: {error}") from None
        hint = (
            f"; the first line is to name the columns, with {columns.separator!r} between, or what "
            "`separator` is in the file of --columns"
        )
        self.width = len(names)
        self.places: Mapping[str, int] = {
            name: place_of(name, names, path, hint) for name in columns.used
        }


class Parquet(Described):
    """The columns of Parquet files. Those of lists become jagged features."""

    def __init__(self, columns: Columns, paths: Sequence[Path]) -> None:
        types = [_types(path, columns) for path in paths]
        kinds = [
            {name: _kind(path, name, each[name]) for name in columns.categories}
            for path, each in zip(paths, types, strict=True)
        ]
        for name in columns.lists:
            if any(each[name] != NOTHING and not each[name].startswith(_LISTS) for each in kinds):
                raise ValueError(f"[lists] splits texts of CSV alone: {name!r} must hold lists")
        for name in columns.categories:
            held = {each[name]: path for each, path in zip(kinds, paths, strict=True)}
            held.pop(NOTHING, None)
            if len(held) > 1:
                raise ValueError(
                    f"one value of {name!r} would have two rows: it holds "
                    + " and ".join(f"{kind} in {path}" for kind, path in held.items())
                )
        _check_tables(columns, kinds)
        jagged = {name for each in kinds for name in each if each[name].startswith(_LISTS)}
        super().__init__(columns, jagged=list(jagged), is_text=False)
        self._signed = {
            columns.table(name)
            for each in types
            for name in columns.categories
            if may_be_negative(value_type(each[name]))
        }


def _types(path: Path, columns: Columns) -> dict[str, Any]:
    """Return the types of the columns, of which all but categories must hold numbers."""
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
                f"{path}: column {name!r} of {types[name]} holds no numbers; cast it where the "
                "file is written"
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
    """Columns that read one table must hold one kind of values."""
    held: dict[str, tuple[str, str]] = {}
    for name in columns.categories:
        for each in kinds:
            kind = each[name].removeprefix(_LISTS)
            if kind == NOTHING:
                continue
            other, before = held.setdefault(columns.table(name), (name, kind))
            if kind != before:
                raise ValueError(
                    f"{other!r} holds {before} and {name!r} {kind}, so one value would have two "
                    f"rows of their table {columns.table(name)!r}; write both alike, or give each "
                    "a table of its own"
                )
