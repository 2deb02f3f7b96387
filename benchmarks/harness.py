"""What the suites share: time limits, step times, where results go. Knows no system and no model.

A step's time is the distance between two marks, set on the main stream when a step's work has been
launched: whatever overlaps with training costs nothing, whatever delays it counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Exact runs need it, cuBLAS reads it once, and all systems shall have the same.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

RESULTS = Path(__file__).parent / "results"
LEAST_STEPS = 10  # fewer give no percentiles worth writing down
_STARTED = time.monotonic()


def say(text: str) -> None:
    """Progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _STARTED:6.1f}] {text}", flush=True)


class OutOfTime(Exception):
    """The minutes granted are over."""


class Deadline:
    """Minutes granted to a whole command."""

    def __init__(self, minutes: float) -> None:
        self._end = _STARTED + 60 * minutes

    @property
    def minutes_left(self) -> float:
        return (self._end - time.monotonic()) / 60

    def check(self) -> None:
        if self.minutes_left <= 0:
            raise OutOfTime


class Marks:
    """Points in time on a device's main stream."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._on_gpu = device.type == "cuda"
        self._events = [
            torch.cuda.Event(enable_timing=True) for _ in range(count if self._on_gpu else 0)
        ]
        self._seconds: list[float] = []
        self._count = 0

    def set(self) -> None:
        if self._on_gpu:
            self._events[self._count].record()
        else:
            self._seconds.append(time.perf_counter())
        self._count += 1

    def milliseconds(self) -> list[float]:
        """Between each mark and the next."""
        if not self._on_gpu:
            return [1000 * float(each) for each in np.diff(self._seconds)]
        torch.cuda.synchronize()
        events = self._events[: self._count]
        return [a.elapsed_time(b) for a, b in pairwise(events)]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of steps."""

    p20: float
    p50: float
    p80: float
    mean: float
    steps: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> Timing:
        p20, p50, p80 = (float(each) for each in np.percentile(milliseconds, (20, 50, 80)))
        return cls(p20, p50, p80, float(np.mean(milliseconds)), len(milliseconds))


def time_steps(
    steps: Iterator[object], *, warmup: int, timed: int, device: torch.device, deadline: Deadline
) -> Timing:
    """Take `warmup` steps, then time `timed`; an early deadline leaves as many as there were."""
    said = time.monotonic()
    for done in range(warmup):
        next(steps)
        deadline.check()
        if time.monotonic() - said > 5:
            said = time.monotonic()
            say(f"    warm-up {done + 1:,} of {warmup:,} steps")
    marks = Marks(device, timed + 1)
    marks.set()
    taken = 0
    while taken < timed and (taken < LEAST_STEPS or deadline.minutes_left > 0):
        next(steps)
        marks.set()
        taken += 1
    return Timing.of(marks.milliseconds())


def hbm(device: torch.device) -> dict[str, int]:
    """Bytes of the GPU's memory, since `reset_hbm`."""
    if device.type != "cuda":
        return {}
    return {
        "allocated_peak": torch.cuda.max_memory_allocated(),
        "reserved_peak": torch.cuda.max_memory_reserved(),
    }


def reset_hbm(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# -- results ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """A suite's results, one line of JSON each, written as they come."""

    suite: str
    folder: Path
    commit: str

    def write(self, run: str, system: str, measured: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        line = {
            "suite": self.suite,
            "run": run,
            "system": system,
            **measured,
            "environment": environment(),
            "commit": self.commit,
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with (self.folder / f"{self.suite}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@cache
def environment() -> dict[str, Any]:
    """What a later reader needs to know about the machine and the software."""
    import hotrow

    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _package("triton"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "hotrow": hotrow.__version__,
    }


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().split("\n")[0] or None


# -- the command line ------------------------------------------------------------------


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every suite has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--minutes", type=float, default=25, help="stop in time")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder for <suite>.jsonl")
    made.add_argument(
        "--commit",
        default=os.environ.get("COMMIT"),
        help="of the code measured; else $COMMIT, else what git says",
    )
    return made


def results_for(suite: str, arguments: argparse.Namespace) -> Results:
    commit = arguments.commit or _first_line(
        "git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"
    )
    return Results(suite, arguments.results, commit or "unknown")


def keeps_results(arguments: argparse.Namespace) -> bool:
    """Tiny runs are no results, unless somebody names a folder for them."""
    return not arguments.smoke or arguments.results != RESULTS


def need_gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise SystemExit("this suite needs a CUDA device")
    return torch.device("cuda")


def quantiles_of(function: Callable[[], object]) -> tuple[float, float, float]:
    """p20, p50, p80 in milliseconds of a kernel, its inputs not in the cache."""
    from triton.testing import do_bench

    p20, p50, p80 = do_bench(function, warmup=20, rep=100, quantiles=[0.2, 0.5, 0.8])
    return p20, p50, p80
