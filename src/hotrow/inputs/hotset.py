"""Which rows of a collection are hot, and which samples read no others.

Sees ids, never counts or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow.inputs.batch import Batch, lookups_of
from hotrow.inputs.tables import EmbeddingBagConfig, WidthGroup, group_by_width
from hotrow.support.messages import few

RowBytes = Mapping[str, int]  # by table: what a row takes in fast memory, state included


# -- places ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Columns:
    """What each key's values mean, on a device; the last entry is for values of no key."""

    bases: Tensor  # [F + 1] int64: place of the table's first row
    limits: Tensor  # [F + 1] int64: its number of rows
    outside: Tensor  # [F + 1] int64: where an id goes that the table does not have
    paddings: Tensor | None  # [F + 1] int64: the id that reads nothing, or -1; None: all -1


class Places:
    """A number for every row of a collection, and two that no row has.

    Whatever is known about each row is then one tensor of `size`, however many tables there are.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig]) -> None:
        self.tables = tuple(tables)
        self.groups = group_by_width(self.tables)  # refuses names that come twice
        self.bases: dict[str, int] = {}
        total = 0
        for table in self.tables:
            self.bases[table.name] = total
            total += table.num_embeddings
        self.num_rows = total
        self.nothing, self.no_row = total, total + 1  # padding; an id that no table has
        self.size = total + 2
        self._columns: dict[tuple[tuple[str, ...], torch.device], _Columns] = {}

    def span(self, table: str) -> slice:
        if table not in self.bases:
            raise ValueError(f"there is no table {table!r}; there are {few(self.bases)}")
        size = next(each.num_embeddings for each in self.tables if each.name == table)
        return slice(self.bases[table], self.bases[table] + size)

    def paddings(self) -> list[int]:
        """Return the places of rows that bags skip."""
        return [
            self.bases[table.name] + table.skipped_idx
            for table in self.tables
            if table.skipped_idx is not None
        ]

    def of(self, batch: Batch) -> Tensor:
        """The place of each of a batch's values, in their shape; no device is waited for."""
        values, columns = batch.values, self._columns_of(batch)
        if batch.offsets is None:
            rank: slice | Tensor = slice(len(batch.keys))
        elif batch.num_samples == 0:
            return values.long()
        else:
            # By search, so that values behind the last offset, which are nobody's, are found out.
            ends = batch.offsets[:: batch.num_samples][1:].long()
            place = torch.arange(values.numel(), device=values.device)
            rank = torch.searchsorted(ends.contiguous(), place, right=True)
        is_row = (values >= 0) & (values < columns.limits[rank])
        places = torch.where(is_row, values + columns.bases[rank], columns.outside[rank])
        if columns.paddings is None:
            return places
        is_padding = is_row & (values == columns.paddings[rank])
        return places.masked_fill_(is_padding, self.nothing)

    def checked(self, batch: Batch) -> Tensor:
        """`of`; on a CPU, an id that no table has is named. Elsewhere its place says it later."""
        places = self.of(batch)
        if places.device.type == "cpu" and bool((places == self.no_row).any()):
            for group in self.groups:
                lookups_of(batch, group)
        return places

    def _columns_of(self, batch: Batch) -> _Columns:
        # Kept, since handing numbers to a device waits for it.
        key = (batch.keys, batch.values.device)
        if key not in self._columns:
            self._columns[key] = self._make_columns(*key)
        return self._columns[key]

    def _make_columns(self, keys: tuple[str, ...], device: torch.device) -> _Columns:
        tables = {name: table for table in self.tables for name in table.feature_names}
        read = [tables.get(key) for key in keys]

        def column(of_table: Callable[[EmbeddingBagConfig], int], other: int) -> Tensor:
            entries = [other if table is None else of_table(table) for table in read]
            return torch.tensor([*entries, other], device=device)

        return _Columns(
            bases=column(lambda table: self.bases[table.name], 0),
            limits=column(lambda table: table.num_embeddings, 0),
            outside=column(lambda _: self.no_row, self.nothing),
            paddings=column(
                lambda table: -1 if table.skipped_idx is None else table.skipped_idx, -1
            )
            if self.paddings()
            else None,
        )


