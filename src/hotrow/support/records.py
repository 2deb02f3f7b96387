"""What a run leaves behind, as small frozen records. Knows nothing about models or files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Counted:
    """Counts of lookups and fetched rows."""

    __slots__ = ()
    lookups: int
    fetched_rows: int

    @property
    def hit_rate(self) -> float:
        """Share of the lookups that caused no fetch."""
        return 1 - self.fetched_rows / self.lookups if self.lookups else 1.0


@dataclass(frozen=True, slots=True)
class Counts(Counted):
    """What a run has looked up, moved and sent, on all ranks together."""

    lookups: int = 0
    fetched_rows: int = 0
    rows_moved: int = 0
    bytes_moved: int = 0
    bytes_sent: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord(Counted):
    """One step. Its rows and bytes moved since the step before, perhaps for later batches; its
    seconds have passed since then, without those that the caller of `run()` took between steps."""

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
    # Of `seconds`, what the host has spent: waiting for the loader, deciding, moving rows. On a GPU
    # the latter two are launches.
    read_seconds: float = 0.0
    plan_seconds: float = 0.0
    rows_seconds: float = 0.0
    # And what lookups and updates took of batches whose rows did not fit the slots together.
    chunk_seconds: float = 0.0
    # Share of the step in which training waited for rows; NaN: not measured. On a GPU it is
    # measured every few steps, and told some later.
    waited: float = math.nan
    # Fetched before any lookup asked for them, to be pinned; `bytes_fetched` has theirs, too.
    loaded_rows: int = 0
    # On several ranks `samples` and `loss` are those of all. Everything else is one rank's: lookups
    # of its samples, moves of the rows that it owns for all ranks, and bytes that it has sent.
    bytes_of_ids: int = 0
    bytes_of_rows: int = 0
    bytes_of_grads: int = 0
    rank_seconds: float = 0.0  # of `seconds`, what this rank has waited for others

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent to others."""
        return self.bytes_of_ids + self.bytes_of_rows + self.bytes_of_grads


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


WORSE_THAN_CONSTANT = "worse than always predicting the share of clicks"


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """Quality on held-out samples. NaN where all labels are alike: `auc`, and the normalised
    entropy, which is the log-loss over that of always predicting the share of clicks."""

    step: int
    samples: int
    auc: float
    log_loss: float
    normalised_entropy: float = math.nan

    @property
    def is_worse_than_constant(self) -> bool:
        """Whether always predicting the share of clicks would have a lower log-loss."""
        return self.normalised_entropy > 1


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
    bytes_sent: int = 0  # to other ranks, by all of them together


@dataclass(frozen=True, slots=True)
class Times:
    """Where the host's seconds went, over all steps but the first ones; see StepRecord."""

    steps: int
    seconds: float
    read_seconds: float
    plan_seconds: float
    rows_seconds: float
    waited: float = math.nan  # mean over the steps in which it was measured
    chunk_seconds: float = 0.0
    rank_seconds: float = 0.0  # waiting for other ranks


@dataclass(frozen=True, slots=True)
class Limit:
    """What a run waits for most."""

    part: str  # "link", "planning", "chunks", "loader", "ranks" or "dense part"
    share: float  # of a step's time
    message: str  # with what to change

    @property
    def name(self) -> str:
        """The part in words."""
        others = {
            "planning": "planning",
            "chunks": "a budget too small for batches",
            "ranks": "what ranks exchange",
        }
        return others.get(self.part, f"the {self.part}")

    @property
    def is_to_be_told(self) -> bool:
        """Training itself is what a step is for."""
        return self.part != "dense part"


@dataclass(frozen=True, slots=True)
class TableRecord(Counted):
    """Lookups and moves of one table in training. `unique_rows` counts a row once per batch."""

    lookups: int
    unique_rows: int
    fetched_rows: int
    evicted_rows: int


@dataclass(frozen=True, slots=True)
class Span:
    """A stage that was at work, as a profiler saw it."""

    place: str  # "host" or "GPU"
    name: str  # "read", "plan", "fill", "train" ...
    start: float  # seconds since whenever
    seconds: float


@dataclass(frozen=True, slots=True)
class StartRecord:
    """What is known of a run before its first step."""

    started: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    memory: Mapping[str, int]  # bytes of fast memory by part


