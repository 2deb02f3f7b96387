"""Arrow columns as numbers and as keys: integers that are sorted, counted and looked up.

Arrow has several types for one thing. The type of a column decides what it may be, when files are
opened. Values are checked as whole arrays; only texts that are not plain numbers pass through
Python one by one.
"""

from __future__ import annotations

import math
from binascii import unhexlify
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from pyarrow import types

from hotrow.support.hashing import mixed
from hotrow.support.messages import few

Words = NDArray[np.uint64]
Mask = NDArray[np.bool_]
Places = NDArray[np.int64]
Checks = NDArray[np.uint32]

PAD = 32  # bytes after texts, so that the words of the last ones may reach beyond them
EXACT = np.uint32(1)  # the check of a value whose key no other value can have
_HASHED = np.uint32(2)  # set in all other checks, so that none is 0 or EXACT
_EIGHT = np.uint64(8)
_ZEROS = np.uint64(int.from_bytes(b"00000000", "little"))
_IS_HEX = np.zeros(256, np.bool_)
_IS_HEX[list(b"0123456789abcdefABCDEF")] = True

# Masks for the first or last n bytes of a word, as they lie in memory.
_FIRST_BYTES = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)
_LAST_BYTES = ~_FIRST_BYTES[::-1]

NOTHING = "nothing"  # the kind of a column without any value
_MISSING = np.uint64(0x9D39247E33776D41)  # the key of missing values, and of no other
_FIRST_NEGATIVE = np.uint64(1 << 63)  # the bits of the least int64
_MOST_WHOLE = 10**18  # whole numbers below it have up to 18 digits
_WHOLE = r"^-?[0-9]{1,18}$"
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_LOWER = np.uint8(0x20)  # turns capital letters into small ones
_SHOWN = 40  # bytes of a text that an error shows


def open_parquet(path: Path, *, mapped: bool = False) -> Any:
    """Open a Parquet file and read its metadata; `mapped` maps the file into memory."""
    try:
        return pq.ParquetFile(path, memory_map=mapped)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        raise ValueError(f"{path} is no whole Parquet file: {error}") from error


def place_of(name: str, names: Sequence[str], path: Path, hint: str = "") -> int:
    """Return the position of a column among `names`, the columns of a file."""
    if name not in names:
        for near in names:
            if near.strip() == name:
                hint = f"; {near!r} has blanks: name it so, or take them out"
        raise ValueError(f"{path} has no column {name!r}; it has {few(names)}{hint}")
    if names.count(name) > 1:
        raise ValueError(f"{path} has {names.count(name)} columns {name!r}: which is meant?")
    return names.index(name)


# What a column of a type holds.


def is_lists(kind: Any) -> bool:
    """Return whether the values of a type are lists, in any of Arrow's forms."""
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def value_type(kind: Any) -> Any:
    """Return the type of the values in lists, or the type itself."""
    return kind.value_type if is_lists(kind) else kind


def kind_of(kind: Any) -> str | None:
    """Return what a column holds, in words; None if it cannot be a category."""
    kind = _decoded(kind)
    if types.is_null(kind):
        return NOTHING
    if is_whole(kind):
        return "whole numbers"
    return "texts" if is_text(kind) else None


def is_whole(kind: Any) -> bool:
    """Return whether a type holds whole numbers; databases write them as decimals, too."""
    is_decimal = types.is_decimal(kind) and kind.scale <= 0
    return bool(types.is_integer(kind) or types.is_boolean(kind) or is_decimal)


def is_number(kind: Any) -> bool:
    """Return whether a type holds numbers."""
    return bool(is_whole(kind) or types.is_floating(kind) or types.is_decimal(kind))


def is_text(kind: Any) -> bool:
    """Return whether a type holds texts or bytes."""
    known = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return types.is_fixed_size_binary(kind) or any(
        getattr(types, f"is_{name}")(kind) for name in known if hasattr(types, f"is_{name}")
    )


def may_be_numbers(kind: Any) -> bool:
    """Return whether values of a type can be read as numbers: texts may hold numbers, too."""
    return is_number(_decoded(kind)) or kind_of(kind) is not None


def may_be_negative(kind: Any) -> bool:
    """Return whether a type has whole numbers below 0."""
    kind = _decoded(kind)
    return bool(types.is_signed_integer(kind) or types.is_decimal(kind))


def _decoded(kind: Any) -> Any:
    return kind.value_type if types.is_dictionary(kind) else kind


# The values of columns.


def shown(value: Any) -> Any:
    """Return a value as errors show it: texts are cut."""
    if not value.is_valid or not types.is_string(value.type):
        return value.as_py()
    return value.as_buffer()[:_SHOWN].to_pybytes().decode("utf-8", errors="replace")


