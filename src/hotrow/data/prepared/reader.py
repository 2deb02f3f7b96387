"""Prepared data as memory-mapped arrays. Reads; knows nothing of how it was made."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data.prepared.format import (
    Manifest,
    Schema,
    Section,
    ShardRecord,
    map_section,
    map_shard,
    read_manifest,
)
from hotrow.support.files import inside, why_wrong

_CHEAP_BYTES = 1 << 30  # of a folder whose checksums are compared by the way: a second or two
_REMEDY = "copy it again, or prepare the folder again with --restart"


@dataclass(frozen=True)
class Jagged:
    """Lists of ids: those of sample i are values[offsets[i]:offsets[i + 1]]."""

    offsets: NDArray[np.int64]  # [samples + 1]
    values: NDArray[Any]  # [offsets[-1]] int32 or int64


@dataclass(frozen=True)
class Shard:
    """Consecutive samples, mapped into memory: nothing is read until it is looked at."""

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
                raise ValueError(f"{wrong}; {_REMEDY}")

    @property
    def schema(self) -> Schema:
        return self.manifest.schema

    @property
    def table_rows(self) -> dict[str, int]:
        return {each.name: each.rows for each in self.manifest.tables}

    def samples(self, split: str) -> int:
        self._shards(split)
        return self.manifest.samples(split)

    def shards(self, split: str) -> list[Shard]:
        return [self._open(record) for record in self._shards(split)]

    def counts(self, table: str) -> NDArray[np.int64]:
        """How often the training split reads each row of a table: [rows], memory-mapped."""
        record = self.manifest.table(table)
        path = inside(self.folder, record.counts.file)
        return map_section(path, Section(0, "int64", (record.rows,)))

    @property
    def num_bytes(self) -> int:
        return sum(each.bytes for each in self.manifest.files)

    def profile(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For `profile=` of a collection: of every table the rows that the training split reads,
        and how often."""
        found = {}
        for table in self.table_rows:
            counts = self.counts(table)
            rows = np.flatnonzero(counts)
            found[table] = torch.from_numpy(rows), torch.from_numpy(counts[rows])
        return found

    def verify(self, advance: Callable[[int], None] = lambda size: None) -> None:
        """Reads every file and compares checksums; a ValueError names what has changed."""
        records = self.manifest.files
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            checked = pool.map(lambda each: why_wrong(self.folder, each, contents=True), records)
            for record, wrong in zip(records, checked, strict=True):
                if wrong:
                    raise ValueError(f"{wrong}; {_REMEDY}")
                advance(record.bytes)

    def verify_if_small(self) -> bool:
        """Compares checksums where that takes a second or two, and says whether it did."""
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
        found = map_shard(inside(self.folder, record.file), self.schema, record)
        jagged = {
            each.name: Jagged(found[f"{each.name}.offsets"], found[f"{each.name}.values"])
            for each in self.schema.jagged
        }
        return Shard(record.samples, found["ids"], found["dense"], found["label"], jagged)
