"""`hotrow simulate`: what strategies would move for a trace, planned without any row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from hotrow.cli._options import (
    Batches,
    DenseMs,
    HtmlFile,
    JsonLinesFlag,
    LinksOption,
    RanksOption,
    Settings,
    WarmUp,
    check_at_least,
    check_dense_ms,
    check_html,
    needs_ranks,
    read_depths,
    read_ranks,
    read_slots,
)
from hotrow.cli._output import counting, show
from hotrow.report.predicted import simulation_document
from hotrow.report.ranked import ranks_document
from hotrow.run.config import load
from hotrow.sizing.machines import THIS, check_links, machines
from hotrow.study.lookups import OfRun
from hotrow.study.rank_scaling import Scaling, simulate_ranks
from hotrow.study.simulation import (
    CACHING,
    ORDERS,
    Simulation,
    find_simulated,
    strategies_at,
)
from hotrow.study.sizing import machine_of
from hotrow.support.units import parse_bytes

_INSTEAD = {"budget": "--slots", "strategy": "--strategy", "depth": "--depths"}


def simulate(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file of a run; its [data] makes the trace.")
    ] = None,
    settings: Settings = None,
    slots: Annotated[
        str | None,
        typer.Option(
            help="Slots: numbers or percent of all rows, with commas between; with --ranks of each "
            "rank, and of the rows that it owns.",
            show_default="1%,5%,10%; with --ranks 10%",
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            help=f"With commas between, of {', '.join(CACHING)}; with the others no row enters or "
            f"leaves a slot. Orders of leaving other than lru's, to compare with: "
            f"{', '.join(ORDERS)}.",
            show_default="the strategies; with --ranks lookahead",
        ),
    ] = None,
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
            help=f"Predict step times on {', '.join(machines())}, on the machine that a TOML file "
            f"describes, or on {THIS} one, which is measured, with the run's device.",
            show_default="no times",
        ),
    ] = None,
    dense_ms: DenseMs = None,
    ranks: RanksOption = None,
    links: LinksOption = None,
    replicate: Annotated[
        str | None,
        typer.Option(
            help="With --ranks: also predict this much memory of each rank for rows that all have, "
            "such as 1MiB.",
            show_default="none",
        ),
    ] = None,
    owners: Annotated[
        int | None,
        typer.Option(
            help="With --ranks: owners of rows whose planners run.",
            show_default="2",
        ),
    ] = None,
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

    - `hotrow simulate run.toml --ranks 8,64,1024 --machine h200 --dense-ms 0.5 --slots 20%`

    With `--ranks`, each rank trains `data.batch_size` samples, and slots are those of a rank.
    (`hotrow train --ranks` divides the batches of `data.batch_size` among ranks: for such a run
    give the samples of one rank, with `--set data.batch_size=`.) Predicted are the bytes between
    ranks and over the link to the host, the balance of owners, memory, and with `--machine` step
    times, from links that docs/scale.md describes. Few ranks draw the batches of all; many are
    computed from how often rows are looked up.

    `hotrow size` searches for the smallest budget that is fast enough.
    """
    for setting in settings or ():
        _refuse_unused(setting, is_timed=machine is not None)
    if dense_ms is not None and machine is None:
        raise ValueError("--dense-ms belongs to --machine; name one")
    check_dense_ms(dense_ms)
    check_html(html)
    needs_ranks(ranks, links=links, replicate=replicate, owners=owners)
    counts = None if ranks is None else read_ranks(ranks)
    if counts is not None and machine is not None:
        check_links(machine)
    if links is not None and machine is None:
        raise ValueError("--links belongs to --machine; name one")
    if pin not in ("ranks", "learned"):
        raise ValueError(f"--pin must be ranks or learned, not {pin!r}")
    if counts is not None and pin == "ranks":
        raise ValueError("--pin ranks is for one rank; leave it out with --ranks")
    known = sorted(set(read_depths(depths)))
    check_at_least(1, batches=batches, owners=owners)
    check_at_least(0, warm_up=warm_up)
    default = CACHING if counts is None else ["lookahead"]
    names = default if strategies is None else strategies.split(",")
    chosen = [find_simulated(name.strip()) for name in names]
    config = load(file, overrides=settings or ())
    # Steps this short gain little from a second thread, and lose much when a core is busy.
    torch.set_num_threads(config.run.threads or 1)
    torch.manual_seed(config.run.seed)  # of rows that leave at random
    place = None if machine is None else machine_of(machine, config)
    name = config.run.name if file is None else str(file)
    trace = OfRun(config.data, steps=config.model.num_steps, repeats=False)
    if counts is not None:
        scaling = Scaling(
            config,
            trace,
            counts,
            batches=batches,
            warm_up=warm_up,
            owners=owners or 2,
            machine=place,
            links=links or "",
            dense_ms=dense_ms,
            replicate=0 if replicate is None else parse_bytes(replicate),
        )
        every = strategies_at(chosen, known)
        ahead = max(strategy.look_ahead or 0 for strategy in every)
        with counting("planning", scaling.steps(ahead), "steps", quiet=as_json) as advance:
            facts, conditions, assumptions = simulate_ranks(
                replace(scaling, on_batch=advance),
                every,
                lambda rows: sorted(set(read_slots(slots or "10%", rows))),
            )
        document = ranks_document(facts, assumptions, name=name, conditions=conditions)
        show(document, as_json=as_json, html=html)
        return
    simulation = Simulation(
        config,
        trace,
        strategies=chosen,
        slots=sorted(set(read_slots(slots or "1%,5%,10%", trace.num_rows))),
        depths=known,
        batches=batches,
        warm_up=warm_up,
        machine=place,
        dense_ms=dense_ms,
    )
    total = simulation.total_batches
    with counting("planning", total, "batches", quiet=as_json) as advance:
        facts, conditions = simulation.run(pins_ranks=pin == "ranks", on_batch=advance)
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
