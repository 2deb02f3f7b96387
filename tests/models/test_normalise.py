"""Vectors may be normalised between lookup and model, and are not if nobody asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
from hotrow.models import DLRM, TBSM, DCNv2, DeepFM
from hotrow.models.layers import normalised
from model_cases import DIM, MODEL_CASES, NUM_DENSE, ModelCase, clicks, tables

cases = pytest.mark.parametrize("case", MODEL_CASES.values(), ids=MODEL_CASES)


@pytest.mark.parametrize("widths", [[2, 2], [2, 4]])
def test_each_vector_has_mean_0_and_variance_1(widths: list[int]) -> None:
    vectors = torch.tensor([[1.0, 3.0, 10.0, -10.0, 30.0, 10.0]])[:, : sum(widths)]
    right = [-1.0, 1.0, 1.0, -1.0]
    if widths[1] == 4:  # mean 10, deviations 0, -20, 20, 0
        right = [-1.0, 1.0, 0.0, -(2**0.5), 2**0.5, 0.0]
    torch.testing.assert_close(normalised(vectors, widths), torch.tensor([right]))


def scaled(model: Any, times: float) -> None:
    for table in model.embedding.tables:
        width = table.embedding_dim - isinstance(model, DeepFM)  # but first-order weights
        rows = dict(model.embedding.state_dict())[model.embedding.key_of(table.name)].clone()
        rows[:, :width] = rows[:, :width] * times + 2 * times
        model.embedding.load_weights(table.name, 0, rows)


def wide(case: ModelCase, **options: Any) -> Any:
    """Rows whose numbers are about 1."""
    drawn = [
        hotrow.EmbeddingBagConfig(
            t.name, t.num_embeddings, t.embedding_dim, t.feature_names, t.pooling, t.padding_idx,
            hotrow.Normal(),
        )
        for t in case.tables
    ]  # fmt: skip
    embedding = case.collection(drawn, hotrow.SGD(lr=0.1), strategy="all-fast", seed=3)
    return case.build(embedding, **options)


@cases
def test_how_large_rows_are_plays_no_part(case: ModelCase) -> None:
    (batch,) = case.batches(1)
    for normalise, alike in ((True, True), (False, False)):
        model = wide(case, normalise=normalise).eval()
        with torch.no_grad():
            before = model(batch)
            scaled(model, 3.0)
            after = model(batch)
        assert torch.allclose(before, after, rtol=1e-3, atol=1e-3) is alike


@cases
def test_it_is_off_and_rows_are_trained_through_it(case: ModelCase) -> None:
    (batch,) = case.batches(1)
    plain, off, on = (wide(case, **o) for o in ({}, {"normalise": False}, {"normalise": True}))
    assert torch.equal(plain(batch), off(batch))
    assert plain.state_dict().keys() == on.state_dict().keys()
    before = {key: each.clone() for key, each in on.embedding.state_dict().items()}
    on(batch).square().sum().backward()
    for key, rows in on.embedding.state_dict().items():
        assert bool(rows.isfinite().all())
        assert not torch.equal(rows, before[key])


def test_a_bag_of_nothing_stays_zero() -> None:
    assert not normalised(torch.zeros(2, 6), [3, 3]).any()
    vectors = torch.zeros(1, 4, requires_grad=True)
    normalised(vectors, [4]).sum().backward()
    assert vectors.grad is not None
    assert bool(vectors.grad.isfinite().all())


class Vectors(nn.Module):
    """Tells nothing of itself."""

    def forward(self, sparse: Tensor) -> Any:
        raise AssertionError("not reached")


def test_what_cannot_be_normalised_is_refused() -> None:
    one = hotrow.EmbeddingBagCollection(tables(1, 1, 1), hotrow.SGD(), strategy="all-fast")
    for make in (
        lambda: DLRM(one, NUM_DENSE, (4, 1), (1,), normalise=True),
        lambda: DCNv2(one, NUM_DENSE, (4,), (1,), normalise=True),
        lambda: DeepFM(one, NUM_DENSE, 1, (1,), normalise=True),
        lambda: TBSM(one, bottom=(1,), normalise=True),
    ):
        with pytest.raises(ValueError, match="a vector of 1 number would always be 0"):
            make()
    with pytest.raises(ValueError, match=r"not tell its tables, .* give normalise=F"):
        DCNv2(Vectors(), NUM_DENSE, (4,), (1,), embedding_width=8, normalise=True)
    model = DLRM(one, NUM_DENSE, (4, DIM), (1,), normalise=True)
    with pytest.raises(ValueError, match="gives 3 numbers per sample; 3 vectors to normalise"):
        model(clicks(1)[0])