def floats(column: Any, *, truths: bool = False) -> NDArray[np.float64]:
    """Return the numbers of a column: NaN where one is missing, infinity where a text is not a
    number. With `truths`, texts may also be true or false."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        return _floats_of_texts(column, truths=truths)
    if types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return _numpy(column.cast(pa.float64(), safe=False))


def _floats_of_texts(column: Any, *, truths: bool) -> NDArray[np.float64]:
    column = column.cast(options=pc.CastOptions(pa.string(), allow_invalid_utf8=True))
    try:
        plain = _numpy(column.cast(pa.float64()))
        if np.isfinite(plain).all():
            return plain
    except pa.ArrowInvalid:
        pass  # one of the texts is not a number
    is_plain = _filled(pc.match_substring_regex(column, _NUMBER), False)
    numbers = pc.if_else(is_plain, column, _scalar(None, "string"))
    values = _numpy(numbers.cast(pa.float64())).copy()
    left = ~_numpy(is_plain) & _numpy(column.is_valid())
    if not left.any():
        return values
    lower = pc.ascii_lower(column)
    words = {"nan": math.nan} | ({"true": 1.0, "false": 0.0} if truths else {})
    for word, value in words.items():
        is_word = left & _numpy(_filled(pc.equal(lower, word), False))
        values[is_word] = value
        left &= ~is_word
    for place in np.flatnonzero(left).tolist():  # blanks around numbers, or not a number at all
        values[place] = _float(column[place].as_buffer().to_pybytes())
    return values


def _float(text: bytes) -> float:
    try:
        number = float(text.decode(errors="replace"))
    except ValueError:
        return math.inf
    return math.inf if math.isnan(number) or b"_" in text else number


def whole_numbers(column: Any) -> tuple[NDArray[np.int64], Mask, Mask]:
    """Return the whole numbers of a column of texts; which texts are empty, whose value is 0; and
    which are not whole numbers or have more than 18 digits."""
    texts, column = column, none_if_empty(column)
    wrong: Mask = np.zeros(len(column), np.bool_)
    try:
        numbers = column.cast(pa.int64())
        is_plain = not (_text_bytes(texts)[0] | _LOWER == ord("x")).any()
    except pa.ArrowInvalid:
        is_plain = False
    if not is_plain:  # Arrow reads 0x10 as a number
        is_whole = pc.match_substring_regex(column, _WHOLE)
        wrong = ~_numpy(_filled(is_whole, True))
        none = _scalar(None, "string")
        numbers = pc.if_else(is_whole, column, none).cast(pa.int64())
    values = _numpy(_filled(numbers, 0))
    return values, _numpy(column.is_null()), wrong | (np.abs(values) >= _MOST_WHOLE)


def none_if_empty(column: Any) -> Any:
    """Replace empty texts by missing ones."""
    return pc.if_else(pc.equal(column, _scalar("", "string")), _scalar(None, "string"), column)


def column_keys(column: Any, *, has_negative: bool = False) -> Values:
    """Return keys: whole numbers as they are, texts by their bytes. With `has_negative` another
    column of the table may hold negative numbers, whose bits are those of numbers from 2**63 on."""
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    missing = _numpy(column.is_null())
    if types.is_decimal(column.type):
        column = column.cast(pa.int64())
    if types.is_null(column.type):
        values = Values(np.zeros(len(column), np.uint64))
    elif types.is_integer(column.type) or types.is_boolean(column.type):
        is_unsigned = types.is_uint64(column.type)
        kind = pa.uint64() if is_unsigned else pa.int64()
        values = Values(_numpy(_filled(column.cast(kind), 0)).astype(np.uint64))
        if is_unsigned and has_negative:
            values = hashed_at(values, values.keys >= _FIRST_NEGATIVE)
    else:
        values = texts_of(column).keys()
    values = hashed_at(values, values.keys == _MISSING)  # a value with this number
    return Values(np.where(missing, _MISSING, values.keys), values.checks)


def texts_of(column: Any) -> Texts:
    """Return the texts of a column; missing ones are empty."""
    data, ends = _text_bytes(column)
    padded = np.zeros(len(data) + PAD, np.uint8)
    padded[: len(data)] = data
    return Texts(padded, ends[:-1], np.diff(ends))


def _text_bytes(column: Any) -> tuple[NDArray[np.uint8], Places]:
    """Return the bytes of all texts, where each begins, and the end of the last one."""
    texts = _filled(column.cast(pa.large_binary()), b"")
    if not len(texts):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    first, last = int(ends[0]), int(ends[-1])
    if first == last:
        return np.empty(0, np.uint8), ends - first
    return np.frombuffer(data, np.uint8)[first:last], ends - first


def lists_of(column: Any) -> tuple[Any, Places]:
    """Return the values of all lists of a column, and how many each list has; a missing list has
    none."""
    if types.is_null(column.type):
        return column.slice(0, 0), np.zeros(len(column), np.int64)
    lengths = _filled(pc.list_value_length(column), 0)
    return column.flatten(), _numpy(lengths).astype(np.int64)


def split_texts(column: Any, separator: str) -> tuple[Any, Places]:
    """Return the parts of all texts, and how many each text has. Empty parts do not count."""
    binary = column.cast(pa.large_binary())
    parts, lengths = lists_of(pc.split_pattern(binary, separator))
    is_part = pc.not_equal(parts, _scalar(b"", "large_binary"))
    owners = np.repeat(np.arange(len(column)), lengths)[_numpy(is_part)]
    return parts.filter(is_part), np.bincount(owners, minlength=len(column))


def _filled(column: Any, value: Any) -> Any:
    """Replace missing values."""
    return column.fill_null(_scalar(value, str(column.type))) if column.null_count else column


@cache
def _scalar(value: Any, kind: str) -> Any:
    """Return a value of a type. A new one is slow: pyarrow looks for pandas first."""
    return pa.scalar(value, kind)


def _numpy(column: Any) -> NDArray[Any]:
    array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return array


# Texts as keys. Eight bytes are one machine word: a few operations on arrays handle a column.


class Values(NamedTuple):
    """Values as integers. Values with equal keys and different checks are different."""

    keys: NDArray[Any]  # uint64, or uint32 if all values fit
    checks: Checks | None = None  # None: all are EXACT


class Texts:
    """Texts that lie one after the other, followed by PAD more bytes."""

    def __init__(self, data: NDArray[np.uint8], starts: Places, lengths: Places) -> None:
        # The 8 bytes from each position on, as one word: a view, in which words overlap.
        self._words = as_strided(data[:8].view(np.uint64), shape=(len(data) - 8,), strides=(1,))
        self._data, self._starts, self._lengths = data, starts, lengths

    def keys(self) -> Values:
        """Return the bytes of texts of up to 8 bytes as numbers, and hashes of longer texts and of
        those that end in a NUL byte, which the number would not show."""
        lengths = self._lengths
        keys = self._words[self._starts]
        keys &= _FIRST_BYTES[np.minimum(lengths, 8)]
        hashed = lengths > 8
        if not self._data[:-PAD].all():  # one of the texts has a NUL byte
            hashed |= (lengths > 0) & (keys <= _FIRST_BYTES[np.clip(lengths - 1, 0, 8)])
        at = np.flatnonzero(hashed)
        if not len(at):
            return Values(keys)
        checks = np.full(len(keys), EXACT)
        keys[at], second = self._hashed(self._starts[at], lengths[at])
        checks[at] = _check(second)
        return Values(keys, checks)

    def _hashed(self, starts: Places, lengths: Places) -> tuple[Words, Words]:
        """Return two independent 64-bit hashes of each text."""
        first = mixed(lengths.astype(np.uint64))
        second = first.copy()
        one, two, at = first, second, np.arange(len(lengths))
        while len(at):
            word = self._words[starts] & _FIRST_BYTES[np.minimum(lengths, 8)]
            one, two = mixed(one ^ word), _stirred(two ^ word)
            starts, lengths = starts + 8, lengths - 8
            left = lengths > 0
            if not left.all():  # few texts may be very long
                first[at], second[at] = one, two
                one, two, at = one[left], two[left], at[left]
                starts, lengths = starts[left], lengths[left]
        return first, second

    def hexadecimal(self) -> tuple[NDArray[np.uint32], Mask]:
        """Return numbers of up to 8 hexadecimal digits, where an empty text is 0; and which texts
        are something else, whose number is 0."""
        words = self._words[self._starts]
        other = np.flatnonzero(self._lengths != 8)
        if len(other):
            # Empty texts are zeros; short ones move to the end of their word, after zeros.
            words[other] = _ZEROS
            short = other[self._lengths[other] > 0]
            size = np.minimum(self._lengths[short], 8)
            moved = self._words[self._starts[short]] << _EIGHT * (8 - size).astype(np.uint64)
            words[short] = moved | (_ZEROS & ~_LAST_BYTES[size])
        wrong = self._lengths > 8
        try:
            digits = unhexlify(words.data)  # four times as fast as arithmetic on words
        except ValueError:
            wrong |= ~_IS_HEX[words.view(np.uint8).reshape(-1, 8)].all(axis=1)
            words[wrong] = _ZEROS
            digits = unhexlify(words.data)
        return np.frombuffer(digits, ">u4").astype(np.uint32), wrong


def hashed_at(values: Values, where: Mask) -> Values:
    """Replace the keys that `where` marks by their hashes."""
    at = np.flatnonzero(where)
    if not len(at):
        return values
    keys = values.keys.copy()
    checks = np.full(len(keys), EXACT) if values.checks is None else values.checks
    checks[at] = (checks[at] ^ _check(_stirred(keys[at]))) | _HASHED
    keys[at] = mixed(keys[at])
    return Values(keys, checks)


def _check(second: Words) -> Checks:
    check: Checks = (second >> np.uint64(32)).astype(np.uint32) | _HASHED
    return check


def _stirred(words: Words) -> Words:
    """Return a cheaper `mixed`, whose leading half depends on every bit of a word."""
    words = words * np.uint64(0xD1342543DE82EF95)
    return words ^ (words >> np.uint64(32))
