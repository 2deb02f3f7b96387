"""Plain PyTorch: tables as nn.EmbeddingBag on the CPU, the dense part on the device.

What published systems were compared with: sparse gradients, torch.optim on the host, and pooled
vectors that cross the link, one thing after the other. Starts from the rows a collection starts
from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.inputs.batch import KeyedJaggedTensor
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

# torch's own forms of hotrow's rules on sparse gradients.
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.SparseAdam,
}
_CHUNK_FLOATS = 1 << 22


def why_not_plain(config: RunConfig) -> str | None:
    """Why torch cannot train a run's tables by itself; None if it can."""
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
    """Looks rows up on the CPU and gives vectors on a device. Rows are no parameters of it, so
    that models have the dense ones alone."""

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], *, seed: int, device: torch.device
    ) -> None:
        super().__init__()
        self.tables, self.features, self.device = tuple(tables), feature_order(tables), device
        self.crossed = 0  # vectors that went to the device
        self._table_of = {name: each for each in tables for name in each.feature_names}
        self._bags: dict[str, nn.Embedding | nn.EmbeddingBag] = {}  # a dict hides them from torch
        for layout in group_by_width(self.tables):
            rows = host_rows(layout.num_rows, layout.dim)
            initialise(rows, layout, [], seed)
            for table, base in zip(layout.tables, layout.bases, strict=True):
                mine = rows[base : base + table.num_embeddings]
                self._bags[table.name] = _bag(table, mine)

    def weight(self, table: str) -> nn.Parameter:
        weight = self._bags[table].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def forward(self, ids: Any) -> PlainVectors:
        """`ids` as generated and prepared data have them."""
        looked_up = _dense(ids) if isinstance(ids, Tensor) else _jagged(ids)
        vectors = {}
        for place, name in enumerate(self.features):
            values, offsets = looked_up(place, name)
            table = self._table_of[name]
            bag = self._bags[table.name]
            vectors[name] = bag(values) if table.pooling == "none" else bag(values, offsets)
        self.crossed += sum(len(each) for each in vectors.values())
        return PlainVectors({name: each.to(self.device) for name, each in vectors.items()})


def _bag(table: EmbeddingBagConfig, rows: Tensor) -> nn.Embedding | nn.EmbeddingBag:
    """A torch module that trains `rows` where they are."""
    shape = (table.num_embeddings, table.embedding_dim)
    padding = table.padding_idx
    if table.pooling == "none":
        return nn.Embedding(*shape, sparse=True, padding_idx=padding, _weight=rows)
    return nn.EmbeddingBag(
        *shape, sparse=True, padding_idx=padding, mode=table.pooling, _weight=rows
    )


class PlainVectors:
    """Vectors by feature, as models ask for them."""

    def __init__(self, vectors: Mapping[str, Tensor]) -> None:
        self._vectors = vectors

    def __getitem__(self, feature: str) -> Tensor:
        return self._vectors[feature]

    def values(self) -> Tensor:
        return torch.cat(list(self._vectors.values()), dim=1)


def _dense(ids: Tensor) -> Any:
    here = ids.cpu()  # where they are already, but for evaluation
    starts = torch.arange(len(here))
    return lambda place, name: (here[:, place].contiguous(), starts)


def _jagged(ids: KeyedJaggedTensor) -> Any:
    values, offsets, keys = ids.values().cpu(), ids.offsets().cpu(), list(ids.keys())
    size = (len(offsets) - 1) // len(keys)

    def looked_up(place: int, name: str) -> tuple[Tensor, Tensor]:
        first = keys.index(name) * size
        starts = offsets[first : first + size + 1]
        low, high = int(starts[0]), int(starts[-1])
        return values[low:high], starts[:-1] - low

    return looked_up


class PlainHybrid:
    """A run of a TOML file, trained so."""

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
            config.embedding.optimizer, [self._tables.weight(each.name) for each in tables]
        )
        loss_fn = F.binary_cross_entropy_with_logits
        self._trainer: Trainer[AnyBatch] = Trainer(
            self._model, loss_fn, dense_optimizer=dense, ids=_sparse, device=self.device
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
            lookups = _count(batch)
            yield StepRecord(
                step=step,
                loss=loss,
                samples=len(batch),
                seconds=perf_counter() - started,
                lookups=lookups,
                unique_rows=0,  # nobody counts them here
                # Pooled ones cross instead of rows, and also those of samples that look nothing up.
                fetched_rows=min(vectors, lookups),
                evicted_rows=vectors,
                bytes_fetched=size,
                bytes_evicted=size,
            )
            started = perf_counter()

    def _once(self, batch: AnyBatch) -> float:
        self._row_optimizer.zero_grad()
        loss = self._step.run(_without_ids(batch, self.device))
        # As it is by default: to say so keeps torch from warning that nobody did.
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
        """Vectors and their gradients, where there is a link that they cross."""
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
    """Row state in the order in which a collection keeps it."""
    found = optimizer.state.get(weight, {})
    for name in rule.state_names:
        if name in found:
            yield found[name]
        else:  # SparseAdam's comes with the first step
            yield torch.full_like(weight, rule.start_of_state())


def _without_ids(batch: AnyBatch, device: torch.device) -> AnyBatch:
    """A batch on the device, but for its ids, which the CPU reads."""
    there = {
        name: getattr(batch, name).to(device, non_blocking=True)
        for name in ("dense", "label", "lengths")
        if isinstance(getattr(batch, name, None), Tensor)
    }
    return replace(batch, **there)


def _sparse(batch: AnyBatch) -> Any:
    return batch.sparse


def _count(batch: AnyBatch) -> int:
    ids = batch.sparse
    return ids.numel() if isinstance(ids, Tensor) else ids.values().numel()
