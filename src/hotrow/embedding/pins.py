"""Pinned rows, and the change between two engines: what published systems need of a collection."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.distributed.ranks import RankError
from hotrow.embedding.arguments import row_numbers
from hotrow.embedding.pipeline import Pipeline
from hotrow.embedding.replicating import replicate
from hotrow.embedding.row_groups import InactiveEngine, RowGroups
from hotrow.engine.host.rows import host_rows_over
from hotrow.engine.rows import RowGroup
from hotrow.engine.strategy import STRATEGIES
from hotrow.inputs.hotset import HotSet
from hotrow.inputs.tables import WidthGroup

_CALL, _WRONG = "pin_rows ", "cannot: "  # what ranks say to each other


class Pins:
    """The rows that a caller has pinned in fast memory."""

    def __init__(self, rows: RowGroups, pipeline: Pipeline) -> None:
        self._rows, self._pipeline = rows, pipeline
        # On several ranks, while the CPU trains: the rows that every rank has in slots, by width.
        self._replicated: dict[int, Tensor] = {}

    def pin_rows(self, rows: Mapping[str, Tensor]) -> HotSet:
        self._pipeline.refuse_if_running("pin_rows()")
        if self.is_on_host:
            raise RuntimeError("pin_rows() while the CPU trains: call train_in_slots() before")
        strategy, groups = self._rows.strategy, self._rows.lookup_groups
        if not (strategy.has_slots and strategy.pinned_part and strategy.refetch):
            raise ValueError(
                f"pin_rows() needs strategy='static', which keeps pinned rows and fetches all "
                f"others; this collection has {strategy.name!r}, which chooses by itself"
            )
        room = self.room_for_pins()
        if self._rows.is_shared and not any(room.values()):
            raise ValueError(
                "pin_rows() on several ranks keeps rows on each of them, in the bytes that "
                "replicate= gives beside the budget: build the collection with them, such as "
                "replicate='64MiB'"
            )
        wanted = self._agreed(rows)
        pinned: dict[str, Tensor] = {}
        chosen: dict[int, Tensor] = {}
        for group in groups:
            by_table = _with_padding(wanted[group.dim], group.layout)
            share = min(1.0, room[group.dim] / max(1, sum(map(len, by_table.values()))))
            by_table = {name: x[: int(share * len(x))] for name, x in by_table.items()}
            names = [table.name for table in group.layout.tables]
            ids = [x + group.layout.bases[names.index(name)] for name, x in by_table.items()]
            chosen[group.dim] = _interleaved(ids)
            pinned.update(by_table)
        if self._rows.is_shared:
            self._pipeline.forget_planned()
            replicate(self._rows, chosen)
            self._rows.replica_choices += 1
        else:
            with self._rows.lock.writing():
                self._pipeline.forget_planned()
                for group in groups:
                    group.pin_rows(chosen[group.dim])
        return HotSet.of(self._rows.tables, pinned)

    def _agreed(self, rows: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        """Return the rows to pin by width and table. Several ranks raise if one of them gives other
        rows, or wrong ones."""
        exchange = self._rows.exchange
        if exchange is None:
            return self._wanted(rows)
        try:
            wanted = self._wanted(rows)
        except Exception as error:
            exchange.meet(f"{_CALL}{_WRONG}{error}")
            raise
        every = exchange.meet(f"{_CALL}{_digest(wanted)}")
        for rank, text in enumerate(every):
            if not text.startswith(_CALL):
                what = "calls another method" if text else "has no batch left and serves the others"
                raise RankError(f"all ranks have to call pin_rows(); rank {rank} {what}")
            if text.startswith(_CALL + _WRONG):
                raise RankError(f"rank {rank}: {text.removeprefix(_CALL + _WRONG)}")
        for rank, text in enumerate(every):
            if text != every[0]:
                raise RankError(
                    f"all ranks have to pin the same rows in the same order; rank {rank} pins "
                    "others than rank 0. Choose them by what all ranks see, or send one rank's"
                )
        return wanted

    def _wanted(self, rows: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        """Return the rows that a caller has named, each once, by width and table."""
        wanted: dict[int, dict[str, Tensor]] = {group.dim: {} for group in self._rows.lookup_groups}
        for table, numbers in rows.items():
            dim, size = self._rows.find(table)[0].dim, self._rows.size_of(table)
            wanted[dim][table] = _first_of_each(row_numbers(table, numbers, size).cpu())
        return wanted

    def room_for_pins(self) -> dict[int, int]:
        if self._rows.is_shared:
            return dict(self._rows.room_for_replicas)
        room = {group.dim: group.room_for_pins for group in self._pinning}
        if None in room.values():
            raise RuntimeError(
                "how many rows can be pinned depends on how large batches are, which is not known "
                "yet: call embedding.reserve(batch_size), or embedding.reserve_like(ids of a batch)"
            )
        return {dim: count for dim, count in room.items() if count is not None}

    @property
    def groups(self) -> Sequence[Any]:
        """The rows of each width, of all ranks together if there are several."""
        return self._rows.lookup_groups

    @property
    def version(self) -> int:
        if self._rows.is_shared:  # what owners pin on their own is not what a caller has pinned
            return self._rows.replica_choices
        return sum(group.planner.pins_version for group in self._pinning)

    @property
    def gave_way(self) -> int:
        """How often pins were released for a larger batch; not those that a caller replaced. On
        several ranks pins stand beside the slots, and never give way."""
        if self._rows.is_shared:
            return 0
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
        returned = self._return_replicas()
        with rows.lock.writing():
            for group in rows.slot_groups:
                group.flush()
                group.expect_changes()
            return returned + self._switch()

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
            size = self._switch()
        return size + self._take_replicas()

    def _return_replicas(self) -> int:
        """Leave the rows that every rank has to their owners alone; return the bytes of the copies
        that this rank had."""
        if self._rows.is_shared:
            groups = [group for group in self._rows.lookup_groups if group.replicated is not None]
            self._replicated = {group.dim: group.replicated for group in groups}
            self._replicate({})
        return self._replica_bytes

    def _take_replicas(self) -> int:
        """Have the rows again that every rank had, from their owners; return the bytes of these."""
        self._replicate(self._replicated)
        return self._replica_bytes

    def _replicate(self, chosen: Mapping[int, Tensor]) -> None:
        if self._replicated:
            none = torch.empty(0, dtype=torch.int64)
            groups = self._rows.lookup_groups
            replicate(self._rows, {group.dim: chosen.get(group.dim, none) for group in groups})

    @property
    def _replica_bytes(self) -> int:
        groups, chosen = self._rows.lookup_groups, self._replicated
        return sum(4 * x.width * len(chosen[x.dim]) for x in groups if x.dim in chosen)

    def _switch(self) -> int:
        size = self._rows.switch()
        self._pipeline.forget_planned()
        return size


def _digest(wanted: Mapping[int, Mapping[str, Tensor]]) -> str:
    """Return a text that differs for other rows, or another order of them."""
    digest = hashlib.blake2b(digest_size=16)
    for rows in wanted.values():
        for table in sorted(rows):
            digest.update(f"{table} {len(rows[table])} ".encode())
            digest.update(rows[table].contiguous().numpy().tobytes())
    return digest.hexdigest()


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
