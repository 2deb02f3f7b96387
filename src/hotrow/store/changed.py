"""Which rows were written since somebody last asked: a bit for each. Knows ids alone."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.support.streams import synchronize


class ChangedRows:
    """32 rows in a word of int32, as everywhere where rows have bits. Noted where the ids are."""

    def __init__(self, num_rows: int, device: torch.device | None = None) -> None:
        """`device`: from where rows may be written, too."""
        # Padding has an id, too.
        self.bits = torch.zeros(num_rows // 32 + 1, dtype=torch.int32)
        # A captured step notes here by itself, wherever `clear` was called since.
        self.there = self.bits
        if device is not None and device.type != "cpu":
            self.there = torch.zeros_like(self.bits, device=device)

    def clear(self) -> None:
        """As if none were written."""
        for each in (self.bits, self.there):
            each.zero_()

    def copy(self) -> ChangedRows:
        """As they are now, on the host."""
        made = ChangedRows(0)
        made.bits = made.there = self._on_host(slice(None)).clone()
        return made

    def note(self, ids: Tensor) -> None:
        """Rows, each given once, were written."""
        bits = self.bits if ids.device.type == "cpu" else self.there
        words, place = torch.unique(ids >> 5, return_inverse=True)
        bit = torch.ones_like(ids).bitwise_left_shift_(ids & 31).int()
        # No two ids have the same bit of a word, so their sum has both.
        more = bits.new_zeros(len(words)).index_add_(0, place, bit)
        bits[words] |= more

    def between(self, first: int, last: int) -> Tensor:
        """Those of the rows first..last-1 that were written, in order."""
        low = first >> 5
        words = self._on_host(slice(low, -(-last // 32)))
        is_set = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        ids = is_set.flatten().nonzero().squeeze(1) + 32 * low
        return ids[(ids >= first) & (ids < last)]

    def _on_host(self, words: slice) -> Tensor:
        """All that was noted; waits for the device."""
        if self.there is self.bits:
            return self.bits[words]
        return self.bits[words] | self.there[words].cpu()

    @property
    def device_bytes(self) -> int:
        return 0 if self.there is self.bits else self.there.nbytes


class TouchedRows:
    """Of a few rows, whether each was written. Noted where the ids are, and nobody waits."""

    def __init__(self, ids: Tensor, device: torch.device) -> None:
        """`ids` in order, each once, on the host; `device`: from where they may be written, too."""
        self.ids = ids
        self._there = {
            each.type: (ids.to(each), torch.zeros(len(ids), dtype=torch.int32, device=each))
            for each in (torch.device("cpu"), device)
        }
        if device.type == "cuda":
            synchronize(device)  # whoever notes does so in a lane of his own

    def note(self, ids: Tensor) -> None:
        """Rows, each given once, are about to be written; -1: none."""
        mine, counts = self._there[ids.device.type]
        if not len(mine):
            return
        at = torch.searchsorted(mine, ids.long()).clamp_(max=len(mine) - 1)
        is_mine = mine[at] == ids
        if ids.device.type == "cpu":
            counts[at[is_mine]] = 1  # by several threads, none of which undoes another's
        else:
            counts.index_add_(0, at, is_mine.int())  # picking them would wait for the device

    def among(self, ids: Tensor) -> Tensor:
        """Which of these, which are among its own, were written; waits for the device."""
        written = torch.stack([counts.cpu() for _, counts in self._there.values()]).any(0)
        return written[torch.searchsorted(self.ids, ids)]
