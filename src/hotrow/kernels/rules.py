"""What one update does to the rows it touches, by optimizer.

A row is updated at most once per step, from the sum of its gradients; rows without a gradient
never change (decay and moments are lazy). Formulas and defaults are torch.optim's. Only single,
correctly rounded operations are used: see kernels/reference.py for why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from hotrow.kernels.reference import row_sum

Setting = Mapping[str, Any]  # a rule's fields, for one table
Scalars = dict[str, Tensor]  # per table [T] float64, or per row [U, 1] float32

STEP = "step"  # the scalar that is a whole number

_TOO_LARGE = 1e30  # squares and products of larger ones would leave float32


def _wrong_with(value: object) -> str | None:
    """What a setting must be that this is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "a number"
    if not math.isfinite(value):
        return "a finite number"
    if value < 0:
        return "a number of at least 0"
    return None if value < _TOO_LARGE else f"a number below {_TOO_LARGE:g}"


def _wrong_with_flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "True or False"


@dataclass(frozen=True)
class RowRule:
    """How rows are updated. Its fields are the settings of every table's param group."""

    lr: float
    state_kept: ClassVar[tuple[str, ...]] = ()
    row_wise: ClassVar[bool] = False  # one state value per row instead of one per weight
    uses_step: ClassVar[bool] = False  # what it computes depends on how many updates there were

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                why = f"it has {', '.join(known)}"
                if name == "momentum":
                    why = "it would move rows that no batch reads; hotrow.Adam keeps moments"
                raise TypeError(f"hotrow.{cls.__name__} has no {name}=: {why}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
            values = value if isinstance(value, tuple | list) else (value,)
            check = _wrong_with_flag if isinstance(field.default, bool) else _wrong_with
            for wrong in filter(None, map(check, values)):
                raise ValueError(
                    f"{type(self).__name__}: {field.name} must be {wrong}, not {value!r}"
                )

    @property
    def state_names(self) -> tuple[str, ...]:
        """The pieces of state that a row has, in their order."""
        return self.state_kept

    def state_widths(self, dim: int) -> dict[str, int]:
        """Return the number of columns of each piece of state."""
        return dict.fromkeys(self.state_names, 1 if self.row_wise else dim)

    def state_width(self, dim: int) -> int:
        return sum(self.state_widths(dim).values())

    def state_columns(self, dim: int) -> dict[str, slice]:
        """Where each piece of state lies in a row."""
        widths = self.state_widths(dim)
        ends = accumulate(widths.values(), initial=dim)
        return {name: slice(*place) for name, place in zip(widths, pairwise(ends), strict=True)}

    def start_of_state(self) -> float:
        return 0.0

    def state_start(self, dim: int) -> list[float]:
        """Return the value that each state column starts with."""
        return [self.start_of_state()] * self.state_width(dim)

    def scalars(self, setting: Setting, step: int) -> dict[str, float]:
        """What the update of a table needs. Plain numbers: tensors of them take far longer."""
        raise NotImplementedError

    def update(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        """Change rows in place: weight and grad [U, dim]."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(RowRule):
    """torch.optim.SGD without momentum; `weight_decay` acts on the rows of the batch."""

    lr: float = 1e-3
    weight_decay: float = 0.0

    def scalars(self, setting: Setting, step: int) -> dict[str, float]:
        return {"lr": setting["lr"], "decay": setting["weight_decay"]}

    def update(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        weight.sub_((grad + weight * s["decay"]).mul_(s["lr"]))


@dataclass(frozen=True)
class Adagrad(RowRule):
    """torch.optim.Adagrad on sparse gradients."""

    lr: float = 1e-2
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    state_kept: ClassVar[tuple[str, ...]] = ("sum",)

    def start_of_state(self) -> float:
        return float(self.initial_accumulator_value)

    def scalars(self, setting: Setting, step: int) -> dict[str, float]:
        return {"lr": setting["lr"], "eps": setting["eps"]}

    def update(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        (total,) = state
        total.add_(self._square(grad))
        weight.sub_((grad * s["lr"]).div_(total.sqrt().add_(s["eps"])))

    def _square(self, grad: Tensor) -> Tensor:
        return grad * grad


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator per row, fed by the mean of the squared gradient."""

    row_wise: ClassVar[bool] = True

    def _square(self, grad: Tensor) -> Tensor:
        return row_sum(grad * grad).div_(grad.shape[1])


@dataclass(frozen=True)
class Adam(RowRule):
    """torch.optim.SparseAdam: moments of untouched rows rest; the step counts every update."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    state_kept: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    uses_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or max(self.betas) >= 1:
            raise ValueError(
                f"{type(self).__name__}: betas must be two numbers below 1, not {self.betas}"
            )

    def scalars(self, setting: Setting, step: int) -> dict[str, float]:
        beta1, beta2 = setting["betas"]
        root = math.sqrt(1 - beta2**step)
        return {
            "keep1": 1 - beta1,
            "keep2": 1 - beta2,
            "size": setting["lr"] * root / (1 - beta1**step),
            "eps": setting["eps"],
        }

    def update(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        mean, square = state
        mean.add_((grad - mean).mul_(s["keep1"]))
        square.add_((grad * grad).sub_(square).mul_(s["keep2"]))
        weight.sub_((mean * s["size"]).div_(square.sqrt().add_(s["eps"])))


@dataclass(frozen=True)
class AdamW(Adam):
    """torch.optim.AdamW on the rows of the batch: decay and moments of the others rest."""

    weight_decay: float = 1e-2

    def scalars(self, setting: Setting, step: int) -> dict[str, float]:
        root = math.sqrt(1 - setting["betas"][1] ** step)
        return {
            **super().scalars(setting, step),
            # torch.optim.AdamW corrects the second moment before eps is added, SparseAdam after:
            # multiplying numerator and denominator by the root brings one to the other.
            "eps": setting["eps"] * root,
            "shrink": 1 - setting["lr"] * setting["weight_decay"],
        }

    def update(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        weight.mul_(s["shrink"])
        super().update(weight, grad, state, s)


class RowSettings(Protocol):
    """A rule, and what it needs for the next update of each table."""

    rule: RowRule
    counts_apart: bool  # the rule's numbers may differ between tables by their steps

    def scalars(self, names: Sequence[str]) -> Scalars:
        """Return what the rule needs for an update of some tables, [T] float64 each."""

    def table_scalars(self, names: tuple[str, ...]) -> list[tuple[float, ...]]:
        """Return `scalars` as rows of numbers, one row per table."""

    def histories(self, names: tuple[str, ...], *, steps_now: bool) -> list[Any]:
        """Return the steps of some tables, by which rows without a gradient move."""

    def steps_of(self, name: str) -> int:
        """Return the number of updates of a table."""


def per_row(scalars: Scalars, table_of_row: Tensor | None) -> Scalars:
    """Per-table scalars as columns that fit rows: [U, 1], or [1, 1] when all tables agree.

    They are float32; the number of a step is int32, because a float32 has 24 bits.
    """
    columns = {}
    for key, values in scalars.items():
        column = (values.int() if key == STEP else values.float()).unsqueeze(1)
        columns[key] = column[:1] if table_of_row is None else column[table_of_row]
    return columns
