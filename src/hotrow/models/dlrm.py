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

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotrow.models.layers import (
    Clicks,
    DotInteraction,
    check_normalised,
    check_one_logit,
    features_of,
    mlp,
    normalised,
    through,
)


class DLRM(nn.Module):
    """The model of the DLRM reference code, ending in a logit.

    `embedding(sparse).values()` is [B, num_features * D], D being the last width of `bottom`;
    hotrow's collections know their number of features. Weights start as in the reference, drawn
    from `generator` or else torch's own. With half-precision weights logits are float32.

    `pad_to` rounds `num_dense` and the width of the interaction up to its multiples: matrix
    products are fast on aligned rows. Padded columns are zeros that meet zero weights, which get no
    gradient; state dicts do not show them.

    `normalise` scales every vector that is looked up to mean 0 and variance 1.
    """

    def __init__(
        self,
        embedding: nn.Module,
        num_dense: int,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256, 1),
        *,
        num_features: int | None = None,
        generator: torch.Generator | None = None,
        pad_to: int = 1,
        normalise: bool = False,
    ) -> None:
        super().__init__()
        check_one_logit("top of a DLRM", top)
        self.embedding = embedding
        self.dim, self.normalise = bottom[-1], normalise
        if normalise:
            check_normalised(self.dim)
        self.num_features = num_features or len(features_of(embedding, otherwise="num_features="))
        self.interact = DotInteraction(self.num_features, self.dim, pad_to=pad_to)
        widths = [num_dense, *bottom]
        self.bottom = mlp(widths, ends_in_relu=True, generator=generator, pad_to=pad_to)
        widths = [self.interact.width, *top]
        self.top = mlp(widths, ends_in_relu=False, generator=generator, pad_to=pad_to)

    def forward(self, batch: Clicks) -> Tensor:
        """Return the log-odds of a click, [B]."""
        dense = through(self.bottom, batch.dense)
        vectors = self.embedding(batch.sparse).values()
        if self.normalise:
            vectors = normalised(vectors, [self.dim] * self.num_features)
        logits: Tensor = self.top(self.interact(dense, vectors))
        return logits.squeeze(1)
