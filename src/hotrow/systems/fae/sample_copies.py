"""Samples of any loader, copied once into two sets and read from there in every epoch.

Samples of one kind form blocks of about a thousand. A block is kept as tensors in memory, or as
bytes in a file, so that ids stay whole numbers. Epochs read blocks in the order of
inputs/shuffle.py. The first batch defines the structure of all. Batches of unknown structure, which
need the caller's `take` and `join`, are kept in memory as they are.

This module does not know rows, nor why a sample is hot.
"""

from __future__ import annotations

import os
import reprlib
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hotrow.inputs import samples
from hotrow.inputs.held_batches import copy_of
from hotrow.inputs.samples import Join, Take
from hotrow.inputs.shuffle import Order, Stretch
from hotrow.support.files import Disk
from hotrow.support.progress import no_progress
from hotrow.systems.fae.hot_cold_schedule import BatchSet, NoBatches, Separated

Advance = Callable[[int], None]  # so many more samples are done

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_BYTES = 1 << 30  # of samples in memory
_MIXED_BYTES = 64 << 20  # of samples that are shuffled together
_ALIGNED = 64


@dataclass(frozen=True)
class SetOptions:
    """How samples are put into batches."""

    batch_size: int | None = None  # None: as in the first batch
    epochs: int = 1
    seed: int | None = 0  # None: the loader's order
    pin_memory: bool = False
    take: Take | None = None
    join: Join | None = None
    block: int = 1024  # samples, or a few more, that stay together while blocks are shuffled
    # Samples that are shuffled together, unless they are more than _MIXED_BYTES. While a set is
    # read, up to four times as many bytes are in memory: two stretches, as stored and in batches.
    mixed: int = 1 << 18

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def taken(self, batch: Any, places: Tensor, size: int) -> Any:
        return samples.take(batch, places, size=size, by=self.take)

    @property
    def knows_batches(self) -> bool:
        """Return whether the caller's functions handle batches of any structure."""
        return self.take is not None and self.join is not None

    def joined(self, batches: Sequence[Any]) -> Any:
        return samples.join(batches, by=self.join)


class Copies:
    """Copies the samples of a loader in one pass."""

    def __init__(
        self, options: SetOptions, *, folder: str | Path | None, most_bytes: int = MOST_BYTES
    ) -> None:
        self._options, self._memory = options, _MemoryLimit(most_bytes, folder)
        self._outline: Any = None
        self._hot, self._cold = _Blocks(options), _Blocks(options)

    def of(
        self,
        batches: Iterable[Any],
        popular: Callable[[Any], Tensor],
        advance: Advance = no_progress,
    ) -> Separated:
        size = self._options.batch_size or 0
        for number, batch in enumerate(batches):
            self._check(batch, number)
            mask = samples.mask_of(popular(batch))
            size = size or len(mask)
            self._hot.add(batch, mask)
            self._cold.add(batch, ~mask)
            advance(len(mask))
        sets: list[BatchSet] = []
        for blocks in (self._hot, self._cold):
            blocks.finish()
            sets.append(CopiedSet(blocks, self._options, size) if blocks.sizes else NoBatches())
        if not any(part.samples for part in sets):
            raise ValueError(_why_nothing(batches))
        hot, cold = sets
        return Separated(hot, cold, size, self._options.epochs)

    def _check(self, batch: Any, number: int) -> None:
        knows = self._options.knows_batches
        try:
            seen = samples.outline(batch, values=not knows)  # `join` decides about values
        except ValueError:
            if not knows:
                raise
            seen = None
        if number == 0:
            self._outline = seen
            self._hot.memory = self._cold.memory = None if seen is None else self._memory
        if seen != self._outline:
            here, there = _first_difference(seen, self._outline)
            raise ValueError(
                f"batch {number} has another structure than the first one, so their samples cannot "
                f"be mixed: {reprlib.repr(here)} instead of {reprlib.repr(there)}; leave out what "
                "differs between batches, or give functions of your own: take= and join="
            )


def _first_difference(one: Any, other: Any) -> tuple[Any, Any]:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for pair in zip(one, other, strict=True):
            if pair[0] != pair[1]:
                return _first_difference(*pair)
    return one, other


def _why_nothing(batches: Iterable[Any]) -> str:
    said = "the loader gave no sample to train with"
    if iter(batches) is batches:
        said += (
            f": a {type(batches).__name__} can be read only once, and this one was; give a "
            "DataLoader, a list or anything else that starts from the beginning with each `for`"
        )
    return said


class _MemoryLimit:
    """Counts bytes in memory; above the limit, samples go to files in a folder."""

    def __init__(self, most_bytes: int, folder: str | Path | None) -> None:
        self._most, self._used = most_bytes, 0
        self._disk = None if folder is None else Disk(Path(folder))
        self.is_full = False

    def take(self, count: int) -> None:
        self._used += count
        if self._used <= self._most or self.is_full:
            return
        if self._disk is None:
            raise ValueError(
                f"hot and cold samples take more than {self._most:,} bytes of memory: give "
                "folder=, where they are kept while training runs, or a larger most_bytes"
            )
        self.is_full = True

    def file(self) -> _File:
        assert self._disk is not None
        return _File(self._disk)


