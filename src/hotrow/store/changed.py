"""Which rows were written, and which no step changes. Knows ids only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.kernels.reference import bits_of, in_bits
from hotrow.support.streams import synchronize


class ChangedRows:
    """A bit per row, 32 in a word of int32. Bits are set on the device where the ids are."""

    def __init__(self, num_rows: int, device: torch.device | None = None) -> None:
        """`device`: rows may be written there as well as on the host."""
        # Padding has an id, too.
        self.bits = torch.zeros(num_rows // 32 + 1, dtype=torch.int32)
        # A captured step sets bits here, so the address stays when `clear` is called.
        self.there = self.bits
        if device is not None and device.type != "cpu":
            self.there = torch.zeros_like(self.bits, device=device)

    def clear(self) -> None:
        """Forget all rows."""
        for bits in (self.bits, self.there):
            bits.zero_()

    def copy(self) -> ChangedRows:
        """Return a copy on the host."""
        copied = ChangedRows(0)
        copied.bits = copied.there = self._on_host(slice(None)).clone()
        return copied

    def note(self, ids: Tensor) -> None:
        """Note that rows, each given once, were written."""
        bits = self.bits if ids.device.type == "cpu" else self.there
        words, place = torch.unique(ids >> 5, return_inverse=True)
        bit = torch.ones_like(ids).bitwise_left_shift_(ids & 31).int()
        # No two ids have the same bit of a word, so their sum has both.
        more = bits.new_zeros(len(words)).index_add_(0, place, bit)
        bits[words] |= more

    def between(self, first: int, last: int) -> Tensor:
        """Return the rows among first..last-1 that were written, in order."""
        low = first >> 5
        words = self._on_host(slice(low, -(-last // 32)))
        is_set = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        ids = is_set.flatten().nonzero().squeeze(1) + 32 * low
        return ids[(ids >= first) & (ids < last)]

    def _on_host(self, words: slice) -> Tensor:
        """Return the bits of host and device together; waits for the device."""
        if self.there is self.bits:
            return self.bits[words]
        return self.bits[words] | self.there[words].cpu()

    @property
    def device_bytes(self) -> int:
        return 0 if self.there is self.bits else self.there.nbytes


class TouchedRows:
    """Whether each of a few rows was written. Noting never waits for a device."""

    def __init__(self, ids: Tensor, device: torch.device) -> None:
        """`ids`: ascending, on the host; `device`: rows may be written there as well."""
        self.ids = ids
        self._counts = {
            place.type: (ids.to(place), torch.zeros(len(ids), dtype=torch.int32, device=place))
            for place in (torch.device("cpu"), device)
        }
        if device.type == "cuda":
            synchronize(device)  # writers use other streams

    def note(self, ids: Tensor) -> None:
        """Note that rows, each given once, are about to be written; -1: none."""
        watched, counts = self._counts[ids.device.type]
        if not len(watched):
            return
        at = torch.searchsorted(watched, ids.long()).clamp_(max=len(watched) - 1)
        is_watched = watched[at] == ids
        if ids.device.type == "cpu":
            counts[at[is_watched]] = 1  # safe from several threads: all of them write 1
        else:
            counts.index_add_(0, at, is_watched.int())  # a mask would wait for the device

    def among(self, ids: Tensor) -> Tensor:
        """Return a mask of the watched `ids` that were written; waits for the device."""
        written = torch.stack([counts.cpu() for _, counts in self._counts.values()]).any(0)
        return written[torch.searchsorted(self.ids, ids)]


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

    def freeze(self, ids: Tensor | FrozenRows | None) -> None:
        """Freeze these rows, or those of another store of the same rows, and no others; None frees
        the bits as well."""
        if ids is None:
            self.bits = self._host_bits = None
            return
        if isinstance(ids, FrozenRows):
            self.bits, self._host_bits = ids.bits, ids._host_bits
            return
        if self.bits is None:
            self.bits = torch.empty(-(-self._size // 32), dtype=torch.int32, device=self._device)
            self._host_bits = self.bits if self.bits.device.type == "cpu" else self.bits.cpu()
        bits_of(ids.to(self._device), self._size, out=self.bits)
        if self._host_bits is not self.bits:
            bits_of(ids.cpu(), self._size, out=self._host_bits)

    def ids(self) -> Tensor:
        """Return the ids of frozen rows, in order, on the host."""
        if self._host_bits is None:
            return torch.empty(0, dtype=torch.int64)
        is_set = (self._host_bits[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return is_set.flatten().nonzero().squeeze(1)

    def moving(self, ids: Tensor) -> Tensor | None:
        """Return a mask of the rows that a step changes; None: all of them."""
        moves = None if self.bits is None else ~self.among(ids)
        trained = self.trained(ids)
        return trained if moves is None else moves if trained is None else moves & trained

    def among(self, ids: Tensor) -> Tensor:
        """Return a mask of the frozen rows."""
        bits = self._host_bits if ids.device.type == "cpu" else self.bits
        return torch.zeros_like(ids, dtype=torch.bool) if bits is None else in_bits(bits, ids)

    def trained(self, ids: Tensor) -> Tensor | None:
        """Return a mask of the rows that are not untrained padding; None: all of them."""
        if self.untrained is None:
            return None
        return ~torch.isin(ids, self.untrained.to(ids.device))

    @property
    def device_bytes(self) -> int:
        return 0 if self.bits is None else self.bits.nbytes
