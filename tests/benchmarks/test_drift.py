"""Hot sets beside an hourly oracle, on a few invented clicks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pa = pytest.importorskip("pyarrow")


@pytest.fixture
def script(load: Any) -> Any:
    return load("drift")


def write(path: Path, *, hours: int = 12, per_hour: int = 3000) -> None:
    """Nine of ten clicks go to five articles, five others after every fifth hour."""
    import pyarrow.parquet as pq

    total = hours * per_hour
    seconds = torch.arange(total) * 3600 // per_hour
    hot = 100 + 5 * (seconds // 18_000) + torch.randint(0, 5, (total,))
    articles = torch.where(torch.rand(total) < 0.9, hot, torch.randint(1000, 3000, (total,)))
    context = {
        name: torch.randint(1, 4, (total,)).numpy()
        for name in ("environment", "deviceGroup", "os", "referrer_type")
    }
    columns = {"timestamp": seconds.numpy(), "article_id": articles.numpy(), **context}
    pq.write_table(pa.table(columns), path)


def test_relearning_stays_near_an_oracle_and_learning_once_does_not(
    script: Any, tmp_path: Path
) -> None:
    path = tmp_path / "clicks.parquet"
    write(path)
    clicks = script.read(path, script.COLUMNS)
    assert clicks.ids.shape == (36_000, 5)
    assert [table.num_embeddings for table in clicks.tables[1:]] == [3, 3, 3, 3]
    names = (script.ORACLE, "learned once, from 5 %", script.HOTLINE, "static")
    lines = {line.name: line for line in script.compare(clicks, 0.02, 250, names)}
    oracle, once, again, static = (lines[name] for name in names)
    assert oracle.share > 0.9
    assert (oracle.below, oracle.hours_near) == (0, 1)
    assert once.below > 0.5
    assert again.below < 0.1
    assert again.times_chosen > once.times_chosen == 1
    assert again.share == pytest.approx(oracle.share - again.below)
    assert len(again.by_hour) == len(oracle.by_hour) == 12
    assert static.share is None
    assert again.hit_rate > static.hit_rate


def test_popular_clicks_are_those_whose_rows_were_pinned_when_they_came(script: Any) -> None:
    """By the decisions alone, with nothing trained."""
    clicks = script.steady(6_000, 300)
    budget, size = 20 * script.ROW_BYTES, 100

    def log() -> Any:
        return script.DecayedCounts(clicks.tables, clicks.row_bytes, budget)

    system = script.Watched(size, len(clicks.ids), log=lambda _: log(), relearn=0, floor=0)
    slots = 20 + 2 * script.most_rows(clicks, size)
    served = script.trained(clicks, size, "static", slots, system)
    counts, learned = log(), 3  # 5 % of 60 batches
    for _, batch in list(clicks.batches(size))[:learned]:
        counts.add(batch)
    expected = script.popular(clicks.batch(0, len(clicks.ids)), counts.hot())
    expected[: learned * size] = False
    assert served.is_popular.equal(expected)
    assert served.times_chosen == 1
    assert served.hits[-1] > served.hits[0]


def test_generated_clicks_keep_their_popularity(script: Any) -> None:
    clicks = script.steady(40_000, 500)
    first, last = (torch.bincount(part, minlength=500) for part in clicks.ids[:, 0].chunk(2))
    assert abs(int(first.max()) - int(last.max())) < 5 * int(first.max()) ** 0.5
    assert first.topk(5)[1].tolist()[0] == last.topk(5)[1].tolist()[0]
    assert int(clicks.hours[-1]) == 4


def test_an_hour_is_counted_by_hand(script: Any) -> None:
    ids = torch.tensor([[0], [0], [1], [2], [2], [1]])
    tables = (script.EmbeddingBagConfig("article_id", 3, 16, ["article_id"]),)
    clicks = script.Clicks(tables, ids, torch.tensor([0, 0, 0, 3, 3, 3]))
    own = script.chosen_by_hour(clicks, script.ROW_BYTES, ahead=True)
    assert own.is_popular.tolist() == [True, True, False, True, True, False]
    assert (own.times_chosen, own.rows_in) == (2, 2)
    before = script.chosen_by_hour(clicks, script.ROW_BYTES, ahead=False)
    assert before.is_popular.tolist() == [False] * 6
    days = script.Clicks(tables, ids, torch.tensor([0, 1, 23, 24, 25, 47]))
    assert script.next_day(days, 0.67) == pytest.approx(1 / 3)  # rows 0 and 1 were read on day 1


def test_other_files_are_refused(script: Any, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "other.parquet"
    pq.write_table(pa.table({"timestamp": [2, 1], "article_id": [1, 2]}), path)
    with pytest.raises(SystemExit, match="has no column environment; it has timestamp, article_id"):
        script.read(path, script.COLUMNS)
    with pytest.raises(SystemExit, match="sorted by timestamp"):
        script.read(path, ["article_id"])
