"""Where the host's time goes, by parts that have names; a profiler's trace shows the same names.

What a device does meanwhile is not seen here, and nobody waits for it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

PREFIX = "hotrow: "  # of names in a trace

# What is added up together; other parts only have names.
_SUMS = {
    "read": "read",
    "plan": "plan",
    **dict.fromkeys(("fill", "send", "collect", "exchange", "insert"), "rows"),
}
_UNNAMED: AbstractContextManager[Any] = nullcontext()
# To ask costs a tenth of a microsecond, a name that nobody reads several.
_is_traced: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def named(name: str) -> AbstractContextManager[Any]:
    """What runs inside has a name in a trace, if one is being made."""
    return record_function(PREFIX + name) if _is_traced() else _UNNAMED


class Sum:
    """Seconds so far."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


class Part:
    """Adds the seconds inside it to a sum; not to be entered twice at a time."""

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
        found = self._parts.get(name)
        if found is None:
            total = getattr(self, _SUMS[name]) if name in _SUMS else Sum()
            found = self._parts[name] = Part(name, total)
        return found

    def note_wait(self, share: float) -> None:
        """For which part of a step a device's training has waited for rows."""
        self._waits.append(share)

    def take_waited(self) -> float:
        """The mean of what was noted since this was asked last; NaN: nothing was."""
        if not self._waits:
            return math.nan
        waits, self._waits = self._waits, []
        return sum(waits) / len(waits)
