"""The vectors that a lookup returns. Knows neither rows nor tables."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hotrow.embedding.keyed_tensor import regroup, regroup_as_dict
from hotrow.inputs.batch import Batch
from hotrow.inputs.jagged_tensor import JaggedTensor, jagged_part
from hotrow.inputs.tables import Outputs
from hotrow.support.messages import few


class Embedded:
    """The vectors of one batch, by feature.

    Vectors can be changed in place. If features are taken by name first, `values()` copies them as
    they are then. If `values()` is called first, features are views of its result, and only that
    result can be changed in place.

    It has the methods of TorchRec's `KeyedTensor`. Without pooling, `jagged(feature)` and
    `to_jagged_dict()` give what TorchRec's `EmbeddingCollection` returns.
    """

    regroup = staticmethod(regroup)
    regroup_as_dict = staticmethod(regroup_as_dict)

    def __init__(
        self,
        columns: tuple[str, ...],
        vectors: Mapping[str, Tensor],
        batch: Batch,
        whole: Tensor | None = None,
        *,
        outputs: Outputs | None = None,
    ) -> None:
        self._columns, self._batch, self._outputs = columns, batch, outputs
        self._vectors: Mapping[str, Tensor] | None = vectors  # None: `values()` was called first
        # All features side by side, where they lie so, in the memory of `vectors`. Either this or
        # those are returned: autograd does not know that a change of one changes the other.
        self._whole, self._whole_is_out = whole, False
        # Whether some feature has one vector per lookup, any number per sample.
        self._jagged = outputs is not None and bool(outputs.unpooled) and batch.offsets is not None

    def keys(self) -> list[str]:
        return list(self._columns)

    def __getitem__(self, feature: str) -> Tensor:
        """Return the vectors of a feature, [batch, dim]; without pooling [lookups, dim]."""
        vectors = self._by_name()
        if feature not in vectors:
            raise KeyError(f"no feature {feature!r}; there are {few(self._columns)}")
        return vectors[feature]

    def __setitem__(self, feature: str, vectors: Tensor) -> None:
        """Accept what Python assigns after `embedded[feature] *= 2`; refuse other vectors."""
        if self[feature] is not vectors:
            raise TypeError(
                f"vectors of feature {feature!r} can be changed in place, but not replaced; keep "
                "other vectors in a variable of your own"
            )

    def to_dict(self) -> dict[str, Tensor]:
        vectors = self._by_name()
        return {name: vectors[name] for name in self._columns}

    def _by_name(self) -> Mapping[str, Tensor]:
        if self._vectors is None:
            assert self._whole is not None
            width = self._whole.shape[1] // len(self._columns)
            parts = self._whole.split(width, dim=1)
            self._vectors = dict(zip(self._columns, parts, strict=True))
        elif not self._whole_is_out:
            self._whole = None
        return self._vectors

    def values(self) -> Tensor:
        """Return all features side by side, [batch, sum of dims].

        A loss of this tensor trains all tables, also those whose columns the loss ignores.
        """
        if self._whole is not None:
            if not self._whole_is_out:
                self._whole_is_out, self._vectors = True, None
            return self._whole
        vectors = list(self.to_dict().values())
        if self._jagged:
            raise ValueError(
                "values() needs one vector per sample; features without pooling have one per "
                "lookup: take them by name"
            )
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=1)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise TypeError(
            f"torch's {name}() takes tensors, and embedding(ids) holds vectors by feature; take "
            "embedding(ids).values(), all features side by side, or embedding(ids)['feature']"
        )

    def key_dim(self) -> int:
        """Return the dimension along which features lie side by side in `values()`."""
        return 1

    def device(self) -> torch.device:
        """Return the device of the vectors."""
        part = self._whole if self._vectors is None else next(iter(self._vectors.values()))
        assert part is not None
        return part.device

    def length_per_key(self) -> list[int]:
        """Return the width of each feature's vectors."""
        if self._vectors is None:  # `values()` stays what it is
            assert self._whole is not None
            return [self._whole.shape[1] // len(self._columns)] * len(self._columns)
        return [self._vectors[name].shape[1] for name in self._columns]

    def offset_per_key(self) -> list[int]:
        """Return where each feature begins in `values()`, and after the last one the width."""
        return list(accumulate(self.length_per_key(), initial=0))

    def offsets(self, feature: str) -> Tensor:
        """Return where each sample's lookups begin among a feature's vectors, [batch + 1]."""
        size, batch = self._batch.num_samples, self._batch
        if batch.offsets is None:
            return torch.arange(size + 1, device=batch.values.device)
        key = feature if self._outputs is None else self._outputs.keys.get(feature, feature)
        place = batch.keys.index(key)
        offsets = batch.offsets[place * size : (place + 1) * size + 1].long()
        return offsets - offsets[0]

    def lengths(self, feature: str) -> Tensor:
        """Return how many lookups each sample has of a feature, [batch]."""
        return self.offsets(feature).diff()

    def jagged(self, feature: str) -> JaggedTensor:
        """Return the vectors of a feature without pooling, sample by sample."""
        vectors, offsets = self[feature], self.offsets(feature)
        if self._outputs is None or feature not in self._outputs.unpooled:
            raise ValueError(
                f"feature {feature!r} is pooled, so each sample has one vector: take it by "
                f"embedded[{feature!r}]"
            )
        return jagged_part(vectors, offsets, None, offsets.dtype)

    def to_jagged_dict(self) -> dict[str, JaggedTensor]:
        """Return `jagged` of all features, as TorchRec's `EmbeddingCollection` returns it."""
        return {name: self.jagged(name) for name in self._columns}
