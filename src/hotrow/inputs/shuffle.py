"""The order of samples: a function of the seed alone.

A split is a list of blocks, each contiguous on disk. In every epoch blocks are shuffled; then as
many as hold `mixed` samples form a stretch, and the samples of a stretch are shuffled. So any two
samples may be in one batch, and files are read by blocks, never by samples. Without a seed the
order does not change.

Nothing is drawn sequentially, so any place of any epoch is found without those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hotrow.support.hashing import hashed, key_of

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Stretch:
    """Samples that are read and shuffled together."""

    blocks: Places  # in the order in which they are read
    first: int  # its first sample's place in the epoch
    samples: int
    key: int | None  # of their order; None: as they are

    def order(self) -> Places | None:
        return None if self.key is None else shuffled(self.samples, key=self.key)


class Order:
    def __init__(self, sizes: NDArray[np.int64], *, mixed: int, seed: int | None) -> None:
        """`sizes`: the samples of each block."""
        self._sizes, self._mixed, self._seed = sizes, mixed, seed
        self.samples = int(sizes.sum())

    @cached_property
    def firsts(self) -> Places:
        """The first sample of each block, as they lie."""
        return np.cumsum(self._sizes) - self._sizes

    def numbers(self, stretch: Stretch, places: Places) -> tuple[Places, Places]:
        """Return the blocks and the numbers of the samples at these places of a stretch, where its
        blocks are read one after another."""
        sizes = self._sizes[stretch.blocks]
        ends = np.cumsum(sizes)
        of = np.searchsorted(ends, places, side="right")
        blocks = stretch.blocks[of]
        return blocks, places + (self.firsts[stretch.blocks] - (ends - sizes))[of]

    def stretches(self, epoch: int, first: int = 0) -> Iterator[Stretch]:
        """Yield the stretches of an epoch, from the one that holds the sample at `first` on."""
        blocks: Places = np.arange(len(self._sizes))
        key = None
        if self._seed is not None:
            blocks = shuffled(len(blocks), key=key_of(self._seed, "blocks", epoch))
            key = key_of(self._seed, "stretch", epoch)
        ends = np.cumsum(self._sizes[blocks])
        # A stretch ends with the block that reaches the next multiple of `mixed`.
        cuts = np.flatnonzero(np.diff((ends - 1) // self._mixed, prepend=-1)) if len(ends) else ends
        for number, cut in enumerate(cuts):
            stop = int(cuts[number + 1]) if number + 1 < len(cuts) else len(ends)
            begin, end = int(ends[cut - 1]) if cut else 0, int(ends[stop - 1])
            if end > first:
                own = None if key is None else key_of(key, "samples", number)
                # Ascending, as they lie: their samples are shuffled anyway.
                yield Stretch(np.sort(blocks[cut:stop]), begin, end - begin, own)


def shuffled(count: int, *, key: int) -> Places:
    """Return 0..count-1 in an order that depends on the key alone, not on library versions."""
    # The upper bits of a hash with the place below them: all different, so every sort gives the
    # same order, and sorting numbers is twice as fast as sorting places by them.
    places = np.arange(count)
    below = np.uint64((1 << count.bit_length()) - 1)
    mixed = hashed(places, key=key)
    mixed &= ~below
    mixed |= places.view(np.uint64)
    mixed.sort()
    mixed &= below
    return mixed.view(np.int64)
