"""Names of strategies: where rows are, which system orders or splits samples, what skips some.

find_named("lookahead")              # a strategy of a collection
find_named("hotline")                # a system
find_named("fae+slipstream")         # a system, and samples that are skipped
"""

from __future__ import annotations

from dataclasses import dataclass

from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.support.messages import did_you_mean
from hotrow.support.numbers import plain_fields
from hotrow.support.units import parse_bytes
from hotrow.systems.slipstream.skip import SkipSettings

# Systems, what they do, and what they promise compared with all-fast.
SYSTEMS = {
    "fae": ("hot samples and cold ones in turns, rows of cold ones fetched", "changed"),
    "fae-hybrid": ("hot samples and cold ones in turns, cold ones on the CPU", "changed"),
    "hotline": (
        "popular samples of a batch first, while the others' rows arrive",
        "exact up to rounding",
    ),
}
SKIPS = {
    "slipstream": "samples left out whose rows have stopped changing",
    "random-drop": "samples left out at random",
}
PLAIN = "hybrid-plain"  # `hotrow compare` alone knows it
_ROWS_OF_SYSTEMS = "static"


@dataclass(frozen=True)
class Named:
    """A strategy by its parts."""

    rows: Strategy
    system: str | None = None
    skip: str | None = None

    @property
    def name(self) -> str:
        base = self.system or self.rows.name
        return base if self.skip is None else f"{base}+{self.skip}"

    @property
    def summary(self) -> str:
        base = self.rows.summary if self.system is None else SYSTEMS[self.system][0]
        return base if self.skip is None else f"{base}; {SKIPS[self.skip]}"

    @property
    def contract(self) -> str:
        if self.skip is not None:
            return "changed"
        return self.rows.contract if self.system is None else SYSTEMS[self.system][1]


def followed(name: str) -> str | None:
    """Return the strategy of a comparison whose number of skipped samples random-drop follows."""
    base, _, skip = name.partition("+")
    return f"{base}+slipstream" if skip == "random-drop" else None


def find_named(name: str) -> Named:
    """Return a strategy or a system, each also with `+slipstream` or `+random-drop`."""
    base, plus, skip = name.partition("+")
    if plus and skip not in SKIPS:
        raise ValueError(
            f"there is no {'+' + skip!r} to put on a strategy; there are "
            f"{' and '.join('+' + name for name in SKIPS)}"
        )
    if base in SKIPS:
        raise ValueError(f"{base} goes on top of a strategy, such as 'lookahead+{base}'")
    if base in SYSTEMS:
        return Named(STRATEGIES[_ROWS_OF_SYSTEMS], base, skip or None)
    if base in STRATEGIES:
        return Named(STRATEGIES[base], None, skip or None)
    known = [*STRATEGIES, *SYSTEMS]
    if base == PLAIN:
        raise ValueError(
            f"{PLAIN} is there to be compared with, by `hotrow compare` alone and with nothing on "
            "top; 'hybrid' is the same done well"
        )
    hint = did_you_mean(base, known)
    raise ValueError(
        f"there is no strategy {base!r}{hint}; known are {', '.join(known)}, each also with "
        f"{' or '.join('+' + name for name in SKIPS)}"
    )


@dataclass(frozen=True)
class SystemSection:
    """`[system]`: settings of strategies that order, split or skip samples.

    `hot_budget`: the largest number of bytes of hot rows of fae and slipstream; None: all that can
    be pinned, or, if nothing is pinned, the run's budget. `target`: the share of hot samples that
    slipstream skips, and of all samples that random-drop skips when it is not compared with
    slipstream. The others are `SkipSettings` of slipstream."""

    hot_budget: str | int | None = None
    target: float = 0.3
    mode: str = "samples"
    watched: float = 0.015
    least_visits: int = 1
    patience: int = 3

    def __post_init__(self) -> None:
        plain_fields(self)
        if not 0 <= self.target < 1:
            raise ValueError(f"target must be a share of at least 0 and below 1, got {self.target}")
        self.skipping()  # refuses values out of range
        if self.hot_budget is not None:
            parse_bytes(self.hot_budget, total=1 << 60)  # only its form

    def skipping(self) -> SkipSettings:
        names = ("target", "mode", "watched", "least_visits", "patience")
        return SkipSettings(**{name: getattr(self, name) for name in names})
