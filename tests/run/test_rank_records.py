"""Ranks record what each of them did; the counts of all are those of the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hotrow
from click_models import ClickModel, click_batches, trainer_of
from hotrow.data.ranks import RankPart
from hotrow.run.files import RunWriter, read_run
from hotrow.run.rank_records import of_all_ranks, rank_records, table_records
from hotrow.run.tally import Tally
from hotrow.store.traffic import Traffic
from hotrow.support.records import Counts, RankRecord, Summary, TableRecord
from rank_processes import run
from step_records import RANK, RUN, SUMMARY

ROWS = (3_000, 1_500)
STEPS, SIZE = 40, 32
TRAINED = click_batches(STEPS, ROWS, size=SIZE, last=5)
HELD_OUT = click_batches(3, ROWS, size=20, last=2)


Trained = tuple[
    tuple[RankRecord, ...], Summary, dict[str, int], float, dict[str, TableRecord], Traffic
]


def trained(rank: int, world: int) -> Trained:
    """Train with an evaluation in between, whose lookups and waiting do not count."""
    named = zip("ab", ROWS, strict=True)
    tables = [hotrow.EmbeddingBagConfig(name, rows, 4, [name]) for name, rows in named]
    embedding = hotrow.EmbeddingBagCollection(
        tables, hotrow.Adagrad(lr=0.1), budget="24KiB", seed=0, replicate="2KiB"
    )
    trainer, tally = trainer_of(ClickModel(embedding, 3)), Tally()
    part = RankPart(rank, world)
    waited = 0.0
    for record in trainer.run([part.cut(batch) for batch in TRAINED]):
        tally.add(record)
        waited += record.rank_seconds
        if record.step == STEPS // 2:
            trainer.evaluate([part.cut(batch) for batch in HELD_OUT])
        assert 0 <= record.rank_seconds <= record.seconds
    records = rank_records(trainer)
    summary = of_all_ranks(tally.summary(), records)
    tables, traffic = table_records(trainer), embedding.traffic()
    return records, summary, embedding.sent_bytes(), waited, tables, traffic


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest) -> Any:
    return run(request.param, trained)


def test_all_ranks_return_the_records_of_all(results: Any) -> None:
    first = results[0][0]
    assert [record.rank for record in first] == list(range(len(results)))
    for records, *_ in results:
        assert records == first


def test_records_add_up_to_the_run(results: Any) -> None:
    records, summary = results[0][:2]
    samples = (STEPS - 1) * SIZE + 5
    assert sum(x.owned_rows for x in records) == sum(ROWS)
    assert [x.samples for x in records] == [
        sum(len(RankPart(x.rank, len(records)).cut(batch).label) for batch in TRAINED)
        for x in records
    ]
    assert [x.lookups for x in records] == [2 * x.samples for x in records]
    assert summary.lookups == 2 * samples
    # Every row that a rank asks for is served by one, and bytes say how many went to others.
    asked, served = (sum(getattr(x, n) for x in records) for n in ("unique_rows", "served_rows"))
    assert 0 < asked == served < summary.lookups
    for record, (_, _, sent, waited, *_) in zip(records, results, strict=True):
        assert (record.bytes_of_ids, record.bytes_of_rows, record.bytes_of_grads) == (
            sent["ids"], sent["rows"], sent["grads"],
        )  # fmt: skip
        assert 0 < record.bytes_of_rows < 4 * 4 * record.served_rows
        assert record.wait_seconds == pytest.approx(waited)
        assert 0 < record.wait_seconds < record.seconds
        assert record.fast_bytes > 0
        assert record.host_bytes > 10 << 20
    assert summary.bytes_sent == sum(x.bytes_sent for x in records)
    assert summary.bytes_moved == sum(x.bytes_moved for x in records) > 0
    fetched = sum(x.fetched_rows for x in records)
    assert summary.hit_rate == pytest.approx(1 - fetched / summary.lookups)


def test_tables_add_up_to_the_run(results: Any) -> None:
    samples = (STEPS - 1) * SIZE + 5
    tables = results[0][4]
    assert {name: table.lookups for name, table in tables.items()} == {"a": samples, "b": samples}
    for *_, others, _ in results:
        assert others == tables
    for name, table in tables.items():
        of_ranks = [traffic.per_table[name] for *_, traffic in results]
        for count in ("unique_rows", "fetched_rows", "evicted_rows"):
            assert getattr(table, count) == sum(getattr(x, count) for x in of_ranks)
        assert 0 < table.fetched_rows <= table.unique_rows < table.lookups


def test_one_rank_has_no_record() -> None:
    records, summary, _, waited, tables, _ = trained(0, 1)
    assert (records, tables) == ((), {})
    assert summary.bytes_sent == waited == 0


def test_steps_before_a_resume_count_for_all_ranks() -> None:
    ranks = [replace(RANK, lookups=60, fetched_rows=6), replace(RANK, lookups=30, fetched_rows=3)]
    earlier = Counts(lookups=110, fetched_rows=21, rows_moved=50, bytes_moved=70, bytes_sent=9)
    whole = of_all_ranks(SUMMARY, ranks, earlier)
    assert (whole.lookups, whole.hit_rate) == (200, 1 - 30 / 200)
    assert whole.bytes_moved == 70 + 2 * RANK.bytes_moved
    assert whole.bytes_sent == 9 + 2 * RANK.bytes_sent
    assert of_all_ranks(SUMMARY, (), earlier) == SUMMARY


def test_records_of_ranks_read_back_as_they_were_written(tmp_path: Path) -> None:
    shared = replace(RUN, ranks=(RANK, replace(RANK, rank=1, machine="other")))
    with RunWriter(tmp_path, name="shared") as writer:
        path = writer.finish(shared)
        assert read_run(writer.folder) == shared
        values = json.loads(path.read_text())
        del values["ranks"]  # as earlier versions wrote it
        path.write_text(json.dumps(values))
        assert read_run(writer.folder) == RUN
