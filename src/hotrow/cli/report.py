"""`hotrow report`: the records of runs as one page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hotrow.cli._options import JsonFlag, Runs, check_file
from hotrow.cli._output import show, warn_people
from hotrow.report.charts import library
from hotrow.report.curves import Curve
from hotrow.report.page import NEEDS_PLOTLY, page_of
from hotrow.report.runs import RunView, runs_document
from hotrow.run.files import RUN_FILE, STEPS_FILE, read_run, read_start, read_steps, to_dict
from hotrow.run.open_run import find_run, runs_in
from hotrow.run.tally import Tally
from hotrow.run.tracing import TRACE_FILE, read_trace
from hotrow.support.files import Disk
from hotrow.support.records import RunRecord, StartRecord, StepRecord

REPORT_PAGE = "report.html"


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
    as_json: JsonFlag = False,
    runs: Runs = Path("runs"),
) -> None:
    """Draw one run, or several over each other, on one page.

    The page needs no network and opens from the disk: summary, loss, AUC, samples per second,
    where a step's time goes, hit rate and bytes moved, hit rates by table, fast memory by part, a
    few steps by stages, settings and environment. Of several runs, settings that differ come first.
    Of a run on several ranks, a table has a row for each rank, and says how evenly they worked.

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
    is_page = not (as_text or as_json)
    if is_page and library() is None:
        raise ValueError(NEEDS_PLOTLY)
    named = [find_run(name, runs) for name in names]
    folders = [folder for each in named for folder in _runs_of(each)]
    views = _views(folders, _unique_names(folders), set(folders) - set(named))
    page = out or (folders[0] if len(folders) == 1 else runs) / REPORT_PAGE
    if is_page:
        check_file("--out", page, such_as=REPORT_PAGE)
    document = runs_document(list(views))
    if is_page:
        Disk(page.parent).write(page.name, [page_of(document).encode()])
        typer.echo(f"written to {page}")
    else:
        show(document, as_json=as_json)


def _runs_of(folder: Path) -> list[Path]:
    """Return a run, or all runs in a folder."""
    is_run = (folder / RUN_FILE).is_file() or (folder / STEPS_FILE).is_file()
    return [folder] if is_run else runs_in(folder) or [folder]


def _unique_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names; their paths where two have the same."""
    short = [folder.name for folder in folders]
    names = [
        name if short.count(name) == 1 else str(folder)
        for name, folder in zip(short, folders, strict=True)
    ]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"run {name} is named twice")
    return names


def _views(folders: Sequence[Path], names: Sequence[str], listed: Set[Path]) -> Iterator[RunView]:
    """Yield the runs. A damaged one that was `listed` in a folder, and not named, is left out."""
    damaged = 0
    for folder, name in zip(folders, names, strict=True):
        try:
            yield _view(folder, name)
        except ValueError as error:
            damaged += 1
            if folder not in listed or damaged == len(folders):
                raise
            warn_people(f"{folder} is left out: {error}")


def _view(folder: Path, name: str) -> RunView:
    has_steps, has_ended = ((folder / file).is_file() for file in (STEPS_FILE, RUN_FILE))
    if not has_steps and not has_ended:
        raise ValueError(f"{folder} has neither {RUN_FILE} nor {STEPS_FILE}: it is no run")
    tally = Tally()

    def noted() -> Iterator[StepRecord]:
        for step in read_steps(folder) if has_steps else ():
            tally.add(step)
            yield step

    curve = Curve(noted())
    record = read_run(folder) if has_ended else _so_far(name, read_start(folder), tally)
    trace = folder / TRACE_FILE
    spans = read_trace(trace) if trace.is_file() else ()
    return RunView(name, record, curve, spans, values=to_dict(record))


def _so_far(name: str, start: StartRecord | None, tally: Tally) -> RunRecord:
    """Return the record of a run that has not ended, from its start and its steps."""
    start = start or StartRecord("", {}, {}, {})
    return RunRecord(name, outcome="not ended", summary=tally.summary(), **asdict(start))
