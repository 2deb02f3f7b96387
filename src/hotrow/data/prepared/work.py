"""Prepares: reads samples and counts their values, encodes them into shards, verifies these.

    files -> pieces -> samples with keys -> spool (.work/)
                                |-> counts of values -> vocabularies
                          spool -> samples with rows -> splits -> shards
                         shards -> checksums, ranges; accesses of each row

Pieces are read in order by one thread and worked on by all cores. In memory are: the pieces under
way, one stretch of them, and the values of all tables, which get what is left of `memory_bytes`; a
table that does not fit is hashed instead. So memory does not depend on the size of the input.

Whatever is finished is noted in .work/, and a stopped run goes on from there. What is written
depends on the files and the settings alone: not on cores, on time, or on how often it was stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotrow import __version__
from hotrow.budget import show_bytes
from hotrow.data.prepared.disk import Disk, inside, make_durable, read_parts, why_wrong
from hotrow.data.prepared.format import (
    MANIFEST,
    SPLITS,
    FileRecord,
    Manifest,
    Schema,
    ShardRecord,
    TableRecord,
    id_dtype,
    read_manifest,
    sections,
    to_json,
)
from hotrow.data.prepared.layouts import Samples, Source
from hotrow.data.prepared.splits import (
    AtRandom,
    ByTime,
    Split,
    by_quantiles,
    last_day_halved,
)
from hotrow.data.prepared.spool import WORK, BadRows, Spool, Stretch, as_bytes, in_sections
from hotrow.data.prepared.text import PIECE_BYTES, Piece
from hotrow.data.prepared.vocabulary import (
    Counted,
    Hashed,
    Tally,
    Vocabulary,
    bytes_per_value,
    joined,
)

HASHED_ROWS = 10_000_000  # of a table that is too large for the memory, if there is no max_rows
_PIECES = 16  # in a stretch
_CHUNK = 1 << 15  # samples that are encoded together
_BASE_BYTES = 384 << 20  # Python, torch and the libraries they load
_PIECE_FACTOR = 12  # bytes of work for each byte of a piece's text, at the most
_STRETCH_FACTOR = 3  # the same for a stretch's samples, with their counts

Item = TypeVar("Item")
Result = TypeVar("Result")
Ids = Vocabulary | Hashed
Splits = dict[str, tuple[ShardRecord, ...]]


@dataclass(frozen=True)
class Settings:
    """What decides about the bytes that are written. A run is resumed with the same only."""

    min_frequency: int = 1
    max_rows: int | None = None
    hash: bool = False
    split: str = "time"
    seed: int = 0
    bad_rows: str = "error"
    memory_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if self.min_frequency < 1:
            raise ValueError(f"--min-frequency must be at least 1, not {self.min_frequency}")
        if self.max_rows is not None and self.max_rows < 2:
            raise ValueError(f"--max-rows must be at least 2, not {self.max_rows}")
        if self.hash and self.max_rows is None:
            raise ValueError(
                "--hash needs --max-rows: where values are not counted, the number of rows of "
                "each table must be given"
            )
        if self.hash and self.min_frequency > 1:
            raise ValueError("--hash counts no values, so it takes no --min-frequency")
        if self.split not in ("time", "random"):
            raise ValueError(f"--split must be time or random, not {self.split!r}")
        if self.bad_rows not in ("skip", "error"):
            raise ValueError(f"--bad-rows must be skip or error, not {self.bad_rows!r}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be at least 0 and below 2**63, not {self.seed}")


class Watch(Protocol):
    """Whoever is told how the work goes."""

    def stage(self, title: str, total: int) -> None: ...
    def advance(self, done: int, samples: int) -> None: ...
    def say(self, text: str) -> None: ...


class NoWatch:
    """Nobody."""

    def stage(self, title: str, total: int) -> None: ...
    def advance(self, done: int, samples: int) -> None: ...
    def say(self, text: str) -> None: ...


def least_memory(workers: int, piece_bytes: int = PIECE_BYTES) -> int:
    """What a run takes besides the values of its tables."""
    pieces = 2 * (workers + 1) * piece_bytes * _PIECE_FACTOR
    return _BASE_BYTES + pieces + _PIECES * piece_bytes * _STRETCH_FACTOR


def prepare(
    source: Source,
    out: Path,
    settings: Settings,
    *,
    workers: int | None = None,
    restart: bool = False,
    watch: Watch | None = None,
    disk: Disk | None = None,
) -> Manifest:
    """Makes the folder `out`, or finishes it; see the top of this module."""
    workers = workers or len(os.sched_getaffinity(0))
    room = settings.memory_bytes - least_memory(workers)
    if room <= 0:
        raise ValueError(
            f"--memory {show_bytes(settings.memory_bytes)} is too small: {workers} workers need "
            f"{show_bytes(least_memory(workers))} besides the values of the tables; give more "
            "memory, or fewer --workers"
        )
    job = _Job(source, out, settings, room, watch or NoWatch(), disk or Disk(out))
    with job.alone(restart=restart), ThreadPoolExecutor(workers) as pool:
        return job.run(pool, ahead=2 * workers)


class _Job:
    """What all stages share."""

    def __init__(
        self, source: Source, out: Path, settings: Settings, room: int, watch: Watch, disk: Disk
    ) -> None:
        self.source, self.out, self.settings = source, out, settings
        self.room, self.watch, self.disk = room, watch, disk
        self.spool = Spool(disk, source.schema, source.key_dtype)
        self.describes = {
            "layout": source.name,
            "files": [_described(path) for path in source.paths],
            **source.describes,
            **asdict(settings),
        }

    def run(self, pool: ThreadPoolExecutor, *, ahead: int) -> Manifest:
        if (self.out / MANIFEST).exists():
            self.watch.say(f"{self.out} is finished already: nothing is left to do")
            return read_manifest(self.out)
        reading = _Read(self)
        stretches = reading.run(pool, ahead)
        tables = reading.tables(stretches)
        bad = stretches[-1].bad
        lines = _lines_of_files(stretches, len(self.source.paths))
        split = self._split(stretches, lines)
        schema = replace(
            self.source.schema, id_dtype=id_dtype([each.ids.rows for each in tables.values()])
        )
        rows = {name: each.ids.rows for name, each in tables.items()}
        records = {name: each.record() for name, each in tables.items()}
        splits = _Encode(self, schema, tables, split).run(stretches, pool, ahead)
        del tables  # their memory is for counts now
        if not splits["train"]:
            raise ValueError(
                f"{sum(lines):,} lines leave none for training; give more, or --split random"
            )
        counts = _Verify(self, schema, rows, splits).run(pool)
        manifest = Manifest(
            schema=schema,
            tables=tuple(record(counts[name]) for name, record in records.items()),
            splits=splits,
            source={"lines": sum(lines), "bad_rows": bad.count, "bad_examples": bad.examples},
            settings=self.describes,
            made_by=f"hotrow {__version__}",
        )
        self.disk.write(MANIFEST, [to_json(manifest).encode()])
        shutil.rmtree(self.out / WORK)
        return manifest

    def _split(self, stretches: list[Stretch], lines: list[int]) -> Split:
        if self.settings.split == "random":
            return AtRandom(self.settings.seed)
        if not self.source.times:
            return last_day_halved(lines)
        noted = self.out / WORK / "split.json"  # the spool goes while shards are made
        if not noted.exists():
            split = by_quantiles([self.spool.read(each).lines for each in stretches])
            self.disk.write(f"{WORK}/split.json", [json.dumps(asdict(split)).encode()])
        return ByTime(**json.loads(noted.read_text()))

    def parse(self, piece: Piece) -> Samples:
        """On a worker."""
        samples = self.source.parse(piece)
        if samples.bad and self.settings.bad_rows == "error":
            raise ValueError(
                f"{self.describe(piece, samples)[0]}. --bad-rows skip leaves such lines out and "
                "counts them"
            )
        return samples

    def describe(self, piece: Piece, samples: Samples, most: int = 5) -> list[str]:
        path, before = self.source.paths[piece.place.file], piece.place.file_line
        return [
            f"{path}, line {before + each.line + 1:,}: {each.reason}" for each in samples.bad[:most]
        ]

    # The folder, and what a stopped run has left in it.

    @contextmanager
    def alone(self, *, restart: bool) -> Iterator[None]:
        """One process at a time works in a folder."""
        work = self.out / WORK
        is_new = not self.out.exists() or not any(self.out.iterdir())
        known = is_new or work.is_dir() or (self.out / MANIFEST).exists()
        if not known:
            raise ValueError(f"{self.out} holds other files; choose a new folder for --out")
        work.mkdir(parents=True, exist_ok=True)
        with (work / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"another process is preparing {self.out}") from None
            if restart:
                self._clear()
            self._check_folder()
            yield
        if (self.out / MANIFEST).exists():
            shutil.rmtree(work, ignore_errors=True)

    def _check_folder(self) -> None:
        noted = self.out / WORK / "settings.json"
        now = json.loads(json.dumps(self.describes))
        if (self.out / MANIFEST).exists():
            before = read_manifest(self.out).settings
            if before != now:
                raise ValueError(
                    f"{self.out} holds data prepared with other {_differs(before, now)}; choose "
                    "another --out, or --restart to replace it"
                )
        elif noted.exists():
            before = json.loads(noted.read_text())
            if before != now:
                raise ValueError(
                    f"{self.out} holds a stopped run with other {_differs(before, now)}; resume "
                    "with the same files and settings, or --restart"
                )
        else:
            self.disk.write(f"{WORK}/settings.json", [json.dumps(now).encode()])

    def _clear(self) -> None:
        (self.out / MANIFEST).unlink(missing_ok=True)
        for name in ("shards", "tables"):
            shutil.rmtree(self.out / name, ignore_errors=True)
        for path in (self.out / WORK).iterdir():
            if path.name != "lock":
                path.unlink()


@dataclass(frozen=True)
class _Table:
    """How a table's values become rows."""

    name: str
    ids: Ids
    values: int | None
    keys: FileRecord | None
    key_dtype: str

    def record(self) -> Callable[[FileRecord], TableRecord]:
        """All but its counts, without the memory that its values take."""
        name, rows, how = self.name, self.ids.rows, self.ids.how
        values, keys, dtype = self.values, self.keys, self.key_dtype
        return lambda counts: TableRecord(name, rows, how, values, counts, keys, dtype)


