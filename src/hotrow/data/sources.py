"""Where a loader finds samples: prepared folders and Parquet files, in blocks, as arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotrow.data.prepared import Jagged, Prepared
from hotrow.data.prepared.arrow import (
    floats,
    is_lists,
    is_number,
    is_whole,
    lists_of,
    open_parquet,
    place_of,
    value_type,
)
from hotrow.data.prepared.format import to_json
from hotrow.support.messages import few

BLOCK = 1024  # samples of prepared data that stay together while blocks are shuffled


@dataclass(frozen=True)
class Samples:
    """Columns of some samples."""

    ids: NDArray[Any]  # [N, single features] int32 or int64
    dense: NDArray[np.float32]  # [N, dense columns]
    label: NDArray[Any]  # [N], 0 or 1
    jagged: dict[str, Jagged]

    def __len__(self) -> int:
        return len(self.label)


class Source(Protocol):
    """Blocks of samples. A block is read as a whole; several threads read at once.

    A source may also have `take(numbers)`, which returns the samples of these ascending numbers:
    then a rank reads its samples alone, instead of their blocks."""

    features: tuple[str, ...]  # in the order of a batch's columns
    single: tuple[str, ...]  # features with one id per sample: the columns of `ids`
    sizes: NDArray[np.int64]  # samples of each block

    def read(self, blocks: NDArray[np.int64]) -> Samples:
        """Return all samples of these blocks, in this order."""


def numbers_of(data: Prepared, dense: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns of numbers that are named, or all; unknown names are refused."""
    known = data.schema.dense
    for name in dense or ():
        if name not in known:
            raise ValueError(
                f"the data has no column of numbers {name!r}; it has {few(known) or 'none'}"
            )
    return known if dense is None else tuple(dense)


