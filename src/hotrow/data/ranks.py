"""The part of every batch that a rank trains. A batch is global: its parts, in rank order, are the
batch of a single process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hotrow.inputs import samples
from hotrow.support.numbers import whole

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class RankPart:
    """The part of one rank among `ranks`. Parts differ by at most one sample; the larger ones are
    those of the first ranks, and the last ranks may have none."""

    rank: int = 0
    ranks: int = 1

    def of(self, size: int) -> tuple[int, int]:
        """Return the first sample of this rank in a batch of `size` samples, and the first one
        after its part."""
        small, larger = divmod(size, self.ranks)
        first = self.rank * small + min(self.rank, larger)
        return first, first + small + (self.rank < larger)

    def cut(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch, which shares the memory of its tensors."""
        if self.ranks == 1:
            return batch
        size = len(batch)  # type: ignore[arg-type]
        part: Batch = samples.cut(batch, *self.of(size), size=size)
        return part


def given_part(rank: Any, ranks: Any) -> RankPart | None:
    """Return the part that arguments name; None if they leave it to torch.distributed."""
    if rank is None and ranks is None:
        return None
    if rank is None or ranks is None:
        raise ValueError(f"give both rank and ranks, or neither; got rank={rank}, ranks={ranks}")
    ranks, rank = whole("ranks", ranks, least=1), whole("rank", rank, least=0)
    if rank >= ranks:
        raise ValueError(f"rank must be below ranks, {ranks}, got {rank}")
    return RankPart(rank, ranks)


def current_part() -> RankPart:
    """Return the part of this process in the default process group; all if there is none."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return RankPart(distributed.get_rank(), distributed.get_world_size())
    return RankPart()
