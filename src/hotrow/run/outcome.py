"""What became of a run's system: as plain values, and in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hotrow.run.source import AnyBatch
from hotrow.run.training import skip_of
from hotrow.support.messages import many
from hotrow.systems.fae.fae import FAE
from hotrow.systems.hotline.hotline import Hotline
from hotrow.training.trainer import System


def record_of(system: System[AnyBatch] | None) -> dict[str, Any]:
    """Its own record, and that of what leaves samples out; empty: there is no system."""
    found: dict[str, Any] = {}
    if isinstance(system, FAE | Hotline):
        found["hotline" if isinstance(system, Hotline) else "fae"] = asdict(system.record)
    skip = skip_of(system)
    if skip is not None:
        found["skip"] = asdict(skip.record)
    return found


def told_of(system: System[AnyBatch] | None) -> dict[str, str]:
    """The same for people, by a word or two."""
    found = {}
    if isinstance(system, FAE):
        found["hot and cold"] = system.described()
    if isinstance(system, Hotline):
        r = system.record
        pinned, times = sum(r.pinned_rows.values()), len(r.learned)
        found["popular samples"] = (
            f"{r.popular_share:.1%} of {r.samples:,}; {r.split_batches:,} of {r.batches:,} batches "
            f"trained in two parts; {pinned:,} rows pinned, chosen {many(times, 'time')}"
            if r.samples
            else f"none was looked for: all {r.batches:,} batches went by while rows were learned"
        )
    skip = skip_of(system)
    if skip is not None:
        s = skip.record
        stale, hot = sum(s.stale_rows.values()), sum(s.hot_rows.values())
        rows = f"; {stale:,} of {hot:,} hot rows are stale" if hot else ""
        stopped = f"; {s.stopped}" if s.stopped else ""
        found["left out"] = f"{s.dropped:,} of {s.offered:,} samples offered{rows}{stopped}"
    return found
