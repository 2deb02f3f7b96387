"""Any accepted input as checked ids of one width group. Does not know where rows are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hotrow.inputs.jagged import KeyedJaggedTensor as KeyedJaggedTensor
from hotrow.inputs.jagged import refuse_repeated_keys
from hotrow.inputs.jagged_tensor import check_integers
from hotrow.inputs.spread import Columns, Spread
from hotrow.inputs.tables import EmbeddingBagConfig, Feature, WidthGroup
from hotrow.support.messages import few

PADDING = -1
_MANY = 16  # bags


@dataclass(frozen=True)
class Batch:
    """One batch of ids in the order of a collection's features.

    `offsets` is None for a dense input: one lookup per sample and feature, sample by sample.
    """

    values: Tensor  # [B, F] dense, or [L]
    offsets: Tensor | None  # [F * B + 1], feature by feature
    keys: tuple[str, ...]  # names of the F columns
    num_samples: int
    ends: tuple[int, ...] = ()  # jagged: where each feature's indices end, after a 0
    given: tuple[Tensor, ...] = ()  # the user's own tensors, if a device compares ids later
    # Where modules look up: bags of each call, by key. Keys then have different numbers of bags.
    calls: tuple[tuple[int, ...], ...] = ()
    varies: bool = False  # some of these have offsets, so batches have other numbers of ids

    @property
    def edges(self) -> Tensor:
        """Return where the ids of each key begin, and the end, by launches alone."""
        assert self.offsets is not None
        if not self.calls:
            return self.offsets[:: self.num_samples]
        firsts = [0]
        for sizes in self.calls:
            firsts.append(firsts[-1] + sum(sizes))
        return torch.cat([self.offsets[first : first + 1] for first in firsts])

    def bags_of(self, key: str) -> slice:
        """Return where the bags of a key begin and end among those of a jagged batch."""
        place = self.keys.index(key)
        if not self.calls:
            return slice(place * self.num_samples, (place + 1) * self.num_samples)
        before = sum(sum(sizes) for sizes in self.calls[:place])
        return slice(before, before + sum(self.calls[place]))

    @property
    def num_values(self) -> int:
        return self.values.numel()

    def has_one_size(self) -> bool:
        """Return whether all bags of each key have equally many ids, as in batches with a fixed
        number of ids per sample; a few bags may be alike by chance. Waits for offsets on a device.
        """
        if self.offsets is None:
            return True
        sizes = self.offsets.diff().cpu()
        by_key = [sizes[self.bags_of(key)] for key in self.keys]
        return all(len(bags) >= _MANY and bool((bags == bags[0]).all()) for bags in by_key)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, values=self.values.to(device), offsets=offsets)


@dataclass(frozen=True)
class Lookups:
    """The lookups of one batch in one width group, bag by bag.

    A bag is the set of lookups that one output vector pools. Bags are ordered sample by sample if
    `by_sample` (dense inputs), else feature by feature.
    """

    ids: Tensor  # [L] int64, PADDING where nothing is read
    offsets: Tensor | None  # [bags + 1] int64; None: one lookup per bag
    divisor: Tensor | None  # [bags, 1] float32; None: nothing is averaged
    bags_per_feature: tuple[int, ...]
    by_sample: bool
    spans: tuple[tuple[int, int], ...] = ()  # of each feature's ids in the user's values
    weights: Tensor | None = None  # [L] float32
    # For captured steps: places for lookups, of which the first ones are used. Launches do not
    # depend on how many; only `offsets` say it, on the device.
    size: int | None = None
    spread: Spread | None = None  # None: as in the user's values
    # In a backward pass: whether the vectors of each part have a gradient. None: all have.
    used: tuple[bool, ...] | None = None
    # Bags that are returned apart: the feature, and how many. Empty: those of each feature.
    parts: tuple[tuple[int, int], ...] = ()

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The bags of each part; parts are features, or calls of a module."""
        return tuple([size for _, size in self.parts]) if self.parts else self.bags_per_feature

    def feature_of(self, part: int) -> int:
        """Return the feature that a part belongs to."""
        return self.parts[part][0] if self.parts else part

    @property
    def num_bags(self) -> int:
        return sum(self.bags_per_feature)

    @property
    def num_lookups(self) -> int:
        return sum(high - low for low, high in self.spans) if self.spans else self.ids.numel()

    def bag_of(self) -> Tensor:
        """Return the bag of each lookup, [L] int64."""
        bags = torch.arange(self.num_bags, device=self.ids.device)
        if self.offsets is None:
            return bags
        if self.size is not None:
            place = torch.arange(self.size, device=self.ids.device)
            bag = torch.searchsorted(self.offsets[1:].contiguous(), place, right=True)
            return bag.clamp_(max=max(0, self.num_bags - 1))  # unused places: any bag
        return torch.repeat_interleave(bags, self.offsets.diff(), output_size=self.num_lookups)

    def used_lookups(self) -> Tensor:
        """Return whether each lookup's feature is `used`, [L] bool; waits for no device."""
        assert self.used is not None
        bags = torch.zeros(self.num_bags, dtype=torch.bool, device=self.ids.device)
        parts = bags.split(list(self.part_sizes))
        if self.by_sample:
            parts = bags.view(-1, len(self.used)).unbind(1)
        for part, is_used in zip(parts, self.used, strict=True):
            if is_used:
                part.fill_(True)
        return bags if self.offsets is None else bags[self.bag_of()]


