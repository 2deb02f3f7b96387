"""What the public data sets look like, and how their lines become samples.

A layout turns columns into samples. It knows nothing of rows of tables, splits or shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from hotrow.data.prepared.arrow import column_keys, texts_of, whole_numbers
from hotrow.data.prepared.format import Feature, Schema
from hotrow.data.prepared.keys import Values
from hotrow.data.prepared.rows import Rows, Samples


class Layout(Protocol):
    """What the lines of text files are."""

    name: str
    schema: Schema
    key_dtype: str
    separator: str
    quotes: bool  # whether there may be some around fields
    header: bytes | None  # the first line of every file
    width: int  # columns of every line
    places: Mapping[str, int]  # of the columns that are used
    describes: Mapping[str, Any]  # what else decides about its samples

    def samples(self, rows: Rows) -> Samples: ...


class Criteo:
    """Criteo's Kaggle and Terabyte logs: label, 13 whole numbers, 26 hexadecimal categories.

    As the DLRM reference treats them: a missing number is 0, a negative one becomes 0, then
    log(x + 1); a missing category is the category 0.
    """

    name, key_dtype, separator, quotes = "criteo", "uint32", "\t", False
    header: bytes | None = None
    dense = tuple(f"I{i}" for i in range(1, 14))
    categories = tuple(f"C{i}" for i in range(1, 27))
    schema = Schema("label", dense, tuple(Feature(name, name) for name in categories))
    places: Mapping[str, int] = {
        name: place for place, name in enumerate(("label", *dense, *categories))
    }
    width = len(places)
    describes: Mapping[str, Any] = MappingProxyType({})

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


class Avazu:
    """Avazu's log: a CSV file with a header, 21 categories, and the hour as the one number.

    The hour is that of the day, as a part of it: 0, 1/24, ... 23/24. The column `id` names the
    sample and is left out.
    """

    name, key_dtype, separator, quotes = "avazu", "uint64", ",", False
    columns = (
        "id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category",
        "app_id", "app_domain", "app_category", "device_id", "device_ip", "device_model",
        "device_type", "device_conn_type", "C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21",
    )  # fmt: skip
    header: bytes | None = ",".join(columns).encode()
    schema = Schema("click", ("hour",), tuple(Feature(name, name) for name in columns[3:]))
    places: Mapping[str, int] = {name: place for place, name in enumerate(columns) if name != "id"}
    width = len(columns)
    describes: Mapping[str, Any] = MappingProxyType({})

    def samples(self, rows: Rows) -> Samples:
        label = rows.labels("click")
        hours, empty, wrong = whole_numbers(rows.columns["hour"])
        wrong = wrong | empty | (hours % 100 > 23) | (hours < 0)
        rows.refuse(wrong, "hour", "not YYMMDDHH")
        for name in self.columns[3:]:
            rows.add_keys(name, column_keys(rows.columns[name]))
        return rows.samples(label, (hours % 100 / 24).astype(np.float32)[:, None])


LAYOUTS: dict[str, Layout] = {"criteo": Criteo(), "avazu": Avazu()}
