"""What the suites share: time limits, step times, where results go. Knows no system and no model.

A step's time is the distance between two marks, set on the main stream when a step's work has been
launched: whatever overlaps with training costs nothing, whatever delays it counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cores import on_fast_cores

# Exact runs need it, cuBLAS reads it once, and all systems shall have the same.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

RESULTS = Path(__file__).parent / "results"
LEAST_STEPS = 10  # fewer give no percentiles worth writing down
WINDOWS, PAUSE = 3, 0.25  # and seconds between them
_STARTED = time.monotonic()


def say(text: str) -> None:
    """Progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _STARTED:6.1f}] {text}", flush=True)


class OutOfTime(Exception):
    """The minutes granted are over."""


class Unavailable(Exception):
    """What is to be measured cannot run here, and why."""


class Deadline:
    """Minutes granted to a whole command."""

    def __init__(self, minutes: float) -> None:
        self._end = _STARTED + 60 * minutes

    @property
    def minutes_left(self) -> float:
        return (self._end - time.monotonic()) / 60

    def check(self, seconds: float = 0.0) -> None:
        """Raises unless there are so many seconds left."""
        if 60 * self.minutes_left <= seconds:
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
    p99: float
    longest: float
    medians: tuple[float, ...] = ()  # of all windows, of which this is one
    whole: Timing | None = None  # all steps of all windows: the figure to report

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Timing:
        p20, p50, p80, p99 = np.percentile(milliseconds, (20, 50, 80, 99)).tolist()
        mean, longest = float(np.mean(milliseconds)), max(milliseconds)
        return cls(p20, p50, p80, mean, len(milliseconds), p99, longest)

    @classmethod
    def best_of(cls, windows: Sequence[Sequence[float]]) -> Timing:
        timings = [cls.of(window) for window in windows]
        best = min(timings, key=lambda timing: timing.p50)
        whole = cls.of([ms for window in windows for ms in window])
        return replace(best, medians=tuple(timing.p50 for timing in timings), whole=whole)


def time_steps(
    steps: Iterator[object], *, warmup: int, timed: int, device: torch.device, deadline: Deadline
) -> Timing:
    """Take `warmup` steps, then time `timed`; an early deadline leaves as many as there were.

    In windows, each on cores that are fast at its start: see cores.py.
    """
    said = time.monotonic()
    for done in range(warmup):
        next(steps)
        deadline.check()
        if time.monotonic() - said > 5:
            said = time.monotonic()
            say(f"    warm-up {done + 1:,} of {warmup:,} steps")
    size = timed // WINDOWS if timed >= WINDOWS * LEAST_STEPS else timed
    windows: list[list[float]] = []
    for _ in range(timed // size):
        if windows:
            if deadline.minutes_left <= 0:
                break
            time.sleep(PAUSE)
        with on_fast_cores():
            windows.append(_time_window(steps, size, device, deadline))
    return Timing.best_of(windows)


def _time_window(
    steps: Iterator[object], size: int, device: torch.device, deadline: Deadline
) -> list[float]:
    marks = Marks(device, size + 1)
    marks.set()
    taken = 0
    while taken < size and (taken < LEAST_STEPS or deadline.minutes_left > 0):
        next(steps)
        marks.set()
        taken += 1
    return marks.milliseconds()


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


class Session:
    """Measures one thing after another: what fails, or has no time, hinders nothing after it."""

    def __init__(self, suite: str, arguments: argparse.Namespace) -> None:
        self.results, self.deadline = results_for(suite, arguments), Deadline(arguments.minutes)
        self._keeps = keeps_results(arguments)
        self._lines: list[str] = []
        self.failed = 0

    def attempt(
        self,
        run: str,
        system: str,
        measure: Callable[[], dict[str, Any]],
        one_line: Callable[[dict[str, Any]], str],
        *,
        name: str | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Measure, write and say one result; not begun with less than `seconds` left."""
        name = name or run
        try:
            self.deadline.check(seconds)
            measured = measure()
        except OutOfTime:
            self.say(f"{name:34} not measured: the minutes are over")
        except Unavailable as reason:
            self.say(f"{name:34} left out: {reason}")
        except Exception as error:
            self.failed += 1
            traceback.print_exc(file=sys.stdout)
            self.say(f"{name:34} FAILED: {error}")
        else:
            if self._keeps:
                self.results.write(run, system, measured)
            self.say(f"{name:34} {one_line(measured)}")

    def say(self, line: str) -> None:
        """Now, and again at the end."""
        self._lines.append(line)
        say(line)

    def print_again(self) -> None:
        print("\n" + "\n".join(self._lines), flush=True)


# -- what was measured before ----------------------------------------------------------


def read_results(path: Path) -> list[dict[str, Any]]:
    """The newest line of each run and system, in the order they first came."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            key = line["run"], line["system"]
            if key not in newest or line["date"] >= newest[key]["date"]:
                newest[key] = line
    return list(newest.values())


def link_rates(ceilings: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Rows per second that cross the link at best, both ways together, by the bytes of a row."""
    found = {}
    for line in ceilings:
        match = re.fullmatch(r"zero-copy both, rows of (\d+) bytes", line["run"])
        if match:
            found[int(match[1])] = 1e6 * line["value"]
    return found


def link_floor_ms(measured: dict[str, Any], rates: dict[int, float]) -> float | None:
    """The least time for the rows that cross, where a rate for about their size was measured."""
    facts, setting = measured["facts"], measured["setting"]
    if "floor_ms" in facts:
        return float(facts["floor_ms"]["sum"])
    row_bytes = setting["total_bytes"] / setting["rows"]
    size = min(rates, key=lambda each: abs(each - row_bytes), default=0)
    if abs(size - row_bytes) > 0.1 * row_bytes or "fetched_rows_per_step" not in facts:
        return None
    read = facts["fetched_rows_per_step"] - facts.get("made_rows_per_step", 0)
    return 1000 * (read + facts["evicted_rows_per_step"]) / rates[size]


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
    made.add_argument("--smoke", action="store_true", help="tiny, on the CPU: does it run at all?")
    return made


def results_for(suite: str, arguments: argparse.Namespace) -> Results:
    commit = arguments.commit or _first_line(
        "git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"
    )
    return Results(suite, arguments.results, commit or "unknown")


def keeps_results(arguments: argparse.Namespace) -> bool:
    """Tiny runs are no results, unless a folder for them is named."""
    return not arguments.smoke or arguments.results != RESULTS


def device_for(arguments: argparse.Namespace) -> torch.device:
    """Triton's kernels can be tried on a CPU with TRITON_INTERPRET=1."""
    if arguments.smoke:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --smoke tries the suite on the CPU")
    return torch.device("cuda")


def quantiles_of(
    function: Callable[[], object], device: torch.device
) -> tuple[float, float, float]:
    """p20, p50, p80 in milliseconds of a kernel, its inputs not in the cache."""
    if device.type == "cpu":
        started = time.perf_counter()
        function()
        return (1000 * (time.perf_counter() - started),) * 3
    from triton.testing import do_bench

    launch = _captured(function) or function  # from Python, launches take longer than kernels
    p20, p50, p80 = do_bench(launch, warmup=20, rep=100, quantiles=[0.2, 0.5, 0.8])
    return p20, p50, p80


def _captured(function: Callable[[], object]) -> Callable[[], None] | None:
    """The same launches as one, or None where a function waits for the device."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay
