"""Rules that mean torch's dense optimizers: rows without a gradient move, too.

Each step of a dense optimizer moves every row. Here a row is stored only when it has a gradient,
with the number of that step in its column `last`; `kernels.idle` computes what the steps in
between did to it. `update` is the dense step on a row that is caught up. Formulas, defaults and
names of state are torch.optim's. Only single, correctly rounded operations are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from hotrow.kernels.rules import SGD, STEP, Adam, AdamW, RowRule, Scalars, Setting

# How idle rows are caught up: by one matrix, by a series, or step by step.
Kind = Literal["linear", "series", "replay"]
LAST = "last"  # int32 bits in columns of float32: the step of the last gradient, 0 for none
_MULTIPLE = 4  # columns of a row: rows of whole 16 bytes are copied faster

# Where the second moment decays too fast beside the first, the series has too few terms.
LEAST_BETA2 = 0.5
MOST_RATIO = 0.999  # of beta1 to the root of beta2


class LinearStep(NamedTuple):
    """What a step does to a row without a gradient: (w, b) becomes a matrix times (w, b)."""

    ww: float
    wb: float
    bw: float
    bb: float
    factor: float  # of the state that is not b


STILL = LinearStep(1.0, 0.0, 0.0, 1.0, 1.0)


class SeriesStep(NamedTuple):
    """What a step of Adam takes.

    w becomes shrink * w - lr * m / correction1 / (sqrt(v / correction2) + eps).
    """

    shrink: float
    beta1: float
    beta2: float
    lr: float
    correction1: float
    correction2: float


@dataclass(frozen=True)
class DenseRule(RowRule):
    """A rule that moves rows in every step. What it keeps per row is fixed when it is made."""

    uses_step: ClassVar[bool] = True
    closed_form: ClassVar[Kind] = "linear"  # of idle rows, with settings that have one
    # Settings of which only this is fixed: whether they are zero.
    fixed: ClassVar[tuple[str, ...]] = ()

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*self.kept_states(), LAST)

    def kept_states(self) -> tuple[str, ...]:
        """Return the names of the state that torch keeps, each as wide as the weights."""
        return self.state_kept

    def state_widths(self, dim: int) -> dict[str, int]:
        kept = dict.fromkeys(self.kept_states(), dim)
        before = dim + sum(kept.values())
        return {**kept, LAST: _MULTIPLE - before % _MULTIPLE}  # the same number in each column

    def state_start(self, dim: int) -> list[float]:
        kept = len(self.kept_states()) * dim
        return [self.start_of_state()] * kept + [0.0] * self.state_widths(dim)[LAST]

    def with_setting(self, setting: Setting) -> Self:
        """Return this rule with the settings of a step; a ValueError says which cannot be used."""
        known = {x.name: _number(setting[x.name]) for x in fields(self) if x.name in setting}
        if all(getattr(self, name) == value for name, value in known.items()):
            return self
        rule = replace(self, **known)
        for name in self.fixed:
            if bool(getattr(rule, name)) != bool(getattr(self, name)):
                raise ValueError(
                    f"{type(self).__name__}: {name} was {getattr(self, name)} when the optimizer "
                    f"was made and is {getattr(rule, name)} now, which would change the state of "
                    f"each row; make the optimizer with the {name} that it needs later, in all its "
                    "param groups."
                )
        return rule

    def idle_kind(self) -> Kind:
        """Return how rows without a gradient are caught up with these settings."""
        raise NotImplementedError

    def idle_step(self, step: int) -> LinearStep | SeriesStep:
        """Return what a step with these settings does to a row without a gradient."""
        raise NotImplementedError

    def update(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        self.dense_step(weight, grad, state[:-1], s)
        step_bits(state[-1]).copy_(s[STEP])

    def dense_step(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        """Make torch's step in place on rows that are caught up; `state` is without `last`."""
        raise NotImplementedError


