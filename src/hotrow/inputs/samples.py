"""Samples out of batches: for orders, splits and filters that choose among them.

A batch is whatever a loader gives: tensors in tuples, lists, dicts and dataclasses, whose first
dimension is the samples', and jagged ids: TorchRec's, or what looks like them, become hotrow's.
Knows nothing of models or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hotrow.inputs.batch import KeyedJaggedTensor, raw_weights

Take = Callable[[Any, Tensor], Any]  # a batch and places of samples -> a batch of those

_GIVE_BOTH = (
    "give take=, a function of a batch and a tensor of places that makes a batch of the samples "
    "there, and where samples of several batches come together also join=, of a list of batches"
)


def check_both(take: object, join: object) -> None:
    """Refuses one without the other: what is cut in a way of its own is joined so, too."""
    if (take is None) != (join is None):
        given, missing = ("take", "join") if join is None else ("join", "take")
        raise ValueError(f"{given}= goes with {missing}=, which is not there: {_GIVE_BOTH}")


def take(batch: Any, places: Tensor, *, size: int) -> Any:
    """The samples at `places` of a batch of `size`, in that order."""
    jagged = _jagged_taken(places, size)
    return _map([batch], lambda parts: _taken(parts[0], places, size), jagged, size)


def cut(batch: Any, low: int, high: int, *, size: int) -> Any:
    """The samples from `low` up to `high`; tensors are views, jagged ids are copied."""

    def tensors(parts: Sequence[Tensor]) -> Tensor:
        _check_samples(parts[0], size)
        return parts[0][low:high]

    def jagged(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        places = torch.arange(low, high, device=parts[0].values().device)
        return _jagged_taken(places, size)(parts)

    return _map([batch], tensors, jagged, size)


def join(batches: Sequence[Any]) -> Any:
    """One batch of all samples of several that look alike."""
    if not batches:
        raise ValueError("there is no batch to join")
    return _map(batches, lambda parts: torch.cat(list(parts)), _jagged_joined)


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor of a batch, in an order that batches which look alike share."""
    found: list[Tensor] = []

    def tensor(parts: Sequence[Tensor]) -> Tensor:
        found.append(parts[0])
        return parts[0]

    def jagged(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        (ids,) = parts
        weights = ids.weights_or_none()
        found.extend([ids.values(), ids.lengths(), *([] if weights is None else [weights])])
        return ids

    _map([batch], tensor, jagged)
    return found


def with_tensors(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """A batch that looks like this one, of tensors as `tensors_of` gives them."""
    given = iter(tensors)

    def jagged(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        values, lengths = next(given), next(given)
        weights = None if parts[0].weights_or_none() is None else next(given)
        return KeyedJaggedTensor(parts[0].keys(), values, lengths=lengths, weights=weights)

    return _map([batch], lambda parts: next(given), jagged)


def pinned(batch: Any) -> Any:
    """A copy in page-locked memory."""
    return _map([batch], lambda parts: parts[0].pin_memory(), lambda parts: parts[0].pin_memory())


def outline(batch: Any, *, values: bool = True) -> Any:
    """What batches share if they look alike: all but their tensors' values and first dimensions.

    A ValueError names what is no part of samples that `take` and `join` know; without `values`
    that is also a text or a number.
    """

    def inside(part: Any) -> Any:
        return outline(part, values=values)

    if isinstance(batch, Tensor):
        return ("tensor", batch.dtype, tuple(batch.shape[1:]))
    if _is_jagged(batch):
        batch = _ours(batch)
        weights = batch.weights_or_none()
        kinds = batch.values().dtype, None if weights is None else weights.dtype
        return ("jagged", tuple(batch.keys()), *kinds)
    if isinstance(batch, list | tuple):
        return (type(batch).__name__, *map(inside, batch))
    if isinstance(batch, Mapping):
        return ("dict", *((key, inside(value)) for key, value in batch.items()))
    if is_dataclass(batch) and not isinstance(batch, type):
        names = [each.name for each in fields(batch) if each.init]
        return (type(batch).__name__, *((name, inside(getattr(batch, name))) for name in names))
    if batch is None or (values and isinstance(batch, str | int | float)):
        return batch
    raise ValueError(
        f"a batch holds a {type(batch).__module__}.{type(batch).__name__}, of which samples cannot "
        "be taken; tensors and hotrow.KeyedJaggedTensor in tuples, lists, dicts and dataclasses "
        "can, and others by functions of your own: take= and join="
    )


def mask_of(found: Any, size: int | None = None) -> Tensor:
    """What a function said of each sample of a batch of `size`, yes or no: checked, on the CPU."""
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.ndim != 1:
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"a tensor of {found.dtype}, shape {tuple(found.shape)}"
        raise TypeError(f"a bool for each sample was expected, a tensor [B], instead of {what}")
    if size is not None and len(found) != size:
        raise ValueError(
            f"a bool for each of {size:,} samples was expected, and {len(found):,} came"
        )
    return found.cpu()


def _map(
    batches: Sequence[Any],
    of_tensors: Callable[[Sequence[Tensor]], Tensor],
    of_jagged: Callable[[Sequence[KeyedJaggedTensor]], KeyedJaggedTensor],
    size: int | None = None,
) -> Any:
    """Walk through batches of one structure side by side; of `size` samples, where it matters."""
    first = batches[0]

    def inside(parts: Sequence[Any]) -> Any:
        return _map(parts, of_tensors, of_jagged, size)

    if isinstance(first, Tensor):
        return of_tensors(batches)
    if _is_jagged(first):
        return of_jagged([_ours(each) for each in batches])
    if isinstance(first, list | tuple):
        _check_texts(first, size)
        if len({len(each) for each in batches}) > 1:
            raise ValueError(
                "batches to join hold lists of different lengths, "
                f"{', '.join(str(len(each)) for each in batches)}; leave them out where batches "
                f"are made, or {_GIVE_BOTH}"
            )
        found = [inside(parts) for parts in zip(*batches, strict=True)]
        return type(first)(*found) if hasattr(first, "_fields") else type(first)(found)
    if isinstance(first, Mapping):
        return {key: inside([each[key] for each in batches]) for key in first}
    if is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in fields(first) if each.init]
        changed = {name: inside([getattr(each, name) for each in batches]) for name in names}
        return replace(first, **changed)
    if first is None or isinstance(first, str | int | float):
        return first
    raise TypeError(
        f"a batch holds a {type(first).__name__}, and whose samples its parts are of is not known; "
        f"{_GIVE_BOTH}"
    )


def _is_jagged(part: Any) -> bool:
    """What `hotrow.inputs.batch.parse` takes for jagged ids."""
    return all(callable(getattr(part, name, None)) for name in ("keys", "values", "offsets"))


def _ours(ids: Any) -> KeyedJaggedTensor:
    if isinstance(ids, KeyedJaggedTensor):
        return ids
    weights = raw_weights(ids)
    return KeyedJaggedTensor(ids.keys(), ids.values(), offsets=ids.offsets(), weights=weights)


def _check_texts(part: Sequence[Any], size: int | None) -> None:
    """A text for each sample, as a DataLoader leaves them, is no tensor, and would stay whole."""
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
        here = places.to(ids.offsets().device)
        starts = ids.offsets()[:-1].view(-1, size).index_select(1, here).flatten()
        lengths = ids.lengths().view(-1, size).index_select(1, here).flatten()
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
    """Feature by feature, so that samples of one batch follow those of another."""
    keys = parts[0].keys()
    for each in parts:
        if each.keys() != keys:
            raise ValueError(f"batches to join have other features: {keys} and {each.keys()}")
    values: list[Tensor] = []
    weights: list[Tensor] = []
    lengths: list[Tensor] = []
    cuts = [_by_feature(each) for each in parts]
    for feature in range(len(keys)):
        for ids, (edges, counts) in zip(parts, cuts, strict=True):
            here = slice(edges[feature], edges[feature + 1])
            values.append(ids.values()[here])
            lengths.append(counts[feature])
            given = ids.weights_or_none()
            if given is not None:
                weights.append(given[here])
    if weights and len(weights) != len(values):
        raise ValueError("batches to join must all have weights, or none of them")
    return KeyedJaggedTensor(
        keys,
        torch.cat(values),
        lengths=torch.cat(lengths),
        weights=torch.cat(weights) if weights else None,
    )


def _by_feature(ids: KeyedJaggedTensor) -> tuple[list[int], Tensor]:
    """Where each feature's ids begin and end, and how many each sample has, [features, samples]."""
    counts = ids.lengths().view(len(ids.keys()), -1)
    return [0, *counts.sum(1).cumsum(0).tolist()], counts
