"""How many threads torch computes with."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from hotrow.run.config import RunSection


def use_threads(run: RunSection, tell: Callable[[str], None]) -> None:
    """Those of the run. Torch's own choice is told where others need the cores: its threads wait
    for each other, and each waits for a core."""
    if run.threads is not None:
        torch.set_num_threads(run.threads)
        return
    threads, load, cores = torch.get_num_threads(), os.getloadavg()[0], os.cpu_count() or 1
    if run.device == "cpu" and threads > 1 and load > cores / 2:
        tell(
            f"other programs keep {load:.1f} of {cores} cores busy, and {threads} threads that "
            "share the rest can be many times slower than one; --set run.threads=1 avoids that"
        )
