"""Converted models on a GPU: look-ahead, captured steps and moves between devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from builders import no_synchronisation
from hotrow.inputs.tree import to_device

pytestmark = pytest.mark.gpu

ROWS = (3000, 2000)
Batch = dict[str, Tensor]


class Clicks(nn.Module):
    """Modules that are called once or twice, with views and with computed ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = nn.Embedding(ROWS[0], 8), nn.Embedding(ROWS[1], 8, padding_idx=0)
        self.tags = nn.EmbeddingBag(500, 8, mode="mean")
        self.top = nn.Linear(32, 1)

    def forward(self, batch: Batch) -> Tensor:
        seen = self.item(batch["seen"]).mean(1)
        vectors = [self.user(batch["x"][:, 0]), self.item(batch["x"][:, 1].int()), seen]
        vectors.append(self.tags(batch["tags"]))
        return self.top(torch.cat(vectors, 1)).squeeze(1)


class Columns(nn.Module):
    """Modules that are called once each, with columns of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fields = nn.ModuleList([nn.Embedding(rows, 8) for rows in (*ROWS, 40)])
        self.top = nn.Linear(24, 1)

    def forward(self, batch: Batch) -> Tensor:
        parts = [field(batch["x"][:, k]) for k, field in enumerate(self.fields)]
        return self.top(torch.cat(parts, 1)).squeeze(1)


def batches(count: int, size: int = 64) -> Iterator[Batch]:
    draw = torch.Generator().manual_seed(1)

    def ids(rows: int, *shape: int) -> Tensor:
        return (torch.rand(*shape, generator=draw) ** 3 * rows).long()

    for _ in range(count):
        columns = torch.stack([ids(ROWS[0], size), ids(ROWS[1], size), ids(40, size)], 1)
        yield {
            "x": columns,
            "seen": ids(ROWS[1], size, 5),
            "tags": ids(500, size, 3),
            "label": torch.rand(size, generator=draw).round(),
        }


def label(batch: Batch) -> Tensor:
    return batch["label"]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch), label(batch))


def converted(model: nn.Module, strategy: str = "lookahead", device: str = "cuda") -> nn.Module:
    twin = deepcopy(model).to(device)
    return hotrow.convert(twin, "40%", strategy=strategy, seed=1, show=False)


def make(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.01)


def trained(model: nn.Module, loader: Any) -> dict[str, Tensor]:
    optimizer = make(model)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def bits_of(bits: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(bits[name], others[name]) for name in bits)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", [Clicks, Columns])
def test_look_ahead_gives_the_bits_of_all_fast_and_the_rows_of_torch(
    kind: Any, on_device: bool
) -> None:
    model, cuda = kind(), torch.device("cuda")
    loader = [to_device(x, cuda) if on_device else x for x in batches(40)]
    moved = [to_device(x, cuda) for x in loader]
    rows = converted(model)
    bits = trained(rows, hotrow.ahead(loader, rows))
    next_to_it = converted(model, "all-fast")
    assert bits_of(bits, trained(next_to_it, hotrow.ahead(loader, next_to_it)))
    plain = trained(deepcopy(model).to(cuda), moved)
    assert all(torch.allclose(bits[name], plain[name], atol=1e-4) for name in plain)
    traffic = next(
        x for x in rows.modules() if isinstance(x, hotrow.Embedding)
    ).collection.traffic()
    assert traffic.evicted_rows > 100


def test_without_look_ahead_rows_are_those_of_torch() -> None:
    model, cuda = Clicks(), torch.device("cuda")
    loader = [to_device(x, cuda) for x in batches(30)]
    bits = trained(converted(model), loader)
    plain = trained(deepcopy(model).to(cuda), loader)
    assert all(torch.allclose(bits[name], plain[name], atol=1e-4) for name in plain)


@pytest.mark.parametrize("strategy", ["lookahead", "all-fast"])
def test_a_step_of_modules_is_captured(strategy: str) -> None:
    model, loader = Columns(), list(batches(40))
    rows, other = converted(model, strategy), converted(model)
    optimizer = make(rows)
    loss: Any = F.binary_cross_entropy_with_logits
    step = hotrow.graphed(rows, loss, optimizer, labels=label, batch_size=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in hotrow.ahead(loader, rows, step=step):
            step(batch)
    assert step.landing is not None
    assert step.landing.num_graphs
    bits = {name: value.cpu() for name, value in rows.state_dict().items()}
    assert bits_of(bits, trained(other, hotrow.ahead(loader, other)))


def test_a_fused_optimizer_beside_a_scaler_does_not_make_the_host_wait() -> None:
    plain = Columns().cuda()
    models = [plain, converted(deepcopy(plain))]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3)
        for number, batch in enumerate(batches(8)):
            optimizer.zero_grad()
            loss = loss_of(model, to_device(batch, torch.device("cuda")))
            scaler.scale(loss * (float("inf") if number == 5 else 1.0)).backward()
            torch.cuda.synchronize()
            with nullcontext() if number < 4 else no_synchronisation():
                scaler.step(optimizer)
            scaler.update()
    for one, other in zip(models[0].parameters(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.cpu(), rtol=1e-4, atol=1e-5)


def test_a_model_moves_before_its_first_step_and_not_after_it() -> None:
    model, loader = Columns(), list(batches(6))
    rows = converted(model, device="cpu").to("cuda")
    straight = converted(model)
    bits = trained(rows, hotrow.ahead(loader, rows))
    assert bits_of(bits, trained(straight, hotrow.ahead(loader, straight)))
    with pytest.raises(RuntimeError, match="cannot move to cpu"):
        rows.cpu()
    plain = hotrow.revert(rows).cpu()
    assert bits_of(bits, plain.state_dict())


class Sequence(nn.Module):
    """A sequence model with a tied output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item, self.place = nn.Embedding(300, 16), nn.Embedding(6, 16)

    def forward(self, batch: Batch) -> Tensor:
        seen = batch["seen"] % 300
        vectors = self.item(seen) + self.place(torch.arange(5, device=seen.device))
        return vectors.mean(1) @ self.item.weight.T


