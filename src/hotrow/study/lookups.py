"""Which rows samples look up, batch after batch: of a prepared folder, a Parquet file, or a run.

Ids only, in one space for all tables. A trace can be read as often as needed, always the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data import Loader, PreparedSource
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.arrow import (
    column_keys,
    is_lists,
    kind_of,
    lists_of,
    open_parquet,
    place_of,
    pyarrow,
    value_type,
)
from hotrow.data.prepared.vocabulary import Counted, Tally, Vocabulary
from hotrow.engine.profile import Profile
from hotrow.inputs.batch import KeyedJaggedTensor
from hotrow.run.config import DataSection
from hotrow.run.source import open_samples
from hotrow.support.messages import few, many

NO_ROW = -1  # where a sequence is padded
_READ_TOGETHER = 1 << 16


@dataclass(frozen=True)
class LookupBatch:
    """Ids of some samples: [samples, features], or feature by feature where `lengths` says how many
    each sample has of each."""

    ids: NDArray[Any]  # [lookups] int32 or int64
    samples: int
    lengths: NDArray[np.int64] | None = None  # [features, samples]
    periods: NDArray[np.int64] | None = None  # [samples], never falling: when they were taken

    def per_sample(self, values: NDArray[Any]) -> NDArray[Any]:
        """The largest of each sample's values, which are one for each id; -1 where it has none."""
        if self.lengths is None:
            found: NDArray[Any] = values.reshape(self.samples, -1).max(1, initial=-1)
            return found
        lengths = self.lengths.reshape(-1)
        starts = np.cumsum(lengths) - lengths
        # One more, because an empty list at the end starts there.
        largest = np.maximum.reduceat(np.append(values, -1), starts)
        largest[lengths == 0] = -1
        found = largest.reshape(-1, self.samples).max(0)
        return found

    def ids_of(self, first: int, last: int) -> NDArray[Any]:
        """Of some of the samples."""
        if self.lengths is None:
            return self.ids.reshape(self.samples, -1)[first:last].reshape(-1)
        sample = np.tile(np.arange(self.samples), len(self.lengths))
        is_in = np.repeat((sample >= first) & (sample < last), self.lengths.reshape(-1))
        found: NDArray[Any] = self.ids[is_in]
        return found


class Lookups(Protocol):
    """A trace."""

    name: str
    num_batches: int
    batch_size: int

    @property
    def rows(self) -> Mapping[str, int]:
        """Of each table."""

    def batches(self) -> Iterator[LookupBatch]: ...


class _Features:
    """Columns of ids in their tables: puts them into one space, and refuses what is outside."""

    def __init__(self, rows: Mapping[str, int], table_of: Mapping[str, str]) -> None:
        """`table_of`: the table of each feature, in the order of a batch's columns."""
        names = list(rows)
        bases = np.cumsum([0, *rows.values()])
        self._names = list(table_of)
        places = [names.index(table) for table in table_of.values()]
        self._dtype = np.int32 if bases[-1] < 2**31 else np.int64
        self._bases = bases[places].astype(self._dtype)
        self._rows = np.array([rows[names[place]] for place in places])

    def batch(
        self, sparse: Tensor | KeyedJaggedTensor, samples: int, *, padded: bool = False
    ) -> LookupBatch:
        if isinstance(sparse, Tensor):
            ids = sparse.numpy()
            self._check(ids.min(0, initial=0), ids.max(0, initial=-1))
            return LookupBatch((ids + self._bases).reshape(-1).astype(self._dtype), samples)
        lengths = sparse.lengths().numpy().reshape(len(self._names), samples)
        many = lengths.sum(1)
        values = sparse.values().numpy().astype(self._dtype)
        if padded:
            return self._padded(values, lengths, many)
        parts = np.split(values, np.cumsum(many)[:-1])
        lows, highs = ([f(part, initial=0) for part in parts] for f in (np.min, np.max))
        self._check(np.array(lows), np.where(many, highs, -1))
        return LookupBatch(values + np.repeat(self._bases, many), samples, lengths)

    def _padded(
        self, values: NDArray[Any], lengths: NDArray[np.int64], many: NDArray[np.int64]
    ) -> LookupBatch:
        is_padding = values == np.repeat(self._rows, many)
        ids = np.where(is_padding, NO_ROW, values + np.repeat(self._bases, many))
        return LookupBatch(ids.astype(self._dtype), lengths.shape[1], lengths)

    def _check(self, low: NDArray[Any], high: NDArray[Any]) -> None:
        for at in np.flatnonzero((low < 0) | (high >= self._rows))[:1].tolist():
            bad = low[at] if low[at] < 0 else high[at]
            raise ValueError(
                f"feature {self._names[at]!r} has the id {bad:,}; its table has "
                f"{self._rows[at]:,} rows"
            )


