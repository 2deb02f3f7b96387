"""DLRM, DCNv2 and DeepFM: the shapes and starts of their references, and what their parts see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
from hotrow.data import SyntheticClicks, SyntheticConfig
from hotrow.models import DLRM, DCNv2, DeepFM
from hotrow.models.dcnv2 import Cross
from hotrow.models.deepfm import pairs
from model_cases import DIM, MODEL_CASES, NUM_DENSE, ROWS, tables


def collection(rule: Any = None) -> hotrow.EmbeddingBagCollection:
    rule = rule or hotrow.SGD(lr=0.1)
    return hotrow.EmbeddingBagCollection(tables(DIM, DIM, DIM), rule, strategy="all-fast", seed=0)


def dlrm(num_dense: int = NUM_DENSE, rule: Any = None) -> DLRM:
    return DLRM(collection(rule), num_dense, (16, DIM), (12, 1))


def clicks(num_dense: int = NUM_DENSE, **options: Any) -> SyntheticClicks:
    names = tuple(f"f{i}" for i in range(len(ROWS)))
    config = SyntheticConfig(rows=ROWS, names=names, num_dense=num_dense, **options)
    return SyntheticClicks(config)


def test_gradients_of_the_interaction_agree_with_finite_differences() -> None:
    dense = torch.rand(6, DIM, dtype=torch.float64, requires_grad=True)
    vectors = torch.rand(6, 3 * DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(dlrm().double().interact, (dense, vectors))


def test_a_dlrm_starts_as_in_the_reference() -> None:
    first: Any = DLRM(nn.Identity(), 300, (500, DIM), (200, 1), num_features=3).bottom[0]
    assert float(first.weight.detach().std()) == pytest.approx((2 / 800) ** 0.5, rel=0.02)
    assert float(first.bias.detach().std()) == pytest.approx((1 / 500) ** 0.5, rel=0.15)
    assert abs(float(first.weight.detach().mean())) < 1e-3


def test_data_without_numbers_needs_no_warning() -> None:
    """pytest makes errors of warnings."""
    model = dlrm(num_dense=0)
    assert model(clicks(num_dense=0, batch_size=64).batch(0)).isfinite().all()
    assert all(each.isfinite().all() for each in model.parameters())


def test_torchs_seed_decides_the_start() -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(dlrm().parameters()).detach()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_training_finds_what_was_planted() -> None:
    model = dlrm(rule=hotrow.Adagrad(lr=0.05))
    trainer: hotrow.Trainer[Any] = hotrow.Trainer(
        model,
        nn.functional.binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.Adagrad(model.parameters(), lr=0.05),
        ids=lambda batch: batch.sparse,
    )
    batches = clicks(batch_size=128, signal=3.0).batches(0, 100)
    losses = [record.loss for record in trainer.run(batches)]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


# -- DCNv2 -------------------------------------------------------------------------------


def test_the_default_is_mlperfs_shape() -> None:
    with torch.device("meta"):
        model = DCNv2(nn.Identity(), 13, embedding_width=26 * 128)
    shapes = {key: tuple(each.shape) for key, each in model.state_dict().items()}
    assert [shapes[f"bottom.{i}.weight"] for i in (0, 2, 4)] == [(512, 13), (256, 512), (128, 256)]
    assert len(model.cross) == 3
    assert shapes["cross.0.down.weight"] == (512, 3456)
    assert shapes["cross.2.up.weight"] == (3456, 512)
    assert shapes["cross.2.up.bias"] == (3456,)
    top = [shapes[f"top.{i}.weight"] for i in (0, 2, 4, 6, 8)]
    assert top == [(1024, 3456), (1024, 1024), (512, 1024), (256, 512), (1, 256)]


def test_cross_layers_start_as_in_torchrec() -> None:
    layer = Cross(600, 200, generator=torch.Generator().manual_seed(0))
    for weight in (layer.down.weight, layer.up.weight):
        assert isinstance(weight, Tensor)
        assert float(weight.detach().std()) == pytest.approx((2 / 800) ** 0.5, rel=0.02)
        assert abs(float(weight.detach().mean())) < 1e-3
    assert not layer.up.bias.any()
    assert list(Cross(6, None).state_dict()) == ["up.weight", "up.bias"]  # one square matrix


@pytest.mark.parametrize("rank", [3, None])
def test_gradients_of_cross_layers_agree_with_finite_differences(rank: int | None) -> None:
    layer = Cross(4, rank).double()
    start, crossed = (torch.rand(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(layer, (start, crossed))


def test_a_table_with_two_features_counts_twice() -> None:
    table = hotrow.EmbeddingBagConfig("item", 50, 6, ["item", "last_seen"])
    embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), strategy="all-fast")
    assert DCNv2(embedding, 2, (4,), (3, 1), cross_rank=2).embedding_width == 12
    wrong = DCNv2(embedding, 2, (4,), (3, 1), embedding_width=9)
    with pytest.raises(ValueError, match=r"gives 12 numbers .* made for 9: give embedding_width=1"):
        wrong.score(torch.rand(2, 2), torch.rand(2, 12))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cross_layers": 0}, "1 cross layer or more, not 0"),
        ({"cross_rank": 0}, "rank of 1 or more, or None for full: not 0"),
    ],
)
def test_wrong_cross_layers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DCNv2(nn.Identity(), 2, (4,), (3, 1), embedding_width=9, **options)


# -- DeepFM ------------------------------------------------------------------------------

NOTHING = [[0.0, 0.0, 0.0]] * 2


def deepfm(num_dense: int = 2, dim: int = 3, num_features: int = 2, deep: bool = False) -> DeepFM:
    """Without its deep layers, unless they are asked for."""
    model = DeepFM(nn.Identity(), num_dense, dim, (4, 1), num_features=num_features)
    if not deep:
        nn.init.zeros_(model.deep[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(model.deep[-1].bias)  # type: ignore[arg-type]
    return model


def rows(weights: list[float], vectors: list[list[float]]) -> Tensor:
    """One sample's, as an embedding gives them."""
    joined = [[*vector, weight] for weight, vector in zip(weights, vectors, strict=True)]
    return torch.tensor(joined).view(1, -1)


