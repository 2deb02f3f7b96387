"""Room for plans within a budget: slots give way to them, before slots are allocated.

How much plans take follows from how large batches are, which is known when the first one comes.
Knows bytes and slots; not what plans are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hotrow.engine.memory import FixedSlots
from hotrow.engine.row_sums import WAITING
from hotrow.engine.rows import RowGroup
from hotrow.engine.tuning import Tuning
from hotrow.store.budget import Share, choose_map
from hotrow.support.interrupts import uninterrupted
from hotrow.support.messages import warn
from hotrow.support.units import show_bytes

_BESIDE_SLOT = 1  # bytes, in the ranking
_WORTH_IT = 1 / 100  # slots more than before


class PlanRoom(FixedSlots):
    """How many slots one width group will have, and what it takes with plans beside them."""

    is_open = True

    def __init__(
        self,
        group: RowGroup,
        build: Callable[[Share], Sequence[Any]],
        share: Share,
        packet_bytes: Callable[[int], int],
    ) -> None:
        """`build` makes the group's parts around a number of slots, and `packet_bytes` says what
        rows on their way take beside them."""
        self._of = weakref.ref(group)  # the group has this room
        self._build, self._packet_bytes = build, packet_bytes
        self._most, self.num_rows = share, group.layout.num_rows
        self._lookups = self._plans = 0  # that there will be room for
        self._sums_wait = False
        self.restore_slots()

    @property
    def _group(self) -> RowGroup:
        group = self._of()
        assert group is not None
        return group

    @property
    def tuning(self) -> Tuning:
        return self._group.settings.tuning

    @property
    def num_slots(self) -> int:
        return self._share.slots

    @property
    def least_slots(self) -> int:
        """How many slots plans must leave."""
        return -(-self._most.slots // 2)

    @property
    def bytes_of_slot(self) -> int:
        """What a slot gives back: its row, its state, and its part of a hashed map."""
        state = 4 * self._group.width + 10 + self._group.memory.pad.id_type.itemsize
        return int(state + (0 if self._share.dense_map else 8))

    def size_for(self, work: Any, *, spare: float) -> int:
        """Learn from the first batch; return for how many lookups to make room."""
        self._group.planning.inputs.expect_uniques(work.count_distinct(), work.size)
        reserved = self._lookups  # by a call of `reserve`
        return int(max(reserved, work.size) if reserved else work.size * (1 + spare))

    def expect(self, lookups: int, last_cycle: int, *, sums_wait: bool) -> None:
        """Make room for the plans of batches with so many lookups, and for the gradients of one
        if they wait for an optimizer's step."""
        self._sums_wait = sums_wait
        # A plan lives from its own cycle to the one after training, when its rows may leave. Inputs
        # of captured steps keep their plans, and a batch of another shape needs one.
        self._plans = max(last_cycle + 2, self._group.capture.inputs + 1)
        self._lookups = lookups

    def num_bytes(self) -> dict[str, int]:
        if not self.is_open:
            return {}
        group = self._group
        later = group.planner.bytes_for(self._lookups) if self._lookups else {}
        return {
            **group.memory.num_bytes(),
            **group.planner.num_bytes,
            **later,
            "plans": self.plan_bytes,
            "rows on their way": self._packet_bytes(self.num_slots),
            **({WAITING: self.waiting_bytes} if self._sums_wait else {}),
        }

    @property
    def plan_bytes(self) -> int:
        return int(self._group.planning.plan_bytes(self._lookups, self._plans))

    @property
    def waiting_bytes(self) -> int:
        """What the gradients of a batch's different rows take while they wait; 0: none wait."""
        if not self._sums_wait:
            return 0
        group = self._group
        per_row = 4 * group.dim + group.memory.pad.id_type.itemsize
        return int(group.planning.inputs.uniques(self._lookups) * per_row)

    def restore_slots(self) -> None:
        """Take all slots that the budget gave, as if no room had been made for plans."""
        self._share = self._most
        self._group.memory.pad.resize(self._most.slots, dense_map=self._most.dense_map)

    def set_slots(self, count: int) -> None:
        """Take another number of slots."""
        dense = self._most.dense_map and choose_map(count, self.num_rows)
        self._share = replace(self._most, slots=count, dense_map=dense)
        self._group.memory.pad.resize(count, dense_map=dense)

    def allocate(self) -> None:
        if not self.is_open:
            return
        group = self._group
        with uninterrupted():
            group.lanes.join()
            group.use(*self._build(self._share))
            self.is_open = False
            group.lanes.join()
        if self._lookups:
            with group.lanes.on("plan"):
                group.planning.reserve(self._lookups, self._plans)


def make_room(
    groups: Sequence[PlanRoom],
    lookups: Sequence[int],  # of a batch in each group
    budget_bytes: int,
    *,
    last_cycle: int,
    sums_wait: bool = False,
) -> None:
    """Choose the slots that fit the budget beside all else, for batches of so many lookups."""
    for group, count in zip(groups, lookups, strict=True):
        group.restore_slots()
        group.expect(count, last_cycle, sums_wait=sums_wait)
    excess = sum(sum(group.num_bytes().values()) for group in groups) - budget_bytes
    tuning = groups[0].tuning
    on_top = tuning.plans_on_top if budget_bytes < tuning.small_budget else 0
    missing, part = 0, 0.0
    if excess < 0:
        _take_more_slots(groups, -excess)
    elif excess > on_top:
        missing, part = _give_up_slots(groups, excess - on_top)
    if missing > 0:
        taken = sum(group.plan_bytes + group.waiting_bytes for group in groups)
        slots = sum(group.num_slots for group in groups)
        what = "plans and waiting gradients" if sums_wait else "plans"
        warn(
            f"of the budget of {show_bytes(budget_bytes)}, {what} of batches with "
            f"{sum(lookups):,} lookups take {show_bytes(taken)}, and more than half of the "
            f"slots would have to give way. {slots:,} slots are kept, and "
            f"{show_bytes(missing)} more than the budget are used. A budget {2 * part:.1f} "
            "times as large would hold all, or batches that are so many times smaller"
        )


def _take_more_slots(groups: Sequence[PlanRoom], spare: int) -> None:
    """Budgets are shared out with more bytes per slot than a device takes."""
    growing = [group for group in groups if group.num_slots < group.num_rows]
    bytes_of = {group: group.num_slots * group.bytes_of_slot for group in growing}
    for group in growing:
        part = spare * bytes_of[group] / sum(bytes_of.values())
        more = int(part / (group.bytes_of_slot + _BESIDE_SLOT))
        if more > group.num_slots * _WORTH_IT:
            group.set_slots(min(group.num_slots + more, group.num_rows))


def _give_up_slots(groups: Sequence[PlanRoom], excess: int) -> tuple[int, float]:
    """The bytes that are still missing when half of the slots are left, and which part of the
    slots' bytes was wanted."""
    bytes_of = {group: group.num_slots * group.bytes_of_slot for group in groups}
    # A group that has all of its rows would have to move some of them from now on.
    giving = [group for group in groups if group.num_slots < group.num_rows]
    if 2 * excess > sum(bytes_of[group] for group in giving):
        giving = list(groups)
    part = excess / sum(bytes_of[group] for group in giving)
    missing = 0
    for group in giving:
        left = group.num_slots - int(part * group.num_slots) - 1
        kept = max(left, group.least_slots)
        missing += (kept - left) * group.bytes_of_slot
        group.set_slots(kept)
    return missing, part
