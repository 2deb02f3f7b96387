"""Popular samples come first, and parts of batches read and update like the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
from builders import CASES, RULES, Case, no_synchronisation, readout
from hotrow.embedding.ahead import Ahead
from hotrow.engine.split_batch import Parted, Split
from hotrow.engine.stages import LATE
from hotrow.inputs import samples
from hotrow.inputs.batch import Batch, parse
from hotrow.inputs.hotset import popular
from hotrow.systems.hotline.split import Splitter

SLOTS = 60


def static(case: Case, rule: str = "adagrad", **options: Any) -> hotrow.EmbeddingBagCollection:
    widths = {table.embedding_dim for table in case.tables}
    shares = tuple(hotrow.Share(SLOTS, buffer_rows=64, dense_map=True) for _ in widths)
    embedding = hotrow.EmbeddingBagCollection(
        case.tables,
        RULES[rule],
        hotrow.Budget(shares, window_bytes=1 << 20),
        strategy="static",
        seed=3,
        **options,
    )
    embedding.pipeline.move_in(LATE)
    return embedding


class Step:
    """Hears of splits, as hotrow.graphed's step does."""

    landing = None

    def __init__(self) -> None:
        self.heard: Split | None = None

    def split(self, split: Split) -> None:
        self.heard = split


def num_samples(batch: Any) -> int:
    return len(batch) if isinstance(batch, Tensor) else len(batch.offsets()) // len(batch.keys())


def parted(batch: Any, first: int, *, holds: bool = True) -> Parted:
    size = num_samples(batch)
    return Parted(
        batch, first, size, lambda b, low, high: samples.cut(b, low, high, size=size), lambda: holds
    )


def splits(embedding: Any, source: list[Parted]) -> Iterator[tuple[Any, Split]]:
    step = Step()
    for batch in Ahead(source, embedding, None, depth=None, step=step):
        split, step.heard = step.heard, None
        assert split is not None
        yield batch, split


def parts_of(embedding: Any, batch: Any, split: Split) -> Iterator[Any]:
    """Each part of a batch, while its rows are there."""
    for low, high in ((0, split.first), (split.first, split.size)):
        part = split.cut(batch, low, high)
        ((_, arrival),) = split.arrivals(part, low)
        embedding.pipeline.arrive(arrival)
        yield part
        embedding.pipeline.done_with(arrival)


def batches_of(case: Case, count: int) -> list[Any]:
    return [batch for batch in case.batches(count) if num_samples(batch) > 2]


def assert_same_rows(left: Any, right: Any) -> None:
    assert left.optimizer.steps == right.optimizer.steps
    for table in left.tables:
        pairs = zip(left.rows(table.name), right.rows(table.name), strict=True)
        assert all(torch.equal(found, expected) for (_, found), (_, expected) in pairs)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", CASES)
