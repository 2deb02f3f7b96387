"""The ids a run would look up, and nothing else of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hotrow.data import SyntheticSequences
from hotrow.run.config import DataSection
from hotrow.run.source import Generated


class Trace:
    """Batches of ids in one space for all tables of a run."""

    def __init__(self, data: DataSection, *, steps: int | None = None) -> None:
        """`steps`: of sequences, before their targets."""
        if data.kind == "prepared":
            raise ValueError(
                'a simulation makes its ids; kind = "counted" with the same folder makes them as '
                "often as they were counted"
            )
        self._drawn = Generated(data, steps=steps, pin_memory=False).drawn
        self._rows = self._drawn.config.rows
        self._bases = torch.tensor([0, *self._rows]).cumsum(0)

    @property
    def num_rows(self) -> int:
        return int(self._bases[-1])

    def batches(self, count: int) -> Iterator[Tensor]:
        """The ids of the first `count` batches, [lookups] each."""
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
        """The `count` ids that are looked up most often in truth, hottest first."""
        ids, uses = [], []
        for table, rows in enumerate(self._rows):
            most = min(count, rows)
            ids.append(self._drawn.hottest(table, most) + self._bases[table])
            uses.append(self._drawn.expected_counts(table, most))
        order = torch.sort(torch.cat(uses), descending=True, stable=True)[1][:count]
        return torch.cat(ids)[order]
