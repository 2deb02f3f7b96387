"""Which of hotrow's rules does to rows what an optimizer of torch does to an embedding's weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotrow.embedding.optimizer import RowOptimizer
from hotrow.kernels.dense_rules import (
    DenseAdagrad,
    DenseAdam,
    DenseAdamW,
    DenseRMSprop,
    DenseRule,
    DenseSGD,
)
from hotrow.kernels.rules import SGD, Adagrad, Adam, AdamW, RowRule

Setting = Mapping[str, Any]
START = "initial_accumulator_value"


class NoRule(TypeError):
    """Rows cannot do what an optimizer of torch does."""


@dataclass(frozen=True)
class TorchRule:
    """What rows do in a step: a rule, and its settings for one param group."""

    rule: type[RowRule]
    settings: dict[str, Any]

    def made(self) -> RowRule:
        """Return the rule with its settings of now."""
        return self.rule(**{name: number(value) for name, value in self.settings.items()})


def number(value: Any) -> Any:
    """Return a setting as a plain value; a tensor on a device is waited for."""
    return float(value) if isinstance(value, Tensor) else value


def rule_for(optimizer: Optimizer, group: Setting, idle: str | None) -> TorchRule:
    """Return the rule of a param group; raise `NoRule` if there is none.

    `idle="decay"` moves rows without a gradient as torch does; `idle="frozen"` says that they may
    rest where torch would move them.
    """
    if isinstance(optimizer, RowOptimizer):
        names = optimizer.setting_names
        return TorchRule(type(optimizer.rule), {name: group[name] for name in names})
    translate = _known(type(optimizer))
    if translate is None:
        raise NoRule(
            f"{_name_of(optimizer)} has no rule for rows. These have: torch.optim.SGD, Adagrad, "
            "SparseAdam, and with idle='decay' Adam, AdamW and RMSprop. Give it the other "
            "parameters, and the stand-ins of tables to one of these"
        )
    if group.get("maximize"):
        raise NoRule(f"{_name_of(optimizer)}: rows are not trained with maximize=True")
    return translate(group, idle)


def rules_for(
    optimizer: Optimizer, groups: Mapping[str, Setting], idle: str | None, known: RowRule | None
) -> dict[str, TorchRule]:
    """Return the rules of param groups by table, as `rule_for` does.

    Where the rule of one moves rows without a gradient, those of all do: rows of a collection have
    one kind of state. So do they where rows have such a rule already (`known`).
    """
    different = {id(x): x for x in groups.values()}  # most often all tables are in one group
    rules = {key: rule_for(optimizer, x, idle) for key, x in different.items()}
    if isinstance(known, DenseRule) or any(issubclass(x.rule, DenseRule) for x in rules.values()):
        rules = {key: _moving(rule, different[key]) for key, rule in rules.items()}
    return {name: rules[id(group)] for name, group in groups.items()}


def _moving(rule: TorchRule, group: Setting) -> TorchRule:
    """Return a rule that does the same to rows, and whose settings may begin to move others."""
    kind = {SGD: DenseSGD, Adagrad: DenseAdagrad}.get(rule.rule)
    return rule if kind is None else TorchRule(kind, {x.name: group[x.name] for x in fields(kind)})


def common_rule(rules: Mapping[str, TorchRule]) -> RowRule:
    """Return a rule for all tables, which may differ in settings, but not in the state of rows."""
    first, *others = (rule.made() for rule in {id(rule): rule for rule in rules.values()}.values())
    for other in others:
        if type(other) is not type(first):
            raise RuntimeError(
                "all tables of a collection have one rule, and their param groups need "
                f"{type(first).__name__} and {type(other).__name__}; use one of these for all"
            )
        if isinstance(first, DenseRule):
            first.with_setting(vars(other))
        if other.start_of_state() != first.start_of_state():
            raise RuntimeError(f"all tables of a collection have one {START}")
    return first


def have_state_of(rules: Mapping[str, TorchRule], rule: RowRule) -> bool:
    """Whether the rules of all tables keep for a row what another one keeps, as that starts."""
    start = getattr(rule, START, None)
    return all(
        each.rule is type(rule)
        and each.settings.get(START) == start
        and (not isinstance(rule, DenseRule) or each.made().state_names == rule.state_names)
        for each in {id(each): each for each in rules.values()}.values()
    )


def _known(kind: type) -> Callable[[Setting, str | None], TorchRule] | None:
    """Return the translation of a class, or of the base that its step is of."""
    for base in kind.__mro__:
        if base in _TRANSLATIONS:
            return _TRANSLATIONS[base]
        if "step" in vars(base):
            return None
    return None


def _sgd(group: Setting, idle: str | None) -> TorchRule:
    moves = group["momentum"] or group["weight_decay"]
    if moves and idle == "decay":
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
        return TorchRule(DenseSGD, {name: group[name] for name in names})
    if group["momentum"]:
        # A OneCycleLR gives momentum to an optimizer that had none.
        how = "momentum=0, and cycle_momentum=False in a schedule"
        raise _moves("SGD with momentum", how, can_rest=False)
    if group["weight_decay"] and idle != "frozen":
        raise _moves("SGD with weight_decay", "weight_decay=0")
    return TorchRule(SGD, {name: group[name] for name in ("lr", "weight_decay")})


def _adagrad(group: Setting, idle: str | None) -> TorchRule:
    names = ("lr", "eps", START)
    settings = {name: group[name] for name in names}
    if idle == "decay" and (group["weight_decay"] or group["lr_decay"]):
        more = {name: group[name] for name in ("weight_decay", "lr_decay")}
        return TorchRule(DenseAdagrad, settings | more)
    if group["weight_decay"]:
        raise _moves("Adagrad with weight_decay", "weight_decay=0", can_rest=False)
    if group["lr_decay"]:
        raise NoRule(
            "torch.optim.Adagrad: rows have lr_decay with idle='decay' alone; else use a "
            "scheduler, with lr_decay=0"
        )
    return TorchRule(Adagrad, settings)


def _rmsprop(group: Setting, idle: str | None) -> TorchRule:
    if idle != "decay":
        raise _moves("RMSprop", "Adagrad", can_rest=False)
    names = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")
    return TorchRule(DenseRMSprop, {name: group[name] for name in names})


def _sparse_adam(group: Setting, idle: str | None) -> TorchRule:
    return TorchRule(Adam, {name: group[name] for name in ("lr", "betas", "eps")})


def _adam(group: Setting, idle: str | None) -> TorchRule:
    name = "AdamW" if group.get("decoupled_weight_decay") else "Adam"
    if idle is None:
        raise _moves(name, "torch.optim.SparseAdam")
    if group["amsgrad"]:
        raise NoRule(f"torch.optim.{name}: rows have no amsgrad")
    if idle == "decay":
        names = ("lr", "betas", "eps", "weight_decay")
        rule = DenseAdamW if name == "AdamW" else DenseAdam
        return TorchRule(rule, {name: group[name] for name in names})
    if name == "Adam" and group["weight_decay"]:
        raise _moves("Adam with weight_decay", "AdamW", can_rest=False)
    decay = group["weight_decay"] if name == "AdamW" else 0.0
    settings = {name: group[name] for name in ("lr", "betas", "eps")}
    return TorchRule(AdamW, {**settings, "weight_decay": decay})


_TRANSLATIONS: dict[type, Callable[[Setting, str | None], TorchRule]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.SparseAdam: _sparse_adam,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.RMSprop: _rmsprop,
}


def _moves(what: str, instead: str, *, can_rest: bool = True) -> NoRule:
    rest = ", or let such rows rest with idle='frozen'" if can_rest else ""
    return NoRule(
        f"{what} moves rows in every step, also those that no batch has looked up: let them move "
        f"with idle='decay', use {instead}{rest}"
    )


def _name_of(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