def no_lookups(features: int, device: torch.device | None = None) -> Lookups:
    """Return the lookups of a batch without samples."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    return Lookups(none, None, None, (0,) * features, by_sample=True)


def parse(features: Any, columns: tuple[str, ...], device: torch.device | None) -> Batch:
    """Return any accepted input as a `Batch`. It must be on `device`; None: anywhere."""
    if isinstance(features, Tensor):
        return _parse_dense(features, columns, device)
    if hasattr(features, "as_batch"):  # what modules look up
        batch: Batch = features.as_batch(columns)
        return batch
    if isinstance(features, tuple | list) and 2 <= len(features) <= 3:
        return _parse_jagged(columns, *parts_of(features), columns, device)
    if is_jagged(features):
        keys = tuple(features.keys())
        refuse_repeated_keys(keys)
        return _parse_jagged(keys, *parts_of(features), columns, device)
    if isinstance(features, Mapping):
        raise TypeError(
            f"ids must not be a {type(features).__name__}; hotrow.KeyedJaggedTensor.of(...) joins "
            f"ids by feature ({few(columns)})"
        )
    raise TypeError(
        "ids must be an int64 tensor [batch, features], a tuple (indices, offsets) or "
        "(indices, offsets, weights), or an object with keys(), values() and offsets() "
        f"such as hotrow.KeyedJaggedTensor; got {type(features).__name__}"
    )


def _parse_dense(values: Tensor, columns: tuple[str, ...], device: torch.device | None) -> Batch:
    if values.dim() == 1 and len(columns) == 1:
        values = values.unsqueeze(1)
    if values.dim() != 2 or values.shape[1] != len(columns):
        raise ValueError(
            f"a dense input must have shape [batch, {len(columns)}], a column for each feature "
            f"({few(columns)}); got {list(values.shape)}"
        )
    return Batch(_int64(values, "ids", device), None, columns, values.shape[0])


def _parse_jagged(
    keys: tuple[str, ...],
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    columns: tuple[str, ...],
    device: torch.device | None,
) -> Batch:
    values, offsets = _int64(values, "indices", device), _int64(offsets, "offsets", device)
    if values.dim() != 1 or offsets.dim() != 1:
        raise ValueError(
            "indices and offsets must have one dimension each, got shapes "
            f"{list(values.shape)} and {list(offsets.shape)}"
        )
    missing = [name for name in columns if name not in keys]
    if missing:
        raise ValueError(
            f"the batch has no feature {missing[0]!r}, which a table of this collection reads; "
            f"it has {few(keys)}"
        )
    num_bags = offsets.numel() - 1
    if num_bags < 0 or num_bags % len(keys):
        short = "; nn.EmbeddingBag's short form leaves the last offset out: append it"
        raise ValueError(
            f"offsets has {offsets.numel():,} entries; {len(keys)} features need a multiple of "
            f"{len(keys)} bags and one entry more, the number of indices"
            + (short if num_bags >= 0 and offsets.numel() % len(keys) == 0 else "")
        )
    if weights is not None:
        _check_weights(weights, values)
    num_samples = num_bags // len(keys)
    ends = _check_offsets(offsets, values.numel(), len(keys), num_samples)
    return Batch(values, offsets, keys, num_samples, ends)


def _check_offsets(
    offsets: Tensor, num_values: int, num_features: int, num_samples: int
) -> tuple[int, ...]:
    # One small tensor and one read, so that a device would be asked once.
    falls = offsets.diff() < 0
    first_fall = falls.int().argmax() if falls.numel() else torch.zeros_like(offsets[0])
    edges = offsets[::num_samples] if num_samples else offsets[:1].expand(num_features + 1)
    facts = torch.stack([offsets[0], offsets[-1], falls.any().long(), first_fall])
    first, last, falling, position, *ends = torch.cat([facts, edges]).tolist()
    if first != 0:
        raise ValueError(f"offsets must start at 0, not {first}")
    if falling:
        raise ValueError(
            f"offsets must not fall, but offsets[{position}] is {int(offsets[position])} and "
            f"offsets[{position + 1}] is {int(offsets[position + 1])}"
        )
    if last != num_values:
        raise ValueError(
            f"offsets must end at the number of indices, {num_values}, but end at {last} (lengths "
            "must sum to it); nn.EmbeddingBag's short form leaves the last offset out: append it"
        )
    return tuple(ends)


def _check_weights(weights: Any, values: Tensor) -> None:
    if not isinstance(weights, Tensor):
        raise TypeError(f"weights must be a tensor, got {type(weights).__name__}")
    if weights.shape != values.shape:
        raise ValueError(
            f"weights must have one entry per index, {values.numel()}, "
            f"got shape {list(weights.shape)}"
        )
    if weights.dtype != torch.float32:
        raise TypeError(f"weights must be float32, not {weights.dtype}")


def _int64(tensor: Any, what: str, device: torch.device | None) -> Tensor:
    check_integers(tensor, what)
    if tensor.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"{what} must be int64 (or int32), not {tensor.dtype}; .long() makes them so"
        )
    if device is not None and tensor.device.type != device.type:
        raise ValueError(
            f"{what} are on {tensor.device} but the rows' device is {device}; move the batch "
            "there, or iterate with hotrow.ahead, which does"
        )
    numbers: Tensor = tensor.long()
    return numbers


def elsewhere(features: Any, batch: Batch) -> Batch:
    """Return a parsed batch of which `features` are a copy on another device."""
    if hasattr(features, "as_batch"):
        joined: Batch = features.as_batch(batch.keys)
        return joined
    values, offsets, _ = parts_of(features)
    if offsets is None:
        if values.shape != batch.values.shape:
            values = values.view_as(batch.values)
        return replace(batch, values=values.long(), given=(features,))
    # Offsets stay the user's own tensor: a captured step reads them where they are.
    return replace(batch, values=values.long(), offsets=offsets, given=(values, offsets))


class BadId(ValueError):
    """An id outside its table. The input itself was understood."""


def lookups_of(batch: Batch, group: WidthGroup) -> Lookups:
    """Return a batch's lookups in one width group; raise on an id outside its table."""
    if batch.offsets is None:
        return _dense_lookups(batch, group)
    return _jagged_lookups(batch, group)


