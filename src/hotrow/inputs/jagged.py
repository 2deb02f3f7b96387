"""Ids of several features, any number of them per sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor


class KeyedJaggedTensor:
    """Ids of several features, each sample holding any number of them.

    The layout is TorchRec's: `values` lists the ids feature by feature, sample by sample;
    `offsets` has one entry per (feature, sample) and a last one, the number of values.
    TorchRec's own class works wherever this one does.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        *,
        offsets: Tensor | None = None,
        lengths: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        if (offsets is None) == (lengths is None):
            raise ValueError("give exactly one of offsets= and lengths=")
        for what, tensor in (("values", values), ("offsets", offsets), ("lengths", lengths)):
            if tensor is not None:
                check_integers(tensor, what)
        self._keys = list(keys)
        refuse_repeated_keys(self._keys)
        if offsets is None:
            assert lengths is not None
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        self._values, self._offsets = values, offsets
        self._weights = weights

    @classmethod
    def of(
        cls,
        features: Mapping[str, Tensor | tuple[Tensor, ...]],
        *,
        include_last_offset: bool | None = None,
    ) -> Self:
        """Join what `nn.EmbeddingBag`s are called with, feature by feature.

        Each feature has ids [B], ids [B, n], (indices, offsets) or (indices, offsets, weights).
        `include_last_offset` is nn.EmbeddingBag's: offsets have B + 1 entries and end with the
        number of ids (True), or have B (False). None decides by B where another feature has ids [B]
        or [B, n], and refuses offsets otherwise: they could be read both ways. If one feature has
        weights, those of the others are 1.
        """
        sizes = [len(ids) for ids in features.values() if isinstance(ids, Tensor) and ids.ndim]
        bags = {
            name: _bags_of(name, given, sizes[0] if sizes else None, include_last_offset)
            for name, given in features.items()
        }
        counts = {name: len(lengths) for name, (_, lengths, _) in bags.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"features must have as many samples each, and have {counts}")
        values, lengths, weights = zip(*bags.values(), strict=True)
        joined = None
        if any(weight is not None for weight in weights):
            joined = torch.cat(
                [
                    torch.ones(len(ids), device=ids.device) if weight is None else weight
                    for weight, ids in zip(weights, values, strict=True)
                ]
            )
        return cls(list(bags), torch.cat(values), lengths=torch.cat(lengths), weights=joined)

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return self._offsets

    def lengths(self) -> Tensor:
        return self._offsets.diff()

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same with every tensor changed."""
        weights = None if self._weights is None else change(self._weights)
        return type(self)(
            self._keys, change(self._values), offsets=change(self._offsets), weights=weights
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        return self.map(torch.Tensor.pin_memory)

    def clone(self) -> Self:
        return self.map(torch.Tensor.clone)


def _bags_of(
    name: str,
    given: Tensor | tuple[Tensor, ...],
    num_samples: int | None,
    include_last_offset: bool | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return one feature's ids, how many each sample has, and their weights."""
    if isinstance(given, Tensor) and given.ndim in (1, 2):
        check_integers(given, f"ids of feature {name!r}")
        length = 1 if given.ndim == 1 else given.shape[1]
        return given.reshape(-1), torch.full((len(given),), length, device=given.device), None
    if _are_tensors(given):
        indices, offsets = given[:2]
        check_integers(indices, f"indices of feature {name!r}")
        check_integers(offsets, f"offsets of feature {name!r}")
        if include_last_offset is None:
            if num_samples is None:
                raise ValueError(
                    f"feature {name!r} has {len(offsets)} offsets, which are {len(offsets)} "
                    f"samples, as nn.EmbeddingBag reads them, or {len(offsets) - 1}, if the last "
                    "is the number of ids; say which by include_last_offset=False or True"
                )
            include_last_offset = len(offsets) != num_samples
        if not include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([len(indices)])])
        weights = given[2] if len(given) == 3 else None
        if weights is not None and len(weights) != len(indices):
            raise ValueError(f"feature {name!r} has {len(indices)} ids and {len(weights)} weights")
        lengths = offsets.diff()
        if offsets.device.type == "cpu" and len(offsets) and int(offsets[0]) != 0:
            raise ValueError(f"feature {name!r}: offsets must begin with 0, not {int(offsets[0])}")
        if lengths.device.type == "cpu" and int(lengths.sum()) != len(indices):
            raise ValueError(
                f"feature {name!r} has {len(indices)} ids, and offsets for {int(lengths.sum())}; "
                "they begin with 0, and end with the number of ids, unless they leave it out "
                "(include_last_offset=False)"
            )
        return indices, lengths, weights
    shape = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given)
    raise TypeError(
        f"feature {name!r} must be a tensor of ids [B] or [B, n], such as torch.tensor([1, 2]), or "
        f"a tuple of tensors, (indices, offsets) or (indices, offsets, weights); got {shape}"
    )


def _are_tensors(given: object) -> bool:
    """Return whether this is (indices, offsets) or (indices, offsets, weights), 1-D each."""
    return (
        isinstance(given, tuple | list)
        and len(given) in (2, 3)
        and all(isinstance(part, Tensor) and part.ndim == 1 for part in given)
    )


def check_integers(tensor: Any, what: str) -> None:
    """Refuse a tensor that holds no integers, so that nothing is rounded or read as 0 and 1."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(
            f"{what} must be int64 (or int32), not {tensor.dtype}; if they are whole numbers, "
            ".long() makes them so"
        )


def refuse_repeated_keys(keys: Sequence[str]) -> None:
    if len(set(keys)) < len(keys):
        name = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"key {name!r} is there twice; every feature has one place in a batch")
