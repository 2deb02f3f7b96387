"""Sequences: batches of them, generated ones, and those of prepared data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from clicks import taobao_lines, write
from hotrow.data import (
    Counted,
    Loader,
    ParquetSource,
    SequenceBatch,
    SequenceLoader,
    SyntheticConfig,
    SyntheticSequences,
)
from hotrow.data.loader import check_histories, histories_of
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.format import Feature, Schema
from hotrow.inputs.tree import only_tensors, tensors_in, to_device
from preparing import prepared

IDS = {"user": torch.arange(6).view(2, 3), "item": 10 + torch.arange(6).view(2, 3)}


def make(lengths: Tensor | None = None, **changes: Tensor) -> SequenceBatch:
    return SequenceBatch.from_ids(torch.rand(2, 3, 1), {**IDS, **changes}, torch.ones(2), lengths)


def test_a_batch_has_ids_feature_by_feature_and_moves_with_all_it_has() -> None:
    batch = make()
    assert batch.sparse.keys() == ["user", "item"]
    assert batch.sparse.values().tolist() == [*range(6), *range(10, 16)]
    assert batch.sparse.offsets().tolist() == [0, 3, 6, 9, 12]
    assert len(batch) == 2
    assert batch.lengths.tolist() == [2, 2]  # nothing is padding
    short = make(torch.tensor([0, 1]))
    assert only_tensors(batch)  # so that its step can be captured
    assert only_tensors(short)
    moved = to_device(short, torch.device("meta"))
    tensors = (moved.dense, moved.sparse.values(), moved.sparse.offsets(), moved.lengths)
    assert all(each.device.type == "meta" for each in (*tensors, moved.label))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"item": torch.zeros(2, 2).long()}, r"'item' has ids \[2, 2\]; dense has 2 samples of 3"),
        ({"lengths": torch.tensor([0, 3])}, "sample 1 has a history of 3 steps.* 2 "),
        ({"lengths": torch.tensor([0, -1])}, "sample 1 has a history of -1 steps.* 2 "),
        ({"lengths": torch.tensor([1])}, "a number for each of 2 samples"),
    ],
)
def test_parts_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
    with pytest.raises(ValueError, match=r"dense must be \[batch, steps, features\]"):
        SequenceBatch.from_ids(torch.rand(2, 3), IDS, torch.ones(2))


# -- Generated ---------------------------------------------------------------------------

STEPS, ROWS = 6, (50, 400, 9)
NAMES = ("user", "item", "category")
CONFIG = SyntheticConfig(rows=ROWS, names=NAMES, batch_size=512, num_dense=2, click_rate=0.4)


def sequences(config: SyntheticConfig = CONFIG, **options: Any) -> SyntheticSequences:
    return SyntheticSequences(config, steps=STEPS, constant=("user",), **options)


def ids_of(batch: SequenceBatch) -> Tensor:
    return batch.sparse.values().view(len(ROWS), len(batch), STEPS + 1)


def test_steps_are_padded_in_front_and_users_stay_the_same() -> None:
    batch = sequences().batch(3)
    ids, lengths = ids_of(batch), batch.lengths
    assert set(lengths.tolist()) == set(range(1, STEPS + 1))
    is_padding = torch.arange(STEPS + 1) < STEPS - lengths[:, None]
    for found, rows in zip(ids, ROWS, strict=True):
        assert bool((found[is_padding] == rows).all())
        assert bool(((found >= 0) & (found < rows))[~is_padding].all())
    user = ids[0].masked_fill(is_padding, -1)
    assert torch.equal(user, ids[0][:, -1:].expand(-1, STEPS + 1).masked_fill(is_padding, -1))
    assert len(ids[1][~is_padding].unique()) > 50
    assert batch.dense.shape == (512, STEPS + 1, 3)
    torch.testing.assert_close(batch.dense[0, :, 0], torch.arange(7) / 7)
    assert not batch.dense[:, :-1, 1:].any()


def test_a_batch_is_known_by_its_number() -> None:
    left, right = sequences().batch(7), sequences()[7]
    pairs = zip(tensors_in(left), tensors_in(right), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(ids_of(left), ids_of(sequences().batch(8)))


def test_the_truth_ranks_better_than_the_target_alone_or_the_history_alone() -> None:
    drawn = sequences()
    batches = list(drawn.batches(0, 20))
    labels = torch.cat([batch.label for batch in batches])
    assert float(labels.mean()) == pytest.approx(0.4, abs=0.02)
    whole = torch.cat([drawn.logits(batch) for batch in batches])
    assert float(whole.std()) == pytest.approx(1.5, rel=0.1)
    alone = torch.cat(
        [drawn.logits(replace(batch, lengths=torch.zeros_like(batch.lengths))) for batch in batches]
    )
    aucs = [float(binary_auroc(each, labels.long())) for each in (whole, alone)]
    assert aucs[0] == pytest.approx(drawn.best_auc(range(20)))
    assert aucs[0] > 0.75
    assert 0.6 < aucs[1] < aucs[0] - 0.05


def test_what_stands_in_padding_changes_no_truth() -> None:
    drawn = sequences()
    batch = drawn.batch(0)
    ids = ids_of(batch).clone()
    ids[:, torch.arange(STEPS + 1) < STEPS - batch.lengths[:, None]] = 1
    named = dict(zip(NAMES, ids, strict=True))
    changed = SequenceBatch.from_ids(batch.dense, named, batch.label, batch.lengths)
    assert torch.equal(drawn.logits(batch), drawn.logits(changed))


def test_rows_are_read_as_often_as_counted() -> None:
    counts = np.arange(ROWS[1]) % 11
    drawn = sequences(counts={"item": Counted(counts)})
    read = torch.cat([ids_of(batch)[1].flatten() for batch in drawn.batches(0, 30)])
    found = torch.bincount(read[read < ROWS[1]], minlength=ROWS[1]).double().numpy()
    expected = found.sum() * counts / counts.sum()
    here = expected > 0
    assert not found[~here].any()
    assert 0.7 < ((found - expected)[here] ** 2 / expected[here]).sum() / here.sum() < 1.3
    hottest = drawn.hottest(1, 5)
    assert counts[hottest.numpy()].tolist() == [10] * 5
    expected_each = float(drawn.expected_counts(1, 5).mean())
    assert found[hottest.numpy()].mean() / 30 == pytest.approx(expected_each, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constant": ("shop",)}, "constant names 'shop'; the tables are user, item, category"),
        ({"constant": NAMES}, "all tables are constant"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"config": replace(CONFIG, lookups=2)}, "lookups must be 1 where steps are generated"),
    ],
)
def test_what_is_no_sequence_is_refused(options: dict[str, Any], message: str) -> None:
    options = {"config": CONFIG, "steps": 3, **options}
    with pytest.raises(ValueError, match=message):
        SyntheticSequences(**options)


# -- Of prepared data --------------------------------------------------------------------

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
    assert ids.dtype == torch.int32  # as in the shards
    assert batch.lengths.dtype == batch.sparse.offsets().dtype == torch.int64
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


def test_histories_are_found_by_their_names() -> None:
    item, past = Feature("item", "item"), Feature("history_item", "item", jagged=True)
    user, tags = Feature("user", "user"), Feature("tags", "tag", jagged=True)
    found = histories_of(Schema("y", (), (user, item, past)))
    assert found == {"user": None, "item": "history_item"}
    assert histories_of(Schema("y", (), (user, item, tags))) == {}
    elsewhere = Feature("history_item", "other", jagged=True)
    assert histories_of(Schema("y", (), (item, elsewhere))) == {}
    more = Schema("y", (), (item, past, tags))
    with pytest.raises(ValueError, match="lists are read as histories here, and 'tags' is none"):
        check_histories(more, histories_of(more))


def test_steps_that_do_not_fit_each_other_are_refused(data: Prepared, tmp_path: Path) -> None:
    columns = {
        "y": [0, 1, 1], "item": [1, 2, 3], "shop": [1, 1, 1],
        "items": [[1], [2, 3], [1]], "shops": [[1], [1], [1]],
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    source = ParquetSource(tmp_path / "a.parquet", label="y", features=list(columns)[1:])
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
