"""`hotrow compare`: strategies side by side on one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import TaskProgressColumn

from hotrow.cli._options import JsonLinesFlag, RunFile, Settings, check_folder, refuse_settings
from hotrow.cli._output import JsonLines, one_line_warnings, progress_bar, warn_people
from hotrow.cli._process import (
    DIVERGED,
    FAILED_STRATEGY,
    INTERRUPTED,
    UNEQUAL,
    use_threads,
)
from hotrow.report.comparison import advise, comparison_document
from hotrow.report.page import page_of
from hotrow.report.terminal import show_parts
from hotrow.run.config import load
from hotrow.run.files import COMPARISON_PAGE, new_folder, to_dict, to_json, write_comparison
from hotrow.run.stopping import StopAfterStep
from hotrow.study.compare import USUAL, Comparison, Turn, choose
from hotrow.study.systems import SYSTEMS
from hotrow.support.records import ComparisonRecord

Advance = Callable[[Turn], None]

_SHORT = "training.steps=64"  # of the built-in job, so that all strategies take about a minute
_REFUSED = {"embedding.strategy": "name what is compared by --strategies instead"}


def compare(
    file: RunFile = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            help=f"With commas between, of {', '.join(SYSTEMS)}; +slipstream or +random-drop "
            "behind one leaves out samples.",
            show_default=f"{', '.join(USUAL)}, and the run's own",
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(help="How often each strategy is trained.")] = 3,
    warm_up: Annotated[
        int | None,
        typer.Option(
            help="First steps of each repetition that are not timed.", show_default="a tenth"
        ),
    ] = None,
    settings: Settings = None,
    as_json: JsonLinesFlag = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", metavar="", help="Nothing but the table at the end.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of compare.json and compare.html; those in it are replaced.",
            show_default="a new one, comparisons/NAME",
        ),
    ] = None,
) -> None:
    """Train one run by several strategies in turn, and say which to take.

    All of them start from the same rows and read the same batches in the same order. They take
    turns (A B C A B C ...), so that what disturbs a machine disturbs all alike, and one strategy's
    tables are in memory at a time. Without a file, 64 steps of the built-in job are trained.

    **Examples**

    - `hotrow compare`

    - `hotrow compare run.toml --strategies lookahead,lru,hybrid --repeat 5`

    - `hotrow compare run.toml --set run.device=cuda --set embedding.budget=5% --out report`

    - `hotrow compare --strategies hybrid,hybrid-plain --set embedding.optimizer.name=adagrad`

    - `hotrow compare run.toml --json --quiet`

    **What the columns are**

    - contract: what the strategy promises next to all-fast; exact means the same bits

    - samples/s: the median of whole runs, samples that a system leaves out included; beside it the
      median step of all repetitions, and from the 20th to the 80th percentile. The first steps of
      each repetition are left out. Batches are read into memory before, where they fit, and
      evaluation is not timed, but for what fae and slipstream evaluate while they train

    - speed-up: over hybrid, or over the first strategy where hybrid is not there

    - fast memory: all that was in use, by rows and for them

    - hit rate: the share of lookups that caused no fetch; rows and bytes: both ways, per sample

    - AUC, log-loss: on the test split, at the end alone: `training.eval_every` does not count

    - equal to all-fast: all losses, dense weights, rows and row state have the same bits, or are
      within the tolerance printed beside; all-fast is trained once for that if it is not asked for

    **hybrid-plain** is what published systems were compared with: nn.EmbeddingBag with sparse
    gradients on the CPU. It is not a strategy of a collection, and takes sgd, adagrad and adam.

    A strategy that fails is reported, and the others go on. Exit codes: 0; 1 an exact strategy is
    not equal to all-fast, or one did not repeat its bits; 3 a loss is NaN; 4 a strategy failed;
    130 Ctrl-C, which ends after the step under way with what there is.
    """
    refuse_settings(settings or (), _REFUSED)
    if repeat < 1:
        raise ValueError(f"--repeat must be at least 1, not {repeat}")
    config = load(file, overrides=[*([_SHORT] if file is None else []), *(settings or ())])
    names = None if strategies is None else [name.strip() for name in strategies.split(",")]
    entries = choose(config, names, repeat=repeat)
    show = _Lines(quiet) if as_json else _Screen(quiet)
    with one_line_warnings(show.warn):
        use_threads(config.run, show.warn)
        comparison = Comparison(config, entries, warm_up=warm_up)
        check_folder("--out", out)
        folder = out or new_folder(Path("comparisons"), config.run.name, option="--out")
        with StopAfterStep() as stop:
            record = _run(comparison, show, stop, folder)
    show.end(record, folder)
    if code := INTERRUPTED if stop.asked else _exit_code(record):
        raise typer.Exit(code)


def _run(
    comparison: Comparison, show: _Screen | _Lines, stop: StopAfterStep, folder: Path
) -> ComparisonRecord:
    """Train; however it ends, the files in the folder hold the results so far."""
    outcome, turns = "interrupted", comparison.run(folder)
    try:
        with show.progress(comparison) as advance:
            for turn in turns:
                advance(turn)
                if turn.is_over:
                    _write(comparison, "under way", folder)
                if stop.asked:
                    break
            else:
                outcome = "finished"
    finally:
        turns.close()  # first, to free the system that it holds
        record = _write(comparison, outcome, folder)
    return record


def _write(comparison: Comparison, outcome: str, folder: Path) -> ComparisonRecord:
    record = comparison.record(outcome)
    record = replace(record, advice=advise(record))
    write_comparison(folder, record, page_of(comparison_document(record)))
    return record


def _exit_code(record: ComparisonRecord) -> int:
    strategies = record.strategies
    is_unequal = any(each.contract == "exact" and each.equal == "no" for each in strategies)
    if is_unequal or any(each.repeatable is False for each in strategies):
        return UNEQUAL
    if any(each.outcome == "failed" and not each.is_optional for each in strategies):
        return FAILED_STRATEGY
    return DIVERGED if any(each.outcome == "diverged" for each in strategies) else 0


class _Screen:
    """A bar on stderr, and the document at the end."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def warn(self, message: str) -> None:
        if not self._quiet:
            warn_people(message)

    @contextmanager
    def progress(self, comparison: Comparison) -> Iterator[Advance]:
        console = Console(stderr=True, highlight=False)
        is_off = self._quiet or not console.is_terminal
        bar = progress_bar(console, TaskProgressColumn(), transient=True, disable=is_off)
        task = bar.add_task("reading batches", total=comparison.total_steps)
        done, last = 0, 0.0

        def advance(turn: Turn) -> None:
            nonlocal done, last
            if turn.is_over:
                done += comparison.steps
                if not self._quiet:
                    console.print(_line(turn))
            # Not with every step: drawing takes as long as a step on a GPU.
            if turn.stage != "training" or monotonic() - last > 0.1:
                last = monotonic()
                at = done if turn.is_over or turn.stage == "reading" else done + turn.steps
                bar.update(task, description=_where(turn), completed=at)

        with bar:
            yield advance

    def end(self, record: ComparisonRecord, folder: Path) -> None:
        show_parts(comparison_document(record).parts, quiet=self._quiet)
        if not self._quiet:
            typer.echo(f"written to {folder}; open {folder / COMPARISON_PAGE}")


