"""Which cores run at full speed just now.

A core of a shared host may run at half its speed for minutes, because another program's work is on
its other half. A system that launches kernels from Python is bound by that, and two systems that
are compared may have met different cores. So before each window of timed steps every core is tried,
and the threads that launch (the main one and autograd's) may use the fast ones only. All other
threads use all cores, as ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LEAST = 2  # threads that launch
SLACK = 1.15  # a fast core takes at most so many times what the fastest takes
_LAUNCHING = "pt_autograd_"


@contextmanager
def on_fast_cores() -> Iterator[None]:
    """Threads that launch use fast cores; does nothing where cores cannot be chosen."""
    try:
        before = {thread: os.sched_getaffinity(thread) for thread in launching_threads()}
        fast = fast_cores(seconds_by_core())
    except (AttributeError, OSError):  # not Linux, or not allowed
        yield
        return
    try:
        for thread in before:
            _allow(thread, fast)
        yield
    finally:
        for thread, cores in before.items():
            _allow(thread, cores)


def fast_cores(seconds: dict[int, float]) -> set[int]:
    """Those that took about as long as the fastest, and LEAST of them in any case."""
    ordered = sorted(seconds, key=seconds.__getitem__)
    limit = SLACK * seconds[ordered[0]]
    return {core for place, core in enumerate(ordered) if place < LEAST or seconds[core] <= limit}


def seconds_by_core(tries: int = 3) -> dict[int, float]:
    """What a fixed piece of Python takes on each core that this thread may use."""
    cores, found = os.sched_getaffinity(0), {}
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            found[core] = min(_work() for _ in range(tries))
    finally:
        os.sched_setaffinity(0, cores)
    return found


def launching_threads() -> list[int]:
    """This one, and those of autograd."""
    found = [0]
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # gone meanwhile
            if (task / "comm").read_text(encoding="utf-8").startswith(_LAUNCHING):
                found.append(int(task.name))
    return found


def _work() -> float:
    started, numbers = time.perf_counter(), {}
    for each in range(20_000):
        numbers[each & 255] = each
    return time.perf_counter() - started


def _allow(thread: int, cores: set[int]) -> None:
    with suppress(OSError):  # gone meanwhile
        os.sched_setaffinity(thread, cores)
