"""Rows that nobody has written are made in their slots, with the bits the store has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hotrow
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.inputs.tables import Constant, Normal, Uniform
from hotrow.kernels.triton.start import Beginning, Unwritten, start_moves

DEVICES = [
    pytest.param("cpu", id="interpreted"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


def some_function(rows: torch.Tensor) -> torch.Tensor:
    return rows[:, None].float() * 0.125 + torch.arange(5.0)


def tables() -> list[hotrow.EmbeddingBagConfig]:
    make = hotrow.EmbeddingBagConfig
    return [
        make("uniform", 70, 5, ["a"], init=Uniform(-0.3, 0.7)),
        make("constant", 33, 5, ["b"], init=Constant(0.25)),
        make("normal", 50, 5, ["c"], init=Normal(0.1, 0.5)),
        make("function", 41, 5, ["d"], init=some_function),
        make("padded", 64, 5, ["e"], padding_idx=3),
    ]


def collection(device: str, **options: Any) -> hotrow.EmbeddingBagCollection:
    # Pinned rows, and batches that pass through in chunks, are read where they lie.
    unpinned = replace(hotrow.STRATEGIES["lookahead"], pinned_part=0.0)
    budget = hotrow.Budget((hotrow.Share(78, 32, False),), window_bytes=1 << 12)
    settings: dict[str, Any] = {"strategy": unpinned, "budget": budget, "engine": gpu_rows}
    settings |= options
    return hotrow.EmbeddingBagCollection(
        tables(), optimizer=hotrow.Adagrad(lr=0.1), device=device, seed=3, **settings
    )


def batches(count: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    limits = torch.tensor([70, 33, 50, 41, 64])
    return [
        (torch.rand(6, 5, generator=generator) * limits).long().to(device) for _ in range(count)
    ]


def train(embedding: hotrow.EmbeddingBagCollection, device: str, count: int = 9) -> None:
    for batch in hotrow.ahead(batches(count, device), embedding):
        vectors = embedding(batch).values()
        (vectors * vectors.cos()).sum().backward()


def rows_of(embedding: hotrow.EmbeddingBagCollection) -> dict[str, torch.Tensor]:
    return {
        table.name: torch.cat([rows.clone() for _, rows in embedding.rows(table.name)])
        for table in embedding.tables
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_were_not_written_are_not_read(device: str) -> None:
    embedding, expected = collection(device), collection(device, strategy="all-fast", budget=None)
    (group,) = embedding.groups
    assert group.memory.host.unwritten is not None
    before = group.store.rows.clone()
    # Whoever reads these, trains with NaN.
    made = slice(0, 103) if device == "cpu" else slice(0, 153)  # uniform, constant (and normal)
    group.store.rows[made] = float("nan")
    group.store.rows[194:] = float("nan")
    train(embedding, device)
    embedding.row_access.flush()
    left = group.store.rows.isnan().any(1)
    assert left.any(), "every row was trained, so nothing is proven"
    group.store.rows[left] = before[left]
    train(expected, device)
    assert same(rows_of(embedding), rows_of(expected))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_were_loaded_are_read(device: str) -> None:
    embedding, expected = collection(device), collection(device, strategy="all-fast", budget=None)
    for each in (embedding, expected):
        for table in each.tables:
            weights = torch.arange(table.num_embeddings * 5.0).view(-1, 5) / 1000
            each.load_weights(table.name, 0, weights)
        train(each, device)
    assert same(rows_of(embedding), rows_of(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_the_bits_say_which_rows_have_left(device: str) -> None:
    embedding = collection(device)
    train(embedding, device)
    (group,) = embedding.groups
    assert group.memory.host.unwritten is not None
    words = group.memory.host.unwritten.written
    bits = (words[:, None] >> torch.arange(32, device=words.device)) & 1
    noted = bits.flatten()[: group.layout.num_rows].bool().cpu()
    start = rows_of(collection(device))
    changed = torch.cat(
        [(a != b).any(1) for a, b in zip(rows_of(embedding).values(), start.values(), strict=True)]
    )
    resident = torch.zeros_like(noted)
    rows = group.memory.pad.row_of_slot
    resident[rows[rows >= 0].long().cpu()] = True
    other = torch.zeros_like(noted)
    other[153:194] = True  # a function's rows, which have to be read
    if device == "cpu":
        other[103:153] = True  # numpy's normal weights, up to rounding
    assert torch.equal(noted | resident, changed | resident | other)
    assert (noted & ~other).any()


def test_a_bit_for_each_row_is_not_worth_it_where_slots_are_few() -> None:
    (group,) = collection("cpu").groups
    share = replace(group_share(group), slots=1)
    assert share.with_room(10**6, 40).slots == 1
    few = hotrow.EmbeddingBagCollection(
        [hotrow.EmbeddingBagConfig("t", 200_000, 1, ["a"])],
        optimizer=hotrow.SGD(lr=0.1), budget=40_000, device="cpu", engine=gpu_rows,
    )  # fmt: skip
    assert few.groups[0].memory.host.unwritten is None
    assert few.memory()["which rows were written"] == 0


def group_share(group: Any) -> Any:
    from hotrow.store.budget import Share

    return Share(group.memory.pad.num_slots, len(group.memory.buffer.memory), False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.thinned(4)
@pytest.mark.parametrize("count", range(1, 13))
def test_a_row_starts_as_its_own_table_says(count: int, device: str) -> None:
    """However many tables a search has to tell apart."""
    unwritten = Unwritten(
        list(range(0, 4 * count + 1, 4)),
        [Beginning("constant", (float(table), 0.0)) for table in range(count)],
        [(1, 2, 3)] * count, [], torch.device(device),
    )  # fmt: skip
    slots = torch.full((4 * count, 3), -1.0, device=device)
    moves = torch.arange(4 * count, device=device)
    total = torch.tensor([4 * count], dtype=torch.int32, device=device)
    start_moves(slots, moves.int(), moves.int(), total, unwritten)
    assert torch.equal(slots, (moves // 4)[:, None].expand(-1, 3).float())
    assert int(unwritten.made) == 4 * count
