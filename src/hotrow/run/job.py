"""A run's parts, built from its configuration. Knows nothing about files or screens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.data import ClickBatch, SyntheticClicks
from hotrow.embedding import EmbeddingBagCollection
from hotrow.models import DLRM
from hotrow.run.config import DENSE_OPTIMIZERS, RunConfig
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
        """The training batches, epoch after epoch."""
        per_epoch = self.config.data.batches_per_epoch
        return (self.clicks.batch(step % per_epoch) for step in range(self.config.total_steps))

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
    )
    dense = config.training.optimizer
    depth = config.embedding.depth
    trainer: Trainer[ClickBatch] = Trainer(
        model,
        F.binary_cross_entropy_with_logits,
        dense_optimizer=DENSE_OPTIMIZERS[dense.name](
            model.parameters(),
            lr=dense.lr,  # type: ignore[call-arg]
            weight_decay=dense.weight_decay,
        ),
        ids=lambda batch: batch.sparse,
        device=config.run.device,
        depth=None if isinstance(depth, str) else depth,
    )
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


def _embedding(config: RunConfig) -> EmbeddingBagCollection:
    names = config.data.clicks.table_names
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
    )
