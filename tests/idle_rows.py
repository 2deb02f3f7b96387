"""Rows of a dense rule beside torch's dense optimizers: each row has its own steps with gradients.

`python tests/idle_rows.py` prints the differences that docs/numerics.md has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from hotrow.kernels import rules as lazy_rules
from hotrow.kernels.dense_rules import (
    DenseAdagrad,
    DenseAdam,
    DenseAdamW,
    DenseRMSprop,
    DenseRule,
    DenseSGD,
    step_bits,
)
from hotrow.kernels.idle import catch_up
from hotrow.kernels.idle_history import History, IdleTables, setting_of
from hotrow.kernels.rules import RowRule, per_row

TORCH: dict[str, Any] = {
    "DenseSGD": torch.optim.SGD,
    "DenseAdam": torch.optim.Adam,
    "DenseAdamW": torch.optim.AdamW,
    "DenseAdagrad": torch.optim.Adagrad,
    "DenseRMSprop": torch.optim.RMSprop,
}
SCHEDULES = ("constant", "cosine", "cycle", "warm-up")
ROWS, DIM = 100, 8


class Rows:
    """Rows with their state, stored only when they have a gradient, and the steps so far."""

    def __init__(self, rule: DenseRule, weight: Tensor) -> None:
        self.rule, self.history, dim = rule, History(rule), weight.shape[1]
        start = torch.tensor(rule.state_start(dim)).expand(len(weight), -1)
        self.rows = torch.cat([weight, start], dim=1)
        self.columns = {"weight": slice(0, dim), **rule.state_columns(dim)}

    def step(self, ids: Tensor, grads: Tensor, setting: dict[str, Any]) -> None:
        """Make a step in which these rows have gradients."""
        if len(ids):
            pieces = self._caught_up(ids, self.history.tables())
            numbers = self.rule.scalars(setting, self.history.now + 1)
            scalars = {
                name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()
            }
            weight, *state = pieces.values()
            self.rule.update(weight, grads, state, per_row(scalars, None))
            self.rows[ids] = torch.cat(list(pieces.values()), dim=1)
        self.history.append(setting)

    def read(self, ids: Tensor | None = None, history: History | None = None) -> dict[str, Tensor]:
        """Return weights and state as they are now."""
        ids = torch.arange(len(self.rows)) if ids is None else ids
        return self._caught_up(ids, (history or self.history).tables())

    def _caught_up(self, ids: Tensor, tables: IdleTables) -> dict[str, Tensor]:
        rows = self.rows[ids]
        pieces = {name: rows[:, place].clone() for name, place in self.columns.items()}
        weight, *state, last = pieces.values()
        catch_up(self.rule, weight, state, step_bits(last)[:, 0], tables)
        return pieces


@dataclass(frozen=True)
class Job:
    """A training of some rows: gaps from 1 to 1,000 steps, and a schedule of settings."""

    rule: DenseRule
    schedule: str = "constant"
    steps: int = 1000
    scale: float = 1.0  # of gradients
    zeros: float = 0.0  # share of gradients' values that are 0
    rows: int = ROWS

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.steps)
        chance = 10 ** (-3 * torch.rand(self.rows, generator=generator))
        for _ in range(self.steps):
            ids = (torch.rand(self.rows, generator=generator) < chance).nonzero().squeeze(1)
            grads = torch.randn(self.rows, DIM, generator=generator)[ids] * self.scale
            kept = torch.rand(self.rows, DIM, generator=generator)[ids] >= self.zeros
            yield ids, grads * kept

    def start(self) -> Tensor:
        return torch.randn(self.rows, DIM, generator=torch.Generator().manual_seed(1)) / 10


class Dense:
    """The same rows under torch's dense optimizer."""

    def __init__(self, job: Job, dtype: torch.dtype) -> None:
        self.param = torch.nn.Parameter(job.start().to(dtype))
        self.optimizer = TORCH[type(job.rule).__name__]([self.param], **setting_of(job.rule))
        self.scheduler = schedule(job.schedule, self.optimizer, job.steps)

    def setting(self, rule: DenseRule) -> dict[str, Any]:
        return {name: self.optimizer.param_groups[0][name] for name in setting_of(rule)}

    def step(self, ids: Tensor, grads: Tensor) -> None:
        self.param.grad = torch.zeros_like(self.param)
        self.param.grad[ids] = grads.to(self.param.dtype)
        self.optimizer.step()
        self.scheduler.step()

    def read(self) -> dict[str, Tensor]:
        state = self.optimizer.state[self.param]
        return {"weight": self.param.detach(), **state}


def schedule(name: str, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    if name == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, steps)
    if name == "warm-up":
        return lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=steps // 5)
    if name == "cycle":
        group = optimizer.param_groups[0]
        cycles = bool(group.get("momentum", "betas" in group))
        return lr_scheduler.OneCycleLR(
            optimizer, 2 * group["lr"], total_steps=steps, cycle_momentum=cycles
        )
    return lr_scheduler.ConstantLR(optimizer, 1.0, 1)


@dataclass
class Differences:
    """The largest differences at the moments that were looked at."""

    weight: float = 0.0  # to torch in float32
    truth: float = 0.0  # to torch in float64
    torch: float = 0.0  # of torch in float32 from torch in float64
    state: float = 0.0  # to float64, relative to the largest value of a row's state
    lazy: float = 0.0  # of the rule that leaves rows without a gradient alone, from float64


