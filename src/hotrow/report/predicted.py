"""What `hotrow simulate` and `hotrow size` predict, as documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotrow.report.charts import Chart, Line, bars_by_name, lines_by_strategy
from hotrow.report.page import (
    NONE,
    Bullets,
    Charts,
    Document,
    Part,
    Section,
    Text,
    number,
    rate,
    table_by_columns,
)
from hotrow.support.records import SizedOption, SizeRecord
from hotrow.support.units import show_bytes

_MOVED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "strategy": lambda x: x["strategy"],
    "slots": lambda x: f"{x['slots']:,}",
    "ahead": lambda x: str(x.get("depth", "all")),
    "hit rate": lambda x: f"{x['hit_rate']:.2%}",
    "rows/batch": lambda x: f"{x['rows_per_batch']:,.0f}",
    "moved/batch": lambda x: show_bytes(x["bytes_per_batch"]) if "depth" in x else NONE,
    "chunked": lambda x: f"{x['chunked_batches']} of {x['batches']}" if "depth" in x else NONE,
}
_TIMED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "ms/step": lambda x: number(x.get("step_ms", math.nan), ".3f"),
    "speed": lambda x: number(x.get("of_all_fast", math.nan), ".0%"),
    "samples/s": lambda x: number(x.get("samples_per_second", math.nan), ",.0f"),
    "waits for": lambda x: x.get("limit", NONE),
}
_SIZED: dict[str, Callable[[SizedOption], str]] = {
    "strategy": lambda option: option.strategy,
    "budget": lambda option: show_bytes(option.budget_bytes),
    "of rows": lambda option: f"{option.slot_share:.1%}",
    "pinned": lambda option: f"{option.pinned_share:.0%}",
    "ahead": lambda option: f"{option.depth}" if option.depth else NONE,
    "fill": lambda option: option.fill or NONE,
    "ms/step": lambda option: f"{option.step_ms:.3g}",
    "speed": lambda option: f"{option.of_all_fast:.0%}",
    "samples/s": lambda option: _rate(option),
    "waits for": lambda option: option.limit,
}
_WORDS = ("waits for", "fill")


def simulation_document(
    facts: Sequence[Mapping[str, Any]], *, name: str, conditions: str
) -> Document:
    """`conditions`: what was simulated, in a sentence."""
    is_timed = any("step_ms" in each for each in facts)
    columns = _MOVED | (_TIMED if is_timed else {})
    parts: list[Part] = [
        Text(conditions, "faint"),
        Section("By slots", [Charts(list(_simulated_charts(facts, is_timed)))]),
        Section("Figures", [table_by_columns(columns, facts, words=_WORDS)]),
    ]
    if is_timed and any(each.get("chunked_batches") for each in facts):
        parts.append(
            Text(
                "No step is predicted where batches are chunked: more slots, or a smaller "
                "data.batch_size, lets their rows in"
            )
        )
    return Document(f"hotrow simulate: {name}", parts, facts)


def _simulated_charts(facts: Sequence[Mapping[str, Any]], is_timed: bool) -> list[Chart]:
    def lines(key: str) -> tuple[Line, ...]:
        return lines_by_strategy(
            (each["strategy"], each.get("depth"), each["slots"], each[key])
            for each in facts
            if key in each
        )

    charts = [
        Chart(
            "Rows fetched for a batch", "slots", "rows", lines("rows_per_batch"),
            "belady is the least that is possible if all batches are known.",
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


def size_document(record: SizeRecord) -> Document:
    marked = [place for place, option in enumerate(record.best) if option == record.chosen]
    best = table_by_columns(_SIZED, record.best, words=_WORDS, marked=marked)
    tried = table_by_columns(_SIZED, record.options, words=_WORDS)
    return Document(
        f"hotrow size: {record.name}",
        [
            Text(advice(record), "advice"),
            Text(_conditions(record), "faint"),
            Bullets(record.notes),
            Section(_title(record), [best]),
            Section("By budget", [Charts([_speeds(record), _moved(record), _parts(record)])]),
            Section("All that was tried", [tried], is_folded=True),
        ],
        facts=[record],
    )


def _title(record: SizeRecord) -> str:
    """Return the title of the best option of each strategy."""
    goal = f"{record.reach:.0%} of all-fast's speed"
    reaches = [option.reaches for option in record.best if option.strategy != "all-fast"]
    if all(reaches):
        return f"The smallest budget of each strategy with {goal}"
    if any(reaches):
        return f"The smallest budget of each strategy with {goal}, or else its fastest"
    return f"The fastest of each strategy: with fewer slots than rows, none has {goal}"


def advice(record: SizeRecord) -> str:
    """Return what to take."""
    best = record.chosen
    if best.strategy == "all-fast":
        return (
            f"Take all-fast, with {show_bytes(best.budget_bytes)} of fast memory: "
            f"{_rate(best)} samples/s."
        )
    goal = "the smallest budget with" if best.reaches else "the nearest to"
    return (
        f"Take {best.strategy} with a budget of {show_bytes(best.budget_bytes)}, "
        f"{best.budget_bytes / record.rows_bytes:.1%} of the rows' bytes, "
        f"{goal} {record.reach:.0%} of all-fast's speed: {_rate(best)} samples/s."
    )


def _conditions(record: SizeRecord) -> str:
    """Return what the figures are of."""
    where = record.machine["gpu"] or "a CPU"
    guessed = {"guessed": "guessed from the model's size", "given": "with the dense part as given"}
    how = guessed.get(record.all_fast_is, record.all_fast_is)
    return (
        f"{record.num_rows:,} rows, {show_bytes(record.rows_bytes)} with their state; batches of "
        f"{record.batch_size:,} samples, {record.lookups:,.0f} lookups, {record.unique_rows:,.0f} "
        f"different rows. On {where} ({record.machine['name']}) all-fast takes "
        f"{record.all_fast_ms:.3g} ms, {how}; steps are predicted, ±{record.error:.0%}."
    )


def _rate(option: SizedOption) -> str:
    low, high = option.low_samples_per_second, option.high_samples_per_second
    return rate(option.samples_per_second, low, high)


def _by_budget(record: SizeRecord, value: Callable[[SizedOption], float]) -> tuple[Line, ...]:
    return lines_by_strategy(
        (option.strategy, option.depth, option.budget_bytes / 2**20, value(option))
        for option in record.options
    )


def _speeds(record: SizeRecord) -> Chart:
    lines = _by_budget(record, lambda option: option.of_all_fast)
    if lines:
        every = [x for line in lines for x in line.x]
        ends, goal = [min(every), max(every)], [record.reach] * 2
        lines += (Line("asked for", ends, goal, colour=7, is_dashed=True),)
    return Chart(
        "Speed", "budget, MiB", "of all-fast's", lines, "Predicted.",
        y_format=".0%", from_zero=True, x_log=True,
    )  # fmt: skip


def _moved(record: SizeRecord) -> Chart:
    lines = _by_budget(record, lambda option: option.moved_rows)
    return Chart(
        "Rows moved", "budget, MiB", "rows per step", lines,
        "In and out, once all slots are taken.", from_zero=True, x_log=True,
    )  # fmt: skip


def _parts(record: SizeRecord) -> Chart:
    names = tuple(option.strategy for option in record.best)
    values = {
        "as all-fast": [record.all_fast_ms for _ in record.best],
        "planning": [option.planning_ms for option in record.best],
        "moving rows": [option.moving_ms for option in record.best],
    }
    return Chart(
        "Parts of a step", "milliseconds", "", bars_by_name(names, values), order=names,
        note="On a GPU, planning and moving rows go on beside training where strategies overlap.",
    )  # fmt: skip
