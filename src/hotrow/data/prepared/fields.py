"""Lines of text into numbers, a column at a time. No quotes: one byte ends a field, one a line.

A general reader of CSV converts some 0.45 million Criteo lines a second on one core; here 8 bytes
of a field are one machine word, and a handful of operations on whole columns turns words into
numbers, twice as fast. What is wrong with a line is found the same way, for all lines at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Mask = NDArray[np.bool_]

_PAD = 16  # bytes around the text, so that words may reach beyond it
_NEWLINE, _RETURN, _MINUS = 10, 13, 45
_EIGHT = np.uint64(8)


def _each_byte(value: int) -> np.uint64:
    return np.uint64(value * 0x0101010101010101)


# Masks for the first or last so many bytes of a word, as they lie in memory.
_FIRST_BYTES = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)
_LAST_BYTES = ~_FIRST_BYTES[::-1]


@dataclass(frozen=True)
class BadLine:
    """A line that is left out: counted from 0 within its piece of text."""

    line: int
    reason: str


class Fields:
    """The fields of a piece of text, without those lines that have too many or too few."""

    def __init__(self, text: bytes, *, separator: str, columns: int) -> None:
        if text and not text.endswith(b"\n"):
            text += b"\n"  # the last line of a file may lack it
        self._text = text
        self._bytes = np.zeros(len(text) + 2 * _PAD, np.uint8)
        self._bytes[_PAD:-_PAD] = np.frombuffer(text, np.uint8)
        self._words = words_at(self._bytes)
        self.bad: list[BadLine] = []
        self._find(ord(separator), columns)

    def _find(self, separator: int, columns: int) -> None:
        is_end = self._bytes == separator
        is_end |= self._bytes == _NEWLINE
        ends = np.flatnonzero(is_end)
        closing = np.flatnonzero(self._bytes[ends] == _NEWLINE)  # the last of each line
        per_line = np.diff(closing, prepend=-1)
        line_ends = ends[closing]
        line_starts = np.concatenate([[_PAD], line_ends[:-1] + 1])
        lines = np.arange(len(closing))
        good = per_line == columns
        if not good.all():
            for line in lines[~good].tolist():
                empty = line_ends[line] - line_starts[line] == 0
                found = "an empty line" if empty else f"{per_line[line]} columns"
                self.bad.append(BadLine(line, f"{found} instead of {columns} columns"))
            ends = ends[np.repeat(good, per_line)]
            lines, line_starts = lines[good], line_starts[good]
        self.lines: NDArray[np.int64] = lines
        self._line_starts = line_starts
        self._ends = np.ascontiguousarray(ends.reshape(-1, columns).T)
        if b"\r" in self._text and len(lines):  # lines of Windows, perhaps among others
            self._ends[-1] -= self._bytes[self._ends[-1] - 1] == _RETURN

    def __len__(self) -> int:
        return len(self.lines)

    def span(self, column: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and lengths."""
        starts = self._ends[column - 1] + 1 if column else self._line_starts
        return starts, self._ends[column] - starts

    def value(self, column: int, place: int) -> str:
        """One field as text, for messages."""
        starts, lengths = self.span(column)
        raw = self._bytes[starts[place] : starts[place] + min(int(lengths[place]), 40)]
        return raw.tobytes().decode("utf-8", errors="replace")

    def keep(self, good: Mask) -> None:
        """Leaves out the other lines."""
        self.lines, self._line_starts = self.lines[good], self._line_starts[good]
        self._ends = np.ascontiguousarray(self._ends[:, good])

    # Each of these gives a column's values and which of them are no such values.

    def integers(self, column: int) -> tuple[NDArray[np.int64], Mask, Mask]:
        """Whole numbers; and which fields are empty, whose value is 0; and which are wrong."""
        starts, lengths = self.span(column)
        empty = lengths == 0
        negative = self._bytes[starts] == _MINUS
        has_negative = bool(negative.any())
        digits = lengths - negative if has_negative else lengths
        # The last 8 bytes, of which those before the number become zeros.
        words = self._words[self._ends[column] - 8] ^ _each_byte(0x30)
        words &= _LAST_BYTES[np.minimum(digits, 8)]
        wrong = ((words + _each_byte(0x76)) | words) & _each_byte(0x80) != 0
        words = words * np.uint64(10) + (words >> _EIGHT)
        low = np.uint64(0x000000FF000000FF)
        values = (
            (words & low) * np.uint64(0x000F424000000064)
            + ((words >> np.uint64(16)) & low) * np.uint64(0x0000271000000001)
        ) >> np.uint64(32)
        found = values.astype(np.int64)
        wrong |= negative & (digits == 0)
        long = np.flatnonzero(digits > 8)
        for place in long.tolist():
            found[place], wrong[place] = self._long_integer(column, place)
        if has_negative:
            short = negative & (digits <= 8)
            found[short] = -found[short]
        return found, empty, wrong

    def _long_integer(self, column: int, place: int) -> tuple[int, bool]:
        text = self.value(column, place)
        if text.lstrip("-").isdecimal() and text.isascii() and len(text) <= 18:
            return int(text), text.count("-") > 1
        return 0, True

    def hexadecimal(self, column: int) -> tuple[NDArray[np.uint32], Mask]:
        """Up to 8 hexadecimal digits; empty is 0."""
        starts, lengths = self.span(column)
        words = self._words[starts]
        other = np.flatnonzero(lengths != 8)
        if len(other):
            # Short ones move to the end of their word, after zeros.
            short = np.minimum(lengths[other], 8)
            moved = words[other] << (_EIGHT * (8 - short).astype(np.uint64))
            words[other] = np.where(
                short > 0, moved | (_each_byte(0x30) & ~_LAST_BYTES[short]), _each_byte(0x30)
            )
        found, wrong = _from_hex(words)
        if len(other):
            wrong[other] |= lengths[other] > 8
        return found, wrong

    def texts(self, column: int) -> Words:
        return text_keys(self._words, *self.span(column))

    def numbers(self, column: int) -> tuple[NDArray[np.float64], Mask, Mask]:
        """Numbers of any form; and which fields are empty, whose value is 0; and which wrong."""
        whole, empty, other = self.integers(column)
        found = whole.astype(np.float64)
        wrong = np.zeros(len(self), np.bool_)
        for place in np.flatnonzero(other).tolist():
            found[place], wrong[place] = _number(self.value(column, place))
        return found, empty, wrong


