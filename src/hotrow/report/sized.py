"""How much fast memory a run needs: in a sentence, and as a document."""

from __future__ import annotations

from collections.abc import Callable

from hotrow.report.charts import Bars, Chart, Line, lines_by_name, name_with_depth
from hotrow.report.document import NONE, Bullets, Charts, Document, Section, Table, Text, rate
from hotrow.support.records import SizedOption, SizeRecord
from hotrow.support.units import show_bytes

_HEADS = (
    "strategy", "budget", "of rows", "pinned", "ahead", "fill", "ms/step", "speed", "samples/s",
    "waits for",
)  # fmt: skip
_WORDS = ("waits for", "fill")


def size_document(record: SizeRecord) -> Document:
    marked = [place for place, option in enumerate(record.best) if option == record.chosen]
    best, tried = ([_cells(each) for each in some] for some in (record.best, record.options))
    return Document(
        f"hotrow size: {record.name}",
        [
            Text(advice(record), "advice"),
            Text(_conditions(record), "faint"),
            Bullets(record.notes),
            Section(
                "Of each strategy, the smallest that is enough",
                [Table(_HEADS, best, words=_WORDS, marked=marked)],
            ),
            Section("By budget", [Charts([_speeds(record), _moved(record), _parts(record)])]),
            Section("All that was tried", [Table(_HEADS, tried, words=_WORDS)], is_folded=True),
        ],
        facts=[record],
    )


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


def _cells(option: SizedOption) -> list[str]:
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
    return rate(option.samples_per_second, low, high)


def _by_budget(record: SizeRecord, value: Callable[[SizedOption], float]) -> tuple[Line, ...]:
    depths = {option.depth for option in record.options if option.strategy == "lookahead"}
    return lines_by_name(
        (
            name_with_depth(option.strategy, option.depth, depths),
            option.budget_bytes / 2**20,
            value(option),
        )
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
    bars = tuple(
        Bars(name, names, times, colour=colour)
        for colour, (name, times) in enumerate(values.items())
    )
    return Chart(
        "Parts of a step", "milliseconds", "", bars, order=names,
        note="On a GPU, planning and moving rows go on beside training where strategies overlap.",
    )  # fmt: skip
