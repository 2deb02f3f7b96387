"""Deep & cross network, version 2. Knows nothing about where embedding rows live.

dense [B, num_dense]          sparse ids
        |                         |
  bottom -> [B, D]         embedding -> [B, width]
        |                         |
        '------ concatenated -----'
                     |
                    x_0 ------------.-------------.
                     |              |             |
                  cross 1 -> x_1 -> cross 2 -> .. cross L
                                                  |
                                            top -> logit [B]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotrow.models.layers import (
    Clicks,
    check_normalised,
    check_one_logit,
    draw,
    mlp,
    normalised,
    through,
    widths_of,
)


class DCNv2(nn.Module):
    """DCN-v2 (Wang et al. 2021) in the form of MLPerf's DLRM-DCNv2, whose shape is the default.

    `embedding(sparse).values()` is [B, embedding_width]; hotrow's collections know it. Vectors are
    concatenated, so their widths may differ, from each other and from the last of `bottom`. Cross
    layers have rank `cross_rank`; None: full rank, one square matrix each.

    Layers of bottom and top start as in the DLRM reference, cross layers as in TorchRec: weights
    Xavier normal, biases zero. All are drawn from `generator`, or from torch's default. With
    half-precision weights logits are float32.

    `pad_to` rounds `num_dense` up to its multiples; state dicts do not show padding. Other widths
    are sums of the widths of layers and vectors, which you choose.

    `normalise` scales every vector that is looked up to mean 0 and variance 1; it needs a hotrow
    collection, which knows where vectors begin.
    """

    def __init__(
        self,
        embedding: nn.Module,
        num_dense: int,
        bottom: Sequence[int] = (512, 256, 128),
        top: Sequence[int] = (1024, 1024, 512, 256, 1),
        *,
        cross_layers: int = 3,
        cross_rank: int | None = 512,
        embedding_width: int | None = None,
        generator: torch.Generator | None = None,
        pad_to: int = 1,
        normalise: bool = False,
    ) -> None:
        super().__init__()
        check_one_logit("top of a DCNv2", top)
        if cross_layers < 1:
            raise ValueError(f"a DCNv2 has 1 cross layer or more, not {cross_layers}")
        self.embedding = embedding
        self.embedding_width = embedding_width or sum(
            widths_of(embedding, otherwise="embedding_width=")
        )
        self.normalise = widths_of(embedding, otherwise="normalise=False") if normalise else []
        check_normalised(*self.normalise)
        width = bottom[-1] + self.embedding_width
        widths = [num_dense, *bottom]
        self.bottom = mlp(widths, ends_in_relu=True, generator=generator, pad_to=pad_to)
        self.cross = nn.ModuleList(
            Cross(width, cross_rank, generator=generator) for _ in range(cross_layers)
        )
        self.top = mlp([width, *top], ends_in_relu=False, generator=generator)

    def forward(self, batch: Clicks) -> Tensor:
        """Return the log-odds of a click, [B]."""
        return self.score(batch.dense, self.embedding(batch.sparse).values())

    def score(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Return the logits of vectors that were looked up: one graph for a compiler."""
        if vectors.shape[1] != self.embedding_width:
            raise ValueError(
                f"the embedding gives {vectors.shape[1]} numbers per sample, but the cross layers "
                f"are made for {self.embedding_width}: give embedding_width={vectors.shape[1]}"
            )
        if self.normalise:
            vectors = normalised(vectors, self.normalise)
        dense = through(self.bottom, dense)
        start = crossed = torch.cat([dense, vectors.to(dense.dtype)], dim=1)
        for layer in self.cross:
            crossed = layer(start, crossed)
        logits: Tensor = self.top(crossed)
        return logits.squeeze(1)


class Cross(nn.Module):
    """One cross layer: x_0 * (W (V x) + b) + x with W [width, rank]; of full rank x_0 * (W x + b)
    + x with W [width, width]."""

    def __init__(
        self, width: int, rank: int | None, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        if rank is not None and rank < 1:
            raise ValueError(f"cross layers have a rank of 1 or more, or None for full: not {rank}")
        self.down: nn.Module = nn.Identity()
        if rank is not None:
            self.down = nn.Linear(width, rank, bias=False)
            draw(self.down, generator)
        self.up = nn.Linear(width if rank is None else rank, width)
        draw(self.up, generator)
        nn.init.zeros_(self.up.bias)

    def forward(self, start: Tensor, crossed: Tensor) -> Tensor:
        # Product and sum in one operation.
        return torch.addcmul(crossed, start, self.up(self.down(crossed)))
