"""How much of the device a fill gets, and who finds out that it is too little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hotrow.engine import schedule
from hotrow.engine.gpu import mover_choice as fills
from hotrow.engine.gpu.mover_choice import FULL, LEVELS, Effort
from hotrow.engine.schedule import Pace


def noted(effort: Effort, waited: float, looks: int) -> int:
    for _ in range(looks):
        effort.note(waited)
    return effort.number


# A level at first, and then: how much of a step waits for rows, in how many looks, and the level.
LOOKS, PATIENCE = fills._LOOKS, fills._PATIENCE
EFFORTS: dict[str, tuple[int, list[tuple[float, int, int]]]] = {
    # One slow step says nothing, and there is no more than all.
    "grows": (0, [(0.6, LOOKS - 1, 0), (0.6, 1, 1), (0.6, 10 * LOOKS, FULL)]),
    "not for a short wait": (0, [(0.2, 1000, 0)]),
    "shrinks": (1, [(0.0, PATIENCE - 1, 1), (0.0, 1, 0)]),
    "stays twice as long when it had to grow again": (
        1,
        [(0.0, PATIENCE, 0), (0.6, LOOKS, 1), (0.0, 2 * PATIENCE - 1, 1), (0.0, 1, 0)],
    ),
    "stays where waits are in between": (1, [(0.0, PATIENCE // 2, 1), (0.2, LOOKS, 1)] * 20),
    "all where nothing runs beside it": (FULL, [(0.0, 1000, FULL)]),
}


@pytest.mark.parametrize(("start", "looks"), EFFORTS.values(), ids=EFFORTS)
def test_a_fill_gets_more_while_training_waits_for_it(start: int, looks: Any) -> None:
    effort = Effort(start, is_fixed=start == FULL)
    for waited, count, level in looks:
        assert noted(effort, waited, count) == level
        assert effort.level == LEVELS[level]


# -- who looks -----------------------------------------------------------------------------


class At:
    """A mark that a lane has passed at a time, or not yet."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def wait(self) -> None:
        raise AssertionError("nobody may wait for a look")

    def passed(self) -> bool:
        return self.seconds is not None

    def since(self, earlier: Any) -> float:
        assert self.seconds is not None
        return self.seconds - earlier.seconds


class Group:
    """A group that is its own mover."""

    def __init__(self) -> None:
        self.mover, self.waits = self, list[float]()

    def note_wait(self, share: float) -> None:
        self.waits.append(share)


def looked_at(
    group: Group, pace: Pace, before: At, rows: At, after: At, *, times: int = schedule._LOOK_EVERY
) -> None:
    works = [SimpleNamespace(group=group)] * 2
    ticket: Any = SimpleNamespace(mark=rows, works=works, needless=None)
    for _ in range(times):
        pace.begins(ticket, before)
        pace.ended(after)


@pytest.mark.parametrize(
    ("rows_at", "share"),
    [(9.0, 0.0), (10.0, 0.0), (11.0, 0.25), (14.0, 1.0), (15.0, 1.0)],
)
def test_a_wait_lasts_from_the_end_of_the_step_before_until_rows_are_there(
    rows_at: float, share: float
) -> None:
    group = Group()
    looked_at(group, Pace(), At(10.0), At(rows_at), At(14.0))
    assert group.waits == [share]  # once, though it has two works


def test_what_has_not_passed_is_read_later() -> None:
    group, pace, late = Group(), Pace(), At(None)
    looked_at(group, pace, At(0.0), At(1.0), late)
    looked_at(group, pace, At(2.0), At(2.0), At(4.0))
    assert group.waits == []  # in their order
    late.seconds = 2.0
    looked_at(group, pace, At(4.0), At(4.0), At(6.0))
    assert group.waits == [0.5, 0.0, 0.0]


def test_only_some_trainings_are_looked_at() -> None:
    group, pace = Group(), Pace()
    looked_at(group, pace, At(0.0), At(1.0), At(2.0), times=10 * schedule._LOOK_EVERY)
    assert len(group.waits) == 10


def test_lanes_that_measure_no_time_tell_nothing() -> None:
    group = Group()
    looked_at(group, Pace(), At(0.0), At(0.0), At(0.0))
    assert group.waits == []
