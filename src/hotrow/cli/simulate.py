"""`hotrow simulate`: what strategies would move for a trace, planned without any row."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hotrow.cli._slots import read_slots
from hotrow.run.config import load
from hotrow.run.files import to_json
from hotrow.run.trace import Trace
from hotrow.simulate import Simulated
from hotrow.simulate import simulate as simulate_trace
from hotrow.strategy import STRATEGIES, find_strategy

CACHING = [name for name, strategy in STRATEGIES.items() if strategy.has_slots]


def simulate(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file of a run; its [data] makes the trace.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Change the data's settings; repeatable."
        ),
    ] = None,
    slots: Annotated[
        str, typer.Option(help="Slots: numbers or percent of all rows, with commas between.")
    ] = "1%,5%,10%",
    strategies: Annotated[
        str,
        typer.Option(
            "--strategy",
            help=f"With commas between, of {', '.join(CACHING)}; with the others no row enters or "
            "leaves a slot.",
            show_default="all of them",
        ),
    ] = ",".join(CACHING),
    depth: Annotated[int, typer.Option(help="Batches known ahead, for lookahead.")] = 50,
    batches: Annotated[int, typer.Option(help="Batches that are counted.")] = 50,
    warm_up: Annotated[int, typer.Option(help="Batches before those, not counted.")] = 100,
    pin: Annotated[
        str,
        typer.Option(help="Hot rows to pin: by the trace's true 'ranks', or as 'learned' by use."),
    ] = "learned",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", metavar="", help="The same facts for machines, one object per line."
        ),
    ] = False,
) -> None:
    """Print hit rates and traffic of every strategy with slots, without a single row.

    The planner sees ids only, so it can be run over a trace by itself: seconds instead of hours,
    and no memory for tables. Of a run's file only `[data]` matters, `run.threads`, and whether its
    model reads sequences.

    The hit rate is the share of lookups that cause no fetch; several lookups of one row in a batch
    cause one at most, so `uncached` has hits, too. Batches whose rows do not fit the slots together
    are chunked: their rows pass through one part after another, and none stays.

    **Examples**

    - `hotrow simulate`

    - `hotrow simulate run.toml --slots 2%,10%,500000 --strategy lru,lookahead`

    - `hotrow simulate configs/traffic-study.toml --slots 1%,2%,5% --pin ranks --depth 50`
    """
    for setting in settings or ():
        _refuse_unused(setting)
    config = load(file, overrides=settings or ())
    # Steps this short gain little from a second thread, and lose much when a core is busy.
    torch.set_num_threads(config.run.threads or 1)
    trace = Trace(config.data, steps=config.model.num_steps)
    sizes = [read_slots(part, trace.num_rows) for part in slots.split(",")]
    chosen = [find_strategy(name.strip()) for name in strategies.split(",")]
    if pin not in ("ranks", "learned"):
        raise ValueError(f"--pin must be ranks or learned, not {pin!r}")
    for name, value in (("--depth", depth), ("--batches", batches), ("--warm-up", warm_up)):
        if value < (least := int(name == "--batches")):
            raise ValueError(f"{name} must be at least {least}, not {value}")
    total = warm_up + batches
    bar = _bar()
    task = bar.add_task("planning", total=total)
    with nullcontext() if as_json else bar:
        found = simulate_trace(
            trace.batches(total),
            num_rows=trace.num_rows,
            choices=[(strategy, size) for size in sizes for strategy in chosen],
            depth=depth,
            warm_up=warm_up,
            hottest=trace.hottest if pin == "ranks" else None,
            on_batch=lambda: bar.advance(task),
        )
    if as_json:
        for each in found:
            typer.echo(to_json(_facts(each)))
    else:
        Console().print(_table(found, trace.num_rows))


_INSTEAD = {"budget": "--slots", "strategy": "--strategy", "depth": "--depth"}


def _refuse_unused(setting: str) -> None:
    """Settings of a file may be there for training; one given by hand is meant."""
    section, _, key = setting.partition("=")[0].strip().partition(".")
    if section in ("embedding", "model", "training"):
        option = _INSTEAD.get(key) if section == "embedding" else None
        raise ValueError(
            f"--set {setting}: a simulation uses [data] and run.threads alone"
            + (f"; give {option} instead" if option else "")
        )


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches"),
        TimeRemainingColumn(),
        transient=True,
    )


def _facts(found: Simulated) -> dict[str, float | int | str]:
    return {
        **asdict(found),
        "hit_rate": found.hit_rate,
        "rows_per_batch": found.rows_per_batch,
        "lookups_per_second": found.lookups_per_second,
    }


def _table(found: Sequence[Simulated], num_rows: int) -> Table:
    table = Table(
        title=f"{num_rows:,} rows, {found[0].lookups // found[0].batches:,} lookups and "
        f"{found[0].unique_rows // found[0].batches:,} unique rows per batch",
        title_justify="left",
    )
    for name in ("slots", "strategy", "ahead", "hit rate", "rows/batch", "planned/s", "chunked"):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    before = None
    for each in found:
        if before not in (None, each.slots):
            table.add_section()
        before = each.slots
        table.add_row(
            f"{each.slots:,}",
            each.strategy,
            str(each.depth),
            f"{each.hit_rate:.2%}",
            f"{each.rows_per_batch:,.0f}",
            f"{each.lookups_per_second / 1e6:.1f} M",
            f"{each.chunked_batches} of {each.batches}",
        )
    return table
