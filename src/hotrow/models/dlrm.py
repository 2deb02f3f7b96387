"""DLRM with dot interaction. Knows nothing about where embedding rows live.

dense [B, num_dense]          sparse ids
        |                         |
  bottom -> [B, D]      embedding -> [B, F * D]
        |                         |
        |----> dot products of all pairs of the F + 1 vectors
        |                         |
        '------ concatenated -----'
                     |
               top -> logit [B]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Clicks(Protocol):
    """What the model reads of a batch: dense [B, num_dense], and ids for the embedding."""

    @property
    def dense(self) -> Tensor: ...
    @property
    def sparse(self) -> Any: ...


class DLRM(nn.Module):
    """The model of the DLRM reference code, ending in a logit.

    `embedding(sparse).values()` is [B, num_features * D], D being the last width of `bottom`;
    hotrow's collections know their number of features. Weights start as in the reference, drawn
    from `generator` or else torch's own.
    """

    pairs: Tensor

    def __init__(
        self,
        embedding: nn.Module,
        num_dense: int,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256, 1),
        *,
        num_features: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if top[-1] != 1:
            raise ValueError(f"the top of a DLRM ends in one logit, not in {top[-1]}")
        self.embedding = embedding
        self.dim = bottom[-1]
        self.num_features = num_features or len(embedding.features)  # type: ignore[arg-type]
        num_vectors = self.num_features + 1
        lower, left = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", lower * num_vectors + left, persistent=False)
        self.bottom = mlp([num_dense, *bottom], ends_in_relu=True, generator=generator)
        self.top = mlp([self.dim + len(self.pairs), *top], ends_in_relu=False, generator=generator)

    def forward(self, batch: Clicks) -> Tensor:
        """Log-odds of a click, [B]."""
        dense = self.bottom(batch.dense)
        vectors = self.embedding(batch.sparse).values()
        logits: Tensor = self.top(self.interact(dense, vectors))
        return logits.squeeze(1)

    def interact(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Dense vector and all dot products of two different vectors, [B, D + F (F + 1) / 2]."""
        if vectors.shape[1] != self.num_features * self.dim:
            raise ValueError(
                f"the embedding gives {vectors.shape[1]} numbers per sample; {self.num_features} "
                f"features as wide as the last layer of bottom, {self.dim}, would be "
                f"{self.num_features * self.dim}"
            )
        stacked = torch.cat([dense, vectors], dim=1).view(len(dense), -1, self.dim)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        return torch.cat([dense, products.index_select(1, self.pairs)], dim=1)


def mlp(
    widths: Sequence[int], *, ends_in_relu: bool, generator: torch.Generator | None = None
) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        linear = nn.Linear(width_in, width_out)
        std = math.sqrt(2 / (width_in + width_out))
        nn.init.normal_(linear.weight, std=std, generator=generator)
        nn.init.normal_(linear.bias, std=math.sqrt(1 / width_out), generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers if ends_in_relu else layers[:-1])
