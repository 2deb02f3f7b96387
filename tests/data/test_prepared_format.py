"""Prepared folders: what is written is read back; what is damaged is refused, and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotrow.data import Loader, PreparedSource
from hotrow.data.prepared import Feature, Prepared, Schema
from hotrow.data.prepared.format import (
    MANIFEST,
    sections,
)
from preparing import write_prepared

SCHEMA = Schema(
    "click",
    ("age", "price"),
    (Feature("item", "item"), Feature("shop", "shop"), Feature("seen", "item", jagged=True)),
)
ROWS = {"item": 9, "shop": 4}


def arrays(samples: int) -> dict[str, Any]:
    random = np.random.default_rng(samples)
    lengths = random.integers(0, 4, samples)
    return {
        "ids": random.integers(0, 4, (samples, 2)).astype("int32"),
        "dense": random.random((samples, 2), dtype="float32"),
        "label": random.integers(0, 2, samples).astype("uint8"),
        "seen.offsets": np.concatenate([[0], np.cumsum(lengths)]).astype("int64"),
        "seen.values": random.integers(0, 9, lengths.sum()).astype("int32"),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    splits = {"train": [arrays(5), arrays(17)], "test": [arrays(3)]}
    counts = {name: np.arange(rows) for name, rows in ROWS.items()}
    return write_prepared(tmp_path, SCHEMA, splits, counts)


def test_what_is_written_is_read_back(folder: Path) -> None:
    data = Prepared(folder)
    assert data.samples("train") == 22
    assert data.table_rows == ROWS
    for shard, samples in zip(data.shards("train"), (5, 17), strict=True):
        expected = arrays(samples)
        np.testing.assert_array_equal(shard.ids, expected["ids"])
        np.testing.assert_array_equal(shard.dense, expected["dense"])
        np.testing.assert_array_equal(shard.label, expected["label"])
        np.testing.assert_array_equal(shard.jagged["seen"].offsets, expected["seen.offsets"])
        np.testing.assert_array_equal(shard.jagged["seen"].values, expected["seen.values"])
    np.testing.assert_array_equal(data.counts("item"), np.arange(9))
    data.verify()


def test_arrays_are_mapped_and_aligned(folder: Path) -> None:
    (shard,) = Prepared(folder).shards("test")
    assert isinstance(shard.ids, np.memmap)
    assert not shard.ids.flags.writeable
    for array in (shard.ids, shard.dense, shard.label, shard.jagged["seen"].offsets):
        assert array.ctypes.data % 64 == 0


def test_a_changed_byte_is_found_by_verify_and_another_size_at_once(folder: Path) -> None:
    path = folder / "shards/train-00001.bin"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"train-00001\.bin has changed since it was written"):
        Prepared(folder).verify()
    path.write_bytes(data[:10])
    with pytest.raises(ValueError, match=r"train-00001\.bin has 10 bytes instead of"):
        Prepared(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"train-00001\.bin is missing"):
        Prepared(folder)


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    found = json.loads((folder / MANIFEST).read_text())
    edit(found)
    (folder / MANIFEST).write_text(json.dumps(found))


def first(manifest: Any, **changed: Any) -> None:
    manifest["splits"]["train"][0].update(changed)


EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "newer": (lambda m: m.update(format=2), "was saved by a newer hotrow"),
    "path": (lambda m: first(m, file="../secret"), "no file inside"),
    "absolute": (lambda m: first(m, file="/etc/passwd"), "no file inside"),
    "huge": (lambda m: first(m, samples=10**15), "samples need"),
    "negative": (lambda m: first(m, samples=-1), "samples: expected a whole number >= 0"),
    "boolean": (lambda m: first(m, samples=True), "samples: expected a whole number"),
    "text": (lambda m: first(m, bytes="many"), "bytes: expected a whole number"),
    "rows": (lambda m: m["tables"][0].update(rows=10**12), "bytes of counts"),
    "dtype": (lambda m: m["schema"].update(id_dtype="object"), "id_dtype is 'object'"),
    "table": (lambda m: m["tables"].pop(), "features read the tables"),
    "twice": (lambda m: m["splits"]["test"].append(m["splits"]["test"][0]), "named twice"),
    "no schema": (lambda m: m.pop("schema"), "it lacks schema"),
    "splits": (lambda m: m.update(splits=[]), "splits: expected a table"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_manifest_that_contradicts_itself_is_refused(folder: Path, name: str) -> None:
    edit, message = EDITS[name]
    change(folder, edit)
    with pytest.raises(ValueError, match=message):
        Prepared(folder)


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path_factory: Any) -> None:
    path = folder / "shards/train-00000.bin"
    outside = tmp_path_factory.mktemp("outside") / "other.bin"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(ValueError, match="leads out of its folder"):
        Prepared(folder)


def test_a_folder_without_a_manifest_says_so(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"format": 1,')
    with pytest.raises(ValueError, match=r"manifest\.json is not valid JSON"):
        Prepared(tmp_path)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"no manifest\.json, so it is no prepared data"):
        Prepared(tmp_path)
    (tmp_path / ".work").mkdir()
    with pytest.raises(ValueError, match="not finished: give the same"):
        Prepared(tmp_path)


def test_a_table_or_split_that_the_data_lacks_is_named(folder: Path) -> None:
    data = Prepared(folder)
    with pytest.raises(ValueError, match="no table 'user'; it has item, shop"):
        data.counts("user")
    for ask in (data.shards, data.samples, lambda split: Loader(folder, split, batch_size=4)):
        with pytest.raises(ValueError, match="no split 'valid'; it has train, test"):
            ask("valid")


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("seen.offsets", -8, "the lists of 'seen' in shard 1 of train are damaged"),
        ("seen.offsets", 1 << 40, "the lists of 'seen' in shard 1 of train are damaged"),
        ("label", 2, "the labels in shard 1 of train are damaged"),
    ],
)
def test_a_damaged_shard_is_noticed_where_it_would_lead_astray(
    folder: Path, section: str, value: int, message: str
) -> None:
    """Whichever way its samples are read; what nothing reads does no harm."""
    data = Prepared(folder)
    record = data.manifest.splits["train"][1]
    place = sections(SCHEMA, record.samples, record.values)[section]
    array = np.memmap(folder / record.file, place.dtype, "r+", place.offset, place.shape)
    array[3] = value
    array.flush()
    source = PreparedSource(folder, "train")
    source.take(np.array([0, 4, 5 + 12]))
    for numbers in ([5 + 3], [5 + 2, 5 + 3, 5 + 12]):
        with pytest.raises(ValueError, match=message):
            source.take(np.array(numbers))
    with pytest.raises(ValueError, match=message):
        source.read(np.arange(len(source.sizes)))