class _Read:
    """The first stage: the spool, and the vocabularies."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        source = job.source
        self._dtype, self._schema = source.key_dtype, source.schema
        self._tallies: dict[str, Tally] = {}
        self._vocabulary = f"{WORK}/vocabulary.json"
        if not job.settings.hash and not (job.out / self._vocabulary).exists():
            self._tallies = {name: Tally(self._dtype) for name in self._schema.tables}

    def run(self, pool: ThreadPoolExecutor, ahead: int) -> list[Stretch]:
        job = self._job
        stretches, finished = self._restore(pool, ahead)
        if finished:
            return stretches
        place = stretches[-1].after if stretches else None
        bad = stretches[-1].bad if stretches else BadRows()
        sizes = [path.stat().st_size for path in job.source.paths]
        samples = 0
        job.watch.stage("reading", sum(sizes))
        found: list[tuple[Piece, Samples]] = []
        counted: list[dict[str, Counted]] = []
        pieces = job.source.pieces(place)

        def close() -> None:
            stretches.append(job.spool.write(len(stretches), found, bad))
            self._add(counted)
            found.clear()
            counted.clear()

        for piece, (part, counts) in in_order(pool, self._parse, pieces, ahead):
            bad = BadRows(bad.count, list(bad.examples))
            bad.add(len(part.bad), job.describe(piece, part))
            found.append((piece, part))
            counted.append(counts)
            samples += len(part.lines)
            job.watch.advance(sum(sizes[: piece.place.file]) + piece.read_bytes, samples)
            if len(found) == _PIECES:
                close()
        if found:
            close()
        if not sum(each.samples for each in stretches):
            raise ValueError("there is no good line in the files" + _examples(bad))
        job.spool.finish()
        return stretches

    def _parse(self, piece: Piece) -> tuple[Samples, dict[str, Counted]]:
        """On a worker."""
        samples = self._job.parse(piece)
        return samples, self._count(samples)

    def _count(self, samples: Samples) -> dict[str, Counted]:
        found = {}
        for table in list(self._tallies):
            keys = [samples.keys[f.name] for f in self._schema.features if f.table == table]
            found[table] = Counted.of(keys[0] if len(keys) == 1 else np.concatenate(keys))
        return found

    def _add(self, counted: list[dict[str, Counted]]) -> None:
        """A stretch's counts together, so that it does not matter in how many parts they came."""
        for table, tally in self._tallies.items():
            tally.add(joined([each[table] for each in counted]))
        self._fit()

    def _fit(self) -> None:
        """Leaves the largest tables to hashing until the others fit."""
        job = self._job
        most = job.room // bytes_per_value(self._dtype)
        while sum(map(len, self._tallies.values())) > most:
            for each in self._tallies.values():
                each.settle()  # what waits may be the same values again
            if sum(map(len, self._tallies.values())) <= most:
                return
            largest = max(self._tallies, key=lambda name: len(self._tallies[name]))
            values = len(self._tallies.pop(largest))
            job.watch.say(
                f"table {largest} has more than {values:,} values, which do not fit --memory "
                f"{show_bytes(job.settings.memory_bytes)} beside the other tables: they are "
                f"hashed into {self._hashed_rows:,} rows"
            )

    @property
    def _hashed_rows(self) -> int:
        return self._job.settings.max_rows or HASHED_ROWS

    def _restore(self, pool: ThreadPoolExecutor, ahead: int) -> tuple[list[Stretch], bool]:
        job = self._job
        stretches, finished = job.spool.log()
        if not stretches:
            return [], False
        if finished and not self._tallies:  # the vocabularies are there: nothing to be read again
            return stretches, True
        job.watch.stage("checking what is read already", sum(each.samples for each in stretches))
        samples = 0
        whole = in_order(pool, job.spool.is_whole, stretches, ahead)
        for stretch, is_whole in whole:
            if not is_whole:
                job.watch.say(f"{job.out / stretch.file.file} is not whole: reading from there")
                return stretches[: stretch.number], False
            if self._tallies:
                self._add([self._count(job.spool.read(stretch))])
            samples += stretch.samples
            job.watch.advance(samples, samples)
        return stretches, finished

    def tables(self, stretches: list[Stretch]) -> dict[str, _Table]:
        """The vocabularies, once written and then read back."""
        job = self._job
        noted = job.out / self._vocabulary
        if not noted.exists():
            records = {
                name: self._write(place, name) for place, name in enumerate(self._schema.tables)
            }
            job.disk.write(self._vocabulary, [json.dumps(records).encode()])
        found = {}
        for name, each in json.loads(noted.read_text()).items():
            ids: Ids = Hashed(self._hashed_rows)
            keys = None if each["keys"] is None else FileRecord(**each["keys"])
            if keys is not None:
                if wrong := why_wrong(job.out, keys, contents=True):
                    raise ValueError(f"{wrong}; --restart makes it again")
                ids = Vocabulary(np.fromfile(inside(job.out, keys.file), self._dtype))
            found[name] = _Table(name, ids, each["values"], keys, self._dtype)
        return found

    def _write(self, place: int, name: str) -> dict[str, Any]:
        job = self._job
        if name not in self._tallies:
            return {"keys": None, "values": None}
        # Its counts are not needed any more once it is written.
        keys, values = self._tallies.pop(name).vocabulary(
            min_frequency=job.settings.min_frequency, max_rows=job.settings.max_rows
        )
        file = job.disk.write(f"tables/{place:03}.keys", [as_bytes(keys)])
        return {"keys": asdict(file), "values": values}


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


