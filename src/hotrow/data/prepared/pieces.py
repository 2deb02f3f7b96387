"""Pieces of files: their lines as columns, what is wrong with some lines, and the samples.

Where pieces begin depends on the files alone, so a second pass or a resumed run sees the same ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared.arrow import EXACT, Checks, Mask, Places, Values, floats, shown
from hotrow.data.prepared.format import Schema

if TYPE_CHECKING:
    from hotrow.data.prepared.job import Disk, Watch
    from hotrow.data.prepared.parallel import Cores

EXAMPLES = 5  # bad lines that are shown


@dataclass(frozen=True)
class Place:
    """A position in the source, at the start of a line."""

    file: int = 0
    offset: int = 0  # bytes of text before it in its file
    file_line: int = 0  # lines before it in its file
    line: int = 0  # lines before it in all files; of the headers only the first file's counts


@dataclass(frozen=True)
class Piece:
    """Whole lines of one file; or one line that is too long and was not kept."""

    place: Place
    after: Place  # where the next piece of the same file begins
    data: Any  # bytes for text
    read_bytes: int  # bytes of the file on disk up to the end of this piece
    bad: str = ""  # why the line was not kept

    @property
    def lines(self) -> int:
        return self.after.file_line - self.place.file_line


@dataclass(frozen=True)
class BadLine:
    """A line that is left out; `line` counts from 0 within its piece."""

    line: int
    reason: str


@dataclass(frozen=True)
class BadLines:
    """The number of lines left out, and the first of them: all might not fit in memory."""

    count: int = 0
    first: tuple[BadLine, ...] = ()

    @classmethod
    def joined(cls, parts: Iterable[BadLines]) -> BadLines:
        every = list(parts)
        first = sorted((bad for part in every for bad in part.first), key=lambda bad: bad.line)
        return cls(sum(part.count for part in every), tuple(first[:EXAMPLES]))

    def later(self, lines: int) -> BadLines:
        """Return the same lines with `lines` more before them."""
        first = (BadLine(bad.line + lines, bad.reason) for bad in self.first)
        return BadLines(self.count, tuple(first))


@dataclass(frozen=True)
class Samples:
    """The good lines of a piece, as columns; ids are still keys."""

    lines: NDArray[np.int64]  # [samples], counted from the start of the piece
    label: NDArray[np.uint8]  # [samples]
    dense: NDArray[np.float32]  # [samples, dense columns]
    keys: dict[str, NDArray[Any]]  # by feature: [samples], or all values of a jagged feature
    bad: BadLines = field(default_factory=BadLines)
    lengths: dict[str, Places] = field(default_factory=dict)  # by jagged feature: [samples]
    checks: dict[str, Checks] = field(default_factory=dict)  # like keys; a missing one: all EXACT

    @property
    def num_bytes(self) -> int:
        columns = (self.keys, self.lengths, self.checks)
        arrays = [self.lines, self.label, self.dense, *(a for c in columns for a in c.values())]
        return sum(array.nbytes for array in arrays)

    def checks_of(self, feature: str) -> Checks:
        checks = self.checks.get(feature)
        return np.full(len(self.keys[feature]), EXACT) if checks is None else checks


class Rows:
    """Lines as Arrow columns by name. Collects the keys of features, and what is wrong with lines:
    the first reason counts."""

    def __init__(
        self, columns: Mapping[str, Any], lines: NDArray[np.int64], bad: BadLines | None = None
    ) -> None:
        """`lines` are the places of the lines in their piece, `bad` the lines without columns."""
        self.columns, self._lines, self._bad = columns, lines, bad or BadLines()
        self._wrong: Mask = np.zeros(len(lines), np.bool_)
        self._first: list[BadLine] = []
        self._keys: dict[str, NDArray[Any]] = {}
        self._checks: dict[str, Checks] = {}
        self._lengths: dict[str, Places] = {}

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def good(self) -> Mask:
        return ~self._wrong

    @property
    def bad(self) -> BadLines:
        refused = BadLines(int(np.count_nonzero(self._wrong)), tuple(self._first))
        return BadLines.joined([self._bad, refused])

    def refuse(self, wrong: Mask, name: str, expected: str, *, called: str | None = None) -> None:
        """Leave out lines because of their values in a column; errors say what was `expected`."""
        for place in np.flatnonzero(wrong & ~self._wrong)[:EXAMPLES].tolist():
            reason = f"{called or name} is {shown(self.columns[name][place])!r}, {expected}"
            self._first.append(BadLine(int(self._lines[place]), reason))
        self._wrong |= wrong

    def labels(self, name: str) -> NDArray[np.uint8]:
        """Return a column of 0 and 1, or of true and false."""
        values = floats(self.columns[name], truths=True)
        wrong = (values != 0) & (values != 1)
        self.refuse(wrong, name, "neither 0 nor 1", called="the label")
        label: NDArray[np.uint8] = (values == 1).astype(np.uint8)
        return label

    def add_keys(self, feature: str, values: Values, lengths: Places | None = None) -> None:
        """Add the keys of a feature; a jagged one has as many per line as `lengths` says."""
        self._keys[feature] = values.keys
        if values.checks is not None:
            self._checks[feature] = values.checks
        if lengths is not None:
            self._lengths[feature] = lengths

    def samples(self, label: NDArray[np.uint8], dense: NDArray[np.float32]) -> Samples:
        """Return the good lines."""
        lines, keys, lengths, checks = self._lines, self._keys, self._lengths, self._checks
        if self._wrong.any():
            good = self.good
            masks = {
                name: np.repeat(good, lengths[name]) if name in lengths else good for name in keys
            }
            lines, label, dense = lines[good], label[good], dense[good]
            keys = {name: values[masks[name]] for name, values in keys.items()}
            checks = {name: values[masks[name]] for name, values in checks.items()}
            lengths = {name: values[good] for name, values in lengths.items()}
        return Samples(lines, label, dense, keys, self.bad, lengths, checks)


class Source(ABC):
    """Files that become samples, piece by piece."""

    name: str
    schema: Schema
    key_dtype: str
    paths: list[Path]
    describes: Mapping[str, Any] = MappingProxyType({})  # what else decides about the samples
    times = False  # whether the samples' "lines" are times, whose quantiles make the splits
    first_line = 0  # number of the first sample, which decides about its split
    header_lines = 0  # of each file

    def ready(self, disk: Disk, cores: Cores, watch: Watch) -> None:  # noqa: B027
        """Do what must be done before there are pieces; by default nothing."""

    @abstractmethod
    def pieces(self, start: Place | None = None) -> Iterator[Piece]:
        """Return the pieces of all files from a place on."""

    @abstractmethod
    def parse(self, piece: Piece) -> Samples:
        """Return the samples of a piece; several threads call this at once."""


def file_by_file(
    count: int, read: Callable[[Place], Iterator[Piece]], start: Place | None, *, headers: int = 0
) -> Iterator[Piece]:
    """Yield the pieces of `count` files from `start` on. `read` yields those of one file from a
    place on; each file begins with `headers` lines of header."""
    place = start or Place()
    for number in range(place.file, count):
        if number > place.file:
            place = Place(number, 0, 0, place.line - headers)
        for piece in read(place):
            yield piece
            place = piece.after
