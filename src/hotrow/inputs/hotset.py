"""Which rows of a collection are hot, and which samples read no others. Sees ids alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow.inputs.batch import Batch, lookups_of
from hotrow.inputs.tables import EmbeddingBagConfig, group_by_width, refuse_shared_features
from hotrow.support.messages import few

RowBytes = Mapping[str, int]  # by table: bytes of a row in fast memory, with its state


@dataclass(frozen=True)
class _Columns:
    """What each key's values mean, on a device; the last entry is for values of no key."""

    bases: Tensor  # [F + 1] int64: number of the table's first row
    limits: Tensor  # [F + 1] int64: its number of rows
    outside: Tensor  # [F + 1] int64: number for an id that the table does not have
    paddings: Tensor | None  # [F + 1] int64: the id that reads nothing, or -1; None: all -1
    tables: Tensor  # [F] int64: place of the table among all; their number for a key of none


class Places:
    """A number for every row of a collection, and two that no row has.

    So one tensor of `size` holds what is known of each row, however many tables there are.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], *, ignores_padding: bool = False
    ) -> None:
        """Padding reads nothing where bags skip it; with `ignores_padding` everywhere."""
        self.tables = tuple(tables)
        self.groups = group_by_width(self.tables)  # refuses repeated names
        self._spans: dict[str, slice] = {}
        total = 0
        for table in self.tables:
            self._spans[table.name] = slice(total, total + table.num_embeddings)
            total += table.num_embeddings
        self._paddings = {
            table.name: table.padding_idx if ignores_padding else table.skipped_idx
            for table in self.tables
        }
        self.num_rows = total
        self.nothing, self.no_row = total, total + 1  # padding; an id that no table has
        self.size = total + 2
        self._columns: dict[tuple[tuple[str, ...], torch.device], _Columns] = {}

    def span(self, table: str) -> slice:
        """Return the numbers of a table's rows."""
        if table not in self._spans:
            raise ValueError(f"there is no table {table!r}; there are {few(self._spans)}")
        return self._spans[table]

    def paddings(self) -> list[int]:
        """Return the numbers of rows that are never read."""
        paddings = self._paddings.items()
        return [self._spans[name].start + row for name, row in paddings if row is not None]

    def of(self, batch: Batch) -> Tensor:
        """Return the number of each of a batch's values, in their shape. No device is synchronized,
        except for keys in an order not seen before."""
        values, columns = batch.values, self.columns_of(batch)
        if batch.offsets is None:
            rank: slice | Tensor = slice(len(batch.keys))
        elif batch.num_samples == 0:
            return values.long()
        else:
            # By search, which also finds values behind the last offset: they are unused.
            ends = batch.offsets[:: batch.num_samples][1:].long()
            place = torch.arange(values.numel(), device=values.device)
            rank = torch.searchsorted(ends.contiguous(), place, right=True)
        is_row = (values >= 0) & (values < columns.limits[rank])
        numbers = torch.where(is_row, values + columns.bases[rank], columns.outside[rank])
        if columns.paddings is None:
            return numbers
        is_padding = is_row & (values == columns.paddings[rank])
        return numbers.masked_fill_(is_padding, self.nothing)

    def checked(self, batch: Batch) -> Tensor:
        """Return `of`; on a CPU raise on an id outside its table. A GPU's numbers hold `no_row`."""
        numbers = self.of(batch)
        if numbers.device.type == "cpu" and bool((numbers == self.no_row).any()):
            for group in self.groups:
                lookups_of(batch, group)
        return numbers

    def columns_of(self, batch: Batch) -> _Columns:
        # Kept, since copying numbers to a device synchronizes it.
        key = (batch.keys, batch.values.device)
        if key not in self._columns:
            self._columns[key] = self._make_columns(*key)
        return self._columns[key]

    def _make_columns(self, keys: tuple[str, ...], device: torch.device) -> _Columns:
        refuse_shared_features(self.tables, "FAE, Hotline and Slipstream")
        place_of = {name: i for i, table in enumerate(self.tables) for name in table.feature_names}
        places = [place_of.get(key, len(self.tables)) for key in keys]
        # Base, limit, number of other ids, and padding; the last entry is for a key of no table.
        facts = [
            (span.start, span.stop - span.start, self.no_row, -1 if row is None else row)
            for span, row in zip(self._spans.values(), self._paddings.values(), strict=True)
        ]
        facts.append((0, 0, self.nothing, -1))
        by_key = torch.tensor([facts[place] for place in (*places, -1)], device=device)
        bases, limits, outside, paddings = by_key.t().contiguous()
        tables = torch.tensor(places, device=device)
        return _Columns(bases, limits, outside, paddings if self.paddings() else None, tables)