class PreparedSource:
    """A split of prepared data, with the numbers named in `dense`, or all. `block` samples stay
    together while blocks are shuffled."""

    def __init__(
        self,
        data: Prepared | str | Path,
        split: str,
        *,
        dense: Sequence[str] | None = None,
        block: int = BLOCK,
    ) -> None:
        self.data = data if isinstance(data, Prepared) else Prepared(data)
        known = self.data.schema.dense
        self.dense = numbers_of(self.data, dense)
        self._numbers = [known.index(name) for name in self.dense]
        self._has_all = self.dense == known
        self.features = tuple(feature.name for feature in self.data.schema.features)
        self.single = tuple(feature.name for feature in self.data.schema.single)
        self._lists = [feature.name for feature in self.data.schema.jagged]
        self.split, self._shards, self._block = split, self.data.shards(split), block
        samples = np.array([shard.samples for shard in self._shards], dtype=np.int64)
        self._firsts = np.cumsum(samples) - samples
        of_shards = -(-samples // block)
        self._first_block = np.cumsum(of_shards) - of_shards
        self.sizes = np.full(int(of_shards.sum()), block, dtype=np.int64)
        last = (np.cumsum(of_shards) - 1)[samples > 0]
        self.sizes[last] = (samples - (of_shards - 1) * block)[samples > 0]

    @property
    def identity(self) -> str:
        """A name that changes with any byte of the samples, or their order."""
        manifest = to_json(self.data.manifest)  # it has every file's checksum
        return hashlib.sha256(f"{self.split} of {manifest}".encode()).hexdigest()

    def read(self, blocks: NDArray[np.int64]) -> Samples:
        return self._gathered(self._first_block, blocks, self._block)

    def take(self, numbers: NDArray[np.int64]) -> Samples:
        """Return the samples of these numbers, in this order."""
        return self._gathered(self._firsts, numbers, 1)

    def _gathered(
        self, firsts: NDArray[np.int64], numbers: NDArray[np.int64], block: int
    ) -> Samples:
        """Copy blocks of `block` samples; each shard has the blocks from its number in `firsts`
        on."""
        lists: dict[str, list[Jagged]] = {name: [] for name in self._lists}
        parts = []
        for number, here in _by_shard(firsts, numbers):
            shard, places = self._shards[number], numbers[here] - firsts[number]
            samples = (places[:, None] * block + np.arange(block)).reshape(-1)
            samples = samples[samples < shard.samples]  # the last block may be short
            parts.append((number, places, len(samples)))
            for name, of_shards in lists.items():
                of_shards.append(self._lists_of(name, number, samples, block))
        count = sum(size for _, _, size in parts)
        ids = np.empty((count, len(self.single)), self.data.schema.id_dtype)
        dense = np.empty((count, len(self.data.schema.dense)), np.float32)
        label, at = np.empty(count, np.uint8), 0
        for number, places, size in parts:
            shard, here = self._shards[number], slice(at, at + size)
            for column, out in ((shard.ids, ids), (shard.dense, dense), (shard.label, label)):
                _copy_blocks(column, places, out[here], block)
            if label[here].max(initial=0) > 1:
                raise self._damaged("the labels", number)
            at = here.stop
        dense = dense if self._has_all else dense[:, self._numbers]
        return Samples(ids, dense, label, {name: joined(parts) for name, parts in lists.items()})

    def _lists_of(self, name: str, number: int, samples: NDArray[np.int64], block: int) -> Jagged:
        """Return the lists of a shard's samples, of which `block` each lie side by side. Opening
        reads no shard, so one may have changed since: refuse offsets out of range."""
        lists = self._shards[number].jagged[name]
        firsts, ends = lists.offsets[samples], lists.offsets[samples + 1]
        offsets = _offsets(ends - firsts)
        if (ends < firsts).any() or firsts.min() < 0 or ends.max() > len(lists.values):
            raise self._damaged(f"the lists of {name!r}", number)
        firsts, ends = firsts[::block], np.append(ends[block - 1 : -1 : block], ends[-1:])
        return Jagged(offsets, lists.values[_ranges(firsts, ends)[1]])

    def _damaged(self, what: str, number: int) -> ValueError:
        return ValueError(
            f"{self.data.folder}: {what} in shard {number} of {self.split} are damaged; prepare "
            "again"
        )


class SubsetSource:
    """The samples of these ascending numbers, in the blocks of another source."""

    def __init__(self, source: Source, numbers: NDArray[np.int64]) -> None:
        self.features, self.single = source.features, source.single
        self._source, self._numbers = source, numbers
        self._edges = np.cumsum([0, *source.sizes])
        self._cuts = np.searchsorted(numbers, self._edges)
        sizes = np.diff(self._cuts)
        self._blocks = np.flatnonzero(sizes)  # of the source; empty ones are left out
        self.sizes = sizes[self._blocks]

    def read(self, blocks: NDArray[np.int64]) -> Samples:
        theirs = self._blocks[blocks]
        cuts = zip(self._cuts[theirs], self._cuts[theirs + 1], strict=True)
        return self._taken(np.concatenate([self._numbers[low:high] for low, high in cuts]))

    def take(self, numbers: NDArray[np.int64]) -> Samples:
        """Return the samples of these ascending numbers, which count the samples of the subset."""
        return self._taken(self._numbers[numbers])

    def _taken(self, numbers: NDArray[np.int64]) -> Samples:
        blocks = np.searchsorted(self._edges, numbers, side="right") - 1
        read, places = read_some(self._source, self._edges[:-1], blocks, numbers)
        if len(read) == len(numbers):
            return read
        lists = {}
        for name, jagged in read.jagged.items():
            offsets, inside = lists_in(jagged, places)
            lists[name] = Jagged(offsets, jagged.values[inside])
        return Samples(read.ids[places], read.dense[places], read.label[places], lists)


def read_some(
    source: Source,
    firsts: NDArray[np.int64],
    blocks: NDArray[np.int64],
    numbers: NDArray[np.int64],
) -> tuple[Samples, NDArray[np.int64]]:
    """Read the samples of these ascending numbers, each from its block, of which `firsts` are the
    first samples. Return what was read, and the place of each sample in it. A source that reads
    whole blocks alone returns all samples of these."""
    if hasattr(source, "take"):
        samples: Samples = source.take(numbers)
        return samples, np.arange(len(numbers))
    needed = blocks[np.flatnonzero(np.diff(blocks, prepend=-1))]
    sizes = source.sizes[needed]
    # Where each block lies in what is read, minus where it lies among all samples.
    shifts = np.cumsum(sizes) - sizes - firsts[needed]
    return source.read(needed), numbers + shifts[np.searchsorted(needed, blocks)]


def _by_shard(firsts: NDArray[np.int64], numbers: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
    """Yield shards, given their first numbers, and which consecutive `numbers` lie in each."""
    shards = np.searchsorted(firsts, numbers, side="right") - 1
    for low, high in pairwise(np.flatnonzero(np.diff(shards, prepend=-1, append=-1)).tolist()):
        yield int(shards[low]), slice(low, high)


def _copy_blocks(
    column: NDArray[Any], places: NDArray[np.int64], out: NDArray[Any], block: int
) -> None:
    """Copy blocks of a shard's column, at ascending places, in one call: between calls threads wait
    for each other, and with many small calls they do little else."""
    full = len(column) // block
    whole = places[: np.searchsorted(places, full)]
    middle = len(whole) * block
    if len(whole) and out[:1].nbytes:
        item = f"V{block * out[:1].nbytes}"
        blocks = column[: full * block].reshape(full, -1).view(item).reshape(full)
        np.take(
            blocks,
            whole,
            out=out[:middle].reshape(len(whole), -1).view(item).reshape(-1),
            mode="clip",
        )
    if len(whole) < len(places):  # the last one, which is short
        out[middle:] = column[full * block :]


def lists_in(
    lists: Jagged, places: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the offsets of the lists at these places, and where their values lie."""
    return _ranges(lists.offsets[places], lists.offsets[places + 1])


def _ranges(
    firsts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each range begins among the numbers of all, and those numbers."""
    lengths = ends - firsts
    offsets = _offsets(lengths)
    numbers = np.repeat(firsts - offsets[:-1], lengths)
    numbers += np.arange(offsets[-1])
    return offsets, numbers


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def joined(parts: Sequence[Jagged]) -> Jagged:
    """Return the lists of several parts as one."""
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return Jagged(_offsets(lengths), np.concatenate([part.values for part in parts]))


class ParquetSource:
    """Parquet files whose columns are ids already: whole numbers below their table's rows, or lists
    of them; a missing list is empty. A block is a row group, so groups of a few ten thousand rows
    shuffle best."""

    def __init__(
        self,
        files: Sequence[str | Path] | str | Path,
        *,
        label: str,
        features: Sequence[str],
        dense: Sequence[str] = (),
    ) -> None:
        self._files = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
        self.features, self._dense, self._label = tuple(features), tuple(dense), label
        self._groups: list[tuple[Path, int]] = []
        sizes = []
        self._columns = [label, *dense, *features]
        if not self.features:
            raise ValueError("features must name one column at least")
        for name in self._columns:
            if self._columns.count(name) > 1:
                raise ValueError(f"column {name!r} is named twice")
        kinds: dict[str, str] = {}
        for file in self._files:
            opened = open_parquet(file, mapped=True)
            kinds |= self._kinds(file, opened.schema_arrow, kinds)
            for group in range(opened.metadata.num_row_groups):
                self._groups.append((file, group))
                sizes.append(opened.metadata.row_group(group).num_rows)
        if not sum(sizes):
            raise ValueError(f"{few(map(str, self._files)) or 'no file'}: there are no rows")
        self.single = tuple(name for name in features if kinds[name] == "single")
        self.sizes = np.array(sizes, dtype=np.int64)

    @property
    def identity(self) -> str:
        """A name that changes with the size or the time of a file."""
        files = [(str(path.resolve()), path.stat()) for path in self._files]
        facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
        return hashlib.sha256(repr((facts, self._columns)).encode()).hexdigest()

    def read(self, blocks: NDArray[np.int64]) -> Samples:
        parts = [self._read(*self._groups[block]) for block in blocks.tolist()]
        lists = [name for name in self.features if name not in self.single]
        return Samples(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.label for part in parts]),
            {name: joined([part.jagged[name] for part in parts]) for name in lists},
        )

    def _kinds(self, file: Path, schema: Any, before: dict[str, str]) -> dict[str, str]:
        kinds = {}
        for name in self._columns:
            kind = schema.field(place_of(name, schema.names, file)).type
            if name not in self.features:
                if not is_number(kind):
                    what = "the label is 0 or 1" if name == self._label else "it is to be a number"
                    raise ValueError(
                        f"{file}: column {name!r} has values of type {kind}, and {what}; cast it "
                        "where the file is written"
                    )
                continue
            if not is_whole(value_type(kind)):
                raise ValueError(
                    f"{file}: column {name!r} has values of type {kind}, and ids are whole numbers;"
                    " cast it to int64 where the file is written, or to text, of which `hotrow "
                    "prepare parquet` makes ids"
                )
            kinds[name] = "jagged" if is_lists(kind) else "single"
            if before.get(name, kinds[name]) != kinds[name]:
                raise ValueError(
                    f"{file}: column {name!r} is {kinds[name]}, and {before[name]} in the files"
                    " before it"
                )
        return kinds

    def _read(self, file: Path, group: int) -> Samples:
        where = f"{file}, row group {group}"
        opened = open_parquet(file, mapped=True)
        try:
            table = opened.read_row_group(group, columns=self._columns, use_threads=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{where} cannot be read: {error}") from error
        columns = {
            name: _Column(where, name, table.column(name).combine_chunks())
            for name in self._columns
        }
        label = columns[self._label].numbers()
        if not np.isin(label, (0, 1)).all():
            raise columns[self._label].wrong(~np.isin(label, (0, 1)), "a label is 0 or 1")
        ids = np.empty((len(label), len(self.single)), np.int64)
        for place, name in enumerate(self.single):
            ids[:, place] = columns[name].ids()
        dense = np.empty((len(label), len(self._dense)), np.float32)
        for place, name in enumerate(self._dense):
            dense[:, place] = columns[name].numbers()
        jagged = {name: columns[name].lists() for name in self.features if name not in self.single}
        return Samples(ids, dense, label.astype(np.uint8), jagged)


class _Column:
    """One column of a row group; errors say where it is."""

    def __init__(self, where: str, name: str, array: Any) -> None:
        self._where, self._name, self._array = where, name, array

    def wrong(self, which: NDArray[np.bool_], expected: str) -> ValueError:
        odd = self._array[int(np.argmax(which))].as_py()
        return ValueError(f"{self._where}: column {self._name!r} has {odd}, and {expected}")

    def ids(self) -> NDArray[np.int64]:
        values = self._values()
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        try:
            ids: NDArray[np.int64] = values.cast(pa.int64()).to_numpy(zero_copy_only=False)
        except ValueError as error:  # larger than any row's number
            kind = self._array.type
            raise ValueError(
                f"{self._where}: column {self._name!r} of {kind} has ids beyond 2**63 - 1, which "
                f"no table has ({error}); `hotrow prepare parquet` makes ids of any values"
            ) from None
        if len(ids) and ids.min() < 0:
            raise self.wrong(ids < 0, "ids are rows of a table, from 0 on")
        return ids

    def numbers(self) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):  # refused below
            numbers = floats(self._values()).astype(np.float32)
        if not np.isfinite(numbers).all():
            raise self.wrong(~np.isfinite(numbers), "numbers are finite ones of 32 bits")
        return numbers

    def lists(self) -> Jagged:
        values, lengths = lists_of(self._array)
        return Jagged(_offsets(lengths), _Column(self._where, self._name, values).ids())

    def _values(self) -> Any:
        if count := self._array.null_count:
            raise ValueError(
                f"{self._where}: column {self._name!r} of {self._array.type} has {count:,} empty "
                "values; fill them where the file is written (`hotrow prepare parquet` takes those "
                "of ids and numbers as they are)"
            )
        return self._array
