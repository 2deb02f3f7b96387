"""Room for plans within a budget: slots give way to them, before any row has one.

How much plans take follows from how large batches are, which is known when the first one comes.
Knows bytes and slots; not what plans are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hotrow.engine.rows import Parts, RowGroup
from hotrow.engine.tuning import Tuning
from hotrow.store.budget import Share, choose_map
from hotrow.support.interrupts import uninterrupted
from hotrow.support.messages import warn
from hotrow.support.streams import Lanes
from hotrow.support.units import show_bytes

_BESIDE_SLOT = 1  # bytes, in the ranking
_WORTH_IT = 1 / 100  # slots more than before


class PlanRoom:
    """How many slots one width group has, and what it takes with plans beside them."""

    def __init__(self, group: RowGroup, build: Callable[[Share], Parts], share: Share) -> None:
        """`build` makes the group's parts around a number of slots."""
        self._of = weakref.ref(group)  # the group has this room
        self._build, self._share = build, share
        self._most_slots, self._may_be_dense = share.slots, share.dense_map

    @property
    def _group(self) -> RowGroup:
        group = self._of()
        assert group is not None
        return group

    @property
    def has_begun(self) -> bool:
        """Whether rows may have slots, or batches wait for them: then slots stay as they are."""
        planner = self._group.planner
        return planner.has_started or bool(planner.window)

    @property
    def plans(self) -> int:
        """Inputs of captured steps keep their plans, and a batch of another shape needs one."""
        return self._group.berths + 1

    @property
    def tuning(self) -> Tuning:
        return self._group.settings.tuning

    @property
    def num_rows(self) -> int:
        return self._group.layout.num_rows

    @property
    def num_slots(self) -> int:
        return self._share.slots

    @property
    def least_slots(self) -> int:
        """How many slots plans must leave."""
        return -(-self._most_slots // 2)

    @property
    def bytes_of_slot(self) -> int:
        """What a slot gives back: its row, its state, and its part of a hashed map."""
        pad = self._group.memory.pad
        state = 4 * self._group.width + 10 + pad.id_type.itemsize
        return int(state + (8 if pad.map.hashed else 0))

    def size_for(self, work: Any, *, spare: float) -> int:
        """Learn from the first batch; return for how many lookups to make room."""
        planning = self._group.planning
        planning.inputs.expect_uniques(work.count_distinct(), work.size)
        reserved = planning.planner.capacity  # by a call of `reserve`
        return int(max(reserved, work.size) if reserved else work.size * (1 + spare))

    def bytes_with(self, lookups: int, plans: int) -> int:
        """Return all of its fast memory, with so many plans for so many lookups at once."""
        group, later = self._group, ("look-ahead ids", "planning", "plans")
        now = sum(size for name, size in group.num_bytes().items() if name not in later)
        planned = group.planning.plan_bytes(lookups, plans)
        return int(now + group.planner.bytes_for(lookups) + planned)

    def plan_bytes(self, lookups: int, plans: int) -> int:
        return int(self._group.planning.plan_bytes(lookups, plans))

    def reserve(self, lookups: int, plans: int) -> None:
        """Make room for the plans of batches, in the lane of plans."""
        self._group.planning.reserve(lookups, plans)

    def restore_slots(self) -> None:
        """Take all slots that the budget gave, as if no room had been made for plans."""
        if self.num_slots < self._most_slots:
            self.set_slots(self._most_slots)

    def set_slots(self, count: int) -> None:
        """Take another number of slots, before any row has one; in the lane they were made in."""
        dense = self._may_be_dense and choose_map(count, self.num_rows)
        self._share = replace(self._share, slots=count, dense_map=dense)
        self._group.drop_parts()  # first: both at once might not fit
        self._group.use(self._build(self._share))


def make_room(
    groups: Sequence[PlanRoom],
    lookups: Sequence[int],  # of a batch in each group
    budget_bytes: int,
    lanes: Lanes,
    *,
    last_cycle: int,
) -> None:
    """Slots and all else within the budget, for batches of so many lookups.

    Called in the lane that slots were made in, which alone can use their memory again.
    """
    # A plan lives from its own cycle to the one after training, when its rows may leave.
    plans = [max(last_cycle + 2, group.plans) for group in groups]
    sizes = list(zip(groups, lookups, plans, strict=True))
    missing, part = 0, 0.0
    with uninterrupted():
        lanes.join()
        for group in groups:
            group.restore_slots()
        excess = sum(group.bytes_with(*size) for group, *size in sizes) - budget_bytes
        tuning = groups[0].tuning
        on_top = tuning.plans_on_top if budget_bytes < tuning.small_budget else 0
        if excess < 0:
            _take_more_slots(groups, -excess)
        elif excess > on_top:
            missing, part = _give_up_slots(groups, excess - on_top)
        lanes.join()
    if missing > 0:
        taken = sum(group.plan_bytes(*size) for group, *size in sizes)
        slots = sum(group.num_slots for group in groups)
        warn(
            f"of the budget of {show_bytes(budget_bytes)}, plans of batches with "
            f"{sum(lookups):,} lookups take {show_bytes(taken)}, and more than half of the "
            f"slots would have to give way. {slots:,} slots are kept, and "
            f"{show_bytes(missing)} more than the budget are used. A budget {2 * part:.1f} "
            "times as large would hold all, or batches that are so many times smaller"
        )
    with lanes.on("plan"):
        for group, *size in sizes:
            group.reserve(*size)


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
