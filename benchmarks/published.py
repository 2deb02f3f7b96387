"""The four published systems beside their bars, ours, and what arithmetic allows.

    python benchmarks/published.py --list
    python benchmarks/published.py --only terabyte --minutes 9
    python benchmarks/published.py --only kaggle fae 'slipstream-*'

`terabyte` is terabyte.py's target (204 M rows of 64 floats, batch 8192, power law 1.05, SGD, 5 % of
the bytes in HBM), `kaggle` has the tables of Criteo Kaggle, dimension 16 and batches of 2048. All
systems train the same dense part on batches of the same trace, one after the other in one process.

Where every step is alike the median step counts, in windows as everywhere (harness.py). Where
batches differ, as hot and cold ones do, whole runs are timed: from the end of the first step to the
end of the last, switches included, over all samples that were offered. A run is an epoch, which
some systems begin by a pause of their own (Hotline pins what it has learned, Slipstream looks at
all hot rows): there are as many pauses in any epoch, so they are spread over as many batches as one
of the data set has; `with_pauses_ms` has them spread over the run. A first run warms up:
hot rows are found and samples told apart, kernels compiled, steps captured. Of the timed ones the
fastest counts, as of windows of steps. FAE and Hotline choose their hot rows by what they would
have seen of an epoch of the data set, 5 % of its samples: that many are drawn for the counts, not
for training. `hybrid-plain` is nn.EmbeddingBag on the CPU with sparse gradients; `fae` trains cold
batches by `hybrid`, as published, `fae-fetched` fetches their rows. Slipstream is asked to leave
out 0.3 of the hot samples, as published, and `random-drop` leaves out as many as it did on `fae`.
What they leave out is a few percent of the time, so the system below them trains the same model in
turns with them, and is what they are compared with.
What is left out counts as done: samples per second are those offered.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import cached_property, partial
from typing import Any

import bars
import numpy as np
import torch
import torch.nn.functional as F
from cores import on_fast_cores
from dense import DenseModule, DenseOptions, dense_optimizer
from harness import (
    Deadline,
    Marks,
    Results,
    Session,
    Unavailable,
    hbm,
    parser,
    read_results,
    reset_hbm,
    say,
)
from scratchpipe import bound_ms, rates
from suite import (
    GIB,
    STORE_SECONDS,
    Bench,
    Setting,
    add_bench_options,
    bench_for,
    clean_up,
    measure,
)
from terabyte import MLPERF
from torch import Tensor
from traces import NUM_DENSE, Trace, counts_by_rank, permutation

import hotrow
from hotrow.data import KAGGLE_ROWS, ClickBatch
from hotrow.systems.hotline.popularity import LEARNED_PART, DecayedCounts

SETTINGS = (
    Setting("terabyte", MLPERF),
    Setting("kaggle", KAGGLE_ROWS, dim=16, batch=2048),
)
# Batches of an epoch: Kaggle's first six days, and 23 of Terabyte's 24.
EPOCHS = {"terabyte": 4_195_197_692 // 8192, "kaggle": 39_291_954 // 2048}
PAUSE = 20  # median steps: what takes longer is no step alone
LONG = 3  # median steps: recorded, to show what a run's mean is made of
DROP_TARGET = 0.3
REPEATS = 3
BELOW = {"slipstream-fae": "fae", "slipstream-hotline": "hotline", "random-drop": "fae"}
SMOKE_BATCHES = 32  # some of them hot, of samples that are told apart
# Systems that train step by step alike: their names in the registry of systems.
BY_STEPS = {
    "hybrid-plain": "torch-hybrid",
    "hybrid": "hotrow-hybrid",
    "static-hybrid": "hotrow-static-hybrid",
    "scratchpipe": "hotrow-scratchpipe",
    "lookahead": "hotrow-lookahead",
    "lookahead-written": "hotrow-lookahead-written",
    "all-fast": "hotrow-all-fast",
}


@dataclass
class Context:
    """What systems of one setting are told, and tell each other."""

    bench: Bench
    batches: int  # of a whole run
    rates: dict[str, float]
    deadline: Deadline
    repeats: int = REPEATS  # of whole runs, after one that warms up
    lines: dict[str, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def seen(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A profile: what FAE and Hotline see of an epoch before they choose their hot rows."""
        s = self.bench.setting
        samples = LEARNED_PART * EPOCHS[s.name] * s.batch
        every = [
            counts_by_rank(num_rows, s.skew, samples, seed=table, device=self.bench.device)
            for table, num_rows in enumerate(s.rows)
        ]
        # As many as the budget could hold, and those that were seen as often as the last of them.
        how_many = torch.cat([each[each > 0].clamp(max=1 << 20).cpu() for each in every])
        room = min(int(s.budget * sum(s.rows)), len(how_many))
        least = int(how_many.sort(descending=True)[0][room - 1]) if room else 1
        found = {}
        for table, (counts, num_rows) in enumerate(zip(every, s.rows, strict=True)):
            ranks = (counts >= least).nonzero().squeeze(1)
            rows = permutation(num_rows, 0, table)(ranks.cpu().numpy())
            found[f"table_{table}"] = torch.from_numpy(rows), counts[ranks].long().cpu()
        return found


