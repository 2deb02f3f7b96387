"""On a GPU: what is measured of it, and `budget="auto"`."""

from __future__ import annotations

import pytest
import torch

import hotrow
from hotrow.sizing.machines import machine_at, measure

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def test_a_gpu_is_measured() -> None:
    found = measure(DEVICE)
    assert found.is_gpu
    assert found.gpu == torch.cuda.get_device_name(DEVICE)
    assert 1 < found.link_gb < found.hbm_gb
    assert found.row_rates[0][1] > found.row_rates[-1][1] > 0
    assert machine_at(DEVICE).gpu == found.gpu


def test_auto_holds_all_rows_where_they_fit() -> None:
    table = hotrow.EmbeddingBagConfig("item", 100_000, 16, ["item"])
    embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), budget="auto", device="cuda")
    ids = torch.arange(4096, device="cuda")[:, None]
    embedding(ids).values().sum().backward()
    assert embedding.groups[0].memory.pad.num_slots == 100_000


def test_auto_takes_less_by_a_profile() -> None:
    table = hotrow.EmbeddingBagConfig("item", 2_000_000, 16, ["item"])
    counts = 1e9 / torch.arange(1, 2_000_001).double() ** 1.6
    embedding = hotrow.EmbeddingBagCollection(
        [table], hotrow.SGD(), budget="auto", device="cuda", profile={"item": counts}
    )
    assert 0 < embedding.groups[0].memory.pad.num_slots < 500_000
