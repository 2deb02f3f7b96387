"""Values of samples that hold any number of them each. Knows no features and no tables."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

_MOST_PRINTED = 1000  # values; torch summarizes larger tensors as well


class Jagged:
    """Values, offsets that say which sample holds which of them, and weights, if any."""

    _values: Tensor
    _offsets: Tensor
    _weights: Tensor | None
    _lengths_dtype: torch.dtype  # of the lengths that were given

    def values(self) -> Tensor:
        """Return all values, sample by sample."""
        return self._values

    def offsets(self) -> Tensor:
        """Return where each sample begins, and after the last one the number of values."""
        return self._offsets

    def lengths(self) -> Tensor:
        """Return how many values each sample has."""
        return self._offsets.diff().to(self._lengths_dtype)

    def offsets_or_none(self) -> Tensor | None:
        """Return `offsets()`, which are always known here."""
        return self._offsets

    def lengths_or_none(self) -> Tensor | None:
        """Return `lengths()`, which are always known here."""
        return self.lengths()

    def weights(self) -> Tensor:
        """Return a weight for each value; raise if there are none."""
        if self._weights is None:
            raise ValueError(f"this {type(self).__name__} has no weights; see weights_or_none()")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same with every tensor changed."""
        changed = copy.copy(self)
        changed._weights = None if self._weights is None else change(self._weights)
        changed._values, changed._offsets = change(self._values), change(self._offsets)
        return changed

    def pin_memory(self) -> Self:
        return self.map(torch.Tensor.pin_memory)

    def clone(self) -> Self:
        return self.map(torch.Tensor.clone)

    def record_stream(self, stream: Any) -> None:
        """Tell torch's allocator that a CUDA stream uses the tensors."""
        for tensor in (self._values, self._offsets, self._weights):
            if tensor is not None:
                tensor.record_stream(stream)

    def __repr__(self) -> str:
        return str(self).rstrip("\n")

    def _lies_in(self, offsets: Tensor | None, lengths: Tensor | None) -> None:
        """Keep one of these, or both if they agree."""
        for what, tensor in (("offsets", offsets), ("lengths", lengths)):
            if tensor is not None and (not isinstance(tensor, Tensor) or tensor.numel()):
                check_integers(tensor, what)
        if lengths is not None and lengths.dim() > 1:
            lengths = lengths.reshape(-1)
        if offsets is not None and not offsets.numel():  # as TorchRec writes "no samples"
            offsets = offsets.new_zeros(1, dtype=torch.int64)
        if lengths is not None:
            ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))
            if offsets is not None:
                _check_agreement(offsets, ends)
            offsets = ends if offsets is None else offsets
        assert offsets is not None
        whole = lengths is not None and not lengths.is_floating_point()
        self._lengths_dtype = lengths.dtype if lengths is not None and whole else offsets.dtype
        self._offsets = offsets

    def _printed(self, first: int, last: int) -> str:
        """Return the values, and the weights, of some samples as text."""
        edges = self._offsets[first : last + 1].tolist()
        values = _by_sample(self._values, edges)
        if self._weights is None:
            return values
        weights = _by_sample(self._weights, edges)
        return f'{{\n        "values": {values},\n        "weights": {weights}\n    }}'

    @property
    def _is_long(self) -> bool:
        return self._values.is_meta or self._values.numel() > _MOST_PRINTED


