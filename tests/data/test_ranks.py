"""Parts of batches: joined in rank order, they are the batches of a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hotrow.inputs.rank_part
from clicks import taobao_lines, write
from hotrow.data import (
    Loader,
    SequenceLoader,
    SyntheticClicks,
    SyntheticConfig,
    SyntheticSequences,
)
from hotrow.data.loader import BatchReader
from hotrow.data.ranks import RankPart
from hotrow.data.sources import Source, SubsetSource
from hotrow.inputs import samples
from hotrow.inputs.rank_part import HeldBatches, whole_batches
from hotrow.inputs.tree import tensors_in
from preparing import prepared as prepare
from samples import Memory, numbers_of
from stored_samples import parquet, parquet_source, prepared

RANKS = (1, 2, 3, 4, 7)


def joined(by_rank: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """Yield the batches that the parts of all ranks are."""
    for parts in zip(*by_rank, strict=True):
        sizes = [len(part) for part in parts]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        yield samples.join(parts)


def assert_same_batches(found: Iterable[Any], expected: Iterable[Any]) -> None:
    for left, right in zip(found, expected, strict=True):
        pairs = zip(tensors_in(left), tensors_in(right), strict=True)
        for one, other in pairs:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("size", [0, 1, 3, 7, 8, 100])
def test_parts_follow_each_other_and_differ_by_one_sample(size: int, ranks: int) -> None:
    parts = [RankPart(rank, ranks).of(size) for rank in range(ranks)]
    assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])]
    assert parts[-1][1] == size
    sizes = [last - first for first, last in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    batch_size=st.integers(1, 20),
    mixed=st.integers(1, 40),
    seed=st.one_of(st.none(), st.integers(0, 5)),
    drop_last=st.booleans(),
    jagged=st.booleans(),
    ranks=st.sampled_from(RANKS),
    workers=st.integers(1, 3),
)
def test_parts_are_the_batches_of_one_process(ranks: int, workers: int, **options: Any) -> None:
    source = Memory(options.pop("sizes"), jagged=options.pop("jagged"))
    if options["drop_last"] and source.sizes.sum() < options["batch_size"]:
        options["drop_last"] = False
    loader = partial(Loader, source, workers=workers, epochs=2, **options)
    whole = loader()
    parts = [loader(rank=rank, ranks=ranks) for rank in range(ranks)]
    assert {len(part) for part in parts} == {len(whole)}
    assert {part.samples for part in parts} == {whole.samples}
    assert_same_batches(joined(parts), whole)
    # A run that was stopped goes on with another number of ranks.
    start = len(whole) * 2 // 3
    fewer = [loader(rank=rank, ranks=3).batches(start) for rank in range(3)]
    assert_same_batches(joined(fewer), whole.batches(start))


# -- Every source ------------------------------------------------------------------------

SOURCES: dict[str, Callable[[Path], Source]] = {
    "memory": lambda folder: Memory([25] * 4, jagged=True),
    "prepared": lambda folder: prepared(folder / "prepared", [40, 9, 51]),
    "parquet": lambda folder: parquet_source(parquet(folder)),
    "subset of memory": lambda folder: subset(Memory([25] * 4, jagged=True)),
    "subset of prepared": lambda folder: subset(prepared(folder / "prepared", [40, 9, 51])),
}


def subset(source: Any) -> SubsetSource:
    numbers = np.flatnonzero(np.arange(100) % 7 % 3 != 0)
    return SubsetSource(source, numbers[(numbers < 50) | (numbers >= 75)])  # a block has none


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_is_read_in_parts(
    source: str, seed: int | None, ranks: int, tmp_path: Path
) -> None:
    loader = partial(Loader, SOURCES[source](tmp_path), batch_size=11, mixed=30, seed=seed)
    parts = [loader(rank=rank, ranks=ranks) for rank in range(ranks)]
    assert_same_batches(joined(parts), loader())
    one = partial(loader, features=["b"], drop_last=True, epochs=2)
    parts = [one(rank=rank, ranks=ranks) for rank in range(ranks)]
    assert_same_batches(joined(parts), one())


@pytest.mark.parametrize("ranks", RANKS)
def test_sets_of_samples_are_read_in_parts(ranks: int, tmp_path: Path) -> None:
    numbers = np.flatnonzero(np.arange(100) % 3 != 0)
    loader = partial(
        Loader, prepared(tmp_path / "out", [40, 9, 51]), batch_size=7, mixed=20, seed=1
    )

    def among(reader: BatchReader[Any]) -> BatchReader[Any]:
        list(reader.batches(stop=1))  # what a reader keeps must not be its subset's
        chosen = reader.among(numbers)
        assert chosen is not None
        return chosen

    parts = [among(loader(rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert_same_batches(joined(parts), among(loader()))


def test_sequences_are_read_in_parts(tmp_path: Path) -> None:
    path = write(tmp_path / "UserBehavior.csv", taobao_lines(30), separator=",")
    data = prepare("taobao", tmp_path / "out", path, seed=3)
    past = {"user": None, "item": "history_item", "category": "history_category"}
    loader = partial(
        SequenceLoader,
        data,
        steps=5,
        histories=past,
        padding=data.table_rows,
        batch_size=9,
        mixed=20,
        seed=2,
    )
    assert len(loader()) > 1
    for ranks in RANKS:
        parts = [loader(rank=rank, ranks=ranks) for rank in range(ranks)]
        assert_same_batches(joined(parts), loader())


GENERATED: dict[str, Callable[[SyntheticConfig], SyntheticClicks | SyntheticSequences]] = {
    "clicks": SyntheticClicks,
    "sequences": partial(SyntheticSequences, steps=3, constant=("cat_1",)),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("kind", "lookups"), [("clicks", 1), ("clicks", (2, 1)), ("sequences", 1)])
def test_generated_batches_come_in_parts(kind: str, lookups: Any, ranks: int) -> None:
    config = SyntheticConfig(rows=(100, 7), lookups=lookups, batch_size=6, num_dense=2, seed=3)
    drawn = GENERATED[kind](config)
    parts = [drawn.batches(2, 5, rank=rank, ranks=ranks) for rank in range(ranks)]
    expected = list(map(drawn.batch, range(2, 5)))
    assert_same_batches(joined(parts), expected)
    assert_same_batches(drawn.batches(2, 5), expected)


# -- Whole batches, for what decides about all samples -----------------------------------


def test_loaders_of_parts_give_whole_batches_too(tmp_path: Path) -> None:
    loader = partial(Loader, prepared(tmp_path / "out", [40, 9, 51]), batch_size=7, seed=1)
    of_rank = loader(rank=1, ranks=3, epochs=2)
    expected = list(loader(epochs=2))
    whole = of_rank.whole_batches()
    assert_same_batches(whole, expected)
    assert_same_batches(whole, expected)  # again
    assert len(whole) == len(of_rank)
    numbers = np.arange(0, 100, 3)
    chosen, all_of_them = of_rank.whole_batches().among(numbers), loader(epochs=2).among(numbers)
    assert chosen is not None
    assert all_of_them is not None
    assert_same_batches(chosen, all_of_them)
    # A rank that has read some of its parts reads the others whole.
    parts = of_rank.batches(start=4)
    assert [len(next(parts)) for _ in range(3)] == [2, 2, 2]
    assert_same_batches(whole_batches(parts), expected[7:])


@pytest.mark.parametrize("kind", GENERATED)
def test_generated_parts_can_be_read_whole(kind: str) -> None:
    config = SyntheticConfig(rows=(100, 7), batch_size=6, num_dense=2, seed=3)
    drawn = GENERATED[kind](config)
    parts = drawn.batches(2, 7, rank=1, ranks=4)
    assert len(next(parts)) == 2
    assert_same_batches(whole_batches(parts), [drawn.batch(k) for k in range(3, 7)])


def test_batches_in_memory_are_read_in_parts_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = SyntheticClicks(SyntheticConfig(rows=(9,), batch_size=5, num_dense=1))
    batches = [drawn.batch(k) for k in range(3)]
    held = HeldBatches(batches)
    assert_same_batches(held, batches)  # of one rank
    monkeypatch.setattr(hotrow.inputs.rank_part, "current_part", lambda: RankPart(1, 2))
    for _ in range(2):
        assert_same_batches(held, [RankPart(1, 2).cut(batch) for batch in batches])
    assert whole_batches(held) is batches
    assert len(held) == 3
    assert whole_batches(batches) is batches


# -- What a rank reads -------------------------------------------------------------------


def test_a_batch_may_be_smaller_than_the_number_of_ranks() -> None:
    batches = [
        list(Loader(Memory([5]), batch_size=2, rank=rank, ranks=4, epochs=2)) for rank in range(4)
    ]
    sizes = [[len(batch) for batch in of_rank] for of_rank in batches]
    assert sizes == [[1] * 6, [1, 1, 0] * 2, [0] * 6, [0] * 6]
    for batch in batches[3]:
        assert batch.dense.shape == (0, 2)
        assert batch.sparse.shape == (0, 2)
        assert batch.label.shape == (0,)


def test_a_rank_reads_its_samples_alone_where_the_source_can(tmp_path: Path) -> None:
    source = prepared(tmp_path / "out", [400, 90, 510])
    read: list[int] = []
    real = source.take

    def take(numbers: Any) -> Any:
        assert (np.diff(numbers) > 0).all()
        read.extend(numbers.tolist())
        return real(numbers)

    source.take = take  # type: ignore[method-assign]
    source.read = lambda blocks: pytest.fail("blocks were read")  # type: ignore[method-assign]
    found = []
    for batch in Loader(source, batch_size=100, mixed=300, seed=1, rank=1, ranks=4, workers=1):
        assert len(batch) == 25
        found += numbers_of(batch, (1 << 33) + 1)
    assert sorted(read) == sorted(found)
    assert len(found) == 250


def test_blocks_without_a_sample_of_the_rank_are_not_read() -> None:
    source, read = Memory([10] * 20), list[int]()
    real = source.read

    def blocks_read(blocks: Any) -> Any:
        read.extend(blocks.tolist())
        return real(blocks)

    source.read = blocks_read  # type: ignore[method-assign]
    list(Loader(source, batch_size=100, mixed=200, rank=1, ranks=4, workers=1))
    assert read == [2, 3, 4, 12, 13, 14]  # samples 25 to 49 of each batch


def test_an_error_is_raised_on_the_ranks_that_read_it() -> None:
    def found(rank: int) -> list[int]:
        source = Memory([10] * 6, broken=4)
        loader = Loader(source, batch_size=20, mixed=20, rank=rank, ranks=2)
        return [numbers_of(batch)[0] for batch in loader]

    assert found(1) == [10, 30, 50]
    with pytest.raises(ValueError, match="the disk is gone"):
        found(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 1}, "give both rank and ranks, or neither; got rank=1, ranks=None"),
        ({"ranks": 2}, "give both rank and ranks, or neither; got rank=None, ranks=2"),
        ({"rank": 2, "ranks": 2}, "rank must be below ranks, 2, got 2"),
        ({"rank": -1, "ranks": 2}, "rank must be at least 0, got -1"),
        ({"rank": 0, "ranks": 0}, "ranks must be at least 1, got 0"),
        ({"rank": 0.0, "ranks": 2}, "rank must be a whole number, not 0.0"),
    ],
)
def test_ranks_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(Memory([10]), batch_size=5, **options)
    with pytest.raises(ValueError, match=message):
        SyntheticClicks(SyntheticConfig(rows=(9,))).batches(0, 1, **options)
