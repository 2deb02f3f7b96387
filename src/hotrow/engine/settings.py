"""What an engine is built from: the settings of one width group."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hotrow.engine import tuning
from hotrow.engine.profile import Profile, hottest, small_tables
from hotrow.engine.rules import Pins
from hotrow.engine.strategy import Strategy
from hotrow.engine.tuning import Tuning
from hotrow.inputs.tables import WidthGroup
from hotrow.kernels.rules import RowSettings
from hotrow.store.budget import Share
from hotrow.support.streams import Lanes, lanes_of
from hotrow.support.threads import RowLock


@dataclass(frozen=True)
class Settings:
    """One width group, and how its rows are kept and trained."""

    layout: WidthGroup
    optimizer: RowSettings
    strategy: Strategy
    share: Share | None  # of the budget; None: every row lives in fast memory, or none
    device: torch.device
    seed: int
    profile: Profile | None = None
    window_bytes: int = 0  # for the ids of batches that are known ahead
    output_dtype: torch.dtype = torch.float32
    fill: str = "auto"  # how a GPU moves rows
    tuning: Tuning = field(default_factory=lambda: tuning.DEFAULT)
    # For tests: no page-locked memory, and what a GPU's engine has instead of shared threads.
    page_locked: bool = True
    writer: Any = None
    worker: Any = None
    # Callers hold it: to write for all that changes rows or maps, to read for reads and gathers.
    lock: RowLock = field(default_factory=lambda: RowLock(shared=False))

    @cached_property
    def lanes(self) -> Lanes:
        return lanes_of(self.device)

    @property
    def dim(self) -> int:
        return self.layout.dim

    @cached_property
    def width(self) -> int:
        """Numbers of a row: its weights and its optimizer state."""
        return self.dim + self.optimizer.rule.state_width(self.dim)

    @cached_property
    def state_columns(self) -> dict[str, slice]:
        """Where each piece of optimizer state stands in a row."""
        return self.optimizer.rule.state_columns(self.dim)

    @cached_property
    def device_bases(self) -> torch.Tensor:
        """The first id of each table, and the number of rows, on the device."""
        return torch.tensor([*self.layout.bases, self.layout.num_rows], device=self.device)

    @property
    def state_start(self) -> list[float]:
        """The value that each state column starts with."""
        return self.optimizer.rule.state_start(self.dim)

    @property
    def table_names(self) -> tuple[str, ...]:
        return tuple(table.name for table in self.layout.tables)

    def pins(self) -> Pins | None:
        """Return which rows the strategy pins; None: none."""
        layout, profile, part = self.layout, self.profile, self.strategy.pinned_part
        if part and profile is not None:
            return Pins(part, lambda count: hottest(profile, layout, count))
        if not self.strategy.learns_pins:
            return None
        return Pins(part, lambda count: small_tables(layout, count // 2), learned=True)
