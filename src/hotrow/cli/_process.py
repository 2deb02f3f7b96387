"""The process of a command: exit codes, ranks, threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hotrow.run.config import RunSection

# Exit codes, next to 0 for success.
UNEQUAL = 1  # a run that promises equality is not equal: a bug worth a report
USER_ERROR = 2
DIVERGED = 3  # the loss is NaN
FAILED_STRATEGY = 4  # of a comparison, at least one; the others are there
LOST_RANK = 5  # a rank was killed, or does not answer the others
INTERRUPTED = 130  # what shells report for a command that Ctrl-C has ended

_RANK_COUNTS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")  # torchrun's and mpirun's
_LOADAVG = Path("/proc/loadavg")  # its fourth word: running threads / all threads


def refuse_ranks(command: str, distributed: Any = torch.distributed) -> None:
    """Raise if this process is one of several ranks: each would do all of a command's work."""
    counts = [os.environ.get(name, "") for name in _RANK_COUNTS]
    if distributed.is_available() and distributed.is_initialized():
        counts.append(str(distributed.get_world_size()))
    ranks = max([1, *(int(count) for count in counts if count.isdecimal())])
    if ranks > 1:
        raise ValueError(
            f"hotrow {command} was started as {ranks} ranks, each of which would do all of the "
            f"work by itself; only `hotrow train` and `hotrow compare` share theirs: start "
            f"`hotrow {command}` once, without torchrun or mpirun"
        )


def use_threads(
    run: RunSection,
    warn: Callable[[str], None],
    *,
    cores: int | None = None,
    busy: float | None = None,
) -> None:
    """Set the run's number of threads. If the run leaves it to torch, warn when other programs keep
    the cores busy: torch's threads wait for each other, and each waits for a core."""
    if run.threads is not None:
        torch.set_num_threads(run.threads)
        return
    threads, cores = torch.get_num_threads(), cores or os.cpu_count() or 1
    busy = min(busy_cores() if busy is None else busy, cores)
    if run.device == "cpu" and threads > 1 and cores - busy < threads / 2:
        which, rest = f"{busy:.1f} of {cores} cores", "the rest"
        if busy == cores:
            which, rest = "both cores" if cores == 2 else f"all {cores} cores", "them"
        warn(
            f"other programs keep {which} busy, and {threads} threads that share {rest} can be "
            "many times slower than one; --set run.threads=1 avoids that"
        )


def busy_cores(loadavg: Path = _LOADAVG, load: float | None = None) -> float:
    """Return how many cores other programs use: in the last minute and now, whichever is less. The
    load of the last minute may be that of a run that has ended."""
    load = os.getloadavg()[0] if load is None else load
    try:
        running = loadavg.read_text().split()[3].partition("/")[0]
        return min(load, int(running) - 1)  # without this program
    except (OSError, ValueError, IndexError):  # not Linux
        return load
