"""Rows of one width on a GPU: slots in its memory, the store in page-locked host memory.

The planned way never waits for the device. The direct way is rows.py's, and may: it serves what
is rare. Which lane a stage runs in is the schedule's business.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
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
    divisor_of,
    fixed_outline,
    is_pooled,
    lookups_of,
    outline_of,
    spans_of,
)
from hotrow.budget import MOST_PACKED, Share
from hotrow.device_planner import (
    DevicePlan,
    DevicePlanner,
    DeviceScratchpad,
    Expected,
    PlanBuffers,
)
from hotrow.evict import EVICTIONS
from hotrow.fills import FillChoice, choose
from hotrow.interrupt import uninterrupted
from hotrow.kernels.reference import Moves, SortedIds, sort_ids
from hotrow.kernels.triton import fill, lookup, start, update
from hotrow.kernels.triton import plan as planning
from hotrow.kernels.triton.segments import Segments, segments_of
from hotrow.lanes import Lanes, Mark, Name
from hotrow.pinned import locked_rows
from hotrow.planner import Hold
from hotrow.rows import RowGroup
from hotrow.scratchpad import FREE
from hotrow.staged import FILL_BLOCKS, Packet, Staged
from hotrow.stages import SPLIT, Work, in_transit_of
from hotrow.store import Store, initialise_table, seed_word
from hotrow.tables import Constant, EmbeddingBagConfig, Normal, Uniform, WidthGroup
from hotrow.writeback import WriteBack

_WINDOW_BYTES = 1 << 26
_READ_BLOCKS = 1  # more of them slow down matrix products, which want all multiprocessors
_WRITTEN_PART = 1 / 16  # of the slots' bytes, at most, for a bit per row of the tables


class DeviceWork(Work):
    """One batch's lookups in one width group; how many are unique, only the device knows."""

    group: DeviceRows
    plan: DevicePlan | None  # type: ignore[assignment]

    def __init__(self, group: DeviceRows, batch: Batch) -> None:
        self.group, self.batch = group, batch
        self.plan = None
        self.expected: Expected | None = None
        self.announced = True  # batches before it hold its rows
        self.incoming = self.outgoing = None
        self.packet: Packet | None = None  # its rows on their way, between collect and insert
        self.collected = self.inserted = self.confirmed = False
        self.berth: int | None = None  # the plan's buffers are to be the same for each
        self.is_fixed = False  # launches are to be the same for all batches of one shape
        self.spans = () if batch.offsets is None else spans_of(batch, group.layout)
        # Of the plan: padding fills it up, so that plans of other batches are launched alike.
        self.size = self.num_lookups
        if batch.offsets is not None and group.is_pooled:
            self.size = group.room(self.size)
        self._lookups: Lookups | None = None
        self._bag_of: Tensor | None = None
        self._sorted: SortedIds | None = None

    @property
    def num_lookups(self) -> int:
        if self.batch.offsets is None:
            return self.batch.num_samples * len(self.group.layout.features)
        return sum(high - low for low, high in self.spans)

    @property
    def is_filled_up(self) -> bool:
        """Whether padding stands behind the lookups in the plan."""
        return self.size > self.num_lookups

    @property
    def lookups(self) -> Lookups:  # type: ignore[override]
        """Without ids: reading those would wait for the device."""
        if self._lookups is None and self.is_fixed:
            assert self.plan is not None
            slots = self.plan.buffers.lookup_slots[: self.size]
            self._lookups = fixed_outline(
                self.batch, self.group.layout, self.group.columns(self.batch.keys), self.size,
                slots != self.group.pad.null_slot,
            )  # fmt: skip
        if self._lookups is None:
            x = outline_of(self.batch, self.group.layout)
            divisor = divisor_of(self.batch, x, self.group.layout)
            self._lookups = Lookups(
                x.ids, x.offsets, divisor, x.bags_per_feature, x.by_sample, x.spans
            )
        return self._lookups

    @property
    def bag_of(self) -> Tensor | None:
        """The bag of each lookup; None where each is its own."""
        if self._bag_of is None and self.lookups.offsets is not None:
            self._bag_of = self.lookups.bag_of().int()
        return self._bag_of

    @property
    def ids(self) -> SortedIds:  # type: ignore[override]
        """Sorted on demand, for the direct way; waits for the device."""
        if self._sorted is None:
            found = lookups_of(self.batch, self.group.layout)
            self._sorted = sort_ids(found.ids, self.group.layout.num_rows)
        return self._sorted

    def reads_like(self, planned: Work) -> bool:
        assert isinstance(planned, DeviceWork)
        mine, theirs = self.lookups, planned.lookups
        if (mine.spans, mine.bags_per_feature) != (theirs.spans, theirs.bags_per_feature):
            return False
        if mine.offsets is not None:
            assert theirs.offsets is not None
            if not torch.equal(mine.offsets, theirs.offsets):
                return False
        return torch.equal(self._looked_up(), planned._looked_up())

    def _looked_up(self) -> Tensor:
        """The ids of the lookups, as they were when they were planned."""
        if self.plan is None:
            ids = lookups_of(self.batch, self.group.layout).ids
            return torch.where(ids < 0, self.group.layout.num_rows, ids)
        segments = self.plan.segments()
        ids = torch.empty(self.plan.lookups, dtype=torch.int64, device=segments.ids.device)
        ids[segments.order.long()] = segments.ids[segments.rank.long()].long()
        return ids[: self.num_lookups]

    def arrive(self, batch: Batch) -> None:
        """The batch's own tensors are on the device now."""
        self.batch = batch
        self._lookups = self._bag_of = self._sorted = None


