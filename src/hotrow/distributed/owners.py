"""Which rank owns a row, and the row's number there. Closed forms; nothing is exchanged.

The rows of a table are cut into blocks of `SHARDS`. Within a block every row is in another shard:
its number is changed by a hash of the table and the block, and its bits are reversed, so that rows
with neighbouring numbers are far apart. A rank owns a range of shards, so a row's shard does not
depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.engine.profile import Counts
from hotrow.inputs.tables import (
    Copied,
    EmbeddingBagConfig,
    Feature,
    FeatureNumbers,
    Init,
    WidthGroup,
)
from hotrow.store.init_fn import check_init_fn
from hotrow.store.ram import start_of_rows
from hotrow.support.hashing import mixed

SHARDS = 1024
_BITS = 10
_REVERSED = np.array([int(f"{k:0{_BITS}b}"[::-1], 2) for k in range(SHARDS)])
OWNED = "rows"  # the one feature of the rows that a rank owns


def first_shard(rank: int, ranks: int) -> int:
    """Return the first shard of a rank; that of rank `ranks` is the number of shards."""
    return -(-rank * SHARDS // ranks)


class TableOwners:
    """The owners of one table's rows."""

    def __init__(self, name: str, num_rows: int, ranks: int) -> None:
        self.name, self.num_rows, self.ranks = name, num_rows, ranks
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self._word = np.uint64(int.from_bytes(digest, "little"))
        self.first = np.array([first_shard(rank, ranks) for rank in range(ranks + 1)])
        self._full = num_rows >> _BITS  # blocks that have a row for every shard
        # The last block may have fewer: where each of its rows stands among those of its owner.
        rest = np.arange(num_rows & (SHARDS - 1))
        shards = _REVERSED[rest ^ self._salts(np.array([self._full]))]
        there = np.zeros(SHARDS, dtype=np.int64)
        there[shards] = 1
        before = np.concatenate([[0], there.cumsum()])
        owners = np.arange(SHARDS) * ranks // SHARDS
        self._last_place = before[:-1] - before[self.first[owners]]
        in_last = before[self.first[1:]] - before[self.first[:-1]]
        self.counts = self._full * np.diff(self.first) + in_last  # rows of each rank
        self._last_shards = np.flatnonzero(there)

    def _salts(self, blocks: np.ndarray) -> np.ndarray:
        words = mixed(blocks.astype(np.uint64) ^ self._word)
        salts: np.ndarray = (words & np.uint64(SHARDS - 1)).astype(np.int64)
        return salts

    def find(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the owner of each row, and the row's number there."""
        block = rows >> _BITS
        shard = _REVERSED[(rows & (SHARDS - 1)) ^ self._salts(block)]
        rank = shard * self.ranks // SHARDS
        width = np.diff(self.first)[rank]
        place = np.where(block < self._full, shard - self.first[rank], self._last_place[shard])
        return rank, block * width + place

    @property
    def blocks(self) -> int:
        return -(-self.num_rows // SHARDS)

    def first_of_block(self, rank: int, block: int) -> int:
        """Return how many rows of a rank are in earlier blocks: they have smaller numbers there."""
        width = int(self.first[rank + 1] - self.first[rank])
        return min(block * width, int(self.counts[rank]))

    def rows_of(self, rank: int, numbers: np.ndarray) -> np.ndarray:
        """Return the rows of the whole table that have these numbers at a rank."""
        first, end = self.first[rank], self.first[rank + 1]
        shards, full = self._last_shards, self._full * (end - first)
        mine = shards[(shards >= first) & (shards < end)]
        block = np.minimum(numbers // max(1, end - first), self._full)
        shard = first + numbers % max(1, end - first)
        is_last = numbers >= full
        shard[is_last] = mine[numbers[is_last] - full]
        rows: np.ndarray = (block << _BITS) | (_REVERSED[shard] ^ self._salts(block))
        return rows


class Route(NamedTuple):
    """The way of ids to their owners."""

    order: Tensor  # [U] places of ids, owner by owner
    numbers: Tensor  # [U] int64: the ids at their owners, in that order
    counts: list[int]  # ids of each rank
    # Rows that every rank has: the places of their ids, and which replicas they are.
    here: Tensor | None = None
    replicas: Tensor | None = None
    choice: int = 0  # of these rows: how often others were chosen before


@dataclass(frozen=True)
class OneFeatureGroup(WidthGroup):
    """Rows of one width that one feature looks up, by their ids."""

    def feature_numbers(self, device: torch.device) -> FeatureNumbers:
        if device not in self._numbers:
            with torch.inference_mode(False):
                zero = torch.zeros(1, dtype=torch.int64, device=device)
                numbers = FeatureNumbers(zero, zero, zero, zero + self.num_rows - 1, None)
            self._numbers[device] = numbers
        return self._numbers[device]


@dataclass(frozen=True)
class OwnedGroup(OneFeatureGroup):
    """The rows of one width that a rank owns: one feature looks all of them up."""

    owners: tuple[TableOwners, ...] = ()
    rank: int = 0

    def describe(self, row_id: int) -> str:
        """Return an id in the user's terms: the row of the whole table."""
        position = int(self.table_of(torch.tensor(row_id)))
        number = np.array([row_id - self.bases[position]])
        row = int(self.owners[position].rows_of(self.rank, number)[0])
        return f"row {row:,} of table {self.tables[position].name!r}"


@dataclass(frozen=True)
class GroupOwners:
    """The owners of the rows of one width."""

    layout: WidthGroup  # of the rows of all ranks
    ranks: int
    tables: tuple[TableOwners, ...] = field(init=False)

    def __post_init__(self) -> None:
        tables = [TableOwners(x.name, x.num_embeddings, self.ranks) for x in self.layout.tables]
        object.__setattr__(self, "tables", tuple(tables))

    @cached_property
    def _bases(self) -> np.ndarray:
        """The first id of each table at each rank, [T, ranks]."""
        counts = np.stack([_at_least_one(table.counts) for table in self.tables])
        bases: np.ndarray = counts.cumsum(0) - counts
        return bases

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the owner of each id, ascending as they are, and the id there."""
        places = np.searchsorted(ids.numpy(), [*self.layout.bases, self.layout.num_rows])
        owners, numbers = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        for t, table in enumerate(self.tables):
            part = slice(places[t], places[t + 1])
            if part.start < part.stop:
                owners[part], mine = table.find(ids[part].numpy() - self.layout.bases[t])
                numbers[part] = mine + self._bases[t, owners[part]]
        return torch.from_numpy(owners), torch.from_numpy(numbers)

    def route(self, ids: Tensor) -> Route:
        """Return the way of ascending ids to their owners."""
        owners, numbers = self.find(ids)
        # A byte per rank is sorted in less time.
        order = owners.to(torch.uint8 if self.ranks < 256 else torch.int64).sort(stable=True)[1]
        counts = torch.bincount(owners, minlength=self.ranks).tolist()
        return Route(order, numbers[order], counts)

    def owned(self, rank: int, seed: int) -> OwnedGroup:
        """Return the layout of the rows that a rank owns."""
        tables = tuple(
            _owned_table(table, owners, rank, seed)
            for table, owners in zip(self.layout.tables, self.tables, strict=True)
        )
        feature = Feature(OWNED, 0, 0, "none", OWNED)
        return OwnedGroup(self.layout.dim, tables, (feature,), self.tables, rank)

    def own_numbers(self, rank: int, table: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of some rows of a table a rank owns, and the ids of these there."""
        owners, numbers = self.tables[table].find(rows.numpy())
        mine = owners == rank
        ids = numbers[mine] + self._bases[table, rank]
        return torch.from_numpy(mine), torch.from_numpy(ids)


@dataclass(frozen=True, eq=False)
class OwnedStart:
    """The start of the rows of a table that a rank owns."""

    start: Init
    dim: int
    table: str
    owners: TableOwners
    rank: int
    seed: int

    @property
    def is_copied(self) -> bool:
        """Whether rows are those of a tensor, that of padding as well."""
        return isinstance(self.start, Copied)

    def __call__(self, numbers: Tensor) -> Tensor:
        if not self.owners.counts[self.rank]:
            return torch.zeros(len(numbers), self.dim)
        rows = torch.from_numpy(self.owners.rows_of(self.rank, numbers.numpy()))
        return start_of_rows(self.start, self.dim, rows, table=self.table, seed=self.seed)


def _owned_table(
    table: EmbeddingBagConfig, owners: TableOwners, rank: int, seed: int
) -> EmbeddingBagConfig:
    check_init_fn(table)
    padding = table.padding_idx
    if padding is not None:
        owner, number = owners.find(np.array([padding]))
        padding = int(number[0]) if owner[0] == rank else None
    return replace(
        table,
        num_embeddings=int(_at_least_one(owners.counts[rank : rank + 1])[0]),
        feature_names=[table.name],
        pooling="none",  # vectors cross, and are pooled where they are looked up
        padding_idx=padding,
        init=OwnedStart(table.start, table.embedding_dim, table.name, owners, rank, seed),
        init_fn=None,
        weight_init_min=None,
        weight_init_max=None,
    )


def _at_least_one(counts: np.ndarray) -> np.ndarray:
    """A table has at least one row: where a rank owns none, nothing looks this one up."""
    least: np.ndarray = np.maximum(counts, 1)
    return least


def owned_counts(
    owners: Sequence[GroupOwners], rank: int, profile: Mapping[str, Counts]
) -> dict[str, Counts]:
    """Return the counts of the rows that a rank owns, numbered as there."""
    tables = {
        table.name: of_table
        for group in owners
        for table, of_table in zip(group.layout.tables, group.tables, strict=True)
    }
    owned: dict[str, Counts] = {}
    for name, counts in profile.items():
        if isinstance(counts, Tensor):
            counts = torch.arange(len(counts)), counts
        rows, uses = counts
        owner, numbers = tables[name].find(rows.cpu().long().numpy())
        mine = torch.from_numpy(owner == rank)
        owned[name] = torch.from_numpy(numbers)[mine], uses.cpu()[mine]
    return owned