class _Encode:
    """The second stage: stretches of the spool into shards."""

    def __init__(self, job: _Job, schema: Schema, tables: dict[str, _Table], split: Split) -> None:
        self._job, self._schema, self._split = job, schema, split
        self._ids = {name: each.ids for name, each in tables.items()}
        self._log = f"{WORK}/encoded.jsonl"
        self._done: dict[int, dict[str, ShardRecord]] = {}

    def run(self, stretches: list[Stretch], pool: ThreadPoolExecutor, ahead: int) -> Splits:
        job = self._job
        self._restore(pool, ahead)
        left = [each for each in stretches if each.number not in self._done]
        job.watch.stage("encoding", sum(each.samples for each in left))
        samples = 0
        parts: dict[str, list[_Part]] = {name: [] for name in SPLITS}
        for chunk, found in in_order(pool, self._encode, self._chunks(left), ahead):
            for name, part in found.items():
                parts[name].append(part)
            samples += chunk.last - chunk.first
            job.watch.advance(samples, samples)
            if chunk.is_last:
                self._write(chunk.stretch, parts)
                parts = {name: [] for name in SPLITS}
        done = [self._done[each.number] for each in stretches]
        return {name: tuple(each[name] for each in done if name in each) for name in SPLITS}

    def _chunks(self, stretches: list[Stretch]) -> Iterator[_Chunk]:
        for stretch in stretches:
            samples = self._samples(stretch)
            at = dict.fromkeys(samples.lengths, 0)
            # An empty stretch is one chunk, too: its end must be seen.
            for first in range(0, max(1, stretch.samples), _CHUNK):
                last = min(first + _CHUNK, stretch.samples)
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
        found = [
            (piece, job.parse(piece)) for piece in islice(job.source.pieces(stretch.place), _PIECES)
        ]
        again = job.spool.write(stretch.number, found, stretch.bad)
        if again.file.sha256 != stretch.file.sha256:
            raise ValueError("the source files have changed; --restart prepares them anew")
        return job.spool.read(again)

    def _encode(self, chunk: _Chunk) -> dict[str, _Part]:
        """On a worker."""
        samples, here = chunk.samples, slice(chunk.first, chunk.last)
        ids = np.empty((chunk.last - chunk.first, len(self._schema.single)), self._schema.id_dtype)
        for place, each in enumerate(self._schema.single):
            ids[:, place] = self._ids[each.table].rows_of(samples.keys[each.name][here])
        lengths, values = {}, {}
        for each in self._schema.jagged:
            first, last = chunk.values[each.name]
            rows = self._ids[each.table].rows_of(samples.keys[each.name][first:last])
            values[each.name] = rows.astype(self._schema.id_dtype)
            lengths[each.name] = np.array(samples.lengths[each.name][here])
        dense, label = np.array(samples.dense[here]), np.array(samples.label[here])
        whole = _Part(ids, dense, label, lengths, values)
        codes = self._split(samples.lines[here])
        present = np.unique(codes).tolist()
        if len(present) == 1:
            return {SPLITS[present[0]]: whole}
        return {SPLITS[code]: _only(whole, codes == code) for code in present}

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
            places = sections(self._schema, samples, values)
            file = job.disk.write(
                f"shards/{name}-{stretch.number:05}.bin",
                in_sections((each, _arrays(key, found)) for key, each in places.items()),
                durable=False,  # but before there is a manifest
            )
            done[name] = ShardRecord(**asdict(file), samples=samples, values=values)
        self._done[stretch.number] = done
        records = {name: asdict(each) for name, each in done.items()}
        job.disk.append(self._log, json.dumps({"stretch": stretch.number, "shards": records}))
        job.spool.remove(stretch)

    def _restore(self, pool: ThreadPoolExecutor, ahead: int) -> None:
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
        checked = in_order(pool, self._why_wrong, list(self._done.items()), ahead)
        for count, ((number, _), reason) in enumerate(checked):
            if reason:
                job.watch.say(f"{reason}: it is made again")
                del self._done[number]
            job.watch.advance(count + 1, 0)

    def _why_wrong(self, found: tuple[int, dict[str, ShardRecord]]) -> str | None:
        reasons = (why_wrong(self._job.out, each, contents=True) for each in found[1].values())
        return next((reason for reason in reasons if reason), None)


