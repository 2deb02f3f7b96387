"""A run's parts, built from its configuration. Knows nothing about files or screens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.embedding.arguments import usable_device
from hotrow.embedding.collection import EmbeddingBagCollection, EmbeddingCollection
from hotrow.engine.profile import Profile, load_profile
from hotrow.engine.strategy import STRATEGIES
from hotrow.inputs.tables import EmbeddingBagConfig, EmbeddingConfig, group_by_width
from hotrow.models import MODELS
from hotrow.run.config import DENSE_OPTIMIZERS, DenseOptimizerSection, RunConfig
from hotrow.run.source import AnyBatch, Samples, open_samples
from hotrow.run.strategy_names import find_named
from hotrow.run.training import epochs_of, known_steps, make_system, training_batches
from hotrow.sizing.budgets import AUTO, auto_budget, buffer_part_of
from hotrow.store.budget import share_out
from hotrow.support.messages import few
from hotrow.support.records import EvalRecord, StepRecord
from hotrow.training.trainer import Trainer


@dataclass(frozen=True)
class Job:
    """Everything one run needs; two jobs of one configuration start from the same bits."""

    config: RunConfig
    samples: Samples
    embedding: EmbeddingBagCollection
    model: nn.Module
    trainer: Trainer[AnyBatch]
    done: int = 0  # steps that were taken before, by another process
    first: int = 0  # the batch that it goes on with

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Of rows, and of the dense part."""
        found: list[torch.optim.Optimizer] = [self.embedding.optimizer]
        if self.trainer.dense_optimizer is not None:
            found.append(self.trainer.dense_optimizer)
        return found

    def train(self) -> Iterator[StepRecord]:
        """The run's steps, with its learning rates."""
        schedules = self.config.training.schedule.drive(self.optimizers, taken=self.done)
        if self.first >= self.total_steps:
            return  # another process trained it all, and was stopped before it had said so
        for record in self.trainer.run(self._batches()):
            for schedule in schedules:
                schedule.step()
            yield record

    def _batches(self) -> Iterable[AnyBatch]:
        """What a system reads more than once it reads from the beginning each time."""
        first, left = self.first, self.total_steps - self.first
        rest: Any = Rest(self.samples, first) if first else self.samples
        if self.trainer.system is None:
            return rest.batches(left)  # type: ignore[no-any-return]
        return training_batches(rest, left, self.trainer.system)

    @property
    def position(self) -> int:
        """The batch that another process would go on with. Which samples were trained, where others
        than all of them are, is not kept: the epoch under way begins anew."""
        if not _chooses_samples(self.config):
            return self.first + self.trainer.step - self.done
        epoch = min(self.total_steps - self.first, self.samples.batches_per_epoch)
        return min(self.first + epochs_of(self.trainer.system) * epoch, self.total_steps)

    @property
    def total_steps(self) -> int:
        """Batches that the run is of."""
        return total_steps(self.config, self.samples)

    @property
    def known_steps(self) -> int | None:
        """Steps that will have been taken; None: not known, or not yet."""
        left = known_steps(self.trainer.system, self.total_steps - self.first)
        return None if left is None else left + self.done

    def evaluate(self, *, at_end: bool = False) -> EvalRecord:
        """Quality on what is held back for the way, or for the end."""
        return self.trainer.evaluate(self.samples.test if at_end else self.samples.validation)


def open_data(config: RunConfig) -> Samples:
    on_gpu = config.run.device.startswith("cuda") and torch.cuda.is_available()
    return open_samples(config.data, pin_memory=on_gpu, steps=config.model.num_steps)


def total_steps(config: RunConfig, samples: Samples) -> int:
    epoch, training = samples.batches_per_epoch, config.training  # or there is no batch at all
    return training.steps or training.epochs * epoch


def _chooses_samples(config: RunConfig) -> bool:
    """Whether others are trained than all of them as they come, and a batch is no step."""
    return find_named(config.embedding.strategy).contract == "changed"


def _first_batch(config: RunConfig, samples: Samples, position: int) -> int:
    """Those that choose their samples begin with an epoch, or have come to the end."""
    if not _chooses_samples(config) or position >= total_steps(config, samples):
        return position
    return position - position % samples.batches_per_epoch


class Rest:
    """Samples without the first batches."""

    def __init__(self, samples: Samples, first: int) -> None:
        self._samples, self._first = samples, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)

    def batches(self, steps: int) -> Iterator[AnyBatch]:
        return self._samples.batches(self._first + steps, start=self._first)


def build(
    config: RunConfig,
    samples: Samples | None = None,
    *,
    done: int = 0,
    position: int | None = None,
) -> Job:
    """`done`: steps that were taken before, whose results are loaded into the job; `position`: the
    batch to go on with, if it is another."""
    samples = samples or open_data(config)
    config = with_budget(config, samples)
    position = done if position is None else position
    first = _first_batch(config, samples, position) if position else 0
    left = partial(_steps_left, config, samples, first)
    profile = _profile(config.embedding.profile, samples)
    embedding = _embedding(config, samples, profile)
    model = MODELS[config.model.kind](
        embedding,
        samples.num_dense,
        **config.model.arguments,
        generator=torch.Generator().manual_seed(config.run.seed),
    ).to(embedding.device)  # rows stay where they are
    trainer: Trainer[AnyBatch] = Trainer(
        model,
        F.binary_cross_entropy_with_logits,
        dense_optimizer=dense_optimizer(config.training.optimizer, model, embedding.device),
        ids=lambda batch: batch.sparse,
        device=embedding.device,
        depth=config.embedding.depth,
        clip_norm=config.training.clip_norm,
        system=make_system(config, samples, profile, left),
    )
    # Reserve now, so that memory shown before the first batch is what it will be.
    if samples.lookups is not None:
        embedding.reserve(config.data.batch_size, samples.lookups)
    trainer.step = done
    return Job(config, samples, embedding, model, trainer, done, first)


