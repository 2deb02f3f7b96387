"""Dense tensors side by side, each under a key. Knows no rows and no batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from hotrow.support.messages import few


def regroup(keyed_tensors: Sequence[Any], groups: Sequence[Sequence[str]]) -> list[Tensor]:
    """Join the tensors of each group of keys side by side.

    Keys may be of any of the keyed tensors, which can be outputs of collections, `KeyedTensor`s and
    TorchRec's, and may be in several groups. A key must be in one keyed tensor alone.
    """
    if not keyed_tensors:
        raise ValueError("there are no keyed tensors to regroup")
    key_dim = keyed_tensors[0].key_dim()
    vectors: dict[str, Tensor] = {}
    for keyed in keyed_tensors:
        parts: Mapping[str, Tensor] = keyed.to_dict()
        if repeated := parts.keys() & vectors.keys():
            raise ValueError(f"key {min(repeated)!r} is in two of the keyed tensors")
        vectors |= parts
    for key in (key for group in groups for key in group):
        if key not in vectors:
            raise KeyError(f"no key {key!r}; there are {few(vectors)}")
    return [torch.cat([vectors[key] for key in group], dim=key_dim) for group in groups]


def regroup_as_dict(
    keyed_tensors: Sequence[Any], groups: Sequence[Sequence[str]], keys: Sequence[str]
) -> dict[str, Tensor]:
    """Return the tensors of `regroup` under these keys, one for each group."""
    if len(groups) != len(keys):
        raise ValueError(f"{len(groups)} groups need as many keys, not {len(keys)}")
    return dict(zip(keys, regroup(keyed_tensors, groups), strict=True))


class KeyedTensor:
    """Dense tensors side by side, each under a key: TorchRec's class of this name.

    A collection returns `Embedded`, which has the same methods; `regroup` takes both.
    """

    regroup = staticmethod(regroup)
    regroup_as_dict = staticmethod(regroup_as_dict)

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        key_dim: int = 1,
    ) -> None:
        self._keys, self._lengths = list(keys), list(length_per_key)
        self._values, self._key_dim = values, key_dim
        if len(self._keys) != len(self._lengths) or sum(self._lengths) != values.shape[key_dim]:
            raise ValueError(
                f"{len(self._keys)} keys need as many lengths that sum to {values.shape[key_dim]}, "
                f"the size of values; got {self._lengths}"
            )
        if len(set(self._keys)) < len(self._keys):
            raise ValueError(f"keys must be different, got {few(self._keys)}")

    @classmethod
    def from_tensor_list(
        cls, keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> Self:
        """Join tensors, one for each key."""
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return cls(keys, lengths, torch.cat(list(tensors), dim=cat_dim), key_dim)

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        """Return all tensors side by side."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension along which they lie."""
        return self._key_dim

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Return the width of each key's tensor."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """Return where each key begins, and after the last one the width of all."""
        return list(accumulate(self._lengths, initial=0))

    def __getitem__(self, key: str) -> Tensor:
        """Return the tensor of a key, a view of `values()`."""
        if key not in self._keys:
            raise KeyError(f"no key {key!r}; there are {few(self._keys)}")
        place = self._keys.index(key)
        return self._values.narrow(self._key_dim, sum(self._lengths[:place]), self._lengths[place])

    def to_dict(self) -> dict[str, Tensor]:
        """Return the tensor of each key, views of `values()`."""
        parts = self._values.split(self._lengths, dim=self._key_dim)
        return dict(zip(self._keys, parts, strict=True))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        moved = self._values.to(device, non_blocking=non_blocking)
        return type(self)(self._keys, self._lengths, moved, self._key_dim)

    def __str__(self) -> str:
        """Return the values by key, as TorchRec prints them."""
        if not self._keys:
            return "KeyedTensor()\n"
        lines = [f'    "{key}": {part.tolist()}' for key, part in self.to_dict().items()]
        return "KeyedTensor({\n" + ",\n".join(lines) + "\n})\n"
