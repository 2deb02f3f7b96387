"""Random numbers: who draws when, and runs that go on with a loader that shuffles."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hotrow

ROWS, SIZE, COUNT = 50, 4, 12  # batches of an epoch
IDS = torch.arange(COUNT * SIZE).remainder(ROWS).view(-1, 1)


class Model(nn.Module):
    def __init__(self, strategy: str = "lookahead", dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = hotrow.EmbeddingBagCollection(
            [hotrow.EmbeddingBagConfig("a", ROWS, 4, ["f"])], hotrow.Adagrad(lr=0.1), 5000,
            strategy=strategy, seed=1,
        )  # fmt: skip
        self.top = nn.Sequential(nn.Dropout(dropout), nn.Linear(4, 1))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.top(self.embedding(ids).values())
        return out


def train(model: Model, stream: Any) -> list[float]:
    losses = []
    for batch in stream:
        loss = model(batch[0]).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


class Drawn(Dataset[tuple[Tensor, Tensor]]):
    """Draws a number for each sample from the global generator."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return IDS[place], torch.rand(())


def told(loader: Any, model: Model, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, hotrow.ahead(loader, model, ids=lambda b: b[0], **options))
        train(model, hotrow.ahead(loader, model, ids=lambda b: b[0], **options))
    return [str(each.message) for each in caught]


def test_a_loader_and_a_step_that_share_a_generator_are_told_of_once() -> None:
    (said,) = told(DataLoader(Drawn(), SIZE), Model())
    assert "draws from torch's global random generator" in said
    assert "generator=torch.Generator()" in said


SHUFFLED = DataLoader(TensorDataset(IDS), SIZE, shuffle=True)
OWN = DataLoader(TensorDataset(IDS), SIZE, shuffle=True, generator=torch.Generator())


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        *((DataLoader(Drawn(), SIZE), {"strategy": x}) for x in ("all-fast", "lru", "static")),
        (DataLoader(Drawn(), SIZE), {"dropout": 0.0}),
        (SHUFFLED, {}),
        (OWN, {}),
    ],
)
def test_where_draws_cannot_be_mixed_nothing_is_said(loader: Any, options: Any) -> None:
    assert not told(loader, Model(**options))


def test_a_depth_of_zero_has_the_order_of_a_plain_loop() -> None:
    def losses(*, plain: bool) -> list[float]:
        model, loader = Model(), DataLoader(Drawn(), SIZE, shuffle=True)
        torch.manual_seed(5)
        if plain:
            return train(model, loader)
        return train(model, hotrow.ahead(loader, model, ids=lambda b: b[0], depth=0))

    assert losses(plain=False) == losses(plain=True)


# -- going on ------------------------------------------------------------------------------


