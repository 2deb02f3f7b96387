"""The direct path: rows are found where they are now, and pass through a bounded buffer.

It needs no plan and changes no map, hold or counter. Evaluation, batches larger than the slots,
late gradients, checkpoints and replaced weights use it. Bits are those of the planned path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotrow.engine.idle import IdleRows
from hotrow.engine.memory import ALL_AT_ONCE, InFlight
from hotrow.engine.scratchpad import FREE
from hotrow.engine.settings import Settings
from hotrow.inputs.batch import Lookups
from hotrow.inputs.tables import WidthGroup
from hotrow.kernels import reference
from hotrow.kernels.reference import SortedIds, sort_ids
from hotrow.support.interrupts import uninterrupted
from hotrow.support.streams import synchronize

# Lookups that are read together, and their ids sorted if a row is to be read only once.
ReadPart = tuple[Lookups, SortedIds | None]


class DirectPath:
    """Reads and replaces the rows of one width, wherever they are."""

    def __init__(
        self,
        settings: Settings,
        memory: Any,
        mover: Any,
        arithmetic: Any,
        in_flight: InFlight,
    ) -> None:
        """`in_flight`: the moves of batches that were planned and have not moved, newest first."""
        self._layout, self._device = settings.layout, settings.device
        self._memory, self._mover, self._arithmetic = memory, mover, arithmetic
        self._in_flight = in_flight

    @property
    def chunk_rows(self) -> int:
        """Rows that pass through the buffer at once."""
        return int(self._memory.buffer.rows)

    def locate(self, ids: Tensor) -> Tensor:
        """Return the slot that holds each row's newest bytes now, -1 if the store does."""
        slots: Tensor = self._memory.locate(ids, self._in_flight)
        return slots

    # -- rows --------------------------------------------------------------------------

    def gather(self, ids: Tensor, out: Tensor) -> Tensor:
        """Copy the newest bytes of rows, each given once, into `out`."""
        if out.device != self._device:
            rows = torch.empty(out.shape, device=self._device)
            return out.copy_(self.gather(ids.to(self._device), rows))
        self._mover.wait_to_read()
        slots = self.locate(ids)
        absent = torch.where(slots == FREE, ids, FREE)
        self._memory.read_store(absent, out)
        self._mover.read_leaving(absent, out)
        self._memory.read_slots(slots, out)
        return out

    def scatter(self, ids: Tensor, rows: Tensor) -> None:
        """Replace rows, each given once, wherever they are now."""
        ids, rows = ids.to(self._device), rows.to(self._device)
        store = self._memory.store
        store.note_changed(ids)
        self._mover.settle()
        store.note(ids)
        slots = self.locate(ids)
        with uninterrupted():
            self._memory.write_slots(slots, rows)
            self._memory.write_store(torch.where(slots == FREE, ids, FREE), rows)
            self._mover.store_changed("train")

    def flush(self) -> None:
        """Bring the store up to date."""
        self._mover.settle()
        rows = self._memory.resident()
        for slots, leaving, _ in self._in_flight() if rows.numel() else ():
            rows[slots] = leaving
        taken = (rows != FREE).nonzero().squeeze(1)
        for part in taken.split(self.chunk_rows):
            self._memory.write_store(rows[part], self._memory.slots.index_select(0, part))
            self._mover.store_changed("train")
        if self._device.type == "cuda":
            synchronize(self._device)

    def load(self, slots: Tensor, ids: Tensor) -> None:
        """Copy rows from the store into slots."""
        for part in torch.arange(ids.numel(), device=ids.device).split(self.chunk_rows):
            rows = self._memory.buffer.take(part.numel())
            self._memory.read_store(ids[part], rows)
            self._memory.slots.index_copy_(0, slots[part], rows)

    # -- vectors -----------------------------------------------------------------------

    def read(self, x: Lookups) -> Tensor:
        """Return one vector per bag, [bags, dim]."""
        return self.read_parts(self.parts_of(x))

    def parts_of(self, x: Lookups) -> list[ReadPart]:
        """Split bags into parts whose rows fit the buffer. Reads no row."""
        return [*self.sorted_parts(x)]

    def read_parts(self, parts: list[ReadPart]) -> Tensor:
        """Return one vector per bag, [bags, dim], of what `parts_of` gave. Threads may share it."""
        with_ids = [(x, ids) for x, ids in parts if ids is not None]
        pool = self._arithmetic.pool_rows
        return self.joined([pool(rows, ids, x) for x, ids, rows in self.pass_through(with_ids)])

    def joined(self, pieces: list[Tensor]) -> Tensor:
        if len(pieces) == 1:
            return pieces[0]
        dim = self._layout.dim
        return torch.cat(pieces) if pieces else torch.zeros(0, dim, device=self._device)

    def sorted_parts(self, x: Lookups) -> list[tuple[Lookups, SortedIds]]:
        """Split bags as `parts_of` does, and sort the ids of every part."""
        return [(part, self.sort_part(part)) for part in chunks(x, self.chunk_rows)]

    def sort_part(self, part: Lookups) -> SortedIds:
        """Sort the ids of a part. Raises if a single bag has more rows than fit."""
        ids = sort_ids(part.ids, self._layout.num_rows)
        count, most = ids.ids.numel(), max(self.chunk_rows, self._memory.null_slot)
        if count > most:
            raise ValueError(_bag_too_large(part, count, most, self._layout))
        return ids

    def pass_through(
        self, parts: list[tuple[Lookups, SortedIds]]
    ) -> Iterator[tuple[Lookups, SortedIds, Tensor]]:
        """Yield the lookups, ids and rows of each part. A row of zeros, which padding reads, stands
        behind the rows. Rows last until the next part."""
        if not parts:
            return
        largest = max(ids.ids.numel() for _, ids in parts) + 1
        with self._memory.buffer.own(largest) as buffer:
            for part, ids in parts:
                count = ids.ids.numel()
                rows = buffer[: count + 1]
                self.gather(ids.ids, out=rows[:count])
                rows[count].zero_()
                yield part, ids, rows

    def weight_grads(self, x: Lookups, grads: Tensor) -> Tensor:
        """Return the gradients of per-sample weights, from the rows as they are now, [L]."""
        pieces, first = [], 0
        for part, ids, rows in self.pass_through(self.sorted_parts(x)):
            mine = grads[first : first + part.num_bags]
            pieces.append(self._arithmetic.weight_grads_of(rows, ids, part, mine))
            first += part.num_bags
        return torch.cat(pieces) if pieces else grads.new_zeros(0)


