"""Gradients summed by row on a GPU. The host does not wait for the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.row_sums import HostSums, RowSums, Scaling, TableGrads
from hotrow.engine.scratchpad import FREE
from hotrow.inputs.batch import Lookups
from hotrow.kernels.triton import norms
from hotrow.kernels.triton.merge import Pairs, merge
from hotrow.kernels.triton.update import Tables
from hotrow.support.late_flag import LateCount
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

    def joined(self, parts: Sequence[RowSums], scaling: Scaling | None = None) -> RowSums:
        tables = None if scaling is None else self._tables(scaling)
        joined, others = parts[0], parts[1:]
        if tables is not None and not others:
            others = [RowSums(joined.ids[:0], joined.grads[:0])]
        for part in others:
            first, second = _pairs(_trimmed(joined)), _pairs(part)
            pairs, count = merge(first, second, self._layout.num_rows, tables)
            late = LateCount(count, joined.count, part.ids.numel())
            joined = RowSums(pairs.ids, pairs.grads, count=late)
            tables = None  # it is done
        return joined

    def _tables(self, scaling: Scaling) -> Tables:
        layout = self._layout
        places, factors, kept = scaling.places, scaling.factors, scaling.kept
        return Tables(self._bases, len(layout.tables), layout.num_rows, places, factors, kept)

    def write_norms(self, sums: RowSums, out: TableGrads) -> None:
        frozen = self._group.store.frozen
        norms.table_norms(
            sums.ids, sums.grads, sums.valid, self._bases, out.norms, out.marked, out.mark,
            out.places, frozen.bits, frozen.untrained,
        )  # fmt: skip

    def update(self, sums: RowSums, scaling: Scaling) -> None:
        group, tables = self._group, self._tables(scaling)
        work = None if sums.work is None else _alive(sums.work)
        if work is not None and group.slots_hold(work):
            slots = work.plan.buffers.row_slots[: sums.ids.numel()]
            group.arithmetic.update_sums(group.slots, sums, slots, tables, group.memory.null_slot)
            return
        self._update_found(sums, tables)

    def _update_found(self, sums: RowSums, tables: Tables) -> None:
        """Update rows where they are now, in slots or in the store."""
        group, null = self._group, self._group.memory.null_slot
        ids = sums.ids.long()
        is_row = ids < self._layout.num_rows
        if sums.valid is not None:
            is_row &= sums.valid
        group.mover.settle()
        slots = group.direct.locate(torch.where(is_row, ids, 0))
        is_there = slots != FREE
        in_slot = torch.where(is_row & is_there, slots, null)
        group.arithmetic.update_sums(group.slots, sums, in_slot, tables, null)
        if group.flight.rows_move:
            self._update_store(sums, torch.where(is_row & ~is_there, ids, FREE), tables)

    def _update_store(self, sums: RowSums, away: Tensor, tables: Tables) -> None:
        """Update the rows of `away`, -1 for none, which the store has."""
        group, memory = self._group, self._group.memory
        group.store.note(away)
        rows = memory.host.to_change(away)
        if rows is not None:  # kernels change rows where they lie
            group.arithmetic.update_sums(rows, sums, away, tables, FREE)
        else:
            for first in range(0, away.numel(), group.chunk_rows):
                part = slice(first, first + group.chunk_rows)
                mine = away[part]
                rows = memory.buffer.take(mine.numel())
                memory.read_store(mine, rows)
                every = torch.arange(len(mine), device=mine.device)
                places = torch.where(mine == FREE, FREE, every)
                group.arithmetic.update_sums(rows, _part_of(sums, part), places, tables, FREE)
                memory.write_store(mine, rows)
        group.mover.store_changed("train")


def _part_of(sums: RowSums, part: slice) -> RowSums:
    valid = None if sums.valid is None else sums.valid[part]
    return RowSums(sums.ids[part], sums.grads[part], None, valid)


def _alive(work: Any) -> Any:
    return work() if isinstance(work, weakref.ref) else work


def _pairs(sums: RowSums) -> Pairs:
    return Pairs(sums.ids, sums.grads, sums.valid)


def _trimmed(sums: RowSums) -> RowSums:
    """Drop padding behind the rows, as far as the host knows by now how many there are."""
    count = None if sums.count is None else sums.count.at_most()
    if count is None or count >= sums.ids.numel():
        return sums
    return RowSums(sums.ids[:count], sums.grads[:count])
