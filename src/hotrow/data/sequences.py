"""Samples with a history. Knows nothing about rows, slots or strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.inputs.batch import KeyedJaggedTensor


@dataclass(frozen=True)
class SequenceBatch:
    """Samples of T past steps and a target, as `hotrow.models.TBSM` reads them.

    All have T + 1 steps, the target's last; a shorter history is padded in front.
    """

    dense: Tensor  # [B, T + 1, num_dense] float32
    sparse: KeyedJaggedTensor  # T + 1 ids per sample and feature
    lengths: Tensor  # [B] int64: past steps that are no padding
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
        for name, each in ids.items():
            if each.shape != (size, steps):
                raise ValueError(
                    f"feature {name!r} has ids {list(each.shape)}; dense has {size} samples of "
                    f"{steps} steps, the target counted"
                )
        if lengths is None:
            lengths = torch.full((size,), steps - 1)
        _check_lengths(lengths, size, most=steps - 1)
        values = torch.cat([each.reshape(-1) for each in ids.values()])
        offsets = torch.arange(0, values.numel() + 1, steps)
        return cls(dense, KeyedJaggedTensor(list(ids), values, offsets=offsets), lengths, label)

    def __len__(self) -> int:
        return len(self.label)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequenceBatch:
        return SequenceBatch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            lengths=self.lengths.to(device, non_blocking=non_blocking),
            label=self.label.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> SequenceBatch:
        """The batch in page-locked memory; the name is the one DataLoader looks for."""
        return SequenceBatch(
            dense=self.dense.pin_memory(),
            sparse=self.sparse.pin_memory(),
            lengths=self.lengths.pin_memory(),
            label=self.label.pin_memory(),
        )

    def clone(self) -> SequenceBatch:
        """The batch in memory of its own: what a loader gives is a part of a larger block."""
        return SequenceBatch(
            self.dense.clone(), self.sparse.clone(), self.lengths.clone(), self.label.clone()
        )


def _check_lengths(lengths: Tensor, size: int, *, most: int) -> None:
    if lengths.shape != (size,):
        raise ValueError(f"lengths must be one number for each of {size} samples, not {lengths}")
    bad = (lengths < 0) | (lengths > most)
    if bool(bad.any()):
        sample = int(bad.int().argmax())
        raise ValueError(
            f"sample {sample} has a history of {int(lengths[sample])} steps; there are {most} "
            "before the target"
        )


def places(steps: int) -> NDArray[np.float32]:
    """Where in its sequence each step is, [steps + 1] from 0 on: the number that the TBSM reference
    gives to each."""
    return (np.arange(steps + 1) / (steps + 1)).astype(np.float32)
