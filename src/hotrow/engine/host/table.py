"""Rows in host memory as the CPU reads and updates them. Knows no batch but by its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.host.link import HostBuffer, Link, RowColumns, in_any_order
from hotrow.engine.host.plan import HostPlan
from hotrow.engine.idle import idle_rows
from hotrow.engine.settings import Settings
from hotrow.kernels.rules import SGD, per_row
from hotrow.kernels.rules import Scalars as TableNumbers
from hotrow.store.ram import Store
from hotrow.support.interrupts import uninterrupted
from hotrow.support.streams import Mark


class HostTable:
    """Reads the rows of batches, and updates them when their gradients have come."""

    def __init__(self, settings: Settings, store: Store, link: Link) -> None:
        self._settings, self._store, self._link = settings, store, link
        self._idle = idle_rows(settings, store)
        self._device, self._lanes, self._dim = settings.device, settings.lanes, settings.dim
        dim, width, rows = settings.dim, settings.width, store.rows
        self._columns = [RowColumns(rows[:, :dim])]
        if width > dim:
            self._columns.append(RowColumns(rows[:, dim:]))
        self._rows, self.grads = (HostBuffer(dim, locked=link.exists) for _ in range(2))
        self._state_rows = HostBuffer(width - dim, locked=False)
        self._held: HostPlan | None = None  # whose rows the buffer for rows has, as the store does
        self._rows_sent = self._lanes.mark("train")
        self.updates = 0
        # An update whose gradients are on their way; a function that does not keep this object.
        self._owed: Callable[[HostTable], None] | None = None
        self._numbers_of: Any = None
        self._numbers: tuple[TableNumbers, bool] = ({}, True)

    def read_vectors(self, ids: Tensor, out: Tensor) -> None:
        """Copy the vectors of rows, which may repeat."""
        self.settle()
        self._read(ids, out)

    def _read(self, ids: Tensor, out: Tensor) -> None:
        if self._idle is None:
            self._columns[0].read(ids, out=out)
        else:
            out.copy_(self._idle.now(self._store.rows.index_select(0, ids), ids))

    def collect(self, plan: HostPlan, *, cross: bool) -> Tensor:
        """Return the rows of a batch, and zeros: here, or on the device where they `cross`."""
        self.settle()
        count = plan.num_rows
        if plan.is_trained:
            self._rows_sent.wait()
            self._held = None  # until all of these have been read
            rows = self._rows.take(count + 1)
        else:  # other threads may read at the same time
            rows = torch.empty(count + 1, self._dim, pin_memory=self._device.type == "cuda")
        rows[count].zero_()  # what padding reads
        there = torch.empty(rows.shape, device=self._device) if cross else rows
        # In one go: the cores lose more by starting again and again than the link would gain.
        self._read(plan.ids, rows[:count])
        if cross:
            there.copy_(rows, non_blocking=True)
        if plan.is_trained:
            if cross:
                self._rows_sent = self._lanes.mark("train")
                plan.there, plan.there_since = there, self.updates
            self._held = None if self._idle is not None else plan  # these are as of now
        return there

    def send_home(self, plan: HostPlan | None, ids: Tensor, grads: Tensor) -> None:
        """Send `grads` of rows to the host, where an update waits for them; `ids` are there."""
        self.settle()
        numbers = self.numbers_now()
        here = grads
        if self._link.exists:
            here = self.grads.take(len(grads)).copy_(grads, non_blocking=True)
        arrived = self._lanes.mark("train")
        self.owe(lambda table: table.update_rows(plan, ids, here, arrived, numbers), plan)

    def owe(self, update: Callable[[HostTable], None], plan: HostPlan | None) -> None:
        """Keep an update for the next read of a row, which does it first.

        Until then the device goes on, with the dense part's optimizer for instance. `backward()`
        may also end in a thread of autograd's own, whose cores would be others than the reader's.
        """
        self._owed = update
        self.updates += 1
        if plan is not None:
            plan.there = None
        # Without a link the gradients are autograd's own, and may change; idle rows of other
        # groups may be read as of the step that this update belongs to.
        if not self._link.exists or self._idle is not None:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Do the update that is owed."""
        if self._owed is not None:
            with uninterrupted():
                owed, self._owed = self._owed, None
                owed(self)

    def update_rows(
        self,
        plan: HostPlan | None,
        ids: Tensor,
        grads: Tensor,
        arrived: Mark,
        numbers: tuple[TableNumbers, bool],
    ) -> None:
        # What the lookup has read is still there, if no row was written since.
        is_held = plan is not None and self._held is plan
        self._held = None
        if not is_held:
            self._rows_sent.wait()
        moves = self._store.frozen.moving(ids)
        values = [self._rows.take(len(ids))]
        if moves is not None:
            ids = ids[moves]
            values = [values[0][moves] if is_held else values[0][: len(ids)]]
        self._store.note_changed(ids)
        if self._idle is not None:
            arrived.wait()
            self._update_idle(ids, grads if moves is None else grads[moves], numbers)
            return
        if len(self._columns) > 1:
            values.append(self._state_rows.take(len(ids)))
        with in_any_order():
            for columns, out in list(zip(self._columns, values, strict=True))[is_held:]:
                columns.read(ids, out=out)
            arrived.wait()
            if moves is not None:
                grads = grads[moves]
            self._step_on(ids, values, grads, numbers)
            self._store.will_write(ids)
            for columns, changed in zip(self._columns, values, strict=True):
                columns.write(ids, changed)

    def _step_on(
        self, ids: Tensor, values: list[Tensor], grads: Tensor, numbers: tuple[TableNumbers, bool]
    ) -> None:
        scalars, alike = numbers
        rule, weights = self._settings.optimizer.rule, values[0]
        if type(rule) is SGD and alike and not scalars["decay"].any():
            # The same without passes over zeros; the gradients are ours.
            weights.sub_(grads.mul_(float(scalars["lr"][0].float())))
            return
        # A row's state follows its weights.
        state = [
            values[1][:, place.start - self._dim : place.stop - self._dim]
            for place in self._settings.state_columns.values()
        ]
        tables = None if alike else self._settings.layout.table_of(ids)
        rule.update(weights, grads, state, per_row(scalars, tables))

    def _update_idle(self, ids: Tensor, grads: Tensor, numbers: tuple[TableNumbers, bool]) -> None:
        """Update rows that are stored as of the step of their last gradient."""
        assert self._idle is not None
        rows = self._store.rows.index_select(0, ids)
        self._idle.catch_up(rows, ids, steps_now=True)
        values = [rows[:, : self._dim], rows[:, self._dim :]]
        self._step_on(ids, values, grads, numbers)
        with in_any_order():
            self._store.write(ids, rows)

    def numbers_now(self) -> tuple[TableNumbers, bool]:
        """Return the rule's numbers for each table, and whether all tables have the same."""
        names = self._settings.table_names
        values = self._settings.optimizer.table_scalars(names)
        if values is not self._numbers_of:
            self._numbers_of = values
            scalars = self._settings.optimizer.scalars(names)
            self._numbers = scalars, all(numbers == values[0] for numbers in values)
        return self._numbers

    def expect_changes(self) -> None:
        """Rows may change from now on without an update by this object."""
        self._held, self.updates = None, self.updates + 1

    def check(self) -> None:
        """Prove that what is held of the last batch is what the store has."""
        self.settle()
        if self._held is not None:
            ids = self._held.ids
            held, stored = self._rows.take(len(ids)), self._store.rows[ids, : self._dim]
            assert torch.equal(held.nan_to_num(), stored.nan_to_num()), (
                "rows have changed since they were read, without a note"
            )
