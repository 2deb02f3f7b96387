"""What strategies would move, as a document, from the facts of `hotrow simulate --json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotrow.report.charts import Chart, Line, lines_by_name, name_with_depth
from hotrow.report.document import NONE, Charts, Document, Part, Section, Table, Text
from hotrow.support.units import show_bytes

_HEADS = ("strategy", "slots", "ahead", "hit rate", "rows/batch", "moved/batch", "chunked")
_PREDICTED = ("ms/step", "speed", "samples/s", "waits for")


def simulation_document(
    facts: Sequence[Mapping[str, Any]], *, name: str, conditions: str
) -> Document:
    """`conditions`: what was simulated, in a sentence."""
    is_timed = any("step_ms" in each for each in facts)
    heads = _HEADS + (_PREDICTED if is_timed else ())
    rows = [_cells(each)[: len(heads)] for each in facts]
    parts: list[Part] = [
        Text(conditions, "faint"),
        Section("By slots", [Charts(list(_charts(facts, is_timed)))]),
        Section("Figures", [Table(heads, rows, words=("waits for",))]),
    ]
    if is_timed and any(each.get("chunked_batches") for each in facts):
        parts.append(
            Text(
                "No step is predicted where batches are chunked: more slots, or a smaller "
                "data.batch_size, lets their rows in"
            )
        )
    return Document(f"hotrow simulate: {name}", parts, facts)


def _charts(facts: Sequence[Mapping[str, Any]], is_timed: bool) -> list[Chart]:
    depths = {each.get("depth") for each in facts if each["strategy"] == "lookahead"}

    def lines(key: str) -> tuple[Line, ...]:
        return lines_by_name(
            (name_with_depth(each["strategy"], each.get("depth"), depths), each["slots"], each[key])
            for each in facts
            if key in each
        )

    charts = [
        Chart(
            "Rows fetched for a batch", "slots", "rows", lines("rows_per_batch"),
            "belady is the least that anyone could fetch who knows all batches.",
            from_zero=True, x_log=True,
        ),
        Chart(
            "Hit rate", "slots", "share of lookups", lines("hit_rate"),
            "Lookups that cause no fetch.", y_format=".0%", x_log=True,
            from_zero=len({each["slots"] for each in facts}) == 1,  # a point alone has no scale
        ),
    ]  # fmt: skip
    if is_timed:
        fast = next(each["all_fast_ms"] for each in facts if "all_fast_ms" in each)
        note = f"With every row in fast memory it takes {fast:.3g} ms."
        charts.append(
            Chart(
                "Predicted step", "slots", "milliseconds", lines("step_ms"), note,
                from_zero=True, x_log=True,
            )
        )  # fmt: skip
    return charts


def _cells(each: Mapping[str, Any]) -> list[str]:
    is_planned, is_timed = "depth" in each, "step_ms" in each
    return [
        each["strategy"],
        f"{each['slots']:,}",
        str(each["depth"]) if is_planned else "all",
        f"{each['hit_rate']:.2%}",
        f"{each['rows_per_batch']:,.0f}",
        show_bytes(each["bytes_per_batch"]) if is_planned else NONE,
        f"{each['chunked_batches']} of {each['batches']}" if is_planned else NONE,
        f"{each['step_ms']:.3f}" if is_timed else NONE,
        f"{each['of_all_fast']:.0%}" if is_timed else NONE,
        f"{each['samples_per_second']:,.0f}" if is_timed else NONE,
        each["limit"] if is_timed else NONE,
    ]
