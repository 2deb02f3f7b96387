"""How skewed data are, as a page: from the facts that `hotrow profile --json` tells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hotrow.report.charts import COLOURS, Chart, Line
from hotrow.report.page import bullets, charts, details, heading, page, paragraph, table

_TABLES_DRAWN = len(COLOURS) - 1
_TABLES = (
    "table", "rows", "read", "accesses", "lookups/sample", "rows/batch", "top 1 %", "top 10 %",
    "Zipf",
)  # fmt: skip
_WHAT = {
    "lru": "the least recent rows leave",
    "static": "the hottest rows stay",
    "belady": "the fewest possible",
}


def page_of_profile(facts: Mapping[str, Any]) -> str:
    """The whole page."""
    total, tables = facts["total"], facts["tables"]
    top = total["top"]["1.0%"]["value"]
    return page(
        f"hotrow profile: {facts['data']}",
        [
            paragraph(
                f"The hottest 1 % of the rows have {top:.1%} of the accesses. "
                f"{facts['floors'][0]:,} slots hold any batch, {facts['floors'][1]:,} any two "
                "together.",
                "advice",
            ),
            paragraph(
                f"{facts['samples']:,} samples in {facts['batches']:,} batches of "
                f"{facts['batch_size']:,}; {total['accesses']:,} accesses to {total['rows']:,} "
                f"rows, {_how(facts)}.",
                "faint",
            ),
            bullets(facts["notes"]),
            heading("Skew"),
            charts([coverage(facts), all_hot(facts)]),
            heading("Fast memory"),
            charts([misses(facts), working_sets(total)]),
            heading("Drift"),
            charts([drift(total)]) or paragraph("One period alone.", "faint"),
            heading("Tables"),
            table(_TABLES, [_cells(each) for each in (total, *tables)], marked=[0]),
            _shares(total),
        ],
    )


def _how(facts: Mapping[str, Any]) -> str:
    if facts["sampled_part"] == 1:
        return "counted exactly"
    return (
        f"estimated from {facts['followed_rows']:,} of them; bands and ± show how far off it may be"
    )


def coverage(facts: Mapping[str, Any]) -> Chart:
    """Of all tables, and of those with most accesses; of as many, with most rows."""
    tables = sorted(facts["tables"], key=lambda each: (-each["accesses"], -each["rows"]))
    tables = tables[:_TABLES_DRAWN]
    lines = []
    for colour, each in enumerate((facts["total"], *(tables if len(facts["tables"]) > 1 else ()))):
        found = each["coverage"]
        share, error = found["share"], found["error"]
        band: dict[str, Any] = {}
        if any(error):
            band["low"] = [max(0.0, x - e) for x, e in zip(share, error, strict=True)]
            band["high"] = [min(1.0, x + e) for x, e in zip(share, error, strict=True)]
        rows = [100 * count / found["num_rows"] for count in found["rows"]]
        lines.append(Line(each["name"], rows, share, colour=colour, is_dashed=colour > 0, **band))
    left = len(facts["tables"]) - len(lines) + 1
    note = "How much of the accesses go to how many rows, the hottest first."
    if left > 0 and len(lines) > 1:
        note += f" The tables with fewest accesses and rows, {left} of them, are left out."
    return Chart(
        "Coverage", "% of the rows", "share of accesses", tuple(lines), note,
        y_format=".0%", from_zero=True, x_log=True,
    )  # fmt: skip


def all_hot(facts: Mapping[str, Any]) -> Chart:
    found, rows = facts["all_hot"], facts["total"]["rows"]
    x = [100 * count / rows for count in found["rows"]]
    line = Line("samples", x, _numbers(found["samples"]), colour=2, has_dots=True)
    return Chart(
        "All-hot samples", "% of the rows that are hot", "share of samples", (line,),
        "Samples that read hot rows alone.", y_format=".0%", from_zero=True, x_log=True,
    )  # fmt: skip


def misses(facts: Mapping[str, Any]) -> Chart:
    """By how many slots there are."""
    lines = []
    for colour, curve in enumerate(facts["curves"]):
        batches = max(1, curve["batches"])
        band: dict[str, Any] = {}
        if facts["sampled_part"] != 1:
            band = {key: [x / batches for x in _numbers(curve[key])] for key in ("low", "high")}
        name = f"{curve['policy']}: {_WHAT.get(curve['policy'], '')}"
        rows = _numbers(curve["rows_per_batch"])
        lines.append(Line(name, curve["slots"], rows, colour=colour, has_dots=True, **band))
    return Chart(
        "Rows fetched for a batch", "slots", "rows", tuple(lines),
        f"Of {facts['total']['unique_rows']:,.0f} different ones. What has no point does not fit, "
        "or is not known of a sample.",
        from_zero=True, x_log=True,
    )  # fmt: skip


def working_sets(total: Mapping[str, Any]) -> Chart:
    sets = total["working_sets"]
    x = [each["batches"] for each in sets]
    mean = Line("on average", x, [each["mean"]["value"] for each in sets], has_dots=True)
    most = Line("at most", x, [each["most"] for each in sets], colour=1, has_dots=True)
    return Chart(
        "Different rows of consecutive batches", "batches", "rows", (mean, most),
        from_zero=True, x_log=True,
    )  # fmt: skip


def drift(total: Mapping[str, Any]) -> Chart:
    found = total["drift"]
    if len(found["own"]) < 2:
        return Chart("Accesses to hot rows", "period", "share", ())
    periods = list(range(1, len(found["own"]) + 1))
    lines = (
        Line("hottest of the period itself", periods, found["own"], has_dots=True),
        Line("of the one before", periods[1:], found["previous"], colour=1, has_dots=True),
        Line("of the first", periods[1:], found["first"], colour=2, has_dots=True),
    )
    return Chart(
        "Accesses to hot rows", "period", "share of accesses", lines,
        f"The {found['hot_rows']:,} hottest rows.", y_format=".0%", from_zero=True,
    )  # fmt: skip


def _cells(each: Mapping[str, Any]) -> list[str]:
    return [
        each["name"],
        f"{each['rows']:,}",
        _estimate(each["distinct"], ",.0f"),
        f"{each['accesses']:,}",
        f"{each['lookups_per_sample']:.3g}",
        f"{each['unique_rows']:,.0f}",
        _estimate(each["top"]["1.0%"], ".1%"),
        _estimate(each["top"]["10.0%"], ".1%"),
        f"{each['zipf']['skew']:.2f} ±{each['zipf']['error']:.1%}",
    ]


def _shares(total: Mapping[str, Any]) -> str:
    rows = [[part, _estimate(share, ".2%")] for part, share in total["top"].items()]
    return details("Shares of the hottest rows", table(["of the rows", "of the accesses"], rows))


def _estimate(found: Mapping[str, float], form: str) -> str:
    text = format(found["value"], form)
    return f"{text} ±{format(found['error'], form)}" if found["error"] else text


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
