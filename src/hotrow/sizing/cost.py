"""How long a step takes, predicted from a machine's ceilings and what a batch moves.

    work = Work(lookups=212_992, unique_rows=56_071, fetched_rows=7_848, evicted_rows=7_848,
                row_bytes=256, table_bytes=52e9)
    step_time(machine, STRATEGIES["lookahead"], work, all_fast_ms=0.59).ms

All-fast is the base: the dense part, lookups and updates. A strategy adds its plans and the rows
that it moves. On a GPU these overlap training, which loses a part of their time. No step is shorter
than the link needs for its rows, or the host to launch it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotrow.engine.strategy import Strategy
from hotrow.sizing.machines import Machine, at

_MS = 1e3
_GIB = 2**30


@dataclass(frozen=True)
class Work:
    """What an average batch needs."""

    lookups: float
    unique_rows: float
    row_bytes: int  # with the optimizer's state
    table_bytes: float  # of all rows
    fetched_rows: float = 0.0
    evicted_rows: float = 0.0
    made_rows: float = 0.0  # of the fetched rows: never written, so they are made and not read
    vector_bytes: int = 0  # of a lookup's result; 0: as wide as a row

    @property
    def read_rows(self) -> float:
        return self.fetched_rows - self.made_rows

    @property
    def moved_rows(self) -> float:
        return self.read_rows + self.evicted_rows


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step and of its parts, some of which overlap."""

    ms: float
    planning_ms: float
    moving_ms: float
    form: str  # how fills move rows; "": none moves, or a CPU does
    limit: str  # what decides the time: dense part, planning, link, host


def rows_ms(machine: Machine, work: Work) -> float:
    """Return the time of lookups and updates in fast memory."""
    vector = work.vector_bytes or work.row_bytes
    # A vector is written, and its gradient read; a row is read, and read and written again.
    moved = 2 * vector * work.lookups + 3 * work.row_bytes * work.unique_rows
    return moved / (machine.rows_part * machine.hbm_gb * 1e9) * _MS


def all_fast_ms(machine: Machine, work: Work, *, dense_ms: float) -> float:
    """Predict a step with every row in fast memory."""
    sorting = machine.sort_ns * work.lookups * 1e-6
    beside = machine.plan_drag if machine.is_gpu else 1.0
    return max(machine.host_ms, dense_ms + rows_ms(machine, work) + beside * sorting)


def dense_ms(machine: Machine, flops: float) -> float:
    """Guess the time of a dense part of so many operations, forward and backward."""
    return flops / (machine.dense_tflops * 1e12) * _MS


def form_of(machine: Machine, strategy: Strategy) -> str:
    """Return how rows move, as a collection chooses it when it is built."""
    if not machine.is_gpu or not strategy.has_slots:
        return ""
    if strategy.staged:
        return "staged"
    if not strategy.overlapped:
        return "zero-copy"
    return "bulk" if "bulk" in machine.forms else "zero-copy"


def step_time(
    machine: Machine,
    strategy: Strategy,
    work: Work,
    *,
    all_fast_ms: float,
    form: str = "auto",
    planning_ms: float | None = None,
) -> StepTime:
    """Predict a step. `planning_ms`: as measured; by default guessed from the lookups."""
    if strategy.everything:
        limit = _largest({"dense part": all_fast_ms}, machine, all_fast_ms)
        return StepTime(all_fast_ms, 0.0, 0.0, "", limit)
    plan = machine.plan_ns * work.lookups * 1e-6 if planning_ms is None else planning_ms
    if strategy.on_host:
        return _on_host(machine, strategy, work, all_fast_ms)
    if form == "auto" or not machine.is_gpu:
        form = form_of(machine, strategy)
    moving = _moving_ms(machine, work, form)
    if machine.is_gpu and strategy.overlapped:
        return _beside(machine, work, all_fast_ms, plan, moving, form)
    total = all_fast_ms + plan + moving
    parts = {"dense part": all_fast_ms, "planning": plan, "link": moving, "host": machine.host_ms}
    limit = _largest(parts, machine, all_fast_ms)
    return StepTime(max(machine.host_ms, total), plan, moving, form, limit)


def _largest(parts: Mapping[str, float], machine: Machine, training: float) -> str:
    limit = max(parts, key=parts.__getitem__)
    # All-fast itself may be limited by the host.
    return "host" if limit == "dense part" and training <= machine.host_ms else limit


def _beside(
    machine: Machine, work: Work, training: float, plan: float, moving: float, form: str
) -> StepTime:
    drag = machine.plan_drag * plan
    if form == "zero-copy":
        drag += machine.fill_drag * min(moving, training)
    elif form == "bulk":
        reading = _link_ms(machine, work, work.read_rows, 0.0)
        drag += machine.read_drag * min(reading, training)
    # Where training waits for rows, fills have the GPU to themselves.
    floor = moving if form == "staged" else min(moving, _moving_ms(machine, work, "zero-copy"))
    parts = {"dense part": training + drag, "link": floor, "host": machine.host_ms}
    limit = _largest(parts, machine, training)
    return StepTime(max(parts.values()), plan, moving, form, limit)


def _moving_ms(machine: Machine, work: Work, form: str) -> float:
    """Return the time to fetch and evict rows while nothing else runs."""
    link = _link_ms(machine, work, work.read_rows, work.evicted_rows)
    if form == "zero-copy" or form not in machine.forms:
        return link
    moves = max(work.fetched_rows, work.evicted_rows)
    alone = moves / (at(machine.forms[form], work.row_bytes) * 1e6) * _MS
    if form == "staged":
        return alone
    return max(alone, _link_ms(machine, work, work.read_rows, 0.0))


def _link_ms(machine: Machine, work: Work, read: float, written: float) -> float:
    count = read + written
    if count <= 0:
        return 0.0
    if not machine.is_gpu:  # each row is gathered and scattered
        return _by_cpu_ms(machine, work, count)
    rate = at(machine.row_rates, work.table_bytes / _GIB) * at(machine.sorted_gain, count)
    widest = max(read, written) * work.row_bytes / (machine.link_gb * 1e9)
    return max(count / (rate * 1e6), widest) * _MS


def _by_cpu_ms(machine: Machine, work: Work, rows: float) -> float:
    rates = [at(machine.host_rows[way], work.row_bytes) for way in ("gather", "scatter")]
    return sum(rows / (rate * 1e6) for rate in rates) * _MS


def _on_host(machine: Machine, strategy: Strategy, work: Work, training: float) -> StepTime:
    """Predict a step where the CPU reads and updates the rows that are not pinned."""
    rows = work.fetched_rows if strategy.pinned_part else work.unique_rows
    host = _by_cpu_ms(machine, work, rows)
    vector = work.vector_bytes or work.row_bytes
    link = 2 * rows * vector / (machine.link_gb * 1e9) * _MS if machine.is_gpu else 0.0
    return StepTime(training + host + link, 0.0, host + link, "", "host")
