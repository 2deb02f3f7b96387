"""`hotrow simulate`: what strategies would move for a trace, planned without any row."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from hotrow.cli._options import (
    Batches,
    DenseMs,
    HtmlFile,
    JsonLinesFlag,
    Settings,
    WarmUp,
    check_at_least,
    check_dense_ms,
    check_html,
    read_depths,
    read_slots,
)
from hotrow.cli._output import counting, show
from hotrow.report.predicted import simulation_document
from hotrow.run.config import load
from hotrow.sizing.machines import THIS, machines
from hotrow.study.lookups import OfRun
from hotrow.study.simulation import CACHING, ORDERS, Simulation, find_simulated
from hotrow.study.sizing import machine_of

_INSTEAD = {"budget": "--slots", "strategy": "--strategy", "depth": "--depths"}


def simulate(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file of a run; its [data] makes the trace.")
    ] = None,
    settings: Settings = None,
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
    batches: Batches = 50,
    warm_up: WarmUp = 100,
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
    dense_ms: DenseMs = None,
    html: HtmlFile = None,
    as_json: JsonLinesFlag = False,
) -> None:
    """Print hit rates and traffic of every strategy with slots, without a single row.

    The planner sees ids only, so it can run over a trace by itself: seconds instead of hours, and
    no memory for tables. Of a run's file, `[data]`, `run.threads`, the width of rows with their
    optimizer's state and whether the model reads sequences matter; with `--machine`, also what the
    model computes.

    The hit rate is the share of lookups that cause no fetch. Several lookups of one row in a batch
    cause at most one, so `uncached` has hits, too. Rows that are pinned before any lookup are not
    counted. Batches whose rows do not fit the slots together are chunked: their rows pass in parts,
    and none stays; no step is predicted for them. `belady` is the least that is possible if all
    batches are known. With `--pin ranks` a strategy may fetch fewer, because rows that are pinned
    before the first batch are not counted.

    Moved are the bytes of a batch's rows that are fetched, and of those that are written back.

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
    trace = OfRun(config.data, steps=config.model.num_steps, repeats=False)
    sizes = sorted(set(read_slots(slots, trace.num_rows)))
    chosen = [find_simulated(name.strip()) for name in strategies.split(",")]
    if pin not in ("ranks", "learned"):
        raise ValueError(f"--pin must be ranks or learned, not {pin!r}")
    known = sorted(set(read_depths(depths)))
    check_at_least(1, batches=batches)
    check_at_least(0, warm_up=warm_up)
    simulation = Simulation(
        config,
        trace,
        strategies=chosen,
        slots=sizes,
        depths=known,
        batches=batches,
        warm_up=warm_up,
        machine=None if machine is None else machine_of(machine, config),
        dense_ms=dense_ms,
    )
    total = simulation.total_batches
    with counting("planning", total, "batches", quiet=as_json) as advance:
        facts, conditions = simulation.run(pins_ranks=pin == "ranks", on_batch=advance)
    name = config.run.name if file is None else str(file)
    show(simulation_document(facts, name=name, conditions=conditions), as_json=as_json, html=html)


def _refuse_unused(setting: str, *, is_timed: bool) -> None:
    """Refuse a setting without effect. Those of a file may be there for training."""
    section, _, key = setting.partition("=")[0].strip().partition(".")
    is_wide = key.startswith("optimizer.") or key in ("kind", "embedding_dim")
    if (section, is_wide) == ("embedding", True) or (section == "model" and (is_timed or is_wide)):
        return
    if section in ("embedding", "model", "training"):
        option = _INSTEAD.get(key) if section == "embedding" else None
        if option == "--strategy":
            find_simulated(setting.partition("=")[2].strip())
        raise ValueError(
            f"--set {setting}: a simulation uses [data] and run.threads, and how wide rows are"
            + (f"; give {option} instead" if option else "")
        )
