"""What a width group has of a GPU's memory, and of the host's: made, shared out, told.

Knows bytes; not when rows move.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.gpu.all_rows import AllPlanner, AllSlots
from hotrow.engine.gpu.bulk import PACKETS, WriteBack
from hotrow.engine.gpu.fill_forms import FillChoice
from hotrow.engine.gpu.mover_choice import FULL, Effort, choose
from hotrow.engine.gpu.plan_buffers import BufferPool, plan_bytes
from hotrow.engine.gpu.planner import DevicePlan, DevicePlanner, DeviceScratchpad
from hotrow.engine.gpu.staged import Staged
from hotrow.engine.gpu.start import initialise_on_gpu, unwritten_rows
from hotrow.engine.gpu.work import DeviceWork
from hotrow.engine.rows import RowGroup
from hotrow.engine.stages import SPLIT, in_transit_of
from hotrow.engine.strategy import Strategy
from hotrow.inputs.tables import WidthGroup
from hotrow.kernels.triton import start
from hotrow.kernels.triton.plan import count_traffic
from hotrow.store.budget import MOST_PACKED, Share, choose_map
from hotrow.store.changed import ChangedRows
from hotrow.store.pinned import locked_rows
from hotrow.store.ram import Store
from hotrow.store.writer import why_not
from hotrow.support.messages import warn
from hotrow.support.progress import bytes_bar

_SPARE_UNIQUES = 1.25  # times as many different rows as the first batch has
_WRITTEN_PART = 1 / 16  # of the slots' bytes, at most, for a bit per row of the tables


class DeviceMemory(RowGroup):
    """Slots on a GPU, the store on the host, and what plans and moving rows need beside them."""

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
        if self.everything:
            self.why_no_snapshot = "training changes rows where they are, on the device"
            self.pad = AllSlots(self.slots)  # type: ignore[assignment]
            self.planner = AllPlanner(self.pad)
            self._past = 0
        self.bases = torch.tensor([*layout.bases, layout.num_rows], device=self.device)
        self._count_plans()
        self._pool_of_buffers = BufferPool(self.lanes)
        self._started = False  # rows may have slots

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
            warn(found.reason)
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
            pins=self._pins(),
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

    def _changed_rows(self) -> ChangedRows:
        return ChangedRows(self.layout.num_rows, self.device)

    def made_rows(self) -> int:
        return 0 if self.unwritten is None else int(self.unwritten.made)

    def memory(self) -> dict[str, int]:
        noted = {} if self.changed is None else {"which rows changed": self.changed.device_bytes}
        if self.everything:
            return {"rows": self.slots.numel() * 4, **noted}
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
            **noted,
        }


def _why_not_bulk(strategy: Strategy) -> str:
    if not (strategy.eviction.looks_ahead and strategy.overlapped):
        return f"{strategy.name} does not know which rows come again"
    if strategy.refetch:
        # Rows that are fetched anew leave and enter the same slot: one kernel keeps them apart.
        return f"{strategy.name} fetches rows that are there"
    reason = why_not()
    return f"no thread of C can write rows: {reason}" if reason else ""


def _count_plan(bases: Tensor, traffic: Tensor, plan: DevicePlan) -> None:
    b = plan.buffers
    moves = (b.move_slots, b.leaving, b.entering)
    count_traffic(bases, plan.segments(), moves, b.counts, traffic)
