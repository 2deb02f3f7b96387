"""Batches under a process group: each rank gets its part without being asked to."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from hotrow.data import ClickBatch, Loader, SyntheticClicks, SyntheticConfig
from hotrow.inputs import samples
from hotrow.inputs.tree import tensors_in
from hotrow.run.config import DataSection
from hotrow.run.source import Generated
from rank_processes import run
from samples import Memory

LOADER = partial(Loader, Memory([50] * 5, jagged=True), batch_size=30, mixed=100, seed=1, epochs=2)
CONFIG = SyntheticConfig(rows=(100, 9), batch_size=10, num_dense=2)
SECTION = DataSection(rows=(100, 9), batch_size=10, samples=30, eval_batches=2)


def read(rank: int, world: int) -> dict[str, list[ClickBatch]]:
    # A loader may be older than the process group: the ranks count when reading begins.
    loader, drawn = LOADER(), SyntheticClicks(CONFIG)
    held = Generated(SECTION, pin_memory=False)
    found: dict[str, Any] = {
        "loader": loader,
        "rest": loader.batches(7),
        "generated": drawn.batches(0, 3),
        "run": held.batches(5, 1),
        "split": held.split("test").batches,
        "whole": LOADER(rank=0, ranks=1),
    }
    batches = {name: list(of_name) for name, of_name in found.items()}
    dist.destroy_process_group()
    batches["later"] = list(loader)
    return batches


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_every_batch(world: int) -> None:
    loader, drawn = LOADER(), SyntheticClicks(CONFIG)
    held = Generated(SECTION, pin_memory=False)
    results = run(world, read)
    assert all(len(result["loader"]) == len(loader) for result in results)
    expected: dict[str, Any] = {
        "loader": loader,
        "rest": loader.batches(7),
        "generated": drawn.batches(0, 3),
        "run": held.batches(5, 1),
        "split": held.split("test").batches,
    }
    for name, batches in expected.items():
        parts = zip(*(result[name] for result in results), strict=True)
        assert_same(map(samples.join, parts), batches)
    for result in results:
        assert_same(result["whole"], loader)
        assert_same(result["later"], loader)


def assert_same(found: Any, expected: Any) -> None:
    for left, right in zip(found, expected, strict=True):
        pairs = zip(tensors_in(left), tensors_in(right), strict=True)
        assert all(one.equal(other) for one, other in pairs)
