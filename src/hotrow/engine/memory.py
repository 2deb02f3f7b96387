"""Where the rows of one width are on a machine without a GPU: in slots and in the store.

Knows bytes and maps; not batches. `gpu/memory.py` has the same parts for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

from hotrow.engine.scratchpad import FREE, Scratchpad
from hotrow.engine.settings import Settings
from hotrow.kernels.reference import places, take
from hotrow.store.budget import SLOT_STATE_BYTES, Share
from hotrow.store.ram import Store, host_rows, initialise
from hotrow.support.host_memory import check_fits

ALL_AT_ONCE = 1 << 16  # rows that pass together where no buffer limits them

# Slots, leaving rows and entering rows of a batch that was planned and has not moved.
PlannedMoves = tuple[Tensor, Tensor, Tensor]
InFlight = Callable[[], Iterable[PlannedMoves]]  # newest first


class FixedSlots:
    """Slots that are allocated with their engine, however large batches are."""

    is_open = False  # slots are not allocated yet, and may become more or fewer

    def allocate(self) -> None:
        """Allocate the slots if they are not."""

    def num_bytes(self) -> dict[str, int]:
        """Return what will be taken of fast memory, if slots are not allocated yet."""
        return {}


class Buffer:
    """A bounded buffer through which rows pass on the direct path."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.memory = torch.zeros(rows + 1, width, device=device)
        self._is_free = Lock()  # held by the thread that has the buffer

    @property
    def rows(self) -> int:
        """How many rows pass at once, beside one that reads zero."""
        return len(self.memory) - 1

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    def take(self, count: int) -> Tensor:
        # A single bag may be larger than the buffer, though not larger than the slots.
        if count > len(self.memory):
            return self._new(count)
        return self.memory[:count]

    def _new(self, count: int) -> Tensor:
        return torch.empty(count, self.memory.shape[1], device=self.memory.device)

    @contextmanager
    def own(self, count: int) -> Iterator[Tensor]:
        """Give a buffer that no other thread has: the first one gets this, others a new one."""
        is_first = self._is_free.acquire(blocking=False)
        try:
            yield self.take(count) if is_first else self._new(count)
        finally:
            if is_first:
                self._is_free.release()


