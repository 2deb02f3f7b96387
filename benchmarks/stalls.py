"""The longest of many steps, from the first one on, with no kernel compiled beforehand.

    python benchmarks/stalls.py --only target --cold

`lookahead`, all rows written, and `all-fast` train in turns, a window of steps each, so that what
slows the whole machine slows both. Each step is timed; of long ones the number is kept, and the
kernels that Triton compiled meanwhile. `settled` is the first step from which the means of 50 stay
within 5 % of the mean of the second half.
"""

from __future__ import annotations

import os
import sys
import tempfile

if "--cold" in sys.argv:  # Triton reads it when it is imported
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="cold-kernels-")

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from harness import Marks, Session, parser, say
from suite import Bench, add_bench_options, bench_for
from terabyte import SETTINGS

from systems import SYSTEMS

NAMES = ("hotrow-lookahead-written", "hotrow-all-fast")
WINDOW = 250  # steps of one system, before it is the other's turn
LONG = 3.0  # medians
BEGINNING = 50  # steps that may compile and capture
SETTLED, WITHIN = 50, 0.05
MOST_LISTED = 40


@dataclass
class Trained:
    """One system's steps so far."""

    name: str
    steps: Iterator[object]
    taken: int = 0
    ms: list[float] = field(default_factory=list)
    compiled: list[tuple[int, str]] = field(default_factory=list)  # step and kernel

    def window(self, size: int, device: torch.device) -> None:
        """Train `size` steps; the device has nothing else to do."""
        marks = Marks(device, size + 1)
        marks.set()
        for _ in range(size):
            next(self.steps)
            marks.set()
            self.taken += 1
        self.ms += marks.milliseconds()


def listen(current: list[Trained]) -> None:
    """Note each kernel that Triton compiles with the system that trains, the only one in a list."""
    from triton import knobs

    def compiled(*_: Any, repr: str = "", fn: Any = None, **__: Any) -> None:
        for each in current:
            each.compiled.append((each.taken, repr or str(fn)))

    knobs.runtime.jit_post_compile_hook = compiled


def facts_of(trained: Trained) -> dict[str, Any]:
    """Return what a result tells of a system's steps."""
    ms = np.array(trained.ms)
    later = ms[BEGINNING:]
    p50, p99, p999 = np.percentile(later, (50, 99, 99.9)).tolist()
    long = np.flatnonzero(ms > LONG * p50)
    return {
        "steps": len(ms),
        "mean": float(later.mean()),
        "p50": p50,
        "p99": p99,
        "p99.9": p999,
        "longest": float(later.max()),
        "longest / p50": float(later.max()) / p50,
        "p99.9 / p50": p999 / p50,
        "long_steps": [[int(step), round(float(ms[step]), 3)] for step in long[:MOST_LISTED]],
        "num_long_steps": len(long),
        "settled": settled(ms),
        "compiled": trained.compiled[:MOST_LISTED],
        "num_compiled_late": sum(step >= BEGINNING for step, _ in trained.compiled),
    }


def settled(ms: Sequence[float] | np.ndarray) -> int:
    """Return the first step from which the means of so many stay close to the steady state."""
    ms = np.asarray(ms)
    steady = ms[len(ms) // 2 :].mean()
    count = len(ms) // SETTLED
    means = ms[: count * SETTLED].reshape(count, SETTLED).mean(axis=1)
    outside = np.flatnonzero(np.abs(means - steady) > WITHIN * steady)
    return int(SETTLED * (outside[-1] + 1)) if len(outside) else 0


def measure(bench: Bench, names: Sequence[str], steps: int, session: Session) -> dict[str, Any]:
    current: list[Trained] = []
    if bench.device.type == "cuda":
        listen(current)
    trained = []
    for name in names:
        system = SYSTEMS[name].build(bench)
        batches = bench.trace.batches(0, bench.trace.steps)
        trained.append(Trained(name, iter(system.steps(batches))))
        say(f"    {name} is built")
    window = min(WINDOW, steps)
    for first in range(0, steps, window):
        if first and session.deadline.minutes_left <= 0:
            break
        for each in trained:
            current[:] = [each]
            each.window(min(window, steps - first), bench.device)
    current.clear()
    for each in trained:
        each.steps.close()  # type: ignore[attr-defined]
    found = {each.name: facts_of(each) for each in trained}
    del trained, each
    gc.collect()
    return {"setting": bench.setting.facts(), "cold": "--cold" in sys.argv, "systems": found}


def one_line(measured: dict[str, Any]) -> str:
    parts = [
        f"{name}: p50 {each['p50']:.3f} ms, p99.9 {each['p99.9 / p50']:.2f} and longest "
        f"{each['longest / p50']:.1f} times that, {each['num_long_steps']} above {LONG:g}, settled "
        f"at {each['settled']:,}, {each['num_compiled_late']} compiled late"
        for name, each in measured["systems"].items()
    ]
    return "; ".join(parts)


def _arguments() -> argparse.Namespace:
    made = parser(__doc__.split("\n")[0])
    made.add_argument("--only", nargs="+", default=["target", "adam"], help="of terabyte.py")
    made.add_argument("--steps", type=int, default=10_000, help="of each system")
    made.add_argument("--systems", nargs="+", default=list(NAMES))
    made.add_argument("--cold", action="store_true", help="compile every kernel anew")
    add_bench_options(made)
    return made.parse_args()


def main() -> None:
    given = _arguments()
    steps = 120 if given.smoke else given.steps
    session = Session("stalls", given)
    for setting in SETTINGS:
        if setting.name in given.only:
            given.timed, given.warmup = steps, 0
            bench = bench_for(setting, given)
            bench.timed = steps
            session.attempt(
                setting.name,
                "hotrow",
                lambda bench=bench: measure(bench, given.systems, steps, session),
                one_line,
            )
            bench.close()
    session.print_again()
    raise SystemExit(1 if session.failed else 0)


if __name__ == "__main__":
    main()
