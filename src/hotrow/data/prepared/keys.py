"""Values as keys: whole numbers that are sorted, counted and looked up. Sees bytes, not columns.

Eight bytes of a text are one machine word, so that a handful of operations on whole arrays turns
all texts of a column into keys.
"""

from __future__ import annotations

from binascii import unhexlify
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from hotrow.support.hashing import mixed

Words = NDArray[np.uint64]
Mask = NDArray[np.bool_]
Places = NDArray[np.int64]
Checks = NDArray[np.uint32]

PAD = 32  # bytes behind texts, so that the words of the last ones may reach beyond them
EXACT = np.uint32(1)  # the check of a value whose key no other value can have
_HASHED = np.uint32(2)  # set in all other checks, so that none of them is 0 or EXACT
_EIGHT = np.uint64(8)
_ZEROS = np.uint64(int.from_bytes(b"00000000", "little"))
_IS_HEX = np.zeros(256, np.bool_)
_IS_HEX[list(b"0123456789abcdefABCDEF")] = True

# Masks for the first or last so many bytes of a word, as they lie in memory.
_FIRST_BYTES = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)
_LAST_BYTES = ~_FIRST_BYTES[::-1]


class Values(NamedTuple):
    """Values as numbers. Equal keys with different checks are different values."""

    keys: NDArray[Any]  # uint64; uint32 where values are that small
    checks: Checks | None = None  # None: all are EXACT


class Texts:
    """Texts that lie one behind the other, followed by PAD more bytes."""

    def __init__(self, data: NDArray[np.uint8], starts: Places, lengths: Places) -> None:
        # The 8 bytes from each position on, as one word: a view, in which words overlap.
        self._words = as_strided(data[:8].view(np.uint64), shape=(len(data) - 8,), strides=(1,))
        self._data, self._starts, self._lengths = data, starts, lengths

    def keys(self) -> Values:
        """Texts of up to 8 bytes are the number themselves. A hash stands for longer texts, and for
        those that end in a NUL byte, which their number would not show."""
        lengths = self._lengths
        keys = self._words[self._starts]
        keys &= _FIRST_BYTES[np.minimum(lengths, 8)]
        hashed = lengths > 8
        if not self._data[:-PAD].all():  # a NUL byte is in one of them
            hashed |= (lengths > 0) & (keys <= _FIRST_BYTES[np.clip(lengths - 1, 0, 8)])
        at = np.flatnonzero(hashed)
        if not len(at):
            return Values(keys)
        checks = np.full(len(keys), EXACT)
        keys[at], second = self._hashed(self._starts[at], lengths[at])
        checks[at] = _check(second)
        return Values(keys, checks)

    def _hashed(self, starts: Places, lengths: Places) -> tuple[Words, Words]:
        """Two independent hashes of 64 bits."""
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
        """Numbers of up to 8 hexadecimal digits, an empty text being 0; and which texts are none,
        whose number is 0."""
        words = self._words[self._starts]
        other = np.flatnonzero(self._lengths != 8)
        if len(other):
            # Empty ones are zeros; short ones move to the end of their word, after zeros.
            words[other] = _ZEROS
            short = other[self._lengths[other] > 0]
            size = np.minimum(self._lengths[short], 8)
            moved = self._words[self._starts[short]] << _EIGHT * (8 - size).astype(np.uint64)
            words[short] = moved | (_ZEROS & ~_LAST_BYTES[size])
        wrong = self._lengths > 8
        try:
            found = unhexlify(words.data)  # four times as fast as arithmetic on words
        except ValueError:
            wrong |= ~_IS_HEX[words.view(np.uint8).reshape(-1, 8)].all(axis=1)
            words[wrong] = _ZEROS
            found = unhexlify(words.data)
        return np.frombuffer(found, ">u4").astype(np.uint32), wrong


def hashed_at(values: Values, where: Mask) -> Values:
    """Replace the keys that `where` marks by hashes of them."""
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
    """A cheaper `mixed`, whose leading half depends on every bit of a word."""
    words = words * np.uint64(0xD1342543DE82EF95)
    return words ^ (words >> np.uint64(32))
