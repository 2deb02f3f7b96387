"""What is computed from rows on a CPU: pooling, gradients, and one optimizer step.

`kernels/reference.py` specifies each operation. `gpu/arithmetic.py` has the same for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hotrow.engine.idle import IdleRows
from hotrow.engine.settings import Settings
from hotrow.engine.work import Work
from hotrow.inputs.batch import Lookups
from hotrow.kernels import reference
from hotrow.kernels.reference import SortedIds
from hotrow.kernels.rules import per_row


class HostPooling:
    """Computes from vectors that came from elsewhere, in the order of sorted ids."""

    def __init__(self, output_dtype: torch.dtype) -> None:
        self._dtype = output_dtype

    def pool(self, vectors: Tensor, ids: SortedIds, x: Lookups) -> Tensor:
        """Return one vector per bag, [bags, dim]; padding reads the last of the vectors."""
        pooled = reference.pool(vectors, ids.inverse, x.offsets, x.weights, x.divisor)
        return pooled.to(self._dtype)

    def row_grads(self, ids: SortedIds, x: Lookups, grads: Tensor) -> Tensor:
        """Return the gradient of each different row, [U, dim]."""
        grads = grads.float()
        if x.divisor is not None:
            grads = grads / x.divisor
        return reference.sum_by_row(grads, x.bag_of(), x.weights, ids)


class HostArithmetic:
    """Computes from rows in slots, or in a buffer of the direct path."""

    def __init__(self, settings: Settings, slots: Tensor, idle: IdleRows | None = None) -> None:
        """`idle` catches up rows that an optimizer moves in every step."""
        self._settings, self._slots, self._dim = settings, slots, settings.dim
        self._idle = idle

    def pool_planned(self, work: Work, x: Lookups) -> Tensor:
        """Return one vector per bag, [bags, dim], of a batch whose plan holds."""
        inverse = work.ids.inverse
        if self._slots.shape[1] == self._dim:
            index = work.plan.row_slots[inverse]
            return reference.pool(self._slots, index, x.offsets, x.weights, x.divisor)
        return reference.pool(self._vectors(work), inverse, x.offsets, x.weights, x.divisor)

    def _vectors(self, work: Work) -> Tensor:
        """Return the vectors of a batch's different rows, and one of zeros, which padding reads."""
        slots: Tensor = work.plan.row_slots
        if self._idle is None:
            return reference.take(self._slots, slots, self._dim)
        vectors = self._idle.now(self._slots.index_select(0, slots[:-1]), work.ids.ids)
        return functional.pad(vectors, (0, 0, 0, 1))

    def weight_grads(self, work: Work, x: Lookups, grads: Tensor) -> Tensor:
        """Return the gradients of per-sample weights, [L], of a batch whose plan holds."""
        return reference.weight_grads(self._vectors(work), work.ids.inverse, x.bag_of(), grads)

    def weight_grads_of(self, rows: Tensor, ids: SortedIds, x: Lookups, grads: Tensor) -> Tensor:
        """Return the gradients of per-sample weights from the rows of `ids`."""
        vectors = rows[:, : self._dim]
        if self._idle is not None:
            vectors = functional.pad(self._idle.now(rows[:-1], ids.ids), (0, 0, 0, 1))
        return reference.weight_grads(vectors, ids.inverse, x.bag_of(), grads)

    def row_grads(self, work: Work, x: Lookups, grads: Tensor) -> Tensor:
        """Return the gradient of each different row of a batch, [U, dim]."""
        if x.divisor is not None:
            grads = grads / x.divisor
        return reference.sum_by_row(grads, x.bag_of(), x.weights, work.ids)

    def update_planned(self, work: Work, x: Lookups, grads: Tensor) -> bool:
        """Update the rows of a batch whose plan holds; False: gradients have to be summed first."""
        return False

    def pooling(self, output_dtype: torch.dtype) -> HostPooling:
        """Return what computes from vectors of other ranks."""
        return HostPooling(output_dtype)

    def slots_of(self, work: Work, ids: Tensor) -> Tensor | None:
        """Return the slots of some rows of a batch whose plan holds; None: ask the direct path."""
        slots: Tensor = work.plan.row_slots[:-1]
        if ids.numel() < slots.numel():  # the others have no gradient
            slots = slots[torch.searchsorted(work.ids.ids, ids)]
        return slots

    def step(self, rows: Tensor, ids: Tensor, grads: Tensor) -> None:
        """Make one optimizer step on rows in a buffer, from their gradients."""
        settings = self._settings
        if self._idle is not None:
            self._idle.catch_up(rows, ids, steps_now=True)
        scalars = settings.optimizer.scalars(list(settings.table_names))
        alike = all(bool((values == values[0]).all()) for values in scalars.values())
        columns = per_row(scalars, None if alike else settings.layout.table_of(ids))
        state = [rows[:, place] for place in settings.state_columns.values()]
        settings.optimizer.rule.update(rows[:, : self._dim], grads, state, columns)
