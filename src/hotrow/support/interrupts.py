"""Ctrl-C, and other signals, at a good moment."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from types import FrameType
from typing import Any

# Whose handlers are known to raise: Ctrl-C, a request to end, time-outs, and a worker of torch's
# DataLoader that was killed.
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]

# As signal.getsignal, which makes an enum of every answer: this is asked several times a step.
_handler, _SIGINT = _signal.getsignal, int(signal.SIGINT)


class _Gate:
    """Lets signals through, or keeps them until it opens again."""

    def __init__(self) -> None:
        self.closed = 0
        self.standing: set[Standing] = set()
        self.asked: list[tuple[int, FrameType | None]] = []
        self.handlers: dict[int, Any] = {}

    def put_up(self) -> None:
        for each in _SIGNALS:
            handler = signal.getsignal(each)
            if callable(handler) and handler != self.receive:
                self.handlers[each] = handler
                signal.signal(each, self.receive)

    def take_down(self) -> None:
        for each, handler in self.handlers.items():
            if signal.getsignal(each) == self.receive:  # whoever came since stays
                signal.signal(each, handler)
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
    """Let an interrupt wait until the block has ended.

    Maps and bytes change together, or a row is lost: Python would raise KeyboardInterrupt
    between any two lines.
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
    """While one of these is up, `uninterrupted` does not ask the system, and costs nothing."""

    def put_up(self) -> None:
        if _in_main_thread():
            _gate.standing.add(self)
            _gate.put_up()

    def take_down(self) -> None:
        self.let_go()
        if _in_main_thread() and not _gate.standing and not _gate.closed:
            _gate.take_down()

    def let_go(self) -> None:
        """Let the end of the next block take the handlers down. For any thread, and finalizers."""
        _gate.standing.discard(self)
