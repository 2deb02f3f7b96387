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
    """Return a value as JSON; its tensors go to `tensors`, named by their place in it."""
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
        items = [pack(item, tensors, f"{where}.{place}") for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping) and all(isinstance(key, _KEYS) for key in value):
        return {
            "table": [
                [pack(key, tensors, where), pack(item, tensors, f"{where}.{key}")]
                for key, item in value.items()
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


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what was packed; a ValueError names what has none of its forms."""
    if packed is None or isinstance(packed, bool | str | int | float):
        return packed
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if isinstance(packed, dict) and len(packed) == 1:
        ((kind, value),) = packed.items()
        if kind == "float" and value in ("nan", "inf", "-inf"):
            return float(value)
        if kind in ("tensor", "array") and isinstance(value, str) and value in tensors:
            tensor = tensors[value]
            return tensor if kind == "tensor" else tensor.numpy()
        if kind == "tuple" and isinstance(value, list):
            return tuple(unpack(item, tensors) for item in value)
        if kind == "table" and isinstance(value, list):
            return dict(_entry(item, tensors) for item in value)
    raise ValueError(f"{json.dumps(packed)[:60]} is no value")


def _entry(packed: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    if not isinstance(packed, list) or len(packed) != 2:
        raise ValueError(f"{json.dumps(packed)[:60]} is no entry of a table")
    key = unpack(packed[0], tensors)
    try:
        hash(key)
    except TypeError:
        raise ValueError(f"{key!r} is no key of a table") from None
    return key, unpack(packed[1], tensors)
