"""Features without a gradient: their rows, state and steps stay, as in plain torch modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import ENGINES, RULES, PlainTables, build_on
from hotrow.inputs.tree import to_device

Table = hotrow.EmbeddingBagConfig
# One width for all, so that one lookup serves them; "a" is shared by a used and an unused feature.
TABLES = [Table("a", 40, 4, ["f", "g"]), Table("b", 30, 4, ["h"]), Table("c", 20, 4, ["i"])]
OTHER_WIDTH = [*TABLES[:2], Table("c", 20, 6, ["i"])]
FEATURES = ("f", "g", "h", "i")
LIMITS = dict(zip(FEATURES, (40, 40, 30, 20), strict=True))
USED = ("f", "h")
STEPS, SIZE = 4, 6


def dense(generator: torch.Generator) -> Tensor:
    ids = [torch.randint(n, (SIZE,), generator=generator) for n in LIMITS.values()]
    return torch.stack(ids, dim=1)


def jagged(generator: torch.Generator) -> hotrow.KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (4, SIZE), generator=generator)
    pairs = zip(LIMITS.values(), lengths, strict=True)
    ids = [torch.randint(n, (int(each.sum()),), generator=generator) for n, each in pairs]
    values = torch.cat(ids)
    weights = torch.rand(len(values), generator=generator)
    return hotrow.KeyedJaggedTensor(FEATURES, values, lengths=lengths.flatten(), weights=weights)


def batches(make: Any = dense, count: int = STEPS) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [make(generator) for _ in range(count)]


def loss_of(vectors: Any, names: Sequence[str] = USED) -> Tensor:
    """A loss of some features alone."""
    total: Any = 0
    for place, name in enumerate(names):
        total = total + (vectors[name].float() * (1 + place)).tanh().sum()
    return total


def assert_like(embedding: hotrow.EmbeddingBagCollection, plain: PlainTables) -> None:
    for key, weight in embedding.state_dict().items():
        twin = plain.weight[key.split(".")[1]].detach()
        torch.testing.assert_close(weight, twin, rtol=1e-5, atol=1e-6)


RULE = {
    "adam": (hotrow.Adam(lr=0.05), lambda each: torch.optim.SparseAdam(list(each), lr=0.05)),
    "adagrad": (hotrow.Adagrad(lr=0.1), lambda each: torch.optim.Adagrad(each, lr=0.1)),
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("kind", [dense, jagged])
@pytest.mark.parametrize("rule", RULE)
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_state_and_steps_are_those_of_torch_modules(engine: str, rule: str, kind: Any) -> None:
    embedding = build_on(engine, TABLES, RULE[rule][0])
    plain = PlainTables(embedding)
    optimizer = RULE[rule][1](plain.parameters())
    every = batches(kind)
    # Which features are used changes: a table that was not counts fewer steps.
    uses = [USED, USED, ("g",), FEATURES]
    for batch, names in zip(hotrow.ahead(every, embedding), uses, strict=True):
        loss_of(embedding(batch), names).backward()
    for batch, names in zip(every, uses, strict=True):
        loss_of(plain(batch), names).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_like(embedding, plain)
    assert embedding.optimizer.steps == [4, 3, 1]
    for name, state in embedding.optimizer.state_dict()["state"].items():
        found = optimizer.state[plain.weight[name]]
        assert state["step"] == int(found["step"]) or rule == "adagrad"
        for key in state.keys() - {"step"}:
            torch.testing.assert_close(state[key], found[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tables", [TABLES, OTHER_WIDTH], ids=["one-width", "two-widths"])
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@pytest.mark.parametrize("engine", ["all-fast", "lookahead", "hybrid", "device"])
def test_decay_leaves_rows_of_unused_tables_alone(engine: str, rule: str, tables: Any) -> None:
    embedding = build_on(engine, tables, RULES[rule])
    start = embedding.state_dict()
    for batch in hotrow.ahead(batches(), embedding):
        loss_of(embedding(batch)).backward()
    now, state = embedding.state_dict(), embedding.optimizer.state_dict()["state"]
    assert torch.equal(now["embedding_bags.c.weight"], start["embedding_bags.c.weight"])
    assert not any(each.any() for key, each in state["c"].items() if key != "step")
    assert state["c"]["step"] == 0
    assert not torch.equal(now["embedding_bags.b.weight"], start["embedding_bags.b.weight"])


def test_a_row_that_only_an_unused_feature_reads_stays() -> None:
    embedding = build_on("all-fast", TABLES, RULES["adamw"])
    start = embedding.state_dict()["embedding_bags.a.weight"]
    ids = torch.tensor([[1, 2, 0, 0], [3, 3, 0, 0]])  # f reads rows 1 and 3 of table a, g 2 and 3
    loss_of(embedding(ids)).backward()
    moved = (embedding.state_dict()["embedding_bags.a.weight"] != start).any(1)
    assert moved.nonzero().flatten().tolist() == [1, 3]


@pytest.mark.parametrize("engine", ["all-fast", "lookahead", "hybrid", "device"])
def test_not_a_number_in_what_is_unused_harms_nothing(engine: str) -> None:
    embedding = build_on(engine, TABLES, hotrow.SGD(lr=0.1))
    place = embedding.groups[0].device
    for table, size in (("b", 30), ("c", 20)):
        embedding.load_weights(table, 0, torch.full((size, 4), torch.nan))
    keys = hotrow.KeyedJaggedTensor(
        FEATURES,
        torch.tensor([1, 1, 5, 7], device=place),
        lengths=torch.ones(4, dtype=torch.int64, device=place),
        weights=torch.tensor([1.0, torch.nan, torch.inf, 1.0], device=place, requires_grad=True),
    )
    embedding(keys)["f"].sum().backward()
    weights = embedding.state_dict()["embedding_bags.a.weight"]
    assert weights.isfinite().all()
    grads = keys.weights_or_none().grad.cpu()  # type: ignore[union-attr]
    assert grads[0] != 0
    assert not grads[1:].any()


def test_vectors_of_half_precision_are_no_other() -> None:
    embedding = build_on("device", TABLES, RULES["adamw"], output_dtype=torch.bfloat16)
    start = embedding.state_dict()
    for batch in hotrow.ahead(batches(count=2), embedding):
        out = embedding(batch)
        assert out["f"].dtype == torch.bfloat16
        loss_of(out).backward()
    now = embedding.state_dict()
    assert [torch.equal(start[key], now[key]) for key in now] == [False, False, True]


def test_values_use_every_table() -> None:
    embedding, other = (build_on("all-fast", TABLES, RULES["adamw"]) for _ in range(2))
    ids = batches()[0]
    embedding(ids).values()[:, :4].tanh().sum().backward()
    out = other(ids)
    (out["f"].tanh().sum() + sum(out[name].sum() * 0 for name in "ghi")).backward()
    assert embedding.optimizer.steps == [1, 1, 1]
    for key, weight in other.state_dict().items():
        assert torch.equal(weight, embedding.state_dict()[key])


@pytest.mark.parametrize("engine", ["all-fast", "lookahead", "hybrid", "static-hybrid", "device"])
def test_accumulated_passes_may_use_different_features(engine: str) -> None:
    embedding = build_on(engine, TABLES, RULE["adam"][0])
    plain = PlainTables(embedding)
    optimizer = RULE["adam"][1](plain.parameters())
    first, second = batches(count=2)
    for _ in range(2):
        with embedding.accumulate():
            loss_of(embedding(to_device(first, embedding.device)), ("f",)).backward()
            loss_of(embedding(to_device(second, embedding.device)), ("g",)).backward()
        loss_of(plain(first), ("f",)).backward()
        loss_of(plain(second), ("g",)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_like(embedding, plain)
    assert embedding.optimizer.steps == [2, 0, 0]
