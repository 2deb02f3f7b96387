"""Counts the steps of torch's optimizers in this process. Knows nothing about rows.

Rows are updated in `backward()`, so that only another optimizer's steps tell where one training
step ends and the next begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hotrow.embedding.optimizer import RowOptimizer
from hotrow.support.messages import warn

_NO_ACCIDENT = 3  # steps in the wrong mode

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
            yield from weights_of(optimizer)


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the weights that an optimizer trains: it may name them, as one of masters does."""
    groups = optimizer.param_groups
    weights = getattr(optimizer, "weights", None)
    return [x for group in groups for x in group["params"]] if weights is None else list(weights)


def are_in_this_pass() -> bool:
    """Return whether the backward pass that is running reaches a weight of a dense optimizer."""
    return any(
        torch._C._will_engine_execute_node(_node_of(weight))
        for weight in weights_since(0)
        if weight.is_leaf and weight.requires_grad
    )


def _node_of(weight: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(weight).node


class EvaluationWatch:
    """Notices a training loop that has left its model in `eval()` mode.

    That is so if an optimizer of the module that was put into this mode steps again and again
    between lookups.
    """

    def __init__(self) -> None:
        # A weak reference to the module whose `train()` or `eval()` has set the mode.
        self._model: Callable[[], nn.Module | None] = lambda: None
        # Lookups in eval() mode since the last in train() mode, with an optimizer step between any
        # two, and the number of steps at the first and at the last of them.
        self._lookups = self._first_steps = self._last_steps = 0
        self._warned = False

    def mode_set_by(self, module: nn.Module, frame: FrameType | None) -> None:
        """Remember the module whose `train()` or `eval()` reached `module` through `frame`."""
        while frame is not None and frame.f_code is nn.Module.train.__code__:
            module, frame = frame.f_locals["self"], frame.f_back
        self._model = weakref.ref(module)

    def end(self) -> None:
        """Note a lookup in train() mode, or that mode: captured steps look nothing up."""
        self._lookups = 0

    def note(self, *, warns: bool) -> None:
        """Note a lookup in eval() mode with gradients on; warn once."""
        if self._lookups and self._last_steps == _count:
            return
        if not self._lookups:
            self._first_steps = _count
        self._lookups, self._last_steps = self._lookups + 1, _count
        model = self._model()
        if self._lookups <= _NO_ACCIDENT or self._warned or not warns or model is None:
            return
        trained = {id(weight) for weight in weights_since(self._first_steps)}
        if any(id(weight) in trained for weight in model.parameters()):
            self._warned = True
            warn(
                f"{_NO_ACCIDENT} optimizer steps followed lookups in eval() mode, in which no row "
                "is updated. To train, call model.train(); to leave the rows as they are, call "
                "embedding.requires_grad_(False)"
            )