# -- the hot set -------------------------------------------------------------------------


class HotSet:
    """Rows of a collection that are hot: a byte for each row there is, on one device."""

    def __init__(self, places: Places, is_hot: Tensor) -> None:
        """`is_hot` [places.num_rows] bool, table by table; rows that bags skip are left out."""
        if is_hot.shape != (places.num_rows,) or is_hot.dtype != torch.bool:
            raise ValueError(
                f"is_hot must be {places.num_rows:,} bools, one for each row of the tables, "
                f"got {is_hot.dtype} of shape {list(is_hot.shape)}"
            )
        self.places = places
        # Nothing that is read is not hot, so padding never makes a sample cold; a bad id does.
        ends = torch.tensor([True, False], device=is_hot.device)
        self.is_hot = torch.cat([is_hot, ends])  # [places.size] bool
        paddings = places.paddings()
        if paddings:
            self.is_hot[torch.tensor(paddings, device=is_hot.device)] = False

    @classmethod
    def none(
        cls, tables: Sequence[EmbeddingBagConfig], device: torch.device | str = "cpu"
    ) -> HotSet:
        places = Places(tables)
        return cls(places, torch.zeros(places.num_rows, dtype=torch.bool, device=device))

    @classmethod
    def of(cls, tables: Sequence[EmbeddingBagConfig], rows: Mapping[str, Tensor]) -> HotSet:
        """From the numbers of each table's hot rows; a table that is not named has none."""
        places = Places(tables)
        is_hot = torch.zeros(places.num_rows, dtype=torch.bool)
        for name, numbers in rows.items():
            mine = is_hot[places.span(name)]
            if bool(((numbers < 0) | (numbers >= len(mine))).any()):
                raise ValueError(f"table {name!r} has rows 0 to {len(mine) - 1}, not all of these")
            mine[numbers.long()] = True
        return cls(places, is_hot)

    @property
    def device(self) -> torch.device:
        return self.is_hot.device

    @property
    def num_rows(self) -> int:
        return sum(self.counts().values())

    def counts(self) -> dict[str, int]:
        """How many rows of each table are hot."""
        # count_nonzero reads bytes; sum() would make numbers of them first, ten times as slowly.
        return {
            table.name: int(torch.count_nonzero(self.mask(table.name)))
            for table in self.places.tables
        }

    def mask(self, table: str) -> Tensor:
        """[rows of the table] bool; a view."""
        return self.is_hot[self.places.span(table)]

    def rows(self, table: str) -> Tensor:
        """The numbers of a table's hot rows, rising, int64."""
        return self.mask(table).nonzero().squeeze(1)

    def ids(self, group: WidthGroup) -> Tensor:
        """The ids of the hot rows of one width group, rising, int64."""
        tables = zip(group.tables, group.bases, strict=True)
        return torch.cat([self.rows(table.name) + base for table, base in tables])

    def num_bytes(self, row_bytes: RowBytes) -> int:
        """What the hot rows take in fast memory."""
        return sum(count * row_bytes[name] for name, count in self.counts().items())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> HotSet:
        moved = object.__new__(HotSet)
        moved.places = self.places
        moved.is_hot = self.is_hot.to(device, non_blocking=non_blocking)
        return moved


def popular(batch: Batch, hot: HotSet) -> Tensor:
    """Which samples read hot rows alone, [B] bool, on the batch's device, which must be `hot`'s.

    Padding in bags and empty bags read nothing, features of no table count for nothing. An id that
    no table has makes its sample cold: whoever then reads the row names it. No device is waited
    for, but when features come in an order not seen before.
    """
    places = hot.places.of(batch)
    if batch.offsets is None:
        return hot.is_hot[places].all(1)
    if batch.num_samples == 0:
        return places.new_empty(0, dtype=torch.bool)
    # Cold lookups of each bag, by what came before it: no atomics, and any length of bag.
    cold = torch.nn.functional.pad((~hot.is_hot[places]).cumsum(0), (1, 0))
    by_bag = cold[batch.offsets.long()].diff()
    return by_bag.view(len(batch.keys), batch.num_samples).sum(0) == 0
