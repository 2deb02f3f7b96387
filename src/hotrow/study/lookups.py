"""Traces: the rows that batches look up, of a prepared folder, a Parquet file or a run.

A trace holds ids only, in one space for all tables. It can be read many times, always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data import Loader, PreparedSource
from hotrow.data.popularity import Counted as Uses
from hotrow.data.popularity import Zipf
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.arrow import (
    column_keys,
    is_lists,
    kind_of,
    lists_of,
    open_parquet,
    place_of,
    value_type,
)
from hotrow.data.prepared.vocabulary import Counted, Tally, Vocabulary
from hotrow.engine.profile import table_counts
from hotrow.inputs.batch import KeyedJaggedTensor
from hotrow.run.config import DataSection
from hotrow.run.source import AnyBatch, Generated, open_samples
from hotrow.support.messages import few, many

NO_ROW = -1  # padding of a sequence
_READ_TOGETHER = 1 << 16


@dataclass(frozen=True)
class LookupBatch:
    """Ids of some samples: [samples, features], or feature by feature where `lengths` is given."""

    ids: NDArray[Any]  # [lookups] int32 or int64
    samples: int
    lengths: NDArray[np.int64] | None = None  # [features, samples]: ids of each
    periods: NDArray[np.int64] | None = None  # [samples], ascending: when samples were taken

    @property
    def rows(self) -> Tensor:
        """The ids without padding, as int64."""
        return torch.from_numpy(self.ids[self.ids != NO_ROW]).long()

    def per_sample(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the largest of each sample's values, one for each id; -1: the sample has none."""
        if self.lengths is None:
            largest: NDArray[Any] = values.reshape(self.samples, -1).max(1, initial=-1)
            return largest
        lengths = self.lengths.reshape(-1)
        starts = np.cumsum(lengths) - lengths
        # One more value, because an empty list at the end starts there.
        by_list = np.maximum.reduceat(np.append(values, -1), starts)
        by_list[lengths == 0] = -1
        largest = by_list.reshape(-1, self.samples).max(0)
        return largest

    def ids_of(self, first: int, last: int) -> NDArray[Any]:
        """Return the ids of samples `first` to `last` - 1."""
        if self.lengths is None:
            return self.ids.reshape(self.samples, -1)[first:last].reshape(-1)
        sample = np.tile(np.arange(self.samples), len(self.lengths))
        is_in = np.repeat((sample >= first) & (sample < last), self.lengths.reshape(-1))
        ids: NDArray[Any] = self.ids[is_in]
        return ids


class Lookups(Protocol):
    """A trace."""

    name: str
    num_batches: int
    batch_size: int

    @property
    def rows(self) -> Mapping[str, int]:
        """Rows of each table."""

    def batches(self) -> Iterator[LookupBatch]: ...


@dataclass(frozen=True)
class Popularity:
    """How often a batch looks up the rows of a table."""

    lookups: float  # of a batch
    law: Zipf | Uses
    hottest: Callable[[int], Tensor]  # the rows that are looked up most, hottest first


def _first(rows: Tensor, count: int) -> Tensor:
    return rows[:count]


class _IdSpace:
    """Turns ids of features into ids of one space for all tables; refuses ids outside a table.

    Unlike `hotrow.inputs.batch`, it gives padding rows no id: a trace has none of them.
    """

    def __init__(
        self, rows: Mapping[str, int], table_of: Mapping[str, str], *, is_padded: bool = False
    ) -> None:
        """`table_of`: the table of each feature, in the order of a batch's columns. `is_padded`: an
        id equal to a table's number of rows is padding."""
        base_of = dict(zip(rows, np.cumsum([0, *rows.values()]).tolist(), strict=False))
        self._features = list(table_of)
        self._rows = np.array([rows[table] for table in table_of.values()])
        self._bases = np.array([base_of[table] for table in table_of.values()])
        self._dtype = _id_type(rows)
        self._is_padded = is_padded

    def batch(self, sparse: Tensor | KeyedJaggedTensor, samples: int) -> LookupBatch:
        count = len(self._features)
        feature, lengths = np.arange(count), None  # by column
        if isinstance(sparse, Tensor):
            values = sparse.numpy()
        else:
            values = sparse.values().numpy()
            lengths = sparse.lengths().numpy().reshape(count, samples)
            feature = np.repeat(feature, lengths.sum(1))
        rows = self._rows[feature]
        is_bad = (values < 0) | (values >= rows + self._is_padded)
        if is_bad.any():
            place = np.argwhere(is_bad)[0]
            bad, which = values[tuple(place)], feature[place[-1]]
            raise ValueError(
                f"feature {self._features[which]!r} has the id {bad:,}; its table has "
                f"{self._rows[which]:,} rows"
            )
        ids = values + self._bases[feature]
        if self._is_padded:
            ids = np.where(values == rows, NO_ROW, ids)
        return LookupBatch(ids.reshape(-1).astype(self._dtype), samples, lengths)


