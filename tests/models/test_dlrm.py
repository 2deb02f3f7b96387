"""DLRM: the reference's shape, start and gradients, and the same bits every time."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hotrow
from hotrow.data import ClickBatch, SyntheticClicks, SyntheticConfig
from hotrow.models import DLRM

ROWS, DIM, NUM_DENSE = (50, 7, 300), 8, 5


class PlainBags(nn.Module):
    """One nn.EmbeddingBag per feature, with the face of a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum") for rows in ROWS)

    def forward(self, sparse):
        pooled = [bag(sparse[:, [column]]) for column, bag in enumerate(self.bags)]
        joined = torch.cat(pooled, dim=1)
        return SimpleNamespace(values=lambda: joined)


def build(seed: int = 0) -> DLRM:
    torch.manual_seed(seed)
    return DLRM(PlainBags(), NUM_DENSE, bottom=(16, DIM), top=(12, 1), num_features=len(ROWS))


@pytest.fixture
def batch() -> ClickBatch:
    return SyntheticClicks(SyntheticConfig(rows=ROWS, num_dense=NUM_DENSE, batch_size=64)).batch(0)


def test_the_logit_is_top_of_bottom_and_all_pairs(batch):
    model = build()
    dense = model.bottom(batch.dense)
    vectors = [dense, *(bag(batch.sparse[:, [i]]) for i, bag in enumerate(model.embedding.bags))]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    expected = model.top(torch.cat([dense, torch.stack(pairs, dim=1)], dim=1)).squeeze(1)
    logits = model(batch)
    assert logits.shape == (64,)
    torch.testing.assert_close(logits, expected)


def test_gradients_agree_with_finite_differences(batch):
    model = build().double()
    dense = torch.rand(6, DIM, dtype=torch.float64, requires_grad=True)
    vectors = torch.rand(6, 3 * DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model.interact, (dense, vectors))


def test_weights_start_as_in_the_reference():
    torch.manual_seed(0)
    model = DLRM(PlainBags(), 300, bottom=(500, DIM), top=(200, 1), num_features=len(ROWS))
    first = model.bottom[0]
    assert float(first.weight.detach().std()) == pytest.approx((2 / 800) ** 0.5, rel=0.02)
    assert float(first.bias.detach().std()) == pytest.approx((1 / 500) ** 0.5, rel=0.15)
    assert abs(float(first.weight.detach().mean())) < 1e-3


def test_data_without_numbers_need_no_warning():
    """pytest makes errors of warnings."""
    model = DLRM(PlainBags(), 0, bottom=(16, DIM), top=(12, 1), num_features=len(ROWS))
    batch = SyntheticClicks(SyntheticConfig(rows=ROWS, num_dense=0, batch_size=64)).batch(0)
    assert model(batch).isfinite().all()
    assert all(each.isfinite().all() for each in model.parameters())


def test_layers_end_as_in_the_reference():
    model = build()
    assert isinstance(model.bottom[-1], nn.ReLU)
    assert isinstance(model.top[-1], nn.Linear)


def test_torchs_seed_decides_the_start():
    def weights(seed: int) -> torch.Tensor:
        return nn.utils.parameters_to_vector(build(seed).parameters()).detach()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_generator_of_ones_own_decides_the_start():
    def top_weights(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        model = DLRM(
            PlainBags(), NUM_DENSE, (16, DIM), (12, 1), num_features=3, generator=generator
        )
        return nn.utils.parameters_to_vector(model.top.parameters()).detach()

    assert torch.equal(top_weights(1), top_weights(1))
    assert not torch.equal(top_weights(1), top_weights(2))


def test_training_twice_gives_the_same_bits():
    def trained() -> torch.Tensor:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clicks = SyntheticClicks(SyntheticConfig(rows=ROWS, num_dense=NUM_DENSE, batch_size=64))
        for batch in clicks.batches(0, 20):
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    assert torch.equal(trained(), trained())


def test_training_finds_what_was_planted():
    clicks = SyntheticClicks(
        SyntheticConfig(rows=ROWS, num_dense=NUM_DENSE, batch_size=128, signal=3.0)
    )
    model = build()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    losses = []
    for batch in clicks.batches(0, 100):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_an_embedding_of_another_width_is_named_in_the_error(batch):
    model = DLRM(PlainBags(), NUM_DENSE, bottom=(16, 4), top=(12, 1), num_features=3)
    with pytest.raises(ValueError, match="gives 24 numbers per sample; 3 features as wide"):
        model(batch)


def test_a_top_that_does_not_end_in_one_logit_is_refused():
    with pytest.raises(ValueError, match="ends in one logit, not in 2"):
        DLRM(PlainBags(), NUM_DENSE, bottom=(16, DIM), top=(12, 2), num_features=3)


def test_a_collection_tells_how_many_features_it_has(batch):
    tables = [
        hotrow.EmbeddingBagConfig(f"cat_{i}", rows, DIM, [f"cat_{i}"])
        for i, rows in enumerate(ROWS)
    ]
    collection = hotrow.EmbeddingBagCollection(tables, hotrow.SGD(0.1), strategy="all-fast")
    model = DLRM(collection, NUM_DENSE, bottom=(16, DIM), top=(12, 1))
    assert model.num_features == 3
    assert model(batch).shape == (64,)
