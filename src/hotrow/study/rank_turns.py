"""What the ranks of a comparison agree on: how a turn has ended, and how far values are apart."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from hotrow.distributed.ranks import RankError, ranks_of
from hotrow.run.ranks import RunRanks
from hotrow.study.likeness import Distance, Reference, Tolerance
from hotrow.study.systems import System

_EXPECTED = (ValueError, OSError, MemoryError, torch.OutOfMemoryError)  # without a traceback


@dataclass(frozen=True)
class Failure:
    """Why a strategy could not be trained, as text: an error's frames would keep it in memory."""

    message: str
    traceback: str = ""  # where, if it was unexpected

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return the failure of an error that is being handled."""
        is_expected, text = isinstance(error, _EXPECTED), " ".join(str(error).split())
        return cls(
            message=text if is_expected and text else f"{type(error).__name__}: {text}",
            traceback="" if is_expected else traceback.format_exc(),
        )


def agree(strategy: str, failure: Failure | None, device: str) -> Failure | None:
    """Return the failure that all ranks have had in a turn; None: they had none.

    Ranks that fail together can train the next strategy. Where one has failed and others have not,
    all of them raise: it is no longer known what each of them waits for.
    """
    ranks = ranks_of(None, torch.device(device))
    if ranks is None:
        return failure
    mine = {"turn": strategy, "failure": None if failure is None else asdict(failure)}
    try:
        # Ranks that do anything else meanwhile raise, and this one as well.
        every = [json.loads(text) for text in ranks.compared(json.dumps(mine))]
        failures = [None if x["failure"] is None else Failure(**x["failure"]) for x in every]
        if any(x["turn"] != strategy for x in every):
            raise RankError(f"ranks compare different strategies, such as {strategy}")
    except (RankError, ValueError, KeyError, TypeError):
        if failure is None:
            raise
        failures = []
    if failure is not None and (not failures or None in failures):
        raise ValueError(
            f"{strategy} failed on rank {ranks.rank} alone, and the others cannot go on without "
            f"it: {failure.message}"
        )
    failed = [(rank, x) for rank, x in enumerate(failures) if x is not None]
    if not failed:
        return None
    if failure is None:
        rank, first = failed[0]
        raise RankError(f"{strategy} failed on rank {rank} alone: {first.message}")
    return failed[0][1]


def open_reference(team: RunRanks, folder: Path, tolerance: Tolerance) -> Reference:
    """Return what keeps the reference's values: on several ranks the first one has them."""
    if team.is_first:
        return Reference(folder, tolerance)
    return FollowedReference(tolerance)


class FollowedReference(Reference):
    """The reference of another rank. This one reads rows along, which all ranks do together."""

    def __init__(self, tolerance: Tolerance) -> None:
        super().__init__(None, tolerance)

    def add(self, table: str, rows: Tensor) -> None:
        self._starts.setdefault(table, 0)

    def _rows_like(self, rows: Tensor) -> Tensor:
        return rows


def shared_distance(
    team: RunRanks, reference: Reference, system: System, losses: Sequence[float]
) -> Distance | None:
    """Return how far a system is from the reference, as the first rank has found; all ranks call
    this together, and all get the same."""
    found = reference.distance(system, losses)
    text = team.from_first(lambda: json.dumps(None if found is None else asdict(found)))
    return msgspec.convert(json.loads(text), Distance | None)


def why_not_shared(kind: Any, ranks: int) -> str | None:
    """Return why a system cannot be trained by several ranks; None: it can, or there is one."""
    if ranks == 1 or kind.shares_rows:
        return None
    return (
        f"{kind.name} trains on one rank: each of {ranks} processes would have whole tables of its "
        "own"
    )
