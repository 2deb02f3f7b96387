"""The training loop, one record per step. Knows nothing about files, bars or configurations.

trainer = Trainer(model, loss_fn, dense_optimizer=optimizer, ids=lambda batch: batch.sparse)
for record in trainer.run(loader):          # logging, saving and early stop live in this loop
    print(record.step, record.loss, record.hit_rate)
print(trainer.evaluate(test_loader).auc)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.ahead import ahead, to_device
from hotrow.embedding import EmbeddingBagCollection
from hotrow.records import EvalRecord, StepRecord

Batch = TypeVar("Batch")


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
        labels: Callable[[Batch], Tensor] = attrgetter("label"),
        device: str | torch.device = "cpu",
        depth: int | None = None,
        deterministic: bool = True,
    ) -> None:
        self.model, self.loss_fn, self.dense_optimizer = model, loss_fn, dense_optimizer
        self.ids, self.labels = ids, labels
        self.device, self.depth = torch.device(device), depth
        self.deterministic = deterministic
        self.step = 0  # steps taken so far, over all calls of run()
        self._collections = [
            module for module in model.modules() if isinstance(module, EmbeddingBagCollection)
        ]

    def run(self, batches: Iterable[Batch]) -> Iterator[StepRecord]:
        """One step per batch and one record per step, as long as the caller asks for more.

        Leaving the loop between two steps, by `break` or an exception, finishes what was
        planned: every row is where it belongs, and the next run() goes on from there.
        """
        if not self.model.training:
            self.model.train()
        source = ahead(batches, self.model, self.ids, depth=self.depth)
        try:
            before, started = self._counters(), perf_counter()
            for batch in source:
                with self._algorithms():  # not while the caller has its turn
                    loss, samples = self._train(batch)
                after = self._counters()
                moved = {key: after[key] - before[key] for key in after}
                seconds = perf_counter() - started
                yield StepRecord(self.step, loss, samples, seconds, **moved)
                before, started = after, perf_counter()  # the caller's time is not ours
        finally:
            source.close()

    def evaluate(self, batches: Iterable[Batch]) -> EvalRecord:
        """AUC and log-loss of binary labels, taking predictions as logits.

        Changes no bit of the training, so it may be called between any two steps.
        """
        scores, labels = [], []
        with self._algorithms(), _evaluation(self.model, self.device):
            for batch in batches:
                batch = to_device(batch, self.device)
                scores.append(self.model(batch).double())
                labels.append(self.labels(batch).double())
        if not scores:
            raise ValueError("there is nothing to evaluate: the batches given are none")
        return _quality(torch.cat(scores), torch.cat(labels), step=self.step)

    def _train(self, batch: Batch) -> tuple[float, int]:
        labels = self.labels(batch)
        loss = self.loss_fn(self.model(batch), labels).mean()
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad()
        loss.backward()
        if self.dense_optimizer is not None:
            self.dense_optimizer.step()
        self.step += 1
        return loss.item(), len(labels)

    def _counters(self) -> dict[str, int]:
        """What all collections have looked up and moved so far, named as in a StepRecord."""
        traffic = [collection.traffic() for collection in self._collections]
        names = (
            "lookups",
            "unique_rows",
            "fetched_rows",
            "evicted_rows",
            "bytes_fetched",
            "bytes_evicted",
        )
        return {name: sum(getattr(each, name) for each in traffic) for name in names}

    @contextmanager
    def _algorithms(self) -> Iterator[None]:
        """Deterministic operations inside; outside again whatever the caller had chosen."""
        memory: Any = torch.utils.deterministic
        mode, filling = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
        if self.deterministic:
            if self.device.type == "cuda":
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
    return EvalRecord(
        step=step,
        samples=len(labels),
        # In double precision, so that large logits do not all become 1.
        auc=float(binary_auroc(scores.sigmoid(), labels.long())) if is_mixed else float("nan"),
        log_loss=float(F.binary_cross_entropy_with_logits(scores, labels)),
    )
