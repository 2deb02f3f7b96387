"""Suites that compare systems: each setting is trained by one system after the other.

Knows how systems are built and timed, one in memory at a time; what they are is in `systems`.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from typing import Any

import torch
from dense import Dense, DenseOptions
from harness import (
    LEAST_STEPS,
    RESULTS,
    Deadline,
    Session,
    device_for,
    hbm,
    link_floor_ms,
    link_rates,
    parser,
    read_results,
    reset_hbm,
    say,
    time_steps,
)
from hostmem import HostMemory
from torch import Tensor
from traces import NUM_DENSE, Trace, steps_to_fill

from hotrow.embedding.arguments import FILLS
from hotrow.engine import tuning
from systems import SYSTEMS, System

GIB = 2**30
MOST_ROW_BYTES = 100 * GIB  # the machine has 128
SHORT_WARMUP = 50  # of systems without a cache
COUNTED_STEPS = 50  # after the timed ones, for counting rows
STORE_SECONDS = 0.25  # per GiB of rows: to touch, page-lock and start them, at the most


@dataclass(frozen=True)
class Setting:
    """Tables, lookups and budget; what varies from run to run."""

    name: str
    rows: tuple[int, ...]
    dim: int = 64
    batch: int = 8192
    hotness: int | tuple[int, ...] = 1  # ids per sample and table, or for each table
    skew: float = 1.05
    budget: float = 0.05  # of the bytes of all rows with their state
    optimizer: str = "sgd"
    output: str = "bfloat16"
    has_dense: bool = True  # a dense part follows, else gradients are given
    is_pooled: bool = True  # else each lookup gives a vector; one id per sample
    model: str = "dlrm"  # or "dcnv2"
    least_warmup: int = 400  # steps of systems with a cache, even if it is full earlier
    tail: int = 320  # batches after the timed ones, so that looking ahead never meets the end

    @property
    def hot(self) -> tuple[int, ...]:
        """Ids per sample, by table."""
        each = self.hotness
        return (each,) * len(self.rows) if isinstance(each, int) else each

    @property
    def state_width(self) -> int:
        widths = {"sgd": 0, "rowwise-adagrad": 1, "adagrad": self.dim, "adam": 2 * self.dim}
        return widths[self.optimizer]

    @property
    def total_bytes(self) -> int:
        return 4 * (self.dim + self.state_width) * sum(self.rows)

    @property
    def budget_bytes(self) -> int:
        return int(self.budget * self.total_bytes)

    @property
    def warmup(self) -> int:
        """Steps until caches are full, and no fewer than `least_warmup`."""
        slots, draws = self.budget * sum(self.rows), self.batch * sum(self.hot) // len(self.hot)
        return max(self.least_warmup, steps_to_fill(slots, self.rows, self.skew, draws))

    @property
    def output_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.output]

    def facts(self) -> dict[str, Any]:
        """For a result's line: everything but the list of tables."""
        facts = asdict(self)
        facts["tables"], facts["rows"] = len(self.rows), sum(self.rows)
        facts["lookups"] = self.batch * sum(self.hot)
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
        counted: int = COUNTED_STEPS,
        fill: str = "auto",
        tuning: dict[str, int] | None = None,
    ) -> None:
        self.setting, self.device, self.options = setting, device, options
        self.warmup, self.timed, self.counted, self.fill = warmup, timed, counted, fill
        self.tuning = tuning or {}
        if options.compile:
            import torch._dynamo

            # One after the other, many systems compile the same code; none may fall back.
            torch._dynamo.config.recompile_limit = 64

    @property
    def trace_key(self) -> tuple[object, ...]:
        """Settings for which this is the same have the same batches."""
        s = self.setting
        return s.rows, s.batch, s.skew, s.hotness, self.warmup + self.timed + s.tail

    @cached_property
    def trace(self) -> Trace:
        started = time.perf_counter()
        s = self.setting
        trace = Trace(
            s.rows,
            steps=self.warmup + self.timed + s.tail,
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
            s.batch, NUM_DENSE, len(s.rows), s.dim, device=self.device, options=self.options,
            model=s.model,
        )  # fmt: skip
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

    def hand_trace_to(self, other: Bench) -> None:
        if self.trace_key == other.trace_key and "trace" in self.__dict__:
            other.__dict__["trace"] = self.__dict__.pop("trace")

    def free_host_memory(self) -> None:
        """Until a peer asks for it again."""
        if "host_memory" in self.__dict__:
            self.__dict__.pop("host_memory").close()

    def close(self) -> None:
        self.free_host_memory()
        if "trace" in self.__dict__:
            self.__dict__.pop("trace").close()
        self.__dict__.pop("dense", None)
        self.__dict__.pop("given_gradient", None)
        clean_up()


