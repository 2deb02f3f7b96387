"""A batch's lookups sorted by id, in tensors of fixed capacity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """L lookups of U unique rows. L is the host's knowledge, U the device's.

    Padding sorts last: it is the id `num_rows`, one more unique row.
    """

    order: Tensor  # [L] int32: positions in the batch, sorted by id, stably
    rank: Tensor  # [L] int32: of each sorted position, the place of its id among the unique ones
    starts: Tensor  # [L + 1] int32: where the run of each unique id begins; entry U is L
    ids: Tensor  # [L] int32 or int64: the unique ids, ascending; only the first U are written
    count: Tensor  # [1] int32: U


def segments_of(ids: Tensor) -> Segments:
    """Segments of a batch that has no plan; `ids` [L], padding being the largest."""
    keys, order = torch.sort(ids, stable=True)
    is_first = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=is_first[1:])
    rank = is_first.cumsum(0) - 1
    count = is_first.sum(dtype=torch.int32).view(1)
    # Those that are not first write to a place that is cut off.
    place = torch.where(is_first, rank, ids.numel())
    every = torch.arange(ids.numel(), device=ids.device)
    starts = torch.full((ids.numel() + 1,), ids.numel(), device=ids.device)
    unique = torch.empty(ids.numel() + 1, dtype=ids.dtype, device=ids.device)
    starts[place] = torch.where(is_first, every, ids.numel())
    unique[place] = keys
    return Segments(order.int(), rank.int(), starts.int(), unique[:-1], count)