class DeviceRows(RowGroup):
    """Rows of one width."""

    plans_later = True
    zero_copy = True  # the device reads and writes the store by itself
    staged: Staged | None = None  # or the copy engine and the CPU move rows
    back: WriteBack | None = None  # or only those that leave
    unwritten: start.Unwritten | None = None  # rows that need not be read: the device knows them
    _notes_written = False
    planner: DevicePlanner  # type: ignore[assignment]
    pad: DeviceScratchpad  # type: ignore[assignment]
    uncollected: list[DeviceWork]  # type: ignore[assignment]

    def __init__(self, layout: WidthGroup, **options: Any) -> None:
        """As RowGroup's."""
        super().__init__(layout, **options)
        device = self.device
        if self.everything:
            self.pad = _AllSlots(self.slots)  # type: ignore[assignment]
            self.planner = _AllPlanner(self.pad)
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
        # Not a method of this object, which would then be known to its own planner.
        self.planner.on_plan = partial(_count_plan, self.bases, self.traffic)
        self._pool_of_buffers = _BufferPool(self.lanes)
        self._scalar_names = tuple(table.name for table in layout.tables)
        self._scalar_values: Any = None
        self._scalars_there: Tensor | None = None
        self._started = False
        self.is_pooled, self.room = is_pooled(layout), Room()
        self._columns: dict[tuple[str, ...], Columns] = {}
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
        found = locked_rows(layout.num_rows, self.width)
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
            layout = self.layout
            self.unwritten = start.Unwritten(
                [*layout.bases, layout.num_rows],
                [_beginning(table, on_gpu=on_gpu) for table in layout.tables],
                [seed_word(seed, stream, self.dim) for stream in range(3)],
                state,
                self.device,
            )

    def _make_scratchpad(self, share: Share) -> None:
        self.fill_choice = self._choose_fill()
        packets = 0
        if self.fill_choice.form in ("mixed", "staged"):
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
                share = share.with_packets(2, 4 * self.width)  # three, of two thirds
        self.pad = DeviceScratchpad(
            share.slots, self.width, self.layout.num_rows, self.device, dense_map=share.dense_map
        )
        self.slots = self.pad.slots
        self.buffer = torch.zeros(share.buffer_rows + 1, self.width, device=self.device)
        self._past = self.strategy.hold.past
        if self.fill_choice.form == "bulk":
            most = 2 * share.packet_rows // 3 or min(share.slots, MOST_PACKED)
            self.back = WriteBack(
                self.store,
                self.slots,
                most=max(1, most),
                id_type=self.pad.id_type,
                lanes=self.lanes,
            )
        if packets:
            self.staged = Staged(
                self.store, self.slots, most=share.packet_rows or min(share.slots, MOST_PACKED),
                packets=packets, id_type=self.pad.id_type, lanes=self.lanes,
                writes=self.fill_choice.form == "staged",
            )  # fmt: skip
        self.planner = DevicePlanner(
            self.pad,
            hold=self.strategy.hold,
            eviction=self.strategy.eviction,
            refetch=self.strategy.refetch,
            pins=self._pins() if self.strategy.pinned_part else None,
            window_bytes=self.window_bytes,
        )

    def _choose_fill(self) -> FillChoice:
        strategy, wanted = self.strategy, self.fill_form
        if not self.zero_copy:
            return FillChoice("staged", "the store is not page-locked")
        if wanted == "bulk" and not (strategy.eviction.looks_ahead and strategy.overlapped):
            return FillChoice("zero-copy", f"{strategy.name} does not know which rows come again")
        if wanted == "mixed" and strategy.refetch:
            # Rows that are fetched anew leave and enter the same slot: one kernel keeps them apart.
            return FillChoice("zero-copy", f"{strategy.name} fetches rows that are there")
        if wanted != "auto":
            return FillChoice(wanted, "asked for")
        if strategy.staged:
            return FillChoice("staged", f"{strategy.name} moves rows in stages")
        if not strategy.overlapped:
            return FillChoice("zero-copy", f"{strategy.name} waits for its rows")
        if self.device.type != "cuda":
            return FillChoice("zero-copy", "one memory serves both")
        return choose(self.store, self.device, self.lanes)

    # -- the planned way ---------------------------------------------------------------

    def work(self, batch: Batch) -> DeviceWork:
        return DeviceWork(self, batch)

    def expect(self, work: DeviceWork, values: Tensor) -> None:  # type: ignore[override]
        """A batch is known that will be planned later; `values` are its indices, on the device."""
        expected = work.expected = self.planner.admit(work.size, announced=True)
        spans = self._spans(work)

        def write_ids(ids: Tensor, counts: Tensor) -> None:
            self._write_ids(values, spans, expected.lookups, ids, counts)

        key = (values.data_ptr(), values.dtype, values.shape, values.stride(), spans is None)
        self.planner.expect(expected, write_ids, key)

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
        first_bad = counts[planning.FIRST_BAD :]
        planning.globalise(
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
        ends, shifts, end = [], [], 0
        for low, high in work.spans:
            shifts.append(low - end)
            end += high - low
            ends.append(end)
        spans = torch.tensor([ends, shifts])
        if self.device.type == "cuda":
            spans = spans.pin_memory()  # or the host might wait for the lane
        return self._spans_there.copy_(spans, non_blocking=True)

    def plan(self, work: DeviceWork) -> bool:  # type: ignore[override]
        """Launch a plan; what became of it is known at `confirm`."""
        if not self._started:
            self._start()
        if work.expected is None:
            work.expected, work.announced = self._admit(work), False
        buffers = self._pool_of_buffers.take(
            max(self.planner.capacity, 1), self.pad.id_type, self.device, work.berth,
            tells=self.staged is not None,
        )  # fmt: skip
        plan = self.planner.plan(work.expected, buffers)
        work.plan = plan
        self.uncollected.append(work)
        weakref.finalize(plan, self._pool_of_buffers.give_back, buffers, work.berth)
        return True

    def _start(self) -> None:
        """Pin what is known to be hot, before the first batch is planned."""
        self._started = True
        if self.everything or self.planner.pins is None:
            return
        self.planner.reserve(1)
        slots, ids = self.planner.hottest()
        if slots.numel():
            for part in torch.arange(ids.numel(), device=self.device).split(self.chunk_rows):
                rows = self._buffer(part.numel())
                self._read_store(ids[part], rows)
                self.slots.index_copy_(0, slots[part], rows)

    def forget_window(self) -> None:
        self.planner.forget_window()

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
        if outcome == planning.PLANNED:
            self._count_moves(work, plan)
            if self.everything:
                self._mark_collected(work)
                work.inserted = True
            return True
        self.lanes.join()
        with self.lanes.on("plan"):
            # Its ids may have been overwritten by those of a batch that was announced since.
            expected = self._admit(work)
            retry = outcome == planning.NO_ROOM and not self.everything
            if self.planner.resume(expected, plan, retry=retry):
                self._count_moves(work, plan)
                return False
        self._forget(work)
        if outcome == planning.BAD_ID:
            lookups_of(work.batch, self.layout)  # says which
            raise AssertionError("a plan found an id that no table has, and nobody else does")
        if outcome == planning.NO_ROOM:
            unique = int(plan.buffers.status[planning.UNIQUE])
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
            if plan.outcome in (planning.NO_ROOM, planning.BAD_ID):
                with self.lanes.on("plan"):
                    self.planner.clear_halt()
            if plan.outcome != planning.PLANNED:
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
        if self.back is not None:
            self._fill_and_keep(work, self.back)
        elif self.zero_copy:
            b = work.plan.buffers
            self._replay(b, "fill", 0, lambda: self._move(b))
            self._store_changed("rows")
        else:
            self._fill_by_host(work)
        self._mark_collected(work)
        work.inserted = True

    def _fill_and_keep(self, work: DeviceWork, back: WriteBack) -> None:
        """Read entering rows; leaving ones are kept for a while, and go back with others."""
        plan = work.plan
        assert plan is not None
        b, moves, new = plan.buffers, _moves_in(plan.buffers), self.unwritten
        if work.announced:
            back.let_read(plan.number)
        else:
            back.wait()  # nobody has looked ahead to it
        if plan.num_evicted and plan.num_moves > back.most:
            back.wait()
            self._replay(b, "fill", 0, lambda: self._move(b))
            return
        packet = back.take(plan.num_moves, plan.certain) if plan.num_evicted else None

        def launch() -> None:
            if packet is not None:
                back.pack(packet, b.move_slots, b.leaving, moves, new)
            fill.fill(
                self.slots, self.store.rows, b.move_slots, None, b.entering, moves, _READ_BLOCKS,
                written=None if new is None else new.written,
            )  # fmt: skip
            if new is not None:
                start.start_moves(self.slots, b.move_slots, b.entering, moves, new)

        self._replay(b, "bulk", -1 if packet is None else packet.number, launch)

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

    def _replay(self, b: PlanBuffers, kind: str, place: int, launch: Callable[[], None]) -> None:
        self.planner.recorder.run((kind, self.width, place, id(b)), launch, keep=b)

    def _move(self, b: PlanBuffers) -> None:
        new = self.unwritten
        fill.fill(
            self.slots, self.store.rows, b.move_slots, b.leaving, b.entering, _moves_in(b),
            FILL_BLOCKS, written=None if new is None else new.written,
        )  # fmt: skip
        if new is not None:
            start.start_moves(self.slots, b.move_slots, b.entering, _moves_in(b), new)

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
        self._scalar_values = values
        self.scalars_alike = all(each == values[0] for each in values)
        there = torch.tensor(values, dtype=torch.float32)
        if self._scalars_there is None:
            self._scalars_there = there.to(self.device)
            return
        if self.device.type == "cuda":
            there = there.pin_memory()
        self._scalars_there.copy_(there, non_blocking=True)

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
        if work.plan.outcome != planning.PLANNED:
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
            "plans": self._pool_of_buffers.num_bytes,
            "buffer": self.buffer.numel() * 4,
            "rows on their way": sum(x.num_bytes for x in (self.staged, self.back) if x),
            "which rows were written": 0 if new is None else new.written.numel() * 4,
        }


