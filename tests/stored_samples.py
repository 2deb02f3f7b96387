"""The samples of `samples.Memory`, as prepared folders and Parquet files hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data import ParquetSource, PreparedSource
from hotrow.data.prepared import Feature, Schema
from preparing import write_prepared
from samples import FEATURES, Memory, columns

SCHEMA = Schema(
    "click",
    ("half", "same"),
    (Feature("a", "a"), Feature("list", "a", jagged=True), Feature("b", "b")),
    id_dtype="int64",
)
BIG = (1 << 33) + 1  # no float32 and no int32 holds it


def prepared(folder: Path, sizes: Sequence[int], *, start: int = 0) -> PreparedSource:
    """The same samples as `hotrow prepare` would leave them, a shard for each size."""
    shards, first = [], start
    for count in sizes:
        found = columns(np.arange(first, first + count), BIG)
        lists = found.jagged["list"]
        shards.append({
            "ids": found.ids, "dense": found.dense, "label": found.label,
            "list.offsets": lists.offsets, "list.values": lists.values,
        })  # fmt: skip
        first += count
    counts = dict.fromkeys("ab", np.zeros(5, np.int64))
    write_prepared(folder, SCHEMA, {"train": shards, "test": []}, counts)
    return PreparedSource(folder, "train", block=8)


def parquet(folder: Path, **changed: Any) -> Path:
    source = Memory([25] * 4, jagged=True).read(np.arange(4))
    lists = np.split(source.jagged["list"].values, source.jagged["list"].offsets[1:-1])
    columns = {
        "clicked": pa.array(source.label),
        "price": pa.array(source.dense[:, 0]),
        "a": pa.array(source.ids[:, 0].astype(np.int32)),
        "b": pa.array(source.ids[:, 1]),
        "list": pa.array([each.tolist() for each in lists], type=pa.list_(pa.int32())),
        "other": pa.array(["x"] * 100),
        **changed,
    }
    path = folder / "data.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=25)
    return path


def parquet_source(*files: Path, **options: Any) -> ParquetSource:
    given = {"label": "clicked", "dense": ["price"], "features": FEATURES, **options}
    return ParquetSource(files, **given)
