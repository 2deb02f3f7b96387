"""`hotrow profile`: how skewed data are, what batches need, and how long that stays so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hotrow.cli._bars import batches_bar, busy_with
from hotrow.cli._declared import JsonFlag
from hotrow.cli._html import HtmlFile, check_html, write_html
from hotrow.cli._numbers import read_slots
from hotrow.cli._places import check_folder
from hotrow.data.prepared.columns import read_columns
from hotrow.data.prepared.format import MANIFEST
from hotrow.engine.profile import save_profile
from hotrow.report.profiled import page_of_profile
from hotrow.run.config import load
from hotrow.run.files import plain, to_dict, to_json
from hotrow.study.lookups import Lookups, OfFolder, OfParquet, OfRun
from hotrow.study.profiling import SLOT_PARTS, DataProfile, TableProfile, profile_lookups
from hotrow.study.skew import TOP, Estimate
from hotrow.study.tracked_rows import BYTES_PER_ROW
from hotrow.support.units import parse_bytes, show_bytes

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
        typer.Option("--out", "-o", help="A folder for the counts, and for all that is told."),
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
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Change a run's settings; repeatable."
        ),
    ] = None,
    html: HtmlFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell how skewed data are, what batches need, and how long that stays so.

    Per table and in all: rows, accesses, rows read at least once; what share of the accesses the
    hottest rows have, and the Zipf law nearest to it (± the most that the two are apart); lookups
    per sample and different rows per batch; the rows of several batches together; how much of a
    period's accesses the hot rows of the period before still have (drift); which samples read hot
    rows alone; and the rows that slots of several numbers would fetch if the least recent rows
    leave (lru), if the hottest stay, having been there from the start (static), and at the very
    least (Belady's bound).

    Everything is counted exactly while all rows fit into --memory, at 48 bytes a row. Else rows are
    sampled by a hash of their ids, and what is estimated is told with its error (±), as far as
    smaller samples were apart. Data are read twice.

    **Examples**

    - `hotrow profile prepared/kaggle`

    - `hotrow profile prepared/kaggle --out kaggle-profile`, and then `hotrow train run.toml --set
      embedding.profile=kaggle-profile`

    - `hotrow profile run.toml --batches 2000 --slots 1%,500000`

    - `hotrow profile clicks.parquet --categories user_id,article_id --time timestamp --json`

    - `hotrow profile prepared/kaggle --html profile.html`
    """
    check_html(html)
    for name, value, least in (("--periods", periods, 1), ("--period", period, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    for name, given in (("--batches", batches), ("--batch-size", batch_size)):
        if given is not None and given < 1:
            raise ValueError(f"{name} must be at least 1, not {given}")
    with busy_with(f"opening {escape(str(data))}"):  # a Parquet file is read to number its values
        lookups = _opened(
            data, columns, categories, time, period, split, batch_size, batches, settings or ()
        )
    num_rows = sum(lookups.rows.values())
    first = lookups.num_batches // 2 if warm_up is None else warm_up
    if not 0 <= first < lookups.num_batches:
        raise ValueError(
            f"--warm-up must leave batches to count, of {lookups.num_batches:,}; not {warm_up:,}"
        )
    wanted = slots and [read_slots(part, num_rows) for part in slots.split(",")]
    hot_part, memory_bytes = _percent(hot), _bytes(memory)
    check_folder("--out", out)
    bar = batches_bar()
    task = bar.add_task("counting", total=2 * lookups.num_batches)
    with nullcontext() if as_json else bar:
        found = profile_lookups(
            lookups,
            memory_bytes=memory_bytes,
            slots=wanted or None,
            first=first,
            hot_part=hot_part,
            periods=periods,
            seed=seed,
            advance=lambda count: bar.advance(task, count),
        )
    if out is not None:
        save_profile(out, found.counts, facts=_facts(found.profile))
    write_html(html, page_of_profile(_facts(found.profile)) if html is not None else "")
    if as_json:
        typer.echo(to_json(_facts(found.profile)))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a file has room for whole numbers
    for part in _shown(found.profile):
        console.print(part, soft_wrap=isinstance(part, str))
    if out is not None:
        console.print(f"counts written to {escape(str(out))}", soft_wrap=True)
    if html is not None:
        console.print(f"page written to {escape(str(html))}", soft_wrap=True)


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
        found = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        found = -1.0
    if not 0 < found <= 1:
        raise ValueError(f"--hot must be a share of the rows, such as 1%, not {text!r}")
    return found


def _facts(found: DataProfile) -> dict[str, Any]:
    facts = to_dict(found)
    for table, each in zip(
        (facts["total"], *facts["tables"]), (found.total, *found.tables), strict=True
    ):
        table["top"] = {f"{part:.1%}": to_dict(each.coverage.top(part)) for part in TOP}
    for curve, one in zip(facts["curves"], found.curves, strict=True):
        curve["rows_per_batch"] = plain(one.per_batch)
        curve["miss_ratio"] = plain(one.ratio)
    return facts


# -- for people --------------------------------------------------------------------------


def _shown(found: DataProfile) -> Iterable[Table | str]:
    yield (
        f"{escape(found.data)}: {found.samples:,} samples in {found.batches:,} batches of "
        f"{found.batch_size:,}"
    )
    yield _tables(found)
    yield "\nThe hottest rows of all tables"
    yield _coverage(found)
    yield "\nDifferent rows of consecutive batches, counted side by side"
    yield _working_sets(found)
    if len(found.total.drift.own) > 1:
        yield f"\nAccesses to the {found.total.drift.hot_rows:,} hottest rows"
        yield _drift(found.total)
    yield (
        f"\nRows fetched for a batch, of {found.total.unique_rows:,.0f}; the last "
        f"{found.curves[0].batches:,} batches counted"
    )
    yield _curves(found)
    if found.curves[0].slots.min() < found.floors[0]:
        yield (
            f"A batch has up to {found.floors[0]:,} different rows: a smaller --batch-size, or "
            f"--slots {found.floors[0]} or more, will fit"
        )
    yield (
        "Rows of static are chosen by what these batches read, and there from the start: their "
        "first fetches do not count, as those of lru and belady do, so that it may fetch fewer"
    )
    yield "\n" + _how(found)
    yield from found.notes


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def _share(found: Estimate) -> str:
    return f"{found.value:.1%}" + (f" ±{found.error:.1%}" if found.error > 5e-5 else "")


def _count(found: Estimate) -> str:
    return f"{found.value:,.0f}" + (f" ±{found.error:,.0f}" if found.error >= 0.5 else "")


def _tables(found: DataProfile) -> Table:
    shown = _table(
        "table", "rows", "read", "accesses", "/sample", "/batch", "top 1%", "top 10%",
        "Zipf",
    )  # fmt: skip
    for each in (*found.tables, found.total):
        if each is found.total:
            shown.add_section()
        shown.add_row(
            escape(each.name),
            f"{each.rows:,}",
            _count(each.distinct),
            f"{each.accesses:,}",
            f"{each.lookups_per_sample:.3g}",
            f"{each.unique_rows:,.0f}",
            _share(each.coverage.top(0.01)),
            _share(each.coverage.top(0.1)),
            f"{each.zipf.skew:.2f} ±{each.zipf.error:.1%}",
        )
    return shown


def _coverage(found: DataProfile) -> Table:
    shown = _table("of the rows", "rows", "accesses", "all-hot samples")
    hot = dict(zip(found.all_hot.rows.tolist(), found.all_hot.samples.tolist(), strict=True))
    at_least = "" if found.is_exact else "≥"
    for part in TOP:
        rows = max(1, int(part * found.total.rows))
        share = hot.get(rows, float("nan"))
        shown.add_row(
            f"{part:.1%}",
            f"{rows:,}",
            _share(found.total.coverage.top(part)),
            "not known" if share != share else f"{at_least}{share:.1%}",
        )
    return shown


def _working_sets(found: DataProfile) -> Table:
    shown = _table("batches", "on average", "at most")
    for each in found.total.working_sets:
        shown.add_row(f"{each.batches:,}", _count(each.mean), f"{each.most:,.0f}")
    return shown


def _drift(total: TableProfile) -> Table:
    drift = total.drift
    shown = _table("period", "of its own", "of the one before", "of the first")
    before = zip(drift.own[1:], drift.previous, drift.first, strict=True)
    shown.add_row("1", f"{drift.own[0]:.1%}", "", "")
    for number, shares in enumerate(before, start=2):
        shown.add_row(str(number), *(f"{share:.1%}" for share in shares))
    return shown


def _curves(found: DataProfile) -> Table:
    shown = _table("slots", *(each.policy for each in found.curves))
    for place, slots in enumerate(found.curves[0].slots.tolist()):
        cells = []
        # The bound of a sample needs room for its largest batch, which a sample may overestimate.
        unknown = "does not fit" if slots < found.floors[0] else "not known"
        for each in found.curves:
            rows = each.per_batch[place]
            spread = (each.high[place] - each.low[place]) / 2 / max(1, each.batches)
            error = f" ±{spread:,.0f}" if spread and not found.is_exact else ""
            cells.append(unknown if rows != rows else f"{rows:,.0f}{error}")
        shown.add_row(f"{slots:,}", *cells)
    return shown


def _how(found: DataProfile) -> str:
    held = f"{found.floors[0]:,} slots hold any batch, {found.floors[1]:,} any two together"
    if found.is_exact:
        most = show_bytes(BYTES_PER_ROW * found.followed_rows)
        return f"{held}. Counted exactly, in {most} at most, {found.seconds:.0f} s"
    return (
        f"{held}. Estimated from {found.followed_rows:,} rows: the hottest of the first batches, "
        f"and {found.sampled_part:.1%} of the others; ± is the error. {found.seconds:.0f} s"
    )
