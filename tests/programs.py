"""Random small training programs.

`draw(seed)` makes a program: tables, batches, an optimizer, a strategy, and a loop that does what
users' loops do. program_models.py has the models that can run it, program_runs.py runs it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor

import hotrow
from builders import SCHEDULES, skewed
from hotrow.engine.strategy import STRATEGIES

# What a program may contain besides lookups and updates. A program without one of them is drawn
# by leaving its name out of `draw`'s `ingredients`; the rest of the program stays as it is.
INGREDIENTS = {
    "accumulate": "two backward passes inside accumulate()",
    "another engine": "train_on_host() or train_in_slots() between two passes",
    "break": "the loop leaves hotrow.ahead, and goes on with another pass",
    "changed ids": "a batch's ids are changed in place before they are looked up",
    "checkpoint": "the lookup is inside torch.utils.checkpoint",
    "evaluate": "vectors are read between two steps",
    "extra lookup": "the step also looks up a batch that hotrow.ahead does not know",
    "freeze rows": "freeze_rows() with some rows, or with None",
    "grad_scale": "the loss is multiplied, and grad_scale says by what",
    "in place": "vectors are multiplied in place",
    "load weights": "load_weights() replaces some rows",
    "no backward": "a batch is looked up, and its loss is not used",
    "no samples": "a batch has no samples",
    "pin rows": "pin_rows() between two passes",
    "rates": "each table has its own learning rate, and a scheduler changes them",
    "refill": "the loader refills one set of buffers",
    "requires_grad": "requires_grad_(False), or True again",
    "round trip": "weights and row state are saved and loaded",
    "save": "a checkpoint is saved, at once or in the background, and loaded in the end",
    "sum of two": "the losses of two batches have one backward pass",
    "thread": "another thread evaluates while this one trains",
    "twice": "one batch is looked up twice in one step",
    "unpooled padding": "tables without pooling have a padding_idx",
    "untracked ids": "ids are changed in place by way of numpy or .data",
    "unused": "the loss uses some features only",
}
EVERYTHING = frozenset(INGREDIENTS)


# -- what is drawn -------------------------------------------------------------------------


@dataclass(frozen=True)
class Action:
    """What a loop does between two steps. `value` depends on the name."""

    name: str
    value: Any = None


@dataclass(frozen=True)
class Step:
    """One step of a loop. `batches` are numbers; those of `extra` are not in the loader."""

    batches: tuple[int, ...]
    used: tuple[str, ...]  # features that the loss uses; none: values(), which uses all
    how: str = "plain"  # or accumulate, checkpoint, no backward, sum of two, twice
    in_place: bool = False
    extra: int | None = None
    change: str | None = None  # how ids are changed: tracked, numpy or data
    before: tuple[Action, ...] = ()
    new_pass: bool = False  # hotrow.ahead is left before this step
    silent: bool = False  # of several ranks: the loss of this one reaches no row


@dataclass(frozen=True)
class Program:
    """Everything that a run depends on."""

    seed: int
    tables: tuple[hotrow.EmbeddingBagConfig, ...]
    rule: hotrow.kernels.rules.RowRule
    rates: tuple[float, ...] | None  # by table
    scheduler: str | None
    form: str  # of ids: dense, kjt, of or tuple
    id_type: torch.dtype
    weights: str  # per sample: none, given or learned
    keys: tuple[str, ...]  # of a KeyedJaggedTensor; one may belong to no table
    most: int  # lookups of one feature of one sample
    empty: frozenset[int]  # batches without samples
    strategy: str
    schedule: str
    victims: str
    room: str  # tight, chunked or roomy
    dense_map: bool
    profile: bool  # counts say which rows to pin
    on_nonfinite: str
    grad_scale: float | None
    late: bool  # updates of the host's rows wait, as on a GPU
    loader: str  # ahead, or direct: no hotrow.ahead
    buffers: str  # fresh, or refilled by: tensor, numpy or data
    depth: int | None
    threads: int
    steps: tuple[Step, ...]
    rank: int = 0  # of several ranks: each has batches of its own

    def __str__(self) -> str:
        names = [each.name for each in fields(self) if each.name != "steps"]
        shown = [f"{name} = {getattr(self, name)!r}" for name in names]
        steps = [f"  {number}: {step}" for number, step in enumerate(self.steps)]
        repeat = f"To repeat it: python tests/program_runs.py {self.seed}"
        return "\n".join([repeat, *shown, "steps:", *steps])

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(name for table in self.tables for name in table.feature_names)

    @property
    def columns(self) -> tuple[str, ...]:
        """The features of a batch, in their order."""
        return self.keys if self.form == "kjt" else self.features

    @cached_property
    def table_of(self) -> dict[str, hotrow.EmbeddingBagConfig]:
        return {name: table for table in self.tables for name in table.feature_names}

    def per_sample(self, feature: str) -> int:
        """Lookups of a feature where all samples have as many."""
        return 1 if self.form == "dense" else 1 + self.features.index(feature) % 3

    @property
    def numbers(self) -> list[int]:
        """The loader's batches."""
        return [number for step in self.steps for number in step.batches]

    @property
    def is_exact(self) -> bool:
        """Whether every bit is to be that of all-fast."""
        on_host = any(act.name == "another engine" for step in self.steps for act in step.before)
        return STRATEGIES[self.strategy].contract == "exact" and not on_host

    @property
    def ingredients(self) -> set[str]:
        """The names of what it contains."""
        named = {act.name for step in self.steps for act in step.before}
        named |= {step.how for step in self.steps} - {"plain"}
        conditions = {
            "break": any(step.new_pass for step in self.steps),
            "changed ids": any(step.change == "tracked" for step in self.steps),
            "untracked ids": any(step.change in ("numpy", "data") for step in self.steps),
            "extra lookup": any(step.extra is not None for step in self.steps),
            "grad_scale": self.grad_scale is not None,
            "in place": any(step.in_place for step in self.steps),
            "no samples": bool(self.empty & set(self.numbers)),
            "rates": bool(self.rates or self.scheduler),
            "refill": self.buffers != "fresh",
            "thread": self.threads > 0,
            "unused": any(step.used and len(step.used) < len(self.features) for step in self.steps),
        }
        return named | {name for name, holds in conditions.items() if holds}


