"""`hotrow compare`: strategies side by side on one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Annotated, Protocol

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
from hotrow.cli._ranks import (
    check_settings,
    ending_together,
    launch,
    read_ranks,
    share_cores,
)
from hotrow.report.comparison import advise, comparison_document
from hotrow.report.page import page_of
from hotrow.report.terminal import show_parts
from hotrow.run.config import RunConfig, load
from hotrow.run.files import COMPARISON_PAGE, new_folder, to_dict, to_json, write_comparison
from hotrow.run.ranks import RunRanks, find_place
from hotrow.run.session import refuse_small_batches
from hotrow.run.stopping import StopAfterStep
from hotrow.study.compare import USUAL, Comparison, Entry, Turn, choose
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
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Train each strategy on N ranks of this machine, which share rows and batches.",
            show_default="one, or those of torchrun",
        ),
    ] = None,
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

    - `hotrow compare run.toml --ranks 2 --strategies all-fast,lookahead,fae`

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

    **--ranks 2** trains one strategy after the other on two ranks, as `hotrow train --ranks` does,
    and compares them with all-fast on as many. Speeds, hit rates and moved rows are those of all
    ranks; the budget and fast memory are of one. A table says what ranks sent each other, and how
    evenly they worked.

    A strategy that fails is reported, and the others go on. Exit codes: 0; 1 an exact strategy is
    not equal to all-fast, or one did not repeat its bits; 3 a loss is NaN; 4 a strategy failed;
    130 Ctrl-C, which ends after the step under way with what there is.
    """
    refuse_settings(settings or (), _REFUSED)
    if repeat < 1:
        raise ValueError(f"--repeat must be at least 1, not {repeat}")
    config = load(file, overrides=[*([_SHORT] if file is None else []), *(settings or ())])
    names = None if strategies is None else [name.strip() for name in strategies.split(",")]
    entries, place = choose(config, names, repeat=repeat), find_place()
    count = 1 if ranks is None else read_ranks(ranks, place)
    if count > 1:
        refuse_small_batches(config, count)  # before ranks are started
        check_folder("--out", out)
        words = _words(file, settings or (), strategies, warm_up, out)
        flags = [name for name, is_on in (("--json", as_json), ("--quiet", quiet)) if is_on]
        raise typer.Exit(launch([*words, "--repeat", str(repeat), *flags], count))
    team = RunRanks(place)
    with ending_together(team):
        team.open(config.run.device)
        team.check_versions()
        check_settings(team, "hotrow compare", config)
        _check_choice(team, entries, warm_up)
        show: _Show = _OtherRank()
        if team.is_first:
            show = _Lines(quiet) if as_json else _Screen(quiet)
        with one_line_warnings(show.warn):
            if team.size > 1:
                share_cores(config.run, place)
            else:
                use_threads(config.run, show.warn)
            stop = StopAfterStep(ranks=team.size, is_first=team.is_first)
            comparison = Comparison(
                config, entries, warm_up=warm_up, team=team, requests=stop.requests
            )
            folder = Path(team.from_first(lambda: str(_folder(out, config))))
            with stop:
                record = _run(comparison, show, stop, folder if team.is_first else None)
        if team.is_first:
            show.end(record, folder)
        if code := INTERRUPTED if stop.asked else _exit_code(record):
            raise typer.Exit(code)


def _folder(out: Path | None, config: RunConfig) -> Path:
    """Return the folder of the results, which is there."""
    check_folder("--out", out)
    return out or new_folder(Path("comparisons"), config.run.name, option="--out")


def _words(
    file: Path | None,
    settings: Sequence[str],
    strategies: str | None,
    warm_up: int | None,
    out: Path | None,
) -> list[str]:
    """Return the command that each rank runs, without its flags."""
    words = ["compare", *(() if file is None else (str(file),))]
    for setting in settings:
        words += ["--set", setting]
    options = {"--strategies": strategies, "--warm-up": warm_up, "--out": out}
    for name, value in options.items():
        words += [] if value is None else [name, str(value)]
    return words


def _check_choice(team: RunRanks, entries: Sequence[Entry], warm_up: int | None) -> None:
    """Raise on all ranks if they were asked to compare different things."""
    named = {entry.kind.name: entry.repetitions for entry in entries}
    mine = json.dumps({"strategies": named, "warm-up": warm_up})
    team.check_equal("hotrow compare", [json.loads(text) for text in team.do(lambda: mine)])


def _run(
    comparison: Comparison, show: _Show, stop: StopAfterStep, folder: Path | None
) -> ComparisonRecord:
    """Train; however it ends, the files in the folder hold the results so far. None: another rank
    writes them."""
    outcome, turns = "interrupted", comparison.run(folder)
    try:
        with show.progress(comparison) as advance:
            for turn in turns:
                advance(turn)
                if turn.is_over:
                    _write(comparison, "under way", folder)
                stop.agree(turn.requested)
                if stop.asked:
                    break
            else:
                outcome = "finished"
    finally:
        turns.close()  # first, to free the system that it holds
        record = _write(comparison, outcome, folder)
    stop.check()
    return record


def _write(comparison: Comparison, outcome: str, folder: Path | None) -> ComparisonRecord:
    record = comparison.record(outcome)
    if folder is None:
        return record
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


class _Show(Protocol):
    """Shows a comparison."""

    def warn(self, message: str) -> None: ...
    def progress(self, comparison: Comparison) -> AbstractContextManager[Advance]: ...
    def end(self, record: ComparisonRecord, folder: Path) -> None: ...


class _OtherRank:
    """Shows nothing: the first rank does, and warns of the same."""

    def warn(self, message: str) -> None: ...

    @contextmanager
    def progress(self, comparison: Comparison) -> Iterator[Advance]:
        yield lambda turn: None

    def end(self, record: ComparisonRecord, folder: Path) -> None: ...


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
