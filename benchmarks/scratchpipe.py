"""ScratchPipe's own experiment: eight tables, twenty lookups in each, from random to local access.

    python benchmarks/scratchpipe.py --list
    python benchmarks/scratchpipe.py --minutes 9
    python benchmarks/scratchpipe.py --localities uniform --only scratchpipe static-hybrid

8 tables of 10 M rows and dimension 128 (38 GiB), 20 ids per table and sample, batch 2048, SGD, the
DLRM's dense part; 10 % and 2 % of the bytes in HBM. Published: 2.8 times the speed of a static
cache on the mean, also where access is random. Ranks follow a power law (traces.py):

    uniform  0      every row alike
    low      0.80   60 % of the rows have 90 % of the lookups: the flattest tables published
    medium   0.95   2 % have 80 %, as was said of Criteo
    high     1.05   1 % have 90 %, as others measured there

`static-hybrid` gets the list of the hottest rows. All rows count as written before, so that every
miss is read over the link. Each system is built once per budget and trained
on one locality after the other; its caches are full before it is timed. Beside its step stands
the least time for the rows that cross, at the rates that this machine was measured to have (see
the ceilings): by the link, rows that a GPU moves; by the CPU, rows that threads read and write.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import (
    RESULTS,
    Session,
    hbm,
    link_rates,
    parser,
    read_results,
    reset_hbm,
    say,
    time_steps,
)
from suite import GIB, STORE_SECONDS, Bench, Setting, add_bench_options, bench_for, clean_up
from traces import hottest_ranks, hottest_rows, share_of_lookups, steps_to_fill

LOCALITIES = {"uniform": 0.0, "low": 0.80, "medium": 0.95, "high": 1.05}
BUDGETS = (0.10, 0.02)
ROWS, DIM, BATCH, HOTNESS = (10_000_000,) * 8, 128, 2048, 20
SHORT, TAIL, COUNTED = 12, 60, 12  # steps of warm-up where there is no cache; after timed ones
MOST_WARMUP = 500
BY_THE_CPU = ("hybrid", "static-hybrid", "scratchpipe")  # on whose cores rows are read and written
PUBLISHED = 2.8  # times the speed of static-hybrid


@dataclass(frozen=True)
class Turn:
    """A system with its budget, trained on all localities; None: it needs none."""

    strategy: str
    budget: float | None
    guess_ms: float  # of a step with random access, to know what fits into the minutes
    is_cached: bool = False

    def run(self, locality: str) -> str:
        return locality if self.budget is None else f"{locality}-{100 * self.budget:.0f}"

    def name(self, locality: str) -> str:
        return f"{self.run(locality)}/{self.strategy}"

    def seconds(self, setting: Setting, timed: int) -> float:
        """Of one locality, at the most, without building it."""
        # Skewed batches have fewer rows to move.
        ms = self.guess_ms * (1.0 if setting.skew == 0 else 0.6)
        return 3 + (warmup_of(self, setting) + timed + COUNTED) * ms / 1000


TURNS = (
    Turn("static-hybrid", 0.10, 60),
    Turn("static-hybrid", 0.02, 60),
    Turn("hybrid", None, 80),
    Turn("scratchpipe", 0.10, 50, is_cached=True),
    Turn("scratchpipe", 0.02, 50, is_cached=True),
    Turn("lookahead", 0.10, 35, is_cached=True),
    Turn("lookahead", 0.02, 35, is_cached=True),
    Turn("all-fast", None, 4),
)


def setting_of(locality: str, budget: float | None) -> Setting:
    return Setting(
        locality,
        ROWS,
        dim=DIM,
        batch=BATCH,
        hotness=HOTNESS,
        skew=LOCALITIES[locality],
        budget=budget or BUDGETS[0],
        least_warmup=SHORT,
        tail=TAIL + COUNTED,
    )


def warmup_of(turn: Turn, setting: Setting) -> int:
    if not turn.is_cached:
        return SHORT
    draws = setting.batch * setting.hotness
    slots = setting.budget * sum(setting.rows)
    return min(MOST_WARMUP, SHORT + steps_to_fill(slots, setting.rows, setting.skew, draws))


class Experiment:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.session = arguments, Session("scratchpipe", arguments)
        self.localities = arguments.localities
        self.benches: dict[str, Bench] = {}  # by locality: batches for all systems
        self.rates = {} if arguments.smoke else rates(arguments.results, 4 * DIM)
        self.steps: dict[tuple[str, str], float] = {}  # milliseconds, by run and strategy

    def chosen(self) -> list[tuple[Turn, list[str]]]:
        only = self.arguments.only
        found = []
        for turn in TURNS:
            mine = [
                each
                for each in self.localities
                if not only or any(self._is(turn, each, pattern) for pattern in only)
            ]
            if mine and (turn.budget is None or turn.budget in self.arguments.budgets):
                found.append((turn, mine))
        return found

    def _is(self, turn: Turn, locality: str, pattern: str) -> bool:
        return fnmatch(turn.strategy, pattern) or fnmatch(turn.name(locality), pattern)

    def bench(self, locality: str) -> Bench:
        """Batches of a locality, enough for the system that warms up longest."""
        if locality not in self.benches:
            turns = [turn for turn, mine in self.chosen() if locality in mine]
            settings = [setting_of(locality, turn.budget) for turn in turns]
            warmup = max(map(warmup_of, turns, settings))
            given = argparse.Namespace(**{**vars(self.arguments), "warmup": warmup})
            self.benches[locality] = bench_for(settings[0], given)
        return self.benches[locality]

    def run(self) -> int:
        for turn, localities in self.chosen():
            system: Any = None
            for locality in localities:
                bench = self.bench(locality)
                if turn.budget is not None:
                    budget = bench.setting.budget if self.arguments.smoke else turn.budget
                    bench.setting = replace(bench.setting, budget=budget)
                name, setting = turn.name(locality), bench.setting
                say(f"{name}, {self.session.deadline.minutes_left:.1f} minutes left")
                build = (
                    0.0 if system is not None else 15 + STORE_SECONDS * setting.total_bytes / GIB
                )
                seconds = turn.seconds(setting, bench.timed) + build
                held: dict[str, Any] = {"system": system}
                self.session.attempt(
                    turn.run(locality),
                    f"hotrow-{turn.strategy}",
                    partial(self.measure, turn, locality, bench, held),
                    partial(self.one_line, turn, locality),
                    name=name,
                    seconds=0 if self.arguments.smoke else seconds,
                )
                system = held.pop("system")
            del system
            clean_up()
        for bench in self.benches.values():
            bench.close()
        self.compare()
        self.session.print_again()
        return int(self.session.failed > 0)

    def measure(
        self, turn: Turn, locality: str, bench: Bench, held: dict[str, Any]
    ) -> dict[str, Any]:
        from systems.ours import Hotrow, facts_of

        trace = bench.trace
        if held["system"] is None:
            reset_hbm(bench.device)
            held["system"] = Hotrow(bench, turn.strategy, written=True)
        system = held["system"]
        if turn.strategy == "static-hybrid":
            pin_hottest(system.embedding, bench.setting)
        warmup = min(warmup_of(turn, bench.setting), bench.warmup)
        batches = trace.batches(bench.warmup - warmup, trace.steps)  # the same ones are timed
        steps: Iterator[object] = system.steps(batches)
        try:
            timing = time_steps(
                steps,
                warmup=warmup,
                timed=bench.timed,
                device=bench.device,
                deadline=self.session.deadline,
            )
            facts = facts_of(system.embedding, steps, min(bench.counted, COUNTED))
        finally:
            steps.close()  # type: ignore[attr-defined]
        self.steps[turn.run(locality), turn.strategy] = timing.p50
        return {
            "setting": bench.setting.facts(),
            "options": {**asdict(bench.options), "fill": bench.fill},
            "step_ms": asdict(timing),
            "samples_per_second": bench.setting.batch / timing.whole.mean * 1000,
            "warmup_steps": warmup,
            "hbm_bytes": {"tables": system.table_bytes(), **hbm(bench.device)},
            "facts": {
                **facts,
                "hottest_have": hottest_have(bench.setting),
                "bound_ms": bound_ms(turn.strategy, facts, self.rates),
            },
        }

    def one_line(self, turn: Turn, locality: str, measured: dict[str, Any]) -> str:
        ms, facts = measured["step_ms"], measured["facts"]
        bound = facts["bound_ms"]
        beside = "" if bound is None else f"; rows {bound:.2f} ms, {ms['p50'] / bound:.2f} times"
        return (
            f"{ms['p50']:8.3f} ms ({ms['p20']:.3f}-{ms['p80']:.3f}) "
            f"{measured['samples_per_second'] / 1e6:6.3f} M samples/s, hits "
            f"{facts['hit_rate']:.1%}{beside}"
        )

    def compare(self) -> None:
        """Speeds over static-hybrid with the same budget, locality by locality."""
        for locality in self.localities:
            for budget in self.arguments.budgets:
                run = f"{locality}-{100 * budget:.0f}"
                bar = self.steps.get((run, "static-hybrid"))
                mine = {
                    turn.strategy: self.steps.get((turn.run(locality), turn.strategy))
                    for turn in TURNS
                    if turn.budget in (None, budget) and turn.strategy != "static-hybrid"
                }
                found = {name: bar / ms for name, ms in mine.items() if bar and ms}
                if found:
                    times = ", ".join(f"{name} {each:.2f}" for name, each in found.items())
                    self.session.say(f"{run:12} times static-hybrid: {times}")
        ratios = [
            self.steps[run, "static-hybrid"] / ms
            for (run, name), ms in self.steps.items()
            if name == "scratchpipe" and (run, "static-hybrid") in self.steps
        ]
        if ratios:
            mean = sum(ratios) / len(ratios)
            self.session.say(
                f"scratchpipe over static-hybrid on the mean {mean:.2f} (published {PUBLISHED}), "
                f"from {min(ratios):.2f} to {max(ratios):.2f}"
            )


def pin_hottest(embedding: Any, setting: Setting) -> None:
    """What a perfect profile would say; one width, so ids are tables one after the other."""
    (group,) = embedding.groups
    room = min(group.num_slots, int(setting.budget * sum(setting.rows)))
    found = hottest_rows(setting.rows, setting.skew, room)
    bases = group.layout.bases
    parts = [torch.from_numpy(ids) + base for ids, base in zip(found, bases, strict=True)]
    group.pin_rows(torch.cat(parts))


def hottest_have(setting: Setting) -> float:
    """The share of all lookups that go to as many rows as the budget is of them, the hottest."""
    ranks = hottest_ranks(setting.rows, setting.skew, int(setting.budget * sum(setting.rows)))
    tables = zip(setting.rows, ranks, strict=True)
    shares = [share_of_lookups(num_rows, setting.skew, many) for num_rows, many in tables]
    return sum(shares) / len(shares)


def rates(results: Path, row_bytes: int) -> dict[str, float]:
    """Rows per second, of the size next to this, measured by ceilings.py: across the link, read by
    the CPU and written by it."""
    folders = (RESULTS, results)
    lines = [line for folder in folders for line in read_results(folder / "ceilings.jsonl")]
    by_size = link_rates(lines)
    if not by_size:
        return {}
    size = min(by_size, key=lambda each: abs(each - row_bytes))
    found = {line["run"]: 1e6 * line["value"] for line in lines if "value" in line}
    known = {
        "link": by_size[size],
        "read": found.get(f"CPU gather, rows of {size} bytes"),
        "write": found.get(f"CPU scatter, rows of {size} bytes"),
    }
    return {name: each for name, each in known.items() if each is not None}


def bound_ms(strategy: str, facts: dict[str, Any], known: dict[str, float]) -> float | None:
    """The least time for the rows that must cross; None: none do, or no rate was measured."""
    if "fetched_rows_per_step" not in facts:
        return None
    read = facts["fetched_rows_per_step"] - facts["made_rows_per_step"]
    written = facts["evicted_rows_per_step"]
    if not read + written:
        return None
    if strategy in BY_THE_CPU:
        if not {"read", "write"} <= known.keys():
            return None
        return 1000 * (read / known["read"] + written / known["write"])
    return 1000 * (read + written) / known["link"] if "link" in known else None


def share(text: str) -> float:
    return float(text.rstrip("%")) / 100


def main(argv: Sequence[str] | None = None) -> None:
    made = parser(__doc__.split("\n")[0])
    made.add_argument("--only", nargs="+", default=[], metavar="NAME", help="[run/]system")
    made.add_argument("--localities", nargs="+", default=[*LOCALITIES], choices=[*LOCALITIES])
    made.add_argument(
        "--budgets", nargs="+", type=share, default=list(BUDGETS), metavar="PERCENT",
        help="of the rows: 10 and 2",
    )  # fmt: skip
    made.add_argument("--list", action="store_true", help="say what would run, and end")
    add_bench_options(made)
    made.set_defaults(timed=60)
    arguments = made.parse_args(argv)
    experiment = Experiment(arguments)
    if not experiment.chosen():
        raise SystemExit("no run has such a name; --list shows them")
    if arguments.list:
        total = 0.0
        for turn, localities in experiment.chosen():
            total += 15 + STORE_SECONDS * setting_of("high", turn.budget).total_bytes / GIB
            for locality in localities:
                seconds = turn.seconds(setting_of(locality, turn.budget), arguments.timed)
                total += seconds
                print(f"{turn.name(locality):28} ~{seconds:.0f} s")
        print(f"~{total / 60:.1f} minutes at the most, building included")
        return
    raise SystemExit(experiment.run())


if __name__ == "__main__":
    main()
