"""`hotrow size`: how much fast memory a run needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hotrow.cli._options import (
    Batches,
    DenseMs,
    HtmlFile,
    JsonFlag,
    LinksOption,
    RanksOption,
    RunFile,
    Settings,
    WarmUp,
    check_at_least,
    check_dense_ms,
    check_file,
    check_html,
    needs_ranks,
    read_depths,
    read_ranks,
    refuse_settings,
)
from hotrow.cli._output import counting, show
from hotrow.report.predicted import advice, size_document
from hotrow.report.ranked import rank_advice_document
from hotrow.run.config import load, read_settings
from hotrow.sizing.machines import THIS, check_links, machines
from hotrow.study.lookups import OfRun
from hotrow.study.rank_scaling import Scaling, size_ranks
from hotrow.study.sizing import DEPTHS, Sizing, machine_of
from hotrow.study.sizing import size as size_of
from hotrow.support import toml
from hotrow.support.files import Disk
from hotrow.support.records import SizeRecord

_REFUSED = {
    f"embedding.{key}": "that is what `hotrow size` finds; leave it out"
    for key in ("budget", "strategy", "depth", "fill")
}


def size(
    file: RunFile = None,
    machine: Annotated[
        str,
        typer.Option(
            help=f"Whose speed counts: {', '.join(machines())}, a TOML file's, or {THIS}, which is "
            "measured, with the run's device."
        ),
    ] = THIS,
    reach: Annotated[float, typer.Option(help="Of all-fast's speed, what is enough.")] = 0.95,
    dense_ms: DenseMs = None,
    depths: Annotated[
        str, typer.Option(help="Batches known ahead that are tried, with commas between.")
    ] = ",".join(map(str, DEPTHS)),
    batches: Batches = 50,
    warm_up: WarmUp = 100,
    settings: Settings = None,
    ranks: RanksOption = None,
    links: LinksOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The run's file with the settings found; one there is replaced."
        ),
    ] = None,
    html: HtmlFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the smallest budget with 95 % of the speed that every row in fast memory would have.

    One pass over the run's batches counts the rows that lru and static would fetch with any number
    of slots, and the fewest possible; lookahead is planned for some numbers. A cost model predicts
    step times from that and from what the machine can do; docs/size.md describes it and compares it
    with measurements. No table is made, except where all-fast is timed: on this machine, for a few
    steps, with generated tables of at most 1 GiB.

    **Examples**

    - `hotrow size run.toml`

    - `hotrow size run.toml --machine h200 --dense-ms 0.5 --reach 0.9`

    - `hotrow size run.toml --machine h200 --out sized.toml`, and then `hotrow train sized.toml`

    - `hotrow size run.toml --batches 400 --warm-up 400 --depths 50,400 --html size.html`

    - `hotrow size run.toml --json | jq .chosen.budget_bytes`

    **What the columns are**

    - budget, of rows: all bytes of fast memory, and the rows that have a slot in it

    - pinned: the largest share of the slots that is for the hottest rows

    - ahead, fill: batches known before they are trained, and how a GPU moves rows (embedding.depth,
      embedding.fill)

    - ms/step, speed (of all-fast's), samples/s: predicted, with the interval that held four of
      five measurements that were compared with predictions

    - waits for: what decides how long a step is

    With `--ranks`, which needs `--machine`, it proposes the fewest of these ranks whose host memory
    holds the rows, and the smallest budget of each rank for lookahead with `--reach` of all-fast's
    speed at that number of ranks. docs/scale.md says what that assumes.

    - `hotrow size run.toml --ranks 1,8,64 --machine h200 --dense-ms 0.5`

    `--out` writes the run's settings, with those found, as a new file; comments are not kept. For a
    GPU by name, run.device becomes cuda.
    """
    if not 0 < reach <= 1:
        raise ValueError(f"--reach must be above 0 and at most 1, such as 0.95, not {reach:g}")
    check_dense_ms(dense_ms)
    check_at_least(1, batches=batches)
    check_at_least(0, warm_up=warm_up)
    refuse_settings(settings or (), _REFUSED)
    known = read_depths(depths)
    check_html(html)
    needs_ranks(ranks, links=links)
    counts = None if ranks is None else read_ranks(ranks)
    if counts is not None:
        check_links(machine)
    if counts is not None and out is not None:
        raise ValueError("--out is for one rank; leave it out with --ranks")
    config = load(file, overrides=settings or ())
    check_file("--out", out, such_as="sized.toml")
    torch.set_num_threads(config.run.threads or 1)
    place = machine_of(machine, config)
    if counts is not None:
        scaling = Scaling(
            config,
            OfRun(config.data, steps=config.model.num_steps, repeats=False),
            counts,
            batches=batches,
            warm_up=warm_up,
            owners=1,
            machine=place,
            links=links or "",
            dense_ms=dense_ms,
        )
        steps = scaling.steps(max(known))
        with counting("planning", steps, "steps", quiet=as_json) as advance:
            found = size_ranks(replace(scaling, on_batch=advance), reach=reach, depth=max(known))
        show(rank_advice_document(found), as_json=as_json, html=html)
        return
    # The trace is read twice for its curves, and once for the planner.
    total = 3 * (warm_up + batches) + max(known)
    with counting("counting and planning", total, "batches", quiet=as_json) as advance:
        sizing = Sizing(
            config,
            place,
            batches=batches,
            warm_up=warm_up,
            depths=known,
            dense_ms=dense_ms,
            on_batch=advance,
        )
        record = size_of(sizing, reach=reach)
    if out is not None:
        text = toml.written(_settings(record, file, settings or ()), head=_head(record))
        Disk(out.parent).write(out.name, [text.encode()])
    show(size_document(record), as_json=as_json, html=html)
    if out is not None and not as_json:
        typer.echo(f"settings written to {out}")


def _settings(record: SizeRecord, file: Path | None, given: Sequence[str]) -> dict[str, Any]:
    """Return the run's settings with those that were found."""
    settings, best = read_settings(file, given), record.chosen
    section = settings.setdefault("embedding", {})
    section["strategy"] = best.strategy
    section.pop("budget", None)
    if best.strategy != "all-fast":
        section["budget"] = best.budget_bytes
        section["depth"] = best.depth if best.strategy == "lookahead" else "auto"
        section["fill"] = best.fill or "auto"
    if record.machine["device"] == "cuda" and record.machine["name"] != THIS:
        run = settings.setdefault("run", {})
        if not str(run.get("device", "")).startswith("cuda"):
            run["device"] = "cuda"
    return settings


def _head(record: SizeRecord) -> str:
    asked = f"hotrow size --machine {record.machine['name']} --reach {record.reach:g}"
    return f"{asked}. {advice(record)}"