def test_a_whole_table_is_read_and_trained() -> None:
    model = Sequence()
    batches_on_device = [to_device(x, torch.device("cuda")) for x in batches(20)]

    def after(each: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        for batch in batches_on_device:
            optimizer.zero_grad()
            F.cross_entropy(each(batch), batch["x"][:, 0] % 300).backward()
            optimizer.step()
        return {name: value.cpu() for name, value in each.state_dict().items()}

    twin = hotrow.convert(deepcopy(model).cuda(), "400%", seed=1, show=False)
    bits, plain = after(twin), after(deepcopy(model).cuda())
    assert all(torch.allclose(bits[name], plain[name], atol=1e-4) for name in plain)
    tight = hotrow.convert(deepcopy(model).cuda(), "50%", seed=1, show=False)
    with pytest.raises(RuntimeError, match="sampled softmax"):
        after(tight)


class Fickle(Columns):
    """Computes ids in another way from some batch on."""

    shift = 0

    def forward(self, batch: Batch) -> Tensor:
        x = batch["x"].float().long() + self.shift
        parts = [field(x[:, k].clamp(max=39)) for k, field in enumerate(self.fields)]
        return self.top(torch.cat(parts, 1)).squeeze(1)


def test_ids_that_are_not_those_planned_are_noticed() -> None:
    loader = list(batches(120))
    for batch in loader:
        batch["x"].clamp_(max=38)
    rows: Any = converted(Fickle())
    optimizer = make(rows)

    def loop() -> None:
        for number, batch in enumerate(hotrow.ahead(loader, rows)):
            rows.shift = int(number >= 60)
            optimizer.zero_grad()
            loss_of(rows, batch).backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match=r"were not those that hotrow\.ahead planned"):
        loop()
