"""The profile of data as a document, from the facts that `hotrow profile --json` prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hotrow.report.charts import COLOURS, Chart, Line, band, with_error
from hotrow.report.page import (
    Bullets,
    Charts,
    Document,
    Part,
    Section,
    Table,
    Text,
    table_by_columns,
)
from hotrow.support.units import show_bytes

_TABLES_DRAWN = len(COLOURS) - 1
_WHAT = {
    "lru": "the least recent rows leave",
    "static": "the hottest rows stay",
    "belady": "the fewest possible",
}


def profile_document(facts: Mapping[str, Any], *, counted_bytes: int) -> Document:
    """`counted_bytes`: the most memory that counting took."""
    total, floors = facts["total"], facts["floors"]
    tables = table_by_columns(_TABLES, (total, *facts["tables"]), marked=[0])
    return Document(
        f"hotrow profile: {facts['data']}",
        [
            Text(
                f"The hottest 1 % of the rows have {total['top']['1.0%']['value']:.1%} of the "
                f"accesses. {floors[0]:,} slots hold any batch, {floors[1]:,} any two together.",
                "advice",
            ),
            Text(
                f"{facts['samples']:,} samples in {facts['batches']:,} batches of "
                f"{facts['batch_size']:,}; {total['accesses']:,} accesses to {total['rows']:,} "
                f"rows. {_how(facts, counted_bytes)}, {facts['seconds']:.0f} s.",
                "faint",
            ),
            Bullets(facts["notes"]),
            Section("Skew", [Charts([coverage(facts), _all_hot(facts)])]),
            Section("Fast memory", list(_fast_memory(facts))),
            Section("Drift", [Charts([_drift(total)], "One period alone.")]),
            Section("Tables", [tables]),
            Section("The hottest rows of all tables", [_hottest(facts)]),
        ],
        facts=[facts],
    )


def _how(facts: Mapping[str, Any], counted_bytes: int) -> str:
    if facts["sampled_part"] == 1:
        return f"Counted exactly, in {show_bytes(counted_bytes)} at most"
    return (
        f"Estimated from {facts['followed_rows']:,} rows: the hottest of the first batches, and "
        f"{facts['sampled_part']:.1%} of the others; bands and ± show how far off it may be"
    )


def coverage(facts: Mapping[str, Any]) -> Chart:
    """Draw all tables together, and those with most accesses; ties: with most rows."""
    tables = sorted(facts["tables"], key=lambda each: (-each["accesses"], -each["rows"]))
    tables = tables[:_TABLES_DRAWN]
    lines = []
    for colour, each in enumerate((facts["total"], *(tables if len(facts["tables"]) > 1 else ()))):
        curve = each["coverage"]
        edges = band(curve["share"], curve["error"])
        edges = {name: [min(1.0, max(0.0, x)) for x in edge] for name, edge in edges.items()}
        rows, dashed = [100 * count / curve["num_rows"] for count in curve["rows"]], colour > 0
        line = Line(each["name"], rows, curve["share"], colour=colour, is_dashed=dashed, **edges)
        lines.append(line)
    left = len(facts["tables"]) - len(lines) + 1
    note = "How much of the accesses go to how many rows, the hottest first."
    if left > 0 and len(lines) > 1:
        note += f" The tables with fewest accesses and rows, {left} of them, are left out."
    return Chart(
        "Coverage", "% of the rows", "share of accesses", tuple(lines), note,
        y_format=".0%", from_zero=True, x_log=True,
    )  # fmt: skip


def _all_hot(facts: Mapping[str, Any]) -> Chart:
    hot, rows = facts["all_hot"], facts["total"]["rows"]
    x = [100 * count / rows for count in hot["rows"]]
    line = Line("samples", x, _numbers(hot["samples"]), colour=2, has_dots=True)
    return Chart(
        "All-hot samples", "% of the rows that are hot", "share of samples", (line,),
        "Samples that read hot rows alone.", y_format=".0%", from_zero=True, x_log=True,
    )  # fmt: skip


def _hottest(facts: Mapping[str, Any]) -> Table:
    """List the shares of accesses and of samples that the hottest rows have."""
    total, hot = facts["total"], facts["all_hot"]
    samples = dict(zip(hot["rows"], hot["samples"], strict=True))
    at_least = "" if facts["sampled_part"] == 1 else "≥"
    cells = []
    for part, share in total["top"].items():
        rows = max(1, int(float(part.removesuffix("%")) / 100 * total["rows"]))
        known = samples.get(rows)
        all_hot = "not known" if known is None else f"{at_least}{known:.1%}"
        cells.append([part, f"{rows:,}", _estimate(share, ".1%"), all_hot])
    return Table(("of the rows", "rows", "accesses", "all-hot samples"), cells)


def _fast_memory(facts: Mapping[str, Any]) -> Iterator[Part]:
    yield Charts([_misses(facts), _working_sets(facts["total"])])
    floor = facts["floors"][0]
    if min(facts["curves"][0]["slots"]) < floor:
        yield Text(
            f"A batch has up to {floor:,} different rows: a smaller --batch-size, or --slots "
            f"{floor} or more, will fit"
        )
    yield Text(
        "static holds the rows that these batches read most, from the start. Loading them is not "
        "counted, while the first fetches of lru and belady are, so static may fetch fewer rows",
        "faint",
    )


def _misses(facts: Mapping[str, Any]) -> Chart:
    """Draw the rows fetched by the number of slots."""
    lines, floor = [], facts["floors"][0]
    for colour, curve in enumerate(facts["curves"]):
        batches = max(1, curve["batches"])
        edges = ("low", "high") if facts["sampled_part"] != 1 else ()
        limits: dict[str, Any] = {
            edge: [x / batches for x in _numbers(curve[edge])] for edge in edges
        }
        name = f"{curve['policy']}: {_WHAT.get(curve['policy'], '')}"
        rows = _numbers(curve["rows_per_batch"])
        lines.append(Line(name, curve["slots"], rows, colour=colour, has_dots=True, **limits))
    first = facts["curves"][0]
    # A sample may overestimate its largest batch, so its bound may have no point.
    gaps = {slots: "does not fit" if slots < floor else "not known" for slots in first["slots"]}
    return Chart(
        "Rows fetched for a batch", "slots", "rows", tuple(lines),
        f"Of {facts['total']['unique_rows']:,.0f} different ones, in the last "
        f"{first['batches']:,} batches. There is no point where a batch does not fit the slots, or "
        "where a sample of the rows cannot tell.",
        from_zero=True, x_log=True, cell=",.0f", gaps=gaps,
    )  # fmt: skip


def _working_sets(total: Mapping[str, Any]) -> Chart:
    sets = total["working_sets"]
    x = [each["batches"] for each in sets]
    value, error = ([each["mean"][key] for each in sets] for key in ("value", "error"))
    mean = Line("on average", x, value, has_dots=True, **band(value, error))
    most = Line("at most", x, [each["most"] for each in sets], colour=1, has_dots=True)
    return Chart(
        "Different rows of consecutive batches", "batches", "rows", (mean, most),
        from_zero=True, x_log=True, cell=",.0f",
    )  # fmt: skip


def _drift(total: Mapping[str, Any]) -> Chart:
    drift = total["drift"]
    title = f"Accesses to the {drift['hot_rows']:,} hottest rows"
    lines: tuple[Line, ...] = ()
    if len(drift["own"]) > 1:
        periods = list(range(1, len(drift["own"]) + 1))
        lines = (
            Line("hottest of the period itself", periods, drift["own"], has_dots=True),
            Line("of the one before", periods[1:], drift["previous"], colour=1, has_dots=True),
            Line("of the first", periods[1:], drift["first"], colour=2, has_dots=True),
        )
    return Chart(
        title, "period", "share of accesses", lines, y_format=".0%", from_zero=True, cell=".1%"
    )


def _estimate(estimate: Mapping[str, float], form: str) -> str:
    return with_error(estimate["value"], estimate["error"], form)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


_TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "table": lambda table: table["name"],
    "rows": lambda table: f"{table['rows']:,}",
    "read": lambda table: _estimate(table["distinct"], ",.0f"),
    "accesses": lambda table: f"{table['accesses']:,}",
    "lookups/sample": lambda table: f"{table['lookups_per_sample']:.3g}",
    "rows/batch": lambda table: f"{table['unique_rows']:,.0f}",
    "top 1 %": lambda table: _estimate(table["top"]["1.0%"], ".1%"),
    "top 10 %": lambda table: _estimate(table["top"]["10.0%"], ".1%"),
    "Zipf": lambda table: f"{table['zipf']['skew']:.2f} ±{table['zipf']['error']:.1%}",
}
