"""FAE's input processor: every sample of a loader goes to the hot set or to the cold one, once.

Loaders that read samples by number, as hotrow.data.Loader does, need only the numbers, 8 bytes
each. They are kept in memory, or in a folder whose files are mapped:

    sets.json       identity of samples and hot rows, and the SHA-256 of both files. It is written
                    last: without it there are no sets.
    hot.numbers     int64, little-endian, ascending
    cold.numbers    all others

Samples of other loaders are copied: see sample_copies.py. This module does not know rows; a
function says which samples are hot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotrow.inputs.samples import mask_of
from hotrow.support.files import Disk, FileRecord, why_wrong
from hotrow.support.manifests import check_files, converted, read_json
from hotrow.support.messages import warn
from hotrow.support.progress import no_progress
from hotrow.systems.fae.hot_cold_schedule import BatchSet, NoBatches, Separated
from hotrow.systems.fae.sample_copies import MOST_BYTES, Advance, SetOptions, copied

FORMAT = 1
MANIFEST = "sets.json"
_PART = 1 << 20  # samples in one step

Popular = Callable[[Any], Tensor]  # a batch -> bool [B]: all lookups of a sample are hot
Numbers = NDArray[np.int64]


def separate(
    batches: Iterable[Any],
    popular: Popular,
    options: SetOptions | None = None,
    *,
    folder: str | Path | None = None,
    key: str | None = None,
    most_bytes: int = MOST_BYTES,
    advance: Advance = no_progress,
) -> Separated:
    """Separate hot samples from cold ones, in one pass over `batches`, which are one epoch.

    A loader that reads samples by number has its own batch size, epochs and seed. Its sets go to
    `folder`; with a `key`, which names the hot rows, the next run finds them there. Several threads
    call `popular`. Both sets keep a short last batch; where the loader leaves out samples that do
    not fill a batch, the sets leave out as many together.

    `options` are for other loaders. Their samples are kept as long as the process lives: in memory
    up to `most_bytes`, the others in the folder. Batches that are not made of tensors alone stay in
    memory. `advance` is called with numbers of samples done.
    """
    path = None if folder is None else Path(folder)
    if isinstance(batches, NumberedSamples):
        sets = _by_number(batches, popular, path, key, advance)
    else:
        sets = copied(
            batches, popular, options or SetOptions(), path, most_bytes=most_bytes, advance=advance
        )
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
        sets = _find(hot(), loader.samples, folder, names)
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
