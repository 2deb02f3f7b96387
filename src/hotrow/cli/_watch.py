"""What people see of a run while it trains, and what machines read instead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text as StyledText

from hotrow.cli._output import JsonLines, warn_people
from hotrow.report.page import Section, Table, facts_table
from hotrow.report.rank_tables import balance_in_words
from hotrow.report.terminal import show_parts
from hotrow.run.files import to_dict, to_json
from hotrow.run.job import Job
from hotrow.run.session import Advance, Result
from hotrow.run.strategy_names import find_named
from hotrow.run.tally import Tally
from hotrow.run.tracing import TRACE_FILE
from hotrow.support.messages import apart, few, many
from hotrow.support.records import WORSE_THAN_CONSTANT, RunRecord
from hotrow.support.units import show_bytes

_IN_PROGRESS = (
    "samples_per_second", "loss", "auc", "hit_rate", "bytes_per_second", "waited",
)  # fmt: skip


class _View(Progress):
    """A bar, and below it as many facts as fit on a line, the first ones first."""

    facts: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        fitting = (" · ".join(self.facts[:count]) for count in range(len(self.facts), 0, -1))
        line = next((line for line in fitting if cell_len(line) <= self.console.width), "")
        yield StyledText(line, style="dim")


class Screen:
    """Tables and a progress bar."""

    def __init__(self, quiet: bool = False) -> None:
        self._console, self._quiet = Console(highlight=False), quiet
        self._memory: Mapping[str, int] = {}
        self._all_rows, self._is_of_rank = 0, False
        self.warned: list[str] = []

    def warn(self, message: str) -> None:
        self.warned.append(message)
        warn_people(message)

    def start(self, job: Job, folder: Path) -> None:
        config, embedding = job.config, job.embedding
        self._memory, self._all_rows = embedding.memory(), embedding.bytes_total
        if self._quiet:
            return
        rows, size, on_ranks = embedding.num_rows, embedding.bytes_total, ""
        if embedding.ranks is not None:
            self._is_of_rank = True
            on_ranks = (
                f", on {embedding.ranks.size} ranks; rank 0 owns {many(rows, 'row')} "
                f"({show_bytes(size)}), and memory is that of rank 0"
            )
            rows = sum(table.num_embeddings for table in embedding.tables)
            size = config.row_bytes * rows
        whose = f" of {escape(config.data.folder)}" if config.data.folder is not None else ""
        self._console.print(
            f"[bold]{folder}[/]: {config.model.kind}, "
            f"{many(len(embedding.tables), 'table')}{whose}, {many(rows, 'row')} "
            f"({show_bytes(size)} with optimizer state), "
            f"strategy {config.embedding.strategy}{on_ranks}"
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
        # Last, so that it is dropped first: it was printed before and does not change.
        memory = [f"memory {show_bytes(taken)}"] if title == "training" else []

        def advance(tally: Tally) -> None:
            speed = f"{tally.samples_per_second:,.0f} samples/s"
            bar.facts = [*progress_facts(tally), *memory]
            total = tally.expected or max(steps, tally.steps)
            bar.update(task, completed=tally.steps, total=total, speed=speed)

        with bar:
            yield advance

    def _show_memory(self, memory: Mapping[str, int], when: str = "") -> None:
        # Without slots no memory is taken before the first batch.
        if any(memory.values()) and not self._quiet:
            rows = [
                [part, show_bytes(size), f"{size / self._all_rows:.2%}"]
                for part, size in (*memory.items(), ("total", sum(memory.values())))
            ]
            share = "of its rows" if self._is_of_rank else "of all rows"
            table = Table(("part", "bytes", share), rows)
            show_parts([Section(f"fast memory{when}", [table])], self._console)

    def tell(self, event: str, **facts: Any) -> None:
        if event == "differs":
            self._console.print(f"[red]not equal to all-fast:[/] {few(facts['what'])}")
        elif event == "resumed":
            text = f"continues after step {facts['step']:,}, from {facts['checkpoint']}"
            self._console.print(text, soft_wrap=True)

    def end(self, result: Result) -> None:
        record, folder, saved = result.record, result.folder, result.saved
        if record.memory != self._memory:  # plans of a GPU grow, and ranks replicate pinned rows
            before, now = self._memory, record.memory
            parts = [x for x in now if now[x] != before.get(x, 0)] or list(before.keys() - now)
            self._show_memory(now, f" at the end, where {few(parts)} changed since the start")
        show_parts([facts_table(summary_facts(record))], self._console)
        how_to_continue = f"; {result.command} continues from it"
        where = "" if saved is None else f"checkpoint of step {saved.step:,} in {saved.folder}"
        where += how_to_continue if where and record.outcome != "finished" else ""
        if self._quiet:
            if where and record.outcome == "interrupted":
                typer.echo(where, err=True)
            return
        typer.echo(f"written to {folder}; hotrow report {folder} draws it")
        if (trace := folder / TRACE_FILE).is_file():
            typer.echo(f"trace in {trace}; https://ui.perfetto.dev and chrome://tracing open it")
        if result.model is not None:
            typer.echo(f"model saved to {result.model}; hotrow evaluate {folder} reads it")
        if where:
            typer.echo(where)


class RunLines(JsonLines):
    """Writes the same as JSON objects."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.warned: list[str] = []

    def warn(self, message: str) -> None:
        self.warned.append(message)
        super().warn(message)

    def start(self, job: Job, folder: Path) -> None:
        embedding = job.embedding
        self.write(
            "start",
            folder=str(folder),
            steps=job.total_steps,
            strategy=job.config.embedding.strategy,
            ranks=1 if embedding.ranks is None else embedding.ranks.size,
            rows=embedding.num_rows,
            slots=embedding.num_slots,
            bytes_total=embedding.bytes_total,
            memory=embedding.memory(),
            fills={str(dim): asdict(choice) for dim, choice in embedding.fills().items()},
        )

    @contextmanager
    def progress(self, title: str, *, steps: int) -> Iterator[Advance]:
        self._last = -math.inf  # write the first step of each stage

        def advance(tally: Tally) -> None:
            if self.progress_is_due(now=tally.steps == steps):
                self.write("progress", stage=title, step=tally.steps, **tally.facts(*_IN_PROGRESS))

        yield advance

    tell = JsonLines.write

    def end(self, result: Result) -> None:
        model, saved = result.model, result.saved
        facts = {
            "event": "end",
            "folder": str(result.folder),
            "model": None if model is None else str(model),
            "checkpoint": None if saved is None else str(saved.folder),
            **to_dict(result.record),
        }
        typer.echo(to_json(facts))


