"""Notices changes of a model, or its optimizer, since a step was captured.

A graph reads tensors at the addresses and with the settings of that time. The check runs before
every replay, so it compares what was found once, instead of walking through the model again.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

_values, _trains, _learns = dict.values, attrgetter("training"), attrgetter("requires_grad")


class CaptureGuard:
    """Remembers a model and an optimizer as they were at a capture."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._modules = list(model.modules())
        self._tables: list[dict[str, Any]] = [
            table
            for module in self._modules
            for table in (module._parameters, module._buffers, module._modules)
        ]
        self._parts = self._parts_now()
        self._tensors = [part for part in self._parts if isinstance(part, Tensor)]
        self._facts = self._facts_now()

    def has_changed(self) -> bool:
        """Whether anything was replaced, has moved, or has another setting."""
        parts = self._parts_now()
        return (
            len(parts) != len(self._parts)
            or not all(map(is_, parts, self._parts))
            or self._facts_now() != self._facts
        )

    def _parts_now(self) -> list[Any]:
        """Return every tensor and module, and the optimizer's state and tensors on a device."""
        parts = list(chain.from_iterable(map(_values, self._tables)))
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                parts += [value for value in state.values() if isinstance(value, Tensor)]
        return parts + [value for value in self._settings_now() if _is_on_device(value)]

    def _facts_now(self) -> tuple[Any, ...]:
        settings = [value for value in self._settings_now() if not _is_on_device(value)]
        return (
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(_learns, self._tensors)),
            list(map(_trains, self._modules)),
            [value.tolist() if isinstance(value, Tensor) else value for value in settings],
        )

    def _settings_now(self) -> list[Any]:
        groups: Iterable[Any] = () if self._optimizer is None else self._optimizer.param_groups
        return [value for group in groups for key, value in group.items() if key != "params"]


def _is_on_device(value: Any) -> bool:
    """Whether a graph reads a setting anew; it has the value of one on the host."""
    return isinstance(value, Tensor) and value.device.type != "cpu"
