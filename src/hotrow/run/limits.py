"""What a run waits for most, and what to change, from times that were measured anyway."""

from __future__ import annotations

import math
from dataclasses import replace

from hotrow.support.records import Limit, Times

# Beside a GPU the host has to be busy with one thing for half of the time before that can be what
# holds the GPU up; how long training waits for rows is measured there.
_PART_OF_HOST, _WAITED = 0.5, 0.15
_CHUNKS = 0.1  # of a step: few batches pass so, and nobody need care, if they take less

_ADVICE = {
    "loader": "Data that hotrow prepare has written are read fastest",
    "planning": (
        "A smaller embedding.depth looks less far ahead, and strategies static and lru decide less"
    ),
    "link": (
        "A larger embedding.budget moves fewer rows, and so does embedding.profile = true where "
        "rows were counted; hotrow compare tries other strategies"
    ),
}


def limit_of(times: Times | None, *, device: str, remedy: str = "") -> Limit | None:
    """The part that a run is limited by; None where too little was measured. `remedy`: what would
    hold the batches that passed in chunks, if any did."""
    if times is None or times.seconds <= 0:
        return None
    return _on_cpu(times, remedy) if device == "cpu" else _on_gpu(times, remedy)


def _on_cpu(times: Times, remedy: str) -> Limit:
    """Parts come one after the other: the largest is what limits."""
    shares = {
        "loader": times.read_seconds / times.seconds,
        "planning": times.plan_seconds / times.seconds,
        "link": times.rows_seconds / times.seconds,
        "chunks": times.chunk_seconds / times.seconds,
    }
    shares["dense part"] = 1 - sum(shares.values())
    in_chunks = f", batches in chunks {shares['chunks']:.0%}" if remedy else ""
    measured = (
        f"of a step, training took {shares['dense part']:.0%}, planning {shares['planning']:.0%}, "
        f"moving rows {shares['link']:.0%}, reading batches {shares['loader']:.0%}{in_chunks}"
    )
    most = 1 / (1 - shares["planning"] - shares["link"] - shares["chunks"])
    if remedy and shares["chunks"] >= _CHUNKS:
        # To plan for them, and to move rows for them, is in vain.
        shares["chunks"] += shares.pop("planning") + shares.pop("link")
    part = max(shares, key=shares.__getitem__)
    if part == "chunks":
        return _limit(part, shares[part], measured, remedy)
    if part == "dense part":
        advice = f"With every row in fast memory it would be {most:.1f} times as fast at most"
    else:
        advice = _ADVICE[part]
    if part in ("planning", "link"):
        advice += ". Here both memories are RAM; a GPU plans, and moves rows, beside training"
    return _limit(part, shares[part], measured, advice)


def _on_gpu(times: Times, remedy: str) -> Limit | None:
    reading, planning = times.read_seconds / times.seconds, times.plan_seconds / times.seconds
    chunks = times.chunk_seconds / times.seconds
    if reading >= _PART_OF_HOST:
        told = f"the host waited for batches for {reading:.0%} of a step"
        return _limit("loader", reading, told, _ADVICE["loader"])
    if remedy and chunks >= _CHUNKS and chunks + planning >= _PART_OF_HOST:
        told = f"the host was busy with batches in chunks for {chunks + planning:.0%} of a step"
        return _limit("chunks", chunks + planning, told, remedy)
    if planning >= _PART_OF_HOST:
        told = f"the host was launching plans for {planning:.0%} of a step"
        return _limit("planning", planning, told, _ADVICE["planning"])
    if math.isnan(times.waited):
        return None
    told = f"training waited for rows for {times.waited:.0%} of a step"
    if times.waited >= _WAITED:
        return _limit("link", times.waited, told, _ADVICE["link"])
    return _limit("dense part", 1 - times.waited, told, "A larger budget would hardly help")


def _limit(part: str, share: float, measured: str, advice: str) -> Limit:
    found = Limit(part, share, "")
    return replace(found, message=f"limited by {found.name}: {measured}. {advice}")
