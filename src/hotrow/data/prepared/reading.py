"""The first stage: files into the spool, and the vocabularies of all tables."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hotrow.data.prepared.format import TableRecord, as_bytes
from hotrow.data.prepared.job import WORK, BadRows, Job, Stretch
from hotrow.data.prepared.pieces import Piece, Samples
from hotrow.data.prepared.vocabulary import (
    Counted,
    Hashed,
    Tally,
    Vocabulary,
    bytes_per_value,
    joined,
)
from hotrow.support.files import FileRecord, inside, why_wrong
from hotrow.support.messages import few
from hotrow.support.units import show_bytes

HASHED_ROWS = 10_000_000  # of a table that is too large for the memory, without max_rows
_VOCABULARY = f"{WORK}/vocabulary.json"


@dataclass(frozen=True)
class Table:
    """How the values of a table become rows."""

    name: str
    ids: Vocabulary | Hashed
    values: int | None
    keys: FileRecord | None
    key_dtype: str

    def record(self) -> partial[TableRecord]:
        """Return the record, which lacks `counts`; it does not hold the memory of the values."""
        facts = (self.name, self.ids.rows, self.ids.how, self.values)
        return partial(TableRecord, *facts, keys=self.keys, key_dtype=self.key_dtype)


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

    def tables(self) -> dict[str, Table]:
        """Return the vocabularies, written once and then read back."""
        job = self._job
        noted = job.out / _VOCABULARY
        if not noted.exists():
            records = {
                name: self._write(place, name) for place, name in enumerate(self._schema.tables)
            }
            job.disk.write(_VOCABULARY, [json.dumps(records).encode()])
        tables = {}
        for name, record in json.loads(noted.read_text()).items():
            ids: Vocabulary | Hashed = Hashed(self._hashed_rows)
            keys = None if record["keys"] is None else FileRecord(**record["keys"])
            if keys is not None:
                if wrong := why_wrong(job.out, keys, contents=True):
                    raise ValueError(f"{wrong}; --restart makes it again")
                ids = Vocabulary(np.fromfile(inside(job.out, keys.file), self._dtype))
            tables[name] = Table(name, ids, record["values"], keys, self._dtype)
        return tables

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
