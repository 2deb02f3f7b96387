"""`padding_idx` as in torch: bags skip it; without pooling its row is read and not trained."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
from builders import RULES, outcome, readout, score_trainer, tight_budget, train, variant
from builders import Case as Stream
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.host.rows import HostRows
from hotrow.inputs.batch import parse
from hotrow.inputs.hotset import popular
from hotrow.inputs.tree import to_device
from hotrow.run import serve_template as _served

Table = hotrow.EmbeddingBagConfig
ROWS, DIM, PADDING = 40, 4, 3
# Two tables of one width, each with a padding row of its own, and one without.
TABLES = [
    Table("a", ROWS, DIM, ["f", "g"], pooling="none", padding_idx=PADDING),
    Table("b", 30, DIM, ["h"], pooling="none", padding_idx=29),
    Table("c", 20, DIM, ["i"], pooling="none"),
]
PADDINGS = {"a": PADDING, "b": 29}


def make(generator: torch.Generator) -> hotrow.KeyedJaggedTensor:
    """Sequences of any length, with much padding."""
    values, lengths = [], []
    for table in TABLES:
        for _ in table.feature_names:
            mine = torch.randint(0, 5, (4,), generator=generator)
            ids = torch.randint(table.num_embeddings, (int(mine.sum()),), generator=generator)
            is_padding = torch.rand(len(ids), generator=generator) < 0.4
            values.append(ids.masked_fill(is_padding, table.padding_idx or 0))
            lengths.append(mine)
    names = [name for table in TABLES for name in table.feature_names]
    return hotrow.KeyedJaggedTensor(names, torch.cat(values), lengths=torch.cat(lengths))


def long() -> hotrow.KeyedJaggedTensor:
    """One sample of 80 steps, most of them padding, and one row that is read 40 times."""
    steps = torch.full((80,), PADDING)
    steps[3::2] = 7
    return hotrow.KeyedJaggedTensor(
        ["f", "g", "h", "i"], torch.cat([steps, torch.tensor([1, 29])]),
        lengths=torch.tensor([80, 0, 2, 0]),
    )  # fmt: skip


CASE = Stream(TABLES, make)
BATCHES = [*CASE.batches(3), long(), *CASE.batches(4, seed=1)]


def weight_of(table: Table) -> Tensor:
    """Weights that are nowhere zero, also in the padding row."""
    draw = torch.Generator().manual_seed(table.num_embeddings)
    return torch.rand(table.num_embeddings, table.embedding_dim, generator=draw) + 0.5


def build(strategy: Any = "all-fast", rule: str = "adagrad", **options: Any) -> Any:
    settings = {"strategy": strategy, "seed": 1, **options}
    embedding = hotrow.EmbeddingBagCollection(TABLES, RULES[rule], **settings)
    for table in TABLES:
        embedding.load_weights(table.name, 0, weight_of(table))
    return embedding


def tight(name: str, rule: str = "adagrad", part: float = 1.0, **options: Any) -> Any:
    """As few slots as the batches in flight need, or, by `part`, too few."""
    strategy = variant(name)
    budget = tight_budget(CASE, BATCHES, strategy.hold, part=part)
    return build(strategy, rule, budget=budget, **options)


BUDGETED = ("lookahead", "lru", "static", "uncached", "scratchpipe")
STATIC = hotrow.Budget((hotrow.Share(30, 8, True),), window_bytes=1 << 12)
WAYS: dict[str, Any] = {
    **{name: partial(build, name) for name in ("all-fast", "cpu", "hybrid")},
    "static-hybrid": partial(build, "static-hybrid", budget=STATIC),
    "chunked": partial(tight, "lookahead", part=0.6),
    **{name: partial(tight, name) for name in BUDGETED},
}


class Plain(nn.Module):
    """The same tables as nn.Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                table.name: nn.Embedding.from_pretrained(
                    weight_of(table), freeze=False, padding_idx=table.padding_idx, sparse=True
                )
                for table in TABLES
            }
        )

    def forward(self, batch: Any) -> Any:
        sizes = batch.lengths().view(4, -1).sum(1).tolist()
        ids = dict(zip(batch.keys(), batch.values().split(sizes), strict=True))
        vectors = {n: self.tables[t.name](ids[n]) for t in TABLES for n in t.feature_names}
        return vectors


