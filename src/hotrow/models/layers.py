"""Layers that models share, and what models read of a batch. Know nothing about embedding rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class Clicks(Protocol):
    """What a model reads of a batch: dense [B, num_dense], and ids for the embedding."""

    @property
    def dense(self) -> Tensor: ...
    @property
    def sparse(self) -> Any: ...


def features_of(embedding: nn.Module, *, otherwise: str) -> tuple[str, ...]:
    """Return the features that a collection looks up; other embeddings need the argument
    `otherwise`."""
    return tuple(_attribute(embedding, "features", otherwise))


def widths_of(embedding: nn.Module, *, otherwise: str) -> list[int]:
    """Return the width of each feature's vector in a collection; other embeddings need the argument
    `otherwise`."""
    tables = _attribute(embedding, "tables", otherwise)
    return [table.embedding_dim for table in tables for _ in table.feature_names]


def _attribute(embedding: nn.Module, name: str, otherwise: str) -> Any:
    if not hasattr(embedding, name):
        raise ValueError(
            f"{type(embedding).__name__} does not tell its {name}, as hotrow's collections do: "
            f"give {otherwise}"
        )
    return getattr(embedding, name)


def check_one_logit(part: str, widths: Sequence[int]) -> None:
    if widths[-1] != 1:
        raise ValueError(f"the {part} ends in one logit, not in {widths[-1]}")


def at_least_float32(numbers: Tensor) -> Tensor:
    """Return half-precision numbers as float32, which keeps the digits of a sum."""
    return numbers.float() if numbers.dtype.itemsize < 4 else numbers


def normalised(vectors: Tensor, widths: Sequence[int]) -> Tensor:
    """Scale vectors that lie side by side in [B, sum of widths] to mean 0 and variance 1 each.

    This is torch's layer_norm without weights. The size of numbers no longer matters, except that
    numbers far below 0.003, the root of its epsilon 1e-5, stay small.
    """
    if vectors.shape[1] != sum(widths):
        raise ValueError(
            f"the embedding gives {vectors.shape[1]} numbers per sample; {len(widths)} vectors to "
            f"normalise would be {sum(widths)}"
        )
    if len(set(widths)) == 1:
        parts = vectors.unflatten(1, (len(widths), widths[0]))
        return functional.layer_norm(parts, widths[:1]).flatten(1)
    parts = vectors.split(list(widths), dim=1)
    return torch.cat([functional.layer_norm(part, part.shape[1:]) for part in parts], dim=1)


def check_normalised(*widths: int) -> None:
    for width in widths:
        if width < 2:
            raise ValueError(f"normalise=True: a vector of {width} number would always be 0")


def through(layers: nn.Sequential, numbers: Tensor) -> Tensor:
    """Return what layers make of numbers of any type."""
    first = cast(nn.Linear, layers[0])
    result: Tensor = layers(numbers.to(first.weight.dtype))
    return result


class DotInteraction(nn.Module):
    """The dense vector and the dot products of all pairs of vectors, [B, D + F (F + 1) / 2].

    The GPU's kernel pads the columns to a multiple of `pad_to`, which costs nothing there.
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
            # Imported here, because Triton is needed with a GPU only.
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
        else:  # data without numbers; torch would warn
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply an input that is padded or not."""
        return functional.linear(self._widened(input), self.weight, self.bias)

    def _widened(self, rows: Tensor) -> Tensor:
        missing = self.in_features + self.padding - rows.shape[1]
        return functional.pad(rows, (0, missing)) if missing else rows

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.padding:
            destination[prefix + "weight"] = destination[prefix + "weight"][:, : self.in_features]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.shape[1:] == (self.in_features,):
            state_dict = {**state_dict, prefix + "weight": self._widened(weight)}
        super()._load_from_state_dict(state_dict, prefix, *others)


class Logit(PaddedLinear):
    """The last layer: one number per sample."""

    def forward(self, input: Tensor) -> Tensor:
        """Sum in float32 if weights are half precision: a loss needs the digits, and a matrix
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
    """Return linear layers with ReLU between them; the input of the first one is padded."""
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
    """Draw a layer's weight as the DLRM reference does: Xavier, normal."""
    std = math.sqrt(2 / (linear.in_features + linear.out_features))
    # Without the padding, because torch draws other numbers into rows that are not contiguous.
    values = linear.weight.detach()[:, : linear.in_features]
    drawn = torch.empty_like(values, memory_format=torch.contiguous_format)
    values.copy_(nn.init.normal_(drawn, std=std, generator=generator))
