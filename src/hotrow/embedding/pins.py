"""Pinned rows, and the change between two engines: what published systems need of a collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.embedding.arguments import row_numbers
from hotrow.embedding.pipeline import Pipeline
from hotrow.embedding.row_groups import InactiveEngine, RowGroups
from hotrow.engine.host.rows import host_rows_over
from hotrow.engine.rows import RowGroup
from hotrow.engine.strategy import STRATEGIES
from hotrow.inputs.hotset import HotSet
from hotrow.inputs.tables import WidthGroup


class Pins:
    """The rows that a caller has pinned in fast memory."""

    def __init__(self, rows: RowGroups, pipeline: Pipeline) -> None:
        self._rows, self._pipeline = rows, pipeline

    def _refuse_ranks(self, what: str) -> None:
        if self._rows.exchange is not None:
            raise RuntimeError(f"{what} works on one rank so far; replicate= keeps rows on all")

    def pin_rows(self, rows: Mapping[str, Tensor]) -> HotSet:
        self._refuse_ranks("pin_rows()")
        self._pipeline.refuse_if_running("pin_rows()")
        if self.is_on_host:
            raise RuntimeError("pin_rows() while the CPU trains: call train_in_slots() before")
        strategy, groups = self._rows.strategy, self._rows.groups
        if not (strategy.has_slots and strategy.pinned_part and strategy.refetch):
            raise ValueError(
                f"pin_rows() needs strategy='static', which keeps pinned rows and fetches all "
                f"others; this collection has {strategy.name!r}, which chooses by itself"
            )
        room, pinned = self.room_for_pins(), {}
        wanted: dict[int, dict[str, Tensor]] = {group.dim: {} for group in groups}
        for table, numbers in rows.items():
            group, _, size = self._rows.find(table)
            wanted[group.dim][table] = _first_of_each(row_numbers(table, numbers, size).cpu())
        with self._rows.lock.writing():
            self._pipeline.forget_planned()
            for group in groups:
                by_table = _with_padding(wanted[group.dim], group.layout)
                share = min(1.0, room[group.dim] / max(1, sum(map(len, by_table.values()))))
                by_table = {name: x[: int(share * len(x))] for name, x in by_table.items()}
                ids = [x + self._rows.find(name)[1] for name, x in by_table.items()]
                group.pin_rows(_interleaved(ids))
                pinned.update(by_table)
        return HotSet.of(self._rows.tables, pinned)

    def room_for_pins(self) -> dict[int, int]:
        room = {group.dim: group.room_for_pins for group in self._pinning}
        if None in room.values():
            raise RuntimeError(
                "how many rows can be pinned depends on how large batches are, which is not known "
                "yet: call embedding.reserve(batch_size), or embedding.reserve_like(ids of a batch)"
            )
        return {dim: count for dim, count in room.items() if count is not None}

    @property
    def version(self) -> int:
        return sum(group.planner.pins_version for group in self._pinning)

    @property
    def gave_way(self) -> int:
        """How often pins were released for a larger batch; not those that a caller replaced."""
        return sum(group.planner.pins_gave_way for group in self._pinning)

    @property
    def _pinning(self) -> Sequence[RowGroup]:
        strategy = self._rows.strategy
        return self._rows.slot_groups if strategy.has_slots or self.is_on_host else ()

    # -- two engines over one store ----------------------------------------------------

    @property
    def is_on_host(self) -> bool:
        """Whether the CPU trains, between `train_on_host()` and `train_in_slots()`."""
        return self._rows.is_on_host

    def train_on_host(self) -> int:
        rows = self._rows
        self._pipeline.refuse_if_running("train_on_host()")
        if not (rows.strategy.has_slots or self.is_on_host):
            raise ValueError(
                f"strategy {rows.strategy.name!r} has no rows that come and go, so there is "
                "nothing to change: train_on_host() is for those with a budget, such as 'static'"
            )
        rows.check_call("train_on_host()")
        if self.is_on_host:
            return 0
        if rows.inactive is None:
            strategy = STRATEGIES["hybrid"]
            owned: Sequence[Any] = rows.owned_groups
            groups = [host_rows_over(group, strategy) for group in owned]
            rows.inactive = InactiveEngine(groups, strategy, 0)
        with rows.lock.writing():
            for group in rows.slot_groups:
                group.flush()
                group.expect_changes()
            return self._switch()

    def train_in_slots(self) -> int:
        rows = self._rows
        self._pipeline.refuse_if_running("train_in_slots()")
        rows.check_call("train_in_slots()")
        if not self.is_on_host:
            return 0
        with rows.lock.writing():
            for group in rows.groups:
                group.flush()
            for group in rows.slot_groups:
                group.reload()
            return self._switch()

    def _switch(self) -> int:
        size = self._rows.switch()
        self._pipeline.forget_planned()
        return size


def _with_padding(rows: Mapping[str, Tensor], layout: WidthGroup) -> dict[str, Tensor]:
    """Leave out padding rows that bags skip; put those that are read first, as most samples read
    them."""
    by_table = dict(rows)
    for table in layout.tables:
        numbers = by_table.get(table.name, torch.empty(0, dtype=torch.int64))
        if table.padding_idx is not None:
            numbers = numbers[numbers != table.padding_idx]
        if table.untrained_idx is not None:
            numbers = torch.cat([torch.tensor([table.untrained_idx]), numbers])
        if table.name in by_table or len(numbers):
            by_table[table.name] = numbers
    return by_table


def _first_of_each(numbers: Tensor) -> Tensor:
    """Drop repeated numbers and keep the order of the first ones."""
    order = numbers.sort(stable=True)[1]
    ordered = numbers[order]
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return numbers[order[is_first].sort()[0]]


def _interleaved(lists: Sequence[Tensor]) -> Tensor:
    """Merge lists, ordered by the relative position of a number in its list."""
    if not lists:
        return torch.empty(0, dtype=torch.int64)
    places = [(torch.arange(len(x)) + 0.5) / max(1, len(x)) for x in lists]
    return torch.cat(list(lists))[torch.cat(places).sort(stable=True)[1]]
