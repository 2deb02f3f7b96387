"""DeepFM: factorisation machine and deep layers on the same vectors. Knows nothing about where
embedding rows live.

dense [B, n] * n rows    sparse ids -> embedding -> F rows per sample
          |                                |
          '---- n + F fields: [B, n + F, D + 1] ----.
                  |                                 |
          first D columns                      last column
          |              |                          |
   dot products      deep layers              first-order weights
   of all pairs          |                          |
          '--------------+----------- summed -------'
                         |
                     logit [B]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from hotrow.models.layers import (
    Clicks,
    at_least_float32,
    features_of,
    mlp,
    normalised,
    refuse_other_than_one_logit,
    refuse_to_normalise,
)


class DeepFM(nn.Module):
    """DeepFM (Guo et al. 2017): first order, pairs of fields, and deep layers, logits summed.

    **Tables are `dim` + 1 wide**: `embedding(sparse).values()` is [B, num_features * (dim + 1)].
    The last number of a row is its id's first-order weight, the others are its vector. In a table
    of its own that weight would be planned, mapped and fetched once more for every id, and small
    rows cost a link by their number, not by their bytes. `dim` = 15 or 63 makes rows of 16 or 64
    numbers, which begin at even addresses. A weight starts like the rest of its row, unless a
    table's `init` is a function that says otherwise, and with row-wise Adagrad it shares the
    row's state.

    A dense feature is a field, too, as in the paper: it has a learnt row of the same form, which
    is multiplied by its value, so that it has a linear term, meets all other fields, and is seen
    by the deep layers. `num_dense` may be 0. A feature with several ids is one field, pooled by
    its table: first-order weights and vectors are summed (or averaged), and its ids do not meet
    each other.

    `deep` has the widths of the deep layers, which start as in the DLRM reference; dense features'
    rows start normal with a standard deviation of 0.01, the bias at zero. All are drawn from
    `generator` or else torch's own. First order and pairs are summed in float32 whatever the
    weights' type, as sums of squares would lose what their difference is to keep. `pad_to`
    rounds the input of the deep layers up to its multiples; no state dict shows padding.

    `normalise` scales every vector that is looked up to mean 0 and variance 1 among its numbers;
    first-order weights stay as they are.
    """

    def __init__(
        self,
        embedding: nn.Module,
        num_dense: int,
        dim: int,
        deep: Sequence[int] = (400, 400, 400, 1),
        *,
        num_features: int | None = None,
        generator: torch.Generator | None = None,
        pad_to: int = 1,
        normalise: bool = False,
    ) -> None:
        super().__init__()
        refuse_other_than_one_logit("deep part of a DeepFM", deep)
        self.embedding, self.dim, self.normalise = embedding, dim, normalise
        if normalise:
            refuse_to_normalise(dim)
        self.num_features = num_features or len(features_of(embedding, otherwise="num_features"))
        rows = torch.empty(num_dense, dim + 1)
        self.dense_rows = nn.Parameter(nn.init.normal_(rows, std=0.01, generator=generator))
        self.bias = nn.Parameter(torch.zeros(()))
        widths = [(num_dense + self.num_features) * dim, *deep]
        self.deep = mlp(widths, ends_in_relu=False, generator=generator, pad_to=pad_to)

    def forward(self, batch: Clicks) -> Tensor:
        """Log-odds of a click, [B]."""
        return self.score(batch.dense, self.embedding(batch.sparse).values())

    def score(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """The dense part, for rows that were looked up: a compiler's whole graph."""
        fields = self.fields(dense, vectors)
        factors = fields[:, :, : self.dim]
        first = cast(nn.Linear, self.deep[0])
        deep = self.deep(factors.flatten(1).to(first.weight.dtype)).squeeze(1)
        by_field = fields[:, :, self.dim].sum(1) + at_least_float32(self.bias)
        logits: Tensor = by_field + pairs(factors) + deep
        return logits

    def fields(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """What each field of a sample is: a vector and a first-order weight."""
        width = self.num_features * (self.dim + 1)
        if vectors.shape[1] != width:
            raise ValueError(
                f"the embedding gives {vectors.shape[1]} numbers per sample; {self.num_features} "
                f"features of a vector of {self.dim} and a first-order weight would be {width}: "
                f"tables of a DeepFM have embedding_dim={self.dim + 1}"
            )
        rows = at_least_float32(self.dense_rows)
        scaled = dense.to(rows.dtype).unsqueeze(2) * rows
        looked_up = vectors.to(rows.dtype).view(len(vectors), self.num_features, self.dim + 1)
        if self.normalise:
            factors = looked_up[:, :, : self.dim].flatten(0, 1)
            factors = normalised(factors, [self.dim]).view(len(vectors), -1, self.dim)
            looked_up = torch.cat([factors, looked_up[:, :, self.dim :]], dim=2)
        return torch.cat([scaled, looked_up], dim=1)


def pairs(factors: Tensor) -> Tensor:
    """The sum of the dot products of all pairs of two different fields, [B], in a time that grows
    with their number: half of what the square of the sum has more than the sum of squares."""
    return (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
