"""Optimizers on rows: what one update does to the rows it touches, and their settings.

A row is updated at most once per step, from the sum of its gradients; rows without a gradient
never change (decay and moments are lazy). Formulas and defaults are torch.optim's. Only single,
correctly rounded operations are used: see kernels/reference.py for why.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hotrow.kernels.reference import row_sum
from hotrow.tables import EmbeddingBagConfig

Setting = Mapping[str, Any]  # a rule's fields, for one table
Scalars = dict[str, Tensor]  # per table [T] float64, or per row [U, 1] float32


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


@dataclass(frozen=True)
class RowRule:
    """How rows are updated. Its fields are the settings of every table's param group."""

    lr: float
    state_names: ClassVar[tuple[str, ...]] = ()
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
            for wrong in filter(None, map(_wrong_with, values)):
                raise ValueError(
                    f"{type(self).__name__}: {field.name} must be {wrong}, not {value!r}"
                )

    def state_width(self, dim: int) -> int:
        return len(self.state_names) * (1 if self.row_wise else dim)

    def state_columns(self, dim: int) -> dict[str, slice]:
        """Where each piece of state lies in a row."""
        width = 1 if self.row_wise else dim
        return {
            name: slice(dim + i * width, dim + (i + 1) * width)
            for i, name in enumerate(self.state_names)
        }

    def start_of_state(self) -> float:
        return 0.0

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
    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    def start_of_state(self) -> float:
        return self.initial_accumulator_value

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
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
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


class RowOptimizer(torch.optim.Optimizer):
    """The settings of each table in torch's form, so that torch's schedulers drive them.

    Rows are updated in `backward()`; `step()` and `zero_grad()` have nothing left to do.
    """

    def __init__(self, rule: RowRule, tables: Sequence[EmbeddingBagConfig]) -> None:
        defaults = {field.name: getattr(rule, field.name) for field in fields(rule)}
        # Empty stand-ins: torch wants a parameter in each group, and rows are none.
        groups = [{"params": [torch.empty(0)], "name": table.name} for table in tables]
        super().__init__(groups, defaults)
        self.rule = rule
        self.names = [table.name for table in tables]
        self._places = {name: place for place, name in enumerate(self.names)}
        self._settings = [field.name for field in fields(rule)]
        self._scalar_names = list(rule.scalars(defaults, 1))
        self._may_change = False  # settings may, in place: a tensor or a list is among them
        self._steps = [0] * len(tables)
        self._uncounted = 0  # of them, for every table
        self.is_in_graph = False  # the step captured last has an update
        self._last_scalars: dict[tuple[str, ...], tuple[Any, Any, list[tuple[float, ...]]]] = {}
        # The collection; a strong reference would keep its memory for longer than it is used.
        self._owner: Callable[[], Any] = lambda: None

    def belongs_to(self, collection: Any) -> None:
        self._owner = weakref.ref(collection)

    @property
    def rows(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the collection whose rows this optimizer updates is gone")
        return owner

    def scalars(self, names: Sequence[str]) -> Scalars:
        """What the rule needs for an update of some tables, [T] float64 each."""
        values = torch.tensor(self.table_scalars(tuple(names)), dtype=torch.float64)
        return dict(zip(self._scalar_names, values.unbind(1), strict=True))

    def table_scalars(self, names: tuple[str, ...]) -> list[tuple[float, ...]]:
        """`scalars` as rows of numbers, one row per table; the same list while nothing changes.

        Asked several times a step, and new in each with Adam or a schedule.
        """
        key: list[Any] = [group[name] for group in self.param_groups for name in self._settings]
        if self._may_change:
            key = list(map(_fixed, key))
        steps = tuple(self.steps) if self.rule.uses_step else None
        found, found_steps, rows = self._last_scalars.get(names, (None, None, []))
        if found == key and found_steps == steps:
            return rows
        if not self._may_change and any(isinstance(value, Tensor | list) for value in key):
            self._may_change = True
            key = list(map(_fixed, key))
        places = [self._places[name] for name in names]
        many = len(self._settings)
        if key == key[:many] * len(self.names) and (steps is None or len(set(steps)) == 1):
            rows = [self._numbers(key, steps, places[0])] * len(names)  # most often
        else:
            rows = [self._numbers(key, steps, place) for place in places]
        self._last_scalars[names] = key, steps, rows
        return rows

    def _numbers(
        self, key: list[Any], steps: tuple[int, ...] | None, place: int
    ) -> tuple[float, ...]:
        many = len(self._settings)
        setting = dict(zip(self._settings, key[place * many : (place + 1) * many], strict=True))
        step = 1 if steps is None else max(steps[place], 1)  # asked before the first update
        return tuple(map(float, self.rule.scalars(setting, step).values()))

    @property
    def steps(self) -> list[int]:
        """The updates of each table so far. Counted by the host: no device has to be asked."""
        if self._uncounted:
            self._steps = [step + self._uncounted for step in self._steps]
            self._uncounted = 0
        return self._steps

    def count_step(self) -> None:
        """One more update, for every table alike, also those without a lookup."""
        self._uncounted += 1
        self._opt_called = True  # what torch's schedulers look for before they move

    def step(self, closure: Any = None) -> Any:
        """Nothing: the rows were updated in `backward()`."""
        return None if closure is None else closure()

    def state_dict(self) -> dict[str, Any]:
        """Settings, steps, and a copy of all row state; large tables stream theirs by `rows()`."""
        told = self.settings_dict()
        state = {
            name: {"step": step, **self.rows.copy_state(name)}
            for name, step in told["steps"].items()
        }
        return {"state": state, "param_groups": told["param_groups"]}

    def settings_dict(self) -> dict[str, Any]:
        """All that `state_dict` has but the state of rows."""
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]
        steps = dict(zip(self.names, self.steps, strict=True))
        return {"rule": type(self.rule).__name__, "steps": steps, "param_groups": groups}

    def load_settings_dict(self, found: dict[str, Any]) -> None:
        """Settings and steps; what was learned about rows comes with them."""
        named = {group["name"]: group for group in found["param_groups"]}
        for place, group in enumerate(self.param_groups):
            mine = named[group["name"]]
            for key in (*self._settings, "initial_lr"):  # the last is torch's schedulers'
                if key in mine:
                    group[key] = mine[key]
            self.steps[place] = int(found["steps"][group["name"]])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        named = {group.get("name"): group for group in state_dict.get("param_groups", [])}
        for name in self.names:
            found = state_dict.get("state", {}).get(name)
            if name not in named or found is None or "step" not in found:
                raise ValueError(f"the optimizer's state has no table {name!r}, or no step for it")
            self.rows.check_state(name, found)
        for place, group in enumerate(self.param_groups):
            name = group["name"]
            group.update({k: v for k, v in named[name].items() if k in group and k != "params"})
            self.steps[place] = int(state_dict["state"][name]["step"])
            self.rows.load_state(name, state_dict["state"][name])


def _fixed(value: Any) -> Any:
    """A setting that nobody changes in place, as torch's schedules change tensors."""
    if isinstance(value, Tensor):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def per_row(scalars: Scalars, table_of_row: Tensor | None) -> Scalars:
    """Per-table scalars as columns that fit rows: [U, 1], or [1, 1] when all tables agree."""
    columns = {}
    for key, values in scalars.items():
        column = values.float().unsqueeze(1)
        columns[key] = column[:1] if table_of_row is None else column[table_of_row]
    return columns
