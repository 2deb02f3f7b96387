"""A small model of clicks, and the trainer of it that most tests want."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from hotrow.data import ClickBatch


class ClickModel(nn.Module):
    """One layer on dense features and vectors."""

    def __init__(self, embedding: hotrow.EmbeddingBagCollection, num_dense: int) -> None:
        super().__init__()
        self.embedding = embedding
        width = sum(t.embedding_dim * len(t.feature_names) for t in embedding.tables)
        torch.manual_seed(0)
        self.top = nn.Linear(width + num_dense, 1).to(embedding.device)

    def forward(self, batch: ClickBatch) -> Tensor:
        vectors = self.embedding(batch.sparse).values()
        logits: Tensor = self.top(torch.cat([batch.dense, vectors], dim=1)).squeeze(1)
        return logits

    def bits(self) -> list[Tensor]:
        """All that training changes."""
        dense = [each.detach().cpu() for each in self.top.state_dict().values()]
        return dense + [
            torch.cat([chunk.cpu() for _, chunk in self.embedding.rows(table.name)])
            for table in self.embedding.tables
        ]


def click_batches(
    count: int, rows: Sequence[int], *, size: int, num_dense: int = 3, last: int | None = None
) -> list[ClickBatch]:
    """Skewed ids of each feature; `last` is the size of the last one."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for mine in [size] * (count - 1) + [size if last is None else last]:
        columns = [(torch.rand(mine, generator=generator) ** 3 * each).long() for each in rows]
        found.append(
            ClickBatch(
                dense=torch.rand(mine, num_dense, generator=generator),
                sparse=torch.stack(columns, dim=1),
                label=torch.randint(0, 2, (mine,), generator=generator).float(),
            )
        )
    return found


def trainer_of(model: Any, system: Any = None, **options: Any) -> hotrow.Trainer[Any]:
    options = {"loss_fn": F.binary_cross_entropy_with_logits, **options}
    options = {"ids": lambda batch: batch.sparse, "device": model.embedding.device, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hotrow.Trainer(model, dense_optimizer=optimizer, system=system, **options)


def same_bits(left: ClickModel, right: ClickModel) -> bool:
    return all(map(torch.equal, left.bits(), right.bits()))
