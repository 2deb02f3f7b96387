"""Rows in files: tables are cut into shards, which are written and read in pieces.

One writer for checkpoints, models and exports; one reader for the shards of checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from hotrow.checkpoint.manifest import IDS, OTHER_COPY, ROWS, CheckpointTable, Shard
from hotrow.checkpoint.parts import TableRows
from hotrow.checkpoint.tensors import (
    bytes_of,
    head,
    memory_pieces,
    pieces_of,
    read_head,
    read_into,
    row_pieces,
)
from hotrow.support.files import BlockSums, Digest, Disk, FileRecord, make_durable

SHARD_BYTES = 256 << 20

Bytes = Iterator[bytes | memoryview]
Where = slice | Tensor  # rows of a table: all from one to another, or those of these numbers
# Which rows have changed (None: all are written), how rows are read, and how many at once.
RowSource = tuple[Tensor | None, Callable[[Where], Tensor], int]


@dataclass(frozen=True)
class ShardRows:
    """Rows of a table that go into one shard."""

    table: TableRows
    key: str
    file: str
    first: int
    span: int
    width: int  # numbers of a row

    @property
    def last(self) -> int:
        return self.first + self.span

    @property
    def metadata(self) -> dict[str, str]:
        return {"table": self.key, "first": str(self.first)}


def cut_tables(tables: Mapping[str, TableRows], *, with_state: bool) -> Iterator[ShardRows]:
    """Cut all tables into shards; `with_state`: the state of rows goes with their weights."""
    for number, (key, table) in enumerate(tables.items()):
        width = table.dim + (sum(table.state.values()) if with_state else 0)
        most = max(1, SHARD_BYTES // (4 * width))
        for place, first in enumerate(range(0, table.rows, most)):
            file = f"rows/{number:03}-{place:05}.safetensors"
            yield ShardRows(table, key, file, first, min(most, table.rows - first), width)


def spans(first: int, last: int, most: int) -> Iterator[slice]:
    """Cut rows into slices of at most so many."""
    for begin in range(first, last, most):
        yield slice(begin, min(begin + most, last))


def table_parts(
    name: str,
    shape: tuple[int, int],
    rows: Iterable[Tensor],
    *,
    ids: Tensor | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Bytes:
    """Yield a file of rows by its parts: its head, the numbers of rows if any, and rows."""
    tensors: dict[str, tuple[torch.dtype, Iterable[int]]] = {}
    if ids is not None:
        tensors[IDS] = (torch.int64, [len(ids)])
    tensors[name] = (torch.float32, shape)
    yield head(tensors, metadata or {})
    if ids is not None:
        yield from pieces_of(ids)
    for part in rows:
        yield from pieces_of(part)


def put(
    disk: Disk, name: str, parts: Iterable[bytes | memoryview], digest: Digest | None = None
) -> FileRecord:
    """Write a file that is on the disk; its name is when its folder is."""
    record = disk.write(name, parts, durable=False, digest=digest)
    make_durable(disk.folder / name)
    return record


def write_shard(
    disk: Disk, piece: ShardRows, source: RowSource, check: Callable[[], None]
) -> Shard | None:
    """Write a shard of a checkpoint; None: no row of it has changed.

    `check` is called before each part is written, and raises to stop.
    """
    ids, read, most = source
    if ids is not None and not len(ids):
        return None
    count = piece.span if ids is None else len(ids)
    places: Iterable[Where] = (
        spans(piece.first, piece.last, most) if ids is None else ids.split(most)
    )
    parts = table_parts(
        ROWS, (count, piece.width), map(read, places), ids=ids, metadata=piece.metadata
    )
    file = put(disk, piece.file, _checked(parts, check), digest=BlockSums())
    return Shard(file.file, file.bytes, file.sha256, piece.first, piece.span, count)


def _checked(parts: Bytes, check: Callable[[], None]) -> Bytes:
    for part in parts:
        check()
        yield part


def table_records(
    tables: Mapping[str, TableRows], written: Iterable[tuple[ShardRows, Shard | None]]
) -> tuple[CheckpointTable, ...]:
    """Return the records of tables whose shards were written, those of a table in order."""
    shards: dict[str, list[Shard]] = {key: [] for key in tables}
    for piece, shard in written:
        if shard is not None:
            shards[piece.key].append(shard)
    return tuple(
        CheckpointTable(key, table.rows, table.dim, table.state, tuple(shards[key]))
        for key, table in tables.items()
    )


@contextmanager
def open_shard(
    path: Path, table: CheckpointTable, shard: Shard, *, whole: bool
) -> Iterator[ShardReader]:
    """Open a shard of a checkpoint. `whole`: it holds all rows of its span, and so no ids."""
    with path.open("rb", buffering=0) as file:
        yield ShardReader(path, file, table, shard, whole=whole)


class ShardReader:
    """One pass over a shard of a checkpoint, from its first byte to its last."""

    def __init__(
        self, path: Path, file: IO[bytes], table: CheckpointTable, shard: Shard, *, whole: bool
    ) -> None:
        self._path, self._file, self._shard, self._whole = path, file, shard, whole
        self._digest = BlockSums()
        expected: dict[str, Any] = {} if whole else {IDS: ("I64", (shard.rows,))}
        expected[ROWS] = ("F32", (shard.rows, table.width))
        try:
            begin, sections = read_head(file, os.fstat(file.fileno()).st_size)
        except ValueError as error:
            raise self._wrong(str(error)) from None
        contents = {name: (each.dtype, each.shape) for name, each in sections.items()}
        if contents != expected:
            raise self._wrong(f"it holds {contents}, and by the manifest {expected}")
        if sorted(sections, key=lambda name: sections[name].first) != list(expected):
            raise self._wrong("its row numbers do not come first")
        self._digest.update(begin)
        self.section = sections[ROWS]

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"{self._path} is damaged: {what}; {OTHER_COPY}")

    def _fill(self, memory: memoryview) -> None:
        try:
            read_into(self._file, memory)
        except ValueError as error:
            raise self._wrong(str(error)) from None
        self._digest.update(memory)

    def pieces(self) -> Iterator[tuple[Where, Tensor]]:
        """Yield rows and where they belong; at the end refuse them if they have changed."""
        ids, first = None if self._whole else self._ids(), self._shard.first
        for place, rows in row_pieces(self.section, self._fill):
            end = place + len(rows)
            yield slice(first + place, first + end) if ids is None else ids[place:end], rows
        self._finish()

    def read_to(self, rows: Tensor) -> None:
        """Read all rows of a span straight into their places."""
        for memory in memory_pieces(bytes_of(rows)):
            self._fill(memory)
        self._finish()

    def _ids(self) -> Tensor:
        ids, shard = torch.empty(self._shard.rows, dtype=torch.int64), self._shard
        self._fill(bytes_of(ids))
        if len(ids) and (
            not bool((ids[1:] > ids[:-1]).all())
            or int(ids[0]) < shard.first
            or int(ids[-1]) >= shard.first + shard.span
        ):
            raise self._wrong("its row numbers are not those of the manifest, in order")
        return ids

    def _finish(self) -> None:
        if self._file.read(1) or self._digest.hexdigest() != self._shard.sums:
            raise self._wrong("it has changed since it was written: its checksum is another")