def test_a_row_ends_in_its_first_order_weight_and_vectors_meet_in_pairs() -> None:
    model = deepfm()
    assert model.score(torch.zeros(1, 2), rows([0.25, -2.0], NOTHING)).item() == -1.75
    nn.init.zeros_(model.dense_rows)
    vectors = rows([0.0, 0.0], [[1.0, 2.0, 3.0], [4.0, 0.5, -1.0]])
    assert model.score(torch.zeros(1, 2), vectors).item() == 1 * 4 + 2 * 0.5 - 3


def test_a_dense_feature_is_a_field_scaled_by_its_value() -> None:
    model = deepfm(num_dense=1)
    model.dense_rows.data = torch.tensor([[1.0, 0.0, 2.0, 0.5]])
    model.bias.data.fill_(0.125)
    given = rows([0.0, 0.0], [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    # Bias, 3 times its weight, and 3 times its products with both vectors.
    assert model.score(torch.tensor([[3.0]]), given).item() == 0.125 + 1.5 + 3 * 1 + 3 * 2
    assert deepfm(num_dense=0).score(torch.zeros(5, 0), torch.rand(5, 8)).shape == (5,)


def test_all_pairs_are_half_of_what_the_square_of_the_sum_has_more() -> None:
    factors = torch.rand(3, 5, 4, dtype=torch.float64, requires_grad=True)
    by_hand = sum((factors[:, i] * factors[:, j]).sum(1) for i in range(5) for j in range(i))
    torch.testing.assert_close(pairs(factors), by_hand)
    assert torch.autograd.gradcheck(pairs, (factors,))


def test_the_deep_layers_see_vectors_and_no_first_order_weights() -> None:
    model = deepfm(deep=True)
    assert model.deep[0].in_features == (2 + 2) * 3
    low, high = (
        model.score(torch.zeros(1, 2), rows(weights, NOTHING)) for weights in ([0.0, 0.0], [1.0, 2])
    )
    torch.testing.assert_close(high - low, torch.tensor([3.0]))


def test_dense_rows_start_small_and_the_bias_at_zero() -> None:
    model = DeepFM(nn.Identity(), 40, 99, num_features=1)
    assert float(model.dense_rows.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert model.bias.item() == 0
    assert [layer.out_features for layer in model.deep[::2]] == [400, 400, 400, 1]


def test_a_large_sum_of_half_precision_keeps_its_pairs() -> None:
    """Summed in bfloat16, 4096 of these fields' squares would swallow the pair of the last two."""
    model = deepfm(num_dense=0, dim=1, num_features=64).bfloat16()
    vectors = torch.full((64, 1), 64.0)
    vectors[1::2] *= -1  # they cancel, so that pairs are minus half of the squares
    given = torch.cat([vectors, torch.zeros(64, 1)], dim=1).view(1, -1)
    given[0, 0] += 0.25
    wanted = (0.25**2 - (63 * 64.0**2 + 64.25**2)) / 2
    assert model.score(torch.zeros(1, 0), given).item() == wanted


def test_tables_without_room_for_the_weight_are_named_in_the_error() -> None:
    model = DeepFM(collection(), NUM_DENSE, DIM, (4, 1))
    message = "3 features of a vector of 8 and a first-order weight would be 27.*embedding_dim=9"
    with pytest.raises(ValueError, match=message):
        model(MODEL_CASES["dlrm"].batches(1)[0])