def keys_of(batch: Batch, group: WidthGroup, *, padding: int) -> tuple[Tensor, Tensor]:
    """Return the ids that a batch looks up in a group, [L] int64, and whether one is outside its
    table, a bool tensor. Lookups that bags skip have the id `padding`. No device is synchronized.
    """
    numbers = group.feature_numbers(batch.values.device)
    facts = [numbers.base, numbers.first, numbers.last]
    facts += [] if numbers.skipped is None else [numbers.skipped]
    if batch.offsets is None:
        values = _dense_values(batch, group)
    else:
        spans = spans_of(batch, group)
        values = torch.cat([batch.values[low:high] for low, high in spans])
        lengths = torch.tensor([high - low for low, high in spans])
        lengths = lengths.to(values.device, non_blocking=True)
        by_value = torch.stack(facts).repeat_interleave(lengths, 1, output_size=len(values))
        facts = list(by_value)
    base, first, last, *skipped = facts
    is_bad = (values.clamp(first, last) != values).any()
    keys = values + base
    if skipped:
        keys = keys.masked_fill_(values == skipped[0], padding)
    return keys.flatten(), is_bad


def _dense_lookups(batch: Batch, group: WidthGroup) -> Lookups:
    # As `keys_of`, in fewer calls: a comparison that synchronizes.
    values, numbers = _dense_values(batch, group), group.feature_numbers(batch.values.device)
    if not torch.equal(values.clamp(numbers.first, numbers.last), values):
        _raise_first_bad_id(batch, group)
    ids = values + numbers.base
    if numbers.skipped is not None:
        ids = ids.masked_fill_(values == numbers.skipped, PADDING)
    bags = (batch.num_samples,) * len(group.features)
    return Lookups(ids.flatten(), None, None, bags, by_sample=True)


