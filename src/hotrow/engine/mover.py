"""How rows move between the store and the slots on a CPU: they are copied.

`gpu/movers.py` has the ways of a GPU. Every mover has the same face. Knows bytes; decides nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.engine.work import Flight, Work
from hotrow.kernels import reference
from hotrow.support.clock import named
from hotrow.support.interrupts import uninterrupted


class NoMoves:
    """The mover of rows that never move."""

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of the device's memory by part."""
        return {}

    @property
    def is_settled(self) -> bool:
        """Whether rows can be found without moving any: then several threads may read."""
        return True

    def fill(self, work: Work) -> None:
        """Write leaving rows back and fetch entering rows, at once."""

    def collect(self, work: Work) -> None:
        """Read leaving rows from their slots and entering rows from the store."""

    def exchange(self, work: Work) -> None:
        """Let rows that were collected change sides."""

    def write_back(self, work: Work) -> None:
        """Put leaving rows that were collected into the store."""

    def insert(self, work: Work) -> None:
        """Put entering rows into their slots, and leaving rows into the store if they are not."""

    def settle(self) -> None:
        """Finish what is between collect and insert: every row is in its slot or in the store."""

    def wait_to_read(self) -> None:
        """Prepare a read: every row is in its slot, in the store, or in `read_leaving`."""

    def read_leaving(self, ids: Tensor, out: Tensor) -> None:
        """Copy rows that have left their slots and are not in the store yet; -1 is none."""

    def store_changed(self, lane: Any) -> None:
        """The store was written to by work that was launched in a lane."""

    def forget_window(self) -> None:
        """Other batches come than those that were known."""

    def rehearse(self, buffers: Any) -> None:
        """Launch what a fill may launch, for a plan that moves nothing."""

    def note_wait(self, share: float, step: float) -> None:
        """Training has waited for rows, for this part of a step of so many seconds."""


class CopyMover(NoMoves):
    """Copies rows: all at once, or in two stages with a buffer between them."""

    def __init__(self, memory: Any, flight: Flight) -> None:
        self._memory, self._flight = memory, flight

    def fill(self, work: Work) -> None:
        moves, store = work.plan.moves, self._memory.store
        store.will_write(moves.leaving)
        reference.fill(self._memory.slots, store.rows, moves)
        self._flight.collect(work, inserted=True)

    def collect(self, work: Work) -> None:
        moves, slots, store = work.plan.moves, self._memory.slots, self._memory.store
        # Rows travel through the buffer, half of it for each direction. More than it holds, as in
        # a first batch, move at once.
        if moves.slots.numel() > self._memory.buffer.rows // 2:
            self.fill(work)
            return
        outgoing = slots.index_select(0, moves.slots[moves.leaving >= 0])
        incoming = store.read(moves.entering, out=torch.empty(len(moves.entering), slots.shape[1]))
        # A row that is fetched anew has its newest bytes in the slot until it is written back.
        again = moves.entering == moves.leaving
        incoming[again] = slots[moves.slots[again]]
        work.cargo = incoming, outgoing
        self._flight.collect(work, inserted=False)

    def write_back(self, work: Work) -> None:
        leaving, (incoming, outgoing) = work.plan.moves.leaving, work.cargo
        if outgoing is not None:
            with named("write-back"):
                self._memory.store.write(leaving[leaving >= 0], outgoing)
            work.cargo = incoming, None

    def insert(self, work: Work) -> None:
        self.write_back(work)
        incoming, _ = work.cargo
        self._memory.slots.index_copy_(0, work.plan.moves.slots, incoming)
        work.cargo = None
        self._flight.insert(work)

    @property
    def is_settled(self) -> bool:
        return not self._flight.in_transit

    def settle(self) -> None:
        if self._flight.in_transit:
            with uninterrupted():
                for work in list(self._flight.in_transit):
                    self.insert(work)

    def wait_to_read(self) -> None:
        self.settle()
