"""Strategies: settings of the one mechanism, as frozen records with names.

To add one, write its record in STRATEGIES. The equality test takes every exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hotrow.engine.evict import EVICTIONS, Eviction
from hotrow.engine.rules import Hold
from hotrow.engine.stages import FIVE, FUSED, IN_PLACE, Stage, hold_of, sequential
from hotrow.support.messages import did_you_mean


def as_listed(stages: Sequence[Stage], cycle: int) -> Sequence[Stage]:
    """The order in which the stages of one cycle run; any order gives the same bits."""
    return stages


@dataclass(frozen=True)
class Strategy:
    """How fast memory is used. `contract` is what a run promises next to all-fast."""

    name: str
    summary: str
    contract: str = "exact"
    everything: bool = False  # every row lives in fast memory
    on_host: bool = False  # rows that are not pinned stay there: the CPU reads and updates them
    on_cpu_alone: bool = False  # and the dense part is there, too
    pinned_part: float = 0.0  # of the slots, for hot rows
    eviction: Eviction = EVICTIONS["least-recent"]
    refetch: bool = False  # rows that are not pinned are fetched for every batch
    look_ahead: int | None = 0  # batches known before they are needed; None: as many as pay
    stages: tuple[Stage, ...] = FUSED
    overlapped: bool = False
    order: Callable[[Sequence[Stage], int], Sequence[Stage]] = as_listed

    @property
    def has_slots(self) -> bool:
        """Whether rows come to fast memory and leave it, within a budget."""
        return not (self.everything or self.on_host)

    @property
    def needs_budget(self) -> bool:
        """Whether some rows are in fast memory, and not all."""
        return self.has_slots or (self.on_host and self.pinned_part > 0)

    @property
    def keeps_rows(self) -> bool:
        """Whether a row can stay in fast memory from one batch to the next."""
        return self.everything or (self.needs_budget and (self.pinned_part > 0 or not self.refetch))

    @property
    def learns_pins(self) -> bool:
        """Whether uses decide what is pinned, if no profile does. Where rows may stay without
        pins, the order in which they leave heeds uses, and pins are in its way."""
        return self.pinned_part > 0 and self.refetch

    def reads_ahead_on(self, device: torch.device) -> bool:
        """Whether a batch may be read before the one before it was trained.

        Where every row is in place this gains nothing on a CPU. On a GPU ids are sorted, and
        batches uploaded, beside training.
        """
        return device.type == "cuda" or not (self.everything or self.on_cpu_alone)

    @property
    def timed_stages(self) -> tuple[Stage, ...]:
        return self.stages if self.overlapped else sequential(self.stages)

    @property
    def order_in_cycle(self) -> Callable[[Sequence[Stage], int], Sequence[Stage]]:
        """Where nothing overlaps, the stages of a cycle are one batch's, one after the other."""
        return self.order if self.overlapped else as_listed

    @property
    def hold(self) -> Hold:
        return hold_of(self.timed_stages)

    @property
    def staged(self) -> bool:
        """Whether rows lie in a buffer between two stages."""
        return not any(stage.collects and stage.inserts for stage in self.stages)

    @property
    def buffer_part(self) -> float:
        """Of the budget: rows on their way between collect and insert, or passing through."""
        return 1 / 4 if self.staged else 1 / 16


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "all-fast",
            "every row in fast memory: the upper bound",
            everything=True,
            overlapped=True,
        ),
        Strategy(
            "cpu",
            "rows and the dense part on the CPU",
            contract="exact up to rounding",
            on_host=True,
            on_cpu_alone=True,
            stages=IN_PLACE,
            overlapped=True,
        ),
        Strategy(
            "hybrid",
            "rows read and updated by the CPU, the dense part on the device",
            contract="exact up to rounding",
            on_host=True,
            stages=IN_PLACE,
            overlapped=True,
        ),
        Strategy(
            "static-hybrid",
            "the hottest rows on the device, the others read and updated by the CPU",
            contract="exact up to rounding",
            on_host=True,
            pinned_part=1.0,
            stages=IN_PLACE,
            overlapped=True,
        ),
        Strategy("uncached", "every row fetched for every batch: the lower bound", refetch=True),
        Strategy(
            "static", "the hottest rows pinned, the others fetched", pinned_part=1.0, refetch=True
        ),
        Strategy("lru", "rows stay until others are more recent"),
        Strategy(
            "scratchpipe",
            "rows arrive before they are needed, in five overlapped stages",
            look_ahead=2,
            stages=FIVE,
            overlapped=True,
        ),
        Strategy(
            "lookahead",
            "rows arrive before they are needed and leave when they are not needed for longest",
            pinned_part=0.5,
            eviction=EVICTIONS["farthest-next-use"],
            look_ahead=None,
            overlapped=True,
        ),
    )
}

# They order, split or drop samples, which a module called from a user's loop cannot do.
_NEED_TRAINER = {
    "fae": "FAE",
    "hotline": "Hotline",
    "slipstream": "Slipstream",
    "random-drop": "RandomDrop",
}


def find_strategy(strategy: str | Strategy) -> Strategy:
    """A strategy by its name."""
    if isinstance(strategy, Strategy):
        return strategy
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    systems = [f"hotrow.{system}()" for name, system in _NEED_TRAINER.items() if name in strategy]
    if systems:
        raise ValueError(
            f"strategy {strategy!r} orders, splits or drops samples, so it cannot run inside a "
            f"module: give {' and '.join(systems)} to hotrow.Trainer(system=). The strategies for "
            f"a collection are {', '.join(STRATEGIES)}"
        )
    hint = did_you_mean(strategy, STRATEGIES)
    raise ValueError(f"there is no strategy {strategy!r}{hint}; known are {', '.join(STRATEGIES)}")
