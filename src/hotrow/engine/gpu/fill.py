"""Rows between the store and the slots, as plans say: the stages that move bytes.

Zero-copy, in bulk or staged, as was chosen; which lane a stage runs in is the schedule's business.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.gpu.bulk import WriteBack
from hotrow.engine.gpu.memory import DeviceMemory
from hotrow.engine.gpu.mover_choice import FULL, LEVELS, Level
from hotrow.engine.gpu.plan_buffers import PlanBuffers
from hotrow.engine.gpu.planner import DevicePlan
from hotrow.engine.gpu.work import DeviceWork
from hotrow.kernels.reference import Moves
from hotrow.kernels.triton import fill, start, words
from hotrow.support.interrupts import uninterrupted
from hotrow.support.streams import Name


class DeviceFills(DeviceMemory):
    """Moves rows."""

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
            self._move(work.plan, level)
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
            self._move(plan, level)
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
            self.store.will_write(ids)
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

    def _move(self, plan: DevicePlan, level: Level) -> None:
        b, new = plan.buffers, self.unwritten
        if self.store.is_watched and plan.num_evicted:
            # A snapshot has to know them before the device writes, so that the host waits here: for
            # the plan, in its own lane, and not for what trains.
            with self.lanes.on("plan"):
                self.store.will_write(b.leaving[: plan.num_moves])

        def launch() -> None:
            fill.fill(
                self.slots, self.store.rows, b.move_slots, b.leaving, b.entering, _moves_in(b),
                level.fill_blocks, written=None if new is None else new.written,
            )  # fmt: skip
            if new is not None:
                start.start_moves(self.slots, b.move_slots, b.entering, _moves_in(b), new)

        self._replay(b, "fill", level.fill_blocks, launch)


def _moves_in(b: PlanBuffers) -> Tensor:
    return b.counts[words.MOVES : words.MOVES + 1]
