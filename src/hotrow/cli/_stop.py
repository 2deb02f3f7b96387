"""Ctrl-C that lets a step end."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import typer


class StopAfterStep:
    """The first Ctrl-C asks for an end after the step under way, the second one ends at once.

    A request to terminate counts as a Ctrl-C, but for the exit code of a run that is saved.
    """

    asked = False
    to_terminate = False
    _signals = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> Self:
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:  # Python lets no other thread decide about signals
            self._before: list[Any] = [signal.signal(each, self._ask) for each in self._signals]
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked, self.to_terminate = True, number == signal.SIGTERM
        typer.echo("stopping after this step; Ctrl-C again stops at once", err=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_main:
            for each, before in zip(self._signals, self._before, strict=True):
                signal.signal(each, before)
