"""A run as one frozen tree of settings, read from a TOML file. Opens no other file.

    config = load("run.toml", overrides=["embedding.budget=5%", "training.steps=200"])

Every error is a ValueError that names the file, the section and the key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from hotrow.data import SyntheticConfig
from hotrow.embedding.arguments import FILLS
from hotrow.kernels.rules import SGD, Adagrad, Adam, AdamW, RowRule, RowWiseAdagrad
from hotrow.run.strategy_names import SystemSection, find_named
from hotrow.sizing.budgets import AUTO
from hotrow.support import toml
from hotrow.support.messages import nearest
from hotrow.support.numbers import plain_fields
from hotrow.support.units import parse_bytes

ROW_RULES: dict[str, type[RowRule]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "row-wise-adagrad": RowWiseAdagrad,
    "adam": Adam,
    "adamw": AdamW,
}
DENSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}

# Models of clicks and models of sequences, by their names in hotrow.models.MODELS, with their
# settings and the defaults of these.
CLICK_MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {"bottom": (64,), "top": (64, 32)},
    "dcnv2": {"bottom": (64,), "top": (64, 32), "cross_layers": 3, "cross_rank": 32},
    "deepfm": {"deep": (64, 32)},
}
SEQUENCE_MODELS: dict[str, dict[str, Any]] = {
    "tbsm": {
        "bottom": (), "top": (15, 15), "sequence": (15, 15), "final": (60,), "num_steps": 20,
    },
}  # fmt: skip
_MODELS = CLICK_MODELS | SEQUENCE_MODELS

# The job without a file uses one thread, so that neither its time nor its bits depend on other
# programs. On generated data it also evaluates during training, and, if the strategy is exact,
# compares all bits at the end.
BUILT_IN: dict[str, Any] = {"run": {"threads": 1}}
BUILT_IN_EVAL_EVERY = 64
# Its data if the model learns from sequences, whose samples are many times as large.
BUILT_IN_SEQUENCES: dict[str, Any] = {
    "rows": [20_000, 200_000, 2_000],
    "names": ["user", "item", "category"],
    "constant": ["user"],
    "num_dense": 0,
    "batch_size": 256,
    "samples": 65_536,
}


@dataclass(frozen=True)
class RunSection:
    """`[run]`: the folder under runs/, the seed of all initial weights, the device, and what is
    written beside the records."""

    name: str = "default"
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None  # None: torch's choice, which can change the last bits
    save: bool = True  # write the trained model to runs/<name>/model
    tensorboard: bool = False  # write event files to runs/<name>

    def __post_init__(self) -> None:
        plain_fields(self)
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.name):
            raise ValueError(
                f"name becomes a folder under runs/, so it may hold letters, digits, '.', '-' "
                f"and '_', not {self.name!r}"
            )
        _at_least(0, seed=self.seed)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")
        _at_least(1, threads=self.threads)
        # Whether the device exists is checked when the run is built: files are read anywhere.
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            hint = '; did you mean "cuda"?' if self.device.startswith("gpu") else ""
            raise ValueError(f'device must be "cpu", "cuda" or "cuda:1", not {self.device!r}{hint}')


@dataclass(frozen=True)
class DataSection(SyntheticConfig):
    """`[data]`: generated clicks, and the number of samples of an epoch.

    With `kind` "prepared" the data are those of `folder`, which `hotrow prepare` has made; only
    `batch_size`, `shuffle`, its `seed`, `dense` and `eval_batches` apply. With "counted" they are
    generated, and rows are read as often as in the folder's training split: its tables replace
    `rows`, `names`, `scale`, `lookups`, `skew`, `num_dense` and `constant`."""

    kind: str = "synthetic"
    folder: str | None = None
    shuffle: bool = True
    dense: tuple[str, ...] | None = None  # the numbers of a folder to read; None: all
    constant: tuple[str, ...] = ()  # generated sequences: tables with one id for all steps
    rows: tuple[int, ...] = (200_000, 100_000, 50_000, 20_000, 5_000, 1_000, 100, 10)
    scale: float = 1.0  # multiplies the rows of each generated table
    samples: int = 524_288
    eval_batches: int | None = None  # None: 8 of generated data, all of prepared data

    def __post_init__(self) -> None:
        _one_of(("synthetic", "prepared", "counted"), kind=self.kind)
        super().__post_init__()
        _at_least(1, eval_batches=self.eval_batches)
        if not 0 < self.scale <= 1:
            raise ValueError(f"scale must be above 0 and at most 1, got {self.scale}")
        if (self.folder is not None) != (self.kind != "synthetic"):
            raise ValueError(
                'kind "prepared" or "counted" and folder belong together: name the folder that '
                "`hotrow prepare` has made"
            )
        if self.samples < self.batch_size:
            raise ValueError(
                f"samples must fill one batch of {self.batch_size:,} at least, got {self.samples:,}"
            )

    @property
    def clicks(self) -> SyntheticConfig:
        """The generator's part of the section."""
        values = {option.name: getattr(self, option.name) for option in fields(SyntheticConfig)}
        rows = tuple(max(1, round(self.scale * rows)) for rows in self.rows)
        return SyntheticConfig(**values | {"rows": rows})


