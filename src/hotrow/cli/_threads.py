"""How many threads torch computes with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from hotrow.run.config import RunSection

_RUNNING = Path("/proc/loadavg")  # its fourth word: threads that run, over all there are


def use_threads(run: RunSection, tell: Callable[[str], None]) -> None:
    """Those of the run. Torch's own choice is told where others need the cores: its threads wait
    for each other, and each waits for a core."""
    if run.threads is not None:
        torch.set_num_threads(run.threads)
        return
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    busy = min(_busy_cores(), cores)
    if run.device == "cpu" and threads > 1 and cores - busy < threads / 2:
        tell(
            f"other programs keep {_of_cores(busy, cores)} busy, and {threads} threads that share "
            f"{'them' if busy == cores else 'the rest'} can be many times slower than one; "
            "--set run.threads=1 avoids that"
        )


def _busy_cores() -> float:
    """By others, lately and now: a load of a minute may be of a run that has ended."""
    lately = os.getloadavg()[0]
    try:
        running = _RUNNING.read_text().split()[3].partition("/")[0]
        return min(lately, int(running) - 1)  # this program runs, too
    except (OSError, ValueError, IndexError):  # elsewhere than on Linux
        return lately


def _of_cores(busy: float, cores: int) -> str:
    if busy < cores:
        return f"{busy:.1f} of {cores} cores"
    return "both cores" if cores == 2 else f"all {cores} cores"
