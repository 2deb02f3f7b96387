"""The random programs of programs.py on several ranks, each with batches of its own.

`difference(rank, world, seed)` runs a program three times and returns the first difference:

1. on one process: `Plain` with the batches of all ranks, whose losses are averaged;
2. on all ranks, with all-fast and the plainest loop. Equal to 1 within OF_TORCH.
3. on all ranks, with the program's strategy, loader and look-ahead. Equal to 2 to the bit, or
   within UP_TO_ROUNDING where that is the strategy's contract.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotrow.engine.strategy import STRATEGIES
from program_models import Model, Plain, Rows, Vectors
from program_runs import EXACT, OF_TORCH, UP_TO_ROUNDING, Trace, _first_difference, _unlike, run
from programs import EVERYTHING, Program, Samples, Step, draw
from rank_cases import few_shards

# Pins by hand and whole state dicts are refused on several ranks. Ids that change
# by way of numpy may equal the old ones on some rank, and then ranks would plan differently.
ON_RANKS = EVERYTHING - {
    "another engine", "pin rows", "round trip", "save", "thread", "untracked ids"
}  # fmt: skip
_SLOTS = [name for name, x in STRATEGIES.items() if x.contract == "exact" and not x.everything]
ON_HOST = [name for name, x in STRATEGIES.items() if x.on_host]


def shared(seed: int, *, on_host: bool = False, more: Collection[str] = ()) -> Program:
    """The program of a seed, in a form that several ranks can run; its rows stay `on_host`, or
    have slots. `more`: what it may do beside `ON_RANKS`."""
    program = draw(seed, {*ON_RANKS, *more})
    name, names = program.strategy, ON_HOST if on_host else _SLOTS
    if STRATEGIES[name].on_host != on_host:
        name = names[seed % len(names)]
    steps = program.steps
    if program.buffers != "fresh":
        # Of an empty batch in memory that is filled again, versions do not tell who changed it.
        steps = tuple(replace(step, change=None) for step in steps)
    return replace(program, strategy=name, late=program.late and on_host, steps=steps)


def of_rank(program: Program, rank: int, world: int) -> Program:
    """The program as one rank sees it: sometimes it has no samples, looks up other features in
    its loss, or none."""
    dice = random.Random(program.seed * 64 + rank)
    is_idle = world > 1 and program.seed % 5 == 4 and rank == 1  # it never has a sample
    empty = {n for n in range(200) if is_idle or dice.random() < 0.1}
    steps = []
    for step in program.steps:
        used, silent = step.used, False
        if used and world > 1 and dice.random() < 0.2:
            used = tuple(name for name in used if dice.random() < 0.5) or used[:1]
        if world > 1 and step.how in ("plain", "sum of two", "twice") and dice.random() < 0.1:
            silent = True
        steps.append(replace(step, used=used, silent=silent))
    # Of two ranks with equal batches, both look up the same rows.
    source = 0 if program.seed % 7 == 3 else rank
    return replace(program, rank=source, empty=frozenset(empty), steps=tuple(steps))


def heard(model: Model, step: Step, loss: Tensor) -> Tensor:
    """Of a silent step the same loss, whose backward pass reaches no row."""
    if not step.silent:
        return loss
    return loss.detach() + 0 * next(iter(model.slopes.values())).sum()


class RankRows(Rows):
    """A collection that all ranks share, and dense weights whose gradients are averaged."""

    def __init__(self, program: Program, rank: int, world: int, *, plainly: bool) -> None:
        self.rank, self.world = rank, world
        super().__init__(program, torch.device("cpu"), plainly=plainly)

    def loss(self, step: Step, batch: Any, samples: Samples) -> Tensor:
        return heard(self, step, super().loss(step, batch, samples))

    def step_of_slopes(self) -> None:
        # The next batch would do this as well, but ranks must not wait for each other here before.
        self.embedding.pipeline.settle_grads()
        for slope in self.slopes.values():
            grad = torch.zeros_like(slope) if slope.grad is None else slope.grad
            dist.all_reduce(grad)
            slope.grad = grad / self.world
        super().step_of_slopes()

    def evaluate(self, number: int, how: str) -> Vectors:
        """Ranks evaluate different numbers of batches."""
        vectors = super().evaluate(number, how)
        for other in range((number + self.rank) % 3):
            super().evaluate(number + other, how)
        return vectors

    def tables(self) -> Iterator[tuple[str, Tensor]]:
        embedding = self.embedding
        embedding.check()
        steps = dict(zip(embedding.optimizer.names, embedding.optimizer.steps, strict=True))
        for table in self.program.tables:
            rows = torch.cat([chunk for _, chunk in embedding.rows(table.name)])
            weights = [chunk for _, chunk in embedding.weights(table.name, dst=0)]
            if self.rank == 0:
                assert torch.equal(torch.cat(weights), rows[:, : table.embedding_dim])
            else:
                assert not weights
            yield f"weights of table {table.name!r}", rows[:, : table.embedding_dim]
            yield f"step of table {table.name!r}", torch.tensor(float(steps[table.name]))
            columns = embedding.optimizer.rule.state_columns(table.embedding_dim)
            for name, part in columns.items():
                yield f"{name!r} of table {table.name!r}", rows[:, part]


class PlainOfAll(Plain):
    """Plain torch on one process, with a batch of each rank at a time."""

    def __init__(self, programs: Sequence[Program], start: dict[str, Tensor]) -> None:
        super().__init__(programs[0], start)
        self.programs = programs
        self.step_of = {step.batches: place for place, step in enumerate(programs[0].steps)}

    def loss(self, step: Step, batch: Any, samples: Samples) -> Tensor:
        losses = []
        for program, part in zip(self.programs, batch, strict=True):
            own = program.steps[self.step_of[step.batches]]
            self.program = program
            losses.append(heard(self, own, super().loss(own, part, part)))
        self.program = self.programs[0]
        return torch.stack(losses).sum() / len(losses)

    def at(self, number: int) -> Any:
        found = []
        for program in self.programs:
            self.program = program
            found.append(super().at(number))
        self.program = self.programs[0]
        return tuple(found)

    def change(self, batch: Any, how: str) -> Any:
        return tuple(super(PlainOfAll, self).change(part, how) for part in batch)

    def weight_grads(self, batch: Any) -> Tensor:
        parts = [super(PlainOfAll, self).weight_grads(part) for part in batch]
        return torch.cat(parts) * len(parts)  # those of each rank are of its own loss

    def evaluate(self, number: int, how: str) -> Vectors:
        with torch.no_grad():
            parts = [self.look_up(part) for part in self.at(number)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def joined(traces: Sequence[Sequence[tuple[str, Tensor]]]) -> Trace:
    """One trace of those of all ranks, as `PlainOfAll` has it."""
    trace = Trace()
    for items in zip(*traces, strict=True):
        label, values = items[0][0], [value for _, value in items]
        if ": loss " in label:
            value = torch.stack(values).double().mean(0)
        elif "gradient of weights" in label or ": feature " in label:
            value = torch.cat(values)
        else:
            value = values[0]
            for other in values[1:]:
                assert not _unlike(other, value, EXACT), label
        trace.add(label, value)
    return trace


def difference(
    rank: int, world: int, seed: int, *, plain: bool = True, **options: Any
) -> str | None:
    """`options`: of `shared`."""
    program = shared(seed, **options)
    programs = [of_rank(program, other, world) for other in range(world)]
    torch.manual_seed(seed)
    fast = RankRows(programs[rank], rank, world, plainly=True)
    start = {
        table.name: torch.cat([chunk for _, chunk in fast.embedding.weights(table.name)])
        for table in program.tables
    }
    of_fast = run(programs[rank], fast)
    tight = RankRows(programs[rank], rank, world, plainly=False)
    of_strategy = run(programs[rank], tight)
    tolerance = EXACT if program.is_exact else UP_TO_ROUNDING
    found = _first_difference(of_strategy, of_fast, tolerance)
    if found is not None:
        return f"{program.strategy} and all-fast differ: {found}"
    if not plain:
        return None
    every: list[Any] = [None] * world
    dist.gather_object(of_fast.items, every if rank == 0 else None)
    if rank:
        return None
    of_torch = run(programs[0], PlainOfAll(programs, start))
    found = _first_difference(joined(every), of_torch, OF_TORCH)
    return None if found is None else f"all-fast and plain torch differ: {found}"


def differences(
    rank: int, world: int, seeds: Sequence[int], *, plain: bool = True, **options: Any
) -> list[str]:
    """The first difference of each program that has one."""
    found = []
    for seed in seeds:
        try:
            with few_shards() if seed % 4 else nullcontext():
                said = difference(rank, world, seed, plain=plain, **options)
        except Exception as error:
            error.add_note(f"seed {seed}, rank {rank} of {world}:\n{shared(seed, **options)}")
            raise
        if said is not None:
            found.append(f"seed {seed}: {said}")
    return found
