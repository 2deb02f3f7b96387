"""The folder that `hotrow prepare` makes, as records: a manifest and what its shards hold.

    manifest.json            schema, tables, splits; every file with its size and SHA-256. Put in
                             place last: a folder without it is not finished.
    shards/train-00000.bin   consecutive samples of one split, all columns in one file, so that a
                             shard is there whole or not at all. No header: little-endian arrays
                             one after the other, each starting at a multiple of 64 bytes:
                               ids      [samples, single features]  int32, or int64 for big tables
                               dense    [samples, dense columns]    float32
                               label    [samples]                   uint8, 0 or 1
                               and for each jagged feature
                               offsets  [samples + 1] int64, values [offsets[-1]] like ids
    tables/000.counts        accesses of every row by the training split, int64: a profile
    tables/000.keys          the values that have rows of their own, as numbers, multiplied as
                             vocabulary.spread does, sorted; the value at position i has row i + 1,
                             and row 0 is for all others

One sample's ids lie side by side, because loaders gather samples in random order. Numbers in a
manifest are checked against each other and against the files before anything is opened or
allocated, and no file it names may lie outside of its folder. Nothing is pickled.

Knows arrays and files; not where samples come from, nor what they are used for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.support.files import Disk, FileRecord
from hotrow.support.manifests import Count, check_files, check_format, converted, read_json
from hotrow.support.messages import few

FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation", "test")
_ALIGNED = 64
_REMEDY = "prepare again"
_INT32_ROWS = 2**31 - 1


@dataclass(frozen=True)
class Feature:
    """One column of ids: which table it reads, and whether samples have lists of them."""

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
        return [each for each in self.features if not each.jagged]

    @property
    def jagged(self) -> list[Feature]:
        return [each for each in self.features if each.jagged]

    @property
    def tables(self) -> list[str]:
        return list(dict.fromkeys(each.table for each in self.features))


@dataclass(frozen=True)
class ShardRecord(FileRecord):
    samples: Count
    values: Mapping[str, Count] = field(default_factory=dict)  # of each jagged feature


@dataclass(frozen=True)
class TableRecord:
    """A table: its rows, and how values became rows."""

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
        for each in self.tables:
            if each.name == name:
                return each
        raise ValueError(
            f"the data has no table {name!r}; it has {few(t.name for t in self.tables)}"
        )

    def samples(self, split: str) -> int:
        return sum(shard.samples for shard in self.splits[split])

    @property
    def files(self) -> list[FileRecord]:
        tables = [file for each in self.tables for file in (each.counts, each.keys) if file]
        return [*(shard for shards in self.splits.values() for shard in shards), *tables]


def id_dtype(rows: Sequence[int]) -> str:
    return "int32" if max(rows, default=0) <= _INT32_ROWS else "int64"


@dataclass(frozen=True)
class Section:
    """Where an array lies in a shard."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        size = np.dtype(self.dtype).itemsize
        for each in self.shape:
            size *= each
        return self.offset + size


def sections(schema: Schema, samples: int, values: Mapping[str, int]) -> dict[str, Section]:
    """The arrays of a shard by name; the last one's end is the size of the file."""
    wanted: list[tuple[str, str, tuple[int, ...]]] = [
        ("ids", schema.id_dtype, (samples, len(schema.single))),
        ("dense", "float32", (samples, len(schema.dense))),
        ("label", "uint8", (samples,)),
    ]
    for each in schema.jagged:
        wanted.append((f"{each.name}.offsets", "int64", (samples + 1,)))
        wanted.append((f"{each.name}.values", schema.id_dtype, (values[each.name],)))
    return side_by_side(wanted)


def side_by_side(wanted: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Section]:
    """Places for arrays (name, dtype, shape) in one file, in that order."""
    found: dict[str, Section] = {}
    end = 0
    for name, dtype, shape in wanted:
        found[name] = Section(-(-end // _ALIGNED) * _ALIGNED, dtype, shape)
        end = found[name].end
    return found


def shard_bytes(schema: Schema, samples: int, values: Mapping[str, int]) -> int:
    return list(sections(schema, samples, values).values())[-1].end


def write_shard(
    disk: Disk,
    file: str,
    schema: Schema,
    samples: int,
    values: Mapping[str, int],
    arrays: Callable[[str], Iterable[NDArray[Any]]],
) -> ShardRecord:
    """Write a shard; `arrays` returns those that make a section, one after the other. It is not
    waited for: `make_durable` must follow before a manifest names it."""
    places = sections(schema, samples, values)
    data = in_sections((section, arrays(name)) for name, section in places.items())
    record = disk.write(file, data, durable=False)
    return ShardRecord(**asdict(record), samples=samples, values=values)


def in_sections(
    parts: Iterable[tuple[Section, Iterable[NDArray[Any]]]],
) -> Iterator[memoryview]:
    """Yield the bytes of a file made of sections, each of several arrays one after the other."""
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
        return np.empty(section.shape, section.dtype)  # no bytes, which cannot be mapped
    kind = np.dtype(section.dtype).newbyteorder("<")
    return np.memmap(path, kind, "r", section.offset, section.shape)


def map_shard(path: Path, schema: Schema, shard: ShardRecord) -> dict[str, NDArray[Any]]:
    """Map the arrays of a shard into memory, by name."""
    places = sections(schema, shard.samples, shard.values)
    return {name: map_section(path, section) for name, section in places.items()}


def to_json(manifest: Manifest) -> str:
    return json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, checked; a ValueError says what is wrong with it."""
    path = folder / MANIFEST
    try:
        found = read_json(path)
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
    return from_json(found, where=str(path))


def from_json(found: Any, *, where: str) -> Manifest:
    version = found.get("format") if isinstance(found, dict) else None
    if type(version) is int and version != FORMAT:
        what = "made by a newer hotrow" if version > FORMAT else "of a form no longer read"
        raise ValueError(
            f"{where} is {what}: format {version}, and this hotrow reads {FORMAT}; "
            + ("update hotrow, or prepare again" if version > FORMAT else "prepare again")
        )
    check_format(found, FORMAT, where=where, remedy=_REMEDY)
    return converted(Manifest, found, where=where, remedy=_REMEDY, check=_check)


def _check(manifest: Manifest) -> None:
    """Refuse numbers that contradict each other, before they size anything."""
    schema, names = manifest.schema, [each.name for each in manifest.tables]
    if schema.id_dtype not in ("int32", "int64"):
        raise ValueError(f"id_dtype is {schema.id_dtype!r}")
    if len(set(names)) != len(names) or set(schema.tables) - set(names):
        raise ValueError(
            f"features read the tables {few(schema.tables)}, and there are {few(names)}"
        )
    if len({each.name for each in schema.features}) != len(schema.features):
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
    jagged = {each.name for each in schema.jagged}
    for shards in manifest.splits.values():
        for shard in shards:
            if set(shard.values) != jagged:
                raise ValueError(f"{shard.file} has values for {few(sorted(shard.values))}")
            expected = shard_bytes(schema, shard.samples, shard.values)
            if shard.bytes != expected:
                raise ValueError(
                    f"{shard.file} has {shard.bytes} bytes, and {shard.samples} samples need "
                    f"{expected}"
                )
    check_files(file.file for file in manifest.files)
