"""One run, or several side by side, as a document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hotrow.report.charts import Bars, Chart, Line, Spans, bars_by_name
from hotrow.report.curves import Curve
from hotrow.report.page import (
    NONE,
    Bullets,
    Charts,
    Document,
    Part,
    Section,
    Table,
    Text,
    number,
    table_by_columns,
)
from hotrow.report.rank_tables import rank_parts
from hotrow.support.messages import many
from hotrow.support.records import RunRecord, Span
from hotrow.support.toml import flat
from hotrow.support.units import show_bytes

_STEPS_SHOWN = 4  # in a timeline
_SPANS_SHOWN = 400
_TABLES_SHOWN = 40
_BARS_SHOWN = 160  # of all tables together, with room for each run beside the others
_IN_CURVE = (
    "loss", "least_loss", "largest_loss", "samples_per_second", "hit_rate", "bytes_per_second",
    "waited", "rank_waited",
)  # fmt: skip
_STAGES = (
    "read", "plan", "confirm", "fill", "send", "collect", "exchange", "insert", "write-back",
    "train", "evaluate",
)  # fmt: skip


@dataclass(frozen=True)
class RunView:
    """The records of a run."""

    name: str  # unique
    record: RunRecord
    curve: Curve
    spans: Sequence[Span] = ()  # of its trace
    values: Mapping[str, Any] = field(default_factory=dict)  # the record for --json


def runs_document(runs: Sequence[RunView]) -> Document:
    limits = [f"{run.name}: {run.record.limit.message}." for run in runs if run.record.limit]
    columns = dict(_SUMMARY)
    if not any(run.record.summary.bytes_sent for run in runs):
        del columns["sent"]
    if not any(run.record.ranks for run in runs):
        del columns["ranks"]
    summary = table_by_columns(columns, runs, words=_WORDS, bad=_bad(runs))
    timelines = [timeline(run) for run in runs if run.spans]
    return Document(
        "hotrow report: " + ", ".join(run.name for run in runs),
        [
            Text(limits[0], "advice") if len(limits) == 1 else Bullets(limits),
            Section("Summary", [summary]),
            Section("Learning", [Charts([losses(runs), aucs(runs)])]),
            Section("Speed", [Charts([speeds(runs), parts_of_a_step(runs), rank_waits(runs)])]),
            *(Section(title, parts) for title, parts in _ranks(runs)),
            Section(
                "Rows",
                [Charts([hit_rates(runs), link_use(runs), tables_hit(runs), waits(runs)])],
            ),
            Section("Hit rates", [_hit_rates_by_table(runs)], only="terminal"),
            Section("Fast memory", [Charts([memory(runs)], "No part of it was recorded.")]),
            Section(
                "Some steps",
                [Charts(timelines, "No trace; hotrow train --trace steps=20 records one.")],
            ),
            Section("Settings and environment", list(_settings(runs))),
        ],
        facts=[{"runs": [{**run.values, "name": run.name, "curve": _curve(run)} for run in runs]}],
    )


# -- charts ----------------------------------------------------------------------------


def _lines(runs: Sequence[RunView], name: str) -> tuple[Line, ...]:
    lines, of_loss = [], name == "loss"
    for colour, run in enumerate(runs):
        limits: dict[str, Any] = {}
        if of_loss and run.curve.width > 1:
            limits = {"low": run.curve.least_loss, "high": run.curve.largest_loss}
        values = getattr(run.curve, name)
        if any(math.isfinite(value) for value in values):
            dashed = of_loss and colour > 0  # losses of exact strategies are equal
            line = Line(run.name, run.curve.middle, values, colour=colour, is_dashed=dashed)
            lines.append(replace(line, **limits))
    return tuple(lines)


def _binned(runs: Sequence[RunView]) -> str:
    widths = {run.curve.width for run in runs}
    if widths == {1}:
        return "A point for each step."
    return f"Each point is the mean of up to {max(widths):,} steps."


def losses(runs: Sequence[RunView]) -> Chart:
    note = _binned(runs)
    if any(run.curve.width > 1 for run in runs):
        note += " The band goes from the least to the largest."
    return Chart("Training loss", "step", "loss", _lines(runs, "loss"), note)


def aucs(runs: Sequence[RunView]) -> Chart:
    lines = []
    for colour, run in enumerate(runs):
        known = [each for each in run.record.evaluations if math.isfinite(each.auc)]
        x, y = [each.step for each in known], [each.auc for each in known]
        if len(known) > 1 and x[-1] == run.record.summary.steps:  # other samples: no line to it
            x.insert(-1, x[-1])
            y.insert(-1, math.nan)
        if known:
            lines.append(Line(run.name, x, y, colour=colour, has_dots=True, is_dashed=colour > 0))
    note = "On validation samples; the point at the end, which stands apart, on test samples."
    return Chart("AUC", "step", "AUC", tuple(lines), note)


def speeds(runs: Sequence[RunView]) -> Chart:
    lines = tuple(
        Line(run.name, run.curve.seconds, run.curve.samples_per_second, colour=i)
        for i, run in enumerate(runs)
        if run.curve.step
    )
    title = "seconds of training, without evaluation"
    return Chart("Samples per second", title, "samples/s", lines, _binned(runs), from_zero=True)


def parts_of_a_step(runs: Sequence[RunView]) -> Chart:
    """On a CPU the parts add up to a step; with a GPU the host launches, and sometimes waits."""
    named: dict[str, Callable[[Any], float]] = {
        "reading batches": lambda x: x.read_seconds,
        "planning": lambda x: x.plan_seconds,
        "moving rows": lambda x: x.rows_seconds,
        "training": lambda x: (
            x.seconds
            - x.read_seconds
            - x.plan_seconds
            - x.rows_seconds
            - x.chunk_seconds
            - x.rank_seconds
        ),
    }
    timed = [(run.name, run.record.times) for run in runs if run.record.times is not None]
    if any(each.chunk_seconds for _, each in timed):
        named["batches in chunks"] = lambda x: x.chunk_seconds
    if any(each.rank_seconds for _, each in timed):
        named["waiting for other ranks"] = lambda x: x.rank_seconds
    order = tuple(name for name, _ in timed)
    parts = {
        name: [1000 * of(each) / each.steps for _, each in timed]
        for name, of in named.items()
        if timed
    }
    return Chart(
        "A step's time on the host", "milliseconds", "", bars_by_name(order, parts),
        is_stacked=True, order=order,
        note="The mean, without the first steps. Beside a GPU, planning and moving rows are what "
        "it takes to launch them.",
    )  # fmt: skip


def waits(runs: Sequence[RunView]) -> Chart:
    return Chart(
        "Training waited for rows", "step", "share of a step",
        _lines(runs, "waited"), y_format=".3~%", from_zero=True,
        note="On a GPU measured every few steps, between marks in its lanes.",
    )  # fmt: skip


def rank_waits(runs: Sequence[RunView]) -> Chart:
    return Chart(
        "Rank 0 waited for other ranks", "step", "share of a step",
        _lines(runs, "rank_waited"), y_format=".3~%", from_zero=True,
        note="In calls that wait for messages of other ranks, which includes sending them.",
    )  # fmt: skip


def hit_rates(runs: Sequence[RunView]) -> Chart:
    return Chart(
        "Hit rate", "step", "share of lookups", _lines(runs, "hit_rate"),
        "The share of lookups that caused no fetch, for batches that were planned meanwhile.",
        y_format=".3~%",
    )  # fmt: skip


def link_use(runs: Sequence[RunView]) -> Chart:
    lines = tuple(
        replace(line, y=[value / 2**20 for value in line.y])
        for line in _lines(runs, "bytes_per_second")
    )
    note = "Between slow and fast memory, both ways."
    return Chart("Moved per second", "step", "MiB/s", lines, note, from_zero=True)


def tables_hit(runs: Sequence[RunView]) -> Chart:
    """Draw the tables with most lookups, ties: most different rows. Runs without them are left
    out."""
    known = [run for run in runs if run.record.tables]
    lookups: dict[str, tuple[int, int]] = {}
    for run in known:
        for name, each in run.record.tables.items():
            lookups[name] = max(lookups.get(name, (0, 0)), (each.lookups, each.unique_rows))
    is_apart = sum(len(run.record.tables) for run in known) == len(lookups)  # no two share a table
    beside = 1 if is_apart else len(known)
    most = min(_TABLES_SHOWN, max(1, _BARS_SHOWN // beside))
    order = tuple(sorted(lookups, key=lookups.__getitem__, reverse=True)[:most])
    bars = tuple(
        Bars(
            run.name,
            order,
            [
                run.record.tables[name].hit_rate if name in run.record.tables else math.nan
                for name in order
            ],
            colour=runs.index(run),
        )
        for run in known
        if not run.record.tables.keys().isdisjoint(order)
    )
    left = len(lookups) - len(order)
    shown = many(len(order), "table")
    note = f"The {shown} with most lookups; {left:,} more left out." if left else ""
    return Chart(
        "Hit rate by table", "share of lookups", "", bars, note,
        x_format=".0%", from_zero=True, order=order, is_stacked=is_apart,
    )  # fmt: skip


def memory(runs: Sequence[RunView]) -> Chart:
    known = [run for run in runs if any(run.record.memory.values())]
    order = tuple(run.name for run in known)
    parts = {
        part: [other.record.memory.get(part, 0) / 2**20 for other in known]
        for run in known
        for part in run.record.memory
    }
    bars = bars_by_name(order, parts)
    note = "Of several ranks, rank 0's." if any(run.record.ranks for run in known) else ""
    return Chart("By part", "MiB", "", bars, note, is_stacked=True, order=order)


def timeline(run: RunView) -> Chart:
    """Draw the stages of a few steps in the middle of a trace."""
    spans = run.spans
    edges = [span.start for span in spans if span.name == "train" and span.place == "host"]
    first = max(0, (len(edges) - _STEPS_SHOWN) // 2)
    start, *_, end = [*edges[first:], math.inf, math.inf][: _STEPS_SHOWN + 1]
    shown = [span for span in spans if start <= span.start < end][:_SPANS_SHOWN]
    has_gpu = any(span.place == "GPU" for span in shown)
    lanes = {id(span): f"{span.place}: {span.name}" if has_gpu else span.name for span in shown}
    stages = [name for name in _STAGES if any(span.name == name for span in shown)]
    places = ("host: ", "GPU: ") if has_gpu else ("",)
    order = [place + name for place in places for name in stages]
    series = tuple(
        Spans(
            name,
            [lanes[id(span)] for span in shown if span.name == name],
            [1000 * (span.start - start) for span in shown if span.name == name],
            [1000 * span.seconds for span in shown if span.name == name],
            colour=place,
        )
        for place, name in enumerate(stages)
    )
    used = set(lanes.values())
    return Chart(
        f"{run.name}: {_STEPS_SHOWN} steps", "milliseconds", "", series,
        "By stages, as a profiler saw them, which slows them down.",
        order=tuple(lane for lane in order if lane in used),
    )  # fmt: skip


# -- texts -----------------------------------------------------------------------------

_EQUALITY = {None: "not compared", True: "bits", False: "no"}
_SUMMARY: dict[str, Callable[[RunView], str]] = {
    "run": lambda run: run.name,
    "ranks": lambda run: str(len(run.record.ranks) or 1),
    "strategy": lambda run: str(run.record.settings.get("embedding", {}).get("strategy", NONE)),
    "outcome": lambda run: run.record.outcome,
    "steps": lambda run: f"{run.record.summary.steps:,}",
    "samples/s": lambda run: number(run.record.summary.samples_per_second, ",.0f"),
    "loss": lambda run: number(run.record.summary.loss, ".4f"),
    "AUC": lambda run: number(run.record.summary.auc, ".4f"),
    "log-loss": lambda run: number(run.record.summary.log_loss, ".4f"),
    "hit rate": lambda run: f"{run.record.summary.hit_rate:.1%}",
    "moved": lambda run: show_bytes(run.record.summary.bytes_moved),
    "sent": lambda run: show_bytes(run.record.summary.bytes_sent),  # to other ranks
    "waited": lambda run: number(run.curve.mean_waited, ".1%"),
    "fast memory": lambda run: _memory(run.record),
    "equal to all-fast": lambda run: _EQUALITY[run.record.summary.equal_to_all_fast],
}
_WORDS = ("strategy", "outcome", "equal to all-fast")


def _ranks(runs: Sequence[RunView]) -> Iterator[tuple[str, list[Part]]]:
    """Yield a title, and what each rank did, for every run of several ranks."""
    shared = [run for run in runs if run.record.ranks]
    for run in shared:
        title = "Ranks" if len(runs) == 1 else f"Ranks of {run.name}"
        yield title, rank_parts(run.record.ranks)


def _memory(record: RunRecord) -> str:
    fast = sum(rank.fast_bytes for rank in record.ranks) or sum(record.memory.values())
    return show_bytes(fast) if fast else NONE


def _bad(runs: Sequence[RunView]) -> list[tuple[int, str]]:
    unequal = [i for i, run in enumerate(runs) if run.record.summary.equal_to_all_fast is False]
    failed = [i for i, run in enumerate(runs) if run.record.outcome in ("failed", "diverged")]
    return [(i, "equal to all-fast") for i in unequal] + [(i, "outcome") for i in failed]


def _settings_of(record: RunRecord) -> dict[str, str]:
    """Return settings and environment by their full names."""
    every = [*flat(record.settings), *flat(record.environment, "environment: ")]
    return {name: NONE if value is None else str(value) for name, value in every}


def _settings(runs: Sequence[RunView]) -> Iterator[Part]:
    """Yield the settings in which runs differ, with each run's value, and those that all share."""
    every = [_settings_of(run.record) for run in runs]
    differing: list[list[str]] = []
    shared: list[list[str]] = []
    for name in dict.fromkeys(name for each in every for name in each):
        values = [each.get(name, NONE) for each in every]
        # An unfinished run of an earlier version has no settings, and differs from none.
        known = {value for each, value in zip(every, values, strict=True) if each}
        if len(known) == 1:
            shared.append([name, *known])
        else:
            differing.append([name, *values])
    names = [run.name for run in runs]
    if differing:
        yield Table(["setting", *names], differing, words=names, marked=range(len(differing)))
    elif len(runs) > 1:
        yield Text("All runs have the same.")
    title = f"{len(shared)} settings" + (" that all share" if len(runs) > 1 else "")
    yield Section(title, [Table(["setting", "value"], shared, words=["value"])], is_folded=True)


def _hit_rates_by_table(runs: Sequence[RunView]) -> Table:
    tables = dict.fromkeys(name for run in runs for name in run.record.tables)
    hits = [{name: each.hit_rate for name, each in run.record.tables.items()} for run in runs]
    rows = [[name, *(number(rate.get(name, math.nan), ".1%") for rate in hits)] for name in tables]
    return Table(["table", *(run.name for run in runs)], rows)


def _curve(run: RunView) -> dict[str, Any]:
    """Return a run's curve for machines: a list for each quantity, all of the same length."""
    names = ("step", "seconds", *_IN_CURVE)
    curve = {name: getattr(run.curve, name) for name in names}
    return {"steps_per_point": run.curve.width, **curve}
