"""Lines of text into numbers, a column at a time. No quotes: one byte ends a field, one a line.

A general reader of CSV converts some 0.45 million Criteo lines a second on one core; here 8 bytes
of a field are one machine word, and a handful of operations on whole columns turns words into
numbers, more than twice as fast. What is wrong with a line is found the same way, for all lines
at once.
"""

from __future__ import annotations

import math
from binascii import unhexlify
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from hotrow.support.messages import many

Words = NDArray[np.uint64]
Mask = NDArray[np.bool_]
Places = NDArray[np.int64]
Checks = NDArray[np.uint32]

_PAD = 32  # bytes around the text, so that words and long numbers may reach beyond it
_NEWLINE, _RETURN, _MINUS, _POINT, _ZERO = b"\n\r-.0"
_MOST_DIGITS = 18  # of a whole number: below 2**63
_MOST_EXACT = 2**53  # whole numbers up to there are floats, too
_EIGHT = np.uint64(8)
_TENS = np.array([float(f"1e{n}") for n in range(_MOST_DIGITS + 1)])
EXAMPLES = 5  # of bad lines that are shown
EXACT = np.uint32(1)  # the check of a value whose key no other value can have
_HASHED = np.uint32(2)  # set in all other checks, so that none of them is 0 or EXACT


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


@dataclass(frozen=True)
class BadLines:
    """How many lines are left out, and the first of them: all would not fit the memory."""

    count: int = 0
    first: tuple[BadLine, ...] = ()

    @classmethod
    def joined(cls, parts: Iterable[BadLines]) -> BadLines:
        every = list(parts)
        first = sorted((bad for each in every for bad in each.first), key=lambda bad: bad.line)
        return cls(sum(each.count for each in every), tuple(first[:EXAMPLES]))

    def told_by(self, better: tuple[BadLine, ...]) -> BadLines:
        """With the reasons of those lines that somebody knows more about."""
        reasons = {each.line: each for each in better}
        return BadLines(self.count, tuple(reasons.get(each.line, each) for each in self.first))

    def later(self, lines: int) -> BadLines:
        """The same, with so many lines before them."""
        first = (BadLine(each.line + lines, each.reason) for each in self.first)
        return BadLines(self.count, tuple(first))


class Values(NamedTuple):
    """Values as numbers. Equal keys with different checks are different values."""

    keys: Words
    checks: Checks | None = None  # None: all are EXACT


