"""What each of several ranks has done, gathered by all of them at the end of a run."""

from __future__ import annotations

import json
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import msgspec

from hotrow.embedding.in_models import collections_in
from hotrow.run.files import to_json
from hotrow.run.tally import Tally
from hotrow.support.records import Counts, RankRecord, Summary, TableRecord
from hotrow.training.trainer import Trainer


def rank_records(trainer: Trainer[Any]) -> tuple[RankRecord, ...]:
    """Return the records of all ranks, on all ranks; none where there is one rank.

    All ranks call it together, when none trains. A rank that is gone is a RankError.
    """
    shared = trainer.shared
    if shared is None:
        return ()
    texts = shared.texts(to_json(own_record(trainer)))
    return tuple(msgspec.json.decode(text, type=RankRecord) for text in texts)


def table_records(trainer: Trainer[Any]) -> dict[str, TableRecord]:
    """Return what all ranks together have looked up and moved of each table; none where there is
    one rank. All ranks call it together."""
    shared = trainer.shared
    if shared is None:
        return {}
    lookups = shared.lookups_by_table()
    mine = {
        name: [lookups[name], x.unique_rows, x.fetched_rows, x.evicted_rows]
        for collection in collections_in(trainer.model).values()
        for name, x in collection.traffic().per_table.items()
    }
    every = [json.loads(text) for text in shared.texts(json.dumps(mine))]
    return {
        name: TableRecord(*map(sum, zip(*(of_rank[name] for of_rank in every), strict=True)))
        for name in mine
    }


def own_record(trainer: Trainer[Any]) -> RankRecord:
    """Return what this rank has done; waits for the device."""
    shared = trainer.shared
    assert shared is not None
    collections = list(collections_in(trainer.model).values())
    traffic = [collection.traffic() for collection in collections]
    return RankRecord(
        rank=shared.rank,
        machine=platform.node(),
        device=str(shared.device),
        owned_rows=sum(collection.num_rows for collection in collections),
        num_slots=sum(collection.num_slots for collection in collections),
        served_rows=shared.served_rows(),
        fetched_rows=sum(x.fetched_rows for x in traffic),
        evicted_rows=sum(x.evicted_rows for x in traffic),
        loaded_rows=sum(x.loaded_rows for x in traffic),
        bytes_fetched=sum(x.bytes_fetched for x in traffic),
        bytes_evicted=sum(x.bytes_evicted for x in traffic),
        fast_bytes=sum(sum(collection.memory().values()) for collection in collections),
        host_bytes=_peak_bytes(),
        chunked_batches=max(x.chunked_batches for x in traffic),
        **asdict(shared.own),
        **shared.counters(),
    )


def totals_of(trainer: Trainer[Any], tally: Tally) -> Counts | None:
    """Return what all ranks have counted in the whole run; None: it never had several, and records
    of steps say it. All ranks call it together, when none trains."""
    if ranks := rank_records(trainer):
        return _counts_of(ranks, tally.earlier)
    return tally.counts if tally.was_shared else None


def of_all_ranks(
    summary: Summary,
    ranks: Sequence[RankRecord],
    earlier: Counts = Counts(),  # noqa: B008
) -> Summary:
    """Return the summary of a run, whose counts are rank 0's own, with those of all ranks: what
    they have counted since their processes started, and all ranks `earlier`."""
    if not ranks:
        return summary
    total = _counts_of(ranks, earlier)
    return replace(
        summary,
        lookups=total.lookups,
        hit_rate=total.hit_rate,
        bytes_moved=total.bytes_moved,
        bytes_sent=total.bytes_sent,
        fast_rows_share=sum(x.num_slots for x in ranks) / sum(x.owned_rows for x in ranks),
        chunked_batches=max(x.chunked_batches for x in ranks),
    )


def _counts_of(ranks: Sequence[RankRecord], earlier: Counts) -> Counts:
    return Counts(
        **{
            field.name: sum(getattr(x, field.name) for x in (earlier, *ranks))
            for field in fields(Counts)
        }
    )


def _peak_bytes() -> int:
    """Return the most host memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
