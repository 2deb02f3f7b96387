"""How much fast memory a run needs: in a sentence, as cells of a table, and as a page."""

from __future__ import annotations

from collections.abc import Sequence

from hotrow.report.cells import NONE, short
from hotrow.report.charts import Bars, Chart, Line
from hotrow.report.page import bullets, charts, details, heading, page, paragraph, table
from hotrow.support.records import SizedOption, SizeRecord
from hotrow.support.units import show_bytes

HEADS = (
    "strategy", "budget", "of rows", "pinned", "ahead", "fill", "ms/step", "speed", "samples/s",
    "waits for",
)  # fmt: skip


def advice(record: SizeRecord) -> str:
    """What to take."""
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


def conditions(record: SizeRecord) -> str:
    """What the figures are of."""
    where = record.machine["gpu"] or "a CPU"
    guessed = {"guessed": "guessed from the model's size", "given": "with the dense part as given"}
    how = guessed.get(record.all_fast_is, record.all_fast_is)
    return (
        f"{record.num_rows:,} rows, {show_bytes(record.rows_bytes)} with their state; batches of "
        f"{record.batch_size:,} samples, {record.lookups:,.0f} lookups, {record.unique_rows:,.0f} "
        f"different rows. On {where} ({record.machine['name']}) all-fast takes "
        f"{record.all_fast_ms:.3g} ms, {how}; steps are predicted, ±{record.error:.0%}."
    )


def cells(option: SizedOption) -> list[str]:
    """For the columns of HEADS."""
    return [
        option.strategy,
        show_bytes(option.budget_bytes),
        f"{option.slot_share:.1%}",
        f"{option.pinned_share:.0%}",
        f"{option.depth}" if option.depth else NONE,
        option.fill or NONE,
        f"{option.step_ms:.3g}",
        f"{option.of_all_fast:.0%}",
        _rate(option),
        option.limit,
    ]


def _rate(option: SizedOption) -> str:
    low, high = option.low_samples_per_second, option.high_samples_per_second
    return f"{short(option.samples_per_second)} ({short(low)}-{short(high)})"


def page_of_size(record: SizeRecord) -> str:
    """The whole page."""
    marked = [place for place, each in enumerate(record.best) if each == record.chosen]
    rows = [cells(each) for each in record.best]
    return page(
        f"hotrow size: {record.name}",
        [
            paragraph(advice(record), "advice"),
            paragraph(conditions(record), "faint"),
            bullets(record.notes),
            heading("Of each strategy, the smallest that is enough"),
            table(HEADS, rows, words=("waits for", "fill"), marked=marked),
            heading("By budget"),
            charts([speeds(record), moved(record), parts(record)]),
            details(
                "All that was tried",
                table(HEADS, [cells(each) for each in record.options], words=("waits for",)),
            ),
        ],
    )


def _named(record: SizeRecord) -> dict[str, Sequence[SizedOption]]:
    depths = {each.depth for each in record.options if each.strategy == "lookahead"}
    found: dict[str, list[SizedOption]] = {}
    for each in record.options:
        name = each.strategy
        if name == "lookahead" and len(depths) > 1:
            name += f", {each.depth} ahead"
        found.setdefault(name, []).append(each)
    return dict(found)


def speeds(record: SizeRecord) -> Chart:
    lines = []
    for colour, (name, some) in enumerate(_named(record).items()):
        x = [each.budget_bytes / 2**20 for each in some]
        y = [each.of_all_fast for each in some]
        lines.append(Line(name, x, y, colour=colour, has_dots=True))
    if lines:
        every = [x for line in lines for x in line.x]
        ends, goal = [min(every), max(every)], [record.reach] * 2
        lines.append(Line("asked for", ends, goal, colour=7, is_dashed=True))
    return Chart(
        "Speed", "budget, MiB", "of all-fast's", tuple(lines), "Predicted.",
        y_format=".0%", from_zero=True, x_log=True,
    )  # fmt: skip


def moved(record: SizeRecord) -> Chart:
    lines = tuple(
        Line(
            name,
            [each.budget_bytes / 2**20 for each in some],
            [each.moved_rows for each in some],
            colour=colour,
            has_dots=True,
        )
        for colour, (name, some) in enumerate(_named(record).items())
    )
    return Chart(
        "Rows moved", "budget, MiB", "rows per step", lines,
        "In and out, once all slots are taken.", from_zero=True, x_log=True,
    )  # fmt: skip


def parts(record: SizeRecord) -> Chart:
    names = tuple(each.strategy for each in record.best)
    values = {
        "as all-fast": [record.all_fast_ms for _ in record.best],
        "planning": [each.planning_ms for each in record.best],
        "moving rows": [each.moving_ms for each in record.best],
    }
    bars = tuple(
        Bars(name, names, each, colour=colour) for colour, (name, each) in enumerate(values.items())
    )
    return Chart(
        "Parts of a step", "milliseconds", "", bars, order=names,
        note="On a GPU, planning and moving rows go on beside training where strategies overlap.",
    )  # fmt: skip
