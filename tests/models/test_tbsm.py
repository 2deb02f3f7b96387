"""TBSM: the reference's shape and start, and histories that are shorter than others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
from hotrow.data import SequenceBatch
from hotrow.models import TBSM
from model_cases import DIM, MODEL_CASES, NUM_STEPS, ROWS, STEP_FEATURES

CASE = MODEL_CASES["tbsm"]


def collection(*, padding_idx: int | None, **options: Any) -> hotrow.EmbeddingCollection:
    tables = [
        hotrow.EmbeddingConfig(name, rows, DIM, [name], padding_idx=padding_idx)
        for name, rows in zip(STEP_FEATURES, ROWS, strict=True)
    ]
    options = {"strategy": "all-fast", "seed": 3, **options}
    return hotrow.EmbeddingCollection(tables, hotrow.SGD(lr=0.1), **options)


def changed_in_padding(batch: SequenceBatch) -> SequenceBatch:
    """With other ids and numbers where there is no history."""
    size = len(batch)
    is_padding = torch.arange(NUM_STEPS + 1) < NUM_STEPS - batch.lengths[:, None]
    ids = batch.sparse.values().view(3, size, -1).clone()
    ids[:, is_padding] = 17
    dense = batch.dense.masked_fill(is_padding[:, :, None], 100.0)
    named = dict(zip(STEP_FEATURES, ids, strict=True))
    return SequenceBatch.from_ids(dense, named, batch.label, batch.lengths)


def test_the_default_is_the_shape_that_is_trained_on_taobao() -> None:
    model = TBSM(nn.Identity(), features=STEP_FEATURES)
    shapes = {key: tuple(each.shape) for key, each in model.state_dict().items()}
    assert {key: shape for key, shape in shapes.items() if "bias" not in key} == {
        "metric": (15, 15),
        "bottom.0.weight": (16, 1),
        "top.0.weight": (15, 16 + 6),  # the pairs of three vectors and a dense one
        "top.2.weight": (15, 15),
        "sequence.0.weight": (15, 20),
        "sequence.2.weight": (15, 15),
        "sequence.4.weight": (20, 15),
        "final.0.weight": (60, 30),
        "final.2.weight": (1, 60),
    }
    assert [type(each) for each in model.top] == [type(model.top[0]), nn.ReLU] * 2


def test_weights_start_as_in_the_reference() -> None:
    model = TBSM(nn.Identity(), top=(9, 300), features=STEP_FEATURES)
    assert float(model.metric.detach().std()) == pytest.approx((1 / 300) ** 0.5, rel=0.02)
    assert abs(float(model.metric.detach().mean())) < 1e-3


def test_what_stands_in_padding_changes_no_bit() -> None:
    batches = CASE.batches(3)
    models = [CASE.build(collection(padding_idx=None)) for _ in range(2)]
    for batch in batches:
        left, right = models[0](batch), models[1](changed_in_padding(batch))
        assert torch.equal(left, right)
        left.sum().backward()
        right.sum().backward()
    gradients = [[each.grad for each in model.parameters()] for model in models]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("padding_idx", [None, 0])
def test_padding_is_read_and_never_trained(padding_idx: int | None) -> None:
    (batch,) = CASE.batches(1)
    assert (batch.sparse.values() == 0).any()
    embedding = collection(padding_idx=padding_idx, strategy="lookahead", budget="90%")
    before = {key: each.clone() for key, each in embedding.state_dict().items()}
    CASE.build(embedding)(batch).sum().backward()
    # All steps of all samples are one lookup.
    assert embedding.traffic().lookups == len(batch) * (NUM_STEPS + 1) * 3
    for key, rows in embedding.state_dict().items():
        assert torch.equal(rows[0], before[key][0])
        assert not torch.equal(rows, before[key])
        assert padding_idx is None or not rows[0].any()


def test_steps_whose_vector_is_zero_have_finite_gradients() -> None:
    """No length can be given to it; what follows ReLU may well be zero."""
    model: Any = CASE.build()
    nn.init.constant_(model.top[-2].bias, -1e6)
    (batch,) = CASE.batches(1)
    logits: Tensor = model(batch)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)
    assert not model.bottom[0].weight.grad.any()


def visits(generator: torch.Generator, size: int = 128) -> SequenceBatch:
    """Clicked is what was seen before."""
    label = torch.rand(size, generator=generator).round()
    seen = torch.randint(1, 9, (size, 1), generator=generator).expand(-1, NUM_STEPS + 1).clone()
    other = 1 + (seen[:, -1] + torch.randint(7, (size,), generator=generator)) % 8
    seen[:, -1] = torch.where(label == 1, seen[:, -1], other)
    lengths = torch.randint(1, NUM_STEPS + 1, (size,), generator=generator)
    is_padding = torch.arange(NUM_STEPS + 1) < NUM_STEPS - lengths[:, None]
    ids = dict.fromkeys(STEP_FEATURES, seen.masked_fill(is_padding, 0))
    return SequenceBatch.from_ids(torch.ones(size, NUM_STEPS + 1, 1), ids, label, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_training_finds_that_the_target_was_seen_before(seed: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tables = [hotrow.EmbeddingConfig(n, 10, 16, [n], padding_idx=0) for n in STEP_FEATURES]
    embedding = hotrow.EmbeddingCollection(
        tables, hotrow.Adagrad(lr=0.05), strategy="all-fast", seed=seed
    )
    model = TBSM(embedding, 1, NUM_STEPS, generator=torch.Generator().manual_seed(seed))
    trainer: hotrow.Trainer[SequenceBatch] = hotrow.Trainer(
        model,
        nn.functional.binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.Adagrad(model.parameters(), lr=0.05),
        ids=lambda batch: batch.sparse,
    )
    for _ in trainer.run(visits(generator) for _ in range(300)):
        pass
    held_out = [visits(generator) for _ in range(8)]
    forgotten = [replace(batch, lengths=torch.zeros_like(batch.lengths)) for batch in held_out]
    assert trainer.evaluate(held_out).auc > 0.7
    assert trainer.evaluate(forgotten).auc < 0.6


def test_features_are_taken_by_name() -> None:
    model = CASE.build()
    (batch,) = CASE.batches(1)
    values = batch.sparse.values().view(3, -1)[[2, 0, 1]].reshape(-1)
    turned = hotrow.KeyedJaggedTensor(
        ["category", "user", "item"], values, offsets=batch.sparse.offsets()
    )
    assert torch.equal(model(replace(batch, sparse=turned)), model(batch))


def test_another_number_of_steps_is_named_in_the_error() -> None:
    model = CASE.build()
    (batch,) = CASE.batches(1)
    short = replace(batch, dense=batch.dense[:, 1:])
    with pytest.raises(ValueError, match=r"\[batch, 7, features\], for 6 past .* \[16, 6, 1\]"):
        model(short)
    fewer = hotrow.KeyedJaggedTensor(
        STEP_FEATURES, torch.zeros(48, dtype=torch.int64), offsets=torch.arange(49)
    )
    with pytest.raises(ValueError, match=r"gives \[16, 8\] .* 'user'; 16 samples .* \[112, 8\]"):
        model(replace(batch, sparse=fewer))


def test_a_model_that_does_not_look_back_is_refused() -> None:
    with pytest.raises(ValueError, match="looks back 1 step or more, not 0"):
        TBSM(nn.Identity(), num_steps=0, features=STEP_FEATURES)