def _moves_in(b: PlanBuffers) -> Tensor:
    return b.counts[planning.MOVES : planning.MOVES + 1]


def _beginning(table: EmbeddingBagConfig, *, on_gpu: bool) -> start.Beginning:
    """How a table's rows start, where a GPU makes the same bits."""
    padding = -1 if table.padding_idx is None else table.padding_idx
    begin = table.start
    if isinstance(begin, Constant):
        return start.Beginning("constant", (begin.value, 0.0), padding)
    if isinstance(begin, Uniform):
        return start.Beginning("uniform", (begin.low, begin.high - begin.low), padding)
    if isinstance(begin, Normal) and on_gpu:
        return start.Beginning("normal", (begin.mean, begin.std), padding)
    return start.Beginning("other")


def initialise_on_gpu(
    store: Tensor, layout: WidthGroup, state: list[float], seed: int, device: torch.device
) -> None:
    """Start every row of page-locked host memory; a GPU fills it as fast as the link goes."""
    columns = torch.tensor(state, device=device)
    for table, base in zip(layout.tables, layout.bases, strict=True):
        rows = store[base : base + table.num_embeddings]
        padding = -1 if table.padding_idx is None else table.padding_idx
        words = [seed_word(seed, stream, layout.dim) for stream in range(3)]
        begin = table.start
        if isinstance(begin, Constant):
            start.start_constant(rows, columns, value=begin.value, padding=padding)
        elif isinstance(begin, Uniform):
            start.start_uniform(
                rows, columns, first_id=base, word=words[0], low=begin.low, high=begin.high,
                padding=padding,
            )  # fmt: skip
        elif isinstance(begin, Normal):
            start.start_normal(
                rows, columns, first_id=base, words=(words[1], words[2]), mean=begin.mean,
                std=begin.std, padding=padding,
            )  # fmt: skip
        else:
            torch.cuda.synchronize(device)
            initialise_table(store, layout, table, state, seed)
    torch.cuda.synchronize(device)


