"""Bytes of fast memory, shared out between width groups. Everything is counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hotrow.support.messages import setting
from hotrow.support.units import show_bytes


@dataclass(frozen=True)
class Share:
    """The part of the budget that one width group gets."""

    slots: int
    buffer_rows: int  # rows that may be on their way, or pass through when a batch has no slots
    dense_map: bool  # four bytes for every row of the tables, or eight for every slot
    packet_rows: int = 0  # rows of one packet where a GPU's rows are staged; 0: any number

    def with_packets(self, packets: int, row_bytes: int) -> Share:
        """Return a share of the same bytes with room for packets, and so with fewer slots."""
        return self.with_room(packets * self.packet_rows * row_bytes, row_bytes)

    def with_room(self, num_bytes: int, row_bytes: int) -> Share:
        """Return a share of the same bytes with `num_bytes` kept free."""
        return replace(self, slots=max(1, self.slots + -num_bytes // slot_bytes(row_bytes)))


@dataclass(frozen=True)
class Budget:
    """A budget shared out by hand, in slots instead of bytes: one `Share` per row width."""

    shares: tuple[Share, ...]
    window_bytes: int  # for the ids of batches known ahead
    total_bytes: int = 0  # of all of it, where it was given in bytes


# Per slot: its row (8), last use (4), next use (4), uses counted (4), its place among the pinned
# (8, for half of them), and 16 for the eighth of the slots that a ranking names.
SLOT_STATE_BYTES = 26
HASH_BYTES = 8


def slot_bytes(row_bytes: int) -> int:
    """Bytes of a slot with its part of the hashed map; a dense map is only used if smaller."""
    return row_bytes + SLOT_STATE_BYTES + HASH_BYTES


def choose_map(slots: int, num_rows: int) -> bool:
    """Return whether the dense row-to-slot map is the smaller one."""
    return 4 * num_rows <= HASH_BYTES * slots


_PACKET_PART = 1 / 32  # there are three or four of them
MOST_PACKED = 1 << 16  # rows
_LEAST_ROWS = 32  # fewer slots, or a smaller buffer, would make every chunk a loop of its own


def _least_bytes(row_bytes: int) -> int:
    # Two rows more: slots and buffer end with one that reads zero.
    return _LEAST_ROWS * (slot_bytes(row_bytes) + row_bytes) + 2 * row_bytes


def smallest_budget(row_bytes: list[int]) -> int:
    """Return the smallest budget that holds a few rows of every width and a window of ids."""
    return -(-sum(map(_least_bytes, row_bytes)) * 16 // 15) + 1


def share_out(
    budget_bytes: int,
    *,
    row_bytes: list[int],
    num_rows: list[int],
    parts: list[float],
    buffer_part: float,
    whose: str = "",  # such as " of each rank"
) -> Budget:
    """Share out slots, buffers and look-ahead ids to width groups within `budget_bytes`.

    `parts` says how much of the bytes each group gets (it sums to one). Groups that reach all
    their rows hand what is left to the others; what no group can use stays unused.
    """
    smallest = smallest_budget(row_bytes)
    if budget_bytes < smallest:
        rows = sum(size * count for size, count in zip(row_bytes, num_rows, strict=True))
        all_fast = setting("strategy", "all-fast")
        hint = f"; tables this small need none: {all_fast}" if rows < smallest else ""
        raise ValueError(
            f"the budget of {show_bytes(budget_bytes, beside=smallest)}{whose} is too small; the "
            f"smallest that works here is {show_bytes(smallest, beside=budget_bytes)} "
            f"({smallest:,} bytes){hint}"
        )
    # Where every row has a slot no row leaves, so there is nothing to look ahead for: a larger
    # budget gives no larger window than tables that fit.
    sizes = zip(row_bytes, num_rows, strict=True)
    enough = sum(_least_bytes(size) + (slot_bytes(size) + size) * count for size, count in sizes)
    window_bytes = min(budget_bytes, enough) // 16
    spare = float(budget_bytes - window_bytes - sum(map(_least_bytes, row_bytes)))
    weight, shares = 1.0, {}
    # Groups that need the least of their part come first, so that the rest reaches others.
    need = [slot_bytes(size) * count for size, count in zip(row_bytes, num_rows, strict=True)]
    for g in sorted(range(len(parts)), key=lambda g: need[g] / parts[g]):
        least = _least_bytes(row_bytes[g])
        mine = least + spare * min(1.0, parts[g] / max(weight, 1e-9))
        buffer_rows = max(_LEAST_ROWS, min(int(mine * buffer_part) // row_bytes[g], num_rows[g]))
        slots = int(mine - (buffer_rows + 2) * row_bytes[g]) // slot_bytes(row_bytes[g])
        slots = min(slots, num_rows[g])
        packet_rows = int(mine * _PACKET_PART) // row_bytes[g]
        packet_rows = max(1, min(packet_rows, num_rows[g], MOST_PACKED))
        shares[g] = Share(slots, buffer_rows, choose_map(slots, num_rows[g]), packet_rows)
        used = slots * slot_bytes(row_bytes[g]) + (buffer_rows + 2) * row_bytes[g]
        spare -= max(0, used - least)
        weight -= parts[g]
    return Budget(tuple(shares[g] for g in range(len(parts))), window_bytes, budget_bytes)


# Batches differ: a later one may be larger than all so far.
_SPARE = 1 / 32


def larger_budget(
    share: Callable[[int], Budget], budget_bytes: int, group: int, slots: int, instead_of: int
) -> int:
    """Return the bytes that give a group `slots` slots and some to spare.

    `share` shares out a budget; `budget_bytes` is too small. `instead_of` is the group's present
    number of slots, which may be less than its share: on a GPU some make room for plans.
    """

    def slots_of(num_bytes: int) -> int:
        return share(num_bytes).shares[group].slots

    most = slots_of(budget_bytes << 40)
    wanted = min(math.ceil(slots * (1 + _SPARE) * slots_of(budget_bytes) / instead_of), most)
    return least_budget(lambda num_bytes: slots_of(num_bytes) >= wanted, budget_bytes)


def least_budget(holds: Callable[[int], bool], low: int) -> int:
    """Return the fewest bytes, at least `low`, for which `holds`; it must hold for more, too."""
    high = low
    while not holds(high):
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
