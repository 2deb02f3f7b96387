"""Memory that plans take of the budget: slots give way to it before any row has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.embedding.row_groups import RowGroups
from hotrow.engine.work import Work
from hotrow.inputs.room import Room
from hotrow.support.messages import few


class PlanMemory:
    """Makes room for the plans of a collection's batches."""

    def __init__(self, rows: RowGroups) -> None:
        self._rows = rows
        self._buffers: dict[Any, Tensor] = {}
        self._jagged_buffer: Tensor | None = None
        self._room = Room()

    def reserve(
        self, features: Sequence[str], batch_size: int, lookups: Mapping[str, int] | None
    ) -> None:
        """Make room for batches of so many samples, with so many lookups each."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 sample, not {batch_size}")
        counts = dict.fromkeys(features, 1) | dict(lookups or {})
        if unknown := counts.keys() - set(features):
            raise ValueError(f"no feature {min(unknown)!r}; there are {few(map(repr, features))}")
        layouts = [group.layout for group in self._rows.lookup_groups]
        sizes = [batch_size * sum(counts[key] for key in layout.keys) for layout in layouts]
        with self._rows.lock.writing():
            self._rows.make_room(sizes)
        for group, size in zip(self._rows.owned_groups, sizes, strict=True):
            group.expected_rows = size

    def make_room(self, first: Sequence[Work]) -> None:
        """Let slots give way to the plans of batches like the first, while that is possible."""
        works: list[Any] = [work.moving for work in first]
        if self._rows.can_resize and len(works) == len(self._rows.owned_groups):
            # Where sizes change, larger ones will come, and `Room` rounds them up.
            spare = 0.0 if all(work.batch.has_one_size() for work in works) else 1 / 3
            sizes = [work.group.plan_room.size_for(work, spare=spare) for work in works]
            self._rows.make_room(sizes)

    def allocate_slots(self, first: Sequence[Work]) -> None:
        """Allocate slots if this is the first batch, which says how much plans take."""
        self.make_room(first)
        self._rows.allocate_slots()  # of each width: an error may have left one without

    def staged(self, values: Tensor) -> Tensor:
        """Copy ids to the device, to one buffer per shape; they are read before the next copy."""
        rows = self._rows
        if values.device == rows.device:
            rows.lanes.keep_for("plan", [values])
            return values.contiguous()
        if values.dim() == 1:  # jagged: one buffer for any number of ids
            buffer = self._jagged_buffer
            if buffer is None or len(buffer) < len(values):
                size = self._room(len(values))
                buffer = torch.zeros(size, dtype=values.dtype, device=rows.device)
                self._jagged_buffer = buffer
            buffer[: len(values)].copy_(values, non_blocking=True)
            return buffer
        key = (values.shape, values.dtype)
        if key not in self._buffers:
            if len(self._buffers) >= 8:  # shapes that change all the time
                return values.to(rows.device, non_blocking=True)
            self._buffers[key] = torch.empty(*key[:1], dtype=key[1], device=rows.device)
        return self._buffers[key].copy_(values, non_blocking=True)
