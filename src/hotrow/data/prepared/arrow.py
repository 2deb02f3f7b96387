"""Columns of Arrow into numbers and keys. Arrow is imported when it is needed: training runs
without it.

Arrow has many types for one thing. What a column may be is decided by its type, when files are
opened; what is wrong with its values is found for all of them at once, and only what is no plain
number takes a turn of Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared.keys import PAD, Mask, Places, Texts, Values, hashed_at
from hotrow.support.messages import few

NOTHING = "nothing"  # the kind of a column without any value
_MISSING = np.uint64(0x9D39247E33776D41)  # the key of a value that is not there, and of no other
_FIRST_NEGATIVE = np.uint64(1 << 63)  # the bits of the least number of 64 bits with a sign
_MOST_WHOLE = 10**18  # whole numbers below it have up to 18 digits
_WHOLE = r"^-?[0-9]{1,18}$"
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_LOWER = np.uint8(0x20)  # makes small letters of large ones
_SHOWN = 40  # bytes of a text that an error shows


def pyarrow(module: str = "", *, what: str = "Parquet is read") -> Any:
    """Import pyarrow, or one of its modules; an error says `what` needs it."""
    try:
        return import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError as error:
        raise ValueError(
            f"{what} with pyarrow, which is not installed: pip install pyarrow"
        ) from error


def open_parquet(path: Path, *, mapped: bool = False) -> Any:
    """Open a Parquet file, whose metadata are read at once; `mapped`: its bytes into memory."""
    parquet = pyarrow("parquet")
    try:
        return parquet.ParquetFile(path, memory_map=mapped)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        raise ValueError(f"{path} is no whole Parquet file: {error}") from error


def place_of(name: str, names: Sequence[str], path: Path, hint: str = "") -> int:
    """Return the place of a column among those of a file."""
    if name not in names:
        for near in names:
            if near.strip() == name:
                hint = f"; {near!r} has blanks: name it so, or take them out"
        raise ValueError(f"{path} has no column {name!r}; it has {few(names)}{hint}")
    if names.count(name) > 1:
        raise ValueError(f"{path} has {names.count(name)} columns {name!r}: which is meant?")
    return names.index(name)


# What columns of a type hold.


def is_lists(kind: Any) -> bool:
    """Whether values of a type are lists, in any of Arrow's forms."""
    types = pyarrow("types")
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def value_type(kind: Any) -> Any:
    """Return the type of what is in lists; the type itself where it is none of lists."""
    return kind.value_type if is_lists(kind) else kind


def kind_of(kind: Any) -> str | None:
    """Return what a column holds, in words; None if no category can be made of it."""
    kind = _decoded(kind)
    if pyarrow("types").is_null(kind):
        return NOTHING
    if is_whole(kind):
        return "whole numbers"
    return "texts" if is_text(kind) else None


def is_whole(kind: Any) -> bool:
    """Whether a type is one of whole numbers; databases write decimals for them."""
    types = pyarrow("types")
    is_decimal = types.is_decimal(kind) and kind.scale <= 0
    return bool(types.is_integer(kind) or types.is_boolean(kind) or is_decimal)


def is_number(kind: Any) -> bool:
    """Whether a type is one of numbers."""
    types = pyarrow("types")
    return bool(is_whole(kind) or types.is_floating(kind) or types.is_decimal(kind))


def is_text(kind: Any) -> bool:
    """Whether a type is one of texts or bytes."""
    types = pyarrow("types")
    known = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return types.is_fixed_size_binary(kind) or any(
        getattr(types, f"is_{name}")(kind) for name in known if hasattr(types, f"is_{name}")
    )


def may_be_numbers(kind: Any) -> bool:
    """Whether the values of a type can be read as numbers: texts may hold them, too."""
    return is_number(_decoded(kind)) or kind_of(kind) is not None


def may_be_negative(kind: Any) -> bool:
    """Whether a type has whole numbers below 0."""
    types, kind = pyarrow("types"), _decoded(kind)
    return bool(types.is_signed_integer(kind) or types.is_decimal(kind))


def _decoded(kind: Any) -> Any:
    return kind.value_type if pyarrow("types").is_dictionary(kind) else kind


# What is in columns.


def shown(value: Any) -> Any:
    """Return a value as errors show it: of a text its beginning."""
    if not value.is_valid or not pyarrow("types").is_string(value.type):
        return value.as_py()
    return value.as_buffer()[:_SHOWN].to_pybytes().decode("utf-8", errors="replace")


def floats(column: Any, *, truths: bool = False) -> NDArray[np.float64]:
    """Return a column's numbers: NaN for those that are missing, infinity for texts that are no
    number. `truths`: texts may also be true or false."""
    arrow = pyarrow()
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        return _floats_of_texts(column, truths=truths)
    if arrow.types.is_boolean(column.type):
        column = column.cast(arrow.int8())
    return _numpy(column.cast(arrow.float64(), safe=False))


