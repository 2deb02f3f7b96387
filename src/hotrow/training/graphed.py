"""One training step as a callable: a CUDA graph where that is possible. Knows no loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.embedding import dense_steps
from hotrow.embedding.in_models import collections_in, some_collections_in
from hotrow.embedding.optimizer import RowOptimizer
from hotrow.engine.split_batch import Split
from hotrow.support.streams import Lanes
from hotrow.training.captured import CapturedStep, GraphSettings, run_phases
from hotrow.training.rank_turn import RankTurn
from hotrow.training.shared_dense import SharedDense


def label_of(batch: Any) -> Any:
    """Return `batch.label`, the default place of labels."""
    try:
        return batch.label
    except AttributeError as error:
        raise AttributeError(
            f"a batch, which is a {type(batch).__name__}, has no .label; say where its labels are, "
            "such as labels=lambda batch: batch['label']"
        ) from error


def check_optimizer(optimizer: object, name: str) -> None:
    """Raise if this is not an optimizer of the dense part."""
    if isinstance(optimizer, RowOptimizer):
        raise TypeError(
            f"{name} is a collection's own, which has nothing to do here: rows are updated in "
            "backward(). Give the dense part's, such as torch.optim.Adam(model.parameters()), or "
            "None"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{name} must be a torch optimizer of the dense part, or None, got "
            f"{type(optimizer).__name__}"
        )


def graphed(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: torch.optim.Optimizer | None,
    *,
    labels: Callable[[Any], Any] = label_of,
    batch_size: int | None = None,
    max_lookups: int | None = None,
    clip_norm: float | None = None,
) -> GraphedStep:
    """Make one step of your own loop, launched as a single CUDA graph.

    `step(batch)` minimises the mean of `loss_fn(model(batch), labels(batch))`: lookup, forward,
    backward, the update of rows, and `optimizer`, which trains the dense part. It returns the loss.

        step = hotrow.graphed(model, loss_fn, optimizer, batch_size=8192)
        for batch in hotrow.ahead(loader, model, ids=lambda b: b.sparse, step=step):
            loss = step(batch)

    Batches of another size than `batch_size`, or with more than `max_lookups` ids, run eagerly,
    with the same bits. Without these, shapes that come often are captured, with room for the
    largest batch seen. On a CPU every step runs eagerly. `clip_norm` is the maximum gradient norm
    of the dense part, and of rows with `update="step"`.

    Several ranks call it together, with their parts of a batch. Their dense gradients are averaged,
    and the loss is the mean over all samples; a step is two graphs with exchanges around them.
    """
    if not callable(loss_fn) or not callable(labels):
        wrong = "loss_fn" if not callable(loss_fn) else "labels"
        raise TypeError(f"{wrong} must be a function, got {type(locals()[wrong]).__name__}")
    check_optimizer(optimizer, "optimizer")
    for name, value in (("batch_size", batch_size), ("max_lookups", max_lookups)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "hotrow.graphed takes the model without DistributedDataParallel, which averages "
            "gradients in hooks of backward() that a graph would not call: give it the model "
            "itself, and the step averages gradients"
        )
    collections = some_collections_in(model)
    lanes = next(iter(collections.values())).lanes
    options: dict[str, Any] = {
        "labels": labels,
        "batch_size": batch_size,
        "max_lookups": max_lookups,
        "clip_norm": clip_norm,
        "lanes": lanes if lanes.device.type == "cuda" else None,
    }
    if any(collection.ranks is not None for collection in collections.values()):
        from hotrow.training.ranked_step import RankedStep  # which is a kind of GraphedStep

        dense = SharedDense(model, collections)
        return RankedStep(model, loss_fn, optimizer, dense=dense, **options)
    return GraphedStep(model, loss_fn, optimizer, **options)


class GraphedStep:
    """A training step, as `hotrow.graphed` returns it and `Trainer` uses it."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: torch.optim.Optimizer | None,
        *,
        labels: Callable[[Any], Any],
        lanes: Lanes | None,  # None: every step runs eagerly
        batch_size: int | None = None,
        max_lookups: int | None = None,
        clip_norm: float | None = None,
        compile: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,  # forward and backward
        in_forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
        graphs: GraphSettings | None = None,
    ) -> None:
        if clip_norm is not None and not 0 < clip_norm < math.inf:
            raise ValueError(f"clip_norm must be a number above 0, got {clip_norm}")
        self._loss_fn, self._labels, self._optimizer = loss_fn, labels, optimizer
        self._model, self._clip_norm = model, clip_norm
        self._forward = torch.compile(model, dynamic=False) if compile else model
        self._mean_loss = torch.compile(_mean_loss, dynamic=False) if compile else _mean_loss
        self._compiles, self._full = compile, 0  # samples of the largest batch of a run so far
        self._around, self._in_forward = around, in_forward
        self._split: Split | RankTurn | None = None
        collections = collections_in(model).values()
        # Of collections whose rows wait for an optimizer's step.
        self._waiting = [c.torch_steps for c in collections if c.torch_steps is not None]
        self._row_optimizers: list[torch.optim.Optimizer] = []
        self.landing: CapturedStep | None = None
        if lanes is not None:
            self.landing = CapturedStep(
                self._once,
                self._phases,
                model,
                optimizer,
                lanes,
                batch_size=batch_size,
                max_lookups=max_lookups,
                settings=graphs or GraphSettings(),
            )

    @property
    def loss_fn(self) -> Callable[[Any, Any], Tensor]:
        return self._loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        self._loss_fn = loss_fn
        if self.landing is not None:
            self.landing.drop()

    @property
    def labels(self) -> Callable[[Any], Any]:
        return self._labels

    def __call__(self, batch: Any) -> Tensor:
        """Run one step; return the loss in a new tensor, without waiting for it."""
        return self.run(batch).clone()

    def run(self, batch: Any) -> Tensor:
        """Run one step; the loss lasts until the next."""
        dense_steps.note(self._optimizer)  # a replay calls no hook, and a failed step counts too
        if self._waiting:
            optimizers = [steps.in_one_step() for steps in self._waiting if steps.trains]
            self._row_optimizers = [x for x in optimizers if x is not self._optimizer]
        if self._compiles:  # captured steps, which call nothing, count as well
            self._full = max(self._full, len(self.labels(batch)))
        if self._split is not None:
            return self._run_split(batch)
        return self._once(batch) if self.landing is None else self.landing.run(batch)

    def split(self, split: Split | RankTurn) -> None:
        """Train the next batch in two parts, or together with other ranks."""
        self._split = split

    def _run_split(self, batch: Any) -> Tensor:
        split, self._split = self._split, None
        assert split is not None
        if split.batch is not batch:
            split.wait()  # another batch may need any row
            return self.run(batch)
        if self.landing is None:
            return run_phases(self._phases(batch, split), split)
        return self.landing.run(batch, split)

    def _once(self, batch: Any) -> Tensor:
        with self._around(), self._fused():
            loss = self._loss_of(batch)
            self._zero_grad()
            loss.backward()
            self._update()
        return loss.detach()

    def _fused(self) -> ExitStack:
        """Let the end of `backward()` update rows, if nothing is to be done to their gradients."""
        stack = ExitStack()
        for steps in self._waiting if self._clip_norm is None else ():
            stack.enter_context(steps.fused())
        return stack

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def samples_of(self, batch: Any) -> int:
        """Return how many samples a batch has that was trained just now, on all ranks."""
        return len(self.labels(batch))

    def fetch_by(self, fetch: Callable[[], bool]) -> None:
        """Take the method with which a rank without samples takes part in a lookup of the others;
        it returns whether their batch was known."""

    def begin_run(self) -> None:
        """Begin a run, whose batches may be of another size than before."""
        self._full = 0

    def _loss_of(self, batch: Any, whole: int | None = None) -> Tensor:
        """Return the loss of a batch, or of a part of a batch of `whole` samples."""
        labels = self.labels(batch)
        forward, mean_loss = self._forward, self._mean_loss
        # Batches smaller than others of their run, such as an epoch's last, have any size, and
        # compiling each takes longer than training it. Parts of full batches have few sizes.
        if self._compiles and (len(labels) if whole is None else whole) < self._full:
            forward, mean_loss = self._model, _mean_loss
        with self._in_forward():
            return mean_loss(self.loss_fn, forward(batch), labels)

    def _phases(self, batch: Any, split: Any) -> Generator[Tensor]:
        """Run one step in two phases; rows of the second may still have to arrive.

        The loss of a part is its share of the mean over the whole batch, so gradients add up to
        those of the whole; rows and dense weights are updated once, at the end.
        """
        with self._around(), self._fused(), ExitStack() as joined:
            self._zero_grad()
            for collection in split.collections:
                joined.enter_context(collection.accumulate())
            loss = self._train_part(batch, split, 0, split.first)
            yield loss
            if split.first < split.size:
                loss = loss + self._train_part(batch, split, split.first, split.size)
            joined.close()  # rows are updated here
            self._update()
            yield loss

    def _train_part(
        self,
        batch: Any,
        split: Split,
        low: int,
        high: int,
        scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> Tensor:
        """Run forward and backward of some samples; return their share of the loss. `scaled`: the
        share of a batch's loss in that of all ranks."""
        part = split.cut(batch, low, high)
        by_collection = split.arrivals(part, low)
        for collection, planned in by_collection:
            collection.pipeline.arrive(planned)
        try:
            loss = scaled(self._loss_of(part, split.size) * ((high - low) / split.size))
            loss.backward()
        finally:
            for collection, planned in by_collection:
                collection.pipeline.done_with(planned)
        return loss.detach()

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [x for x in (self._optimizer, *self._row_optimizers) if x is not None]

    def _weights(self) -> list[Tensor]:
        """Return the weights that the step trains, stand-ins included."""
        return [x for each in self._optimizers for x in dense_steps.weights_of(each)]

    def _update(self) -> None:
        """Update the dense part, and rows that wait for an optimizer's step."""
        if self._clip_norm is not None:
            weights: Any = self._model.parameters()
            if self._optimizer is not None:  # gradients of other weights are not zeroed, and grow
                weights = self._weights()
            nn.utils.clip_grad_norm_(weights, self._clip_norm)
        for optimizer in self._optimizers:
            optimizer.step()


def _mean_loss(loss_fn: Callable[[Any, Any], Tensor], predictions: Any, labels: Any) -> Tensor:
    return loss_fn(predictions, labels).mean()
