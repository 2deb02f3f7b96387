"""Planning on a CPU: ids are checked and sorted by the host, and a plan is known at once.

`gpu/planning.py` has the same face, where plans are launched and their outcome is known later.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotrow.engine.counters import Counters
from hotrow.engine.memory import PlannedMoves, SlotMemory
from hotrow.engine.planner import Plan, Planner
from hotrow.engine.settings import Settings
from hotrow.engine.split_batch import place_of
from hotrow.engine.work import Flight, SortedPart, SortedWork, Work
from hotrow.inputs.batch import Batch, lookups_of
from hotrow.kernels.reference import Moves, sort_ids
from hotrow.support.streams import Mark

_REMEMBERED = 64  # batches that a lookup may ask for again
_NONE = torch.empty(0, dtype=torch.int64)
_NO_MOVES = Moves(_NONE, _NONE, _NONE)


class Outcome(Enum):
    """What a plan came to, as `confirm` tells it."""

    PLANNED = "planned"
    HALTED_OTHERS = "halted others"  # plans that were launched behind it have to be made again
    NO_ROOM = "no room"  # the same, and the batch takes the direct path


class Depth(NamedTuple):
    """How many batches ahead are worth knowing."""

    useful: int
    limit: int | None = None  # of what the planner can keep
    bytes_per_batch: int = 0  # that each known batch takes of the budget's bytes for ids


class AllRowsPlanning:
    """Planning where every row is in its own slot: ids are sorted, and nothing moves."""

    remembered_batches = _REMEMBERED
    most_ahead: int | None = None  # batches that may be expected at once; None: any number

    def __init__(self, settings: Settings, flight: Flight, counters: Counters) -> None:
        self._layout, self._flight, self._counters = settings.layout, flight, counters

    def input_device(self, device: torch.device | None) -> torch.device | None:
        """Return where ids have to be, of a batch that is on `device` or anywhere."""
        return torch.device("cpu")

    def copies_to_compare(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return copies of a batch's ids, which are compared by value when they are looked up."""
        return tuple(map(torch.clone, tensors))

    def work(self, group: Any, batch: Batch) -> Work:
        """Check a batch's ids and sort them."""
        lookups = lookups_of(batch, self._layout)
        return SortedWork(group, lookups, sort_ids(lookups.ids, self._layout.num_rows))

    def part(self, work: Work, batch: Batch, part: Batch, first: int) -> Work:
        """Return some samples of a planned batch, from `first` on."""
        place = place_of(batch, part, first, self._layout)
        return SortedPart(work, lookups_of(part, self._layout), place)

    def expect(self, work: Work, values: Tensor) -> None:
        """A batch is known that will be planned later; `values` are its indices."""

    def start(self) -> tuple[Tensor, Tensor] | None:
        """Return slots and ids of rows to be pinned before the first plan; None: there are none,
        or the first plan has them among its moves."""
        return None

    def plan(self, work: Work) -> bool:
        """Plan a batch; False if it has to take the direct path."""
        null = work.ids.ids.new_tensor([self._layout.num_rows])
        work.plan = Plan(0, torch.cat([work.ids.ids, null]), _NO_MOVES)
        work.collected = work.inserted = True
        self._counters.count(work.ids)
        return True

    def moves_in_flight(self) -> Iterator[PlannedMoves]:
        """Yield the moves of batches that were planned and have not moved, newest first."""
        return iter(())

    def mark_planned(self, work: Work, mark: Mark) -> None:
        """Note when the outcome of a plan will be known; here it already is."""

    def confirm(self, work: Work) -> Outcome:
        """Learn the outcome of a plan; here `plan` has said it."""
        return Outcome.PLANNED

    def take_back(self, work: Work) -> None:
        """A batch before this one could not be planned; here no batch is planned behind it."""

    def forget_window(self) -> None:
        """The batches expected will not come."""

    def depth(self) -> Depth | None:
        """Return how many batches ahead are worth knowing; None: it does not matter."""
        return None

    def compare(self, work: Work) -> None:
        """Launch a comparison of a batch's ids with the planned ones, where a device does that."""

    def note_number(self, work: Work, number: int) -> None:
        """A batch is yielded that has this number in its pass."""

    def take_changed(self) -> int | None:
        """Return the number of a batch whose ids a device has found changed, once; None: none."""
        return None

    def free_berth(self, berth: int) -> None:
        """No batch will land in this input of a captured step again."""

    def num_bytes(self) -> dict[str, int]:
        return {}

    def check(self) -> None:
        """Prove the maps consistent."""


class SlotPlanning(AllRowsPlanning):
    """Planning where rows come to slots and leave them."""

    def __init__(
        self, settings: Settings, flight: Flight, counters: Counters, memory: SlotMemory
    ) -> None:
        super().__init__(settings, flight, counters)
        self._window_bytes = settings.window_bytes
        self.planner = Planner(
            memory.pad,
            hold=settings.strategy.hold,
            eviction=settings.strategy.eviction,
            refetch=settings.strategy.refetch,
            pins=settings.pins(),
            tuning=settings.tuning,
        )

    def expect(self, work: Work, values: Tensor) -> None:
        self.planner.expect(work.ids)

    def plan(self, work: Work) -> bool:
        ids, counters = work.ids, self._counters
        plan = work.plan = self.planner.plan(ids)
        if plan is None:
            return False
        self._flight.begin(work)
        wanted = plan.moves.slots.numel() - plan.loaded
        counters.count(ids, fetched=plan.moves.entering[:wanted], evicted=plan.moves.leaving)
        if plan.loaded:
            counters.count_loaded(plan.moves.entering[wanted:])
        return True

    def moves_in_flight(self) -> Iterator[PlannedMoves]:
        for work in reversed(self._flight.uncollected):
            moves = work.plan.moves
            yield moves.slots, moves.leaving, moves.entering

    def forget_window(self) -> None:
        self.planner.forget_window()

    def depth(self) -> Depth | None:
        return Depth(self.planner.useful_depth(), bytes_per_batch=8 * self.planner.largest_batch)

    def num_bytes(self) -> dict[str, int]:
        return {"look-ahead ids": self._window_bytes}

    def check(self) -> None:
        self.planner.check()
