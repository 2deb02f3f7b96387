"""Planning on a device where every row is in fast memory: ids are sorted, nothing moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.engine.evict import EVICTIONS
from hotrow.engine.gpu.planner import DevicePlan, DevicePlanner, Expected, refuse_too_many
from hotrow.engine.rules import Hold
from hotrow.kernels.triton import plan as planning

_WINDOW_BYTES = 1 << 26


class AllSlots:
    """Stands for a scratchpad where every row is its own slot."""

    def __init__(self, slots: Tensor) -> None:
        refuse_too_many(slots.shape[0] - 1)
        self.slots = slots
        self.num_rows = self.num_slots = self.null_slot = slots.shape[0] - 1
        self.id_type = torch.int32

    @property
    def has_every_row(self) -> bool:
        return True

    def check(self) -> None:
        assert not self.slots[self.null_slot].any(), "the padding slot was written to"


class AllPlanner(DevicePlanner):
    """Sorts and checks ids; every row is where it belongs."""

    def __init__(self, pad: Any) -> None:
        super().__init__(
            pad,
            hold=Hold(0, 0),
            eviction=EVICTIONS["least-recent"],
            tracks_slots=False,
            window_bytes=_WINDOW_BYTES,  # of batches that another collection knows ahead
        )

    def _prepare_victims(self, *, announced: bool) -> None: ...

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

    def check(self, *, may_halt: bool = False) -> None:
        self.pad.check()