class HostDirectPath(DirectPath):
    """The direct path on a CPU. Small parts are read without sorting their ids: copying a row once
    for every lookup takes less time."""

    def __init__(self, settings: Settings, *parts: Any, idle: IdleRows | None = None) -> None:
        super().__init__(settings, *parts)
        self._width, self._idle = settings.width, idle
        self._dim, self._has_padding = settings.dim, bool(settings.layout.skipped)

    def parts_of(self, x: Lookups) -> list[ReadPart]:
        if self._idle is not None:  # catching a row up takes longer than to sort its id
            return [*self.sorted_parts(x)]
        if x.offsets is None:  # the vectors are the result, and pass through no buffer
            return [(part, None) for part in chunks(x, ALL_AT_ONCE)]
        limit = self.chunk_rows
        return [
            (part, self.sort_part(part) if part.ids.numel() > limit else None)
            for part in chunks(x, limit)
        ]

    def read_parts(self, parts: list[ReadPart]) -> Tensor:
        return self.joined([self._read_part(x, ids) for x, ids in parts])

    def _read_part(self, x: Lookups, ids: SortedIds | None) -> Tensor:
        if ids is not None:
            vectors = functional.pad(self._vectors_of(ids.ids), (0, 0, 0, 1))  # padding reads 0
            return reference.pool(vectors, ids.inverse, x.offsets, x.weights, x.divisor)
        vectors = self._vectors_of(x.ids)
        if x.offsets is None:
            return vectors
        every = torch.arange(x.ids.numel(), device=self._device)
        return reference.pool(vectors, every, x.offsets, x.weights, x.divisor)

    def _vectors_of(self, ids: Tensor) -> Tensor:
        """Copy the newest vectors of rows, [n, dim]. Ids may repeat; padding gives zeros."""
        self._mover.settle()
        is_padding = ids < 0 if self._has_padding else None
        width = self._dim if self._idle is None else self._width
        rows: Tensor = self._memory.vectors(ids, is_padding, width, self._in_flight)
        return rows if self._idle is None else self._idle.now(rows, ids)


def chunks(x: Lookups, limit: int) -> Iterator[Lookups]:
    """Yield whole bags, at most `limit` lookups at a time, or a single bag with more."""
    if x.num_bags and x.ids.numel() <= limit:
        yield x
        return
    if x.offsets is None:
        for part in x.ids.split(limit) if x.num_bags else ():
            yield replace(x, ids=part, bags_per_feature=(part.numel(),))
        return
    low = 0
    while low < x.num_bags:
        end = int(torch.searchsorted(x.offsets, x.offsets[low] + limit, right=True)) - 1
        end = max(low + 1, end)
        lookups = slice(int(x.offsets[low]), int(x.offsets[end]))
        yield Lookups(
            ids=x.ids[lookups],
            offsets=x.offsets[low : end + 1] - x.offsets[low],
            weights=None if x.weights is None else x.weights[lookups],
            divisor=None if x.divisor is None else x.divisor[low:end],
            bags_per_feature=(end - low,),
            by_sample=x.by_sample,
        )
        low = end


def _bag_too_large(bag: Lookups, size: int, limit: int, layout: WidthGroup) -> str:
    table = layout.tables[int(layout.table_of(bag.ids.max()))]
    return (
        f"one sample looks up {size:,} different rows of table {table.name!r}, but the budget has "
        f"room for {limit:,} rows of this width at once; a budget {size / limit:.1f} times as "
        "large is the smallest that works"
    )
