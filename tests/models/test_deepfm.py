"""DeepFM: where its three parts come from."""

import pytest
import torch
from torch import Tensor, nn

from hotrow.models import DeepFM
from hotrow.models.deepfm import pairs
from model_cases import MODEL_CASES


def make(num_dense: int = 2, dim: int = 3, num_features: int = 2) -> DeepFM:
    return DeepFM(nn.Identity(), num_dense, dim, (4, 1), num_features=num_features)


def silenced(model: DeepFM) -> DeepFM:
    """Without its deep layers."""
    last = model.deep[-1]
    nn.init.zeros_(last.weight)  # type: ignore[arg-type]
    nn.init.zeros_(last.bias)  # type: ignore[arg-type]
    return model


def rows(weights: list[float], vectors: list[list[float]]) -> Tensor:
    """One sample's, as an embedding gives them."""
    found = [[*vector, weight] for weight, vector in zip(weights, vectors, strict=True)]
    return torch.tensor(found).view(1, -1)


def test_the_last_number_of_a_row_is_its_first_order_weight() -> None:
    model = silenced(make())
    nothing = [[0.0, 0.0, 0.0]] * 2
    assert model.score(torch.zeros(1, 2), rows([0.25, -2.0], nothing)).item() == -1.75


def test_vectors_meet_in_pairs() -> None:
    model = silenced(make())
    nn.init.zeros_(model.dense_rows)
    found = model.score(torch.zeros(1, 2), rows([0.0, 0.0], [[1.0, 2.0, 3.0], [4.0, 0.5, -1.0]]))
    assert found.item() == 1 * 4 + 2 * 0.5 - 3


def test_a_dense_feature_is_a_field_scaled_by_its_value() -> None:
    model = silenced(make(num_dense=1))
    model.dense_rows.data = torch.tensor([[1.0, 0.0, 2.0, 0.5]])
    model.bias.data.fill_(0.125)
    given = rows([0.0, 0.0], [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    # Bias, 3 times its weight, and 3 times its products with both vectors.
    assert model.score(torch.tensor([[3.0]]), given).item() == 0.125 + 1.5 + 3 * 1 + 3 * 2


def test_all_pairs_are_half_of_what_the_square_of_the_sum_has_more() -> None:
    factors = torch.rand(3, 5, 4, dtype=torch.float64, requires_grad=True)
    by_hand = sum((factors[:, i] * factors[:, j]).sum(1) for i in range(5) for j in range(i))
    torch.testing.assert_close(pairs(factors), by_hand)
    assert torch.autograd.gradcheck(pairs, (factors,))


def test_the_deep_layers_see_vectors_and_no_first_order_weights() -> None:
    model = make(num_dense=2, dim=3, num_features=2)
    assert model.deep[0].in_features == (2 + 2) * 3
    nothing = [[0.0, 0.0, 0.0]] * 2
    scores = [
        model.score(torch.zeros(1, 2), rows(weights, nothing)) for weights in ([0.0, 0.0], [1.0, 2])
    ]
    torch.testing.assert_close(scores[1] - scores[0], torch.tensor([3.0]))


def test_a_model_without_dense_features_is_one_of_tables_alone() -> None:
    model = make(num_dense=0)
    assert model.score(torch.zeros(5, 0), torch.rand(5, 8)).shape == (5,)


def test_dense_rows_start_small_and_the_bias_at_zero() -> None:
    model = DeepFM(nn.Identity(), 40, 99, num_features=1)
    assert float(model.dense_rows.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert model.bias.item() == 0
    assert [layer.out_features for layer in model.deep[::2]] == [400, 400, 400, 1]


def test_a_large_sum_of_half_precision_keeps_its_pairs() -> None:
    """Summed in bfloat16, 4096 of these fields' squares would swallow the pair of the last two."""
    model = silenced(make(num_dense=0, dim=1, num_features=64)).bfloat16()
    vectors = torch.full((64, 1), 64.0)
    vectors[1::2] *= -1  # they cancel, so that pairs are minus half of the squares
    given = torch.cat([vectors, torch.zeros(64, 1)], dim=1).view(1, -1)
    given[0, 0] += 0.25
    wanted = (0.25**2 - (63 * 64.0**2 + 64.25**2)) / 2
    assert model.score(torch.zeros(1, 0), given).item() == wanted


def test_tables_without_room_for_the_weight_are_named_in_the_error() -> None:
    case = MODEL_CASES["dlrm"]  # of width 8
    model = DeepFM(case.embedding(), 5, 8, (4, 1))
    (batch,) = case.batches(1)
    message = "3 features of a vector of 8 and a first-order weight would be 27.*embedding_dim=9"
    with pytest.raises(ValueError, match=message):
        model(batch)
