"""Turns a batch into sorted ids for rows on the host. Does not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.engine.host.hot import HotRows
from hotrow.engine.host.link import Link
from hotrow.engine.host.plan import HostPlan
from hotrow.engine.settings import Settings
from hotrow.inputs.batch import Batch, keys_of
from hotrow.kernels.triton.segments import segments_of

_INT32_MAX = 2**31 - 1


class Sorter:
    """Sorts the ids of batches in one width group, on the device that they are on."""

    def __init__(self, settings: Settings, link: Link, hot: HotRows) -> None:
        layout, device = settings.layout, settings.device
        self._layout, self._lanes, self._link, self._hot = layout, settings.lanes, link, hot
        self.has_padding = layout.feature_numbers(device).skipped is not None
        self._key_type = torch.int32 if layout.num_rows < _INT32_MAX else torch.int64
        bases = torch.tensor([*layout.bases, layout.num_rows])
        self._bases = bases.to(self._key_type).to(device)

    def keys_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the ids looked up, [L], padding the largest, and whether one is bad."""
        keys, bad = keys_of(batch, self._layout, padding=self._layout.num_rows)
        return keys.to(self._key_type), bad

    def sort(self, keys: Tensor, bad: Tensor) -> HostPlan:
        """Sort ids; facts and unique ids set out for the host."""
        hot, cold, more = self._hot.split(keys)
        segments = segments_of(cold)
        ordered = segments.ids.index_select(0, segments.rank)
        edges = torch.searchsorted(ordered, self._bases)
        padded = cold.numel() - edges[-1:]
        counts = [segments.count, padded, bad.view(1), edges, *more]
        facts = torch.cat([count.long() for count in counts])
        (host_facts, host_ids), _ = self._link.start_to_host(facts, segments.ids.long())
        assert host_facts is not None
        assert host_ids is not None
        return HostPlan(keys, segments, host_facts, host_ids, hot)

    def sort_now(self, ids: Tensor) -> HostPlan:
        """Sort ids that are known to be good, -1 or the largest being padding; waits for facts."""
        keys = torch.where(ids < 0, self._layout.num_rows, ids).to(self._key_type)
        plan = self.sort(keys, torch.zeros((), device=keys.device))
        plan.ready = self._lanes.mark("train")
        plan.learn()
        return plan

    def current(self, plan: HostPlan) -> HostPlan:
        """Return a plan that suits the rows that are hot now."""
        if self._hot.is_current(plan):
            return plan
        self._lanes.hand_over(plan.tensors())
        return self.sort_now(plan.keys)