def weights(embedding: Any, table: str) -> Tensor:
    return torch.cat([chunk for _, chunk in embedding.weights(table)])


def assert_reads(embedding: Any, expected: Any, batch: Any) -> None:
    found = embedding(to_device(batch, embedding.device))
    for name in expected:
        torch.testing.assert_close(found[name].detach().cpu(), expected[name], rtol=0, atol=0)


# -- what is read ------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_lookup_reads_the_stored_row(way: str) -> None:
    embedding, expected = WAYS[way](), Plain()(BATCHES[0])
    assert_reads(embedding, expected, BATCHES[0])
    assert_reads(embedding.eval(), expected, BATCHES[0])
    with torch.inference_mode():
        assert_reads(embedding, expected, BATCHES[0])
    ids = torch.tensor([[PADDING, PADDING, 29, 0], [1, PADDING, 2, 19]])  # a dense batch
    assert_reads(embedding, dense_of(ids), ids)


def test_a_new_collection_reads_zeros() -> None:
    embedding = hotrow.EmbeddingBagCollection(TABLES, hotrow.SGD(), strategy="all-fast")
    ids = torch.tensor([[PADDING, 1, 29, 0]])
    assert not embedding(ids)["f"].any()
    assert not embedding(ids)["h"].any()
    assert embedding(ids)["g"].any()


@pytest.mark.parametrize("way", ["all-fast", "lookahead", "static-hybrid"])
def test_a_row_that_is_loaded_while_training_is_read(way: str) -> None:
    embedding = WAYS[way]()
    for step, batch in enumerate(hotrow.ahead(BATCHES, embedding)):
        new = torch.full((1, DIM), float(step))
        embedding.load_weights("a", PADDING, new)
        vectors = embedding(batch)
        ids = batch.values()[: len(vectors["f"])]
        assert bool((vectors["f"][ids == PADDING] == step).all())
        readout(vectors).backward()


def test_an_exported_model_reads_it() -> None:
    table = SimpleNamespace(
        name="a", embedding_dim=DIM, pooling="none", padding_idx=PADDING,
        weight=weight_of(TABLES[0]),
    )  # fmt: skip
    ids, offsets = torch.tensor([1, PADDING, 5]), torch.tensor([0, 2, 3])
    found = _served._look_up(table, ids, offsets)  # type: ignore[arg-type]
    assert torch.equal(found, table.weight[ids])
    table.pooling = "mean"
    pooled = _served._look_up(table, ids, offsets)  # type: ignore[arg-type]
    assert torch.equal(pooled, table.weight[[1, 5]])


# -- what is trained ---------------------------------------------------------------------

TORCH = {
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adam": lambda params: torch.optim.SparseAdam(list(params), lr=0.01),
}


@pytest.mark.parametrize("rule", TORCH)
@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_nn_embedding(way: str, rule: str) -> None:
    embedding, plain = WAYS[way](rule=rule), Plain()
    optimizer: Any = TORCH[rule](plain.parameters())
    losses = []
    for batch in BATCHES:
        loss = readout(plain(batch))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(train(embedding, BATCHES).losses, losses, rtol=1e-4, atol=1e-5)
    for table in TABLES:
        twin: Any = plain.tables[table.name]
        found = weights(embedding, table.name)
        torch.testing.assert_close(found, twin.weight.detach(), rtol=1e-4, atol=1e-5)
    assert_padding_rests(embedding)


def assert_padding_rests(embedding: Any) -> None:
    for table, row in PADDINGS.items():
        config = next(each for each in TABLES if each.name == table)
        assert torch.equal(weights(embedding, table)[row], weight_of(config)[row])
        state = embedding.optimizer.state_dict()["state"][table]
        for name, values in state.items():
            if name != "step":
                assert not values[row].any(), f"{name} of a padding row has changed"
        assert not torch.equal(weights(embedding, table), weight_of(config))


