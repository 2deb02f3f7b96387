"""The figures of a comparison as short texts, the same on a screen and on a page."""

from __future__ import annotations

import math
from collections.abc import Callable

from hotrow.support.messages import few, many
from hotrow.support.records import WORSE_THAN_CONSTANT, ComparisonRecord, Figures
from hotrow.support.units import show_bytes

NONE = "-"


def equality(figures: Figures) -> str:
    if figures.strategy == "all-fast":
        return NONE
    words = {"bits": "bits", "tolerance": "within tolerance", "no": "no"}
    return words.get(figures.equal, "not compared")


def speed_title(record: ComparisonRecord) -> str:
    return f"speed-up over {record.baseline}" if record.baseline is not None else "speed-up"


def _number(form: str) -> Callable[[float], str]:
    return lambda value: NONE if math.isnan(value) else format(value, form)


_whole, _times, _quality = _number(",.0f"), _number(".2f"), _number(".4f")


def spread(figures: Figures) -> str:
    if math.isnan(figures.samples_per_second):
        return NONE
    slow, fast = figures.slow_samples_per_second, figures.fast_samples_per_second
    return f"{short(figures.samples_per_second)} ({short(slow)}-{short(fast)})"


def short(rate: float) -> str:
    """Three digits: 5.09M, 812k."""
    for unit, word in ((1e6, "M"), (1e3, "k")):
        if rate >= 0.9995 * unit:
            return f"{rate / unit:.3g}{word}"
    return f"{rate:.3g}"


def speed_cells(figures: Figures) -> list[str]:
    """Beside the strategy's name, for the columns of SPEED."""
    ran = figures.samples > 0
    return [
        figures.contract,
        _whole(figures.whole_run),
        spread(figures),
        _times(figures.speed_up),
        show_bytes(figures.fast_bytes) if ran else NONE,
    ]


def result_cells(figures: Figures) -> list[str]:
    """Likewise, for the columns of RESULT."""
    ran = figures.samples > 0
    moved = figures.bytes_per_sample
    return [
        f"{figures.hit_rate:.1%}" if ran else NONE,
        _times(figures.rows_per_sample),
        NONE if math.isnan(moved) else show_bytes(moved),
        f"{figures.samples:,}" if ran else NONE,
        _quality(figures.auc),
        _quality(figures.log_loss),
        equality(figures) if ran else NONE,
    ]


# The empty one is speed_title.
SPEED = ("contract", "samples/s", "step p50 (p20-p80)", "", "fast memory")
RESULT = (
    "hit rate", "rows/sample", "bytes/sample", "samples", "AUC", "log-loss", "equal to all-fast",
)  # fmt: skip


def remarks(record: ComparisonRecord) -> list[str]:
    """What does not fit a table: failures, differences, what was left out."""
    found = list(record.notes)
    for each in record.strategies:
        if each.outcome == "failed":
            found.append(f"{each.strategy} failed: {each.message}")
        if each.outcome == "diverged":
            found.append(f"{each.strategy}: the loss is no number at the end")
        if each.repetitions and each.outcome == "unfinished":
            found.append(
                f"{each.strategy}: {each.repetitions} of "
                f"{many(record.repetitions, 'repetition')} done"
            )
        elif each.is_optional and 0 < each.repetitions < record.repetitions:
            found.append(f"{each.strategy} was trained once, to compare with")
        if each.equal_note:
            found.append(f"{each.strategy}: {equality(each)}; {each.equal_note}")
        if each.repeat_note:
            found.append(f"{each.strategy} did not repeat itself: {each.repeat_note}")
    if worse := [each.strategy for each in record.strategies if each.normalised_entropy > 1]:
        found.append(f"{few(worse)}: {WORSE_THAN_CONSTANT} (normalised entropy above 1)")
    return found


def conditions(record: ComparisonRecord) -> str:
    """What the figures are of, in a sentence or two."""
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
