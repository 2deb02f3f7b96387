"""Samples out of batches, for systems that order, split or filter them.

A batch is what a loader gives: tensors in tuples, lists, dicts and dataclasses, whose first
dimension is the samples', and jagged ids. TorchRec's jagged tensors, and those like them, become
hotrow's. This module does not know models or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.inputs.batch import is_jagged, parts_of
from hotrow.inputs.jagged import KeyedJaggedTensor
from hotrow.inputs.tree import members, rebuilt

Take = Callable[[Any, Tensor], Any]  # a batch and places of samples -> a batch of those
Join = Callable[[Sequence[Any]], Any]  # several batches -> one

_GIVE_BOTH = (
    "give take=, a function of a batch and a tensor of places that makes a batch of the samples "
    "there, and where samples of several batches come together also join=, of a list of batches"
)


def check_both(take: object, join: object) -> None:
    """Refuse one without the other."""
    if (take is None) != (join is None):
        given, missing = ("take", "join") if join is None else ("join", "take")
        raise ValueError(f"{given}= goes with {missing}=, which is not there: {_GIVE_BOTH}")


def take(batch: Any, places: Tensor, *, size: int, by: Take | None = None) -> Any:
    """Return the samples at `places` of a batch of `size`, in that order; `by` the caller's
    function, if there is one."""
    if by is not None:
        return by(batch, places)
    jagged = _jagged_taken(places, size)
    return _map([batch], lambda parts: _taken(parts[0], places, size), jagged, size)


def cut(batch: Any, low: int, high: int, *, size: int) -> Any:
    """Return the samples from `low` up to `high`; tensors are views, jagged ids are copied."""

    def tensors(parts: Sequence[Tensor]) -> Tensor:
        _check_samples(parts[0], size)
        return parts[0][low:high]

    def jagged(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        places = torch.arange(low, high, device=parts[0].values().device)
        return _jagged_taken(places, size)(parts)

    return _map([batch], tensors, jagged, size)


def join(batches: Sequence[Any], *, by: Join | None = None) -> Any:
    """Return one batch of all samples of several batches of one structure; a single one as it is.

    `by` is the caller's function, if there is one.
    """
    if not batches:
        raise ValueError("there is no batch to join")
    if len(batches) == 1:
        return batches[0]
    if by is not None:
        return by(batches)
    return _map(batches, lambda parts: torch.cat(list(parts)), _jagged_joined)


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same batch with every tensor changed; raise if it holds unknown objects."""
    return _map([batch], lambda parts: change(parts[0]), lambda parts: parts[0].map(change))


