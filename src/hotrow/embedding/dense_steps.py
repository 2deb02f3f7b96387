"""Counts the steps of torch's optimizers in this process. Knows nothing about rows.

Rows are updated in `backward()`, so that only another optimizer's steps tell where one training
step ends and the next begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hotrow.embedding.optimizer import RowOptimizer

_count = 0
_last: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # when each stepped last


@cache
def watch() -> None:
    """Count from now on; once in a process."""
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: note(optimizer))


def note(optimizer: Optimizer | None) -> None:
    """An optimizer has stepped; None: the step had no dense part."""
    global _count
    _count += 1
    if optimizer is not None and not isinstance(optimizer, RowOptimizer):
        _last[optimizer] = _count


def count() -> int:
    """Return how many steps there were so far."""
    return _count


def weights_since(number: int) -> Iterator[Tensor]:
    """Yield the weights of dense optimizers that have stepped since `count()` was `number`."""
    for optimizer, last in list(_last.items()):
        if last > number:
            if (weights := getattr(optimizer, "weights", None)) is None:
                weights = [each for group in optimizer.param_groups for each in group["params"]]
            yield from weights  # MasterWeights names them; its groups have the masters


def are_in_this_pass() -> bool:
    """Return whether the backward pass that is running reaches a weight of a dense optimizer."""
    return any(
        torch._C._will_engine_execute_node(_node_of(weight))
        for weight in weights_since(0)
        if weight.is_leaf and weight.requires_grad
    )


def _node_of(weight: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(weight).node
