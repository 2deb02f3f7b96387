"""`hotrow simulate`: what strategies would move for a trace, planned without any row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from hotrow.cli._slots import read_slots
from hotrow.reuse import NEVER, Reuse, belady
from hotrow.run.config import load
from hotrow.run.files import to_json
from hotrow.run.named import find_named
from hotrow.run.trace import Trace
from hotrow.simulate import Simulated
from hotrow.simulate import simulate as simulate_trace
from hotrow.strategy import STRATEGIES, Strategy

_MOST_ROWS = 1 << 28  # up to here their last uses, 4 bytes each, are affordable
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
    depths: Annotated[
        str,
        typer.Option(
            "--depths",
            "--depth",
            help="Batches known ahead, for lookahead: numbers with commas between.",
        ),
    ] = "50",
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
    cause one at most, so `uncached` has hits, too, and rows that are pinned before any lookup asks
    for them cause none. Batches whose rows do not fit the slots together
    are chunked: their rows pass through one part after another, and none stays. `belady` is the
    least that anyone could fetch who knows all batches; only rows that `--pin ranks` puts there
    before the first one may save more.

    **Examples**

    - `hotrow simulate`

    - `hotrow simulate run.toml --slots 2%,10%,500000 --strategy lru,lookahead`

    - `hotrow simulate configs/traffic-study.toml --slots 1%,2%,5% --pin ranks --depths 50,200`
    """
    for setting in settings or ():
        _refuse_unused(setting)
    config = load(file, overrides=settings or ())
    # Steps this short gain little from a second thread, and lose much when a core is busy.
    torch.set_num_threads(config.run.threads or 1)
    trace = Trace(config.data, steps=config.model.num_steps)
    sizes = [read_slots(part, trace.num_rows) for part in slots.split(",")]
    chosen = [_simulated(name.strip()) for name in strategies.split(",")]
    if pin not in ("ranks", "learned"):
        raise ValueError(f"--pin must be ranks or learned, not {pin!r}")
    known = [_depth(part) for part in depths.split(",")]
    for name, value in (("--batches", batches), ("--warm-up", warm_up)):
        if value < (least := int(name == "--batches")):
            raise ValueError(f"{name} must be at least {least}, not {value}")
    choices = [
        (each, size)
        for size in sizes
        for strategy in chosen
        for each in _at_depths(strategy, known)
    ]
    # What is known ahead of the last batch that counts must be there.
    total = warm_up + batches + max(each.look_ahead or 0 for each, _ in choices)
    bound = _Bound(trace.num_rows)
    bar = _bar()
    task = bar.add_task("planning", total=total)
    with nullcontext() if as_json else bar:
        found = simulate_trace(
            bound.watched(trace.batches(total)),
            num_rows=trace.num_rows,
            choices=choices,
            warm_up=warm_up,
            counted=batches,
            hottest=trace.hottest if pin == "ranks" else None,
            on_batch=lambda: bar.advance(task),
        )
    least_rows = bound.rows_per_batch(sizes, warm_up, batches)
    if as_json:
        for each in _with_bound([_facts(each) for each in found], least_rows):
            typer.echo(to_json(each))
    else:
        Console().print(_table(found, trace.num_rows, least_rows))


def _depth(text: str) -> int:
    try:
        found = int(text)
    except ValueError:
        raise ValueError(f"--depths: cannot read {text.strip()!r}; write 50 or 50,200") from None
    if found < 0:
        raise ValueError(f"--depths must be at least 0, not {found}")
    return found


def _at_depths(strategy: Strategy, depths: Sequence[int]) -> list[Strategy]:
    """Where a strategy does not say itself how many batches it knows ahead."""
    if strategy.look_ahead is not None:
        return [strategy]
    return [replace(strategy, look_ahead=depth) for depth in depths]


