"""Rows of one width on a GPU: slots in its memory, the store in page-locked host memory.

The planned way never waits for the device. The direct way is rows.py's, and may: it serves what
is rare. Which lane a stage runs in is the schedule's business.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotrow.engine.gpu.fill import DeviceFills
from hotrow.engine.gpu.id_check import IdCheck
from hotrow.engine.gpu.plan_buffers import PlanBuffers
from hotrow.engine.gpu.planner import DevicePlan, Expected
from hotrow.engine.gpu.work import DevicePart, DeviceWork
from hotrow.engine.rows import ReadPart
from hotrow.engine.scratchpad import FREE
from hotrow.engine.split_batch import place_of
from hotrow.engine.stages import Work
from hotrow.engine.uploads import TableScalars, Upload
from hotrow.inputs.batch import Batch, Columns, Lookups, Room, columns_of, is_pooled, lookups_of
from hotrow.inputs.tables import WidthGroup
from hotrow.kernels.triton import fill, lookup, start, update, words
from hotrow.kernels.triton.segments import Segments, segments_of
from hotrow.kernels.triton.window import announce, globalise
from hotrow.support.streams import Mark, synchronize


class DeviceRows(DeviceFills):
    """Rows of one width."""

    compares_later = True

    def __init__(self, layout: WidthGroup, **options: Any) -> None:
        """As RowGroup's."""
        super().__init__(layout, **options)
        device = self.device
        columns = [
            (layout.bases[f.table], table.num_embeddings, table.skipped_idx, f.column)
            for f in layout.features
            for table in (layout.tables[f.table],)
        ]
        self.features = torch.tensor(
            [[b, n, -1 if p is None else p, c] for b, n, p, c in columns], device=device
        )
        self._planned: list[weakref.ref[DeviceWork]] = []
        self._id_check = IdCheck(self.features, layout.num_rows)
        names = tuple(table.name for table in layout.tables)
        self._table_scalars = TableScalars(partial(self.optimizer.table_scalars, names), self.lanes)
        self.is_pooled, self.room = is_pooled(layout), Room()
        self._columns: dict[tuple[str, ...], Columns] = {}
        self._spans_now: Any = None
        self._spans_there = Upload((2, len(layout.features)), torch.int64, self.lanes)

    # -- the planned way ---------------------------------------------------------------

    def work(self, batch: Batch) -> DeviceWork:
        return DeviceWork(self, batch)

    def part(  # type: ignore[override]
        self, work: DeviceWork, batch: Batch, part: Batch, first: int
    ) -> DevicePart:
        return DevicePart(work, part, place_of(batch, part, first, self.layout))

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
            return self._spans_there.there
        self._spans_now = None  # what fails below must not count as uploaded
        ends, shifts, end = [], [], 0
        for low, high in work.spans:
            shifts.append(low - end)
            end += high - low
            ends.append(end)
        there = self._spans_there.send((ends, shifts))
        self._spans_now = work.spans
        return there

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
        self._load(slots, ids)
        self._count_loaded(ids)

    def pin_rows(self, ids: Tensor) -> None:
        self._started = True
        with self.lanes.on("plan"):  # in which all that plans need was made
            super().pin_rows(ids)
        self.lanes.join()

    def reload(self) -> None:
        self.lanes.join()
        super().reload()
        self.lanes.join()

    def expect_changes(self) -> None:
        if self.unwritten is not None:
            self.unwritten.written.fill_(-1)  # every bit

    def _load(self, slots: Tensor, ids: Tensor) -> None:
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
            self._tell_of_chunks(work.ids.ids)
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

    def slots_hold(self, work: Work) -> bool:
        if self.everything:
            return work.plan is not None
        return super().slots_hold(work)

    # -- ids that were changed ---------------------------------------------------------

    def compare(self, work: DeviceWork) -> None:  # type: ignore[override]
        batch, plan = work.batch, work.plan
        if plan is None or not batch.given or not self.slots_hold(work):
            return  # what takes the direct way reads ids as they are
        segments = plan.segments()
        places = None if batch.offsets is None else self.columns(batch.keys).places
        self._id_check.launch(
            batch.given, places, batch.num_samples, segments.ids, (segments.order, segments.rank),
            plan.buffers.number,
        )  # fmt: skip

    def note_number(self, work: DeviceWork, number: int) -> None:  # type: ignore[override]
        if work.plan is not None:
            self._id_check.note(work.plan.buffers.number, number)

    def take_changed(self) -> int | None:
        return self._id_check.take()

    # -- lookup and update -------------------------------------------------------------

    def lookup(self, work: DeviceWork, x: Lookups) -> Tensor:  # type: ignore[override]
        if not self.slots_hold(work):
            return self.read(self._with_ids(work, x))
        return self._pool_slots(self.slots, work.slots, x)

    def _with_ids(self, work: DeviceWork, x: Lookups) -> Lookups:
        found = lookups_of(work.batch, self.layout)
        return Lookups(
            found.ids, found.offsets, found.divisor, found.bags_per_feature, found.by_sample,
            found.spans, x.weights,
        )  # fmt: skip

    def parts_of(self, x: Lookups) -> list[ReadPart]:
        if self.everything:
            return [(x, None)]
        return [*self._sorted_parts(x)]  # a row of the store crosses the link once

    def read_parts(self, parts: list[ReadPart]) -> Tensor:
        if self.everything:
            self.lanes.join()
            return self._joined(
                [self._pool_slots(self.slots, self._or_null(x.ids).int(), x) for x, _ in parts]
            )
        with_ids = [(x, ids) for x, ids in parts if ids is not None]  # all of them
        passing = self._pass_through(with_ids)
        return self._joined([self._pool_slots(rows, s.inverse.int(), x) for x, s, rows in passing])

    def _pool_slots(self, rows: Tensor, slots: Tensor, x: Lookups) -> Tensor:
        return lookup.pool(
            rows, slots, x.offsets, x.weights, x.divisor, self.dim, self.output_dtype
        )

    def weight_grads(self, work: DeviceWork, x: Lookups, grads: Tensor) -> Tensor:  # type: ignore[override]
        if self.slots_hold(work):
            count = work.num_lookups if x.size is None else x.size
            slots = work.slots[:count]
            found = lookup.weight_grads(self.slots, slots, work.bag_of, grads, self.dim)
            if x.size is None:
                return found
            assert x.offsets is not None
            is_padding = torch.arange(x.size, device=self.device) >= x.offsets[-1]
            return found.masked_fill_(is_padding, 0.0)
        pieces, first = [], 0
        parts = self._sorted_parts(self._with_ids(work, x))
        for part, ids, rows in self._pass_through(parts):
            mine = grads[first : first + part.num_bags]
            slots = ids.inverse.int()
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
        b, segments = work.plan.buffers, work.plan.segments()
        if self.changed is not None:
            start.note_written(self.changed.there, segments.ids, segments.count)
        row_slots, weights = b.row_slots[: work.plan.lookups], x.weights
        if x.used is not None:
            row_slots, weights = self._only_used(row_slots, segments, x)
        update.update_slots(
            self.slots, row_slots, segments, grads, work.bag_of,
            weights, x.divisor, self.optimizer.rule, scalars, bases, self.pad.null_slot, self.dim,
            self.frozen, self.untrained,
        )  # fmt: skip
        return True

    def _only_used(
        self, row_slots: Tensor, segments: Segments, x: Lookups
    ) -> tuple[Tensor, Tensor | None]:
        """Return the slots of unique rows, the null slot for rows without a gradient, and weights.

        All shapes are fixed and no value is read back, so that a captured step can do it.
        """
        used = x.used_lookups()
        weights = x.weights
        if weights is not None:
            weights = weights.masked_fill(~used, 0.0)  # 0 times NaN would be NaN
        size = segments.order.numel()  # padding may stand behind the lookups
        in_order = functional.pad(used, (0, size - used.numel()))[segments.order.long()]
        before = functional.pad(in_order.cumsum(0), (1, 0))
        starts = segments.starts.long().clamp(0, size)  # behind the last row they are not written
        has_grad = before[starts].diff() > 0
        return torch.where(has_grad, row_slots, self.pad.null_slot), weights

    def update(self, ids: Tensor, grads: Tensor, work: Work | None) -> None:
        scalars, bases = self.device_scalars()
        for first in range(0, ids.numel(), self.chunk_rows):
            part = slice(first, first + self.chunk_rows)
            rows = self._buffer(ids[part].numel())
            self.gather(ids[part], out=rows)
            update.update_rows(
                rows, None, ids[part], None, grads[part], self.optimizer.rule, scalars, bases,
                self.dim, frozen=self.frozen, untrained=self.untrained,
            )  # fmt: skip
            self.scatter(ids[part], rows)

    def device_scalars(self) -> tuple[Tensor, Tensor | None]:
        """The rule's numbers for each table, [T, K] on the device; bases where tables differ."""
        if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self.push_scalars()
        return self._table_scalars.there, None if self.scalars_alike else self.bases[:-1]

    def push_scalars(self) -> None:
        self._table_scalars.push()

    @property
    def scalars_alike(self) -> bool:
        return self._table_scalars.alike and not self.optimizer.counts_apart

    def check(self) -> None:
        # Between a plan that failed and its confirmation planning has halted, and rightly so.
        plans = [work.plan for work in self.uncollected]
        failed = any(plan is not None and plan.outcome != words.PLANNED for plan in plans)
        self.planner.check(may_halt=failed)

    # -- the direct way ----------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Threads read one after the other here, and each settles by itself."""
        return True

    def settle(self) -> None:
        if self.back is not None:
            self.lanes.join()
            with self.lanes.on("rows"):
                self.back.wait()
        self._settle_staged()

    def _settle_staged(self) -> None:
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
        # Rows that are to go back in bulk are read on their way: to wait for them would take as
        # long as what training has launched.
        self._settle_staged()
        if self.back is not None:
            self.back.wait_for_writer()
        slots = self.locate(ids)
        absent = torch.where(slots == FREE, ids, FREE)
        self._read_store(absent, out)
        if self.back is not None:
            self.back.read(absent, out)
        fill.gather(self.slots, slots, out)
        return out

    def scatter(self, ids: Tensor, rows: Tensor) -> None:
        ids, rows = ids.to(self.device), rows.to(self.device)
        if self.changed is not None:
            self.changed.note(ids)
        if self.everything:
            self.lanes.join()
            self.store.write(ids, rows)
            return
        self.settle()
        self.store.note(ids)
        slots = self.locate(ids)
        fill.scatter(self.slots, slots, rows.contiguous())
        self._write_store(torch.where(slots == FREE, ids, FREE), rows)

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
            synchronize(self.device)

    # ----------------------------------------------------------------------------------
