"""Suites that compare systems: each setting is trained by one system after the other.

Knows how systems are built and timed, one in memory at a time; what they are is in `systems`.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from typing import Any

import torch
from dense import Dense, DenseOptions
from harness import (
    RESULTS,
    Deadline,
    OutOfTime,
    hbm,
    parser,
    reset_hbm,
    results_for,
    say,
    time_steps,
)
from hostmem import HostMemory
from systems import SYSTEMS, System, Unavailable
from torch import Tensor
from traces import NUM_DENSE, Trace, steps_to_fill

from hotrow.embedding import FILLS

GIB = 2**30
MOST_ROW_BYTES = 100 * GIB  # the machine has 128
LEAST_WARMUP = 400  # of systems with a cache
SHORT_WARMUP = 50  # of systems without
TAIL = 320  # batches after the timed ones, so that looking ahead never meets the end
START_MINUTES = 0.5  # with less than this left no system is started


@dataclass(frozen=True)
class Setting:
    """Tables, lookups and budget; what varies from run to run."""

    name: str
    rows: tuple[int, ...]
    dim: int = 64
    batch: int = 8192
    hotness: int = 1  # ids per sample and table
    skew: float = 1.05
    budget: float = 0.05  # of the bytes of all rows with their state
    optimizer: str = "sgd"
    output: str = "bfloat16"
    has_dense: bool = True  # a DLRM's dense part follows, else gradients are given

    @property
    def state_width(self) -> int:
        return {"sgd": 0, "rowwise-adagrad": 1, "adam": 2 * self.dim}[self.optimizer]

    @property
    def total_bytes(self) -> int:
        return 4 * (self.dim + self.state_width) * sum(self.rows)

    @property
    def budget_bytes(self) -> int:
        return int(self.budget * self.total_bytes)

    @property
    def output_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.output]

    def facts(self) -> dict[str, Any]:
        """For a result's line: everything but the list of tables."""
        facts = asdict(self)
        facts["tables"], facts["rows"] = len(self.rows), sum(self.rows)
        return facts | {"total_bytes": self.total_bytes, "budget_bytes": self.budget_bytes}


class Bench:
    """One setting's batches, dense part and host memory, for the systems that run it in turn."""

    def __init__(
        self,
        setting: Setting,
        *,
        device: torch.device,
        options: DenseOptions,
        warmup: int,
        timed: int,
        fill: str = "auto",
    ) -> None:
        self.setting, self.device, self.options = setting, device, options
        self.warmup, self.timed, self.fill = warmup, timed, fill
        if options.compile:
            import torch._dynamo

            # One after the other, many systems compile the same code; none may fall back.
            torch._dynamo.config.recompile_limit = 64

    @cached_property
    def trace(self) -> Trace:
        started = time.perf_counter()
        s = self.setting
        trace = Trace(
            s.rows,
            steps=self.warmup + self.timed + TAIL,
            batch=s.batch,
            skew=s.skew,
            hotness=s.hotness,
            lock=self.device.type == "cuda",
        )
        say(
            f"  {trace.steps:,} batches, {8 * trace.ids.numel() / GIB:.1f} GiB, in "
            f"{time.perf_counter() - started:.1f} s; {trace.unique_rows(0):,} rows in the first"
        )
        return trace

    @cached_property
    def dense(self) -> Dense:
        started = time.perf_counter()
        s = self.setting
        dense = Dense(
            s.batch, NUM_DENSE, len(s.rows), s.dim, device=self.device, options=self.options
        )
        say(f"    dense part made in {time.perf_counter() - started:.1f} s")
        return dense

    @cached_property
    def given_gradient(self) -> Tensor:
        """For embeddings alone: [B, F * D], the same in every step."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (self.setting.batch, len(self.setting.rows) * self.setting.dim)
        grad = torch.randn(shape, generator=generator, device=self.device)
        return (1e-3 * grad).to(self.setting.output_dtype)

    def gradient(self, vectors: Tensor, dense: Tensor, label: Tensor) -> Tensor:
        """What comes back for a batch's vectors, for systems that have no trainer."""
        if self.setting.has_dense:
            return self.dense.step(vectors, dense, label)
        return self.given_gradient

    @cached_property
    def host_memory(self) -> HostMemory:
        """For all rows of one peer after the other; touching and locking it takes long."""
        memory = HostMemory(self.setting.total_bytes + (1 << 20))
        seconds = memory.touch()
        if self.device.type == "cuda":
            seconds += memory.lock()
        say(f"    {memory.bytes.numel() / GIB:.1f} GiB of host memory in {seconds:.1f} s")
        return memory

    def close(self) -> None:
        for part in ("trace", "host_memory"):
            if part in self.__dict__:
                self.__dict__.pop(part).close()
        self.__dict__.pop("dense", None)
        self.__dict__.pop("given_gradient", None)
        clean_up()