class _Bound:
    """Belady's bound, of the batches that go by."""

    def __init__(self, num_rows: int) -> None:
        self._reuse = Reuse()
        self._last_use = None
        if num_rows <= _MOST_ROWS:
            self._last_use = np.full(num_rows, NEVER, dtype=np.int32)

    def watched(self, trace: Iterable[Tensor]) -> Iterator[Tensor]:
        for ids in trace:
            if self._last_use is not None:
                rows = np.unique(ids.numpy())
                self._reuse.add(self._last_use[rows])
                self._last_use[rows] = self._reuse.batches - 1
            yield ids

    def rows_per_batch(self, slots: Sequence[int], first: int, counted: int) -> dict[int, float]:
        """By how many slots there are; those in which a batch does not fit are left out."""
        uses = self._reuse.next_uses()
        if self._last_use is None or uses is None:
            return {}
        curve = belady(uses, slots, first=first, counted=counted)
        rows = zip(curve.slots.tolist(), curve.per_batch.tolist(), strict=True)
        return {size: least for size, least in rows if not math.isnan(least)}


_INSTEAD = {"budget": "--slots", "strategy": "--strategy", "depth": "--depths"}


def _refuse_unused(setting: str) -> None:
    """Settings of a file may be there for training; one given by hand is meant."""
    section, _, key = setting.partition("=")[0].strip().partition(".")
    if section in ("embedding", "model", "training"):
        option = _INSTEAD.get(key) if section == "embedding" else None
        if option == "--strategy":
            _simulated(setting.partition("=")[2].strip())
        raise ValueError(
            f"--set {setting}: a simulation uses [data] and run.threads alone"
            + (f"; give {option} instead" if option else "")
        )


def _simulated(name: str) -> Strategy:
    """A strategy of rows: what orders samples, or leaves some out, is decided by training."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    named = find_named(name)
    rows = named.rows.name
    told = f"; its rows follow {rows}: give --strategy {rows}" if named.rows.has_slots else ""
    raise ValueError(
        f"--strategy {name}: which samples are trained, and when, is decided while training, so it "
        f"is not simulated{told}. Simulated are {', '.join(CACHING)}"
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


def _with_bound(
    facts: Sequence[dict[str, Any]], least: Mapping[int, float]
) -> Iterator[dict[str, Any]]:
    """After the strategies of each number of slots, the bound."""
    for each, following in zip(facts, [*facts[1:], None], strict=True):
        yield each
        size = each["slots"]
        if size in least and (following is None or following["slots"] != size):
            lookups, batches = each["lookups"], each["batches"]
            yield {
                "strategy": "belady",
                "slots": size,
                "batches": batches,
                "lookups": lookups,
                "unique_rows": each["unique_rows"],
                "fetched_rows": round(least[size] * batches),
                "hit_rate": 1 - least[size] * batches / max(1, lookups),
                "rows_per_batch": least[size],
            }


def _table(found: Sequence[Simulated], num_rows: int, least: Mapping[int, float]) -> Table:
    table = Table(
        title=f"{num_rows:,} rows, {found[0].lookups // found[0].batches:,} lookups and "
        f"{found[0].unique_rows // found[0].batches:,} unique rows per batch",
        title_justify="left",
    )
    for name in ("slots", "strategy", "ahead", "hit rate", "rows/batch", "planned/s", "chunked"):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    before = None
    for each in _with_bound([_facts(each) for each in found], least):
        if before not in (None, each["slots"]):
            table.add_section()
        before = each["slots"]
        is_planned = "depth" in each
        table.add_row(
            f"{each['slots']:,}",
            each["strategy"],
            str(each["depth"]) if is_planned else "all",
            f"{each['hit_rate']:.2%}",
            f"{each['rows_per_batch']:,.0f}",
            f"{each['lookups_per_second'] / 1e6:.1f} M" if is_planned else "",
            f"{each['chunked_batches']} of {each['batches']}" if is_planned else "",
        )
    return table
