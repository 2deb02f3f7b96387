"""`hybrid-plain`: tables as nn.EmbeddingBag on the CPU, the dense part on the device.

Published systems were compared with this: sparse gradients, torch.optim on the host, and pooled
vectors that cross the link, without overlap. Rows start as those of a collection do.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.inputs.batch import count_ids
from hotrow.inputs.tables import EmbeddingBagConfig, group_by_width
from hotrow.run.config import RunConfig
from hotrow.run.job import Job, dense_optimizer, model_of, tables_of
from hotrow.run.serve_template import Tables, Vectors
from hotrow.run.source import AnyBatch, Samples
from hotrow.store.ram import host_rows, initialise
from hotrow.support.records import StepRecord
from hotrow.training.trainer import Trainer

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


def plain_job(config: RunConfig, samples: Samples) -> Job:
    """Build a run that plain PyTorch trains."""
    if (reason := why_not_plain(config)) is not None:
        raise ValueError(reason)
    tables = PlainTables(config, samples)
    model = model_of(config, samples, tables).to(tables.device)
    optimizer = dense_optimizer(config.training.optimizer, model, tables.device)
    trainer = _PlainTrainer(
        model,
        F.binary_cross_entropy_with_logits,
        dense_optimizer=optimizer,
        ids=lambda batch: batch.sparse,
        device=tables.device,
        graphs=False,
        clip_norm=config.training.clip_norm,
    )
    return Job(config, samples, cast(Any, tables), model, optimizer, trainer)


class PlainTables(Tables):
    """Looks rows up on the CPU and returns vectors on a device.

    Rows are not parameters of this module, so that a model has dense parameters only.
    """

    def __init__(self, config: RunConfig, samples: Samples) -> None:
        tables = tables_of(config, samples)
        super().__init__(cast(Any, tables))
        self.device = torch.device(config.run.device)
        self.crossed = self.most_crossed = 0  # vectors of a batch that were copied to the device
        self._width = config.model.row_width
        self._bags: dict[str, nn.Embedding | nn.EmbeddingBag] = {}  # a dict hides them from torch
        for layout in group_by_width(tables):
            rows = host_rows(layout.num_rows, layout.dim)
            initialise(rows, layout, [], config.run.seed)
            for table, base in zip(layout.tables, layout.bases, strict=True):
                self._bags[table.name] = _bag(table, rows[base : base + table.num_embeddings])
        section = config.embedding.optimizer
        options = {key: value for key, value in section.options.items() if key != "weight_decay"}
        self._rule = section.rule()
        self.optimizer = _OPTIMIZERS[section.name](
            [bag.weight for bag in self._bags.values()], **options
        )

    def forward(self, sparse: Any) -> Vectors:
        ids, vectors = self._ids(sparse), {}
        for table in self.tables:
            bag = self._bags[table.name]
            for name in table.feature_names:
                values, offsets = ids[name]
                starts = torch.arange(len(values)) if offsets is None else offsets[:-1]
                given = (values,) if table.pooling == "none" else (values.contiguous(), starts)
                vectors[name] = bag(*given)
        if self.training:
            self.crossed = sum(map(len, vectors.values()))
            self.most_crossed = max(self.most_crossed, self.crossed)
        return Vectors({name: vector.to(self.device) for name, vector in vectors.items()})

    def bytes_of(self, vectors: int) -> int:
        return 4 * vectors * self._width

    def rows(self, table: str) -> Iterator[tuple[int, Tensor]]:
        """Yield rows with their state, in the order in which a collection keeps it."""
        weight = self._bags[table].weight
        state = dict(self.optimizer.state.get(weight, {}))
        if not state:  # SparseAdam makes it in the first step
            start = torch.full_like(weight, self._rule.start_of_state())
            state = dict.fromkeys(self._rule.state_names, start)
        parts = [weight.detach(), *(state[name] for name in self._rule.state_names)]
        step = max(1, _CHUNK_FLOATS // sum(part.shape[1] for part in parts))
        for first in range(0, len(weight), step):
            yield first, torch.cat([part[first : first + step] for part in parts], dim=1)

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of vectors and gradients, where they cross a link."""
        if self.device.type == "cpu":
            return {}
        return {"vectors and gradients": 2 * self.bytes_of(self.most_crossed)}


def _bag(table: EmbeddingBagConfig, rows: Tensor) -> nn.Embedding | nn.EmbeddingBag:
    """Return a torch module that trains `rows` in place."""
    shape = table.num_embeddings, table.embedding_dim
    options: dict[str, Any] = {"sparse": True, "padding_idx": table.padding_idx, "_weight": rows}
    if table.pooling == "none":
        return nn.Embedding(*shape, **options)
    return nn.EmbeddingBag(*shape, mode=table.pooling, **options)


class _PlainTrainer(Trainer[AnyBatch]):
    """Trains batch after batch, without looking ahead."""

    def run(self, batches: Iterable[AnyBatch]) -> Generator[StepRecord]:
        tables = cast(PlainTables, self.model.embedding)
        self.model.train()
        started = perf_counter()
        for batch in batches:
            tables.optimizer.zero_grad()
            loss = self._step.run(_without_ids(batch, self.device))
            # This is the default; torch warns if it is not set explicitly.
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                tables.optimizer.step()
            self.step += 1
            lookups, size = count_ids(batch.sparse), tables.bytes_of(tables.crossed)
            yield StepRecord(
                step=self.step,
                loss=float(loss),
                samples=len(batch),
                seconds=perf_counter() - started,
                lookups=lookups,
                unique_rows=0,  # not counted
                # Pooled vectors cross instead of rows, also those of empty bags.
                fetched_rows=min(tables.crossed, lookups),
                evicted_rows=tables.crossed,
                bytes_fetched=size,
                bytes_evicted=size,
            )
            started = perf_counter()


def _without_ids(batch: AnyBatch, device: torch.device) -> AnyBatch:
    """Return a batch on the device, except its ids, which the CPU reads."""
    moved = {
        name: getattr(batch, name).to(device, non_blocking=True)
        for name in ("dense", "label", "lengths")
        if isinstance(getattr(batch, name, None), Tensor)
    }
    return replace(batch, **moved)
