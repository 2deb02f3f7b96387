"""What people see of a run, and what machines read instead: two objects with the same verbs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hotrow.run.files import to_dict, to_json
from hotrow.run.job import Job
from hotrow.run.saving import Saved
from hotrow.run.strategy_names import find_named
from hotrow.run.tally import Tally
from hotrow.run.tracing import TRACE_FILE
from hotrow.support.messages import apart, few, many
from hotrow.support.records import WORSE_THAN_CONSTANT, Limit, RunRecord
from hotrow.support.units import show_bytes

Advance = Callable[[Tally], None]


def tell_people(message: str) -> None:
    typer.echo(f"warning: {message}", err=True)


@contextmanager
def one_line_warnings(tell: Callable[[str], None] = tell_people) -> Iterator[None]:
    """Warnings inside are told as sentences: which line of Python warns is nothing to act upon."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: tell(" ".join(str(message).split()))
        yield


@contextmanager
def counted(title: str, samples: int) -> Iterator[Callable[[Iterable[Any]], Iterator[Any]]]:
    """Gives what counts the samples of batches that pass through it, with a bar on stderr."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(title, total=samples)

    def passing(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            bar.advance(task, len(batch))

    with bar:
        yield passing


class Show(Protocol):
    def warn(self, message: str) -> None: ...
    def start(self, job: Job, folder: Path) -> None: ...
    def progress(self, title: str, *, steps: int) -> Any: ...
    def differs(self, what: list[str]) -> None: ...
    def resumed(self, step: int, checkpoint: Path) -> None: ...
    def saved(self, saved: Saved) -> None: ...
    def end(
        self, record: RunRecord, folder: Path, model: Path | None, saved: Saved | None
    ) -> None: ...


class _View(Progress):
    """A bar, and below it a line of as many facts as there is room for, the first ones first."""

    facts: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        fitting = (" · ".join(self.facts[:count]) for count in range(len(self.facts), 0, -1))
        line = next((each for each in fitting if cell_len(each) <= self.console.width), "")
        yield Text(line, style="dim")


class Screen:
    """Tables and a progress bar."""

    def __init__(self, quiet: bool = False) -> None:
        self._console, self._quiet = Console(highlight=False), quiet
        self._memory: Mapping[str, int] = {}
        self._all_rows = 0

    def warn(self, message: str) -> None:
        tell_people(message)

    def start(self, job: Job, folder: Path) -> None:
        config, embedding = job.config, job.embedding
        self._memory, self._all_rows = embedding.memory(), embedding.bytes_total
        if self._quiet:
            return
        # Whatever the run's file says of generated tables.
        whose = f" of {escape(config.data.folder)}" if config.data.folder is not None else ""
        self._console.print(
            f"[bold]{folder}[/]: {config.model.kind}, "
            f"{many(len(embedding.tables), 'table')}{whose}, {many(embedding.num_rows, 'row')} "
            f"({show_bytes(embedding.bytes_total)} with optimizer state), "
            f"strategy {config.embedding.strategy}"
        )
        for dim, choice in embedding.fills().items():
            self._console.print(f"rows of width {dim} move {choice}")
        self._show_memory(self._memory)

    @contextmanager
    def progress(self, title: str, *, steps: int) -> Iterator[Advance]:
        bar = _View(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
            disable=self._quiet,
        )
        task = bar.add_task(title, total=steps, speed="")
        taken = sum(self._memory.values())
        # Last: the first to go, since it stays the same, and was told before.
        memory = [f"memory {show_bytes(taken)}"] if title == "training" else []

        def advance(tally: Tally) -> None:
            speed = f"{tally.samples_per_second:,.0f} samples/s"
            bar.facts = [*_facts(tally), *memory]
            total = tally.expected or max(steps, tally.steps)
            bar.update(task, completed=tally.steps, total=total, speed=speed)

        with bar:
            yield advance

    def _show_memory(self, memory: Mapping[str, int]) -> None:
        # Without slots nothing is taken before the first batch.
        if any(memory.values()) and not self._quiet:
            self._console.print(_memory_table(memory, all_rows=self._all_rows))

    def differs(self, what: list[str]) -> None:
        self._console.print(f"[red]not equal to all-fast:[/] {few(what)}")

    def resumed(self, step: int, checkpoint: Path) -> None:
        self._console.print(f"goes on after step {step:,}, from {checkpoint}", soft_wrap=True)

    def saved(self, saved: Saved) -> None: ...

    def end(self, record: RunRecord, folder: Path, model: Path | None, saved: Saved | None) -> None:
        if record.memory != self._memory:  # a GPU's plans are as large as batches turn out to be
            self._show_memory(record.memory)
        table = Table(show_header=False, box=None, padding=(0, 2))
        for key, value in _summary(record).items():
            table.add_row(key, value)
        self._console.print(table)
        if self._quiet:
            if saved is not None and record.outcome == "interrupted":
                typer.echo(_where(saved, record, folder), err=True)
            return
        self._console.print(f"written to {folder}; hotrow report {folder} draws it", soft_wrap=True)
        if (trace := folder / TRACE_FILE).is_file():
            told = f"trace in {trace}; https://ui.perfetto.dev and chrome://tracing open it"
            self._console.print(told, soft_wrap=True)
        if model is not None:
            told = f"model saved to {model}; hotrow evaluate {folder} reads it"
            self._console.print(told, soft_wrap=True)
        if saved is not None:
            self._console.print(_where(saved, record, folder), soft_wrap=True)


def _where(saved: Saved, record: RunRecord, folder: Path) -> str:
    told = f"checkpoint of step {saved.step:,} in {saved.folder}"
    goes_on = f"; hotrow train {folder} --resume goes on from it"
    return told if record.outcome == "finished" else told + goes_on


class JsonLines:
    """One JSON object per line; progress at most once a second."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet

    def warn(self, message: str) -> None:
        typer.echo(to_json({"event": "warning", "message": message}))

    def start(self, job: Job, folder: Path) -> None:
        embedding = job.embedding
        self._write(
            "start",
            folder=str(folder),
            steps=job.total_steps,
            strategy=job.config.embedding.strategy,
            rows=embedding.num_rows,
            slots=embedding.num_slots,
            bytes_total=embedding.bytes_total,
            memory=embedding.memory(),
            fills={str(dim): asdict(choice) for dim, choice in embedding.fills().items()},
        )

    @contextmanager
    def progress(self, title: str, *, steps: int) -> Iterator[Advance]:
        last = -math.inf

        def advance(tally: Tally) -> None:
            nonlocal last
            if monotonic() - last >= 1 or tally.steps == steps:
                last = monotonic()
                self._write(
                    "progress",
                    stage=title,
                    step=tally.steps,
                    samples_per_second=tally.samples_per_second,
                    loss=tally.loss,
                    auc=tally.auc,
                    hit_rate=tally.hit_rate,
                    bytes_per_second=tally.bytes_per_second,
                    waited=tally.waited,
                )

        yield advance

    def differs(self, what: list[str]) -> None:
        self._write("differs", what=what)

    def resumed(self, step: int, checkpoint: Path) -> None:
        self._write("resumed", step=step, checkpoint=str(checkpoint))

    def saved(self, saved: Saved) -> None:
        facts = {"step": saved.step, "seconds": saved.seconds, "pause": saved.pause}
        self._write("checkpoint", folder=str(saved.folder), **facts, waited=saved.waited)

    def end(self, record: RunRecord, folder: Path, model: Path | None, saved: Saved | None) -> None:
        told = {
            "event": "end",
            "folder": str(folder),
            "model": None if model is None else str(model),
            "checkpoint": None if saved is None else str(saved.folder),
            **to_dict(record),
        }
        typer.echo(to_json(told))

    def _write(self, event: str, **facts: Any) -> None:
        if not self._quiet:
            typer.echo(to_json({"event": event, **facts}))


