"""Decisions of systems on several ranks: each rank makes them for itself, from the same data.

What ranks compare is small: a checksum of what was decided. A rank that has read other batches is
found here before its rows are pinned or skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from hotrow.distributed.ranks import RankError
from hotrow.distributed.whole_batches import check_equal, checksum_of
from hotrow.embedding.collection import EmbeddingBagCollection

Result = TypeVar("Result")


def check_same(embedding: EmbeddingBagCollection, what: str, *facts: Tensor | float) -> None:
    """Raise on all ranks if they do not have equal facts; `what` these are. One rank has no other.

    All ranks call it together, when nothing is in flight."""
    if embedding.ranks is not None:
        tensors = [x if isinstance(x, Tensor) else torch.tensor(x) for x in facts]
        check_equal(embedding.row_access.meet(str(checksum_of(tensors))), what)


def is_first(embedding: EmbeddingBagCollection) -> bool:
    """Return whether this is the first rank, or the only one."""
    return embedding.ranks is None or embedding.ranks.rank == 0


def of_first(embedding: EmbeddingBagCollection, fact: bool) -> bool:
    """Return what the first rank knows."""
    known: bool = json.loads(embedding.row_access.meet(json.dumps(fact))[0])
    return known


def first_alone(embedding: EmbeddingBagCollection, work: Callable[[], Result]) -> Result:
    """Do some work on the first rank, and then on the others. What fails on one raises on all."""
    if embedding.ranks is None:
        return work()
    results: list[Result] = []
    for is_turn in (is_first(embedding), not is_first(embedding)):
        error: Exception | None = None
        if is_turn:
            try:
                results.append(work())
            except Exception as raised:
                error = raised
        said = embedding.row_access.meet(json.dumps(None if error is None else str(error)))
        if error is not None:
            raise error
        for rank, text in enumerate(said):
            if (why := json.loads(text)) is not None:
                raise RankError(f"rank {rank}: {why}")
    return results[0]
