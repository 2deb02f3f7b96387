"""The folder that `hotrow prepare` makes: its manifest, its shards, and `Prepared`, which reads it.

    manifest.json            schema, tables, splits; every file with its size and SHA-256. Written
                             last: a folder without it is not finished.
    shards/train-00000.bin   consecutive samples of one split, all columns in one file, so that a
                             shard is whole or missing. No header: little-endian arrays one after
                             the other, each starting at a multiple of 64 bytes:
                               ids      [samples, single features]  int32, or int64 for big tables
                               dense    [samples, dense columns]    float32
                               label    [samples]                   uint8, 0 or 1
                               and for each jagged feature
                               offsets  [samples + 1] int64, values [offsets[-1]] like ids
    tables/000.counts        accesses of every row by the training split, int64: a profile
    tables/000.keys          the values that have rows of their own, as keys that vocabulary.spread
                             has multiplied, sorted; the value at position i has row i + 1, and row
                             0 is for all others

The ids of a sample lie side by side, because loaders gather samples in random order. The numbers of
a manifest are checked against each other and against the files before anything is opened or
allocated, and no file may lie outside the folder. Nothing is pickled.

Knows arrays and files; not where samples come from, nor what they are used for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.support.files import Disk, FileRecord, inside, why_wrong
from hotrow.support.manifests import Count, check_files, check_format, converted, read_json
from hotrow.support.messages import few

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation", "test")
_ALIGNED = 64
_REMEDY = "prepare again"
_CHEAP_BYTES = 1 << 30  # checksums of a folder up to this size take a second or two
_COPY_AGAIN = "copy it again, or prepare the folder again with --restart"


@dataclass(frozen=True)
class Feature:
    """A column of ids: the table that it reads, and whether samples have lists of ids."""

    name: str
    table: str
    jagged: bool = False


@dataclass(frozen=True)
class Schema:
    """The columns of every shard."""

    label: str
    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    id_dtype: str = "int32"

    @property
    def single(self) -> list[Feature]:
        return [feature for feature in self.features if not feature.jagged]

    @property
    def jagged(self) -> list[Feature]:
        return [feature for feature in self.features if feature.jagged]

    @property
    def tables(self) -> list[str]:
        return list(dict.fromkeys(feature.table for feature in self.features))


@dataclass(frozen=True)
class ShardRecord(FileRecord):
    samples: Count
    values: Mapping[str, Count] = field(default_factory=dict)  # of each jagged feature


@dataclass(frozen=True)
class TableRecord:
    """A table: its rows, and how its values became rows."""

    name: str
    rows: Count
    ids: str  # "vocabulary" or "hash"
    values: Count | None  # different values in the source; None: not counted
    counts: FileRecord
    keys: FileRecord | None
    key_dtype: str = "uint32"


@dataclass(frozen=True)
class Manifest:
    schema: Schema
    tables: tuple[TableRecord, ...]
    splits: Mapping[str, tuple[ShardRecord, ...]]
    source: Mapping[str, Any]
    settings: Mapping[str, Any]
    made_by: str = ""

    def table(self, name: str) -> TableRecord:
        for table in self.tables:
            if table.name == name:
                return table
        raise ValueError(
            f"the data has no table {name!r}; it has {few(t.name for t in self.tables)}"
        )

    def samples(self, split: str) -> int:
        return sum(shard.samples for shard in self.splits[split])

    @property
    def files(self) -> list[FileRecord]:
        tables = [file for table in self.tables for file in (table.counts, table.keys) if file]
        return [*(shard for shards in self.splits.values() for shard in shards), *tables]


@dataclass(frozen=True)
class Section:
    """Where an array lies in a file."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + np.dtype(self.dtype).itemsize * math.prod(self.shape)


def sections(schema: Schema, samples: int, values: Mapping[str, int]) -> dict[str, Section]:
    """Return the arrays of a shard by name; the end of the last one is the size of the file."""
    wanted: list[tuple[str, str, tuple[int, ...]]] = [
        ("ids", schema.id_dtype, (samples, len(schema.single))),
        ("dense", "float32", (samples, len(schema.dense))),
        ("label", "uint8", (samples,)),
    ]
    for feature in schema.jagged:
        name = feature.name
        wanted.append((f"{name}.offsets", "int64", (samples + 1,)))
        wanted.append((f"{name}.values", schema.id_dtype, (values[name],)))
    return side_by_side(wanted)


