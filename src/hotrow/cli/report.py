"""`hotrow report`: what runs have left behind, as one page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hotrow.cli._declared import Runs
from hotrow.cli._places import check_file
from hotrow.report.charts import library
from hotrow.report.curves import Curve
from hotrow.report.page import NEEDS_PLOTLY
from hotrow.report.runs import (
    SUMMARY,
    Seen,
    page_of_runs,
    settings_table,
    summary_cells,
    to_values,
)
from hotrow.run.files import (
    RUN_FILE,
    STEPS_FILE,
    read_run,
    read_start,
    read_steps,
    to_dict,
    to_json,
)
from hotrow.run.open_run import find_run, runs_in
from hotrow.run.tracing import TRACE_FILE, read_trace
from hotrow.support.files import Disk
from hotrow.support.records import RunRecord, StartRecord, Summary

REPORT_PAGE = "report.html"
_BESIDE = 5  # runs that a narrow screen has room for


def report(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNS", help="Names of runs in --runs, their folders, or a folder of several."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page that is written; one that is there is replaced.",
            show_default="report.html in the run's folder, or in --runs if there are several",
        ),
    ] = None,
    as_text: Annotated[
        bool, typer.Option("--text", metavar="", help="Tables on the screen instead of a page.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="The same facts for machines, no page.")
    ] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Draw one run, or several over each other, on one page.

    The page needs no network and opens from the disk: summary, loss, AUC, samples per second,
    where a step's time goes, hit rate and bytes moved, hit rates by table, fast memory by part, a
    few steps by stages, settings and environment. Of several runs, settings that differ come first.

    **Examples**

    - `hotrow train`, then `hotrow report default`

    - `hotrow report first second --out both.html`

    - `hotrow report runs`: all that are there

    - `hotrow train --trace steps=20`, then `hotrow report default`: with a timeline of its stages

    - `hotrow report default --text`

    - `hotrow report default --json | jq .runs[0].curve.loss`

    A run that is under way, or was killed, is drawn as far as its steps are recorded. Runs of any
    length are read step by step, and drawn as 600 points at most: each the mean of as many steps.

    Charts need plotly: `pip install plotly`. `--text` and `--json` do without it.
    """
    if as_text and as_json:
        raise ValueError("--text or --json, not both")
    if not (as_text or as_json) and library() is None:
        raise ValueError(NEEDS_PLOTLY)
    named = [find_run(name, runs) for name in names]
    folders = [folder for each in named for folder in _runs_of(each)]
    told_apart = _told_apart(folders)
    page = out or (folders[0] if len(folders) == 1 else runs) / REPORT_PAGE
    if not (as_text or as_json):
        check_file("--out", page, such_as=REPORT_PAGE)
    seen = list(_seen(folders, told_apart, set(folders) - set(named)))
    if as_json:
        typer.echo(to_json({"runs": [_values(run) for run in seen]}))
        return
    if as_text:
        _print(seen)
        return
    Disk(page.parent).write(page.name, [page_of_runs(seen).encode()])
    typer.echo(f"written to {page}")


def _runs_of(folder: Path) -> list[Path]:
    """A run, or all of those in a folder."""
    is_run = (folder / RUN_FILE).is_file() or (folder / STEPS_FILE).is_file()
    return [folder] if is_run else runs_in(folder) or [folder]


def _told_apart(folders: Sequence[Path]) -> list[str]:
    """The folders' names; their paths where two have the same."""
    names = [folder.name for folder in folders]
    found = [
        name if names.count(name) == 1 else str(folder)
        for name, folder in zip(names, folders, strict=True)
    ]
    for name in found:
        if found.count(name) > 1:
            raise ValueError(f"run {name} is named twice")
    return found


def _seen(folders: Sequence[Path], names: Sequence[str], found: Set[Path]) -> Iterator[Seen]:
    """Of runs that nobody named, `found` in a folder, a damaged one does not hide the others."""
    damaged = 0
    for folder, name in zip(folders, names, strict=True):
        try:
            yield _see(folder, name)
        except ValueError as error:
            damaged += 1
            if folder not in found or damaged == len(folders):
                raise
            typer.echo(f"warning: {folder} is left out: {error}", err=True)


def _see(folder: Path, name: str) -> Seen:
    has_steps = (folder / STEPS_FILE).is_file()
    if not has_steps and not (folder / RUN_FILE).is_file():
        raise ValueError(f"{folder} has neither {RUN_FILE} nor {STEPS_FILE}: it is no run")
    curve = Curve.of(read_steps(folder)) if has_steps else Curve()
    has_ended = (folder / RUN_FILE).is_file()
    record = read_run(folder) if has_ended else _so_far(name, read_start(folder), curve)
    trace = folder / TRACE_FILE
    return Seen(name, record, curve, read_trace(trace) if trace.is_file() else ())


def _so_far(name: str, start: StartRecord | None, curve: Curve) -> RunRecord:
    """A run that has left its steps, and what it began with."""
    start = start or StartRecord("", {}, {}, {})
    total, nan = curve.total, float("nan")
    summary = Summary(
        steps=total.steps,
        samples=total.samples,
        seconds=total.seconds,
        samples_per_second=total.samples_per_second,
        loss=curve.bins[-1].loss if curve.bins else nan,
        auc=nan,
        log_loss=nan,
        lookups=total.lookups,
        hit_rate=total.hit_rate,
        fast_rows_share=nan,
        bytes_moved=total.bytes_moved,
    )
    return RunRecord(
        name, start.started, "not ended", start.settings, start.environment, start.memory, summary
    )


def _values(run: Seen) -> dict[str, Any]:
    return {**to_dict(run.record), "name": run.name, "curve": to_values(run)}


def _print(seen: Sequence[Seen]) -> None:
    console = Console(highlight=False)
    differing = settings_table(seen)[0] if len(seen) > 1 else []
    for first in range(0, len(seen), _BESIDE):
        last = first + _BESIDE
        _print_some(
            console, seen[first:last], [[row[0], *row[1:][first:last]] for row in differing]
        )
    for run in seen:
        if run.record.limit is not None:
            console.print(f"{run.name}: {run.record.limit.message}", soft_wrap=True, markup=False)


def _print_some(console: Console, seen: Sequence[Seen], settings: Sequence[Sequence[str]]) -> None:
    # A column for each run: more facts than fit beside each other are told of each.
    table = _table([SUMMARY[0], *(run.name for run in seen)])
    facts = zip(SUMMARY, *(summary_cells(run) for run in seen), strict=True)
    for fact in list(facts)[1:]:
        table.add_row(*fact)
    console.print(table)
    by_table = _table(["hit rate of table", *(run.name for run in seen)])
    for name in dict.fromkeys(name for run in seen for name in run.record.tables):
        found = [run.record.tables.get(name) for run in seen]
        by_table.add_row(name, *("-" if each is None else f"{each.hit_rate:.1%}" for each in found))
    if by_table.row_count:
        console.print(by_table)
    if settings:
        table = _table(["setting", *(run.name for run in seen)])
        for row in settings:
            table.add_row(*row)
        console.print(table)


def _table(heads: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column(heads[0])
    for head in heads[1:]:
        table.add_column(head, justify="right")
    return table