@pytest.mark.parametrize("way", ["all-fast", "lookahead", "hybrid", "static-hybrid"])
def test_joined_and_scaled_gradients_leave_it_alone(way: str) -> None:
    embedding = WAYS[way](rule="adam")
    embedding.grad_scale = 4.0
    with embedding.accumulate():
        for batch in BATCHES[:3]:
            readout(embedding(batch), 4.0).backward()
    assert_padding_rests(embedding)


@pytest.mark.parametrize("way", ["all-fast", "lookahead", "hybrid", "static-hybrid"])
def test_frozen_rows_and_padding_go_together(way: str) -> None:
    embedding = WAYS[way]()
    for step, batch in enumerate(BATCHES):
        changes: dict[int, Any] = {0: {"a": torch.arange(ROWS)}, 2: {}, 4: None}
        if step in changes:
            embedding.freeze_rows(changes[step])
        readout(embedding(batch)).backward()
        assert torch.equal(weights(embedding, "a"), weight_of(TABLES[0])) is (step < 2)
    assert_padding_rests(embedding)


@pytest.mark.parametrize("way", ["all-fast", "lookahead", "hybrid", "static-hybrid"])
def test_gradients_of_padding_alone_are_not_looked_at(way: str) -> None:
    """nn.Embedding drops them, so one that is not finite does no harm."""
    embedding = WAYS[way](on_nonfinite="error")
    ids = torch.tensor([[PADDING, 1, 29, 0], [2, 4, 5, 6]])
    (embedding(ids)["f"] * torch.tensor([[torch.nan], [1.0]])).sum().backward()
    assert weights(embedding, "a").isfinite().all()
    assert not torch.equal(weights(embedding, "a")[2], weight_of(TABLES[0])[2])
    with pytest.raises(FloatingPointError, match="row 2 of table 'a'"):
        (embedding(ids)["f"] * torch.nan).sum().backward()
    assert torch.equal(weights(embedding, "a")[PADDING], weight_of(TABLES[0])[PADDING])


# -- bags --------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("strategy", ["all-fast", "lookahead", "hybrid", "static-hybrid"])
def test_a_bag_skips_it_whatever_is_stored(strategy: str, pooling: str) -> None:
    table = Table("t", ROWS, DIM, ["f"], pooling=pooling, padding_idx=PADDING)
    beside = Table("u", 10, DIM, ["g"], pooling="none", padding_idx=0)
    embedding = hotrow.EmbeddingBagCollection(
        [table, beside],
        hotrow.Adagrad(lr=0.1),
        hotrow.Budget((hotrow.Share(30, 8, True),), window_bytes=1 << 12),
        strategy=strategy,
        seed=1,
    )
    plain = nn.EmbeddingBag.from_pretrained(
        weight_of(table), freeze=False, mode=pooling, padding_idx=PADDING, include_last_offset=True
    )
    other = nn.Embedding.from_pretrained(weight_of(beside), freeze=False, padding_idx=0)
    optimizer = torch.optim.Adagrad([*plain.parameters(), *other.parameters()], lr=0.1)
    for each in (table, beside):
        embedding.load_weights(each.name, 0, weight_of(each))
    ids, offsets = torch.tensor([PADDING, 1, PADDING, 7, 7, PADDING]), torch.tensor([0, 2, 5, 6])
    steps, edges = torch.tensor([0, 5, 0, 9]), torch.tensor([0, 1, 1, 4])
    batch = hotrow.KeyedJaggedTensor(
        ["f", "g"], torch.cat([ids, steps]), lengths=torch.cat([offsets.diff(), edges.diff()])
    )
    for _ in range(3):
        found = embedding(batch)
        pooled, vectors = plain(ids, offsets), other(steps)
        torch.testing.assert_close(found["f"], pooled, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["g"], vectors, rtol=1e-5, atol=1e-6)
        (found["f"].square().sum() + found["g"].square().sum()).backward()
        (pooled.square().sum() + vectors.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(embedding, "t"), plain.weight.detach())
    torch.testing.assert_close(weights(embedding, "u"), other.weight.detach())