class HotSet:
    """The hot rows of a collection: a byte for every row, on one device."""

    def __init__(self, places: Places, is_hot: Tensor) -> None:
        """`is_hot` [places.num_rows] bool, table by table; rows that bags skip are never hot."""
        if is_hot.shape != (places.num_rows,) or is_hot.dtype != torch.bool:
            raise ValueError(
                f"is_hot must be {places.num_rows:,} bools, one for each row of the tables, "
                f"got {is_hot.dtype} of shape {list(is_hot.shape)}"
            )
        self.places = places
        # Padding never makes a sample cold; a bad id does.
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
        """Return a hot set of row numbers by table; a table that is not named has none."""
        places = Places(tables)
        is_hot = torch.zeros(places.num_rows, dtype=torch.bool)
        for name, numbers in rows.items():
            mask = is_hot[places.span(name)]
            if bool(((numbers < 0) | (numbers >= len(mask))).any()):
                raise ValueError(f"table {name!r} has rows 0 to {len(mask) - 1}, not all of these")
            mask[numbers.long()] = True
        return cls(places, is_hot)

    @property
    def device(self) -> torch.device:
        return self.is_hot.device

    @property
    def num_rows(self) -> int:
        return sum(self.counts().values())

    def counts(self) -> dict[str, int]:
        """Return how many rows of each table are hot."""
        # Ten times as fast as sum(), which converts to int64 first.
        return {
            table.name: int(torch.count_nonzero(self.mask(table.name)))
            for table in self.places.tables
        }

    def mask(self, table: str) -> Tensor:
        """Return which rows of a table are hot, bool; a view."""
        return self.is_hot[self.places.span(table)]

    def rows(self, table: str) -> Tensor:
        """Return the ascending numbers of a table's hot rows, int64."""
        return self.mask(table).nonzero().squeeze(1)

    def num_bytes(self, row_bytes: RowBytes) -> int:
        """Return the bytes of the hot rows in fast memory."""
        return sum(count * row_bytes[name] for name, count in self.counts().items())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> HotSet:
        moved = object.__new__(HotSet)
        moved.places = self.places
        moved.is_hot = self.is_hot.to(device, non_blocking=non_blocking)
        return moved


def popular(batch: Batch, hot: HotSet) -> Tensor:
    """Return which samples read hot rows alone, [B] bool. Batch and `hot` are on one device.

    Padding in bags and empty bags read nothing; features of no table are ignored. An id outside its
    table makes its sample cold; the lookup raises later. No device is synchronized, except for
    features in an order not seen before.
    """
    places = hot.places.of(batch)
    if batch.offsets is None:
        return hot.is_hot[places].all(1)
    if batch.num_samples == 0:
        return places.new_empty(0, dtype=torch.bool)
    # Cold lookups of each bag, by prefix sums: no atomics, and bags of any length.
    cold = torch.nn.functional.pad((~hot.is_hot[places]).cumsum(0), (1, 0))
    by_bag = cold[batch.offsets.long()].diff()
    return by_bag.view(len(batch.keys), batch.num_samples).sum(0) == 0
