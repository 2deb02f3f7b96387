"""Ids of several features, any number of them per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from hotrow.inputs.jagged_tensor import Jagged, JaggedTensor, check_end, check_integers, jagged_part
from hotrow.support.messages import few

# What TorchRec's constructor can be given besides, to save computing it.
_DERIVED = {
    "stride_per_key", "length_per_key", "lengths_offset_per_key", "offset_per_key",
    "index_per_key", "jt_dict",
}  # fmt: skip


class KeyedJaggedTensor(Jagged):
    """Ids of several features, each sample holding any number of them.

    The layout is TorchRec's: `values` lists the ids feature by feature, sample by sample;
    `lengths` has how many ids each (feature, sample) has, or `offsets` where each begins and, last,
    the number of values. Where both are given they must agree. TorchRec's own class works wherever
    this one does, and this one has the methods and the order of arguments of TorchRec's.

    Every feature has as many samples (`stride`). Offsets that are computed from lengths are int64.
    What TorchRec keeps from call to call (`length_per_key` and others) is computed at each call, so
    that it stays right where the tensors change; on a GPU such a call waits for the device.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Any = None,
        *,
        inverse_indices: Any = None,
        **derived: Any,
    ) -> None:
        _refuse_variable_stride(stride_per_key_per_rank, inverse_indices)
        if unknown := set(derived) - _DERIVED:
            raise TypeError(f"KeyedJaggedTensor has no argument {min(unknown)!r}")
        if offsets is None and lengths is None:
            raise ValueError(
                "give lengths= or offsets=; the third positional argument is weights, as in "
                "TorchRec"
            )
        self._keys = list(keys)
        refuse_repeated_keys(self._keys)
        self._values, self._weights = _ids(values), weights
        self._lies_in(offsets, lengths)
        self._stride = self._checked_stride(stride)

    def _checked_stride(self, stride: int | None) -> int | None:
        """Return the number of samples, if no feature can say it."""
        count = self._offsets.numel() - 1
        if not self._keys:
            if count:
                raise ValueError(f"a batch without keys has lengths of {count:,} bags")
            return stride or 0
        if stride is not None and count != stride * len(self._keys):
            raise ValueError(
                f"stride={stride} and {len(self._keys)} keys need {stride * len(self._keys):,} "
                f"lengths; there are {count:,}"
            )
        return None

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

    @classmethod
    def from_lengths_sync(
        cls,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Any = None,
        inverse_indices: Any = None,
    ) -> Self:
        """Make a batch from lengths, with TorchRec's order of arguments."""
        _refuse_variable_stride(stride_per_key_per_rank, inverse_indices)
        return cls(keys, values, weights, lengths, stride=stride)

    @classmethod
    def from_offsets_sync(
        cls,
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Any = None,
        inverse_indices: Any = None,
    ) -> Self:
        """Make a batch from offsets, with TorchRec's order of arguments."""
        _refuse_variable_stride(stride_per_key_per_rank, inverse_indices)
        return cls(keys, values, weights, None, offsets, stride)

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, Any]) -> Self:
        """Join a `JaggedTensor` for each feature, hotrow's or TorchRec's."""
        if not jt_dict:
            return cls.empty()
        parts = list(jt_dict.values())
        sizes = {key: part.lengths().numel() for key, part in jt_dict.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"features must have as many samples each, and have {sizes}")
        return cls(
            list(jt_dict),
            torch.cat([part.values() for part in parts]),
            _joined_weights([part.weights_or_none() for part in parts]),
            torch.cat([part.lengths() for part in parts]),
        )

    @classmethod
    def concat(cls, kjt_list: Sequence[Any]) -> Self:
        """Join the features of several batches of the same samples."""
        if not kjt_list:
            raise ValueError("there are no batches to concatenate")
        strides = [kjt.stride() for kjt in kjt_list]
        if len(set(strides)) != 1:
            raise ValueError(f"batches to concatenate have different numbers of samples, {strides}")
        return cls(
            [key for kjt in kjt_list for key in kjt.keys()],  # noqa: SIM118
            torch.cat([kjt.values() for kjt in kjt_list]),
            _joined_weights([kjt.weights_or_none() for kjt in kjt_list]),
            torch.cat([kjt.lengths() for kjt in kjt_list]),
            stride=strides[0],
        )

    @classmethod
    def empty(
        cls,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> Self:
        """Return a batch without features and samples; values are int64 by default."""
        return cls(
            [],
            torch.empty(0, dtype=values_dtype or torch.int64, device=device),
            torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

    @classmethod
    def empty_like(cls, kjt: Any) -> Self:
        """Return a batch without features, of the types, device and stride of another one."""
        weights = kjt.weights_or_none()
        return cls(
            [],
            kjt.values()[:0],
            None if weights is None else weights[:0],
            kjt.lengths()[:0],
            stride=kjt.stride(),
        )

    def keys(self) -> list[str]:
        return self._keys

    def stride(self) -> int:
        """Return the number of samples."""
        if self._stride is not None:
            return self._stride
        count = self._offsets.numel() - 1
        if count % len(self._keys):
            raise ValueError(
                f"{len(self._keys)} keys need a multiple of as many lengths; there are {count:,}"
            )
        return count // len(self._keys)

    def stride_per_key(self) -> list[int]:
        """Return the number of samples of each feature, which is the same for all."""
        return [self.stride()] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """Return False: every feature has as many samples."""
        return False

    def inverse_indices_or_none(self) -> None:
        """Return None: they belong to batches with different numbers of samples."""
        return

    def index_per_key(self) -> dict[str, int]:
        """Return the place of each key."""
        return {key: place for place, key in enumerate(self._keys)}

    def offset_per_key(self) -> list[int]:
        """Return where each feature's values begin, and after the last one their number."""
        stride = self.stride()
        if not stride or not self._keys:
            return [0] * (len(self._keys) + 1)
        edges: list[int] = self._offsets[::stride].tolist()
        check_end(edges, self._values)
        return edges

    def length_per_key(self) -> list[int]:
        """Return how many values each feature has."""
        edges = self.offset_per_key()
        return [high - low for low, high in pairwise(edges)]

    def lengths_offset_per_key(self) -> list[int]:
        """Return where each feature's lengths begin, and after the last one their number."""
        return [self.stride() * place for place in range(len(self._keys) + 1)]

    def sync(self) -> Self:
        """Return this batch: nothing is kept that could be computed before."""
        return self

    def unsync(self) -> Self:
        """Return this batch."""
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return the ids of a feature."""
        if key not in self._keys:
            raise KeyError(f"no feature {key!r}; there are {few(self._keys)}")
        return self._part(self._keys.index(key), self.offset_per_key())

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Return the ids of each feature."""
        edges = self.offset_per_key()
        return {key: self._part(place, edges) for place, key in enumerate(self._keys)}

    def _part(self, place: int, edges: Sequence[int]) -> JaggedTensor:
        size, span = self.stride(), slice(edges[place], edges[place + 1])
        offsets = self._offsets[place * size : (place + 1) * size + 1]
        weights = None if self._weights is None else self._weights[span]
        return jagged_part(self._values[span], offsets - offsets[:1], weights, self._lengths_dtype)

    def split(self, segments: Sequence[int]) -> list[Self]:
        """Return batches of the next `segments[0]` features, the next `segments[1]`, ..."""
        ends = list(accumulate(segments, initial=0))
        if any(size < 0 for size in segments) or ends[-1] > len(self._keys):
            raise ValueError(
                f"segments must sum to at most {len(self._keys)}, the number of keys; got "
                f"{list(segments)}"
            )
        edges = self.offset_per_key()
        return [self._of_features(range(low, high), edges) for low, high in pairwise(ends)]

    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> Self:
        """Return a batch of the features at these places, in this order, each at most once.

        `indices_tensor` is TorchRec's, and not needed.
        """
        return self._of_features(
            [range(len(self._keys))[i] for i in indices], self.offset_per_key()
        )

    def _of_features(self, places: Sequence[int], edges: Sequence[int]) -> Self:
        parts = [self._part(place, edges) for place in places]
        lengths = [part.lengths() for part in parts]
        nothing = self._values[:0]
        return type(self)(
            [self._keys[place] for place in places],
            torch.cat([nothing, *(part.values() for part in parts)]),
            None if self._weights is None else _cut(self._weights, places, edges),
            torch.cat(lengths) if lengths else self.lengths()[:0],
            stride=self.stride(),
        )

    def to(
        self,
        device: torch.device | str,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the same on a device; `dtype` is that of the weights."""
        moved = self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if moved._weights is not None and dtype is not None:
            moved._weights = moved._weights.to(dtype)
        return moved

    def __str__(self) -> str:
        """Return the ids by feature and sample, as TorchRec prints them; many are summarized."""
        if not self._keys:
            return "KeyedJaggedTensor()\n"
        size = self.stride()
        if self._is_long:
            return (
                f"KeyedJaggedTensor({{{few(self._keys)}: {size:,} samples, "
                f"{len(self._values):,} values}})\n"
            )
        lines = [
            f'    "{key}": {self._printed(place * size, (place + 1) * size)}'
            for place, key in enumerate(self._keys)
        ]
        return "KeyedJaggedTensor({\n" + ",\n".join(lines) + "\n})\n"


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


def _ids(values: Any) -> Tensor:
    """Return ids; a tensor without values may have any type, as `torch.tensor([])` has."""
    if isinstance(values, Tensor) and not values.numel() and values.is_floating_point():
        return values.long()
    check_integers(values, "values")
    ids: Tensor = values
    return ids


def _refuse_variable_stride(stride_per_key_per_rank: Any, inverse_indices: Any) -> None:
    if stride_per_key_per_rank is not None or inverse_indices is not None:
        raise NotImplementedError(
            "stride_per_key_per_rank= and inverse_indices= (features with different numbers of "
            "samples) are not supported; repeat the ids of each feature for every sample"
        )


def _joined_weights(weights: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in weights if part is not None]
    if known and len(known) < len(weights):
        raise ValueError("all features must have weights, or none of them")
    return torch.cat(known) if known else None


def _cut(weights: Tensor, places: Sequence[int], edges: Sequence[int]) -> Tensor:
    parts = [weights[edges[place] : edges[place + 1]] for place in places]
    return torch.cat([weights[:0], *parts])


def refuse_repeated_keys(keys: Sequence[str]) -> None:
    if len(set(keys)) < len(keys):
        name = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"key {name!r} is there twice; every feature has one place in a batch")