@dataclass(frozen=True)
class _Rows:
    """Some rows of a table."""

    table: str
    first: int
    last: int


class _Verify:
    """The third stage: every shard is read back, its checksum and its ids are checked, and the
    accesses of the training split are counted, of as many rows at a time as fit the memory."""

    def __init__(self, job: _Job, schema: Schema, rows: dict[str, int], splits: Splits) -> None:
        self._job, self._schema, self._rows, self._splits = job, schema, rows, splits

    def run(self, pool: ThreadPoolExecutor) -> dict[str, FileRecord]:
        job = self._job
        shards = [(s, name == "train") for name, found in self._splits.items() for s in found]
        groups = self._groups()
        job.watch.stage("verifying", len(groups) * sum(each.bytes for each, _ in shards))
        done = samples = 0
        found: dict[str, list[FileRecord]] = {}
        for turn, group in enumerate(groups):
            counts = {each: np.zeros(each.last - each.first, np.int64) for each in group}
            check = self._why_wrong if turn == 0 else lambda _: None
            checked = in_order(pool, check, (shard for shard, _ in shards), ahead=2)
            for (shard, is_counted), (_, wrong) in zip(shards, checked, strict=True):
                if wrong:
                    raise ValueError(f"{wrong}; give the same command again to make it anew")
                self._count(pool, shard, counts if is_counted else {})
                done, samples = done + shard.bytes, samples + shard.samples
                job.watch.advance(done, samples)
            for each, uses in counts.items():
                parts = found.setdefault(each.table, [])
                parts.append(job.disk.write(self._file(each), [as_bytes(uses)]))
        make_durable(job.out / "shards")
        return {name: self._joined(name, found[name]) for name in self._rows}

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
        most = left = max(1, self._job.room // 8)
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
        path = inside(self._job.out, shard.file)
        found = {}
        for name, each in sections(self._schema, shard.samples, shard.values).items():
            if name == "ids" or name.endswith(".values"):
                empty = 0 in each.shape
                found[name] = (
                    np.empty(each.shape, each.dtype)
                    if empty
                    else np.memmap(path, each.dtype, "r", each.offset, each.shape)
                )
        ids = found.pop("ids")
        columns = {each.name: ids[:, place] for place, each in enumerate(self._schema.single)}
        return columns | {each.name: found[f"{each.name}.values"] for each in self._schema.jagged}

    def _why_wrong(self, shard: ShardRecord) -> str | None:
        """On a worker."""
        make_durable(inside(self._job.out, shard.file))
        if wrong := why_wrong(self._job.out, shard, contents=True):
            return wrong
        arrays = self._arrays(shard)
        for each in self._schema.features:
            top = arrays[each.name].max(initial=0)
            assert top < self._rows[each.table], f"{shard.file}: {each.name} has row {top}"
        return None

    def _count(
        self, pool: ThreadPoolExecutor, shard: ShardRecord, counts: dict[_Rows, NDArray[np.int64]]
    ) -> None:
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

        list(pool.map(count, counts))


def in_order(
    pool: ThreadPoolExecutor,
    work: Callable[[Item], Result],
    items: Iterable[Item],
    ahead: int,
) -> Iterator[tuple[Item, Result]]:
    """Results in the order of the items, of which `ahead` are under way at the most."""
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) >= ahead:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:
        for _, future in waiting:
            future.cancel()


