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
from rich.table import Table
from torch import Tensor

from hotrow.cli._bars import batches_bar
from hotrow.cli._html import HtmlFile, check_html, write_html
from hotrow.cli._numbers import check_dense_ms, read_depths, read_slots
from hotrow.engine.evict import EVICTIONS
from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.report.simulated import page_of_simulation
from hotrow.run.config import RunConfig, load
from hotrow.run.files import to_json
from hotrow.run.strategy_names import find_named
from hotrow.sizing.cost import Work, step_time
from hotrow.sizing.machines import THIS, Machine, machines
from hotrow.sizing.reuse import NEVER, Reuse, belady
from hotrow.sizing.simulator import Simulated
from hotrow.sizing.simulator import simulate as simulate_trace
from hotrow.study.sizing import base_of, machine_of, planning_ms_of, row_bytes_of
from hotrow.study.trace import Trace
from hotrow.support.messages import did_you_mean
from hotrow.support.units import show_bytes

_MOST_ROWS = 1 << 28  # up to here their last uses, 4 bytes each, are affordable
CACHING = [name for name, strategy in STRATEGIES.items() if strategy.has_slots]
# lru, but that others leave first. What looks ahead is lookahead's.
ORDERS = {
    name: replace(STRATEGIES["lru"], name=name, eviction=each)
    for name, each in EVICTIONS.items()
    if not each.looks_ahead and each != STRATEGIES["lru"].eviction
}


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
            f"leaves a slot. Orders of leaving other than lru's, to compare with: "
            f"{', '.join(ORDERS)}.",
            show_default="the strategies",
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
        typer.Option(
            help="Hot rows to pin: by the trace's true 'ranks', or as 'learned' by use, which "
            "static does alone; lookahead pins none then."
        ),
    ] = "learned",
    machine: Annotated[
        str | None,
        typer.Option(
            help=f"Predict step times on {', '.join(machines())}, or on {THIS} one, which is "
            "measured, with the run's device.",
            show_default="no times",
        ),
    ] = None,
    dense_ms: Annotated[
        float | None,
        typer.Option(
            help="With --machine: milliseconds that the dense part of a step takes there.",
            show_default="timed on this machine, guessed for others",
        ),
    ] = None,
    html: HtmlFile = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", metavar="", help="The same facts for machines, one object per line."
        ),
    ] = False,
) -> None:
    """Print hit rates and traffic of every strategy with slots, without a single row.

    The planner sees ids only, so it can be run over a trace by itself: seconds instead of hours,
    and no memory for tables. Of a run's file only `[data]` matters, `run.threads`, how wide rows
    are with their optimizer's state, and whether the model reads sequences; with `--machine`, also
    what the model has to compute.

    The hit rate is the share of lookups that cause no fetch; several lookups of one row in a batch
    cause one at most, so `uncached` has hits, too, and rows that are pinned before any lookup asks
    for them cause none. Batches whose rows do not fit the slots together
    are chunked: their rows pass through one part after another, and none stays; no step is
    predicted where there are such batches. `belady` is the least that anyone could fetch who knows
    all batches; only rows that `--pin ranks` puts there before the first one may save more.

    Moved are the bytes of a batch's rows that come and of those that leave, which are written back.

    **Examples**

    - `hotrow simulate`

    - `hotrow simulate run.toml --slots 2%,10%,500000 --strategy lru,lookahead`

    - `hotrow simulate configs/traffic-study.toml --slots 1%,2%,5% --pin ranks --depths 50,200`

    - `hotrow simulate run.toml --machine h200 --dense-ms 0.5 --html simulate.html`

    `hotrow size` searches for the smallest budget that is fast enough.
    """
    for setting in settings or ():
        _refuse_unused(setting, is_timed=machine is not None)
    if dense_ms is not None and machine is None:
        raise ValueError("--dense-ms belongs to --machine; name one")
    check_dense_ms(dense_ms)
    check_html(html)
    config = load(file, overrides=settings or ())
    # Steps this short gain little from a second thread, and lose much when a core is busy.
    torch.set_num_threads(config.run.threads or 1)
    torch.manual_seed(config.run.seed)  # of rows that leave at random
    trace = Trace(config.data, steps=config.model.num_steps)
    sizes = sorted({read_slots(part, trace.num_rows) for part in slots.split(",")})
    chosen = [_simulated(name.strip()) for name in strategies.split(",")]
    if pin not in ("ranks", "learned"):
        raise ValueError(f"--pin must be ranks or learned, not {pin!r}")
    known = sorted(set(read_depths(depths)))
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
    place = None if machine is None else machine_of(machine, config)
    bound = _Bound(trace.num_rows)
    bar = batches_bar()
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
            as_trained=place is not None and not place.is_gpu,
        )
    least_rows = bound.rows_per_batch(sizes, warm_up, batches)
    timing = None
    if place is not None:
        timing = _Timing(config, place, found[0], trace.num_rows, dense_ms)
    floors = bound.floors(chosen)
    row_bytes = row_bytes_of(config)
    facts = list(
        _with_bound([_facts(each, timing, row_bytes, floors) for each in found], least_rows)
    )
    told = _told(found[0], trace.num_rows, timing)
    if floors:
        told += f". {_fitting(floors)}"
    name = config.run.name if file is None else str(file)
    write_html(html, page_of_simulation(facts, name=name, told=told) if html is not None else "")
    if as_json:
        for each in facts:
            typer.echo(to_json(each))
        return
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a file has room for whole numbers
    console.print(_table(facts, told, is_timed=timing is not None))
    if timing is not None and any(each.chunked_batches for each in found):
        typer.echo(
            "No step is predicted where batches are chunked: more slots, or a smaller "
            "data.batch_size, lets their rows in"
        )
    if html is not None:
        typer.echo(f"page written to {html}")


