"""Stand-ins for CUDA graphs: they repeat what the host knew when a step was captured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import hotrow.embedding.step
from hotrow.training.captured import GraphSettings

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