def draw(seed: int, ingredients: Iterable[str] = EVERYTHING) -> Program:
    """The program of a seed. What is left out of `ingredients` changes nothing else in it."""
    allowed = frozenset(ingredients)
    if unknown := allowed - EVERYTHING:
        raise ValueError(f"no ingredient {min(unknown)!r}; there are {', '.join(INGREDIENTS)}")
    dice = random.Random(seed)

    def chance(share: float, ingredient: str = "") -> bool:
        return dice.random() < share and (not ingredient or ingredient in allowed)

    tables = _draw_tables(dice, allowed)
    features = [name for table in tables for name in table.feature_names]
    sums = all(table.pooling == "sum" for table in tables)
    form = dice.choice(["dense", "kjt", "kjt", "of", "tuple"])
    weights = dice.choice(["none", "given", "learned"])
    jagged_with_weights = sums and form in ("kjt", "tuple")
    keys = dice.sample(features, len(features))
    if chance(0.3):
        keys.insert(dice.randrange(len(keys) + 1), "unread")
    strategy = dice.choice([*STRATEGIES, "lookahead", "scratchpipe", "static", "lru"])
    has_slots = STRATEGIES[strategy].has_slots
    schedule = dice.choice(["", "", *SCHEDULES])
    victims = dice.choice(["own", "random", "most-recent"])
    loader = dice.choice(["ahead", "ahead", "ahead", "direct"])
    refilled, buffers = dice.choice(["tensor", "numpy", "data"]), "fresh"
    if chance(0.35, "refill"):
        buffers = refilled
    threads = dice.choice([1, 2]) * chance(0.3, "thread")
    rates = tuple(dice.choice([0.02, 0.1, 0.3]) for _ in tables)
    scheduler = dice.choice([None, "exponential", "lambda"])
    has_rates = chance(0.4, "rates")
    values_work = form == "dense" or all(table.pooling != "none" for table in tables)
    program = Program(
        seed=seed,
        tables=tables,
        rule=_draw_rule(dice),
        rates=rates if has_rates else None,
        scheduler=scheduler if has_rates else None,
        form=form,
        id_type=dice.choice([torch.int64, torch.int64, torch.int32]),
        weights=weights if jagged_with_weights else "none",
        keys=tuple(keys),
        most=dice.choice([2, 4, 7]),
        empty=frozenset(n for n in range(40) if chance(0.06, "no samples")),
        strategy=strategy,
        schedule=schedule if has_slots else "",
        victims=victims if has_slots else "own",
        room=dice.choice(["tight", "tight", "roomy", "chunked"]),
        dense_map=chance(0.5),
        profile=chance(0.3),
        on_nonfinite=dice.choice(["propagate", "propagate", "error", "skip"]),
        grad_scale=4.0 if chance(0.15, "grad_scale") else None,
        late=chance(0.15) and not threads,  # Triton's interpreter is slow, and has one thread
        loader=loader,
        buffers=buffers,
        depth=dice.choice([None, None, 0, 1, 5]),
        threads=threads,
        steps=(),
    )
    if program.buffers != "fresh" and program.weights == "learned":
        program = replace(program, weights="given")
    return replace(program, steps=_draw_steps(dice, program, allowed, values_work))