class _Timing:
    """Steps, predicted."""

    def __init__(
        self,
        config: RunConfig,
        machine: Machine,
        like: Simulated,
        num_rows: int,
        dense_ms: float | None,
    ) -> None:
        self.machine, self._batch_size = machine, config.data.batch_size
        self._vector_bytes = 4 * config.model.row_width
        self._row_bytes, self._num_rows = row_bytes_of(config), num_rows
        self.base = base_of(config, machine, self._work(like), given_ms=dense_ms)

    def _work(self, found: Simulated) -> Work:
        batches = max(1, found.batches)
        return Work(
            lookups=found.lookups / batches,
            unique_rows=found.unique_rows / batches,
            row_bytes=self._row_bytes,
            table_bytes=self._num_rows * self._row_bytes,
            fetched_rows=found.fetched_rows / batches,
            evicted_rows=found.evicted_rows / batches,
            vector_bytes=self._vector_bytes,
        )

    def facts(self, found: Simulated) -> dict[str, Any]:
        planning = None if self.machine.is_gpu else planning_ms_of(found, self.machine)
        time = step_time(
            self.machine,
            _simulated(found.strategy),
            self._work(found),
            all_fast_ms=self.base.ms,
            planning_ms=planning,
        )
        return {
            "machine": self.machine.name,
            "all_fast_ms": self.base.ms,
            "all_fast_is": self.base.how,
            "step_ms": time.ms,
            "planning_ms": time.planning_ms,
            "moving_ms": time.moving_ms,
            "of_all_fast": self.base.ms / time.ms,
            "samples_per_second": 1e3 * self._batch_size / time.ms,
            "limit": time.limit,
        }


def _told(found: Simulated, num_rows: int, timing: _Timing | None) -> str:
    said = (
        f"{num_rows:,} rows, {found.lookups // found.batches:,} lookups and "
        f"{found.unique_rows // found.batches:,} unique rows per batch"
    )
    if timing is None:
        return said
    where = timing.machine.gpu or "this machine's CPU"
    how = "with the dense part as given" if timing.base.how == "given" else timing.base.how
    return f"{said}; on {where} all-fast takes {timing.base.ms:.3g} ms, {how}"


