"""Ways to train a run, by name: every strategy of a collection, and other systems.

To add one, register how it is built:

    register(SystemKind("mine", "what it does", "changed", build=lambda config, samples: Mine(...)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from hotrow.engine.strategy import STRATEGIES
from hotrow.inputs.samples import take
from hotrow.run.config import RunConfig
from hotrow.run.job import Job, build, dense_weights, skip_of
from hotrow.run.rank_records import rank_records
from hotrow.run.source import AnyBatch, Samples
from hotrow.run.strategy_names import PLAIN, SKIPS, Named, find_named
from hotrow.run.strategy_names import SYSTEMS as NAMED_SYSTEMS
from hotrow.study.plain import plain_job, why_not_plain
from hotrow.support.messages import did_you_mean
from hotrow.support.records import EvalRecord, RankRecord, StepRecord
from hotrow.systems.slipstream.slipstream import RandomDrop, Slipstream

CONTRACTS = ("exact", "exact up to rounding", "changed")


class System(Protocol):
    """A run that can be trained once and read afterwards."""

    @property
    def device(self) -> torch.device:
        """Device of the dense part."""

    def train(self) -> Iterator[StepRecord]:
        """Train all steps of the run, on `samples.batches(...)`, with its learning rates."""

    def evaluate(self) -> EvalRecord:
        """Measure the quality at the end, on the test split."""

    def dense(self) -> Mapping[str, Tensor]:
        """Return all trained values except rows, by name."""

    def tables(self) -> Sequence[str]: ...

    def rows(self, table: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the current rows of a table with their state, in chunks on the host: (first row,
        [n, dim + state])."""

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of fast memory by part, as all-fast's collection counts them."""


@dataclass(frozen=True)
class SystemKind:
    """How a system is built, and what it promises next to all-fast."""

    name: str
    summary: str
    contract: str  # one of CONTRACTS
    build: Callable[[RunConfig, Samples], System]
    # Returns why it cannot train a run; None: it can.
    refuses: Callable[[RunConfig], str | None] = lambda config: None
    is_bounded: bool = True  # by the budget, or it has no rows in fast memory
    is_budgeted: bool = False  # it keeps as many rows in fast memory as the budget holds
    shares_rows: bool = True  # several ranks can train it

    def __post_init__(self) -> None:
        if self.contract not in CONTRACTS:
            raise ValueError(f"contract must be one of {CONTRACTS}, not {self.contract!r}")


SYSTEMS: dict[str, SystemKind] = {}


def register(kind: SystemKind) -> None:
    """Make a system known to `hotrow compare`."""
    if kind.name in SYSTEMS:
        raise ValueError(f"there is a system {kind.name!r} already; give another name")
    SYSTEMS[kind.name] = kind


def find_system(name: str) -> SystemKind:
    if name in SYSTEMS:
        return SYSTEMS[name]
    if "+" in name or name in SKIPS:
        return _of_named(find_named(name))
    hint = did_you_mean(name, SYSTEMS)
    raise ValueError(
        f"there is no strategy {name!r}{hint}; known are {', '.join(SYSTEMS)}, each but "
        f"{PLAIN} also with {' or '.join('+' + each for each in SKIPS)}"
    )


class StrategySystem:
    """A run as `hotrow train` trains it."""

    def __init__(
        self,
        config: RunConfig,
        samples: Samples,
        build: Callable[[RunConfig, Samples], Job] = build,
    ) -> None:
        self._job = build(config, samples)

    @property
    def device(self) -> torch.device:
        return self._job.embedding.device

    @property
    def skip(self) -> RandomDrop | Slipstream | None:
        """What skips samples, if anything does."""
        return skip_of(self._job.trainer.system)

    @property
    def on_the_way(self) -> tuple[int, float]:
        """Samples evaluated while it trained, and the seconds that took."""
        return self._job.trainer.loss_samples, self._job.trainer.loss_seconds

    def hear(self, requests: Callable[[], int]) -> None:
        """See `Trainer.hear`."""
        self._job.trainer.hear(requests)

    @property
    def requested(self) -> int:
        """See `Trainer.requested`."""
        return self._job.trainer.requested

    def rank_records(self) -> tuple[RankRecord, ...]:
        """Return what each of several ranks has done; all of them call this together."""
        return rank_records(self._job.trainer)

    def train(self) -> Iterator[StepRecord]:
        return self._job.train()

    def evaluate(self) -> EvalRecord:
        return self._job.evaluate(at_end=True)

    def dense(self) -> Mapping[str, Tensor]:
        return dense_weights(self._job.model)

    def tables(self) -> Sequence[str]:
        return [table.name for table in self._job.embedding.tables]

    def rows(self, table: str) -> Iterator[tuple[int, Tensor]]:
        return self._job.embedding.rows(table)

    def memory(self) -> Mapping[str, int]:
        return self._job.embedding.memory()


class OtherBatches:
    """Samples of a run with other batches to train on."""

    def __init__(self, samples: Samples, batches: Callable[[int], Iterable[AnyBatch]]) -> None:
        self._samples, self.batches = samples, batches

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)  # it would read the samples again, in their own batches
        return getattr(self._samples, name)


def reordered_batches(samples: Samples, seed: int) -> Callable[[int], Iterator[AnyBatch]]:
    """Return batches whose samples are in another order."""

    def batches(steps: int) -> Iterator[AnyBatch]:
        draw = torch.Generator().manual_seed(seed)
        for batch in samples.batches(steps):
            size = len(batch.label)
            yield take(batch, torch.randperm(size, generator=draw), size=size)

    return batches


def reordered(seed: int) -> SystemKind:
    """Return all-fast with the samples of each batch, and so all sums, in another order: its
    distance from all-fast is what rounding does to a run."""

    def build(config: RunConfig, samples: Samples) -> StrategySystem:
        other = OtherBatches(samples, reordered_batches(samples, seed))
        config = with_strategy(config, find_named("all-fast"))
        return StrategySystem(config, cast(Samples, other))

    return SystemKind(
        f"reordered-{seed}",
        "all-fast, the samples of each batch in another order",
        "exact up to rounding",
        build=build,
        is_bounded=False,
    )


def with_strategy(config: RunConfig, named: Named) -> RunConfig:
    """Return the run with another strategy, without its own equality check. A strategy of the CPU
    alone does not use a GPU."""
    run = replace(config.run, device="cpu") if named.rows.on_cpu_alone else config.run
    embedding = replace(config.embedding, strategy=named.name)
    training = replace(config.training, check_equality=False)
    return replace(config, run=run, embedding=embedding, training=training)


def _of_named(named: Named) -> SystemKind:
    return SystemKind(
        named.name,
        named.summary,
        named.contract,
        build=lambda config, samples: StrategySystem(with_strategy(config, named), samples),
        is_bounded=not named.rows.everything,
        is_budgeted=named.rows.has_slots and not named.rows.everything,
    )


for _name in (*STRATEGIES, *NAMED_SYSTEMS):
    register(_of_named(find_named(_name)))
register(
    SystemKind(
        PLAIN,
        "nn.EmbeddingBag with sparse gradients and torch.optim on the CPU, the dense part on the "
        "device",
        "exact up to rounding",
        build=partial(StrategySystem, build=plain_job),
        refuses=why_not_plain,
        shares_rows=False,
    )
)
