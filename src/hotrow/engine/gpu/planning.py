"""Planning on a GPU: the host launches a plan, and learns later what became of it.

Turns batches into ids in the planner's window, gives plans their buffers, and reads outcomes. The
decisions are `gpu/planner.py`'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.counters import Counters
from hotrow.engine.evict import EVICTIONS
from hotrow.engine.gpu.id_check import IdCheck, feature_facts
from hotrow.engine.gpu.plan_buffers import BufferPool, PlanBuffers, plan_bytes
from hotrow.engine.gpu.planner import DevicePlan, DevicePlanner, Expected
from hotrow.engine.gpu.work import DevicePart, DeviceWork
from hotrow.engine.memory import PlannedMoves
from hotrow.engine.mover import NoMoves
from hotrow.engine.planning import Depth, Outcome
from hotrow.engine.rules import Hold
from hotrow.engine.settings import Settings
from hotrow.engine.split_batch import place_of
from hotrow.engine.uploads import Upload
from hotrow.engine.work import Flight
from hotrow.inputs.batch import Batch, is_pooled, lookups_of
from hotrow.inputs.room import Room
from hotrow.inputs.spread import Columns, columns_of
from hotrow.kernels.triton import words
from hotrow.kernels.triton.plan import plan_everything
from hotrow.kernels.triton.traffic import count_traffic
from hotrow.kernels.triton.window import announce, globalise
from hotrow.support.progress import line_if_long
from hotrow.support.streams import Mark

_SPARE_UNIQUES = 1.25  # times as many different rows as the first batch has
_ALL_ROWS_WINDOW = 1 << 26  # bytes, for batches that another collection knows ahead
_REMEMBERED = 8  # batches that a lookup may ask for again; their plans keep buffers for as long


class Inputs:
    """What it takes to read a batch's ids on the device. It outlives slots and planners."""

    def __init__(self, settings: Settings) -> None:
        layout, device = settings.layout, settings.device
        self.features = feature_facts(layout).to(device)
        self.id_check = IdCheck(self.features, layout.num_rows)
        self.is_pooled, self.room = is_pooled(layout), Room()
        self.unique_part = 1.0  # of a batch's lookups, that may be of different rows
        self.plans_at_once = 0  # plans that the budget has room for; 0: not counted yet
        self._layout, self._device = layout, device
        self._columns: dict[tuple[str, ...], Columns] = {}
        self._sent_spans: Any = None
        self._spans = Upload((2, len(layout.features)), torch.int64, settings.lanes)

    def columns(self, keys: tuple[str, ...]) -> Columns:
        """Return the columns for an order of keys. Made once: a captured step cannot bring them."""
        if keys not in self._columns:
            self._columns[keys] = columns_of(keys, self._layout, self._device)
        return self._columns[keys]

    def spans(self, work: DeviceWork) -> Tensor | None:
        """Return where features' ids end, at one place; read in the lane of plans before the next
        call changes it."""
        if work.batch.offsets is None:
            return None
        if work.spans == self._sent_spans:
            return self._spans.there
        self._sent_spans = None  # what fails below must not count as uploaded
        ends, shifts, end = [], [], 0
        for low, high in work.spans:
            shifts.append(low - end)
            end += high - low
            ends.append(end)
        there = self._spans.send((ends, shifts))
        self._sent_spans = work.spans
        return there

    def uniques(self, lookups: int) -> int:
        """Return how many different rows a plan of so many lookups gets room for."""
        return min(lookups, 1 + int(self.unique_part * lookups))

    def expect_uniques(self, distinct: int, lookups: int) -> None:
        """Batches of so many lookups have about so many different rows, and padding."""
        self.unique_part = min(1.0, _SPARE_UNIQUES * (distinct + 1) / max(1, lookups))


