"""Vectors that a collection returns can be changed in place, and gradients stay those of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import PlainTables, assert_close
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.rows import cpu_rows

ON_GPU = torch.cuda.is_available()
Table = hotrow.EmbeddingBagConfig
TABLES = [Table("a", 20, 4, ["f"]), Table("b", 20, 4, ["g"])]
ONE = [Table("a", 20, 4, ["f"])]
TWO_WIDTHS = [Table("a", 20, 4, ["f"]), Table("b", 20, 6, ["g"])]
Change = Callable[[Any, Tensor], Tensor]


@pytest.fixture(params=[cpu_rows, gpu_rows])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


def place(engine: Any) -> str:
    return "cuda" if ON_GPU and engine is gpu_rows else "cpu"


def build(engine: Any, tables: Any = TABLES, **options: Any) -> hotrow.EmbeddingBagCollection:
    options |= {"device": place(engine), "engine": engine}
    rule = hotrow.SGD(lr=0.1)
    return hotrow.EmbeddingBagCollection(tables, rule, strategy="all-fast", seed=1, **options)


def scale_one(out: Any, scale: Tensor) -> Tensor:
    vectors = out["f"]
    vectors *= scale
    return vectors.tanh().sum() + out["g"].square().sum()


def scale_both(out: Any, scale: Tensor) -> Tensor:
    for name in ("f", "g"):
        vectors = out[name]
        vectors.mul_(scale).add_(1)
    return (out["f"] * out["g"]).sum()


def scale_values(out: Any, scale: Tensor) -> Tensor:
    vectors = out.values()
    vectors *= scale
    return vectors.tanh().sum()


def side_by_side(out: Any, scale: Tensor) -> Tensor:
    """The gradients of these vectors lie in memory as those of all bags do."""
    return (torch.cat([out["f"], out["g"]], 1) * scale).tanh().sum()


def in_another_order(out: Any, scale: Tensor) -> Tensor:
    joined = torch.cat([out["g"], out["f"]], 1) * scale
    return (joined * torch.arange(joined.shape[1], device=joined.device)).tanh().sum()


def scale_then_values(out: Any, scale: Tensor) -> Tensor:
    vectors = out["f"]
    vectors *= scale
    return out.values().tanh().sum() + vectors.sum()


def write_columns(out: Any, scale: Tensor) -> Tensor:
    vectors = out["g"]
    vectors[:, 1:3] = 0
    vectors[0] += scale
    return vectors.tanh().sum() + out["f"].sum()


CHANGES = [
    scale_one,
    scale_both,
    scale_values,
    scale_then_values,
    side_by_side,
    in_another_order,
    write_columns,
]


def dense_ids(device: str) -> Tensor:
    return torch.tensor([[1, 2], [3, 2], [1, 9]], device=device)


def jagged_ids(device: str) -> hotrow.KeyedJaggedTensor:
    ids = torch.tensor([1, 2, 3, 3, 5, 1, 9, 8, 7, 7, 2, 1], device=device)
    return hotrow.KeyedJaggedTensor(["f", "g"], ids, lengths=torch.full((6,), 2, device=device))


@pytest.mark.parametrize("make", [dense_ids, jagged_ids])
@pytest.mark.parametrize("tables", [TABLES, TWO_WIDTHS], ids=["one-width", "two-widths"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_in_place_train_like_torch(
    change: Change, tables: Any, make: Any, engine: Any
) -> None:
    if change is scale_both and tables is TWO_WIDTHS:
        pytest.skip("multiplies vectors of one width")
    embedding = build(engine, tables)
    twin, grads = PlainTables(embedding), []
    for run, device in ((embedding, place(engine)), (twin, "cpu")):
        scale = torch.tensor(1.7, device=device, requires_grad=True)
        change(run(make(device)), scale).backward()
        assert scale.grad is not None
        grads.append(scale.grad.cpu())
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(*grads)
    assert_close(embedding, twin)


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
@pytest.mark.parametrize("change", [scale_one, scale_values, scale_then_values])
def test_evaluation_allows_changes_too(change: Change, mode: str, engine: Any) -> None:
    embedding = build(engine)
    twin, found = PlainTables(embedding), []
    embedding.train(mode != "eval")
    context: Any = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(
        mode, torch.enable_grad
    )
    for run, device in ((embedding, place(engine)), (twin, "cpu")):
        scale = torch.tensor(1.7, device=device, requires_grad=mode == "eval")
        with context():
            found.append(change(run(dense_ids(device)), scale).detach().cpu())
    torch.testing.assert_close(*found)


def test_one_feature_alone(engine: Any) -> None:
    embedding = build(engine, ONE)
    ids = torch.tensor([[1], [1], [4]], device=place(engine))
    out = embedding(ids)
    vectors = out["f"]
    vectors *= 2
    assert out.values() is vectors
    before = embedding.state_dict()["embedding_bags.a.weight"]
    out.values().sum().backward()
    moved = before - embedding.state_dict()["embedding_bags.a.weight"]
    torch.testing.assert_close(moved[[1, 4, 2], 0], torch.tensor([0.4, 0.2, 0.0]))


def test_features_after_values_are_views_of_them(engine: Any) -> None:
    embedding = build(engine)
    twin = PlainTables(embedding)
    out = embedding(dense_ids(place(engine)))
    every = out.values()
    every *= 2
    (out["f"].tanh().sum() + out.values().square().sum()).backward()
    whole = twin(dense_ids("cpu")).values() * 2
    (whole[:, :4].tanh().sum() + whole.square().sum()).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_close(embedding, twin)
    with pytest.raises(RuntimeError, match="view and is being modified inplace"):
        out["f"].mul_(2)


def test_values_after_features_are_a_copy(engine: Any) -> None:
    out = build(engine)(dense_ids(place(engine)))
    first = out["f"]
    every = out.values()
    expected = every.detach().clone()
    first *= 2
    assert torch.equal(every, expected)  # what was taken before is not changed behind the back
    every *= 3
    assert torch.equal(first, expected[:, :4] * 2)


def test_lookups_without_pooling(engine: Any) -> None:
    embedding = hotrow.EmbeddingCollection(
        ONE, hotrow.SGD(lr=0.1), strategy="all-fast", device=place(engine), engine=engine
    )
    ids = hotrow.KeyedJaggedTensor(
        ["f"],
        torch.tensor([1, 2, 3], device=place(engine)),
        lengths=torch.tensor([2, 1], device=place(engine)),
    )
    before = embedding.state_dict()["embeddings.a.weight"]
    sequences = embedding(ids)["f"]
    sequences *= 4**0.5
    sequences.sum().backward()
    moved = before - embedding.state_dict()["embeddings.a.weight"]
    torch.testing.assert_close(moved[[1, 2, 3, 4], 0], torch.tensor([0.2, 0.2, 0.2, 0.0]))


def test_a_saved_vector_that_is_changed_is_refused_as_in_torch(engine: Any) -> None:
    vectors = build(engine)(dense_ids(place(engine)))["f"]
    loss = vectors.square().sum()
    vectors *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_in_place_operator_may_stand_behind_a_feature(engine: Any) -> None:
    out = build(engine)(torch.tensor([[1, 2], [3, 4]], device=place(engine)))
    before = out["f"].clone()
    out["f"] *= 2
    assert torch.equal(out["f"], before * 2)
    with pytest.raises(TypeError, match="can be changed in place, but not replaced"):
        out["f"] = before