class Seen(DecayedCounts):
    """Counts of a learning phase that has gone on for longer than the batches of a run."""

    def __init__(self, context: Context, embedding: hotrow.EmbeddingBagCollection) -> None:
        (group,) = embedding.groups
        row_bytes = {table.name: 4 * group.width for table in embedding.tables}
        room = embedding.room_for_pins()[group.dim]
        super().__init__(embedding.tables, row_bytes, 4 * group.width * room)
        self._seen = context.seen
        self.clear()

    def clear(self) -> None:
        super().clear()
        for name, (rows, counts) in self._seen.items():
            self._counts.of(name)[rows] = self._UNIT * counts


class Source:
    """Batches of a trace that can be gone through again and again: one epoch each time."""

    def __init__(self, trace: Trace, count: int) -> None:
        self._trace, self._count = trace, min(count, trace.steps)

    def __len__(self) -> int:
        return self._count

    @property
    def batches_per_epoch(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ClickBatch]:
        return self._trace.batches(0, self._count)


# -- systems that order, split or leave out samples ------------------------------------


def fae(context: Context, cold: str, **options: Any) -> Any:
    return hotrow.FAE(cold=cold, profile=context.seen, **options)


def hotline(context: Context, **options: Any) -> Any:
    return hotrow.Hotline(log=partial(Seen, context), **options)


def slipstream() -> Any:
    # No test batches: nothing stops it, as published.
    return hotrow.Slipstream.as_published(target=DROP_TARGET, validate_every=0)


def random_drop(context: Context) -> Any:
    if "slipstream-fae" not in context.lines:
        raise Unavailable("slipstream-fae, which says how many samples, has not run here before")
    facts = context.lines["slipstream-fae"]["facts"]
    dropped = hotrow.RandomDrop(facts["skipped_share"], starting_batch=facts["skipped_from"])
    return fae(context, "hybrid", skip=dropped)


WHOLE: dict[str, Callable[[Context], Any]] = {
    "fae": lambda context: fae(context, "hybrid"),
    "fae-fetched": lambda context: fae(context, "fetched"),
    "hotline": hotline,
    "slipstream-fae": lambda context: fae(context, "hybrid", skip=slipstream()),
    "slipstream-hotline": lambda context: hotline(context, skip=slipstream()),
    "random-drop": random_drop,
}


def measure_whole(context: Context, name: str) -> dict[str, Any]:
    from systems.ours import Hotrow

    bench, batch = context.bench, context.bench.setting.batch
    system = WHOLE[name](context)
    reset_hbm(bench.device)
    started = time.perf_counter()
    built = Hotrow(bench, "static", system=system)
    startup = time.perf_counter() - started
    say(f"    built in {startup:.1f} s")
    source = Source(bench.trace, context.batches)
    trainers, below = {name: built.trainer}, BELOW.get(name)
    if below is not None:
        trainers[below] = built.trainer_with(system=WHOLE[below](context))
    timed: dict[str, list[WholeRun]] = {each: [] for each in trainers}
    for repeat in range(1 + context.repeats):
        if repeat > 2 and context.deadline.minutes_left <= 0:
            break
        context.deadline.check()
        for each, trainer in trainers.items():
            # Threads keep the cores they began on.
            with on_fast_cores() if repeat else nullcontext():
                taken = time_run(trainer, source, bench.device)
            say(f"    {'timed' if repeat else 'warm-up'} run of {each}: {taken.told(batch)}")
            timed[each] += [taken] if repeat else []
    epoch, runs = EPOCHS[bench.setting.name], timed[name]
    ms = [each.ms(batch, epoch) for each in runs]
    offered = sum(each.offered for each in runs)
    trained = sum(each.trained for each in runs)
    return {
        "setting": bench.setting.facts(),
        "options": {**asdict(bench.options), "fill": bench.fill},
        "step_ms": {
            "p20": min(ms), "p50": min(ms), "p80": max(ms),
            "mean": float(np.mean(ms)), "steps": sum(each.steps for each in runs), "medians": ms,
        },
        "samples_per_second": batch / min(ms) * 1000,
        "warmup_steps": len(source),
        "hbm_bytes": {"tables": built.table_bytes(), **hbm(bench.device)},
        "startup_seconds": startup,
        "facts": {
            "hotrow": hotrow.__version__,
            "timed": "whole runs",
            "epoch_batches": epoch,
            "with_pauses_ms": float(np.median([each.ms(batch) for each in runs])),
            "pauses_ms": float(np.median([each.pauses for each in runs])),
            "median_step_ms": float(np.median([each.median for each in runs])),
            "dropped_share": 1 - trained / offered,
            # Of those that might have been: hot ones, since it was known which are stale.
            "skipped_share": system.skip.record.share if system.skip is not None else 0.0,
            "skipped_from": system.skip.record.first_batch if system.skip is not None else 0,
            "hot_share": hot_share(system),
            "hit_rate": built.embedding.traffic().hit_rate,
            **({} if below is None else {"below_ms": [x.ms(batch, epoch) for x in timed[below]]}),
        },
    }  # fmt: skip