class DevicePlanning:
    """Launches the plans of one width group."""

    remembered_batches = _REMEMBERED
    rehearses_on = ("cuda",)  # where kernels are compiled

    def __init__(
        self,
        settings: Settings,
        inputs: Inputs,
        planner: DevicePlanner,
        flight: Flight,
        counters: Counters,
        buffers: BufferPool,
    ) -> None:
        self.planner, self.inputs, self._flight, self._counters = planner, inputs, flight, counters
        self._layout, self._lanes = settings.layout, settings.lanes
        self._buffers, self._id_type = buffers, planner.pad.id_type
        self._planned: list[weakref.ref[DeviceWork]] = []
        self._is_rehearsed = False
        # A function that does not keep this object alive by its own planner.
        planner.on_plan = partial(_count_plan, settings.device_bases, counters.by_table)
        self.columns, self.room, self.is_pooled = inputs.columns, inputs.room, inputs.is_pooled

    def input_device(self, device: torch.device | None) -> torch.device | None:
        return device

    def copies_to_compare(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ()  # a kernel compares

    def work(self, group: Any, batch: Batch) -> DeviceWork:
        return DeviceWork(group, batch)

    def part(self, work: DeviceWork, batch: Batch, part: Batch, first: int) -> DevicePart:
        return DevicePart(work, part, place_of(batch, part, first, self._layout))

    # -- ids of batches to come --------------------------------------------------------

    def expect(self, work: DeviceWork, values: Tensor) -> None:
        """A batch is known that will be planned later; `values` are its indices, on the device."""
        expected = work.expected = self.planner.admit(work.size, announced=True)
        spans = self.inputs.spans(work)

        def write_ids(ids: Tensor, counts: Tensor) -> None:
            self._write_ids(values, spans, expected.lookups, ids, counts)

        def announce_there(
            window: Tensor, window_counts: Tensor, state: Tensor, next_use: Tensor | None
        ) -> None:
            announce(
                values.contiguous(), window, window_counts, self.inputs.features, spans,
                expected.lookups, self._layout.num_rows, state, next_use,
            )  # fmt: skip

        if values.device.type in self.rehearses_on and not self._is_rehearsed:
            self._is_rehearsed = True
            with line_if_long("compiling kernels"):
                self.rehearse(work.group.mover, announce_there, write_ids)
        key = (values.data_ptr(), values.dtype, values.shape, values.stride(), spans is None)
        self.planner.expect(expected, write_ids, key, announce_there)

    def rehearse(self, mover: NoMoves, announce: Any, write_ids: Any) -> None:
        """Compile what plans and moves may launch, so that no later step waits for it."""
        planner, lanes = self.planner, self._lanes
        lookups, row = planner.capacity, planner.depth
        buffers = self._buffers.take(lookups, self.inputs.uniques(lookups), None)
        planner.rehearse(buffers, announce)
        # A batch that is not announced has a row of its own, whose address may be any.
        write_ids(planner.window_ids[row], planner.window_counts[row])
        lanes.after("rows", lanes.mark("plan"))
        with lanes.on("rows"):
            mover.rehearse(buffers)
            lanes.mark("rows")  # after which the buffers may be used again
        self._buffers.give_back(buffers, None)

    def _admit(self, work: DeviceWork) -> Expected:
        """Return a place for a batch that was not announced."""
        expected = self.planner.admit(work.size, announced=False)
        counts = self.planner.counts_of(expected)
        counts.copy_(self.planner.fresh_counts)
        spans, ids = self.inputs.spans(work), self.planner.window_ids[expected.row]
        self._write_ids(work.batch.values, spans, expected.lookups, ids, counts)
        return expected

    def _write_ids(
        self, values: Tensor, spans: Tensor | None, lookups: int, ids: Tensor, counts: Tensor
    ) -> None:
        globalise(
            values.contiguous(), ids, self.inputs.features, spans, lookups, self._layout.num_rows,
            counts[words.FIRST_BAD :],
        )  # fmt: skip

    def forget_window(self) -> None:
        self.planner.forget_window()

    @property
    def most_ahead(self) -> int | None:
        return max(0, self.planner.depth - 2)

    def depth(self) -> Depth | None:
        return Depth(self.planner.useful_depth(), limit=self.planner.depth - 2)

    # -- plans -------------------------------------------------------------------------

    def start(self) -> tuple[Tensor, Tensor] | None:
        """Before the first plan, return slots and ids of rows to be pinned there; else None."""
        if self.planner.has_started:
            return None
        self.planner.has_started = True
        if self.planner.pins is None:
            return None
        self._lanes.after("plan", self._lanes.mark("train"))  # rows may have been loaded there
        self.planner.reserve(1)
        return self.planner.hottest()

    def plan(self, work: DeviceWork) -> bool:
        """Launch a plan; its outcome is known at `confirm`."""
        if work.expected is None:
            self._lanes.after("plan", self._lanes.mark("rows"))  # where its ids may have landed
            work.expected, work.announced = self._admit(work), False
        self._let_go()
        # In a captured step's input all batches have one size; others may take any buffers.
        lookups = self.planner.capacity if work.berth is None else work.expected.lookups
        lookups = max(lookups, 1)
        buffers = self._buffers.take(lookups, self.inputs.uniques(lookups), work.berth)
        work.plan = self.planner.plan(work.expected, buffers)
        self._planned.append(weakref.ref(work))
        self._flight.begin(work)
        self._give_back_later(work, buffers)
        return True

    def _give_back_later(self, work: DeviceWork, buffers: PlanBuffers) -> None:
        give_back = self._buffers.give_back
        work.gives_back = weakref.finalize(work.plan, give_back, buffers, work.berth)

    def _let_go(self) -> None:
        """Drop plans whose rows may have left, though a caller still has the batch: late gradients
        take the direct path. The next plans use the buffers."""
        kept = []
        for reference in self._planned:
            work = reference()
            if work is not None and work.inserted and not work.group.slots_hold(work):
                work.plan = None
            elif work is not None:
                kept.append(reference)
        self._planned = kept

    def mark_planned(self, work: DeviceWork, mark: Mark) -> None:
        if work.plan is not None and work.plan.ready is None:
            work.plan.ready = mark

    def confirm(self, work: DeviceWork) -> Outcome:
        """Learn the outcome of a plan, which is made again if that can help. Raises on a bad id."""
        plan = work.plan
        if plan is None or work.collected:
            return Outcome.PLANNED
        outcome = self.planner.read(plan)
        if outcome == words.PLANNED:
            self._count_moves(work, plan)
            return Outcome.PLANNED
        self._lanes.join()
        with self._lanes.on("plan"):
            # Its ids may have been overwritten by those of a batch that was announced since.
            expected = self._admit(work)
            retry = self._can_retry and outcome == words.NO_ROOM
            larger = self._larger(work, plan) if retry else None
            if self.planner.resume(expected, plan, retry=retry, larger=larger):
                self._count_moves(work, plan)
                return Outcome.HALTED_OTHERS
        self._flight.drop(work)
        if outcome == words.BAD_ID:
            lookups_of(work.batch, self._layout)  # raises, and says which
            raise AssertionError("a plan found an id that no table has, but the host found none")
        return Outcome.NO_ROOM if outcome == words.NO_ROOM else Outcome.HALTED_OTHERS

    _can_retry = True

    def _larger(self, work: DeviceWork, plan: DevicePlan) -> PlanBuffers | None:
        """Return buffers for a batch with more different rows than expected; None: it had room."""
        unique, b = int(plan.buffers.status[words.UNIQUE]), plan.buffers
        if unique <= b.uniques:
            return None
        self.inputs.expect_uniques(unique, plan.lookups)
        larger = self._buffers.make(b.capacity, self.inputs.uniques(b.capacity))
        work.gives_back.detach()  # the smaller ones are freed
        self._give_back_later(work, larger)
        return larger

    def _count_moves(self, work: DeviceWork, plan: DevicePlan) -> None:
        if not work.confirmed:
            work.confirmed = True
            unique = plan.num_unique - work.is_filled_up  # padding is no row
            self._counters.note([work.num_lookups, unique, plan.num_moves, plan.num_evicted])

    def take_back(self, work: DeviceWork) -> None:
        """A batch before this one failed: this one has to be planned again, if it was halted."""
        plan = work.plan
        if plan is not None and not work.collected:
            if plan.outcome is None:
                self.planner.read(plan)
            if plan.outcome in (words.NO_ROOM, words.BAD_ID):
                with self._lanes.on("plan"):
                    self.planner.clear_halt()
            if plan.outcome != words.PLANNED:
                self._flight.drop(work)
                work.expected = None

    def moves_of(self, work: Any) -> PlannedMoves:
        """Return the moves of a batch; waits for its plan."""
        self.planner.read(work.plan)
        b, count = work.plan.buffers, work.plan.num_moves
        if work.plan.outcome != words.PLANNED:
            count = 0
        return b.move_slots[:count].long(), b.leaving[:count].long(), b.entering[:count].long()

    def moves_in_flight(self) -> Iterator[PlannedMoves]:
        return map(self.moves_of, reversed(self._flight.uncollected))

    # -- ids that were changed ---------------------------------------------------------

    def compare(self, work: DeviceWork) -> None:
        """Launch a comparison of a batch's ids with those that were planned."""
        batch, plan = work.batch, work.plan
        if plan is None or not batch.given or not work.group.slots_hold(work):
            return  # the direct path reads ids as they are
        segments = plan.segments()
        places = None if batch.offsets is None else self.columns(batch.keys).places
        self.inputs.id_check.launch(
            batch.given, places, batch.num_samples, segments.ids, (segments.order, segments.rank),
            plan.buffers.number,
        )  # fmt: skip

    def note_number(self, work: DeviceWork, number: int) -> None:
        if work.plan is not None:
            self.inputs.id_check.note(work.plan.buffers.number, number)

    def take_changed(self) -> int | None:
        return self.inputs.id_check.take()

    # -- bytes -------------------------------------------------------------------------

    def reserve(self, lookups: int, plans: int) -> None:
        """Make room for batches, of which so many may have plans at once; in the lane of plans."""
        self.inputs.plans_at_once = plans
        self.planner.reserve(lookups)
        all_of_it = sum(self.planner.bytes_for(lookups).values())
        beside = all_of_it - self.planner.window_ids[:-1].nbytes
        self.planner.lookup_bytes = -(-(self.plan_bytes(lookups, plans) + beside) // lookups)

    def plan_bytes(self, lookups: int, plans: int) -> int:
        """Return what plans take."""
        return plans * plan_bytes(lookups, self.inputs.uniques(lookups), self._id_type)

    def free_berth(self, berth: int) -> None:
        """No batch will land in this input of a captured step again."""
        self._buffers.free_berth(berth)

    def num_bytes(self) -> dict[str, int]:
        planned = self.plan_bytes(self.planner.capacity, self.inputs.plans_at_once)
        return {**self.planner.num_bytes, "plans": max(self._buffers.num_bytes, planned)}

    def check(self) -> None:
        # Between a plan that failed and its confirmation planning has halted, and rightly so.
        plans = [work.plan for work in self._flight.uncollected]
        failed = any(plan is not None and plan.outcome != words.PLANNED for plan in plans)
        self.planner.check(may_halt=failed)


class AllPlanner(DevicePlanner):
    """Sorts and checks ids; every row is where it belongs."""

    def __init__(self, pad: Any) -> None:
        super().__init__(
            pad,
            hold=Hold(0, 0),
            eviction=EVICTIONS["least-recent"],
            tracks_slots=False,
            window_bytes=_ALL_ROWS_WINDOW,
        )

    def _prepare_victims(self, *, announced: bool) -> None: ...

    def _launch_kernels(self, batch: Expected, plan: DevicePlan) -> None:
        b = plan.buffers
        plan_everything(
            self.plan_ids[: batch.lookups],
            plan.segments(),
            b.row_slots,
            b.lookup_slots,
            (b.move_slots, b.leaving, b.entering),
            self.plan_counts,
            b.counts,
            b.status,
            self.scratch,
            state=self.state,
            capacity=self.capacity,
        )

    def check(self, *, may_halt: bool = False) -> None:
        self.pad.check()


class DeviceAllRowsPlanning(DevicePlanning):
    """Planning where every row is in its own slot: ids are sorted and checked, nothing moves."""

    _can_retry = False

    def depth(self) -> Depth | None:
        return None

    def rehearse(self, mover: NoMoves, announce: Any, write_ids: Any) -> None:
        """Compile nothing: the first steps launch all there is."""

    def confirm(self, work: DeviceWork) -> Outcome:
        is_new = not work.collected
        outcome = super().confirm(work)
        if is_new and outcome is Outcome.PLANNED and work.plan is not None:
            self._flight.collect(work, inserted=True)
        return outcome

    def num_bytes(self) -> dict[str, int]:
        return {}


def _count_plan(bases: Tensor, by_table: Tensor, plan: DevicePlan) -> None:
    b = plan.buffers
    moves = (b.move_slots, b.leaving, b.entering)
    count_traffic(bases, plan.segments(), moves, b.counts, by_table)
