"""What a run of `prepare` is asked for, how it shares its memory, and what its stages share.

The first stage leaves samples with keys in place of rows in the spool. Text is read, decompressed
and parsed once. The spool is as large as the shards that are made of it, and goes as they come.

A stretch is a number of consecutive pieces, which the files alone decide, and one file of the
spool. A log notes every stretch. A stopped run goes on after the last whole stretch, and counts the
values of the stretches before it again, in the same order, so that it ends as if it had not been
stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from hotrow.data.prepared.format import Schema, Section, in_sections, map_section, side_by_side
from hotrow.data.prepared.parallel import Cores
from hotrow.data.prepared.pieces import EXAMPLES, Piece, Place, Samples, Source
from hotrow.data.prepared.text import PIECE_BYTES
from hotrow.support import files
from hotrow.support.files import FileRecord, inside, why_wrong
from hotrow.support.numbers import plain_fields
from hotrow.support.units import show_bytes

WORK = ".work"
LOG = f"{WORK}/read.jsonl"


class Disk(files.Disk):
    """The folder that `hotrow prepare` makes."""

    remedy = "What is finished is kept: make room and give the same command again to resume"

    def append(self, name: str, record: object) -> None:
        """Add a line to a log; it is on the disk when this returns."""
        # It starts with a line end, so that half a line before it does no harm.
        self.extend(name, b"\n" + json.dumps(record).encode() + b"\n", durable=True)

    def extend(self, name: str, data: bytes | memoryview, *, durable: bool = False) -> None:
        """Add to the end of a file; an error may leave a part of the data there."""
        path = self.folder / name
        try:
            with path.open("ab") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self.in_plain_words(error, path) from None

    def log(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of a log. Half a line, of a run that was killed, is left out."""
        path = self.folder / name
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