class Shuffled:
    """Shuffles by the generators of Python and numpy when it begins."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        order = np.random.permutation(len(IDS))
        random.shuffle(order[:8])
        return ((IDS[torch.from_numpy(each)],) for each in order.reshape(-1, SIZE))


def loader_of(kind: str) -> Any:
    if kind == "numpy":
        return Shuffled()
    workers = 2 if kind == "workers" else 0
    return DataLoader(TensorDataset(IDS), SIZE, shuffle=True, num_workers=workers)


class Run:
    """A program that trains three epochs, and saves after every seventh step."""

    def __init__(self, kind: str, folder: Path, strategy: str = "lookahead") -> None:
        self.model = Model(strategy)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.stream = hotrow.ahead(loader_of(kind), self.model, ids=lambda batch: batch[0])
        self.folder, self.losses = folder, list[float]()
        torch.manual_seed(9)
        random.seed(9)
        np.random.seed(9)

    def train(self, epoch: int = 0, step: int = 0, last: int = 3 * COUNT) -> None:
        for number in range(epoch, 3):
            for (ids,) in self.stream:
                loss = self.model(ids).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
                step += 1
                if step == last:
                    hotrow.save_checkpoint(
                        self.folder, self.model, step=step, optimizer=self.optimizer,
                        stream=self.stream, extra={"epoch": number},
                    )  # fmt: skip
                    self.stream.close()
                    return

    def go_on(self) -> None:
        loaded = hotrow.load_checkpoint(
            self.folder, self.model, optimizer=self.optimizer, stream=self.stream
        )
        self.train(loaded.extra["epoch"], loaded.step)

    def bits(self) -> list[Tensor]:
        return [each.clone() for each in self.model.state_dict().values()]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("shuffled", "lookahead"), ("shuffled", "all-fast"), ("numpy", "lookahead"),
     ("workers", "lookahead")],
)  # fmt: skip
@pytest.mark.parametrize("last", [1, 7, COUNT, COUNT + 5, 3 * COUNT - 1])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_run_goes_on_to_the_bit_with_a_loader_that_shuffles(
    kind: str, strategy: str, last: int, tmp_path: Path
) -> None:
    if kind == "workers" and last != COUNT + 5:
        pytest.skip("one is enough: workers take their time to start")
    whole = Run(kind, tmp_path / "whole", strategy)
    whole.train()
    stopped = Run(kind, tmp_path / "stopped", strategy)
    stopped.train(last=last)
    torch.manual_seed(1234)  # another process
    again = Run(kind, tmp_path / "stopped", strategy)
    again.go_on()
    assert stopped.losses + again.losses == whole.losses
    assert all(map(torch.equal, again.bits(), whole.bits()))


def test_a_stream_tells_its_place_after_it_has_gone_on() -> None:
    model = Model()
    stream = hotrow.ahead(DataLoader(TensorDataset(IDS), SIZE), model, ids=lambda b: b[0])
    for _ in range(5):
        next(stream)
    state = stream.state_dict()
    assert state["batches"] == stream.position() == 5
    with pytest.raises(RuntimeError, match=r"call close\(\) before"):
        stream.load_state_dict(state)
    stream.close()
    stream.load_state_dict(state)
    assert [int(ids[0]) for (ids,) in stream] == [
        int(IDS[place * SIZE]) for place in range(5, COUNT)
    ]
    assert stream.position() == COUNT
    assert len(list(stream)) == COUNT  # and the next pass is a whole one


def test_a_place_behind_the_end_is_refused() -> None:
    model = Model()
    stream = hotrow.ahead([(IDS[:4],)] * 3, model, ids=lambda b: b[0])
    list(stream)
    state = stream.state_dict()
    stream.load_state_dict(state | {"batches": 4})
    with pytest.raises(ValueError, match="the loader has 3 batches, and this pass is to go on aft"):
        next(stream)
    for wrong in (None, {}, {"batches": -1, "random": {}}, {"batches": 1}):
        with pytest.raises(ValueError, match=r"no state of hotrow\.ahead"):
            stream.load_state_dict(wrong)


@pytest.mark.parametrize("copied", [True, False])
def test_a_loader_with_a_state_of_its_own_is_given_that_of_the_last_batch_yielded(
    copied: bool,
) -> None:
    class Stateful:
        def __init__(self) -> None:
            self.state = {"at": 0}

        def __iter__(self) -> Iterator[tuple[Tensor]]:
            while self.state["at"] < COUNT:
                at = self.state["at"] * SIZE
                self.state["at"] += 1
                yield (IDS[at : at + SIZE],)

        def state_dict(self) -> dict[str, int]:
            return dict(self.state) if copied else self.state

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state

    model, loader = Model(), Stateful()
    stream = hotrow.ahead(loader, model, ids=lambda b: b[0])
    with pytest.raises(RuntimeError, match="no batch has been yielded"):
        stream.state_dict()
    for number in range(1, 5):
        next(stream)
        state = stream.state_dict()
        assert state == {"at": stream.position()} == {"at": number}
    assert loader.state["at"] > 4
    stream.close()
    other = hotrow.ahead(Stateful(), model, ids=lambda b: b[0])
    other.load_state_dict(state)
    assert len(list(other)) == COUNT - 4
