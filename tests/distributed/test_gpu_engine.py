"""The engine of a GPU on several ranks: its kernels interpreted, or on a device."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hotrow
from hotrow.distributed import ranks
from hotrow.engine.gpu.rows import gpu_rows
from rank_processes import run

SIZES, DIMS = (900, 200, 5), (8, 8, 4)
STRATEGIES = ("lookahead", "lru", "static", "uncached", "scratchpipe")


def train(rank: int, device: str, strategy: str, batches: list[Tensor], **options: Any) -> Any:
    """Return the losses, the rows with their state, and how many rows have left their slots."""
    tables = [
        hotrow.EmbeddingBagConfig(f"t{k}", rows, dim, [f"f{k}"])
        for k, (rows, dim) in enumerate(zip(SIZES, DIMS, strict=True))
    ]
    budget = hotrow.Budget((hotrow.Share(140, 64, True), hotrow.Share(3, 64, True)), 1 << 14)
    embedding = hotrow.EmbeddingBagCollection(
        tables,
        hotrow.Adagrad(lr=0.1),
        None if strategy == "all-fast" else budget,
        strategy=strategy,
        seed=3,
        device=device,
        engine=gpu_rows,
        **options,
    )
    losses = []
    for batch in hotrow.ahead(batches, embedding):
        loss = (embedding(batch).values() - 0.3).square().sum()
        losses.append(loss.detach())
        loss.backward()
    embedding.check()
    rows = [part for x in tables for _, part in embedding.rows(x.name)]
    return torch.stack(losses).cpu(), rows, embedding.traffic().evicted_rows


def equal_to_all_fast(rank: int, world: int, device: str, steps: int, size: int) -> list[str]:
    """Return what differs. Interpreted kernels take long: half of them with replicas."""
    generator = torch.Generator().manual_seed(rank)
    columns = [torch.randint(rows, (steps, size), generator=generator) for rows in SIZES]
    batches = list(torch.stack(columns, 2))
    batches[2] = batches[2][: 3 * rank]  # of different sizes, and empty on the first rank
    losses, rows, _ = train(rank, device, "all-fast", batches)
    differing = []
    choices = ({}, {"replicate": "9KiB"})
    for number, strategy in enumerate(STRATEGIES):
        for options in choices if device == "cuda" else choices[number % 2 :][:1]:
            more_losses, more_rows, evicted = train(rank, device, strategy, batches, **options)
            is_equal = torch.equal(losses, more_losses)
            is_equal &= all(map(torch.equal, rows, more_rows))
            if not is_equal or not evicted:
                differing.append(f"{strategy} {options}: equal {is_equal}, {evicted} evicted")
    return differing


def test_interpreted_kernels_train_as_with_all_rows_in_fast_memory() -> None:
    for differing in run(2, equal_to_all_fast, "cpu", steps=7, size=20, timeout=170):
        assert not differing


def fills(rank: int, world: int) -> dict[int, Any]:
    """Return how rows move, of a width that has replicas and one that has none."""
    tables = [
        hotrow.EmbeddingBagConfig(f"t{n}", n, dim, [f"t{n}"]) for n, dim in ((900, 8), (9, 4))
    ]
    profile = {"t900": torch.ones(900), "t9": torch.zeros(9)}
    options = {"strategy": "lookahead", "fill": "zero-copy", "engine": gpu_rows, "profile": profile}
    embedding = hotrow.EmbeddingBagCollection(
        tables, hotrow.SGD(), "8KiB", seed=3, replicate="1KiB", **options
    )
    assert len(embedding.groups) > 2
    return {dim: choice.form for dim, choice in embedding.fills().items()}


def test_fills_are_those_of_owned_rows_beside_replicas() -> None:
    assert run(2, fills) == [{8: "zero-copy", 4: "zero-copy"}] * 2


def without_first_gradient(rank: int, world: int) -> list[bool]:
    """The first loss of one rank leaves the rows of converted modules out. Plans get room when the
    calls of a whole batch are known, which all ranks notice at the same time."""
    outcomes = []
    for strategy in ("all-fast", "lookahead"):
        torch.manual_seed(0)
        model: Any = nn.ModuleList([nn.Embedding(900, 8), nn.Embedding(900, 4), nn.Linear(12, 1)])
        options = {"strategy": strategy, "seed": 1, "engine": gpu_rows}
        hotrow.convert(model, None if strategy == "all-fast" else "30KiB", show=False, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            ids = torch.arange(4 * step, 4 * step + 8) * (3 + rank)
            loss = model[2](torch.cat([model[0](ids), model[1](ids)], 1)).square().sum()
            optimizer.zero_grad()
            (loss if rank == 0 or step else model[2].weight.sum()).backward()
            optimizer.step()
        outcomes.append([model[0].weight.detach().clone(), model[1].weight.detach().clone()])
    return list(map(torch.equal, *outcomes))


def test_the_first_gradient_may_be_that_of_one_rank() -> None:
    for equal in run(2, without_first_gradient):
        assert all(equal)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_on_one_gpu_train_as_with_all_rows_in_fast_memory(world: int) -> None:
    for differing in run(world, equal_to_all_fast, "cuda", steps=40, size=20, timeout=280):
        assert not differing


def alone(rank: int, world: int, device: str, backend: str) -> list[str]:
    """One rank that exchanges everything with itself, beside one that exchanges nothing."""
    draw = torch.Generator().manual_seed(5)
    batches = [
        torch.stack([torch.randint(rows, (20,), generator=draw) for rows in SIZES], 1)
        for _ in range(30 if device == "cuda" else 6)
    ]
    group = dist.new_group([0], backend=backend)
    wanted = train(rank, device, "lookahead", batches)
    differing, exchange = [], ranks.Ranks.exchange
    strategies = ("lookahead", "all-fast", "scratchpipe", "static")
    for strategy in strategies if device == "cuda" else strategies[:2]:  # the interpreter is slow
        with (
            patch.object(ranks, "FEWEST", 1),
            patch.object(ranks.Ranks, "exchange", autospec=True, side_effect=exchange) as exchanges,
        ):
            losses, rows, _ = train(rank, device, strategy, batches, process_group=group)
        is_equal = torch.equal(losses, wanted[0]) and all(map(torch.equal, rows, wanted[1]))
        if not is_equal or exchanges.call_count < 3 * len(batches):
            differing.append(f"{strategy}: equal {is_equal}, {exchanges.call_count} exchanges")
    return differing


def test_one_rank_may_exchange_with_itself() -> None:
    assert run(1, alone, "cpu", "gloo", timeout=170) == [[]]


@pytest.mark.gpu
def test_one_rank_exchanges_with_itself_over_nccl() -> None:
    """Several ranks on one device cannot use NCCL; this runs the same calls."""
    assert run(1, alone, "cuda", "nccl", timeout=170) == [[]]
