"""Budgets of fast memory, the time of a step with each, and which to choose.

Decides `budget="auto"`. Knows bytes, counts and the cost model, but no run and no row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hotrow.engine import tuning
from hotrow.engine.profile import Profile, table_counts
from hotrow.engine.strategy import Strategy
from hotrow.inputs.tables import WidthGroup
from hotrow.sizing.cost import StepTime, Work, all_fast_ms, step_time
from hotrow.sizing.machines import Machine, machine_at
from hotrow.store.budget import Budget, least_budget, share_out, smallest_budget
from hotrow.support.units import show_bytes

AUTO = "auto"
REACH = 0.95
LEFT = 0.3  # share of a GPU's free memory for the model, its optimizer and activations
_SAMPLES = 8192  # of a batch, where the number is not known
_STEPS = 24  # budgets tried
_PLAN_BYTES = 200  # per lookup, of plans on a GPU beside slots (benchmarks/results)


@dataclass(frozen=True)
class Point:
    """A budget, and a step with it."""

    slots: int
    budget_bytes: int
    fetched_rows: float  # per step
    time: StepTime


def first_reaching(points: Iterable[Point], ms: float) -> Point | None:
    """Return the smallest budget with which a step takes no longer than `ms`."""
    fast = [point for point in points if point.time.ms <= ms]
    return min(fast, key=lambda point: point.budget_bytes, default=None)


def geometric(low: int, high: int, count: int) -> list[int]:
    """Return `count` whole numbers from `low` to `high`, in about equal ratios."""
    low, high = max(1, low), max(1, high)
    if low >= high or count < 2:
        return [high]
    ratio = (high / low) ** (1 / (count - 1))
    return sorted({min(high, round(low * ratio**step)) for step in range(count - 1)} | {high})


def budget_for(
    slots: int, *, row_bytes: int, num_rows: int, buffer_part: float, plan_bytes: int = 0
) -> int:
    """Return the smallest budget that has room for so many slots of one width."""

    def given(total: int) -> int:
        shared = share_out(
            total, row_bytes=[row_bytes], num_rows=[num_rows], parts=[1.0], buffer_part=buffer_part
        )
        return shared.shares[0].slots

    wanted = min(slots, num_rows)
    budget = least_budget(lambda total: given(total) >= wanted, smallest_budget([row_bytes]))
    # Small plans are not counted in a small budget (`hotrow.engine.gpu.plan_room`).
    limits = tuning.DEFAULT
    is_on_top = budget < limits.small_budget and plan_bytes <= limits.plans_on_top
    return budget if is_on_top else budget + plan_bytes


def buffer_part_of(strategy: Strategy, device: torch.device) -> float:
    """Return the share of a budget that is a buffer for rows on their way."""
    # A GPU seldom uses its buffer; on a CPU all rows pass through it.
    return 1 / 64 if device.type == "cuda" else strategy.buffer_part


def plan_bytes_of(lookups: float) -> int:
    """Return the bytes of a budget that plans of such batches take on a GPU."""
    return int(_PLAN_BYTES * lookups)


def auto_budget(
    share: Callable[[int], Budget],
    groups: Sequence[WidthGroup],
    row_bytes: Sequence[int],
    *,
    strategy: Strategy,
    device: torch.device,
    profile: Profile | None,
    machine: Machine | None = None,
    free_bytes: int | None = None,
) -> int:
    """Return the bytes of `budget="auto"`.

    With a profile, this is the smallest budget that is 95 % as fast as slots for all rows. On a GPU
    it is at most 70 % of the free memory, and that much without a profile. It never exceeds what
    all rows need. `share` divides a budget among the groups; `free_bytes` is measured if None.
    """
    is_limited = device.type == "cuda" or free_bytes is not None
    if profile is None and not is_limited:
        raise ValueError(
            f"budget='{AUTO}' takes what is free of a GPU's memory, or what a profile says is "
            f"enough, and here is neither: device='{device}', and no profile=. Give a number of "
            "bytes or '10%' of the rows, a GPU, or counts from `hotrow profile DATA --out`; "
            "`hotrow size` finds a budget for a run's file"
        )
    sizes = list(zip(row_bytes, groups, strict=True))
    lowest = smallest_budget(list(row_bytes))
    highest = least_budget(lambda total: _has_all(share(total), groups), lowest)
    most: float = math.inf
    if is_limited:
        free = _free_bytes(device) if free_bytes is None else free_bytes
        most = int((1 - LEFT) * free)
        if most < lowest:
            raise ValueError(
                f"budget='{AUTO}' takes {1 - LEFT:.0%} of the {show_bytes(free)} that are free on "
                f"{device}, which is too little: the smallest budget that works here is "
                f"{show_bytes(lowest)}. Free memory, or give a budget in bytes"
            )
    budget = limited = int(min(highest, most))
    if profile is not None:
        # Without the host's time for a step, which could hide all moves; larger batches hide less.
        machine = replace(machine or machine_at(device), host_ms=0.0)
        counted = [_Counted(group, profile) for group in groups]
        at_budget = partial(_point, machine, strategy, share, counted, sizes)
        goal = at_budget(highest).time.ms / REACH
        points = [at_budget(total) for total in geometric(lowest, limited, _STEPS)]
        fitting = [point for point in points if _holds_two(share(point.budget_bytes), counted)]
        enough = first_reaching(fitting, goal)
        budget = limited if enough is None else enough.budget_bytes
    features = sum(len(table.feature_names) for group in groups for table in group.tables)
    plans = plan_bytes_of(_SAMPLES * features) if device.type == "cuda" else 0
    return int(min(budget + plans, most))


def _has_all(shared: Budget, groups: Sequence[WidthGroup]) -> bool:
    pairs = zip(shared.shares, groups, strict=True)
    return all(share.slots >= group.num_rows for share, group in pairs)


def _holds_two(shared: Budget, counted: Sequence[_Counted]) -> bool:
    """Return whether two batches fit, so that rows arrive while the batch before trains."""
    pairs = zip(shared.shares, counted, strict=True)
    return all(share.slots >= min(2 * rows.unique, rows.known_rows) for share, rows in pairs)


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that torch has reserved and does not use is free as well.
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


class _Counted:
    """Rows of a group that a batch reads on average, if lookups are drawn by the counts."""

    def __init__(self, group: WidthGroup, profile: Profile) -> None:
        expected = [torch.zeros(1, dtype=torch.float64)]
        self.lookups = 0
        for table in group.tables:
            _, uses = table_counts(profile, table.name)
            lookups = _SAMPLES * len(table.feature_names)
            self.lookups += lookups
            if uses.numel():
                expected.append(-torch.expm1(-lookups * uses / uses.sum()))
        hottest = torch.cat(expected).sort(descending=True)[0]
        self._read = torch.cat([hottest.new_zeros(1), hottest.cumsum(0)])  # by the hottest rows

    @property
    def known_rows(self) -> int:
        return len(self._read) - 2

    @property
    def unique(self) -> float:
        return float(self._read[-1])

    def missing(self, slots: int) -> float:
        """Return how many of them are not resident: the hottest have the slots beside a batch."""
        room = max(0, slots - int(self.unique))
        return self.unique - float(self._read[min(room, len(self._read) - 1)])


def _point(
    machine: Machine,
    strategy: Strategy,
    share: Callable[[int], Budget],
    counted: Sequence[_Counted],
    sizes: Sequence[tuple[int, WidthGroup]],
    total: int,
) -> Point:
    """Predict a step of rows alone; the time of a dense part could hide more moves."""
    shared = share(total)
    missing = [
        0.0 if given.slots >= group.num_rows else rows.missing(given.slots)
        for rows, given, (_, group) in zip(counted, shared.shares, sizes, strict=True)
    ]
    unique = sum(rows.unique for rows in counted)
    bytes_read = sum(size * rows.unique for rows, (size, _) in zip(counted, sizes, strict=True))
    work = Work(
        lookups=sum(rows.lookups for rows in counted),
        unique_rows=unique,
        row_bytes=round(bytes_read / max(1.0, unique)),
        table_bytes=sum(size * group.num_rows for size, group in sizes),
        fetched_rows=sum(missing),
        evicted_rows=sum(missing),
    )
    base = all_fast_ms(machine, work, dense_ms=0.0)
    slots = sum(given.slots for given in shared.shares)
    time = step_time(machine, strategy, work, all_fast_ms=base)
    return Point(slots, total, work.fetched_rows, time)
