"""What every planner decides alike, wherever it runs: the hold, pins, numbers and re-pinning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hotrow.engine.evict import Eviction
from hotrow.engine.tuning import Tuning

OLDEST = -(2**30)  # last use of a free slot
_TURNOVERS = 1.5
PINNED = 2**31 - 1  # last use of a pinned slot: a hold that never ends


@dataclass(frozen=True)
class Hold:
    """Rows used by the `past` batches before and the `future` batches after may not leave."""

    past: int
    future: int

    @property
    def batches(self) -> int:
        """How many batches' rows must fit together."""
        return self.past + 1 + self.future


@dataclass(frozen=True)
class Pins:
    """Which part of the slots is for hot rows, and which rows are known to be hot beforehand."""

    part: float
    hottest: Callable[[int], Tensor]  # at most so many ids, hottest first
    learned: bool = False  # re-pin by the uses counted while running


class Slots(Protocol):
    """What a planner asks of a scratchpad."""

    slots: Tensor
    num_slots: int
    num_rows: int

    @property
    def has_every_row(self) -> bool: ...


class PlannerRules:
    """The state and the rules that planners share. Numbers count batches in planning order."""

    def __init__(
        self,
        pad: Slots,
        *,
        hold: Hold,
        eviction: Eviction,
        refetch: bool,
        pins: Pins | None,
        tuning: Tuning,
    ) -> None:
        """`refetch`: fetch a row that is neither pinned nor held anew for every batch."""
        self.hold, self.eviction, self.pins, self.tuning = hold, eviction, pins, tuning
        self._slots = pad
        # Where rows can be pinned and every row has a slot, no row has to leave.
        self.refetch = refetch and (pins is None or not pad.has_every_row)
        self.number = 0  # of the next batch to be planned, counted from the last renumbering
        self._origin = 0
        self.pins_version = 0  # changes whenever other rows are pinned, or fewer
        self.pins_gave_way = 0  # how often pins gave way to a batch that did not fit
        self.largest_batch = 0  # different rows of the largest batch that was planned
        self.wanted_slots = 0  # by the last batch that did not fit, beside those in flight
        self._mean_missing = 0.0

    @property
    def last_number(self) -> int:
        """The number of the newest batch there could have been."""
        return self._origin + self.number - 1

    def known_ahead(self, count: int) -> list[Tensor]:
        """Return the rows of the next batches, `count` batches at most; may wait for a device."""
        raise NotImplementedError

    def note_missing(self, rows: int) -> None:
        """Learn how many rows batches miss. Batches that do not fit count as well, because looking
        far ahead gains nothing for them."""
        self._mean_missing += 0.1 * (rows - self._mean_missing)

    def useful_depth(self) -> int:
        """Batches until all slots have been replaced, and half as many more.

        With so many, misses are within 6 % of the fewest possible (docs/decisions.md).
        """
        return 2 + int(_TURNOVERS * self._slots.num_slots / max(1.0, self._mean_missing))

    # -- pins --------------------------------------------------------------------------

    def room_for_pins(self, largest_batch: int) -> int:
        """How many slots can be pinned beside batches of so many rows."""
        if self._slots.has_every_row:
            return self._slots.num_slots
        return max(0, self._slots.num_slots - self.hold.batches * largest_batch)

    def count_pins(self, part: float, largest_batch: int) -> int:
        """How many slots to pin if `part` of them are for hot rows."""
        return min(int(part * self._slots.num_slots), self.room_for_pins(largest_batch))

    def is_relearn_due(self, number: int) -> bool:
        """Whether to pin other rows before the batch with this number."""
        if self.pins is None or not self.pins.learned or self._slots.has_every_row:
            return False
        tuning = self.tuning
        return number in tuning.early_relearn or (number > 0 and number % tuning.relearn == 0)

    def stop_learning(self) -> None:
        """A caller has named the rows to pin."""
        if self.pins is not None:
            self.pins = replace(self.pins, learned=False)

    def slots_for(self, ids: Tensor, needed_before: int) -> int:
        """How many slots would have held a batch with these rows beside the ones in flight."""
        rows, others = ids.numel(), self.hold.batches - 1
        near = self.known_ahead(others)
        together = torch.cat([ids, *near]).unique().numel()
        if self.wanted_slots <= rows:  # nothing was in flight: batches to come tell what would be
            if near:
                together += (together - rows) * (others - len(near)) // len(near)
            elif not needed_before:  # how many rows batches share is not known
                together += others * max(rows, self.largest_batch)
        return int(min(max(together, self.wanted_slots), self._slots.num_rows))
