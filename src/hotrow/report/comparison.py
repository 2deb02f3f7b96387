"""A comparison as a page: with charts where plotly is installed, with one plain drawing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hotrow.report.cells import (
    NONE,
    RESULT,
    SPEED,
    conditions,
    remarks,
    result_cells,
    speed_cells,
    speed_title,
)
from hotrow.report.charts import Bars, Chart, library
from hotrow.report.page import bullets, charts, details, heading, page, paragraph, table
from hotrow.support.records import ComparisonRecord, Figures

_EQUAL = "equal to all-fast"
_SPEED_NOTE = "The median of whole runs, and from the slowest to the fastest repetition."


def page_of(record: ComparisonRecord) -> str:
    """The whole page."""
    timed = [each for each in record.strategies if each.whole_run > 0]
    left_over = remarks(record)
    return page(
        f"hotrow compare: {record.name}",
        [
            paragraph(record.advice, "advice") if record.advice else "",
            paragraph(f"{record.started}, {record.outcome}. {conditions(record)}", "faint"),
            heading("Speed"),
            _speeds(timed, record),
            heading("Figures"),
            _table(record),
            heading("Remarks") if left_over else "",
            bullets(left_over),
            heading("What they are"),
            bullets([f"{each.strategy}: {each.summary or NONE}" for each in record.strategies]),
            _settings(record),
        ],
    )


def _speeds(timed: Sequence[Figures], record: ComparisonRecord) -> str:
    if not timed:
        return paragraph("No strategy was timed.")
    # Under way a page is written after every turn, and has no use for a library of megabytes.
    if record.outcome == "under way" or library() is None:
        return _drawing(timed)
    names = [each.strategy for each in timed]
    speeds = Bars(
        "samples/s",
        names,
        [each.whole_run for each in timed],
        low=[each.slow_run for each in timed],
        high=[each.fast_run for each in timed],
    )
    mib = 2**20
    parts = list(dict.fromkeys(part for each in timed for part in each.memory))
    memory = [
        Bars(part, names, [each.memory.get(part, 0) / mib for each in timed], colour=place)
        for place, part in enumerate(parts)
    ]
    hits = Bars("hit rate", names, [each.hit_rate for each in timed], colour=2)
    moved = Bars("KiB", names, [each.bytes_per_sample / 1024 for each in timed], colour=1)
    order = tuple(names)
    return charts(
        [
            Chart(
                "Samples per second", "samples/s", "", (speeds,), order=order, from_zero=True,
                note=_SPEED_NOTE,
            ),
            Chart(
                "Fast memory by part", "MiB", "", tuple(memory), order=order, is_stacked=True,
                note=f"The budget is {record.budget_bytes / mib:,.1f} MiB.",
            ),
            Chart(
                "Hit rate", "share of lookups", "", (hits,), order=order, x_format=".0%",
                from_zero=True, note="Lookups that caused no fetch.",
            ),
            Chart("Moved per sample", "KiB, both ways", "", (moved,), order=order, from_zero=True),
        ]
    )  # fmt: skip


def _drawing(timed: Sequence[Figures]) -> str:
    """A bar for each whole run, with a line from the slowest to the fastest repetition upon it."""
    scale = 480 / max(each.fast_run for each in timed)
    height = 30 * len(timed) + 8
    rows = []
    for place, each in enumerate(timed):
        top = 30 * place + 6
        low, middle, high = (
            130 + scale * rate for rate in (each.slow_run, each.whole_run, each.fast_run)
        )
        rows.append(
            f'<text x="0" y="{top + 15}">{escape(each.strategy)}</text>'
            f'<rect class="bar" x="130" y="{top}" width="{middle - 130:.1f}" height="20" />'
            f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{top + 10}" '
            f'y2="{top + 10}" />'
            f'<text x="{max(middle, high) + 8:.1f}" y="{top + 15}">'
            f"{each.whole_run:,.0f}</text>"
        )
    return (
        f'<div class="plain"><svg viewBox="0 0 720 {height}" role="img" aria-label="Samples per '
        f'second">{"".join(rows)}</svg></div><p class="faint">Samples per second. {_SPEED_NOTE}</p>'
    )


def _table(record: ComparisonRecord) -> str:
    heads = ["strategy", *(name or speed_title(record) for name in SPEED), *RESULT]
    rows = [_cells(each) for each in record.strategies]
    bad = [(number, _EQUAL) for number, row in enumerate(rows) if row[-1] in ("no", "failed")]
    return table(heads, rows, words=("contract", _EQUAL), bad=bad)


def _cells(figures: Figures) -> list[str]:
    texts = [figures.strategy, *speed_cells(figures), *result_cells(figures)]
    if figures.outcome == "failed" and figures.samples == 0:
        texts[-1] = "failed"
    return texts


def _settings(record: ComparisonRecord) -> str:
    """Settings and machine, for whoever wants to repeat it."""
    lines = [
        f"{section}.{key} = {value}"
        for section, values in record.settings.items()
        for key, value in values.items()
    ]
    lines += [f"{key}: {value}" for key, value in record.environment.items()]
    return details("Settings and machine", f"<pre>{escape(chr(10).join(lines))}</pre>")