def _dense_values(batch: Batch, group: WidthGroup) -> Tensor:
    """Return the indices of a group's features, [batch, features]."""
    if group.keys == batch.keys:
        return batch.values
    return batch.values.index_select(1, group.feature_numbers(batch.values.device).column)


def _raise_first_bad_id(batch: Batch, group: WidthGroup) -> None:
    numbers, values = group.feature_numbers(batch.values.device), _dense_values(batch, group)
    is_bad = values.clamp(numbers.first, numbers.last) != values
    sample, column = divmod(int(is_bad.flatten().int().argmax()), values.shape[1])
    feature, value = group.features[column], int(values[sample, column])
    _raise_bad_id(feature.key, f"sample {sample}", value, group.tables[feature.table])


def _jagged_lookups(batch: Batch, group: WidthGroup) -> Lookups:
    parts: list[Tensor] = []
    for feature, (low, high) in zip(group.features, spans_of(batch, group), strict=True):
        table = group.tables[feature.table]
        ids = _checked(batch, low, high, feature, table) + group.bases[feature.table]
        if table.skipped_idx is not None:
            ids = ids.masked_fill(ids == group.bases[feature.table] + table.skipped_idx, PADDING)
        parts.append(ids)
    x = outline_of(batch, group)
    ids = torch.cat(parts)
    assert x.offsets is not None
    return replace(x, ids=ids, divisor=_divisor(ids != PADDING, x, group))


def spans_of(batch: Batch, group: WidthGroup) -> tuple[tuple[int, int], ...]:
    """Return where the indices of each of a group's features are in a jagged batch's values."""
    places = [batch.keys.index(feature.key) for feature in group.features]
    return tuple((batch.ends[place], batch.ends[place + 1]) for place in places)


def outline_of(batch: Batch, group: WidthGroup) -> Lookups:
    """Return `lookups_of` without ids and divisor. No device is synchronized."""
    nothing = batch.values.new_empty(0)
    if batch.offsets is None:
        bags = (batch.num_samples,) * len(group.features)
        return Lookups(nothing, None, None, bags, by_sample=True)
    spans = spans_of(batch, group)
    if batch.calls:
        return _outline_of_calls(batch, group, spans)
    lengths: list[Tensor] = []
    for feature, (low, high) in zip(group.features, spans, strict=True):
        if feature.pooling == "none":
            lengths.append(batch.offsets.new_ones(high - low))
        else:
            of_key = batch.bags_of(feature.key)
            lengths.append(batch.offsets[of_key.start : of_key.stop + 1].diff())
    return Lookups(
        ids=nothing,
        offsets=torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0)),
        divisor=None,
        bags_per_feature=tuple(part.numel() for part in lengths),
        by_sample=False,
        spans=spans,
    )