@dataclass(frozen=True)
class WholeRun:
    """From the end of the first step to the end of the last."""

    milliseconds: tuple[float, ...]  # of each step but the first
    offered: int  # samples, those of the first step left out
    trained: int

    @property
    def steps(self) -> int:
        return len(self.milliseconds)

    @property
    def median(self) -> float:
        return float(np.median(self.milliseconds))

    @property
    def pauses(self) -> float:
        """What the longest steps took beyond a usual one."""
        usual = self.median
        return sum(each - usual for each in self.milliseconds if each > PAUSE * usual)

    def ms(self, batch: int, epoch: int | None = None) -> float:
        """For as many samples as a batch has, with pauses spread over an epoch of so many batches,
        or over the run."""
        batches = self.offered / batch
        return (sum(self.milliseconds) - self.pauses) / batches + self.pauses / (epoch or batches)

    def told(self, batch: int) -> str:
        return (
            f"{self.ms(batch):.3f} ms per batch, of which pauses {self.pauses:.0f} ms in all; "
            f"median step {self.median:.3f} ms, "
            f"{sum(each > LONG * self.median for each in self.milliseconds)} of {self.steps} "
            f"{LONG} times as long"
        )


def time_run(trainer: Any, source: Source, device: torch.device) -> WholeRun:
    # The rest of each set makes a batch of its own, and parts of a batch may be steps.
    marks = Marks(device, 4 * len(source) + 64)
    samples = []
    for record in trainer.run(source):
        marks.set()
        samples.append(record.samples)
    total = len(source) * len(next(iter(source)).label)
    return WholeRun(tuple(marks.milliseconds()), total - samples[0], sum(samples[1:]))


def hot_share(system: Any) -> float:
    """Of the samples, as the system has told them apart."""
    record = system.record
    return float(record.popular_share if isinstance(system, hotrow.Hotline) else record.hot_share)


# -- systems that train step by step alike ---------------------------------------------


class CpuAlone:
    """Rows and the dense part on the CPU. All rows start alike: to draw them takes minutes."""

    def __init__(self, bench: Bench) -> None:
        from systems.ours import LR, RULES, Clicks, trainer
        from traces import feature_names

        s, device = bench.setting, torch.device("cpu")
        names = feature_names(len(s.rows))
        tables = [
            hotrow.EmbeddingBagConfig(f"table_{name}", n, s.dim, [name], init=hotrow.Constant(0.01))
            for n, name in zip(s.rows, names, strict=True)
        ]
        self.embedding = hotrow.EmbeddingBagCollection(
            tables, RULES[s.optimizer](lr=LR), strategy="cpu", device=device, seed=0
        )
        options = DenseOptions(compile=False, interaction="plain", masters="plain")
        dense = DenseModule(NUM_DENSE, len(s.rows), s.dim)
        self.trainer = trainer(
            Clicks(self.embedding, dense),
            dense_optimizer(dense, options),
            loss=F.binary_cross_entropy_with_logits,
            device=device,
            compile=False,
            graphs=False,
        )

    def steps(self, batches: Any) -> Iterator[None]:
        for _ in self.trainer.run(batches):
            yield

    def table_bytes(self) -> int:
        return 0

    def facts(self, steps: Iterator[None]) -> dict[str, Any]:
        return {"threads": torch.get_num_threads()}


def measure_steps(context: Context, name: str) -> dict[str, Any]:
    if name == "cpu":
        from systems import SYSTEMS, Kind

        SYSTEMS.setdefault("hotrow-cpu", Kind(CpuAlone, 300, is_slow=True))
    line = measure(context.bench, BY_STEPS.get(name, "hotrow-cpu"), context.deadline)
    line["facts"]["bound_ms"] = bound_ms(name, line["facts"], context.rates)
    return line


