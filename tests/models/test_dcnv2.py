"""DCNv2: MLPerf's shape, TorchRec's start, low rank and full."""

import pytest
import torch
from torch import nn

import hotrow
from hotrow.models import DCNv2
from hotrow.models.dcnv2 import Cross
from model_cases import MODEL_CASES


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
        assert isinstance(weight, torch.Tensor)
        assert float(weight.detach().std()) == pytest.approx((2 / 800) ** 0.5, rel=0.02)
        assert abs(float(weight.detach().mean())) < 1e-3
    assert not layer.up.bias.any()


def test_full_rank_is_one_square_matrix() -> None:
    layer = Cross(6, None)
    assert list(layer.state_dict()) == ["up.weight", "up.bias"]
    assert layer.up.weight.shape == (6, 6)


@pytest.mark.parametrize("rank", [3, None])
def test_gradients_agree_with_finite_differences(rank: int | None) -> None:
    layer = Cross(4, rank).double()
    start, crossed = (torch.rand(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(layer, (start, crossed))


def test_tables_of_several_widths_stand_side_by_side() -> None:
    case = MODEL_CASES["dcnv2"]
    model = case.build()
    assert isinstance(model, DCNv2)
    assert model.embedding_width == 8 + 4 + 8
    assert model.state_dict()["cross.0.up.bias"].shape == (7 + 20,)


def test_a_table_with_two_features_counts_twice() -> None:
    table = hotrow.EmbeddingBagConfig("item", 50, 6, ["item", "last_seen"])
    embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), strategy="all-fast")
    model = DCNv2(embedding, 2, (4,), (3, 1), cross_rank=2)
    assert model.embedding_width == 12
    with pytest.raises(
        ValueError, match=r"gives 12 numbers .* made for 9: give embedding_width=12"
    ):
        DCNv2(embedding, 2, (4,), (3, 1), embedding_width=9).score(
            torch.rand(2, 2), torch.rand(2, 12)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cross_layers": 0}, "1 cross layer or more, not 0"),
        ({"cross_rank": 0}, "rank of 1 or more, or None for full: not 0"),
    ],
)
def test_wrong_cross_layers_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DCNv2(nn.Identity(), 2, (4,), (3, 1), embedding_width=9, **options)  # type: ignore[arg-type]
