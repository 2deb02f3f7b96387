"""A comparison as a document: with charts where plotly is installed, else one plain drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hotrow.report.charts import Bars, Chart, library
from hotrow.report.document import (
    NONE,
    Bullets,
    Charts,
    Document,
    Part,
    Section,
    Table,
    Text,
    number,
    rate,
)
from hotrow.support.messages import few, many
from hotrow.support.records import WORSE_THAN_CONSTANT, ComparisonRecord, Figures
from hotrow.support.units import show_bytes

_EQUAL = "equal to all-fast"


def comparison_document(record: ComparisonRecord) -> Document:
    timed = [figures for figures in record.strategies if figures.whole_run > 0]
    summaries = [f"{figures.strategy}: {figures.summary or NONE}" for figures in record.strategies]
    parts: list[Part] = [
        Text(f"{record.started}, {record.outcome}. {conditions(record)}", "faint"),
        Section("Speed", [_speeds(timed, record)]),
        Section("Figures", [_table(record)]),
        Section("What they are", [Bullets(summaries)], only="page"),
        Section("Settings and machine", [_settings(record)], is_folded=True),
    ]
    if noted := remarks(record):
        parts.insert(3, Section("Remarks", [Bullets(noted)]))
    if record.advice:
        parts.insert(0, Text(record.advice, "advice"))
    return Document(f"hotrow compare: {record.name}", parts)


def _speeds(timed: Sequence[Figures], record: ComparisonRecord) -> Part:
    names = tuple(figures.strategy for figures in timed)
    rates = Bars(
        "samples/s",
        names,
        [figures.whole_run for figures in timed],
        low=[figures.slow_run for figures in timed],
        high=[figures.fast_run for figures in timed],
    )
    speed = Chart(
        "Samples per second", "samples/s", "", (rates,), order=names, from_zero=True,
        note="The median of whole runs, and from the slowest to the fastest repetition.",
    )  # fmt: skip
    # Under way a page is written after every turn, and has no use for a library of megabytes.
    if record.outcome == "under way" or library() is None:
        return Charts([speed], "No strategy was timed.", is_plain=True)
    parts = dict.fromkeys(part for figures in timed for part in figures.memory)
    memory = tuple(
        Bars(part, names, [figures.memory.get(part, 0) / 2**20 for figures in timed], colour=place)
        for place, part in enumerate(parts)
    )
    hits = Bars("hit rate", names, [figures.hit_rate for figures in timed], colour=2)
    moved = Bars("KiB", names, [figures.bytes_per_sample / 1024 for figures in timed], colour=1)
    every = [
        speed,
        Chart(
            "Fast memory by part", "MiB", "", memory, order=names, is_stacked=True,
            note=f"The budget is {record.budget_bytes / 2**20:,.1f} MiB.",
        ),
        Chart(
            "Hit rate", "share of lookups", "", (hits,), order=names, x_format=".0%",
            from_zero=True, note="Lookups that caused no fetch.",
        ),
        Chart("Moved per sample", "KiB, both ways", "", (moved,), order=names, from_zero=True),
    ]  # fmt: skip
    return Charts(every, "No strategy was timed.")


def _table(record: ComparisonRecord) -> Table:
    over = f" over {record.baseline}" if record.baseline is not None else ""
    heads = (
        "strategy", "contract", "samples/s", "step p50 (p20-p80)", f"speed-up{over}", "fast memory",
        "hit rate", "rows/sample", "bytes/sample", "samples", "AUC", "log-loss", _EQUAL,
    )  # fmt: skip
    rows = [_cells(figures) for figures in record.strategies]
    bad = {(number, _EQUAL) for number, row in enumerate(rows) if row[-1] in ("no", "failed")}
    return Table(heads, rows, words=("contract", _EQUAL), bad=bad)


def _cells(figures: Figures) -> list[str]:
    has_run = figures.samples > 0
    moved, has_failed = figures.bytes_per_sample, figures.outcome == "failed"
    return [
        figures.strategy,
        figures.contract,
        number(figures.whole_run, ",.0f"),
        rate(
            figures.samples_per_second,
            figures.slow_samples_per_second,
            figures.fast_samples_per_second,
        ),
        number(figures.speed_up, ".2f"),
        show_bytes(figures.fast_bytes) if has_run else NONE,
        f"{figures.hit_rate:.1%}" if has_run else NONE,
        number(figures.rows_per_sample, ".2f"),
        NONE if math.isnan(moved) else show_bytes(moved),
        f"{figures.samples:,}" if has_run else NONE,
        number(figures.auc, ".4f"),
        number(figures.log_loss, ".4f"),
        equality(figures) if has_run else "failed" if has_failed else NONE,
    ]


def equality(figures: Figures) -> str:
    if figures.strategy == "all-fast":
        return NONE
    words = {"bits": "bits", "tolerance": "within tolerance", "no": "no"}
    return words.get(figures.equal, "not compared")


def remarks(record: ComparisonRecord) -> list[str]:
    """Return what does not fit a table: failures, differences, what was left out."""
    lines = list(record.notes)
    for figures in record.strategies:
        name, done = figures.strategy, figures.repetitions
        if figures.outcome == "failed":
            lines.append(f"{name} failed: {figures.message}")
        if figures.outcome == "diverged":
            lines.append(f"{name}: the loss is NaN at the end")
        if done and figures.outcome == "unfinished":
            lines.append(f"{name}: {done} of {many(record.repetitions, 'repetition')} done")
        elif figures.is_optional and 0 < done < record.repetitions:
            lines.append(f"{name} was trained once, to compare with")
        if figures.equal_note:
            lines.append(f"{name}: {equality(figures)}; {figures.equal_note}")
        if figures.repeat_note:
            lines.append(f"{name} did not repeat itself: {figures.repeat_note}")
    if worse := [each.strategy for each in record.strategies if each.normalised_entropy > 1]:
        lines.append(f"{few(worse)}: {WORSE_THAN_CONSTANT} (normalised entropy above 1)")
    return lines


def conditions(record: ComparisonRecord) -> str:
    """Return what the figures are of, in a sentence or two."""
    where = record.environment.get("gpu") or record.environment["device"]
    tolerance, batch = record.tolerance, record.settings["data"]["batch_size"]
    return (
        f"{many(record.steps, 'step')} of {many(batch, 'sample')}, "
        f"{many(record.repetitions, 'repetition')} in turn, the first "
        f"{many(record.warm_up, 'step')} of each left out of speeds; "
        f"{show_bytes(record.rows_bytes)} of rows with their state, a budget of "
        f"{show_bytes(record.budget_bytes)}; on {where}, torch's threads: "
        f"{record.environment['threads']}. Within tolerance: every loss differs by at most "
        f"{tolerance['relative']:g} of its value plus {tolerance['absolute']:g}, and so do "
        f"{1 - tolerance['outliers']:.0%} of the dense weights, rows and row state whose bits "
        "differ; or, where rounding was carried further, both are at most twice as far as all-fast "
        "is from itself with the samples of each batch in another order."
    )


def _settings(record: ComparisonRecord) -> Text:
    """Return settings and machine, for repeating the comparison."""
    lines = [
        f"{section}.{key} = {value}"
        for section, values in record.settings.items()
        for key, value in values.items()
    ]
    lines += [f"{key}: {value}" for key, value in record.environment.items()]
    return Text("\n".join(lines), "code")
