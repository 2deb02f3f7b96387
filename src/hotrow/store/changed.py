"""Which rows were written: a bit for every row, or a counter for a few. Knows ids only."""

from __future__ import annotations

import torch
from torch import Tensor

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
