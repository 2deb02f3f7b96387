"""Rows of one width on a GPU: slots in its memory, the store in page-locked host memory.

The planned way never waits for the device. The direct way is rows.py's, and may: it serves what
is rare. Which lane a stage runs in is the schedule's business.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow.batch import (
    Batch,
    Columns,
    Lookups,
    Room,
    columns_of,
    is_pooled,
    lookups_of,
)
from hotrow.budget import MOST_PACKED, Share, choose_map
from hotrow.device_planner import (
    DevicePlan,
    DevicePlanner,
    DeviceScratchpad,
    Expected,
)
from hotrow.device_start import initialise_on_gpu, unwritten_rows
from hotrow.device_work import DeviceWork
from hotrow.everything import AllPlanner, AllSlots
from hotrow.fills import FULL, LEVELS, Effort, FillChoice, Level, choose
from hotrow.interrupt import uninterrupted
from hotrow.kernels.reference import Moves
from hotrow.kernels.triton import fill, lookup, start, update, words
from hotrow.kernels.triton.plan import count_traffic
from hotrow.kernels.triton.segments import Segments, segments_of
from hotrow.kernels.triton.window import announce, globalise
from hotrow.lanes import Mark, Name
from hotrow.pinned import locked_rows
from hotrow.plan_buffers import BufferPool, PlanBuffers, plan_bytes
from hotrow.progress import bytes_bar
from hotrow.rows import RowGroup
from hotrow.scratchpad import FREE
from hotrow.staged import Staged
from hotrow.stages import SPLIT, Work, in_transit_of
from hotrow.store import Store
from hotrow.strategy import Strategy
from hotrow.tables import WidthGroup
from hotrow.writeback import PACKETS, WriteBack
from hotrow.writer import why_not

_SPARE_UNIQUES = 1.25  # times as many different rows as the first batch has
_WRITTEN_PART = 1 / 16  # of the slots' bytes, at most, for a bit per row of the tables


class DeviceRows(RowGroup):
    """Rows of one width."""

    plans_later = can_be_captured = True
    zero_copy = True  # the device reads and writes the store by itself
    staged: Staged | None = None  # or the copy engine and the CPU move rows
    back: WriteBack | None = None  # or only those that leave
    unwritten: start.Unwritten | None = None  # rows that need not be read: the device knows them
    _notes_written = False
    _plans_at_once = 0  # plans that the budget has room for; 0: nobody has counted
    _unique_part = 1.0  # of a batch's lookups, that may be of different rows
    planner: DevicePlanner  # type: ignore[assignment]
    pad: DeviceScratchpad  # type: ignore[assignment]
    uncollected: list[DeviceWork]  # type: ignore[assignment]

    def __init__(self, layout: WidthGroup, **options: Any) -> None:
        """As RowGroup's."""
        super().__init__(layout, **options)
        device = self.device
        if self.everything:
            self.pad = AllSlots(self.slots)  # type: ignore[assignment]
            self.planner = AllPlanner(self.pad)
            self._past = 0
        self.bases = torch.tensor([*layout.bases, layout.num_rows], device=device)
        columns = [
            (layout.bases[f.table], table.num_embeddings, table.padding_idx, f.column)
            for f in layout.features
            for table in (layout.tables[f.table],)
        ]
        self.features = torch.tensor(
            [[b, n, -1 if p is None else p, c] for b, n, p, c in columns], device=device
        )
        self._count_plans()
        self._pool_of_buffers = BufferPool(self.lanes)
        self._planned: list[weakref.ref[DeviceWork]] = []
        self._scalar_names = tuple(table.name for table in layout.tables)
        self._scalar_values: Any = None
        self._scalars_there: Tensor | None = None
        self._started = False
        self.is_pooled, self.room = is_pooled(layout), Room()
        self._columns: dict[tuple[str, ...], Columns] = {}
        self._spans_now: Any = None
        self._spans_there = torch.zeros(2, len(layout.features), dtype=torch.int64, device=device)

    # -- memory ------------------------------------------------------------------------

    def _make_rows(self, share: Share | None) -> None:
        layout, device = self.layout, self.device
        if share is None:
            rows = torch.zeros(layout.num_rows + 1, self.width, device=device)
            self.slots, self.store = rows, Store(rows[:-1])
            return
        if device.type != "cuda":
            super()._make_rows(share)
            return
        with bytes_bar("page-locking rows") as advance:
            found = locked_rows(layout.num_rows, self.width, progress=advance)
        self.zero_copy, self.store = found.locked, Store(found.rows)
        if not found.locked:
            warnings.warn(found.reason, stacklevel=5)
        self._make_scratchpad(share)

    def _initialise(self, state: list[float], seed: int) -> None:
        on_gpu = self.device.type == "cuda" and self.zero_copy
        if on_gpu:
            initialise_on_gpu(self.store.rows, self.layout, state, seed, self.device)
        else:
            super()._initialise(state, seed)
        if self._notes_written:
            self.unwritten = unwritten_rows(self.layout, state, seed, self.device, on_gpu=on_gpu)

    def _make_scratchpad(self, share: Share) -> None:
        self.fill_choice = self._choose_fill()
        # Where training waits for rows anyhow, there is nothing beside them.
        self.effort = Effort() if self.strategy.overlapped else Effort(FULL, is_fixed=True)
        packets = 0
        if self.fill_choice.form == "staged":
            if not self.strategy.staged:
                self.strategy = replace(self.strategy, stages=SPLIT)
            # One more than may be in transit, so that nobody waits for its last row to be written.
            packets = 1 + in_transit_of(self.strategy.timed_stages)
            if share.slots < self.layout.num_rows:
                share = share.with_packets(packets, 4 * self.width)
        else:
            bits = self.layout.num_rows // 8
            self._notes_written = bits <= _WRITTEN_PART * share.slots * self.width * 4
            by_bytes = share.packet_rows > 0  # slots given by hand are as many as were asked for
            if self._notes_written and by_bytes and share.slots < self.layout.num_rows:
                share = share.with_room(bits, 4 * self.width)
            if self.fill_choice.form == "bulk" and by_bytes:
                share = share.with_packets(PACKETS, 4 * self.width)
        self._share, self._most_slots, self._packets = share, share.slots, packets
        self._may_be_dense = share.dense_map
        self._make_slots()

    def _make_slots(self) -> None:
        share, packets = self._share, self._packets
        self.pad = DeviceScratchpad(
            share.slots, self.width, self.layout.num_rows, self.device, dense_map=share.dense_map
        )
        self.slots = self.pad.slots
        self.buffer = torch.zeros(share.buffer_rows + 1, self.width, device=self.device)
        self._past = self.strategy.hold.past
        if self.fill_choice.form == "bulk":
            most = share.packet_rows or min(share.slots, MOST_PACKED)
            self.back = WriteBack(
                self.store,
                self.slots,
                most=max(1, most),
                lanes=self.lanes,
            )
        if packets:
            self.staged = Staged(
                self.store, self.slots, most=share.packet_rows or min(share.slots, MOST_PACKED),
                packets=packets, id_type=self.pad.id_type, lanes=self.lanes,
            )  # fmt: skip
        self.planner = DevicePlanner(
            self.pad,
            hold=self.strategy.hold,
            eviction=self.strategy.eviction,
            refetch=self.strategy.refetch,
            pins=self._pins() if self.strategy.pinned_part else None,
            window_bytes=self.window_bytes,
        )

    def _count_plans(self) -> None:
        # Not a method of this object, which would then be known to its own planner.
        self.planner.on_plan = partial(_count_plan, self.bases, self.traffic)

    # -- room for plans ----------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether rows may have slots, or batches wait for them: then slots stay as they are."""
        return self._started or bool(self.planner.window)

    def bytes_with(self, lookups: int, plans: int) -> int:
        """All of its fast memory, with so many plans for so many lookups at once."""
        later = ("look-ahead ids", "planning", "plans")
        now = sum(size for name, size in self.memory().items() if name not in later)
        return now + self.planner.bytes_for(lookups) + self.plan_bytes(lookups, plans)

    def plan_bytes(self, lookups: int, plans: int) -> int:
        """What plans take."""
        return plans * plan_bytes(lookups, self._uniques(lookups), self.pad.id_type)

    def expect_uniques(self, distinct: int, lookups: int) -> None:
        """Batches of so many lookups have about so many different rows, and padding."""
        self._unique_part = min(1.0, _SPARE_UNIQUES * (distinct + 1) / max(1, lookups))

    def _uniques(self, lookups: int) -> int:
        """The different rows that a plan of so many lookups gets room for."""
        return min(lookups, 1 + int(self._unique_part * lookups))

    @property
    def least_slots(self) -> int:
        """As many as plans must leave."""
        return -(-self._most_slots // 2)

    @property
    def bytes_of_slot(self) -> int:
        """What a slot gives back: its row, its state, and its part of a hashed map."""
        state = 4 * self.width + 10 + self.pad.id_type.itemsize
        return state + (8 if self.pad.map.hashed else 0)

    def restore_slots(self) -> None:
        """All that the budget gave, as if no room had been made for plans."""
        if self.pad.num_slots < self._most_slots:
            self.set_slots(self._most_slots)

    def set_slots(self, count: int) -> None:
        """Another number of slots, before any row has one; in the lane that they were made in."""
        dense = self._may_be_dense and choose_map(count, self.layout.num_rows)
        self._share = replace(self._share, slots=count, dense_map=dense)
        # The old ones go first: both at once might not fit.
        del self.pad, self.slots, self.buffer, self.planner
        self.back = self.staged = None
        self._make_slots()
        self._count_plans()

    def reserve(self, lookups: int, plans: int) -> None:
        """Make room for batches, of which so many may have plans at once; in the lane of plans."""
        self._plans_at_once = plans
        self.planner.reserve(lookups)
        beside = self.planner.bytes_for(lookups) - self.planner.window_ids[:-1].nbytes
        self.planner.lookup_bytes = -(-(self.plan_bytes(lookups, plans) + beside) // lookups)

    def _choose_fill(self) -> FillChoice:
        strategy, wanted = self.strategy, self.fill_form
        if not self.zero_copy:
            return FillChoice("staged", "the store is not page-locked")
        if wanted == "bulk" and (reason := _why_not_bulk(strategy)):
            return FillChoice("zero-copy", reason)
        if wanted != "auto":
            return FillChoice(wanted, "asked for")
        if strategy.staged:
            return FillChoice("staged", f"{strategy.name} moves rows in stages")
        if not strategy.overlapped:
            return FillChoice("zero-copy", f"{strategy.name} waits for its rows")
        if self.device.type != "cuda":
            return FillChoice("zero-copy", "one memory serves both")
        bulk = not _why_not_bulk(strategy)
        return choose(self.store, self.device, self.lanes, bulk=bulk)

    # -- the planned way ---------------------------------------------------------------

    def work(self, batch: Batch) -> DeviceWork:
        return DeviceWork(self, batch)

    def expect(self, work: DeviceWork, values: Tensor) -> None:  # type: ignore[override]
        """A batch is known that will be planned later; `values` are its indices, on the device."""
        expected = work.expected = self.planner.admit(work.size, announced=True)
        spans = self._spans(work)

        def write_ids(ids: Tensor, counts: Tensor) -> None:
            self._write_ids(values, spans, expected.lookups, ids, counts)

        def announce_there(
            window: Tensor, window_counts: Tensor, state: Tensor, next_use: Tensor | None
        ) -> None:
            announce(
                values.contiguous(), window, window_counts, self.features, spans, expected.lookups,
                self.layout.num_rows, state, next_use,
            )  # fmt: skip

        key = (values.data_ptr(), values.dtype, values.shape, values.stride(), spans is None)
        self.planner.expect(expected, write_ids, key, announce_there)

    def _admit(self, work: DeviceWork) -> Expected:
        """A place for a batch that nobody announced."""
        expected = self.planner.admit(work.size, announced=False)
        counts = self.planner.counts_of(expected)
        counts.copy_(self.planner.fresh_counts)
        self._write_ids(
            work.batch.values,
            self._spans(work),
            expected.lookups,
            self.planner.window_ids[expected.row],
            counts,
        )
        return expected

    def _write_ids(
        self, values: Tensor, spans: Tensor | None, lookups: int, ids: Tensor, counts: Tensor
    ) -> None:
        first_bad = counts[words.FIRST_BAD :]
        globalise(
            values.contiguous(), ids, self.features, spans, lookups, self.layout.num_rows, first_bad
        )

    def columns(self, keys: tuple[str, ...]) -> Columns:
        """Made once for each order of keys: a captured step cannot bring them."""
        if keys not in self._columns:
            self._columns[keys] = columns_of(keys, self.layout, self.device)
        return self._columns[keys]

    def _spans(self, work: DeviceWork) -> Tensor | None:
        """At the same place every time; read, in the lane of plans, before the next."""
        if work.batch.offsets is None:
            return None
        if work.spans == self._spans_now:
            return self._spans_there
        self._spans_now = None  # what fails below must not count as uploaded
        ends, shifts, end = [], [], 0
        for low, high in work.spans:
            shifts.append(low - end)
            end += high - low
            ends.append(end)
        spans = torch.tensor([ends, shifts])
        if self.device.type == "cuda":
            spans = spans.pin_memory()  # or the host might wait for the lane
        self._spans_there.copy_(spans, non_blocking=True)
        self._spans_now = work.spans
        return self._spans_there

    def plan(self, work: DeviceWork) -> bool:  # type: ignore[override]
        """Launch a plan; what became of it is known at `confirm`."""
        if not self._started:
            self._start()
        if work.expected is None:
            self.lanes.after("plan", self.lanes.mark("rows"))  # where its ids may have landed
            work.expected, work.announced = self._admit(work), False
        self._let_go()
        # In a berth all batches have one size; others may take whatever was there before.
        lookups = self.planner.capacity if work.berth is None else work.expected.lookups
        lookups = max(lookups, 1)
        buffers = self._pool_of_buffers.take(
            lookups, self._uniques(lookups), self.pad.id_type, self.device, work.berth,
            tells=self.staged is not None,
        )  # fmt: skip
        plan = self.planner.plan(work.expected, buffers)
        work.plan = plan
        self._planned.append(weakref.ref(work))
        self.uncollected.append(work)
        self._give_back_later(work, buffers)
        return True

    def _give_back_later(self, work: DeviceWork, buffers: PlanBuffers) -> None:
        give_back = self._pool_of_buffers.give_back
        work.gives_back = weakref.finalize(work.plan, give_back, buffers, work.berth)

    def _larger(self, work: DeviceWork, plan: DevicePlan) -> PlanBuffers | None:
        """Buffers for a batch with more different rows than it had room for; None if it had."""
        unique, b = int(plan.buffers.status[words.UNIQUE]), plan.buffers
        if unique <= b.uniques:
            return None
        self.expect_uniques(unique, plan.lookups)
        larger = self._pool_of_buffers.make(
            b.capacity, self._uniques(b.capacity), self.pad.id_type, self.device,
            tells=self.staged is not None,
        )  # fmt: skip
        work.gives_back.detach()  # the smaller ones go
        self._give_back_later(work, larger)
        return larger

    def _let_go(self) -> None:
        """Plans whose rows may have left are of no use to who still has the batch: late gradients
        take the direct way. Their buffers serve the next ones."""
        kept = []
        for each in self._planned:
            work = each()
            if work is not None and work.inserted and not self.slots_hold(work):
                work.plan = None
            elif work is not None:
                kept.append(each)
        self._planned = kept

    def free_berth(self, berth: int) -> None:
        """No batch will land there again."""
        self._pool_of_buffers.free_berth(berth)

    def _start(self) -> None:
        """Pin what is known to be hot, before the first batch is planned."""
        self._started = True
        if self.everything or self.planner.pins is None:
            return
        self.lanes.after("plan", self.lanes.mark("train"))  # rows may have been loaded there
        self.planner.reserve(1)
        slots, ids = self.planner.hottest()
        if slots.numel():
            for part in torch.arange(ids.numel(), device=self.device).split(self.chunk_rows):
                rows = self._buffer(part.numel())
                self._read_store(ids[part], rows)
                self.slots.index_copy_(0, slots[part], rows)

    def forget_window(self) -> None:
        self.planner.forget_window()
        if self.back is not None:
            self.back.forget()  # other batches come than those that were looked at

    @property
    def most_ahead(self) -> int | None:
        return max(0, self.planner.depth - 2)

    def mark_planned(self, work: DeviceWork, mark: Mark) -> None:  # type: ignore[override]
        if work.plan is not None and work.plan.ready is None:
            work.plan.ready = mark

    def confirm(self, work: DeviceWork) -> bool:  # type: ignore[override]
        """Learn what became of a plan: `work.plan` is None if it failed. Raises on a bad id.

        False if plans launched behind it were halted, though it may have been planned since.
        """
        plan = work.plan
        if plan is None or work.collected:
            return True
        outcome = self.planner.read(plan)
        if outcome == words.PLANNED:
            self._count_moves(work, plan)
            if self.everything:
                self._mark_collected(work)
                work.inserted = True
            return True
        self.lanes.join()
        with self.lanes.on("plan"):
            # Its ids may have been overwritten by those of a batch that was announced since.
            expected = self._admit(work)
            retry = outcome == words.NO_ROOM and not self.everything
            larger = self._larger(work, plan) if retry else None
            if self.planner.resume(expected, plan, retry=retry, larger=larger):
                self._count_moves(work, plan)
                return False
        self._forget(work)
        if outcome == words.BAD_ID:
            lookups_of(work.batch, self.layout)  # says which
            raise AssertionError("a plan found an id that no table has, and nobody else does")
        if outcome == words.NO_ROOM:
            unique = int(plan.buffers.status[words.UNIQUE])
            self._tell_of_chunks(unique - work.is_filled_up)
            self.count_direct(work)
        return False

    def _count_moves(self, work: DeviceWork, plan: DevicePlan) -> None:
        if not work.confirmed:
            work.confirmed = True
            unique = plan.num_unique - work.is_filled_up  # the padding's id is none
            self._note([work.num_lookups, unique, plan.num_moves, plan.num_evicted])

    def take_back(self, work: DeviceWork) -> None:  # type: ignore[override]
        """A batch before this one failed: this one has to be planned again, if it was halted."""
        plan = work.plan
        if plan is not None and not work.collected:
            if plan.outcome is None:
                self.planner.read(plan)
            if plan.outcome in (words.NO_ROOM, words.BAD_ID):
                with self.lanes.on("plan"):
                    self.planner.clear_halt()
            if plan.outcome != words.PLANNED:
                self._forget(work)
                work.expected = None

    def _forget(self, work: DeviceWork) -> None:
        work.plan = None
        if work in self.uncollected:
            self.uncollected.remove(work)

    def collect(self, work: DeviceWork) -> None:  # type: ignore[override]
        """Rows set out; where the device moves them by itself, that waits until `insert`."""
        if self.staged is None:
            return
        if not work.announced:
            self._insert_all()  # batches before it were planned without knowing what it needs
        assert work.plan is not None
        b, count = work.plan.buffers, work.plan.num_moves
        if count > self.staged.most:
            self.fill(work)
            return
        if count:
            assert b.told is not None
            work.packet = self.staged.collect(
                Moves(b.move_slots, b.leaving, b.entering), _moves_in(b), b.told[:count],
                evicts=work.plan.num_evicted > 0, replay=partial(self._replay, b),
            )  # fmt: skip
            self.in_transit.append(work)
        self._mark_collected(work)
        work.inserted = not count

    def exchange(self, work: DeviceWork) -> None:  # type: ignore[override]
        assert self.staged is not None
        assert work.packet is not None
        self.staged.depart(work.packet)
        self.staged.arrive(work.packet)

    def write_back(self, work: DeviceWork) -> None:  # type: ignore[override]
        assert self.staged is not None
        assert work.packet is not None
        self.staged.write(work.packet)

    def insert(self, work: DeviceWork) -> None:  # type: ignore[override]
        if not work.collected:
            self.fill(work)
            return
        assert self.staged is not None
        assert work.packet is not None
        assert work.plan is not None
        self.staged.insert(work.packet, partial(self._replay, work.plan.buffers))
        work.packet = None
        work.inserted = True
        self.in_transit.remove(work)

    def _insert_all(self) -> None:
        with uninterrupted(), self.lanes.on("rows"):
            for work in list(self.in_transit):
                self.insert(work)  # type: ignore[arg-type]

    def fill(self, work: DeviceWork) -> None:  # type: ignore[override]
        """All at once: whoever trains this batch may be next."""
        assert work.plan is not None
        if self.everything:
            return
        if self.staged is not None:
            self.staged.wait()  # a row on its way back may be fetched again
        level = self.effort.level if work.announced else LEVELS[FULL]
        if self.back is not None:
            self._fill_and_keep(work, self.back, level)
        elif self.zero_copy:
            self._move(work.plan.buffers, level)
            self._store_changed("rows")
        else:
            self._fill_by_host(work)
        self._mark_collected(work)
        work.inserted = True

    def note_wait(self, share: float) -> None:
        if not self.everything:
            self.effort.note(share)

    def _fill_and_keep(self, work: DeviceWork, back: WriteBack, level: Level) -> None:
        """Read entering rows; leaving ones are kept for a while, and go back with others."""
        plan = work.plan
        assert plan is not None
        b, moves, new = plan.buffers, _moves_in(plan.buffers), self.unwritten
        if work.announced:
            back.let_read(plan.number)
        else:
            back.wait()  # nobody has looked ahead to it
        if not level.in_bulk or (
            plan.num_evicted and not back.is_worth(plan.num_moves, plan.certain - plan.number)
        ):
            self._move(b, level)
            return
        packet = back.take(plan.num_moves, plan.certain) if plan.num_evicted else None

        def launch() -> None:
            if packet is not None:
                back.pack(packet, b.move_slots, b.leaving, moves, new)
            fill.fill(
                self.slots, self.store.rows, b.move_slots, None, b.entering, moves,
                level.read_blocks, written=None if new is None else new.written,
            )  # fmt: skip
            if new is not None:
                start.start_moves(self.slots, b.move_slots, b.entering, moves, new)

        place = -1 if packet is None else packet.number
        self._replay(b, ("bulk", level.read_blocks), place, launch)

    def _fill_by_host(self, work: DeviceWork) -> None:
        """Where the device cannot reach the store: the host waits, gathers and copies."""
        moves = zip(*(each.split(self.chunk_rows) for each in self._moves_of(work)), strict=True)
        for slots, leaving, entering in moves:
            goes, comes = leaving >= 0, (entering >= 0) & (entering != leaving)
            self._write_store(leaving[goes], self.slots.index_select(0, slots[goes]))
            rows = torch.empty(int(comes.sum()), self.width, device=self.device)
            self._read_store(entering[comes], rows)
            self.slots.index_copy_(0, slots[comes], rows)

    def _read_store(self, ids: Tensor, out: Tensor) -> None:
        """Rows of the store; -1: nothing is read."""
        if self.zero_copy:
            fill.gather(self.store.rows, ids, out)
            return
        there = ids >= 0
        out[there] = self.store.rows[ids[there].cpu()].to(self.device)

    def _write_store(self, ids: Tensor, rows: Tensor) -> None:
        """Replace rows of the store; -1: nothing is written."""
        if self.unwritten is not None:
            self.unwritten.note(ids)
        if self.zero_copy:
            fill.scatter(self.store.rows, ids, rows.contiguous())
            self._store_changed("train")
            return
        there = ids >= 0
        self.store.write(ids[there].cpu(), rows[there].cpu())

    def _store_changed(self, lane: Name) -> None:
        """The device has written to the store by itself."""
        if self.staged is not None:
            self.staged.changed(self.lanes.mark(lane))

    def _replay(self, b: PlanBuffers, kind: Any, place: int, launch: Callable[[], None]) -> None:
        self.planner.recorder.run((kind, self.width, place, b.number), launch)

    def _move(self, b: PlanBuffers, level: Level) -> None:
        new = self.unwritten

        def launch() -> None:
            fill.fill(
                self.slots, self.store.rows, b.move_slots, b.leaving, b.entering, _moves_in(b),
                level.fill_blocks, written=None if new is None else new.written,
            )  # fmt: skip
            if new is not None:
                start.start_moves(self.slots, b.move_slots, b.entering, _moves_in(b), new)

        self._replay(b, "fill", level.fill_blocks, launch)

    def slots_hold(self, work: Work) -> bool:
        if self.everything:
            return work.plan is not None
        return super().slots_hold(work)

    # -- lookup and update -------------------------------------------------------------

    def lookup(self, work: DeviceWork, x: Lookups) -> Tensor:  # type: ignore[override]
        if not self.slots_hold(work):
            return self.read(self._with_ids(work, x))
        assert work.plan is not None
        slots = work.plan.buffers.lookup_slots[: work.plan.lookups]
        return lookup.pool(
            self.slots, slots, x.offsets, x.weights, x.divisor, self.dim, self.output_dtype
        )

    def _with_ids(self, work: DeviceWork, x: Lookups) -> Lookups:
        found = lookups_of(work.batch, self.layout)
        return Lookups(
            found.ids, found.offsets, found.divisor, found.bags_per_feature, found.by_sample,
            found.spans, x.weights,
        )  # fmt: skip

    def _pool(self, rows: Tensor, index: Tensor, inverse: Tensor, x: Lookups) -> Tensor:
        slots = index[inverse].int()
        return lookup.pool(
            rows, slots, x.offsets, x.weights, x.divisor, self.dim, self.output_dtype
        )

    def weight_grads(self, work: DeviceWork, x: Lookups, grads: Tensor) -> Tensor:  # type: ignore[override]
        if self.slots_hold(work):
            assert work.plan is not None
            count = work.num_lookups if x.size is None else x.size
            slots = work.plan.buffers.lookup_slots[:count]
            found = lookup.weight_grads(self.slots, slots, work.bag_of, grads, self.dim)
            if x.size is None:
                return found
            assert x.offsets is not None
            is_padding = torch.arange(x.size, device=self.device) >= x.offsets[-1]
            return found.masked_fill_(is_padding, 0.0)
        pieces, first = [], 0
        for part, ids, rows, index in self._pass_through(self._with_ids(work, x)):
            mine = grads[first : first + part.num_bags]
            slots = index[ids.inverse].int()
            pieces.append(lookup.weight_grads(rows, slots, part.bag_of(), mine, self.dim))
            first += part.num_bags
        return torch.cat(pieces) if pieces else grads.new_zeros(0)

    def row_grads(self, work: DeviceWork, x: Lookups, grads: Tensor) -> Tensor:  # type: ignore[override]
        """The gradient of each unique row, [U, dim]; waits for the device."""
        segments, ids = self._segments(work), work.ids.ids
        terms = (grads, work.bag_of, x.weights, x.divisor)
        found = update.sum_by_row(*terms, segments, padding=self.layout.num_rows)
        return found[: ids.numel()]

    def _segments(self, work: DeviceWork) -> Segments:
        if work.plan is not None:
            return work.plan.segments()
        ids = lookups_of(work.batch, self.layout).ids
        return segments_of(torch.where(ids < 0, self.layout.num_rows, ids))

    def update_at_once(  # type: ignore[override]
        self, work: DeviceWork, x: Lookups, grads: Tensor
    ) -> bool:
        """Sum gradients and update rows in their slots, without waiting; False if they left."""
        if not self.slots_hold(work):
            return False
        assert work.plan is not None
        scalars, bases = self.device_scalars()
        b = work.plan.buffers
        update.update_slots(
            self.slots, b.row_slots[: work.plan.lookups], work.plan.segments(), grads, work.bag_of,
            x.weights, x.divisor, self.optimizer.rule, scalars, bases, self.pad.null_slot, self.dim,
        )  # fmt: skip
        return True

    def update(self, ids: Tensor, grads: Tensor, work: Work | None) -> None:
        scalars, bases = self.device_scalars()
        for first in range(0, ids.numel(), self.chunk_rows):
            part = slice(first, first + self.chunk_rows)
            rows = self._buffer(ids[part].numel())
            self.gather(ids[part], out=rows)
            update.update_rows(
                rows, None, ids[part], None, grads[part], self.optimizer.rule, scalars, bases,
                self.dim,
            )  # fmt: skip
            self.scatter(ids[part], rows)

    def device_scalars(self) -> tuple[Tensor, Tensor | None]:
        """The rule's numbers for each table, [T, K] on the device; bases where tables differ.

        One tensor for ever, so that a captured step follows a schedule.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            assert self._scalars_there is not None
        else:
            self.push_scalars()
        assert self._scalars_there is not None
        return self._scalars_there, None if self.scalars_alike else self.bases[:-1]

    def push_scalars(self) -> None:
        values = self.optimizer.table_scalars(self._scalar_names)
        if values is self._scalar_values:
            return
        self.scalars_alike = all(each == values[0] for each in values)
        there = torch.tensor(values, dtype=torch.float32)
        if self._scalars_there is None:
            self._scalars_there = there.to(self.device)
        else:
            if self.device.type == "cuda":
                there = there.pin_memory()
            self._scalars_there.copy_(there, non_blocking=True)
        self._scalar_values = values  # now that they are there

    # -- the direct way ----------------------------------------------------------------

    def settle(self) -> None:
        self.lanes.join()
        if self.back is not None:
            with self.lanes.on("rows"):
                self.back.wait()
            self.lanes.join()
        if self.staged is not None:
            if self.in_transit:
                self._insert_all()
                self.lanes.join()
            self.staged.wait()

    def locate(self, ids: Tensor) -> Tensor:
        for work in self.uncollected:
            assert work.plan is not None
            self.planner.read(work.plan)
        return super().locate(ids)

    def _slots_of(self, ids: Tensor) -> Tensor:
        return self.pad.map.lookup(ids.to(self.pad.id_type)).long()

    def _moves_of(self, work: Work) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(work.plan, DevicePlan)
        b, count = work.plan.buffers, work.plan.num_moves
        if work.plan.outcome != words.PLANNED:
            count = 0
        return b.move_slots[:count].long(), b.leaving[:count].long(), b.entering[:count].long()

    def gather(self, ids: Tensor, out: Tensor) -> Tensor:
        if out.device != self.device:
            out.copy_(self.gather(ids.to(self.device), torch.empty(out.shape, device=self.device)))
            return out
        if self.everything:
            self.lanes.join()
            return self.store.read(ids, out=out)
        self.settle()
        slots = self.locate(ids)
        absent = slots == FREE
        self._read_store(torch.where(absent, ids, FREE), out)
        here = (~absent).nonzero().squeeze(1)
        out[here] = self.slots.index_select(0, slots[here])
        return out

    def scatter(self, ids: Tensor, rows: Tensor) -> None:
        ids, rows = ids.to(self.device), rows.to(self.device)
        if self.everything:
            self.lanes.join()
            self.store.write(ids, rows)
            return
        self.settle()
        slots = self.locate(ids)
        absent = slots == FREE
        here = (~absent).nonzero().squeeze(1)
        self.slots.index_copy_(0, slots[here], rows[here])
        self._write_store(torch.where(absent, ids, FREE), rows)

    def flush(self) -> None:
        if self.everything:
            return
        self.settle()
        rows = self.pad.row_of_slot.long()
        for work in reversed(self.uncollected):
            assert work.plan is not None
            self.planner.read(work.plan)
            slots, leaving, _ = self._moves_of(work)
            rows[slots] = leaving
        taken = (rows != FREE).nonzero().squeeze(1)
        for part in taken.split(self.chunk_rows):
            self._write_store(rows[part], self.slots.index_select(0, part))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ----------------------------------------------------------------------------------

    def made_rows(self) -> int:
        return 0 if self.unwritten is None else int(self.unwritten.made)

    def memory(self) -> dict[str, int]:
        if self.everything:
            return {"rows": self.slots.numel() * 4}
        new = self.unwritten
        return {
            "slots": self.slots.numel() * 4,
            **self.planner.num_bytes,
            "row-to-slot map": self.pad.map.num_bytes,
            "plans": max(
                self._pool_of_buffers.num_bytes,
                self.plan_bytes(self.planner.capacity, self._plans_at_once),
            ),
            "buffer": self.buffer.numel() * 4,
            "rows on their way": sum(x.num_bytes for x in (self.staged, self.back) if x),
            "which rows were written": 0 if new is None else new.written.numel() * 4,
        }


def _why_not_bulk(strategy: Strategy) -> str:
    if not (strategy.eviction.looks_ahead and strategy.overlapped):
        return f"{strategy.name} does not know which rows come again"
    if strategy.refetch:
        # Rows that are fetched anew leave and enter the same slot: one kernel keeps them apart.
        return f"{strategy.name} fetches rows that are there"
    reason = why_not()
    return f"no thread of C can write rows: {reason}" if reason else ""


def _moves_in(b: PlanBuffers) -> Tensor:
    return b.counts[words.MOVES : words.MOVES + 1]


def _count_plan(bases: Tensor, traffic: Tensor, plan: DevicePlan) -> None:
    b = plan.buffers
    moves = (b.move_slots, b.leaving, b.entering)
    count_traffic(bases, plan.segments(), moves, b.counts, traffic)
