"""The process of a command: exit codes, ranks, threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from hotrow.run.config import RunSection

# Exit codes, next to 0 for success.
UNEQUAL = 1  # a run that promises equality is not equal: a bug worth a report
USER_ERROR = 2
DIVERGED = 3  # the loss is NaN
FAILED_STRATEGY = 4  # of a comparison, at least one; the others are there
INTERRUPTED = 130  # what shells report for a command that Ctrl-C has ended

_RANK_COUNTS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")  # torchrun's and mpirun's
_RUNNING = Path("/proc/loadavg")  # its fourth word: threads that run, over all there are


def refuse_ranks(command: str) -> None:
    """Refuse to be one of several ranks, each of which would train the whole run."""
    counts = [os.environ.get(name, "") for name in _RANK_COUNTS]
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        counts.append(str(distributed.get_world_size()))
    ranks = max([1, *(int(count) for count in counts if count.isdecimal())])
    if ranks > 1:
        raise ValueError(
            f"hotrow {command} was started as {ranks} ranks, each of which would train the whole "
            f"run by itself; training on several is not supported yet: start `hotrow {command}` "
            "once, without torchrun or mpirun"
        )


def use_threads(run: RunSection, warn: Callable[[str], None]) -> None:
    """Set the run's number of threads. Warn of torch's own choice where other programs need the
    cores: its threads wait for each other, and each waits for a core."""
    if run.threads is not None:
        torch.set_num_threads(run.threads)
        return
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    busy = min(_busy_cores(), cores)
    if run.device == "cpu" and threads > 1 and cores - busy < threads / 2:
        warn(
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
