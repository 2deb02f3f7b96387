"""What happens to one batch's rows between planning and training, one function per stage.

Stages look like ordinary code and know nothing about streams or other batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hotrow.engine.rules import Hold
from hotrow.engine.work import Work
from hotrow.support.streams import Name


@dataclass(frozen=True)
class Stage:
    """A step of the way, and how many cycles after planning it is taken."""

    name: str
    cycle: int
    run: Callable[[Work], None]
    lane: Name = "rows"
    collects: bool = False  # rows are read, from the slots and from the store
    returns: bool = False  # leaving rows reach the store before what is collected later
    inserts: bool = False  # entering rows reach the slots
    trains: bool = False


def plan(work: Work) -> None:
    if work.plan is None:
        work.group.plan(work)


def fill(work: Work) -> None:
    """Write leaving rows back and fetch entering ones, at once."""
    if work.plan is not None and not work.collected:
        work.group.mover.fill(work)


def collect(work: Work) -> None:
    """Gather entering rows from the store and leaving rows from the slots."""
    if work.plan is not None and not work.collected:
        work.group.mover.collect(work)


def exchange(work: Work) -> None:
    """Both gathers change sides; where one memory serves both, they already have."""
    if work.collected and not work.inserted:
        work.group.mover.exchange(work)


def send(work: Work) -> None:
    """Collect, and let leaving rows go on to the store: what is gathered later comes after them."""
    collect(work)
    if work.collected and not work.inserted:
        work.group.mover.write_back(work)


def insert(work: Work) -> None:
    """Put entering rows into their slots, and leaving rows into the store if they are not there."""
    if work.plan is not None and not work.inserted:
        work.group.mover.insert(work)


def train(work: Work) -> None:
    """The user's part: lookup, loss, backward, update."""


# Planning runs two cycles before the fill, so that the host need not wait for a plan's counts.
FUSED = (
    Stage("plan", 0, plan, "plan"),
    Stage("fill", 2, fill, collects=True, returns=True, inserts=True),
    Stage("train", 3, train, "train", trains=True),
)
# The same, for rows that take longer than a step: they have two.
SPLIT = (
    Stage("plan", 0, plan, "plan"),
    Stage("send", 2, send, collects=True, returns=True),
    Stage("insert", 3, insert, inserts=True),
    Stage("train", 4, train, "train", trains=True),
)
FIVE = (
    Stage("plan", 0, plan, "plan"),
    Stage("collect", 1, collect, collects=True),
    Stage("exchange", 2, exchange),
    Stage("insert", 3, insert, returns=True, inserts=True),
    Stage("train", 4, train, "train", trains=True),
)
# Rows move when the batch before has been trained: two batches' rows need not fit together.
LATE = (
    Stage("plan", 0, plan, "plan"),
    Stage("fill", 2, fill, collects=True, returns=True, inserts=True),
    Stage("train", 2, train, "train", trains=True),
)
# Rows that stay where they are: only ids are looked at a batch ahead.
IN_PLACE = (
    Stage("plan", 0, plan, "plan"),
    Stage("train", 1, train, "train", collects=True, returns=True, inserts=True, trains=True),
)


def hold_of(stages: Sequence[Stage]) -> Hold:
    """The batches whose rows must stay, from when rows are collected, written back and trained.

    A leaving row's last update must end before it is collected, and a batch that fetches it again
    must collect it after it was written back.
    """
    collect = min(stage.cycle for stage in stages if stage.collects)
    back = max(stage.cycle for stage in stages if stage.returns)
    train = max(stage.cycle for stage in stages if stage.trains)
    return Hold(past=train - collect, future=back - collect)


def in_transit_of(stages: Sequence[Stage]) -> int:
    """How many batches may have rows between the slots and the store at once."""
    collect = min(stage.cycle for stage in stages if stage.collects)
    insert = max(stage.cycle for stage in stages if stage.inserts)
    return 1 + insert - collect


def sequential(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The same stages, all in one cycle: nothing overlaps, nothing needs to be held."""
    return tuple(replace(stage, cycle=0) for stage in stages)
