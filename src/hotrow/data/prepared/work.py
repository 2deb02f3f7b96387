"""Prepares: reads samples and counts their values, encodes them into shards, verifies these.

    files -> pieces -> samples with keys -> spool (.work/)          reading
                                |-> counts of values -> vocabularies
                          spool -> samples with rows -> splits -> shards   encoding
                         shards -> checksums, ranges; accesses of each row     verifying

Pieces are read in order by one thread and worked on by all cores. In memory are: the pieces under
way, one stretch of them, and the values of all tables, which get what is left of `memory_bytes`; a
table that does not fit is hashed instead. So memory does not depend on the size of the input.

Whatever is finished is noted in .work/, and a stopped run goes on from there. What is written
depends on the files and the settings alone: not on cores, on time, or on how often it was stopped.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hotrow import __version__
from hotrow.budget import show_bytes
from hotrow.data.prepared.disk import Disk
from hotrow.data.prepared.encoding import Encode
from hotrow.data.prepared.folder import alone
from hotrow.data.prepared.format import MANIFEST, Manifest, id_dtype, read_manifest, to_json
from hotrow.data.prepared.job import Job
from hotrow.data.prepared.layouts import Source
from hotrow.data.prepared.parallel import Cores
from hotrow.data.prepared.reading import Read
from hotrow.data.prepared.settings import NoWatch, Settings, Watch
from hotrow.data.prepared.splits import AtRandom, ByTime, Split, by_quantiles, last_day_halved
from hotrow.data.prepared.spool import WORK, Spool, Stretch
from hotrow.data.prepared.text import PIECE_BYTES
from hotrow.data.prepared.verifying import Verify

_BASE_BYTES = 384 << 20  # Python, torch and the libraries they load
_PIECE_FACTOR = 12  # bytes of work for each byte of a piece's text, at the most
_STRETCH_FACTOR = 3  # the same for a stretch's samples, with their counts


def least_memory(workers: int, piece_bytes: int = PIECE_BYTES) -> int:
    """What a run takes besides the values of its tables."""
    pieces = 2 * (workers + 1) * piece_bytes * _PIECE_FACTOR
    return _BASE_BYTES + pieces + Spool.PIECES * piece_bytes * _STRETCH_FACTOR


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
    disk, described = disk or Disk(out), _described(source, settings)
    spool = Spool(disk, source.schema, source.key_dtype)
    with alone(disk, described, restart=restart), Cores(workers) as cores:
        job = Job(source, out, settings, room, watch or NoWatch(), disk, spool, cores)
        if (out / MANIFEST).exists():
            job.watch.say(f"{out} is finished already: nothing is left to do")
            return read_manifest(out)
        manifest = _run(job, described)
        disk.write(MANIFEST, [to_json(manifest).encode()])
        shutil.rmtree(out / WORK)
        return manifest


def _described(source: Source, settings: Settings) -> dict[str, Any]:
    """All that decides about what is written."""
    files = []
    for path in source.paths:
        found = path.stat()
        files.append({"name": path.name, "bytes": found.st_size, "changed_ns": found.st_mtime_ns})
    return {"layout": source.name, "files": files, **source.describes, **asdict(settings)}


def _run(job: Job, described: dict[str, Any]) -> Manifest:
    reading = Read(job)
    stretches = reading.run()
    tables = reading.tables()
    bad, lines = stretches[-1].bad, _lines_of_files(stretches, len(job.source.paths))
    rows = {name: each.ids.rows for name, each in tables.items()}
    records = {name: each.record() for name, each in tables.items()}
    schema = replace(job.source.schema, id_dtype=id_dtype(list(rows.values())))
    splits = Encode(job, schema, tables, _split(job, stretches, lines)).run(stretches)
    del tables  # their memory is for counts now
    if not splits["train"]:
        raise ValueError(
            f"{sum(lines):,} lines leave none for training; give more, or --split random"
        )
    counts = Verify(job, schema, rows, splits).run()
    return Manifest(
        schema=schema,
        tables=tuple(record(counts[name]) for name, record in records.items()),
        splits=splits,
        source={"lines": sum(lines), "bad_rows": bad.count, "bad_examples": bad.examples},
        settings=described,
        made_by=f"hotrow {__version__}",
    )


def _split(job: Job, stretches: list[Stretch], lines: list[int]) -> Split:
    if job.settings.split == "random":
        return AtRandom(job.settings.seed)
    if not job.source.times:
        return last_day_halved(lines)
    noted = job.out / WORK / "split.json"  # the spool goes while shards are made
    if not noted.exists():
        split = by_quantiles([job.spool.read(each).lines for each in stretches])
        job.disk.write(f"{WORK}/split.json", [json.dumps(asdict(split)).encode()])
    return ByTime(**json.loads(noted.read_text()))


def _lines_of_files(stretches: list[Stretch], files: int) -> list[int]:
    found = [0] * files
    for stretch in stretches:
        for file, lines in stretch.lines.items():
            found[file] += lines
    return found
