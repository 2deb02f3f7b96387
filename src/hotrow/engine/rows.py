"""The engine: rows of one width that move between the store and fast memory.

`RowGroup` has a memory (slots, maps, store), a planning part, a mover, a direct path and an
arithmetic. A CPU and a GPU differ in these parts; so does `all-fast`, whose memory has every row
in its own slot. `host/` has the other engine, whose rows stay in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotrow.engine.arithmetic import HostArithmetic, HostPooling
from hotrow.engine.capture import NoCapture
from hotrow.engine.counters import Counters, Overflow
from hotrow.engine.direct import DirectPath, HostDirectPath
from hotrow.engine.idle import idle_rows
from hotrow.engine.memory import AllRows, FixedSlots, SlotMemory
from hotrow.engine.mover import CopyMover, NoMoves
from hotrow.engine.planning import AllRowsPlanning, Outcome, SlotPlanning
from hotrow.engine.row_sums import HostSums
from hotrow.engine.rules import PlannerRules
from hotrow.engine.scratchpad import FREE
from hotrow.engine.settings import Settings
from hotrow.engine.work import AtRest, Flight, Work
from hotrow.inputs.batch import Lookups
from hotrow.inputs.tables import WidthGroup
from hotrow.store.ram import Store
from hotrow.support.interrupts import uninterrupted

_UNTIMED: AbstractContextManager[None] = nullcontext()


class RowGroup:
    """Rows of one width."""

    active = True  # False: another engine trains the same rows now
    notes_changes = True  # every change of a row is noted in the store
    fill_choice: Any = None  # how a GPU moves rows, and why
    sums_kind: type[HostSums] = HostSums
    # Different rows of a batch, before the first is planned; None: not known.
    expected_rows: int | None = None

    def __init__(self, settings: Settings, flight: Flight, counters: Counters) -> None:
        self.settings, self.flight, self.counters = settings, flight, counters
        self.layout, self.optimizer = settings.layout, settings.optimizer
        self.strategy, self.device, self.lock = settings.strategy, settings.device, settings.lock
        self.lanes, self.dim, self.width = settings.lanes, settings.dim, settings.width
        self.state = settings.state_columns
        self.output_dtype = settings.output_dtype
        self.overflow = Overflow(settings.dim)
        self.capture = NoCapture()
        self.plan_room = FixedSlots()

    def use(
        self, memory: Any, planning: Any, mover: NoMoves, arithmetic: Any, direct: DirectPath
    ) -> None:
        """Take parts that were built for this engine. Each has one face and several kinds."""
        self.memory, self.planning, self.mover = memory, planning, mover
        self.arithmetic, self.direct = arithmetic, direct
        self.idle = idle_rows(self.settings, memory.store)
        self.slots: Tensor = memory.slots
        self.store: Store = memory.store
        # What a part does for the engine, without a call in between.
        self.parts_of, self.read_parts = direct.parts_of, direct.read_parts
        self.gather, self.scatter, self.flush = direct.gather, direct.scatter, direct.flush
        self.chunk_rows, self.settle = direct.chunk_rows, mover.settle
        self.freeze, self.expect_changes = self.store.frozen.freeze, memory.expect_changes

    @property
    def num_slots(self) -> int:
        """Rows that fit fast memory."""
        return int(self.memory.null_slot)

    # -- planning ----------------------------------------------------------------------

    def plan(self, work: Work) -> None:
        """Plan a batch, or launch its plan. Maps change, bytes do not."""
        pinned = self.planning.start()
        if pinned is not None:
            self._load_pins(*pinned)
        if not self.planning.plan(work):
            self._no_room(work)

    def confirm(self, work: Work) -> bool:
        """Learn the outcome of a plan; raises on a bad id. False if plans behind it were halted."""
        outcome = self.planning.confirm(work)
        if outcome is Outcome.NO_ROOM:
            self._no_room(work)
        return outcome is Outcome.PLANNED

    def forget_window(self) -> None:
        """The batches expected will not come."""
        self.planning.forget_window()
        self.mover.forget_window()

    def go_direct(self, work: Work) -> bool:
        """A batch that was not announced comes between planned ones: count it on the direct path.

        False if rows do not move: then it can be planned now.
        """
        if self.flight.rows_move:
            self.count_direct(work)
        return self.flight.rows_move

    def _no_room(self, work: Work) -> None:
        """A batch does not fit the slots: it takes the direct path, in chunks."""
        rows, is_first = work.ids.ids, not self.counters.direct_batches
        self.overflow.note(rows, self.planner, self.num_slots, is_first=is_first)
        self.count_direct(work)

    def count_direct(self, work: Work) -> None:
        """Count a batch on the direct path: rows outside the slots are read and written there."""
        self.counters.direct_batches += 1
        outside = work.ids.ids[self.direct.locate(work.ids.ids) == FREE]
        self.counters.count(work.ids, fetched=outside, evicted=outside)

    @property
    def planner(self) -> Any:
        """The planner of slots; rows that are all in fast memory have none on a CPU."""
        return self.planning.planner

    # -- moving ------------------------------------------------------------------------

    def finish_planned(self) -> None:
        """Move the rows of all planned batches, though these will not be trained.

        The maps already say that they have moved. Errors of plans are dropped: they belong to
        batches that will not be yielded.
        """
        with uninterrupted():
            with self.lanes.on("rows"):
                for work in list(self.flight.in_transit):
                    self.mover.insert(work)
            for work in list(self.flight.uncollected):
                with suppress(Exception):
                    self.confirm(work)
                if work.plan is not None and not work.collected:
                    with self.lanes.on("rows"):
                        self.mover.fill(work)

    @property
    def sums(self) -> HostSums:
        """Sums gradients that wait for an optimizer's step. Not kept: it refers to this object."""
        return self.sums_kind(self)

    def slots_hold(self, work: Work) -> bool:
        """Whether a batch's rows are in the slots that were planned for it."""
        return self.active and self.flight.holds(work)

    # -- lookup and update -------------------------------------------------------------

    def pooling(self, output_dtype: torch.dtype) -> HostPooling:
        """Return what computes from vectors of other ranks."""
        pooling: HostPooling = self.arithmetic.pooling(output_dtype)
        return pooling

    def timed(self, work: Work | None) -> AbstractContextManager[None]:
        """Measure what is done inside, if the batch passes in chunks."""
        return self.counters.chunks if work is not None and work.plan is None else _UNTIMED

    def lookup(self, work: Work, x: Lookups) -> Tensor:
        """Return one vector per bag, [bags, dim], by the plan while it holds. `x` has weights."""
        if self.slots_hold(work):
            vectors: Tensor = self.arithmetic.pool_planned(work, x)
            return vectors
        return self.direct.read(work.with_ids(x))

    def weight_grads(self, work: Work, x: Lookups, grads: Tensor) -> Tensor:
        """Return the gradients of per-sample weights, from the rows before their update, [L]."""
        if self.slots_hold(work):
            weight_grads: Tensor = self.arithmetic.weight_grads(work, x, grads)
            return weight_grads
        return self.direct.weight_grads(work.with_ids(x), grads)

    def grads_by_row(self, work: Work, x: Lookups, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of a batch's rows that have a gradient, each once, and the gradients.

        A row that only features without a gradient look up has none.
        """
        return grads_by_row(work, x, lambda x: self.arithmetic.row_grads(work, x, grads))

    def update_planned(self, work: Work, x: Lookups, grads: Tensor) -> bool:
        """Update a batch's rows from the gradients of its bags, in one go; False: not possible."""
        return self.slots_hold(work) and self.arithmetic.update_planned(work, x, grads)

    def update(self, ids: Tensor, grads: Tensor, work: Work | None) -> None:
        """Make one optimizer step on unique rows; `work` if all of them are one batch's."""
        slots = None
        if work is not None and self.slots_hold(work):
            slots = self.arithmetic.slots_of(work, ids)
        moves = self.store.frozen.moving(ids)
        if moves is not None:
            ids, grads = ids[moves], grads[moves]
            slots = None if slots is None else slots[moves]
        self.store.note_changed(ids)
        for first in range(0, ids.numel(), self.chunk_rows):
            part = slice(first, first + self.chunk_rows)
            rows = self.memory.buffer.take(ids[part].numel())
            if slots is None:
                self.direct.gather(ids[part], out=rows)
            else:
                torch.index_select(self.slots, 0, slots[part], out=rows)
            self.arithmetic.step(rows, ids[part], grads[part])
            if slots is None:
                self.direct.scatter(ids[part], rows)
            else:
                self.memory.put_slots(slots[part], rows)

    # -- rows --------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether rows can be found without moving any: then several threads may read."""
        return bool(self.mover.is_settled)

    def replaced(self) -> None:
        """Rows were replaced in the store, while nothing was in flight."""
        self.expect_changes()
        self.reload()

    def reload(self) -> None:
        """Read all rows that have slots once more from the store, where others changed them."""
        self.lanes.join()
        rows = self.memory.resident()
        taken = (rows != FREE).nonzero().squeeze(1)
        self.direct.load(taken, rows[taken])
        self.lanes.join()

    def count_resident(self) -> int:
        """Count the rows that have slots."""
        return int((self.memory.resident() != FREE).sum())

    # -- pins --------------------------------------------------------------------------

    @property
    def room_for_pins(self) -> int | None:
        """Rows that can be pinned beside batches an eighth larger than any so far; None: how large
        batches are is not known."""
        planner: PlannerRules = self.planner
        largest = planner.largest_batch or self.expected_rows
        if largest is None:
            return None
        # A batch without a lookup tells nothing of the next one.
        return planner.room_for_pins(min(self.num_slots, -(-max(1, largest) * 9 // 8)))

    def pin_rows(self, ids: Tensor) -> None:
        """Empty the slots, pin these rows, hottest first, and load them. Nothing is in flight."""
        self.plan_room.allocate()
        with self.lanes.on("plan"):  # in which all that plans need was made
            self.flush()
            assert not self.flight.uncollected, "rows of planned batches have not moved yet"
            ids = ids.to(self.device)
            slots = self.planner.pin_rows(ids)
            self.flight.end(self.planner.last_number)
            self._load_pins(slots, ids)
        self.lanes.join()

    def _load_pins(self, slots: Tensor, ids: Tensor) -> None:
        self.direct.load(slots, ids)
        self.counters.count_loaded(ids)

    # -- facts -------------------------------------------------------------------------

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of fast memory by part."""
        return self.plan_room.num_bytes() or {
            **self.memory.num_bytes(), **self.planning.num_bytes(), **self.mover.num_bytes(),
        }  # fmt: skip

    def check(self) -> None:
        """Prove the maps consistent; for tests and long runs."""
        self.planning.check()


def grads_by_row(
    work: Work, x: Lookups, row_grads: Callable[[Lookups], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the ids of a batch's rows that have a gradient, and those of `row_grads(x)`."""
    if x.used is None:
        return work.ids.ids, row_grads(x)
    used, ids = x.used_lookups(), work.ids
    if x.weights is not None:
        x = replace(x, weights=x.weights.masked_fill(~used, 0.0))  # 0 times NaN would be NaN
    sums = row_grads(x)
    before = functional.pad(used[ids.order].cumsum(0), (1, 0))
    has_grad = before[ids.starts].diff() > 0
    return ids.ids[has_grad], sums[has_grad]


def cpu_rows(layout: WidthGroup, **options: Any) -> RowGroup:
    """Build the engine of a CPU; `options` are those of `Settings`."""
    settings = Settings(layout, **options)
    width, device = settings.width, settings.device
    counters = Counters(layout, device, width=width, moved_width=width)
    if settings.share is None:
        group = RowGroup(settings, AtRest(), counters)
        rows, mover = AllRows(settings), NoMoves()
        idle = idle_rows(settings, rows.store)
        arithmetic = HostArithmetic(settings, rows.slots, idle)
        planning = AllRowsPlanning(settings, group.flight, counters)
        in_flight = planning.moves_in_flight
        direct = HostDirectPath(settings, rows, mover, arithmetic, in_flight, idle=idle)
        group.use(rows, planning, mover, arithmetic, direct)
        return group
    group = RowGroup(settings, Flight(settings.strategy.hold.past), counters)
    memory = SlotMemory(settings, settings.share)
    copies = CopyMover(memory, group.flight)
    idle = idle_rows(settings, memory.store)
    arithmetic = HostArithmetic(settings, memory.slots, idle)
    slots = SlotPlanning(settings, group.flight, counters, memory)
    in_flight = slots.moves_in_flight
    direct = HostDirectPath(settings, memory, copies, arithmetic, in_flight, idle=idle)
    group.use(memory, slots, copies, arithmetic, direct)
    return group
