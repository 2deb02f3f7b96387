"""FAE's input processor: every sample of a loader goes to the hot set or to the cold one, once.

Loaders that read samples by number, as hotrow.data.Loader does, need only the numbers, 8 bytes
each. They are kept in memory, or in a folder whose files are mapped:

    sets.json       identity of samples and hot rows, and the SHA-256 of both files. It is written
                    last: without it there are no sets.
    hot.numbers     int64, little-endian, ascending
    cold.numbers    all others

Samples of other loaders are copied once. Samples of one kind form blocks of about a thousand. A
block is kept as tensors in memory, or as bytes in a file, so that ids stay whole numbers. Epochs
read blocks in the order of inputs/shuffle.py. The first batch defines the structure of all. Batches
of unknown structure, which need the caller's `take` and `join`, are kept in memory as they are.

This module does not know rows; a function says which samples are hot.
"""

from __future__ import annotations

import json
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.inputs import samples
from hotrow.inputs.held_batches import copy_of
from hotrow.inputs.samples import Join, Take, mask_of
from hotrow.inputs.shuffle import Order, Stretch
from hotrow.support.files import Disk, FileRecord, why_wrong
from hotrow.support.manifests import check_files, converted, read_json
from hotrow.support.messages import warn
from hotrow.support.progress import no_progress
from hotrow.systems.fae.hot_cold_schedule import BatchSet, NoBatches, Separated

FORMAT = 1
MANIFEST = "sets.json"
MOST_BYTES = 1 << 30  # of samples in memory
_PART = 1 << 20  # samples in one step
_MIXED_BYTES = 64 << 20  # of samples that are shuffled together
_ALIGNED = 64

Popular = Callable[[Any], Tensor]  # a batch -> bool [B]: all lookups of a sample are hot
Numbers = NDArray[np.int64]
Stored = tuple[int, torch.Size, torch.dtype]  # a tensor's offset in a file, shape and dtype
Advance = Callable[[int], None]  # so many more samples are done


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


def separate(
    batches: Iterable[Any],
    popular: Popular,
    options: SetOptions | None = None,
    *,
    folder: str | Path | None = None,
    key: str | None = None,
    most_bytes: int = MOST_BYTES,
    advance: Advance = no_progress,
    writes: bool = True,
) -> Separated:
    """Separate hot samples from cold ones, in one pass over `batches`, which are one epoch.

    A loader that reads samples by number has its own batch size, epochs and seed. Its sets go to
    `folder`; with a `key`, which names the hot rows, the next run finds them there. Several threads
    call `popular`. Both sets keep a short last batch; where the loader leaves out samples that do
    not fill a batch, the sets leave out as many together.

    `options` are for other loaders. Their samples are kept as long as the process lives: in memory
    up to `most_bytes`, the others in the folder. Batches that are not made of tensors alone stay in
    memory. `advance` is called with numbers of samples done.

    Without `writes` sample numbers that another rank has written are read from the folder. Where
    it does not hold them, they are kept in memory.
    """
    path = None if folder is None else Path(folder)
    if isinstance(batches, NumberedSamples):
        sets = _by_number(batches, popular, path, key, advance, writes=writes)
    else:
        sets = _copied(batches, popular, options or SetOptions(), path, most_bytes, advance)
    if not sets.hot.samples:
        warn(
            f"none of the {sets.samples:,} samples is hot: each reads a row that is not, so all "
            "are trained as cold ones. More hot rows, or fewer lookups per sample, would help"
        )
    return sets


def check_evaluated_again(test: Iterable[Any] | None) -> None:
    """Refuse test batches that can be read only once, or are none."""
    if isinstance(test, Iterator):
        raise ValueError(
            "test is evaluated several times, and an iterator gives its batches once; give a "
            "list or a loader"
        )
    if isinstance(test, list | tuple) and not test:
        raise ValueError("test has no batch to evaluate on; leave it out where there is none")


def check_read_again(batches: Iterable[Any]) -> None:
    """Refuse batches that can be read only once: finding hot rows and training both read them."""
    if iter(batches) is batches:
        raise ValueError(
            f"the batches are a {type(batches).__name__}, which can be read only once, and they "
            "are read to find hot rows before they are read for training: give a DataLoader, a "
            "list or anything else that starts from the beginning with each `for`"
        )


# -- samples by number -------------------------------------------------------------------


@runtime_checkable
class NumberedSamples(Protocol):
    """A loader that reads samples by their numbers, as hotrow.data.Loader does."""

    epochs: int
    samples: int

    def each(self, work: Callable[[Any], Tensor]) -> Iterable[tuple[int, int, Tensor]]:
        """Yield (first number, count, result of `work`) for all samples, some at a time."""

    def among(self, numbers: Numbers) -> BatchSet | None:
        """Return a loader of these samples alone; None if there are none."""

    def identity(self) -> str | None:
        """Return what names the samples and what is read of them."""


