"""Builds the engine of a GPU: slots in its memory, the store in page-locked host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.capture import InGraph
from hotrow.engine.counters import Counters
from hotrow.engine.direct import DirectPath, ReadPart
from hotrow.engine.gpu.arithmetic import DeviceArithmetic
from hotrow.engine.gpu.bulk import PACKETS, WriteBack
from hotrow.engine.gpu.memory import DeviceAllRows, DeviceMemory, HostStore
from hotrow.engine.gpu.mover_choice import FULL, Effort
from hotrow.engine.gpu.movers import Bulk, DeviceNoMoves, StagedMover, ZeroCopy
from hotrow.engine.gpu.plan_buffers import BufferPool
from hotrow.engine.gpu.plan_room import PlanRoom
from hotrow.engine.gpu.planner import DevicePlanner
from hotrow.engine.gpu.planning import AllPlanner, DeviceAllRowsPlanning, DevicePlanning, Inputs
from hotrow.engine.gpu.row_sums import DeviceSums
from hotrow.engine.gpu.scratchpad import DeviceScratchpad, FutureScratchpad, id_type_of
from hotrow.engine.gpu.staged import Staged
from hotrow.engine.memory import Buffer
from hotrow.engine.mover import NoMoves
from hotrow.engine.rows import RowGroup
from hotrow.engine.settings import Settings
from hotrow.engine.uploads import TableScalars
from hotrow.engine.work import AtRest, Flight
from hotrow.inputs.batch import Lookups
from hotrow.inputs.tables import WidthGroup
from hotrow.kernels.dense_rules import DenseRule
from hotrow.store.budget import Share

# Memory, planning, mover, arithmetic and direct path, as `RowGroup.use` takes them.
Parts = tuple[DeviceMemory, DevicePlanning, NoMoves, DeviceArithmetic, DirectPath]


_MOVES_IDLE = (
    "{} moves rows that no batch looks up (idle='decay'), which a GPU's engine does not do yet; "
    "with idle='frozen' they rest"
)


def gpu_rows(layout: WidthGroup, **options: Any) -> RowGroup:
    """Build the engine of a GPU; `options` are those of `Settings`."""
    settings = Settings(layout, **options)
    if isinstance(settings.optimizer.rule, DenseRule):
        raise ValueError(_MOVES_IDLE.format(type(settings.optimizer.rule).__name__))
    return _all_rows(settings) if settings.share is None else _slots(settings, settings.share)


def _counters(settings: Settings) -> Counters:
    width = settings.width
    return Counters(settings.layout, settings.device, width=width, moved_width=width)


def _all_rows(settings: Settings) -> RowGroup:
    counters = _counters(settings)
    group = RowGroup(settings, AtRest(), counters)
    memory, mover = DeviceAllRows(settings), DeviceNoMoves(settings.lanes)
    scalars = TableScalars(settings)
    arithmetic = DeviceArithmetic(
        settings, memory.slots, memory.null_slot, memory.store, scalars
    )  # fmt: skip
    inputs = Inputs(settings)
    planning = DeviceAllRowsPlanning(
        settings, inputs, AllPlanner(memory.pad), group.flight, counters,
        BufferPool(settings.lanes, memory.pad.id_type),
    )  # fmt: skip
    direct = AllRowsDirectPath(settings, memory, mover, arithmetic, planning.moves_in_flight)
    group.use(memory, planning, mover, arithmetic, direct)
    group.capture = InGraph(scalars, inputs.room, memory.store)
    group.sums_kind = DeviceSums
    return group


class AllRowsDirectPath(DirectPath):
    """The direct path where every row is in its own slot: ids are slots."""

    def parts_of(self, x: Lookups) -> list[ReadPart]:
        return [(x, None)]

    def read_parts(self, parts: list[ReadPart]) -> Tensor:
        self._mover.wait_to_read()
        null, slots = self._memory.null_slot, self._memory.slots
        pool = self._arithmetic.pool
        return self.joined(
            [pool(slots, torch.where(x.ids < 0, null, x.ids).int(), x) for x, _ in parts]
        )


def _slots(settings: Settings, share: Share) -> RowGroup:
    host = HostStore(settings, share)
    settings = replace(settings, strategy=host.strategy)
    counters = _counters(settings)
    if host.unwritten is not None:
        unwritten = host.unwritten
        counters.made_rows = lambda: int(unwritten.made)
    group = RowGroup(settings, Flight(settings.strategy.hold.past), counters)
    builder = Builder(settings, host, group)
    group.use(*builder.without_slots())
    group.capture = InGraph(builder.scalars, builder.inputs.room, host.store)
    group.fill_choice = host.fill_choice
    group.sums_kind = DeviceSums
    group.plan_room = PlanRoom(group, builder.with_slots, host.share, builder.packet_bytes)
    return group


class Builder:
    """Builds the parts of an engine: without slots, and with them when the first batch is known."""

    def __init__(self, settings: Settings, host: HostStore, group: RowGroup) -> None:
        self._settings, self._host = settings, host
        self._flight, self._counters = group.flight, group.counters
        self.scalars, self.inputs = TableScalars(settings), Inputs(settings)
        # Where the host gathers entering rows, plans tell it which they are.
        self._plan_buffers = BufferPool(
            settings.lanes, id_type_of(settings.layout.num_rows), tells=host.packets > 0
        )
        self._buffer = Buffer(host.share.buffer_rows, settings.width, settings.device)

    def without_slots(self) -> Parts:
        """Build parts for which all rows are in the store, and nothing is planned."""
        settings = self._settings
        pad = FutureScratchpad(settings.width, settings.layout.num_rows, settings.device)
        memory, planning = self._planning(pad)
        return self._parts(memory, planning, DeviceNoMoves(settings.lanes))

    def with_slots(self, share: Share) -> Parts:
        """Build the parts around so many slots."""
        settings = self._settings
        pad = DeviceScratchpad(
            share.slots, settings.width, settings.layout.num_rows, settings.device,
            dense_map=share.dense_map,
        )  # fmt: skip
        memory, planning = self._planning(pad)
        return self._parts(memory, planning, self._mover(memory, planning))

    def _planning(self, pad: DeviceScratchpad) -> tuple[DeviceMemory, DevicePlanning]:
        settings = self._settings
        planner = DevicePlanner(
            pad,
            hold=settings.strategy.hold,
            eviction=settings.strategy.eviction,
            refetch=settings.strategy.refetch,
            pins=settings.pins(),
            window_bytes=settings.window_bytes,
            tuning=settings.tuning,
        )
        planning = DevicePlanning(
            settings, self.inputs, planner, self._flight, self._counters, self._plan_buffers,
        )  # fmt: skip
        return DeviceMemory(self._host, pad, self._buffer), planning

    def _parts(self, memory: DeviceMemory, planning: DevicePlanning, mover: NoMoves) -> Parts:
        arithmetic = DeviceArithmetic(
            self._settings, memory.slots, memory.null_slot, memory.store, self.scalars
        )
        direct = DirectPath(self._settings, memory, mover, arithmetic, planning.moves_in_flight)
        return memory, planning, mover, arithmetic, direct

    def _mover(self, memory: DeviceMemory, planning: DevicePlanning) -> ZeroCopy:
        settings, host, lanes = self._settings, self._host, self._settings.lanes
        # Where training waits for rows anyhow, there is nothing beside them.
        effort = Effort() if settings.strategy.overlapped else Effort(FULL, is_fixed=True)
        parts = (settings, memory, self._flight, planning.planner.recorder, effort)
        most = self._packet_rows(memory.pad.num_slots)
        if host.fill_choice.form == "bulk":
            back = WriteBack(
                host.store, memory.slots, most=most, lanes=lanes,
                least_certain=settings.tuning.least_certain,
                places=settings.tuning.places_on_host, writer=settings.writer,
            )  # fmt: skip
            return Bulk(*parts, back=back, waits=settings.fill == "bulk")
        if host.fill_choice.form == "staged":
            staged = Staged(
                host.store, memory.slots, most=most, packets=host.packets,
                id_type=memory.pad.id_type, lanes=lanes, worker=settings.worker,
            )  # fmt: skip
            return StagedMover(*parts, staged=staged, moves_of=planning.moves_of)
        return ZeroCopy(*parts)

    def _packet_rows(self, slots: int) -> int:
        return max(1, self._host.share.packet_rows or min(slots, self._settings.tuning.most_packed))

    def packet_bytes(self, slots: int) -> int:
        """Return what rows on their way take of the device, beside so many slots."""
        row = 4 * self._settings.width
        form = self._host.fill_choice.form
        per_row = {"bulk": PACKETS * (row + 8), "staged": self._host.packets * row}.get(form, 0)
        return self._packet_rows(slots) * per_row