def _only(part: _Part, mask: NDArray[np.bool_]) -> _Part:
    values = {name: each[np.repeat(mask, part.lengths[name])] for name, each in part.values.items()}
    lengths = {name: each[mask] for name, each in part.lengths.items()}
    return _Part(part.ids[mask], part.dense[mask], part.label[mask], lengths, values)


def _arrays(name: str, parts: list[_Part]) -> Iterator[NDArray[Any]]:
    """The arrays that make one section of a shard."""
    feature, _, what = name.rpartition(".")
    if what == "offsets":
        lengths = np.concatenate([each.lengths[feature] for each in parts])
        yield np.concatenate([[0], np.cumsum(lengths)])
        return
    for each in parts:
        yield each.values[feature] if what == "values" else getattr(each, what)


def _lines_of_files(stretches: list[Stretch], files: int) -> list[int]:
    found = [0] * files
    for stretch in stretches:
        for file, lines in stretch.lines.items():
            found[file] += lines
    return found


def _examples(bad: BadRows) -> str:
    return f"; the first of {bad.count:,} bad ones: {bad.examples[0]}" if bad.examples else ""


def _described(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {"name": path.name, "bytes": found.st_size, "changed_ns": found.st_mtime_ns}


def _differs(before: Any, now: dict[str, Any]) -> str:
    return ", ".join(key for key in now if before.get(key) != now[key]) or "settings"
