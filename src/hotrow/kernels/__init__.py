"""Operations on rows and ids, chosen by the device of the tensors they work on.

`reference` is the specification: plain PyTorch, any device. Faster forms keep its signatures.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hotrow.kernels import reference
from hotrow.kernels.reference import Moves, SortedIds


class Kernels(Protocol):
    """What every set of kernels offers; `reference` says what each one means."""

    def sort_ids(self, ids: Tensor, num_rows: int) -> SortedIds: ...

    def take(self, rows: Tensor, index: Tensor, dim: int) -> Tensor: ...

    def pool(
        self,
        vectors: Tensor,
        index: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
        divisor: Tensor | None,
    ) -> Tensor: ...

    def sum_by_row(
        self, grads: Tensor, bag_of: Tensor, weights: Tensor | None, ids: SortedIds
    ) -> Tensor: ...

    def sum_pairs(self, grads: Tensor, ids: SortedIds) -> Tensor: ...

    def weight_grads(
        self, vectors: Tensor, index: Tensor, bag_of: Tensor, grads: Tensor
    ) -> Tensor: ...

    def fill(self, slots: Tensor, store: Tensor, moves: Moves) -> None: ...


def for_device(device: torch.device) -> Kernels:
    """The kernels for rows that live on `device`."""
    return reference
