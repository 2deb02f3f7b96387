"""Records of a small run, and of a device that computes losses late."""

from __future__ import annotations

from collections.abc import Callable

from hotrow.support.records import (
    EvalRecord,
    LateStepRecord,
    RankRecord,
    RunRecord,
    StepRecord,
    Summary,
)

STEP = StepRecord(
    step=1, loss=0.5, samples=32, seconds=0.01, lookups=100, unique_rows=60, fetched_rows=25,
    evicted_rows=5, bytes_fetched=1600, bytes_evicted=320,
)  # fmt: skip
SUMMARY = Summary(
    steps=1, samples=32, seconds=0.01, samples_per_second=3200.0, loss=0.5, auc=0.7, log_loss=0.6,
    lookups=100, hit_rate=0.75, fast_rows_share=0.1, bytes_moved=1920, equal_to_all_fast=True,
)  # fmt: skip
RUN = RunRecord(
    name="first",
    started="2026-11-15T00:00:00+00:00",
    outcome="finished",
    settings={"run": {"name": "first"}, "embedding": {"strategy": "lookahead"}},
    environment={"python": "3.12.0"},
    memory={"slots": 1024},
    summary=SUMMARY,
    evaluations=(EvalRecord(step=1, samples=32, auc=0.7, log_loss=0.6),),
)
RANK = RankRecord(
    rank=0, machine="one", device="cpu", owned_rows=500, num_slots=50, samples=16, lookups=60,
    unique_rows=40, served_rows=44, fetched_rows=6, bytes_fetched=960, bytes_evicted=320,
    bytes_of_ids=80, bytes_of_rows=320, bytes_of_grads=320, seconds=0.01, wait_seconds=0.002,
    fast_bytes=4096, host_bytes=300 << 20,
)  # fmt: skip


def late_step(step: int, loss: Callable[[], float]) -> StepRecord:
    return LateStepRecord(step, loss, 32, 0.01, 100, 60, 25, 5, 1600, 320)  # type: ignore[arg-type]


def failing_step(step: int) -> StepRecord:
    """Return a step of a device that does not answer."""

    def fail() -> float:
        raise RuntimeError("the device does not answer")

    return late_step(step, fail)


class Device:
    """Notes for which steps a loss was read."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def record(self, step: int) -> StepRecord:
        def loss() -> float:
            self.asked.append(step)
            return step / 10

        return late_step(step, loss)
