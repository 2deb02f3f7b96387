"""`requires_grad_(False)` freezes the rows of a collection, also by way of the model around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
from builders import CASES, RULES, Outcome, build, build_on, outcome, readout
from hotrow.inputs.tree import to_device

CASE = CASES["multi-hot"]


@pytest.fixture(params=["all-fast", "lookahead", "hybrid", "static-hybrid", "device-lookahead"])
def embedding(request: pytest.FixtureRequest) -> hotrow.EmbeddingBagCollection:
    return build_on(request.param, CASE.tables, RULES["adam"])


def plain(**options: Any) -> hotrow.EmbeddingBagCollection:
    return build(CASE, "adam", **options)


class Model(nn.Module):
    def __init__(self, embedding: hotrow.EmbeddingBagCollection) -> None:
        super().__init__()
        self.tower = nn.ModuleDict({"rows": embedding})
        self.scale = nn.Parameter(torch.tensor(1.0, device=embedding.device))

    def forward(self, batch: Any) -> Tensor:
        return readout(self.tower["rows"](batch)) * self.scale


def found_in(embedding: hotrow.EmbeddingBagCollection) -> Outcome:
    return outcome(embedding, [])


def step(model: nn.Module, batch: Any) -> None:
    model(batch).backward()


def test_frozen_rows_keep_weights_state_and_steps(embedding: Any) -> None:
    model, batches = Model(embedding), CASE.batches(6)
    stream = hotrow.ahead(batches, model)
    for number, batch in enumerate(stream):
        if number == 2:
            then = found_in(embedding)
            assert embedding.requires_grad_(False) is embedding
            assert not embedding.requires_grad
        if number == 4:
            assert found_in(embedding).same_bits(then)
            embedding.requires_grad_(True)
        step(model, batch)
    assert embedding.requires_grad
    assert embedding.optimizer.steps == [4, 4]
    assert not found_in(embedding).same_bits(then)


def test_frozen_steps_are_as_if_they_had_not_been(embedding: Any) -> None:
    model, batches = Model(embedding), CASE.batches(5)
    for number, batch in enumerate(hotrow.ahead(batches, model)):
        embedding.requires_grad_(number != 2)
        step(model, batch)
    other = Model(plain(device=embedding.device))
    for number, batch in enumerate(batches):
        if number != 2:
            step(other, to_device(batch, embedding.device))
    twin: Any = other.tower["rows"]
    for key, weight in embedding.state_dict().items():
        torch.testing.assert_close(weight, twin.state_dict()[key])


def test_a_frozen_collection_alone_needs_no_gradient(embedding: Any) -> None:
    batch = torch.tensor([[1, 2], [3, 4]], device=embedding.device)
    embedding.requires_grad_(False)
    out = embedding(batch)
    assert not out.values().requires_grad
    embedding.requires_grad_()
    assert embedding(batch).values().requires_grad


def test_learned_weights_have_gradients_while_rows_are_frozen(embedding: Any) -> None:
    batch = to_device(CASE.batches(1)[0], embedding.device)
    grads = []
    before = found_in(embedding)
    for frozen in (True, False):
        embedding.requires_grad_(not frozen)
        weights = batch.weights_or_none().clone().requires_grad_()
        ids = hotrow.KeyedJaggedTensor(
            batch.keys(), batch.values(), offsets=batch.offsets(), weights=weights
        )
        readout(embedding(ids)).backward()
        grads.append(weights.grad)
        assert found_in(embedding).same_bits(before) == frozen
    assert torch.equal(*grads)
    assert grads[0].any()


def test_the_model_around_freezes_it_too() -> None:
    embedding = plain()
    model, (batch,) = nn.Sequential(Model(embedding)), CASE.batches(1)
    assert model.requires_grad_(False) is model
    assert not embedding.requires_grad
    assert not model[0].scale.requires_grad
    assert not model(batch).requires_grad
    model.requires_grad_()
    assert embedding.requires_grad
    assert model[0].scale.requires_grad
    before = found_in(embedding)
    step(model, batch)
    assert not found_in(embedding).same_bits(before)


def test_other_modules_are_frozen_as_ever() -> None:
    plain()
    layer = nn.Linear(2, 2)
    assert layer.requires_grad_(False) is layer
    assert not any(each.requires_grad for each in layer.parameters())
    assert all(each.requires_grad for each in layer.requires_grad_().parameters())


def test_it_is_no_parameter() -> None:
    embedding = plain()
    assert list(embedding.parameters()) == []
    assert list(embedding.buffers()) == []
    assert all(key.endswith(".weight") for key in embedding.state_dict())


def test_it_can_be_set_like_a_tensors() -> None:
    embedding = plain()
    embedding.requires_grad = False
    assert not embedding.requires_grad
    assert not embedding._anchor.requires_grad


def test_rows_frozen_by_number_stay_so() -> None:
    embedding, twin = plain(), plain()
    rows = {"a": torch.arange(40)}
    for each in (embedding, twin):
        each.freeze_rows(rows)
    embedding.requires_grad_(False)
    batches = CASE.batches(3)
    assert not embedding(batches[0])["f"].requires_grad
    embedding.requires_grad_(True)
    for each in (embedding, twin):
        for batch in batches:
            readout(each(batch)).backward()
    assert found_in(embedding).same_bits(found_in(twin))
    start = plain().state_dict()["embedding_bags.a.weight"]
    assert torch.equal(embedding.state_dict()["embedding_bags.a.weight"][:40], start[:40])


@pytest.mark.parametrize("first", ["slots", "host"])
def test_both_engines_over_one_store_are_frozen(first: str) -> None:
    embedding = build_on("lookahead", CASE.tables, RULES["adam"], strategy="static")
    model, batches = Model(embedding), CASE.batches(4)
    change = embedding.train_on_host if first == "slots" else embedding.train_in_slots
    if first == "host":
        embedding.train_on_host()
    step(model, batches[0])
    embedding.requires_grad_(False)
    before = found_in(embedding)
    step(model, batches[1])
    change()
    assert not embedding.requires_grad
    step(model, batches[2])
    assert found_in(embedding).same_bits(before)
    embedding.requires_grad_(True)
    step(model, batches[3])
    assert not found_in(embedding).same_bits(before)
    assert embedding.optimizer.steps == [2, 2]


def test_gradients_that_wait_are_not_dropped() -> None:
    """As with a torch parameter: the graph of a forward pass knows what it was made with."""
    embedding, twin = plain(), plain()
    first, second = CASE.batches(2)
    loss = readout(embedding(first))
    embedding.requires_grad_(False)
    readout(embedding(second))
    loss.backward()
    readout(twin(first)).backward()
    assert found_in(embedding).same_bits(found_in(twin))
