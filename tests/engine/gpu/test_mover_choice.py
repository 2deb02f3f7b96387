"""How much of the device a fill gets, and who finds out that it is too little."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hotrow.engine import schedule
from hotrow.engine.gpu import mover_choice as fills
from hotrow.engine.gpu.mover_choice import FULL, LEVELS, Effort
from hotrow.engine.schedule import Pace

LOOKS, PATIENCE = fills._LOOKS, fills._PATIENCE
Steps = Callable[
    [int, int], tuple[float, float]
]  # of a level and a look: its wait, and its seconds


def levels(effort: Effort, looks: int, steps: Steps) -> list[int]:
    """The level of each look."""
    found = []
    for look in range(looks):
        found.append(effort.number)
        effort.note(*steps(effort.number, look))
    return found


def test_a_fill_gets_more_while_training_waits_for_it() -> None:
    assert levels(Effort(), 3 * LOOKS, lambda level, look: (0.6, 1.0)) == (
        [0] * LOOKS + [1] * LOOKS + [2] * LOOKS
    )
    # One slow step says nothing.
    once = levels(Effort(), LOOKS * 3, lambda level, look: (0.6 if look == 2 else 0.0, 1.0))
    assert once == [0] * (3 * LOOKS)


@pytest.mark.parametrize("best", range(len(LEVELS)))
def test_the_level_with_the_shortest_steps_is_found_and_kept(best: int) -> None:
    def steps(level: int, look: int) -> tuple[float, float]:
        return (0.1 if level < best else 0.0), 1.0 + 0.1 * abs(level - best)

    for start in range(len(LEVELS)):
        found = levels(Effort(start), 8000, steps)
        assert found[400:].count(best) > 0.97 * len(found[400:])
        assert found[4000:].count(best) > 0.98 * len(found[4000:])  # others are tried less often


def test_the_first_look_with_another_level_does_not_count() -> None:
    before: list[int] = []

    def steps(level: int, look: int) -> tuple[float, float]:
        is_first = bool(before) and before[-1] != level
        before.append(level)
        return 0.0, 100.0 if is_first else 1.0 + 0.1 * level

    effort = Effort(1)
    levels(effort, PATIENCE + 2 * LOOKS, steps)
    assert effort.number == 0


def test_a_fill_that_moves_much_begins_with_more() -> None:
    for num_bytes, number in ((1 << 20, 0), (60 << 20, FULL - 2), (200 << 20, FULL - 1)):
        effort = Effort()
        effort.begin(num_bytes)
        effort.begin(1 << 40)  # only the first one says so
        assert effort.number == number
        assert effort.level == LEVELS[number]


def test_a_fill_gets_all_where_nothing_runs_beside_it() -> None:
    effort = Effort(FULL, is_fixed=True)
    effort.begin(1 << 40)
    assert set(levels(effort, 1000, lambda level, look: (0.0, 1.0))) == {FULL}


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
        self.mover, self.waits, self.steps = self, list[float](), list[float]()

    def note_wait(self, share: float, step: float) -> None:
        self.waits.append(share)
        self.steps.append(step)


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
    assert group.steps == [4.0]


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