def _outline_of_calls(
    batch: Batch, group: WidthGroup, spans: tuple[tuple[int, int], ...]
) -> Lookups:
    """Return `outline_of` where modules look up: offsets have every bag, also those of one id."""
    offsets = batch.offsets
    assert offsets is not None
    if group.keys != batch.keys:
        bags = [batch.bags_of(feature.key) for feature in group.features]
        lengths = torch.cat([offsets[x.start : x.stop + 1].diff() for x in bags])
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    calls = [batch.calls[batch.keys.index(feature.key)] for feature in group.features]
    return Lookups(
        ids=batch.values.new_empty(0),
        offsets=offsets,
        divisor=None,
        bags_per_feature=tuple(sum(sizes) for sizes in calls),
        by_sample=False,
        spans=spans,
        parts=tuple((place, bags) for place, sizes in enumerate(calls) for bags in sizes),
    )


def fixed_outline(
    batch: Batch, group: WidthGroup, columns: Columns, size: int, is_real: Tensor
) -> Lookups:
    """Return `outline_of` with the divisor, by launches that are equal for all batches of a shape.

    For a group without pooling, which has a vector per lookup, the shape includes its spans; where
    modules look up, the bags of their calls. `is_real` [size] says which lookups read a row.
    """
    if is_pooled(group) and not batch.calls:
        x = _pooled_outline(batch, group, columns, size)
    else:
        x = replace(outline_of(batch, group), size=size)
    return replace(x, divisor=_divisor(is_real, x, group))


def is_pooled(group: WidthGroup) -> bool:
    """Return whether every sample has one vector per feature."""
    return all(feature.pooling != "none" for feature in group.features)


def _pooled_outline(batch: Batch, group: WidthGroup, columns: Columns, size: int) -> Lookups:
    assert batch.offsets is not None
    offsets = batch.offsets.long()
    edges = offsets[:: batch.num_samples]
    firsts = edges.index_select(0, columns.places)
    lengths = edges.diff().index_select(0, columns.places)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    if not columns.is_all:
        by_key = offsets[:-1].view(len(batch.keys), batch.num_samples)
        by_feature = by_key.index_select(0, columns.places) + (starts - firsts).unsqueeze(1)
        offsets = torch.cat([by_feature.flatten(), ends[-1:]])
    as_given = columns.is_all and batch.num_values == size
    return Lookups(
        ids=batch.values.new_empty(0),
        offsets=offsets,
        divisor=None,
        bags_per_feature=(batch.num_samples,) * len(group.features),
        by_sample=False,
        spans=spans_of(batch, group),
        size=size,
        spread=None if as_given else Spread(edges, starts, ends, columns),
    )


def divisor_of(batch: Batch, x: Lookups, group: WidthGroup) -> Tensor | None:
    """Return what each bag's sum is divided by, without checking ids."""
    if x.offsets is None or all(feature.pooling != "mean" for feature in group.features):
        return None
    parts = []
    for feature, (low, high) in zip(group.features, x.spans, strict=True):
        skipped = group.tables[feature.table].skipped_idx
        parts.append(batch.values[low:high] != (PADDING if skipped is None else skipped))
    return _divisor(torch.cat(parts), x, group)


