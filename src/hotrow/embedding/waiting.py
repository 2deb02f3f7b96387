"""Gradients of rows that wait for an optimizer's step, as `.grad` of a parameter does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotrow.embedding.row_groups import Group, RowGroups
from hotrow.embedding.stand_ins import StandIns
from hotrow.engine.work import Work
from hotrow.kernels import reference


@dataclass(frozen=True)
class RowSums:
    """Gradients of rows of one width: ids, ascending and each once, and sums [n, dim]."""

    ids: Tensor
    grads: Tensor
    work: Work | None  # the batch, if all rows are of one


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
        self._refuse_unheld = weakref.WeakMethod(refuse_unheld)  # its object owns this one
        self._sums: dict[int, RowSums] = {}  # by the place of a group

    def add(self, sums: dict[int, RowSums], tables: Collection[str]) -> None:
        """Add the gradients of a backward pass; `tables` have one, perhaps of no row."""
        waiting = self._stand_ins.waiting()
        self._follow(waiting)
        for place, new in sums.items():
            old = self._sums.get(place)
            self._sums[place] = new if old is None else self._added(place, old, new)
        names = self._stand_ins.names
        places = [place for place, name in enumerate(names) if waiting[place] or name in tables]
        self._stand_ins.publish(self._norms(), places)

    def _added(self, place: int, old: RowSums, new: RowSums) -> RowSums:
        ids = reference.sort_ids(
            torch.cat([old.ids, new.ids]), self._rows.groups[place].layout.num_rows
        )
        grads = reference.sum_pairs(torch.cat([old.grads, new.grads]), ids)
        return RowSums(ids.ids, grads, None)

    def _follow(self, waiting: Sequence[bool]) -> None:
        """Do to the gradients that wait what was done to the stand-ins' since."""
        if not self._sums:
            return
        if not any(waiting):
            self._sums.clear()
            return
        refuse_unheld = self._refuse_unheld()
        if refuse_unheld is not None:
            refuse_unheld()
        self._stand_ins.refuse_other_changes()
        factors = self._stand_ins.factors()
        kept = self._stand_ins.with_grad()
        for place, sums in list(self._sums.items()):
            tables = self._tables_of(place, sums.ids)
            sums = _taken(sums, kept[tables])
            self._sums[place] = _scaled(sums, factors, self._tables_of(place, sums.ids))

    def _tables_of(self, place: int, ids: Tensor) -> Tensor:
        """Return the place of each row's table among all."""
        layout = self._rows.groups[place].layout
        names = self._stand_ins.names
        numbers = torch.tensor([names.index(table.name) for table in layout.tables])
        return numbers.to(ids.device)[layout.table_of(ids)]

    def _norms(self) -> Tensor:
        """Return the norm of each table's gradients, [T]; 0 without any.

        Squares are summed in the order of ids, so that bits depend on nothing else.
        """
        norms = torch.zeros(len(self._stand_ins.names), dtype=torch.float64)
        for place, sums in self._sums.items():
            group = self._rows.groups[place]
            squares = reference.row_sum(sums.grads * sums.grads).squeeze(1)
            moves = group.store.frozen.moving(sums.ids)
            if moves is not None:
                squares = squares.masked_fill(~moves, 0.0)
            bases = torch.tensor([*group.layout.bases, group.layout.num_rows])
            bounds = torch.searchsorted(sums.ids, bases.to(sums.ids.device)).tolist()
            for table, low, high in zip(group.layout.tables, bounds, bounds[1:], strict=False):
                at = self._stand_ins.names.index(table.name)
                norms[at] = squares[low:high].double().sum().sqrt()
        return norms.float()

    def of_step(self, tables: Collection[str]) -> list[tuple[Group, RowSums]]:
        """Return what a step of these tables applies. It goes on waiting, as torch's does."""
        factors, names = self._stand_ins.factors(), self._stand_ins.names
        stepped = torch.tensor([name in tables for name in names], device=factors.device)
        stepped &= self._stand_ins.with_grad()
        parts = []
        for place, sums in self._sums.items():
            sums = _taken(sums, stepped[self._tables_of(place, sums.ids)])
            sums = _scaled(sums, factors, self._tables_of(place, sums.ids))
            group = self._rows.groups[place]
            if group.strategy.on_host:  # its update works in place
                sums = replace(sums, grads=sums.grads.clone())
            if sums.ids.numel():
                parts.append((group, sums))
        return parts


def _taken(sums: RowSums, taken: Tensor) -> RowSums:
    """Return the gradients of some rows."""
    if bool(taken.all()):
        return sums
    return RowSums(sums.ids[taken], sums.grads[taken], sums.work)


def _scaled(sums: RowSums, factors: Tensor, tables: Tensor) -> RowSums:
    if bool((factors == 1).all()):
        return sums
    return RowSums(sums.ids, sums.grads * factors[tables].unsqueeze(1), sums.work)
