"""Which strategy to take, from the figures of a comparison, in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotrow.support.messages import apart
from hotrow.support.records import ComparisonRecord, Figures
from hotrow.support.units import show_bytes


def advise(record: ComparisonRecord) -> str:
    """Return the fastest exact strategy within the budget, and what else is worth a thought."""
    timed = [each for each in record.strategies if each.whole_run > 0]
    if not timed and record.outcome == "interrupted":
        return "It was stopped before any strategy had ended: there is nothing to choose from."
    if timed and all(each.outcome == "diverged" for each in timed):
        return (
            "Every loss is NaN at the end: there is nothing to choose from. Smaller learning rates "
            "may help."
        )
    right = [each for each in timed if _keeps_its_word(each) and each.outcome != "diverged"]
    affordable = [each for each in right if each.is_within_budget]
    sentences = [_broken_promises(timed)]
    best = _fastest_of_best_contract(affordable)
    if best is None:
        budget = show_bytes(record.budget_bytes)
        sentences.append(f"No strategy with all-fast's results ran within the budget of {budget}.")
    else:
        others = [each for each in right if each is not best]
        sentences += [_choice(best, record), _rivals(best, others), *_faster(best, others)]
    if record.settings["run"]["device"] == "cpu":
        sentences.append("On a CPU both memories are RAM: these speeds say nothing about a GPU.")
    return " ".join(sentence for sentence in sentences if sentence)


def _fastest_of_best_contract(affordable: Sequence[Figures]) -> Figures | None:
    for contract in ("exact", "exact up to rounding"):
        kept = [each for each in affordable if each.contract == contract]
        if kept:
            return max(kept, key=_speed)
    return None


def _speed(figures: Figures) -> float:
    return figures.whole_run


def _keeps_its_word(figures: Figures) -> bool:
    return not (figures.contract == "exact" and figures.equal == "no")


def _broken_promises(timed: Sequence[Figures]) -> str:
    broken = [each.strategy for each in timed if not _keeps_its_word(each)]
    if not broken:
        return ""
    return f"Do not use {' or '.join(broken)}: exact by contract, but not equal to all-fast here."


def _choice(best: Figures, record: ComparisonRecord) -> str:
    over = ""
    if record.baseline not in (None, best.strategy):
        over = f", {best.speed_up:.2f} times {record.baseline},"
    return (
        f"Take {best.strategy}: with {best.whole_run:,.0f} samples/s{over} the fastest "
        f"that is {best.contract} within the budget of {show_bytes(record.budget_bytes)}."
    )


def _is_within_spread(one: Figures, other: Figures) -> bool:
    """Return whether the ranges from p20 to p80 overlap: a run cannot tell the two apart."""
    return (
        one.fast_samples_per_second >= other.slow_samples_per_second
        and other.fast_samples_per_second >= one.slow_samples_per_second
    )


def _rivals(best: Figures, others: Sequence[Figures]) -> str:
    names = [
        each.strategy
        for each in others
        if each.contract == best.contract
        and each.is_within_budget
        and _is_within_spread(each, best)
    ]
    if not names:
        return ""
    return f"Differences to {', '.join(names)} are within the spread."


def _faster(best: Figures, others: Sequence[Figures]) -> Iterator[str]:
    """Yield what is faster at a price."""
    for each in sorted(others, key=_speed, reverse=True):
        if _speed(each) <= _speed(best):
            continue
        is_clear = "" if not _is_within_spread(each, best) else " (within the spread)"
        yield (
            f"{each.strategy} is {_speed(each) / _speed(best):.2f} times as fast{is_clear}, "
            f"{_price(each, best)}."
        )


def _price(figures: Figures, best: Figures) -> str:
    if not figures.is_within_budget:
        return f"with {show_bytes(figures.fast_bytes)} of fast memory"
    if figures.contract == "changed":
        auc, best_auc = apart(figures.auc, best.auc, digits=4, kind="f")
        return f"and changes the training: AUC {auc} instead of {best_auc}"
    return figures.contract
