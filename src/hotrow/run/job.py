"""The parts of a run, built from its configuration. Knows no files of runs and no screens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.data.ranks import current_part
from hotrow.embedding.arguments import usable_device
from hotrow.embedding.collection import EmbeddingBagCollection, EmbeddingCollection
from hotrow.engine.profile import Profile, load_profile
from hotrow.engine.strategy import STRATEGIES
from hotrow.inputs.rank_part import whole_batches
from hotrow.inputs.tables import EmbeddingBagConfig, EmbeddingConfig, group_by_width
from hotrow.models import MODELS
from hotrow.run.config import (
    DENSE_OPTIMIZERS,
    DenseOptimizerSection,
    EmbeddingSection,
    RunConfig,
)
from hotrow.run.source import AnyBatch, Samples, open_samples
from hotrow.run.strategy_names import find_named
from hotrow.sizing.budgets import AUTO, auto_budget, buffer_part_of
from hotrow.store.budget import share_out
from hotrow.support.messages import few, many, warn
from hotrow.support.records import EvalRecord, StepRecord
from hotrow.support.units import parse_bytes
from hotrow.systems.fae.fae import FAE
from hotrow.systems.hotline.hotline import Hotline
from hotrow.systems.slipstream.slipstream import RandomDrop, Slipstream
from hotrow.training.trainer import System, Trainer


@dataclass(frozen=True)
class Job:
    """All parts of one run. Two jobs of one configuration start with the same bits."""

    config: RunConfig
    samples: Samples
    embedding: EmbeddingBagCollection
    model: nn.Module
    dense_optimizer: torch.optim.Optimizer
    trainer: Trainer[AnyBatch]
    done: int = 0  # steps that another process has taken before
    first: int = 0  # the first batch of this process

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.embedding.optimizer, self.dense_optimizer]

    def train(self) -> Generator[StepRecord]:
        """Take the steps of the run, with its learning rates."""
        schedules = self.config.training.schedule.drive(self.optimizers, taken=self.done)
        if self.first >= self.total_steps:
            return  # another process trained all of it, and stopped before it wrote the record
        # Closed here, since Python loses a Ctrl-C that comes while it collects a generator.
        with closing(self.trainer.run(self._batches())) as records:
            for record in records:
                for schedule in schedules:
                    schedule.step()
                yield record

    def _batches(self) -> Iterable[AnyBatch]:
        samples, first, steps = self.samples, self.first, self.total_steps - self.first
        # Comparisons have samples that can be read from the first batch alone.
        read = partial(samples.batches, start=first) if first else samples.batches
        if self.trainer.system is None:
            return read(first + steps)
        epoch = min(steps, samples.batches_per_epoch)
        if isinstance(self.trainer.system, FAE):  # sorts the samples of one epoch, and repeats them
            if _has_sample_numbers(samples, steps):
                loader: Iterable[AnyBatch] = samples.loader(-(-steps // epoch))  # type: ignore[attr-defined]
                return loader
            steps = epoch
        return Again(lambda: read(first + steps), steps, epoch)

    @property
    def position(self) -> int:
        """The batch with which another process would continue. Systems that choose samples do not
        save which ones they have trained: for them the current epoch starts again."""
        if not _chooses_samples(self.config):
            return self.first + self.trainer.step - self.done
        epoch = min(self.total_steps - self.first, self.samples.batches_per_epoch)
        epochs: int = getattr(self.trainer.system, "epochs", 0)  # that have ended
        return min(self.first + epochs * epoch, self.total_steps)

    @property
    def total_steps(self) -> int:
        """The batches of the whole run."""
        return total_steps(self.config, self.samples)

    @property
    def known_steps(self) -> int | None:
        """The steps of the whole run; None: not known, or not yet."""
        system = self.trainer.system
        if skip_of(system) is not None:
            return None
        steps = system.total_steps if isinstance(system, FAE) else self.total_steps - self.first
        return None if steps is None else steps + self.done

    def evaluate(self, *, at_end: bool = False) -> EvalRecord:
        """Evaluate the model on the validation samples, or at the end on the test samples."""
        split = self.samples.split("test" if at_end else "validation")
        return self.trainer.evaluate(split.batches)


def open_data(config: RunConfig) -> Samples:
    on_gpu = config.run.device.startswith("cuda") and torch.cuda.is_available()
    return open_samples(config.data, pin_memory=on_gpu, steps=config.model.num_steps)


def total_steps(config: RunConfig, samples: Samples) -> int:
    epoch, training = samples.batches_per_epoch, config.training  # raises if no batch is full
    return training.steps or training.epochs * epoch


def _chooses_samples(config: RunConfig) -> bool:
    """Return whether the strategy reorders or skips samples, so that a batch is not a step."""
    return find_named(config.embedding.strategy).contract == "changed"


def build(
    config: RunConfig,
    samples: Samples | None = None,
    *,
    done: int = 0,
    position: int | None = None,
) -> Job:
    """Build a job.

    `done` is the number of steps taken before, whose results the caller loads into the job.
    `position` is the first batch, if it is not `done`.
    """
    samples = samples or open_data(config)
    config = with_budget(config, samples)
    first = done if position is None else position
    if first and _chooses_samples(config) and first < total_steps(config, samples):
        first -= first % samples.batches_per_epoch  # such systems start with an epoch
    profile = _profile(config.embedding.profile, samples)
    embedding = _embedding(config, samples, profile)
    model = model_of(config, samples, embedding).to(embedding.device)  # rows stay where they are
    optimizer = dense_optimizer(config.training.optimizer, model, embedding.device)
    trainer: Trainer[AnyBatch] = Trainer(
        model,
        F.binary_cross_entropy_with_logits,
        dense_optimizer=optimizer,
        ids=lambda batch: batch.sparse,
        device=embedding.device,
        depth=config.embedding.depth,
        clip_norm=config.training.clip_norm,
        system=_system(config, samples, profile, first),
    )
    # Reserve now, so that the memory shown before the first batch is what it will be.
    if samples.lookups is not None:
        largest_part = -(-config.data.batch_size // current_part().ranks)
        embedding.reserve(largest_part, samples.lookups)
    trainer.step = done
    return Job(config, samples, embedding, model, optimizer, trainer, done, first)


def model_of(config: RunConfig, samples: Samples, embedding: nn.Module) -> nn.Module:
    return MODELS[config.model.kind](
        embedding,
        samples.num_dense,
        **config.model.arguments,
        generator=torch.Generator().manual_seed(config.run.seed),
    )


def with_budget(config: RunConfig, samples: Samples) -> RunConfig:
    """Return the configuration with a budget in bytes instead of "auto". On several ranks each
    collection chooses for the rows that its rank owns."""
    section = config.embedding
    if section.budget != AUTO or current_part().ranks > 1:
        return config
    strategy = find_named(section.strategy).rows
    if not strategy.needs_budget:
        strategy = STRATEGIES["lookahead"]  # for the strategies it is compared with
    groups = group_by_width(tables_of(config, samples))
    row_bytes = [config.row_bytes]  # the same for all tables
    device = usable_device(config.run.device)
    share = partial(
        share_out,
        row_bytes=row_bytes,
        num_rows=[group.num_rows for group in groups],
        parts=[1.0],
        buffer_part=buffer_part_of(strategy, device),
    )
    profile = _profile(section.profile, samples)
    budget = auto_budget(
        share, groups, row_bytes, strategy=strategy, device=device, profile=profile
    )
    return replace(config, embedding=replace(section, budget=budget))


def all_fast(config: RunConfig) -> RunConfig:
    """Return the run with all rows in fast memory, which exact strategies are compared with."""
    return replace(config, embedding=replace(config.embedding, strategy="all-fast"))


def differences(left: Job, right: Job) -> list[str]:
    """Return the dense weights and tables whose bits differ; a weight that one job lacks differs.
    Rows are compared with their optimizer state. Several ranks call this together; each compares
    the rows that it owns."""
    weights, others = dense_weights(left.model), dense_weights(right.model)
    names = [
        name
        for name in weights | others
        if name not in weights or name not in others or not same_bits(weights[name], others[name])
    ]
    for table in left.embedding.tables:
        if not same_bits(_rows(left, table.name), _rows(right, table.name)):
            names.append(f"rows of table {table.name}")
    return names


def dense_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name. Rows are neither: a state dict could not hold them."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors}


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Compare the stored bytes: NaN equals NaN, and 0.0 differs from -0.0."""
    return left.shape == right.shape and torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _rows(job: Job, table: str) -> Tensor:
    if job.embedding.ranks is None:
        return torch.cat([rows for _, rows in job.embedding.rows(table)])
    job.embedding.row_access.settle()  # replicas go to their owners, too
    return job.embedding.row_access.stored(table).cpu()