def clean_up() -> None:
    """Free what is no longer referenced, in both memories."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def measure(bench: Bench, name: str, deadline: Deadline) -> dict[str, Any]:
    """Build one system, train, time, take apart."""
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
            "options": {**asdict(bench.options), "fill": bench.fill, "tuning": bench.tuning},
            "step_ms": asdict(timing),
            "samples_per_second": bench.setting.batch / timing.whole.mean * 1000,
            "warmup_steps": warmup,
            "hbm_bytes": {"tables": system.table_bytes(), **hbm(bench.device)},
            "startup_seconds": startup,
            "facts": system.facts(steps),
        }
    finally:
        steps.close()


def one_line(measured: dict[str, Any], rates: dict[int, float]) -> str:
    ms, tables = measured["step_ms"], measured["hbm_bytes"]["tables"]
    whole = ms["whole"]
    floor = link_floor_ms(measured, rates)
    beside = "" if not floor else f"; random rows {floor:.3f} ms, {ms['p50'] / floor:.2f} times"
    return (
        f"{whole['mean']:8.3f} ms on the mean of {whole['steps']:,} steps (p50 {whole['p50']:.3f}, "
        f"p99 {whole['p99']:.3f}, longest {whole['longest']:.1f}; fastest window {ms['mean']:.3f}) "
        f"{measured['samples_per_second'] / 1e6:6.2f} M samples/s "
        f"{tables / GIB:6.2f} GiB{beside}"
    )


# -- the command -----------------------------------------------------------------------


@dataclass(frozen=True)
class Suite:
    """A list of settings and the systems that run each by default."""

    name: str
    description: str
    settings: tuple[Setting, ...]  # the most valuable first
    default: dict[str, tuple[str, ...]]  # setting -> systems; "*": all settings not named
    systems: tuple[str, ...]  # every one that can run here, the most valuable first

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

    @property
    def steps(self) -> int:
        kind = SYSTEMS[self.system]
        warmup = self.setting.warmup if kind.is_cached else SHORT_WARMUP
        return 3 + 20 if kind.is_slow else warmup + 200 + COUNTED_STEPS

    @property
    def seconds(self) -> float:
        """A rough guess, on the safe side: to know what fits into the minutes."""
        s, kind = self.setting, SYSTEMS[self.system]
        lookups = s.batch * sum(s.hot) / (8192 * 26)
        start = 5 + STORE_SECONDS * s.total_bytes / GIB * kind.has_store
        return start + self.steps * kind.target_ms / 1000 * max(0.5, lookups)


def main(suite: Suite) -> None:
    arguments = _arguments(suite)
    runs = suite.runs(arguments.only, arguments.systems, arguments.all)
    if not runs:
        raise SystemExit("no run has such a name; --list --all shows them")
    if arguments.missing:
        runs = _without_results(runs, suite, arguments)
    if arguments.list:
        for run in runs:
            gib = run.setting.total_bytes / GIB
            print(f"{run.name:34} {gib:5.1f} GiB {run.steps:5,} steps, ~{run.seconds:.0f} s")
        print(f"{len(runs)} runs, ~{sum(run.seconds for run in runs) / 60:.1f} minutes")
        return
    if arguments.isolate:
        raise SystemExit(_in_processes(runs, Deadline(arguments.minutes)))
    raise SystemExit(_in_this_process(suite, runs, arguments))


def _arguments(suite: Suite) -> argparse.Namespace:
    made = parser(suite.description)
    made.add_argument("--only", nargs="+", default=[], metavar="NAME", help="setting[/system]")
    made.add_argument("--systems", nargs="+", default=[], metavar="NAME", help="only these")
    made.add_argument("--all", action="store_true", help="every system in every setting")
    made.add_argument("--missing", action="store_true", help="only what has no result as yet")
    made.add_argument("--list", action="store_true", help="say what would run, and end")
    made.add_argument("--isolate", action="store_true", help="a process for each run")
    add_bench_options(made)
    return made.parse_args()


def add_bench_options(made: argparse.ArgumentParser) -> None:
    """What `bench_for` asks for."""
    made.add_argument("--timed", type=int, default=300, help="steps that are timed")
    made.add_argument("--warmup", type=int, help="steps before them; else until caches are full")
    made.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    made.add_argument("--no-graphs", action="store_true", help="capture no CUDA graphs")
    made.add_argument(
        "--interaction",
        choices=("plain", "fused"),
        default="plain",
        help="of the dense part's vectors: PyTorch's operations, or hotrow's kernel",
    )
    made.add_argument("--fill", choices=FILLS, default="auto", help="how hotrow's rows move")
    made.add_argument(
        "--tuning",
        nargs="+",
        default=[],
        metavar="NAME=NUMBER",
        help="other numbers of hotrow.engine.tuning, such as places_on_host=16",
    )
    made.add_argument(
        "--masters",
        choices=("plain", "hotrow"),
        default="plain",
        help="who updates float32 masters of dense weights: compiled SGD, or hotrow",
    )


def _without_results(runs: list[Run], suite: Suite, arguments: argparse.Namespace) -> list[Run]:
    """Those that neither the folder for results nor the one that is kept has."""
    known = {
        (line["run"], line["system"])
        for folder in (arguments.results, RESULTS)
        for line in read_results(folder / f"{suite.name}.jsonl")
    }
    return [run for run in runs if (run.setting.name, run.system) not in known]


def _in_processes(runs: Sequence[Run], deadline: Deadline) -> int:
    """Each run by this same command, so that no memory or compiled code is shared."""
    failed = 0
    for run in runs:
        if 60 * deadline.minutes_left < run.seconds:
            say(f"{run.name:34} not measured: the minutes are over")
            continue
        failed += subprocess.run(_command([run], deadline)).returncode != 0
    return int(failed > 0)


def _go_on_in_a_new_process(runs: Sequence[Run], deadline: Deadline) -> None:
    """In place of this one: only its end gives back the memory that a lost context has locked."""
    if runs:
        say(f"the GPU's context is lost: a new process goes on with {len(runs)} runs")
        command = _command(runs, deadline)
        os.execv(command[0], command)


def _command(runs: Sequence[Run], deadline: Deadline) -> list[str]:
    """This command, for these runs only, in what is left of its time."""
    apart = ("--only", "--systems", "--minutes", "--isolate", "--all", "--missing")
    limit = ["--minutes", f"{deadline.minutes_left:.2f}"]
    names = [run.name for run in runs]
    options = _without(sys.argv[1:], *apart)
    return [sys.executable, sys.argv[0], "--only", *names, *limit, *options]


def _without(options: list[str], *names: str) -> list[str]:
    kept, leaving = [], False
    for option in options:
        if option.startswith("--"):
            leaving = option.split("=")[0] in names
        if not leaving:
            kept.append(option)
    return kept


def _in_this_process(suite: Suite, runs: list[Run], arguments: argparse.Namespace) -> int:
    session = Session(suite.name, arguments)
    rates = _link_rates(arguments)
    bench: Bench | None = None
    try:
        for place, run in enumerate(runs):
            if bench is None or bench.setting.name != run.setting.name:
                bench = _next_bench(bench, run.setting, arguments)
            say(f"{run.name}, {session.deadline.minutes_left:.1f} minutes left")
            session.attempt(
                run.setting.name,
                run.system,
                _measuring(bench, run.system, session.deadline),
                lambda measured: one_line(measured, rates),
                name=run.name,
                seconds=0 if arguments.smoke else run.seconds,
            )
            if not _gpu_answers():
                session.print_again()
                _go_on_in_a_new_process(runs[place + 1 :], session.deadline)
                break
            clean_up()
        if bench is not None:
            bench.close()
    finally:  # even when the GPU has stopped answering
        session.print_again()
    return int(session.failed > 0)


def _link_rates(arguments: argparse.Namespace) -> dict[int, float]:
    kept, new = (read_results(folder / "ceilings.jsonl") for folder in (RESULTS, arguments.results))
    return {} if arguments.smoke else link_rates(kept) | link_rates(new)


def _measuring(bench: Bench, system: str, deadline: Deadline) -> Callable[[], dict[str, Any]]:
    return lambda: measure(bench, system, deadline)


def _gpu_answers() -> bool:
    """False after an error that no later call in this process survives."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _next_bench(before: Bench | None, setting: Setting, arguments: argparse.Namespace) -> Bench:
    bench = bench_for(setting, arguments)
    if before is not None:
        before.hand_trace_to(bench)
        before.close()
    return bench


