"""The kinds of files that `hotrow prepare` reads, by name; and the public logs among them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hotrow.data.prepared.arrow import Values, column_keys, texts_of, whole_numbers
from hotrow.data.prepared.columns import Csv, ParquetSource, read_columns
from hotrow.data.prepared.format import Feature, Schema
from hotrow.data.prepared.job import SIZES, Settings, Sizes
from hotrow.data.prepared.pieces import Rows, Samples, Source
from hotrow.data.prepared.taobao import Taobao
from hotrow.data.prepared.text import TextSource
from hotrow.support.messages import nearest


class Criteo(TextSource):
    """Criteo's Kaggle and Terabyte logs: label, 13 whole numbers, 26 hexadecimal categories.

    As in the DLRM reference, a missing number is 0, a negative one becomes 0, and then all become
    log(x + 1); a missing category is the category 0.
    """

    name, key_dtype, separator = "criteo", "uint32", "\t"
    dense = tuple(f"I{i}" for i in range(1, 14))
    categories = tuple(f"C{i}" for i in range(1, 27))
    schema = Schema("label", dense, tuple(Feature(name, name) for name in categories))
    places: Mapping[str, int] = {
        name: place for place, name in enumerate(("label", *dense, *categories))
    }
    width = len(places)

    def samples(self, rows: Rows) -> Samples:
        label = rows.labels("label")
        dense = np.empty((len(rows), len(self.dense)), np.float32)
        for place, name in enumerate(self.dense):
            values, _, wrong = whole_numbers(rows.columns[name])
            rows.refuse(wrong, name, "not a whole number")
            np.maximum(values, 0, out=dense[:, place], casting="unsafe")
        dense += 1
        np.log(dense, out=dense)
        for name in self.categories:
            keys, wrong = texts_of(rows.columns[name]).hexadecimal()
            rows.refuse(wrong, name, "not up to 8 hexadecimal digits")
            rows.add_keys(name, Values(keys))
        return rows.samples(label, dense)


class Avazu(TextSource):
    """Avazu's log: a CSV file with a header, 21 categories, and the hour as the one number.

    The hour becomes a fraction of the day: 0, 1/24, ... 23/24. The column `id` names the sample
    and is left out.
    """

    name, key_dtype = "avazu", "uint64"
    columns = (
        "id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category",
        "app_id", "app_domain", "app_category", "device_id", "device_ip", "device_model",
        "device_type", "device_conn_type", "C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21",
    )  # fmt: skip
    header = ",".join(columns).encode()
    schema = Schema("click", ("hour",), tuple(Feature(name, name) for name in columns[3:]))
    places: Mapping[str, int] = {name: place for place, name in enumerate(columns) if name != "id"}
    width = len(columns)

    def samples(self, rows: Rows) -> Samples:
        label = rows.labels("click")
        hours, empty, wrong = whole_numbers(rows.columns["hour"])
        wrong = wrong | empty | (hours % 100 > 23) | (hours < 0)
        rows.refuse(wrong, "hour", "not YYMMDDHH")
        for name in self.columns[3:]:
            rows.add_keys(name, column_keys(rows.columns[name]))
        return rows.samples(label, (hours % 100 / 24).astype(np.float32)[:, None])


KINDS = ("criteo", "avazu", "taobao", "parquet", "csv")


def open_source(
    kind: str,
    files: list[Path],
    *,
    out: Path,
    columns: Path | None,
    settings: Settings,
    sizes: Sizes = SIZES,
) -> Source:
    """Open files of a kind as samples."""
    if kind not in KINDS:
        near = nearest(kind, KINDS)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(KINDS)}"
        raise ValueError(f"unknown kind of files {kind!r}; {hint}")
    is_described = kind in ("parquet", "csv")
    if columns is not None and not is_described:
        raise ValueError(f"the columns of {kind} are known; --columns is for parquet and csv")
    if kind == "taobao":
        skip = settings.bad_rows == "skip"
        return Taobao(files, out, seed=settings.seed, skip_bad=skip, sizes=sizes)
    if kind in ("criteo", "avazu"):
        known = Criteo if kind == "criteo" else Avazu
        return known(files, piece_bytes=sizes.piece_bytes)
    if columns is None:
        raise ValueError(
            f"{kind} needs --columns: a TOML file that says which column is the label, which are "
            "dense and which are categories"
        )
    if kind == "parquet":
        return ParquetSource(read_columns(columns), files, piece_samples=sizes.piece_samples)
    return Csv(read_columns(columns), files, piece_bytes=sizes.piece_bytes)
