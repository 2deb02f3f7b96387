"""What the public data sets look like, and how their lines become samples.

A layout turns a piece of text into columns. It knows nothing of rows, splits or shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared.disk import Disk
from hotrow.data.prepared.fields import EXACT, BadLine, BadLines, Checks, Fields, Judge, one
from hotrow.data.prepared.format import Feature, Schema
from hotrow.data.prepared.parallel import Cores
from hotrow.data.prepared.settings import Watch
from hotrow.data.prepared.text import Piece, Place, TextFiles
from hotrow.data.prepared.vocabulary import Keys

_PART_BYTES = 1 << 19  # of text that is parsed together: its columns fit a core's cache


@dataclass(frozen=True)
class Samples:
    """The good lines of a piece, as columns; ids are still keys."""

    lines: NDArray[np.int64]  # [samples], counted from the start of the piece
    label: NDArray[np.uint8]  # [samples]
    dense: NDArray[np.float32]  # [samples, dense columns]
    keys: dict[str, Keys]  # of each feature: [samples], or of a jagged one all its values
    bad: BadLines = field(default_factory=BadLines)
    num_lines: int = 0  # good and bad ones
    lengths: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # of jagged ones [samples]
    checks: dict[str, Checks] = field(default_factory=dict)  # like keys; without: all are EXACT

    @property
    def num_bytes(self) -> int:
        arrays: list[NDArray[Any]] = [
            self.lines,
            self.label,
            self.dense,
            *self.keys.values(),
            *self.lengths.values(),
            *self.checks.values(),
        ]
        return sum(each.nbytes for each in arrays)

    def checks_of(self, feature: str) -> Checks:
        found = self.checks.get(feature)
        return np.full(len(self.keys[feature]), EXACT) if found is None else found


class Layout(Protocol):
    name: str
    schema: Schema
    key_dtype: str
    header: bytes | None

    def parse(self, text: bytes) -> Samples: ...


class Source(Protocol):
    """Files that become samples, piece by piece. Pieces depend on the files alone."""

    name: str
    schema: Schema
    key_dtype: str
    paths: list[Path]
    describes: dict[str, Any]  # what else decides about its samples
    times: bool  # whether samples' "lines" are times, of which quantiles make splits
    first_line: int  # the number of the first sample, by which it is split
    header_lines: int  # of each file

    def ready(self, disk: Disk, cores: Cores, watch: Watch) -> None: ...  # before any piece
    def pieces(self, start: Place | None = None) -> Iterator[Piece]: ...
    def parse(self, piece: Piece) -> Samples: ...


class TextSource:
    """Files of lines in one of the layouts below."""

    def __init__(self, layout: Layout, paths: Sequence[Path], *, piece_bytes: int) -> None:
        self.name, self.schema, self.key_dtype = layout.name, layout.schema, layout.key_dtype
        self._layout = layout
        self._files = TextFiles(paths, header=layout.header, piece_bytes=piece_bytes)
        self.paths = self._files.paths
        self.describes: dict[str, Any] = getattr(layout, "describes", {})
        self.times = False
        self.first_line = self.header_lines = 0 if layout.header is None else 1

    def ready(self, disk: Disk, cores: Cores, watch: Watch) -> None:
        """Nothing is to be done before."""

    def pieces(self, start: Place | None = None) -> Iterator[Piece]:
        return self._files.pieces(start)

    def parse(self, piece: Piece) -> Samples:
        text: bytes = piece.data
        if piece.bad:
            bad = BadLines(1, (BadLine(0, piece.bad),))
            return replace(self._layout.parse(b""), bad=bad, num_lines=1)
        first = line = 0
        if self._layout.header is not None and not piece.place.file_line:
            first, line = text.find(b"\n") + 1 or len(text), 1
        parts: list[Samples] = []
        while first < len(text) or not parts:
            last = text.rfind(b"\n", first, first + _PART_BYTES) + 1
            last = last or text.find(b"\n", first) + 1 or len(text)
            part = text[first:last]
            parts.append(_later(self._layout.parse(part), line))
            first, line = last, line + parts[-1].num_lines
        return parts[0] if len(parts) == 1 else _together(parts)


def _later(found: Samples, lines: int) -> Samples:
    if not lines:
        return found
    return replace(found, lines=found.lines + lines, bad=found.bad.later(lines))


def _together(parts: list[Samples]) -> Samples:
    return Samples(
        np.concatenate([each.lines for each in parts]),
        np.concatenate([each.label for each in parts]),
        np.concatenate([each.dense for each in parts]),
        {name: np.concatenate([each.keys[name] for each in parts]) for name in parts[0].keys},
        BadLines.joined(each.bad for each in parts),
        lengths={
            name: np.concatenate([each.lengths[name] for each in parts])
            for name in parts[0].lengths
        },
        checks={
            name: np.concatenate([each.checks_of(name) for each in parts])
            for name in parts[0].keys
            if any(name in each.checks for each in parts)
        },
    )


class Criteo:
    """Criteo's Kaggle and Terabyte logs: label, 13 whole numbers, 26 hexadecimal categories.

    As the DLRM reference treats them: a missing number is 0, a negative one becomes 0, then
    log(x + 1); a missing category is the category 0.
    """

    name = "criteo"
    key_dtype = "uint32"
    header: bytes | None = None
    dense = tuple(f"I{i}" for i in range(1, 14))
    categories = tuple(f"C{i}" for i in range(1, 27))
    schema = Schema("label", dense, tuple(Feature(name, name) for name in categories))

    def parse(self, text: bytes) -> Samples:
        fields = Fields(text, separator="\t", columns=40)
        judge = Judge(fields)
        label = label_of(fields, judge, column=0)
        where = slice(1, 14)
        values, _, wrong = fields.integers(where)
        judge.refuse(
            wrong, where, lambda i, found: f"{self.dense[i]} is {found!r}, not a whole number"
        )
        dense = np.empty((len(fields), 13), np.float32)
        np.maximum(values.T, 0, out=dense, casting="unsafe")
        dense += 1
        np.log(dense, out=dense)
        where = slice(14, 40)
        found, wrong = fields.hexadecimal(where)
        judge.refuse(
            wrong,
            where,
            lambda i, found: f"{self.categories[i]} is {found!r}, not up to 8 hexadecimal digits",
        )
        return samples_of(
            fields, judge, label, dense, dict(zip(self.categories, found, strict=True))
        )


class Avazu:
    """Avazu's log: a CSV file with a header, 21 categories, and the hour as the one number.

    The hour is that of the day, as a part of it: 0, 1/24, ... 23/24. The column `id` names the
    sample and is left out.
    """

    name = "avazu"
    key_dtype = "uint64"
    columns = (
        "id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category",
        "app_id", "app_domain", "app_category", "device_id", "device_ip", "device_model",
        "device_type", "device_conn_type", "C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21",
    )  # fmt: skip
    header: bytes | None = ",".join(columns).encode()
    schema = Schema("click", ("hour",), tuple(Feature(name, name) for name in columns[3:]))

    def parse(self, text: bytes) -> Samples:
        fields = Fields(text, separator=",", columns=24)
        judge = Judge(fields)
        label = label_of(fields, judge, column=1)
        hours, empty, wrong = fields.integers(one(2))
        wrong = wrong | empty | (hours % 100 > 23) | (hours < 0)
        judge.refuse(wrong, one(2), lambda _, found: f"hour is {found!r}, not YYMMDDHH")
        dense = (hours % 100 / 24).astype(np.float32).T
        found, names = fields.texts(slice(3, 24)), self.columns[3:]
        keys = dict(zip(names, found.keys, strict=True))
        checks = {} if found.checks is None else dict(zip(names, found.checks, strict=True))
        return samples_of(fields, judge, label, dense, keys, checks=checks)


LAYOUTS: dict[str, Layout] = {"criteo": Criteo(), "avazu": Avazu()}


def no_label(found: Any) -> str:
    return f"the label is {found!r}, neither 0 nor 1"


def label_of(fields: Fields, judge: Judge, *, column: int) -> NDArray[np.uint8]:
    if (bits := fields.bits(column)) is not None:
        return bits
    where = one(column)
    is_true, is_false = fields.spelled(where, b"true"), fields.spelled(where, b"false")
    label: NDArray[np.uint8] = is_true[0].astype(np.uint8)
    if (is_true | is_false).all():
        return label
    values, empty, wrong = fields.numbers(where)  # 1.0 as well
    values = np.where(is_true, 1, values)
    wrong = (wrong | empty | ((values != 0) & (values != 1))) & ~(is_true | is_false)
    judge.refuse(wrong, where, lambda _, found: no_label(found))
    label = np.where(wrong[0], 0, values[0]).astype(np.uint8)
    return label


def samples_of(
    fields: Fields,
    judge: Judge,
    label: NDArray[Any],
    dense: NDArray[Any],
    keys: dict[str, Keys],
    lengths: dict[str, NDArray[np.int64]] | None = None,  # of jagged ones
    checks: dict[str, Checks] | None = None,
) -> Samples:
    found = Samples(
        fields.lines, label, dense, keys, judge.bad, fields.num_lines, lengths or {}, checks or {}
    )
    return found if judge.good.all() else only(found, judge.good)


def only(samples: Samples, good: NDArray[np.bool_]) -> Samples:
    """Return the samples that `good` marks."""
    lengths = samples.lengths
    masks = {
        name: np.repeat(good, lengths[name]) if name in lengths else good for name in samples.keys
    }
    return replace(
        samples,
        lines=samples.lines[good],
        label=samples.label[good],
        dense=samples.dense[good],
        keys={name: each[masks[name]] for name, each in samples.keys.items()},
        lengths={name: each[good] for name, each in lengths.items()},
        checks={name: each[masks[name]] for name, each in samples.checks.items()},
    )