class Unbounded(Buffer):
    """New memory for every caller, for rows that are all in fast memory."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__(0, width, device)

    @property
    def rows(self) -> int:
        return ALL_AT_ONCE

    @property
    def num_bytes(self) -> int:
        return 0

    def take(self, count: int) -> Tensor:
        return self._new(count)


def locate(ids: Tensor, slots: Tensor, in_flight: Iterable[PlannedMoves]) -> Tensor:
    """Return the slot that holds each row's newest bytes now, -1 if the store does.

    `slots` is what the maps say, which describe the state after all planned batches. `in_flight`
    has the moves that were planned and not made yet, newest first; they are undone here.
    """
    for move_slots, leaving, entering in in_flight:
        if move_slots.numel():
            slots = torch.where(places(ids, entering) >= 0, FREE, slots)
            place = places(ids, leaving)
            slots = torch.where(place >= 0, move_slots[place], slots)
    return slots


class SlotMemory:
    """Slots, the map from rows to slots, a buffer, and the store behind them."""

    def __init__(self, settings: Settings, share: Share) -> None:
        layout, width, device = settings.layout, settings.width, settings.device
        self.store = Store(host_rows(layout.num_rows, width), untrained=layout.untrained)
        initialise(self.store.rows, layout, settings.state_start, settings.seed)
        self.pad = Scratchpad(
            share.slots, width, layout.num_rows, device, dense_map=share.dense_map
        )
        self.slots = self.pad.slots
        self.buffer = Buffer(share.buffer_rows, width, device)

    @property
    def null_slot(self) -> int:
        return self.pad.null_slot

    def locate(self, ids: Tensor, in_flight: InFlight) -> Tensor:
        return locate(ids, self.pad.map.lookup(ids), in_flight())

    def vectors(
        self, ids: Tensor, is_padding: Tensor | None, dim: int, in_flight: InFlight
    ) -> Tensor:
        """Copy the newest vectors of rows, [n, dim]. Ids may repeat; padding gives zeros."""
        slots = self.locate(ids if is_padding is None else ids.clamp(min=0), in_flight)
        if is_padding is not None:
            slots.masked_fill_(is_padding, self.null_slot)
        is_away = slots == FREE
        away = is_away.nonzero().squeeze(1)
        vectors = take(self.slots, slots.masked_fill_(is_away, self.null_slot), dim)
        if away.numel():
            vectors.index_copy_(0, away, take(self.store.rows, ids.index_select(0, away), dim))
        return vectors

    def resident(self) -> Tensor:
        """Return the row of each slot, as the maps say; -1 if it is free."""
        return self.pad.row_of_slot.clone()

    def read_slots(self, slots: Tensor, out: Tensor) -> None:
        """Copy rows from slots to `out`; -1: leave that row of `out` as it is."""
        here = slots != FREE
        out[here] = self.slots.index_select(0, slots[here])

    def write_slots(self, slots: Tensor, rows: Tensor) -> None:
        """Replace the rows of slots; -1: skip the row."""
        here = slots != FREE
        self.slots.index_copy_(0, slots[here], rows[here])

    def put_slots(self, slots: Tensor, rows: Tensor) -> None:
        """Replace the rows of slots, all of them real."""
        self.slots.index_copy_(0, slots, rows)

    def read_store(self, ids: Tensor, out: Tensor) -> None:
        """Copy rows of the store to `out`; -1: leave that row of `out` as it is."""
        away = ids >= 0
        out[away] = self.store.rows.index_select(0, ids[away])

    def write_store(self, ids: Tensor, rows: Tensor) -> None:
        """Replace rows of the store; -1: skip the row."""
        away = ids >= 0
        self.store.write(ids[away], rows[away])

    def expect_changes(self) -> None:
        """Others will change rows in the store."""

    def num_bytes(self) -> dict[str, int]:
        return {
            "slots": self.slots.nbytes,
            "slot state": self.pad.num_slots * SLOT_STATE_BYTES,
            "row-to-slot map": self.pad.map.num_bytes,
            "buffer": self.buffer.num_bytes,
        }


class AllRows:
    """Every row is in fast memory, in its own slot: the slots are the store."""

    def __init__(self, settings: Settings) -> None:
        layout, width, device = settings.layout, settings.width, settings.device
        if device.type == "cpu":
            check_fits(layout.num_rows, width)
        # The last row stays zero: padding reads it.
        self.slots = torch.zeros(layout.num_rows + 1, width, device=device)
        self.null_slot = layout.num_rows
        self.store = Store(self.slots[:-1], device=device, untrained=layout.untrained)
        self.start(settings)
        self.buffer: Buffer = Unbounded(width, device)

    def start(self, settings: Settings) -> None:
        """Give every row its start."""
        initialise(self.store.rows, settings.layout, settings.state_start, settings.seed)

    def locate(self, ids: Tensor, in_flight: InFlight) -> Tensor:
        return ids

    def vectors(
        self, ids: Tensor, is_padding: Tensor | None, dim: int, in_flight: InFlight
    ) -> Tensor:
        slots = ids if is_padding is None else torch.where(is_padding, self.null_slot, ids)
        return take(self.slots, slots, dim)

    def read_slots(self, slots: Tensor, out: Tensor) -> None:
        self.store.read(slots, out=out)

    def write_slots(self, slots: Tensor, rows: Tensor) -> None:
        self.store.write(slots, rows)

    put_slots = write_slots

    def read_store(self, ids: Tensor, out: Tensor) -> None:
        """Nothing is in the store alone."""

    def write_store(self, ids: Tensor, rows: Tensor) -> None:
        """Nothing is in the store alone."""

    def resident(self) -> Tensor:
        """No slot has to be written back."""
        return torch.empty(0, dtype=torch.int64, device=self.slots.device)

    def expect_changes(self) -> None:
        """Others change rows where they are."""

    def num_bytes(self) -> dict[str, int]:
        return {"rows": self.slots.nbytes}
