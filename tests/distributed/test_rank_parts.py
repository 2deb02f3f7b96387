"""Batches that several ranks train in two parts: while the first ones train, other rows travel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import hotrow
from hotrow.distributed.arrivals import Arrival
from hotrow.distributed.shared_rows import SharedWork
from hotrow.embedding.ahead import Ahead
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.split_batch import Parted
from hotrow.engine.stages import LATE
from hotrow.inputs import samples
from hotrow.systems.hotline.split import Splitter
from rank_cases import TOLERANCE
from rank_processes import run

Config = hotrow.EmbeddingBagConfig
STEPS = 14
HOT = {"a": torch.arange(60), "b": torch.arange(0, 300, 6), "c": torch.arange(40)}
# Small rates: where a gradient is a small sum of large ones, Adagrad enlarges its rounding.
RULES = {"adagrad": hotrow.Adagrad(lr=0.01), "adam": hotrow.Adam(lr=0.01)}
Item = dict[str, Any]


class Model(nn.Module):
    """Two collections, the second of which is looked up first, and a dense part."""

    def __init__(
        self, rule: str, device: str = "cpu", *, is_dense: bool = True, engine: Any = None
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"seed": 5, "device": device, "engine": engine}
        options["strategy"] = "static"
        one = [Config("a", 400, 4, ["f", "h"], pooling="mean", padding_idx=399),
               Config("b", 300, 6, ["g"])]  # fmt: skip
        other = [Config("c", 350, 4, ["f"], pooling="none")]
        shares = tuple(hotrow.Share(150, 64, True) for _ in range(2))
        self.bags = hotrow.EmbeddingBagCollection(
            one, RULES[rule], hotrow.Budget(shares, 1 << 14), replicate="12KiB", **options
        )
        self.rows = hotrow.EmbeddingCollection(
            other, RULES[rule], hotrow.Budget(shares[:1], 1 << 14), replicate="6KiB", **options
        )
        for collection in (self.bags, self.rows):
            collection.pipeline.move_in(LATE)
        torch.manual_seed(1)
        self.top = nn.Sequential(nn.Linear(18, 6), nn.ReLU(), nn.Linear(6, 1)).to(device)
        self.is_dense = is_dense
        self.log: list[str] = []

    def pin(self) -> dict[str, Any]:
        return {
            "bags": self.bags.pin_rows({name: HOT[name] for name in "ab"}),
            "rows": self.rows.pin_rows({"c": HOT["c"]}),
        }

    def forward(self, batch: Item) -> Tensor:
        self.log.append(f"forward of {len(batch['label'])}")
        row = self.rows(batch["column"])["f"]
        bags = self.bags(batch["ids"])
        vectors = torch.cat([row, *(bags[name] for name in "fhg")], 1)
        if not self.is_dense:  # of each sample alone, so parts have the bits of the whole
            slope = torch.linspace(-1, 1, vectors.shape[1], device=vectors.device)
            return (vectors * slope).square().sum(1)
        logits: Tensor = self.top(vectors).squeeze(1)
        return logits


def ids_of(batch: Item) -> dict[str, Any]:
    return {"bags": batch["ids"], "rows": batch["column"]}


def loss_of(predictions: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(predictions, labels, reduction="none")


def exact_loss(predictions: Tensor, labels: Tensor) -> Tensor:
    """A product, which has the same bits wherever in its tensor a sample is."""
    return predictions * (labels + 0.5)


def item(draw: torch.Generator, size: int, popular: float) -> Item:
    """Samples of which a share looks up pinned rows alone."""
    is_popular = torch.rand(size, generator=draw) < popular
    sizes, keys = {"f": 400, "h": 400, "g": 300}, ["f", "h", "g"]
    hot = {"f": HOT["a"], "h": HOT["a"], "g": HOT["b"]}
    values, lengths = [], []
    for key in keys:
        length = torch.randint(0, 4, (size,), generator=draw)
        drawn = torch.randint(sizes[key], (int(length.sum()),), generator=draw)
        in_hot = hot[key][torch.randint(len(hot[key]), drawn.shape, generator=draw)]
        values.append(torch.where(is_popular.repeat_interleave(length), in_hot, drawn))
        lengths.append(length)
    column = torch.randint(350, (size,), generator=draw)
    column = torch.where(is_popular, column % len(HOT["c"]), column)
    return {
        "ids": hotrow.KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths)),
        "column": column.unsqueeze(1),
        "label": torch.rand(size, generator=draw),
    }


# Samples of two ranks, and the share of popular ones: none at one rank, at both, and all.
SIZES = [((33, 17), (0.5, 0.5)), ((40, 8), (0.6, 0.0)), ((16, 16), (1.0, 1.0)), ((24, 25), (0, 0)),
         ((0, 32), (0.5, 0.7)), ((19, 0), (0.5, 0.5)), ((21, 22), (1.0, 0.4))]  # fmt: skip


def items(rank: int, world: int) -> list[Item]:
    draw = torch.Generator().manual_seed(100 + rank)
    return [
        item(draw, sizes[rank % 2], popular[rank % 2])
        for sizes, popular in (SIZES[number % len(SIZES)] for number in range(STEPS))
    ]


def collections_of(model: Model) -> dict[str, Any]:
    return {"bags": model.bags, "rows": model.rows}


def state_of(model: Model) -> dict[str, Tensor]:
    found = {}
    for collection in collections_of(model).values():
        collection.check()
        for table in collection.tables:
            found[table.name] = torch.cat([rows for _, rows in collection.rows(table.name)])
        found[f"steps of {collection.tables[0].name}"] = torch.tensor(collection.optimizer.steps)
    return found | {name: x.detach().clone() for name, x in model.top.state_dict().items()}


def trained(model: Model, batches: list[Any], optimizer: Any) -> list[float]:
    loss = loss_of if model.is_dense else exact_loss
    step = hotrow.graphed(model, loss, optimizer, labels=lambda batch: batch["label"])
    stream = Ahead(batches, model, ids_of, depth=None, step=step)
    return [float(step(batch)) for batch in stream]


def in_parts_and_whole(
    rank: int, world: int, rule: str, device: str
) -> tuple[list[str], list[int]]:
    """The same sorted batches, in parts and whole."""
    parted, whole = Model(rule, device), Model(rule, device)
    hot = parted.pin()
    whole.pin()
    splitter = Splitter(collections_of(parted), ids_of)
    splitter.pin(hot)
    given = [splitter.sort(batch)().parted for batch in items(rank, world)]
    optimizers = [torch.optim.Adam(x.top.parameters(), lr=0.01) for x in (parted, whole)]
    losses = trained(parted, given, optimizers[0])
    expected = trained(whole, [x.batch for x in given], optimizers[1])
    found = []
    if not torch.allclose(torch.tensor(losses), torch.tensor(expected), **TOLERANCE):
        found.append(f"losses {losses} differ from {expected}")
    for name, value in state_of(whole).items():
        other = state_of(parted)[name].float()
        if not torch.allclose(other, value.float(), **TOLERANCE):
            most = float((other - value.float()).abs().max())
            found.append(f"{name} differs by {most:.3g}")
    return found, [x.first for x in given]


@pytest.mark.parametrize("rule", [pytest.param("adagrad", marks=pytest.mark.slow), "adam"])
def test_parts_train_like_whole_batches(rule: str) -> None:
    results = run(2, in_parts_and_whole, rule, "cpu", timeout=120)
    assert [found for found, _ in results] == [[], []]
    firsts = list(zip(*(first for _, first in results), strict=True))
    # Both have a first part, one of them alone, none, and the whole batch.
    assert {(one > 0, other > 0) for one, other in firsts} == {
        (one, other) for one in (False, True) for other in (False, True)
    }
    assert (16, 16) in firsts


@pytest.mark.slow
def test_parts_train_like_whole_batches_on_four_ranks() -> None:
    for found, _ in run(4, in_parts_and_whole, "adam", "cpu", timeout=300):
        assert found == []


# -- to the bit --------------------------------------------------------------------------------


def parted(batch: Item, first: int) -> Parted:
    size = len(batch["label"])
    return Parted(
        batch, first, size, lambda b, low, high: samples.cut(b, low, high, size=size), lambda: True
    )


# Shares of a mean are exact for powers of two.
FIRSTS = [((16, 8), (16, 0)), ((16, 16), (16, 8)), ((32, 0), (32, 32)), ((32, 16), (0, 0)),
          ((16, 8), (16, 8))]  # fmt: skip


def to_the_bit(
    rank: int, world: int, rule: str, steps: int = 10, device: str = "cpu", engine: Any = None
) -> list[str]:
    draw = torch.Generator().manual_seed(rank)
    options: dict[str, Any] = {"device": device, "is_dense": False, "engine": engine}
    models, found = [Model(rule, **options) for _ in range(2)], []
    for model in models:
        model.pin()
    given = []
    for number in range(steps):
        size, first = FIRSTS[number % len(FIRSTS)][rank % 2]
        popular = item(draw, first, 1.0)
        rest = item(draw, size - first, 0.2)
        batch = samples.join([x for x in (popular, rest) if len(x["label"])] or [rest])
        given.append(parted(batch, first))
    losses = [trained(models[0], given, None), trained(models[1], [x.batch for x in given], None)]
    if not torch.allclose(*map(torch.tensor, losses), **TOLERANCE):
        found.append(f"losses {losses[0]} differ from {losses[1]}")
    expected = state_of(models[1])
    for name, value in state_of(models[0]).items():
        if not torch.equal(value, expected[name]):
            found.append(f"{name} differs")
    return found


@pytest.mark.parametrize("rule", ["adagrad", pytest.param("adam", marks=pytest.mark.slow)])
def test_rows_are_updated_once_from_both_parts(rule: str) -> None:
    """To the bit: the loss of a sample depends on no other, and there is no dense weight."""
    assert run(2, to_the_bit, rule) == [[], []]


@pytest.mark.slow
def test_interpreted_kernels_update_rows_once_from_both_parts() -> None:
    assert run(2, to_the_bit, "adagrad", 5, engine=gpu_rows, timeout=170) == [[], []]


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_parts_of_ranks_on_one_gpu(world: int) -> None:
    for found in run(world, to_the_bit, "adam", 20, "cuda", timeout=280):
        assert found == []
    for found, _ in run(world, in_parts_and_whole, "adam", "cuda", timeout=280):
        assert found == []


# -- when rows travel --------------------------------------------------------------------------


@contextmanager
def noted(log: list[str]) -> Iterator[None]:
    """Note what becomes of the rows of the bags."""
    expect, wait = SharedWork.expect, Arrival.wait

    def expected(self: SharedWork, *args: Any) -> None:
        log.append(f"rows of width {self.group.dim} are asked for")
        expect(self, *args)

    def waited(self: Arrival) -> Tensor:
        log.append("rows have come")
        return wait(self)

    with ExitStack() as stack:
        stack.enter_context(patch.object(SharedWork, "expect", expected))
        stack.enter_context(patch.object(Arrival, "wait", waited))
        yield


def in_order(rank: int, world: int) -> tuple[list[str], int]:
    model, draw = Model("adam"), torch.Generator().manual_seed(rank)
    model.pin()
    first = item(draw, 6 + rank, 1.0)
    batch = samples.join([first, item(draw, 10, 0.0)])
    log = model.log

    def loss(predictions: Tensor, labels: Tensor) -> Tensor:
        predictions.register_hook(lambda grad: log.append(f"backward of {len(labels)}"))
        return loss_of(predictions, labels)

    optimizer = torch.optim.SGD(model.top.parameters(), lr=0.1)
    step = hotrow.graphed(model, loss, optimizer, labels=lambda batch: batch["label"])
    with noted(log):
        for one in Ahead([parted(batch, 6 + rank)], model, ids_of, depth=None, step=step):
            step(one)
    return log, model.bags.sent_bytes()["rows"]


def test_rows_are_asked_for_before_the_first_part_and_needed_after_it() -> None:
    widths = (4, 6, 4)
    for rank, (log, sent) in enumerate(run(2, in_order)):
        size = 6 + rank
        assert log == [
            *(f"rows of width {width} are asked for" for width in widths),
            f"forward of {size}",
            f"backward of {size}",
            *["rows have come"] * 3,
            "forward of 10",
            "backward of 10",
        ]
        assert sent > 0


def missing(rank: int, world: int) -> list[Tensor]:
    """Samples of the first part look up rows that are not on every rank: they are waited for."""
    found = []
    for is_parted in (True, False):
        model, draw = Model("adam", is_dense=False), torch.Generator().manual_seed(rank)
        model.pin()
        batch = item(draw, 16, 0.3)
        trained(model, [parted(batch, 8) if is_parted else batch] * 3, None)
        found.append(state_of(model)["a"])
    return found


def test_a_first_part_waits_for_rows_that_are_not_here() -> None:
    for one, other in run(2, missing):
        assert torch.equal(one, other)


def replaced(rank: int, world: int) -> bool:
    """Other rows were pinned since the batch was sorted."""
    model, draw = Model("adam"), torch.Generator().manual_seed(rank)
    model.pin()
    batch = item(draw, 16, 1.0)
    given = parted(batch, 8)
    held = Parted(batch, 8, 16, given.cut, lambda: False)
    trained(model, [held], None)
    return model.log == ["forward of 16"]


def test_a_batch_whose_pins_have_changed_has_no_first_part() -> None:
    assert run(2, replaced) == [True, True]


def lost(rank: int, world: int) -> list[str]:
    """Replicated rows alone are read by a first part: what would be read of others is NaN."""
    model, draw = Model("adam"), torch.Generator().manual_seed(rank)
    splitter = Splitter(collections_of(model), ids_of)
    splitter.pin(model.pin())
    batch, seen = item(draw, 16, 0.5), []
    vectors_for = SharedWork.vectors_for

    def looked_at(self: SharedWork, part: Any) -> Tensor:
        vectors = vectors_for(self, part)
        if self._arrival is not None:
            is_nan = vectors.isnan().any(1)
            at = torch.zeros(len(is_nan), dtype=torch.bool)
            at[self.route.order] = True
            seen.append("others are NaN" if torch.equal(is_nan, at) else "others are read")
        return vectors

    with patch.object(SharedWork, "vectors_for", looked_at):
        trained(model, [splitter.sort(batch)().parted], None)
    return sorted(set(seen))


def test_the_first_part_reads_replicated_rows_alone() -> None:
    assert run(2, lost) == [["others are NaN"]] * 2