def differences(job: Job, looks: int = 5, lazy: RowRule | None = None) -> Differences:
    """Train beside torch, and compare whole tables at the end and at moments before."""
    rows, result = Rows(job.rule, job.start()), Differences()
    single, double = Dense(job, torch.float32), Dense(job, torch.float64)
    frozen = None if lazy is None else LazyRows(lazy, job.start())
    moments = torch.randint(1, job.steps, (looks,), generator=torch.Generator().manual_seed(7))
    for step, (ids, grads) in enumerate(job.batches(), start=1):
        setting = single.setting(job.rule)
        rows.step(ids, grads, setting)
        single.step(ids, grads)
        double.step(ids, grads)
        if frozen is not None:
            frozen.step(ids, grads, setting)
        if step == job.steps or step in moments:
            _compare(rows.read(), single.read(), double.read(), result)
            if frozen is not None:
                result.lazy = max(result.lazy, _apart(frozen.weight, double.read()["weight"]))
    return result


class LazyRows:
    """Rows under today's rules, which leave rows without a gradient alone."""

    def __init__(self, rule: RowRule, weight: Tensor) -> None:
        self.rule, self.weight, self.steps = rule, weight, 0
        starts = torch.tensor(rule.state_start(DIM)).expand(len(weight), -1)
        self.state = [piece.clone() for piece in starts.split(DIM, dim=1)] if len(starts[0]) else []

    def step(self, ids: Tensor, grads: Tensor, setting: dict[str, Any]) -> None:
        self.steps += 1
        numbers = self.rule.scalars(setting, self.steps)
        scalars = {name: torch.tensor([[value]]) for name, value in numbers.items()}
        pieces = [piece[ids] for piece in (self.weight, *self.state)]
        self.rule.update(pieces[0], grads, pieces[1:], scalars)
        for piece, values in zip((self.weight, *self.state), pieces, strict=True):
            piece[ids] = values


def _compare(
    own: dict[str, Tensor], single: dict[str, Tensor], double: dict[str, Tensor], to: Differences
) -> None:
    to.weight = max(to.weight, _apart(own["weight"], single["weight"]))
    to.truth = max(to.truth, _apart(own["weight"], double["weight"]))
    to.torch = max(to.torch, _apart(single["weight"], double["weight"]))
    for name in list(own)[1:-1]:
        # torch's float32 state underflows where float64 goes on.
        largest = double[name].abs().amax(1, keepdim=True).clamp_min(1e-30)
        to.state = max(to.state, float(((own[name] - double[name]).abs() / largest).max()))


def _apart(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max())


RULES = {
    "SGD": DenseSGD(3e-3),
    "SGD, momentum": DenseSGD(3e-3, momentum=0.9),
    "SGD, decay": DenseSGD(3e-3, weight_decay=1e-2),
    "SGD, momentum, dampening, decay": DenseSGD(3e-3, 0.9, dampening=0.5, weight_decay=1e-3),
    "SGD, Nesterov, decay": DenseSGD(3e-3, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": DenseAdam(1e-3),
    "Adam, L2": DenseAdam(1e-3, weight_decay=1e-2),
    "AdamW": DenseAdamW(1e-3),
    "AdamW, lr 0.01, decay 0.1": DenseAdamW(1e-2, weight_decay=0.1),
    "Adagrad": DenseAdagrad(),
    "Adagrad, L2, lr_decay": DenseAdagrad(lr_decay=1e-3, weight_decay=1e-3),
    "RMSprop": DenseRMSprop(1e-3),
    "RMSprop, momentum": DenseRMSprop(1e-3, momentum=0.9),
    "RMSprop, centered, momentum": DenseRMSprop(1e-3, momentum=0.9, centered=True),
}


def lazy_of(rule: DenseRule) -> RowRule | None:
    """Return the rule of the same optimizer that leaves rows without a gradient alone."""
    setting = setting_of(rule)
    if isinstance(rule, DenseSGD):
        return lazy_rules.SGD(setting["lr"], setting["weight_decay"]) if not rule.momentum else None
    if isinstance(rule, DenseAdamW):
        return lazy_rules.AdamW(**setting)
    if isinstance(rule, DenseAdam) and not rule.weight_decay:
        return lazy_rules.Adam(rule.lr, rule.betas, rule.eps)
    if isinstance(rule, DenseAdagrad) and not rule.weight_decay:
        return lazy_rules.Adagrad(rule.lr, rule.initial_accumulator_value, rule.eps)
    return None


def main() -> None:
    rules = dict(RULES)
    for betas in [(0.9, 0.98), (0.9, 0.95), (0.5, 0.999), (0.95, 0.999), (0.0, 0.999)]:
        rules[f"Adam, betas {betas}"] = replace(DenseAdam(1e-3), betas=betas)
    for name, rule in rules.items():
        for plan in SCHEDULES:
            lazy = lazy_of(rule)
            d = differences(Job(rule, plan), lazy=lazy)
            numbers = [f"{x:.1e}" for x in (d.weight, d.truth, d.torch, d.state, d.lazy)]
            numbers[-1] = numbers[-1] if lazy else "-"
            print(f"| {name} | {plan} |", " | ".join(numbers), "|", flush=True)


if __name__ == "__main__":
    main()
