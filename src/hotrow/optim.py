"""Optimizers on rows: what one update does to the rows it touches, and their settings.

A row is updated at most once per step, from the sum of its gradients; rows without a gradient
never change (decay and moments are lazy). Formulas and defaults are torch.optim's. Only single,
correctly rounded operations are used: see kernels/reference.py for why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from hotrow.kernels.reference import row_sum
from hotrow.tables import EmbeddingBagConfig

Scalars = dict[str, Tensor]  # per table [T] float64, or per row [U, 1] float32


def _is_setting(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < 1e30  # type: ignore[operator]


@dataclass(frozen=True)
class RowRule:
    """How rows are updated. Its fields are the settings of every table's param group."""

    lr: float
    state_names: ClassVar[tuple[str, ...]] = ()
    row_wise: ClassVar[bool] = False  # one state value per row instead of one per weight
    uses_step: ClassVar[bool] = False  # what it computes depends on how many updates there were

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
            values = value if isinstance(value, tuple | list) else (value,)
            if not all(_is_setting(each) for each in values):
                raise ValueError(
                    f"{type(self).__name__}: {field.name} must be a number of at least 0, "
                    f"not {value!r}"
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

    def scalars(self, setting: Scalars, step: Tensor) -> Scalars:
        """What the update needs per table, computed in float64 from settings and step, [T]."""
        raise NotImplementedError

    def update(self, weight: Tensor, grad: Tensor, state: list[Tensor], s: Scalars) -> None:
        """Change rows in place: weight and grad [U, dim]."""
        raise NotImplementedError


@dataclass(frozen=True)
class SGD(RowRule):
    """torch.optim.SGD without momentum; `weight_decay` acts on the rows of the batch."""

    lr: float = 1e-3
    weight_decay: float = 0.0

    def scalars(self, setting: Scalars, step: Tensor) -> Scalars:
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

    def scalars(self, setting: Scalars, step: Tensor) -> Scalars:
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

    def scalars(self, setting: Scalars, step: Tensor) -> Scalars:
        beta1, beta2 = setting["betas.0"], setting["betas.1"]
        root = (1 - beta2**step).sqrt()
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

    def scalars(self, setting: Scalars, step: Tensor) -> Scalars:
        root = (1 - setting["betas.1"] ** step).sqrt()
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
        self._setting_names = [field.name for field in fields(rule)]
        self._has_tensors = False
        # Updates so far. On the host, which counts them: no device has to be asked.
        self._steps = torch.zeros(len(tables), dtype=torch.int64)
        self._uncounted = 0  # of them, for every table
        self._last_scalars: dict[tuple[str, ...], tuple[Any, list[tuple[float, ...]]]] = {}
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
        places = [self._places[name] for name in names]
        table: dict[str, list[float]] = {}
        for group in (self.param_groups[place] for place in places):
            for field in fields(self.rule):
                value = group[field.name]
                parts = value if isinstance(value, tuple | list) else [value]
                for i, each in enumerate(parts):
                    key = f"{field.name}.{i}" if len(parts) > 1 else field.name
                    table.setdefault(key, []).append(float(each))
        setting = {key: torch.tensor(values, dtype=torch.float64) for key, values in table.items()}
        return self.rule.scalars(setting, self.steps[places])

    def table_scalars(self, names: tuple[str, ...]) -> list[tuple[float, ...]]:
        """`scalars` as rows of numbers, one row per table; the same list while nothing changes."""
        settings = self._setting_names
        key: list[Any] = [group[name] for group in self.param_groups for name in settings]
        if self._has_tensors:
            key = list(map(_number, key))  # a schedule changes a tensor in place
        if self.rule.uses_step:
            key.append(self.steps.tolist())
        found, rows = self._last_scalars.get(names, (None, []))
        if found != key:
            self._has_tensors = any(
                isinstance(group[name], Tensor) for group in self.param_groups for name in settings
            )
            # Tables with the same settings have the same numbers, and most have.
            alike: dict[Any, str] = {}
            facts = [self._facts(name) for name in names]
            for name, fact in zip(names, facts, strict=True):
                alike.setdefault(fact, name)
            columns = [values.tolist() for values in self.scalars(tuple(alike.values())).values()]
            found_rows = dict(zip(alike, zip(*columns, strict=True), strict=True))
            rows = [found_rows[fact] for fact in facts]
            self._last_scalars[names] = list(map(_number, key)), rows
        return rows

    def _facts(self, name: str) -> tuple[Any, ...]:
        place = self._places[name]
        group = self.param_groups[place]
        return (int(self.steps[place]), *(_number(group[each]) for each in self._setting_names))

    @property
    def steps(self) -> Tensor:
        """The updates of each table so far."""
        if self._uncounted:
            self._steps += self._uncounted
            self._uncounted = 0
        return self._steps

    def count_step(self) -> None:
        """One more update, for every table alike, also those without a lookup."""
        self._uncounted += 1  # a tensor would take longer than all else here
        self._opt_called = True  # what torch's schedulers look for before they move

    def step(self, closure: Any = None) -> Any:
        """Nothing: the rows were updated in `backward()`."""
        return None if closure is None else closure()

    def state_dict(self) -> dict[str, Any]:
        """Settings, steps, and a copy of all row state; large tables stream theirs by `rows()`."""
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]
        state = {
            name: {"step": int(step), **self.rows.copy_state(name)}
            for name, step in zip(self.names, self.steps, strict=True)
        }
        return {"state": state, "param_groups": groups}

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


def _number(value: Any) -> Any:
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