def _draw_tables(
    dice: random.Random, allowed: frozenset[str]
) -> tuple[hotrow.EmbeddingBagConfig, ...]:
    poolings = dice.choice([["sum"], ["sum"], ["mean"], ["none"], ["sum", "mean"], ["none", "sum"]])
    widths = dice.choice([[4], [4], [3, 6], [2, 4, 5]])
    letters = iter("fghijklmnopq")
    tables = []
    for name in "abcd"[: dice.choice([1, 2, 2, 3, 4])]:
        rows, pooling = dice.choice([1, 7, 20, 60, 90]), dice.choice(poolings)
        padding = dice.choice([0, rows - 1, rows // 2]) if dice.random() < 0.5 else None
        if pooling == "none" and "unpooled padding" not in allowed:
            padding = None
        names = [next(letters) for _ in range(dice.choice([1, 1, 1, 2, 3]))]
        config = hotrow.EmbeddingBagConfig(name, rows, dice.choice(widths), names)
        tables.append(replace(config, pooling=pooling, padding_idx=padding))
    return tuple(tables)


def _draw_rule(dice: random.Random) -> hotrow.kernels.rules.RowRule:
    """With a large `eps`: a gradient that should be zero, and is 1e-9 by rounding, would have the
    optimizers that divide by its size take a step as large as any other."""
    rate, eps = dice.choice([0.02, 0.1]), dice.choice([1e-2, 1e-3])
    start, betas = dice.choice([0.0, 0.1]), dice.choice([(0.9, 0.999), (0.5, 0.9)])
    decay = dice.choice([0.0, 0.05, 0.3])
    kinds: list[Callable[[], hotrow.kernels.rules.RowRule]] = [
        lambda: hotrow.SGD(rate, weight_decay=decay),
        lambda: hotrow.Adagrad(rate, initial_accumulator_value=start, eps=eps),
        lambda: hotrow.RowWiseAdagrad(rate, initial_accumulator_value=start, eps=eps),
        lambda: hotrow.Adam(rate, betas=betas, eps=eps),
        lambda: hotrow.AdamW(rate, betas=betas, eps=eps, weight_decay=decay),
    ]
    return dice.choice(kinds)()


def _draw_steps(
    dice: random.Random, program: Program, allowed: frozenset[str], values_work: bool
) -> tuple[Step, ...]:
    def chance(share: float, ingredient: str) -> bool:
        return dice.random() < share and ingredient in allowed

    numbers, extras, features = count(), count(100), program.features
    kinds = ["accumulate", "checkpoint", "no backward", "sum of two", "twice"]
    steps = []
    for place in range(dice.choice([4, 8, 12, 20])):
        how = dice.choice(kinds) if dice.random() < 0.3 else "plain"
        # A buffer that was refilled no longer has the ids of a batch whose backward is to come.
        if how not in allowed or (how == "sum of two" and program.buffers != "fresh"):
            how = "plain"
        size = 2 if how in ("accumulate", "sum of two") else 1
        used = tuple(name for name in features if dice.random() < 0.6) or features[:1]
        used = used if chance(0.3, "unused") else features
        if values_work and dice.random() < 0.2:
            used = ()
        new_pass = place > 0 and chance(0.12, "break")
        before = _draw_actions(dice, program, allowed, extras, new_pass)
        if not place:  # rows of padding start with zeros
            before += tuple(
                Action("unpooled padding", (table.name, table.padding_idx, 1))
                for table in program.tables
                if table.pooling == "none" and table.padding_idx is not None
            )
        change = dice.choice(["tracked", "numpy", "data"]) if dice.random() < 0.1 else None
        name = "changed ids" if change == "tracked" else "untracked ids"
        steps.append(
            Step(
                batches=tuple(next(numbers) for _ in range(size)),
                used=used,
                how=how,
                in_place=chance(0.1, "in place"),
                extra=next(extras) if chance(0.1, "extra lookup") else None,
                change=change if name in allowed and how == "plain" else None,
                before=before,
                new_pass=new_pass,
            )
        )
    return tuple(steps)


def _draw_actions(
    dice: random.Random,
    program: Program,
    allowed: frozenset[str],
    extras: Iterator[int],
    new_pass: bool,
) -> tuple[Action, ...]:
    table = dice.choice(program.tables)
    rows = table.num_embeddings
    some = tuple(sorted(dice.sample(range(rows), dice.randint(1, rows))))
    first = dice.randrange(rows)
    drawn: list[tuple[float, Action]] = [
        (0.15, Action("evaluate", (next(extras), dice.choice(["eval", "no_grad", "inference"])))),
        (0.15, Action("freeze rows", dice.choice([None, (), (table.name, some, "mask"),
                                                  (table.name, some, "numbers")]))),
        (0.1, Action("load weights", (table.name, first, dice.randint(1, rows - first)))),
        (0.1, Action("requires_grad", dice.random() < 0.5)),
        (0.08, Action("save", dice.choice(["now", "background"]))),
    ]  # fmt: skip
    # These need that no hotrow.ahead is running, and a thread would read a half of them.
    quiet = new_pass and not program.threads
    how = dice.choice(["state_dict", "itself", "checkpoint"])
    pinned = Action("pin rows", (table.name, some))
    switch = Action("another engine")
    drawn += [(0.4 * quiet, Action("round trip", how))]
    strategy = STRATEGIES[program.strategy]
    drawn += [(0.3 * (quiet and strategy.name == "static"), pinned)]
    drawn += [(0.2 * (quiet and strategy.has_slots), switch)]
    return tuple(act for share, act in drawn if dice.random() < share and act.name in allowed)


# -- batches -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """One batch as plain facts, by feature."""

    ids: dict[str, Tensor]  # int64, sample by sample
    lengths: dict[str, Tensor]  # by sample
    weights: dict[str, Tensor] | None
    label: Tensor  # a number for each sample


@cache
def samples_of(program: Program, number: int) -> Samples:
    seed = 1000 * program.seed + number + (program.rank << 40)
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, 7, (), generator=generator))
    size = 0 if number in program.empty else size
    ids, lengths = {}, {}
    for name in program.columns:
        table = program.table_of.get(name)
        rows = 1000 if table is None else table.num_embeddings
        length = torch.randint(0, program.most, (size,), generator=generator)
        if program.form in ("dense", "of"):
            length = torch.full((size,), program.per_sample(name))
        ids[name] = skewed(generator, rows, int(length.sum()))
        if table is not None and table.padding_idx is not None:
            hit = torch.rand(ids[name].shape, generator=generator) < 0.15
            ids[name] = ids[name].masked_fill(hit, table.padding_idx)
        lengths[name] = length
    weights = None
    if program.weights != "none":
        weights = {k: torch.rand(v.shape, generator=generator) + 0.1 for k, v in ids.items()}
    return Samples(ids, lengths, weights, torch.rand(size, generator=generator) + 0.5)


