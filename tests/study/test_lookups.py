"""Traces out of folders, Parquet files and runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import hotrow
from clicks import taobao_lines, write
from commands import succeeds
from hotrow.data.prepared import Prepared
from hotrow.run.config import load
from hotrow.run.source import open_samples
from hotrow.study.lookups import NO_ROW, LookupBatch, OfFolder, OfParquet, OfRun, _IdSpace
from hotrow.study.profiling import profile_lookups
from hotrow.study.rank_popularity import Popularities
from hotrow.study.rank_traffic import RankTables, draw_exchange


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lists beside single values, and a table that two columns read."""
    draw = np.random.default_rng(0)
    columns = {
        "label": draw.integers(0, 2, 300),
        "shop": [f"s{number}" for number in draw.integers(0, 9, 300)],
        "item": draw.integers(0, 50, 300),
        "seen": [draw.integers(0, 50, size).tolist() for size in draw.integers(0, 4, 300)],
    }
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet", row_group_size=70)
    (tmp_path / "columns.toml").write_text(
        'label = "label"\ncategories = ["shop", "item", "seen"]\n[tables]\nseen = "item"\n'
    )
    columns_file = ["--columns", tmp_path / "columns.toml", "--out", tmp_path / "out"]
    succeeds("prepare", "parquet", tmp_path / "clicks.parquet", *columns_file)
    return tmp_path


def test_ranks_are_computed_from_the_counts_of_a_folder(folder: Path) -> None:
    """Rows of a folder are looked up as often as its training split counted them."""
    given = ["data.kind=prepared", f"data.folder={folder / 'out'}", "data.batch_size=16"]
    config = load(overrides=given)
    trace = OfRun(config.data)
    found = trace.popularities()
    data = Prepared(folder / "out")
    for name, rows in data.table_rows.items():
        popularity, counts = found[name], torch.from_numpy(data.counts(name).astype(np.int64))
        assert popularity.lookups == counts.sum() / (data.samples("train") / 16)
        hottest = popularity.hottest(rows)
        assert counts[hottest].tolist() == sorted(counts[counts > 0].tolist(), reverse=True)
        assert popularity.law.num_ranks == len(hottest)
    tables = RankTables(config, trace)
    drawn = draw_exchange(tables, 4, batches=20, warm_up=4)
    computed = Popularities(tables).exchange(4, batches=20, warm_up=4)
    assert computed.unique_rows == pytest.approx(drawn.unique_rows, rel=0.03)
    assert computed.plain.sent_bytes == pytest.approx(drawn.plain.sent_bytes, rel=0.03)


