"""Which rows were written since somebody last asked: a bit for each. Knows ids alone."""

from __future__ import annotations

import torch
from torch import Tensor


class ChangedRows:
    """32 rows in a word of int32, as everywhere where rows have bits."""

    def __init__(self, num_rows: int) -> None:
        # Padding has an id, too.
        self.bits = torch.zeros(num_rows // 32 + 1, dtype=torch.int32)

    def copy(self) -> ChangedRows:
        """As they are now."""
        made = ChangedRows(0)
        made.bits = self.bits.clone()
        return made

    def note(self, ids: Tensor) -> None:
        """Rows, each given once, were written."""
        ids = ids.to(self.bits.device)
        words, place = torch.unique(ids >> 5, return_inverse=True)
        bit = torch.ones_like(ids).bitwise_left_shift_(ids & 31).int()
        # No two ids have the same bit of a word, so their sum has both.
        more = torch.zeros(len(words), dtype=torch.int32).index_add_(0, place, bit)
        self.bits[words] |= more

    def between(self, first: int, last: int) -> Tensor:
        """Those of the rows first..last-1 that were written, in order."""
        low = first >> 5
        words = self.bits[low : -(-last // 32)]
        is_set = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        ids = is_set.flatten().nonzero().squeeze(1) + 32 * low
        return ids[(ids >= first) & (ids < last)]
