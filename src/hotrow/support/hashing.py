"""Seeded hashing of integers: numbers that look random, the same wherever they are asked for."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import NDArray

UINT64_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """One 64-bit number that depends on every bit of `value` (splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & UINT64_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & UINT64_MASK
    return value ^ (value >> 31)


def key_of(seed: int, purpose: str, table: int) -> int:
    """A key of its own for every use of a seed in every table."""
    # As Python's own number: a seed of numpy or torch would overflow, and give another key.
    return mix(mix(mix(operator.index(seed)) ^ int.from_bytes(purpose.encode()[:8])) + table)


def hashed(values: NDArray[np.int64], *, key: int) -> NDArray[np.uint64]:
    """64 bits per value; `mix` for arrays, with the key in place of its constant."""
    bits = values.astype(np.uint64)
    bits += np.uint64(mix(key))
    return _finished(bits)


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Words of which every bit depends on every bit given, no two alike (splitmix64's end)."""
    return _finished(words.copy())


def _finished(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each word in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return bits
