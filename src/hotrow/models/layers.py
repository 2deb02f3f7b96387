"""Layers that several models are made of, and what models read of a batch.

Know nothing about where embedding rows live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class Clicks(Protocol):
    """What the model reads of a batch: dense [B, num_dense], and ids for the embedding."""

    @property
    def dense(self) -> Tensor: ...
    @property
    def sparse(self) -> Any: ...


def features_of(embedding: nn.Module, *, otherwise: str) -> tuple[str, ...]:
    """The features that a collection looks up; other embeddings do not tell."""
    return tuple(_told_by(embedding, "features", f"{otherwise}="))


def width_of(embedding: nn.Module, *, otherwise: str) -> int:
    """The numbers per sample that a collection gives; other embeddings do not tell."""
    return sum(widths_of(embedding, otherwise=f"{otherwise}="))


def widths_of(embedding: nn.Module, *, otherwise: str) -> list[int]:
    """The numbers in each feature's vector that a collection gives; others do not tell."""
    tables = _told_by(embedding, "tables", otherwise)
    return [table.embedding_dim for table in tables for _ in table.feature_names]


def _told_by(embedding: nn.Module, fact: str, otherwise: str) -> Any:
    if not hasattr(embedding, fact):
        raise ValueError(
            f"{type(embedding).__name__} does not tell its {fact}, as hotrow's collections do: "
            f"give {otherwise}"
        )
    return getattr(embedding, fact)


def refuse_other_than_one_logit(part: str, widths: Sequence[int]) -> None:
    if widths[-1] != 1:
        raise ValueError(f"the {part} ends in one logit, not in {widths[-1]}")


def at_least_float32(numbers: Tensor) -> Tensor:
    """Half-precision numbers with room for the digits of a sum."""
    return numbers.float() if numbers.dtype.itemsize < 4 else numbers


def normalised(vectors: Tensor, widths: Sequence[int]) -> Tensor:
    """Vectors that lie side by side in [B, sum of widths], each scaled to mean 0 and variance 1.

    torch's layer_norm without anything to learn: how large numbers are no longer counts, but
    those far below the root of its 1e-5, about 0.003, stay small.
    """
    if vectors.shape[1] != sum(widths):
        raise ValueError(
            f"the embedding gives {vectors.shape[1]} numbers per sample; {len(widths)} vectors to "
            f"normalise would be {sum(widths)}"
        )
    if len(set(widths)) == 1:
        parts = vectors.unflatten(1, (len(widths), widths[0]))
        return functional.layer_norm(parts, widths[:1]).flatten(1)
    each = zip(vectors.split(list(widths), dim=1), widths, strict=True)
    return torch.cat([functional.layer_norm(part, (width,)) for part, width in each], dim=1)


def refuse_to_normalise(width: int) -> None:
    if width < 2:
        raise ValueError(f"normalise=True: a vector of {width} number would always be 0")


class DotInteraction(nn.Module):
    """Dense vector and all dot products of two different vectors, [B, D + F (F + 1) / 2].

    Padded columns, up to a multiple of `pad_to`, follow where they cost nothing.
    """

    pairs: Tensor

    def __init__(self, num_features: int, dim: int, *, pad_to: int = 1) -> None:
        super().__init__()
        self.num_features, self.dim = num_features, dim
        num_vectors = num_features + 1
        lower, left = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", lower * num_vectors + left, persistent=False)
        self.width = dim + len(self.pairs)
        self.padded_width = self.width + -self.width % pad_to

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        if vectors.shape[1] != self.num_features * self.dim:
            raise ValueError(
                f"the embedding gives {vectors.shape[1]} numbers per sample; {self.num_features} "
                f"features as wide as the last layer of bottom, {self.dim}, would be "
                f"{self.num_features * self.dim}"
            )
        if dense.is_cuda:
            # Here, because only machines with a GPU need have Triton.
            from hotrow.kernels.triton import interact

            if interact.suits(self.num_features, dense):
                joined: Tensor = interact.interact(dense, vectors, self.padded_width)
                return joined
        stacked = torch.cat([dense, vectors.to(dense.dtype)], dim=1)
        stacked = stacked.view(len(dense), -1, self.dim)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        return torch.cat([dense, products.index_select(1, self.pairs)], dim=1)


class PaddedLinear(nn.Linear):
    """A linear layer whose weight may have more columns than `in_features`, all of them zero."""

    def __init__(self, in_features: int, out_features: int, *, pad_to: int) -> None:
        super().__init__(in_features, out_features)
        self.padding = -in_features % pad_to
        self.weight = nn.Parameter(functional.pad(self.weight.detach(), (0, self.padding)))

    def reset_parameters(self) -> None:
        if self.in_features:
            super().reset_parameters()
        else:  # of data without numbers; torch would warn
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Input may come padded or not."""
        return functional.linear(self._widened(input), self.weight, self.bias)

    def _widened(self, rows: Tensor) -> Tensor:
        missing = self.in_features + self.padding - rows.shape[1]
        return functional.pad(rows, (0, missing)) if missing else rows

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.padding:
            destination[prefix + "weight"] = destination[prefix + "weight"][:, : self.in_features]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        given = state_dict.get(prefix + "weight")
        if given is not None and given.shape[1:] == (self.in_features,):
            state_dict = {**state_dict, prefix + "weight": self._widened(given)}
        super()._load_from_state_dict(state_dict, prefix, *others)


class Logit(PaddedLinear):
    """The last layer: one number per sample."""

    def forward(self, input: Tensor) -> Tensor:
        """Of half-precision weights a float32 sum: a loss wants all of its digits, and a matrix
        product of one column would waste the tensor cores."""
        if self.weight.dtype.itemsize > 2:
            return super().forward(input)
        products = self._widened(input).float() * self.weight.float()
        return products.sum(1, keepdim=True) + self.bias.float()


def mlp(
    widths: Sequence[int],
    *,
    ends_in_relu: bool,
    generator: torch.Generator | None = None,
    pad_to: int = 1,
) -> nn.Sequential:
    """Linear layers with ReLU between them; the first one's input padded."""
    layers: list[nn.Module] = []
    for number, (width_in, width_out) in enumerate(pairwise(widths), start=2):
        is_logit = number == len(widths) and width_out == 1 and not ends_in_relu
        kind = Logit if is_logit else PaddedLinear
        linear = kind(width_in, width_out, pad_to=1 if layers else pad_to)
        draw(linear, generator)
        nn.init.normal_(linear.bias, std=math.sqrt(1 / width_out), generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers if ends_in_relu else layers[:-1])


def draw(linear: nn.Linear, generator: torch.Generator | None) -> None:
    """Start a layer's weight as the DLRM reference does, and as Xavier's normal form is."""
    std = math.sqrt(2 / (linear.in_features + linear.out_features))
    # Apart from the padding, because torch draws other numbers into rows that lie apart.
    values = linear.weight.detach()[:, : linear.in_features]
    drawn = torch.empty_like(values, memory_format=torch.contiguous_format)
    values.copy_(nn.init.normal_(drawn, std=std, generator=generator))
