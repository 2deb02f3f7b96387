"""Batches out of files: read, shuffled and put together by threads, ahead of training.

    loader = Loader("prepared/criteo", batch_size=8192, seed=0)
    for batch in hotrow.ahead(loader, model, ids=lambda batch: batch.sparse):
        ...

A batch is known by its number alone (see hotrow.inputs.shuffle), so a run that was stopped after n
batches goes on with `loader.batches(start=n)`, and gets what it would have got.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data.prepared import Prepared
from hotrow.data.prepared.parallel import Cores
from hotrow.data.sources import PreparedSource, Samples, Source, SubsetSource
from hotrow.data.synthetic import ClickBatch
from hotrow.inputs.batch import KeyedJaggedTensor
from hotrow.inputs.shuffle import Order, Stretch
from hotrow.support.messages import few, many
from hotrow.support.numbers import whole

MIXED = 1 << 18  # samples that are shuffled together
_MOST_WORKERS = 4

Batch = TypeVar("Batch", covariant=True)  # it is only given
Result = TypeVar("Result")


class BatchReader(Generic[Batch]):
    """Samples of a source, in order and cut into batches; what a batch looks like is told by
    those below."""

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
    ) -> None:
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
        self._single = [each for each in self.features if each in source.single]
        self._columns = [source.single.index(each) for each in self._single]
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
        """A batch of these samples; several threads ask at once."""

    def batches(self, start: int = 0, stop: int | None = None) -> Generator[Batch, None, None]:
        """From batch number `start` of all epochs on, to the one before `stop`."""
        start = whole("start", start)
        stop = len(self) if stop is None else min(whole("stop", stop), len(self))
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be one of {len(self):,} batches, got {start:,}")
        return self._batches(start, stop)

    def _batches(self, start: int, stop: int) -> Generator[Batch, None, None]:
        number = start
        with Cores(self.workers) as cores:
            waiting: list[Columns] = []
            for _, found in cores.in_order(self._made, self._stretches(start, stop)):
                for each in found:
                    if number >= stop:
                        return
                    if isinstance(each, Columns):
                        waiting.append(each)
                        if not each.ends:
                            continue
                        each, waiting = self._batch(self._joined(waiting)), []
                    yield each
                    number += 1

    def each(
        self, work: Callable[[Batch], Result], *, size: int = 1 << 16
    ) -> Iterator[tuple[int, int, Result]]:
        """What `work` makes of all samples, as they lie, in batches of about `size`: after the
        number of a batch's first sample, and how many it has. It runs in the reader's threads."""

        def done(stretch: Stretch) -> Result:
            low, high = stretch.first, stretch.first + stretch.samples
            read = self.source.read(stretch.blocks)
            return work(self._batch(self._picked(read, stretch, low, high)))

        with Cores(self.workers) as cores:
            stretches = Order(self.source.sizes, mixed=size, seed=None).stretches(0)
            for stretch, result in cores.in_order(done, stretches):
                yield stretch.first, stretch.samples, result

    def among(self, numbers: NDArray[np.int64]) -> Self | None:
        """Return a reader of the samples of these ascending numbers alone, with a short last batch;
        None if there are none. Where this one leaves some out of an epoch, that one leaves out as
        many as there are among the last ones of all."""
        reader = copy(self)
        reader.samples = reader._end = int(np.searchsorted(numbers, self._end))
        if not reader.samples:
            return None
        reader.source = SubsetSource(self.source, numbers)
        reader._order = Order(reader.source.sizes, mixed=self._mixed, seed=self._seed)
        return reader

    def identity(self) -> str | None:
        """Return what names the samples and what is read of them; None: the source has no name."""
        mine = getattr(self.source, "identity", None)
        return None if mine is None else f"{mine} {type(self).__name__} {','.join(self.features)}"

    def _stretches(self, start: int, stop: int) -> Iterator[tuple[Stretch, int]]:
        """With the place in its epoch of the first sample that is wanted."""
        epoch, batch = divmod(start, self.batches_per_epoch)
        last, batches = divmod(stop, self.batches_per_epoch)
        for each in range(epoch, self.epochs):
            begin = batch * self.batch_size if each == epoch else 0
            for stretch in self._order.stretches(each, begin):
                if each > last or (each == last and stretch.first >= batches * self.batch_size):
                    return
                yield stretch, begin

    def _made(self, item: tuple[Stretch, int]) -> list[Batch | Columns]:
        """Batches that lie in a stretch, and the parts of those that reach beyond it."""
        (stretch, begin), end = item, self._end
        low, high = max(begin, stretch.first), min(end, stretch.first + stretch.samples)
        if low >= high:
            return []
        columns = self._picked(self.source.read(stretch.blocks), stretch, low, high)
        made: list[Batch | Columns] = []
        at = low
        while at < high:
            edge = min(end, (at // self.batch_size + 1) * self.batch_size)
            part = columns.part(at - low, min(edge, high) - low, ends=edge <= high)
            is_whole = part.ends and at % self.batch_size == 0
            made.append(self._batch(part) if is_whole else part)
            at = edge
        return made

    def _picked(self, samples: Samples, stretch: Stretch, low: int, high: int) -> Columns:
        """The samples at these places of the epoch, in its order."""
        order = stretch.order()
        here = slice(low - stretch.first, high - stretch.first)
        places = np.arange(here.start, here.stop) if order is None else order[here]
        jagged = {}
        for name, lists in samples.jagged.items():
            if name not in self.features:
                continue
            first, lengths = lists.offsets[places], np.diff(lists.offsets)[places]
            offsets = self._new(len(places) + 1, torch.int64)
            ends = offsets.numpy()
            ends[0] = 0
            np.cumsum(lengths, out=ends[1:])
            inside = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
            jagged[name] = offsets, self._taken(lists.values, np.repeat(first, lengths) + inside)
        label = self._new(len(places), torch.float32)
        label.numpy()[:] = samples.label[places]
        found = samples.ids
        if self._columns != list(range(found.shape[1])):
            found = found[:, self._columns]
        ids, dense = self._taken(found, places), self._taken(samples.dense, places)
        return Columns(ids, dense, label, jagged)

    def _taken(self, array: NDArray[Any], places: NDArray[np.int64]) -> Tensor:
        """numpy throughout: torch would start threads of its own in each of ours."""
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype  # mapped arrays cannot be written
        out = self._new((len(places), *array.shape[1:]), dtype)
        # Rows as items of their own: numpy copies those faster. ("raise" makes a copy of all.)
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
            lengths = self._cat([each.jagged[name][0].diff() for each in parts])
            offsets = self._new(len(lengths) + 1, torch.int64)
            offsets[0] = 0
            torch.cumsum(lengths, 0, out=offsets[1:])
            jagged[name] = offsets, self._cat([each.jagged[name][1] for each in parts])
        ids, dense, label = (
            self._cat([getattr(each, name) for each in parts]) for name in ("ids", "dense", "label")
        )
        return Columns(ids, dense, label, jagged)

    def _cat(self, tensors: Sequence[Tensor]) -> Tensor:
        count = sum(map(len, tensors))
        out = self._new((count, *tensors[0].shape[1:]), tensors[0].dtype)
        np.concatenate([each.numpy() for each in tensors], out=out.numpy())
        return out


@dataclass(frozen=True)
class Columns:
    """Samples in their order, in memory that a GPU may read."""

    ids: Tensor
    dense: Tensor
    label: Tensor
    jagged: dict[str, tuple[Tensor, Tensor]]  # offsets, which may begin above 0, and their values
    ends: bool = True  # a batch ends with its last sample

    def part(self, first: int, last: int, *, ends: bool) -> Columns:
        here = slice(first, last)
        jagged = {}
        for name, (offsets, values) in self.jagged.items():
            low, high = int(offsets[first]), int(offsets[last])
            jagged[name] = offsets[first : last + 1], values[low:high]
        return Columns(self.ids[here], self.dense[here], self.label[here], jagged, ends)


class Loader(BatchReader[ClickBatch]):
    """Batches of a source, epoch after epoch; none holds samples of two epochs.

    With a `seed` every epoch has another order, without one samples come as they lie. `drop_last`
    leaves out what does not fill a batch at the end of an epoch: a step for one more size costs
    more than it teaches. `len()` counts the batches of all epochs. `features` chooses some, in
    their order. `sparse` is [B, F] where every sample has one id of each feature, and jagged
    otherwise. Memory: about (2 x workers + 1) x `mixed` samples. A batch may be changed in place;
    it lies in the memory of its stretch, which stays as long as any batch of it does, so whoever
    keeps a few of many keeps `batch.clone()`.
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
                mine, found = columns.jagged[name]
                here[:] = mine.numpy()[1:] - int(mine[0]) + end
                values.append(found)
            else:
                here[:] = np.arange(end + 1, end + size + 1)
                values.append(columns.ids[:, self._single.index(name)])
            end = int(here[-1])
        return KeyedJaggedTensor(self.features, self._cat(values), offsets=offsets)


def _as_items(rows: NDArray[Any]) -> NDArray[Any]:
    """A row as one item of so many bytes."""
    size = rows.itemsize * math.prod(rows.shape[1:])
    if rows.ndim == 1 or not size or not rows.flags.c_contiguous:
        return rows
    return rows.view(f"V{size}").reshape(len(rows))
