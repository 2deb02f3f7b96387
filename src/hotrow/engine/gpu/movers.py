"""How a GPU moves rows between the store and its slots: by itself, in bulk, or in stages.

A mover runs what plans say. The schedule decides in which lane a stage runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.gpu.bulk import WriteBack
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
        return self.effort.level if work.announced else LEVELS[FULL]

    def move(self, plan: DevicePlan, level: Level) -> None:
        """Launch the moves of a plan."""
        b, unwritten = plan.buffers, self._memory.host.unwritten
        slots, store = self._memory.slots, self._memory.store
        if store.is_watched and plan.num_evicted:
            # A snapshot has to know rows before the device writes them, so the host waits here:
            # for the plan, in its own lane, and not for what trains.
            with self._lanes.on("plan"):
                store.will_write(b.leaving[: plan.num_moves])

        def launch() -> None:
            fill.fill(
                slots, store.rows, b.move_slots, b.leaving, b.entering, moves_in(b),
                level.fill_blocks, written=None if unwritten is None else unwritten.written,
            )  # fmt: skip
            if unwritten is not None:
                start.start_moves(slots, b.move_slots, b.entering, moves_in(b), unwritten)

        self.replay(b, "fill", level.fill_blocks, launch)

    def replay(self, b: PlanBuffers, kind: Any, place: int, launch: Callable[[], None]) -> None:
        """Launch, or replay what was captured for the same buffers."""
        self._recorder.run((kind, self._width, place, b.number), launch)

    def note_wait(self, share: float) -> None:
        self.effort.note(share)


class Bulk(ZeroCopy):
    """Entering rows are read by a kernel. Leaving rows are kept for a while and go back together,
    by the copy engine and the CPU."""

    def __init__(self, *parts: Any, back: WriteBack) -> None:
        super().__init__(*parts)
        self.back = back

    def num_bytes(self) -> dict[str, int]:
        return {"rows on their way": self.back.num_bytes}

    def fill(self, work: Work) -> None:
        plan, back, level = work.plan, self.back, self.level_for(work)
        if work.announced:
            back.let_read(plan.number)
        else:
            back.wait()  # its rows may be among those that were kept
        if not level.in_bulk or (
            plan.num_evicted and not back.is_worth(plan.num_moves, plan.certain - plan.number)
        ):
            self.move(plan, level)
        else:
            self._read_and_keep(plan, level)
        self._flight.collect(work, inserted=True)

    def _read_and_keep(self, plan: DevicePlan, level: Level) -> None:
        b, unwritten, back = plan.buffers, self._memory.host.unwritten, self.back
        packet = back.take(plan.num_moves, plan.certain) if plan.num_evicted else None

        def launch() -> None:
            slots, moves = self._memory.slots, moves_in(b)
            if packet is not None:
                back.pack(packet, b.move_slots, b.leaving, moves, unwritten)
            fill.fill(
                slots, self._memory.store.rows, b.move_slots, None, b.entering, moves,
                level.read_blocks, written=None if unwritten is None else unwritten.written,
            )  # fmt: skip
            if unwritten is not None:
                start.start_moves(slots, b.move_slots, b.entering, moves, unwritten)

        place = -1 if packet is None else packet.number
        self.replay(b, ("bulk", level.read_blocks), place, launch)

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
