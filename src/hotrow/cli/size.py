"""`hotrow size`: how much fast memory a run needs, before anybody buys it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hotrow.cli._options import (
    Batches,
    DenseMs,
    HtmlFile,
    JsonFlag,
    RunFile,
    Settings,
    WarmUp,
    check_at_least,
    check_dense_ms,
    check_file,
    check_html,
    read_depths,
)
from hotrow.cli._output import counting, show
from hotrow.cli._process import refuse_ranks
from hotrow.report.sized import advice, size_document
from hotrow.run.config import load, read_settings
from hotrow.sizing.machines import THIS, machines
from hotrow.study.sizing import DEPTHS, Sizing, machine_of
from hotrow.study.sizing import size as size_of
from hotrow.support import toml
from hotrow.support.files import Disk
from hotrow.support.records import SizeRecord

_REFUSED = ("budget", "strategy", "depth", "fill")


def size(
    file: RunFile = None,
    machine: Annotated[
        str,
        typer.Option(
            help=f"Whose speed counts: {', '.join(machines())}, or {THIS}, which is measured, with "
            "the run's device."
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

    One pass over the run's batches tells what lru and static would fetch with any number of slots,
    and the fewest rows that anyone could; lookahead is planned for some of them. A cost model makes
    step times of that, from what the machine can do: docs/size.md says how, and how near it is to
    what was measured. No table is made, but where all-fast is timed: on this machine, for a few
    steps, with generated tables of 1 GiB at the most.

    **Examples**

    - `hotrow size run.toml`

    - `hotrow size run.toml --machine h200 --dense-ms 0.5 --reach 0.9`

    - `hotrow size run.toml --machine h200 --out sized.toml`, and then `hotrow train sized.toml`

    - `hotrow size run.toml --batches 400 --warm-up 400 --depths 50,400 --html size.html`

    - `hotrow size run.toml --json | jq .chosen.budget_bytes`

    **What the columns are**

    - budget, of rows: all bytes of fast memory, and the rows that have a slot in it

    - pinned: of the slots, the most that rows get which were hottest so far

    - ahead, fill: batches known before they are trained, and how a GPU moves rows (embedding.depth,
      embedding.fill)

    - ms/step, speed (of all-fast's), samples/s: predicted, with the interval that four in five
      were in where predictions could be compared with a measurement

    - waits for: what decides how long a step is

    `--out` writes the run's settings, with those found, as a new file; comments are not kept. For a
    GPU by name, run.device becomes cuda.
    """
    refuse_ranks("size")  # it times some steps
    if not 0 < reach <= 1:
        raise ValueError(f"--reach must be above 0 and at most 1, such as 0.95, not {reach:g}")
    check_dense_ms(dense_ms)
    check_at_least(1, batches=batches)
    check_at_least(0, warm_up=warm_up)
    for setting in settings or ():
        _refuse_found(setting)
    known = read_depths(depths)
    check_html(html)
    config = load(file, overrides=settings or ())
    check_file("--out", out, such_as="sized.toml")
    torch.set_num_threads(config.run.threads or 1)
    place = machine_of(machine, config)
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


def _refuse_found(setting: str) -> None:
    section, _, key = setting.partition("=")[0].strip().partition(".")
    if section == "embedding" and key in _REFUSED:
        raise ValueError(f"--set {setting}: that is what `hotrow size` finds; leave it out")


def _settings(record: SizeRecord, file: Path | None, given: Sequence[str]) -> dict[str, Any]:
    """The run's own, with those that were found."""
    found, best = read_settings(file, given), record.chosen
    section = found.setdefault("embedding", {})
    section["strategy"] = best.strategy
    section.pop("budget", None)
    if best.strategy != "all-fast":
        section["budget"] = best.budget_bytes
        section["depth"] = best.depth if best.strategy == "lookahead" else "auto"
        section["fill"] = best.fill or "auto"
    if record.machine["device"] == "cuda" and record.machine["name"] != THIS:
        run = found.setdefault("run", {})
        if not str(run.get("device", "")).startswith("cuda"):
            run["device"] = "cuda"
    return found


def _head(record: SizeRecord) -> str:
    asked = f"hotrow size --machine {record.machine['name']} --reach {record.reach:g}"
    return f"{asked}. {advice(record)}"
