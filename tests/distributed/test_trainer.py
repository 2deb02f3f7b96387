"""hotrow.Trainer on several ranks trains what it trains alone on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hotrow
from click_models import ClickModel, click_batches, trainer_of
from hotrow.data import ClickBatch
from hotrow.data.ranks import RankPart
from hotrow.support.records import EvalRecord
from rank_processes import run

ROWS = (3_000, 1_500)
STEPS, SIZE = 8, 32
TRAINED = click_batches(STEPS, ROWS, size=SIZE, last=3)  # with 4 ranks a part of it is empty
HELD_OUT = click_batches(5, ROWS, size=20, last=2)
Strategies = ("all-fast", "lookahead")


def make(strategy: str = "lookahead", **options: Any) -> ClickModel:
    named = zip("ab", ROWS, strict=True)
    tables = [hotrow.EmbeddingBagConfig(name, rows, 4, [name]) for name, rows in named]
    options = {"optimizer": hotrow.Adagrad(lr=0.1), "budget": "24KiB", "seed": 0, **options}
    return ClickModel(hotrow.EmbeddingBagCollection(tables, strategy=strategy, **options), 3)


def parts(batches: Sequence[ClickBatch], rank: int, world: int) -> list[ClickBatch]:
    return [RankPart(rank, world).cut(batch) for batch in batches]


def outcome(trainer: hotrow.Trainer[Any], rank: int, world: int) -> dict[str, Any]:
    """Train and evaluate the parts of a rank."""
    records = list(trainer.run(parts(TRAINED, rank, world)))
    held_out = parts(HELD_OUT, rank, world)
    model: Any = trainer.model
    return {
        "losses": [record.loss for record in records],
        "samples": [record.samples for record in records],
        "sent": sum(x.bytes_of_ids + x.bytes_of_rows + x.bytes_of_grads for x in records),
        "evaluation": trainer.evaluate(held_out),
        "mean": trainer.mean_loss(held_out),
        "bits": model.bits(),
    }


def clicks(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in Strategies:
        found[strategy] = outcome(trainer_of(make(strategy)), rank, world)
    model = make()
    found["clipped"] = outcome(trainer_of(model, clip_norm=0.05), rank, world)
    model = make(optimizer=None, update="step")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    options: Any = {"ids": lambda b: b.sparse, "dense_optimizer": optimizer}
    loss_fn = F.binary_cross_entropy_with_logits
    found["step"] = outcome(hotrow.Trainer(model, loss_fn, **options), rank, world)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_trains_the_same(world: int) -> None:
    alone, results = clicks(0, 1), run(world, clicks)
    for case, expected in alone.items():
        of_ranks = [result[case] for result in results]
        first = of_ranks[0]
        torch.testing.assert_close(first["losses"], expected["losses"], rtol=0, atol=1e-6)
        assert first["samples"] == expected["samples"] == [SIZE] * (STEPS - 1) + [3]
        assert_same(first["evaluation"], expected["evaluation"])
        assert first["mean"] == pytest.approx(expected["mean"], abs=1e-6)
        for bits, other in zip(first["bits"], expected["bits"], strict=True):
            torch.testing.assert_close(bits, other, rtol=1e-5, atol=1e-6)
        assert first["sent"] > expected["sent"] == 0
        for other in of_ranks[1:]:
            assert (other["losses"], other["evaluation"]) == (first["losses"], first["evaluation"])
            assert all(map(torch.equal, other["bits"], first["bits"]))
    for left, right in ((result[name] for name in Strategies) for result in results):
        assert left["losses"] == right["losses"]
        assert all(map(torch.equal, left["bits"], right["bits"]))


def assert_same(found: EvalRecord, expected: EvalRecord) -> None:
    assert (found.step, found.samples) == (expected.step, expected.samples)
    assert found.auc == pytest.approx(expected.auc, abs=1e-9)
    assert found.log_loss == pytest.approx(expected.log_loss, abs=1e-6)
