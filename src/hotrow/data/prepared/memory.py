"""How a run shares the memory it was given. What tables get does not depend on the cores."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hotrow.data.prepared.text import PIECE_BYTES
from hotrow.support.units import show_bytes

BASE_BYTES = 384 << 20  # Python, torch and the libraries they load
_STRETCH_BYTES = 320 << 20  # one that is filled and one that is written, with their counts
_PIECE_BYTES = 12 * PIECE_BYTES  # of work for each piece under way, at the most


@dataclass(frozen=True)
class Share:
    workers: int
    idle: int  # cores that there is no memory for
    values_bytes: int  # for the values of all tables


def share(memory_bytes: int, workers: int | None) -> Share:
    """Half of what is left is for pieces under way, two for each worker and two more; the other
    half for values. Without a word on `workers`, as many cores as fit."""
    left = memory_bytes - BASE_BYTES - _STRETCH_BYTES
    most = left // 2 // (2 * _PIECE_BYTES) - 1
    if most < 1 or (workers or 1) > most:
        least = needed(workers or 1)
        raise ValueError(
            f"--memory {show_bytes(memory_bytes, beside=least)} is too small: "
            f"{workers or 1} --workers need {show_bytes(least, beside=memory_bytes)}"
        )
    cores = len(os.sched_getaffinity(0))
    return Share(
        workers=workers or min(most, cores),
        idle=0 if workers else max(0, cores - most),
        values_bytes=left - left // 2,
    )


def needed(workers: int) -> int:
    """The least that so many workers can do with."""
    return BASE_BYTES + _STRETCH_BYTES + 2 * (2 * (workers + 1) * _PIECE_BYTES)
