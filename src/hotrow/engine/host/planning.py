"""Planning for rows that stay on the host: ids are sorted a batch ahead, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.engine.counters import Counters
from hotrow.engine.gpu.id_check import IdCheck, feature_facts
from hotrow.engine.host.hot import HotRows
from hotrow.engine.host.link import Link
from hotrow.engine.host.plan import FACTS, HostPlan, HostWork
from hotrow.engine.planning import AllRowsPlanning, Outcome
from hotrow.engine.settings import Settings
from hotrow.engine.work import AtRest, Work
from hotrow.inputs.batch import Batch, keys_of, lookups_of
from hotrow.kernels.triton.segments import segments_of
from hotrow.support.streams import Mark, capturing

_REMEMBERED = 8  # batches that a lookup may ask for again


class LargestBytes:
    """The largest batch's bytes so far, by part."""

    def __init__(self) -> None:
        self.parts: dict[str, int] = {}

    def note(self, part: str, *tensors: Tensor) -> None:
        size = sum(tensor.nbytes for tensor in tensors)
        self.parts[part] = max(self.parts.get(part, 0), size)


class HostPlanning(AllRowsPlanning):
    """Sorts the ids of batches in one width group. Nothing is decided, and no row moves."""

    remembered_batches = _REMEMBERED

    def __init__(
        self, settings: Settings, link: Link, hot: HotRows, counters: Counters, peak: LargestBytes
    ) -> None:
        super().__init__(settings, AtRest(), counters)
        layout = settings.layout
        self._link, self._hot, self._peak = link, hot, peak
        self._lanes, self._device = settings.lanes, settings.device
        self.has_padding = layout.feature_numbers(settings.device).skipped is not None
        self._key_type = torch.int32 if layout.num_rows < 2**31 - 1 else torch.int64
        self._id_check = IdCheck(feature_facts(layout).to(settings.device), layout.num_rows)
        self._bases = torch.tensor([*layout.bases, layout.num_rows])
        self._device_bases = self._bases.to(self._key_type).to(settings.device)

    def input_device(self, device: torch.device | None) -> torch.device | None:
        return device

    def copies_to_compare(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return () if self._link.exists else super().copies_to_compare(tensors)

    def work(self, group: Any, batch: Batch) -> Work:
        return HostWork(group, batch)

    def part(self, work: Work, batch: Batch, part: Batch, first: int) -> Work:
        raise NotImplementedError("batches in parts need rows in slots")

    def plan(self, work: Work) -> bool:
        """Sort a batch's ids; how many rows they are is known at `confirm`."""
        assert isinstance(work, HostWork)
        work.plan = self.sort(*self.keys_of(work.batch))
        return True

    def mark_planned(self, work: Work, mark: Mark) -> None:
        if work.plan is not None and work.plan.ready is None:
            work.plan.ready = mark

    def confirm(self, work: Work) -> Outcome:
        """Learn how many rows a batch has. Raises on a bad id."""
        assert isinstance(work, HostWork)
        plan = work.plan
        if plan is not None and plan.num_rows < 0:
            if not plan.learn():
                work.plan = None
                lookups_of(work.batch, self._layout)  # raises, and says which
                raise AssertionError("a plan found a bad id, but the host found none")
            self._count(plan)
        return Outcome.PLANNED

    def planned(self, work: HostWork) -> HostPlan:
        """Return a batch's plan, made now if there is none, for the rows that are hot now."""
        if work.plan is None:
            self.plan(work)
            self.mark_planned(work, self._lanes.mark("train"))
        self.confirm(work)
        assert work.plan is not None
        work.plan = self.current(work.plan)
        return work.plan

    # -- sorting, which does not wait for the device -------------------------------------

    def keys_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the ids looked up, [L], padding the largest, and whether one is bad."""
        keys, bad = keys_of(batch, self._layout, padding=self._layout.num_rows)
        return keys.to(self._key_type), bad

    def sort(self, keys: Tensor, bad: Tensor) -> HostPlan:
        """Sort ids; facts and unique ids set out for the host."""
        hot, cold, more = self._hot.split(keys)
        segments = segments_of(cold)
        ordered = segments.ids.index_select(0, segments.rank)
        edges = torch.searchsorted(ordered, self._device_bases)
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

    def _count(self, plan: HostPlan) -> None:
        """Count a batch: every row that is not hot is read, and written, across the link."""
        edges = plan.facts[FACTS : FACTS + len(self._bases)]
        lookups, cold = edges.diff(), torch.searchsorted(plan.ids, self._bases).diff()
        hot_lookups, hot_rows = self._hot.count(plan)
        counts = torch.stack([lookups + hot_lookups, cold + hot_rows, cold, cold], dim=1)
        self._counters.by_table += counts
        self._counters.note(counts.sum(0).tolist())
        self._peak.note("sorted ids", *plan.tensors())

    def compare(self, work: Work) -> None:
        assert isinstance(work, HostWork)
        batch, plan = work.batch, work.plan
        if not self._link.exists or plan is None or not batch.given or capturing():
            return
        places = None
        if batch.offsets is not None:
            names = [batch.keys.index(feature.key) for feature in self._layout.features]
            places = torch.tensor(names).to(self._device, non_blocking=True)
        self._id_check.launch(batch.given, places, batch.num_samples, plan.keys, None, work.number)

    def note_number(self, work: Work, number: int) -> None:
        assert isinstance(work, HostWork)
        work.number = number

    def take_changed(self) -> int | None:
        return self._id_check.take()