def _facts(tally: Tally) -> list[str]:
    loss = [f"loss {tally.loss:.3f}"] if tally.losses else []
    auc = [] if math.isnan(tally.auc) else [f"AUC {tally.auc:.3f}"]
    waited = [] if math.isnan(tally.waited) else [f"waited {tally.waited:.0%}"]
    moved = [f"hits {tally.hit_rate:.1%}", f"link {show_bytes(tally.bytes_per_second)}/s"]
    return [*loss, *auc, *moved, *waited]


def _memory_table(memory: Mapping[str, int], *, all_rows: int) -> Table:
    table = Table(box=None, padding=(0, 2), title="fast memory", title_justify="left")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("of all rows", justify="right")
    for part, size in (*memory.items(), ("total", sum(memory.values()))):
        table.add_row(part, show_bytes(size), f"{size / all_rows:.2%}")
    return table


def _slots(record: RunRecord) -> str:
    if not record.summary.fast_rows_share:
        return "none: rows stay in slow memory"
    strategy = find_named(record.settings["embedding"]["strategy"]).rows
    kept = "" if strategy.keeps_rows else ", none kept between batches"
    return f"for {record.summary.fast_rows_share:.2%} of the rows{kept}"


def _summary(record: RunRecord) -> dict[str, str]:
    found = record.summary
    contract = find_named(record.settings["embedding"]["strategy"]).contract
    equality = {
        None: "not compared",
        True: "yes, to the bit: rows, row state, dense weights, "
        + many(found.steps, "loss", "losses"),
        False: "NO" if contract == "exact" else f"not to the bit, and promised is: {contract}",
    }
    # A run that was stopped has seen no test sample.
    split = "validation" if record.outcome == "interrupted" else "test"
    chunked = {}
    if found.chunked_batches:
        chunked["too large for the slots"] = (
            many(found.chunked_batches, "batch", "batches") + ", in chunks"
        )
    return {
        "outcome": f"{record.outcome} after {many(found.steps, 'step')}, "
        + many(found.samples, "sample"),
        f"{split} AUC": "not evaluated" if math.isnan(found.auc) else f"{found.auc:.4f}",
        f"{split} log-loss": _log_loss(record),
        "hit rate": f"{found.hit_rate:.2%} of {many(found.lookups, 'lookup')}",
        "slots": _slots(record),
        **record.told,
        **chunked,
        "moved": show_bytes(found.bytes_moved),
        "speed": f"{found.samples_per_second:,.0f} samples/s",
        **({} if record.limit is None else {"limited by": _limit(record.limit)}),
        "equal to all-fast": equality[found.equal_to_all_fast],
    }


def _limit(limit: Limit) -> str:
    return f"{limit.name}, {limit.share:.0%} of a step"


def _log_loss(record: RunRecord) -> str:
    if not record.evaluations:
        return "not evaluated"
    last = record.evaluations[-1]
    if math.isnan(last.normalised_entropy):
        return f"{last.log_loss:.4f}"
    entropy, _ = apart(last.normalised_entropy, 1.0, digits=4, kind="f")
    told = f"{last.log_loss:.4f}, normalised entropy {entropy}"
    return f"{told}: {WORSE_THAN_CONSTANT}" if last.is_worse_than_constant else told
