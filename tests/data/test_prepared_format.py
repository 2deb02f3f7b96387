"""Prepared folders: what is written is read back; what is damaged is refused, and named."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

import hotrow
from hotrow.data import Loader, PreparedSource
from hotrow.data.prepared import Feature, Manifest, Prepared, Schema
from hotrow.data.prepared.format import (
    MANIFEST,
    ShardRecord,
    TableRecord,
    from_json,
    sections,
    shard_bytes,
    to_json,
)
from hotrow.data.prepared.spool import Disk

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


def write_shard(disk: Disk, name: str, samples: int) -> ShardRecord:
    found = arrays(samples)
    values = {"seen": len(found["seen.values"])}
    data = bytearray(shard_bytes(SCHEMA, samples, values))
    for key, section in sections(SCHEMA, samples, values).items():
        data[section.offset : section.end] = found[key].tobytes()
    return ShardRecord(**asdict(disk.write(name, [bytes(data)])), samples=samples, values=values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    disk = Disk(tmp_path)
    tables = []
    for place, (name, rows) in enumerate(ROWS.items()):
        counts = disk.write(f"tables/{place:03}.counts", [np.arange(rows).tobytes()])
        tables.append(TableRecord(name, rows, "hash", None, counts, None))
    splits = {
        "train": tuple(write_shard(disk, f"shards/train-{i:05}.bin", i) for i in (5, 17)),
        "test": (write_shard(disk, "shards/test-00000.bin", 3),),
    }
    manifest = Manifest(SCHEMA, tuple(tables), splits, source={}, settings={})
    disk.write(MANIFEST, [to_json(manifest).encode()])
    return tmp_path


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


def test_a_changed_byte_is_found_by_verify(folder: Path) -> None:
    path = folder / "shards/train-00017.bin"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"train-00017\.bin has changed since it was written"):
        Prepared(folder).verify()


def test_a_shard_of_another_size_or_none_is_found_at_once(folder: Path) -> None:
    path = folder / "shards/train-00017.bin"
    os.truncate(path, 10)
    with pytest.raises(ValueError, match=r"train-00017\.bin has 10 bytes instead of"):
        Prepared(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"train-00017\.bin is missing"):
        Prepared(folder)


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    found = json.loads((folder / MANIFEST).read_text())
    edit(found)
    (folder / MANIFEST).write_text(json.dumps(found))


EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "newer": (lambda m: m.update(format=2), "was saved by a newer hotrow"),
    "path": (lambda m: m["splits"]["train"][0].update(file="../secret"), "no file inside"),
    "absolute": (lambda m: m["splits"]["train"][0].update(file="/etc/passwd"), "no file inside"),
    "huge": (lambda m: m["splits"]["train"][0].update(samples=10**15), "samples need"),
    "negative": (
        lambda m: m["splits"]["train"][0].update(samples=-1),
        "samples: expected a whole number >= 0",
    ),
    "boolean": (
        lambda m: m["splits"]["train"][0].update(samples=True),
        "samples: expected a whole number",
    ),
    "text": (
        lambda m: m["splits"]["train"][0].update(bytes="many"),
        "bytes: expected a whole number",
    ),
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


def test_a_manifest_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"format": 1,')
    with pytest.raises(ValueError, match=r"manifest\.json is not valid JSON"):
        Prepared(folder)


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path_factory: Any) -> None:
    path = folder / "shards/train-00005.bin"
    outside = tmp_path_factory.mktemp("outside") / "other.bin"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(ValueError, match="leads out of its folder"):
        Prepared(folder)


def test_a_folder_that_is_not_finished_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no manifest\.json, so it is no prepared data"):
        Prepared(tmp_path)
    (tmp_path / ".work").mkdir()
    with pytest.raises(ValueError, match="not finished: give the same"):
        Prepared(tmp_path)


def test_a_table_or_split_that_the_data_lacks_is_named(folder: Path) -> None:
    data = Prepared(folder)
    with pytest.raises(ValueError, match="no table 'user'; it has item, shop"):
        data.counts("user")
    with pytest.raises(ValueError, match="no split 'validation'; it has train, test"):
        data.shards("validation")


def test_a_manifest_survives_json(folder: Path) -> None:
    manifest = Prepared(folder).manifest
    assert from_json(json.loads(to_json(manifest)), where="here") == manifest
    assert replace(manifest, made_by="other") != manifest


class _Full:
    def __init__(self, file: IO[bytes], room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        self._room -= len(data)
        if self._room < 0:
            self._file.write(data[: len(data) // 2])  # as disks do: a part is there
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class FullDisk(Disk):
    def open(self, path: Path) -> Any:
        return _Full(super().open(path), room=100)


def test_a_full_disk_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"the disk is full: .*000\.bin was not written"):
        FullDisk(tmp_path).write("shards/000.bin", [bytes(60), bytes(60)])
    assert list((tmp_path / "shards").iterdir()) == []


def test_a_loader_gives_every_sample_of_a_split(folder: Path) -> None:
    batches = list(Loader(folder, "train", batch_size=8))
    assert [len(each) for each in batches] == [8, 8, 6]
    expected = [arrays(samples) for samples in (5, 17)]
    label = np.concatenate([each["label"] for each in expected])
    dense = np.concatenate([each["dense"] for each in expected])
    np.testing.assert_array_equal(np.concatenate([each.label for each in batches]), label)
    np.testing.assert_array_equal(np.concatenate([each.dense for each in batches]), dense)
    lists = [
        part
        for each in expected
        for part in np.split(each["seen.values"], each["seen.offsets"][1:-1])
    ]
    shops = np.concatenate([each["ids"][:, 1] for each in expected])
    place = 0
    for batch in batches:
        sparse, size = batch.sparse, len(batch)
        assert isinstance(sparse, hotrow.KeyedJaggedTensor)
        assert sparse.keys() == ["item", "shop", "seen"]
        values, offsets = sparse.values(), sparse.offsets()
        for sample in range(size):
            seen = values[offsets[2 * size + sample] : offsets[2 * size + sample + 1]]
            np.testing.assert_array_equal(seen, lists[place + sample])
            assert values[offsets[size + sample]] == shops[place + sample]
        place += size


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


def test_a_loader_shuffles_over_shards(folder: Path) -> None:
    def dense(**options: Any) -> list[Any]:
        batches = Loader(folder, "train", batch_size=4, **options)
        return [line for batch in batches for line in batch.dense.tolist()]

    assert dense(seed=1) != dense()
    assert sorted(dense(seed=1)) == sorted(dense())
    with pytest.raises(ValueError, match="has no split 'valid'; it has train, test"):
        Loader(folder, "valid", batch_size=4)