def bench_for(setting: Setting, arguments: argparse.Namespace) -> Bench:
    assert setting.total_bytes <= MOST_ROW_BYTES, f"{setting.name} has too many bytes of rows"
    device, timed, counted = device_for(arguments), arguments.timed, COUNTED_STEPS
    warmup = setting.warmup if arguments.warmup is None else arguments.warmup
    if arguments.smoke:
        setting, timed, counted, warmup = tiny(setting), LEAST_STEPS, 2, min(warmup, 5)
    options = DenseOptions(
        compile=not (arguments.no_compile or arguments.smoke),
        graphs=not arguments.no_graphs,
        interaction=arguments.interaction,
        masters=arguments.masters,
    )
    return Bench(
        setting,
        device=device,
        options=options,
        warmup=warmup,
        timed=timed,
        counted=counted,
        fill=arguments.fill,
        tuning=tuned(arguments.tuning),
    )


def tuned(given: Sequence[str]) -> dict[str, int]:
    """Let collections that are built from now on use these numbers; return them."""
    numbers = {name: int(value) for name, _, value in (each.partition("=") for each in given)}
    tuning.DEFAULT = replace(tuning.DEFAULT, **numbers)
    return numbers


def tiny(setting: Setting) -> Setting:
    rows = tuple(min(each, 5000) for each in setting.rows)
    return replace(setting, rows=rows, batch=32, budget=max(setting.budget, 0.2), tail=40)