class Fields:
    """The fields of a piece of text, without those lines that have too many or too few."""

    def __init__(self, text: bytes, *, separator: str, columns: int) -> None:
        if text and not text.endswith(b"\n"):
            text += b"\n"  # the last line of a file may lack it
        self._text = text
        self._has_nul = b"\0" in text
        self._bytes = np.zeros(len(text) + 2 * _PAD, np.uint8)
        self._bytes[_PAD:-_PAD] = np.frombuffer(text, np.uint8)
        self._words = words_at(self._bytes)
        self.num_lines = count_lines(text)  # bad ones among them
        self.bad = BadLines()
        self._find(ord(separator), columns)

    def _find(self, separator: int, columns: int) -> None:
        if separator == _NEWLINE - 1:  # a tab: one comparison finds both
            ends = np.flatnonzero(self._bytes - np.uint8(separator) < 2)
        else:
            ends = np.flatnonzero((self._bytes == separator) | (self._bytes == _NEWLINE))
        # Where nothing is wrong, every so many ends one is the end of a line, and no other is.
        line_ends = ends[columns - 1 :: columns]
        lines = self.num_lines
        if len(ends) != lines * columns or (self._bytes[line_ends] != _NEWLINE).any():
            self._find_good(ends, columns)
        else:
            self.lines: NDArray[np.int64] = np.arange(lines)
            self._starts = np.append(_PAD, line_ends[:-1] + 1) if lines else line_ends
            self._ends = np.ascontiguousarray(ends.reshape(-1, columns).T)
        if b"\r" in self._text and len(self):  # lines of Windows, perhaps among others
            self._ends[-1] -= self._bytes[self._ends[-1] - 1] == _RETURN

    def _find_good(self, ends: NDArray[np.int64], columns: int) -> None:
        """The lines with the right number of columns; the others are bad."""
        closing = np.flatnonzero(self._bytes[ends] == _NEWLINE)  # the last end of each line
        per_line = np.diff(closing, prepend=-1)
        line_ends = ends[closing]
        starts = np.append(_PAD, line_ends[:-1] + 1)
        good = per_line == columns
        bad = np.flatnonzero(~good)
        first = []
        for line in bad[:EXAMPLES].tolist():
            empty = not self._bytes[starts[line] : line_ends[line]].tobytes().strip(b"\r")
            found = (
                f"an empty line instead of {columns} columns"
                if empty
                else f"{many(int(per_line[line]), 'column')} instead of {columns}"
            )
            first.append(BadLine(line, found))
        self.bad = BadLines(len(bad), tuple(first))
        self.lines, self._starts = np.flatnonzero(good), starts[good]
        self._ends = np.ascontiguousarray(ends[np.repeat(good, per_line)].reshape(-1, columns).T)

    def __len__(self) -> int:
        return len(self.lines)

    def span(self, columns: slice) -> tuple[Places, Places]:
        """Where fields start and how long they are: [columns, lines]."""
        first = columns.start
        ends = self._ends[columns]
        starts = self._ends[max(0, first - 1) : columns.stop - 1] + 1
        if first == 0:
            starts = np.concatenate([self._starts[None], starts])
        return starts, ends - starts

    def value(self, column: int, line: int, *, most: int = 40) -> str:
        """One field as text, or its beginning."""
        start = self._ends[column - 1, line] + 1 if column else self._starts[line]
        raw = self._bytes[start : min(int(self._ends[column, line]), int(start) + most)]
        return raw.tobytes().decode("utf-8", errors="replace")

    # Each of these reads consecutive columns, and gives values and masks, [columns, lines].

    def integers(self, columns: slice) -> tuple[NDArray[np.int64], Mask, Mask]:
        """Whole numbers; and which fields are empty, whose value is 0; and which are wrong."""
        starts, lengths = self.span(columns)
        empty = lengths == 0
        negative = self._bytes[starts] == _MINUS
        negative &= ~empty
        has_negative = bool(negative.any())
        digits = lengths - negative if has_negative else lengths
        # The last 8 bytes, of which those before the number become zeros.
        words = self._words[self._ends[columns] - 8]
        words ^= _each_byte(0x30)
        words &= _LAST_BYTES[np.minimum(digits, 8)]
        check = words + _each_byte(0x76)
        check |= words
        check &= _each_byte(0x80)
        wrong = check != 0
        # Neighbours are added up: 8 digits, 4 pairs, 2 fours, 1 number.
        np.right_shift(words, _EIGHT, out=check)
        words *= np.uint64(10)
        words += check
        low = np.uint64(0x000000FF000000FF)
        np.right_shift(words, np.uint64(16), out=check)
        check &= low
        check *= np.uint64(0x0000271000000001)
        words &= low
        words *= np.uint64(0x000F424000000064)
        words += check
        words >>= np.uint64(32)
        found = words.view(np.int64)
        wrong |= negative & (digits == 0)
        if has_negative:
            found[negative] = -found[negative]
        long = digits > 8
        if long.any():
            found[long], places, wrong[long] = self._digits(starts[long], lengths[long])
            wrong[long] |= places >= 0
        return found, empty, wrong

    def bits(self, column: int) -> NDArray[np.uint8] | None:
        """The values of a column in which every field is 0 or 1; None if one is not."""
        starts, lengths = self.span(one(column))
        found: NDArray[np.uint8] = self._bytes[starts[0]] - np.uint8(_ZERO)
        return found if (lengths == 1).all() and (found <= 1).all() else None

    def hexadecimal(self, columns: slice) -> tuple[NDArray[np.uint32], Mask]:
        """Up to 8 hexadecimal digits, empty is 0; and which fields are wrong."""
        starts, lengths = self.span(columns)
        shape, lengths = starts.shape, lengths.reshape(-1)
        words = self._words[starts.reshape(-1)]
        other = np.flatnonzero(lengths != 8)
        if len(other):
            # Empty ones are zeros; short ones move to the end of their word, after zeros.
            words[other] = _each_byte(0x30)
            short = other[lengths[other] > 0]
            size = np.minimum(lengths[short], 8)
            moved = self._words[starts.reshape(-1)[short]] << _EIGHT * (8 - size).astype(np.uint64)
            words[short] = moved | (_each_byte(0x30) & ~_LAST_BYTES[size])
        found, wrong = _from_hex(words)
        if len(other):
            wrong[other] |= lengths[other] > 8
        return found.reshape(shape), wrong.reshape(shape)

    def texts(self, columns: slice) -> Values:
        """Any text as a number, see text_keys."""
        starts, lengths = self.span(columns)
        keys, checks = self._keys(starts.reshape(-1), lengths.reshape(-1))
        shape = starts.shape
        return Values(keys.reshape(shape), None if checks is None else checks.reshape(shape))

    def _keys(self, starts: Places, lengths: Places) -> Values:
        return text_keys(self._words, starts, lengths, has_nul=self._has_nul)

    def lists(self, column: int, separator: str) -> tuple[Values, Places]:
        """The texts of fields that hold several, as numbers, one after the other; and how many each
        line has: [lines]. Empty ones do not count."""
        starts, lengths = (each[0] for each in self.span(one(column)))
        marks = np.flatnonzero(self._bytes == ord(separator))
        of = np.searchsorted(starts, marks, side="right") - 1
        inside = (of >= 0) & (marks < (starts + lengths)[of]) if len(starts) else of > 0
        marks, of = marks[inside], of[inside]
        # Fields lie behind one another, so sorting puts a value's begin beside its end.
        begins = np.sort(np.concatenate([starts, marks + 1]))
        sizes = np.sort(np.concatenate([starts + lengths, marks])) - begins
        owners = np.sort(np.concatenate([np.arange(len(starts)), of]))[sizes > 0]
        keys = self._keys(begins[sizes > 0], sizes[sizes > 0])
        return keys, np.bincount(owners, minlength=len(starts))

    def spelled(self, columns: slice, word: bytes) -> Mask:
        """Which fields are a word of up to 8 lower-case letters, in upper or lower case."""
        starts, lengths = self.span(columns)
        letters = _FIRST_BYTES[len(word)]
        lower = (self._words[starts] & letters) | (_each_byte(0x20) & letters)
        found: Mask = (lower == np.uint64(int.from_bytes(word, "little"))) & (lengths == len(word))
        return found

    def numbers(self, columns: slice) -> tuple[NDArray[np.float64], Mask, Mask]:
        """Numbers of any form; and which fields are empty or NaN, whose value is 0; and which are
        wrong."""
        whole, empty, wrong = self.integers(columns)
        found = whole.astype(np.float64)
        if wrong.any():
            starts, lengths = (each[wrong] for each in self.span(columns))
            digits, places, other = self._digits(starts, lengths)
            # Both are floats without rounding, so that their quotient is rounded once, and right.
            found[wrong] = digits / _TENS[np.maximum(places, 0)]
            wrong[wrong] = other | (np.abs(digits) > _MOST_EXACT)
        if wrong.any():
            missing = self.spelled(columns, b"nan")
            found[missing], wrong = 0, wrong & ~missing
            empty = empty | missing
        for column, line in zip(*np.nonzero(wrong), strict=True):  # exponents, very long ones
            text = self.value(columns.start + int(column), int(line), most=1 << 20)
            found[column, line], wrong[column, line] = _number(text)
        return found, empty, wrong

    def _digits(self, starts: Places, lengths: Places) -> tuple[Places, Places, Mask]:
        """A byte at a time: the digits as one number, how many of them follow a point (-1: there
        is none), and which fields are anything else, or have too many digits."""
        negative = self._bytes[starts] == _MINUS
        starts, lengths = starts + negative, lengths - negative
        found, places = np.zeros(len(starts), np.int64), np.full(len(starts), -1)
        wrong = (lengths - 1 > _MOST_DIGITS) | (lengths < 1)
        for done in range(min(_MOST_DIGITS + 1, int(lengths.max(initial=0)))):
            byte = self._bytes[np.minimum(starts + done, len(self._bytes) - 1)]
            digit, inside = byte - np.uint8(_ZERO), lengths > done
            is_digit = (digit < 10) & inside
            found = np.where(is_digit, found * 10 + digit, found)
            places += is_digit & (places >= 0)
            is_point = (byte == _POINT) & (places < 0) & inside
            places += is_point
            wrong |= inside & ~is_digit & ~is_point
        wrong |= lengths - (places >= 0) > _MOST_DIGITS
        wrong |= (lengths == 1) & (places >= 0)
        found[wrong] = 0
        return np.where(negative, -found, found), places, wrong


