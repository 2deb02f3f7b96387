"""Speeds of published systems over what they were published beside, and what arithmetic allows.

Knows results alone; neither systems nor machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]  # of one system's results, as published.py writes it

SYSTEMS = (
    "hybrid-plain",
    "cpu",
    "hybrid",
    "static-hybrid",
    "fae",
    "fae-fetched",
    "hotline",
    "scratchpipe",
    "slipstream-fae",
    "slipstream-hotline",
    "random-drop",
    "lookahead",
    "lookahead-written",
    "all-fast",
)
# What each is compared with, and the ratio published; None: ours to report.
BARS: dict[str, tuple[tuple[str, float | None], ...]] = {
    "fae": (("hybrid-plain", 1.52), ("cpu", 2.3), ("hybrid", None)),
    "fae-fetched": (("hybrid-plain", 1.52), ("cpu", 2.3), ("hybrid", None), ("fae", None)),
    "hotline": (("hybrid", 2.2),),
    "static-hybrid": (("hybrid", None),),
    "scratchpipe": (("static-hybrid", 2.8), ("hybrid", 5.0)),
    "slipstream-fae": (("fae", 1.2),),
    "slipstream-hotline": (("hotline", 1.175),),
    "random-drop": (("fae", None),),
    "lookahead": tuple(
        (name, None)
        for name in ("fae", "fae-fetched", "hotline", "scratchpipe", "slipstream-fae",
                     "slipstream-hotline", "all-fast")
    ),
}  # fmt: skip
BARS["lookahead-written"] = BARS["lookahead"]


@dataclass(frozen=True)
class Ratio:
    """One system's speed over another's, both of one run."""

    system: str
    over: str
    value: float
    published: float | None
    bound: float | None  # None: nothing bounds it but the machine

    def __str__(self) -> str:
        published = "" if self.published is None else f", published {self.published:g}"
        bound = "" if self.bound is None else f", bound {self.bound:.2f}"
        return f"{self.value:.2f} times {self.over}{published}{bound}"


def ratios(lines: Mapping[str, Line]) -> list[Ratio]:
    """All that these lines, by system, allow."""
    found = []
    for system in SYSTEMS:
        for over, published in BARS.get(system, ()):
            if system in lines and over in lines:
                value = beside(lines[system]) or ms(lines[over])
                value /= ms(lines[system])
                found.append(Ratio(system, over, value, published, bound(system, over, lines)))
    return found


def beside(line: Line) -> float | None:
    """Of the system below one that leaves out samples, in turns with it; None: there is none."""
    taken = line["facts"].get("below_ms")
    return min(taken) if taken else None


def ms(line: Line) -> float:
    return float(line["step_ms"]["p50"])


def bound(system: str, over: str, lines: Mapping[str, Line]) -> float | None:
    """The ratio that arithmetic allows, however well a system is made; None: any."""
    facts, bar = lines[system]["facts"], ms(lines[over])
    if system == "fae" and over in ("hybrid", "hybrid-plain", "cpu"):
        # Hot samples as if every row were in fast memory, cold ones by the honest hybrid.
        hot = facts.get("hot_share")
        if hot is None or not {"all-fast", "hybrid"} <= lines.keys():
            return None
        return bar / (hot * ms(lines["all-fast"]) + (1 - hot) * ms(lines["hybrid"]))
    if over == "fae" and "dropped_share" in facts and facts["dropped_share"]:
        # Hot samples alone are left out, and those take what they would by all-fast.
        if "all-fast" not in lines:
            return None
        below = beside(lines[system]) or bar
        return below / (below - facts["dropped_share"] * ms(lines["all-fast"]))
    if system == "slipstream-hotline":
        return 1 / (1 - facts["dropped_share"]) if facts["dropped_share"] < 1 else None
    if system == "scratchpipe":
        floor = facts.get("bound_ms")
        trained = ms(lines["all-fast"]) if "all-fast" in lines else 0.0
        return None if not floor else bar / max(floor, trained)
    return bar / ms(lines["all-fast"]) if "all-fast" in lines else None