def _id_type(rows: Mapping[str, int]) -> type[np.integer[Any]]:
    return np.int32 if sum(rows.values()) < 2**31 else np.int64


class OfFolder:
    """The samples of a prepared folder, in their order on disk."""

    def __init__(
        self, folder: Path, *, split: str = "train", batch_size: int, batches: int | None = None
    ) -> None:
        data = Prepared(folder)
        self.name, self.batch_size = f"{folder}, {split}", batch_size
        self.rows = data.table_rows
        if not data.samples(split):
            raise ValueError(f"{folder} holds no sample for {split}")
        self._space = _IdSpace(self.rows, {each.name: each.table for each in data.schema.features})
        self._loader = Loader(
            PreparedSource(data, split, dense=()),
            batch_size=batch_size,
            mixed=_READ_TOGETHER,
            pin_memory=False,
        )
        self.num_batches = min(len(self._loader), batches or len(self._loader))

    def batches(self) -> Iterator[LookupBatch]:
        for batch in self._loader.batches(stop=self.num_batches):
            yield self._space.batch(batch.sparse, len(batch))


class OfRun:
    """The lookups of a run, in its order, on generated or prepared data."""

    def __init__(
        self,
        data: DataSection,
        *,
        steps: int | None = None,
        name: str = "a run",
        batches: int | None = None,
        repeats: bool = True,
    ) -> None:
        """`steps`: of sequences, before their targets. `repeats`: epochs of generated data are
        equal, as in training; False: every batch is new."""
        self.name, self.batch_size, self._folder = name, data.batch_size, data.folder
        self._samples = open_samples(data, pin_memory=False, steps=steps)
        self._repeats = repeats
        tables, is_padded = self._samples.tables, steps is not None
        self.rows = {table: rows - is_padded for table, (rows, _) in tables.items()}
        table_of = {name: table for table, (_, names) in tables.items() for name in names}
        self._space = _IdSpace(self.rows, table_of, is_padded=is_padded)
        self.num_batches = batches or self._samples.batches_per_epoch

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())

    def batches(self, count: int | None = None) -> Iterator[LookupBatch]:
        """Yield `count` batches, epoch after epoch; by default those of the trace."""
        count, samples = count or self.num_batches, self._samples
        batches: Iterator[AnyBatch] = samples.batches(count)
        if isinstance(samples, Generated) and not self._repeats:
            batches = samples.drawn.batches(0, count)
        for batch in batches:
            yield self._space.batch(batch.sparse, len(batch))

    def hottest(self, count: int) -> Tensor:
        """Return the `count` ids that are looked up most often, hottest first: by the law that data
        are generated by, or as the training split has counted them."""
        profile = self.profile(count).values()
        bases = np.cumsum([0, *self.rows.values()]).tolist()
        ids = [hot + base for (hot, _), base in zip(profile, bases, strict=False)]
        uses = torch.cat([counts for _, counts in profile])
        order = torch.sort(uses, descending=True, stable=True)[1][:count]
        return torch.cat(ids)[order]

    def profile(self, count: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return rows of each table, the `count` hottest at least, and how often a batch, or the
        training split of prepared data, looks them up."""
        samples, found = self._samples, {}
        for table, (name, rows) in enumerate(self.rows.items()):
            if isinstance(samples, Generated):
                most, drawn = min(count, rows), samples.drawn
                hot, counts = drawn.hottest(table, most), drawn.expected_counts(table, most)
            else:
                assert samples.profile is not None
                hot, counts = table_counts(samples.profile, name)
            found[name] = hot, counts.double()
        return found

    def popularities(self) -> dict[str, Popularity]:
        """Return how popular the rows of each table are, if lookups do not depend on others."""
        samples, found = self._samples, {}
        for table, (name, rows) in enumerate(self.rows.items()):
            if isinstance(samples, Generated):
                drawn, law = samples.drawn, samples.drawn.popularity(table)
                lookups = drawn.config.batch_size * drawn.config.lookups_per_table[table]
                found[name] = Popularity(float(lookups), law, partial(drawn.hottest, table))
            else:
                assert samples.profile is not None
                ids, counts = table_counts(samples.profile, name)
                assert self._folder is not None
                batches = Prepared(Path(self._folder)).samples("train") / self.batch_size
                law = Uses(counts.long().numpy(), ids.numpy(), num_rows=rows)
                order = torch.sort(counts, descending=True, stable=True)[1]
                hottest = partial(_first, ids[order])
                found[name] = Popularity(float(counts.sum()) / batches, law, hottest)
        return found


class OfParquet:
    """A Parquet file, in which every distinct value of a column is a row of its table.

    Reads the file once to number the values. `time` names a sorted column of seconds or timestamps;
    `period` seconds from the first one on are a period, and so on.
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
        self._columns = [*categories, *([time] if time else [])]
        self._table_of = {name: (tables or {}).get(name, name) for name in categories}
        schema = open_parquet(file, mapped=True).schema_arrow
        for name in self._columns:
            place_of(name, schema.names, file)
        for name in categories:
            if kind_of(value_type(schema.field(name).type)) is None:
                raise ValueError(
                    f"{file}: column {name!r} of {schema.field(name).type} cannot be a category: "
                    "only whole numbers and texts can, and lists of them"
                )
        tallies = {table: Tally("uint64") for table in dict.fromkeys(self._table_of.values())}
        for columns in self._tables(_READ_TOGETHER):
            for name, table in self._table_of.items():
                tallies[table].add(Counted.of(_keys_of(columns, name)[0]))
        self._vocabularies = {
            table: Vocabulary(tally.vocabulary(min_frequency=1, max_rows=None)[0])
            for table, tally in tallies.items()
        }
        self.rows = {table: len(each.keys) for table, each in self._vocabularies.items()}
        if not sum(self.rows.values()):
            raise ValueError(f"{file} has no value in {few(categories)}")
        bases = np.cumsum([0, *self.rows.values()]).tolist()
        self._base_of = dict(zip(self.rows, bases, strict=False))
        all_batches = -(-open_parquet(file, mapped=True).metadata.num_rows // batch_size)
        self.num_batches = min(all_batches, batches or all_batches)

    def _tables(self, size: int) -> Iterator[Any]:
        """Yield `size` samples at a time as Arrow tables; the last one may have fewer."""
        file, rest = open_parquet(self._file, mapped=True), None
        # Arrow's own batches may be smaller than asked for: they end where a dictionary does.
        for read in file.iter_batches(batch_size=_READ_TOGETHER, columns=self._columns):
            table = pa.Table.from_batches([read])
            rest = table if rest is None else pa.concat_tables([rest, table])
            while rest.num_rows >= size:
                yield rest.slice(0, size)
                rest = rest.slice(size)
        if rest is not None and rest.num_rows:
            yield rest

    def batches(self) -> Iterator[LookupBatch]:
        start: int | None = None
        for _, columns in zip(range(self.num_batches), self._tables(self.batch_size), strict=False):
            ids, lengths, periods = [], [], None
            for name, table in self._table_of.items():
                keys, counts = _keys_of(columns, name)
                ids.append(self._vocabularies[table].rows_of(keys) - 1 + self._base_of[table])
                lengths.append(counts)
            if self._time is not None:
                seconds = self._seconds(columns.column(self._time).combine_chunks())
                start = int(seconds[0]) if start is None else start
                periods = (seconds - start) // self._period
                if (np.diff(periods) < 0).any():
                    raise ValueError(f"{self._file} is not sorted by {self._time!r}, the time")
            joined = np.concatenate(ids).astype(_id_type(self.rows))
            yield LookupBatch(joined, columns.num_rows, np.stack(lengths), periods)

    def _seconds(self, column: Any) -> NDArray[np.int64]:
        where = f"{self._file}: column {self._time!r}, the time,"
        is_missing = pc.is_null(column, nan_is_null=True)
        if missing := is_missing.true_count:
            raise ValueError(f"{where} has {many(missing, 'empty value')}; leave such samples out")
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("s", column.type.tz), safe=False)
        try:
            seconds: NDArray[np.int64] = column.cast(pa.int64(), safe=False).to_numpy()
        except ValueError as error:
            raise ValueError(f"{where} cannot be read as seconds: {error}") from None
        return seconds


def _keys_of(columns: Any, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the values of a column as numbers, and how many each sample has."""
    column = columns.column(name).combine_chunks()
    lengths = np.ones(len(column), np.int64)
    if is_lists(column.type):
        column, lengths = lists_of(column)
    # Columns of any sign may read one table.
    return column_keys(column, has_negative=True).keys, lengths
