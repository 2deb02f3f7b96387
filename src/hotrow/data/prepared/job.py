"""What a run of `prepare` is asked for, how it shares its memory, and what its stages share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hotrow.data.prepared.parallel import Cores
from hotrow.data.prepared.pieces import Piece, Samples, Source
from hotrow.data.prepared.spool import Disk, Spool
from hotrow.data.prepared.text import PIECE_BYTES
from hotrow.support.numbers import plain_fields
from hotrow.support.units import show_bytes

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
        path, before = self.source.paths[piece.place.file], piece.place.file_line
        return [
            f"{path}, line {before + bad.line + 1:,}: {bad.reason}" for bad in samples.bad.first
        ]
