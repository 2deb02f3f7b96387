"""Batches as trees: tensors in tuples, lists, mappings, dataclasses and jagged tensors.

A new batch has the structure of the old one; mappings become dicts. This module does not know
samples or ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hotrow.inputs.jagged_tensor import Jagged

_MOST_PARTS = 1024  # of a container in which tensors are searched for


def members(node: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a container by index, key or field name; None if it is no container."""
    if isinstance(node, list | tuple):
        return dict(enumerate(node))
    if isinstance(node, Mapping):
        return node
    kind: Any = type(node)
    names = _field_names(kind)
    return None if names is None else {name: getattr(node, name) for name in names[0]}


def rebuilt(node: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a container like `node` with other parts, given as `members` names them."""
    if isinstance(node, list | tuple):
        values = parts.values()
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    return dict(parts) if isinstance(node, Mapping) else replace(node, **parts)


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same batch with every tensor changed."""
    return _mapped(batch, change, has_to=False)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor, and every object with a method `to`, to a device."""
    return _mapped(batch, lambda part: part.to(device, non_blocking=True), has_to=True)


def _mapped(node: Any, change: Callable[[Any], Any], *, has_to: bool) -> Any:
    if isinstance(node, Tensor) or (has_to and hasattr(node, "to")):
        return change(node)
    if isinstance(node, Jagged):
        return node.map(change)
    parts = members(node)
    if parts is None:
        return node
    changed = {name: _mapped(part, change, has_to=has_to) for name, part in parts.items()}
    return rebuilt(node, changed)


def tensors_in(batch: Any) -> list[Tensor]:
    """Return every tensor of a batch, in the order in which `map_tensors` changes them."""
    tensors: list[Tensor] = []
    _collect(batch, tensors)
    return tensors


def all_tensors_in(batch: Any) -> list[Tensor]:
    """Return every tensor of a batch, also those in attributes of objects of other classes."""
    tensors: list[Tensor] = []
    _collect_all(batch, tensors, depth=4)
    return tensors


def _collect_all(node: Any, tensors: list[Tensor], depth: int) -> None:
    if isinstance(node, list | tuple | Mapping) and len(node) > _MOST_PARTS:
        return  # labels or names; looking at each would take long
    if callable(node) or isinstance(node, ModuleType):
        return  # no part of a batch, though it may refer to it
    parts = None if isinstance(node, Tensor | Jagged) else members(node)
    if parts is None and not _collect(node, tensors):
        slots = getattr(type(node), "__slots__", ())
        named = [slots] if isinstance(slots, str) else slots
        parts = {name: getattr(node, name) for name in named if hasattr(node, name)}
        parts |= getattr(node, "__dict__", {})
    if parts is not None and depth:
        for part in parts.values():
            _collect_all(part, tensors, depth - 1)


def only_tensors_in(batch: Any) -> list[Tensor] | None:
    """Return every tensor of a batch; None if it holds anything else."""
    tensors: list[Tensor] = []
    return tensors if _collect(batch, tensors) else None


def only_tensors(batch: Any) -> bool:
    """Return whether a batch holds nothing but tensors that `map_tensors` changes."""
    return only_tensors_in(batch) is not None


def _collect(node: Any, tensors: list[Tensor]) -> bool:
    """Append the tensors below a node; return whether there is nothing else."""
    if isinstance(node, Tensor):
        tensors.append(node)
        return True
    if isinstance(node, Jagged):
        node.map(lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return True
    parts = members(node)
    if parts is None:
        return False
    are_tensors = [_collect(part, tensors) for part in parts.values()]  # all, also after a False
    if not all(are_tensors):
        return False
    kind: Any = type(node)
    names = _field_names(kind)
    return names is None or all(_collect(getattr(node, name), []) for name in names[1])


@cache  # several times a step: `dataclasses` would go through all fields each time
def _field_names(kind: Any) -> tuple[list[str], list[str]] | None:
    """Return the fields that a dataclass is given and those it computes; None: it is none."""
    if not is_dataclass(kind):
        return None
    every = fields(kind)
    return [x.name for x in every if x.init], [x.name for x in every if not x.init]