def test_a_folder_is_read_as_its_manifest_has_counted_it(folder: Path) -> None:
    data = Prepared(folder / "out")
    lookups = OfFolder(folder / "out", batch_size=64)
    found = profile_lookups(lookups)
    assert found.profile.samples == data.samples("train")
    assert found.profile.batches == lookups.num_batches == -(-found.profile.samples // 64)
    for table in data.table_rows:
        rows, counts = found.counts[table]
        assert rows.tolist() == np.flatnonzero(data.counts(table)).tolist()
        assert counts.tolist() == data.counts(table)[rows].tolist()
    held_back = OfFolder(folder / "out", split="test", batch_size=64)
    assert sum(batch.samples for batch in held_back.batches()) == data.samples("test")
    assert OfFolder(folder / "out", batch_size=64, batches=2).num_batches == 2
    overrides = ["data.kind=prepared", f"data.folder={folder / 'out'}", "data.batch_size=64"]
    run = OfRun(load(overrides=overrides).data)
    assert (run.num_batches, run.rows) == (data.samples("train") // 64, data.table_rows)


def test_a_parquet_file_has_a_row_for_every_value(folder: Path) -> None:
    lookups = OfParquet(
        folder / "clicks.parquet",
        categories=["shop", "item", "seen"],
        tables={"seen": "item"},
        batch_size=64,
    )
    table = pq.read_table(folder / "clicks.parquet")
    items = Counter(table["item"].to_pylist())
    items.update(item for each in table["seen"].to_pylist() for item in each)
    shops = Counter(table["shop"].to_pylist())
    assert lookups.rows == {"shop": len(shops), "item": len(items)}
    found = profile_lookups(lookups)
    assert found.profile.samples == 300
    assert [each.batches for each in (found.profile, lookups) if hasattr(each, "samples")] == [5]
    for name, counts in (("shop", shops), ("item", items)):
        assert sorted(found.counts[name][1].tolist()) == sorted(counts.values())
    sizes = [batch.samples for batch in lookups.batches()]
    assert sizes == [64, 64, 64, 64, 44]
    # A batch has the samples of its place: of the first, all lists and their lengths.
    first = next(lookups.batches())
    assert first.lengths is not None
    assert first.lengths[2].tolist() == [len(each) for each in table["seen"].to_pylist()[:64]]
    again = OfParquet(folder / "clicks.parquet", categories=["shop"], batch_size=64, batches=2)
    assert [batch.samples for batch in again.batches()] == [64, 64]


def test_times_make_periods(tmp_path: Path) -> None:
    seconds = np.array([100, 150, 199, 200, 420, 430])
    stamps = pa.array(seconds * 1000, pa.timestamp("ms"))
    pq.write_table(pa.table({"time": stamps, "item": [0] * 6}), tmp_path / "a.parquet")
    lookups = OfParquet(
        tmp_path / "a.parquet", categories=["item"], batch_size=4, time="time", period=100
    )
    periods = [batch.periods for batch in lookups.batches()]
    assert [each.tolist() for each in periods if each is not None] == [[0, 0, 0, 1], [3, 3]]
    pq.write_table(pa.table({"time": [5, 200, 5], "item": [0] * 3}), tmp_path / "b.parquet")
    unsorted = OfParquet(
        tmp_path / "b.parquet", categories=["item"], batch_size=4, time="time", period=100
    )
    with pytest.raises(ValueError, match="not sorted by 'time'"):
        list(unsorted.batches())
    for times in ([1, None, 3], [1.0, float("nan"), 3.0]):
        pq.write_table(pa.table({"time": times, "item": [0] * 3}), tmp_path / "c.parquet")
        gaps = OfParquet(tmp_path / "c.parquet", categories=["item"], batch_size=4, time="time")
        with pytest.raises(ValueError, match=r"c.parquet: column 'time'.* has 1 empty value"):
            list(gaps.batches())


def test_columns_that_cannot_be_ids_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"price": [0.5], "item": [1]}), tmp_path / "a.parquet")
    for name, message in (
        ("price", "column 'price' of double cannot be a category"),
        ("shop", "has no column 'shop'; it has price, item"),
    ):
        with pytest.raises(ValueError, match=message):
            OfParquet(tmp_path / "a.parquet", categories=[name], batch_size=4)
    (tmp_path / "c.parquet").write_text("no")
    for name in ("b.parquet", "c.parquet"):
        with pytest.raises(ValueError, match=r"does not exist|is no whole Parquet file"):
            OfParquet(tmp_path / name, categories=["item"], batch_size=4)


def test_a_column_without_any_value_is_a_table_without_rows(tmp_path: Path) -> None:
    columns = {"seen": pa.array([[], None, []], pa.list_(pa.int64())), "item": pa.array([1, 2, 2])}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = profile_lookups(
        OfParquet(tmp_path / "a.parquet", categories=["seen", "item"], batch_size=2)
    ).profile
    assert (found.table("seen").rows, found.table("seen").accesses) == (0, 0)
    assert np.isnan(found.table("seen").zipf.skew)
    assert found.total.accesses == 3
    with pytest.raises(ValueError, match="has no value in seen"):
        OfParquet(tmp_path / "a.parquet", categories=["seen"], batch_size=2)


