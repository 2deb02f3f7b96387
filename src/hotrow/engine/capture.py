"""How a captured step treats the rows of an engine: in the graph, around it, or not at all."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.work import Work
from hotrow.inputs.batch import Batch
from hotrow.store.ram import Store


class NoBoundary:
    """What the host does around a graph that looks rows up and updates them by itself."""

    def load(self, work: Work) -> None:
        """Put vectors where the graph reads them."""

    def apply(self, work: Work) -> None:
        """Update rows from where the graph has put gradients."""


class NoCapture:
    """Rows of a CPU: no graph can use them, so steps run eagerly."""

    inputs = 0  # of captured steps; each keeps the plan of its batch

    def accepts(self, batch: Batch, *, updates_at_once: bool) -> bool:
        """Whether graphs may read a batch; `updates_at_once`: nothing scales its gradients."""
        return False

    def can_replay(self, work: Work, *, updates_at_once: bool) -> bool:
        """Whether a batch that graphs may read can be trained by one now."""
        return False

    def fix_lookups(self, most: int) -> None:
        """Plan all batches alike, as if they had so many lookups."""

    def push_scalars(self) -> None:
        """Bring the optimizer's numbers on the device up to date."""

    def settings(self) -> tuple[Any, ...]:
        """Return what graphs depend on: they are captured again when it changes."""
        return ()

    def memory_of(self, work: Work) -> Any:
        """Return the memory that a graph of this batch reads, and that it must keep."""
        return None

    def boundary(self, work: Work) -> NoBoundary:
        """Return what the host does around a graph of this batch, which is about to be captured."""
        return NoBoundary()


class InGraph(NoCapture):
    """Rows of a GPU: lookups and updates are launches, so they are part of the graph."""

    def __init__(self, scalars: Any, room: Any, store: Store) -> None:
        """`room`: how plans of jagged batches are sized."""
        self._scalars, self._room, self._store = scalars, room, store

    def accepts(self, batch: Batch, *, updates_at_once: bool) -> bool:
        return True

    def can_replay(self, work: Work, *, updates_at_once: bool) -> bool:
        holds: bool = work.group.slots_hold(work)
        return holds

    def fix_lookups(self, most: int) -> None:
        self._room.fix(most)

    def push_scalars(self) -> None:
        self._scalars.push()

    def settings(self) -> tuple[Any, ...]:
        self.push_scalars()
        changed = self._store.changed
        return (
            self._scalars.are_alike,
            _address(self._store.frozen.bits),
            None if changed is None else _address(changed.there),
        )

    def memory_of(self, work: Work) -> Any:
        return work.plan.buffers


class AroundGraph(NoCapture):
    """Rows that no graph can reach, on the host or on other ranks: they are looked up before the
    graph and updated after it."""

    def __init__(self, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: of the vectors."""
        self._dim, self._dtype, self._device = dim, dtype, device
        # Of the newest graph, by its input; graphs hold them, and they go with them.
        self._boundaries: weakref.WeakValueDictionary[int, GraphBoundary] = (
            weakref.WeakValueDictionary()
        )

    def accepts(self, batch: Batch, *, updates_at_once: bool) -> bool:
        return batch.offsets is None and updates_at_once

    def can_replay(self, work: Work, *, updates_at_once: bool) -> bool:
        return updates_at_once and bool(work.group.active)

    def boundary(self, work: Any) -> GraphBoundary:
        shape = (work.lookups.num_bags, self._dim)
        vectors = torch.zeros(shape, dtype=self._dtype, device=self._device)
        boundary = self._boundaries[work.berth] = GraphBoundary(vectors)
        return boundary

    def boundary_of(self, work: Any) -> GraphBoundary:
        """Return the boundary of the graph that is being captured."""
        return self._boundaries[work.berth]

    def num_bytes(self) -> dict[str, int]:
        size = sum(boundary.num_bytes for boundary in self._boundaries.values())
        return {"vectors of captured steps": size} if size else {}


class GraphBoundary(NoBoundary):
    """Where a captured step is cut: vectors come from rows outside, gradients go there."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors  # [bags, dim], read by the graph
        self.grads: Tensor | None = None  # likewise, written by it; None: it has no update
        self.used: tuple[bool, ...] | None = None  # the features that have gradients; None: all

    @property
    def num_bytes(self) -> int:
        return self.vectors.nbytes + (0 if self.grads is None else self.grads.nbytes)

    def load(self, work: Work) -> None:
        work.group.planning.compare(work)
        self.vectors.copy_(work.group.lookup(work, work.lookups))

    def apply(self, work: Work) -> None:
        if self.grads is not None:
            x = replace(work.lookups, used=self.used)
            if not work.group.update_planned(work, x, self.grads):
                work.group.update(*work.group.grads_by_row(work, x, self.grads), work)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