def test_parts_read_what_the_whole_reads(engine: str, name: str) -> None:
    def vectors(ids: Any) -> dict[str, Tensor]:
        return {name: vector.detach() for name, vector in embedding(ids).to_dict().items()}

    embedding = static(CASES[name])
    source = [parted(batch, num_samples(batch) // 2) for batch in batches_of(CASES[name], 4)]
    for batch, split in splits(embedding, source):
        split.wait()
        whole, found = vectors(batch), []
        for part in parts_of(embedding, batch, split):
            found.append(vectors(part))
            assert len(embedding.pipeline.planned) > 1
        for feature, expected in whole.items():
            assert torch.equal(torch.cat([vector[feature] for vector in found]), expected)


def all_of(found: Any) -> Tensor:
    return readout(found)


def first_of(found: Any) -> Tensor:
    loss: Tensor = found["f"].tanh().sum()
    return loss


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("name", "rule", "loss"),
    [
        *((name, "adam", all_of) for name in CASES),
        ("shared", "adamw", first_of),  # features without a gradient
        ("multi-hot", "adamw", first_of),
    ],
)
def test_rows_are_updated_once_from_both_parts(
    engine: str, name: str, rule: str, loss: Callable[[Any], Tensor]
) -> None:
    """To the bit: the readout of a sample depends on no other, so bags have the same gradients."""
    batches = batches_of(CASES[name], 4)
    whole, embedding = static(CASES[name], rule), static(CASES[name], rule)
    start = embedding.state_dict()
    for batch in hotrow.ahead(batches, whole):
        loss(whole(batch)).backward()
    source = [parted(batch, 1 + place % 2) for place, batch in enumerate(batches)]
    for batch, split in splits(embedding, source):
        with embedding.accumulate():
            for part in parts_of(embedding, batch, split):
                loss(embedding(part)).backward()
                split.wait()
    assert_same_rows(embedding, whole)
    if loss is first_of:
        assert embedding.optimizer.steps == [len(batches), 0]
        key = "embedding_bags.b.weight"
        assert torch.equal(embedding.state_dict()[key], start[key])


def test_a_part_without_gradients_adds_nothing(engine: str) -> None:
    case = CASES["one-hot"]
    batch = case.batches(1)[0]
    alone, embedding = static(case), static(case)
    half = len(batch) // 2
    for ids in hotrow.ahead([batch], alone):
        found = alone(ids).to_dict()
        columns = tuple(found)
        rest = Batch(torch.empty(0), None, columns, len(batch) - half)
        readout(hotrow.Embedded(columns, {k: v[half:] for k, v in found.items()}, rest)).backward()
    for ids, split in splits(embedding, [parted(batch, half)]):
        parts = parts_of(embedding, ids, split)
        next(parts)
        part = next(parts)
        with embedding.accumulate():
            readout(embedding(part)).backward()
    assert_same_rows(embedding, alone)


@pytest.mark.parametrize(("first", "holds"), [(0, True), (1, False)])
def test_a_batch_whose_first_rows_may_be_missing_comes_whole(first: int, holds: bool) -> None:
    case, step = CASES["one-hot"], Step()
    embedding = static(case)
    (batch,) = case.batches(1)
    source = [parted(batch, first, holds=holds)]
    for ids in Ahead(source, embedding, None, depth=None, step=step):
        assert torch.equal(ids, batch)
    assert step.heard is None


def test_without_a_step_that_knows_parts_batches_come_whole() -> None:
    case = CASES["one-hot"]
    (batch,) = case.batches(1)
    for ids in hotrow.ahead([parted(batch, 1)], static(case)):
        assert torch.equal(ids, batch)


# -- order ---------------------------------------------------------------------------------


class Pinned:
    """A collection that says which rows are pinned."""

    def __init__(self, case: Case, hot: dict[str, Tensor], device: str = "cpu") -> None:
        self.embedding = static(case, device=device)
        self.splitter = Splitter({"": self.embedding}, lambda batch: batch["ids"], grain=4)
        self.embedding.reserve(8)
        self.hot = self.embedding.pin_rows(hot)
        self.splitter.pin({"": self.hot})


def items(case: Case, count: int, size: int = 11) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows = [t.num_embeddings for t in case.tables for _ in t.feature_names]
    return [
        {
            "ids": torch.stack(
                [(torch.rand(size, generator=generator) ** 3 * n).long() for n in rows], 1
            ),
            "number": torch.arange(size),
            "name": "kept as it is",
        }
        for _ in range(count)
    ]


HOT = {"a": torch.arange(12), "b": torch.arange(8)}


def test_popular_samples_come_first_and_the_order_is_kept_otherwise() -> None:
    case = CASES["one-hot"]
    pinned = Pinned(case, HOT)
    sizes = set()
    for batch in items(case, 8):
        is_popular = popular(parse(batch["ids"], pinned.embedding.features, None), pinned.hot)
        found = pinned.splitter.sort(batch)()
        assert found.popular == int(is_popular.sum()) == found.by_collection[""]
        order = [*is_popular.nonzero().squeeze(1), *(~is_popular).nonzero().squeeze(1)]
        expected = batch["number"] if found.popular < 2 else torch.stack(order)
        assert torch.equal(found.parted.batch["number"], expected)
        assert torch.equal(found.parted.batch["ids"], batch["ids"][expected])
        assert found.parted.batch["name"] == "kept as it is"
        assert found.parted.size == 11
        assert found.popular - 2 < found.parted.first <= found.popular
        assert found.parted.first % 2 == 0  # a quarter of 11
        sizes.add(found.parted.first)
    assert len(sizes) > 1


def test_jagged_ids_are_put_in_order_with_all_their_lookups() -> None:
    case = CASES["multi-hot"]
    pinned = Pinned(case, HOT)
    orders = set()
    for ids in case.batches(12):
        size = num_samples(ids)
        batch = {"ids": ids, "number": torch.arange(size)}
        found = pinned.splitter.sort(batch)().parted
        order = found.batch["number"]
        expected = samples.take(ids, order, size=size)
        assert torch.equal(found.batch["ids"].values(), expected.values())
        assert torch.equal(found.batch["ids"].weights_or_none(), expected.weights_or_none())
        orders.add(tuple(order.tolist()) != tuple(range(size)))
        is_popular = popular(parse(found.batch["ids"], pinned.embedding.features, None), pinned.hot)
        assert bool(is_popular[: found.first].all())
    assert True in orders


@dataclass
class Foreign:
    """What hotrow.inputs.samples cannot cut: one tensor is not the samples'."""

    ids: Tensor
    prices: Tensor

    def taken(self, places: Tensor) -> Foreign:
        return replace(self, ids=self.ids[places])


def test_a_batch_of_any_kind_is_taken_apart_by_take() -> None:
    case = CASES["one-hot"]
    pinned = Pinned(case, HOT)
    batch = Foreign(items(case, 1)[0]["ids"], torch.rand(3))
    ids = {"": pinned.embedding}
    plain = Splitter(ids, lambda b: b.ids, grain=4)
    plain.pin({"": pinned.hot})
    with pytest.raises(ValueError, match="give take="):
        plain.sort(batch)
    splitter = Splitter(ids, lambda b: b.ids, take=Foreign.taken, grain=4)
    splitter.pin({"": pinned.hot})
    parted = splitter.sort(batch)().parted
    assert 0 < parted.first < parted.size
    rest = parted.cut(parted.batch, parted.first, parted.size)
    assert torch.equal(rest.ids, parted.batch.ids[parted.first :])
    assert rest.prices is batch.prices


def test_a_sample_is_popular_if_all_collections_say_so() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = static(CASES["one-hot"]), static(CASES["shared"])

    model = Two()
    named = {"user": model.user, "item": model.item}
    splitter = Splitter(named, lambda batch: batch, grain=20)
    hot = {"user": HOT, "item": {"a": torch.arange(30), "b": torch.arange(10)}}
    for name, each in named.items():
        each.reserve(4)
        hot[name] = each.pin_rows(hot[name])  # type: ignore[assignment]
    splitter.pin(hot)  # type: ignore[arg-type]
    batch = {"user": items(CASES["one-hot"], 1, 20)[0], "item": items(CASES["shared"], 1, 20)[0]}
    ids = {name: each["ids"] for name, each in batch.items()}
    found = splitter.sort(ids)()
    masks = [
        popular(parse(ids[name], named[name].features, None), hot[name])  # type: ignore[arg-type]
        for name in named
    ]
    assert found.by_collection == {n: int(m.sum()) for n, m in zip(named, masks, strict=True)}
    assert found.popular == int((masks[0] & masks[1]).sum()) == found.parted.first
    assert 0 < found.popular < min(found.by_collection.values())


def test_pins_that_changed_end_the_split() -> None:
    case = CASES["one-hot"]
    pinned = Pinned(case, HOT)
    found = pinned.splitter.sort(items(case, 1)[0])()
    assert found.parted.holds()
    pinned.embedding.pin_rows(HOT)
    assert not found.parted.holds()


def test_a_size_less_is_taken_rather_than_one_that_did_not_come_yet() -> None:
    splitter = Splitter({"": static(CASES["one-hot"])}, None, grain=4)
    splitter._minds_new_sizes = True  # as on a GPU
    first_parts = [splitter._first_of(popular, 40) for popular in (12, 25, 29, 31, 9, 38, 21)]
    assert first_parts == [10, 10, 10, 30, 0, 30, 10]
    other = Splitter({"": static(CASES["one-hot"])}, None, grain=4)
    other._minds_new_sizes = True
    assert [other._first_of(popular, 40) for popular in (3, 12, 25)] == [0, 10, 10]  # none is none


@pytest.mark.parametrize(
    ("dtype", "ids", "is_computed"),
    [
        (torch.int64, lambda batch: batch, False),
        (torch.int64, lambda batch: batch[:4], False),  # the same memory
        (torch.int64, lambda batch: batch.clone(), True),
        (torch.int32, lambda batch: batch, True),  # plans read int64
    ],
)
def test_plans_wait_for_ids_computed_of_a_batch_that_another_lane_has_made(
    dtype: torch.dtype, ids: Any, is_computed: bool
) -> None:
    embedding = static(CASES["one-hot"])
    batch = CASES["one-hot"].batches(1)[0].to(dtype)
    source = iter(Ahead([batch], embedding, ids, depth=None))
    reader, waits = source._reader, list[tuple[str, str]]()
    assert reader is not None
    made: Any = "sorted"

    class Noting:
        device = reader.lanes.device

        def mark(self, name: str) -> str:
            return name

        def after(self, lane: str, mark: str) -> None:
            waits.append((lane, mark))

    lanes, reader.lanes = reader.lanes, Noting()  # type: ignore[assignment]
    reader._wait_for(batch, [(embedding, embedding.pipeline.prepare(ids(batch)))], made)
    reader.lanes = lanes
    expected = [("plan", "sorted"), (reader.lane, "sorted")]
    assert waits == [*expected, *([("plan", "train")] if is_computed else [])]
    source.close()


@pytest.mark.gpu
def test_a_gpu_gives_the_same_order_without_being_waited_for() -> None:
    case = CASES["one-hot"]
    there, here = Pinned(case, HOT, "cuda"), Pinned(case, HOT)
    batches = [samples.pinned({k: v for k, v in b.items() if k != "name"}) for b in items(case, 6)]
    for _ in range(2):
        there.splitter.sort(batches[0])()  # brings what it knows of pins there, and is captured
    with no_synchronisation():
        waiting = [there.splitter.sort(each) for each in batches]
    for outcome, batch in zip(waiting, batches, strict=True):
        found, expected = outcome(), here.splitter.sort(batch)()
        assert found.popular == expected.popular
        assert found.parted.first == expected.parted.first
        if found.parted.first:
            for name in batch:
                assert found.parted.batch[name].is_cuda
                assert torch.equal(found.parted.batch[name].cpu(), expected.parted.batch[name])