def one(column: int) -> slice:
    return slice(column, column + 1)


def _number(text: str) -> tuple[float, bool]:
    try:
        value = float(text)
    except ValueError:
        return 0.0, True
    return (value, False) if math.isfinite(value) and "_" not in text else (0.0, True)


def words_at(data: NDArray[np.uint8]) -> Words:
    """The 8 bytes from each position on, as one word: a view, in which words overlap."""
    return as_strided(data[:8].view(np.uint64), shape=(len(data) - 8,), strides=(1,))


def text_keys(words: Words, starts: Places, lengths: Places, *, has_nul: bool) -> Values:
    """Texts as numbers. Up to 8 bytes are the number themselves; a hash stands for longer texts and
    for those that end in a NUL byte, which their number would not show. `has_nul`: whether any
    NUL byte may be in the texts."""
    keys = words[starts]
    keys &= _FIRST_BYTES[np.minimum(lengths, 8)]
    hashed = lengths > 8
    if has_nul:
        hashed |= (lengths > 0) & (keys <= _FIRST_BYTES[np.clip(lengths - 1, 0, 8)])
    at = np.flatnonzero(hashed)
    if not len(at):
        return Values(keys)
    checks = np.full(len(keys), EXACT)
    keys[at], second = _hashed(words, starts[at], lengths[at])
    checks[at] = _check(second)
    return Values(keys, checks)


