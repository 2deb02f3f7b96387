"""Builds the rows of a collection: divides the budget among widths, and makes their groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow.distributed.owners import GroupOwners, owned_counts
from hotrow.distributed.ranks import Ranks
from hotrow.distributed.replicas import choose_replicas, replica_group, room_for_replicas
from hotrow.distributed.shared_rows import SharedRows
from hotrow.embedding.optimizer import RowOptimizer
from hotrow.embedding.row_groups import Engine, Group, RowGroups, engine_for
from hotrow.engine.profile import Profile, byte_parts
from hotrow.engine.stages import SPLIT
from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.inputs.tables import Copied, EmbeddingBagConfig, group_by_width
from hotrow.kernels.dense_rules import DenseRule
from hotrow.sizing.budgets import AUTO, auto_budget, buffer_part_of
from hotrow.store.budget import Budget, larger_budget, share_out
from hotrow.support.messages import setting
from hotrow.support.streams import Lanes
from hotrow.support.threads import RowLock
from hotrow.support.units import parse_bytes, show_bytes, write_budget

_NEARLY_ALL = 0.9  # of the bytes of all rows: a larger budget saves nothing


class GroupBuilder:
    """Divides a budget among widths and builds their groups."""

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        optimizer: RowOptimizer,
        strategy: Strategy,
        device: torch.device,
        profile: Profile | None,
        ranks: Ranks | None = None,
        seed: int = 0,
    ) -> None:
        self.layouts = group_by_width(tables)
        self.owners: list[GroupOwners] = []
        if ranks is not None:
            self.owners = [GroupOwners(layout, ranks.size) for layout in self.layouts]
            self.layouts = [owners.owned(ranks.rank, seed) for owners in self.owners]
            if profile is not None:
                profile = owned_counts(self.owners, ranks.rank, profile)
        self._tables, self._optimizer = tables, optimizer
        self._strategy, self._device, self._profile = strategy, device, profile
        rule = optimizer.rule
        if device.type == "cuda" and isinstance(rule, DenseRule):
            raise ValueError(
                f"{type(rule).__name__} moves rows that no batch looks up (idle='decay'), which "
                "a GPU's engine does not do yet; with idle='frozen' they rest"
            )
        self._row_bytes = [4 * (x.dim + rule.state_width(x.dim)) for x in self.layouts]
        self.num_rows = sum(layout.num_rows for layout in self.layouts)
        sizes = zip(self._row_bytes, self.layouts, strict=True)
        self.bytes_total = sum(size * layout.num_rows for size, layout in sizes)
        self._parts: list[float] | None = None  # None: they depend on the budget
        self._is_percentage = False  # the budget is written as one

    def divide(self, budget: str | float | Budget | None) -> Budget | None:
        """Return the share of each width; None: the strategy ignores the budget."""
        if not self._strategy.needs_budget:
            return None
        layouts, profile = self.layouts, self._profile
        if isinstance(budget, Budget):
            if len(budget.shares) != len(layouts):
                raise ValueError(
                    f"the budget has {len(budget.shares)} shares; the tables have {len(layouts)} "
                    f"widths ({', '.join(str(x.dim) for x in layouts)}), one share for each"
                )
            return budget
        if budget is None:
            raise ValueError(
                f"strategy {self._strategy.name!r} needs a budget: the bytes of fast memory it may "
                f"use, such as budget='10%' of the {self.bytes_total:,} bytes of rows"
            )
        self._is_percentage = isinstance(budget, str) and "%" in budget
        total = 0 if budget == AUTO else parse_bytes(budget, total=self.bytes_total)
        if profile is not None:  # ranking takes long, so other budgets are divided alike
            size = total or self.bytes_total // 10
            self._parts = byte_parts(layouts, self._row_bytes, size, profile=profile)
        if budget == AUTO:
            total = auto_budget(
                self._divide_bytes,
                layouts,
                self._row_bytes,
                strategy=self._strategy,
                device=self._device,
                profile=profile,
            )
        return self._divide_bytes(total)

    def _divide_bytes(self, total: int) -> Budget:
        parts = self._parts
        if parts is None:
            parts = byte_parts(self.layouts, self._row_bytes, total, profile=self._profile)
        return share_out(
            total,
            row_bytes=self._row_bytes,
            num_rows=[layout.num_rows for layout in self.layouts],
            parts=parts,
            buffer_part=buffer_part_of(self._strategy, self._device),
            whose=" of each rank" if self.owners else "",
        )

    def check_free_memory(self, shared: Budget | None) -> None:
        """Raise if a GPU has too little free memory."""
        if self._device.type != "cuda" or (shared is None and not self._strategy.everything):
            return
        wanted = self.bytes_total
        if shared is not None:
            sizes = zip(self._row_bytes, shared.shares, strict=True)
            by_hand = sum(size * (share.slots + share.buffer_rows) for size, share in sizes)
            wanted = shared.total_bytes or by_hand
        free, total = torch.cuda.mem_get_info(self._device)
        # Memory that torch caches can be used again.
        free += torch.cuda.memory_reserved(self._device)
        free -= torch.cuda.memory_allocated(self._device)
        if wanted > free:
            raise ValueError(
                f"{show_bytes(wanted)} of rows and what belongs to them do not fit {self._device}: "
                f"{show_bytes(free)} of its {show_bytes(total)} are free. Give a smaller budget, "
                f"such as budget='{max(1, int(free * 0.8 / 2**20))}MiB', or free memory"
            )

    def build(
        self, engine: Engine, shared: Budget | None, lanes: Lanes, lock: RowLock, **options: Any
    ) -> RowGroups:
        """Build a group per width; `options` are passed on to the engine."""
        window_bytes = 0 if shared is None else shared.window_bytes
        features = sum(len(layout.features) for layout in self.layouts)
        groups = [
            engine(
                layout,
                optimizer=self._optimizer,
                strategy=self._strategy,
                share=None if shared is None else shared.shares[g],
                device=self._device,
                profile=self._profile,
                window_bytes=window_bytes * len(layout.features) // features,
                lock=lock,
                **options,
            )
            for g, layout in enumerate(self.layouts)
        ]
        if shared is not None and shared.total_bytes:
            for number, group in enumerate(groups):
                group.overflow.setting_for = partial(self._setting_for, shared.total_bytes, number)
        # Staged rows need more stages; the rows of other groups can use those as well.
        split = [group.strategy for group in groups if group.strategy.stages is SPLIT]
        rows = RowGroups(self._tables, self._optimizer, self._device, lanes, lock, window_bytes)
        rows.activate(groups, split[0] if split else self._strategy)
        # Of a budget in bytes, plans get their part when the size of batches is known.
        rows.budget_bytes = 0 if shared is None else shared.total_bytes
        if not rows.budget_bytes:
            rows.allocate_slots()
        return rows

    def choose_replicas(self, total: int, profile: Profile | None) -> list[Tensor]:
        """Return the ids of the rows of each width that every rank has."""
        layouts = [owners.layout for owners in self.owners]
        return choose_replicas(layouts, self._row_bytes, total, profile)

    def room_for_replicas(self, total: int) -> dict[int, int]:
        """Return how many rows of each width every rank can have."""
        layouts = [owners.layout for owners in self.owners]
        room = room_for_replicas(layouts, self._row_bytes, total)
        return {layout.dim: count for layout, count in zip(layouts, room, strict=True)}

    def build_replicas(
        self,
        engine: Engine,
        options: Mapping[str, Any],
        shared: Sequence[SharedRows],
        *,
        are_copied: bool = False,
    ) -> list[Group]:
        """Build the groups of replicated rows, all of which are in fast memory. `are_copied`: from
        their owners, so they need no start."""
        if self._strategy.on_host:  # `engine` has no fast memory for them
            engine = engine_for(self._device, STRATEGIES["all-fast"])
        return [
            engine(
                replica_group(
                    group.layout, group.replicated, None if are_copied else options["seed"]
                ),
                optimizer=self._optimizer,
                strategy=STRATEGIES["all-fast"],
                share=None,
                device=self._device,
                seed=options["seed"],
                lock=options["lock"],
                output_dtype=torch.float32,
            )
            for group in shared
            if group.replicated is not None
        ]

    def _setting_for(self, total: int, group: int, slots: int, instead_of: int) -> str:
        """Return the setting that gives a group so many slots, as a user would write it."""
        wanted = larger_budget(self._divide_bytes, total, group, slots, instead_of)
        if wanted > _NEARLY_ALL * self.bytes_total:
            return setting("strategy", "all-fast")
        whole = self.bytes_total if self._is_percentage else None
        return setting("budget", write_budget(wanted, total=whole))


def build_rows(
    tables: Sequence[EmbeddingBagConfig],
    optimizer: RowOptimizer,
    strategy: Strategy,
    device: torch.device,
    profile: Profile | None,
    budget: str | float | Budget | None,
    engine: Engine,
    ranks: Ranks | None = None,
    replicate: int = 0,
    **options: Any,
) -> RowGroups:
    """Build the rows of a collection; `options` are those of `GroupBuilder.build`. With `ranks`,
    build those that this rank owns, and replicas of so many bytes."""
    builder = GroupBuilder(tables, optimizer, strategy, device, profile, ranks, options["seed"])
    shared = builder.divide(budget)
    builder.check_free_memory(shared)
    whole = dict(options)
    if ranks is not None:
        whole["output_dtype"] = torch.float32  # of vectors that are not pooled yet
    rows = builder.build(engine, shared, **whole)
    rows.num_rows, rows.bytes_total = builder.num_rows, builder.bytes_total
    rows.is_fresh = not any(isinstance(table.start, Copied) for table in tables)
    rows.build_again = partial(
        build_rows, tables, optimizer, strategy, device, profile, budget, engine, ranks, replicate,
        **options,
    )  # fmt: skip
    if ranks is not None:
        chosen = builder.choose_replicas(replicate, profile)
        kind = options["output_dtype"]
        groups = [SharedRows(*x, kind) for x in zip(builder.owners, chosen, strict=True)]
        rows.share_out(groups, [*rows.groups, *builder.build_replicas(engine, whole, groups)])
        rows.room_for_replicas = builder.room_for_replicas(replicate)
        rows.build_replicas = partial(builder.build_replicas, engine, whole, are_copied=True)
        for table in tables:
            if isinstance(table.start, Copied):
                table.start.held.clear()  # every rank has taken its rows
    return rows
