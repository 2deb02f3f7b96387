"""Bytes that are predicted for several ranks are those that real runs send."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest

import hotrow
from commands import succeeds
from hotrow.data import SyntheticClicks
from hotrow.distributed.ranks import Channel, Header, Headers, Ranks
from hotrow.engine.strategy import STRATEGIES
from hotrow.run.config import RunConfig, load
from hotrow.study.lookups import OfRun
from hotrow.study.rank_popularity import Popularities
from hotrow.study.rank_traffic import Exchanged, RankTables, draw_exchange
from rank_processes import run

STEPS = 8
SETTINGS = (
    "data.rows=[5000, 900, 60, 7]", "data.batch_size=64", "model.embedding_dim=8",
    "embedding.optimizer.name=sgd",
)  # fmt: skip
REPLICATED = 1 << 14


def config() -> RunConfig:
    return load(None, overrides=SETTINGS)


def trace() -> OfRun:
    return OfRun(config().data, repeats=False)


def sent_by(rank: int, world: int, strategy: str, replicate: int) -> dict[str, int]:
    """Train as a rank of the predicted run: it has batch t R + r in step t."""
    ids = trace()
    tables = [hotrow.EmbeddingBagConfig(x, rows, 8, [x]) for x, rows in ids.rows.items()]
    options: dict[str, Any] = {}
    if replicate:
        rows = replicate // config().row_bytes
        options = {"replicate": replicate, "profile": ids.profile(rows)}
    embedding = hotrow.EmbeddingBagCollection(
        tables, hotrow.SGD(lr=0.01), "60%", strategy=strategy, seed=0, **options
    )
    clicks, swaps, swap = SyntheticClicks(config().data.clicks), [], Ranks.swap

    def counted(ranks: Ranks, header: Header, channel: Channel) -> Headers:
        headers = swap(ranks, header, channel)
        swaps.append(8 * ranks._width * (world - 1))
        return headers

    every = [clicks.batch(step * world + rank).sparse for step in range(STEPS)]
    with patch.object(Ranks, "swap", counted):
        for batch in hotrow.ahead(every, embedding):
            embedding(batch).values().sum().backward()
    return {**embedding.sent_bytes(), "headers": sum(swaps)}


def predicted(ranks: int, strategy: str, *words: str) -> dict[str, Any]:
    given = [word for setting in SETTINGS for word in ("--set", setting)]
    given += ["--batches", str(STEPS), "--warm-up", "0", "--depths", "3", "--slots", "60%"]
    given += ["--strategy", strategy, "--ranks", str(ranks), "--json", *words]
    facts: dict[str, Any] = json.loads(succeeds("simulate", *given).output.splitlines()[0])
    assert facts["drawn"]
    return facts


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["lookahead", "lru"])
def test_predicted_bytes_are_those_of_real_runs(ranks: int, strategy: str) -> None:
    results = run(ranks, sent_by, strategy, 0)
    facts = predicted(ranks, strategy)
    measured = {
        kind: sum(sent[kind] for sent in results) / ranks / STEPS
        for kind in ("ids", "rows", "early rows", "grads", "headers")
    }
    assert facts["id_bytes"] + facts["mark_bytes"] == pytest.approx(measured["ids"], rel=1e-9)
    assert facts["early_row_bytes"] == pytest.approx(measured["early rows"], rel=1e-9)
    rows = facts["early_row_bytes"] + facts["late_row_bytes"]
    assert rows == pytest.approx(measured["rows"], rel=1e-9)
    assert facts["grad_bytes"] == pytest.approx(measured["grads"], rel=1e-9)
    total = measured["ids"] + measured["rows"] + measured["grads"]
    assert facts["sent_bytes"] == pytest.approx(total, rel=1e-9)
    assert (facts["early_row_bytes"] > 0) == (strategy == "lookahead")
    # One header more says that no rank has another batch.
    assert facts["header_bytes"] * (STEPS + 1 / 3) == pytest.approx(measured["headers"] * STEPS)


def test_predicted_bytes_with_replicas_are_those_of_real_runs() -> None:
    results = run(2, sent_by, "lookahead", REPLICATED)
    facts = predicted(2, "lookahead", "--replicate", "16KiB")
    total = sum(sent[kind] for sent in results for kind in ("ids", "rows", "grads")) / 2 / STEPS
    assert facts["sent_bytes_replicated"] == pytest.approx(total, rel=1e-9)
    assert facts["replicated_rows"] == REPLICATED // 32


@pytest.mark.parametrize("ranks", [2, 16])
def test_computed_bytes_are_those_of_drawn_batches(ranks: int) -> None:
    tables = RankTables(config(), trace())
    replicas = tables.replicas(REPLICATED)
    look_ahead = STRATEGIES["scratchpipe"]
    rows = tables.layout.num_rows // ranks
    options: dict[str, Any] = {
        "batches": 40, "warm_up": 10, "choices": [(look_ahead, int(0.9 * rows))], "ahead": 4,
        "planned": ranks, "replicas": replicas,
    }  # fmt: skip
    drawn = draw_exchange(tables, ranks, **options)
    computed = Popularities(tables).exchange(ranks, **options)
    assert computed.unique_rows == pytest.approx(drawn.unique_rows, rel=0.02)
    assert (drawn.is_drawn, computed.is_drawn) == (True, False)
    for one, other in ((drawn.plain, computed.plain), (drawn.replicated, computed.replicated)):
        assert one is not None
        assert other is not None
        assert other.sent_bytes == pytest.approx(one.sent_bytes, rel=0.02)
        assert other.early_bytes + 100 == pytest.approx(one.early_bytes + 100, rel=0.05)
        assert other.late_bytes + 100 == pytest.approx(one.late_bytes + 100, rel=0.05)
        assert other.mark_bytes == pytest.approx(one.mark_bytes, rel=0.05)
        assert other.balance == pytest.approx(one.balance, rel=0.1)
    assert _distinct(computed) == pytest.approx(_distinct(drawn), rel=0.03)


def _distinct(exchanged: Exchanged) -> float:
    (planned,) = exchanged.planned
    return sum(x.unique_rows for x in planned) / sum(x.batches for x in planned)
