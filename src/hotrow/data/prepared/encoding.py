"""The second stage: stretches of the spool into shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared.format import SPLITS, Feature, Schema, ShardRecord, write_shard
from hotrow.data.prepared.job import Job
from hotrow.data.prepared.keys import Checks
from hotrow.data.prepared.reading import Table
from hotrow.data.prepared.rows import Samples
from hotrow.data.prepared.splits import Split
from hotrow.data.prepared.spool import WORK, Stretch
from hotrow.data.prepared.vocabulary import RowChecks, Vocabulary
from hotrow.support.files import why_wrong

CHUNK = 1 << 15  # samples that are encoded together
_ZEROS = 1 << 22  # bytes that are written at once
Splits = dict[str, tuple[ShardRecord, ...]]


@dataclass(frozen=True)
class _Part:
    """Samples of one split, keys become rows."""

    ids: NDArray[Any]
    dense: NDArray[np.float32]
    label: NDArray[np.uint8]
    lengths: dict[str, NDArray[np.int64]]
    values: dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Chunk:
    """Some consecutive samples of a stretch; `values` says where those of jagged features lie."""

    stretch: Stretch
    samples: Samples
    first: int
    last: int
    is_last: bool
    values: dict[str, tuple[int, int]]


class Encode:
    def __init__(self, job: Job, schema: Schema, tables: dict[str, Table], split: Split) -> None:
        self._job, self._schema, self._split = job, schema, split
        self._ids = {name: each.ids for name, each in tables.items()}
        self._log = f"{WORK}/encoded.jsonl"
        self._done: dict[int, dict[str, ShardRecord]] = {}
        self._checks: dict[str, RowChecks] = {}  # of tables some of whose keys are hashes

    def run(self, stretches: list[Stretch]) -> Splits:
        job = self._job
        self._restore()
        self._open_checks(stretches)
        left = [each for each in stretches if each.number not in self._done]
        job.watch.stage("encoding", sum(each.samples for each in left))
        samples = 0
        parts: dict[str, list[_Part]] = {name: [] for name in SPLITS}
        for chunk, found in job.cores.in_order(self._encode, self._chunks(left)):
            for name, part in found.items():
                parts[name].append(part)
            samples += chunk.last - chunk.first
            job.watch.advance(samples, samples)
            if chunk.is_last:
                job.cores.behind(partial(self._write, chunk.stretch, parts))
                parts = {name: [] for name in SPLITS}
        job.cores.catch_up()
        done = [self._done[each.number] for each in stretches]
        return {name: tuple(each[name] for each in done if name in each) for name in SPLITS}

    def _chunks(self, stretches: list[Stretch]) -> Iterator[_Chunk]:
        for stretch in stretches:
            samples = self._samples(stretch)
            at = dict.fromkeys(samples.lengths, 0)
            # An empty stretch is one chunk, too: its end must be seen.
            for first in range(0, max(1, stretch.samples), CHUNK):
                last = min(first + CHUNK, stretch.samples)
                values = {}
                for name, lengths in samples.lengths.items():
                    values[name] = (at[name], at[name] + int(lengths[first:last].sum()))
                    at[name] = values[name][1]
                yield _Chunk(stretch, samples, first, last, last == stretch.samples, values)

    def _samples(self, stretch: Stretch) -> Samples:
        job = self._job
        if (job.out / stretch.file.file).exists() and job.spool.is_whole(stretch):
            return job.spool.read(stretch)
        # A shard was damaged after its part of the spool had gone: from the files again.
        found = []
        for piece in job.source.pieces(stretch.place):
            found.append((piece, job.parse(piece)))
            if piece.after == stretch.after:
                break
        again = job.spool.write(stretch.number, found, stretch.bad)
        if again.file.sha256 != stretch.file.sha256:
            raise ValueError("the source files have changed; --restart prepares them anew")
        return job.spool.read(again)

    def _encode(self, chunk: _Chunk) -> dict[str, _Part]:
        """On a worker."""
        samples, here = chunk.samples, slice(chunk.first, chunk.last)
        ids = np.empty((chunk.last - chunk.first, len(self._schema.single)), self._schema.id_dtype)
        for place, each in enumerate(self._schema.single):
            ids[:, place] = self._rows(each, samples, here)
        lengths, values = {}, {}
        for each in self._schema.jagged:
            first, last = chunk.values[each.name]
            rows = self._rows(each, samples, slice(first, last))
            values[each.name] = rows.astype(self._schema.id_dtype)
            lengths[each.name] = np.array(samples.lengths[each.name][here])
        dense, label = np.array(samples.dense[here]), np.array(samples.label[here])
        whole = _Part(ids, dense, label, lengths, values)
        codes = self._split(samples.lines[here])
        present = np.unique(codes).tolist()
        if len(present) == 1:
            return {SPLITS[present[0]]: whole}
        return {SPLITS[code]: _only(whole, codes == code) for code in present}

    def _open_checks(self, stretches: list[Stretch]) -> None:
        checked = {name for stretch in stretches for name in stretch.checked}
        hashed = {each.table for each in self._schema.features if each.name in checked}
        for place, name in enumerate(self._schema.tables):
            ids = self._ids[name]
            if name in hashed and isinstance(ids, Vocabulary):
                file = f"{WORK}/{place:03}.checks"
                if not (self._job.out / file).exists():
                    self._job.disk.write(file, _zeros(4 * ids.rows), durable=False)
                self._checks[name] = RowChecks(self._job.out / file)

    def _rows(self, feature: Feature, samples: Samples, here: slice) -> NDArray[np.int64]:
        rows = self._ids[feature.table].rows_of(samples.keys[feature.name][here])
        if (known := self._checks.get(feature.table)) is not None:
            checks: Checks | None = samples.checks.get(feature.name)
            if not known.confirm(rows, None if checks is None else checks[here]):
                raise ValueError(
                    f"two different values of table {feature.table!r} have the same 64-bit hash "
                    "and would share a row; write them as whole numbers or as texts of up to 8 "
                    "bytes, or let values share rows with --hash and --max-rows"
                )
        return rows

    def _write(self, stretch: Stretch, parts: dict[str, list[_Part]]) -> None:
        job, done = self._job, {}
        for name, found in parts.items():
            samples = sum(len(each.label) for each in found)
            if not samples:
                continue
            values = {
                each.name: sum(len(part.values[each.name]) for part in found)
                for each in self._schema.jagged
            }
            file = f"shards/{name}-{stretch.number:05}.bin"
            arrays = partial(_arrays, found)
            done[name] = write_shard(job.disk, file, self._schema, samples, values, arrays)
        self._done[stretch.number] = done
        records = {name: asdict(each) for name, each in done.items()}
        job.disk.append(self._log, json.dumps({"stretch": stretch.number, "shards": records}))
        job.spool.remove(stretch)

    def _restore(self) -> None:
        """Shards that are there as they were written are kept."""
        job, path = self._job, self._job.out / self._log
        if not path.exists():
            return
        for line in path.read_bytes().split(b"\n"):
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                continue  # half a line, of a run that was killed
            shards = {name: ShardRecord(**each) for name, each in found["shards"].items()}
            self._done[found["stretch"]] = shards
        job.watch.stage("checking shards", len(self._done))
        checked = job.cores.in_order(self._why_wrong, list(self._done.items()))
        for count, ((number, _), reason) in enumerate(checked):
            if reason:
                job.watch.say(f"{reason}: it is made again")
                del self._done[number]
            job.watch.advance(count + 1, 0)

    def _why_wrong(self, found: tuple[int, dict[str, ShardRecord]]) -> str | None:
        reasons = (why_wrong(self._job.out, each, contents=True) for each in found[1].values())
        return next((reason for reason in reasons if reason), None)


def _zeros(size: int) -> Iterator[bytes]:
    for first in range(0, size, _ZEROS):
        yield bytes(min(_ZEROS, size - first))


def _only(part: _Part, mask: NDArray[np.bool_]) -> _Part:
    values = {name: each[np.repeat(mask, part.lengths[name])] for name, each in part.values.items()}
    lengths = {name: each[mask] for name, each in part.lengths.items()}
    return _Part(part.ids[mask], part.dense[mask], part.label[mask], lengths, values)


def _arrays(parts: list[_Part], name: str) -> Iterator[NDArray[Any]]:
    """The arrays that make one section of a shard."""
    feature, _, what = name.rpartition(".")
    if what == "offsets":
        lengths = np.concatenate([each.lengths[feature] for each in parts])
        yield np.concatenate([[0], np.cumsum(lengths)])
        return
    for each in parts:
        yield each.values[feature] if what == "values" else getattr(each, what)
