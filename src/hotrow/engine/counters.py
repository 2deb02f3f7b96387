"""What one width group has looked up and moved, and which batches did not fit. Knows ids alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hotrow.engine.rules import PlannerRules
from hotrow.inputs.tables import WidthGroup
from hotrow.kernels.reference import SortedIds
from hotrow.support.clock import Part, Sum
from hotrow.support.messages import warn


class Counters:
    """Lookups, different rows, rows fetched and rows evicted: in all, and by table."""

    def __init__(
        self, layout: WidthGroup, device: torch.device, *, width: int, moved_width: int
    ) -> None:
        """`width`: numbers of a row; `moved_width`: those that cross when a batch needs it."""
        self._layout, self._row_bytes, self._moved_bytes = layout, 4 * width, 4 * moved_width
        self.moved = [0, 0, 0, 0]
        self.by_table = torch.zeros(len(layout.tables), 4, dtype=torch.int64, device=device)
        self.loaded_rows = 0  # fetched to be pinned, before a lookup asked for them
        self.loaded_by_table = torch.zeros(len(layout.tables), dtype=torch.int64, device=device)
        self.made_rows: Callable[[], int] = lambda: 0  # rows that entered slots without being read
        self.direct_batches = 0  # batches that took the direct path because they did not fit
        self.chunk_time = Sum()
        self.chunks = Part("chunks", self.chunk_time)

    def note(self, moved: Sequence[int]) -> None:
        """Add lookups, different rows, rows fetched and rows evicted."""
        self.moved = [before + more for before, more in zip(self.moved, moved, strict=True)]

    def count(
        self, ids: SortedIds, *, fetched: Tensor | None = None, evicted: Tensor | None = None
    ) -> None:
        """Count a batch by its sorted ids; -1 among rows that moved is none."""
        self.note([ids.order.numel(), ids.ids.numel(), _rows_in(fetched), _rows_in(evicted)])
        edges = torch.searchsorted(ids.ids, self._bases(ids.ids))
        self.by_table[:, 0] += ids.starts[edges].diff()
        self.by_table[:, 1] += edges.diff()
        for column, rows in ((2, fetched), (3, evicted)):
            if rows is not None:
                tables = self._layout.table_of(rows[rows >= 0])
                self.by_table[:, column] += torch.bincount(tables, minlength=len(self.by_table))

    def count_loaded(self, ids: Tensor) -> None:
        """Count rows that were fetched to be pinned."""
        self.loaded_rows += ids.numel()
        # Sorting does not wait for the device; counting by table would.
        edges = torch.searchsorted(ids.sort()[0], self._bases(ids))
        self.loaded_by_table += edges.diff().to(self.loaded_by_table.device)

    def _bases(self, ids: Tensor) -> Tensor:
        return ids.new_tensor([*self._layout.bases, self._layout.num_rows])

    def bytes_of(self, fetched: int, evicted: int, loaded: int) -> tuple[int, int]:
        """Return the bytes that entered and that left with so many rows."""
        entered = fetched * self._moved_bytes + loaded * self._row_bytes
        return entered, evicted * self._moved_bytes


def _rows_in(ids: Tensor | None) -> int:
    return 0 if ids is None else int((ids >= 0).sum())


class Overflow:
    """Batches that do not fit the slots: how many slots would have held them, and the warning."""

    # What to write to get so many slots instead of those; None: the budget is not in bytes.
    setting_for: Callable[[int, int], str] | None = None

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self.needed_slots = 0

    def note(self, ids: Tensor, planner: PlannerRules, num_slots: int, *, is_first: bool) -> None:
        """A batch with these different rows has no room; warn of the first."""
        self.needed_slots = max(self.needed_slots, planner.slots_for(ids, self.needed_slots))
        if not is_first:
            return
        advice = self.remedy("it", num_slots)
        if self.needed_slots <= num_slots and planner.pins is not None:
            advice = "Pinned rows give way to the next ones of its size"
        warn(
            f"a batch of {ids.numel():,} different rows does not fit the {num_slots:,} "
            f"slots of width {self._dim} beside those in flight; it passes through in chunks, "
            f"which is correct but slow. {advice}"
        )

    def remedy(self, batches: str, num_slots: int) -> str:
        """Say what would hold batches that passed in chunks."""
        if self.needed_slots <= num_slots:
            return f"A larger budget would hold {batches}"
        if self.setting_for is None:
            return f"{self.needed_slots:,} slots would hold {batches}"
        return f"{self.setting_for(self.needed_slots, num_slots)} would hold {batches}"