@dataclass(frozen=True)
class ModelSection:
    """`[model]`: the kind, the width of vectors, and the widths of hidden layers. The default of a
    kind takes the place of None; it is sized for generated data."""

    kind: str = "dlrm"
    embedding_dim: int = 16
    bottom: tuple[int, ...] | None = None  # of dense features, below the interaction
    top: tuple[int, ...] | None = None  # above it
    deep: tuple[int, ...] | None = None  # beside it
    cross_layers: int | None = None
    cross_rank: int | str | None = None  # or "full"
    sequence: tuple[int, ...] | None = None  # of the layers that weigh the steps
    final: tuple[int, ...] | None = None  # above context and target
    num_steps: int | None = None  # before the target

    def __post_init__(self) -> None:
        plain_fields(self)
        _one_of(_MODELS, kind=self.kind)
        _at_least(1, embedding_dim=self.embedding_dim, cross_layers=self.cross_layers)
        _at_least(1, num_steps=self.num_steps)
        if isinstance(self.cross_rank, int):
            _at_least(1, cross_rank=self.cross_rank)
        elif self.cross_rank not in (None, "full"):
            raise ValueError(f'cross_rank must be "full" or a number, not {self.cross_rank!r}')
        for name in ("bottom", "top", "deep", "sequence", "final"):
            for width in getattr(self, name) or ():
                _at_least(1, **{name: width})
        takes = _MODELS[self.kind]
        # Defaults replace None, so that the record of a run is complete.
        for name in (option.name for option in fields(self) if option.default is None):
            if getattr(self, name) is None:
                object.__setattr__(self, name, takes.get(name))
            elif name not in takes:
                raise ValueError(f"{self.kind} takes {', '.join(takes)}, but not {name}")

    @property
    def row_width(self) -> int:
        """The weights of a row, which hold the first-order weight of a DeepFM, too."""
        return self.embedding_dim + (self.kind == "deepfm")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the model's class, beside the embedding and those the data decide."""
        arguments = {name: getattr(self, name) for name in _MODELS[self.kind]}
        # The logit of a TBSM comes after `final`; `top` gives the vector of a step.
        logit = "top" if "final" not in arguments else "final"
        for name, last in (("bottom", self.embedding_dim), (logit, 1), ("deep", 1)):
            if name in arguments:
                arguments[name] = (*arguments[name], last)
        if self.kind == "deepfm":
            arguments["dim"] = self.embedding_dim
        if self.cross_rank == "full":
            arguments["cross_rank"] = None
        return arguments


@dataclass(frozen=True)
class RowOptimizerSection:
    """`[embedding.optimizer]`: how rows are updated. None: the default of torch."""

    name: str = "row-wise-adagrad"
    lr: float = 0.05
    weight_decay: float | None = None
    eps: float | None = None
    betas: tuple[float, float] | None = None
    initial_accumulator_value: float | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        _one_of(ROW_RULES, name=self.name)
        takes = {option.name for option in fields(ROW_RULES[self.name])}
        for option in self.options:
            if option not in takes:
                raise ValueError(f"{self.name} takes {', '.join(sorted(takes))}, but not {option}")
        self.rule()  # refuses values out of range

    @property
    def options(self) -> dict[str, Any]:
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {key: value for key, value in values.items() if key != "name" and value is not None}

    def rule(self) -> RowRule:
        return ROW_RULES[self.name](**self.options)