def with_budget(config: RunConfig, samples: Samples) -> RunConfig:
    """The same run with a budget in bytes where it says "auto"."""
    section = config.embedding
    if section.budget != AUTO:
        return config
    strategy = find_named(section.strategy).rows
    if not strategy.needs_budget:
        strategy = STRATEGIES["lookahead"]  # for those that it is compared with
    groups = group_by_width(tables_of(config, samples))
    width = config.model.row_width  # of all tables
    row_bytes = [4 * (width + section.optimizer.rule().state_width(width))]
    device = usable_device(torch.device(config.run.device))
    share = partial(
        share_out,
        row_bytes=row_bytes,
        num_rows=[each.num_rows for each in groups],
        parts=[1.0],
        buffer_part=buffer_part_of(strategy, device),
    )
    profile = _profile(section.profile, samples)
    budget = auto_budget(
        share, groups, row_bytes, strategy=strategy, device=device, profile=profile
    )
    return replace(config, embedding=replace(section, budget=budget))


def _steps_left(config: RunConfig, samples: Samples, first: int) -> int:
    return total_steps(config, samples) - first


def all_fast(config: RunConfig) -> RunConfig:
    """The same run with every row in fast memory: what exact strategies are compared with."""
    return replace(config, embedding=replace(config.embedding, strategy="all-fast"))


def differences(left: Job, right: Job) -> list[str]:
    """The weights, row states and dense weights whose bits differ; empty for equal jobs."""
    mine, other = dense_weights(left.model), dense_weights(right.model)
    # Those that only one of them has differ, too.
    found = [
        key
        for key in mine | other
        if key not in mine or key not in other or not same_bits(mine[key], other[key])
    ]
    for table in left.embedding.tables:
        if not same_bits(_rows(left, table.name), _rows(right, table.name)):
            found.append(f"rows of table {table.name}")
    return found


def dense_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name. Rows are neither: they would not fit a state dict."""
    return {
        name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())
    }


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equality of what is stored: a NaN equals itself, and 0.0 is not -0.0."""
    return left.shape == right.shape and torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _rows(job: Job, table: str) -> Tensor:
    return torch.cat([rows for _, rows in job.embedding.rows(table)])


def dense_optimizer(
    section: DenseOptimizerSection, model: nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay}
    # A captured step follows a learning rate that is a tensor; fused forms read it by themselves.
    # torch 2.11 has no fused Adagrad for CUDA, and its other form would wait for the tensor.
    if device.type == "cuda" and section.name != "adagrad":
        options |= {"lr": torch.tensor(section.lr, device=device), "fused": True}
        if section.name in ("adam", "adamw"):
            options["capturable"] = True
    return DENSE_OPTIMIZERS[section.name](model.parameters(), **options)


def _embedding(
    config: RunConfig, samples: Samples, profile: Profile | None
) -> EmbeddingBagCollection:
    is_sequence = config.model.num_steps is not None
    collection = EmbeddingCollection if is_sequence else EmbeddingBagCollection
    try:
        return collection(
            tables=tables_of(config, samples),
            optimizer=config.embedding.optimizer.rule(),
            budget=config.embedding.budget,
            strategy=find_named(config.embedding.strategy).rows,
            device=config.run.device,
            seed=config.run.seed,
            fill=config.embedding.fill,
            profile=profile,
        )
    except RuntimeError as error:
        if isinstance(error.__cause__, ImportError):  # Triton's absence is not a bug
            raise ValueError(str(error)) from error
        raise


def _profile(given: bool | str, samples: Samples) -> Profile | None:
    if isinstance(given, str):
        return _profile_in(given, samples)
    profile = samples.profile if given else None
    if given and profile is None:
        raise ValueError(
            "embedding.profile pins rows by how often they were counted; generated data have no "
            'counts, unless data.kind is "counted"; `hotrow profile` counts them'
        )
    return profile


def _profile_in(folder: str, samples: Samples) -> Profile:
    """Counts of other tables are refused here, where their folder is known."""
    found = load_profile(folder)
    remedy = "count those of this run: `hotrow profile DATA --out`"
    for name, (rows, _) in found.items():
        if name not in samples.tables:
            raise ValueError(
                f"embedding.profile = {folder!r} has counts of table {name!r}, and this run has "
                f"{few(samples.tables)}; {remedy}"
            )
        counted, here = int(rows.max()) + 1 if len(rows) else 0, samples.tables[name][0]
        if counted > here:
            raise ValueError(
                f"embedding.profile = {folder!r} has counts of table {name!r} with at least "
                f"{counted:,} rows, and in this run it has {here:,}; {remedy}"
            )
    return found


def tables_of(config: RunConfig, samples: Samples) -> list[EmbeddingBagConfig]:
    dim = config.model.row_width
    if config.model.num_steps is None:
        return [
            EmbeddingBagConfig(name, num_rows, dim, features)
            for name, (num_rows, features) in samples.tables.items()
        ]
    return [
        EmbeddingConfig(name, num_rows, dim, features, padding_idx=num_rows - 1)
        for name, (num_rows, features) in samples.tables.items()
    ]
