"""A run's parts, built from its configuration. Knows nothing about files or screens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.ahead import map_tensors
from hotrow.data import ClickBatch, SyntheticClicks
from hotrow.embedding import EmbeddingBagCollection
from hotrow.models import DLRM
from hotrow.run.config import DENSE_OPTIMIZERS, DenseOptimizerSection, RunConfig
from hotrow.tables import EmbeddingBagConfig
from hotrow.trainer import Trainer


@dataclass(frozen=True)
class Job:
    """Everything one run needs; two jobs of one configuration start from the same bits."""

    config: RunConfig
    clicks: SyntheticClicks
    embedding: EmbeddingBagCollection
    model: DLRM
    trainer: Trainer[ClickBatch]

    def batches(self) -> Iterator[ClickBatch]:
        """The training batches, epoch after epoch; for a GPU in page-locked memory."""
        per_epoch = self.config.data.batches_per_epoch
        for step in range(self.config.total_steps):
            batch = self.clicks.batch(step % per_epoch)
            on_gpu = self.embedding.device.type == "cuda"
            yield map_tensors(batch, Tensor.pin_memory) if on_gpu else batch

    @cached_property
    def eval_batches(self) -> list[ClickBatch]:
        """Batches that follow the training data, kept because every evaluation reads them."""
        first = self.config.data.batches_per_epoch
        return list(self.clicks.batches(first, first + self.config.data.eval_batches))


def build(config: RunConfig) -> Job:
    clicks = SyntheticClicks(config.data.clicks)
    embedding = _embedding(config)
    model = DLRM(
        embedding,
        config.data.num_dense,
        bottom=(*config.model.bottom, config.model.embedding_dim),
        top=(*config.model.top, 1),
        num_features=len(config.data.rows),
        generator=torch.Generator().manual_seed(config.run.seed),
    ).to(embedding.device)  # rows stay where they are
    trainer: Trainer[ClickBatch] = Trainer(
        model,
        F.binary_cross_entropy_with_logits,
        dense_optimizer=_dense_optimizer(config.training.optimizer, model, embedding.device),
        ids=lambda batch: batch.sparse,
        device=embedding.device,
        depth=config.embedding.depth,
    )
    # What is told of its memory before the first batch is to be what it will be.
    lookups = dict(zip(embedding.features, config.data.clicks.lookups_per_table, strict=True))
    embedding.reserve(config.data.clicks.batch_size, lookups)
    return Job(config, clicks, embedding, model, trainer)


def all_fast(config: RunConfig) -> RunConfig:
    """The same run with every row in fast memory: what exact strategies are compared with."""
    return replace(config, embedding=replace(config.embedding, strategy="all-fast"))


def differences(left: Job, right: Job) -> list[str]:
    """The weights, row states and dense weights whose bits differ; empty for equal jobs."""
    found = []
    for part in ("bottom", "top"):
        mine = getattr(left.model, part).state_dict()
        other = getattr(right.model, part).state_dict()
        found += [f"{part}.{key}" for key in mine if not same_bits(mine[key], other[key])]
    for table in left.embedding.tables:
        if not same_bits(_rows(left, table.name), _rows(right, table.name)):
            found.append(f"rows of table {table.name}")
    return found


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equality of what is stored: a NaN equals itself, and 0.0 is not -0.0."""
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def _rows(job: Job, table: str) -> Tensor:
    return torch.cat([rows for _, rows in job.embedding.rows(table)])


def _dense_optimizer(
    section: DenseOptimizerSection, model: DLRM, device: torch.device
) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay}
    # A captured step follows a learning rate that is a tensor; fused forms read it by themselves.
    # torch 2.11 has no fused Adagrad for CUDA, and its other form would wait for the tensor.
    if device.type == "cuda" and section.name != "adagrad":
        options |= {"lr": torch.tensor(section.lr, device=device), "fused": True}
        if section.name in ("adam", "adamw"):
            options["capturable"] = True
    return DENSE_OPTIMIZERS[section.name](model.parameters(), **options)


def _embedding(config: RunConfig) -> EmbeddingBagCollection:
    names = config.data.clicks.table_names
    try:
        return EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name, num_rows, config.model.embedding_dim, [name])
                for name, num_rows in zip(names, config.data.rows, strict=True)
            ],
            optimizer=config.embedding.optimizer.rule(),
            budget=config.embedding.budget,
            strategy=config.embedding.strategy,
            device=config.run.device,
            seed=config.run.seed,
            fill=config.embedding.fill,
        )
    except RuntimeError as error:
        if isinstance(error.__cause__, ImportError):  # Triton's absence is not a bug
            raise ValueError(str(error)) from error
        raise
