"""Rows of the next batch that the current one does not change are sent while it trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.distributed.early_rows import EarlyRows
from hotrow.distributed.owners import TableOwners
from rank_processes import run

SIZES = {"a": 3000, "b": 2000, "c": 1500}
TABLES = [
    hotrow.EmbeddingBagConfig("a", SIZES["a"], 4, ["a"], padding_idx=0),
    hotrow.EmbeddingBagConfig("b", SIZES["b"], 4, ["b"], pooling="mean"),
    hotrow.EmbeddingBagConfig("c", SIZES["c"], 6, ["c"]),
]


def batches(rank: int, count: int, world: int = 2, samples: int = 24) -> list[Tensor]:
    """Few rows are in nearly all batches, and some batches have no samples on the last rank."""
    draw = torch.Generator().manual_seed(rank)
    sizes = torch.tensor(list(SIZES.values()))
    found = []
    for number in range(count):
        ids = (torch.rand(samples, len(sizes), generator=draw) ** 3 * sizes).long()
        found.append(ids[: 0 if number % 5 == 3 and rank == world - 1 else samples])
    return found


def collection(strategy: str, **options: Any) -> Any:
    budget = None if strategy == "all-fast" else "40%"
    options = {"optimizer": hotrow.Adam(lr=0.05), "budget": budget, "seed": 1, **options}
    return hotrow.EmbeddingBagCollection(TABLES, strategy=strategy, **options)


def rows_of(embedding: Any) -> list[Tensor]:
    embedding.check()
    return [torch.cat([chunk for _, chunk in embedding.rows(name)]) for name in SIZES]


def loss_of(embedding: Any, ids: Tensor) -> Tensor:
    loss: Tensor = embedding(ids).values().square().sum()
    return loss


# -- which rows travel when ------------------------------------------------------------------


def shares(rank: int, world: int, strategy: str) -> tuple[dict[str, int], list[Tensor]]:
    embedding, every = collection(strategy), batches(rank, 12, world)
    for ids in hotrow.ahead(every, embedding):
        loss_of(embedding, ids).backward()
    return embedding.sent_bytes(), every


@pytest.mark.parametrize("strategy", ["lookahead", "scratchpipe"])
def test_rows_that_no_rank_has_looked_up_in_the_batch_before_are_early(strategy: str) -> None:
    results = run(2, shares, strategy)
    widths = {"a": 4, "b": 4, "c": 6}
    early = 0
    for before, now in zip(range(11), range(1, 12), strict=True):
        for column, (name, width) in enumerate(widths.items()):
            changed = torch.cat([every[before][:, column] for _, every in results])
            for rank, (_, every) in enumerate(results):
                wanted = every[now][:, column].unique()
                wanted = wanted[wanted > 0] if name == "a" else wanted  # padding
                fresh = wanted[~torch.isin(wanted, changed)]
                owner = owners_of(name)[fresh]
                early += 4 * width * int((owner != rank).sum())
    assert sum(sent["early rows"] for sent, _ in results) == early > 0
    assert all(sent["early rows"] < sent["rows"] for sent, _ in results)


def owners_of(name: str) -> Tensor:
    """Return which of two ranks owns each row."""
    rows = torch.arange(SIZES[name]).numpy()
    return torch.from_numpy(TableOwners(name, SIZES[name], 2).find(rows)[0])


@pytest.mark.parametrize("strategy", ["lru", "uncached", "all-fast"])
def test_strategies_that_know_no_batch_ahead_send_nothing_early(strategy: str) -> None:
    for sent, _ in run(2, shares, strategy):
        assert sent["early rows"] == 0 < sent["rows"]


# -- what may change rows meanwhile ----------------------------------------------------------


def plainly(embedding: Any, every: list[Tensor], others: list[Tensor]) -> None:
    for ids in hotrow.ahead(every, embedding):
        loss_of(embedding, ids).backward()


def accumulated(embedding: Any, every: list[Tensor], others: list[Tensor]) -> None:
    """Rows of three batches change at once."""
    stream = hotrow.ahead(every, embedding)
    for ids in stream:
        with embedding.accumulate():
            loss_of(embedding, ids).backward()
            for _, more in zip(range(2), stream, strict=False):
                loss_of(embedding, more).backward()


def mixed_with_others(embedding: Any, every: list[Tensor], others: list[Tensor]) -> None:
    """Batches that were not read ahead change the same rows in between, some of them twice."""
    for number, ids in enumerate(hotrow.ahead(every, embedding, depth=2)):
        loss_of(embedding, ids).backward()
        with warnings.catch_warnings():  # of ids that were not planned
            warnings.simplefilter("ignore")
            for other in others[number % 3 : number % 3 + number % 2 + 1]:
                loss_of(embedding, other).backward()


def twice(embedding: Any, every: list[Tensor], others: list[Tensor]) -> None:
    """Each batch is trained two times, and the next one once with it."""
    for ids in hotrow.ahead(every, embedding):
        for _ in range(2):
            loss_of(embedding, ids).backward()


def without_backward(embedding: Any, every: list[Tensor], others: list[Tensor]) -> None:
    for number, ids in enumerate(hotrow.ahead(every, embedding)):
        loss = loss_of(embedding, ids)
        if number % 3:
            loss.backward()


def left_early(embedding: Any, every: list[Tensor], others: list[Tensor]) -> None:
    for part in (every[:9], every):
        for number, ids in enumerate(hotrow.ahead(part, embedding)):
            loss_of(embedding, ids).backward()
            if number == 4:
                break


def with_evaluation(embedding: Any, every: list[Tensor], others: list[Tensor]) -> None:
    for ids in hotrow.ahead(every, embedding):
        loss_of(embedding, ids).backward()
        with torch.no_grad():
            embedding(others[0])


def partly_used(embedding: Any, every: list[Tensor], others: list[Tensor]) -> None:
    """Some tables have no gradient."""
    for number, ids in enumerate(hotrow.ahead(every, embedding)):
        out = embedding(ids)
        out["abc"[number % 3]].square().sum().backward()


LOOPS: dict[str, Callable[..., None]] = {
    loop.__name__: loop
    for loop in (plainly, accumulated, mixed_with_others, twice, without_backward, left_early,
                 with_evaluation, partly_used)
}  # fmt: skip


def trained(rank: int, world: int, loop: str, strategy: str, **options: Any) -> Any:
    embedding = collection(strategy, **options)
    LOOPS[loop](embedding, batches(rank, 13, world), batches(rank + world, 4, world))
    return rows_of(embedding), embedding.sent_bytes()["early rows"]


def differences(
    rank: int, world: int, loops: list[str], strategies: list[str], **options: Any
) -> list[str]:
    found = []
    for loop in loops:
        wanted, _ = trained(rank, world, loop, "all-fast", **options)
        for strategy in strategies:
            rows, early = trained(rank, world, loop, strategy, **options)
            if not all(map(torch.equal, rows, wanted)):
                found.append(f"{loop}, {strategy}: other rows than all-fast")
            if not early and strategy == "lookahead":
                found.append(f"{loop}, {strategy}: no row was early")
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_early_rows_are_as_they_are_when_they_are_looked_up(world: int) -> None:
    results = run(world, differences, list(LOOPS), ["lookahead", "scratchpipe"], timeout=120)
    assert not any(results), results


def test_early_rows_beside_rows_on_every_rank() -> None:
    results = run(2, differences, list(LOOPS), ["lookahead"], replicate=8000, timeout=120)
    assert not any(results), results


# -- steps of torch's optimizers -------------------------------------------------------------


def stepped(rank: int, world: int, strategy: str, pattern: str) -> Any:
    budget = None if strategy == "all-fast" else "60%"
    module = hotrow.EmbeddingBag(3000, 4, strategy=strategy, budget=budget, seed=1, mode="sum")
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
    every = [ids[:, :1] for ids in batches(rank, 13, world)]
    for number, ids in enumerate(hotrow.ahead(every, module)):
        module(ids).square().sum().backward()
        if pattern == "accumulate" and number % 3:
            continue
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        if pattern != "skip" or number % 4:
            optimizer.step()
        if pattern != "keep" or number % 2:
            optimizer.zero_grad()
    return [torch.cat([chunk for _, chunk in module.weights()])]


def step_differences(rank: int, world: int) -> list[str]:
    found = []
    for pattern in ("plain", "accumulate", "skip", "keep"):
        wanted, rows = (stepped(rank, world, x, pattern) for x in ("all-fast", "lookahead"))
        if not all(map(torch.equal, rows, wanted)):
            found.append(f"{pattern}: other rows than all-fast")
    return found


def test_early_rows_beside_steps_of_torch_optimizers() -> None:
    results = run(2, step_differences, timeout=120)
    assert not any(results), results


# -- mistakes are found ----------------------------------------------------------------------


@contextmanager
def whatever_changed() -> Iterator[None]:
    """Early rows are used though other batches than the one before have changed rows."""

    def holds(self: EarlyRows, serial: int, replaced: int) -> bool:
        return self._batch is not None and self._batch.serial == serial

    with patch.object(EarlyRows, "holds", holds):
        yield


@contextmanager
def nothing_late() -> Iterator[None]:
    def is_late(self: EarlyRows, place: int, ids: Tensor, serial: int) -> Tensor:
        return torch.zeros(len(ids), dtype=torch.bool)

    with patch.object(EarlyRows, "_is_late", is_late):
        yield


MISTAKES = {x.__name__: x for x in (whatever_changed, nothing_late)}


def with_mistake(rank: int, world: int, name: str, loop: str) -> list[str]:
    with MISTAKES[name]():
        return differences(rank, world, [loop], ["lookahead"])


@pytest.mark.parametrize(
    ("name", "loop"), [("whatever_changed", "accumulated"), ("nothing_late", "plainly")]
)
def test_a_mistake_about_early_rows_is_found(name: str, loop: str) -> None:
    found = run(2, with_mistake, name, loop, timeout=120)
    assert found == [[f"{loop}, lookahead: other rows than all-fast"]] * 2
