"""Columns of any name: a TOML file says what they are. CSV and Parquet are read alike."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared.arrow import is_lists, pyarrow, value_type
from hotrow.data.prepared.disk import Disk
from hotrow.data.prepared.fields import (
    EXAMPLES,
    BadLine,
    BadLines,
    Checks,
    Fields,
    Judge,
    Values,
    hashed_at,
    one,
    text_keys,
    words_at,
)
from hotrow.data.prepared.format import Feature, Schema
from hotrow.data.prepared.layouts import Samples, label_of, no_label, only, samples_of
from hotrow.data.prepared.parallel import Cores
from hotrow.data.prepared.settings import Watch
from hotrow.data.prepared.text import Piece, Place, file_by_file
from hotrow.data.prepared.vocabulary import Keys
from hotrow.support import toml
from hotrow.support.messages import few

_MISSING = np.uint64(0x9D39247E33776D41)  # the key of a value that is not there, and of no other
_FIRST_NEGATIVE = np.uint64(1 << 63)  # the bits of the least number of 64 bits with a sign
_UNIT = "\x1f"  # stands between fields whose quotes were taken off
_LISTS = "lists of "
_NOTHING = "nothing"  # what a Parquet file says of a column without any value
_LARGEST = float(np.finfo(np.float32).max)
_PIECE_SAMPLES = 1 << 14


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
            if len(mark) != 1 or not mark.isascii() or mark in '"\r\n' + _UNIT:
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


class Csv:
    """A layout of lines with a header, which names the columns. Quotes may be around fields; an
    end of line within them is not understood."""

    name = "csv"
    key_dtype = "uint64"

    def __init__(self, columns: Columns, path: Path, first_line: bytes) -> None:
        self.header: bytes | None = first_line
        self._columns = columns
        try:
            text = first_line.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"{path} does not begin with a header in UTF-8") from None
        try:
            self._names = next(csv.reader([text], delimiter=columns.separator), [])
        except csv.Error as error:
            raise ValueError(f"{path} does not begin with a header: {error}") from None
        hint = (
            f"; the first line is to name the columns, with {columns.separator!r} between, or what "
            "`separator` is in the file of --columns"
        )
        self._places = {name: _place(name, self._names, path, hint) for name in columns.used}
        features = (
            Feature(name, columns.table(name), name in columns.lists) for name in columns.categories
        )
        self.schema = Schema(columns.label, columns.dense, tuple(features))
        self.describes = {"columns": _plain(columns)}

    def parse(self, text: bytes) -> Samples:
        columns, separator = self._columns, self._columns.separator
        broken: tuple[BadLine, ...] = ()
        if b'"' in text:
            text, broken = _without_quotes(text, separator)
            separator = _UNIT
        fields = Fields(text, separator=separator, columns=len(self._names))
        fields.bad = fields.bad.told_by(broken)
        judge = Judge(fields)
        label = label_of(fields, judge, column=self._places[columns.label])
        dense = np.empty((len(fields), len(columns.dense)), np.float32)
        for place, name in enumerate(columns.dense):
            where = one(self._places[name])
            values, _, wrong = fields.numbers(where)
            wrong = wrong | (np.abs(values) > _LARGEST)
            judge.refuse(wrong, where, partial(_no_number, name))
            right = np.where(wrong[0], 0, values[0])
            dense[:, place] = _number(right, log=name in columns.log)
        keys: dict[str, Keys] = {}
        lengths, checks = {}, {}
        for name in columns.categories:
            if name in columns.lists:
                found, lengths[name] = fields.lists(self._places[name], columns.lists[name])
            else:
                found = fields.texts(one(self._places[name]))
            keys[name] = found.keys.reshape(-1)
            if found.checks is not None:
                checks[name] = found.checks.reshape(-1)
        return samples_of(fields, judge, label, dense, keys, lengths, checks)


def _without_quotes(text: bytes, separator: str) -> tuple[bytes, tuple[BadLine, ...]]:
    """The same lines and fields, and what is wrong with the first lines that have wrong quotes:
    these are empty now. Lines with quotes take a turn of Python each."""
    found, broken = [], []
    for number, line in enumerate(text.removesuffix(b"\n").split(b"\n")):
        if b'"' not in line:
            found.append(line.replace(separator.encode(), _UNIT.encode()))
            continue
        decoded = line.removesuffix(b"\r").decode("utf-8", errors="surrogateescape")
        try:
            fields = next(csv.reader([decoded], delimiter=separator, strict=True))
        except csv.Error as error:
            fields = []
            why = str(error)
            if "end of data" in why:
                why = (
                    "they do not close before its end, and a line end within quotes is not "
                    "understood; write such texts as Parquet, or without it"
                )
            broken.append(BadLine(number, f"its quotes are wrong: {why}"))
        found.append(_UNIT.join(fields).encode("utf-8", errors="surrogateescape"))
    return b"\n".join(found) + b"\n", tuple(broken[:EXAMPLES])


def _place(name: str, names: list[str], path: Path, hint: str = "") -> int:
    if name not in names:
        for near in names:
            if near.strip() == name:
                hint = f"; {near!r} has blanks: name it so, or take them out"
        raise ValueError(f"{path} has no column {name!r}; it has {few(names)}{hint}")
    if names.count(name) > 1:
        raise ValueError(f"{path} has {names.count(name)} columns {name!r}: which is meant?")
    return names.index(name)


def _plain(columns: Columns) -> dict[str, Any]:
    found = asdict(columns)
    if not columns.lists:
        del found["lists"]  # folders made before there were any are the same
    return {key: list(each) if isinstance(each, tuple) else each for key, each in found.items()}


def _no_number(column: str, _: int, found: Any) -> str:
    return f"{column} is {found!r}, not a number, or too large for one of 32 bits"


def _number(values: NDArray[np.float64], *, log: bool) -> NDArray[np.float32]:
    return (np.log1p(np.maximum(values, 0)) if log else values).astype(np.float32)


class ParquetSource:
    """Parquet files, by row groups. Columns of lists become jagged features."""

    name = "parquet"
    key_dtype = "uint64"
    times = False
    first_line, header_lines = 1, 0  # as in CSV files, so that both are split alike

    def __init__(self, columns: Columns, paths: Sequence[Path]) -> None:
        self._columns, self.paths = columns, list(paths)
        self.describes: dict[str, Any] = {"columns": _plain(columns)}
        self._signed: set[str] = set()  # tables whose columns may hold negative numbers
        kinds = [_kinds(path, columns, self._signed) for path in self.paths]
        for name in columns.lists:
            if any(each[name] != _NOTHING and not each[name].startswith(_LISTS) for each in kinds):
                raise ValueError(f"[lists] splits texts of CSV alone: {name!r} must hold lists")
        for name in columns.categories:
            held = {each[name]: path for each, path in zip(kinds, self.paths, strict=True)}
            held.pop(_NOTHING, None)
            if len(held) > 1:
                raise ValueError(
                    f"one value of {name!r} would have two rows: it holds "
                    + " and ".join(f"{kind} in {path}" for kind, path in held.items())
                )
        _check_tables(columns, kinds)
        self.schema = Schema(
            columns.label,
            columns.dense,
            tuple(
                Feature(
                    name, columns.table(name), any(each[name].startswith(_LISTS) for each in kinds)
                )
                for name in columns.categories
            ),
        )

    def ready(self, disk: Disk, cores: Cores, watch: Watch) -> None:
        """Nothing is to be done before."""

    def pieces(self, start: Place | None = None) -> Iterator[Piece]:
        return file_by_file(len(self.paths), self._file, start or Place(line=self.first_line))

    def _file(self, place: Place) -> Iterator[Piece]:
        """Each piece is a part of one row group; `offset` counts row groups."""
        path = self.paths[place.file]
        with _opened(path) as file:
            size, total = path.stat().st_size, max(1, file.metadata.num_rows)
            groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            at = 0
            for group, rows in enumerate(groups):
                if at + rows <= place.file_line:
                    at += rows
                    continue
                for batch in self._batches(file, path, group):
                    first, at = at, at + len(batch)
                    if first < place.file_line:
                        continue  # before a stop
                    line = place.line + len(batch)
                    after = Place(place.file, group, at, line)
                    yield Piece(place, after, batch, size * at // total)
                    place = after

    def _batches(self, file: Any, path: Path, group: int) -> Iterator[Any]:
        arrow = pyarrow()
        try:
            yield from file.iter_batches(
                batch_size=_PIECE_SAMPLES, row_groups=[group], columns=self._columns.used
            )
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}, row group {group}: cannot be read: {error}") from error

    def parse(self, piece: Piece) -> Samples:
        try:
            return self._parse(piece.data)
        except ValueError as error:
            raise ValueError(f"{self.paths[piece.place.file]}: {error}") from error

    def _parse(self, batch: Any) -> Samples:
        columns = self._columns
        wrong = np.zeros(len(batch), np.bool_)
        first: list[BadLine] = []

        def refuse(found: NDArray[np.bool_], why: Callable[[Any], str], values: Any) -> None:
            for place in np.flatnonzero(found & ~wrong)[:EXAMPLES].tolist():
                first.append(BadLine(place, why(values[place].as_py())))
            wrong[:] |= found

        column = batch.column(columns.label)
        values, missing = _floats(column, truths=True)
        refuse(missing | ((values != 0) & (values != 1)), no_label, column)
        label = np.where(values == 1, 1, 0).astype(np.uint8)
        dense = np.empty((len(batch), len(columns.dense)), np.float32)
        for place, name in enumerate(columns.dense):
            column = batch.column(name)
            values, missing = _floats(column)
            values = np.where(missing | np.isnan(values), 0, values)
            wrong_here = ~(np.abs(values) <= _LARGEST)  # also what is no number
            refuse(wrong_here, partial(_no_number, name, 0), column)
            dense[:, place] = _number(np.where(wrong_here, 0, values), log=name in columns.log)
        keys: dict[str, Keys] = {}
        lengths: dict[str, NDArray[np.int64]] = {}
        checks: dict[str, Checks] = {}
        for feature in self.schema.features:
            column = batch.column(feature.name)
            if feature.jagged and pyarrow("types").is_null(column.type):
                lengths[feature.name] = np.zeros(len(batch), np.int64)
                column = column.slice(0, 0)
            elif feature.jagged:
                size = pyarrow("compute").list_value_length(column).fill_null(0)
                lengths[feature.name] = size.to_numpy(zero_copy_only=False).astype(np.int64)
                column = column.flatten()
            try:
                found = column_keys(column, has_negative=feature.table in self._signed)
            except pyarrow().ArrowInvalid as error:
                raise ValueError(
                    f"column {feature.name!r} of {column.type} has values that are too large: "
                    f"{error}; cast it to text where the file is written"
                ) from None
            keys[feature.name] = found.keys
            if found.checks is not None:
                checks[feature.name] = found.checks
        bad = BadLines.joined([BadLines(int(np.count_nonzero(wrong)), tuple(first))])
        lines = np.arange(len(batch))
        every = Samples(lines, label, dense, keys, bad, len(batch), lengths, checks)
        return only(every, ~wrong) if wrong.any() else every


def _opened(path: Path) -> Any:
    arrow = pyarrow()
    try:
        return pyarrow("parquet").ParquetFile(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no whole Parquet file: {error}") from error


def _check_tables(columns: Columns, kinds: list[dict[str, str]]) -> None:
    """Columns that read one table must hold one kind of values."""
    held: dict[str, tuple[str, str]] = {}
    for name in columns.categories:
        for each in kinds:
            kind = each[name].removeprefix(_LISTS)
            if kind == _NOTHING:
                continue
            other, before = held.setdefault(columns.table(name), (name, kind))
            if kind != before:
                raise ValueError(
                    f"{other!r} holds {before} and {name!r} {kind}, so one value would have two "
                    f"rows of their table {columns.table(name)!r}; write both alike, or give each "
                    "a table of its own"
                )


def _kinds(path: Path, columns: Columns, signed: set[str]) -> dict[str, str]:
    """What the categories hold, in words; the other columns are checked on the way. Tables whose
    numbers may be negative are added to `signed`."""
    with _opened(path) as file:
        schema = file.schema_arrow
        for name in columns.used:
            _place(name, schema.names, path)
        types = {name: schema.field(name).type for name in columns.used}
    for name in (columns.label, *columns.dense):
        if is_lists(types[name]):
            raise ValueError(f"{path}: {name!r} holds lists; only categories may")
        if not _may_be_numbers(types[name]):
            raise ValueError(
                f"{path}: column {name!r} of {types[name]} holds no numbers; cast it where the "
                "file is written"
            )
    found = {}
    for name in columns.categories:
        kind = kind_of(value_type(types[name]))
        if kind is None:
            raise ValueError(
                f"{path}: column {name!r} of {types[name]} cannot be a category: only whole "
                "numbers and texts can, and lists of them; cast it to int64 or to text where the "
                "file is written"
            )
        found[name] = _LISTS + kind if is_lists(types[name]) else kind
        if _may_be_negative(value_type(types[name])):
            signed.add(columns.table(name))
    return found


def _may_be_negative(found: Any) -> bool:
    types = pyarrow("types")
    if types.is_dictionary(found):
        found = found.value_type
    return bool(types.is_signed_integer(found) or types.is_decimal(found))


def kind_of(found: Any) -> str | None:
    """What a column holds, in words; None: what no category is made of."""
    types = pyarrow("types")
    if types.is_dictionary(found):
        return kind_of(found.value_type)
    if types.is_null(found):
        return _NOTHING
    if types.is_integer(found) or types.is_boolean(found) or _is_whole_decimal(found):
        return "whole numbers"
    return "texts" if _is_text(found) else None


def _may_be_numbers(found: Any) -> bool:
    types = pyarrow("types")
    if types.is_dictionary(found):
        found = found.value_type
    return types.is_floating(found) or types.is_decimal(found) or kind_of(found) is not None


def _is_whole_decimal(kind: Any) -> bool:
    """What databases write for whole numbers."""
    return bool(pyarrow("types").is_decimal(kind) and kind.scale <= 0)


def _is_text(kind: Any) -> bool:
    types = pyarrow("types")
    known = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return types.is_fixed_size_binary(kind) or any(
        getattr(types, f"is_{each}")(kind) for each in known if hasattr(types, f"is_{each}")
    )


def _floats(column: Any, *, truths: bool = False) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """A column's numbers, and which are missing. `truths`: texts may also be true or false."""
    arrow = pyarrow()
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if _is_text(column.type):
        texts = (_float(each, truths=truths) for each in column.to_pylist())
        return np.fromiter(texts, np.float64, len(column)), missing
    if arrow.types.is_boolean(column.type):
        column = column.cast(arrow.int8())
    values = column.cast(arrow.float64(), safe=False).fill_null(0)
    return values.to_numpy(zero_copy_only=False), missing


