"""What was looked up and moved, counted per table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TableTraffic:
    """Lookups and moves of one table. `unique_rows` counts a row once per batch."""

    lookups: int = 0
    unique_rows: int = 0
    fetched_rows: int = 0
    evicted_rows: int = 0
    row_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of lookups that caused no fetch."""
        return 1 - self.fetched_rows / self.lookups if self.lookups else 1.0


@dataclass(frozen=True)
class Traffic:
    """Lookups and moves of a collection."""

    per_table: Mapping[str, TableTraffic] = field(default_factory=dict)
    chunked_batches: int = 0  # batches whose rows did not fit the slots together

    @property
    def lookups(self) -> int:
        return sum(each.lookups for each in self._tables)

    @property
    def unique_rows(self) -> int:
        return sum(each.unique_rows for each in self._tables)

    @property
    def fetched_rows(self) -> int:
        return sum(each.fetched_rows for each in self._tables)

    @property
    def evicted_rows(self) -> int:
        return sum(each.evicted_rows for each in self._tables)

    @property
    def bytes_fetched(self) -> int:
        return sum(each.fetched_rows * each.row_bytes for each in self._tables)

    @property
    def bytes_evicted(self) -> int:
        return sum(each.evicted_rows * each.row_bytes for each in self._tables)

    @property
    def hit_rate(self) -> float:
        return 1 - self.fetched_rows / self.lookups if self.lookups else 1.0

    @property
    def _tables(self) -> Iterable[TableTraffic]:
        return self.per_table.values()
