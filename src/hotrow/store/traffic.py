"""Counters of lookups and moved rows, per table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotrow.support.records import Counted


@dataclass(frozen=True)
class TableTraffic(Counted):
    """Lookups and moves of one table.

    `unique_rows` counts a row once per batch. `loaded_rows` were fetched to be pinned, before any
    lookup; `bytes_fetched` includes them, `fetched_rows` does not.
    """

    lookups: int = 0
    unique_rows: int = 0
    fetched_rows: int = 0
    evicted_rows: int = 0
    bytes_fetched: int = 0
    bytes_evicted: int = 0
    loaded_rows: int = 0

    def __add__(self, other: TableTraffic) -> TableTraffic:
        return TableTraffic(*(getattr(self, n) + getattr(other, n) for n in COUNTS))


COUNTS = tuple(TableTraffic.__dataclass_fields__)


@dataclass(frozen=True)
class Traffic(TableTraffic):
    """Lookups and moves of a collection: the sums, and each table's."""

    per_table: Mapping[str, TableTraffic] = field(default_factory=dict)
    chunked_batches: int = 0  # batches whose rows did not fit the slots together
    made_rows: int = 0  # fetched rows that were never written: made in their slots, not moved

    @classmethod
    def of(
        cls, per_table: Mapping[str, TableTraffic], chunked_batches: int, made_rows: int = 0
    ) -> Traffic:
        total = sum(per_table.values(), start=TableTraffic())
        sums = {name: getattr(total, name) for name in COUNTS}
        return cls(
            **sums, per_table=per_table, chunked_batches=chunked_batches, made_rows=made_rows
        )
