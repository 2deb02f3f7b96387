"""Turns a batch into sorted ids for rows on the host. Does not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.engine.host.hot import HotRows
from hotrow.engine.host.link import Link
from hotrow.engine.host.plan import HostPlan
from hotrow.engine.settings import Settings
from hotrow.inputs.batch import Batch, spans_of
from hotrow.kernels.triton.segments import segments_of

_INT32_MAX = 2**31 - 1


class Sorter:
    """Sorts the ids of batches in one width group, on the device that they are on."""

    def __init__(self, settings: Settings, link: Link, hot: HotRows) -> None:
        layout, device = settings.layout, settings.device
        self._layout, self._lanes, self._link, self._hot = layout, settings.lanes, link, hot
        facts = []
        for feature in layout.features:
            table = layout.tables[feature.table]
            padding = -1 if table.skipped_idx is None else table.skipped_idx
            base = layout.bases[feature.table]
            facts.append([base, table.num_embeddings, padding, feature.column])
        self.has_padding = any(padding >= 0 for _, _, padding, _ in facts)
        # Base, limit, padding and column of each feature, [4, F]. Laid out here: on the device a
        # kernel would do it, for which no lane waits.
        self.features = torch.tensor(facts).t().contiguous().to(device)
        self._key_type = torch.int32 if layout.num_rows < _INT32_MAX else torch.int64
        bases = torch.tensor([*layout.bases, layout.num_rows])
        self._bases = bases.to(self._key_type).to(device)

    def keys_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the ids looked up, [L], padding the largest, and whether one is bad."""
        values = batch.values
        features = self.features.to(values.device)
        if batch.offsets is None:
            if len(self._layout.features) < len(batch.keys):
                values = values.index_select(1, features[3])
        else:
            spans = spans_of(batch, self._layout)
            values = torch.cat([values[low:high] for low, high in spans])
            lengths = torch.tensor([high - low for low, high in spans])
            lengths = lengths.to(values.device, non_blocking=True)
            features = torch.repeat_interleave(features, lengths, 1, output_size=len(values))
        base, limit, padding, _ = features
        bad = ((values < 0) | (values >= limit)).any()
        keys = values + base
        if self.has_padding:
            keys = torch.where(values == padding, self._layout.num_rows, keys)
        return keys.flatten().to(self._key_type), bad

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
