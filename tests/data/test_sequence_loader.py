"""Batches of sequences out of prepared data: every step is where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from clicks import taobao_lines, write
from hotrow.data import Loader, ParquetSource, PreparedSource, SequenceBatch, SequenceLoader
from hotrow.data.loader import check_histories, histories_of
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.format import Feature, Schema
from preparing import prepared

PAST = {"user": None, "item": "history_item", "category": "history_category"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("taobao")
    path = write(folder / "UserBehavior.csv", taobao_lines(200), separator=",")
    return prepared("taobao", folder / "out", path, seed=3)


def loader(data: Prepared, steps: int = 20, **options: Any) -> SequenceLoader:
    options = {"batch_size": 32, "mixed": 50, "workers": 2, **options}
    padding = data.table_rows
    return SequenceLoader(data, steps=steps, histories=PAST, padding=padding, **options)


def one_by_one(data: Prepared, steps: int) -> list[dict[str, Any]]:
    """The training split in Python's own words."""
    found = []
    for shard in data.shards("train"):
        for i in range(shard.samples):
            sample: dict[str, Any] = {
                "label": float(shard.label[i]),
                "gap": float(shard.dense[i, 0]),
            }
            for place, name in enumerate(PAST):
                target = int(shard.ids[i, place])
                lists = shard.jagged["history_item" if name == "user" else PAST[name]]
                past = lists.values[lists.offsets[i] : lists.offsets[i + 1]].tolist()[-steps:]
                past = [target] * len(past) if name == "user" else past
                padding = [data.table_rows[name]] * (steps - len(past))
                sample[name] = [*padding, *past, target]
                sample["length"] = len(past)
            found.append(sample)
    return found


def samples_of(batch: SequenceBatch, steps: int) -> list[dict[str, Any]]:
    size = len(batch)
    ids = batch.sparse.values().view(3, size, steps + 1)
    assert batch.sparse.keys() == list(PAST)
    assert batch.sparse.offsets().tolist() == list(range(0, ids.numel() + 1, steps + 1))
    assert batch.dense.shape == (size, steps + 1, 2)
    place = torch.arange(steps + 1) / (steps + 1)
    torch.testing.assert_close(batch.dense[:, :, 0], place.expand(size, -1))
    assert not batch.dense[:, :-1, 1].any()
    return [
        {
            "label": float(batch.label[i]),
            "gap": float(batch.dense[i, -1, 1]),
            "length": int(batch.lengths[i]),
            **{name: ids[place, i].tolist() for place, name in enumerate(PAST)},
        }
        for i in range(size)
    ]


@pytest.mark.parametrize("steps", [20, 3, 25])
def test_every_sample_is_what_the_shards_hold(data: Prepared, steps: int) -> None:
    expected = one_by_one(data, steps)
    assert {each["length"] for each in expected} >= {1, min(steps, 20)}
    assert any(each["length"] < steps for each in expected)
    found = [each for batch in loader(data, steps) for each in samples_of(batch, steps)]
    assert found == expected


def test_a_seed_gives_the_order_that_clicks_have(data: Prepared) -> None:
    mine = loader(data, seed=5, epochs=2)
    clicks = Loader(data, features=["item"], batch_size=32, mixed=50, seed=5, epochs=2)
    targets = [batch.sparse.values().view(3, -1, 21)[1, :, -1] for batch in mine]
    assert len(targets) == len(clicks)
    for target, batch in zip(targets, clicks, strict=True):
        assert torch.equal(target, batch.sparse[:, 0])
    rest = [batch.label for batch in mine.batches(start=4)]
    whole = [batch.label for batch in mine][4:]
    assert all(torch.equal(*pair) for pair in zip(rest, whole, strict=True))


def test_numbers_can_be_left_out(data: Prepared) -> None:
    source = PreparedSource(data, "train", dense=[])
    mine = SequenceLoader(
        source, steps=4, histories=PAST, padding=data.table_rows, batch_size=16, workers=1
    )
    assert next(iter(mine)).dense.shape == (16, 5, 1)
    with pytest.raises(ValueError, match="the data has no number 'age'; it has gap"):
        PreparedSource(data, "train", dense=["age"])


def test_histories_are_found_by_their_names() -> None:
    item, past = Feature("item", "item"), Feature("history_item", "item", jagged=True)
    user, tags = Feature("user", "user"), Feature("tags", "tag", jagged=True)
    assert histories_of(Schema("y", (), (user, item, past))) == {
        "user": None,
        "item": "history_item",
    }
    assert histories_of(Schema("y", (), (user, item, tags))) == {}
    elsewhere = Feature("history_item", "other", jagged=True)
    assert histories_of(Schema("y", (), (item, elsewhere))) == {}
    more = Schema("y", (), (item, past, tags))
    with pytest.raises(ValueError, match="lists are read as histories here, and 'tags' is none"):
        check_histories(more, histories_of(more))


def test_steps_that_do_not_fit_each_other_are_refused(data: Prepared, tmp_path: Path) -> None:
    table = pa.table(
        {
            "y": [0, 1, 1],
            "item": [1, 2, 3],
            "shop": [1, 1, 1],
            "items": [[1], [2, 3], [1]],
            "shops": [[1], [1], [1]],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    names = ["item", "shop", "items", "shops"]
    source = ParquetSource([tmp_path / "a.parquet"], label="y", features=names)
    mine = SequenceLoader(
        source, steps=3, histories={"item": "items", "shop": "shops"},
        padding={"item": 9, "shop": 9}, batch_size=3,
    )  # fmt: skip
    with pytest.raises(ValueError, match="a sample has 2 ids in items and 1 in shops"):
        list(mine)
    for options, message in (
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"histories": {"item": None}}, "histories must name the list of one feature"),
        ({"histories": {"item": "items"}}, "the data has no feature 'items'"),
    ):
        options = {"steps": 3, "histories": PAST, "padding": {}, "batch_size": 4, **options}
        with pytest.raises(ValueError, match=message):
            SequenceLoader(data, **options)


def test_arrays_are_those_of_the_shards(data: Prepared) -> None:
    batch = next(iter(loader(data)))
    assert batch.sparse.values().dtype == torch.int32
    assert np.dtype(data.schema.id_dtype) == np.int32
    assert batch.lengths.dtype == batch.sparse.offsets().dtype == torch.int64
