"""Gradients summed by row, which wait for an optimizer's step and may be scaled until then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.work import Work
from hotrow.inputs.batch import Lookups
from hotrow.kernels import reference

WAITING = "waiting gradients"  # among the bytes of fast memory


@dataclass(frozen=True)
class RowSums:
    """Gradients of rows of one width: ids, ascending and each once, and sums [n, dim]."""

    ids: Tensor
    grads: Tensor
    work: Any = None  # the batch, if all rows are of one; a GPU's engine keeps no plan alive
    # [n] bool: others have no gradient; None: all have. The id `num_rows` is padding, anyhow.
    valid: Tensor | None = None
    count: Any = None  # how many rows there are before padding, known late; None: no padding

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.grads.nbytes


@dataclass(frozen=True)
class TableGrads:
    """What torch sees of the gradients of a collection's tables, and where the group's are.

    A gradient is its norm and a mark; both are multiplied alike.
    """

    norms: Tensor  # [all tables] float32: as they were made
    marked: Tensor  # [all tables, 1, 2] float32: norms and marks, which torch changes
    mark: float
    places: Tensor  # [T] int64: where each table of the group stands among all


@dataclass(frozen=True)
class Scaling:
    """What was done to the gradients of each table since they were summed."""

    places: Tensor  # [T] int64: where each table of the group stands among all
    factors: Tensor  # [all tables] float32
    kept: Tensor  # [all tables] bool: others have no gradient, or are not stepped


class HostSums:
    """Sums whose number the host knows."""

    def __init__(self, group: Any) -> None:
        self._group, self._layout = group, group.layout

    def of_batch(self, work: Work, x: Lookups, grads: Tensor) -> RowSums:
        """Sum the gradients of bags."""
        ids, sums = self._group.grads_by_row(work, x, grads)
        return RowSums(ids, sums, work)

    def joined(self, parts: Sequence[RowSums], scaling: Scaling | None = None) -> RowSums:
        """Add sums up, in their order; `scaling` is what was done to the first since."""
        if scaling is not None:
            parts = [self._scaled(parts[0], scaling), *parts[1:]]
        if len(parts) == 1:
            return parts[0]
        ids = reference.sort_ids(torch.cat([part.ids for part in parts]), self._layout.num_rows)
        grads = torch.cat([part.grads for part in parts])
        return RowSums(ids.ids, reference.sum_pairs(grads, ids))

    def _scaled(self, sums: RowSums, scaling: Scaling) -> RowSums:
        """Multiply the gradients of each table; drop those of tables that are not kept."""
        factors, kept = scaling.factors, scaling.kept
        tables = scaling.places[self._layout.table_of(sums.ids)]
        if not bool(kept[scaling.places].all()):
            taken = kept[tables]
            sums = RowSums(sums.ids[taken], sums.grads[taken], sums.work)
            tables = tables[taken]
        if bool((factors == 1).all()):
            return sums
        return replace(sums, grads=sums.grads * factors[tables].unsqueeze(1))

    def write_norms(self, sums: RowSums, out: TableGrads) -> None:
        """Write the norm of each table's gradients; 0 without any.

        Squares are summed in the order of ids, so that bits depend on nothing else.
        """
        squares = reference.row_sum(sums.grads * sums.grads).squeeze(1)
        moves = self._group.store.frozen.moving(sums.ids)
        if moves is not None:
            squares = squares.masked_fill(~moves, 0.0)
        bases = torch.tensor([*self._layout.bases, self._layout.num_rows])
        bounds = torch.searchsorted(sums.ids, bases.to(sums.ids.device)).tolist()
        pairs = pairwise(bounds)
        norms = torch.stack([squares[low:high].double().sum().sqrt() for low, high in pairs])
        out.norms[out.places] = norms.to(out.norms)
        out.marked[out.places, 0, 0] = out.norms[out.places]
        out.marked[out.places, 0, 1] = out.mark

    def update(self, sums: RowSums, scaling: Scaling) -> None:
        """Make one optimizer step on the rows of the tables that are kept."""
        sums = self._scaled(sums, scaling)
        if self._group.strategy.on_host:  # its update works in place, and these go on waiting
            sums = replace(sums, grads=sums.grads.clone())
        if sums.ids.numel():
            with self._group.timed(sums.work):
                self._group.update(sums.ids, sums.grads, sums.work)
