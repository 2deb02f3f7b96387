"""`hotrow profile`: skew, working sets and drift of data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from hotrow.cli._options import (
    HtmlFile,
    JsonFlag,
    Settings,
    check_at_least,
    check_folder,
    check_html,
    read_slots,
)
from hotrow.cli._output import counting, show
from hotrow.data.prepared.columns import read_columns
from hotrow.data.prepared.format import MANIFEST
from hotrow.engine.profile import save_profile
from hotrow.report.profiled import profile_document
from hotrow.run.config import load
from hotrow.run.files import plain, to_dict
from hotrow.study.lookups import Lookups, OfFolder, OfParquet, OfRun
from hotrow.study.profiling import SLOT_PARTS, DataProfile, profile_lookups
from hotrow.study.tracked_rows import BYTES_PER_ROW, TOP
from hotrow.support.units import parse_bytes

_BATCH_SIZE = 2048


def profile(
    data: Annotated[
        Path,
        typer.Argument(
            help="A folder made by `hotrow prepare`, a Parquet file, or the TOML file of a run."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A folder for the counts and for all figures."),
    ] = None,
    columns: Annotated[
        Path | None,
        typer.Option(help="Parquet: TOML file that describes the columns, as for `prepare`."),
    ] = None,
    categories: Annotated[
        str | None, typer.Option(help="Parquet: columns of ids or texts, with commas between.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Parquet: a sorted column of seconds, or of timestamps.")
    ] = None,
    period: Annotated[int, typer.Option(help="Seconds of a period, with --time.")] = 86_400,
    periods: Annotated[int, typer.Option(help="Periods of equal length, without --time.")] = 8,
    hot: Annotated[
        str, typer.Option(help="Rows of the hot set whose drift is followed, in percent.")
    ] = "1%",
    split: Annotated[
        str | None, typer.Option(help="Which split of a prepared folder.", show_default="train")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples of a batch; a run's file has its own.", show_default=str(_BATCH_SIZE)
        ),
    ] = None,
    batches: Annotated[
        int | None, typer.Option(help="The first ones only.", show_default="one epoch")
    ] = None,
    warm_up: Annotated[
        int | None,
        typer.Option(help="Batches before misses are counted.", show_default="half of them"),
    ] = None,
    slots: Annotated[
        str | None,
        typer.Option(
            help="Slots: numbers or percent of all rows, with commas between.",
            show_default=",".join(f"{part:.0%}" for part in SLOT_PARTS),
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option(help="The most that counting uses. What does not fit is sampled.")
    ] = "2GiB",
    seed: Annotated[int, typer.Option(help="Of the rows that are sampled.")] = 0,
    settings: Settings = None,
    html: HtmlFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure how skewed data are, what batches need, and how long that stays so.

    Per table and in all: rows, accesses, rows read at least once; the share of accesses that the
    hottest rows have, and the nearest Zipf law (± the largest distance); lookups per sample and
    different rows per batch; different rows of several batches together; the share of a period's
    accesses that the hot rows of the period before have (drift); the share of samples that read hot
    rows only; and the rows fetched with several numbers of slots if the least recent rows leave
    (lru), if the hottest stay, loaded before the start (static), and at least (Belady's bound).

    Everything is counted exactly while all rows fit into --memory, at 48 bytes a row. Else rows are
    sampled by a hash of their ids, and estimates are shown with their error (±), from the spread of
    smaller samples. Data are read twice.

    **Examples**

    - `hotrow profile prepared/kaggle`

    - `hotrow profile prepared/kaggle --out kaggle-profile`, and then `hotrow train run.toml --set
      embedding.profile=kaggle-profile`

    - `hotrow profile run.toml --batches 2000 --slots 1%,500000`

    - `hotrow profile clicks.parquet --categories user_id,article_id --time timestamp --json`

    - `hotrow profile prepared/kaggle --html profile.html`
    """
    check_html(html)
    check_at_least(1, periods=periods, period=period, batches=batches, batch_size=batch_size)
    console = Console(stderr=True)
    opening = console.status(f"opening {escape(str(data))}")
    # Numbering the values of a Parquet file takes an unknown time.
    with opening if console.is_terminal else nullcontext():
        lookups = _opened(
            data, columns, categories, time, period, split, batch_size, batches, settings or ()
        )
    num_rows = sum(lookups.rows.values())
    first = lookups.num_batches // 2 if warm_up is None else warm_up
    if not 0 <= first < lookups.num_batches:
        raise ValueError(
            f"--warm-up must leave batches to count, of {lookups.num_batches:,}; not {warm_up:,}"
        )
    wanted = read_slots(slots, num_rows) if slots else None
    hot_part, memory_bytes = _percent(hot), _bytes(memory)
    check_folder("--out", out)
    total = 2 * lookups.num_batches
    with counting("counting", total, "batches", quiet=as_json) as advance:
        profiled = profile_lookups(
            lookups,
            memory_bytes=memory_bytes,
            slots=wanted,
            first=first,
            hot_part=hot_part,
            periods=periods,
            seed=seed,
            advance=advance,
        )
    facts = _facts(profiled.profile)
    if out is not None:
        save_profile(out, profiled.counts, facts=facts)
    counted_bytes = BYTES_PER_ROW * profiled.profile.followed_rows
    show(profile_document(facts, counted_bytes=counted_bytes), as_json=as_json, html=html)
    if out is not None and not as_json:
        typer.echo(f"counts written to {out}")


