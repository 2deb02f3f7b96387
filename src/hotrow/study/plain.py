"""`hybrid-plain`: tables as nn.EmbeddingBag on the CPU, the dense part on the device.

Published systems were compared with this: sparse gradients, torch.optim on the host, and pooled
vectors that cross the link, without overlap. Rows start as those of a collection do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.inputs.batch import count_ids, parse
from hotrow.inputs.tables import EmbeddingBagConfig, feature_order, group_by_width
from hotrow.kernels.rules import RowRule
from hotrow.models import MODELS
from hotrow.run.config import RowOptimizerSection, RunConfig
from hotrow.run.job import dense_optimizer, dense_weights, tables_of, total_steps
from hotrow.run.source import AnyBatch, Samples
from hotrow.store.ram import host_rows, initialise
from hotrow.support.records import EvalRecord, StepRecord
from hotrow.training.graphed import GraphedStep, label_of
from hotrow.training.trainer import Trainer, algorithms

# torch's optimizers that equal hotrow's rules on sparse gradients.
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.SparseAdam,
}
_CHUNK_FLOATS = 1 << 22


def why_not_plain(config: RunConfig) -> str | None:
    """Return why torch cannot train a run's tables; None: it can."""
    section = config.embedding.optimizer
    if section.name not in _OPTIMIZERS:
        return (
            f"torch has no {section.name} for sparse gradients; hybrid-plain takes "
            f"{', '.join(_OPTIMIZERS)}, such as --set embedding.optimizer.name=adagrad"
        )
    if section.weight_decay:
        return (
            f"torch's {section.name} refuses weight_decay on sparse gradients; hybrid-plain needs "
            "--set embedding.optimizer.weight_decay=0"
        )
    return None