@dataclass(frozen=True)
class BadRows:
    """The number of lines left out, and the first of them."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def and_more(self, count: int, examples: list[str]) -> BadRows:
        return BadRows(self.count + count, [*self.examples, *examples][:EXAMPLES])


@dataclass(frozen=True)
class Stretch:
    """A file of the spool, and where it comes from."""

    number: int
    file: FileRecord
    samples: int
    values: dict[str, int]  # by jagged feature
    place: Place
    after: Place
    lines: dict[int, int]  # by file that it is made of
    bad: BadRows  # of this stretch and all before it
    checked: tuple[str, ...] = ()  # features whose checks it has


class Spool:
    """Stretches on disk."""

    def __init__(self, disk: Disk, schema: Schema, key_dtype: str) -> None:
        self._disk, self._schema, self._dtype = disk, schema, key_dtype
        self._written: set[int] = set()  # by this run, not by one before it

    def write(self, number: int, parts: list[tuple[Piece, Samples]], bad: BadRows) -> Stretch:
        samples = sum(len(part.lines) for _, part in parts)
        values = {
            feature.name: sum(len(part.keys[feature.name]) for _, part in parts)
            for feature in self._schema.jagged
        }
        names = (feature.name for feature in self._schema.features)
        checked = tuple(name for name in names if any(name in part.checks for _, part in parts))
        places = self._sections(samples, values, checked)
        data = in_sections((place, _arrays(parts, name)) for name, place in places.items())
        file = self._disk.write(f"{WORK}/{number:05}.keys", data, durable=False)
        lines: dict[int, int] = {}
        for piece, _ in parts:
            lines[piece.place.file] = lines.get(piece.place.file, 0) + piece.lines
        place, after = parts[0][0].place, parts[-1][0].after
        stretch = Stretch(number, file, samples, values, place, after, lines, bad, checked)
        self._disk.append(LOG, asdict(stretch))
        self._written.add(number)
        return stretch

    def finish(self) -> None:
        self._disk.append(LOG, {"finished": True})

    def log(self) -> tuple[list[Stretch], bool]:
        """Return the stretches that were written, and whether those are all."""
        stretches: list[Stretch] = []
        for record in self._disk.log(LOG):
            if "finished" in record:
                return stretches, True
            stretch = msgspec.convert(record, Stretch, str_keys=True)
            stretches[stretch.number :] = [stretch]  # one that was written again replaces it
        return stretches, False

    def is_whole(self, stretch: Stretch) -> bool:
        contents = stretch.number not in self._written
        return why_wrong(self._disk.folder, stretch.file, contents=contents) is None

    def remove(self, stretch: Stretch) -> None:
        (self._disk.folder / stretch.file.file).unlink(missing_ok=True)

    def read(self, stretch: Stretch) -> Samples:
        """Map the samples of a stretch into memory; their lines count over all files."""
        path = inside(self._disk.folder, stretch.file.file)
        places = self._sections(stretch.samples, stretch.values, stretch.checked)
        arrays = {name: map_section(path, place) for name, place in places.items()}
        return Samples(
            arrays["lines"],
            arrays["label"],
            arrays["dense"],
            {feature.name: arrays[f"{feature.name}.keys"] for feature in self._schema.features},
            lengths={f.name: arrays[f"{f.name}.lengths"] for f in self._schema.jagged},
            checks={name: arrays[f"{name}.checks"] for name in stretch.checked},
        )

    def _sections(
        self, samples: int, values: dict[str, int], checked: Sequence[str]
    ) -> dict[str, Section]:
        wanted: list[tuple[str, str, tuple[int, ...]]] = [
            ("lines", "int64", (samples,)),
            ("dense", "float32", (samples, len(self._schema.dense))),
            ("label", "uint8", (samples,)),
        ]
        for feature in self._schema.features:
            count = values[feature.name] if feature.jagged else samples
            wanted.append((f"{feature.name}.keys", self._dtype, (count,)))
            if feature.name in checked:
                wanted.append((f"{feature.name}.checks", "uint32", (count,)))
            if feature.jagged:
                wanted.append((f"{feature.name}.lengths", "int64", (samples,)))
        return side_by_side(wanted)


def _arrays(parts: list[tuple[Piece, Samples]], name: str) -> Iterator[NDArray[Any]]:
    """Yield the arrays that make one section of a stretch."""
    feature, _, what = name.rpartition(".")
    for piece, part in parts:
        if name == "lines":
            yield part.lines + piece.place.line
        elif what == "checks":
            yield part.checks_of(feature)
        else:
            yield getattr(part, what)[feature] if feature else getattr(part, what)


BASE_BYTES = 384 << 20  # Python, torch and the libraries they load
_STRETCH_BYTES = 320 << 20  # one stretch that is filled and one that is written, with their counts
_WORK_BYTES = 12 * PIECE_BYTES  # at most, for each piece that is being worked on


@dataclass(frozen=True)
class Settings:
    """What decides about the bytes that are written. A run is resumed only with the same."""

    min_frequency: int = 1
    max_rows: int | None = None
    hash: bool = False
    split: str = "time"
    seed: int = 0
    bad_rows: str = "error"
    memory_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        plain_fields(self)
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


@dataclass(frozen=True)
class Sizes:
    """How much is worked on at once. Memory is shared for the defaults; tests use small sizes."""

    piece_bytes: int = PIECE_BYTES  # of text in a piece
    piece_samples: int = 1 << 14  # of Parquet in a piece
    event_bytes: int = 6 << 20  # of text, about, in one file of Taobao's events
    stretch_pieces: int = 16  # in a stretch, or fewer:
    stretch_bytes: int = 48 << 20  # of samples are enough, which short lines reach sooner
    values_bytes: int | None = None  # for the values of all tables; None: what `share` leaves


SIZES = Sizes()


class Watch:
    """Gets the progress of a run. This one ignores it."""

    def stage(self, title: str, total: int) -> None: ...
    def advance(self, done: int, samples: int) -> None: ...
    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class Share:
    workers: int
    idle: int  # cores that there is no memory for
    values_bytes: int  # for the values of all tables


def share(memory_bytes: int, workers: int | None, *, cores: int | None = None) -> Share:
    """Share the memory of a run. Half of what is left is for pieces, two for each worker and two
    more; the other half is for values, so that this part does not depend on the cores. By default
    there are as many workers as there are cores and memory for them."""
    left = memory_bytes - BASE_BYTES - _STRETCH_BYTES
    most = left // 2 // (2 * _WORK_BYTES) - 1
    if most < 1 or (workers or 1) > most:
        least = needed(workers or 1)
        raise ValueError(
            f"--memory {show_bytes(memory_bytes, beside=least)} is too small: "
            f"{workers or 1} --workers need {show_bytes(least, beside=memory_bytes)}"
        )
    cores = cores or len(os.sched_getaffinity(0))
    return Share(
        workers=workers or min(most, cores),
        idle=0 if workers else max(0, cores - most),
        values_bytes=left - left // 2,
    )


def needed(workers: int) -> int:
    """Return the least memory for a number of workers."""
    return BASE_BYTES + _STRETCH_BYTES + 2 * (2 * (workers + 1) * _WORK_BYTES)


@dataclass(frozen=True)
class Job:
    source: Source
    out: Path
    settings: Settings
    sizes: Sizes
    values_bytes: int  # of memory, for the values of all tables
    watch: Watch
    disk: Disk
    spool: Spool
    cores: Cores

    def parse(self, piece: Piece) -> Samples:
        """Return the samples of a piece; bad lines are an error unless skipped. Runs on workers."""
        samples = self.source.parse(piece)
        if samples.bad.count and self.settings.bad_rows == "error":
            raise ValueError(
                f"{self.describe(piece, samples)[0]}. --bad-rows skip leaves such lines out and "
                "counts them"
            )
        return samples

    def describe(self, piece: Piece, samples: Samples) -> list[str]:
        where, before = f"{self.source.paths[piece.place.file]}, line", piece.place.file_line + 1
        return [f"{where} {before + bad.line:,}: {bad.reason}" for bad in samples.bad.first]
