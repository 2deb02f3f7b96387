"""Step records handed on in order, without waiting for a device.

On a GPU a step's loss is known some steps after its launch; whoever reads it earlier waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hotrow.support.records import LateStepRecord, StepRecord

STEPS_BEHIND = 8  # more than a device lags behind the host


class Arriving:
    """Hands records on: at once, or a few steps later where the loss is on its way."""

    def __init__(self, hand_on: Callable[[StepRecord], None]) -> None:
        self._hand_on = hand_on
        self._waiting: deque[StepRecord] = deque()

    def add(self, record: StepRecord) -> None:
        self._waiting.append(record)
        self._leave(STEPS_BEHIND if isinstance(record, LateStepRecord) else 0)

    def finish(self) -> None:
        """Hands on all that is left; waits for the device."""
        self._leave(0)

    def _leave(self, count: int) -> None:
        while len(self._waiting) > count:
            self._hand_on(self._waiting.popleft())