def _floats_of_texts(column: Any, *, truths: bool) -> NDArray[np.float64]:
    arrow, compute = pyarrow(), pyarrow("compute")
    column = column.cast(options=compute.CastOptions(arrow.string(), allow_invalid_utf8=True))
    try:
        plain = _numpy(column.cast(arrow.float64()))
        if np.isfinite(plain).all():
            return plain
    except arrow.ArrowInvalid:
        pass  # a text among them is no number
    is_plain = _filled(compute.match_substring_regex(column, _NUMBER), False)
    numbers = compute.if_else(is_plain, column, _scalar(None, "string"))
    found = _numpy(numbers.cast(arrow.float64())).copy()
    left = ~_numpy(is_plain) & _numpy(column.is_valid())
    if not left.any():
        return found
    lower = compute.ascii_lower(column)
    words = {"nan": math.nan} | ({"true": 1.0, "false": 0.0} if truths else {})
    for word, value in words.items():
        is_word = left & _numpy(_filled(compute.equal(lower, word), False))
        found[is_word] = value
        left &= ~is_word
    for place in np.flatnonzero(left).tolist():  # blanks around numbers, or no number at all
        found[place] = _float(column[place].as_buffer().to_pybytes())
    return found


def _float(text: bytes) -> float:
    try:
        number = float(text.decode(errors="replace"))
    except ValueError:
        return math.inf
    return math.inf if math.isnan(number) or b"_" in text else number


def whole_numbers(column: Any) -> tuple[NDArray[np.int64], Mask, Mask]:
    """Return the whole numbers of a column of texts; and which texts are empty, whose value is 0;
    and which are something else, or have more than 18 digits."""
    arrow, compute = pyarrow(), pyarrow("compute")
    texts, column = column, none_if_empty(column)
    wrong: Mask = np.zeros(len(column), np.bool_)
    try:
        numbers = column.cast(arrow.int64())
        is_plain = not (_text_bytes(texts)[0] | _LOWER == ord("x")).any()
    except arrow.ArrowInvalid:
        is_plain = False
    if not is_plain:  # Arrow would take 0x10 for a number
        is_whole = compute.match_substring_regex(column, _WHOLE)
        wrong = ~_numpy(_filled(is_whole, True))
        none = _scalar(None, "string")
        numbers = compute.if_else(is_whole, column, none).cast(arrow.int64())
    values = _numpy(_filled(numbers, 0))
    return values, _numpy(column.is_null()), wrong | (np.abs(values) >= _MOST_WHOLE)


def none_if_empty(column: Any) -> Any:
    """Replace empty texts by missing ones."""
    compute = pyarrow("compute")
    return compute.if_else(
        compute.equal(column, _scalar("", "string")), _scalar(None, "string"), column
    )


def column_keys(column: Any, *, has_negative: bool = False) -> Values:
    """Return whole numbers as they are, and texts by their bytes. `has_negative`: another column of
    the table may hold negative numbers, which have the same bits as numbers from 2**63 on."""
    arrow, types = pyarrow(), pyarrow("types")
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    missing = _numpy(column.is_null())
    if types.is_decimal(column.type):
        column = column.cast(arrow.int64())
    if types.is_null(column.type):
        values = Values(np.zeros(len(column), np.uint64))
    elif types.is_integer(column.type) or types.is_boolean(column.type):
        is_unsigned = types.is_uint64(column.type)
        kind = arrow.uint64() if is_unsigned else arrow.int64()
        values = Values(_numpy(_filled(column.cast(kind), 0)).astype(np.uint64))
        if is_unsigned and has_negative:
            values = hashed_at(values, values.keys >= _FIRST_NEGATIVE)
    else:
        values = texts_of(column).keys()
    values = hashed_at(values, values.keys == _MISSING)  # a value that has this number, too
    return Values(np.where(missing, _MISSING, values.keys), values.checks)


def texts_of(column: Any) -> Texts:
    """Return a column's texts; those that are missing are empty."""
    data, ends = _text_bytes(column)
    padded = np.zeros(len(data) + PAD, np.uint8)
    padded[: len(data)] = data
    return Texts(padded, ends[:-1], np.diff(ends))


def _text_bytes(column: Any) -> tuple[NDArray[np.uint8], Places]:
    """Return the bytes of all texts, and where they begin, with the end of the last one."""
    texts = _filled(column.cast(pyarrow().large_binary()), b"")
    if not len(texts):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    first, last = int(ends[0]), int(ends[-1])
    if first == last:
        return np.empty(0, np.uint8), ends - first
    return np.frombuffer(data, np.uint8)[first:last], ends - first


def lists_of(column: Any) -> tuple[Any, Places]:
    """Return the values of a column of lists, one after the other, and how many each list has; one
    that is missing has none."""
    if pyarrow("types").is_null(column.type):
        return column.slice(0, 0), np.zeros(len(column), np.int64)
    lengths = _filled(pyarrow("compute").list_value_length(column), 0)
    return column.flatten(), _numpy(lengths).astype(np.int64)


def split_texts(column: Any, separator: str) -> tuple[Any, Places]:
    """Return the parts of texts, one after the other, and how many each text has. Empty ones do not
    count."""
    compute = pyarrow("compute")
    binary = column.cast(pyarrow().large_binary())
    parts, lengths = lists_of(compute.split_pattern(binary, separator))
    is_part = compute.not_equal(parts, _scalar(b"", "large_binary"))
    owners = np.repeat(np.arange(len(column)), lengths)[_numpy(is_part)]
    return parts.filter(is_part), np.bincount(owners, minlength=len(column))


def _filled(column: Any, value: Any) -> Any:
    """Replace missing values."""
    return column.fill_null(_scalar(value, str(column.type))) if column.null_count else column


@cache
def _scalar(value: Any, kind: str) -> Any:
    """Return a value of a type. Each new one takes long: pyarrow looks for pandas before."""
    return pyarrow().scalar(value, kind)


def _numpy(column: Any) -> NDArray[Any]:
    array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return array
