"""Numbers that numpy or torch have made, as Python's own.

Python's have no width that could overflow, and can be written down as JSON.
"""

from __future__ import annotations

import operator
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor


def plain(value: Any) -> Any:
    """A number or several of them, as Python has them; anything else as it is."""
    if isinstance(value, np.generic | np.ndarray | Tensor):
        found = value.tolist()
        return tuple(found) if isinstance(found, list) else found
    return tuple(map(plain, value)) if type(value) is tuple else value


def plain_fields(record: Any) -> None:
    """The same for a frozen dataclass, while it is made."""
    for each in fields(record):
        object.__setattr__(record, each.name, plain(getattr(record, each.name)))


def whole(name: str, value: Any, *, least: int | None = None) -> int:
    """A whole number of any kind; a ValueError names what is none, or too small."""
    try:
        found = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, not {value!r}") from None
    if least is not None and found < least:
        raise ValueError(f"{name} must be at least {least}, got {found}")
    return found
