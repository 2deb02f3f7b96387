"""The ids a run would look up, and nothing else of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hotrow.data import SyntheticSequences
from hotrow.run.config import DataSection
from hotrow.run.source import Generated
from hotrow.study.lookups import NO_ROW, OfRun


class Trace:
    """Batches of ids in one space for all tables of a run."""

    def __init__(self, data: DataSection, *, steps: int | None = None) -> None:
        """`steps`: of sequences, before their targets."""
        self._drawn = None
        if data.kind == "prepared":
            self._read = OfRun(data, steps=steps)
            self._rows = tuple(self._read.rows.values())
        else:
            self._drawn = Generated(data, steps=steps, pin_memory=False).drawn
            self._rows = self._drawn.config.rows
        self._bases = torch.tensor([0, *self._rows]).cumsum(0)

    @property
    def num_rows(self) -> int:
        return int(self._bases[-1])

    def batches(self, count: int) -> Iterator[Tensor]:
        """The ids of the first `count` batches, [lookups] each; a folder's, epoch after epoch."""
        if self._drawn is None:
            for read in self._read.batches(count):
                yield torch.from_numpy(read.ids[read.ids != NO_ROW]).long()
            return
        for batch in self._drawn.batches(0, count):
            if isinstance(batch.sparse, Tensor):
                yield (batch.sparse + self._bases[:-1]).flatten()
                continue
            lookups = batch.sparse.lengths().view(len(self._rows), -1).sum(1)
            ids = batch.sparse.values() + self._bases[:-1].repeat_interleave(lookups)
            if isinstance(self._drawn, SyntheticSequences):
                ids = ids[ids < self._bases[1:].repeat_interleave(lookups)]  # no padding
            yield ids

    def hottest(self, count: int) -> Tensor:
        """The `count` ids that are looked up most often, hottest first: in truth, or as the
        training split has counted them."""
        found = [self._table(table, min(count, rows)) for table, rows in enumerate(self._rows)]
        ids = [rows + base for (rows, _), base in zip(found, self._bases.tolist(), strict=False)]
        uses = torch.cat([each.double() for _, each in found])
        order = torch.sort(uses, descending=True, stable=True)[1][:count]
        return torch.cat(ids)[order]

    def _table(self, table: int, count: int) -> tuple[Tensor, Tensor]:
        """Rows of a table, the hottest among them, and their uses."""
        if self._drawn is not None:
            return self._drawn.hottest(table, count), self._drawn.expected_counts(table, count)
        assert self._read.profile is not None
        rows, uses = self._read.profile[list(self._read.rows)[table]]
        return rows, uses
