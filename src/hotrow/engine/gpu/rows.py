"""Builds the engine of a GPU: slots in its memory, the store in page-locked host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.counters import Counters
from hotrow.engine.direct import DirectPath, ReadPart
from hotrow.engine.flight import AtRest, Flight
from hotrow.engine.gpu.all_rows import AllPlanner
from hotrow.engine.gpu.arithmetic import DeviceArithmetic, Scalars
from hotrow.engine.gpu.bulk import WriteBack
from hotrow.engine.gpu.memory import DeviceAllRows, DeviceMemory, HostStore
from hotrow.engine.gpu.mover_choice import FULL, Effort
from hotrow.engine.gpu.movers import Bulk, DeviceNoMoves, StagedMover, ZeroCopy
from hotrow.engine.gpu.plan_buffers import BufferPool
from hotrow.engine.gpu.plan_room import PlanRoom
from hotrow.engine.gpu.planner import DevicePlanner
from hotrow.engine.gpu.planning import DeviceAllRowsPlanning, DevicePlanning, Inputs
from hotrow.engine.gpu.staged import Staged
from hotrow.engine.rows import Parts, RowGroup
from hotrow.engine.settings import Settings
from hotrow.inputs.batch import Lookups
from hotrow.inputs.tables import WidthGroup
from hotrow.store.budget import Share


def gpu_rows(layout: WidthGroup, **options: Any) -> RowGroup:
    """Build the engine of a GPU; `options` are those of `Settings`."""
    settings = Settings(layout, **options)
    return _all_rows(settings) if settings.share is None else _slots(settings, settings.share)


def _counters(settings: Settings) -> Counters:
    width = settings.width
    return Counters(settings.layout, settings.device, width=width, moved_width=width)


def _all_rows(settings: Settings) -> RowGroup:
    counters = _counters(settings)
    group = RowGroup(settings, AtRest(), counters)
    memory, mover = DeviceAllRows(settings), DeviceNoMoves(settings.lanes)
    scalars = Scalars(settings)
    arithmetic = DeviceArithmetic(
        settings, memory.slots, memory.null_slot, memory.store, scalars
    )  # fmt: skip
    planning = DeviceAllRowsPlanning(
        settings, Inputs(settings), AllPlanner(memory.pad), group.flight, counters,
        BufferPool(settings.lanes), scalars.bases, staged=False,
    )  # fmt: skip
    direct = AllRowsDirectPath(settings, memory, mover, arithmetic, planning.moves_in_flight)
    group.use(Parts(memory, planning, mover, arithmetic, direct))
    group.can_be_captured = True
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
    lasting = Lasting(settings, host, group)
    group.use(lasting.build(host.share))
    group.can_be_captured = True
    group.fill_choice = host.fill_choice
    group.plan_room = PlanRoom(group, lasting.build, host.share)
    return group


class Lasting:
    """What stays when slots are made anew, and how the parts are built around it."""

    def __init__(self, settings: Settings, host: HostStore, group: RowGroup) -> None:
        self._settings, self._host = settings, host
        self._flight, self._counters = group.flight, group.counters
        self._scalars, self._inputs = Scalars(settings), Inputs(settings)
        self._buffers = BufferPool(settings.lanes)
        # Where training waits for rows anyhow, there is nothing beside them.
        self._effort = Effort() if settings.strategy.overlapped else Effort(FULL, is_fixed=True)

    def build(self, share: Share) -> Parts:
        """Build the parts around so many slots."""
        settings, host, counters = self._settings, self._host, self._counters
        memory = DeviceMemory(settings, host, share)
        planner = DevicePlanner(
            memory.pad,
            hold=settings.strategy.hold,
            eviction=settings.strategy.eviction,
            refetch=settings.strategy.refetch,
            pins=settings.pins(),
            window_bytes=settings.window_bytes,
            tuning=settings.tuning,
        )
        arithmetic = DeviceArithmetic(
            settings, memory.slots, memory.null_slot, memory.store, self._scalars
        )  # fmt: skip
        planning = DevicePlanning(
            settings, self._inputs, planner, self._flight, counters, self._buffers,
            self._scalars.bases, staged=host.packets > 0,
        )  # fmt: skip
        mover = self._mover(memory, planner, planning, share)
        direct = DirectPath(settings, memory, mover, arithmetic, planning.moves_in_flight)
        return Parts(memory, planning, mover, arithmetic, direct)

    def _mover(
        self, memory: DeviceMemory, planner: DevicePlanner, planning: DevicePlanning, share: Share
    ) -> ZeroCopy:
        settings, host, lanes = self._settings, self._host, self._settings.lanes
        parts = (settings, memory, self._flight, planner.recorder, self._effort)
        most = max(1, share.packet_rows or min(share.slots, settings.tuning.most_packed))
        if host.fill_choice.form == "bulk":
            back = WriteBack(
                host.store, memory.slots, most=most, lanes=lanes,
                least_certain=settings.tuning.least_certain, writer=settings.writer,
            )  # fmt: skip
            return Bulk(*parts, back=back)
        if host.fill_choice.form == "staged":
            staged = Staged(
                host.store, memory.slots, most=most, packets=host.packets,
                id_type=memory.pad.id_type, lanes=lanes, worker=settings.worker,
            )  # fmt: skip
            return StagedMover(*parts, staged=staged, moves_of=planning.moves_of)
        return ZeroCopy(*parts)
