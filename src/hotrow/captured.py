"""A training step as CUDA graphs: the host launches it at once, instead of kernel by kernel.

A graph reads its inputs at fixed places: a few berths, each with room for a batch and its plans,
which are used in turn; each has a graph of its own. What a graph cannot do (another
shape, a batch that goes the direct way) runs eagerly, with the same kernels and the same bits.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.ahead import map_tensors, only_tensors, tensors_in
from hotrow.embedding import Arrival, EmbeddingBagCollection
from hotrow.lanes import PRIORITIES, Lanes, Mark, capture
from hotrow.watch import Watch

_EAGER_FIRST = 3  # steps of a shape before it is captured: kernels are compiled, memory is there
_MOST_SHAPES = 4
_BERTHS = 6  # three batches between plan and training, the one in training, and some room


class CapturedStep:
    """Runs `step(batch) -> loss`, captured where that is possible."""

    def __init__(
        self,
        step: Callable[[Any], Tensor],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        lanes: Lanes,
    ) -> None:
        # Weakly: it belongs to whoever owns this, and both hold memory that must go in time.
        self._step = weakref.WeakMethod(step)
        self._model, self._optimizer, self._lanes = model, optimizer, lanes
        self._shapes: dict[Any, _Shape] = {}
        self._berths: dict[int, _Berth] = {}  # by the identity of the batch they hold
        self._settings: Any = None
        self._watch: Watch | None = None
        self._loss = torch.zeros((), device=lanes.device)
        self._pool: Any = None
        self._stale = 0
        self._refused = False

    def land(self, batch: Any, works: Sequence[Any]) -> Any:
        """Copy a batch to where graphs read it; None if its shape is new, or changes too often."""
        if not only_tensors(batch):
            return None  # what is no tensor may change, and a graph would not see it
        tensors = tensors_in(batch)
        key = tuple((each.shape, each.dtype) for each in tensors)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MOST_SHAPES or not tensors:
                return None
            shape = self._shapes[key] = _Shape()
        shape.seen += 1
        if shape.seen <= _EAGER_FIRST or any(work.batch.offsets is not None for work in works):
            return None
        berth = shape.next_berth(batch, self._lanes)
        self._berths[id(berth.batch)] = berth
        self._lanes.after("plan", berth.trained)
        for there, here in zip(berth.tensors, tensors, strict=True):
            there.copy_(here, non_blocking=True)
        for work in works:
            work.berth = berth.number
        return berth.batch

    def run(self, batch: Any, arrivals: Sequence[tuple[EmbeddingBagCollection, Arrival]]) -> Tensor:
        """One step, captured where that is possible. The loss lasts until the next one."""
        berth = self._berths.get(id(batch))
        graph = None if berth is None else self._graph_for(berth, arrivals)
        if graph is None:
            loss = self._run_eagerly(batch)
        else:
            for embedding, _ in arrivals:
                embedding.optimizer.count_step()
                for group in embedding.groups:
                    group.push_scalars()
            graph.replay()
            loss = self._loss
        if berth is not None:
            berth.trained = self._lanes.mark("train")
            for embedding, arrival in arrivals:
                embedding.done_with(arrival)  # its plan's buffers are the berth's again
        return loss

    def _run_eagerly(self, batch: Any) -> Tensor:
        step = self._step()
        assert step is not None
        return step(batch)

    def _graph_for(
        self, berth: _Berth, arrivals: Sequence[tuple[EmbeddingBagCollection, Arrival]]
    ) -> torch.cuda.CUDAGraph | None:
        works: list[Any] = [work for _, each in arrivals for work in each.works]
        if (
            self._refused
            or _counts_on_the_host(self._optimizer)
            or not all(work.group.slots_hold(work) for work in works)
        ):
            return None
        self._drop_if_stale(arrivals)
        key = tuple(id(work.plan.buffers) for work in works)
        if key not in berth.graphs:
            try:
                berth.graphs[key] = self._capture(berth)
            except RuntimeError as error:
                self._refused = True
                warnings.warn(
                    f"this training step cannot be captured as a CUDA graph, so it runs kernel by "
                    f"kernel, with the same result but slower: {str(error).splitlines()[0]}. A "
                    "step that reads values back (.item(), prints, branches on a tensor) cannot; "
                    "graphs=False says so beforehand",
                    stacklevel=4,
                )
                return None
            berth.kept.append([work.plan.buffers for work in works])
        return berth.graphs[key]

    def _capture(self, berth: _Berth) -> torch.cuda.CUDAGraph:
        def launch() -> None:
            self._loss.copy_(self._run_eagerly(berth.batch))

        graph = capture(launch, self._pool, PRIORITIES["train"])
        self._pool = graph.pool()
        return graph

    def _drop_if_stale(self, arrivals: Sequence[tuple[EmbeddingBagCollection, Arrival]]) -> None:
        """A graph knows the settings as they were, but for those that are tensors."""
        groups = [group for each, _ in arrivals for group in each.groups]
        for group in groups:
            group.push_scalars()
        settings = (
            [group.scalars_alike for group in groups],
            [each.grad_scale for each, _ in arrivals],
        )
        if self._watch is not None and not self._watch.changed() and settings == self._settings:
            return
        self._watch = Watch(self._model, self._optimizer)
        if self._settings is not None:
            for berth in self._berths.values():
                berth.graphs.clear()
            self._pool = None  # it went with the last of them
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


class _Berth:
    """A place for one batch in flight, and the graphs that read it."""

    def __init__(self, number: int, batch: Any, trained: Mark) -> None:
        self.number, self.batch, self.trained = number, batch, trained
        self.tensors = tensors_in(batch)
        self.graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self.kept: list[Any] = []  # buffers that graphs read


class _Shape:
    """Batches of one shape, and their berths, used in turn."""

    _numbers = count()

    def __init__(self) -> None:
        self.seen = 0
        self.berths: deque[_Berth] = deque()

    def next_berth(self, batch: Any, lanes: Lanes) -> _Berth:
        if len(self.berths) < _BERTHS:
            there = map_tensors(batch, lambda each: torch.empty_like(each, device=lanes.device))
            self.berths.append(_Berth(next(self._numbers), there, lanes.mark("train")))
        else:
            self.berths.rotate(-1)
        return self.berths[-1]


def _counts_on_the_host(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether a step reads state that a replay would not change, such as Adagrad's step."""
    if optimizer is None:
        return False
    state = (each for one in optimizer.state.values() for each in one.values())
    return any(isinstance(each, Tensor) and not each.is_cuda for each in state)
