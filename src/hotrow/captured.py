"""A training step as CUDA graphs: the host launches it at once, instead of kernel by kernel.

A graph reads its inputs at fixed places. Batches are copied there; plans stay where they are, in
one of a few sets of buffers, and each set has a graph of its own. What a graph cannot do (another
shape, a batch that goes the direct way) runs eagerly, with the same kernels and the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.ahead import map_tensors, tensors_in
from hotrow.embedding import Arrival, EmbeddingBagCollection
from hotrow.optim import RowOptimizer

_EAGER_FIRST = 3  # steps of a shape before it is captured: kernels are compiled, memory is there
_MOST_GRAPHS = 24


class CapturedStep:
    """Runs `step(batch) -> loss`, captured where that is possible."""

    def __init__(
        self,
        step: Callable[[Any], Tensor],
        ids: Callable[[Any], Any],
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
    ) -> None:
        self._step, self._ids, self._optimizer, self._device = step, ids, optimizer, device
        self._shapes: dict[Any, _Shape] = {}
        self._settings: Any = None
        self._loss = torch.zeros((), device=device)
        self._pool: Any = None
        self._stale = 0

    def run(self, batch: Any, arrivals: Sequence[tuple[EmbeddingBagCollection, Arrival]]) -> Tensor:
        """One step; the loss is valid until the next one."""
        if not self._can_capture(arrivals):
            return self._step(batch)
        tensors = tensors_in(batch)
        shape = self._shape(batch, tensors)
        if shape.steps < _EAGER_FIRST:
            shape.steps += 1
            return self._step(batch)
        self._drop_if_stale(arrivals)
        key = tuple(id(work.plan.buffers) for _, each in arrivals for work in each.works)
        graph = shape.graphs.get(key)
        if graph is None:
            if sum(len(each.graphs) for each in self._shapes.values()) >= _MOST_GRAPHS:
                return self._step(batch)
            graph = shape.graphs[key] = self._capture(shape, arrivals)
        for there, here in zip(shape.tensors, tensors, strict=True):
            there.copy_(here, non_blocking=True)
        for embedding, _ in arrivals:
            embedding.optimizer.count_step()
            for group in embedding.groups:
                group.push_scalars()
        graph.replay()
        return self._loss

    def _can_capture(self, arrivals: Sequence[tuple[EmbeddingBagCollection, Arrival]]) -> bool:
        return bool(arrivals) and all(
            work.group.slots_hold(work) and each.batch.offsets is None
            for _, each in arrivals
            for work in each.works
        )

    def _shape(self, batch: Any, tensors: list[Tensor]) -> _Shape:
        key = tuple((each.shape, each.dtype) for each in tensors)
        if key not in self._shapes:
            copy = map_tensors(batch, torch.clone)
            self._shapes[key] = _Shape(copy, tensors_in(copy))
        return self._shapes[key]

    def _capture(
        self, shape: _Shape, arrivals: Sequence[tuple[EmbeddingBagCollection, Arrival]]
    ) -> torch.cuda.CUDAGraph:
        features = self._ids(shape.batch)
        for embedding, arrival in arrivals:
            embedding.arrive_as(features, arrival)
        graph = torch.cuda.CUDAGraph()
        # Other threads may pin memory or load batches meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._loss.copy_(self._step(shape.batch).detach())
        self._pool = graph.pool()
        shape.kept.append([work.plan.buffers for _, each in arrivals for work in each.works])
        return graph

    def _drop_if_stale(self, arrivals: Sequence[tuple[EmbeddingBagCollection, Arrival]]) -> None:
        """A graph knows the settings as they were, but for those that are tensors."""
        settings = (
            None if self._optimizer is None else _settings(self._optimizer),
            [group.scalars_alike for each, _ in arrivals for group in each.groups],
        )
        if settings == self._settings:
            return
        if self._settings is not None:
            for shape in self._shapes.values():
                shape.graphs.clear()
            self._stale += 1
            if self._stale == 3:
                warnings.warn(
                    "the dense optimizer's settings change from step to step, and each change "
                    "captures the step anew, which is slow. Give it its learning rate as a tensor "
                    "on the device (torch.optim.SGD(..., lr=torch.tensor(0.1, device='cuda'), "
                    "fused=True); Adam also wants capturable=True), which graphs follow",
                    stacklevel=4,
                )
        self._settings = settings


class _Shape:
    """Inputs of one shape: where graphs read them, and the graphs."""

    def __init__(self, batch: Any, tensors: list[Tensor]) -> None:
        self.batch, self.tensors = batch, tensors
        self.steps = 0
        self.graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self.kept: list[Any] = []  # buffers that graphs read


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    if isinstance(optimizer, RowOptimizer):
        return []
    return [
        {
            key: id(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]