def changed(program: Program, samples: Samples) -> Samples:
    """The samples after `change_ids`."""
    limit = smallest(program) - 1
    ids = {name: each.clamp(max=limit) for name, each in samples.ids.items()}
    return replace(samples, ids=ids)


def smallest(program: Program) -> int:
    return min(table.num_embeddings for table in program.tables)


def change_ids(program: Program, values: Tensor, how: str) -> None:
    """Change a batch's ids in place, so that they are still rows of every table."""
    limit = smallest(program) - 1
    if how == "tracked":
        values.clamp_(max=limit)
    elif how == "data":
        values.data.clamp_(max=limit)
    else:
        flat = values.numpy()
        flat[flat > limit] = limit


Raw = dict[str, Tensor]  # values, label, and for jagged forms offsets and perhaps weights


def raw_of(program: Program, samples: Samples) -> Raw:
    """The tensors that a loader would fill."""
    names = program.columns
    if program.form in ("dense", "of"):
        size = len(samples.label)
        widths = [program.per_sample(name) for name in names]
        columns = [samples.ids[n].view(size, w) for n, w in zip(names, widths, strict=True)]
        return {"values": torch.cat(columns, dim=1).to(program.id_type), "label": samples.label}
    lengths = torch.cat([samples.lengths[name] for name in names])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = torch.cat([samples.ids[name] for name in names])
    raw = {"values": values.to(program.id_type), "offsets": offsets, "label": samples.label}
    if samples.weights is not None:
        raw["weights"] = torch.cat([samples.weights[name] for name in names])
        raw["weights"].requires_grad_(program.weights == "learned")
    return raw


