"""State of optimizers that is saved or loaded before a converted model has looked anything up."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow

Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.01),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.05),
}


def plain() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Embedding(300, 4), nn.Embedding(200, 8)])


def converted(model: nn.ModuleList) -> nn.ModuleList:
    return hotrow.convert(deepcopy(model), "60%", seed=1, show=False)


def train(model: nn.ModuleList, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        ids = torch.randint(0, 200, (32,), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        sum((module(ids).sin().square().sum() for module in model), torch.tensor(0.0)).backward()
        optimizer.step()


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def weights_of(model: nn.Module) -> list[Tensor]:
    return list(model.state_dict().values())


@pytest.mark.parametrize("name", MAKERS)
def test_training_goes_on_in_a_new_process(name: str) -> None:
    model = converted(plain())
    optimizer = MAKERS[name](model.parameters())
    train(model, optimizer, 0, 5)
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, 5, 10)
    other = converted(plain())
    again = MAKERS[name](other.parameters())
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(other, again, 5, 10)
    assert all(map(torch.equal, weights_of(model), weights_of(other)))


@pytest.mark.parametrize("name", MAKERS)
def test_a_checkpoint_of_the_plain_model_goes_on_with_rows(name: str) -> None:
    model = plain()
    for module in model:
        module.sparse = name == "SparseAdam"
    optimizer = MAKERS[name](model.parameters())
    train(model, optimizer, 0, 5)
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, 5, 10)
    other = converted(plain())
    again = MAKERS[name](other.parameters())
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(other, again, 5, 10)
    for weight, expected in zip(weights_of(other), weights_of(model), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def test_state_has_the_shape_of_the_table_before_the_first_step() -> None:
    model = converted(plain())
    optimizer = MAKERS["Adagrad"](model.parameters())
    sums = [entry["sum"] for entry in optimizer.state_dict()["state"].values()]
    assert [tuple(x.shape) for x in sums] == [(300, 4), (200, 8)]


def test_one_optimizer_of_two_collections_saves_and_loads_both() -> None:
    first, second = converted(plain()), converted(plain())
    params = [*first.parameters(), *second.parameters()]
    optimizer = MAKERS["Adagrad"](params)
    for model in (first, second):
        train(model, optimizer, 0, 3)
    state = deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    sums = [entry["sum"] for entry in optimizer.state_dict()["state"].values()]
    assert all(map(torch.equal, sums, [entry["sum"] for entry in state["state"].values()]))
    assert len(sums) == 4


def test_revert_gives_weights_back_to_lists_that_hold_them() -> None:
    model = plain()
    held: Any = [(list(model[0].parameters()), 0.0)]
    model.regularization_weight = held
    hotrow.convert(model, "60%", held="replace", show=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 0, 2)
    hotrow.revert(model)
    assert held[0][0][0] is model[0].weight
    file = io.BytesIO()
    torch.save(model, file)  # nothing of hotrow is left, which could not be pickled