def dense_optimizer(
    section: DenseOptimizerSection, model: nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay}
    # A captured step needs a learning rate that is a tensor, and a fused optimizer that reads it on
    # the device. torch 2.11 has no fused Adagrad for CUDA; its other form waits for the tensor.
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
    section = _with_pins(config, samples, current_part().ranks)
    try:
        return collection(
            tables=tables_of(config, samples),
            optimizer=section.optimizer.rule(),
            budget=section.budget,
            strategy=find_named(section.strategy).rows,
            device=_device(config.run.device),
            seed=config.run.seed,
            fill=section.fill,
            profile=profile,
            replicate=section.replicate or 0,
        )
    except RuntimeError as error:
        if isinstance(error.__cause__, ImportError):  # Triton is missing, which is not a bug
            raise ValueError(str(error)) from error
        raise


def _device(name: str) -> str:
    """Return the device of this rank: "cuda" is the GPU that it was given."""
    is_shared = name == "cuda" and current_part().ranks > 1 and torch.cuda.is_available()
    return f"cuda:{torch.cuda.current_device()}" if is_shared else name


def _with_pins(config: RunConfig, samples: Samples, ranks: int) -> EmbeddingSection:
    """Return the settings of the collection. Rows that a system pins are on every rank, beside the
    budget: unless `replicate` says how many, they get half of it."""
    section = config.embedding
    if ranks == 1 or section.replicate is not None or find_named(section.strategy).system is None:
        return section
    if section.budget == AUTO:
        raise ValueError(
            f'embedding.budget = "auto" leaves open what {section.strategy} may pin on {ranks} '
            "ranks: give embedding.replicate, the bytes of rows that every rank keeps"
        )
    owned = config.row_bytes * sum(rows for rows, _ in samples.tables.values()) // ranks
    total = parse_bytes(section.budget, total=owned)
    return replace(section, budget=total - total // 2, replicate=total // 2)


def _profile(given: bool | str, samples: Samples) -> Profile | None:
    if isinstance(given, str):
        profile = load_profile(given)
        _check_profile(profile, given, samples)
        return profile
    if given and samples.profile is None:
        raise ValueError(
            "embedding.profile pins rows by how often they were counted; generated data have no "
            'counts, unless data.kind is "counted"; `hotrow profile` counts them'
        )
    return samples.profile if given else None


def _check_profile(profile: Profile, folder: str, samples: Samples) -> None:
    """Refuse counts of other tables here, where their folder is known."""
    remedy = "count those of this run: `hotrow profile DATA --out`"
    for name, (rows, _) in profile.items():
        if name not in samples.tables:
            raise ValueError(
                f"embedding.profile = {folder!r} has counts of table {name!r}, and this run has "
                f"{few(samples.tables)}; {remedy}"
            )
        counted, num_rows = int(rows.max()) + 1 if len(rows) else 0, samples.tables[name][0]
        if counted > num_rows:
            raise ValueError(
                f"embedding.profile = {folder!r} has counts of table {name!r} with at least "
                f"{counted:,} rows, and in this run it has {num_rows:,}; {remedy}"
            )


def tables_of(config: RunConfig, samples: Samples) -> list[EmbeddingBagConfig]:
    dim, tables = config.model.row_width, samples.tables.items()
    if config.model.num_steps is None:
        return [EmbeddingBagConfig(name, rows, dim, features) for name, (rows, features) in tables]
    return [
        EmbeddingConfig(name, rows, dim, features, padding_idx=rows - 1)
        for name, (rows, features) in tables
    ]


# -- systems: which samples a run trains, and in what order -----------------------------


def _system(
    config: RunConfig, samples: Samples, profile: Profile | None, first: int
) -> System[AnyBatch] | None:
    """Return the system that the run's strategy names; None: batches are trained as they are."""
    named = find_named(config.embedding.strategy)
    if named.system is None and named.skip is None:
        return None  # an evaluation needs no full batch of training samples
    # At least one: a run may have trained all steps before its record was written.
    steps, test = max(1, total_steps(config, samples) - first), _validation(samples)
    epoch = min(steps, samples.batches_per_epoch)
    section = config.system
    skip: RandomDrop | Slipstream | None = None
    if named.skip == "random-drop":
        skip = RandomDrop(section.target, batches_per_epoch=epoch)
    elif named.skip is not None:
        skip = Slipstream(
            section.skipping(),
            hot_budget=section.hot_budget or config.embedding.budget,
            profile=profile if named.system is None else None,
            test=test,
            batches_per_epoch=epoch,
        )
    if named.system is None:
        return skip
    if named.system == "hotline":
        return Hotline(batches_per_epoch=epoch, skip=skip)
    return FAE(
        hot_budget=section.hot_budget,
        profile=profile,
        cold="hybrid" if named.system == "fae-hybrid" else "fetched",
        test=test,
        epochs=None if _has_sample_numbers(samples, steps) else -(-steps // epoch),
        seed=config.data.seed,
        skip=skip,
        # Whole epochs end by themselves.
        most_samples=steps * config.data.batch_size if steps % epoch else None,
    )


def _validation(samples: Samples) -> Iterable[AnyBatch] | None:
    """Return the batches that systems evaluate; None, with a warning: there are none."""
    try:
        samples.split("validation")
    except ValueError as error:
        warn(str(error))
        return None
    return Again(lambda: samples.split("validation").batches)


def _has_sample_numbers(samples: Samples, steps: int) -> bool:
    """Return whether FAE can sort samples by their numbers. It copies those of a part of an epoch,
    because it must train the samples that a run without FAE trains."""
    return hasattr(samples, "loader") and steps >= samples.batches_per_epoch


class Again:
    """Batches that are read from the beginning each time."""

    def __init__(
        self,
        batches: Callable[[], Iterable[AnyBatch]],
        count: int | None = None,
        batches_per_epoch: int | None = None,
    ) -> None:
        self._batches, self._count, self.batches_per_epoch = batches, count, batches_per_epoch

    def __iter__(self) -> Iterator[AnyBatch]:
        return iter(self._batches())

    def whole_batches(self) -> Again:
        """Return the same batches, whole on every rank."""

        return Again(lambda: whole_batches(self._batches()), self._count, self.batches_per_epoch)

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError("the number of batches is not known")
        return self._count


def skip_of(system: System[AnyBatch] | None) -> RandomDrop | Slipstream | None:
    """Return what skips samples of a run; None: nothing does."""
    skip = getattr(system, "skip", system)
    return skip if isinstance(skip, RandomDrop | Slipstream) else None


def record_of(system: System[AnyBatch] | None) -> dict[str, Any]:
    """Return the records of a system and of what skips samples; empty: there is no system."""
    records: dict[str, Any] = {}
    if isinstance(system, FAE | Hotline):
        records["hotline" if isinstance(system, Hotline) else "fae"] = asdict(system.record)
    if (skip := skip_of(system)) is not None:
        records["skip"] = asdict(skip.record)
    return records


def told_of(system: System[AnyBatch] | None) -> dict[str, str]:
    """Return the same facts for people."""
    facts = {}
    if isinstance(system, FAE):
        facts["hot and cold"] = system.described()
    if isinstance(system, Hotline):
        r = system.record
        pinned, times = sum(r.pinned_rows.values()), len(r.learned)
        facts["popular samples"] = (
            f"{r.popular_share:.1%} of {r.samples:,}; {r.split_batches:,} of {r.batches:,} batches "
            f"trained in two parts; {pinned:,} rows pinned, chosen {many(times, 'time')}"
            if r.samples
            else f"none: all {r.batches:,} batches were trained while rows were learned"
        )
    if (skip := skip_of(system)) is not None:
        s = skip.record
        stale, hot = sum(s.stale_rows.values()), sum(s.hot_rows.values())
        rows = f"; {stale:,} of {hot:,} hot rows are stale" if hot else ""
        stopped = f"; {s.stopped}" if s.stopped else ""
        facts["left out"] = f"{s.dropped:,} of {s.offered:,} samples offered{rows}{stopped}"
    return facts