def features_of(program: Program, raw: Raw) -> Any:
    """What a collection is called with."""
    if program.form == "dense":
        return raw["values"]
    if program.form == "of":
        columns = raw["values"].split([program.per_sample(n) for n in program.features], dim=1)
        return hotrow.KeyedJaggedTensor.of(dict(zip(program.features, columns, strict=True)))
    weights = raw.get("weights")
    if program.form == "tuple":
        given = (raw["values"], raw["offsets"])
        return given if weights is None else (*given, weights)
    return hotrow.KeyedJaggedTensor(
        program.keys, raw["values"], offsets=raw["offsets"], weights=weights
    )


class Buffers:
    """Memory that a loader fills again for every batch."""

    def __init__(self, how: str, pinned: bool) -> None:
        self._how, self._pinned = how, pinned
        self._tensors: dict[tuple[str, torch.dtype], Tensor] = {}

    def fill(self, raw: Raw) -> Raw:
        return {name: self._copy(name, each) for name, each in raw.items()}

    def _copy(self, name: str, source: Tensor) -> Tensor:
        key = (name, source.dtype)
        if key not in self._tensors:
            room = torch.zeros(256, dtype=source.dtype)
            self._tensors[key] = room.pin_memory() if self._pinned else room
        flat = self._tensors[key][: source.numel()]
        if self._how == "tensor":
            flat.copy_(source.detach().flatten())
        elif self._how == "data":
            flat.data.copy_(source.detach().flatten())
        else:
            flat.numpy()[:] = source.detach().flatten().numpy()
        return flat.view(source.shape)