def side_by_side(wanted: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Section]:
    """Place arrays (name, dtype, shape) in one file, in that order."""
    places: dict[str, Section] = {}
    end = 0
    for name, dtype, shape in wanted:
        places[name] = Section(-(-end // _ALIGNED) * _ALIGNED, dtype, shape)
        end = places[name].end
    return places


def write_shard(
    disk: Disk, file: str, schema: Schema, arrays: Mapping[str, NDArray[Any]]
) -> ShardRecord:
    """Write the arrays of a shard, by section. It may not be on the disk yet: `make_durable` must
    follow before a manifest names the shard."""
    samples = len(arrays["label"])
    values = {feature.name: len(arrays[f"{feature.name}.values"]) for feature in schema.jagged}
    places = sections(schema, samples, values)
    data = in_sections((section, [arrays[name]]) for name, section in places.items())
    record = disk.write(file, data, durable=False)
    return ShardRecord(**asdict(record), samples=samples, values=values)


def in_sections(
    parts: Iterable[tuple[Section, Iterable[NDArray[Any]]]],
) -> Iterator[memoryview]:
    """Yield the bytes of a file made of sections, each of one or more arrays."""
    end = 0
    for section, arrays in parts:
        yield memoryview(bytes(section.offset - end))
        end = section.offset
        for array in arrays:
            view = as_bytes(array.astype(section.dtype, copy=False))
            end += len(view)
            yield view
        assert end == section.end, f"{end} bytes instead of {section.end}"


def as_bytes(array: NDArray[Any]) -> memoryview:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def map_section(path: Path, section: Section) -> NDArray[Any]:
    """Map an array of a file into memory."""
    if 0 in section.shape:
        return np.empty(section.shape, section.dtype)  # nothing cannot be mapped
    kind = np.dtype(section.dtype).newbyteorder("<")
    return np.memmap(path, kind, "r", section.offset, section.shape)


def map_shard(path: Path, schema: Schema, shard: ShardRecord) -> dict[str, NDArray[Any]]:
    """Map the arrays of a shard into memory, by name."""
    places = sections(schema, shard.samples, shard.values)
    return {name: map_section(path, section) for name, section in places.items()}


def to_json(manifest: Manifest) -> str:
    return json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a folder; a ValueError says what is wrong with it."""
    path = folder / MANIFEST
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            raise ValueError(
                f"{folder} does not exist; `hotrow prepare` makes such folders"
            ) from None
        hint = "; preparing was not finished: give the same `hotrow prepare` again to resume"
        unfinished = (folder / ".work").is_dir()
        raise ValueError(
            f"{folder} has no {MANIFEST}" + (hint if unfinished else ", so it is no prepared data")
        ) from None
    check_format(content, FORMAT, where=str(path), remedy=_REMEDY)
    return converted(Manifest, content, where=str(path), remedy=_REMEDY, check=_check)


def _check(manifest: Manifest) -> None:
    """Refuse numbers that contradict each other, before they size anything."""
    schema, names = manifest.schema, [table.name for table in manifest.tables]
    if schema.id_dtype not in ("int32", "int64"):
        raise ValueError(f"id_dtype is {schema.id_dtype!r}")
    if len(set(names)) != len(names) or set(schema.tables) - set(names):
        raise ValueError(
            f"features read the tables {few(schema.tables)}, and there are {few(names)}"
        )
    if len({feature.name for feature in schema.features}) != len(schema.features):
        raise ValueError("two features have one name")
    for table in manifest.tables:
        if table.counts.bytes != 8 * table.rows:
            raise ValueError(
                f"table {table.name} has {table.rows} rows, {table.counts.bytes} bytes of counts"
            )
        if table.key_dtype not in ("uint32", "uint64"):
            raise ValueError(f"key_dtype is {table.key_dtype!r}")
        size = np.dtype(table.key_dtype).itemsize
        if table.keys is not None and table.keys.bytes != size * (table.rows - 1):
            raise ValueError(
                f"table {table.name} has {table.rows} rows, {table.keys.bytes} bytes of keys"
            )
    jagged = {feature.name for feature in schema.jagged}
    for shards in manifest.splits.values():
        for shard in shards:
            if set(shard.values) != jagged:
                raise ValueError(f"{shard.file} has values for {few(sorted(shard.values))}")
            *_, last = sections(schema, shard.samples, shard.values).values()
            if shard.bytes != last.end:
                raise ValueError(
                    f"{shard.file} has {shard.bytes} bytes, and {shard.samples} samples need "
                    f"{last.end}"
                )
    check_files(file.file for file in manifest.files)


@dataclass(frozen=True)
class Jagged:
    """Lists of ids: sample i has values[offsets[i]:offsets[i + 1]]."""

    offsets: NDArray[np.int64]  # [samples + 1]
    values: NDArray[Any]  # [offsets[-1]] int32 or int64


@dataclass(frozen=True)
class Shard:
    """Consecutive samples, mapped into memory: nothing is read until it is used."""

    samples: int
    ids: NDArray[Any]  # [samples, single features] int32 or int64
    dense: NDArray[np.float32]  # [samples, dense columns]
    label: NDArray[np.uint8]  # [samples]
    jagged: dict[str, Jagged]


class Prepared:
    """A folder made by `hotrow prepare`.

    data = Prepared("prepared/criteo")
    for shard in data.shards("train"):
        shard.ids, shard.dense, shard.label
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(self.folder)
        for record in self.manifest.files:
            if wrong := why_wrong(self.folder, record, contents=False):
                raise ValueError(f"{wrong}; {_COPY_AGAIN}")

    @property
    def schema(self) -> Schema:
        return self.manifest.schema

    @property
    def table_rows(self) -> dict[str, int]:
        return {table.name: table.rows for table in self.manifest.tables}

    def samples(self, split: str) -> int:
        self._shards(split)
        return self.manifest.samples(split)

    def shards(self, split: str) -> list[Shard]:
        return [self._open(record) for record in self._shards(split)]

    def counts(self, table: str) -> NDArray[np.int64]:
        """Return how often the training split reads each row of a table: [rows], memory-mapped."""
        record = self.manifest.table(table)
        path = inside(self.folder, record.counts.file)
        return map_section(path, Section(0, "int64", (record.rows,)))

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.manifest.files)

    def profile(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return for each table the rows that the training split reads, and how often: `profile=`
        of a collection."""
        profile = {}
        for table in self.table_rows:
            counts = self.counts(table)
            rows = np.flatnonzero(counts)
            profile[table] = torch.from_numpy(rows), torch.from_numpy(counts[rows])
        return profile

    def verify(self, advance: Callable[[int], None] = lambda size: None) -> None:
        """Read every file and compare checksums; a ValueError names what has changed."""
        records = self.manifest.files
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            checked = pool.map(lambda file: why_wrong(self.folder, file, contents=True), records)
            for record, wrong in zip(records, checked, strict=True):
                if wrong:
                    raise ValueError(f"{wrong}; {_COPY_AGAIN}")
                advance(record.bytes)

    def verify_if_small(self) -> bool:
        """Compare checksums if that takes a second or two; return whether it did."""
        is_small = self.num_bytes <= _CHEAP_BYTES
        if is_small:
            self.verify()
        return is_small

    def _shards(self, split: str) -> tuple[ShardRecord, ...]:
        if split not in self.manifest.splits:
            names = ", ".join(self.manifest.splits)
            raise ValueError(f"{self.folder} has no split {split!r}; it has {names}")
        return self.manifest.splits[split]

    def _open(self, record: ShardRecord) -> Shard:
        arrays = map_shard(inside(self.folder, record.file), self.schema, record)
        jagged = {
            feature.name: Jagged(
                arrays[f"{feature.name}.offsets"], arrays[f"{feature.name}.values"]
            )
            for feature in self.schema.jagged
        }
        return Shard(record.samples, arrays["ids"], arrays["dense"], arrays["label"], jagged)
