"""Signals that stop a run after a step, on all of its ranks. Shows one line."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from contextlib import suppress
from enum import IntFlag
from types import FrameType
from typing import Any, Self

# The kernel sends SIGTERM to ranks once for every thread of a launcher that was killed.
_SECONDS_ALIKE = 1.0


class Request(IntFlag):
    """What a rank asks of all of them, by bits that travel with each step."""

    INTERRUPT = 1  # stop after this step: Ctrl-C
    TERMINATE = 2  # stop after this step: SIGTERM
    SAVE = 4  # a timed checkpoint is due


def leave_closed_terminal() -> None:
    """Print to nowhere from now on if the terminal was closed: it would raise, and end the run."""
    for stream in (1, 2):
        with suppress(OSError):
            is_device = stat.S_ISCHR(os.fstat(stream).st_mode)
            if is_device and not os.isatty(stream):  # /dev/null, or a terminal that is gone
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


class StopAfterStep:
    """Handles Ctrl-C: the first one stops after the current step, the second one at once.

    SIGTERM is handled in the same way; only the exit code of a saved run differs. Several ranks
    stop when all of them know of it; `is_first`: this one says so.
    """

    _signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, *, ranks: int = 1, is_first: bool = True) -> None:
        self.asked = self.to_terminate = False  # known to all ranks
        self._received, self._received_at = Request(0), 0.0
        self._is_cut = False
        self._is_alone, self._is_first = ranks == 1, is_first

    def __enter__(self) -> Self:
        self._before: list[Any] = []
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            self._before = [signal.signal(number, self._ask) for number in self._signals]
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        is_termination, now = number == signal.SIGTERM, time.monotonic()
        if self._received:
            is_repeated = self._received == Request.TERMINATE and is_termination
            if is_repeated and not self._is_alone and now - self._received_at < _SECONDS_ALIKE:
                return
            self._is_cut = True
            raise KeyboardInterrupt
        self._received_at = now
        self._received = Request.TERMINATE if is_termination else Request.INTERRUPT
        if self._is_alone:
            self.agree(self._received)

    def check(self) -> None:
        """Raise if a second signal has come, and Python has lost the KeyboardInterrupt, as it does
        where it came in a finalizer or a garbage collection."""
        if self._is_cut:
            raise KeyboardInterrupt

    def requests(self) -> int:
        """Return what this process was asked."""
        return self._received

    def agree(self, requests: int) -> None:
        """Note what ranks were asked: from now on, all of them stop after the current step."""
        if self.asked or not requests & (Request.INTERRUPT | Request.TERMINATE):
            return
        self.asked, self.to_terminate = True, not requests & Request.INTERRUPT
        leave_closed_terminal()
        if self._is_first:
            text = "stopping after this step; Ctrl-C again stops at once"
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self._signals, self._before, strict=False):
            signal.signal(number, handler)