def hashed_at(found: Values, where: Mask) -> Values:
    """Replace the keys that `where` marks by hashes of them."""
    at = np.flatnonzero(where)
    if not len(at):
        return found
    keys = found.keys.copy()
    checks = np.full(len(keys), EXACT) if found.checks is None else found.checks
    checks[at] = (checks[at] ^ _check(stirred(keys[at]))) | _HASHED
    keys[at] = mixed(keys[at])
    return Values(keys, checks)


def _check(second: Words) -> Checks:
    found: Checks = (second >> np.uint64(32)).astype(np.uint32) | _HASHED
    return found


def _hashed(words: Words, starts: Places, lengths: Places) -> tuple[Words, Words]:
    """Two independent hashes of 64 bits."""
    first = mixed(lengths.astype(np.uint64))
    second = first.copy()
    one, two, at = first, second, np.arange(len(lengths))
    while len(at):
        next_ = words[starts] & _FIRST_BYTES[np.minimum(lengths, 8)]
        one, two = mixed(one ^ next_), stirred(two ^ next_)
        starts, lengths = starts + 8, lengths - 8
        left = lengths > 0
        if not left.all():  # few texts may be very long
            first[at], second[at] = one, two
            one, two, at = one[left], two[left], at[left]
            starts, lengths = starts[left], lengths[left]
    return first, second


def stirred(words: Words) -> Words:
    """A cheaper `mixed`, whose leading half depends on every bit of a word."""
    words = words * np.uint64(0xD1342543DE82EF95)
    return words ^ (words >> np.uint64(32))


_IS_HEX = np.zeros(256, np.bool_)
_IS_HEX[list(b"0123456789abcdefABCDEF")] = True


def _from_hex(words: Words) -> tuple[NDArray[np.uint32], Mask]:
    """The numbers that 8 digits each are; and which are none, whose number is 0."""
    wrong: Mask = np.zeros(len(words), np.bool_)
    try:
        found = unhexlify(words.data)  # four times as fast as arithmetic on words
    except ValueError:
        wrong |= ~_IS_HEX[words.view(np.uint8).reshape(-1, 8)].all(axis=1)
        words[wrong] = _each_byte(_ZERO)
        found = unhexlify(words.data)
    return np.frombuffer(found, ">u4").astype(np.uint32), wrong


def count_lines(text: bytes) -> int:
    """Ends of lines; bytes.count takes four times as long where lines are short."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _NEWLINE))


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
        self._first: list[BadLine] = []

    def refuse(self, wrong: Mask, columns: slice, reason: Callable[[int, str], str]) -> None:
        """`wrong` is [columns, lines]; the reason is told the column, from the first, and the
        text."""
        if not wrong.any():
            return
        for column, mask in enumerate(wrong):
            for line in np.flatnonzero(mask & ~self._wrong)[:EXAMPLES].tolist():
                text = reason(column, self._fields.value(columns.start + column, line))
                self._first.append(BadLine(int(self._fields.lines[line]), text))
            self._wrong |= mask

    @property
    def good(self) -> Mask:
        return ~self._wrong

    @property
    def bad(self) -> BadLines:
        count = int(np.count_nonzero(self._wrong))
        return BadLines.joined([self._fields.bad, BadLines(count, tuple(self._first))])
