"""Batches as models read them. Knows nothing about rows, slots or strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.inputs.batch import KeyedJaggedTensor


@dataclass(frozen=True)
class _Batch:
    """What moves all parts of a batch."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return the batch in page-locked memory; DataLoader looks for this name."""
        return self._each(lambda part: part.pin_memory())

    def clone(self) -> Self:
        """Return the batch in memory of its own: a loader's batch is a part of a larger block."""
        return self._each(lambda part: part.clone())

    def _each(self, change: Callable[[Any], Any]) -> Self:
        return type(self)(*(change(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class ClickBatch(_Batch):
    """Samples as a model reads them."""

    dense: Tensor  # [B, num_dense] float32
    sparse: Tensor | KeyedJaggedTensor  # [B, F] int64 if every feature has one lookup
    label: Tensor  # [B] float32

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class SequenceBatch(_Batch):
    """Samples of T past steps and a target, as `hotrow.models.TBSM` reads them.

    All have T + 1 steps, the target last; a shorter history is padded in front.
    """

    dense: Tensor  # [B, T + 1, num_dense] float32
    sparse: KeyedJaggedTensor  # T + 1 ids per sample and feature
    lengths: Tensor  # [B] int64: past steps without padding
    label: Tensor  # [B] float32

    @classmethod
    def from_ids(
        cls,
        dense: Tensor,
        ids: Mapping[str, Tensor],  # by feature, [B, T + 1]
        label: Tensor,
        lengths: Tensor | None = None,  # None: there is no padding
    ) -> SequenceBatch:
        if dense.dim() != 3 or not ids:
            raise ValueError(
                "dense must be [batch, steps, features] and ids name a feature or more; got "
                f"{list(dense.shape)} and {len(ids)}"
            )
        size, steps, _ = dense.shape
        for name, of_feature in ids.items():
            if of_feature.shape != (size, steps):
                raise ValueError(
                    f"feature {name!r} has ids {list(of_feature.shape)}; dense has {size} samples "
                    f"of {steps} steps, the target counted"
                )
        if lengths is None:
            lengths = torch.full((size,), steps - 1)
        if lengths.shape != (size,):
            raise ValueError(f"lengths must be a number for each of {size} samples, not {lengths}")
        if len(bad := ((lengths < 0) | (lengths >= steps)).nonzero()):
            raise ValueError(
                f"sample {int(bad[0])} has a history of {int(lengths[bad[0]])} steps; there are "
                f"{steps - 1} before the target"
            )
        values = torch.cat([of_feature.reshape(-1) for of_feature in ids.values()])
        offsets = torch.arange(0, values.numel() + 1, steps)
        return cls(dense, KeyedJaggedTensor(list(ids), values, offsets=offsets), lengths, label)

    def __len__(self) -> int:
        return len(self.label)


def positions(steps: int) -> NDArray[np.float32]:
    """Return the position of each step in its sequence, [steps + 1], from 0 to below 1: the number
    that the TBSM reference gives to each step."""
    return (np.arange(steps + 1) / (steps + 1)).astype(np.float32)
