"""Which of hotrow's rules does to rows what an optimizer of torch does to an embedding's weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from hotrow.embedding.optimizer import RowOptimizer
from hotrow.kernels.rules import SGD, Adagrad, Adam, AdamW, RowRule

Setting = Mapping[str, Any]


class NoRule(TypeError):
    """Rows cannot do what an optimizer of torch does."""


@dataclass(frozen=True)
class TorchRule:
    """What rows do in a step: a rule, and its settings for one param group."""

    rule: type[RowRule]
    settings: dict[str, Any]


def rule_for(optimizer: Optimizer, group: Setting, idle: str | None) -> TorchRule:
    """Return the rule of a param group; raise `NoRule` if there is none.

    `idle="frozen"` says that rows without a gradient may rest where torch would move them.
    """
    if isinstance(optimizer, RowOptimizer):
        names = optimizer.setting_names
        return TorchRule(type(optimizer.rule), {name: group[name] for name in names})
    translate = _known(type(optimizer))
    if translate is None:
        raise NoRule(
            f"{_name_of(optimizer)} has no rule for rows. These have: torch.optim.SGD, Adagrad, "
            "SparseAdam, and Adam and AdamW with idle='frozen'. Give it the other parameters, and "
            "the stand-ins of tables to one of these"
        )
    if group.get("maximize"):
        raise NoRule(f"{_name_of(optimizer)}: rows are not trained with maximize=True")
    return translate(group, idle)


def _known(kind: type) -> Callable[[Setting, str | None], TorchRule] | None:
    """Return the translation of a class, or of the base that its step is of."""
    for base in kind.__mro__:
        if base in _TRANSLATIONS:
            return _TRANSLATIONS[base]
        if "step" in vars(base):
            return None
    return None


def _sgd(group: Setting, idle: str | None) -> TorchRule:
    if group["momentum"]:
        # A OneCycleLR gives momentum to an optimizer that had none.
        how = "momentum=0, and cycle_momentum=False in a schedule"
        raise _moves("SGD with momentum", how, can_rest=False)
    if group["weight_decay"] and idle != "frozen":
        raise _moves("SGD with weight_decay", "weight_decay=0")
    return TorchRule(SGD, {name: group[name] for name in ("lr", "weight_decay")})


def _adagrad(group: Setting, idle: str | None) -> TorchRule:
    if group["weight_decay"]:
        raise _moves("Adagrad with weight_decay", "weight_decay=0", can_rest=False)
    if group["lr_decay"]:
        raise NoRule("torch.optim.Adagrad: rows have no lr_decay; use a scheduler, with lr_decay=0")
    names = ("lr", "eps", "initial_accumulator_value")
    return TorchRule(Adagrad, {name: group[name] for name in names})


def _sparse_adam(group: Setting, idle: str | None) -> TorchRule:
    return TorchRule(Adam, {name: group[name] for name in ("lr", "betas", "eps")})


def _adam(group: Setting, idle: str | None) -> TorchRule:
    name = "AdamW" if group.get("decoupled_weight_decay") else "Adam"
    if idle != "frozen":
        raise _moves(name, "torch.optim.SparseAdam")
    if group["amsgrad"]:
        raise NoRule(f"torch.optim.{name}: rows have no amsgrad")
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
}


def _moves(what: str, instead: str, *, can_rest: bool = True) -> NoRule:
    rest = ", or let such rows rest with idle='frozen'" if can_rest else ""
    return NoRule(
        f"{what} moves rows in every step, also those that no batch has looked up, which would "
        f"touch whole tables; use {instead}{rest}"
    )


def _name_of(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
