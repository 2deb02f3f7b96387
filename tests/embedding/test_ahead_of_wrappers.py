"""Loops that other libraries write around `hotrow.ahead`, and options that were misspelt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow

IDS = torch.randint(0, 300, (20, 8), generator=torch.Generator().manual_seed(0))


def model() -> Any:
    torch.manual_seed(0)
    return hotrow.convert(nn.Sequential(nn.Embedding(300, 8)), "60%", seed=1, show=False)


def train(rows: Any, batches: Iterator[Tensor], count: int) -> int:
    optimizer = torch.optim.SGD(rows.parameters(), lr=0.1)
    steps = 0
    for _, ids in zip(range(count), batches, strict=False):
        optimizer.zero_grad()
        rows(ids).square().sum().backward()
        optimizer.step()
        steps += 1
    return steps


def test_a_loop_that_pauses_goes_on_where_it_was() -> None:
    rows = model()
    source = hotrow.ahead(list(IDS), rows)
    assert [train(rows, iter(source), 7) for _ in range(2)] == [7, 7]
    assert source.position() == 14
    source.close()


class Prepared(list[Tensor]):
    """A wrapper with a state_dict() that its loader has not, as accelerate's."""

    def state_dict(self) -> Any:
        raise AttributeError("'DataLoader' object has no attribute 'dl_state_dict'")

    load_state_dict = state_dict


def test_a_loader_whose_state_dict_fails_is_counted() -> None:
    rows = model()
    source = hotrow.ahead(Prepared(IDS), rows)
    train(rows, iter(source), 5)
    state = source.state_dict()
    assert state["batches"] == 5
    source.close()
    source.load_state_dict(state)
    assert train(rows, iter(source), 99) == 15


def test_mistakes_are_named_at_once() -> None:
    with pytest.raises(TypeError, match=r"no option 'stratgy' \(did you mean 'strategy'\?\)"):
        hotrow.convert(nn.Sequential(nn.Embedding(300, 8)), "60%", stratgy="lru", show=False)
    with pytest.raises(ValueError, match="'5' has no unit"):
        hotrow.convert(nn.Sequential(nn.Embedding(300, 8)), "5", show=False)
    with pytest.raises(TypeError, match="ids= must say which one a function is for"):
        hotrow.ahead(list(IDS), model(), ids=lambda batch: batch)
    with pytest.raises(TypeError, match="convert the model without the wrapper"):
        hotrow.convert(nn.DataParallel(nn.Embedding(30, 8)), "60%")
    with pytest.warns(UserWarning, match="is converted already"):
        hotrow.convert(model(), "60%")
    tied = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.warns(UserWarning, match="no embedding of Sequential was converted; 0: "):
        hotrow.convert(tied, "60%", show=False)


class Shifted(nn.Module):
    """Looks up positions of all but the last id of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.place = nn.Embedding(300, 8), nn.Embedding(9, 8)

    def forward(self, ids: Tensor) -> Tensor:
        seen = ids[:, :-1]
        return self.item(seen) + self.place(torch.arange(seen.shape[1]))


@pytest.mark.filterwarnings("error")
def test_positions_of_a_shifted_sequence_are_found() -> None:
    torch.manual_seed(0)
    rows: Any = hotrow.convert(Shifted(), "60%", seed=1, show=False)
    assert train(rows, iter(hotrow.ahead(list(IDS.view(10, 2, 8)), rows)), 99) == 10
