"""Optimizers, and whatever else has a state of its own, loaded on the device that is here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# How an optimizer computes: that is for the device here to say.
_FORMS = ("fused", "foreach", "capturable", "differentiable")


def load_part(part: Any, state: Any) -> None:
    if isinstance(part, torch.optim.Optimizer):
        _load_optimizer(part, state)
    else:
        part.load_state_dict(state)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    before = [dict(group) for group in optimizer.param_groups]
    groups = [
        {**then, **{key: now[key] for key in _FORMS if key in now}}
        for now, then in zip(before, state["param_groups"], strict=False)
    ]
    if len(groups) < len(before):
        raise ValueError(
            f"{len(before)} groups of parameters are trained; {len(groups)} were saved"
        )
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group, now in zip(optimizer.param_groups, before, strict=True):
        for key in [key for key in group if key != "params"]:
            group[key] = _as_here(group[key], now.get(key))


def _as_here(value: Any, now: Any) -> Any:
    """A setting in the form it has here: a captured step reads a tensor at one place."""
    if isinstance(now, Tensor) and isinstance(value, Tensor | float | int):
        return now.copy_(torch.as_tensor(value))
    if isinstance(now, float) and isinstance(value, Tensor):
        return float(value)
    return value