def _number(text: str) -> tuple[float, bool]:
    try:
        value = float(text)
    except ValueError:
        return 0.0, True
    return (value, False) if math.isfinite(value) and "_" not in text else (0.0, True)


def words_at(data: NDArray[np.uint8]) -> Words:
    """The 8 bytes from each position on, as one word: a view, in which words overlap."""
    return as_strided(data[:8].view(np.uint64), shape=(len(data) - 8,), strides=(1,))


def text_keys(words: Words, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Words:
    """Texts as numbers: up to 8 bytes as they are, so that different texts have different
    numbers; of longer ones a hash of 64 bits."""
    found = words[starts]
    found &= _FIRST_BYTES[np.minimum(lengths, 8)]
    long = np.flatnonzero(lengths > 8)
    if len(long):
        found[long] = _hashed(words, starts[long], lengths[long])
    return found


def _hashed(words: Words, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Words:
    found = mixed(lengths.astype(np.uint64))
    for done in range(0, int(lengths.max()), 8):
        left = lengths - done
        at = np.minimum(starts + done, len(words) - 1)
        next_ = words[at] & _FIRST_BYTES[left.clip(0, 8)]
        found = np.where(left > 0, mixed(found ^ next_), found)
    return found


def _from_hex(words: Words) -> tuple[NDArray[np.uint32], Mask]:
    letter = words >> np.uint64(6)
    letter &= _each_byte(1)
    halves = words & _each_byte(0x0F)
    halves += letter * np.uint64(9)
    # Halves are 0 to 15, and written again as digits or letters they are what was read.
    again = halves + _each_byte(6)
    again >>= np.uint64(4)
    again &= _each_byte(1)
    again *= np.uint64(0x27)
    again += halves
    again += _each_byte(0x30)
    again ^= words
    again |= halves & _each_byte(0x10)
    wrong = again != 0
    if wrong.any():
        wrong = _no_hex(words, wrong)
    np.right_shift(halves, _EIGHT, out=letter)
    halves <<= np.uint64(4)
    halves |= letter
    halves &= np.uint64(0x00FF00FF00FF00FF)
    np.right_shift(halves, _EIGHT, out=letter)
    halves |= letter
    halves &= np.uint64(0x0000FFFF0000FFFF)
    np.right_shift(halves, np.uint64(16), out=letter)
    halves |= letter
    return halves.astype(np.uint32).byteswap(inplace=True), wrong


_IS_HEX = np.zeros(256, np.bool_)
_IS_HEX[list(b"0123456789abcdefABCDEF")] = True


def _no_hex(words: Words, suspect: Mask) -> Mask:
    """Capital letters are right, too."""
    wrong = suspect.copy()
    wrong[suspect] = ~_IS_HEX[words[suspect].view(np.uint8).reshape(-1, 8)].all(axis=1)
    return wrong


def mixed(words: Words) -> Words:
    """Every bit of the result depends on every bit of a word, and no two words give one result
    (the finalizer of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Judge:
    """Collects what is wrong with the lines of a piece; the first reason of a line counts."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._wrong: Mask = np.zeros(len(fields), np.bool_)
        self.reasons: list[BadLine] = []

    def refuse(self, wrong: Mask, column: int, reason: Callable[[str], str]) -> None:
        if not wrong.any():
            return
        for place in np.flatnonzero(wrong & ~self._wrong).tolist():
            text = reason(self._fields.value(column, place))
            self.reasons.append(BadLine(int(self._fields.lines[place]), text))
        self._wrong |= wrong

    @property
    def good(self) -> Mask:
        return ~self._wrong

    @property
    def any_bad(self) -> bool:
        return bool(self._wrong.any())
