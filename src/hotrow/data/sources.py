"""Where a loader finds samples: blocks of them, as arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hotrow.data.prepared import Jagged, Prepared
from hotrow.data.prepared.format import to_json
from hotrow.support.messages import few

BLOCK = 1024  # samples of prepared data that stay together while blocks are shuffled


@dataclass(frozen=True)
class Samples:
    """Columns of some samples."""

    ids: NDArray[Any]  # [N, single features] int32 or int64
    dense: NDArray[np.float32]  # [N, dense columns]
    label: NDArray[Any]  # [N], 0 or 1
    jagged: dict[str, Jagged]

    def __len__(self) -> int:
        return len(self.label)


class Source(Protocol):
    """Blocks of samples that are read as a whole, by several threads at once."""

    features: tuple[str, ...]  # in the order of a batch's columns
    single: tuple[str, ...]  # those with one id in each sample: the columns of `ids`
    sizes: NDArray[np.int64]  # samples of each block

    def read(self, blocks: NDArray[np.int64]) -> Samples:
        """All samples of these blocks, in this order."""


def numbers_of(data: Prepared, dense: Sequence[str] | None) -> tuple[str, ...]:
    """Those that are named, or all; one that the data lacks is refused."""
    known = data.schema.dense
    for name in dense or ():
        if name not in known:
            raise ValueError(f"the data has no number {name!r}; it has {few(known) or 'none'}")
    return known if dense is None else tuple(dense)


class PreparedSource:
    """A split of what `hotrow prepare` has made; of its numbers those named in `dense`, or all."""

    def __init__(
        self, data: Prepared | str | Path, split: str, *, dense: Sequence[str] | None = None
    ) -> None:
        self.data = data if isinstance(data, Prepared) else Prepared(data)
        known = self.data.schema.dense
        self.dense = numbers_of(self.data, dense)
        self._numbers = [known.index(name) for name in self.dense]
        self._has_all = self.dense == known
        self.features = tuple(each.name for each in self.data.schema.features)
        self.single = tuple(each.name for each in self.data.schema.single)
        self.split, self._shards = split, self.data.shards(split)
        samples = np.array([shard.samples for shard in self._shards], dtype=np.int64)
        self._firsts = np.cumsum(samples) - samples
        of_shards = -(-samples // BLOCK)
        self._first_block = np.cumsum(of_shards) - of_shards
        self.sizes = np.full(int(of_shards.sum()), BLOCK, dtype=np.int64)
        last = (np.cumsum(of_shards) - 1)[samples > 0]
        self.sizes[last] = (samples - (of_shards - 1) * BLOCK)[samples > 0]

    @property
    def identity(self) -> str:
        """Changes with any byte of the samples, or their order."""
        manifest = to_json(self.data.manifest)  # it has every file's checksum
        return hashlib.sha256(f"{self.split} of {manifest}".encode()).hexdigest()

    def read(self, blocks: NDArray[np.int64]) -> Samples:
        ids, dense, label = self._room(int(self.sizes[blocks].sum()))
        at = 0
        for number, mine in self._by_shard(blocks):
            shard = self._shards[number]
            size = int(self.sizes[mine].sum())
            here, places = slice(at, at + size), mine - self._first_block[number]
            _copy_blocks(shard.ids, places, ids[here])
            _copy_blocks(shard.label, places, label[here])
            self._check_labels(number, label[here])
            if self._has_all:
                _copy_blocks(shard.dense, places, dense[here])
            else:
                every = np.empty((size, shard.dense.shape[1]), np.float32)
                _copy_blocks(shard.dense, places, every)
                dense[here] = every[:, self._numbers]
            at = here.stop
        return Samples(ids, dense, label, self._lists(blocks))

    def take(self, numbers: NDArray[np.int64]) -> Samples:
        """The samples of these numbers, in this order."""
        ids, dense, label = self._room(len(numbers))
        lists: dict[str, list[Jagged]] = {each.name: [] for each in self.data.schema.jagged}
        shards = np.searchsorted(self._firsts, numbers, side="right") - 1
        for low, high in pairwise(np.flatnonzero(np.diff(shards, prepend=-1, append=-1))):
            shard, here = self._shards[shards[low]], slice(low, high)
            places = numbers[here] - self._firsts[shards[low]]
            found = shard.dense[places]
            dense[here] = found if self._has_all else found[:, self._numbers]
            ids[here], label[here] = shard.ids[places], shard.label[places]
            self._check_labels(int(shards[low]), label[here])
            for name, parts in lists.items():
                mine = shard.jagged[name]
                self._check_lists(name, int(shards[low]), mine, places)
                parts.append(_lists_at(mine, places))
        return Samples(ids, dense, label, {name: joined(parts) for name, parts in lists.items()})

    def _room(self, count: int) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.uint8]]:
        ids = np.empty((count, len(self.single)), self.data.schema.id_dtype)
        return ids, np.empty((count, len(self.dense)), np.float32), np.empty(count, np.uint8)

    def _by_shard(self, blocks: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Blocks one after the other that lie in one shard."""
        shards = np.searchsorted(self._first_block, blocks, side="right") - 1
        edges = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(blocks)]
        for first, last in pairwise(edges):
            if first < last:
                yield int(shards[first]), blocks[first:last]

    def _lists(self, blocks: NDArray[np.int64]) -> dict[str, Jagged]:
        lists: dict[str, list[Jagged]] = {each.name: [] for each in self.data.schema.jagged}
        if lists:
            for number, first, last in self._runs(blocks):
                for name, found in lists.items():
                    mine = self._shards[number].jagged[name]
                    self._check_lists(name, number, mine, slice(first, last))
                    offsets = mine.offsets[first : last + 1]
                    values = mine.values[offsets[0] : offsets[-1]]
                    found.append(Jagged(offsets - offsets[0], values))
        return {name: joined(parts) for name, parts in lists.items()}

    def _check_lists(
        self, name: str, number: int, lists: Jagged, places: NDArray[np.int64] | slice
    ) -> None:
        """Opening reads no shard, so that one may have changed; its offsets would lead anywhere."""
        firsts, ends = lists.offsets[:-1][places], lists.offsets[1:][places]
        if len(ends) and (
            (ends < firsts).any() or firsts.min() < 0 or ends.max() > len(lists.values)
        ):
            raise self._damaged(f"the lists of {name!r}", number)

    def _check_labels(self, number: int, label: NDArray[np.uint8]) -> None:
        if label.max(initial=0) > 1:
            raise self._damaged("the labels", number)

    def _damaged(self, what: str, number: int) -> ValueError:
        return ValueError(
            f"{self.data.folder}: {what} in shard {number} of {self.split} are damaged; prepare "
            "again"
        )

    def _runs(self, blocks: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """(shard, first, last) of blocks, with neighbours joined: unshuffled ones are many."""
        run: tuple[int, int, int] | None = None
        shards = np.searchsorted(self._first_block, blocks, side="right") - 1
        starts = (blocks - self._first_block[shards]) * BLOCK
        ends = starts + self.sizes[blocks]
        for number, first, last in zip(*(x.tolist() for x in (shards, starts, ends)), strict=True):
            if run and run[0] == number and run[2] == first:
                run = number, run[1], last
                continue
            if run:
                yield run
            run = number, first, last
        if run:
            yield run


class SubsetSource:
    """The samples of these numbers, ascending, in the blocks of the source that holds them."""

    def __init__(self, source: Source, numbers: NDArray[np.int64]) -> None:
        self.features, self.single = source.features, source.single
        self._source, self._numbers = source, numbers
        edges = np.cumsum([0, *source.sizes])
        self._cuts = np.searchsorted(numbers, edges)
        sizes = np.diff(self._cuts)
        self._blocks = np.flatnonzero(sizes)  # the source's; an empty one is none of ours
        self._firsts, self.sizes = edges[self._blocks], sizes[self._blocks]

    def read(self, blocks: NDArray[np.int64]) -> Samples:
        theirs = self._blocks[blocks]
        cuts = zip(self._cuts[theirs], self._cuts[theirs + 1], strict=True)
        numbers = np.concatenate([self._numbers[low:high] for low, high in cuts])
        if hasattr(self._source, "take"):
            found: Samples = self._source.take(numbers)
            return found
        # Where each block lies in what is read, less where it lies among all.
        starts = np.cumsum([0, *self._source.sizes[theirs]])[:-1] - self._firsts[blocks]
        places = numbers + np.repeat(starts, self.sizes[blocks])
        return chosen(self._source.read(theirs), places)


def _copy_blocks(column: NDArray[Any], places: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Blocks of a shard's column, at ascending places, in one call: between calls threads wait for
    each other, and with many small ones they do little else."""
    full = len(column) // BLOCK
    whole = places[: np.searchsorted(places, full)]
    middle = len(whole) * BLOCK
    if len(whole) and out[:1].nbytes:
        item = f"V{BLOCK * out[:1].nbytes}"
        blocks = column[: full * BLOCK].reshape(full, -1).view(item).reshape(full)
        np.take(
            blocks,
            whole,
            out=out[:middle].reshape(len(whole), -1).view(item).reshape(-1),
            mode="clip",
        )
    if len(whole) < len(places):  # the last one, which is short
        out[middle:] = column[full * BLOCK :]


def chosen(samples: Samples, places: NDArray[np.int64]) -> Samples:
    """Some of them, in this order."""
    return Samples(
        samples.ids[places],
        samples.dense[places],
        samples.label[places],
        {name: _lists_at(lists, places) for name, lists in samples.jagged.items()},
    )


def _lists_at(lists: Jagged, places: NDArray[np.int64]) -> Jagged:
    firsts = lists.offsets[places]
    lengths = lists.offsets[places + 1] - firsts
    offsets = np.zeros(len(places) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - firsts, lengths)
    return Jagged(offsets, lists.values[inside])


def joined(parts: Sequence[Jagged]) -> Jagged:
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([np.diff(each.offsets) for each in parts])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Jagged(offsets, np.concatenate([each.values for each in parts]))