# -- the command -----------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    setting: Setting
    system: str

    @property
    def name(self) -> str:
        return f"{self.setting.name}/{self.system}"

    def seconds(self, batches: int) -> float:
        """A rough guess, on the safe side."""
        s = self.setting
        store = STORE_SECONDS * s.total_bytes / GIB * (self.system != "all-fast")
        steps = {"hybrid-plain": 23 * 0.13, "cpu": 23 * 0.4, "hybrid": 600 * 0.006}
        cached = (s.warmup + 500) * 0.003 if self.system in BY_STEPS else 0.0
        whole = (1 + REPEATS) * batches * 0.005 * (1 + (self.system in BELOW)) + 15
        return 12 + store + steps.get(self.system, cached or whole)


def runs_of(only: Sequence[str]) -> list[Run]:
    """A pattern names a setting, a system or setting/system."""
    chosen = []
    names = {setting.name for setting in SETTINGS}
    by_setting = [each for each in only if any(fnmatch(name, each) for name in names)]
    by_system = [each for each in only if each not in by_setting]
    for setting in SETTINGS:
        for system in bars.SYSTEMS:
            run = Run(setting, system)
            is_setting = not by_setting or any(fnmatch(setting.name, each) for each in by_setting)
            is_system = not by_system or any(
                fnmatch(system, each) or fnmatch(run.name, each) for each in by_system
            )
            if is_setting and is_system:
                chosen.append(run)
    return chosen


def run_all(runs: Sequence[Run], arguments: argparse.Namespace) -> int:
    session = Session("published", arguments)
    context: Context | None = None
    for run in runs:
        if context is None or context.bench.setting.name != run.setting.name:
            if context is not None:
                finish(context, session)
            context = Context(
                bench_for(run.setting, arguments),
                SMOKE_BATCHES if arguments.smoke else arguments.batches,
                {} if arguments.smoke else rates(arguments.results, 4 * run.setting.dim),
                session.deadline,
                repeats=1 if arguments.smoke else arguments.repeats,
            )
            if not arguments.smoke:
                context.lines |= before(run.setting.name, session.results)
        say(f"{run.name}, {session.deadline.minutes_left:.1f} minutes left")
        session.attempt(
            run.setting.name,
            f"hotrow-{run.system}",
            partial(attempt, context, run.system),
            one_line,
            name=run.name,
            seconds=0 if arguments.smoke else run.seconds(arguments.batches),
        )
        clean_up()
        context.bench.free_host_memory()  # a plain one's: the others bring theirs
    if context is not None:
        finish(context, session)
    session.print_again()
    return int(session.failed > 0)


def attempt(context: Context, name: str) -> dict[str, Any]:
    line = measure_whole(context, name) if name in WHOLE else measure_steps(context, name)
    context.lines[name] = line
    return line


def before(run: str, results: Results) -> dict[str, dict[str, Any]]:
    """What earlier commands measured of the same commit, so that a table may take several."""
    lines = read_results(results.folder / "published.jsonl")
    mine = [each for each in lines if (each["run"], each["commit"]) == (run, results.commit)]
    return {each["system"].removeprefix("hotrow-"): each for each in mine}


def one_line(line: dict[str, Any]) -> str:
    ms, batch = line["step_ms"], line["setting"]["batch"]
    rate, least, most = (batch / ms[key] / 1000 for key in ("p50", "p80", "p20"))
    return f"{rate:8.4f} M samples/s ({least:.4f}-{most:.4f}), {ms['p50']:.3f} ms"


def finish(context: Context, session: Session) -> None:
    name = context.bench.setting.name
    for ratio in bars.ratios(context.lines):
        session.say(f"{name}/{ratio.system:20} {ratio}")
    context.bench.close()


def main(argv: Sequence[str] | None = None) -> None:
    description = __doc__.split("\n")[0]
    made_parser = parser(description)
    made_parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    made_parser.add_argument("--list", action="store_true", help="say what would run, and end")
    made_parser.add_argument("--batches", type=int, default=400, help="of a whole run")
    made_parser.add_argument("--repeats", type=int, default=REPEATS, help="timed whole runs")
    add_bench_options(made_parser)
    arguments = made_parser.parse_args(argv)
    runs = runs_of(arguments.only)
    if not runs:
        raise SystemExit("no run has such a name; --list shows them")
    if arguments.list:
        for run in runs:
            print(f"{run.name:34} ~{run.seconds(arguments.batches):.0f} s")
        total = sum(run.seconds(arguments.batches) for run in runs)
        print(f"{len(runs)} runs, ~{total / 60:.1f} minutes")
        return
    raise SystemExit(run_all(runs, arguments))


if __name__ == "__main__":
    main()
