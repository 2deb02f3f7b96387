"""Sizes of buffers for batches of changing size. Knows numbers only."""

from __future__ import annotations


class Room:
    """Sizes of buffers for batches of changing size: few different ones, so that launches repeat.

    The first size is taken as it is, since many loaders have no other. A larger one brings spare
    room. Much smaller sizes are rounded up on their own.
    """

    def __init__(self) -> None:
        self.most = 0
        self._is_fixed = False

    def fix(self, most: int) -> None:
        """Set the largest size for good."""
        self.most, self._is_fixed = most, True

    def __call__(self, count: int) -> int:
        if count > self.most and not self._is_fixed:
            self.most = _eighths(count + count // 8) if self.most else count
        return self.most if self.most // 2 < count <= self.most else _eighths(count)


def _eighths(count: int) -> int:
    """Round up, by an eighth at most, to one of eight numbers between two powers of two."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step
