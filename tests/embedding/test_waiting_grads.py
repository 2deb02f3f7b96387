"""Gradients that wait for an optimizer's step: what they take, and which of them count."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
from builders import readout
from contracts import DEVICE, by_gpu
from hotrow.support.late_flag import LateCount

ROWS = 400
# A batch is looked up twice, or was never announced.
pytestmark = pytest.mark.filterwarnings("ignore:these ids are not the ones:UserWarning")


def build(*, padding: int | None = None, **options: Any) -> hotrow.EmbeddingBagCollection:
    tables = [
        hotrow.EmbeddingBagConfig("a", ROWS, 8, ["fa"]),
        hotrow.EmbeddingBagConfig("b", ROWS, 8, ["fb"], padding_idx=padding),
    ]
    return hotrow.EmbeddingBagCollection(
        tables, None, "40%", update="step", seed=3, **{**by_gpu(), **options}
    )


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(1, ROWS, (12, 2), generator=generator).to(DEVICE)


@pytest.mark.parametrize("action", ["error", "skip"])
@pytest.mark.parametrize("kind", ["padding", "two-lookups"])
def test_padding_has_no_gradient_that_is_not_finite(kind: str, action: str) -> None:
    embedding = build(padding=0 if kind == "padding" else None, on_nonfinite=action)
    ids = batch(0)
    if kind == "padding":
        ids[3, 1] = 0
    loss = readout(embedding(ids))
    if kind == "two-lookups":  # their sums are joined, and the same rows leave room behind
        loss = loss + readout(embedding(ids.flip(0)))
    loss.backward()
    torch.optim.SGD(embedding.parameters(), lr=0.1).step()
    assert embedding.torch_steps is not None
    assert embedding.torch_steps.steps("b") == 1


class Later(LateCount):
    """A number that the host knows some steps later."""

    asked = 0

    def now(self) -> int | None:
        self.asked += 1
        return super().now() if self.asked > 3 else None


@pytest.mark.parametrize("count", [LateCount, Later])
def test_gradients_that_were_zeroed_take_no_memory(
    count: type[LateCount], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotrow.engine.gpu.row_sums.LateCount", count)
    embedding = build()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    most = 0
    for number in range(16):
        optimizer.zero_grad(set_to_none=False)
        readout(embedding(batch(number))).backward()
        optimizer.step()
        if number == 5:
            most = embedding.memory()["waiting gradients"]
    assert embedding.memory()["waiting gradients"] <= 1.1 * most


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_weights_of_an_optimizer_that_is_gone_are_freed(engine: str) -> None:
    embedding = build() if engine == "gpu" else build(device="cpu", engine=None)
    top = nn.Linear(16, 1).to(embedding.device)
    optimizer = torch.optim.SGD([*embedding.parameters(), *top.parameters()], lr=0.1)
    for number in range(2):
        ids = batch(number).to(embedding.device)
        top(torch.cat([*embedding(ids).to_dict().values()], 1)).sum().backward()
        optimizer.step()
    weight = weakref.ref(top.weight)
    del top, optimizer
    gc.collect()
    assert weight() is None
