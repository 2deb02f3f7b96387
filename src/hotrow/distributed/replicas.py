"""Rows that every rank has: small tables as a whole, and rows that a profile names hot.

Lookups of them exchange nothing. Every rank updates its copies from the gradients of all ranks,
added in the order of ranks, as an owner does; so all copies have the bits of the owner's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hotrow.distributed.owners import OWNED, OneFeatureGroup
from hotrow.engine.profile import Profile, hottest, small_tables
from hotrow.inputs.tables import Constant, EmbeddingBagConfig, Feature, Init, WidthGroup
from hotrow.store.ram import start_of_rows


@dataclass(frozen=True)
class ReplicaGroup(OneFeatureGroup):
    """The replicated rows of one width: their ids are places among them, in the order of ids."""

    rows: tuple[Tensor, ...] = ()  # of each table

    def describe(self, row_id: int) -> str:
        """Return an id in the user's terms: the row of the whole table."""
        position = int(self.table_of(torch.tensor(row_id)))
        row = int(self.rows[position][row_id - self.bases[position]])
        return f"row {row:,} of table {self.tables[position].name!r}"


@dataclass(frozen=True, eq=False)
class _Start:
    """The start of a table's replicated rows."""

    start: Init
    dim: int
    table: str
    rows: Tensor
    seed: int

    def __call__(self, numbers: Tensor) -> Tensor:
        return start_of_rows(
            self.start, self.dim, self.rows[numbers], table=self.table, seed=self.seed
        )


def choose_replicas(
    layouts: Sequence[WidthGroup],
    row_bytes: Sequence[int],
    total: int,
    profile: Profile | None,
) -> list[Tensor]:
    """Return the ids of the rows of each width that `total` bytes replicate, ascending: the
    smallest tables first, then the rows that a profile counts most."""
    chosen = []
    limits = room_for_replicas(layouts, row_bytes, total)
    for layout, limit in zip(layouts, limits, strict=True):
        ids = small_tables(layout, limit)
        if profile is not None and len(ids) < limit:
            hot = hottest(profile, layout, limit)
            hot = hot[~torch.isin(hot, ids)]
            ids = torch.cat([ids, hot[: limit - len(ids)]])
        chosen.append(ids.sort()[0])
    return chosen


def room_for_replicas(
    layouts: Sequence[WidthGroup], row_bytes: Sequence[int], total: int
) -> list[int]:
    """Return how many rows of each width `total` bytes replicate."""
    sizes = [size * layout.num_rows for size, layout in zip(row_bytes, layouts, strict=True)]
    whole = max(1, sum(sizes))
    return [
        min(total * of_rows // whole // size, layout.num_rows)
        for layout, size, of_rows in zip(layouts, row_bytes, sizes, strict=True)
    ]


def replica_group(layout: WidthGroup, ids: Tensor, seed: int | None) -> ReplicaGroup:
    """Return the layout of the replicas of some rows, which start as those of their tables; without
    a `seed` they are zero, for rows that are copied from their owners."""
    edges = np.searchsorted(ids.numpy(), [*layout.bases, layout.num_rows])
    rows, tables, names = [], [], []
    for position, table in enumerate(layout.tables):
        part = ids[edges[position] : edges[position + 1]] - layout.bases[position]
        if len(part):
            rows.append(part)
            tables.append(_replicated(table, part, seed))
            names.append(table.name)
    feature = Feature(OWNED, 0, 0, "none", OWNED)
    return ReplicaGroup(layout.dim, tuple(tables), (feature,), tuple(rows))


def _replicated(table: EmbeddingBagConfig, rows: Tensor, seed: int | None) -> EmbeddingBagConfig:
    padding = None
    if table.padding_idx is not None:
        place = (rows == table.padding_idx).nonzero()
        padding = int(place[0]) if len(place) else None
    start: Init = Constant(0.0)
    if seed is not None:
        start = _Start(table.start, table.embedding_dim, table.name, rows, seed)
    return replace(
        table,
        num_embeddings=len(rows),
        feature_names=[table.name],
        pooling="none",
        padding_idx=padding,
        init=start,
        init_fn=None,
        weight_init_min=None,
        weight_init_max=None,
    )
