"""The training loop, one record per step. Knows nothing about files, bars or configurations.

trainer = Trainer(model, loss_fn, dense_optimizer=optimizer, ids=lambda batch: batch.sparse)
for record in trainer.run(loader):          # logging, saving and early stop live in this loop
    print(record.step, record.loss, record.hit_rate)
print(trainer.evaluate(test_loader).auc)
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.embedding.ahead import Ahead
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.inputs.tree import to_device
from hotrow.support.clock import Clock, named
from hotrow.support.records import EvalRecord, LateStepRecord, StepRecord
from hotrow.support.streams import Lanes, Mark, lanes_of
from hotrow.training.captured import CapturedStep, Late
from hotrow.training.graphed import GraphedStep, check_optimizer, label_of, lanes_in

Batch = TypeVar("Batch")

_COUNTERS = (
    "lookups",
    "unique_rows",
    "fetched_rows",
    "evicted_rows",
    "bytes_fetched",
    "bytes_evicted",
    "loaded_rows",
)


class System(Protocol[Batch]):
    """Trains batches in passes of its own. Between two passes nothing is in flight, so that rows
    can be looked at, pinned or brought up to date.

    A system with `keeps_batches = True` reads loaders by `Kept`, or copies samples."""

    def attach(self, trainer: Trainer[Batch]) -> None:
        """Before anything is trained; says why it cannot train this model."""

    def passes(self, batches: Iterable[Batch]) -> Generator[Iterable[Batch]]:
        """What to train, one pass after the other; the next is asked for when all of one has been
        trained."""


class Trainer(Generic[Batch]):
    """Trains any model that looks rows up in hotrow collections.

    `model(batch)` gives predictions, `labels(batch)` what they are compared with, and
    `loss_fn(predictions, labels)` one loss per sample, whose mean is minimised, or that mean.
    Rows are updated by their collections, everything else by `dense_optimizer`.

    Operations without a deterministic form are refused by torch, because two runs of one job
    must give the same bits; `deterministic=False` lets them pass.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        *,
        dense_optimizer: torch.optim.Optimizer | None,
        ids: Callable[[Batch], Any],
        labels: Callable[[Batch], Tensor] = label_of,
        device: str | torch.device = "cpu",
        depth: int | str | None = None,
        deterministic: bool = True,
        graphs: bool = True,
        compile: bool = False,
        autocast: torch.dtype | None = None,
        clip_norm: float | None = None,
        system: System[Batch] | None = None,
    ) -> None:
        """`clip_norm`: the most that the dense part's gradients may be long together. `system`:
        what orders, splits or leaves out samples; None: batches are trained as they come."""
        check_optimizer(dense_optimizer, "dense_optimizer")
        self.model, self.dense_optimizer, self.ids = model, dense_optimizer, ids
        self.device, self.depth = torch.device(device), depth
        self.deterministic = deterministic
        self.step = 0  # steps taken so far, over all calls of run()
        self.loss_samples, self.loss_seconds = 0, 0.0  # that mean_loss was asked of, and took
        self.autocast = autocast
        self._algorithms = partial(algorithms, deterministic, self.device)
        lanes = lanes_in(model) if graphs and self.device.type == "cuda" else None
        self._step = GraphedStep(
            model,
            loss_fn,
            dense_optimizer,
            labels=labels,
            lanes=None if lanes is None or lanes.device.type == "cpu" else lanes,
            compile=compile,
            clip_norm=clip_norm,
            around=self._algorithms,
            in_forward=partial(
                torch.autocast, self.device.type, autocast, enabled=autocast is not None
            ),
        )
        self._losses: _Losses | None = None
        self._collections = [
            module for module in model.modules() if isinstance(module, EmbeddingBagCollection)
        ]
        self.system = system
        if isinstance(system, type) or not (system is None or hasattr(system, "attach")):
            raise TypeError(
                f"system is what orders, splits or leaves out samples, such as hotrow.Hotline(), "
                f"not {system!r}; strategies such as 'lookahead' are a collection's"
            )
        if system is not None:
            system.attach(self)

    def run(self, batches: Iterable[Batch]) -> Iterator[StepRecord]:
        """One step per batch and one record per step, as long as the caller asks for more.

        Leaving the loop between two steps, by `break` or an exception, finishes what was
        planned: every row is where it belongs, and the next run() goes on from there.
        """
        if not self.model.training:
            self.model.train()
        self._step.begin_run()
        if self.system is None:
            yield from self._pass(batches)
            return
        passes, asked, before = self.system.passes(batches), perf_counter(), self._counters()
        try:
            for each in passes:
                some = iter(each)
                for first in some:  # a pass may turn out to have no batch
                    # What a system does before a pass, such as to pin rows, is the first step's.
                    yield from self._pass(chain([first], some), asked, before)
                    asked, before = perf_counter(), self._counters()
        finally:
            passes.close()

    def _pass(
        self,
        batches: Iterable[Batch],
        asked: float | None = None,
        counted: dict[str, int] | None = None,
    ) -> Iterator[StepRecord]:
        """When it ends nothing is in flight, and every row is where it belongs."""
        source = Ahead(
            batches,
            self.model,
            self.ids,
            depth=self.depth,
            step=self._step,
            is_kept=getattr(self.system, "keeps_batches", False),
        )
        try:
            clock = source.clock
            before = (counted or self._counters()) | self._times(clock)
            started = perf_counter() if asked is None else asked
            for batch in source:
                with clock.part("train"):
                    loss = self._train(batch)
                samples = len(self.labels(batch))
                after = self._counters() | self._times(clock)
                moved = {key: after[key] - before[key] for key in after}
                seconds = perf_counter() - started
                waited = clock.take_waited()
                if self.device.type == "cpu":  # where rows move, and then the batch is trained
                    waited = moved["rows_seconds"] / seconds
                kind = LateStepRecord if callable(loss) else StepRecord
                moved |= {"seconds": seconds, "waited": waited}
                yield kind(self.step, loss, samples, **moved)  # type: ignore[arg-type]
                before, started = after, perf_counter()  # the caller's time is not ours
        finally:
            source.close()

    def evaluate(self, batches: Iterable[Batch]) -> EvalRecord:
        """AUC, log-loss and normalised entropy of binary labels, taking predictions as logits.

        Changes no bit of the training, so it may be called between any two steps.
        """
        scores, labels = [], []
        with named("evaluate"), self._algorithms(), _evaluation(self.model, self.device):
            for batch in batches:
                batch, sent = self._moved(batch)
                scores.append(self.model(batch).double())
                labels.append(self.labels(batch).to(torch.float64, copy=True))
                sent.wait()  # the loader may fill its memory again
        if not scores:
            raise ValueError("there is nothing to evaluate: the batches given are none")
        return _quality(torch.cat(scores), torch.cat(labels), step=self.step)

    def predict(self, batch: Batch) -> Tensor:
        """What the model says of a batch, in evaluation mode. Changes no bit of the training."""
        with self._algorithms(), _evaluation(self.model, self.device):
            batch, sent = self._moved(batch)
            predictions: Tensor = self.model(batch)
            sent.wait()
            return predictions

    def _moved(self, batch: Batch) -> tuple[Batch, Mark]:
        """A batch on the device, and when it will be there: page-locked memory is read later."""
        moved = to_device(batch, self.device)
        return moved, lanes_of(self.device).mark_here()

    def mean_loss(self, batches: Iterable[Batch]) -> float:
        """Of all their samples, in evaluation mode. Changes no bit of the training."""
        total, size, started = 0.0, 0, perf_counter()
        for batch in batches:
            predictions = self.predict(batch)
            labels = self.labels(batch).to(predictions.device)
            total += float(self.loss_fn(predictions, labels).mean()) * len(labels)
            size += len(labels)
        if not size:
            raise ValueError("there is no sample to evaluate on: the batches given are none")
        self.loss_samples += size
        self.loss_seconds += perf_counter() - started
        return total / size

    def one_collection(self, why: str) -> tuple[EmbeddingBagCollection, Callable[[Batch], Any]]:
        """The model's only collection, for a system that needs just one, and what that looks up of
        a batch, where `ids` may give a dict by the collections' names."""
        named = self.model.named_modules()
        found = {name: each for name, each in named if isinstance(each, EmbeddingBagCollection)}
        if len(found) != 1:
            raise ValueError(
                f"{why} of one collection, and the model has {len(found)}{': ' * bool(found)}"
                f"{', '.join(map(repr, found))}; tables of any width can be in one"
            )
        ((name, collection),) = found.items()
        name = name.removeprefix("_orig_mod.")

        def ids(batch: Batch) -> Any:
            found = self.ids(batch)
            return found[name] if isinstance(found, Mapping) and name in found else found

        return collection, ids

    @property
    def loss_fn(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self._step.loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._step.loss_fn = loss_fn

    @property
    def labels(self) -> Callable[[Batch], Tensor]:
        return self._step.labels

    @property
    def _captured(self) -> CapturedStep | None:
        return self._step.landing

    def _train(self, batch: Batch) -> float | Callable[[], float]:
        loss = self._step.run(batch)
        self.step += 1
        if self._captured is not None and self._captured.late is not None:
            return self._captured.late
        if loss.device.type == "cpu":
            return loss.item()
        if self._losses is None:
            self._losses = _Losses(lanes_of(loss.device))
        return self._losses.note(loss)

    def _counters(self) -> dict[str, int]:
        """What all collections have looked up and moved so far, named as in a StepRecord."""
        totals = dict.fromkeys(_COUNTERS, 0)
        for group in (group for each in self._collections for group in each.every_group):
            counters = group.counters
            _, _, fetched, evicted = counters.moved
            loaded = counters.loaded_rows
            moved = [*counters.moved, *counters.bytes_of(fetched, evicted, loaded), loaded]
            for name, count in zip(_COUNTERS, moved, strict=True):
                totals[name] += count
        return totals

    def _times(self, clock: Clock) -> dict[str, float]:
        """The host's seconds so far, named as in a StepRecord."""
        return {
            "read_seconds": clock.read.seconds,
            "plan_seconds": clock.plan.seconds,
            "rows_seconds": clock.rows.seconds,
            "chunk_seconds": sum(each.chunk_seconds() for each in self._collections),
        }


@contextmanager
def algorithms(deterministic: bool, device: torch.device) -> Iterator[None]:
    """Deterministic operations inside; outside again whatever the caller had chosen."""
    memory: Any = torch.utils.deterministic
    mode, filling = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    if deterministic:
        if device.type == "cuda":
            # cuBLAS reads it when it first runs; without it torch refuses matrix products.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error")
        # torch would also fill new memory: a pass over every buffer that no result needs.
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = filling


class _Losses:
    """Losses on their way from a device, in page-locked memory that is used in turn."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._there = torch.zeros(1024, pin_memory=True)
        self._taken: deque[Late] = deque()
        self._next = 0

    def note(self, loss: Tensor) -> Callable[[], float]:
        if len(self._taken) == self._there.numel():
            self._taken.popleft()()  # its place is needed
        place = self._there[self._next]
        self._next = (self._next + 1) % self._there.numel()
        place.copy_(loss, non_blocking=True)
        late = Late(place, self._lanes, self._lanes.mark("train"))
        self._taken.append(late)
        return late


@contextmanager
def _evaluation(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode inside; every module's own mode and the random state again outside."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
        ):
            yield
    finally:
        for module in training:
            module.training = True


def _quality(scores: Tensor, labels: Tensor, *, step: int) -> EvalRecord:
    # Here, because its import takes longer than all of hotrow's.
    from torchmetrics.functional.classification import binary_auroc

    # Of one class alone nothing can be ranked; torchmetrics would warn and say 0.
    is_mixed = bool((labels != labels[0]).any())
    is_finite = bool(scores.isfinite().all())
    log_loss = float(F.binary_cross_entropy_with_logits(scores, labels))
    rate = labels.mean()
    return EvalRecord(
        step=step,
        samples=len(labels),
        # In double precision, so that large logits do not all become 1.
        auc=(
            float(binary_auroc(scores.sigmoid(), labels.long()))
            if is_mixed and is_finite
            else math.nan
        ),
        log_loss=log_loss,
        normalised_entropy=(
            log_loss / float(F.binary_cross_entropy(rate, rate)) if is_mixed else math.nan
        ),
    )
