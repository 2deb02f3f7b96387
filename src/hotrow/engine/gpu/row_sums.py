"""Gradients summed by row on a GPU. The host does not wait for the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.row_sums import HostSums, RowSums, TableGrads
from hotrow.engine.scratchpad import FREE
from hotrow.inputs.batch import Lookups
from hotrow.kernels.triton import norms, update
from hotrow.kernels.triton.segments import segments_of
from hotrow.kernels.triton.update import Tables
from hotrow.support.streams import capturing


class DeviceSums(HostSums):
    """Sums of which the device knows how many there are."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._bases: Tensor = group.settings.device_bases

    def of_batch(self, work: Any, x: Lookups, grads: Tensor) -> RowSums:
        if work.plan is None:
            return super().of_batch(work, x, grads)  # a batch in chunks, which waits anyhow
        # A graph is for any batch of its shape.
        most = None if capturing() else work.plan.num_unique
        sums, ids, valid = self._group.arithmetic.row_sums(work, x, grads, most)
        return RowSums(ids, sums, weakref.ref(work), valid)

    def joined(self, parts: Sequence[RowSums]) -> RowSums:
        if len(parts) == 1:
            return parts[0]
        padding = self._layout.num_rows
        every = torch.cat([_padded(part, padding).long() for part in parts])
        segments = segments_of(every)
        # Rows cannot be more than there are, with padding.
        most = min(every.numel(), padding + 1)
        grads = torch.cat([part.grads for part in parts])
        sums = update.sum_by_row(grads, None, None, None, segments, padding=padding, most=most)
        is_there = torch.arange(most, device=every.device) < segments.count
        return RowSums(torch.where(is_there, segments.ids[:most], padding), sums)

    def scaled(self, sums: RowSums, places: Tensor, factors: Tensor, kept: Tensor) -> RowSums:
        tables = places[torch.bucketize(sums.ids.long(), self._bases[1:-1], right=True)]
        valid = kept[tables] if sums.valid is None else sums.valid & kept[tables]
        return replace(sums, grads=sums.grads * factors[tables].unsqueeze(1), valid=valid)

    def write_norms(self, sums: RowSums, out: TableGrads) -> None:
        frozen = self._group.store.frozen
        norms.table_norms(
            sums.ids, sums.grads, sums.valid, self._bases, out.norms, out.marked, out.mark,
            out.places, frozen.bits, frozen.untrained,
        )  # fmt: skip

    def update(self, sums: RowSums, places: Tensor, factors: Tensor, stepped: Tensor) -> None:
        group, layout = self._group, self._layout
        tables = Tables(self._bases, len(layout.tables), layout.num_rows, places, factors, stepped)
        work = None if sums.work is None else _alive(sums.work)
        if work is not None and group.slots_hold(work):
            slots = work.plan.buffers.row_slots[: sums.ids.numel()]
            group.arithmetic.update_sums(group.slots, sums, slots, tables, group.memory.null_slot)
            return
        self._update_found(sums, tables)

    def _update_found(self, sums: RowSums, tables: Tables) -> None:
        """Update rows where they are now: those in slots at once, others through the buffer."""
        group, memory, null = self._group, self._group.memory, self._group.memory.null_slot
        ids = sums.ids.long()
        is_row = ids < self._layout.num_rows
        group.mover.settle()
        slots = group.direct.locate(torch.where(is_row, ids, 0))
        in_slot = torch.where(is_row & (slots != FREE), slots, null)
        group.arithmetic.update_sums(group.slots, sums, in_slot, tables, null)
        if not group.flight.rows_move:
            return
        away = torch.where(is_row & (slots == FREE), ids, FREE)
        if sums.valid is not None:
            away = torch.where(sums.valid, away, FREE)
        group.store.note(away)
        for first in range(0, away.numel(), group.chunk_rows):
            part = slice(first, first + group.chunk_rows)
            mine = away[part]
            rows = memory.buffer.take(mine.numel())
            memory.read_store(mine, rows)
            group.mover.read_leaving(mine, rows)
            places = torch.where(mine == FREE, FREE, torch.arange(len(mine), device=ids.device))
            group.arithmetic.update_sums(rows, _part_of(sums, part), places, tables, FREE)
            memory.write_store(mine, rows)
        group.mover.store_changed("train")


def _part_of(sums: RowSums, part: slice) -> RowSums:
    valid = None if sums.valid is None else sums.valid[part]
    return RowSums(sums.ids[part], sums.grads[part], None, valid)


def _alive(work: Any) -> Any:
    return work() if isinstance(work, weakref.ref) else work


def _padded(sums: RowSums, padding: int) -> Tensor:
    """Return the ids, of which those without a gradient are padding."""
    return sums.ids if sums.valid is None else torch.where(sums.valid, sums.ids, padding)