class OtherRank:
    """Shows nothing: the first rank does. Keeps warnings, of which that one may not know."""

    def __init__(self) -> None:
        self.warned: list[str] = []

    def warn(self, message: str) -> None:
        self.warned.append(message)

    def start(self, job: Job, folder: Path) -> None: ...

    @contextmanager
    def progress(self, title: str, *, steps: int) -> Iterator[Advance]:
        yield lambda tally: None

    def tell(self, event: str, **facts: Any) -> None: ...

    def end(self, result: Result) -> None: ...


def progress_facts(tally: Tally) -> list[str]:
    loss = [f"loss {tally.loss:.3f}"] if tally.losses else []
    auc = [] if math.isnan(tally.auc) else [f"AUC {tally.auc:.3f}"]
    waited = [] if math.isnan(tally.waited) else [f"waited {tally.waited:.0%}"]
    moved = [f"hits {tally.hit_rate:.1%}", f"link {show_bytes(tally.bytes_per_second)}/s"]
    return [*loss, *auc, *moved, *waited]


def summary_facts(record: RunRecord) -> dict[str, str]:
    summary, limit = record.summary, record.limit
    contract = find_named(record.settings["embedding"]["strategy"]).contract
    equality = {
        None: "not compared",
        True: "yes, to the bit: rows, row state, dense weights, "
        + many(summary.steps, "loss", "losses"),
        False: "NO" if contract == "exact" else f"not to the bit, and promised is: {contract}",
    }
    # A run that was stopped was not tested.
    split = "validation" if record.outcome == "interrupted" else "test"
    facts = {
        "outcome": f"{record.outcome} after {many(summary.steps, 'step')}, "
        + many(summary.samples, "sample"),
        f"{split} AUC": "not evaluated" if math.isnan(summary.auc) else f"{summary.auc:.4f}",
        f"{split} log-loss": _log_loss(record),
        "hit rate": f"{summary.hit_rate:.2%} of {many(summary.lookups, 'lookup')}",
        "slots": _slots(record),
        **record.told,
    }
    if summary.chunked_batches:
        chunked = many(summary.chunked_batches, "batch", "batches")
        facts["too large for the slots"] = f"{chunked}, in chunks"
    facts["moved"] = show_bytes(summary.bytes_moved)
    if summary.bytes_sent:
        facts["sent between ranks"] = show_bytes(summary.bytes_sent)
    if record.ranks:
        facts[many(len(record.ranks), "rank")] = f"largest / mean: {balance_in_words(record.ranks)}"
    facts["speed"] = f"{summary.samples_per_second:,.0f} samples/s"
    if limit is not None:
        facts["limited by"] = f"{limit.name}, {limit.share:.0%} of a step"
    facts["equal to all-fast"] = equality[summary.equal_to_all_fast]
    return facts


def _slots(record: RunRecord) -> str:
    if not record.summary.fast_rows_share:
        return "none: rows stay in slow memory"
    strategy = find_named(record.settings["embedding"]["strategy"]).rows
    kept = "" if strategy.keeps_rows else ", none kept between batches"
    return f"for {record.summary.fast_rows_share:.2%} of the rows{kept}"


def _log_loss(record: RunRecord) -> str:
    if not record.evaluations:
        return "not evaluated"
    last = record.evaluations[-1]
    if math.isnan(last.normalised_entropy):
        return f"{last.log_loss:.4f}"
    entropy, _ = apart(last.normalised_entropy, 1.0, digits=4, kind="f")
    text = f"{last.log_loss:.4f}, normalised entropy {entropy}"
    return f"{text}: {WORSE_THAN_CONSTANT}" if last.is_worse_than_constant else text
