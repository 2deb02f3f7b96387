"""Rows that nobody has written must have the bits that they had: a sample of them, looked at now
and then. Knows what engines promise about their rows; not when it is asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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

SAMPLE = 4096  # rows of each width in slow memory, and as many slots
_IN_FLIGHT = 8  # newest plans, of which some may not be trained yet


class CorruptRows(RuntimeError):
    """Rows, or the maps that say where they are, are not what they were left as."""

    def __init__(self, message: str, since: int) -> None:
        super().__init__(message)
        self.since = since  # the step after which all was found right


@dataclass(frozen=True)
class _Slots:
    """Some slots, and what they held."""

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


class Shadow:
    """Of collections, from when this is made.

    In slow memory a row may change when somebody has said that he writes it (`Store.will_write`).
    In a slot, unpinned, it may change when the slot has got another row, when a batch was planned
    that uses it, or when the row was replaced the direct way. Rows that static-hybrid, or all-fast
    on a GPU, keep in the device's memory may change at any time: of them nothing is promised.
    """

    def __init__(
        self, collections: Iterable[EmbeddingBagCollection], *, step: int = 0, sample: int = SAMPLE
    ) -> None:
        self._collections, self._sample, self._since = list(collections), sample, step
        self._draw = torch.Generator().manual_seed(0)  # nobody else's numbers change
        self._come_to_rest()
        self._samples = [each for c in self._collections for each in self._take(c)]

    def verify(self, step: int) -> int:
        """Compare, and take another sample. A CorruptRows says what is wrong; otherwise the number
        of rows that nobody had written, and that were compared."""
        self._come_to_rest()
        for each in self._collections:
            try:
                each.check()
            except AssertionError as error:
                raise self._corrupt(f"the maps of slots are wrong ({error})", step) from error
        compared = sum(self._compare(each, step) for each in self._samples)
        self._since = step
        self._samples = [each for c in self._collections for each in self._take(c)]
        return compared

    def end(self) -> None:
        for each in self._samples:
            each.group.store.touched = None

    def _come_to_rest(self) -> None:
        """No write that was announced is still to be done."""
        for each in self._collections:
            for group in each.every_group:
                group.settle()
            if each.device.type == "cuda":
                synchronize(each.device)

    # -- samples -----------------------------------------------------------------------

    def _take(self, collection: EmbeddingBagCollection) -> list[_Sample]:
        by_store: dict[int, list[Group]] = {}
        for group in collection.every_group:
            by_store.setdefault(id(group.store), []).append(group)
        return [self._take_from(groups) for groups in by_store.values()]

    def _take_from(self, groups: list[Group]) -> _Sample:
        group = groups[0]
        store, num_rows = group.store, group.layout.num_rows
        ids = torch.empty(0, dtype=torch.int64)
        if store.why_no_snapshot is None:
            ids = torch.randint(num_rows, (self._sample,), generator=self._draw).unique()
            if num_rows <= self._sample:
                ids = torch.arange(num_rows)
        slots = tuple(
            self._slots_of(each)
            for each in groups
            if isinstance(each, RowGroup) and each.flight.rows_move
        )
        every = torch.cat([ids, *(each.ids for each in slots)]).unique()
        store.touched = TouchedRows(every, group.device)
        return _Sample(group, ids, store.rows[ids.to(store.rows.device)].cpu(), slots)

    def _slots_of(self, group: RowGroup) -> _Slots:
        planner: Any = group.planner
        last_use, rows = planner.last_use.cpu(), group.memory.pad.row_of_slot.cpu()
        free = (rows == FREE) | (last_use == PINNED)
        newest = int(last_use[~free].max()) if not free.all() else 0
        slots = (~free & (last_use < newest - _IN_FLIGHT)).nonzero().squeeze(1)
        slots = slots[torch.randperm(len(slots), generator=self._draw)[: self._sample]]
        held = group.slots[slots.to(group.device)].cpu()
        return _Slots(group, slots, rows[slots].long(), last_use[slots], held)

    # -- comparison --------------------------------------------------------------------

    def _compare(self, sample: _Sample, step: int) -> int:
        store, group = sample.group.store, sample.group
        touched = store.touched
        if touched is None:  # all rows were replaced
            return 0
        rows = store.rows[sample.ids.to(store.rows.device)].cpu()
        still = ~touched.among(sample.ids)
        self._refuse(group, sample.ids, still, sample.rows, rows, "slow memory", step)
        compared = int(still.sum())
        for each in sample.slots:
            planner: Any = each.group.planner
            slots = each.slots.to(each.group.device)
            still = ~touched.among(each.ids)
            still &= each.group.memory.pad.row_of_slot[slots].cpu() == each.ids
            still &= planner.last_use[slots].cpu() == each.last_use
            rows = each.group.slots[slots].cpu()
            self._refuse(each.group, each.ids, still, each.rows, rows, "its slot", step)
            compared += int(still.sum())
        return compared

    def _refuse(
        self, group: Group, ids: Tensor, still: Tensor, before: Tensor, now: Tensor, where: str,
        step: int,
    ) -> None:  # fmt: skip
        differs = (before.view(torch.int32) != now.view(torch.int32)).any(1) & still
        if not differs.any():
            return
        named = few((group.layout.describe(each) for each in ids[differs].tolist()), most=3)
        raise self._corrupt(
            f"{int(differs.sum()):,} of {int(still.sum()):,} rows have other bits in {where}, and "
            f"nobody has written them: {named}",
            step,
        )

    def _corrupt(self, what: str, step: int) -> CorruptRows:
        return CorruptRows(
            f"at step {step:,} {what}. They were right after step {self._since:,}; checkpoints "
            "saved since then may hold wrong rows. Either this machine's memory fails, or hotrow "
            "is wrong: test the memory, and report this",
            self._since,
        )