def _count_plan(bases: Tensor, traffic: Tensor, plan: DevicePlan) -> None:
    b = plan.buffers
    moves = (b.move_slots, b.leaving, b.entering)
    planning.count_traffic(bases, plan.segments(), moves, b.counts, traffic)


class _BufferPool:
    """Buffers of plans that nobody reads any more, used again when the device has caught up."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._returned: deque[tuple[PlanBuffers, int | None]] = deque()
        self._free: dict[int | None, deque[tuple[PlanBuffers, list[Mark | None]]]] = {}
        self.num_bytes = 0

    def give_back(self, buffers: PlanBuffers, berth: int | None) -> None:
        # From whichever thread dropped the plan: no stream is known here.
        self._returned.append((buffers, berth))

    def take(
        self,
        capacity: int,
        id_type: torch.dtype,
        device: torch.device,
        berth: int | None,
        *,
        tells: bool,
    ) -> PlanBuffers:
        """For the plan lane, which waits until others have done with them."""
        if self._returned:
            # Whatever moves a batch's rows is marked when it has been launched.
            marks = [self._lanes.mark("train"), self._lanes.newest("rows")]
            while self._returned:
                buffers, place = self._returned.popleft()
                self._free.setdefault(place, deque()).append((buffers, marks))
        free = self._free.get(berth)
        while free:
            buffers, marks = free.popleft()
            if buffers.capacity >= capacity:
                for mark in marks:
                    self._lanes.after("plan", mark)
                return buffers
            self.num_bytes -= buffers.num_bytes
        buffers = PlanBuffers(capacity, id_type, device, tells=tells)
        self.num_bytes += buffers.num_bytes
        return buffers


class _AllSlots:
    """Stands for a scratchpad where every row is its own slot."""

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots
        self.num_rows = self.num_slots = self.null_slot = slots.shape[0] - 1
        self.id_type = torch.int32

    def check(self) -> None:
        assert not self.slots[self.null_slot].any(), "the padding slot was written to"


class _AllPlanner(DevicePlanner):
    """Sorts and checks ids; every row is where it belongs."""

    def __init__(self, pad: Any) -> None:
        super().__init__(
            pad,
            hold=Hold(0, 0),
            eviction=EVICTIONS["least-recent"],
            tracks_slots=False,
            window_bytes=_WINDOW_BYTES,  # of batches that another collection knows ahead
        )

    def _prepare_victims(self) -> None: ...

    def _launch_kernels(self, batch: Expected, plan: DevicePlan) -> None:
        b = plan.buffers
        planning.plan_everything(
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
        )

    def check(self) -> None:
        self.pad.check()
