"""How much fast memory pays: budgets, the time that a step takes with each, and which to choose.

Knows bytes, counts and the cost model; no run and no row. `budget="auto"` is decided here.
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
from hotrow.sizing.ceilings import machine_at
from hotrow.sizing.cost import StepTime, Work, all_fast_ms, step_time
from hotrow.sizing.machines import Machine
from hotrow.store.budget import Budget, least_budget, share_out, smallest_budget
from hotrow.support.units import show_bytes

AUTO = "auto"
REACH = 0.95
LEFT = 0.3  # of the free memory of a GPU, for the model, its optimizer and what they compute with
_SAMPLES = 8192  # of a batch, where nobody knows how many there will be
_STEPS = 24  # budgets that are tried
_PLAN_BYTES = 200  # of a lookup: what plans take on a GPU beside slots (benchmarks/results)


@dataclass(frozen=True)
class Point:
    """A budget, and a step with it."""

    slots: int
    budget_bytes: int
    fetched_rows: float  # of a step
    time: StepTime


def first_reaching(points: Iterable[Point], ms: float) -> Point | None:
    """The smallest budget with which a step takes no longer."""
    found = [each for each in points if each.time.ms <= ms]
    return min(found, key=lambda each: each.budget_bytes, default=None)


def geometric(low: int, high: int, count: int) -> list[int]:
    """Whole numbers from one to the other, each about as many times the one before."""
    low, high = max(1, low), max(1, high)
    if low >= high or count < 2:
        return [high]
    ratio = (high / low) ** (1 / (count - 1))
    return sorted({min(high, round(low * ratio**step)) for step in range(count - 1)} | {high})


def budget_for(
    slots: int, *, row_bytes: int, num_rows: int, buffer_part: float, plan_bytes: int = 0
) -> int:
    """The smallest budget that has room for so many slots of one width."""

    def given(total: int) -> int:
        shared = share_out(
            total, row_bytes=[row_bytes], num_rows=[num_rows], parts=[1.0], buffer_part=buffer_part
        )
        return shared.shares[0].slots

    wanted = min(slots, num_rows)
    found = least_budget(lambda total: given(total) >= wanted, smallest_budget([row_bytes]))
    # Plans come on top of a small budget, as far as they are small (`hotrow.engine.gpu.plan_room`).
    is_on_top = found < tuning.DEFAULT.small_budget and plan_bytes <= tuning.DEFAULT.plans_on_top
    return found if is_on_top else found + plan_bytes


def buffer_part_of(strategy: Strategy, device: torch.device) -> float:
    """Of a budget, what rows pass through."""
    # A GPU's buffer serves only what is rare; a CPU's rows travel through it.
    return 1 / 64 if device.type == "cuda" else strategy.buffer_part


def plan_bytes_of(lookups: float) -> int:
    """What plans of such batches take of a budget on a GPU."""
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
    """The bytes of `budget="auto"`.

    With a profile, the smallest budget that is 95 % as fast as slots for all rows; on a GPU, no
    more than 70 % of what is free, and that much where there is no profile. Never more than all
    rows need. `share` shares a budget out among the groups; `free_bytes` is measured if not given.
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
    found = limited = int(min(highest, most))
    if profile is not None:
        # What the host needs for a step could hide any move of rows; larger batches hide less.
        machine = replace(machine or machine_at(device), host_ms=0.0)
        counted = [_Counted(group, profile) for group in groups]
        at_budget = partial(_point, machine, strategy, share, counted, sizes)
        goal = at_budget(highest).time.ms / REACH
        points = [at_budget(total) for total in geometric(lowest, limited, _STEPS)]
        fitting = [each for each in points if _holds_two(share(each.budget_bytes), counted)]
        enough = first_reaching(fitting, goal)
        found = limited if enough is None else enough.budget_bytes
    features = sum(len(table.feature_names) for group in groups for table in group.tables)
    plans = plan_bytes_of(_SAMPLES * features) if device.type == "cuda" else 0
    return int(min(found + plans, most))


def _has_all(shared: Budget, groups: Sequence[WidthGroup]) -> bool:
    pairs = zip(shared.shares, groups, strict=True)
    return all(each.slots >= group.num_rows for each, group in pairs)


def _holds_two(shared: Budget, counted: Sequence[_Counted]) -> bool:
    """Whether rows can come while the batch before is trained."""
    pairs = zip(shared.shares, counted, strict=True)
    return all(share.slots >= min(2 * each.unique, each.known_rows) for share, each in pairs)


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    # What torch keeps for itself can be used again.
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


class _Counted:
    """Rows of a group that a batch is expected to read, with every lookup drawn by the counts."""

    def __init__(self, group: WidthGroup, profile: Profile) -> None:
        expected = [torch.zeros(1, dtype=torch.float64)]
        self.lookups = 0
        for table in group.tables:
            _, uses = table_counts(profile, table.name)
            lookups = _SAMPLES * len(table.feature_names)
            self.lookups += lookups
            if uses.numel():
                expected.append(-torch.expm1(-lookups * uses / uses.sum()))
        found = torch.cat(expected).sort(descending=True)[0]
        self._read = torch.cat([found.new_zeros(1), found.cumsum(0)])  # by the hottest rows

    @property
    def known_rows(self) -> int:
        return len(self._read) - 2

    @property
    def unique(self) -> float:
        return float(self._read[-1])

    def missing(self, slots: int) -> float:
        """Of those, what is not among the hottest; they have the slots that a batch leaves."""
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
    """A step with nothing but rows: where a dense part takes time, too, more can hide in it."""
    shared = share(total)
    pairs = list(zip(counted, shared.shares, sizes, strict=True))
    missing = [
        0.0 if mine.slots >= group.num_rows else each.missing(mine.slots)
        for each, mine, (_, group) in pairs
    ]
    unique = sum(each.unique for each in counted)
    bytes_read = sum(size * each.unique for each, (size, _) in zip(counted, sizes, strict=True))
    work = Work(
        lookups=sum(each.lookups for each in counted),
        unique_rows=unique,
        row_bytes=round(bytes_read / max(1.0, unique)),
        table_bytes=sum(size * group.num_rows for size, group in sizes),
        fetched_rows=sum(missing),
        evicted_rows=sum(missing),
    )
    base = all_fast_ms(machine, work, dense_ms=0.0)
    slots = sum(each.slots for each in shared.shares)
    return Point(
        slots, total, work.fetched_rows, step_time(machine, strategy, work, all_fast_ms=base)
    )