def _fitting(floors: Mapping[str, int]) -> str:
    """In how many slots batches fit, with those that must stay beside them."""
    named: dict[int, list[str]] = {}
    for name, slots in floors.items():
        named.setdefault(slots, []).append(name)
    parts = (f"{slots:,} for {', '.join(names)}" for slots, names in sorted(named.items()))
    return f"Batches fit, with those in flight, from so many slots on: {'; '.join(parts)}"


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

    def floors(self, strategies: Iterable[Strategy]) -> dict[str, int]:
        """Slots in which batches fit together of which none may leave yet; empty: not known."""
        if self._last_use is None:
            return {}
        return {each.name: self._reuse.floor(each.hold.batches) for each in strategies}

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


def _refuse_unused(setting: str, *, is_timed: bool) -> None:
    """Settings of a file may be there for training; one given by hand is meant."""
    section, _, key = setting.partition("=")[0].strip().partition(".")
    is_wide = key.startswith("optimizer.") or key in ("kind", "embedding_dim")
    if (section, is_wide) == ("embedding", True) or (section == "model" and (is_timed or is_wide)):
        return
    if section in ("embedding", "model", "training"):
        option = _INSTEAD.get(key) if section == "embedding" else None
        if option == "--strategy":
            _simulated(setting.partition("=")[2].strip())
        raise ValueError(
            f"--set {setting}: a simulation uses [data] and run.threads, and how wide rows are"
            + (f"; give {option} instead" if option else "")
        )


def _simulated(name: str) -> Strategy:
    """A strategy of rows: what orders samples, or leaves some out, is decided by training."""
    if found := STRATEGIES.get(name) or ORDERS.get(name):
        return found
    try:
        named = find_named(name)
    except ValueError:
        known = [*CACHING, *ORDERS]
        hint = did_you_mean(name, known)
        raise ValueError(
            f"there is no strategy {name!r}{hint}; simulated are {', '.join(known)}"
        ) from None
    rows = named.rows.name
    told = f"; its rows follow {rows}: give --strategy {rows}" if named.rows.has_slots else ""
    raise ValueError(
        f"--strategy {name}: which samples are trained, and when, is decided while training, so it "
        f"is not simulated{told}. Simulated are {', '.join(CACHING)}"
    )


def _facts(
    found: Simulated, timing: _Timing | None, row_bytes: int, floors: Mapping[str, int]
) -> dict[str, Any]:
    moved = found.fetched_rows + found.loaded_rows + found.evicted_rows
    return {
        **asdict(found),
        "hit_rate": found.hit_rate,
        "rows_per_batch": found.rows_per_batch,
        "bytes_per_batch": moved * row_bytes / max(1, found.batches),
        "fits_from_slots": floors.get(found.strategy),
        "lookups_per_second": found.lookups_per_second,
        # Chunks take turns with computing, which no prediction knows: it would call them free.
        **({} if timing is None or found.chunked_batches else timing.facts(found)),
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


def _table(facts: Sequence[Mapping[str, Any]], told: str, *, is_timed: bool) -> Table:
    table = Table(title=told, title_justify="left")
    heads = ["slots", "strategy", "ahead", "hit rate", "rows/batch", "moved", "chunked"]
    heads += ["ms/step", "speed", "waits for"] if is_timed else []
    for name in heads:
        justify: Any = "left" if name in ("strategy", "waits for") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    before = None
    for each in facts:
        if before not in (None, each["slots"]):
            table.add_section()
        before = each["slots"]
        is_planned = "depth" in each
        cells = [
            f"{each['slots']:,}",
            each["strategy"],
            str(each["depth"]) if is_planned else "all",
            f"{each['hit_rate']:.2%}",
            f"{each['rows_per_batch']:,.0f}",
        ]
        if is_planned:
            cells.append(show_bytes(each["bytes_per_batch"]))
            cells.append(f"{each['chunked_batches']} of {each['batches']}")
        if "step_ms" in each:
            cells += [f"{each['step_ms']:.3f}", f"{each['of_all_fast']:.0%}", each["limit"]]
        table.add_row(*cells)
    return table
