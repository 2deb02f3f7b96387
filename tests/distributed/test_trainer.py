"""hotrow.Trainer on several ranks trains what it trains alone on the same batches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
Strategies = ("all-fast", "lookahead", "scratchpipe")


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


class Bags(nn.Module):
    """Converted modules; what they look up is learned from the first batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.EmbeddingBag(rows, 4, mode="sum") for rows in ROWS)
        self.top = nn.Linear(11, 1)
        hotrow.convert(self, budget="24KiB")

    def forward(self, batch: ClickBatch) -> Tensor:
        bags = [self.a(batch.sparse[:, :1]), self.b(batch.sparse[:, 1:])]
        logits: Tensor = self.top(torch.cat([batch.dense, *bags], 1)).sum(1)
        return logits

    def bits(self) -> list[Tensor]:
        rows: Any = (self.a, self.b)
        tables = [torch.cat([chunk.clone() for _, chunk in x.weights()]) for x in rows]
        return [self.top.weight.detach(), *tables]


def clicks(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in (*Strategies, "hybrid"):
        found[strategy] = outcome(trainer_of(make(strategy)), rank, world)
    model = make()
    found["clipped"] = outcome(trainer_of(model, clip_norm=0.05), rank, world)
    model = make(optimizer=None, update="step")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    options: Any = {"ids": lambda b: b.sparse, "dense_optimizer": optimizer}
    loss_fn = F.binary_cross_entropy_with_logits
    found["step"] = outcome(hotrow.Trainer(model, loss_fn, **options), rank, world)
    bags = Bags()
    options["dense_optimizer"] = torch.optim.Adagrad(bags.parameters(), lr=0.1)
    options["ids"] = None
    found["modules"] = outcome(hotrow.Trainer(bags, loss_fn, **options), rank, world)
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
    for result in results:
        first, *others = (result[name] for name in Strategies)
        for other in others:
            assert other["losses"] == first["losses"]
            assert all(map(torch.equal, other["bits"], first["bits"]))


def assert_same(found: EvalRecord, expected: EvalRecord) -> None:
    assert (found.step, found.samples) == (expected.step, expected.samples)
    assert found.auc == pytest.approx(expected.auc, abs=1e-9)
    assert found.log_loss == pytest.approx(expected.log_loss, abs=1e-6)


class NeedsSamples(ClickModel):
    """A model that cannot be called without samples: before its lookup, or after."""

    when = "before"

    def forward(self, batch: ClickBatch) -> Tensor:
        if self.when == "before" and not len(batch.label):
            raise ValueError("no samples")
        logits = super().forward(batch)
        if not len(batch.label):
            raise ValueError("no samples")
        return logits


class Normed(ClickModel):
    """A model with statistics of batches, which a part of one sample does not have."""

    def __init__(self, embedding: hotrow.EmbeddingBagCollection, num_dense: int) -> None:
        super().__init__(embedding, num_dense)
        width = sum(table.embedding_dim for table in embedding.tables) + num_dense
        self.top: Any = nn.Sequential(nn.BatchNorm1d(width), nn.Dropout(0.1), self.top)


def without_samples(rank: int, world: int) -> dict[str, Any]:
    """All samples of every second batch, and of the last, are the first rank's."""
    found: dict[str, Any] = {}
    kinds: list[Any] = [NeedsSamples, NeedsSamples, Normed]
    for kind, when in zip(kinds, ("before", "after", "never"), strict=True):
        model = kind(make().embedding, 3)
        model.when = when
        trainer = trainer_of(model)
        mine = parts(TRAINED, rank, world)
        empty = RankPart(1, 2).cut(RankPart(1, 2).cut(TRAINED[-1]))
        for number in (*range(0, STEPS, 2), STEPS - 1):
            mine[number] = TRAINED[number] if rank == 0 else empty
        assert not len(empty.label)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            losses = [record.loss for record in trainer.run(mine)]
        said = [str(x.message) for x in warned if "batch of 0 samples" in str(x.message)]
        # Another number of batches on every rank, and one on the last alone.
        held_out = HELD_OUT if rank == world - 1 else HELD_OUT[:rank]
        record = trainer.evaluate(held_out)
        mean = trainer.mean_loss(held_out)
        predicted = trainer.predict(HELD_OUT[0])
        found[when] = (losses, model.bits(), record, mean, predicted, len(said))
    return found


def test_a_rank_without_samples_takes_part() -> None:
    alone: dict[str, Any] = {}
    for when in ("before", "after"):
        trainer = trainer_of(make())
        alone[when] = [record.loss for record in trainer.run(TRAINED)], trainer.model.bits()  # type: ignore[operator]
    results = run(2, without_samples)
    for rank, result in enumerate(results):
        for when, (losses, bits, record, mean, predicted, warned) in result.items():
            first = results[0][when]
            assert (losses, record, mean) == (first[0], first[2], first[3])
            assert all(map(torch.equal, bits, first[1]))
            assert torch.equal(predicted, first[4])
            assert record.samples == sum(len(batch.label) for batch in HELD_OUT)
            assert all(x.isfinite().all() for x in bits)
            if when in alone:
                torch.testing.assert_close(losses, alone[when][0], rtol=0, atol=1e-6)
                for one, other in zip(bits, alone[when][1], strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
                assert warned == rank  # the last one, once


def in_steps(clip_norm: float | None, batches: Sequence[ClickBatch]) -> list[Tensor]:
    """Rows make the steps of torch's optimizer."""
    model = NeedsSamples(make(update="step", optimizer=None).embedding, 3)
    for _ in trainer_of(model, clip_norm=clip_norm).run(batches):
        pass
    return model.bits()


def in_steps_without_samples(rank: int, world: int, clip_norm: float | None) -> list[Tensor]:
    mine = parts(TRAINED, rank, world)
    mine[4] = TRAINED[4] if rank == 0 else RankPart(1, 2).cut(RankPart(1, 2).cut(TRAINED[-1]))
    assert rank == 0 or not len(mine[4].label)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model cannot be called with a batch of 0 samples")
        return in_steps(clip_norm, mine)


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_a_rank_without_samples_takes_part_in_a_step_of_torch(clip_norm: float | None) -> None:
    expected = in_steps(clip_norm, TRAINED)
    for bits in run(2, in_steps_without_samples, clip_norm):
        for one, other in zip(bits, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def unequal(rank: int, world: int) -> list[str]:
    """Ranks run out of batches at different times, alone and inside of hotrow.join."""
    said = []
    for around in (lambda model: nullcontext(), hotrow.join):
        model = make()
        try:
            with around(model):
                for _ in trainer_of(model).run(parts(TRAINED, rank, world)[: 5 - 2 * rank]):
                    pass
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_trainer_that_runs_out_of_batches_is_an_error_on_all_ranks() -> None:
    for said in run(2, unequal, group_timeout=20):
        assert [text[:26] for text in said] == ["rank 1 of 2 ran out of bat"] * 2
        assert "which hotrow.Trainer does not allow, inside of hotrow.join either" in said[1]


def nonfinite(rank: int, world: int) -> list[Any]:
    found: list[Any] = []
    for what in ("skip", "error"):
        model = make(on_nonfinite=what)
        trainer = trainer_of(model)
        batches = parts(TRAINED, rank, world)
        if rank == world - 1:
            batches[2].dense[0] = float("nan")
        try:
            found.append([record.loss for record in trainer.run(batches)])
        except FloatingPointError as error:
            found.append(str(error))
        rows = [chunk for table in "ab" for _, chunk in model.embedding.rows(table)]
        found.append(all(x.isfinite().all() for x in rows))
    return found


def test_what_is_not_finite_on_one_rank_is_so_on_all() -> None:
    first, second = run(2, nonfinite)
    assert first[1::2] == second[1::2] == [True, True]
    assert [str(x) for x in first[0]] == [str(x) for x in second[0]]
    assert first[0][:2] == second[0][:2]
    assert first[0][2] != first[0][2]  # NaN: the loss of all ranks
    for rank, text in enumerate((first[2], second[2])):
        assert "on_nonfinite='skip' leaves such updates out" in text, rank


def refusals(rank: int, world: int) -> list[str]:
    model = make()
    loss_fn = F.binary_cross_entropy_with_logits
    wrapped = nn.parallel.DistributedDataParallel(model)
    lazy: Any = nn.ModuleList([model, nn.LazyLinear(2)])

    def trainer(model: Any, **options: Any) -> Any:
        return hotrow.Trainer(model, loss_fn, dense_optimizer=None, **options)

    calls: list[Any] = [
        lambda: trainer(wrapped),
        lambda: trainer(lazy),
        lambda: hotrow.graphed(wrapped, loss_fn, None),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


def test_what_several_ranks_cannot_do_is_refused_in_a_sentence() -> None:
    for said in run(2, refusals):
        assert "itself, and the model is wrapped in DistributedDataParallel" in said[0]
        assert "nn.LazyLinear, so ranks cannot start alike" in said[1]
        assert said[2].startswith("hotrow.graphed takes the model without DistributedData")
