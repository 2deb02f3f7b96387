"""Seconds are added up by parts, and a profiler sees their names only while it looks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hotrow
from hotrow.engine.schedule import Pace, Ticket
from hotrow.engine.stages import FIVE, FUSED
from hotrow.support.clock import PREFIX, Clock, named

BATCHES = [torch.randint(200, (16, 1)) for _ in range(6)]


def trainer(strategy: str = "lookahead") -> hotrow.Trainer[torch.Tensor]:
    table = hotrow.EmbeddingBagConfig("a", 900, 4, ["a"])
    embedding = hotrow.EmbeddingBagCollection(
        [table], hotrow.SGD(lr=0.1), budget="60%", strategy=strategy
    )
    return hotrow.Trainer(
        torch.nn.Sequential(embedding),
        lambda found, _: found.values().sum(),
        dense_optimizer=None,
        ids=lambda batch: batch,
        labels=lambda batch: batch,
    )


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
        def __init__(self) -> None:
            self.mover = self

        def note_wait(self, share: float, step: float) -> None:
            noted.append(share)

    clock, noted = Clock(), list[float]()
    pace, group = Pace(clock), Group()
    ticket = Ticket(None, cast(Any, [SimpleNamespace(group=group)]))
    for _ in range(4):  # one in four is looked at
        ticket.mark = cast(Any, At(11))
        pace.begins(ticket, cast(Any, At(10)))
        pace.ended(cast(Any, At(14)))
    assert clock.take_waited() == 0.25
    assert noted == [0.25]
    assert math.isnan(clock.take_waited())  # they are handed out once


def _names(profiler: Any) -> set[str]:
    return {each.name.removeprefix(PREFIX) for each in profiler.events() if PREFIX in each.name}


def test_names_are_seen_by_a_profiler_alone() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, named("plan"):
        pass
    assert _names(profiler) == {"plan"}
    assert named("plan") is named("fill")  # nothing is made without a profiler


@pytest.mark.parametrize(("strategy", "stages"), [("lookahead", FUSED), ("scratchpipe", FIVE)])
def test_a_trace_names_every_stage(strategy: str, stages: tuple[Any, ...]) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        list(trainer(strategy).run(BATCHES))
    found = _names(profiler)
    assert {"read", "confirm", *(stage.name for stage in stages)} <= found
    assert found - {"write-back"} <= {"read", "confirm", *(stage.name for stage in stages)}
    assert ("write-back" in found) == (strategy == "scratchpipe")


def test_steps_say_where_their_time_went() -> None:
    records = list(trainer().run(BATCHES))
    for name in ("read_seconds", "plan_seconds", "rows_seconds"):
        assert sum(getattr(record, name) for record in records) > 0
    for record in records:
        assert record.read_seconds + record.plan_seconds + record.rows_seconds < record.seconds
        assert record.waited == record.rows_seconds / record.seconds
