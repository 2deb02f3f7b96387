"""A seeded permutation of 0..n-1, without a table: one of a billion rows takes no more memory than
one of ten."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotrow.support.hashing import mix


class Scatter:
    """A permutation of 0..num_rows-1.

    Multiplying by an odd number, adding, and xor with a right shift are each one-to-one on words of
    b bits, so their product permutes 0..2^b-1. A result past the last row is permuted again until
    it falls inside: that follows the cycle it started on, so no two positions meet. The words are
    less than twice the rows, hence two passes on average at most.
    """

    def __init__(self, num_rows: int, *, key: int) -> None:
        bits = (num_rows - 1).bit_length()
        self._num_rows = np.uint64(num_rows)
        self._mask = np.uint64((1 << bits) - 1)
        self._shift = np.uint64(bits // 2 + 1)
        keys = [mix(key + step) for step in range(8)]
        self._rounds = [
            (np.uint64(a | 1), np.uint64(b)) for a, b in zip(keys[::2], keys[1::2], strict=True)
        ]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        ids = self._permute(positions.astype(np.uint64))
        outside = np.flatnonzero(ids >= self._num_rows)
        while len(outside):
            moved = self._permute(ids[outside])
            ids[outside] = moved
            outside = outside[moved >= self._num_rows]
        return ids.view(np.int64)

    def _permute(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for factor, offset in self._rounds:
            words = (words * factor + offset) & self._mask
            words ^= words >> self._shift
        return words