RUNS = [
    ["data.batch_size=32", "data.samples=320"],
    ["data.batch_size=32", "data.samples=320", "data.lookups=[1, 1, 3, 1, 1, 1, 1, 2]"],
    ["model.kind=tbsm", "data.batch_size=32", "data.samples=320"],
]


@pytest.mark.parametrize("settings", RUNS)
def test_a_run_looks_up_what_its_batches_have(settings: list[str]) -> None:
    config = load(overrides=settings)
    lookups = OfRun(config.data, steps=config.model.num_steps, batches=11)
    read = open_samples(config.data, pin_memory=False, steps=config.model.num_steps)
    bases = np.cumsum([0, *lookups.rows.values()])
    assert lookups.num_rows == bases[-1]
    for mine, batch in zip(lookups.batches(), read.batches(11), strict=True):
        kjt = batch.sparse
        if isinstance(kjt, torch.Tensor):
            wanted = [*kjt.numpy().T]
        else:
            wanted = np.split(kjt.values().numpy(), kjt.offsets()[32:-1:32].numpy())
        for place, (ids, rows) in enumerate(zip(wanted, lookups.rows.values(), strict=True)):
            mine_too = mine.ids[(mine.ids >= bases[place]) & (mine.ids < bases[place + 1])]
            assert sorted(mine_too - bases[place]) == sorted(ids[ids < rows])
        assert len(mine.rows) == sum(mine.ids != NO_ROW)
        assert mine.samples == 32


def test_epochs_of_generated_data_repeat_only_where_asked() -> None:
    data = load(overrides=RUNS[0]).data
    (first, *_, again), (_, *_, new) = (
        [batch.ids.tolist() for batch in OfRun(data, batches=11, repeats=each).batches()]
        for each in (True, False)
    )
    assert first == again != new


def test_sequences_of_a_folder_are_padded_with_nothing(tmp_path: Path) -> None:
    write(tmp_path / "UserBehavior.csv", taobao_lines(60), separator=",")
    succeeds("prepare", "taobao", tmp_path / "UserBehavior.csv", "--out", tmp_path / "out")
    overrides = ["model.kind=tbsm", "data.kind=prepared", f"data.folder={tmp_path / 'out'}"]
    config = load(overrides=[*overrides, "data.batch_size=16"])
    lookups = OfRun(config.data, steps=config.model.num_steps)
    batch = next(lookups.batches())
    assert (batch.ids == NO_ROW).any()
    assert batch.ids.max() < sum(lookups.rows.values())
    assert profile_lookups(lookups).profile.total.accesses > 0


def test_the_largest_value_of_a_sample_may_be_that_of_none() -> None:
    lengths = np.array([[2, 0, 0], [1, 0, 1]])
    batch = LookupBatch(np.array([4, 5, 1, 2]), 3, lengths)
    assert batch.per_sample(np.array([7, 9, 8, 3])).tolist() == [9, -1, 3]
    assert batch.ids_of(1, 3).tolist() == [2]


def test_an_id_that_its_table_has_not_names_its_feature() -> None:
    space = _IdSpace({"a": 3, "b": 5}, {"x": "a", "y": "b"})
    assert space.batch(torch.tensor([[2, 4]]), 1).ids.tolist() == [2, 7]
    lists = hotrow.KeyedJaggedTensor(["x", "y"], torch.tensor([2, 6]), lengths=torch.tensor([1, 1]))
    for wrong, said in (
        (torch.tensor([[2, 0], [3, 0]]), "feature 'x' has the id 3; its table has 3 rows"),
        (torch.tensor([[2, -1]]), "feature 'y' has the id -1; its table has 5 rows"),
        (lists, "feature 'y' has the id 6; its table has 5 rows"),
    ):
        with pytest.raises(ValueError, match=said):
            space.batch(wrong, 1)
