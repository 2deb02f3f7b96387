"""The third stage: shards are read back, checked, and their accesses counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared.encoding import Splits
from hotrow.data.prepared.format import Schema, ShardRecord, as_bytes, map_shard
from hotrow.data.prepared.job import Job
from hotrow.data.prepared.spool import WORK
from hotrow.support.files import FileRecord, inside, make_durable, read_parts, why_wrong
from hotrow.support.messages import few

_LARGE = 1000.0  # numbers beyond it are pointed out


@dataclass(frozen=True)
class _Rows:
    """Some rows of a table."""

    table: str
    first: int
    last: int


class Verify:
    """Counts the accesses of as many rows at a time as fit the memory."""

    def __init__(self, job: Job, schema: Schema, rows: dict[str, int], splits: Splits) -> None:
        self._job, self._schema, self._rows, self._splits = job, schema, rows, splits

    def run(self) -> dict[str, FileRecord]:
        job = self._job
        shards = [(s, name == "train") for name, found in self._splits.items() for s in found]
        groups = self._groups()
        job.watch.stage("verifying", len(groups) * sum(each.bytes for each, _ in shards))
        done = samples = 0
        largest = none = np.zeros(len(self._schema.dense), np.float32)
        found: dict[str, list[FileRecord]] = {}
        for turn, group in enumerate(groups):
            counts = {each: np.zeros(each.last - each.first, np.int64) for each in group}
            check = self._why_wrong if turn == 0 else lambda _: (None, none)
            checked = job.cores.in_order(check, (shard for shard, _ in shards), ahead=2)
            for (shard, is_counted), (_, (wrong, most)) in zip(shards, checked, strict=True):
                if wrong:
                    raise ValueError(f"{wrong}; give the same command again to make it anew")
                largest = np.maximum(largest, most)
                self._count(shard, counts if is_counted else {})
                done, samples = done + shard.bytes, samples + shard.samples
                job.watch.advance(done, samples)
            for each, uses in counts.items():
                parts = found.setdefault(each.table, [])
                parts.append(job.disk.write(self._file(each), [as_bytes(uses)]))
        self._tell_of_large(largest)
        make_durable(job.out / "shards")
        return {name: self._joined(name, found[name]) for name in self._rows}

    def _tell_of_large(self, largest: NDArray[np.float32]) -> None:
        found = zip(self._schema.dense, largest.tolist(), strict=True)
        if large := [f"{name} (up to {most:,.0f})" for name, most in found if most > _LARGE]:
            self._job.watch.say(
                f"large numbers, from which a model learns little or nothing: {few(large)}; name "
                "them in log, or scale them in the files"
            )

    def _file(self, rows: _Rows) -> str:
        """Where the counts of these rows go; not yet to their place, if there are others."""
        place = self._schema.tables.index(rows.table)
        is_whole = rows.last - rows.first == self._rows[rows.table]
        return f"tables/{place:03}.counts" if is_whole else f"{WORK}/{place:03}-{rows.first}.counts"

    def _joined(self, table: str, parts: list[FileRecord]) -> FileRecord:
        if len(parts) == 1:
            return parts[0]
        job = self._job
        data = (each for part in parts for each in read_parts(job.out / part.file))
        return job.disk.write(self._file(_Rows(table, 0, self._rows[table])), data)

    def _groups(self) -> list[list[_Rows]]:
        """Tables, or parts of them, whose counts fit the memory together."""
        groups: list[list[_Rows]] = [[]]
        most = left = max(1, self._job.values_bytes // 8)
        for name, rows in self._rows.items():
            first = 0
            while first < rows:
                if not left or (left < rows - first and left < most):
                    groups.append([])
                    left = most
                last = min(rows, first + left)
                groups[-1].append(_Rows(name, first, last))
                left -= last - first
                first = last
        return groups

    def _arrays(self, shard: ShardRecord) -> dict[str, NDArray[Any]]:
        """The ids of each feature."""
        found = self._mapped(shard)
        ids = found["ids"]
        columns = {each.name: ids[:, place] for place, each in enumerate(self._schema.single)}
        return columns | {each.name: found[f"{each.name}.values"] for each in self._schema.jagged}

    def _mapped(self, shard: ShardRecord) -> dict[str, NDArray[Any]]:
        return map_shard(inside(self._job.out, shard.file), self._schema, shard)

    def _why_wrong(self, shard: ShardRecord) -> tuple[str | None, NDArray[np.float32]]:
        """On a worker; and the largest of each column of numbers."""
        make_durable(inside(self._job.out, shard.file))
        if wrong := why_wrong(self._job.out, shard, contents=True):
            return wrong, np.zeros(len(self._schema.dense), np.float32)
        arrays = self._arrays(shard)
        for each in self._schema.features:
            top = arrays[each.name].max(initial=0)
            assert top < self._rows[each.table], f"{shard.file}: {each.name} has row {top}"
        dense = self._mapped(shard)["dense"]
        return None, np.maximum(dense.max(axis=0, initial=0), -dense.min(axis=0, initial=0))

    def _count(self, shard: ShardRecord, counts: dict[_Rows, NDArray[np.int64]]) -> None:
        arrays = self._arrays(shard) if counts else {}

        def count(rows: _Rows) -> None:
            mine = counts[rows]
            for each in self._schema.features:
                if each.table != rows.table:
                    continue
                ids = arrays[each.name]
                if len(mine) < self._rows[rows.table]:
                    ids = ids[(ids >= rows.first) & (ids < rows.last)] - rows.first
                if len(mine) < 1 << 16:
                    mine += np.bincount(ids, minlength=len(mine))
                else:
                    used, uses = np.unique(ids, return_counts=True)
                    mine[used] += uses

        self._job.cores.each(count, counts)
