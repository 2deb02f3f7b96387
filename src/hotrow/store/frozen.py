"""Rows that no step changes: a bit per row for those that a caller freezes, and padding rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.kernels.reference import bits_of, in_bits


class FrozenRows:
    """Frozen rows of one store, for the host and for the device that updates rows.

    `bits` keeps its address while it is a tensor, so that a captured step sees what is frozen now.
    """

    def __init__(self, num_rows: int, device: torch.device, untrained: Sequence[int] = ()) -> None:
        """`untrained`: ids of padding rows that no step changes, whatever is frozen."""
        self.bits: Tensor | None = None  # on `device`; None: a captured step need not look
        self._host_bits: Tensor | None = None  # the same; the same tensor where `device` is a CPU
        self.untrained = torch.tensor(untrained, device=device) if untrained else None
        self._device = device
        self._size = num_rows + 1  # padding has an id, too

    def freeze(self, ids: Tensor | None) -> None:
        """Freeze these rows and no others; None frees the bits as well."""
        if ids is None:
            self.bits = self._host_bits = None
            return
        if self.bits is None:
            self.bits = torch.empty(-(-self._size // 32), dtype=torch.int32, device=self._device)
            self._host_bits = self.bits if self.bits.device.type == "cpu" else self.bits.cpu()
        bits_of(ids.to(self._device), self._size, out=self.bits)
        if self._host_bits is not self.bits:
            bits_of(ids.cpu(), self._size, out=self._host_bits)

    def moving(self, ids: Tensor) -> Tensor | None:
        """Return a mask of the rows that a step changes; None: all of them."""
        bits = self._host_bits if ids.device.type == "cpu" else self.bits
        moves = None if bits is None else ~in_bits(bits, ids)
        trained = self.trained(ids)
        return trained if moves is None else moves if trained is None else moves & trained

    def trained(self, ids: Tensor) -> Tensor | None:
        """Return a mask of the rows that are not untrained padding; None: all of them."""
        if self.untrained is None:
            return None
        return ~torch.isin(ids, self.untrained.to(ids.device))

    @property
    def device_bytes(self) -> int:
        return 0 if self.bits is None else self.bits.nbytes
