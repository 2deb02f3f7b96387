"""Gradients summed by row on a GPU. The host launches, and waits for no number."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.row_sums import HostSums, RowSums
from hotrow.engine.scratchpad import FREE
from hotrow.inputs.batch import Lookups
from hotrow.kernels.triton import norms, update
from hotrow.kernels.triton.segments import segments_of
from hotrow.support.streams import capturing


class DeviceSums(HostSums):
    """Sums of which the device knows how many there are: `valid` says so."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._bases: Tensor = group.settings.device_bases

    def of_batch(self, work: Any, x: Lookups, grads: Tensor) -> RowSums:
        if work.plan is None:
            return super().of_batch(work, x, grads)  # a batch in chunks, which waits anyhow
        plan = work.plan
        # A graph is for any batch of its shape.
        most = None if capturing() else plan.num_unique
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
        ids = torch.where(is_there, segments.ids[:most], padding)
        return RowSums(ids, sums, None, ids < padding)

    def scaled(self, sums: RowSums, factors: Tensor, kept: Tensor) -> RowSums:
        tables = self._tables_of(sums)
        valid = kept[tables] if sums.valid is None else sums.valid & kept[tables]
        grads = sums.grads * factors[tables].unsqueeze(1)
        return replace(sums, grads=grads, valid=valid)

    def _tables_of(self, sums: RowSums) -> Tensor:
        inner = self._bases[1:-1]
        return torch.bucketize(sums.ids.long(), inner, right=True)

    def norms(self, sums: RowSums) -> Tensor:
        valid = self._moving(sums)
        return norms.table_norms(sums.ids, sums.grads, valid, self._bases)

    def _moving(self, sums: RowSums) -> Tensor | None:
        """Return which rows a step changes; None: all."""
        frozen = self._group.store.frozen
        if frozen.bits is None and frozen.untrained is None:
            return sums.valid
        moves: Tensor = frozen.moving(sums.ids)
        return moves if sums.valid is None else sums.valid & moves

    def update(self, sums: RowSums, factors: Tensor, stepped: Tensor) -> None:
        group = self._group
        tables = self._tables_of(sums)
        moves, valid = stepped[tables], self._moving(sums)
        moves = moves if valid is None else moves & valid
        factors = factors[tables]
        work = None if sums.work is None else _alive(sums.work)
        if work is not None and group.slots_hold(work):
            slots = work.plan.buffers.row_slots[: sums.ids.numel()]
            group.arithmetic.update_sums(sums.ids, sums.grads, factors, slots, moves)
            return
        self._update_found(sums, factors, moves)

    def _update_found(self, sums: RowSums, factors: Tensor, moves: Tensor) -> None:
        """Update rows where they are now: those in slots at once, others through the buffer."""
        group, memory = self._group, self._group.memory
        ids = torch.where(moves, sums.ids.long(), 0)
        group.mover.settle()
        slots = group.direct.locate(ids)
        is_away = moves & (slots == FREE)
        in_slot = moves & (slots != FREE)
        group.arithmetic.update_sums(sums.ids, sums.grads, factors, slots, in_slot)
        if not group.flight.rows_move:
            return
        away = torch.where(is_away, ids, FREE)
        group.store.note(away)
        for first in range(0, away.numel(), group.chunk_rows):
            part = slice(first, first + group.chunk_rows)
            mine = away[part]
            rows = memory.buffer.take(mine.numel())
            memory.read_store(mine, rows)
            group.mover.read_leaving(mine, rows)
            group.arithmetic.update_buffer(
                rows, sums.ids[part], sums.grads[part], factors[part], is_away[part]
            )
            memory.write_store(mine, rows)
        group.mover.store_changed("train")


def _alive(work: Any) -> Any:
    return work() if isinstance(work, weakref.ref) else work


def _padded(sums: RowSums, padding: int) -> Tensor:
    """Return the ids, of which those without a gradient are padding."""
    return sums.ids if sums.valid is None else torch.where(sums.valid, sums.ids, padding)
