"""Seconds of the host by named parts; a profiler's trace shows the same names.

Time of a device is not measured, and nothing here waits for one.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

PREFIX = "hotrow: "  # of names in a trace

# The sum of each part; other parts only have names.
_SUMS = {
    "read": "read",
    "plan": "plan",
    **dict.fromkeys(("fill", "send", "collect", "exchange", "insert"), "rows"),
}
_UNNAMED: AbstractContextManager[Any] = nullcontext()
# This check costs 0.1 us; a name costs several, so it is made only for a profiler.
_is_traced: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def named(name: str) -> AbstractContextManager[Any]:
    """Name the block in a profiler's trace, if one is being recorded."""
    return record_function(PREFIX + name) if _is_traced() else _UNNAMED


class Sum:
    """Seconds so far."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


class Part:
    """Adds the seconds of a block to a sum; not reentrant."""

    __slots__ = ("_name", "_named", "_since", "_sum")

    def __init__(self, name: str, total: Sum) -> None:
        self._name, self._sum = name, total

    def __enter__(self) -> None:
        self._named = record_function(PREFIX + self._name) if _is_traced() else None
        if self._named is not None:
            self._named.__enter__()
        self._since = perf_counter()

    def __exit__(self, *error: Any) -> None:
        self._sum.seconds += perf_counter() - self._since
        if self._named is not None:
            self._named.__exit__(*error)


class Clock:
    """The parts of a pass over batches: "read", the stages by their names, "confirm"."""

    def __init__(self) -> None:
        self.read, self.plan, self.rows = Sum(), Sum(), Sum()
        self._parts: dict[str, Part] = {}
        self._waits: list[float] = []

    def part(self, name: str) -> Part:
        part = self._parts.get(name)
        if part is None:
            total = getattr(self, _SUMS[name]) if name in _SUMS else Sum()
            part = self._parts[name] = Part(name, total)
        return part

    def note_wait(self, share: float) -> None:
        """Add the share of a step in which a device waited for rows."""
        self._waits.append(share)

    def take_waited(self) -> float:
        """Return the mean of the shares since the last call; NaN: none."""
        if not self._waits:
            return math.nan
        waits, self._waits = self._waits, []
        return sum(waits) / len(waits)