def clean_up() -> None:
    """Whatever nobody refers to any more leaves both memories."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def measure(bench: Bench, name: str, deadline: Deadline) -> dict[str, Any]:
    """Build one system, train, time, take apart."""
    if deadline.minutes_left < START_MINUTES:
        raise OutOfTime
    kind, trace = SYSTEMS[name], bench.trace
    reset_hbm(bench.device)
    started = time.perf_counter()
    system: System = kind.build(bench)
    startup = time.perf_counter() - started
    say(f"    built in {startup:.1f} s")
    warmup = bench.warmup if kind.is_cached else SHORT_WARMUP
    timed = bench.timed
    if kind.is_slow:
        warmup, timed = 3, min(timed, 20)
    warmup = min(warmup, bench.warmup)
    first = bench.warmup - warmup  # so that all systems time the same batches
    steps = iter(system.steps(trace.batches(first, trace.steps)))
    try:
        timing = time_steps(
            steps, warmup=warmup, timed=timed, device=bench.device, deadline=deadline
        )
        return {
            "setting": bench.setting.facts(),
            "options": {**asdict(bench.options), "fill": bench.fill},
            "step_ms": asdict(timing),
            "samples_per_second": bench.setting.batch / timing.mean * 1000,
            "warmup_steps": warmup,
            "hbm_bytes": {"tables": system.table_bytes(), **hbm(bench.device)},
            "startup_seconds": startup,
            "facts": system.facts(steps),
        }
    finally:
        steps.close()


def one_line(name: str, measured: dict[str, Any]) -> str:
    ms, tables = measured["step_ms"], measured["hbm_bytes"]["tables"]
    return (
        f"{name:32} {ms['p50']:8.3f} ms ({ms['p20']:.3f}-{ms['p80']:.3f}, mean "
        f"{ms['mean']:.3f}) {measured['samples_per_second'] / 1e6:6.2f} M samples/s "
        f"{tables / GIB:6.2f} GiB"
    )


# -- the command -----------------------------------------------------------------------


@dataclass(frozen=True)
class Suite:
    """A list of settings and the systems that run each by default."""

    name: str
    description: str
    settings: tuple[Setting, ...]
    default: dict[str, tuple[str, ...]]  # setting -> systems; "*": all settings not named
    systems: tuple[str, ...]  # every one that can run here

    def runs(self, only: Sequence[str], systems: Sequence[str], everything: bool) -> list[Run]:
        """Setting by setting. A pattern names a setting, or setting/system."""
        chosen = []
        for setting in self.settings:
            usual = self.default.get(setting.name, self.default["*"])
            for system in self.systems:
                whole = f"{setting.name}/{system}"
                by_setting = any(fnmatch(setting.name, each) for each in only)
                by_name = any(fnmatch(whole, each) for each in only)
                by_system = any(fnmatch(system, each) for each in systems)
                usually = system in usual or everything or by_system
                if by_name or ((by_setting or not only) and usually and (by_system or not systems)):
                    chosen.append(Run(setting, system))
        return chosen


@dataclass(frozen=True)
class Run:
    setting: Setting
    system: str

    @property
    def name(self) -> str:
        return f"{self.setting.name}/{self.system}"


def main(suite: Suite) -> None:
    arguments = _arguments(suite)
    runs = suite.runs(arguments.only, arguments.systems, arguments.all)
    if not runs:
        raise SystemExit("no run has such a name; --list --all shows them")
    if arguments.list:
        for run in runs:
            print(f"{run.name:40} {run.setting.total_bytes / GIB:6.1f} GiB of rows")
        return
    deadline = Deadline(arguments.minutes)
    if arguments.isolate:
        raise SystemExit(_in_processes(runs, deadline))
    raise SystemExit(_in_this_process(suite, runs, arguments, deadline))


def _arguments(suite: Suite) -> argparse.Namespace:
    made = parser(suite.description)
    made.add_argument("--only", nargs="+", default=[], metavar="NAME", help="setting[/system]")
    made.add_argument("--systems", nargs="+", default=[], metavar="NAME", help="only these")
    made.add_argument("--all", action="store_true", help="every system in every setting")
    made.add_argument("--list", action="store_true", help="say what would run, and end")
    made.add_argument("--timed", type=int, default=200, help="steps that are timed")
    made.add_argument("--warmup", type=int, help="steps before them; else until caches are full")
    made.add_argument("--isolate", action="store_true", help="a process for each run")
    made.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    made.add_argument("--no-graphs", action="store_true", help="capture no CUDA graphs")
    made.add_argument("--interaction", choices=("plain", "fused"), default="plain")
    made.add_argument("--fill", choices=FILLS, default="auto", help="how hotrow's rows move")
    made.add_argument("--masters", choices=("plain", "hotrow"), default="plain")
    made.add_argument("--smoke", action="store_true", help="tiny, on the CPU: does it run at all?")
    return made.parse_args()


def _in_processes(runs: list[Run], deadline: Deadline) -> int:
    """Each run by this same command, so that no memory or compiled code is shared."""
    options = _without(sys.argv[1:], "--only", "--systems", "--minutes", "--isolate", "--all")
    failed = 0
    for run in runs:
        if deadline.minutes_left < START_MINUTES:
            break
        limit = ["--minutes", f"{deadline.minutes_left:.2f}"]
        command = [sys.executable, sys.argv[0], "--only", run.name, *limit, *options]
        failed += subprocess.run(command).returncode != 0
    return int(failed > 0)


def _without(options: list[str], *names: str) -> list[str]:
    kept, leaving = [], False
    for option in options:
        if option.startswith("--"):
            leaving = option.split("=")[0] in names
        if not leaving:
            kept.append(option)
    return kept


def _in_this_process(
    suite: Suite, runs: list[Run], arguments: argparse.Namespace, deadline: Deadline
) -> int:
    results, lines, failed = results_for(suite.name, arguments), [], False
    keeps = not arguments.smoke or arguments.results != RESULTS  # tiny runs are no results
    bench: Bench | None = None
    try:
        for run in runs:
            if bench is None or bench.setting.name != run.setting.name:
                if bench is not None:
                    bench.close()
                bench = _bench(run.setting, arguments)
            say(f"{run.name}, {deadline.minutes_left:.1f} minutes left")
            try:
                measured = measure(bench, run.system, deadline)
            except OutOfTime:
                lines.append(f"{run.name:32} not measured: the minutes are over")
            except Unavailable as reason:
                lines.append(f"{run.name:32} left out: {reason}")
            except Exception as error:
                failed = True
                traceback.print_exc(file=sys.stdout)
                lines.append(f"{run.name:32} FAILED: {error}")
            else:
                if keeps:
                    results.write(run.setting.name, run.system, measured)
                lines.append(one_line(run.name, measured))
            say(lines[-1])
            clean_up()
        if bench is not None:
            bench.close()
    finally:  # even when the GPU has stopped answering
        print("\n" + "\n".join(lines), flush=True)
    return int(failed)


def _bench(setting: Setting, arguments: argparse.Namespace) -> Bench:
    assert setting.total_bytes <= MOST_ROW_BYTES, f"{setting.name} has too many bytes of rows"
    timed, device = arguments.timed, torch.device("cuda")
    if arguments.smoke:
        setting = tiny(setting)
        timed, device = min(timed, 12), torch.device("cpu")
    elif not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --smoke tries the suite on the CPU")
    warmup = arguments.warmup
    if warmup is None:
        slots = setting.budget * sum(setting.rows)
        draws = setting.batch * setting.hotness
        warmup = max(LEAST_WARMUP, steps_to_fill(slots, setting.rows, setting.skew, draws))
    if arguments.smoke:
        warmup = min(warmup, 20)
    options = DenseOptions(
        compile=not arguments.no_compile,
        graphs=not arguments.no_graphs,
        interaction=arguments.interaction,
        masters=arguments.masters,
    )
    return Bench(
        setting, device=device, options=options, warmup=warmup, timed=timed, fill=arguments.fill
    )


def tiny(setting: Setting) -> Setting:
    rows = tuple(min(each, 5000) for each in setting.rows)
    return replace(setting, rows=rows, batch=128, budget=max(setting.budget, 0.2))