# -- hot rows ----------------------------------------------------------------------------


def test_padding_is_pinned_with_any_rows() -> None:
    """Or every sample that is padded would count as one that reads a cold row."""
    embedding = tight("static", "sgd")
    embedding.reserve(1, {"f": 3, "g": 3, "h": 3})
    hot = embedding.pin_rows({"a": torch.tensor([5, 6])})
    assert hot.rows("a").tolist() == [PADDING, 5, 6]
    assert hot.rows("b").tolist() == [29]
    ids = torch.tensor([[PADDING, 5, 29, 0], [5, 6, 1, 0], [PADDING, 5, 29, 1]])
    embedding.pin_rows({"a": torch.tensor([5, 6, PADDING]), "c": torch.tensor([0])})
    hot = embedding.pin_rows({"a": torch.tensor([5, 6, PADDING]), "c": torch.tensor([0])})
    batch = parse(ids, embedding.features, None)
    assert popular(batch, hot).tolist() == [True, False, False]
    assert_reads(embedding, dense_of(ids), ids)


def dense_of(ids: Tensor) -> dict[str, Tensor]:
    owners = [table for table in TABLES for _ in table.feature_names]
    names = ("f", "g", "h", "i")
    return {n: weight_of(t)[ids[:, k]] for k, (n, t) in enumerate(zip(names, owners, strict=True))}


# -- a GPU's engine ----------------------------------------------------------------------


DEVICES = [
    pytest.param("cpu", id="interpreted"),
    pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("way", "rule"), [("lookahead", "sgd"), ("chunked", "adam"), ("lru", "adamw")]
)
def test_on_a_device(way: str, rule: str, device: str) -> None:
    batches = BATCHES[:5]  # Triton's interpreter is slow
    on_cpu = train(build("all-fast", rule), batches)
    options = {"device": device, "engine": gpu_rows}
    expected = build("all-fast", rule, **options)
    assert_reads(expected.eval(), Plain()(BATCHES[0]), BATCHES[0])
    right = train(expected.train(), batches)
    for name, value in on_cpu.weights.items():
        torch.testing.assert_close(right.weights[name], value, rtol=1e-4, atol=1e-5)
    embedding = WAYS[way](rule=rule, **options)
    assert_reads(embedding.eval(), Plain()(BATCHES[0]), BATCHES[0])
    assert train(embedding.train(), batches).same_bits(right)
    assert_padding_rests(embedding)
    looked_at = tight("lookahead", rule, on_nonfinite="error", **options)
    train(looked_at, batches[:2])
    assert_padding_rests(looked_at)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["hybrid", "static-hybrid"])
def test_rows_that_cross_the_link(way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(build("all-fast"), BATCHES)
    monkeypatch.setattr(HostRows, "rows_cross", lambda *_: True)
    embedding = WAYS[way](device=device)
    found = train(embedding, BATCHES)
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-4, atol=1e-5)
    assert_padding_rests(embedding)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [0, 60])
@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_captured_steps_read_it_and_leave_it_alone(rule: str, slots: int) -> None:
    options: dict[str, Any] = {"strategy": "all-fast"}
    if slots:
        budget = hotrow.Budget((hotrow.Share(slots, 16, True),), window_bytes=1 << 14)
        options = {"strategy": "lookahead", "budget": budget}
    draw = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(30):
        ids = torch.randint(20, (8, 4), generator=draw)
        is_padding = torch.rand(8, 4, generator=draw) < 0.4
        batches.append(torch.where(is_padding, torch.tensor([PADDING, PADDING, 29, 0]), ids))
    found = []
    for graphs in (True, False):
        embedding = build(rule=rule, device="cuda", **options)
        records = score_trainer(embedding, graphs=graphs).run(batches)
        losses = [torch.tensor(record.loss) for record in records]
        found.append(outcome(embedding, losses))
        assert_padding_rests(embedding)
    assert found[0].same_bits(found[1])
