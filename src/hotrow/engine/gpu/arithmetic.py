"""What is computed from rows on a GPU: pooling, gradients, and optimizer steps, by kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hotrow.engine.arithmetic import HostPooling
from hotrow.engine.gpu.work import DeviceWork
from hotrow.engine.row_sums import RowSums
from hotrow.engine.settings import Settings
from hotrow.engine.uploads import TableScalars
from hotrow.inputs.batch import Lookups, lookups_of
from hotrow.kernels.reference import SortedIds
from hotrow.kernels.triton import lookup, start, update
from hotrow.kernels.triton.segments import Segments, segments_of
from hotrow.store.ram import Store


class DevicePooling(HostPooling):
    """The same by kernels, without waiting for the device."""

    def pool(self, vectors: Tensor, ids: SortedIds, x: Lookups) -> Tensor:
        index, dim = ids.inverse.int(), vectors.shape[1]
        return lookup.pool(vectors, index, x.offsets, x.weights, x.divisor, dim, self._dtype)

    def row_grads(self, ids: SortedIds, x: Lookups, grads: Tensor) -> Tensor:
        rank = ids.inverse[ids.order]
        count = torch.full((1,), ids.ids.numel(), dtype=torch.int32, device=grads.device)
        segments = Segments(ids.order.int(), rank.int(), ids.starts.int(), ids.ids, count)
        return update.sum_by_row(grads, x.bag_of().int(), x.weights, x.divisor, segments)


class DeviceArithmetic:
    """Computes from rows in slots, or in a buffer of the direct path."""

    def __init__(
        self, settings: Settings, slots: Tensor, null_slot: int, store: Store, scalars: TableScalars
    ) -> None:
        self._slots, self._null_slot, self._store = slots, null_slot, store
        self._layout, self._dim = settings.layout, settings.dim
        self._rule, self._dtype = settings.optimizer.rule, settings.output_dtype
        self._scalars, self._bases = scalars, settings.device_bases[:-1]

    def pool(self, rows: Tensor, slots: Tensor, x: Lookups) -> Tensor:
        """Return one vector per bag, [bags, dim]; `slots` has the row of each lookup."""
        return lookup.pool(rows, slots, x.offsets, x.weights, x.divisor, self._dim, self._dtype)

    def pool_planned(self, work: DeviceWork, x: Lookups) -> Tensor:
        return self.pool(self._slots, work.slots, x)

    def pool_rows(self, rows: Tensor, ids: SortedIds, x: Lookups) -> Tensor:
        """Return one vector per bag from the rows of `ids`, which a row of zeros follows."""
        return self.pool(rows, ids.inverse.int(), x)

    def weight_grads(self, work: DeviceWork, x: Lookups, grads: Tensor) -> Tensor:
        count = work.num_lookups if x.size is None else x.size
        slots = work.slots[:count]
        weight_grads = lookup.weight_grads(self._slots, slots, work.bag_of, grads, self._dim)
        if x.size is None:
            return weight_grads
        assert x.offsets is not None
        is_padding = torch.arange(x.size, device=slots.device) >= x.offsets[-1]
        return weight_grads.masked_fill_(is_padding, 0.0)

    def weight_grads_of(self, rows: Tensor, ids: SortedIds, x: Lookups, grads: Tensor) -> Tensor:
        return lookup.weight_grads(rows, ids.inverse.int(), x.bag_of(), grads, self._dim)

    def row_grads(self, work: DeviceWork, x: Lookups, grads: Tensor) -> Tensor:
        """Return the gradient of each different row, [U, dim]; waits for the device."""
        segments, ids = self._segments(work), work.ids.ids
        terms = (grads, work.bag_of, x.weights, x.divisor)
        sums = update.sum_by_row(*terms, segments, padding=self._layout.num_rows)
        return sums[: ids.numel()]

    def _segments(self, work: DeviceWork) -> Segments:
        if work.plan is not None:
            segments: Segments = work.plan.segments()
            return segments
        ids = lookups_of(work.batch, self._layout).ids
        return segments_of(torch.where(ids < 0, self._layout.num_rows, ids))

    def update_planned(self, work: DeviceWork, x: Lookups, grads: Tensor) -> bool:
        """Sum gradients and update rows in their slots, without waiting for the device."""
        plan, store = work.plan, self._store
        assert plan is not None
        scalars, bases = self._scalars.now(self._bases)
        b, segments = plan.buffers, plan.segments()
        if store.changed is not None:
            start.note_written(store.changed.there, segments.ids, segments.count)
        row_slots, weights = b.row_slots[: plan.lookups], x.weights
        if x.used is not None:
            row_slots, weights = self._only_used(row_slots, segments, x)
        update.update_slots(
            self._slots, row_slots, segments, grads, work.bag_of, weights, x.divisor,
            self._rule, scalars, bases, self._null_slot, self._dim,
            store.frozen.bits, store.frozen.untrained,
        )  # fmt: skip
        return True

    def _only_used(
        self, row_slots: Tensor, segments: Segments, x: Lookups
    ) -> tuple[Tensor, Tensor | None]:
        """Return the slots of unique rows, the null slot for rows without a gradient, and weights.

        All shapes are fixed and no value is read back, so that a captured step can do it.
        """
        used = x.used_lookups()
        weights = x.weights
        if weights is not None:
            weights = weights.masked_fill(~used, 0.0)  # 0 times NaN would be NaN
        size = segments.order.numel()  # padding may stand behind the lookups
        in_order = functional.pad(used, (0, size - used.numel()))[segments.order.long()]
        before = functional.pad(in_order.cumsum(0), (1, 0))
        starts = segments.starts.long().clamp(0, size)  # behind the last row they are not written
        has_grad = before[starts].diff() > 0
        return torch.where(has_grad, row_slots, self._null_slot), weights

    def row_sums(
        self, work: DeviceWork, x: Lookups, grads: Tensor, most: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of a planned batch's different rows, their ids, and which are valid:
        [n, dim], [n] and [n]. `most` is n; None: as many as a batch of this shape may have."""
        plan = work.plan
        assert plan is not None
        segments, weights, valid = plan.segments(), x.weights, None
        count = segments.ids.numel() if most is None else most
        if x.used is not None:
            slots = plan.buffers.row_slots[: plan.lookups]
            slots, weights = self._only_used(slots, segments, x)
            valid = slots[:count] != self._null_slot
        ids = segments.ids[:count]
        padding = self._layout.num_rows
        if most is None:
            is_there = torch.arange(count, device=ids.device) < segments.count
            ids = torch.where(is_there, ids, padding)
        else:
            ids = ids.clone()  # another plan will use the buffers
        has_padding = bool(self._layout.skipped) or work.is_filled_up
        terms = (grads, work.bag_of, weights, x.divisor)
        sums = update.sum_by_row(
            *terms, segments, padding=padding if has_padding else None, most=count
        )
        return sums, ids, valid

    def update_sums(
        self, rows: Tensor, sums: RowSums, index: Tensor, tables: update.Tables, null_slot: int
    ) -> None:
        """Make one optimizer step on rows, from gradients that are scaled by table."""
        store = self._store
        if store.changed is not None:
            start.note_written(store.changed.there, torch.where(index == null_slot, -1, sums.ids))
        scalars, bases = self._scalars.now(self._bases)
        update.update_rows(
            rows, index, sums.ids, None, sums.grads, self._rule, scalars, bases, self._dim,
            null_slot, store.frozen.bits, store.frozen.untrained, tables, sums.valid,
        )  # fmt: skip

    def pooling(self, output_dtype: torch.dtype) -> DevicePooling:
        return DevicePooling(output_dtype)

    def slots_of(self, work: DeviceWork, ids: Tensor) -> Tensor | None:
        return None

    def step(self, rows: Tensor, ids: Tensor, grads: Tensor) -> None:
        scalars, bases = self._scalars.now(self._bases)
        update.update_rows(
            rows, None, ids, None, grads, self._rule, scalars, bases, self._dim
        )  # fmt: skip
