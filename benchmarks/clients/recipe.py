"""The model and the samples of the recipes for Lightning and accelerate."""

from __future__ import annotations

import torch
from generated import ROWS, labels, skewed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

_BATCH, _TAGS = 256, 6


class Clicks(nn.Module):
    """An ordinary model: two embeddings, a bag of tags and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(2 * ROWS, 16)
        self.item = nn.Embedding(ROWS, 16)
        self.tags = nn.EmbeddingBag(ROWS, 16, mode="mean", padding_idx=0)
        self.dense = nn.Sequential(nn.Linear(48, 32), nn.SiLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def forward(self, user: Tensor, item: Tensor, tags: Tensor) -> Tensor:
        vectors = (self.user(user), self.item(item), self.tags(tags))
        return self.dense(torch.cat(vectors, dim=1)).squeeze(1)


def clicks_loader(steps: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return shuffled batches (user, item, tags, label)."""
    count = steps * _BATCH
    user, item = skewed(2 * ROWS, count, 1), skewed(ROWS, count, 2)
    tags = skewed(ROWS, count * _TAGS, 3).reshape(count, _TAGS)
    columns = (user, item, tags, labels(user, item))
    data = TensorDataset(*(torch.from_numpy(column) for column in columns))
    return DataLoader(data, batch_size=_BATCH, shuffle=True)


def score(model: nn.Module) -> Tensor:
    model.eval()
    user, item, tags, _ = next(iter(DataLoader(clicks_loader(4).dataset, batch_size=1024)))
    return model(user, item, tags)
