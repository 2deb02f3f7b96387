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

from hotrow.distributed.ranks import RankError
from hotrow.embedding.ahead import Ahead
from hotrow.embedding.arguments import usable_device
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.in_models import collections_in, module_tables_in
from hotrow.inputs.rank_part import RankPart, whole_batches
from hotrow.inputs.tree import to_device
from hotrow.support.clock import Clock, named
from hotrow.support.records import EvalRecord, LateStepRecord, StepRecord
from hotrow.support.streams import Lanes, Mark, lanes_of
from hotrow.training.captured import CapturedStep
from hotrow.training.graphed import GraphedStep, check_optimizer, label_of
from hotrow.training.ranked_step import RankedStep
from hotrow.training.shared_dense import SharedDense
from hotrow.training.static_inputs import PendingLoss
from hotrow.training.whole_batches import WholeBatches

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
    can be read, pinned or brought up to date.

    A system with `keeps_batches = True` reads loaders by `Kept`, or copies samples. One with `take`
    cuts batches by that function of a batch and places of samples. On several ranks batches are
    whole, and the trainer cuts each rank's part out of those that are to be trained."""

    def attach(self, trainer: Trainer[Batch]) -> None:
        """Prepare before training; raise if this model cannot be trained."""

    def passes(self, batches: Iterable[Batch]) -> Generator[Iterable[Batch]]:
        """Yield what to train, pass by pass; the next is requested when one has been trained."""


