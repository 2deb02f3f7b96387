"""A report of several ranks has a row for each of them, and says how even they are."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from commands import succeeds
from hotrow.cli._watch import summary_facts
from hotrow.report.curves import Curve
from hotrow.report.page import Charts, Section, Table, Text, page_of
from hotrow.report.rank_tables import balance_in_words, rank_parts
from hotrow.report.runs import RunView, runs_document
from hotrow.run.files import RunWriter
from hotrow.support.records import RankRecord, StepRecord
from step_records import RANK, RUN, STEP

RANKS = (
    RANK,
    replace(RANK, rank=1, machine="other", lookups=20, served_rows=132, wait_seconds=0.006),
)
SHARED = replace(RUN, ranks=RANKS)


def shared_step(step: int) -> StepRecord:
    return replace(STEP, step=step, rank_seconds=0.001 * step)


def table_of(ranks: tuple[RankRecord, ...]) -> Table:
    return next(part for part in rank_parts(ranks) if isinstance(part, Table))


def test_a_table_has_a_row_for_each_rank_and_the_balance_last() -> None:
    table = table_of(RANKS)
    cells = [dict(zip(table.heads, row, strict=True)) for row in table.rows]
    assert [row["rank"] for row in cells] == ["0", "1", "balance"]
    assert [row["lookups"] for row in cells] == ["60", "20", "1.500"]
    assert [row["rows served"] for row in cells] == ["44", "132", "1.500"]
    assert [row["host link"] for row in cells] == ["1.2 KiB", "1.2 KiB", "1.000"]
    assert [row["sent"] for row in cells] == ["720 B", "720 B", "1.000"]
    assert [row["waited"] for row in cells] == ["0.00 s", "0.01 s", "1.500"]
    assert [row["of training"] for row in cells] == ["20.0%", "60.0%", "1.500"]
    assert table.marked == [2]
    *_, places = rank_parts(RANKS)
    assert isinstance(places, Table)
    assert [row[:3] for row in places.rows] == [["0", "one", "cpu"], ["1", "other", "cpu"]]


def test_a_line_says_how_even_ranks_are() -> None:
    expected = "lookups 1.500, rows served 1.500, host link 1.000, sent 1.000, waited 1.500"
    assert balance_in_words(RANKS) == expected
    assert rank_parts(RANKS)[0] == Text(
        f"Balance of 2 ranks, the largest value over the mean: {expected}."
    )
    nothing = replace(RANK, lookups=0, bytes_fetched=0, bytes_evicted=0)
    assert "lookups 1.000, rows served 1.000, host link 1.000" in balance_in_words([nothing] * 2)


def test_many_ranks_are_cut_off_in_the_table_and_not_in_the_balance() -> None:
    ranks = tuple(replace(RANK, rank=number, lookups=number + 1) for number in range(99))
    parts = rank_parts(ranks)
    assert len(table_of(ranks).rows) == 65
    assert table_of(ranks).rows[-1][2] == "1.980"  # 99 over a mean of 50
    assert isinstance(parts[1], Text)
    assert "35 more ranks left out" in parts[1].text
    assert isinstance(parts[3], Charts)
    for chart in parts[3].charts:
        assert len(chart.order) == 40
        assert chart.note == "The first 40 ranks."


def test_runs_of_one_rank_show_nothing_of_ranks() -> None:
    alone = RunView("first", RUN, Curve([STEP]))
    shared = RunView("second", SHARED, Curve(map(shared_step, range(1, 5))))
    for views, titles in (([alone], []), ([shared], ["Ranks"]), ([alone, shared], ["Ranks of"])):
        document = runs_document(views)
        sections = [part for part in document.parts if isinstance(part, Section)]
        of_ranks = [part.title for part in sections if part.title.startswith("Ranks")]
        assert [title.removesuffix(" second") for title in of_ranks] == titles
        text = page_of(document)
        assert ("Rank 0 waited for other ranks" in text) == bool(titles)
        (summary,) = next(x for x in sections if x.title == "Summary").parts
        assert isinstance(summary, Table)
        assert ("ranks" in summary.heads) == bool(titles)


def test_a_curve_has_the_share_of_waiting_for_ranks() -> None:
    assert Curve(map(shared_step, range(1, 5))).rank_waited == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert Curve(map(shared_step, range(1, 5)), most=2).rank_waited == pytest.approx([0.15, 0.35])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with RunWriter(tmp_path_factory.mktemp("runs"), name="shared") as run:
        for step in range(1, 5):
            run.step(shared_step(step))
        run.finish(replace(SHARED, name="shared"))
    return run.folder


def test_the_command_prints_them_as_text_and_json(folder: Path) -> None:
    text = succeeds("report", str(folder), "--text").stdout
    assert "Balance of 2 ranks, the largest value over the mean: lookups 1.500" in text
    assert "process memory" in text
    (run,) = json.loads(succeeds("report", str(folder), "--json").stdout)["runs"]
    assert run["ranks"] == [asdict(rank) for rank in RANKS]
    assert run["curve"]["rank_waited"] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_the_facts_at_the_end_of_a_run_say_how_even_ranks_were() -> None:
    settings = {"embedding": {"strategy": "lookahead"}}
    summary = replace(RUN.summary, bytes_sent=1440)
    facts = summary_facts(replace(SHARED, settings=settings, summary=summary))
    assert facts["sent between ranks"] == "1.4 KiB"
    assert facts["2 ranks"].startswith("largest / mean: lookups 1.500, rows served 1.500")
    assert not any("rank" in name for name in summary_facts(replace(RUN, settings=settings)))
