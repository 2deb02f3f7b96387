"""A comparison as a document: figures, charts, remarks, and which strategy to take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hotrow.report.charts import Bars, Chart, bars_by_name, library
from hotrow.report.page import (
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
from hotrow.report.rank_tables import comparison_parts
from hotrow.support.messages import apart, few, many
from hotrow.support.records import WORSE_THAN_CONSTANT, ComparisonRecord, Figures
from hotrow.support.toml import flat
from hotrow.support.units import show_bytes

_EQUAL = "equal to all-fast"


def comparison_document(record: ComparisonRecord, *, has_library: bool | None = None) -> Document:
    """`has_library`: whether a page has charts drawn by plotly; by default if it is installed."""
    timed = [figures for figures in record.strategies if figures.whole_run > 0]
    summaries = [f"{figures.strategy}: {figures.summary or NONE}" for figures in record.strategies]
    has_library = library() is not None if has_library is None else has_library
    # While training, a page is written after every turn: a library of megabytes is left out.
    is_plain = record.outcome == "under way" or not has_library
    charts = Charts(_charts(timed, record, is_plain), "No strategy was timed.", is_plain=is_plain)
    parts: list[Part] = [
        Text(f"{record.started}, {record.outcome}. {conditions(record)}", "faint"),
        Section("Speed", [charts]),
        Section("Figures", [_table(record)]),
        Section("What they are", [Bullets(summaries)], only="page"),
        Section("Settings and machine", [_settings(record)], is_folded=True),
    ]
    if lines := remarks(record):
        parts.insert(3, Section("Remarks", [Bullets(lines)]))
    if record.ranks > 1:
        parts.insert(3, Section("Ranks", comparison_parts(record.strategies)))
    if record.advice:
        parts.insert(0, Text(record.advice, "advice"))
    return Document(f"hotrow compare: {record.name}", parts)


def _charts(timed: Sequence[Figures], record: ComparisonRecord, is_plain: bool) -> list[Chart]:
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
    if is_plain:
        return [speed]
    parts = dict.fromkeys(part for figures in timed for part in figures.memory)
    memory = {part: [each.memory.get(part, 0) / 2**20 for each in timed] for part in parts}
    hits = Bars("hit rate", names, [figures.hit_rate for figures in timed], colour=2)
    moved = Bars("KiB", names, [figures.bytes_per_sample / 1024 for figures in timed], colour=1)
    return [
        speed,
        Chart(
            "Fast memory by part", "MiB", "", bars_by_name(names, memory), order=names,
            is_stacked=True, note=f"The budget is {record.budget_bytes / 2**20:,.1f} MiB.",
        ),
        Chart(
            "Hit rate", "share of lookups", "", (hits,), order=names, x_format=".0%",
            from_zero=True, note="Lookups that caused no fetch.",
        ),
        Chart("Moved per sample", "KiB, both ways", "", (moved,), order=names, from_zero=True),
    ]  # fmt: skip


def _table(record: ComparisonRecord) -> Table:
    over = f" over {record.baseline}" if record.baseline is not None else ""
    of_each = " of a rank" if record.ranks > 1 else ""
    heads = (
        "strategy", "contract", "samples/s", "samples/s of a step, p50 (p20-p80)",
        f"speed-up{over}", f"fast memory{of_each}", "hit rate", "rows/sample", "bytes/sample",
        "samples", "AUC", "log-loss", _EQUAL,
    )  # fmt: skip
    rows = [_cells(figures) for figures in record.strategies]
    bad = {(place, _EQUAL) for place, row in enumerate(rows) if row[-1] in ("no", "failed")}
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
        number(figures.hit_rate, ".1%") if has_run else NONE,
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
    """Return what does not fit a table: failures, differences, skipped samples."""
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
    """Return what was compared, in a sentence or two."""
    where = record.environment.get("gpu") or record.environment["device"]
    tolerance, batch = record.tolerance, record.settings["data"]["batch_size"]
    of_each = f" for each of {record.ranks} ranks" if record.ranks > 1 else ""
    return (
        f"{many(record.steps, 'step')} of {many(batch, 'sample')}, "
        f"{many(record.repetitions, 'repetition')} in turn, the first "
        f"{many(record.warm_up, 'step')} of each left out of speeds; "
        f"{show_bytes(record.rows_bytes)} of rows with their state, a budget of "
        f"{show_bytes(record.budget_bytes)}{of_each}; on {where}, torch's threads: "
        f"{record.environment['threads']}. Within tolerance: every loss differs by at most "
        f"{tolerance['relative']:g} of its value plus {tolerance['absolute']:g}, and so do "
        f"{1 - tolerance['outliers']:.0%} of the dense weights, rows and row state whose bits "
        "differ. A strategy beyond that is within tolerance, too, if its distance to all-fast is "
        "at most twice that of all-fast trained with the samples of each batch in another order."
    )


def _settings(record: ComparisonRecord) -> Text:
    """Return settings and machine, for repeating the comparison."""
    lines = [f"{key} = {value}" for key, value in flat(record.settings)]
    lines += [f"{key}: {value}" for key, value in flat(record.environment)]
    return Text("\n".join(lines), "code")


# -- advice ----------------------------------------------------------------------------


def advise(record: ComparisonRecord) -> str:
    """Name the fastest exact strategy within the budget, and those that are faster at a price."""
    timed = [figures for figures in record.strategies if figures.whole_run > 0]
    if not timed and record.outcome == "interrupted":
        return "It was stopped before any strategy had ended: there is nothing to choose from."
    if timed and all(figures.outcome == "diverged" for figures in timed):
        return (
            "Every loss is NaN at the end: there is nothing to choose from. Smaller learning rates "
            "may help."
        )
    broken = [each.strategy for each in timed if not _keeps_contract(each)]
    right = [each for each in timed if _keeps_contract(each) and each.outcome != "diverged"]
    best = _best([figures for figures in right if figures.is_within_budget])
    budget, sentences = show_bytes(record.budget_bytes), []
    if broken:
        names = " or ".join(broken)
        sentences.append(f"Do not use {names}: exact by contract, but not equal to all-fast here.")
    if best is None:
        sentences.append(f"No strategy with all-fast's results ran within the budget of {budget}.")
    else:
        over = ""
        if record.baseline not in (None, best.strategy):
            over = f", {best.speed_up:.2f} times {record.baseline},"
        sentences.append(
            f"Take {best.strategy}: with {best.whole_run:,.0f} samples/s{over} the fastest "
            f"that is {best.contract} within the budget of {budget}."
        )
        sentences += _others(best, [figures for figures in right if figures is not best])
    if record.settings["run"]["device"] == "cpu":
        sentences.append("On a CPU both memories are RAM: these speeds say nothing about a GPU.")
    return " ".join(sentences)


def _keeps_contract(figures: Figures) -> bool:
    return not (figures.contract == "exact" and figures.equal == "no")


def _best(affordable: Sequence[Figures]) -> Figures | None:
    """Return the fastest strategy of the strictest contract."""
    for contract in ("exact", "exact up to rounding"):
        kept = [figures for figures in affordable if figures.contract == contract]
        if kept:
            return max(kept, key=lambda figures: figures.whole_run)
    return None


def _is_within_spread(one: Figures, other: Figures) -> bool:
    """Return whether ranges of speed overlap, so that the two may be equally fast: the ranges of
    their repetitions, or where one was trained once, from p20 to p80 of the steps."""
    if min(one.repetitions, other.repetitions) > 1:
        return one.fast_run >= other.slow_run and other.fast_run >= one.slow_run
    return (
        one.fast_samples_per_second >= other.slow_samples_per_second
        and other.fast_samples_per_second >= one.slow_samples_per_second
    )


def _others(best: Figures, others: Sequence[Figures]) -> Iterator[str]:
    """Yield which strategies are as fast, and what is faster at a price."""
    rivals = [
        figures.strategy
        for figures in others
        if figures.contract == best.contract
        and figures.is_within_budget
        and _is_within_spread(figures, best)
    ]
    if rivals:
        yield f"Differences to {', '.join(rivals)} are within the spread."
    for figures in sorted(others, key=lambda each: each.whole_run, reverse=True):
        if figures.whole_run > best.whole_run:
            spread = " (within the spread)" if _is_within_spread(figures, best) else ""
            yield (
                f"{figures.strategy} is {figures.whole_run / best.whole_run:.2f} times as fast"
                f"{spread}, {_price(figures, best)}."
            )


def _price(figures: Figures, best: Figures) -> str:
    if not figures.is_within_budget:
        return f"with {show_bytes(figures.fast_bytes)} of fast memory"
    if figures.contract == "changed":
        auc, best_auc = apart(figures.auc, best.auc, digits=4, kind="f")
        return f"and changes the training: AUC {auc} instead of {best_auc}"
    return figures.contract
