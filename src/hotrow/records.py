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
    resumed_after: tuple[int, ...] = ()  # steps whose checkpoints it went on from


@dataclass(frozen=True, slots=True)
class Figures:
    """One strategy of a comparison. Speeds are of all steps of all its repetitions together, but
    for the first ones of each; everything else is of the first repetition."""

    strategy: str
    summary: str
    contract: str
    # "finished", "diverged" (the loss is no number), "failed", "unfinished" or "not run"
    outcome: str
    message: str = ""  # why it failed
    traceback: str = ""  # where, if nobody expected it to
    repetitions: int = 0
    timed_steps: int = 0
    samples_per_second: float = math.nan  # p50
    slow_samples_per_second: float = math.nan  # p20
    fast_samples_per_second: float = math.nan  # p80
    speed_up: float = math.nan  # over the baseline's p50
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes of fast memory by part
    fast_bytes: int = 0  # all of them
    is_within_budget: bool = True
    hit_rate: float = math.nan
    rows_per_sample: float = math.nan  # fetched and evicted
    bytes_per_sample: float = math.nan
    samples: int = 0
    auc: float = math.nan
    log_loss: float = math.nan
    equal: str = "not compared"  # with all-fast: "bits", "tolerance", "no" or "not compared"
    equal_note: str = ""  # how far apart, or why not compared
    repeatable: bool | None = None  # all repetitions ended in the same bits; None: there was one
    repeat_note: str = ""  # what differs between them
    is_optional: bool = False  # nobody asked for it: it is there to compare with


@dataclass(frozen=True, slots=True)
class ComparisonRecord:
    """Strategies side by side on one run's data, model and start."""

    name: str
    started: str
    outcome: str  # "finished", "under way" or "interrupted"
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: int
    repetitions: int
    warm_up: int  # first steps of each repetition that no speed is of
    baseline: str | None  # the strategy that speed-ups are over
    budget_bytes: int
    rows_bytes: int  # all rows with their state
    tolerance: Mapping[str, float]  # relative, absolute, and the share of outliers
    notes: tuple[str, ...]
    strategies: tuple[Figures, ...]
    advice: str = ""
