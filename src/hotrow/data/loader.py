"""Batches from files: threads read and shuffle samples and build batches, ahead of training.

    loader = Loader("prepared/criteo", batch_size=8192, seed=0)
    for batch in hotrow.ahead(loader, model, ids=lambda batch: batch.sparse):
        ...

A batch depends on its number alone (see hotrow.inputs.shuffle), so a run that was stopped after n
batches goes on with `loader.batches(start=n)` and gets the same batches. With several ranks each
one gets its part of every batch, and the numbers are those of the whole batches: a run that was
stopped goes on with any number of ranks.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data.batches import ClickBatch, SequenceBatch, positions
from hotrow.data.prepared import Prepared, Schema
from hotrow.data.prepared.parallel import Cores
from hotrow.data.ranks import PartReader, RankPart, current_part, given_part
from hotrow.data.sources import (
    PreparedSource,
    Samples,
    Source,
    SubsetSource,
    lists_in,
    read_some,
)
from hotrow.inputs.batch import KeyedJaggedTensor
from hotrow.inputs.shuffle import Order, Stretch
from hotrow.support.messages import few, many
from hotrow.support.numbers import whole

MIXED = 1 << 18  # samples that are shuffled together
_MOST_WORKERS = 4
_PREFIX = "history_"

Batch = TypeVar("Batch", covariant=True)
Result = TypeVar("Result")
Histories = Mapping[str, str | None]  # by feature: the feature that lists its past, if it has one


class BatchReader(Generic[Batch]):
    """Reads the samples of a source in order, and cuts them into batches; subclasses say what a
    batch looks like."""

    def __init__(
        self,
        source: Source | Prepared | str | Path,
        split: str = "train",
        *,
        batch_size: int,
        features: Sequence[str] | None = None,
        seed: int | None = None,
        epochs: int = 1,
        drop_last: bool = False,
        mixed: int = MIXED,
        workers: int | None = None,
        pin_memory: bool | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self._part = given_part(rank, ranks)
        batch_size = whole("batch_size", batch_size, least=1)
        epochs, mixed = whole("epochs", epochs, least=1), whole("mixed", mixed, least=1)
        seed = None if seed is None else whole("seed", seed)
        workers = None if workers is None else whole("workers", workers, least=0)
        if isinstance(source, Prepared | str | Path):
            source = PreparedSource(source, split)
        self.source, self.batch_size, self.epochs = source, batch_size, epochs
        self.features = source.features if features is None else tuple(features)
        if not self.features or len(set(self.features)) < len(self.features):
            given = few(self.features) or "none"
            raise ValueError(f"features must name one at least, and each once; got {given}")
        for name in self.features:
            if name not in source.features:
                raise ValueError(f"the data has no feature {name!r}; it has {few(source.features)}")
        self._single = [name for name in self.features if name in source.single]
        self._columns = [source.single.index(name) for name in self._single]
        self._mixed, self._seed = mixed, seed
        self._order = Order(source.sizes, mixed=mixed, seed=seed)
        self.samples = self._end = self._order.samples
        if drop_last:
            self._end -= self.samples % batch_size
        if not self._end:
            raise ValueError(
                f"a batch of {batch_size:,} cannot be filled by {many(self.samples, 'sample')}"
                + ("; lower batch_size" if self.samples else "")
            )
        self.workers = workers or min(_MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) - 1))
        self._pins = torch.cuda.is_available() if pin_memory is None else pin_memory

    @property
    def batches_per_epoch(self) -> int:
        return -(-self._end // self.batch_size)

    def __len__(self) -> int:
        return self.epochs * self.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    @abstractmethod
    def _batch(self, columns: Columns) -> Batch:
        """Return a batch of these samples; several threads call this at once."""

    def batches(self, start: int = 0, stop: int | None = None) -> PartReader[Batch]:
        """Return the batches of all epochs from number `start` to the one before `stop`; of each,
        the part of this rank."""
        start = whole("start", start)
        stop = len(self) if stop is None else min(whole("stop", stop), len(self))
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be one of {len(self):,} batches, got {start:,}")
        return PartReader(partial(self._batches, start, stop), self._part or current_part())

    def whole_batches(self) -> Self:
        """Return a reader of the same batches, whole on every rank."""
        reader = copy(self)
        reader._part = RankPart()
        return reader

    def _batches(self, start: int, stop: int, part: RankPart) -> Generator[Batch, None, None]:
        number, made_of = start, partial(self._made, part)
        with Cores(self.workers) as cores:
            waiting: list[Columns] = []
            for _, made in cores.in_order(made_of, self._stretches(start, stop)):
                for batch in made:
                    if number >= stop:
                        return
                    if isinstance(batch, Columns):
                        waiting.append(batch)
                        if not batch.ends:
                            continue
                        batch, waiting = self._batch(self._joined(waiting)), []
                    yield batch
                    number += 1

    def each(
        self, work: Callable[[Batch], Result], *, size: int = 1 << 16
    ) -> Iterator[tuple[int, int, Result]]:
        """Yield (first sample, number of samples, result of `work`) for batches of about `size`, in
        the order of the source. Every rank reads all samples. `work` runs in the reader's
        threads."""

        def done(stretch: Stretch) -> Result:
            low, high = stretch.first, stretch.first + stretch.samples
            return work(self._batch(self._read(stretch, low, high)))

        with Cores(self.workers) as cores:
            stretches = Order(self.source.sizes, mixed=size, seed=None).stretches(0)
            for stretch, result in cores.in_order(done, stretches):
                yield stretch.first, stretch.samples, result

    def among(self, numbers: NDArray[np.int64]) -> Self | None:
        """Return a reader of the samples of these ascending numbers, with a short last batch; None
        if there are none. Numbers that this reader leaves out of an epoch are left out."""
        reader = copy(self)
        reader.samples = reader._end = int(np.searchsorted(numbers, self._end))
        if not reader.samples:
            return None
        reader.source = SubsetSource(self.source, numbers)
        reader._order = Order(reader.source.sizes, mixed=self._mixed, seed=self._seed)
        return reader

    def identity(self) -> str | None:
        """Return a name for the samples and what is read of them; None: the source has no name."""
        name = getattr(self.source, "identity", None)
        return None if name is None else f"{name} {type(self).__name__} {','.join(self.features)}"

    def _stretches(self, start: int, stop: int) -> Iterator[tuple[Stretch, int]]:
        """Yield stretches, and the place in its epoch of the first sample that is wanted."""
        first, batch = divmod(start, self.batches_per_epoch)
        last, batches = divmod(stop, self.batches_per_epoch)
        for epoch in range(first, self.epochs):
            begin = batch * self.batch_size if epoch == first else 0
            for stretch in self._order.stretches(epoch, begin):
                if epoch > last or (epoch == last and stretch.first >= batches * self.batch_size):
                    return
                yield stretch, begin

    def _made(self, part: RankPart, item: tuple[Stretch, int]) -> list[Batch | Columns]:
        """Return a rank's parts of the batches of a stretch. Those of batches that reach beyond
        it are columns: what follows is in the next stretch."""
        (stretch, begin), size = item, self.batch_size
        low, high = max(begin, stretch.first), min(self._end, stretch.first + stretch.samples)
        if low >= high:
            return []
        edges = [low, *range((low // size + 1) * size, high, size), high]
        if part.ranks == 1:
            columns, cuts = self._read(stretch, low, high), [edge - low for edge in edges]
        else:
            wanted = [self._within(part, *span) for span in pairwise(edges)]
            columns = self._read_some(stretch, wanted)
            cuts = [0, *np.cumsum([last - first for first, last in wanted]).tolist()]
        made: list[Batch | Columns] = []
        for (first, last), here in zip(pairwise(edges), pairwise(cuts), strict=True):
            ends = last == self._end or last % size == 0
            in_part = columns.part(*here, ends=ends)
            made.append(self._batch(in_part) if ends and first % size == 0 else in_part)
        return made

    def _within(self, part: RankPart, first: int, last: int) -> tuple[int, int]:
        """Return the places of a rank's samples among those from `first` to `last` of the epoch,
        all of one batch."""
        begin = first // self.batch_size * self.batch_size
        low, high = part.of(min(self.batch_size, self._end - begin))
        low, high = max(first, begin + low), min(last, begin + high)
        return (low, high) if low < high else (first, first)

    def _read(self, stretch: Stretch, low: int, high: int) -> Columns:
        """Return the samples at these places of the epoch, in its order."""
        order, here = stretch.order(), slice(low - stretch.first, high - stretch.first)
        places = np.arange(here.start, here.stop) if order is None else order[here]
        return self._picked(self.source.read(stretch.blocks), places)

    def _read_some(self, stretch: Stretch, spans: Sequence[tuple[int, int]]) -> Columns:
        """Return the samples in these spans of the epoch, in its order, and read few others."""
        places = np.concatenate([np.arange(*span) for span in spans]) - stretch.first
        if not len(places):
            return self._no_samples
        if (order := stretch.order()) is not None:
            places = order[places]
        # Sources read samples in ascending order; `where` finds each one in what they return.
        where = np.full(stretch.samples, -1)
        where[places] = 0
        ascending = np.flatnonzero(where == 0)
        blocks, numbers = self._order.numbers(stretch, ascending)
        read, where[ascending] = read_some(self.source, self._order.firsts, blocks, numbers)
        return self._picked(read, where[places])

    @cached_property
    def _no_samples(self) -> Columns:
        """The columns of a part without samples. A source need not be able to read no block."""
        return self._picked(self.source.read(np.zeros(1, np.int64)), np.zeros(0, np.int64))

    def _picked(self, samples: Samples, places: NDArray[np.int64]) -> Columns:
        """Copy the samples at these places."""
        jagged = {}
        for name, lists in samples.jagged.items():
            if name not in self.features:
                continue
            ends, inside = lists_in(lists, places)
            offsets = self._new(len(ends), torch.int64)
            offsets.numpy()[:] = ends
            jagged[name] = offsets, self._taken(lists.values, inside)
        label = self._new(len(places), torch.float32)
        label.numpy()[:] = samples.label[places]
        columns = samples.ids
        if self._columns != list(range(columns.shape[1])):
            columns = columns[:, self._columns]
        ids, dense = self._taken(columns, places), self._taken(samples.dense, places)
        return Columns(ids, dense, label, jagged)

    def _taken(self, array: NDArray[Any], places: NDArray[np.int64]) -> Tensor:
        """Copy with numpy: torch would start threads of its own in each of ours."""
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype  # mapped arrays are read-only
        out = self._new((len(places), *array.shape[1:]), dtype)
        # numpy copies faster if a row is one item. Mode "raise" would copy everything first.
        items = _as_items(array)
        into = _as_items(out.numpy()) if items is not array else out.numpy()
        np.take(items, places, axis=0, out=into, mode="clip")
        return out

    def _new(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._pins)

    def _joined(self, parts: Sequence[Columns]) -> Columns:
        if len(parts) == 1:
            return parts[0]
        jagged = {}
        for name in parts[0].jagged:
            lengths = self._cat([part.jagged[name][0].diff() for part in parts])
            offsets = self._new(len(lengths) + 1, torch.int64)
            offsets[0] = 0
            torch.cumsum(lengths, 0, out=offsets[1:])
            jagged[name] = offsets, self._cat([part.jagged[name][1] for part in parts])
        ids, dense, label = (
            self._cat([getattr(part, name) for part in parts]) for name in ("ids", "dense", "label")
        )
        return Columns(ids, dense, label, jagged)

    def _cat(self, tensors: Sequence[Tensor]) -> Tensor:
        count = sum(map(len, tensors))
        out = self._new((count, *tensors[0].shape[1:]), tensors[0].dtype)
        np.concatenate([tensor.numpy() for tensor in tensors], out=out.numpy())
        return out


@dataclass(frozen=True)
class Columns:
    """Samples in their order, in memory that a GPU may read."""

    ids: Tensor
    dense: Tensor
    label: Tensor
    jagged: dict[str, tuple[Tensor, Tensor]]  # offsets, which may begin above 0, and values
    ends: bool = True  # whether a batch ends with its last sample

    def part(self, first: int, last: int, *, ends: bool) -> Columns:
        here = slice(first, last)
        jagged = {}
        for name, (offsets, values) in self.jagged.items():
            low, high = int(offsets[first]), int(offsets[last])
            jagged[name] = offsets[first : last + 1], values[low:high]
        return Columns(self.ids[here], self.dense[here], self.label[here], jagged, ends)


class Loader(BatchReader[ClickBatch]):
    """Batches of a source, epoch after epoch; no batch holds samples of two epochs.

    With a `seed` every epoch has another order; without one samples come in the order of the
    source. `drop_last` leaves out a short batch at the end of an epoch: a step of another size
    costs more than it teaches. `len()` counts the batches of all epochs. `features` chooses some
    features and their order. `sparse` is [B, F] if every sample has one id of each feature, and
    jagged otherwise. Memory: about (2 x workers + 1) x `mixed` samples.

    With several ranks `batch_size` is global: each rank gets its part of every batch, and the parts
    in rank order are the batch of a single process, bit for bit. Parts differ by at most one
    sample; in a short batch some may be empty. So `len()` and batch numbers are the same on all
    ranks. The ranks are those of torch.distributed if it is initialized when reading begins, or
    `rank` and `ranks`; `rank=0, ranks=1` reads whole batches.

    A batch may be changed in place. It shares the memory of its stretch, which stays as long as
    any of its batches; to keep a few of many batches, keep `batch.clone()`.
    """

    def _batch(self, columns: Columns) -> ClickBatch:
        return ClickBatch(columns.dense, self._sparse(columns), columns.label)

    def _sparse(self, columns: Columns) -> Tensor | KeyedJaggedTensor:
        if not columns.jagged:
            return columns.ids
        size, values = len(columns.label), []
        offsets = self._new(len(self.features) * size + 1, torch.int64)
        ends = offsets.numpy()
        ends[0] = end = 0
        for number, name in enumerate(self.features):
            here = ends[number * size + 1 : (number + 1) * size + 1]
            if name in columns.jagged:
                of_feature, ids = columns.jagged[name]
                here[:] = of_feature.numpy()[1:] - int(of_feature[0]) + end
                values.append(ids)
            else:
                here[:] = np.arange(end + 1, end + size + 1)
                values.append(columns.ids[:, self._single.index(name)])
            end += len(values[-1])
        return KeyedJaggedTensor(self.features, self._cat(values), offsets=offsets)


def histories_of(schema: Schema) -> dict[str, str | None]:
    """Return the features of a step and the lists of their past; empty if there are no sequences.

    The past of a feature `item` is a list `history_item` that reads the same table, as `hotrow
    prepare taobao` makes it.
    """
    tables = {feature.name: feature.table for feature in schema.jagged}
    histories: dict[str, str | None] = {}
    for feature in schema.single:
        past = _PREFIX + feature.name
        histories[feature.name] = past if tables.get(past) == feature.table else None
    return histories if any(histories.values()) else {}


def check_histories(schema: Schema, histories: Histories) -> None:
    """Refuse lists that are not histories: no step would read them."""
    if others := sorted({feature.name for feature in schema.jagged} - set(histories.values())):
        raise ValueError(
            f"lists are read as histories here, and {others[0]!r} is none: it would be named "
            f"{_PREFIX}x and read the table of a feature x"
        )


class SequenceLoader(BatchReader[SequenceBatch]):
    """Batches of sequences, with the order, the threads and the options of a `Loader`.

    A sample has one id of each feature, its target's, and for some features a list of the ids
    before, oldest first. `histories` has the features of a step. One without a history is the same
    at all steps, as a user is. The histories of a sample are equally long. The last `steps` of a
    longer one count; a shorter one begins with the ids in `padding`. The numbers of a step are its
    position, from 0 to 1 as in the TBSM reference, and then those of the sample at the target, 0
    at the steps before.
    """

    def __init__(
        self,
        source: Source | Prepared | str | Path,
        split: str = "train",
        *,
        steps: int,
        histories: Histories,
        padding: Mapping[str, int],
        **options: Any,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        lists = [past for past in histories.values() if past is not None]
        if not lists:
            raise ValueError("histories must name the list of one feature at least")
        super().__init__(source, split, features=[*histories, *lists], **options)
        self._steps, self._histories, self._lists = steps, dict(histories), lists
        self._padding = dict(padding)
        self._positions = positions(steps)

    def identity(self) -> str | None:
        name = super().identity()
        return None if name is None else f"{name} {self._steps} {sorted(self._padding.items())}"

    def _batch(self, columns: Columns) -> SequenceBatch:
        size, steps = len(columns.label), self._steps
        lengths = self._new(size, torch.int64)
        np.minimum(self._equal_lengths(columns), steps, out=lengths.numpy())
        is_past = np.arange(steps) >= steps - lengths.numpy()[:, None]
        values = self._new((len(self._histories), size, steps + 1), columns.ids.dtype)
        for (name, past), ids in zip(self._histories.items(), values.numpy(), strict=True):
            target = columns.ids.numpy()[:, self._single.index(name)]
            ids[:, steps] = target
            ids[:, :steps] = self._padding[name]
            if past is None:
                np.copyto(ids[:, :steps], target[:, None], where=is_past)
            else:
                ids[:, :steps][is_past] = self._last(columns, past)
        offsets = self._new(values.numel() // (steps + 1) + 1, torch.int64)
        offsets.numpy()[:] = np.arange(0, values.numel() + 1, steps + 1)
        sparse = KeyedJaggedTensor(list(self._histories), values.view(-1), offsets=offsets)
        dense = self._new((size, steps + 1, 1 + columns.dense.shape[1]), torch.float32)
        numbers = dense.numpy()
        numbers[:, :, 0] = self._positions
        numbers[:, :steps, 1:] = 0
        numbers[:, steps, 1:] = columns.dense.numpy()
        return SequenceBatch(dense, sparse, lengths, columns.label)

    def _equal_lengths(self, columns: Columns) -> NDArray[np.int64]:
        first, *others = (np.diff(columns.jagged[name][0].numpy()) for name in self._lists)
        for name, lengths in zip(self._lists[1:], others, strict=True):
            if len(bad := np.flatnonzero(lengths != first)):
                raise ValueError(
                    f"a sample has {first[bad[0]]:,} ids in {self._lists[0]} and "
                    f"{lengths[bad[0]]:,} in {name}; a step has one of each"
                )
        return first

    def _last(self, columns: Columns, name: str) -> NDArray[Any]:
        """Return the last `steps` values of each list."""
        offsets, values = (tensor.numpy() for tensor in columns.jagged[name])
        lengths, ends = np.diff(offsets), offsets[1:] - offsets[0]
        if not len(lengths) or lengths.max() <= self._steps:
            return values
        firsts = np.repeat(ends - np.minimum(lengths, self._steps), lengths)
        return values[np.arange(len(values)) >= firsts]


def _as_items(rows: NDArray[Any]) -> NDArray[Any]:
    """Return rows as one item each, if they lie side by side."""
    size = rows.itemsize * math.prod(rows.shape[1:])
    if rows.ndim == 1 or not size or not rows.flags.c_contiguous:
        return rows
    return rows.view(f"V{size}").reshape(len(rows))