class OfFolder:
    """The samples of a prepared folder, as they lie."""

    def __init__(
        self, folder: Path, *, split: str = "train", batch_size: int, batches: int | None = None
    ) -> None:
        data = Prepared(folder)
        self.name, self.batch_size = f"{folder}, {split}", batch_size
        self.rows = data.table_rows
        features = {each.name: each.table for each in data.schema.features}
        if not data.samples(split):
            raise ValueError(f"{folder} holds no sample for {split}")
        self._features = _Features(self.rows, features)
        self._loader = Loader(
            PreparedSource(data, split, dense=()),
            batch_size=batch_size,
            mixed=_READ_TOGETHER,
            pin_memory=False,
        )
        self.num_batches = min(len(self._loader), batches or len(self._loader))

    def batches(self) -> Iterator[LookupBatch]:
        for batch in self._loader.batches(stop=self.num_batches):
            yield self._features.batch(batch.sparse, len(batch))


class OfRun:
    """What a run would look up, in its order: generated, or read as it reads."""

    def __init__(
        self,
        data: DataSection,
        *,
        steps: int | None = None,
        name: str = "a run",
        batches: int | None = None,
    ) -> None:
        """`steps`: of sequences, before their targets."""
        self.name, self.batch_size = name, data.batch_size
        self._padded = steps is not None
        self._samples = open_samples(data, pin_memory=False, steps=steps)
        tables = self._samples.tables
        self.rows = {table: rows - self._padded for table, (rows, _) in tables.items()}
        features = {name: table for table, (_, names) in tables.items() for name in names}
        self._features = _Features(self.rows, features)
        self.num_batches = batches or self._samples.batches_per_epoch

    @property
    def profile(self) -> Profile | None:
        """How often rows are read in training, where that was counted."""
        return self._samples.profile

    def batches(self, count: int | None = None) -> Iterator[LookupBatch]:
        """So many, epoch after epoch; by default those of the trace."""
        for batch in self._samples.batches(count or self.num_batches):
            yield self._features.batch(batch.sparse, len(batch), padded=self._padded)


@dataclass(frozen=True)
class _Piece:
    """Consecutive samples of a Parquet file."""

    samples: int
    ids: list[NDArray[np.int64]]  # of each feature
    lengths: list[NDArray[np.int64]]
    times: NDArray[np.int64] | None

    def part(self, first: int, last: int) -> _Piece:
        ids = []
        for values, lengths in zip(self.ids, self.lengths, strict=True):
            ends = np.cumsum(lengths)
            ids.append(values[ends[first] - lengths[first] : ends[last - 1]])
        times = None if self.times is None else self.times[first:last]
        return _Piece(last - first, ids, [each[first:last] for each in self.lengths], times)

    def joined(self, other: _Piece) -> _Piece:
        both = [
            [np.concatenate(each) for each in zip(mine, yours, strict=True)]
            for mine, yours in ((self.ids, other.ids), (self.lengths, other.lengths))
        ]
        times = None
        if self.times is not None and other.times is not None:
            times = np.concatenate([self.times, other.times])
        return _Piece(self.samples + other.samples, both[0], both[1], times)


