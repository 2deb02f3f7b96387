"""Whole batches, which every rank has read: ranks compare what they have of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hotrow.distributed.ranks import RankError


def checksum_of(tensors: Iterable[Tensor], *, waits: bool = True) -> int:
    """Return a number that tells tensors with other values, types or shapes apart. Without `waits`,
    no device is waited for: of its tensors, types and shapes alone count."""
    number = 1  # not 0, which says that there is none
    for tensor in tensors:
        kind = f"{tensor.dtype} {tuple(tensor.shape)}"
        number = zlib.crc32(kind.encode(), number)
        if tensor.numel() and (waits or tensor.device.type == "cpu"):
            values = tensor.detach().cpu().contiguous().flatten()
            number = zlib.crc32(values.view(torch.uint8).numpy().data, number)
    return number


def check_equal(said: Sequence[object], what: str) -> None:
    """Raise if a rank has said something else than the first one of `what` they have."""
    for rank, other in enumerate(said):
        if other != said[0]:
            raise RankError(
                f"rank {rank} has other data than rank 0: {what} differs. A system decides from "
                "whole batches, which all ranks read alike: give every rank the same loader, with "
                "the same seed and without a sampler of its own such as DistributedSampler; "
                "hotrow's loaders, given as they are and not as lists, do so by themselves"
            )