class Trainer(Generic[Batch]):
    """Trains any model that looks rows up in hotrow collections.

    `model(batch)` returns predictions, `labels(batch)` what they are compared with, and
    `loss_fn(predictions, labels)` one loss per sample, whose mean is minimised, or that mean.
    Collections update their rows, and `dense_optimizer` updates everything else.

    torch refuses operations without a deterministic form, because two runs of one job must give
    the same bits; `deterministic=False` allows them.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        *,
        dense_optimizer: torch.optim.Optimizer | None,
        ids: Any = None,
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
        """`ids`: as of `hotrow.ahead`. `clip_norm`: maximum gradient norm of the dense part, and of
        rows that an optimizer of torch steps. `system`: what orders, splits or
        skips samples; None: batches are trained as they come."""
        check_optimizer(dense_optimizer, "dense_optimizer")
        self.model, self.dense_optimizer, self.ids = model, dense_optimizer, ids
        usable_device(device)  # raises where it cannot be used
        self.device, self.depth = torch.device(device), depth
        self.deterministic = deterministic
        self.step = 0  # steps taken so far, over all calls of run()
        self._requests: Callable[[], int] = int
        self.loss_samples, self.loss_seconds = 0, 0.0  # of mean_loss
        self.autocast = autocast
        self._algorithms = partial(algorithms, deterministic, self.device)
        self._collections = collections_in(model)
        lanes = next((collection.lanes for collection in self._collections.values()), None)
        if not graphs or lanes is None or not self.device.type == lanes.device.type == "cuda":
            lanes = None
        in_forward = partial(
            torch.autocast, self.device.type, autocast, enabled=autocast is not None
        )
        options: dict[str, Any] = {
            "labels": labels,
            "compile": compile,
            "clip_norm": clip_norm,
            "around": self._algorithms,
            "in_forward": in_forward,
        }
        self._dense: SharedDense | None = None  # with other ranks
        self._step: GraphedStep
        if any(collection.ranks is not None for collection in self._collections.values()):
            self._dense = SharedDense(model, self._collections)
            self._step = RankedStep(
                model, loss_fn, dense_optimizer, dense=self._dense, lanes=lanes, **options
            )
        else:
            self._step = GraphedStep(model, loss_fn, dense_optimizer, lanes=lanes, **options)
        self._losses: _Losses | None = None
        self.system = system
        step = self._step  # not this object, or a cycle of references would keep the rows
        self.whole = WholeBatches(
            RankPart() if self._dense is None else self._dense.rank_part,
            lambda batch: len(step.labels(batch)),
            getattr(system, "take", None),
        )
        if isinstance(system, type) or not (system is None or hasattr(system, "attach")):
            raise TypeError(
                f"system is what orders, splits or leaves out samples, such as hotrow.Hotline(), "
                f"not {system!r}; strategies such as 'lookahead' are a collection's"
            )
        if system is not None:
            if module_tables_in(model):
                raise ValueError(
                    f"{type(system).__name__} reads the ids of samples from batches, which needs a "
                    "collection in the model: hotrow.EmbeddingBagCollection instead of converted "
                    "modules"
                )
            system.attach(self)

    def hear(self, requests: Callable[[], int]) -> None:
        """Let `requests` return bits, such as "stop" or "save", that this rank sends to all ranks
        with each step. All of them find the bits of all ranks in `requested` after the same step,
        and can act alike."""
        self._requests = requests
        if isinstance(self._step, RankedStep):
            self._step.requests = requests

    @property
    def requested(self) -> int:
        """The bits that ranks have sent with the newest step; of one rank alone, its bits now."""
        if isinstance(self._step, RankedStep):
            return self._step.requested
        return self._requests()

    def run(self, batches: Iterable[Batch]) -> Generator[StepRecord]:
        """Train one step per batch, and yield one record per step.

        Leaving the loop between two steps, by `break` or an exception, finishes what was
        planned: every row is where it belongs, and the next run() goes on from there.

        Of several ranks each has its own part of every batch. With a system, which decides about
        whole batches, loaders of hotrow are read whole, and others have to give the same whole
        batches on every rank.
        """
        if not self.model.training:
            self.model.train()
        self._step.begin_run()
        if self.system is None:
            yield from self._pass(batches)
            return
        passes = self.system.passes(self.whole.of(batches))
        asked, before = perf_counter(), self._counters()
        try:
            for some in map(iter, self._told_of(passes)):
                while (begun := self._begun(some)) is not None:  # a pass may have no batch
                    # What a system does before a pass, such as pinning rows, is part of its first
                    # step.
                    yield from self._pass(begun, asked, before)
                    asked, before = perf_counter(), self._counters()
        finally:
            passes.close()

    def _told_of(self, passes: Iterator[Iterable[Batch]]) -> Iterator[Iterable[Batch]]:
        """Yield passes. If a system fails, other ranks need not wait for this one."""
        try:
            yield from passes
        except Exception as error:
            if self._dense is not None and not isinstance(error, RankError):
                self._dense.tell(error)
            raise

    def _begun(self, batches: Iterator[Batch]) -> Iterator[Batch] | None:
        """Return batches again, of which the first was read; None: there is none. An error of the
        loader is raised inside of the pass, which tells other ranks."""
        try:
            return chain([next(batches)], batches)
        except StopIteration:
            return None
        except Exception as error:
            if self._dense is None or isinstance(error, RankError):
                raise
            return _raising(error)

    def _pass(
        self,
        batches: Iterable[Batch],
        asked: float | None = None,
        counted: dict[str, int] | None = None,
    ) -> Iterator[StepRecord]:
        """Train one pass; at its end nothing is in flight, and every row is where it belongs."""
        checksums: deque[int] = deque()  # of the whole batches that are known ahead
        dense = None if self.system is None else self._dense
        if dense is not None:
            batches = self.whole.parts(batches, checksums)
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
                if dense is not None:
                    dense.checksum = checksums.popleft()
                with clock.part("train"):
                    loss = self._train(batch)
                samples = self._step.samples_of(batch)
                after = self._counters() | self._times(clock)
                moved = {key: after[key] - before[key] for key in after}
                seconds = perf_counter() - started
                waited = clock.take_waited()
                if self.device.type == "cpu":  # where rows move, and then the batch is trained
                    waited = moved["rows_seconds"] / seconds
                kind = LateStepRecord if callable(loss) else StepRecord
                if self._dense is not None:
                    self._dense.own.seconds += seconds
                    self._dense.own.wait_seconds += moved["rank_seconds"]
                moved |= {"seconds": seconds, "waited": waited}
                yield kind(self.step, loss, samples, **moved)  # type: ignore[arg-type]
                # Without the caller's time, in which it may evaluate.
                before, started = after | self._waits(), perf_counter()
        finally:
            source.close()

    def evaluate(self, batches: Iterable[Batch]) -> EvalRecord:
        """Return AUC, log-loss and normalised entropy of binary labels; predictions are logits.

        Changes no bit of the training, so it may be called between any two steps. Several ranks
        call it together, each with any number of batches, and all get the record of all samples.
        """
        scores, labels = [], []
        with named("evaluate"), self._algorithms(), _evaluation(self.model, self.device):
            for batch in batches:
                batch, sent = self._moved(batch)
                of_batch = self.labels(batch).to(torch.float64, copy=True)
                labels.append(of_batch)
                if self._dense is None or len(of_batch):  # models may need a sample
                    scores.append(self.model(batch).double())
                else:
                    scores.append(of_batch)
                sent.wait()  # the loader may fill its memory again
        if self._dense is not None:
            scores, labels = ([x] for x in self._dense.gathered(scores, labels))
        if not sum(map(len, scores)):
            raise ValueError("there is nothing to evaluate: the batches given are none")
        return _quality(torch.cat(scores), torch.cat(labels), step=self.step)

    def predict(self, batch: Batch) -> Tensor:
        """Return the model's predictions in evaluation mode. Changes no bit of the training.

        Of several ranks, each has a batch of its own. It reads rows of the others, which answer
        while they predict, evaluate or train as well."""
        with self._algorithms(), _evaluation(self.model, self.device):
            batch, sent = self._moved(batch)
            predictions: Tensor = self.model(batch)
            sent.wait()
            return predictions

    def _moved(self, batch: Batch) -> tuple[Batch, Mark]:
        """Return a batch on the device, and the mark when page-locked memory has been read."""
        moved = to_device(batch, self.device)
        return moved, lanes_of(self.device).mark_here()

    def mean_loss(self, batches: Iterable[Batch], *, whole: bool = False) -> float:
        """Return the mean over all samples, in evaluation mode. Changes no bit of the training.

        Several ranks call it together; the samples are those of all, and all get the same bits.
        `whole`: every rank has the same whole batches, of which it evaluates its part."""
        total, size, started = 0.0, 0, perf_counter()
        checksums: deque[int] = deque()
        if whole and self._dense is not None:
            batches = self.whole.parts(whole_batches(batches), checksums)
        for batch in batches:
            if self._dense is not None and not len(self.labels(batch)):
                continue
            predictions = self.predict(batch)
            labels = self.labels(batch).to(predictions.device)
            total += float(self.loss_fn(predictions, labels).mean()) * len(labels)
            size += len(labels)
        if self._dense is not None:
            if whole:
                self._dense.check_equal(str([*checksums]), "what test= gives")
            total, samples = self._dense.sums(total, size)
            size = int(samples)
        if not size:
            raise ValueError("there is no sample to evaluate on: the batches given are none")
        self.loss_samples += size
        self.loss_seconds += perf_counter() - started
        return total / size

    def one_collection(self, why: str) -> tuple[EmbeddingBagCollection, Callable[[Batch], Any]]:
        """Return the model's only collection, for a system that needs just one, and a function
        that returns its ids of a batch."""
        named = self._collections
        if len(named) != 1:
            raise ValueError(
                f"{why} of one collection, and the model has {len(named)}{': ' * bool(named)}"
                f"{', '.join(map(repr, named))}; tables of any width can be in one"
            )
        ((name, collection),) = named.items()

        def ids(batch: Batch) -> Any:
            features = self.ids(batch)
            is_named = isinstance(features, Mapping) and name in features
            return features[name] if is_named else features

        return collection, ids

    @property
    def shared(self) -> SharedDense | None:
        """What this rank shares with others, and counts; None: there are no others."""
        return self._dense

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
        if self._captured is not None and self._captured.pending_loss is not None:
            return self._captured.pending_loss
        if loss.device.type == "cpu":
            return loss.item()
        if self._losses is None:
            self._losses = _Losses(lanes_of(loss.device))
        return self._losses.note(loss)

    def _counters(self) -> dict[str, int]:
        """Return what all collections have looked up and moved, named as in a StepRecord."""
        totals = dict.fromkeys(_COUNTERS, 0)
        for group in (group for c in self._collections.values() for group in c.every_group):
            counters = group.counters
            _, _, fetched, evicted = counters.moved
            loaded = counters.loaded_rows
            moved = [*counters.moved, *counters.bytes_of(fetched, evicted, loaded), loaded]
            for name, count in zip(_COUNTERS, moved, strict=True):
                totals[name] += count
        if self._dense is not None:
            totals |= self._dense.counters()
        return totals

    def _times(self, clock: Clock) -> dict[str, float]:
        """Return the host's seconds so far, named as in a StepRecord."""
        return {
            "read_seconds": clock.read.seconds,
            "plan_seconds": clock.plan.seconds,
            "rows_seconds": clock.rows.seconds,
            "chunk_seconds": sum(c.chunk_seconds() for c in self._collections.values()),
            **self._waits(),
        }

    def _waits(self) -> dict[str, float]:
        return {"rank_seconds": 0.0 if self._dense is None else self._dense.wait_seconds}


