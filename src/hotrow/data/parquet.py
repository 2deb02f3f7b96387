"""Parquet files as a source of samples: their columns are ids already, or numbers.

Arrow has many types for one thing. What a column holds is decided when files are opened, by its
type; what its values are is checked as they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared import Jagged
from hotrow.data.prepared.arrow import (
    is_lists,
    is_number,
    is_whole,
    lists_of,
    open_parquet,
    place_of,
    pyarrow,
    value_type,
)
from hotrow.data.sources import Samples, joined
from hotrow.support.messages import few


class ParquetSource:
    """Parquet files whose columns are ids already: whole numbers below their table's rows, or
    lists of them, of which one that is missing is empty. A block is a row group, so those of a few
    ten thousand rows shuffle best."""

    def __init__(
        self,
        files: Sequence[str | Path] | str | Path,
        *,
        label: str,
        features: Sequence[str],
        dense: Sequence[str] = (),
    ) -> None:
        self._files = [Path(each) for each in ([files] if isinstance(files, str | Path) else files)]
        self.features, self._dense, self._label = tuple(features), tuple(dense), label
        self._groups: list[tuple[Path, int]] = []
        sizes = []
        self._columns = [label, *dense, *features]
        if not self.features:
            raise ValueError("features must name one column at least")
        for name in self._columns:
            if self._columns.count(name) > 1:
                raise ValueError(f"column {name!r} is named twice")
        kinds: dict[str, str] = {}
        for file in self._files:
            opened = open_parquet(file, mapped=True)
            kinds |= self._kinds(file, opened.schema_arrow, kinds)
            for group in range(opened.metadata.num_row_groups):
                self._groups.append((file, group))
                sizes.append(opened.metadata.row_group(group).num_rows)
        if not sum(sizes):
            raise ValueError(f"{few(map(str, self._files)) or 'no file'}: there are no rows")
        self.single = tuple(name for name in features if kinds[name] == "single")
        self.sizes = np.array(sizes, dtype=np.int64)

    @property
    def identity(self) -> str:
        """Changes when a file does, as far as its size and time tell."""
        files = [(str(each.resolve()), each.stat()) for each in self._files]
        facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
        return hashlib.sha256(repr((facts, self._columns)).encode()).hexdigest()

    def read(self, blocks: NDArray[np.int64]) -> Samples:
        parts = [self._read(*self._groups[block]) for block in blocks.tolist()]
        lists = [name for name in self.features if name not in self.single]
        return Samples(
            np.concatenate([each.ids for each in parts]),
            np.concatenate([each.dense for each in parts]),
            np.concatenate([each.label for each in parts]),
            {name: joined([each.jagged[name] for each in parts]) for name in lists},
        )

    def _kinds(self, file: Path, schema: Any, before: dict[str, str]) -> dict[str, str]:
        found = {}
        for name in self._columns:
            kind = schema.field(place_of(name, schema.names, file)).type
            if name not in self.features:
                if not is_number(kind):
                    what = "the label is 0 or 1" if name == self._label else "it is to be a number"
                    raise ValueError(
                        f"{file}: column {name!r} has values of type {kind}, and {what}; cast it "
                        "where the file is written"
                    )
                continue
            if not is_whole(value_type(kind)):
                raise ValueError(
                    f"{file}: column {name!r} has values of type {kind}, and ids are whole numbers;"
                    " cast it to int64 where the file is written, or to text, of which `hotrow "
                    "prepare parquet` makes ids"
                )
            found[name] = "jagged" if is_lists(kind) else "single"
            if before.get(name, found[name]) != found[name]:
                raise ValueError(
                    f"{file}: column {name!r} is {found[name]}, and {before[name]} in the files"
                    " before it"
                )
        return found

    def _read(self, file: Path, group: int) -> Samples:
        where = f"{file}, row group {group}"
        opened = open_parquet(file, mapped=True)
        try:
            table = opened.read_row_group(group, columns=self._columns, use_threads=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{where} cannot be read: {error}") from error
        columns = {
            name: _Column(where, name, table.column(name).combine_chunks())
            for name in self._columns
        }
        label = columns[self._label].numbers()
        if not np.isin(label, (0, 1)).all():
            raise columns[self._label].wrong(~np.isin(label, (0, 1)), "a label is 0 or 1")
        ids = np.empty((len(label), len(self.single)), np.int64)
        for place, name in enumerate(self.single):
            ids[:, place] = columns[name].ids()
        dense = np.empty((len(label), len(self._dense)), np.float32)
        for place, name in enumerate(self._dense):
            dense[:, place] = columns[name].numbers()
        jagged = {name: columns[name].lists() for name in self.features if name not in self.single}
        return Samples(ids, dense, label.astype(np.uint8), jagged)


class _Column:
    """One column of a row group; errors say where it is."""

    def __init__(self, where: str, name: str, array: Any) -> None:
        self._where, self._name, self._array = where, name, array

    def wrong(self, which: NDArray[np.bool_], expected: str) -> ValueError:
        odd = self._array[int(np.argmax(which))].as_py()
        return ValueError(f"{self._where}: column {self._name!r} has {odd}, and {expected}")

    def ids(self) -> NDArray[np.int64]:
        values = self._values()
        try:
            found = _cast(values, "int64")
        except ValueError as error:  # larger than any row's number
            kind = self._array.type
            raise ValueError(
                f"{self._where}: column {self._name!r} of {kind} has ids beyond 2**63 - 1, which "
                f"no table has ({error}); `hotrow prepare parquet` makes ids of any values"
            ) from None
        if len(found) and found.min() < 0:
            raise self.wrong(found < 0, "ids are rows of a table, from 0 on")
        return found

    def numbers(self) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):  # it is found below
            found = _cast(self._values(), "float64").astype(np.float32)
        if not np.isfinite(found).all():
            raise self.wrong(~np.isfinite(found), "numbers are finite ones of 32 bits")
        return found

    def lists(self) -> Jagged:
        """One that is missing has no values, whatever lies where it would be."""
        values, lengths = lists_of(self._array)
        offsets = np.zeros(len(self._array) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Jagged(offsets, _Column(self._where, self._name, values).ids())

    def _values(self) -> Any:
        if count := self._array.null_count:
            raise ValueError(
                f"{self._where}: column {self._name!r} of {self._array.type} has {count:,} empty "
                "values; fill them where the file is written (`hotrow prepare parquet` takes those "
                "of ids and numbers as they are)"
            )
        return self._array


def _cast(values: Any, kind: str) -> NDArray[Any]:
    arrow = pyarrow()
    if arrow.types.is_boolean(values.type):
        values = values.cast(arrow.int8())  # of which Arrow makes any number
    found: NDArray[Any] = values.cast(getattr(arrow, kind)(), safe=kind == "int64").to_numpy(
        zero_copy_only=False
    )
    return found