@dataclass(frozen=True, slots=True)
class RankRecord(Counted):
    """What one of several ranks has trained since its process was started. Its rows are those that
    it owns; they are looked up by all ranks."""

    rank: int
    machine: str
    device: str
    owned_rows: int
    num_slots: int
    samples: int
    lookups: int  # of its samples
    unique_rows: int  # that it asked owners for, itself among them, each once per batch
    served_rows: int  # that ranks asked of it, itself among them
    fetched_rows: int  # from slow memory, of its own rows
    bytes_fetched: int  # over the link to its host, and back
    bytes_evicted: int
    bytes_of_ids: int  # sent to other ranks
    bytes_of_rows: int
    bytes_of_grads: int
    seconds: float  # of training, without evaluation
    # Of `seconds`, in calls that wait for messages of other ranks: headers, ids, rows, gradients
    # and averages. What a call itself sends and copies counts; what a GPU waits for NCCL does not.
    wait_seconds: float
    fast_bytes: int  # of fast memory: slots, replicas and all that belongs to them
    host_bytes: int  # of its process in host memory, at the most
    chunked_batches: int = 0  # whose rows did not fit its slots together
    evicted_rows: int = 0
    loaded_rows: int = 0  # fetched to be pinned, before any lookup

    @property
    def rows_moved(self) -> int:
        return self.fetched_rows + self.loaded_rows + self.evicted_rows

    @property
    def bytes_moved(self) -> int:
        return self.bytes_fetched + self.bytes_evicted

    @property
    def bytes_sent(self) -> int:
        return self.bytes_of_ids + self.bytes_of_rows + self.bytes_of_grads

    @property
    def wait_share(self) -> float:
        """Share of training in which it waited for other ranks."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything about a run but its steps."""

    name: str
    started: str
    outcome: str  # "finished", "diverged" (the loss is NaN), "interrupted" or "failed"
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    memory: Mapping[str, int]  # bytes of fast memory by part
    summary: Summary
    evaluations: tuple[EvalRecord, ...] = field(default=())
    data: Mapping[str, Any] = field(default_factory=dict)  # what a model of it can read: tables ...
    resumed_after: tuple[int, ...] = ()  # steps whose checkpoints it went on from
    system: Mapping[str, Any] = field(default_factory=dict)  # what ordered or left out samples
    told: Mapping[str, str] = field(default_factory=dict)  # the same in words
    tables: Mapping[str, TableRecord] = field(default_factory=dict)  # by the tables' names
    times: Times | None = None  # None: there were too few steps
    limit: Limit | None = None  # None: nothing stands out
    # Checkpoints that its last process has saved, their seconds, and of training those in which it
    # stood still for their begin or waited for the disk. Empty: none.
    saving: Mapping[str, float] = field(default_factory=dict)
    # Whether the model beside it is of its end, and not of before it went on; None: not known.
    has_model: bool | None = None
    ranks: tuple[RankRecord, ...] = ()  # of several ranks; `memory` and `times` are those of rank 0


@dataclass(frozen=True, slots=True)
class Figures:
    """One strategy of a comparison. Speeds of steps are of all its repetitions together, but for
    the first ones of each; everything else is of the first repetition. Where steps differ, as those
    of hot and cold batches do, the median says little: `whole_run` is what a run gets, samples that
    it leaves out included."""

    strategy: str
    summary: str
    contract: str
    # "finished", "diverged" (the loss is NaN), "failed", "unfinished" or "not run"
    outcome: str
    message: str = ""  # why it failed
    traceback: str = ""  # where, if the failure was unexpected
    repetitions: int = 0
    timed_steps: int = 0
    samples_per_second: float = math.nan  # p50
    slow_samples_per_second: float = math.nan  # p20
    fast_samples_per_second: float = math.nan  # p80
    whole_run: float = math.nan  # samples offered per second; median of the repetitions
    speed_up: float = math.nan  # of whole runs, over the baseline's
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes of fast memory by part
    fast_bytes: int = 0  # all of them
    is_within_budget: bool = True
    hit_rate: float = math.nan
    rows_per_sample: float = math.nan  # fetched, loaded to be pinned, and evicted
    bytes_per_sample: float = math.nan
    samples: int = 0
    auc: float = math.nan
    log_loss: float = math.nan
    equal: str = "not compared"  # with all-fast: "bits", "tolerance", "no" or "not compared"
    equal_note: str = ""  # how far apart, or why not compared
    repeatable: bool | None = None  # all repetitions ended in the same bits; None: there was one
    repeat_note: str = ""  # what differs between them
    is_optional: bool = False  # not asked for: it is there to compare with
    normalised_entropy: float = math.nan
    slow_run: float = math.nan  # `whole_run` of the slowest repetition
    fast_run: float = math.nan  # and of the fastest
    ranks: tuple[RankRecord, ...] = ()  # of several ranks; `memory` is that of rank 0


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
    ranks: int = 1  # that trained each strategy; the budget is that of each rank


@dataclass(frozen=True, slots=True)
class SizedOption:
    """A strategy with a budget, and what is predicted of it."""

    strategy: str
    budget_bytes: int
    slots: int
    slot_share: float  # of all rows
    pinned_share: float  # of the slots, the most that hot rows get
    depth: int  # batches known ahead
    fill: str  # how a GPU would move rows; "": it moves none, or there is no GPU
    moved_rows: float  # of a step, both ways
    step_ms: float
    planning_ms: float
    moving_ms: float
    of_all_fast: float  # its speed, over that of all-fast
    samples_per_second: float
    low_samples_per_second: float
    high_samples_per_second: float
    limit: str  # what a step waits for: dense part, planning, link, host
    reaches: bool  # what was asked for


@dataclass(frozen=True, slots=True)
class SizeRecord:
    """How much fast memory a run needs, by a prediction."""

    name: str
    machine: Mapping[str, Any]
    reach: float  # of all-fast's speed
    rows_bytes: int
    num_rows: int
    batch_size: int
    lookups: float  # of a batch
    unique_rows: float
    all_fast_ms: float
    all_fast_is: str  # "measured", "given" or "guessed"
    error: float  # of predictions, as it was where some were measured
    chosen: SizedOption
    best: tuple[SizedOption, ...]  # of each strategy the smallest that reaches it, or the fastest
    options: tuple[SizedOption, ...]  # all that was tried
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankAdvice:
    """How many ranks to take for a run, by a prediction, and what was tried."""

    name: str
    reach: float  # of all-fast's speed at the same number of ranks
    rows_bytes: int
    best: tuple[Mapping[str, Any], ...]  # by ranks, the smallest budget that reaches it, or fastest
    chosen: int | None  # its place among `best`; None: none has the memory
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
