"""Samples of any loader, copied once into two sets and read from there in every epoch.

Samples of one kind form blocks of about a thousand. A block is kept as tensors in memory, or as
bytes in a file, so that ids stay whole numbers. Epochs read blocks in the order of
inputs/shuffle.py. The first batch defines the structure of all. Batches of unknown structure, which
need the caller's `take` and `join`, are kept in memory as they are.

This module does not know rows, nor why a sample is hot.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from hotrow.inputs import samples
from hotrow.inputs.held_batches import copy_of
from hotrow.inputs.samples import Join, Take
from hotrow.inputs.shuffle import Order, Stretch
from hotrow.support.files import Disk
from hotrow.support.progress import no_progress
from hotrow.systems.fae.hot_cold_schedule import NoBatches, Separated

Advance = Callable[[int], None]  # so many more samples are done
Stored = tuple[int, torch.Size, torch.dtype]  # a tensor's offset in a file, shape and dtype

MOST_BYTES = 1 << 30  # of samples in memory
_MIXED_BYTES = 64 << 20  # of samples that are shuffled together
_ALIGNED = 64


@dataclass(frozen=True)
class SetOptions:
    """How samples are put into batches."""

    epochs: int = 1
    seed: int | None = 0  # None: the loader's order
    pin_memory: bool = False
    take: Take | None = None
    join: Join | None = None
    block: int = 1024  # samples, or a few more, that stay together while blocks are shuffled
    # Samples that are shuffled together, unless they are more than _MIXED_BYTES. While a set is
    # read, up to four times as many bytes are in memory: two stretches, as stored and in batches.
    mixed: int = 1 << 18

    def taken(self, batch: Any, places: Tensor, size: int) -> Any:
        return samples.take(batch, places, size=size, by=self.take)

    def joined(self, batches: Sequence[Any]) -> Any:
        return samples.join(batches, by=self.join)


def copied(
    batches: Iterable[Any],
    popular: Callable[[Any], Tensor],
    options: SetOptions,
    folder: Path | None = None,
    *,
    most_bytes: int = MOST_BYTES,
    advance: Advance = no_progress,
) -> Separated:
    """Copy the samples of a loader in one pass. Both sets have batches of the first one's size."""
    memory, first, size = _Memory(most_bytes, folder), None, 0
    hot, cold = _Blocks(options, memory), _Blocks(options, memory)
    for number, batch in enumerate(batches):
        outline = _outline(batch, options)
        mask = samples.mask_of(popular(batch))
        if number == 0:
            first, size = outline, len(mask)
            hot.has_tensors = cold.has_tensors = outline is not None
        if outline != first:
            here, there = _first_difference(outline, first)
            raise ValueError(
                f"batch {number} has another structure than the first one, so their samples cannot "
                f"be mixed: {reprlib.repr(here)} instead of {reprlib.repr(there)}; leave out what "
                "differs between batches, or give functions of your own: take= and join="
            )
        hot.add(batch, mask)
        cold.add(batch, ~mask)
        advance(len(mask))
    hot.end_block()
    cold.end_block()
    memory.finish()
    if not hot.sizes and not cold.sizes:
        raise ValueError("the loader gave no sample to train with")
    hot_set, cold_set = (
        CopiedSet(blocks, options, size) if blocks.sizes else NoBatches() for blocks in (hot, cold)
    )
    return Separated(hot_set, cold_set, options.epochs)


def _outline(batch: Any, options: SetOptions) -> Any:
    """Return the structure of a batch; None: unknown, and left to the caller's functions."""
    is_ours = options.take is None or options.join is None
    try:
        return samples.outline(batch, values=is_ours)  # `join` decides about values
    except ValueError:
        if is_ours:
            raise
        return None


def _first_difference(one: Any, other: Any) -> tuple[Any, Any]:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for pair in zip(one, other, strict=True):
            if pair[0] != pair[1]:
                return _first_difference(*pair)
    return one, other


