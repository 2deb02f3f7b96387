"""Ctrl-C, and other signals, at a good moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Whose handlers are known to raise: Ctrl-C, a request to end, and time-outs.
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)
]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt wait until the block has ended.

    Maps and bytes change together, or a row is lost: Python would raise KeyboardInterrupt
    between any two lines.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread alone
        return
    handlers = {each: signal.getsignal(each) for each in _SIGNALS}
    deferred: dict[int, Callable[[int, FrameType | None], Any]] = {
        each: handler for each, handler in handlers.items() if callable(handler)
    }
    asked: list[tuple[int, FrameType | None]] = []
    for each in deferred:
        signal.signal(each, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        for each, handler in deferred.items():
            signal.signal(each, handler)
        for number, frame in asked:
            deferred[number](number, frame)
