"""Time-based sequence model. Knows nothing about where embedding rows live.

dense [B, T + 1, num_dense]     ids of F features, T + 1 per sample: T past steps, then the target
          |                               |
   bottom -> [B, T + 1, D]      embedding -> [B, T + 1, F * D]
          |                               |
          '---- dot products, top --------'      a DLRM without its logit, at every step
                       |
             of length 1, [B, T + 1, C]
              |                   |
       past [B, T, C]       target [B, C] ---------------.
              |                   |                      |
              |----> past . (A' A target) -> [B, T]      |
              |                   |                      |
              |            sequence -> weights [B, T]    |
              |                   |                      |
              '-- weighted sum ---'                      |
                       |                                 |
                 context [B, C] ----- concatenated ------'
                                           |
                                    final -> logit [B]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotrow.models.layers import (
    DotInteraction,
    at_least_float32,
    check_normalised,
    check_one_logit,
    features_of,
    mlp,
    normalised,
    through,
)


class Histories(Protocol):
    """What the model reads of a batch; `hotrow.data.SequenceBatch` is one."""

    @property
    def dense(self) -> Tensor: ...  # [B, T + 1, num_dense]
    @property
    def sparse(self) -> Any: ...  # T + 1 ids per sample and feature, the target's last
    @property
    def lengths(self) -> Tensor: ...  # [B] whole numbers: past steps without padding


class TBSM(nn.Module):
    """TBSM as in facebookresearch/tbsm, ending in a logit. Its defaults are the shape that is
    trained there on Taobao's user behaviour: users, items and categories of width 16, 20 steps.

    `embedding(sparse)[feature]` is [B * (T + 1), D] for each of `features`, D being the last
    width of `bottom`; a hotrow.EmbeddingCollection knows its features, and plans all steps of all
    samples as one batch.

    As in the reference (commit 429d7e0, model type "tsl" with its defaults):
    - at every step a DLRM gives a vector; `top` ends in ReLU, since the logit is left out;
    - these vectors are scaled to length 1 (`tsl_proj`);
    - past steps are compared with the target by the inner product of A' A, where A is learned and
      starts normal with variance 1 / C (`tsl_inner` "def");
    - `sequence` lists the hidden widths of the layers that turn T products into T weights between
      0 and 1 (`tsl_mechanism` "mlp"), which multiply the past steps' vectors;
    - `final` sees context and target. Layers start as in the DLRM reference.

    Different from the reference:
    - It ends in a logit instead of a probability: the loss keeps all digits.
    - Histories may be shorter than T. They are padded in front, the target stays last, and
      `lengths` says how many past steps there are: the vectors of padding are set to zero, so they
      add nothing, and what was looked up for them gets no gradient. The reference pads with id 0
      and lets the model learn what that means, which is `lengths` = T throughout. Padding to one
      shape lets a GPU capture the step. With a table's `padding_idx` as the id, padding is read
      and never trained; without, its rows are updated with gradients of zero.
    - There is one context (`tsl_num_heads` 1), and none of the other model types.

    Weights are drawn from `generator`, or from torch's default. Some starts get stuck early; the
    reference goes on with the best of five seeds. With half-precision weights logits are float32.
    `pad_to` rounds the inputs of bottom, top, sequence and final up to its multiples; state dicts
    do not show padding. `normalise` scales every vector that is looked up to mean 0 and variance 1.
    """

    places: Tensor

    def __init__(
        self,
        embedding: nn.Module,
        num_dense: int = 1,
        num_steps: int = 20,
        bottom: Sequence[int] = (16,),
        top: Sequence[int] = (15, 15),
        sequence: Sequence[int] = (15, 15),
        final: Sequence[int] = (60, 1),
        *,
        features: Sequence[str] | None = None,
        generator: torch.Generator | None = None,
        pad_to: int = 1,
        normalise: bool = False,
    ) -> None:
        super().__init__()
        check_one_logit("final part of a TBSM", final)
        if num_steps < 1:
            raise ValueError(f"a TBSM looks back 1 step or more, not {num_steps}")
        self.embedding, self.num_steps, self.dim = embedding, num_steps, bottom[-1]
        self.features = tuple(features or features_of(embedding, otherwise="features="))
        self.normalise = normalise
        if normalise:
            check_normalised(self.dim)
        self.register_buffer("places", torch.arange(num_steps), persistent=False)
        self.bottom = mlp(
            [num_dense, *bottom], ends_in_relu=True, generator=generator, pad_to=pad_to
        )
        self.interact = DotInteraction(len(self.features), self.dim, pad_to=pad_to)
        widths = [self.interact.width, *top]
        self.top = mlp(widths, ends_in_relu=True, generator=generator, pad_to=pad_to)
        metric = torch.empty(top[-1], top[-1])
        nn.init.normal_(metric, std=math.sqrt(1 / top[-1]), generator=generator)
        self.metric = nn.Parameter(metric)
        widths = [num_steps, *sequence, num_steps]
        self.sequence = mlp(widths, ends_in_relu=False, generator=generator, pad_to=pad_to)
        widths = [2 * top[-1], *final]
        self.final = mlp(widths, ends_in_relu=False, generator=generator, pad_to=pad_to)

    def forward(self, batch: Histories) -> Tensor:
        """Return the log-odds that the target is clicked, [B]."""
        self._check(batch.dense)
        looked_up = self.embedding(batch.sparse)
        for name in self.features:
            self._check_vectors(name, looked_up[name], num_samples=len(batch.dense))
        vectors = torch.cat([looked_up[name] for name in self.features], dim=1)
        return self.score(batch.dense, vectors, batch.lengths)

    def score(self, dense: Tensor, vectors: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits of vectors [B * (T + 1), F * D] that were looked up: one graph for a
        compiler."""
        steps = self.steps(dense, vectors)
        past, target = steps[:, :-1], steps[:, -1]
        is_real = self.places >= self.num_steps - lengths.unsqueeze(1)
        past = past.masked_fill(~is_real.unsqueeze(2), 0.0)
        context = self.context(past, target)
        logits: Tensor = self.final(torch.cat([context, target.to(context.dtype)], dim=1))
        return logits.squeeze(1)

    def steps(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Return a vector of length 1 for each step of each sample, [B, T + 1, C]."""
        below = through(self.bottom, dense.flatten(0, 1))
        if self.normalise:
            vectors = normalised(vectors, [self.dim] * len(self.features))
        above: Tensor = self.top(self.interact(below, vectors))
        scaled = functional.normalize(at_least_float32(above), dim=1).to(above.dtype)
        return scaled.view(len(dense), self.num_steps + 1, -1)

    def context(self, past: Tensor, target: Tensor) -> Tensor:
        """Return what matters of the past to the target, [B, C]."""
        query = target @ self.metric.T @ self.metric
        products = torch.bmm(past, query.unsqueeze(2).to(past.dtype)).squeeze(2)
        weights = torch.sigmoid(self.sequence(products)).to(past.dtype)
        return torch.bmm(weights.unsqueeze(1), past).squeeze(1)

    def _check(self, dense: Tensor) -> None:
        if dense.dim() != 3 or dense.shape[1] != self.num_steps + 1:
            raise ValueError(
                f"dense must have shape [batch, {self.num_steps + 1}, features], for "
                f"{self.num_steps} past steps and the target; got {list(dense.shape)}"
            )

    def _check_vectors(self, feature: str, vectors: Tensor, *, num_samples: int) -> None:
        wanted = (num_samples * (self.num_steps + 1), self.dim)
        if vectors.shape != wanted:
            raise ValueError(
                f"the embedding gives {list(vectors.shape)} numbers for feature {feature!r}; "
                f"{num_samples} samples of {self.num_steps} past steps and a target, as wide as "
                f"the last layer of bottom, would be {list(wanted)}"
            )
