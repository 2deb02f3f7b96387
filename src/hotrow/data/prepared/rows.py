"""Lines of files as columns, what is wrong with some of them, and the samples that they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared.arrow import floats, shown
from hotrow.data.prepared.keys import EXACT, Checks, Mask, Places, Values

EXAMPLES = 5  # of bad lines that are shown


@dataclass(frozen=True)
class BadLine:
    """A line that is left out: counted from 0 within its piece of text."""

    line: int
    reason: str


@dataclass(frozen=True)
class BadLines:
    """How many lines are left out, and the first of them: all would not fit the memory."""

    count: int = 0
    first: tuple[BadLine, ...] = ()

    @classmethod
    def joined(cls, parts: Iterable[BadLines]) -> BadLines:
        every = list(parts)
        first = sorted((bad for part in every for bad in part.first), key=lambda bad: bad.line)
        return cls(sum(part.count for part in every), tuple(first[:EXAMPLES]))

    def later(self, lines: int) -> BadLines:
        """Return the same with so many lines before them."""
        first = (BadLine(bad.line + lines, bad.reason) for bad in self.first)
        return BadLines(self.count, tuple(first))


@dataclass(frozen=True)
class Samples:
    """The good lines of a piece, as columns; ids are still keys."""

    lines: NDArray[np.int64]  # [samples], counted from the start of the piece
    label: NDArray[np.uint8]  # [samples]
    dense: NDArray[np.float32]  # [samples, dense columns]
    keys: dict[str, NDArray[Any]]  # of each feature: [samples], or of a jagged one all its values
    bad: BadLines = field(default_factory=BadLines)
    lengths: dict[str, Places] = field(default_factory=dict)  # of jagged ones [samples]
    checks: dict[str, Checks] = field(default_factory=dict)  # like keys; without: all are EXACT

    @property
    def num_bytes(self) -> int:
        columns = (self.keys, self.lengths, self.checks)
        arrays = [self.lines, self.label, self.dense, *(a for c in columns for a in c.values())]
        return sum(array.nbytes for array in arrays)

    def checks_of(self, feature: str) -> Checks:
        checks = self.checks.get(feature)
        return np.full(len(self.keys[feature]), EXACT) if checks is None else checks


class Rows:
    """Columns of lines, as Arrow arrays by name. Collects what is wrong with lines, of which the
    first reason counts, and the keys of features."""

    def __init__(
        self, columns: Mapping[str, Any], lines: NDArray[np.int64], bad: BadLines | None = None
    ) -> None:
        """`lines`: the places of these lines in their piece. `bad`: lines that have no columns."""
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
        """Return a column of 0 and 1, or true and false."""
        values = floats(self.columns[name], truths=True)
        wrong = (values != 0) & (values != 1)
        self.refuse(wrong, name, "neither 0 nor 1", called="the label")
        label: NDArray[np.uint8] = (values == 1).astype(np.uint8)
        return label

    def add_keys(self, feature: str, values: Values, lengths: Places | None = None) -> None:
        """Add the keys of a feature; `lengths` says how many each line has of a jagged one."""
        self._keys[feature] = values.keys
        if values.checks is not None:
            self._checks[feature] = values.checks
        if lengths is not None:
            self._lengths[feature] = lengths

    def samples(self, label: NDArray[np.uint8], dense: NDArray[np.float32]) -> Samples:
        """Return the lines that nothing is wrong with."""
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