def weights_of(features: Any, x: Lookups, group: WidthGroup) -> Tensor | None:
    """Return the per-sample weights of a group's lookups, differentiable; None without any."""
    weights = raw_weights(features)
    if weights is None:
        return None
    for feature in group.features:
        if feature.pooling != "sum":
            raise ValueError(
                f"feature {feature.key!r} has pooling={feature.pooling!r}; per-sample weights "
                "work with pooling='sum' only, as in torch.nn.EmbeddingBag"
            )
    if x.size is not None:
        return weights if x.spread is None else x.spread.take(weights, x.size)
    parts = [weights[low:high] for low, high in x.spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def is_jagged(features: Any) -> bool:
    """Return whether an input is a jagged tensor: hotrow's, TorchRec's or one like them."""
    return all(callable(getattr(features, name, None)) for name in ("keys", "values", "offsets"))


def parts_of(features: Any) -> tuple[Tensor, Any, Tensor | None]:
    """Return ids, offsets and weights of an accepted input, as the user holds them.

    A dense input has no offsets.
    """
    if isinstance(features, Tensor):
        return features, None, None
    if isinstance(features, tuple | list):
        return features[0], features[1], raw_weights(features)
    return features.values(), features.offsets(), raw_weights(features)


def raw_weights(features: Any) -> Tensor | None:
    if isinstance(features, tuple | list):
        return features[2] if len(features) == 3 else None
    weights: Tensor | None = getattr(features, "weights_or_none", lambda: None)()
    return weights


def count_ids(features: Any) -> int:
    """Return how many ids an input has, without checking them; 0 for what `parse` will refuse."""
    ids = features.values() if is_jagged(features) else features
    if isinstance(features, tuple | list) and features:
        ids = features[0]
    return ids.numel() if isinstance(ids, Tensor) else 0


def compared(features: Any) -> tuple[Tensor, ...]:
    """Return the tensors that distinguish one batch of ids from another."""
    if hasattr(features, "as_batch"):
        tensors: tuple[Tensor, ...] = features.tensors
        return tensors
    values, offsets, _ = parts_of(features)
    return (values,) if isinstance(features, Tensor) else (values, offsets)


def versions_of(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return how often each tensor was changed."""
    # Inference tensors have no version, so each counts as changed.
    return tuple([object() if t.is_inference() else t._version for t in tensors])


def identity(
    features: Any, tensors: tuple[Tensor, ...], versions: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return what distinguishes one batch of ids from another, without reading them.

    Tensors are compared by memory, shape and version. Keep them alive as long as an identity, so
    that their memory is not reused.
    """
    keys = tuple(features.keys()) if is_jagged(features) else ()
    return (keys, versions, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors))


def _divisor(is_real: Tensor, x: Lookups, group: WidthGroup) -> Tensor | None:
    """Return what each bag's sum is divided by: for means its lookups without padding."""
    if x.offsets is None or all(feature.pooling != "mean" for feature in group.features):
        return None
    real = torch.nn.functional.pad(is_real.cumsum(0), (1, 0))
    counts = real[x.offsets].diff().clamp_(min=1)
    by_feature = counts.split(list(x.bags_per_feature))
    parts = [
        part if feature.pooling == "mean" else torch.ones_like(part)
        for part, feature in zip(by_feature, group.features, strict=True)
    ]
    return torch.cat(parts).float().unsqueeze(1)


def _checked(
    batch: Batch, low: int, high: int, feature: Feature, table: EmbeddingBagConfig
) -> Tensor:
    ids = batch.values[low:high]
    inside = ids.clamp(0, table.num_embeddings - 1)
    if not torch.equal(inside, ids):
        place = int((inside != ids).int().argmax())
        assert batch.offsets is not None
        starts = batch.offsets[batch.bags_of(feature.key)]
        # The last sample that begins there or before: an empty one begins where the next does.
        sample = int((starts <= low + place).sum()) - 1
        where = f"position {low + place}, sample {sample}"
        _raise_bad_id(feature.key, where, int(ids[place]), table)
    return ids


def _raise_bad_id(feature: str, where: str, value: int, table: EmbeddingBagConfig) -> None:
    raise BadId(
        f"feature {feature!r}, {where}: id {value} is outside table {table.name!r}, "
        f"which has rows 0 to {table.num_embeddings - 1}"
    )
