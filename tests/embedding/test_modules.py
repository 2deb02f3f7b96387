"""`hotrow.Embedding` and `hotrow.EmbeddingBag` beside torch's modules of the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hotrow

ROWS, DIM = 200, 4
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.01),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.05),
}
DTYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
SHAPES: list[tuple[int, ...]] = [(), (7,), (3, 5), (2, 3, 4), (0,), (0, 3), (2, 0)]


def ids_of(*shape: int, seed: int = 0, rows: int = 100) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows, shape, generator=draw)


def pair(kind: str = "Embedding", **options: Any) -> tuple[Any, Any]:
    """Return a module of hotrow's, and torch's with the same rows."""
    own = {key: options.pop(key) for key in ("budget", "strategy") if key in options}
    torch.manual_seed(0)
    plain = getattr(nn, kind)(ROWS, DIM, **options)
    own = {"budget": "90%", "strategy": "lookahead", **own}
    ours = getattr(hotrow, kind)(ROWS, DIM, **options, **own)
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def assert_trains_alike(
    ours: Any, plain: Any, calls: list[tuple[Any, ...]], maker: str = "SGD"
) -> None:
    optimizers = [MAKERS[maker](module.parameters()) for module in (ours, plain)]
    for call in calls:
        vectors = [module(*call) for module in (ours, plain)]
        assert vectors[0].shape == vectors[1].shape
        assert vectors[0].dtype == vectors[1].dtype
        torch.testing.assert_close(vectors[0].detach(), vectors[1].detach(), atol=2e-6, rtol=1e-5)
        scale = torch.linspace(0.5, 1.5, DIM)
        for optimizer, found in zip(optimizers, vectors, strict=True):
            optimizer.zero_grad()
            ((found * scale).square().sum() + found.sum()).backward()
            optimizer.step()
        torch.testing.assert_close(
            ours.state_dict()["weight"], plain.weight.detach(), atol=5e-6, rtol=1e-5
        )


# -- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_arguments_have_the_order_and_the_defaults_of_torch(kind: str) -> None:
    """All of torch's arguments come first, so that calls by position mean the same."""
    for name in ("__init__", "forward"):
        theirs = inspect.signature(getattr(getattr(nn, kind), name)).parameters
        ours = inspect.signature(getattr(getattr(hotrow, kind), name)).parameters
        defaults = [(key, x.default) for key, x in theirs.items()]
        assert [(key, x.default) for key, x in ours.items()][: len(defaults)] == defaults
        rest = list(ours.values())[len(defaults) :]
        assert all(x.kind in (x.KEYWORD_ONLY, x.VAR_KEYWORD) for x in rest)


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"max_norm": 1.0}, "max_norm changes rows when they are looked up"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq is not supported; divide the loss"),
        ({"dtype": torch.float64}, "rows are float32, not torch.float64"),
        ({"padding_idx": ROWS}, f"padding_idx {ROWS} is outside the {ROWS} rows"),
        ({"padding_idx": -ROWS - 1}, "padding_idx -201 is outside"),
    ],
)
def test_arguments_without_a_rule_are_refused(
    kind: str, option: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        getattr(hotrow, kind)(ROWS, DIM, **option)
    assert "\n" not in str(error.value)


def test_other_modes_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="mode must be one of sum, mean, max, not 'median'"):
        hotrow.EmbeddingBag(ROWS, DIM, mode="median")
    with pytest.raises(ValueError, match=r"weights have shape \[2, 4\], and the table \[200, 4\]"):
        hotrow.Embedding(ROWS, DIM, _weight=torch.zeros(2, DIM))


# -- lookups ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ids_of_any_shape_and_integer_type(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ours, plain = pair()
    for seed in range(2):
        ids = ids_of(*shape, seed=seed)
        found, expected = ours(ids.to(dtype)), plain(ids)
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
def test_embeddings_train_as_those_of_torch(maker: str, padding_idx: int | None) -> None:
    ours, plain = pair(sparse=maker == "SparseAdam", padding_idx=padding_idx)
    assert ours.padding_idx == plain.padding_idx
    shapes = [shape for shape in SHAPES if 0 not in shape]
    calls = [(ids_of(*shape, seed=seed),) for seed, shape in enumerate([*shapes, (9,)])]
    if padding_idx is not None and maker == "SparseAdam":
        calls = [call for call in calls if call[0].dim()]  # torch's own sparse gradient fails
    padding = torch.tensor([3, 0, ROWS - 1, 0])
    assert_trains_alike(ours, plain, [*calls, (padding,), calls[1]], maker)