def step_bits(column: Tensor) -> Tensor:
    """Return the column `last` as step numbers, int32, in the same memory."""
    return column.view(torch.int32)


def _number(value: Any) -> Any:
    """Return a setting without tensors: torch's schedules may put them there."""
    if isinstance(value, Tensor):
        return float(value)
    return tuple(map(_number, value)) if isinstance(value, tuple | list) else value


@dataclass(frozen=True)
class DenseSGD(DenseRule):
    """torch.optim.SGD on dense gradients."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    fixed: ClassVar[tuple[str, ...]] = ("momentum", "nesterov")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError(
                "DenseSGD: nesterov=True needs a momentum above 0 and dampening=0, not "
                f"momentum={self.momentum} and dampening={self.dampening}"
            )

    def kept_states(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def scalars(self, setting: Setting, step: int) -> dict[str, float]:
        rule = self.with_setting(setting)
        return {
            "lr": rule.lr,
            "decay": rule.weight_decay,
            "momentum": rule.momentum,
            "gain": rule._gain(step),
            STEP: step,
        }

    def _gain(self, step: int) -> float:
        # torch's buffer starts as the first gradient, without dampening.
        return 1.0 if step == 1 else 1 - self.dampening

    def dense_step(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        grad = grad + weight * s["decay"]
        if self.momentum:
            (buffer,) = state
            buffer.mul_(s["momentum"]).add_(grad * s["gain"])
            grad = grad.add_(buffer * s["momentum"]) if self.nesterov else buffer
        weight.sub_(grad * s["lr"])

    def idle_kind(self) -> Kind:
        return "linear"

    def idle_step(self, step: int) -> LinearStep:
        lr, decay, momentum = self.lr, self.weight_decay, self.momentum
        if not momentum:
            return LinearStep(1 - lr * decay, 0.0, 0.0, 1.0, 1.0)
        bw = self._gain(step) * decay
        ww, wb = 1 - lr * bw, -lr * momentum
        if self.nesterov:
            ww, wb = 1 - lr * (decay + momentum * bw), -lr * momentum * momentum
        return LinearStep(ww, wb, bw, momentum, 1.0)


@dataclass(frozen=True)
class DenseAdam(DenseRule):
    """torch.optim.Adam on dense gradients; its decay is added to the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    state_kept: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    closed_form: ClassVar[Kind] = "series"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or max(self.betas) >= 1:
            raise ValueError(
                f"{type(self).__name__}: betas must be two numbers below 1, not {self.betas}"
            )

    def scalars(self, setting: Setting, step: int) -> dict[str, float]:
        rule = self.with_setting(setting)
        beta1, beta2 = rule.betas
        return {
            "keep1": 1 - beta1,
            "keep2": 1 - beta2,
            "size": rule.lr / (1 - beta1**step),
            "root": math.sqrt(1 - beta2**step),
            "eps": rule.eps,
            "decay": rule._decay(),
            STEP: step,
        }

    def _decay(self) -> float:
        """Return what the weight is multiplied by before it is added to the gradient."""
        return self.weight_decay

    def _shrink(self) -> float:
        return 1.0

    def dense_step(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        grad = grad + weight * s["decay"]
        self._move(weight, grad, state, s)

    def _move(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        mean, square = state
        mean.add_((grad - mean).mul_(s["keep1"]))
        square.add_((grad * grad).sub_(square).mul_(s["keep2"]))
        size = square.sqrt().div_(s["root"]).add_(s["eps"])
        # Without eps, 0 / 0 is no movement; torch has NaN.
        moved = (mean / size).masked_fill_(mean == 0, 0)
        weight.sub_(moved.mul_(s["size"]))

    def idle_kind(self) -> Kind:
        beta1, beta2 = self.betas
        # A decay in the gradient enters the second moment: there is no form but the steps.
        converges = beta2 >= LEAST_BETA2 and beta1 <= MOST_RATIO * math.sqrt(beta2)
        return "series" if converges and not self._decay_in_gradient() else "replay"

    def _decay_in_gradient(self) -> bool:
        return self.weight_decay > 0

    def idle_step(self, step: int) -> SeriesStep:
        beta1, beta2 = self.betas
        corrections = 1 - beta1**step, 1 - beta2**step
        return SeriesStep(self._shrink(), beta1, beta2, self.lr, *corrections)


@dataclass(frozen=True)
class DenseAdamW(DenseAdam):
    """torch.optim.AdamW on dense gradients; its decay acts on the weights themselves."""

    weight_decay: float = 1e-2

    def _decay(self) -> float:
        """Return what the weight is multiplied by before it is taken off the weight."""
        return self.lr * self.weight_decay

    def _shrink(self) -> float:
        return 1 - self._decay()

    def dense_step(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        # A factor near 1 in float32 would be off by the same amount in each step.
        weight.sub_(weight * s["decay"])
        self._move(weight, grad, state, s)

    def _decay_in_gradient(self) -> bool:
        return False


@dataclass(frozen=True)
class DenseAdagrad(DenseRule):
    """torch.optim.Adagrad on dense gradients."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    state_kept: ClassVar[tuple[str, ...]] = ("sum",)

    def start_of_state(self) -> float:
        return float(self.initial_accumulator_value)

    def scalars(self, setting: Setting, step: int) -> dict[str, float]:
        rule = self.with_setting(setting)
        lr = rule.lr / (1 + (step - 1) * rule.lr_decay)
        return {"lr": lr, "decay": rule.weight_decay, "eps": rule.eps, STEP: step}

    def dense_step(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        grad = grad + weight * s["decay"]
        (total,) = state
        total.add_(grad * grad)
        weight.sub_(grad.div_(total.sqrt().add_(s["eps"])).mul_(s["lr"]))

    def idle_kind(self) -> Kind:
        return "replay" if self.weight_decay else "linear"

    def idle_step(self, step: int) -> LinearStep:
        return STILL


@dataclass(frozen=True)
class DenseRMSprop(DenseRule):
    """torch.optim.RMSprop on dense gradients."""

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    fixed: ClassVar[tuple[str, ...]] = ("momentum", "centered")

    def kept_states(self) -> tuple[str, ...]:
        buffer = ("momentum_buffer",) if self.momentum else ()
        return ("square_avg", *buffer, *(("grad_avg",) if self.centered else ()))

    def scalars(self, setting: Setting, step: int) -> dict[str, float]:
        rule = self.with_setting(setting)
        return {
            "lr": rule.lr,
            "keep": 1 - rule.alpha,
            "eps": rule.eps,
            "decay": rule.weight_decay,
            "momentum": rule.momentum,
            STEP: step,
        }

    def dense_step(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        kept = dict(zip(self.kept_states(), state, strict=True))
        grad, square = grad + weight * s["decay"], kept["square_avg"]
        square.add_((grad * grad).sub_(square).mul_(s["keep"]))
        if self.centered:
            mean = kept["grad_avg"]
            mean.add_((grad - mean).mul_(s["keep"]))
            square = square - mean * mean
        grad.div_(square.sqrt().add_(s["eps"]))
        if self.momentum:
            grad = kept["momentum_buffer"].mul_(s["momentum"]).add_(grad)
        weight.sub_(grad * s["lr"])

    def idle_kind(self) -> Kind:
        return "replay" if self.weight_decay else "linear"

    def idle_step(self, step: int) -> LinearStep:
        # Without momentum there is no b, and nothing but factors.
        return LinearStep(1.0, -self.lr * self.momentum, 0.0, self.momentum, self.alpha)


def moving(rule: RowRule) -> RowRule:
    """Return the rule that moves rows without a gradient as well, as torch's optimizer does."""
    settings = {field.name: getattr(rule, field.name) for field in fields(rule)}
    kind = {SGD: DenseSGD, Adam: DenseAdam, AdamW: DenseAdamW}.get(type(rule))
    return rule if kind is None else kind(**settings)
