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

import torch
from torch import Tensor, nn

from hotrow.models.layers import (
    Clicks,
    at_least_float32,
    check_normalised,
    check_one_logit,
    features_of,
    mlp,
    normalised,
    through,
)


class DeepFM(nn.Module):
    """DeepFM (Guo et al. 2017): first order, pairs of fields, and deep layers, logits summed.

    **Tables are `dim` + 1 wide**: `embedding(sparse).values()` is [B, num_features * (dim + 1)].
    The last number of a row is the first-order weight of its id, the others are its vector. In a
    table of its own that weight would be planned, mapped and fetched once more for every id, and
    for small rows a link's cost depends on their number, not on their bytes. `dim` = 15 or 63 makes
    aligned rows of 16 or 64 numbers. A weight starts like the rest of its row, unless the table's
    `init` is a function that does otherwise; with row-wise Adagrad it shares the state of the row.

    A dense feature is a field, too, as in the paper: it has a learned row of the same form, which
    is multiplied by its value. So it has a linear term, is paired with all other fields, and is an
    input of the deep layers. `num_dense` may be 0. A feature with several ids is one field, pooled
    by its table: first-order weights and vectors are summed (or averaged), and its ids are not
    paired with each other.

    `deep` has the widths of the deep layers, which start as in the DLRM reference; the rows of
    dense features start normal with a standard deviation of 0.01, the bias at zero. All are drawn
    from `generator`, or from torch's default. First order and pairs are summed in float32 for
    weights of any type, because the difference of two large sums of squares needs the digits.
    `pad_to` rounds the input of the deep layers up to its multiples; state dicts do not show
    padding.

    `normalise` scales every vector that is looked up to mean 0 and variance 1; first-order weights
    stay as they are.
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
        check_one_logit("deep part of a DeepFM", deep)
        self.embedding, self.dim, self.normalise = embedding, dim, normalise
        if normalise:
            check_normalised(dim)
        self.num_features = num_features or len(features_of(embedding, otherwise="num_features="))
        rows = torch.empty(num_dense, dim + 1)
        self.dense_rows = nn.Parameter(nn.init.normal_(rows, std=0.01, generator=generator))
        self.bias = nn.Parameter(torch.zeros(()))
        widths = [(num_dense + self.num_features) * dim, *deep]
        self.deep = mlp(widths, ends_in_relu=False, generator=generator, pad_to=pad_to)

    def forward(self, batch: Clicks) -> Tensor:
        """Return the log-odds of a click, [B]."""
        return self.score(batch.dense, self.embedding(batch.sparse).values())

    def score(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Return the logits of rows that were looked up: one graph for a compiler."""
        fields = self.fields(dense, vectors)
        factors = fields[:, :, : self.dim]
        deep = through(self.deep, factors.flatten(1)).squeeze(1)
        by_field = fields[:, :, self.dim].sum(1) + at_least_float32(self.bias)
        logits: Tensor = by_field + pairs(factors) + deep
        return logits

    def fields(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Return a vector and a first-order weight for each field of each sample."""
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
    """Return the sum of the dot products of all pairs of fields, [B], in linear time: half the
    difference of the square of the sum and the sum of the squares."""
    return (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
