"""How a GPU moves rows between the store and its slots: by itself, in bulk, or in stages.

A mover runs what plans say. The schedule decides in which lane a stage runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.gpu.bulk import Packet, WriteBack
from hotrow.engine.gpu.memory import DeviceMemory
from hotrow.engine.gpu.mover_choice import FULL, LEVELS, Effort, Level
from hotrow.engine.gpu.plan_buffers import PlanBuffers
from hotrow.engine.gpu.planner import DevicePlan
from hotrow.engine.gpu.staged import Staged
from hotrow.engine.mover import NoMoves
from hotrow.engine.settings import Settings
from hotrow.engine.work import Flight, Work
from hotrow.kernels.reference import Moves
from hotrow.kernels.triton import fill, start, words
from hotrow.kernels.triton.fill import ALL, Span
from hotrow.support.interrupts import uninterrupted
from hotrow.support.streams import Lanes, Name, Recorder

# Moves of a planned batch on the host's side: slots, leaving and entering rows.
MovesOf = Callable[[Work], tuple[Tensor, Tensor, Tensor]]


class DeviceNoMoves(NoMoves):
    """The mover of rows that are all in a GPU's memory; a read waits for what was launched."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def settle(self) -> None:
        self._lanes.join()

    def wait_to_read(self) -> None:
        self._lanes.join()


class ZeroCopy(DeviceNoMoves):
    """One kernel reads entering rows from page-locked host memory and writes leaving rows there."""

    def __init__(
        self,
        settings: Settings,
        memory: DeviceMemory,
        flight: Flight,
        recorder: Recorder,
        effort: Effort,
    ) -> None:
        self._memory, self._flight, self._recorder = memory, flight, recorder
        super().__init__(settings.lanes)
        self._width, self.effort = settings.width, effort

    def fill(self, work: Work) -> None:
        self.move(work.plan, self.level_for(work))
        self._flight.collect(work, inserted=True)

    def insert(self, work: Work) -> None:
        self.fill(work)

    def num_bytes(self) -> dict[str, int]:
        return {"rows on their way": 0}

    def level_for(self, work: Work) -> Level:
        """Return what a fill may take of the device: all, if training waits for it."""
        if not work.announced:
            return LEVELS[FULL]
        if work.plan.num_moves:
            self.effort.begin(work.plan.num_moves * 8 * self._width)
        return self.effort.level

    def move(self, plan: DevicePlan, level: Level) -> None:
        """Launch the moves of a plan."""
        b = plan.buffers
        self._note_leaving(plan)

        def launch() -> None:
            self._launch_fill(b, b.leaving, level.fill_blocks)
            self._start_moves(b)

        self.replay(b, "fill", level.fill_blocks, launch)

    def _note_leaving(self, plan: DevicePlan) -> None:
        """Let a snapshot know rows before the device writes them, for which the host waits: for
        the plan, in its own lane, and not for what trains."""
        store = self._memory.store
        if store.is_watched and plan.num_evicted:
            with self._lanes.on("plan"):
                store.will_write(plan.buffers.leaving[: plan.num_moves])

    def _launch_fill(
        self, b: PlanBuffers, leaving: Tensor | None, blocks: int, span: Span = ALL
    ) -> None:
        unwritten = self._memory.host.unwritten
        fill.fill(
            self._memory.slots, self._memory.store.rows, b.move_slots, leaving, b.entering,
            moves_in(b), blocks, written=None if unwritten is None else unwritten.written,
            span=span,
        )  # fmt: skip

    def _start_moves(self, b: PlanBuffers) -> None:
        """Make the entering rows that were never written."""
        unwritten = self._memory.host.unwritten
        if unwritten is not None:
            slots = self._memory.slots
            start.start_moves(slots, b.move_slots, b.entering, moves_in(b), unwritten)

    def replay(self, b: PlanBuffers, kind: Any, place: int, launch: Callable[[], None]) -> None:
        """Launch, or replay what was captured for the same buffers."""
        self._recorder.run((kind, self._width, place, b.number), launch)

    def rehearse(self, buffers: PlanBuffers) -> None:
        memory = self._memory
        if memory.host.is_locked:
            self._launch_fill(buffers, buffers.leaving, 1)
        self._start_moves(buffers)
        none = torch.full((16,), -1, device=memory.slots.device)
        rows = torch.zeros(len(none), self._width, device=none.device)
        memory.pad.map.lookup(none[:0].new_zeros(1).to(memory.pad.id_type))  # of the direct path
        memory.read_slots(none, rows)
        memory.write_slots(none, rows)
        memory.read_store(none, rows)
        memory.write_store(none, rows)

    def note_wait(self, share: float, step: float) -> None:
        self.effort.note(share, step)


