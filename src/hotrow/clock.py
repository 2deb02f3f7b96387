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
MOVING = ("fill", "send", "collect", "exchange", "insert")  # stages that move rows

_UNNAMED: AbstractContextManager[Any] = nullcontext()


def named(name: str) -> AbstractContextManager[Any]:
    """What runs inside has a name in a trace, if one is being made."""
    # To ask costs a tenth of a microsecond, a name that nobody reads several.
    is_traced = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(PREFIX + name) if is_traced else _UNNAMED


class Part:
    """Adds up the seconds inside it; not to be entered twice at a time."""

    __slots__ = ("_name", "_named", "_since", "seconds")

    def __init__(self, name: str) -> None:
        self._name, self.seconds = name, 0.0

    def __enter__(self) -> None:
        self._named = named(self._name)
        self._named.__enter__()
        self._since = perf_counter()

    def __exit__(self, *error: Any) -> None:
        self.seconds += perf_counter() - self._since
        self._named.__exit__(*error)


class Clock:
    """The parts of a pass over batches: "read", the stages by their names, "confirm"."""

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._waits: list[float] = []

    def part(self, name: str) -> Part:
        found = self._parts.get(name)
        if found is None:
            found = self._parts[name] = Part(name)
        return found

    def seconds(self, *names: str) -> float:
        return sum(self._parts[name].seconds for name in names if name in self._parts)

    def note_wait(self, share: float) -> None:
        """For which part of a step a device's training has waited for rows."""
        self._waits.append(share)

    def take_waited(self) -> float:
        """The mean of what was noted since this was asked last; NaN: nothing was."""
        waits, self._waits = self._waits, []
        return sum(waits) / len(waits) if waits else math.nan
