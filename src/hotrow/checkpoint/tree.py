"""States of any shape as JSON beside named tensors, and back. Nothing is pickled.

JSON has no tuples, no keys but text, no NaN and no infinity: such values are tables with one
entry that says what they are, and so is a table itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KEYS = (str, int, bool, float, type(None), tuple)


def pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """A value as JSON has it; its tensors go to `tensors`, named by their place in it."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, np.generic):
        return pack(value.item(), tensors, where)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        return {"tensor": _named(value, tensors, where)}
    if isinstance(value, np.ndarray) and value.dtype != object:
        tensor = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)
        return {"array": _named(tensor, tensors, where)}
    if isinstance(value, list | tuple):
        items = [pack(each, tensors, f"{where}.{place}") for place, each in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping) and all(isinstance(key, _KEYS) for key in value):
        return {
            "table": [
                [pack(key, tensors, where), pack(each, tensors, f"{where}.{key}")]
                for key, each in value.items()
            ]
        }
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which is not saved: "
        "numbers, text, tensors, lists and tables of them are"
    )


def _named(tensor: Tensor, tensors: dict[str, Tensor], where: str) -> str:
    while where in tensors:  # a key may have a dot in it
        where += "'"
    tensors[where] = tensor
    return where


def unpack(found: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What was packed; a ValueError says what is none of its forms."""
    if found is None or isinstance(found, bool | str | int | float):
        return found
    if isinstance(found, list):
        return [unpack(each, tensors) for each in found]
    if isinstance(found, dict) and len(found) == 1:
        ((kind, value),) = found.items()
        if kind == "float" and value in ("nan", "inf", "-inf"):
            return float(value)
        if kind in ("tensor", "array") and isinstance(value, str) and value in tensors:
            tensor = tensors[value]
            return tensor if kind == "tensor" else tensor.numpy()
        if kind == "tuple" and isinstance(value, list):
            return tuple(unpack(each, tensors) for each in value)
        if kind == "table" and isinstance(value, list):
            return dict(_entry(each, tensors) for each in value)
    raise ValueError(f"{json.dumps(found)[:60]} is no value")


def _entry(found: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    if not isinstance(found, list) or len(found) != 2:
        raise ValueError(f"{json.dumps(found)[:60]} is no entry of a table")
    key = unpack(found[0], tensors)
    try:
        hash(key)
    except TypeError:
        raise ValueError(f"{key!r} is no key of a table") from None
    return key, unpack(found[1], tensors)