class Bulk(ZeroCopy):
    """Entering rows are read by a kernel. Leaving rows are kept for a while and go back together,
    by the copy engine and the CPU; those for which the CPU has no time are written by the kernel.
    """

    def __init__(self, *parts: Any, back: WriteBack, waits: bool = False) -> None:
        """`waits`: for the CPU, so that it writes all rows that may be kept."""
        super().__init__(*parts)
        self.back, self._waits = back, waits

    def num_bytes(self) -> dict[str, int]:
        return {"rows on their way": self.back.num_bytes}

    def fill(self, work: Work) -> None:
        plan, back, level = work.plan, self.back, self.level_for(work)
        if work.announced:
            back.let_read(plan.number)
        else:
            back.wait()  # its rows may be among those that were kept
        keeps = back.is_worth(plan.num_moves, plan.certain - plan.number)
        if not plan.num_evicted:
            self._read_and_keep(plan, level, None)
        elif not keeps:
            self.move(plan, level)
        elif plan.num_moves <= back.most:
            if self._may_keep(plan.num_moves):
                self._read_and_keep(plan, level, back.take(plan.num_moves, plan.certain))
                back.is_packed()
            else:
                self.move(plan, level)
        else:
            self._fill_parts(plan, level)
        self._flight.collect(work, inserted=True)

    def _may_keep(self, count: int) -> bool:
        return self._waits or self.back.has_room(count)

    def _read_and_keep(self, plan: DevicePlan, level: Level, packet: Packet | None) -> None:
        b, moves = plan.buffers, moves_in(plan.buffers)

        def launch() -> None:
            if packet is not None:
                self.back.pack(packet, b.move_slots, b.leaving, moves, self._memory.host.unwritten)
            self._launch_fill(b, None, level.read_blocks)
            self._start_moves(b)

        place = -1 if packet is None else packet.number
        self.replay(b, ("bulk", level.read_blocks), place, launch)

    def _fill_parts(self, plan: DevicePlan, level: Level) -> None:
        """Move as many rows at once as a packet holds, each part as the CPU has time."""
        b, back, count = plan.buffers, self.back, plan.num_moves
        self._note_leaving(plan)
        # Of one size: a small last part would wait for the next batch, in a packet of its own.
        most = -(-count // -(-count // back.most))
        for first in range(0, count, most):
            span = Span(first, min(first + most, count))
            size = span.end - first
            if not self._may_keep(size):
                self._launch_fill(b, b.leaving, level.fill_blocks, span)
                continue
            packet = back.take(size, plan.certain)
            unwritten = self._memory.host.unwritten
            back.pack(packet, b.move_slots, b.leaving, moves_in(b), unwritten, span)
            back.is_packed()  # so that the copy engine works beside the reads
            self._launch_fill(b, None, level.read_blocks, span)
        self._start_moves(b)

    def rehearse(self, buffers: PlanBuffers) -> None:
        super().rehearse(buffers)
        moves, unwritten = moves_in(buffers), self._memory.host.unwritten
        self.back.rehearse(buffers.move_slots, buffers.leaving, moves, unwritten)
        self._launch_fill(buffers, None, 1)

    def settle(self) -> None:
        self._lanes.join()
        with self._lanes.on("rows"):
            self.back.wait()
        self._lanes.join()

    def wait_to_read(self) -> None:
        # Rows that are to go back are read on their way: waiting for them would take as long as
        # what training has launched.
        self._lanes.join()
        self.back.wait_for_writer()

    def read_leaving(self, ids: Tensor, out: Tensor) -> None:
        self.back.read(ids, out)

    def forget_window(self) -> None:
        self.back.forget()  # what was certain about known batches no longer is


class StagedMover(ZeroCopy):
    """The CPU gathers and writes rows, the copy engine moves them, a kernel inserts them."""

    def __init__(self, *parts: Any, staged: Staged, moves_of: MovesOf) -> None:
        super().__init__(*parts)
        self.staged, self._moves_of = staged, moves_of

    def num_bytes(self) -> dict[str, int]:
        return {"rows on their way": self.staged.num_bytes}

    def fill(self, work: Work) -> None:
        self.staged.wait()  # a row on its way back may be fetched again
        if self._memory.host.is_locked:
            self.move(work.plan, self.level_for(work))
            self.store_changed("rows")
        else:
            self._fill_by_host(work)
        self._flight.collect(work, inserted=True)

    def collect(self, work: Work) -> None:
        if not work.announced:
            self._insert_all()  # batches before it were planned without knowing what it needs
        b, count = work.plan.buffers, work.plan.num_moves
        if count > self.staged.most:
            self.fill(work)
            return
        if count:
            assert b.told is not None
            work.cargo = self.staged.collect(
                Moves(b.move_slots, b.leaving, b.entering), moves_in(b), b.told[:count],
                evicts=work.plan.num_evicted > 0, replay=partial(self.replay, b),
            )  # fmt: skip
        self._flight.collect(work, inserted=not count)

    def exchange(self, work: Work) -> None:
        self.staged.depart(work.cargo)
        self.staged.arrive(work.cargo)

    def write_back(self, work: Work) -> None:
        self.staged.write(work.cargo)

    def insert(self, work: Work) -> None:
        if not work.collected:
            self.fill(work)
            return
        self.staged.insert(work.cargo, partial(self.replay, work.plan.buffers))
        work.cargo = None
        self._flight.insert(work)

    def rehearse(self, buffers: PlanBuffers) -> None:
        super().rehearse(buffers)
        moves = Moves(buffers.move_slots, buffers.leaving, buffers.entering)
        self.staged.rehearse(moves, moves_in(buffers))

    def _insert_all(self) -> None:
        with uninterrupted(), self._lanes.on("rows"):
            for work in list(self._flight.in_transit):
                self.insert(work)

    def _fill_by_host(self, work: Work) -> None:
        """Move rows where the device cannot reach the store: the host waits, gathers, copies."""
        memory, host = self._memory, self._memory.host
        pieces = (each.split(memory.buffer.rows) for each in self._moves_of(work))
        for slots, leaving, entering in zip(*pieces, strict=True):
            goes, comes = leaving >= 0, (entering >= 0) & (entering != leaving)
            host.write(leaving[goes], memory.slots.index_select(0, slots[goes]))
            rows = torch.empty(int(comes.sum()), self._width, device=slots.device)
            host.read(entering[comes], rows)
            memory.slots.index_copy_(0, slots[comes], rows)

    def settle(self) -> None:
        self._lanes.join()
        if self._flight.in_transit:
            self._insert_all()
            self._lanes.join()
        self.staged.wait()

    def wait_to_read(self) -> None:
        self.settle()

    def store_changed(self, lane: Name) -> None:
        """The device has written to the store by itself: what is gathered later waits for that."""
        if self._memory.host.is_locked:
            self.staged.changed(self._lanes.mark(lane))


def moves_in(b: PlanBuffers) -> Tensor:
    """Return how many rows a plan moves, on the device."""
    return b.counts[words.MOVES : words.MOVES + 1]
