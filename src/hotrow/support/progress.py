"""A progress bar or a line on the terminal for long work."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

_SOON = 1.0  # seconds: shorter work gets neither


@contextmanager
def bytes_bar(
    title: str, *, clock: Callable[[], float] = perf_counter
) -> Iterator[Callable[[int, int], None]]:
    """Yield `advance(done, total)`, in bytes, for one piece of work.

    The bar goes to stderr if that is a terminal, and disappears when the work has ended.
    """
    started, bar, task = clock(), None, None

    def advance(done: int, total: int) -> None:
        nonlocal bar, task
        if bar is None:
            if done >= total or clock() - started < _SOON or not _is_seen():
                return
            bar = _bar()
            bar.start()
            task = bar.add_task(title, total=total)
        bar.update(task, completed=done)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def line_if_long(title: str, *, seconds: float = _SOON) -> Iterator[None]:
    """Write a line to stderr, if that is a terminal, for work that takes longer than this."""

    def say() -> None:
        if _is_seen():
            print(f"{title} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(seconds, say)
    timer.daemon = True  # a program may end meanwhile
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_seen() -> bool:
    # A program without a console has no stderr, or one that was closed.
    stderr: Any = sys.stderr
    return stderr is not None and not getattr(stderr, "closed", False) and bool(stderr.isatty())


def _bar() -> Any:
    # Imported here, because most programs need no bar.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def no_progress(*_: object) -> None:
    """Ignore reports of progress."""
