"""Vectors of one width on their way from their owners. Knows places, not rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hotrow.distributed.ranks import Pending


@dataclass(frozen=True)
class Arrival:
    """Vectors that a rank has asked for, owner by owner, in one or several messages."""

    count: int  # of vectors
    messages: Sequence[tuple[Tensor | None, Pending]]  # the places of vectors, None: all in order

    def wait(self) -> Tensor:
        """Return the vectors when they are there; on a device its stream waits, where it can."""
        came = [(places, pending.wait()) for places, pending in self.messages]
        if len(came) == 1 and came[0][0] is None:
            return came[0][1]
        vectors = came[0][1].new_empty(self.count, *came[0][1].shape[1:])
        for places, part in came:
            assert places is not None
            vectors.index_copy_(0, places, part)
        return vectors

    @property
    def values(self) -> list[Tensor]:
        """The memory in which vectors arrive."""
        return [pending.values for _, pending in self.messages]