def _by_number(
    loader: NumberedSamples,
    popular: Popular,
    folder: Path | None,
    key: str | None,
    advance: Advance,
    *,
    writes: bool,
) -> Separated:
    def hot() -> Iterator[Numbers]:
        for first, count, said in loader.each(popular):
            yield first + np.flatnonzero(mask_of(said, count).numpy())
            advance(count)

    identity, sets = loader.identity(), None
    # Sets on disk are used again if identity and key are known and equal.
    names = None if identity is None or key is None else {"data": identity, "hot": key}
    if folder is not None and names is not None:
        try:
            sets = _read(folder, names, loader.samples)
        except FileNotFoundError:
            pass
        except ValueError as error:
            warn(f"{error}; samples are told apart again")
    reused = sets is not None
    if sets is None:
        sets = _find(hot(), loader.samples, folder if writes else None, names)
    hot_set, cold_set = (NoBatches() if x is None else x for x in map(loader.among, sets))
    return Separated(hot_set, cold_set, loader.epochs, reused=reused)


def _find(
    hot: Iterable[Numbers], samples: int, folder: Path | None, names: dict[str, str] | None
) -> tuple[Numbers, Numbers]:
    """Return the `hot` samples and all others; in a folder, with the names they are found by."""
    if folder is None:
        found = np.concatenate([np.empty(0, np.int64), *hot])
        return found, np.concatenate([np.empty(0, np.int64), *_others(found, samples)])
    disk = Disk(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # first, since it describes what follows
    first = disk.write("hot.numbers", map(_as_bytes, hot))
    found = _mapped(folder, first)
    second = disk.write("cold.numbers", map(_as_bytes, _others(found, samples)))
    if names is not None:
        files = {"hot": asdict(first), "cold": asdict(second)}
        manifest = {"format": FORMAT, "samples": samples, **names, "files": files}
        disk.write(MANIFEST, [json.dumps(manifest, indent=1).encode()])
    return found, _mapped(folder, second)


@dataclass(frozen=True)
class _Files:
    hot: FileRecord
    cold: FileRecord

    def __post_init__(self) -> None:
        check_files([self.hot.file, self.cold.file])


@dataclass(frozen=True)
class _Manifest:
    format: int
    data: str  # identity of the samples
    hot: str  # key of the hot rows
    files: _Files


def _read(folder: Path, names: dict[str, str], samples: int) -> tuple[Numbers, Numbers]:
    """Return the sets on disk; a ValueError says why they cannot be used."""
    path = folder / MANIFEST
    manifest = converted(_Manifest, read_json(path), where=str(path), remedy="it is not used")
    if manifest.format != FORMAT:
        raise ValueError(f"{path} is of format {manifest.format}, not {FORMAT}")
    if manifest.data != names["data"] or manifest.hot != names["hot"]:
        what = "samples" if manifest.data != names["data"] else "hot rows"
        raise ValueError(f"{folder} has the sets of other {what}")
    hot, cold = manifest.files.hot, manifest.files.cold
    if hot.bytes + cold.bytes != 8 * samples or hot.bytes % 8:
        raise ValueError(f"{path}: {hot.bytes} and {cold.bytes} bytes are not {samples} numbers")
    for record in (hot, cold):
        if wrong := why_wrong(folder, record, contents=True):
            raise ValueError(wrong)
    return _mapped(folder, hot), _mapped(folder, cold)


def _others(hot: Numbers, samples: int) -> Iterator[Numbers]:
    """Yield the numbers below `samples` that are not in `hot`."""
    for first in range(0, samples, _PART):
        last = min(first + _PART, samples)
        low, high = np.searchsorted(hot, [first, last])
        yield np.delete(np.arange(first, last), hot[low:high] - first)


def _as_bytes(numbers: Numbers) -> memoryview:
    return np.ascontiguousarray(numbers, "<i8").view(np.uint8).data


def _mapped(folder: Path, record: FileRecord) -> Numbers:
    if not record.bytes:
        return np.empty(0, np.int64)  # an empty file cannot be mapped
    return np.memmap(folder / record.file, np.dtype("<i8"), "r")


# -- copied samples ----------------------------------------------------------------------


def _copied(
    batches: Iterable[Any],
    popular: Popular,
    options: SetOptions,
    folder: Path | None,
    most_bytes: int,
    advance: Advance,
) -> Separated:
    """Copy the samples of a loader in one pass. Both sets have batches of the first one's size."""
    memory, first, size = _Memory(most_bytes, folder), None, 0
    hot, cold = _Blocks(options, memory), _Blocks(options, memory)
    for number, batch in enumerate(batches):
        outline = _outline(batch, options)
        if number == 0:
            first = outline
            hot.has_tensors = cold.has_tensors = outline is not None
        if outline != first:
            here, there = _first_difference(outline, first)
            raise ValueError(
                f"batch {number} has another structure than the first one, so their samples cannot "
                f"be mixed: {reprlib.repr(here)} instead of {reprlib.repr(there)}; leave out what "
                "differs between batches, or give functions of your own: take= and join="
            )
        mask = mask_of(popular(batch))
        size = size or len(mask)  # the first batch may be empty
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
