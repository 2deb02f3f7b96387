"""One batch as the engine of rows on the host knows it: its lookups sorted, and where they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow.engine.work import DeferredWork
from hotrow.inputs.batch import PADDING
from hotrow.kernels.reference import SortedIds, sort_ids
from hotrow.kernels.triton.segments import Segments
from hotrow.support.streams import Mark

FACTS = 3  # unique ids, padded lookups, whether an id is bad; then each table's first lookup


@dataclass(frozen=True)
class HotLookups:
    """The lookups of rows that are on the device, where there are such rows."""

    slots: Tensor  # [L] int32: the slot of each lookup; the null slot where its row is not hot
    segments: Segments  # these sorted: its ids are slots
    version: int  # of the choice of hot rows


class HostPlan:
    """A batch's lookups sorted by id. How many rows they are is known when `ready` has passed."""

    def __init__(
        self,
        keys: Tensor,
        segments: Segments,
        facts: Tensor,
        host_ids: Tensor,
        hot: HotLookups | None,
    ) -> None:
        """`keys`: all ids; the segments leave out hot rows, which count as padding there."""
        self.keys, self.segments, self.hot = keys, segments, hot  # on the device
        self.facts, self.host_ids = facts, host_ids  # on the host, when `ready` has passed
        self.inverse = torch.empty_like(segments.rank)  # [L] int32: of each lookup, its row here
        self.inverse[segments.order.long()] = segments.rank
        self.ready: Mark | None = None
        self.num_rows = -1  # different ones, without padding; -1: not known yet
        self.rows_cross = False  # or else the bags' vectors do
        self.there: Tensor | None = None  # [num_rows + 1, dim] on the device; the last is zero
        self.there_since = -1  # which updates `there` has seen
        self.host_side: HostSide | None = None
        self.is_trained = True  # False: its rows are read and not updated

    @property
    def num_lookups(self) -> int:
        return self.keys.numel()

    def learn(self) -> bool:
        """Wait for the facts; False if an id is bad."""
        if self.ready is not None:
            self.ready.wait()
        unique, padded, bad = self.facts[:FACTS].tolist()
        self.num_rows = unique - (padded > 0)
        return not bad

    @property
    def ids(self) -> Tensor:
        """The ids of its rows, [num_rows] int64, on the host."""
        return self.host_ids[: self.num_rows]

    def sorted_by(self, order: Tensor, starts: Tensor, inverse: Tensor, ids: Tensor) -> SortedIds:
        """Return the sorted lookups as the reference kernels read them, on either side."""
        real = self.num_lookups - int(self.facts[1])
        starts = starts[: self.num_rows + 1].long()
        return SortedIds(ids, order[:real].long(), starts, inverse.long())

    def tensors(self) -> list[Tensor]:
        """Return all that lies on the device."""
        s = self.segments
        tensors = [self.keys, self.inverse, s.order, s.rank, s.starts, s.ids, s.count]
        if self.hot is not None:
            h = self.hot.segments
            tensors += [self.hot.slots, h.order, h.rank, h.starts, h.ids, h.count]
        return tensors


@dataclass(frozen=True)
class HostSide:
    """What the host needs to pool bags, and to sum their gradients, by itself."""

    ids: SortedIds
    offsets: Tensor | None
    divisor: Tensor | None
    bag_of: Tensor


class HostWork(DeferredWork):
    """One batch's lookups in one width group. `ids` has hot rows and others alike."""

    plan: HostPlan | None
    berth: int  # the input of a captured step that it is in
    number = 0  # in its pass

    def _sort(self) -> SortedIds:
        plan, num_rows = self.plan, self.group.layout.num_rows
        if plan is None or plan.num_rows < 0:
            return super()._sort()
        if plan.hot is not None:
            keys = plan.keys.long()
            return sort_ids(torch.where(keys == num_rows, PADDING, keys), num_rows)
        s = plan.segments
        return plan.sorted_by(s.order, s.starts, plan.inverse, s.ids[: plan.num_rows].long())

    def looked_up(self) -> Tensor:
        if self.plan is None:
            keys: Tensor = self.group.planning.keys_of(self.batch)[0]
            return keys
        return self.plan.keys
