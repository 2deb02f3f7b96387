"""The first stage: files into the spool, and the vocabularies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hotrow.data.prepared.format import TableRecord, as_bytes
from hotrow.data.prepared.job import Job
from hotrow.data.prepared.pieces import Piece
from hotrow.data.prepared.rows import Samples
from hotrow.data.prepared.spool import WORK, BadRows, Stretch
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

HASHED_ROWS = 10_000_000  # of a table that is too large for the memory, if there is no max_rows
Ids = Vocabulary | Hashed


@dataclass(frozen=True)
class Table:
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


class Read:
    def __init__(self, job: Job) -> None:
        self._job = job
        source = job.source
        self._dtype, self._schema = source.key_dtype, source.schema
        self._tallies: dict[str, Tally] = {}
        self._vocabulary = f"{WORK}/vocabulary.json"
        if not job.settings.hash and not (job.out / self._vocabulary).exists():
            self._tallies = {name: Tally(self._dtype) for name in self._schema.tables}

    def run(self) -> list[Stretch]:
        job = self._job
        stretches, finished = self._restore()
        if finished:
            return stretches
        place = stretches[-1].after if stretches else None
        bad = stretches[-1].bad if stretches else BadRows()
        job.source.ready(job.disk, job.cores, job.watch)
        sizes = [path.stat().st_size for path in job.source.paths]
        samples = size = 0
        job.watch.stage("reading", sum(sizes))
        found: list[tuple[Piece, Samples]] = []
        counted: list[dict[str, Counted]] = []
        pieces = job.source.pieces(place)

        def close(
            found: list[tuple[Piece, Samples]], counted: list[dict[str, Counted]], bad: BadRows
        ) -> None:
            stretches.append(job.spool.write(len(stretches), found, bad))
            self._add(counted)

        for piece, (part, counts) in job.cores.in_order(self._parse, pieces):
            bad = bad.and_more(part.bad.count, job.describe(piece, part))
            found.append((replace(piece, data=None), part))  # its text is not needed any more
            counted.append(counts)
            samples += len(part.lines)
            job.watch.advance(sum(sizes[: piece.place.file]) + piece.read_bytes, samples)
            size += part.num_bytes
            if len(found) == job.spool.PIECES or size >= job.spool.BYTES:
                job.cores.behind(partial(close, found, counted, bad))
                found, counted, size = [], [], 0
        if found:
            job.cores.behind(partial(close, found, counted, bad))
        job.cores.catch_up()
        if not sum(each.samples for each in stretches):
            lines = sum(lines for each in stretches for lines in each.lines.values())
            if lines and not (bad.count or job.source.times):  # the first of each file
                names = few(str(path) for path in job.source.paths)
                raise ValueError(f"{names}: a header, and no lines below it")
            if lines > bad.count and job.source.times:  # of Taobao: samples are made of several
                raise ValueError(
                    f"{lines - bad.count:,} good lines make no sample: nobody has two of them"
                )
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
        most = job.values_bytes // bytes_per_value(self._dtype)
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

    def _restore(self) -> tuple[list[Stretch], bool]:
        job = self._job
        stretches, finished = job.spool.log()
        if not stretches:
            return [], False
        if finished and not self._tallies:  # the vocabularies are there: nothing to be read again
            return stretches, True
        job.watch.stage("checking what is read already", sum(each.samples for each in stretches))
        samples = 0
        whole = job.cores.in_order(job.spool.is_whole, stretches)
        for stretch, is_whole in whole:
            if not is_whole:
                job.watch.say(f"{job.out / stretch.file.file} is not whole: reading from there")
                return stretches[: stretch.number], False
            if self._tallies:
                self._add([self._count(job.spool.read(stretch))])
            samples += stretch.samples
            job.watch.advance(samples, samples)
        return stretches, finished

    def tables(self) -> dict[str, Table]:
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
            found[name] = Table(name, ids, each["values"], keys, self._dtype)
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


def _examples(bad: BadRows) -> str:
    return f"; the first of {bad.count:,} bad ones: {bad.examples[0]}" if bad.examples else ""
