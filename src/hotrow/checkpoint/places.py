"""Where the rows of a table lie, in files and in a collection: with one rank, or with several.

Rank r of R has the rows of a table that `distributed.owners` gives it, numbered as there. Both are
closed forms of the table's name, its size and R, so a manifest has these three and no list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow.distributed.owners import SHARDS, TableOwners

Where = slice | Tensor  # rows by number: all from one to another, or those of a tensor
MOST_RANKS = 1 << 14  # more than there can be: a damaged manifest is to size nothing


@dataclass(frozen=True)
class Share:
    """The rows of a table that one rank has."""

    num_rows: int  # of the whole table
    owners: TableOwners | None = None  # None: one rank has all of them
    rank: int = 0

    @property
    def ranks(self) -> int:
        return 1 if self.owners is None else self.owners.ranks

    @property
    def count(self) -> int:
        return self.num_rows if self.owners is None else int(self.owners.counts[self.rank])

    @property
    def name(self) -> str:
        """The table's name, if it says which rank has which rows: modules may be converted alone,
        or in a model, and have other names."""
        return "" if self.owners is None else self.owners.name

    def is_like(self, other: Share) -> bool:
        """Whether both are the same rows with the same numbers."""
        return (self.ranks, self.rank, self.name) == (other.ranks, other.rank, other.name)

    def meets(self, other: Share) -> bool:
        """Whether some shards of this one may be in the other."""
        if self.owners is None or other.owners is None or self.name != other.name:
            return True
        first, last = self.owners.first[self.rank : self.rank + 2]
        others = other.owners.first[other.rank : other.rank + 2]
        return bool(first < others[1] and others[0] < last)

    def rows_of(self, numbers: Where) -> Tensor:
        """Return the rows of the whole table that have these numbers here."""
        if isinstance(numbers, slice):
            numbers = torch.arange(numbers.start, numbers.stop)
        if self.owners is None or not len(numbers):
            return numbers
        return torch.from_numpy(self.owners.rows_of(self.rank, numbers.numpy()))

    def numbers_of(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return which of some rows of the whole table are here (None: all), and their numbers."""
        if self.owners is None:
            return None, rows
        owner, numbers = self.owners.find(rows.numpy())
        mine = torch.from_numpy(owner == self.rank)
        return mine, torch.from_numpy(numbers)[mine]


def shares_of(name: str, num_rows: int, ranks: int) -> list[Share]:
    """Return the rows of a table that each rank has."""
    if ranks == 1:
        return [Share(num_rows)]
    owners = TableOwners(name, num_rows, ranks)
    return [Share(num_rows, owners, rank) for rank in range(ranks)]


def in_order(
    shares: Sequence[Share], parts: Sequence[Iterator[Tensor]], width: int, at_once: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield all rows of a table in order, (first row, [n, width]), from those that each rank has.

    `parts`: by rank, its rows in pieces, in the order of their numbers. They are read to their end.
    `at_once`: about how many rows are yielded together.
    """
    owners = shares[0].owners
    assert owners is not None
    step, streams = max(1, at_once // SHARDS), [_Stream(part, width) for part in parts]
    for block in range(0, owners.blocks, step):
        first, end = block * SHARDS, min(block + step, owners.blocks)
        rows = torch.empty(min(end * SHARDS, owners.num_rows) - first, width)
        for share, stream in zip(shares, streams, strict=True):
            low, high = (owners.first_of_block(share.rank, x) for x in (block, end))
            if low < high:
                rows[share.rows_of(slice(low, high)) - first] = stream.take(high - low)
        yield first, rows
    for stream in streams:
        stream.end()


class _Stream:
    """Takes rows in any portions from pieces of other sizes."""

    def __init__(self, pieces: Iterator[Tensor], width: int) -> None:
        self._pieces, self._left = pieces, torch.empty(0, width)

    def take(self, count: int) -> Tensor:
        taken = [self._left[:count]]
        self._left, missing = self._left[count:], count - len(self._left)
        while missing > 0:
            piece = next(self._pieces)  # the manifest's numbers were checked: there are enough
            taken.append(piece[:missing])
            self._left = piece[missing:]
            missing -= len(piece)
        return torch.cat(taken)

    def end(self) -> None:
        """Read to the end, where checksums are compared."""
        for _ in self._pieces:
            pass
