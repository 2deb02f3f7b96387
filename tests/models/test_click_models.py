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


def test_dense_rows_start_small_and_the_bias_at_zero() -> None:
    model = DeepFM(nn.Identity(), 40, 99, num_features=1)
    assert float(model.dense_rows.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert model.bias.item() == 0
    assert [layer.out_features for layer in model.deep[::2]] == [400, 400, 400, 1]


def test_a_large_sum_of_half_precision_keeps_its_pairs() -> None:
    """Summed in bfloat16, 4096 of these fields' squares would swallow the pair of the last two."""
    model = DeepFM(nn.Identity(), 0, 1, (4, 1), num_features=64).bfloat16()
    for last in model.deep[-1].parameters():
        nn.init.zeros_(last)
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
