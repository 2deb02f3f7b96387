"""Rows that no step changes: a bit per row for those that a caller freezes, and padding rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.kernels.reference import bits_of, in_bits


class FrozenRows:
    """Frozen rows of a width group, on the device that updates its rows.

    `bits` keeps its address while it is a tensor, so that a captured step sees what is frozen now.
    """

    def __init__(self, num_rows: int, device: torch.device, untrained: Sequence[int] = ()) -> None:
        """`untrained`: ids of padding rows that no step changes, whatever is frozen."""
        self.bits: Tensor | None = None  # None: a captured step need not look
        self.untrained = torch.tensor(untrained, device=device) if untrained else None
        self._device = device
        self._size = num_rows + 1  # padding has an id, too

    def freeze(self, ids: Tensor | None) -> None:
        """Freeze these rows and no others; None frees the bits as well."""
        if ids is None:
            self.bits = None
            return
        if self.bits is None:
            self.bits = torch.empty(-(-self._size // 32), dtype=torch.int32, device=self._device)
        bits_of(ids.to(self._device), self._size, out=self.bits)

    def copy_from(self, other: FrozenRows) -> None:
        """Freeze the rows that another engine over the same store has frozen."""
        if other.bits is None or self.bits is None:
            bits = other.bits
            self.bits = None if bits is None else bits.to(self._device, copy=True)
        else:
            self.bits.copy_(other.bits)

    def moving(self, ids: Tensor) -> Tensor | None:
        """Return a mask of the rows that a step changes; None: all of them."""
        moves = None if self.bits is None else ~in_bits(self.bits, ids)
        trained = self.trained(ids)
        return trained if moves is None else moves if trained is None else moves & trained

    def trained(self, ids: Tensor) -> Tensor | None:
        """Return a mask of the rows that are not untrained padding; None: all of them."""
        if self.untrained is None:
            return None
        return ~torch.isin(ids, self.untrained.to(ids.device))
