"""What a run leaves behind, as small frozen records. Knows nothing about models or files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Its rows and bytes moved since the step before, perhaps for later batches."""

    step: int
    loss: float
    samples: int
    seconds: float
    lookups: int
    unique_rows: int
    fetched_rows: int
    evicted_rows: int
    bytes_fetched: int
    bytes_evicted: int

    @property
    def hit_rate(self) -> float:
        """Share of the lookups that caused no fetch."""
        return 1 - self.fetched_rows / self.lookups if self.lookups else 1.0


class LateStepRecord(StepRecord):
    """A step whose loss is still on its way from a device: reading it waits."""

    __slots__ = ("_late",)
    _late: Callable[[], float]

    @property
    def loss(self) -> float:
        return self._late()

    @loss.setter  # type: ignore[override]
    def loss(self, late: Callable[[], float]) -> None:
        object.__setattr__(self, "_late", late)


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """Quality on held-out samples. NaN where all labels are alike: `auc`, and the normalised
    entropy, which is the log-loss over that of whoever knows the share of clicks alone."""

    step: int
    samples: int
    auc: float
    log_loss: float
    normalised_entropy: float = math.nan


@dataclass(frozen=True, slots=True)
class Summary:
    """The run in a few numbers; `seconds` counts training only, not evaluation."""

    steps: int
    samples: int
    seconds: float
    samples_per_second: float
    loss: float
    auc: float
    log_loss: float
    lookups: int
    hit_rate: float
    fast_rows_share: float
    bytes_moved: int
    equal_to_all_fast: bool | None = None  # None: not compared
    chunked_batches: int = 0  # whose rows did not fit the slots together


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything about a run but its steps."""

    name: str
    started: str
    outcome: str  # "finished", "diverged" (the loss is no number), "interrupted" or "failed"
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    memory: Mapping[str, int]  # bytes of fast memory by part
    summary: Summary
    evaluations: tuple[EvalRecord, ...] = field(default=())
    data: Mapping[str, Any] = field(default_factory=dict)  # what a model of it can read: tables ...
