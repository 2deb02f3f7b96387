"""The stages of `prepare`: `Read` fills the spool and makes the vocabularies of tables, `Encode`
turns stretches of the spool into shards, `Verify` checks the shards and counts accesses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared.format import (
    SPLITS,
    Feature,
    Schema,
    ShardRecord,
    TableRecord,
    as_bytes,
    map_shard,
    write_shard,
)
from hotrow.data.prepared.job import WORK, BadRows, Job, Stretch
from hotrow.data.prepared.pieces import Piece, Samples
from hotrow.data.prepared.vocabulary import (
    Counted,
    Hashed,
    RowChecks,
    Tally,
    Vocabulary,
    bytes_per_value,
    joined,
)
from hotrow.support.files import FileRecord, inside, make_durable, why_wrong
from hotrow.support.hashing import mixed
from hotrow.support.messages import few
from hotrow.support.units import show_bytes

HASHED_ROWS = 10_000_000  # of a table that is too large for the memory, without max_rows
_VOCABULARY = f"{WORK}/vocabulary.json"
_LOG = f"{WORK}/encoded.jsonl"
_ZEROS = 1 << 22  # bytes that are written at once
_TOGETHER = 1 << 15  # samples whose ids fit a cache
_LARGE = 1000.0  # larger numbers are pointed out
_PARTS = 10  # at random: one of ten for validation, one for the test
_MOST_TIMES = 1 << 22
_LAST = 7  # of one file the last seventh is held back, as the last day of a week would be

# Returns for each line, counted over all files, or for each time, the number of its split.
Split = Callable[[NDArray[np.int64]], NDArray[np.uint8]]
Splits = dict[str, tuple[ShardRecord, ...]]
Rows = Vocabulary | Hashed


@dataclass(frozen=True)
class InOrder:
    """Lines (or times) before `held` are for training. The others are for the two `splits`, the
    second of which begins at `middle`."""

    held: int
    middle: int
    splits: tuple[int, int] = (1, 2)

    def __call__(self, lines: NDArray[np.int64]) -> NDArray[np.uint8]:
        first, second = self.splits
        held = np.where(lines >= self.middle, second, first)
        return np.where(lines >= self.held, held, 0).astype(np.uint8)


@dataclass(frozen=True)
class AtRandom:
    """The split of a line depends on the seed and its number alone."""

    seed: int

    def __call__(self, lines: NDArray[np.int64]) -> NDArray[np.uint8]:
        start = mixed(np.array([self.seed], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        part = mixed(start ^ lines.astype(np.uint64)) % np.uint64(_PARTS)
        return np.where(part < 2, part + 1, 0).astype(np.uint8)


def last_day_halved(lines_of_files: Sequence[int], *, first_line: int = 0) -> InOrder:
    """Hold back the last of several files, or the last seventh of one, rounded down: the first half
    for the test, because published figures are for it, and the second for validation. All as in
    the DLRM reference."""
    total = sum(lines_of_files)
    held = lines_of_files[-1] if len(lines_of_files) > 1 else total // _LAST
    end = first_line + total
    return InOrder(end - held, end - held // 2, (2, 1))


def by_quantiles(times: Sequence[NDArray[np.int64]]) -> InOrder:
    """Split at 70 % and 85 % of the samples' times, as TBSM splits Taobao: validation, then test.
    Of very many samples a regular part decides."""
    step = 1 + sum(map(len, times)) // _MOST_TIMES
    every = np.sort(np.concatenate([part[::step] for part in times]))
    return InOrder(int(every[len(every) * 7 // 10]), int(every[len(every) * 17 // 20]))


def out_of_order(names: Sequence[str]) -> str | None:
    """Return a hint if the last file may not be the last day: a shell puts day_10 before day_2."""
    numbers = [[int(digits) for digits in re.findall(r"[0-9]+", name)] for name in names]
    if len({re.sub(r"[0-9]+", "", name) for name in names}) > 1 or numbers == sorted(numbers):
        return None
    expected = names[numbers.index(max(numbers))]
    return (
        f"files are taken as they are given, in the order of time: {names[-1]} is the last one, "
        f"and by its number that would be {expected}. In a shell, day_{{0..23}} keeps the order"
    )


class Read:
    def __init__(self, job: Job) -> None:
        self._job, source = job, job.source
        self._dtype, self._schema = source.key_dtype, source.schema
        self._hashed_rows = job.settings.max_rows or HASHED_ROWS
        self._tallies: dict[str, Tally] = {}
        if not job.settings.hash and not (job.out / _VOCABULARY).exists():
            self._tallies = {name: Tally(self._dtype) for name in self._schema.tables}

    def run(self) -> list[Stretch]:
        job, sizes = self._job, self._job.sizes
        stretches, is_finished = self._restore()
        if is_finished:
            return stretches
        place = stretches[-1].after if stretches else None
        bad = stretches[-1].bad if stretches else BadRows()
        job.source.ready(job.disk, job.cores, job.watch)
        file_bytes = [path.stat().st_size for path in job.source.paths]
        samples = size = 0
        job.watch.stage("reading", sum(file_bytes))
        parts: list[tuple[Piece, Samples]] = []
        counted: list[dict[str, Counted]] = []

        def close(
            parts: list[tuple[Piece, Samples]], counted: list[dict[str, Counted]], bad: BadRows
        ) -> None:
            stretches.append(job.spool.write(len(stretches), parts, bad))
            self._add(counted)

        for piece, (part, counts) in job.cores.in_order(self._parse, job.source.pieces(place)):
            bad = bad.and_more(part.bad.count, job.describe(piece, part))
            parts.append((replace(piece, data=None), part))  # its text is not needed any more
            counted.append(counts)
            samples += len(part.lines)
            job.watch.advance(sum(file_bytes[: piece.place.file]) + piece.read_bytes, samples)
            size += part.num_bytes
            if len(parts) == sizes.stretch_pieces or size >= sizes.stretch_bytes:
                job.cores.behind(partial(close, parts, counted, bad))
                parts, counted, size = [], [], 0
        if parts:
            job.cores.behind(partial(close, parts, counted, bad))
        job.cores.catch_up()
        self._check(stretches, bad)
        job.spool.finish()
        return stretches

    def _check(self, stretches: list[Stretch], bad: BadRows) -> None:
        """Refuse files without samples."""
        if sum(stretch.samples for stretch in stretches):
            return
        source = self._job.source
        lines = sum(lines for stretch in stretches for lines in stretch.lines.values())
        if lines and not (bad.count or source.times):  # they are the headers
            names = few(str(path) for path in source.paths)
            raise ValueError(f"{names}: a header, and no lines below it")
        if lines > bad.count and source.times:  # Taobao's samples are made of several lines
            raise ValueError(
                f"{lines - bad.count:,} good lines make no sample: no user has two of them"
            )
        first = f"; the first of {bad.count:,} bad ones: {bad.examples[0]}" if bad.examples else ""
        raise ValueError("there is no good line in the files" + first)

    def _parse(self, piece: Piece) -> tuple[Samples, dict[str, Counted]]:
        """Runs on workers."""
        samples = self._job.parse(piece)
        return samples, self._count(samples)

    def _count(self, samples: Samples) -> dict[str, Counted]:
        counted = {}
        for table in list(self._tallies):
            keys = [samples.keys[f.name] for f in self._schema.features if f.table == table]
            counted[table] = Counted.of(keys[0] if len(keys) == 1 else np.concatenate(keys))
        return counted

    def _add(self, counted: list[dict[str, Counted]]) -> None:
        """Add the counts of a stretch together: how many parts they came in does not matter."""
        for table, tally in self._tallies.items():
            tally.add(joined([counts[table] for counts in counted]))
        self._fit()

    def _fit(self) -> None:
        """Leave the largest tables to hashing until the others fit in memory."""
        job = self._job
        most = job.values_bytes // bytes_per_value(self._dtype)
        while sum(map(len, self._tallies.values())) > most:
            for tally in self._tallies.values():
                tally.settle()  # pending values may be known already
            if sum(map(len, self._tallies.values())) <= most:
                return
            largest = max(self._tallies, key=lambda name: len(self._tallies[name]))
            values = len(self._tallies.pop(largest))
            job.watch.say(
                f"table {largest} has more than {values:,} values, which do not fit --memory "
                f"{show_bytes(job.settings.memory_bytes)} beside the other tables: they are "
                f"hashed into {self._hashed_rows:,} rows"
            )

    def _restore(self) -> tuple[list[Stretch], bool]:
        """Return the stretches of a stopped run, and whether those are all."""
        job = self._job
        stretches, is_finished = job.spool.log()
        if not stretches:
            return [], False
        if is_finished and not self._tallies:  # the vocabularies exist: nothing to count again
            return stretches, True
        total = sum(stretch.samples for stretch in stretches)
        job.watch.stage("checking what is read already", total)
        samples = 0
        for stretch, is_whole in job.cores.in_order(job.spool.is_whole, stretches):
            if not is_whole:
                job.watch.say(f"{job.out / stretch.file.file} is not whole: reading from there")
                return stretches[: stretch.number], False
            if self._tallies:
                self._add([self._count(job.spool.read(stretch))])
            samples += stretch.samples
            job.watch.advance(samples, samples)
        return stretches, is_finished

    def tables(self) -> tuple[dict[str, Rows], dict[str, partial[TableRecord]]]:
        """Return how values become rows, written once and then read back; and the records of
        tables, which lack `counts`."""
        job = self._job
        noted = job.out / _VOCABULARY
        if not noted.exists():
            records = {
                name: self._write(place, name) for place, name in enumerate(self._schema.tables)
            }
            job.disk.write(_VOCABULARY, [json.dumps(records).encode()])
        tables: dict[str, Rows] = {}
        lacking = {}
        for name, record in json.loads(noted.read_text()).items():
            ids: Rows = Hashed(self._hashed_rows)
            keys = None if record["keys"] is None else FileRecord(**record["keys"])
            if keys is not None:
                if wrong := why_wrong(job.out, keys, contents=True):
                    raise ValueError(f"{wrong}; --restart makes it again")
                ids = Vocabulary(np.fromfile(inside(job.out, keys.file), self._dtype))
            tables[name] = ids
            facts = (name, ids.rows, ids.how, record["values"])
            lacking[name] = partial(TableRecord, *facts, keys=keys, key_dtype=self._dtype)
        return tables, lacking

    def _write(self, place: int, name: str) -> dict[str, Any]:
        job = self._job
        if name not in self._tallies:
            return {"keys": None, "values": None}
        # The tally goes: its counts are not needed once the keys are written.
        keys, values = self._tallies.pop(name).vocabulary(
            min_frequency=job.settings.min_frequency, max_rows=job.settings.max_rows
        )
        file = job.disk.write(f"tables/{place:03}.keys", [as_bytes(keys)])
        return {"keys": asdict(file), "values": values}


class Encode:
    def __init__(self, job: Job, schema: Schema, tables: dict[str, Rows], split: Split) -> None:
        self._job, self._schema, self._ids, self._split = job, schema, tables, split
        self._done: dict[int, dict[str, ShardRecord]] = {}
        self._checks: dict[str, RowChecks] = {}  # of tables some of whose keys are hashes

    def run(self, stretches: list[Stretch]) -> Splits:
        job = self._job
        self._restore()
        self._open_checks(stretches)
        left = [stretch for stretch in stretches if stretch.number not in self._done]
        job.watch.stage("encoding", sum(stretch.samples for stretch in left))
        samples = 0
        for stretch in left:  # one is encoded while the one before is written
            job.cores.behind(partial(self._write, stretch, *self._encode(stretch)))
            samples += stretch.samples
            job.watch.advance(samples, samples)
        job.cores.catch_up()
        done = [self._done[stretch.number] for stretch in stretches]
        return {name: tuple(shards[name] for shards in done if name in shards) for name in SPLITS}

    def _samples(self, stretch: Stretch) -> Samples:
        job = self._job
        if (job.out / stretch.file.file).exists() and job.spool.is_whole(stretch):
            return job.spool.read(stretch)
        # A shard was damaged after its part of the spool was removed: read the files again.
        parts = []
        for piece in job.source.pieces(stretch.place):
            parts.append((piece, job.parse(piece)))
            if piece.after == stretch.after:
                break
        again = job.spool.write(stretch.number, parts, stretch.bad)
        if again.file.sha256 != stretch.file.sha256:
            raise ValueError("the source files have changed; --restart prepares them anew")
        return job.spool.read(again)

    def _encode(self, stretch: Stretch) -> tuple[Samples, NDArray[Any], dict[str, NDArray[Any]]]:
        """Return the samples of a stretch, their ids, and the ids of lists by feature."""
        schema, samples = self._schema, self._samples(stretch)
        ids = np.empty((stretch.samples, len(schema.single)), schema.id_dtype)

        def fill(first: int) -> None:
            here = slice(first, first + _TOGETHER)
            for place, feature in enumerate(schema.single):
                ids[here, place] = self._rows(feature, samples, here)

        def rows(feature: Feature) -> NDArray[Any]:
            return self._rows(feature, samples, slice(None)).astype(schema.id_dtype)

        self._job.cores.map(fill, range(0, stretch.samples, _TOGETHER))
        names = [feature.name for feature in schema.jagged]
        lists = self._job.cores.map(rows, schema.jagged)
        return samples, ids, dict(zip(names, lists, strict=True))

    def _write(
        self,
        stretch: Stretch,
        samples: Samples,
        ids: NDArray[Any],
        values: dict[str, NDArray[Any]],
    ) -> None:
        """Write the shards of a stretch, one for each split that it has samples of."""
        job, codes = self._job, self._split(samples.lines)
        shards = {}
        for code in np.flatnonzero(np.bincount(codes)).tolist():
            mask = codes == code
            arrays = {"ids": ids, "dense": samples.dense, "label": samples.label}
            if not mask.all():
                arrays = {name: array[mask] for name, array in arrays.items()}
            for name, rows in values.items():
                lengths = samples.lengths[name]
                arrays[f"{name}.offsets"] = np.concatenate([[0], np.cumsum(lengths[mask])])
                arrays[f"{name}.values"] = rows[np.repeat(mask, lengths)]
            file = f"shards/{SPLITS[code]}-{stretch.number:05}.bin"
            shards[SPLITS[code]] = write_shard(job.disk, file, self._schema, arrays)
        self._done[stretch.number] = shards
        records = {name: asdict(shard) for name, shard in shards.items()}
        job.disk.append(_LOG, {"stretch": stretch.number, "shards": records})
        job.spool.remove(stretch)

    def _open_checks(self, stretches: list[Stretch]) -> None:
        checked = {name for stretch in stretches for name in stretch.checked}
        hashed = {feature.table for feature in self._schema.features if feature.name in checked}
        for place, name in enumerate(self._schema.tables):
            ids = self._ids[name]
            if name in hashed and isinstance(ids, Vocabulary):
                file = f"{WORK}/{place:03}.checks"
                if not (self._job.out / file).exists():
                    size = 4 * ids.rows
                    zeros = (bytes(min(_ZEROS, size - at)) for at in range(0, size, _ZEROS))
                    self._job.disk.write(file, zeros, durable=False)
                self._checks[name] = RowChecks(self._job.out / file)

    def _rows(self, feature: Feature, samples: Samples, here: slice) -> NDArray[np.int64]:
        rows = self._ids[feature.table].rows_of(samples.keys[feature.name][here])
        if (known := self._checks.get(feature.table)) is not None:
            checks = samples.checks.get(feature.name)
            if not known.confirm(rows, None if checks is None else checks[here]):
                raise ValueError(
                    f"two different values of table {feature.table!r} have the same 64-bit hash "
                    "and would share a row; write them as whole numbers or as texts of up to 8 "
                    "bytes, or let values share rows with --hash and --max-rows"
                )
        return rows

    def _restore(self) -> None:
        """Keep the shards of a stopped run that are still as they were written."""
        job = self._job
        for record in job.disk.log(_LOG):
            shards = {name: ShardRecord(**shard) for name, shard in record["shards"].items()}
            self._done[record["stretch"]] = shards
        if not self._done:
            return
        job.watch.stage("checking shards", len(self._done))
        checked = job.cores.in_order(self._why_wrong, list(self._done.items()))
        for count, ((number, _), reason) in enumerate(checked):
            if reason:
                job.watch.say(f"{reason}: it is made again")
                del self._done[number]
            job.watch.advance(count + 1, 0)

    def _why_wrong(self, done: tuple[int, dict[str, ShardRecord]]) -> str | None:
        reasons = (why_wrong(self._job.out, shard, contents=True) for shard in done[1].values())
        return next((reason for reason in reasons if reason), None)


class Verify:
    """Checks all shards, and counts the accesses of rows. Tables stand one after the other; a pass
    over the shards counts as many of their rows as fit in memory."""

    def __init__(self, job: Job, schema: Schema, rows: dict[str, int], splits: Splits) -> None:
        self._job, self._schema, self._rows = job, schema, rows
        ends = np.cumsum(list(rows.values())).tolist()
        self._bounds = {name: (end - rows[name], end) for name, end in zip(rows, ends, strict=True)}
        self._shards = [(shard, name == "train") for name in splits for shard in splits[name]]
        self._largest = np.zeros(len(schema.dense), np.float32)  # of each column of numbers

    def run(self) -> dict[str, FileRecord]:
        job, total = self._job, sum(self._rows.values())
        counts = np.zeros(min(total, max(1, job.values_bytes // 8)), np.int64)
        passes = -(-total // len(counts))
        job.watch.stage("verifying", passes * sum(shard.bytes for shard, _ in self._shards))
        counted = (self._pass(number, counts) for number in range(passes))
        left = counts[:0]

        def counts_of(rows: int) -> Iterator[memoryview]:
            nonlocal left
            while rows:
                left = left if len(left) else next(counted)
                part, left = left[:rows], left[rows:]
                rows -= len(part)
                yield as_bytes(part)

        files = {
            name: job.disk.write(f"tables/{place:03}.counts", counts_of(rows))
            for place, (name, rows) in enumerate(self._rows.items())
        }
        make_durable(job.out / "shards")
        columns = zip(self._schema.dense, self._largest.tolist(), strict=True)
        if large := [f"{name} (up to {most:,.0f})" for name, most in columns if most > _LARGE]:
            job.watch.say(
                f"large numbers, from which a model learns little or nothing: {few(large)}; name "
                "them in log, or scale them in the files"
            )
        return files

    def _pass(self, number: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count rows `number` x len(counts) and on, in the memory of `counts`. The first pass also
        checks the shards."""
        job, first = self._job, number * len(counts)
        counts = counts[: sum(self._rows.values()) - first]
        counts[:] = 0
        done = number * sum(shard.bytes for shard, _ in self._shards)
        samples = number * sum(shard.samples for shard, _ in self._shards)
        check = self._why_wrong if not number else lambda _: (None, self._largest)
        checked = job.cores.in_order(check, (shard for shard, _ in self._shards), ahead=2)
        for (shard, is_counted), (_, (wrong, most)) in zip(self._shards, checked, strict=True):
            if wrong:
                raise ValueError(f"{wrong}; give the same command again to make it anew")
            self._largest = np.maximum(self._largest, most)
            if is_counted:
                job.cores.map(partial(self._count, self._ids(shard), counts, first), self._rows)
            done, samples = done + shard.bytes, samples + shard.samples
            job.watch.advance(done, samples)
        return counts

    def _count(
        self, ids_of: dict[str, NDArray[Any]], counts: NDArray[np.int64], first: int, table: str
    ) -> None:
        """Add the accesses of one table's rows to the counts, which begin with row `first` of all.
        Runs on workers."""
        start, end = self._bounds[table]
        low, high = max(first, start), min(first + len(counts), end)
        if low >= high:
            return
        uses = counts[low - first : high - first]
        for feature in self._schema.features:
            if feature.table != table:
                continue
            ids = ids_of[feature.name]
            if len(uses) < end - start:
                ids = ids[(ids >= low - start) & (ids < high - start)] - (low - start)
            if len(uses) < 1 << 16:
                uses += np.bincount(ids, minlength=len(uses))
            else:
                used, times = np.unique(ids, return_counts=True)
                uses[used] += times

    def _why_wrong(self, shard: ShardRecord) -> tuple[str | None, NDArray[np.float32]]:
        """Return what is wrong with a shard, and the largest of each column of numbers. Runs on
        workers."""
        make_durable(inside(self._job.out, shard.file))
        if wrong := why_wrong(self._job.out, shard, contents=True):
            return wrong, self._largest
        ids = self._ids(shard)
        for feature in self._schema.features:
            top = ids[feature.name].max(initial=0)
            assert top < self._rows[feature.table], f"{shard.file}: {feature.name} has row {top}"
        dense = self._mapped(shard)["dense"]
        return None, np.maximum(dense.max(axis=0, initial=0), -dense.min(axis=0, initial=0))

    def _ids(self, shard: ShardRecord) -> dict[str, NDArray[Any]]:
        """Return the ids of each feature in a shard."""
        arrays = self._mapped(shard)
        columns = {f.name: arrays["ids"][:, place] for place, f in enumerate(self._schema.single)}
        return columns | {f.name: arrays[f"{f.name}.values"] for f in self._schema.jagged}

    def _mapped(self, shard: ShardRecord) -> dict[str, NDArray[Any]]:
        return map_shard(inside(self._job.out, shard.file), self._schema, shard)
