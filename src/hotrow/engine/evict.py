"""The order in which rows leave, one function each. Sees counters, touches no bytes.

A function returns a key per slot; the smallest keys leave first. Slots that may not leave are
masked by the planner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = 2**31 - 1  # next use of a row that no known batch uses
DOUBLED = 512  # twice the uses are worth as many batches of recency
MOST_USES = 2**15 - 1  # that are told apart


@dataclass(frozen=True)
class SlotFacts:
    """What is known of every slot."""

    last_use: Tensor  # [C] int32: number of the last batch that uses it
    next_use: Tensor  # [C] int32: number of the next known batch that uses it, or NEVER
    uses: Tensor  # [C] int32: batches that used it; halved now and then where pins are learned


def least_recent(slots: SlotFacts) -> Tensor:
    return slots.last_use.long()


def most_recent(slots: SlotFacts) -> Tensor:
    """The worst order there is; windows that are too short show at once."""
    return -slots.last_use.long()


def least_frequent(slots: SlotFacts) -> Tensor:
    return (slots.uses.long() << 32) + slots.last_use.long()


def least_worth(slots: SlotFacts) -> Tensor:
    """Recency, with a bonus by uses. What was popular once leaves in the end, unlike by uses alone.

    The logarithm is a straight line between powers of two, so that integers give the same.
    """
    fraction, exponent = torch.frexp(slots.uses.clamp(1, MOST_USES).float())
    bonus = DOUBLED * (exponent - 1) + (DOUBLED * (2 * fraction - 1)).int()
    return slots.last_use.long() + bonus


def farthest_next_use(slots: SlotFacts) -> Tensor:
    """Belady's choice where the next use is known; before those, the others by their worth."""
    known = slots.next_use != NEVER
    return torch.where(known, (1 << 62) - slots.next_use.long(), least_worth(slots))


def at_random(slots: SlotFacts) -> Tensor:
    return torch.randint(1 << 62, slots.uses.shape, device=slots.uses.device)


@dataclass(frozen=True)
class Eviction:
    """An order, whether it looks at the future, and whether one ranking may serve many batches.

    A ranking in bulk stays exact for least-recent (what was used since is dropped from it) and
    is as old as the ranking for the others.
    """

    name: str
    key: Callable[[SlotFacts], Tensor]
    looks_ahead: bool = False
    in_bulk: bool = True


EVICTIONS = {
    eviction.name: eviction
    for eviction in (
        Eviction("least-recent", least_recent),
        Eviction("least-frequent", least_frequent),
        Eviction("farthest-next-use", farthest_next_use, looks_ahead=True),
        Eviction("random", at_random, in_bulk=False),
        Eviction("most-recent", most_recent, in_bulk=False),
    )
}
