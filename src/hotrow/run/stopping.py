"""Ctrl-C that lets a step end."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any, Self


class StopAfterStep:
    """The first Ctrl-C asks for an end after the step under way, the second one ends at once.

    A request to terminate counts as a Ctrl-C, but for the exit code of a run that is saved.
    """

    asked = False
    to_terminate = False
    _signals = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> Self:
        self._before: list[Any] = []
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            self._before = [signal.signal(each, self._ask) for each in self._signals]
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked, self.to_terminate = True, number == signal.SIGTERM
        print("stopping after this step; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self._signals, self._before, strict=False):
            signal.signal(number, handler)