class _Lines(JsonLines):
    """JSON objects, the table last."""

    def warn(self, message: str) -> None:
        self.write("warning", message=message)

    @contextmanager
    def progress(self, comparison: Comparison) -> Iterator[Advance]:
        self.write(
            "start",
            strategies=[entry.kind.name for entry in comparison.entries],
            steps=comparison.steps,
            warm_up=comparison.warm_up,
            budget_bytes=comparison.budget_bytes,
            rows_bytes=comparison.rows_bytes,
        )

        def advance(turn: Turn) -> None:
            if self.progress_is_due(now=turn.is_over):
                self.write("repetition" if turn.is_over else "progress", **asdict(turn))

        yield advance

    def end(self, record: ComparisonRecord, folder: Path) -> None:
        typer.echo(to_json({"event": "table", "folder": str(folder), **to_dict(record)}))


def _where(turn: Turn) -> str:
    if turn.stage == "reading":
        return f"reading batches ({turn.steps:,})"
    return f"{turn.strategy}, {turn.repetition} of {turn.repetitions}: {turn.stage}"


def _line(turn: Turn) -> str:
    """Return the line that stays on the screen after a turn."""
    what = f"{turn.strategy}, {turn.repetition} of {turn.repetitions}"
    if turn.stage == "failed":
        return f"{what}: [red]failed[/]"
    return f"{what}: {turn.samples_per_second:,.0f} samples/s, loss {turn.loss:.4f}"
