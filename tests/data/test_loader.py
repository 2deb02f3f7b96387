"""Batches out of files: every sample once an epoch, in an order that a seed alone decides."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hotrow
from hotrow.data import Loader, ParquetSource
from hotrow.inputs.shuffle import Order
from samples import FEATURES, Memory, numbers_of
from stored_samples import parquet, parquet_source


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def all_of(loader: Loader, start: int = 0) -> list[list[int]]:
    return [numbers_of(batch) for batch in loader.batches(start)]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    batch_size=st.integers(1, 20),
    mixed=st.integers(1, 40),
    seed=st.one_of(st.none(), st.integers(0, 5)),
    drop_last=st.booleans(),
    jagged=st.booleans(),
    workers=st.integers(1, 3),
)
def test_every_sample_comes_once_an_epoch(
    sizes: list[int],
    batch_size: int,
    mixed: int,
    seed: int | None,
    drop_last: bool,
    jagged: bool,
    workers: int,
) -> None:
    total = sum(sizes)
    options: dict[str, Any] = {
        "batch_size": batch_size, "mixed": mixed, "seed": seed, "drop_last": drop_last,
        "workers": workers, "epochs": 2,
    }  # fmt: skip
    source = Memory(sizes, jagged=jagged)
    if drop_last and total < batch_size:
        with pytest.raises(ValueError, match=r"cannot be filled by .*lower batch_size"):
            Loader(source, **options)
        return
    loader = Loader(source, **options)
    found = all_of(loader)
    assert len(found) == len(loader) == 2 * loader.batches_per_epoch
    for epoch in range(2):
        mine = found[epoch * loader.batches_per_epoch : (epoch + 1) * loader.batches_per_epoch]
        assert all(len(batch) == batch_size for batch in mine[:-1])
        samples = joined(mine)
        wanted = total - total % batch_size if drop_last else total
        assert len(samples) == len(set(samples)) == wanted
        if seed is None:
            assert samples == list(range(wanted))
    start = len(found) * 2 // 3  # resumed, in the middle of the second epoch
    assert all_of(loader, start) == found[start:]


def test_a_seed_decides_and_every_epoch_differs() -> None:
    def order(**options: Any) -> list[int]:
        return joined(all_of(Loader(Memory([50] * 20), batch_size=100, mixed=200, **options)))

    assert order(seed=1) == order(seed=1) == order(seed=1, workers=3)
    assert order(seed=1) != order(seed=2)
    two = order(seed=1, epochs=2)
    assert two[:1000] != two[1000:]
    # As stored runs expect it: another order would not resume them.
    assert order(seed=1)[:8] == [448, 431, 673, 689, 416, 295, 400, 747]


def test_samples_meet_others_from_far_away() -> None:
    order = Order(np.full(1000, 100), mixed=10_000, seed=3)
    (first, *_) = list(order.stretches(0))
    picked = first.order()
    assert picked is not None
    assert len(set(first.blocks.tolist())) == 100
    met = first.blocks[picked // 100]
    assert np.abs(np.diff(met)).mean() > 200  # of 1,000; two at random: 333
    assert np.abs(np.diff(picked)).mean() > 2_500  # of 10,000


def test_the_order_is_spread_evenly() -> None:
    places = np.zeros((8, 8))
    for seed in range(800):
        (stretch,) = Order(np.full(8, 1), mixed=8, seed=seed).stretches(0)
        picked = stretch.order()
        assert picked is not None
        places[np.arange(8), stretch.blocks[picked]] += 1
    expected = 100.0
    chi_squared = ((places - expected) ** 2 / expected).sum()
    assert chi_squared < 49 + 4 * np.sqrt(2 * 49)


def test_an_error_is_raised_where_its_samples_would_come() -> None:
    loader = Loader(Memory([10] * 6, broken=4), batch_size=10, mixed=10, workers=2)
    batches = iter(loader)
    assert [numbers_of(next(batches))[0] for _ in range(4)] == [0, 10, 20, 30]
    with pytest.raises(ValueError, match="the disk is gone"):
        next(batches)


@pytest.mark.parametrize("jagged", [False, True])
def test_a_batch_that_is_changed_changes_no_other(jagged: bool) -> None:
    loader = Loader(Memory([50] * 20, jagged=jagged), batch_size=30, mixed=200, seed=1)
    wanted = all_of(loader)
    batches = list(loader)
    kept = [batch.clone() for batch in batches]
    for batch, expected in zip(batches, wanted, strict=True):
        assert numbers_of(batch) == expected
        sparse = batch.sparse
        parts = [sparse] if isinstance(sparse, Tensor) else [sparse.values(), sparse.offsets()]
        for tensor in (batch.dense, batch.label, *parts):
            tensor.fill_(-1)
    assert [numbers_of(batch) for batch in kept] == wanted


def test_a_clone_keeps_no_more_than_its_batch() -> None:
    (first, *_) = Loader(Memory([50] * 20), batch_size=30, mixed=200, seed=1)
    clone = first.clone()
    for batch, is_alone in ((first, False), (clone, True)):
        for tensor in (batch.dense, batch.label, batch.sparse):
            assert isinstance(tensor, Tensor)
            assert (tensor.untyped_storage().nbytes() == tensor.nbytes) == is_alone


def test_threads_end_with_the_loop() -> None:
    before = threading.active_count()
    for _ in Loader(Memory([10] * 50), batch_size=10, mixed=10, workers=3):
        break
    assert threading.active_count() == before


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.uint64, torch.tensor])
def test_numbers_of_numpy_and_torch_are_numbers(kind: Any) -> None:
    loader = Loader(
        Memory([50] * 20), batch_size=kind(100), mixed=kind(200), seed=kind(1), epochs=kind(1)
    )
    # The order of the number itself; a width of 8 or 64 bits changes nothing.
    assert all_of(loader, kind(0))[0][:4] == [448, 431, 673, 689]


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, f"{name} must be a whole number, not {value!r}")
        for name in ("batch_size", "epochs", "mixed", "seed", "workers")
        for value in (2.0, "2")
    ),
    *(
        ({name: 0}, f"{name} must be at least 1, got 0")
        for name in ("batch_size", "epochs", "mixed")
    ),
    ({"features": ["x"]}, "the data has no feature 'x'; it has a, b$"),
    ({"features": []}, "features must name one at least, and each once"),
    ({"features": ["a", "a"]}, "features must name one at least, and each once"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(Memory([10]), **{"batch_size": 5, **options})


def test_a_start_past_the_end_is_refused() -> None:
    loader = Loader(Memory([10]), batch_size=5)
    assert all_of(loader, 2) == []
    with pytest.raises(ValueError, match="start must be one of 2 batches, got 3"):
        next(loader.batches(3))


def test_a_collection_trains_on_what_is_loaded() -> None:
    tables = [hotrow.EmbeddingBagConfig(name, 6000, 4, [name]) for name in FEATURES]

    def trained(strategy: str) -> Tensor:
        embedding = hotrow.EmbeddingBagCollection(
            tables,
            hotrow.SGD(lr=0.1),
            None if strategy == "all-fast" else "30%",
            strategy=strategy,
            seed=0,
        )
        loader = Loader(Memory([10] * 30, jagged=True), batch_size=20, seed=0, epochs=2)
        for batch in hotrow.ahead(loader, embedding, ids=lambda batch: batch.sparse):
            embedding(batch.sparse).values().square().sum().backward()
        return torch.cat([embedding.state_dict()[key] for key in sorted(embedding.state_dict())])

    assert torch.equal(trained("lookahead"), trained("all-fast"))


# -- Parquet -----------------------------------------------------------------------------


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    source = parquet_source(parquet(tmp_path))
    assert source.sizes.tolist() == [25] * 4
    assert source.single == ("a", "b")
    loader = Loader(source, batch_size=30, mixed=50, seed=4, epochs=2)
    found = joined(all_of(loader))
    assert sorted(found[:100]) == sorted(found[100:]) == list(range(100))
    assert found[:100] != found[100:]


def test_parquet_without_lists_gives_a_tensor(tmp_path: Path) -> None:
    source = parquet_source(parquet(tmp_path), features=["a", "b"])
    (first, *_) = Loader(source, batch_size=30)
    assert isinstance(first.sparse, Tensor)
    assert numbers_of(first) == list(range(30))
    for files in (tmp_path / "data.parquet", str(tmp_path / "data.parquet")):
        assert ParquetSource(files, label="clicked", features=["a"]).sizes.tolist() == [25] * 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"clicked": pa.array([2] * 100)}, "column 'clicked' has 2, and a label is 0 or 1"),
        ({"a": pa.array([None] + [1] * 99)}, "row group 0: column 'a' of int64 has 1 empty values"),
        ({"list": pa.array([[1, None]] * 100)}, "column 'list' of int64 has 25 empty values"),
        ({"price": pa.array([1.0] * 99 + [float("nan")])}, "3: column 'price' has nan, and number"),
        ({"price": pa.array([1e39] * 100)}, "column 'price' has 1e.39, and numbers are finite"),
        ({"a": pa.array([-1] * 100)}, "column 'a' has -1, and ids are rows of a table, from 0 on"),
        ({"a": pa.array([2**63] * 100, pa.uint64())}, "'a' of uint64 has ids beyond 2.*63 - 1"),
        ({"list": pa.array([[1, -2]] * 100)}, "column 'list' has -2, and ids are rows of a table"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    loader = Loader(parquet_source(parquet(tmp_path, **changed)), batch_size=10)
    with pytest.raises(ValueError, match=message):
        list(loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ["a", "c"]}, "has no column 'c'; it has clicked, price, a, b, list, other"),
        ({"features": ["other"]}, "'other' has values of type string, and ids are whole numbers"),
        ({"features": ["price"]}, "column 'price' is named twice"),
        ({"features": []}, "features must name one column at least"),
        ({"features": ["price"], "dense": []}, "of type float, and ids are .* cast it to int64"),
        ({"dense": ["other"]}, "'other' has values of type string, and it is to be a number; cast"),
        ({"dense": ["list"], "features": ["a"]}, "'list' has values of type list<.* is to be a nu"),
        ({"label": "other"}, "'other' has values of type string, and the label is 0 or 1"),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parquet_source(parquet(tmp_path), **options)


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, lambda of: pa.list_(of, 2)])
@pytest.mark.parametrize("of", [pa.int8(), pa.uint64(), pa.bool_(), pa.decimal128(38, 0)])
def test_lists_of_every_form_are_read_and_missing_ones_are_empty(
    tmp_path: Path, kind: Any, of: Any
) -> None:
    lists = pa.array([[0, 1], None] * 50, pa.list_(pa.int64(), 2)).cast(kind(pa.int64()))
    source = parquet_source(parquet(tmp_path, list=lists.cast(kind(of))))
    found = source.read(np.arange(4)).jagged["list"]
    assert found.values.tolist() == [0, 1] * 50
    assert np.diff(found.offsets).tolist() == [2, 0] * 50


@pytest.mark.parametrize("of", [pa.int8(), pa.uint64(), pa.decimal128(38, 0), pa.bool_()])
def test_columns_of_every_width_are_read(tmp_path: Path, of: Any) -> None:
    values = pa.array([0, 1] * 50).cast(of)
    path = parquet(tmp_path, a=values, price=values, clicked=values)
    found = parquet_source(path, features=["a", "b"]).read(np.arange(4))
    for column in (found.ids[:, 0], found.dense[:, 0], found.label):
        assert column.tolist() == [0, 1] * 50


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path)
    source = parquet_source(path)
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)  # of the first row group; what is written at the end stays
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"data\.parquet, row group 0 cannot be read"):
        source.read(np.arange(1))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    with pytest.raises(ValueError, match=r"x\.parquet does not exist"):
        parquet_source(path)
    path.write_bytes(b"not Parquet at all")
    with pytest.raises(ValueError, match=r"x\.parquet is no whole Parquet file"):
        parquet_source(path)
    two = pa.table([pa.array([0, 1]), pa.array([1, 2]), pa.array([3, 4])], names=["y", "a", "a"])
    pq.write_table(two, path)
    with pytest.raises(ValueError, match="has 2 columns 'a': which is meant"):
        ParquetSource(path, label="y", features=["a"])


@pytest.mark.parametrize("seed", [None, 1])
def test_a_stop_reads_no_more_than_its_batches(seed: int | None) -> None:
    source = Memory([50] * 20)
    loader = Loader(source, batch_size=30, mixed=100, seed=seed, epochs=2, workers=1)
    everything = all_of(loader)
    for start, stop in ((0, 3), (2, 2), (30, 37), (33, 35), (0, None), (60, 999)):
        found = [numbers_of(batch) for batch in loader.batches(start, stop)]
        assert found == everything[start:stop]
    read: list[int] = []
    real = source.read
    source.read = lambda blocks: read.append(len(blocks)) or real(blocks)  # type: ignore[method-assign, func-returns-value]
    list(loader.batches(stop=4))
    assert sum(read) == 4  # blocks of 50: two stretches
