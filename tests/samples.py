"""Samples whose columns follow from their numbers, as sources have them, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data import ClickBatch
from hotrow.data.prepared import Jagged
from hotrow.data.sources import Samples

FEATURES = ("a", "list", "b")


class Memory:
    """A source that can do no more than it must. Sample i has the ids i and `base` + i, and a list
    of i % 4 ids if there are lists."""

    single = ("a", "b")

    def __init__(
        self, sizes: Sequence[int], *, jagged: bool = False, broken: int = -1, base: int = 1000
    ) -> None:
        self.sizes, self._firsts = np.array(sizes, dtype=np.int64), np.cumsum([0, *sizes])
        self.features = FEATURES if jagged else self.single
        self._broken, self._base = broken, base

    def read(self, blocks: NDArray[np.int64]) -> Samples:
        if self._broken in blocks:
            raise ValueError("the disk is gone")
        numbers = [np.arange(*self._firsts[block : block + 2]) for block in blocks]
        return columns(np.concatenate(numbers), self._base, jagged="list" in self.features)


def columns(numbers: NDArray[np.int64], base: int, *, jagged: bool = True) -> Samples:
    lengths = numbers % 4
    lists = Jagged(np.concatenate([[0], np.cumsum(lengths)]), base + np.repeat(numbers, lengths))
    return Samples(
        np.stack([numbers, base + numbers], axis=1),
        np.stack([numbers / 2, numbers], axis=1).astype(np.float32),
        (numbers % 2).astype(np.uint8),
        {"list": lists} if jagged else {},
    )


def numbers_of(batch: ClickBatch, base: int = 1000) -> list[int]:
    """Which samples a batch has; and that their columns belong together."""
    sparse: Any = batch.sparse
    if isinstance(sparse, Tensor):
        number, other = sparse.T
    else:
        size, values = len(batch), sparse.values()
        assert sparse.keys() == list(FEATURES)
        number, lists, other = values[:size], values[size:-size], values[-size:]
        lengths = torch.stack([torch.ones(size), number % 4, torch.ones(size)]).long()
        assert torch.equal(sparse.lengths().view(3, size), lengths)
        assert torch.equal(lists, base + number.repeat_interleave(number % 4))
    assert torch.equal(other, base + number)
    dense = torch.stack([number / 2, number.float()], 1)
    assert torch.equal(batch.dense, dense[:, : batch.dense.shape[1]])
    assert torch.equal(batch.label, (number % 2).float())
    return [int(each) for each in number]