class OfParquet:
    """A Parquet file: every different value of a column is a row of its table.

    Reads the file once to number the values. Where `time` names a column of seconds or timestamps,
    each `period` seconds from the first on are a period.
    """

    def __init__(
        self,
        file: Path,
        *,
        categories: Sequence[str],
        tables: Mapping[str, str] | None = None,
        batch_size: int,
        batches: int | None = None,
        time: str | None = None,
        period: int = 86_400,
    ) -> None:
        self.name, self.batch_size = str(file), batch_size
        self._file, self._time, self._period = file, time, period
        self._categories = list(categories)
        self._table_of = {name: (tables or {}).get(name, name) for name in categories}
        self._check()
        self._vocabularies = self._numbered()
        self.rows = {table: len(each.keys) for table, each in self._vocabularies.items()}
        bases = np.cumsum([0, *self.rows.values()])
        self._bases = dict(zip(self.rows, bases.tolist(), strict=False))
        self._dtype = np.int32 if bases[-1] < 2**31 else np.int64
        all_batches = -(-open_parquet(self._file, mapped=True).metadata.num_rows // batch_size)
        self.num_batches = min(all_batches, batches or all_batches)
        if not bases[-1]:
            raise ValueError(f"{file} has no value in {few(categories)}")

    def _check(self) -> None:
        schema = open_parquet(self._file, mapped=True).schema_arrow
        for name in (*self._categories, *([self._time] if self._time else [])):
            place_of(name, schema.names, self._file)
        for name in self._categories:
            if kind_of(value_type(schema.field(name).type)) is None:
                raise ValueError(
                    f"{self._file}: column {name!r} of {schema.field(name).type} cannot be a "
                    "category: only whole numbers and texts can, and lists of them"
                )

    def _columns(self) -> Iterator[Any]:
        columns = [*self._categories, *([self._time] if self._time else [])]
        yield from open_parquet(self._file, mapped=True).iter_batches(
            batch_size=_READ_TOGETHER, columns=columns
        )

    def _numbered(self) -> dict[str, Vocabulary]:
        tallies = {table: Tally("uint64") for table in dict.fromkeys(self._table_of.values())}
        for batch in self._columns():
            for name, table in self._table_of.items():
                tallies[table].add(Counted.of(_keys_of(batch.column(name))[0]))
        return {
            table: Vocabulary(tally.vocabulary(min_frequency=1, max_rows=None)[0])
            for table, tally in tallies.items()
        }

    def _pieces(self) -> Iterator[_Piece]:
        for batch in self._columns():
            ids, lengths = [], []
            for name, table in self._table_of.items():
                keys, many = _keys_of(batch.column(name))
                ids.append(self._vocabularies[table].rows_of(keys) - 1 + self._bases[table])
                lengths.append(many)
            times = None if self._time is None else self._seconds(batch.column(self._time))
            yield _Piece(len(batch), ids, lengths, times)

    def _seconds(self, column: Any) -> NDArray[np.int64]:
        arrow, where = pyarrow(), f"{self._file}: column {self._time!r}, the time,"
        is_missing = pyarrow("compute").is_null(column, nan_is_null=True)
        if missing := is_missing.true_count:
            raise ValueError(f"{where} has {many(missing, 'empty value')}; leave such samples out")
        if arrow.types.is_timestamp(column.type):
            column = column.cast(arrow.timestamp("s", column.type.tz), safe=False)
        try:
            found: NDArray[np.int64] = column.cast(arrow.int64(), safe=False).to_numpy()
        except ValueError as error:
            raise ValueError(f"{where} cannot be read as seconds: {error}") from None
        return found

    def batches(self) -> Iterator[LookupBatch]:
        rest: _Piece | None = None
        given, start = 0, 0
        for piece in self._pieces():
            rest = piece if rest is None else rest.joined(piece)
            if not given and rest.times is not None:
                start = int(rest.times[0])
            at = 0
            while rest.samples - at >= self.batch_size and given < self.num_batches:
                yield self._batch(rest.part(at, at + self.batch_size), start)
                given, at = given + 1, at + self.batch_size
            if given == self.num_batches:
                return
            rest = rest.part(at, rest.samples) if at < rest.samples else None
        if rest is not None:
            yield self._batch(rest, start)

    def _batch(self, piece: _Piece, start: int) -> LookupBatch:
        periods = None if piece.times is None else (piece.times - start) // self._period
        if periods is not None and (np.diff(periods) < 0).any():
            raise ValueError(f"{self._file} is not sorted by {self._time!r}, the time")
        ids = np.concatenate(piece.ids).astype(self._dtype)
        return LookupBatch(ids, piece.samples, np.stack(piece.lengths), periods)


def _keys_of(column: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values as numbers, and how many each sample has."""
    if not is_lists(column.type):
        return _keys(column), np.ones(len(column), np.int64)
    values, lengths = lists_of(column)
    return _keys(values), lengths


def _keys(column: Any) -> NDArray[Any]:
    return column_keys(column, has_negative=True).keys  # columns of any sign may read one table
