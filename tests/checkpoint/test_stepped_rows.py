"""Checkpoints of rows that torch's optimizers step: collections, and converted modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
from click_models import ClickModel

ROWS = (300, 200)


class Modules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Embedding(ROWS[0], 8), nn.Embedding(ROWS[1], 8)
        self.top = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.top(torch.cat([self.a(ids[:, 0]), self.b(ids[:, 1])], 1))
        return vectors.squeeze(1)


def modules(budget: str) -> nn.Module:
    return hotrow.convert(Modules(), budget, seed=1, show=False)


class Collection(ClickModel):
    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.embedding(ids).values()).squeeze(1)


def collection(budget: str) -> nn.Module:
    sizes = zip("ab", ROWS, strict=True)
    tables = [hotrow.EmbeddingBagConfig(name, rows, 8, [name]) for name, rows in sizes]
    rows = hotrow.EmbeddingBagCollection(tables, None, budget, update="step", seed=3)
    return Collection(rows, 0)


def batches(first: int, last: int) -> Iterator[Tensor]:
    for number in range(first, last):
        draw = torch.Generator().manual_seed(number)
        yield (torch.rand(32, 2, generator=draw) ** 2 * torch.tensor(ROWS)).long()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for ids in hotrow.ahead(list(batches(first, last)), model):
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"].values()
    return [*model.state_dict().values(), *(x for entry in state for x in entry.values())]


@pytest.mark.parametrize("build", [modules, collection])
def test_training_goes_on_and_state_is_saved_once(build: Any, tmp_path: Path) -> None:
    model = build("40%")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    train(model, optimizer, 0, 8)
    saved = hotrow.save_checkpoint(tmp_path, model, step=8, optimizer=optimizer)
    rows = 2 * sum(ROWS) * 8 * 4  # with their state
    total = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    assert rows <= total < rows + 20_000, total
    train(model, optimizer, 8, 16)
    other = build("60%")
    again = torch.optim.Adagrad(other.parameters(), lr=0.1)
    assert hotrow.load_checkpoint(tmp_path, other, optimizer=again).step == 8
    train(other, again, 8, 16)
    pairs = zip(bits(model, optimizer), bits(other, again), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
