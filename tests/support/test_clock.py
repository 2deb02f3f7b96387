"""Seconds are added up by parts, and a profiler sees their names only while it looks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from time import sleep
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.profiler import ProfilerActivity, profile

from hotrow.engine.schedule import Pace, Ticket
from hotrow.engine.stages import FIVE, FUSED
from hotrow.support.clock import PREFIX, Clock, named
from test_trainer import BATCHES, make_trainer


def test_parts_add_up_what_is_inside_them() -> None:
    clock = Clock()
    for _ in range(2):
        with clock.part("read"):
            sleep(0.01)
    with pytest.raises(KeyError), clock.part("plan"):
        raise KeyError
    for stage in ("collect", "insert"):
        with clock.part(stage):
            sleep(0.01)
    assert 0.02 <= clock.read.seconds < 1
    assert 0 < clock.plan.seconds < 1
    assert 0.02 <= clock.rows.seconds < 1


def test_waits_are_handed_out_once() -> None:
    clock = Clock()
    assert math.isnan(clock.take_waited())
    clock.note_wait(0.1)
    clock.note_wait(0.3)
    assert clock.take_waited() == pytest.approx(0.2)
    assert math.isnan(clock.take_waited())


def test_what_a_device_waited_reaches_the_clock() -> None:
    """Rows arrive 1 s after training was ready for them, in a step of 4 s."""

    class At:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def passed(self) -> bool:
            return True

        def since(self, earlier: Any) -> float:
            return self.seconds - float(earlier.seconds)

    class Group:
        def note_wait(self, share: float) -> None:
            noted.append(share)

    clock, noted = Clock(), list[float]()
    pace = Pace(clock)
    ticket = Ticket(None, cast(Any, [SimpleNamespace(group=Group())]))
    for _ in range(4):  # one in four is looked at
        ticket.mark = cast(Any, At(11))
        pace.begins(ticket, cast(Any, At(10)))
        pace.ended(cast(Any, At(14)))
    assert clock.take_waited() == 0.25
    assert noted == [0.25]


def _names(profiler: Any) -> set[str]:
    return {each.name.removeprefix(PREFIX) for each in profiler.events() if PREFIX in each.name}


def test_names_are_seen_by_a_profiler_alone() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, named("plan"):
        pass
    assert _names(profiler) == {"plan"}
    assert named("plan") is named("fill")  # nothing is made while nobody looks


@pytest.mark.parametrize(("strategy", "stages"), [("lookahead", FUSED), ("scratchpipe", FIVE)])
def test_a_trace_names_every_stage(strategy: str, stages: tuple[Any, ...]) -> None:
    trainer = make_trainer(strategy)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in trainer.run(BATCHES[:6]):
            pass
    found = _names(profiler)
    assert {"read", "confirm", *(stage.name for stage in stages)} <= found
    assert found - {"write-back"} <= {"read", "confirm", *(stage.name for stage in stages)}
    assert ("write-back" in found) == (strategy == "scratchpipe")


def test_steps_say_where_their_time_went() -> None:
    def slow() -> Iterator[Any]:
        for batch in BATCHES:
            sleep(0.003)
            yield batch

    records = list(make_trainer().run(slow()))
    assert sum(each.read_seconds for each in records) >= 0.003 * len(BATCHES)
    assert sum(each.plan_seconds for each in records) > 0
    assert sum(each.rows_seconds for each in records) > 0
    for each in records:
        assert each.read_seconds + each.plan_seconds + each.rows_seconds < each.seconds
        assert each.waited == each.rows_seconds / each.seconds
