"""`prepare`: reads samples and counts their values, encodes them into shards, verifies the shards.

    files -> pieces -> samples with keys -> spool (.work/)          reading
                                |-> counts of values -> vocabularies
                          spool -> samples with rows -> splits -> shards   encoding
                         shards -> checksums, ranges; accesses of each row     verifying

One thread reads pieces in order and all cores work on them. Memory holds the pieces in flight, one
stretch, and the values of all tables, which get a fixed part of `memory_bytes` (see `job.share`); a
table that does not fit is hashed instead. So memory does not depend on the size of the input.

Finished work is noted in .work/, and a stopped run goes on from there. What is written depends on
the files and the settings alone: not on cores, on time, or on how often it was stopped.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hotrow.data.prepared.format import (
    MANIFEST,
    Manifest,
    Prepared,
    read_manifest,
    to_json,
)
from hotrow.data.prepared.job import (
    SIZES,
    WORK,
    Disk,
    Job,
    Settings,
    Sizes,
    Spool,
    Stretch,
    Watch,
    share,
)
from hotrow.data.prepared.parallel import Cores
from hotrow.data.prepared.pieces import Source
from hotrow.data.prepared.stages import (
    AtRandom,
    Encode,
    InOrder,
    Read,
    Split,
    Verify,
    by_quantiles,
    last_day_halved,
    out_of_order,
)
from hotrow.support.messages import many
from hotrow.support.units import show_bytes
from hotrow.support.version import __version__

_SETTINGS = f"{WORK}/settings.json"
_LOCK = "lock"
_WORK_FORMAT = 2  # of what a stopped run leaves; raised when keys, lines or splits change


def prepare(
    source: Source,
    out: Path,
    settings: Settings,
    *,
    workers: int | None = None,
    restart: bool = False,
    watch: Watch | None = None,
    disk: Disk | None = None,
    sizes: Sizes = SIZES,
) -> Manifest:
    """Make the folder `out`, or finish it; see the top of this module."""
    shared = share(settings.memory_bytes, workers)
    watch, disk, described = watch or Watch(), disk or Disk(out), _described(source, settings)
    if shared.idle:
        watch.say(
            f"{many(shared.idle, 'core')} idle, as more than {shared.workers} need more --memory"
        )
    if settings.split == "time" and (hint := out_of_order([path.name for path in source.paths])):
        watch.say(hint)
    spool = Spool(disk, source.schema, source.key_dtype)
    with _alone(disk, described, restart=restart), Cores(shared.workers) as cores:
        values_bytes = sizes.values_bytes or shared.values_bytes
        job = Job(source, out, settings, sizes, values_bytes, watch, disk, spool, cores)
        if (out / MANIFEST).exists():
            data = Prepared(out)
            checked = (
                "all checksums are right"
                if data.verify_if_small()
                else "all files have their sizes, and `hotrow verify` compares checksums"
            )
            watch.say(f"{out} is already prepared ({checked}); nothing to do")
            return data.manifest
        manifest = _run(job, described)
        disk.write(MANIFEST, [to_json(manifest).encode()])
        shutil.rmtree(out / WORK)
        return manifest


def _described(source: Source, settings: Settings) -> dict[str, Any]:
    """Return all that decides about what is written."""
    files, seen = [], set()
    for path in source.paths:
        if path.resolve() in seen:
            raise ValueError(f"{path} is given twice")
        seen.add(path.resolve())
        stat = path.stat()
        files.append({"name": path.name, "bytes": stat.st_size, "changed_ns": stat.st_mtime_ns})
    return {"layout": source.name, "files": files, **source.describes, **asdict(settings)}


def _run(job: Job, described: dict[str, Any]) -> Manifest:
    if job.settings.hash:
        _check_room(job, (job.settings.max_rows or 0) * len(job.source.schema.tables))
    reading = Read(job)
    stretches = reading.run()
    tables, records = reading.tables()
    counted = sum((Counter(stretch.lines) for stretch in stretches), Counter[int]())
    bad, lines = stretches[-1].bad, [counted[file] for file in range(len(job.source.paths))]
    rows = {name: ids.rows for name, ids in tables.items()}
    _check_room(job, sum(rows.values()))
    id_dtype = "int32" if max(rows.values()) < 2**31 else "int64"
    schema = replace(job.source.schema, id_dtype=id_dtype)
    splits = Encode(job, schema, tables, _split(job, stretches, lines)).run(stretches)
    del tables  # counts need their memory
    if not splits["train"]:
        raise ValueError(
            f"of {many(sum(lines), 'line')} none is left for training; give more, or --split random"
        )
    counts = Verify(job, schema, rows, splits).run()
    return Manifest(
        schema=schema,
        tables=tuple(record(counts=counts[name]) for name, record in records.items()),
        splits=splits,
        source={"lines": sum(lines), "bad_rows": bad.count, "bad_examples": bad.examples},
        settings=described,
        made_by=f"hotrow {__version__}",
    )


def _check_room(job: Job, rows: int) -> None:
    """Refuse access counts that do not fit the disk: --max-rows may ask for any number."""
    replaced = sum(path.stat().st_size for path in job.out.glob("*/*.counts"))
    free = shutil.disk_usage(job.out).free + replaced
    if 8 * rows > free:
        raise ValueError(
            f"access counts of {rows:,} rows take {show_bytes(8 * rows, beside=free)}, and "
            f"{job.out} has {show_bytes(free, beside=8 * rows)} free; lower --max-rows, or make "
            "room"
        )


def _split(job: Job, stretches: list[Stretch], lines: list[int]) -> Split:
    if job.settings.split == "random":
        return AtRandom(job.settings.seed)
    if not job.source.times:
        samples = [count - job.source.header_lines for count in lines]
        return last_day_halved(samples, first_line=job.source.first_line)
    noted = job.out / WORK / "split.json"  # the spool goes while shards are made
    if noted.exists():
        starts = json.loads(noted.read_text())
        return InOrder(starts["validation"], starts["test"])
    split = by_quantiles([job.spool.read(stretch).lines for stretch in stretches])
    starts = {"validation": split.held, "test": split.middle}
    job.disk.write(f"{WORK}/split.json", [json.dumps(starts).encode()])
    return split


@contextmanager
def _alone(disk: Disk, described: Mapping[str, Any], *, restart: bool) -> Iterator[None]:
    """Let one process at a time work in a folder, and resume only what is `described` alike."""
    out, work = disk.folder, disk.folder / WORK
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; --out is the folder to make")
    is_new = not out.exists() or not any(out.iterdir())
    if not (is_new or (work / _LOCK).exists() or _is_ours(out / MANIFEST)):
        raise ValueError(f"{out} holds other files; choose a new folder for --out")
    try:
        work.mkdir(parents=True, exist_ok=True)
        opened = (work / _LOCK).open("w")
    except OSError as error:
        raise ValueError(f"{out} cannot be made: {error.strerror}; choose another --out") from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is preparing {out}") from None
        if restart:
            _clear(out)
        try:
            _check(disk, json.loads(json.dumps(described)))
            yield
        finally:
            if (out / MANIFEST).exists():
                shutil.rmtree(work, ignore_errors=True)


def _is_ours(manifest: Path) -> bool:
    """Return whether `prepare` wrote a manifest: --restart removes what lies beside it, and other
    programs have files of that name."""
    try:
        keys = json.loads(manifest.read_bytes())
    except (OSError, ValueError):
        return False
    return (
        isinstance(keys, dict)
        and str(keys.get("made_by")).startswith("hotrow ")
        and {"schema", "splits"} <= keys.keys()  # else it is a model's
    )


def _check(disk: Disk, now: dict[str, Any]) -> None:
    out, noted = disk.folder, disk.folder / _SETTINGS
    if (out / MANIFEST).exists():
        before = read_manifest(out).settings
        if before != now:
            raise ValueError(
                f"{out} holds data prepared with other {_differs(before, now)}; choose "
                "another --out, or --restart to replace it"
            )
    elif noted.exists():
        before = json.loads(noted.read_text())
        if before.pop("work_format", 1) != _WORK_FORMAT:
            raise ValueError(
                f"{out} holds a stopped run of another version of hotrow, which cannot be resumed; "
                "--restart begins anew"
            )
        if before == now | {"bad_rows": "error"} and now["bad_rows"] == "skip":
            # As the message about a bad line suggests; no line was skipped so far.
            _note(disk, now)
        elif before != now:
            raise ValueError(
                f"{out} holds a stopped run with other {_differs(before, now)}; resume "
                "with the same files and settings, or --restart"
            )
    else:
        _note(disk, now)


def _note(disk: Disk, now: dict[str, Any]) -> None:
    disk.write(_SETTINGS, [json.dumps({**now, "work_format": _WORK_FORMAT}).encode()])


def _clear(out: Path) -> None:
    (out / MANIFEST).unlink(missing_ok=True)
    for name in ("shards", "tables"):
        shutil.rmtree(out / name, ignore_errors=True)
    for path in (out / WORK).iterdir():
        if path.name != _LOCK:
            path.unlink()


def _differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return ", ".join(key for key in now if before.get(key) != now[key]) or "settings"
