"""Numbers of numpy and torch do what Python's own do."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

import hotrow
from hotrow.data import SyntheticClicks, SyntheticConfig
from hotrow.data.prepared.job import Settings
from hotrow.run.config import (
    DataSection,
    DenseOptimizerSection,
    EmbeddingSection,
    ModelSection,
    RowOptimizerSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    TrainingSection,
)
from hotrow.support.numbers import plain

KINDS = [np.int64, np.int32, np.uint64, torch.tensor]


def test_numbers_become_python_s_own() -> None:
    found = plain((np.int64(1), np.float32(0.5), torch.tensor(2), np.array([3, 4]), "x", None))
    assert found == (1, 0.5, 2, (3, 4), "x", None)
    assert [type(each) for each in found] == [int, float, int, tuple, str, type(None)]


@pytest.mark.parametrize("kind", KINDS)
def test_generated_clicks_are_those_of_the_number(kind: Any) -> None:
    def first(**settings: Any) -> torch.Tensor:
        config = SyntheticConfig(batch_size=16, num_dense=2, **settings)
        sparse = SyntheticClicks(config).batch(0).sparse
        assert not isinstance(sparse, torch.Tensor)
        return sparse.values()

    own = first(rows=(100, 50), lookups=2, skew=1.0, seed=3)
    other = first(rows=(kind(100), kind(50)), lookups=kind(2), skew=kind(1), seed=kind(3))
    assert torch.equal(own, other)
    assert torch.equal(own, first(rows=np.array([100, 50]), lookups=2, skew=1.0, seed=3))


@pytest.mark.parametrize("kind", KINDS)
def test_settings_can_be_written_down(kind: Any) -> None:
    config = RunConfig(
        RunSection(seed=kind(1), threads=kind(1)),
        DataSection(seed=kind(2), rows=(kind(50),), batch_size=kind(16)),
        ModelSection(embedding_dim=kind(8), bottom=(kind(4),)),
        EmbeddingSection(
            budget=kind(4096), depth=kind(2), optimizer=RowOptimizerSection(lr=kind(1))
        ),
        TrainingSection(
            steps=kind(3), schedule=ScheduleSection(warmup_steps=kind(2)),
            optimizer=DenseOptimizerSection(lr=kind(1)),
        ),
    )  # fmt: skip
    assert json.loads(json.dumps(asdict(config)))["training"]["steps"] == 3
    settings = Settings(seed=kind(1), max_rows=kind(10), memory_bytes=kind(1 << 30))
    assert json.loads(json.dumps(asdict(settings)))["memory_bytes"] == 1 << 30


@pytest.mark.parametrize("kind", KINDS)
def test_tables_start_with_the_bits_of_the_number(kind: Any) -> None:
    def rows(rows: Any, dim: Any, seed: Any) -> torch.Tensor:
        table = hotrow.EmbeddingBagConfig("a", rows, dim, ["a"])
        embedding = hotrow.EmbeddingBagCollection(
            [table], hotrow.SGD(lr=0.1), strategy="all-fast", seed=seed
        )
        return torch.cat(list(embedding.state_dict().values()))

    assert torch.equal(rows(kind(100), kind(8), kind(3)), rows(100, 8, 3))