class JaggedTensor(Jagged):
    """Values of samples, any number of them each: TorchRec's class of this name.

    `values` lists the values sample by sample; `lengths` has how many each sample has, or `offsets`
    where each begins and, last, the number of values. Where both are given they must agree. Values
    can have any type, and more than one dimension: `EmbeddingCollection` gives a vector per lookup.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        if offsets is None and lengths is None:
            raise ValueError(
                "give lengths= or offsets=; the second positional argument is weights, as in "
                "TorchRec"
            )
        self._values, self._weights = values, weights
        self._lies_in(offsets, lengths)

    @classmethod
    def empty(
        cls,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> Self:
        """Return a tensor without samples."""
        return cls(
            torch.empty(0, dtype=values_dtype, device=device),
            torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @classmethod
    def from_dense(cls, values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Self:
        """Join the values of each sample."""
        sizes = [len(part) for part in values]
        if weights is not None and [len(part) for part in weights] != sizes:
            raise ValueError("weights must have as many entries per sample as values")
        joined = torch.cat(list(values)) if sizes else torch.empty(0)
        lengths = torch.tensor(sizes, dtype=torch.int32, device=joined.device)
        joined_weights = torch.cat(list(weights)) if sizes and weights is not None else None
        return cls(joined, joined_weights, lengths=lengths)

    @classmethod
    def from_dense_lengths(
        cls, values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> Self:
        """Take the first `lengths[i]` values of row i of a padded tensor [batch, n, ...]."""
        check_integers(lengths, "lengths")
        if lengths.shape != values.shape[:1]:
            raise ValueError(
                f"values of shape {list(values.shape)} need {len(values)} lengths, got shape "
                f"{list(lengths.shape)}"
            )
        if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= values.shape[1]:
            raise ValueError(f"lengths must be from 0 to {values.shape[1]}, the width of values")
        mask = _mask(lengths, values.shape[1])
        return cls(values[mask], None if weights is None else weights[mask], lengths=lengths)

    def to_dense(self) -> list[Tensor]:
        """Return the values of each sample."""
        return _split(self._values, self._offsets)

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return the weights of each sample; None if there are none."""
        return None if self._weights is None else _split(self._weights, self._offsets)

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """Return the values as a padded tensor, [batch, length] or [batch, length, dim].

        The length is the longest sample's, or `desired_length`; longer samples lose their last
        values. Gradients pass through.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Return the weights as `to_padded_dense` returns the values; None if there are none."""
        if self._weights is None:
            return None
        return self._padded(self._weights, desired_length, padding_value)

    def _padded(self, parts: Tensor, length: int | None, padding: float) -> Tensor:
        lengths = self._offsets.diff()
        if length is None:
            length = int(lengths.max()) if len(lengths) else 0
        mask = _mask(lengths, length)
        padded = parts.new_full((len(lengths), length, *parts.shape[1:]), padding)
        places = self._offsets[:-1, None] + torch.arange(length, device=parts.device)
        padded[mask] = parts[places[mask]]
        return padded

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def __str__(self) -> str:
        """Return the values by sample, as TorchRec prints them; many values are summarized."""
        count = len(self._offsets) - 1
        if self._is_long:
            return f"JaggedTensor({{{count:,} samples, {len(self._values):,} values}})\n"
        edges = self._offsets.tolist()
        values = _by_sample(self._values, edges)
        if self._weights is None:
            return f"JaggedTensor({{\n    {values}\n}})\n"
        weights = _by_sample(self._weights, edges)
        return f'JaggedTensor({{\n    "values": {values},\n    "weights": {weights}\n}})\n'


def jagged_part(
    values: Tensor, offsets: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> JaggedTensor:
    """Return a `JaggedTensor` of parts that need no check."""
    part = JaggedTensor.__new__(JaggedTensor)
    part._values, part._offsets, part._weights = values, offsets, weights
    part._lengths_dtype = dtype
    return part


def check_integers(tensor: Any, what: str) -> None:
    """Refuse a tensor that holds no integers, so that nothing is rounded or read as 0 and 1."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(
            f"{what} must be int64 (or int32), not {tensor.dtype}; if they are whole numbers, "
            ".long() makes them so"
        )


def _check_agreement(offsets: Tensor, ends: Tensor) -> None:
    if offsets.numel() != ends.numel():
        raise ValueError(
            f"lengths are of {ends.numel() - 1:,} bags and offsets of {offsets.numel() - 1:,}; "
            "give one of them, or both of the same batch"
        )
    if not offsets.is_meta and not torch.equal(offsets.long(), ends):
        place = int((offsets != ends).int().argmax())
        raise ValueError(
            f"lengths and offsets do not agree: offsets[{place}] is {int(offsets[place])}, and the "
            f"lengths before it sum to {int(ends[place])}"
        )


def _mask(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def check_end(edges: Sequence[int], parts: Tensor) -> None:
    """Raise unless offsets end with the number of values; slices would be cut silently."""
    if edges[-1] != len(parts):
        raise ValueError(
            f"lengths must sum to the number of values, {len(parts):,}, and sum to {edges[-1]:,}"
        )


def _split(parts: Tensor, offsets: Tensor) -> list[Tensor]:
    edges = offsets.tolist()
    check_end(edges, parts)
    return [parts[low:high] for low, high in pairwise(edges)]


def _by_sample(parts: Tensor, edges: Sequence[int]) -> str:
    every = parts.tolist()
    return str([every[low:high] for low, high in pairwise(edges)])
