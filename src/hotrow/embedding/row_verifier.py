"""Checks, on a sample, that rows which were not written keep their bits.

Knows what engines promise about their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.row_groups import Group
from hotrow.engine.rows import RowGroup
from hotrow.engine.rules import PINNED
from hotrow.engine.scratchpad import FREE
from hotrow.store.changed import TouchedRows
from hotrow.support.messages import few
from hotrow.support.streams import synchronize

_SAMPLE = 4096  # rows of each width in slow memory, and as many slots
_IN_FLIGHT = 8  # newest plans, of which some may not be trained yet


class CorruptRows(RuntimeError):
    """Rows, or the maps that say where they are, are not what they were left as."""

    def __init__(self, message: str, since: int) -> None:
        super().__init__(message)
        self.since = since  # the last step after which all rows were right


@dataclass(frozen=True)
class _Slots:
    """A sample of slots, and what they held."""

    group: RowGroup
    slots: Tensor
    ids: Tensor  # on the host, as what follows
    last_use: Tensor
    rows: Tensor


@dataclass(frozen=True)
class _Sample:
    group: Group  # one of those that have the store
    ids: Tensor
    rows: Tensor
    slots: tuple[_Slots, ...]


class RowVerifier:
    """Verifies the rows of a collection, from when it is made.

    A row in slow memory may change when a write was announced (`Store.will_write`). A row in an
    unpinned slot may change when the slot gets another row, when a batch that uses it is planned,
    or when the row is replaced the direct way. Rows that static-hybrid, or all-fast on a GPU, keep
    in device memory may change at any time: they are not compared.
    """

    def __init__(self, collection: EmbeddingBagCollection, *, step: int = 0) -> None:
        self._collection, self._since = collection, step
        self._draw = torch.Generator().manual_seed(0)  # leaves the global generator alone
        with self._collection.lock.writing():
            self._come_to_rest()
            self._samples = self._take()

    def verify(self, step: int) -> int:
        """Compare the sample and take another one; return how many unwritten rows were compared.

        Raises CorruptRows if bits or maps are wrong.
        """
        with self._collection.lock.writing():
            self._come_to_rest()
            try:
                self._collection.check()
            except AssertionError as error:
                raise self._corrupt(f"the maps of slots are wrong ({error})", step) from error
            compared = sum(self._compare(sample, step) for sample in self._samples)
            self._since = step
            self._samples = self._take()
        return compared

    def end(self) -> None:
        for sample in self._samples:
            sample.group.store.touched = None

    def _come_to_rest(self) -> None:
        """Wait until all announced writes are done."""
        for group in self._collection.every_group:
            group.settle()
        if self._collection.device.type == "cuda":
            synchronize(self._collection.device)

    # -- samples -----------------------------------------------------------------------

    def _take(self) -> list[_Sample]:
        by_store: dict[int, list[Group]] = {}
        for group in self._collection.every_group:
            by_store.setdefault(id(group.store), []).append(group)
        return [self._take_from(groups) for groups in by_store.values()]

    def _take_from(self, groups: list[Group]) -> _Sample:
        group = groups[0]
        store, num_rows = group.store, group.layout.num_rows
        ids = torch.empty(0, dtype=torch.int64)
        if store.why_no_snapshot is None:
            ids = torch.randint(num_rows, (_SAMPLE,), generator=self._draw).unique()
            if num_rows <= _SAMPLE:
                ids = torch.arange(num_rows)
        slots = tuple(
            self._slots_of(group)
            for group in groups
            if isinstance(group, RowGroup) and group.flight.rows_move
        )
        every = torch.cat([ids, *(sample.ids for sample in slots)]).unique()
        store.touched = TouchedRows(every, group.device)
        return _Sample(group, ids, store.rows[ids.to(store.rows.device)].cpu(), slots)

    def _slots_of(self, group: RowGroup) -> _Slots:
        planner: Any = group.planner
        last_use, rows = planner.last_use.cpu(), group.memory.pad.row_of_slot.cpu()
        free = (rows == FREE) | (last_use == PINNED)
        newest = int(last_use[~free].max()) if not free.all() else 0
        slots = (~free & (last_use < newest - _IN_FLIGHT)).nonzero().squeeze(1)
        slots = slots[torch.randperm(len(slots), generator=self._draw)[:_SAMPLE]]
        held = group.slots[slots.to(group.device)].cpu()
        return _Slots(group, slots, rows[slots].long(), last_use[slots], held)

    # -- comparison --------------------------------------------------------------------

    def _compare(self, sample: _Sample, step: int) -> int:
        store, group = sample.group.store, sample.group
        touched = store.touched
        if touched is None:  # all rows were replaced
            return 0
        rows = store.rows[sample.ids.to(store.rows.device)].cpu()
        unwritten = ~touched.among(sample.ids)
        self._refuse(group, sample.ids, unwritten, sample.rows, rows, "slow memory", step)
        compared = int(unwritten.sum())
        for held in sample.slots:
            group, planner = held.group, cast(Any, held.group.planner)
            slots = held.slots.to(group.device)
            unwritten = ~touched.among(held.ids)
            unwritten &= group.memory.pad.row_of_slot[slots].cpu() == held.ids
            unwritten &= planner.last_use[slots].cpu() == held.last_use
            rows = group.slots[slots].cpu()
            self._refuse(group, held.ids, unwritten, held.rows, rows, "its slot", step)
            compared += int(unwritten.sum())
        return compared

    def _refuse(
        self, group: Group, ids: Tensor, unwritten: Tensor, before: Tensor, now: Tensor,
        where: str, step: int,
    ) -> None:  # fmt: skip
        differs = (before.view(torch.int32) != now.view(torch.int32)).any(1) & unwritten
        if not differs.any():
            return
        named = few((group.layout.describe(row) for row in ids[differs].tolist()), most=3)
        raise self._corrupt(
            f"{int(differs.sum()):,} of {int(unwritten.sum()):,} rows have other bits in {where}, "
            f"but were not written: {named}",
            step,
        )

    def _corrupt(self, what: str, step: int) -> CorruptRows:
        return CorruptRows(
            f"at step {step:,} {what}. They were right after step {self._since:,}; checkpoints "
            "saved since then may hold wrong rows. Either this machine's memory fails, or hotrow "
            "is wrong: test the memory, and report this",
            self._since,
        )
