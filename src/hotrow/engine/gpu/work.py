"""One batch's lookups in one width group, on a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.gpu.planner import DevicePlan, Expected
from hotrow.engine.split_batch import Place
from hotrow.engine.work import DeferredWork
from hotrow.inputs.batch import (
    Batch,
    Lookups,
    fixed_outline,
    lookups_of,
    spans_of,
)


class DeviceWork(DeferredWork):
    """One batch's lookups in one width group; how many are unique, only the device knows."""

    plan: DevicePlan | None

    def __init__(self, group: Any, batch: Batch) -> None:
        super().__init__(group, batch)
        self.expected: Expected | None = None
        self.confirmed = False
        self.berth: int | None = None  # the plan's buffers are to be the same for each
        self.gives_back: Any = None  # those, when the plan has gone
        self.spans = () if batch.offsets is None else spans_of(batch, group.layout)
        # Of the plan: padding fills it up, so that plans of other batches are launched alike.
        self.size = self.num_lookups
        if batch.offsets is not None and (group.planning.is_pooled or batch.varies):
            self.size = group.planning.room(self.size)

    @property
    def num_lookups(self) -> int:
        if self.batch.offsets is None:
            return self.batch.num_samples * len(self.group.layout.features)
        return sum(high - low for low, high in self.spans)

    def count_distinct(self) -> int:
        """Different rows that are looked up, some twice if features share a table; may wait."""
        values = self.batch.values
        if self.batch.offsets is None:
            parts = [values[:, feature.column] for feature in self.group.layout.features]
        else:
            parts = [values[low:high] for low, high in self.spans]
        return sum(each.unique().numel() for each in parts)

    @property
    def is_filled_up(self) -> bool:
        """Whether padding stands behind the lookups in the plan."""
        return self.size > self.num_lookups

    def _outline(self) -> Lookups:
        if not self.is_fixed:
            return super()._outline()
        assert self.plan is not None
        slots = self.plan.buffers.lookup_slots[: self.size]
        columns = self.group.planning.columns(self.batch.keys)
        is_real = slots != self.group.memory.null_slot
        return fixed_outline(self.batch, self.group.layout, columns, self.size, is_real)

    @property
    def slots(self) -> Tensor:
        """Of each lookup, by the plan; padding may stand behind."""
        assert self.plan is not None
        return self.plan.buffers.lookup_slots[: self.plan.lookups]

    def looked_up(self) -> Tensor:
        """The ids of the lookups, as they were when they were planned."""
        if self.plan is None:
            # What is kept may be older than the user's tensor, which may have changed since.
            found = self.ids
            padding = found.ids.new_tensor([self.group.layout.num_rows])
            return torch.cat([found.ids, padding]).index_select(0, found.inverse)
        segments = self.plan.segments()
        ids = torch.empty(self.plan.lookups, dtype=torch.int64, device=segments.ids.device)
        ids[segments.order.long()] = segments.ids[segments.rank.long()].long()
        return ids[: self.num_lookups]

    def with_ids(self, x: Lookups) -> Lookups:
        return replace(lookups_of(self.batch, self.group.layout), weights=x.weights)


class DevicePart(DeviceWork):
    """Some samples of a planned batch: read by its plan, updated with it."""

    whole: DeviceWork
    place: Place

    def __init__(self, whole: DeviceWork, batch: Batch, place: Place) -> None:
        super().__init__(whole.group, batch)
        self.whole, self.place = whole, place
        self.plan, self.collected, self.inserted = whole.plan, whole.collected, whole.inserted

    @property
    def slots(self) -> Tensor:
        return self.whole.slots[self.place.lookups]

    def looked_up(self) -> Tensor:
        return self.whole.looked_up()[self.place.lookups]