def tensors_of(batch: Any) -> list[Tensor]:
    """Return every tensor of a batch; their order depends on its structure alone."""
    tensors: list[Tensor] = []
    map_tensors(batch, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


def with_tensors(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a batch of this structure, with tensors in the order of `tensors_of`."""
    given = iter(tensors)
    return map_tensors(batch, lambda _: next(given))


def pinned(batch: Any) -> Any:
    """Return a copy in page-locked memory."""
    return map_tensors(batch, Tensor.pin_memory)


def outline(batch: Any, *, values: bool = True) -> Any:
    """Return what batches of one structure share: all but tensors' values and first dimensions.

    A ValueError names a part that `take` and `join` cannot handle; without `values` also a text or
    a number.
    """
    if isinstance(batch, Tensor):
        return ("tensor", batch.dtype, tuple(batch.shape[1:]))
    if is_jagged(batch):
        ids = _ours(batch)
        weights = ids.weights_or_none()
        kinds = ids.values().dtype, None if weights is None else weights.dtype
        return ("jagged", tuple(ids.keys()), *kinds)
    parts = members(batch)
    if parts is not None:
        kind = "dict" if isinstance(batch, Mapping) else type(batch).__name__
        return (kind, *((name, outline(part, values=values)) for name, part in parts.items()))
    if batch is None or (values and isinstance(batch, str | int | float)):
        return batch
    raise ValueError(
        f"a batch holds a {type(batch).__module__}.{type(batch).__name__}, of which samples cannot "
        "be taken; tensors and hotrow.KeyedJaggedTensor in tuples, lists, dicts and dataclasses "
        "can, and others by functions of your own: take= and join="
    )


def mask_of(mask: Any, size: int | None = None) -> Tensor:
    """Return a mask with a bool for each of `size` samples, checked, on the CPU."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 1:
        what = type(mask).__name__
        if isinstance(mask, Tensor):
            what = f"a tensor of {mask.dtype}, shape {tuple(mask.shape)}"
        raise TypeError(f"a bool for each sample was expected, a tensor [B], instead of {what}")
    if size is not None and len(mask) != size:
        raise ValueError(
            f"a bool for each of {size:,} samples was expected, and {len(mask):,} came"
        )
    return mask.cpu()


def _map(
    batches: Sequence[Any],
    of_tensors: Callable[[Sequence[Tensor]], Tensor],
    of_jagged: Callable[[Sequence[KeyedJaggedTensor]], KeyedJaggedTensor],
    size: int | None = None,
) -> Any:
    """Walk through batches of one structure side by side; `size` is their number of samples."""
    first = batches[0]
    if isinstance(first, Tensor):
        return of_tensors(batches)
    if is_jagged(first):
        return of_jagged([_ours(batch) for batch in batches])
    parts = [part for batch in batches if (part := members(batch)) is not None]
    has_tensors = any(isinstance(batch, Tensor) for batch in batches)
    if 0 < len(parts) < len(batches) or has_tensors:
        kinds = dict.fromkeys(type(batch).__name__ for batch in batches)
        raise ValueError(
            f"batches to join hold {' and '.join(kinds)} in the same place; leave it out where "
            f"batches are made, or {_GIVE_BOTH}"
        )
    if isinstance(first, list | tuple):
        _check_texts(first, size)
        if len({len(batch) for batch in batches}) > 1:
            raise ValueError(
                "batches to join hold lists of different lengths, "
                f"{', '.join(str(len(batch)) for batch in batches)}; leave them out where batches "
                f"are made, or {_GIVE_BOTH}"
            )
    if parts:
        joined = {
            name: _map([part[name] for part in parts], of_tensors, of_jagged, size)
            for name in parts[0]
        }
        return rebuilt(first, joined)
    if first is None or isinstance(first, str | int | float):
        return first
    raise TypeError(
        f"a batch holds a {type(first).__name__}, and whose samples its parts are of is not known; "
        f"{_GIVE_BOTH}"
    )


def _ours(ids: Any) -> KeyedJaggedTensor:
    if isinstance(ids, KeyedJaggedTensor):
        return ids
    values, offsets, weights = parts_of(ids)
    return KeyedJaggedTensor(ids.keys(), values, offsets=offsets, weights=weights)


def _check_texts(part: Sequence[Any], size: int | None) -> None:
    """Refuse a list with a text for each sample, as a DataLoader makes it: it cannot be cut."""
    if part and len(part) == size and all(isinstance(each, str) for each in part):
        raise ValueError(
            f"a batch of {size:,} samples holds as many texts ({part[0]!r}, ...), which are not "
            f"taken apart with it; leave them out where batches are made, or {_GIVE_BOTH}"
        )


def _check_samples(tensor: Tensor, size: int) -> None:
    if tensor.ndim == 0 or len(tensor) != size:
        raise ValueError(
            f"a batch of {size:,} samples holds a tensor of shape {tuple(tensor.shape)}, whose "
            "first dimension is not the samples'. Ids and their offsets can be a "
            f"hotrow.KeyedJaggedTensor; or {_GIVE_BOTH}"
        )


def _taken(tensor: Tensor, places: Tensor, size: int) -> Tensor:
    _check_samples(tensor, size)
    return tensor.index_select(0, places.to(tensor.device))


def _jagged_taken(places: Tensor, size: int) -> Callable[..., KeyedJaggedTensor]:
    def taken(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        (ids,) = parts
        if len(ids.offsets()) - 1 != len(ids.keys()) * size:
            raise ValueError(
                f"ids of {len(ids.keys())} features have {len(ids.offsets()) - 1} bags, and "
                f"{size:,} samples would have {len(ids.keys()) * size:,}"
            )
        columns = places.to(ids.offsets().device)
        starts = ids.offsets()[:-1].view(-1, size).index_select(1, columns).flatten()
        lengths = ids.lengths().view(-1, size).index_select(1, columns).flatten()
        ends = lengths.cumsum(0)
        lookups = torch.repeat_interleave(starts - (ends - lengths), lengths)
        lookups += torch.arange(len(lookups), device=lookups.device)
        weights = ids.weights_or_none()
        return KeyedJaggedTensor(
            ids.keys(),
            ids.values().index_select(0, lookups),
            lengths=lengths,
            weights=None if weights is None else weights.index_select(0, lookups),
        )

    return taken


def _jagged_joined(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Join feature by feature, so that samples of one batch follow those of another."""
    keys = parts[0].keys()
    for ids in parts:
        if ids.keys() != keys:
            raise ValueError(f"batches to join have other features: {keys} and {ids.keys()}")
    weights = [ids.weights_or_none() for ids in parts]
    if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        raise ValueError("batches to join must all have weights, or none of them")
    counts = [ids.lengths().view(len(keys), -1) for ids in parts]  # by feature and sample
    cuts = [count.sum(1).tolist() for count in counts]

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        split = [tensor.split(cut) for tensor, cut in zip(tensors, cuts, strict=True)]
        return torch.cat([part for by_batch in zip(*split, strict=True) for part in by_batch])

    return KeyedJaggedTensor(
        keys,
        joined([ids.values() for ids in parts]),
        lengths=torch.cat(counts, 1).flatten(),
        weights=None if weights[0] is None else joined([w for w in weights if w is not None]),
    )