class _File:
    """A file without a name, so that it disappears with the process."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        disk.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=disk.folder, prefix="samples-")
        os.close(handle)
        self._path = Path(name)
        try:
            self._writing = disk.open(self._path)
            self._reading = self._path.open("rb")
        finally:
            self._path.unlink()
        weakref.finalize(self, _close, self._writing, self._reading)
        self.size = 0
        self.mapped: Any = None  # all bytes, once finished

    def write(self, part: memoryview) -> None:
        try:
            self._writing.write(part)
        except OSError as error:
            raise self._disk.in_plain_words(error, self._path) from None
        self.size += len(part)

    def finish(self) -> None:
        try:
            self._writing.close()  # writes what is still buffered
        except OSError as error:
            raise self._disk.in_plain_words(error, self._path) from None
        if self.size:  # an empty file cannot be mapped
            # Copy-on-write, because torch wants memory that could be written.
            self.mapped = np.memmap(self._reading, np.uint8, "c")
        self._reading.close()


def _close(*files: IO[bytes]) -> None:
    for file in files:
        with suppress(OSError):  # a full disk was reported before
            file.close()


class _Blocks:
    """Blocks of samples of one kind, in memory or in a file."""

    def __init__(self, options: SetOptions) -> None:
        self._options = options
        self.memory: _MemoryLimit | None = None  # None: batches of unknown structure, in memory
        self._waiting: list[Any] = []  # samples of the next block
        self._count = 0  # of those samples
        self._like: Any = None  # the first block
        self._kept: list[Any] = []  # blocks in memory, behind those in the file
        self._file: _File | None = None
        # Of each tensor of each block in the file.
        self._stored: list[list[tuple[int, torch.Size, torch.dtype]]] = []
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
            self._end_block()

    def _end_block(self) -> None:
        if not self._count:
            return
        block = self._options.joined(self._waiting)
        if self.memory is not None:
            block = samples.map_tensors(block, lambda x: x.detach().cpu().contiguous())
            tensors = samples.tensors_of(block)
            if any(not tensor.ndim for tensor in tensors):
                raise ValueError("samples hold a tensor without dimensions; give it one per sample")
            size = sum(tensor.nbytes for tensor in tensors)
            self.memory.take(size)
            self.bytes += size
        self._like = block if self._like is None else self._like
        self.sizes.append(self._count)
        self._kept.append(block)
        self._waiting, self._count = [], 0
        if self.memory is not None and self.memory.is_full:
            self._write(self.memory)

    def _write(self, memory: _MemoryLimit) -> None:
        """Move the blocks in memory to the file."""
        self._file = self._file or memory.file()
        for block in self._kept:
            stored = []
            for tensor in samples.tensors_of(block):
                self._file.write(memoryview(bytes(-self._file.size % _ALIGNED)))
                stored.append((self._file.size, tensor.shape, tensor.dtype))
                if tensor.numel():
                    self._file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            self._stored.append(stored)
        self._kept = []

    def finish(self) -> None:
        self._end_block()
        if self._file is not None:
            self._file.finish()

    def read(self, block: int) -> Any:
        if block >= len(self._stored):
            return self._kept[block - len(self._stored)]
        return samples.with_tensors(self._like, (self._tensor(*x) for x in self._stored[block]))

    def _tensor(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if not shape.numel():
            return torch.zeros(shape, dtype=dtype)
        assert self._file is not None
        mapped, count = self._file.mapped, shape.numel()
        return torch.frombuffer(mapped, dtype=dtype, offset=offset, count=count).view(shape)


class CopiedSet:
    """Copied samples of one kind, in batches. A thread reads one stretch ahead."""

    def __init__(self, blocks: _Blocks, options: SetOptions, batch_size: int) -> None:
        self._blocks, self._options, self._size = blocks, options, batch_size
        sizes = np.array(blocks.sizes, dtype=np.int64)
        self.samples = int(sizes.sum())
        fitting = _MIXED_BYTES * self.samples // max(1, blocks.bytes)
        self._order = Order(sizes, mixed=max(1, min(options.mixed, fitting)), seed=options.seed)
        self._pins = options.pin_memory and blocks.memory is not None

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.samples // self._size)

    def batches(self, start: int = 0) -> Iterator[Any]:
        """Yield batches from number `start` of all epochs on."""
        stretches = self._stretches(*divmod(start, self.batches_per_epoch))
        waiting: list[Any] = []
        with ThreadPoolExecutor(1, thread_name_prefix="samples") as pool:
            for parts in _one_ahead(pool, self._made, stretches):
                for part, is_last in parts:
                    waiting.append(part)
                    if is_last:
                        whole = len(waiting) == 1
                        yield waiting[0] if whole else self._pinned(self._options.joined(waiting))
                        waiting = []

    def _stretches(self, epoch: int, batch: int) -> Iterator[tuple[Stretch, int]]:
        """Yield stretches, each with the place of the first wanted sample in its epoch."""
        begin = batch * self._size
        for number in range(epoch, self._options.epochs):
            for stretch in self._order.stretches(number, begin):
                yield stretch, begin
            begin = 0

    def _made(self, item: tuple[Stretch, int]) -> list[tuple[Any, bool]]:
        """Return a stretch's batches, or parts of them, and whether a batch ends with each."""
        stretch, begin = item
        joined = self._options.joined([self._blocks.read(int(block)) for block in stretch.blocks])
        order = stretch.order()
        places = torch.arange(stretch.samples) if order is None else torch.from_numpy(order)
        at, high = max(begin, stretch.first), stretch.first + stretch.samples
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


def _one_ahead(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """Yield results in order while the next one is computed."""
    last: Future[Result] | None = None
    for item in items:
        following = pool.submit(work, item)
        if last is not None:
            yield last.result()
        last = following
    if last is not None:
        yield last.result()
