"""Slipstream and random-drop on several ranks skip what they skip on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import hotrow
from click_models import ClickModel, trainer_of
from hotrow.data import ClickBatch, SyntheticClicks, SyntheticConfig
from hotrow.inputs.tree import tensors_in
from rank_processes import run

CONFIG = SyntheticConfig(rows=(2_000, 60, 9), batch_size=48, num_dense=3, skew=1.3, seed=5)
STEPS = 36


def model(strategy: str = "lookahead", **options: Any) -> ClickModel:
    tables = [
        hotrow.EmbeddingBagConfig(f"cat_{k}", rows, 4, [f"cat_{k}"])
        for k, rows in enumerate(CONFIG.rows)
    ]
    options = {"optimizer": hotrow.Adagrad(lr=0.05), "budget": "50%", "seed": 0, **options}
    return ClickModel(hotrow.EmbeddingBagCollection(tables, strategy=strategy, **options), 3)


def clicks(seed: int = CONFIG.seed) -> SyntheticClicks:
    config = asdict(CONFIG) | {"seed": seed}
    return SyntheticClicks(SyntheticConfig(**config))


class Epoch:
    """A loader of hotrow that is read again."""

    def __init__(self, first: int, last: int) -> None:
        self._span = first, last

    def __iter__(self) -> Any:
        return iter(clicks().batches(*self._span))

    def __len__(self) -> int:
        return self._span[1] - self._span[0]

    def whole_batches(self) -> list[ClickBatch]:
        return list(map(clicks().batch, range(*self._span)))


def slipstream(**changes: Any) -> hotrow.Slipstream:
    settings = {"target": 0.3, "watched": 0.2, "sample_rate": 0.1, "hot_budget": "60%"}
    settings |= {"test": Epoch(40, 42), "validate_every": 6, "recheck_every": 9}
    settings["batches_per_epoch"] = STEPS
    return hotrow.Slipstream(**{**settings, **changes})


SYSTEMS: dict[str, Callable[[], Any]] = {
    "random-drop": lambda: hotrow.RandomDrop(share=0.2, starting_batch=5),
    "slipstream": slipstream,
    "rows": lambda: slipstream(mode="rows"),
}


def trained(system: Any, strategy: str, batches: Iterable[Any]) -> dict[str, Any]:
    """Train by a system. The samples that were trained are told by their labels and numbers."""
    trainer = trainer_of(model(strategy), system)
    seen: list[Any] = []
    passes = system.passes

    def noted(batch: Any) -> Any:
        seen.append([x.clone() for x in tensors_in(batch)])
        return batch

    system.passes = lambda batches: (map(noted, segment) for segment in passes(batches))
    records = list(trainer.run(batches))
    trained_model: Any = trainer.model
    return {
        "losses": [x.loss for x in records],
        "samples": [x.samples for x in records],
        "record": asdict(system.record),
        "seen": seen,
        "bits": trained_model.bits(),
    }


def every_system(rank: int, world: int) -> dict[str, Any]:
    found = {
        name: trained(system(), "lookahead", clicks().batches(0, STEPS))
        for name, system in SYSTEMS.items()
    }
    batches = Epoch(0, STEPS).whole_batches()  # of the user's own, the same on every rank
    found["list"] = trained(slipstream(), "scratchpipe", batches)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return every_system(0, 1)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_ranks_skips_the_same(world: int, alone: dict[str, Any]) -> None:
    results = run(world, every_system)
    assert alone["random-drop"]["record"]["dropped"] == (STEPS - 5) * 48 // 5
    for case in ("slipstream", "list"):
        assert alone[case]["record"]["dropped"] > 100
    assert alone["rows"]["record"]["stale_rows"]
    for case, expected in alone.items():
        first = results[0][case]
        assert first["samples"] == expected["samples"]
        assert_same_record(first["record"], expected["record"])
        assert same_tensors(first["seen"], expected["seen"])
        torch.testing.assert_close(first["losses"], expected["losses"], rtol=1e-5, atol=1e-7)
        for one, other in zip(first["bits"], expected["bits"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        for other in results:
            assert same_tensors(other[case]["seen"], first["seen"])
            for key in ("losses", "record", "samples"):
                assert other[case][key] == first[key], (case, key)
            assert all(map(torch.equal, other[case]["bits"], first["bits"]))


def assert_same_record(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Thresholds are of rows, which differ by rounding."""
    found, expected = dict(found), dict(expected)
    one, other = (x.pop("threshold") or {"tau": 0.0} for x in (found, expected))
    assert one["tau"] == pytest.approx(other["tau"], rel=1e-3)
    assert found == expected


def same_tensors(one: Sequence[Any], other: Sequence[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(x, y) for a, b in pairs for x, y in zip(a, b, strict=True))
