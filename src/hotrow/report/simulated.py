"""What strategies would move, as a page: from the facts that `hotrow simulate --json` tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotrow.report.cells import NONE
from hotrow.report.charts import Chart, Line
from hotrow.report.page import charts, heading, page, paragraph, table
from hotrow.support.units import show_bytes

_HEADS = ("strategy", "slots", "ahead", "hit rate", "rows/batch", "moved/batch", "chunked")
_PREDICTED = ("ms/step", "speed", "samples/s", "waits for")


def page_of_simulation(facts: Sequence[Mapping[str, Any]], *, name: str, told: str) -> str:
    """The whole page; `told`: what was simulated, in a sentence."""
    is_timed = any("step_ms" in each for each in facts)
    heads = _HEADS + (_PREDICTED if is_timed else ())
    return page(
        f"hotrow simulate: {name}",
        [
            paragraph(told, "faint"),
            heading("By slots"),
            charts([rows(facts), hits(facts), *([steps(facts)] if is_timed else [])]),
            heading("Figures"),
            table(heads, [_cells(each, is_timed) for each in facts], words=("waits for",)),
        ],
    )


def rows(facts: Sequence[Mapping[str, Any]]) -> Chart:
    return Chart(
        "Rows fetched for a batch", "slots", "rows", _lines(facts, "rows_per_batch"),
        "belady is the least that anyone could fetch who knows all batches.",
        from_zero=True, x_log=True,
    )  # fmt: skip


def hits(facts: Sequence[Mapping[str, Any]]) -> Chart:
    return Chart(
        "Hit rate", "slots", "share of lookups", _lines(facts, "hit_rate"),
        "Lookups that cause no fetch.", y_format=".0%", x_log=True,
        from_zero=len({each["slots"] for each in facts}) == 1,  # a point alone has no scale
    )  # fmt: skip


def steps(facts: Sequence[Mapping[str, Any]]) -> Chart:
    fast = next(each["all_fast_ms"] for each in facts if "all_fast_ms" in each)
    return Chart(
        "Predicted step", "slots", "milliseconds", _lines(facts, "step_ms"),
        f"With every row in fast memory it takes {fast:.3g} ms.", from_zero=True, x_log=True,
    )  # fmt: skip


def _lines(facts: Sequence[Mapping[str, Any]], key: str) -> tuple[Line, ...]:
    named: dict[str, list[Mapping[str, Any]]] = {}
    many = {each.get("depth") for each in facts if each["strategy"] == "lookahead"}
    for each in facts:
        name = each["strategy"]
        if name == "lookahead" and len(many) > 1:
            name += f", {each['depth']} ahead"
        if key in each:
            named.setdefault(name, []).append(each)
    return tuple(
        Line(name, [x["slots"] for x in some], [x[key] for x in some], colour=at, has_dots=True)
        for at, (name, some) in enumerate(named.items())
    )


def _cells(each: Mapping[str, Any], is_timed: bool) -> list[str]:
    is_planned = "depth" in each
    found = [
        each["strategy"],
        f"{each['slots']:,}",
        str(each["depth"]) if is_planned else "all",
        f"{each['hit_rate']:.2%}",
        f"{each['rows_per_batch']:,.0f}",
        show_bytes(each["bytes_per_batch"]) if is_planned else NONE,
        f"{each['chunked_batches']} of {each['batches']}" if is_planned else NONE,
    ]
    if not is_timed:
        return found
    if "step_ms" not in each:
        return [*found, NONE, NONE, NONE, NONE]
    return [
        *found,
        f"{each['step_ms']:.3f}",
        f"{each['of_all_fast']:.0%}",
        f"{each['samples_per_second']:,.0f}",
        each["limit"],
    ]
