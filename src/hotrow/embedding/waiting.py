"""Gradients of rows that wait for an optimizer's step, as `.grad` of a parameter does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from hotrow.embedding.row_groups import Group, RowGroups
from hotrow.embedding.stand_ins import StandIns
from hotrow.engine.row_sums import RowSums, Scaling


class WaitingGrads:
    """The gradients of all backward passes since `zero_grad()`, summed by row.

    What torch does to the gradients of the stand-ins meanwhile is done to the rows' before others
    are added, and in a step.
    """

    def __init__(
        self, rows: RowGroups, stand_ins: StandIns, refuse_unheld: Callable[[], None]
    ) -> None:
        """`refuse_unheld` raises if no optimizer will ever step."""
        self._rows, self._stand_ins = rows, stand_ins
        rows.sums_wait = True
        self._refuse_unheld = weakref.WeakMethod(refuse_unheld)  # its object owns this one
        self._sums: dict[int, RowSums] = {}  # by the place of a group
        self._given: Sequence[int] = ()  # the places of tables that have a gradient
        # By the place of a group: where its tables stand among all.
        self._places: dict[int, Tensor] = {}
        self._masks: dict[tuple[bool, ...], Tensor] = {}

    def add(self, sums: Mapping[int, Sequence[RowSums]], tables: Collection[str]) -> None:
        """Add the gradients of a backward pass, by the place of a group; `tables` have one,
        perhaps of no row."""
        waiting = self._stand_ins.waiting()
        before = self._factors()
        for place, news in sums.items():
            olds = [self._sums[place]] if place in self._sums else []
            scaling = self._scaling(place, *before) if olds and before is not None else None
            self._sums[place] = self._group(place).sums.joined([*olds, *news], scaling)
        if before is not None:
            for place in self._sums.keys() - sums.keys():
                joined = self._group(place).sums.joined
                self._sums[place] = joined([self._sums[place]], self._scaling(place, *before))
        waiting_bytes = sum(each.num_bytes for each in self._sums.values())
        self._rows.waiting_bytes = max(self._rows.waiting_bytes, waiting_bytes)
        names = self._stand_ins.names
        self._given = range(len(names))
        if len(tables) < len(names):
            self._given = [
                place for place in self._given if waiting[place] or names[place] in tables
            ]
        if len(self._sums) < len(self._rows.groups):
            self._stand_ins.clear()
        for place, each in self._sums.items():
            self._group(place).sums.write_norms(each, self._stand_ins.table_grads(self._at(place)))

    def publish(self) -> None:
        """Show torch the norms of what was added; several ranks do it together, for all rows."""
        if self._rows.exchange is not None:
            self._stand_ins.change_norms(self._rows.exchange.norms)
        self._stand_ins.publish(self._given)

    def free_zeroed(self) -> None:
        """Free the memory of gradients that `zero_grad()` has taken away."""
        if self._sums and not any(self._stand_ins.waiting()):
            self._sums.clear()
            if self._rows.exchange is not None:
                self._rows.exchange.early.forget_grads()

    def _factors(self) -> tuple[Tensor, Tensor] | None:
        """Return what was done since to the gradients that wait: factors, and which are kept; None
        if none wait."""
        self.free_zeroed()
        if not self._sums:
            return None
        refuse_unheld = self._refuse_unheld()
        if refuse_unheld is not None:
            refuse_unheld()
        return self._stand_ins.judge()

    def _scaling(self, place: int, factors: Tensor, kept: Tensor) -> Scaling:
        return Scaling(self._at(place), factors, kept)

    def _group(self, place: int) -> Group:
        return self._rows.groups[place]

    def _at(self, place: int) -> Tensor:
        """Return where the tables of a group stand among all."""
        if place not in self._places:
            names = self._stand_ins.names
            numbers = [names.index(table.name) for table in self._group(place).layout.tables]
            self._places[place] = torch.tensor(numbers, device=self._stand_ins.device)
        return self._places[place]

    def step(self, tables: Collection[str], is_skipped: Tensor | None) -> None:
        """Update the rows of some tables, unless `is_skipped` is not 0. Gradients go on waiting,
        as torch's do."""
        factors, stepped = self._stand_ins.judge()
        if is_skipped is not None:
            stepped = stepped & (is_skipped == 0).to(stepped.device)
        if len(tables) < len(self._stand_ins.names):
            stepped = stepped & self._mask(tables)
        for place, sums in self._sums.items():
            self._group(place).sums.update(sums, self._scaling(place, factors, stepped))

    def of_table(self, table: str) -> tuple[Tensor, Tensor] | None:
        """Return the gradients of a table's rows, as they are now: row numbers, ascending and each
        once, and gradients [n, dim]; None: the table has no gradient."""
        place = self._stand_ins.names.index(table)
        if not self._stand_ins.waiting()[place]:
            return None
        if self._rows.exchange is not None:
            raise RuntimeError(
                f"gradients of table {table!r} wait on several ranks, each of which has those of "
                "its own rows; let the optimizer step, or call zero_grad(), before hotrow.revert()"
            )
        group, base, size = self._rows.find(table)
        sums = self._sums.get(self._rows.groups.index(group))
        if sums is None:
            return None
        factors, kept = self._stand_ins.judge()
        ids = sums.ids.long() - base
        taken = (ids >= 0) & (ids < size) & kept[place].to(ids.device)
        if sums.valid is not None:
            taken &= sums.valid
        return ids[taken], sums.grads[taken] * factors[place].to(ids.device)

    def _mask(self, tables: Collection[str]) -> Tensor:
        key = tuple(name in tables for name in self._stand_ins.names)
        if key not in self._masks:
            self._masks[key] = torch.tensor(key, device=self._stand_ins.device)
        return self._masks[key]

    def bad_row(self, tables: Collection[str]) -> tuple[str, float] | None:
        """Return a row of these tables whose gradient is not finite, and a value of it."""
        stepped = self._mask(tables) & self._stand_ins.judge()[1]
        for place, sums in self._sums.items():
            group = self._group(place)
            moves = stepped[self._at(place)][group.layout.table_of(sums.ids.long())]
            moves &= sums.ids < group.layout.num_rows  # padding has no gradient that was written
            for mask in (sums.valid, group.store.frozen.trained(sums.ids)):
                moves = moves if mask is None else moves & mask
            bad = moves & ~sums.grads.isfinite().all(1)
            if bool(bad.any()):
                row = int(bad.int().argmax())
                grad = sums.grads[row]
                return group.layout.describe(int(sums.ids[row])), float(grad[~grad.isfinite()][0])
        return None
