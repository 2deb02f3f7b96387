"""Stand-ins for CUDA graphs: they repeat what the host knew when a step was captured."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import hotrow.embedding.call_lookups
import hotrow.embedding.stand_ins
import hotrow.embedding.step
import hotrow.engine.gpu.row_sums
import hotrow.inputs.calls
import hotrow.support.late_flag
from hotrow.embedding.id_sources import same_memory
from hotrow.training.captured import GraphSettings

CAPTURING = (
    hotrow.embedding.call_lookups,
    hotrow.embedding.stand_ins,
    hotrow.embedding.step,
    hotrow.engine.gpu.row_sums,
    hotrow.inputs.calls,
    hotrow.support.late_flag,
)

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run on the CPU where there is no GPU"
)


class Replays:
    """Captures steps by stand-ins for graphs, and counts what they do."""

    def __init__(self) -> None:
        self.captures = self.replays = self.strange = 0
        self.tables: tuple[str, ...] | None = ("a", "b")  # that the step updates

    def settings(self) -> GraphSettings:
        # As few inputs as possible, so that they are soon used again.
        return GraphSettings(self.capture, eager_first=1, inputs=4, forgotten=6)

    def capture(self, launch: Any, pool: Any, priority: int) -> Any:
        static = launch.args[0]
        ((embedding, _),) = static.planned
        embedding.optimizer.in_graph = self.tables  # a real capture runs the backward pass
        return StandIn(launch, static, self)


class StandIn:
    """Launches again what was captured, with what the host knew of the batch at that time."""

    def __init__(self, launch: Callable[[], None], static: Any, seen: Replays) -> None:
        self._launch, self._static, self._seen = launch, static, seen
        ((self._embedding, _),) = static.planned
        planned = self._embedding.pipeline.planned[-1]
        works = [copy.copy(work) for work in planned.works]
        for work in works:
            work.plan = replace(work.plan)  # type: ignore[type-var]
        self._planned = replace(planned, works=tuple(works))
        seen.captures += 1

    def pool(self) -> Any:
        return None

    def replay(self) -> None:
        embedding, planned = self._embedding, self._planned
        now = self._static.planned[0][1].batch
        self._seen.replays += 1
        self._seen.strange += planned.batch.ends != now.ends
        for work in planned.works:
            work.arrive(planned.batch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embedding.pipeline, "_find", lambda features: planned)
            patch.setattr(hotrow.embedding.step, "capturing", lambda: True)
            for group in embedding.groups:
                patch.setattr(group, "slots_hold", lambda work: True)
            self._launch()


class ModuleReplays(Replays):
    """The same for models whose modules look rows up one by one, with torch's optimizers."""

    def capture(self, launch: Any, pool: Any, priority: int) -> Any:
        static = launch.args[0]
        ((collection, planned),) = static.planned
        calls = {call.table for call in planned.features.calls}
        names = collection.optimizer.names  # a real capture runs the backward pass
        collection.optimizer.in_graph = tuple(name for name in names if name in calls)
        return ModuleStandIn(launch, static, self)


class ModuleStandIn:
    """Launches again what was captured: calls find the batch of the capture, by its memory."""

    def __init__(self, launch: Callable[[], None], static: Any, seen: ModuleReplays) -> None:
        self._launch, self._static, self._seen = launch, static, seen
        ((self._collection, _),) = static.planned
        planned = self._collection.pipeline.planned[-1]
        works = [copy.copy(work) for work in planned.works]
        for work in works:
            work.plan = replace(work.plan)  # type: ignore[type-var]
        self._planned, self._landed = replace(planned, works=tuple(works), served={}), static.landed
        seen.captures += 1

    def pool(self) -> Any:
        return None

    def replay(self) -> None:
        collection, planned = self._collection, self._planned
        self._seen.replays += 1
        self._seen.strange += self._static.landed != self._landed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collection.pipeline, "planned", deque([planned]))
            patch.setattr(collection.calls, "_is_same", _is_same_memory)
            for module in CAPTURING:
                patch.setattr(module, "capturing", lambda: True)
            for group in collection.groups:
                patch.setattr(group, "slots_hold", lambda work: True)
            self._launch()


def _is_same_memory(call: Any, joined: Any, number: int, *, by_content: bool) -> bool:
    expected = joined.calls[number]
    pairs = zip(call.tensors, expected.tensors, strict=True)
    return call.form == expected.form and all(same_memory(x, y) for x, y in pairs)
