"""Delay Ctrl-C and other signals until a block of code has ended."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from types import FrameType
from typing import Any

# Signals whose handlers are known to raise: Ctrl-C, termination, time-outs, and a killed worker of
# torch's DataLoader.
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]

# Like signal.getsignal, but without making an enum: this is called several times a step.
_handler, _SIGINT = _signal.getsignal, int(signal.SIGINT)


class _Gate:
    """Passes signals on, or keeps them until it opens again."""

    def __init__(self) -> None:
        self.closed = 0
        self.standing: set[Standing] = set()
        self.asked: list[tuple[int, FrameType | None]] = []
        self.handlers: dict[int, Any] = {}

    def put_up(self) -> None:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and handler != self.receive:
                self.handlers[number] = handler
                signal.signal(number, self.receive)

    def take_down(self) -> None:
        for number, handler in self.handlers.items():
            if signal.getsignal(number) == self.receive:  # keep a handler that was set since
                signal.signal(number, handler)
        self.handlers = {}

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.closed:
            self.asked.append((number, frame))
        else:
            self.handlers[number](number, frame)

    @property
    def is_up(self) -> bool:
        return bool(_handler(_SIGINT) == self.receive)


_gate = _Gate()


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class uninterrupted:
    """Delay signals until the block has ended.

    Python raises KeyboardInterrupt between any two lines. Maps and bytes must change together, or
    a row is lost.
    """

    def __enter__(self) -> None:
        self._mine = self._put_up = False
        if not _in_main_thread():
            return  # signals are handled in the main thread alone
        if not _gate.closed and not (_gate.standing and _gate.is_up):
            self._put_up = True
            _gate.put_up()
        self._mine = True
        _gate.closed += 1

    def __exit__(self, *_: object) -> None:
        if not self._mine:
            return
        _gate.closed -= 1
        if _gate.closed:
            return
        asked, _gate.asked = _gate.asked, []
        handlers = dict(_gate.handlers)
        if self._put_up and not _gate.standing:
            _gate.take_down()
        for number, frame in asked:
            handlers[number](number, frame)


class Standing:
    """Keeps the handlers installed, so that `uninterrupted` costs nothing."""

    def put_up(self) -> None:
        if _in_main_thread():
            _gate.standing.add(self)
            _gate.put_up()

    def take_down(self) -> None:
        self.let_go()
        if _in_main_thread() and not _gate.standing and not _gate.closed:
            _gate.take_down()

    def let_go(self) -> None:
        """Let the end of the next block remove the handlers. For any thread, and finalizers."""
        _gate.standing.discard(self)
