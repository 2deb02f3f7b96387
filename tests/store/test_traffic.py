"""What is counted as fetched, and what was there before any lookup asked for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.engine.strategy import STRATEGIES

# Few lookups beside a small table that is pinned whole, and beside many hot rows.
TABLES = [
    hotrow.EmbeddingBagConfig("large", 20_000, 4, ["a"]),
    hotrow.EmbeddingBagConfig("small", 300, 4, ["b"]),
]
PROFILE = {"large": torch.arange(20_000, 0, -1), "small": torch.full((300,), 30_000)}


def batches(count: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = torch.tensor([20_000, 300])
    return [(torch.rand(8, 2, generator=draw) * sizes).long() for _ in range(count)]


def trained(strategy: str, **options: Any) -> hotrow.EmbeddingBagCollection:
    embedding = hotrow.EmbeddingBagCollection(
        TABLES, hotrow.RowWiseAdagrad(lr=0.1), budget="50%", strategy=strategy, seed=0, **options
    )
    for ids in hotrow.ahead(batches(), embedding):
        embedding(ids).values().sum().backward()
    return embedding


@pytest.mark.parametrize("profile", [None, PROFILE], ids=["learned", "profiled"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_no_lookup_asked_for_are_no_misses(
    strategy: str, profile: hotrow.Profile | None
) -> None:
    traffic = trained(strategy, profile=profile).traffic()
    for found in (traffic, *traffic.per_table.values()):
        assert 0 <= found.fetched_rows <= found.unique_rows <= found.lookups
        assert 0 <= found.hit_rate <= 1
    # The host's strategies send vectors alone, of 4 numbers; others rows with their state.
    sizes = {4 * numbers * traffic.fetched_rows for numbers in (4, 5)}
    assert traffic.bytes_fetched - 4 * 5 * traffic.loaded_rows in sizes
    assert traffic.loaded_rows == sum(found.loaded_rows for found in traffic.per_table.values())
    # Without a profile a small table is what is known to be hot; look-ahead then pins nothing.
    if STRATEGIES[strategy].pinned_part and (strategy != "lookahead" or profile is not None):
        assert traffic.per_table["small"].loaded_rows > 250
        assert (traffic.per_table["large"].loaded_rows > 1000) is (profile is not None)
    else:
        assert traffic.loaded_rows == 0


@pytest.mark.parametrize("profile", [None, PROFILE], ids=["learned", "profiled"])
@pytest.mark.usefixtures("device_engine")
def test_a_device_counts_them_apart_as_well(profile: hotrow.Profile | None) -> None:
    traffic = trained("static", profile=profile).traffic()
    assert 0 <= traffic.hit_rate <= 1
    assert traffic.loaded_rows >= 300
    assert traffic.bytes_fetched == 4 * 5 * (traffic.fetched_rows + traffic.loaded_rows)
    assert traffic.per_table["small"].fetched_rows == 0


def test_rows_that_a_caller_pins_are_counted_apart() -> None:
    embedding = hotrow.EmbeddingBagCollection(
        TABLES, hotrow.SGD(lr=0.1), budget="50%", strategy="static"
    )
    embedding.reserve(8)
    embedding.pin_rows({"small": torch.arange(300)})
    traffic = embedding.traffic()
    assert (traffic.loaded_rows, traffic.fetched_rows, traffic.hit_rate) == (300, 0, 1.0)
    assert traffic.per_table["small"].bytes_fetched == 300 * 4 * 4


def test_steps_say_the_same() -> None:
    embedding = hotrow.EmbeddingBagCollection(
        TABLES, hotrow.SGD(lr=0.1), budget="50%", strategy="static", profile=PROFILE
    )
    trainer = hotrow.Trainer(
        torch.nn.Sequential(embedding),
        lambda found, _: found.values().sum(),
        dense_optimizer=None,
        ids=lambda batch: batch,
        labels=lambda batch: batch,
    )
    steps = list(trainer.run(batches()))
    traffic = embedding.traffic()
    assert all(0 <= step.hit_rate <= 1 for step in steps)
    for name in ("fetched_rows", "loaded_rows", "bytes_fetched"):
        assert sum(getattr(step, name) for step in steps) == getattr(traffic, name)
    assert traffic.loaded_rows > 1000