def _float(text: str | bytes | None, *, truths: bool) -> float:
    """As in CSV files: infinity, which is refused, for what is no number, and NaN for "nan"."""
    if text is None:
        return math.nan
    plain = text.decode(errors="replace") if isinstance(text, bytes) else text
    if truths and (lower := plain.lower()) in ("true", "false"):
        return float(lower == "true")
    try:
        found = math.inf if "_" in plain else float(plain)
    except ValueError:
        return math.inf
    return math.inf if math.isnan(found) and plain.lower() != "nan" else found


def column_keys(column: Any, *, has_negative: bool = False) -> Values:
    """Whole numbers as they are, texts as in CSV files. `has_negative`: another column of the table
    may hold negative numbers, which have the same bits as numbers from 2**63 on."""
    arrow, types = pyarrow(), pyarrow("types")
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if types.is_decimal(column.type):
        column = column.cast(arrow.int64())
    if types.is_null(column.type):
        found = Values(np.zeros(len(column), np.uint64))
    elif types.is_integer(column.type) or types.is_boolean(column.type):
        is_unsigned = types.is_uint64(column.type)
        kind = arrow.uint64() if is_unsigned else arrow.int64()
        whole = column.cast(kind).fill_null(0).to_numpy(zero_copy_only=False)
        found = Values(whole.astype(np.uint64))
        if is_unsigned and has_negative:
            found = hashed_at(found, found.keys >= _FIRST_NEGATIVE)
    else:
        found = _text_keys(column.cast(arrow.large_binary()).fill_null(b""))
    found = hashed_at(found, found.keys == _MISSING)  # a value that has this number, too
    return Values(np.where(missing, _MISSING, found.keys), found.checks)


def _text_keys(texts: Any) -> Values:
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    if not len(texts):
        return Values(np.empty(0, np.uint64))
    first, last = int(ends[0]), int(ends[-1])
    padded = np.zeros(last - first + 32, np.uint8)
    if last > first:
        padded[: last - first] = np.frombuffer(data, np.uint8)[first:last]
    has_nul = not padded[: last - first].all()
    return text_keys(words_at(padded), ends[:-1] - first, np.diff(ends), has_nul=has_nul)


def first_line(path: Path) -> bytes:
    """Of a file that may be compressed."""
    from hotrow.data.prepared.text import TextFiles

    piece = next(TextFiles([path]).pieces(), None)
    if piece and piece.bad:
        raise ValueError(f"{path}, line 1: {piece.bad}")
    line: bytes = piece.data.partition(b"\n")[0] if piece else b""
    return line.rstrip(b"\r")