def _opened(
    data: Path,
    columns: Path | None,
    categories: str | None,
    time: str | None,
    period: int,
    split: str | None,
    batch_size: int | None,
    batches: int | None,
    settings: Sequence[str],
) -> Lookups:
    if data.name == MANIFEST:
        data = data.parent
    if data.suffix != ".parquet" and (columns or categories or time):
        raise ValueError(f"--columns, --categories and --time are for Parquet files, not {data}")
    if data.suffix != ".toml" and settings:
        raise ValueError(f"--set changes the settings of a run's file, and {data} is none")
    if data.is_dir():
        if not (data / MANIFEST).is_file():
            raise ValueError(f"{data} has no {MANIFEST}: `hotrow prepare` has not made it")
        split = split or "train"
        return OfFolder(data, split=split, batch_size=batch_size or _BATCH_SIZE, batches=batches)
    if not data.is_file():
        raise ValueError(f"{data}: there is no such file or folder")
    if split is not None:
        raise ValueError(f"--split is for prepared folders, and {data} is none")
    if data.suffix == ".parquet":
        if (columns is None) == (categories is None):
            raise ValueError("give one of --columns and --categories: which columns are ids?")
        described = None if columns is None else read_columns(columns)
        names = described.categories if described else (categories or "").split(",")
        return OfParquet(
            data,
            categories=[each.strip() for each in names],
            tables=described.tables if described else None,
            batch_size=batch_size or _BATCH_SIZE,
            batches=batches,
            time=time,
            period=period,
        )
    if data.suffix != ".toml":
        raise ValueError(
            f"{data} is no prepared folder, no .parquet and no .toml; `hotrow prepare` makes "
            "folders of other files"
        )
    sized = [] if batch_size is None else [f"data.batch_size={batch_size}"]
    config = load(data, overrides=[*settings, *sized])
    steps = config.model.num_steps
    return OfRun(config.data, steps=steps, name=str(data), batches=batches)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"--memory: {error}") from None


def _percent(text: str) -> float:
    try:
        part = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        part = -1.0
    if not 0 < part <= 1:
        raise ValueError(f"--hot must be a share of the rows, such as 1%, not {text!r}")
    return part


def _facts(profile: DataProfile) -> dict[str, Any]:
    facts, tables = to_dict(profile), (profile.total, *profile.tables)
    for written, table in zip((facts["total"], *facts["tables"]), tables, strict=True):
        written["top"] = {f"{part:.1%}": to_dict(table.coverage.top(part)) for part in TOP}
    for written, curve in zip(facts["curves"], profile.curves, strict=True):
        written["rows_per_batch"] = plain(curve.per_batch)
        written["miss_ratio"] = plain(curve.ratio)
    return facts
