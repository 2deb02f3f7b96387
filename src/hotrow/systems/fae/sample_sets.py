"""FAE's hot and cold samples by their numbers, of loaders that read samples by number.

    sets.json       of which samples and which hot rows; both files with their SHA-256. Put in place
                    last: without it there are no sets.
    hot.numbers     int64, little-endian, ascending
    cold.numbers    all others

Sets are small beside the samples themselves, 8 bytes each, and are mapped into memory.
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
from hotrow.systems.fae.hot_cold_schedule import BatchSet, NoBatches, Separated

FORMAT = 1
MANIFEST = "sets.json"
_PART = 1 << 20  # samples that are looked at together

Numbers = NDArray[np.int64]


@runtime_checkable
class NumberedSamples(Protocol):
    """A loader that reads samples by their numbers, as hotrow.data.Loader does."""

    batch_size: int
    epochs: int
    samples: int

    def each(self, work: Callable[[Any], Tensor]) -> Iterable[tuple[int, int, Tensor]]:
        """Yield what `work` makes of all samples, after the first one's number and how many."""

    def among(self, numbers: Numbers) -> BatchSet | None:
        """Return a loader of these samples alone; None if there are none."""

    def identity(self) -> str | None:
        """Return what names the samples and what is read of them."""


def separated(
    loader: NumberedSamples,
    popular: Callable[[Any], Tensor],
    *,
    folder: str | Path | None,
    key: str | None,
    advance: Callable[[int], None],
) -> Separated:
    """Separate the samples of a loader; both sets keep a short last batch. Where the loader leaves
    out some that do not fill a batch, the sets leave out as many together; without a seed, the
    same.

    `popular` says of each sample of a batch whether it is hot; several threads ask at once. The
    numbers of either kind are put into the folder. With a `key`, which names the hot rows, they are
    read from there when samples and key are the same. Without a folder they are kept in memory: 8
    bytes per sample.
    """

    def hot() -> Iterator[Numbers]:
        for first, count, said in loader.each(popular):
            yield first + np.flatnonzero(mask_of(said, count).numpy())
            advance(count)

    numbers = SampleSets(loader.identity(), folder, key).of(hot, loader.samples)
    hot_set, cold_set = loader.among(numbers.hot), loader.among(numbers.cold)
    return Separated(
        NoBatches() if hot_set is None else hot_set,
        NoBatches() if cold_set is None else cold_set,
        loader.batch_size,
        loader.epochs,
        reused=numbers.reused,
    )


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


@dataclass(frozen=True)
class Sets:
    hot: Numbers
    cold: Numbers
    reused: bool


class SampleSets:
    """Where numbers of hot and cold samples are kept, if anywhere."""

    def __init__(self, identity: str | None, folder: str | Path | None, key: str | None) -> None:
        """They are found again if the samples' identity and the hot rows' key are known, and the
        same."""
        self._folder = None if folder is None else Path(folder)
        self._names = None if identity is None or key is None else {"data": identity, "hot": key}

    def of(self, hot: Callable[[], Iterable[Numbers]], samples: int) -> Sets:
        """Those on disk; else of the `hot` samples, and all others."""
        if self._folder is None:
            found = np.concatenate([np.empty(0, np.int64), *hot()])
            rest = np.concatenate([np.empty(0, np.int64), *_others(found, samples)])
            return Sets(found, rest, reused=False)
        if self._names is not None:
            try:
                return self._read(self._folder, self._names, samples)
            except FileNotFoundError:
                pass  # there are none
            except ValueError as error:
                warn(f"{error}; samples are told apart again")
        return self._write(self._folder, hot, samples)

    def _write(self, folder: Path, hot: Callable[[], Iterable[Numbers]], samples: int) -> Sets:
        disk = Disk(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)  # what it tells of is about to change
        first = disk.write("hot.numbers", map(_as_bytes, hot()))
        found = _mapped(folder, first)
        second = disk.write("cold.numbers", map(_as_bytes, _others(found, samples)))
        if self._names is not None:
            files = {"hot": asdict(first), "cold": asdict(second)}
            manifest = {"format": FORMAT, "samples": samples, **self._names, "files": files}
            disk.write(MANIFEST, [json.dumps(manifest, indent=1).encode()])
        return Sets(found, _mapped(folder, second), reused=False)

    def _read(self, folder: Path, names: dict[str, str], samples: int) -> Sets:
        """A ValueError says why there is nothing to be used."""
        path = folder / MANIFEST
        manifest = converted(_Manifest, read_json(path), where=str(path), remedy="it is not used")
        if manifest.format != FORMAT:
            raise ValueError(f"{path} is of format {manifest.format}, not {FORMAT}")
        if manifest.data != names["data"] or manifest.hot != names["hot"]:
            what = "samples" if manifest.data != names["data"] else "hot rows"
            raise ValueError(f"{folder} has the sets of other {what}")
        hot, cold = manifest.files.hot, manifest.files.cold
        if hot.bytes + cold.bytes != 8 * samples or hot.bytes % 8:
            raise ValueError(
                f"{path}: {hot.bytes} and {cold.bytes} bytes are not {samples} numbers"
            )
        for record in (hot, cold):
            if wrong := why_wrong(folder, record, contents=True):
                raise ValueError(wrong)
        return Sets(_mapped(folder, hot), _mapped(folder, cold), reused=True)


def _others(hot: Numbers, samples: int) -> Iterator[Numbers]:
    """The numbers below `samples` that are not among these."""
    for first in range(0, samples, _PART):
        last = min(first + _PART, samples)
        low, high = np.searchsorted(hot, [first, last])
        is_other = np.ones(last - first, bool)
        is_other[hot[low:high] - first] = False
        yield first + np.flatnonzero(is_other)


def _as_bytes(numbers: Numbers) -> memoryview:
    return np.ascontiguousarray(numbers, "<i8").view(np.uint8).data


def _mapped(folder: Path, record: FileRecord) -> Numbers:
    if not record.bytes:
        return np.empty(0, np.int64)  # no bytes, which cannot be mapped
    return np.memmap(folder / record.file, np.dtype("<i8"), "r")