def _raising(error: Exception) -> Iterator[Any]:
    yield from ()
    raise error


@contextmanager
def algorithms(deterministic: bool, device: torch.device) -> Iterator[None]:
    """Inside, only deterministic operations; afterwards, the caller's own setting."""
    memory: Any = torch.utils.deterministic
    mode, filling = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    if deterministic:
        if device.type == "cuda":
            # cuBLAS reads it when it first runs; without it torch refuses matrix products.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error")
        # torch would also fill new memory, which no result needs.
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = filling


class _Losses:
    """Copies losses from a device to page-locked memory, whose elements are used in turn."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._memory = torch.zeros(1024, pin_memory=True)
        self._pending: deque[PendingLoss] = deque()
        self._next = 0

    def note(self, loss: Tensor) -> Callable[[], float]:
        if len(self._pending) == self._memory.numel():
            self._pending.popleft()()  # its element is needed
        element = self._memory[self._next]
        self._next = (self._next + 1) % self._memory.numel()
        element.copy_(loss, non_blocking=True)
        pending = PendingLoss(element, self._lanes, self._lanes.mark("train"))
        self._pending.append(pending)
        return pending


@contextmanager
def _evaluation(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, evaluation mode; afterwards, every module's own mode and the random state."""
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

    # One class alone cannot be ranked; torchmetrics would warn and return 0.
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
