"""Room for plans within a budget: slots give way to them, before any row has one.

How much plans take follows from how large batches are, which is known when the first one comes.
Knows bytes and slots; not what plans are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hotrow.support.interrupts import uninterrupted
from hotrow.support.messages import warn
from hotrow.support.streams import Lanes
from hotrow.support.units import show_bytes

if TYPE_CHECKING:
    from hotrow.engine.gpu.rows import DeviceRows

# Whoever gives less tries things out: slots are kept, and plans may come on top.
SMALL_BUDGET, ON_TOP = 256 << 20, 16 << 20
_BESIDE_SLOT = 1  # bytes, in the ranking
_WORTH_IT = 1 / 100  # slots more than before


def make_room(
    groups: Sequence[DeviceRows],
    lookups: Sequence[int],  # of a batch in each group
    budget_bytes: int,
    lanes: Lanes,
    *,
    last_cycle: int,
) -> None:
    """Slots and all else within the budget, for batches of so many lookups.

    Called in the lane that slots were made in, which alone can use their memory again.
    """
    # A plan lives from its own cycle to the one after training, when its rows may leave. Captured
    # steps keep theirs, and a batch of another shape needs one more.
    plans = [max(last_cycle + 2, group.berths + 1) for group in groups]
    sizes = list(zip(groups, lookups, plans, strict=True))
    missing, part = 0, 0.0
    with uninterrupted():
        lanes.join()
        for group in groups:
            group.restore_slots()
        excess = sum(group.bytes_with(*size) for group, *size in sizes) - budget_bytes
        on_top = ON_TOP if budget_bytes < SMALL_BUDGET else 0
        if excess < 0:
            _take_more_slots(groups, -excess)
        elif excess > on_top:
            missing, part = _give_up_slots(groups, excess - on_top)
        lanes.join()
    if missing > 0:
        taken = sum(group.plan_bytes(*size) for group, *size in sizes)
        slots = sum(group.pad.num_slots for group in groups)
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


def _take_more_slots(groups: Sequence[DeviceRows], spare: int) -> None:
    """Budgets are shared out with more bytes per slot than a device takes."""
    growing = [group for group in groups if group.pad.num_slots < group.layout.num_rows]
    bytes_of = {group: group.pad.num_slots * group.bytes_of_slot for group in growing}
    for group in growing:
        part = spare * bytes_of[group] / sum(bytes_of.values())
        more = int(part / (group.bytes_of_slot + _BESIDE_SLOT))
        if more > group.pad.num_slots * _WORTH_IT:
            group.set_slots(min(group.pad.num_slots + more, group.layout.num_rows))


def _give_up_slots(groups: Sequence[DeviceRows], excess: int) -> tuple[int, float]:
    """The bytes that are still missing when half of the slots are left, and which part of the
    slots' bytes was wanted."""
    bytes_of = {group: group.pad.num_slots * group.bytes_of_slot for group in groups}
    # Whoever has all of its rows would have to move some of them from now on.
    giving = [group for group in groups if group.pad.num_slots < group.layout.num_rows]
    if 2 * excess > sum(bytes_of[group] for group in giving):
        giving = list(groups)
    part = excess / sum(bytes_of[group] for group in giving)
    missing = 0
    for group in giving:
        left = group.pad.num_slots - int(part * group.pad.num_slots) - 1
        kept = max(left, group.least_slots)
        missing += (kept - left) * group.bytes_of_slot
        group.set_slots(kept)
    return missing, part