class _Memory:
    """A limit for blocks in memory, and a file for those above it. The file has no name, so that it
    disappears with the process."""

    def __init__(self, most_bytes: int, folder: Path | None) -> None:
        self._most, self._used, self._folder = most_bytes, 0, folder
        self._file: IO[bytes] | None = None
        self._mapped: Any = None  # all bytes of the file, once finished

    def take(self, tensors: Sequence[Tensor]) -> list[Stored] | None:
        """Write tensors to the file; None: there is room for them in memory."""
        self._used += sum(tensor.nbytes for tensor in tensors)
        if self._used <= self._most:
            return None
        if self._folder is None:
            raise ValueError(
                f"hot and cold samples take more than {self._most:,} bytes of memory: give "
                "folder=, where they are kept while training runs, or a larger most_bytes"
            )
        with self._errors(self._folder):
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = TemporaryFile(dir=self._folder)  # noqa: SIM115
            return [_write(self._file, tensor) for tensor in tensors]

    def finish(self) -> None:
        if self._file is not None and self._folder is not None:
            with self._errors(self._folder), self._file as file:
                file.flush()
                # Copy-on-write, because torch wants memory that could be written.
                self._mapped = np.memmap(file, np.uint8, "c")

    @contextmanager
    def _errors(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Disk(folder).in_plain_words(error, folder / "samples") from None

    def read(self, stored: Stored) -> Tensor:
        offset, shape, dtype = stored
        if not shape.numel():
            return torch.zeros(shape, dtype=dtype)
        count = shape.numel()
        return torch.frombuffer(self._mapped, dtype=dtype, offset=offset, count=count).view(shape)


def _write(file: IO[bytes], tensor: Tensor) -> Stored:
    file.write(bytes(-file.tell() % _ALIGNED))
    stored = file.tell(), tensor.shape, tensor.dtype
    if tensor.numel():
        file.write(tensor.view(-1).view(torch.uint8).numpy().data)
    return stored


class _Blocks:
    """Blocks of samples of one kind."""

    def __init__(self, options: SetOptions, memory: _Memory) -> None:
        self._options, self._memory = options, memory
        self.has_tensors = True  # else batches are of unknown structure, and stay in memory
        self._waiting: list[Any] = []  # samples of the next block
        self._count = 0  # of those samples
        self._like: Any = None  # the first block
        self._blocks: list[tuple[Any, list[Stored] | None]] = []  # in memory, or in the file
        self.sizes: list[int] = []
        self.bytes = 0

    def add(self, batch: Any, mask: Tensor) -> None:
        places = mask.nonzero().squeeze(1)
        if not len(places):
            return
        taken = self._options.taken(batch, places, len(mask))
        if self._options.take is not None:
            taken = copy_of(taken)  # it may hold views of buffers that the loader refills
        self._waiting.append(taken)
        self._count += len(places)
        if self._count >= self._options.block:
            self.end_block()

    def end_block(self) -> None:
        if not self._count:
            return
        block, stored = self._options.joined(self._waiting), None
        if self.has_tensors:
            block = samples.map_tensors(block, lambda x: x.detach().cpu().contiguous())
            tensors = samples.tensors_of(block)
            if any(not tensor.ndim for tensor in tensors):
                raise ValueError("samples hold a tensor without dimensions; give it one per sample")
            stored = self._memory.take(tensors)
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        self._like = block if self._like is None else self._like
        self._blocks.append((block if stored is None else None, stored))
        self.sizes.append(self._count)
        self._waiting, self._count = [], 0

    def read(self, number: int) -> Any:
        block, stored = self._blocks[number]
        if stored is None:
            return block
        return samples.with_tensors(self._like, map(self._memory.read, stored))


class CopiedSet:
    """Copied samples of one kind, in batches. A thread reads one stretch ahead."""

    def __init__(self, blocks: _Blocks, options: SetOptions, batch_size: int) -> None:
        self._blocks, self._options, self._size = blocks, options, batch_size
        sizes = np.array(blocks.sizes, dtype=np.int64)
        self.samples = int(sizes.sum())
        fitting = _MIXED_BYTES * self.samples // max(1, blocks.bytes)
        self._order = Order(sizes, mixed=max(1, min(options.mixed, fitting)), seed=options.seed)
        self._pins = options.pin_memory and blocks.has_tensors

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.samples // self._size)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of all epochs."""
        epochs = range(self._options.epochs)
        stretches = (x for epoch in epochs for x in self._order.stretches(epoch))
        waiting: list[Any] = []  # parts of a batch
        with ThreadPoolExecutor(1, thread_name_prefix="samples") as pool:
            made = deque(pool.submit(self._made, x) for x in islice(stretches, 1))
            while made:
                made.extend(pool.submit(self._made, x) for x in islice(stretches, 1))
                for part, is_last in made.popleft().result():
                    waiting.append(part)
                    if is_last:
                        whole = len(waiting) == 1
                        yield waiting[0] if whole else self._pinned(self._options.joined(waiting))
                        waiting = []

    def _made(self, stretch: Stretch) -> list[tuple[Any, bool]]:
        """Return a stretch's batches, or parts of them, and whether a batch ends with each."""
        joined = self._options.joined([self._blocks.read(int(block)) for block in stretch.blocks])
        order = stretch.order()
        places = torch.arange(stretch.samples) if order is None else torch.from_numpy(order)
        at, high = stretch.first, stretch.first + stretch.samples
        made = []
        while at < high:
            edge = min(self.samples, (at // self._size + 1) * self._size)
            here = places[at - stretch.first : min(edge, high) - stretch.first]
            part = self._options.taken(joined, here, stretch.samples)
            is_whole = at % self._size == 0 and edge <= high
            made.append((self._pinned(part) if is_whole else part, edge <= high))
            at = edge
        return made

    def _pinned(self, batch: Any) -> Any:
        return samples.pinned(batch) if self._pins else batch
