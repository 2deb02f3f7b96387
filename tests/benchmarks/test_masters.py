"""Masters are what float32 training by hand would hold, and weights are those, rounded."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense_masters import MasterWeights

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd, fused, lr a tensor": lambda params: torch.optim.SGD(
        params, lr=torch.tensor(0.1), fused=True
    ),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.rand(8, 5, generator=generator), torch.rand(8, 1, generator=generator))
        for _ in range(count)
    ]


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    model.zero_grad()
    nn.functional.mse_loss(model(x.bfloat16()).float(), y).backward()


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any]) -> None:
    scheduler = halved(optimizer)
    for batch in data:
        backward(model, batch)
        optimizer.step()
        scheduler.step()


def by_hand(make: Any, data: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Masters and weights of plain training: float32 parameters, a rounded copy of the model."""
    masters = list(build().parameters())
    rounded = build().bfloat16()
    optimizer = make(masters)
    scheduler = halved(optimizer)
    for batch in data:
        backward(rounded, batch)
        for master, weight in zip(masters, rounded.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for master, weight in zip(masters, rounded.parameters(), strict=True):
                weight.copy_(master)
    return masters, list(rounded.parameters())


def assert_same_bits(found: Any, expected: Any) -> None:
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0)


@every_optimizer
@pytest.mark.parametrize("steps", [0, 20])
def test_training_equals_masters_kept_by_hand(make: Any, steps: int) -> None:
    model, data = build(), batches(steps)
    optimizer = MasterWeights(model, make)
    train(model, optimizer, data)
    masters, weights = by_hand(make, data)
    assert_same_bits(optimizer.masters, masters)
    assert_same_bits(model.parameters(), weights)


@every_optimizer
def test_a_saved_state_goes_on_with_the_same_bits(make: Any) -> None:
    data, model = batches(20), build()
    optimizer = MasterWeights(model, make)
    train(model, optimizer, data[:10])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    train(model, optimizer, data[10:])

    other = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    resumed = MasterWeights(other, make)
    memory = [x.data_ptr() for x in (*resumed.masters, *other.parameters())]
    file.seek(0)
    resumed.load_state_dict(torch.load(file))
    train(other, resumed, data[10:])
    assert_same_bits(resumed.masters, optimizer.masters)
    assert_same_bits(other.parameters(), model.parameters())
    assert [x.data_ptr() for x in (*resumed.masters, *other.parameters())] == memory


def test_masters_of_another_model_are_refused() -> None:
    optimizer = MasterWeights(build(), OPTIMIZERS["sgd"])
    other = MasterWeights(nn.Linear(5, 16), OPTIMIZERS["sgd"])
    with pytest.raises(ValueError, match="the 4 masters loaded are not of the shapes of the 2"):
        other.load_state_dict(optimizer.state_dict())