class PlainTables(nn.Module):
    """Looks rows up on the CPU and returns vectors on a device.

    Rows are not parameters of this module, so that a model has dense parameters only.
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], *, seed: int, device: torch.device
    ) -> None:
        super().__init__()
        self.tables, self.features, self.device = tuple(tables), feature_order(tables), device
        self.crossed = 0  # vectors copied to the device
        self._table_of = {name: table for table in tables for name in table.feature_names}
        self._bags: dict[str, nn.Embedding | nn.EmbeddingBag] = {}  # a dict hides them from torch
        for layout in group_by_width(self.tables):
            rows = host_rows(layout.num_rows, layout.dim)
            initialise(rows, layout, [], seed)
            for table, base in zip(layout.tables, layout.bases, strict=True):
                self._bags[table.name] = _bag(table, rows[base : base + table.num_embeddings])

    def weight(self, table: str) -> nn.Parameter:
        weight = self._bags[table].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def forward(self, ids: Any) -> PlainVectors:
        batch, vectors = parse(ids.to("cpu"), self.features, None), {}  # evaluation has them there
        size = batch.num_samples
        for name in self.features:
            place, table = batch.keys.index(name), self._table_of[name]
            if batch.offsets is None:
                values, starts = batch.values[:, place].contiguous(), torch.arange(size)
            else:
                low, high = batch.ends[place : place + 2]
                starts = batch.offsets[place * size : (place + 1) * size] - low
                values = batch.values[low:high]
            bag = self._bags[table.name]
            vectors[name] = bag(values) if table.pooling == "none" else bag(values, starts)
        self.crossed += sum(map(len, vectors.values()))
        return PlainVectors({name: each.to(self.device) for name, each in vectors.items()})


def _bag(table: EmbeddingBagConfig, rows: Tensor) -> nn.Embedding | nn.EmbeddingBag:
    """Return a torch module that trains `rows` in place."""
    shape = table.num_embeddings, table.embedding_dim
    options: dict[str, Any] = {"sparse": True, "padding_idx": table.padding_idx, "_weight": rows}
    if table.pooling == "none":
        return nn.Embedding(*shape, **options)
    return nn.EmbeddingBag(*shape, mode=table.pooling, **options)


class PlainVectors:
    """Vectors by feature, as models read them."""

    def __init__(self, vectors: Mapping[str, Tensor]) -> None:
        self._vectors = vectors

    def __getitem__(self, feature: str) -> Tensor:
        return self._vectors[feature]

    def values(self) -> Tensor:
        return torch.cat(list(self._vectors.values()), dim=1)


class PlainHybrid:
    """A run, trained by plain PyTorch."""

    def __init__(self, config: RunConfig, samples: Samples) -> None:
        if (reason := why_not_plain(config)) is not None:
            raise ValueError(reason)
        self._config, self._samples = config, samples
        self.device = torch.device(config.run.device)
        tables = tables_of(config, samples)
        self._tables = PlainTables(tables, seed=config.run.seed, device=self.device)
        self._model = MODELS[config.model.kind](
            self._tables,
            samples.num_dense,
            **config.model.arguments,
            generator=torch.Generator().manual_seed(config.run.seed),
        ).to(self.device)
        dense = dense_optimizer(config.training.optimizer, self._model, self.device)
        self._rule = config.embedding.optimizer.rule()
        self._row_optimizer = _row_optimizer(
            config.embedding.optimizer, [self._tables.weight(table.name) for table in tables]
        )
        loss_fn = F.binary_cross_entropy_with_logits
        self._trainer: Trainer[AnyBatch] = Trainer(
            self._model,
            loss_fn,
            dense_optimizer=dense,
            ids=attrgetter("sparse"),
            device=self.device,
        )
        self._step = GraphedStep(
            self._model,
            loss_fn,
            dense,
            labels=label_of,
            lanes=None,
            clip_norm=config.training.clip_norm,
            around=partial(algorithms, True, self.device),
        )
        self._schedules = config.training.schedule.drive([self._row_optimizer, dense])
        self._largest_bytes = 0

    def train(self) -> Iterator[StepRecord]:
        self._model.train()
        steps, started = total_steps(self._config, self._samples), perf_counter()
        for step, batch in enumerate(self._samples.batches(steps), start=1):
            before = self._tables.crossed
            loss = self._once(batch)
            vectors = self._tables.crossed - before
            size = 4 * vectors * self._config.model.row_width
            self._largest_bytes = max(self._largest_bytes, size)
            lookups = count_ids(batch.sparse)
            yield StepRecord(
                step=step,
                loss=loss,
                samples=len(batch),
                seconds=perf_counter() - started,
                lookups=lookups,
                unique_rows=0,  # not counted
                # Pooled vectors cross instead of rows, also those of empty bags.
                fetched_rows=min(vectors, lookups),
                evicted_rows=vectors,
                bytes_fetched=size,
                bytes_evicted=size,
            )
            started = perf_counter()

    def _once(self, batch: AnyBatch) -> float:
        self._row_optimizer.zero_grad()
        loss = self._step.run(_without_ids(batch, self.device))
        # This is the default; torch warns if it is not set explicitly.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            self._row_optimizer.step()
        for schedule in self._schedules:
            schedule.step()
        self._trainer.step += 1
        return float(loss)

    def evaluate(self) -> EvalRecord:
        return self._trainer.evaluate(self._samples.split("test").batches)

    def dense(self) -> Mapping[str, Tensor]:
        return dense_weights(self._model)

    def tables(self) -> Sequence[str]:
        return [table.name for table in self._tables.tables]

    def rows(self, table: str) -> Iterator[tuple[int, Tensor]]:
        weight = self._tables.weight(table)
        parts = [weight.detach(), *_state(self._rule, self._row_optimizer, weight)]
        step = max(1, _CHUNK_FLOATS // sum(part.shape[1] for part in parts))
        for first in range(0, len(weight), step):
            yield first, torch.cat([part[first : first + step] for part in parts], dim=1)

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of vectors and gradients, where they cross a link."""
        if self.device.type == "cpu":
            return {}
        return {"vectors and gradients": 2 * self._largest_bytes}


def _row_optimizer(
    section: RowOptimizerSection, weights: list[nn.Parameter]
) -> torch.optim.Optimizer:
    options = {key: value for key, value in section.options.items() if key != "weight_decay"}
    return _OPTIMIZERS[section.name](weights, **options)


def _state(
    rule: RowRule, optimizer: torch.optim.Optimizer, weight: nn.Parameter
) -> Iterator[Tensor]:
    """Yield row state in the order in which a collection keeps it."""
    state = optimizer.state.get(weight, {})
    for name in rule.state_names:
        if name in state:
            yield state[name]
        else:  # SparseAdam makes it in the first step
            yield torch.full_like(weight, rule.start_of_state())


def _without_ids(batch: AnyBatch, device: torch.device) -> AnyBatch:
    """Return a batch on the device, except its ids, which the CPU reads."""
    moved = {
        name: getattr(batch, name).to(device, non_blocking=True)
        for name in ("dense", "label", "lengths")
        if isinstance(getattr(batch, name, None), Tensor)
    }
    return replace(batch, **moved)
