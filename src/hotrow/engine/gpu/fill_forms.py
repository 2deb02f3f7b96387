"""Forms of a fill, and which to take by how fast each is. Knows rates, and no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# How many times as fast staged has to be alone to be taken: zero-copy takes two multiprocessors
# from training; staged takes cores from loaders and launches. A form that was 2.2 times as fast
# alone, on all cores, was slower beside training (benchmarks/LOG.md).
CLEARLY = 2.5
# How fast bulk has to be, of zero-copy alone, to be taken: it disturbs training's kernels less.
# Where it had 0.97 of zero-copy's rate, a step took 0.69 ms by it and 0.87 by zero-copy
# (benchmarks/LOG.md).
NEARLY = 0.85


@dataclass(frozen=True)
class FillChoice:
    """The form that is used, why, and how many moves per second each form that was tried made."""

    form: str  # zero-copy, bulk, staged
    why: str
    moves_per_second: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        rates = [f"{form} {rate / 1e6:.1f}" for form, rate in self.moves_per_second.items()]
        measured = f"; million moves per second: {', '.join(rates)}" if rates else ""
        return f"{self.form} ({self.why}{measured})"


def by_rates(moves_per_second: Mapping[str, float]) -> FillChoice:
    """Bulk, if nearly as fast as zero-copy; otherwise that, unless staged is clearly faster."""
    rates, needed = moves_per_second, moves_per_second["zero-copy"]
    if rates.get("bulk", 0.0) >= NEARLY * needed:
        return FillChoice("bulk", "about as fast as zero-copy, and training is faster", rates)
    if rates.get("staged", 0.0) >= CLEARLY * needed:
        return FillChoice("staged", f"{CLEARLY:g} times as fast, or more", rates)
    why_not = {"bulk": "bulk is slower", "staged": f"staged is not {CLEARLY:g} times as fast"}
    return FillChoice("zero-copy", ", ".join(why_not[x] for x in rates if x in why_not), rates)