BAGS: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "rows": ({}, [(ids_of(5, 3),), (ids_of(2, 6),), (ids_of(1, 1),)]),
    "offsets": (
        {},
        [
            (ids_of(9), torch.tensor([0, 4, 4, 7])),
            (ids_of(4), torch.tensor([0])),
            (ids_of(9), torch.tensor([0, 0, 9])),
        ],
    ),
    "ends": (
        {"include_last_offset": True},
        [(ids_of(9), torch.tensor([0, 4, 4, 9])), (ids_of(4), torch.tensor([0, 4]))],
    ),
    "int32": ({}, [(ids_of(9).int(), torch.tensor([0, 4, 4]).int()), (ids_of(3, 2).int(),)]),
    "padding": (
        {"padding_idx": 2},
        [
            (torch.tensor([[2, 5, 2], [2, 2, 2], [7, 8, 9]]),),
            (torch.tensor([2, 2, 7, 2, 5]), torch.tensor([0, 2, 4])),
        ],
    ),
    "no rows": ({}, [(ids_of(0), torch.tensor([0, 0])), (ids_of(3, 2),)]),
}


@pytest.mark.parametrize("form", BAGS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_train_as_those_of_torch(mode: str, form: str) -> None:
    options, calls = BAGS[form]
    # A maximum of torch has no sparse gradient.
    for maker in MAKERS if mode != "max" else ("SGD", "Adagrad"):
        ours, plain = pair("EmbeddingBag", mode=mode, sparse=maker == "SparseAdam", **options)
        assert_trains_alike(ours, plain, calls, maker)


@pytest.mark.parametrize("form", ["rows", "offsets", "ends", "padding"])
def test_weights_of_samples_are_trained_too(form: str) -> None:
    options, calls = BAGS[form]
    ours, plain = pair("EmbeddingBag", mode="sum", **options)
    for ids, *rest in calls:
        torch.manual_seed(1)
        weights = [torch.rand(ids.shape), torch.empty(ids.shape)]
        weights[1].copy_(weights[0])
        for module, of_samples in zip((ours, plain), weights, strict=True):
            of_samples.requires_grad_()
            optimizer = MAKERS["SGD"](module.parameters())
            bags = module(ids, rest[0] if rest else None, of_samples)
            bags.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(weights[0].grad, weights[1].grad)
        assert_trains_alike(*pair("EmbeddingBag", mode="sum", **options), [
            (ids, rest[0] if rest else None, weights[0].detach())
        ])  # fmt: skip


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_weights_of_samples_need_sums_as_in_torch(mode: str) -> None:
    for module in pair("EmbeddingBag", mode=mode):
        with pytest.raises(NotImplementedError, match="per_sample_weights"):
            module(ids_of(2, 2), None, torch.ones(2, 2))


WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "id": ((torch.tensor([[ROWS]]),), f"id {ROWS} is outside table"),
    "negative": ((torch.tensor([[-1]]),), "id -1 is outside table"),
    "floats": ((torch.ones(2, 2),), "ids must be int64"),
    "dimensions": ((ids_of(2, 2, 2),), "one or two dimensions"),
    "both": ((ids_of(2, 2), torch.tensor([0])), "offsets must be None"),
    "neither": ((ids_of(3),), "offsets say where bags begin"),
    "first": ((ids_of(3), torch.tensor([1])), "offsets must start at 0, not 1"),
    "falls": ((ids_of(3), torch.tensor([0, 2, 1])), "offsets must not fall"),
    "beyond": ((ids_of(3), torch.tensor([0, 4])), "must not pass the number of ids, 3"),
    "shape": ((ids_of(2, 2), None, torch.ones(4)), "there must be one for each id"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("trains", [True, False])
def test_bad_calls_are_refused_and_the_next_works(case: str, trains: bool) -> None:
    call, sentence = WRONG[case]
    ours, plain = pair("EmbeddingBag", mode="sum")
    with torch.set_grad_enabled(trains), pytest.raises((ValueError, TypeError), match=sentence):
        ours(*call)
    assert_trains_alike(ours, plain, [(ids_of(4, 2),)])


# -- starting values and checkpoints ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("freeze", [True, False])
def test_pretrained_rows_are_frozen_or_not(kind: str, freeze: bool) -> None:
    rows = torch.randn(ROWS, DIM)
    options: dict[str, Any] = {"freeze": freeze, "padding_idx": 3}
    ours = getattr(hotrow, kind).from_pretrained(rows, budget="90%", **options)
    plain = getattr(nn, kind).from_pretrained(rows.clone(), **options)
    ids = ids_of(4, 3)
    assert torch.equal(ours.state_dict()["weight"], rows)
    assert ours(ids).requires_grad == plain(ids).requires_grad == (not freeze)
    assert [x.requires_grad for x in ours.parameters()] == [not freeze]
    if freeze:
        torch.testing.assert_close(ours(ids), plain(ids))
        ours(ids)
        ours.requires_grad_(True)
        plain.requires_grad_(True)
    before = rows.clone()
    assert_trains_alike(ours, plain, [(ids,), (ids,)])
    assert torch.equal(rows, before)  # the caller's tensor is copied


def test_rows_do_not_follow_a_tensor_that_is_changed_before_their_first_use() -> None:
    rows = torch.randn(ROWS, DIM)
    module = hotrow.Embedding.from_pretrained(rows, budget="90%")
    before = rows.clone()
    rows.zero_()
    assert torch.equal(module.state_dict()["weight"], before)
    assert torch.equal(module(torch.tensor([3, 5])), before[[3, 5]])


def test_rows_start_by_a_function_of_their_numbers() -> None:
    def start(rows: Tensor) -> Tensor:
        return (rows.unsqueeze(1) * 10 + torch.arange(DIM)).float()

    module = hotrow.Embedding(ROWS, DIM, budget="90%", init=start)
    expected = start(torch.arange(ROWS))
    assert torch.equal(module(torch.tensor([5, 199, 0])).detach(), expected[[5, 199, 0]])
    assert torch.equal(module.state_dict()["weight"], expected)


def test_the_padding_row_starts_at_zero_and_loads_as_any_other() -> None:
    ours, _ = pair(padding_idx=7)
    fresh = hotrow.Embedding(ROWS, DIM, padding_idx=7, budget="90%")
    assert not fresh(torch.tensor(7)).any()
    assert fresh(torch.tensor(8)).any()
    ours.load_weights(7, torch.ones(1, DIM))
    assert torch.equal(ours(torch.tensor(7)), torch.ones(DIM))


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_checkpoints_of_the_plain_module_load_and_back(kind: str) -> None:
    ours, plain = pair(kind)
    assert list(ours.state_dict()) == list(plain.state_dict()) == ["weight"]
    assert [name for name, _ in ours.named_parameters()] == ["weight"]
    assert_trains_alike(ours, plain, [(ids_of(4, 2),)])
    other = getattr(nn, kind)(ROWS, DIM)
    assert str(other.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"
    again = getattr(hotrow, kind)(ROWS, DIM, budget="90%")
    assert str(again.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(again.weight.data, ours.weight.data)
    rows = torch.cat([part for _, part in ours.weights()])
    assert torch.equal(rows, ours.state_dict()["weight"])


# -- the whole table -------------------------------------------------------------------------


@pytest.mark.parametrize("maker", ["SGD", "Adagrad"])
def test_the_weight_is_a_differentiable_read(maker: str) -> None:
    ours, plain = pair(budget="400%", padding_idx=2)
    optimizers = [MAKERS[maker](module.parameters()) for module in (ours, plain)]
    for seed in range(3):
        ids, losses = ids_of(6, seed=seed), []
        for module, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            logits = functional.linear(module(ids), module.weight)
            loss = functional.cross_entropy(logits, ids) + module.weight[3:6].norm()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
        torch.testing.assert_close(ours.weight.data, plain.weight.data, atol=5e-6, rtol=1e-5)


def test_a_weight_beyond_the_budget_names_what_to_do_instead() -> None:
    ours, plain = pair(budget="90%")
    with pytest.raises(RuntimeError, match="budget of fast memory is") as error:
        ours.weight.sum()
    for what in ("module(ids)", "sampled softmax", "weights()", "no_grad"):
        assert what in str(error.value)
    with torch.no_grad():
        assert torch.equal(ours.weight * 2, plain.weight * 2)
    assert ours.weight.shape == plain.weight.shape
    assert_trains_alike(ours, plain, [(ids_of(5),)])


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda module: nn.init.normal_(module.weight),
    "data normal_": lambda module: module.weight.data.normal_(),
    "data row": lambda module: module.weight.data[2].fill_(0.0),
    "data fill": lambda module: module.weight.data.fill_(0.0),
    "data copy_": lambda module: module.weight.data.copy_(torch.zeros(ROWS, DIM)),
    "detach": lambda module: module.weight.detach().zero_(),
    "row": lambda module: module.weight.__setitem__(2, 0.0),
    "add": lambda module: module.weight.add_(1.0),
    "times": lambda module: module.weight.__imul__(2.0),
    "data": lambda module: setattr(module.weight, "data", torch.zeros(ROWS, DIM)),
}


@pytest.mark.parametrize("budget", ["90%", "400%"])
@pytest.mark.parametrize("case", IN_PLACE)
def test_changes_in_place_name_what_to_use(case: str, budget: str) -> None:
    ours, plain = pair(budget=budget)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"init=.*load_weights") as error:
        IN_PLACE[case](ours)
    assert "in place" in str(error.value)
    assert torch.equal(ours.state_dict()["weight"], plain.weight)