@dataclass(frozen=True)
class EmbeddingSection:
    """`[embedding]`: the strategy, the budget of fast memory, how many batches are known ahead, and
    how a GPU moves rows. `profile`: pin rows by the counts of prepared data, or of a folder of
    `hotrow profile`. On several ranks the budget is that of each rank, and `replicate` the bytes of
    rows that every rank keeps beside it."""

    strategy: str = "lookahead"
    budget: str | int = "10%"
    depth: str | int = "auto"
    fill: str = "auto"
    profile: bool | str = False
    replicate: str | int | None = None  # None: none, but half of the budget of a system that pins
    optimizer: RowOptimizerSection = field(default_factory=RowOptimizerSection)

    def __post_init__(self) -> None:
        plain_fields(self)
        find_named(self.strategy)
        _one_of(FILLS, fill=self.fill)
        if self.budget != AUTO:
            parse_bytes(self.budget, total=1 << 60)  # only its form: the tables' bytes come later
        if self.replicate:
            parse_bytes(self.replicate)
        if isinstance(self.depth, str) and self.depth != "auto":
            raise ValueError(f'depth must be "auto" or a number of batches, not {self.depth!r}')
        if isinstance(self.depth, int):
            _at_least(0, depth=self.depth)


@dataclass(frozen=True)
class DenseOptimizerSection:
    """`[training.optimizer]`: the torch optimizer of the dense layers."""

    name: str = "adagrad"
    lr: float = 0.02
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        plain_fields(self)
        _one_of(DENSE_OPTIMIZERS, name=self.name)
        _at_least(0, lr=self.lr, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class ScheduleSection:
    """`[training.schedule]`: learning rates as in the DLRM reference code, which MLPerf uses.

    The rate grows linearly over the first `warmup_steps`. From step `decay_start` on it falls with
    the square of the remaining `decay_steps`, and is constant after them. It applies to rows and
    dense layers.
    """

    warmup_steps: int = 0
    decay_start: int | None = None
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        _at_least(0, warmup_steps=self.warmup_steps, decay_start=self.decay_start)
        _at_least(1, decay_steps=self.decay_steps)
        if (self.decay_start is None) != (self.decay_steps is None):
            raise ValueError("decay_start and decay_steps belong together: give both or neither")
        if self.decay_start is not None and self.decay_start < self.warmup_steps:
            raise ValueError(
                f"decay_start is step {self.decay_start}, before the end of warm-up, step "
                f"{self.warmup_steps}"
            )

    def scale(self, step: int) -> float:
        """Return the factor of the rate at a step; the first step is 1."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.decay_start is None or self.decay_steps is None or step < self.decay_start:
            return 1.0
        left = self.decay_steps - min(step - self.decay_start, self.decay_steps - 1)
        return (left / self.decay_steps) ** 2

    def drive(self, optimizers: Iterable[torch.optim.Optimizer], taken: int = 0) -> list[LambdaLR]:
        """Return schedules to step after each training step; `taken` steps were taken before. A
        constant rate has none."""
        if not self.warmup_steps and self.decay_steps is None:
            return []
        return [
            LambdaLR(optimizer, lambda taken: self.scale(taken + 1), last_epoch=taken - 1)
            for optimizer in optimizers
        ]


@dataclass(frozen=True)
class TrainingSection:
    """`[training]`: how long to train, how often to evaluate, and whether to compare all bits."""

    epochs: int = 1
    steps: int | None = None  # instead of whole epochs
    eval_every: int | None = None
    patience: int | None = None  # evaluations without a better AUC that end the run
    clip_norm: float | None = None  # maximum gradient norm of the dense part
    verify_every: int | None = None  # steps between comparisons of rows that no step wrote
    check_equality: bool = False
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    optimizer: DenseOptimizerSection = field(default_factory=DenseOptimizerSection)

    def __post_init__(self) -> None:
        plain_fields(self)
        _at_least(1, steps=self.steps, epochs=self.epochs, eval_every=self.eval_every)
        _at_least(1, patience=self.patience, verify_every=self.verify_every)
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm must be a number above 0, got {self.clip_norm}")
        if self.patience is not None and self.eval_every is None:
            raise ValueError(
                "patience counts evaluations; say by eval_every how often there are any"
            )


@dataclass(frozen=True)
class CheckpointSection:
    """`[checkpoint]`: how often the state of a run is saved, how many checkpoints are kept, and
    whether a run is resumed from them."""

    every_steps: int | None = None
    every_seconds: float | None = None
    full_every: int = 1  # the checkpoints between hold the changed rows only
    keep: int = 2
    background: bool = True  # written while training goes on
    log: str | int = "5%"  # memory for rows that change during a save, as bytes or share of rows
    folder: str | None = None  # the parent of the run's checkpoints; None: runs/<name>/checkpoints
    on_error: str = "continue"  # or "stop", if a checkpoint cannot be written
    resume: str = "never"  # or "auto": if there is a checkpoint
    strict: bool = True  # refuse to resume with other data, model, optimizers or seeds

    def __post_init__(self) -> None:
        plain_fields(self)
        _at_least(1, every_steps=self.every_steps, full_every=self.full_every, keep=self.keep)
        if self.every_seconds is not None and not 0 < self.every_seconds < math.inf:
            raise ValueError(f"every_seconds must be a number above 0, got {self.every_seconds}")
        _one_of(("continue", "stop"), on_error=self.on_error)
        try:
            parse_bytes(self.log, total=1 << 60)  # only its form
        except ValueError as error:
            raise ValueError(f"log: {error}") from None
        _one_of(("never", "auto"), resume=self.resume)


@dataclass(frozen=True)
class RunConfig:
    """One run. Every key has a default: an empty file is a run."""

    run: RunSection = field(default_factory=RunSection)
    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    embedding: EmbeddingSection = field(default_factory=EmbeddingSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    system: SystemSection = field(default_factory=SystemSection)

    def __post_init__(self) -> None:
        named = find_named(self.embedding.strategy)
        if self.training.check_equality and named.contract == "changed":
            raise ValueError(
                f"training.check_equality compares all bits with all-fast, and {named.name} trains "
                "samples in another order, or fewer of them; training.check_equality=false"
            )

    @property
    def row_bytes(self) -> int:
        """The bytes of a row with its optimizer state."""
        width = self.model.row_width
        return 4 * (width + self.embedding.optimizer.rule().state_width(width))


def load(path: str | Path | None = None, *, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a TOML file, then apply `section.key=value` overrides; no file: the built-in job."""
    overrides = list(overrides)
    settings = read_settings(path, overrides)
    where = f"{path or 'settings'}{' with --set' if overrides else ''}"
    config = toml.build(RunConfig, settings, where=where, section="")
    if _is_built_in(path, settings) and "check_equality" not in settings["training"]:
        is_exact = find_named(config.embedding.strategy).contract == "exact"
        config = replace(config, training=replace(config.training, check_equality=is_exact))
    return config


def from_settings(
    settings: Mapping[str, Any], overrides: Iterable[str] = (), *, where: str
) -> RunConfig:
    """Build a run from settings that were saved with a run, then apply overrides."""
    try:
        tables = json.loads(json.dumps(settings))  # a copy, with lists instead of tuples
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
    overrides = list(overrides)
    for text in overrides:
        toml.override(RunConfig, tables, text)
    where += " with --set" if overrides else ""
    return toml.build(RunConfig, tables, where=where, section="")


def is_data(folder: Path) -> bool:
    """Return whether `hotrow prepare` has made a folder, or begun to."""
    return (folder / "shards").is_dir()


def read_settings(path: str | Path | None, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the settings of a file and of overrides, without defaults."""
    if path is not None and Path(path).is_dir():
        raise ValueError(
            f"{path} holds data, and a run file is wanted: --set data.kind=prepared "
            f"--set data.folder={path} does without one"
            if is_data(Path(path))
            else f"{path} is a folder, and the TOML file of a run is wanted"
        )
    settings = deepcopy(BUILT_IN) if path is None else toml.read(Path(path))
    for text in overrides:
        toml.override(RunConfig, settings, text)
    if path is None and settings.get("model", {}).get("kind") in SEQUENCE_MODELS:
        data = settings.get("data", {})
        # Names and shape belong to the rows: a user who gives rows gives all.
        if not {"rows", "kind"} & data.keys():
            settings["data"] = BUILT_IN_SEQUENCES | data
    if _is_built_in(path, settings):
        settings["training"] = {"eval_every": BUILT_IN_EVAL_EVERY, **settings.get("training", {})}
    return settings


def _is_built_in(path: str | Path | None, settings: dict[str, Any]) -> bool:
    return path is None and settings.get("data", {}).get("kind", "synthetic") == "synthetic"


def _one_of(names: Iterable[str], **values: str) -> None:
    names = list(names)
    for key, value in values.items():
        if value not in names:
            near = nearest(value, names)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"{key} must be one of {', '.join(names)}, not {value!r}{hint}")


def _at_least(limit: float, **values: float | None) -> None:
    for key, value in values.items():
        if value is not None and not limit <= value < math.inf:
            raise ValueError(f"{key} must be a number of at least {limit}, got {value}")
