"""safetensors files, written and read in pieces; and the shards of tables, which are such files.

The library handles whole tensors only, and tables can be larger than memory.

    8 bytes   length of the header
    header    JSON: {"rows": {"dtype": "F32", "shape": [9, 4], "data_offsets": [0, 144]}, ...}
    data      all tensors, one after the other
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from hotrow.checkpoint.manifest import IDS, OTHER_COPY, ROWS, CheckpointTable, Shard
from hotrow.checkpoint.parts import TableRows
from hotrow.checkpoint.places import Where
from hotrow.support.files import BlockSums, Digest, Disk, FileRecord, make_durable

# That are read or written at once. The system takes several times as long for writes of 16 MiB as
# for these (benchmarks/checkpoint.py).
PIECE_BYTES = 4 << 20
_MOST_HEADER_BYTES = 100_000_000  # as in the library

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Section:
    """A tensor's place in a file."""

    dtype: str
    shape: tuple[int, ...]
    first: int  # byte of the file
    bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES_BY_NAME[self.dtype]


def head(
    tensors: Mapping[str, tuple[torch.dtype, Iterable[int]]], metadata: Mapping[str, str]
) -> bytes:
    """What a file of these tensors begins with, in their order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        first, sizes = end, list(shape)
        end += math.prod(sizes) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": sizes, "data_offsets": [first, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # so that the numbers are aligned
    return len(header).to_bytes(8, "little") + header


def packed(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A file of whole tensors by its parts; one of them is copied at a time."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise ValueError(
                f"{name} is a tensor of {tensor.dtype}, {tensor.layout}: none can be saved"
            )
    yield head({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, {})
    for tensor in tensors.values():
        yield from pieces_of(tensor)


def pieces_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes. One that is contiguous on the host is not copied."""
    yield from memory_pieces(bytes_of(tensor.detach().cpu().contiguous()))


def memory_pieces(memory: memoryview) -> Iterator[memoryview]:
    for first in range(0, len(memory), PIECE_BYTES):
        yield memory[first : first + PIECE_BYTES]


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor of the host that lies in one piece, as bytes that can be read and written."""
    memory: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return memory


def read_head(file: IO[bytes], size: int) -> tuple[bytes, dict[str, Section]]:
    """Return the head of a file of `size` bytes, and the places of its tensors.

    Everything in it is checked; a ValueError says what is wrong.
    """
    begin = file.read(8)
    length = int.from_bytes(begin, "little")
    if len(begin) < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
        raise ValueError("its header is longer than the file")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("it ends inside of its header")
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("its header is no JSON") from None
    if not isinstance(entries, dict):
        raise ValueError("its header is no table")
    entries.pop("__metadata__", None)
    sections = {name: _section(name, entry, 8 + length) for name, entry in entries.items()}
    end = 8 + length
    for section in sorted(sections.values(), key=lambda section: section.first):
        if section.first != end:
            raise ValueError("its tensors do not lie one behind the other")
        end += section.bytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end:,} of {size:,}")
    return begin + text, sections


def _section(name: str, entry: Any, base: int) -> Section:
    try:
        dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"what it says of {name!r} is no tensor") from None
    numbers = (*shape, first, last) if isinstance(shape, list) else (None,)
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or (
        not isinstance(dtype, str) or dtype not in _DTYPES_BY_NAME
    ):
        raise ValueError(f"what it says of {name!r} is no tensor")
    size = math.prod(shape) * _DTYPES_BY_NAME[dtype].itemsize
    if last - first != size:
        raise ValueError(f"{name!r} takes {last - first:,} bytes instead of {size:,}")
    return Section(dtype, tuple(shape), base + first, size)


@contextmanager
def open_tensors(path: Path, *, remedy: str) -> Iterator[tuple[IO[bytes], dict[str, Section]]]:
    """Open a file; gives it and the places of its tensors."""
    with path.open("rb", buffering=0) as file:
        try:
            _, sections = read_head(file, os.fstat(file.fileno()).st_size)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}; {remedy}") from None
        yield file, sections


def read_tensors(path: Path, *, remedy: str) -> dict[str, Tensor]:
    """Return all tensors of a file."""
    tensors = {}
    with open_tensors(path, remedy=remedy) as (file, sections):
        for name, section in sections.items():
            file.seek(section.first)
            tensors[name] = torch.empty(section.shape, dtype=section.torch_dtype)
            if section.bytes:
                read_into(file, bytes_of(tensors[name]))
    return tensors


def read_rows(file: IO[bytes], section: Section) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of a tensor in pieces: (first row, rows)."""
    file.seek(section.first)
    yield from row_pieces(section, partial(read_into, file))


def rows_at_once(width: int) -> int:
    """Return how many rows of so many numbers make a piece."""
    return max(1, PIECE_BYTES // (4 * max(1, width)))


def row_pieces(
    section: Section, fill: Callable[[memoryview], None]
) -> Iterator[tuple[int, Tensor]]:
    """Yield a tensor's rows in pieces (first row, rows); `fill` reads the bytes that come next."""
    if not section.bytes:
        return  # of such rows any number takes no room
    rows, *shape = section.shape
    step = rows_at_once(math.prod(shape))
    for first in range(0, rows, step):
        piece = torch.empty((min(step, rows - first), *shape), dtype=section.torch_dtype)
        fill(bytes_of(piece))
        yield first, piece


def read_into(file: IO[bytes], memory: memoryview) -> None:
    """Fill the memory; a ValueError says that the file has less."""
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError("it is shorter than it was")
        done += count


def row_not_finite(rows: Tensor) -> int | None:
    """Return the first row that holds NaN or infinity; None: there is none."""
    if bool(rows.isfinite().all()):
        return None
    return int((~rows.isfinite().all(1)).nonzero()[0])


SHARD_BYTES = 256 << 20

Bytes = Iterator[bytes | memoryview]
# Which rows have changed (None: all are written), how rows are read, and how many at once.
RowSource = tuple[Tensor | None, Callable[[Where], Tensor], int]


@dataclass(frozen=True)
class ShardRows:
    """Rows of a table that go into one shard, by their numbers at this rank."""

    table: TableRows
    key: str
    file: str
    first: int
    span: int
    width: int  # numbers of a row
    rank: int

    @property
    def last(self) -> int:
        return self.first + self.span

    @property
    def metadata(self) -> dict[str, str]:
        return {"table": self.key, "first": str(self.first)}  # `first`: at the rank of the file


def cut_tables(tables: Mapping[str, TableRows], *, with_state: bool) -> Iterator[ShardRows]:
    """Cut all rows that are here into shards; `with_state`: their state goes with their weights."""
    for number, (key, table) in enumerate(tables.items()):
        width = table.dim + (sum(table.state.values()) if with_state else 0)
        most, share = max(1, SHARD_BYTES // (4 * width)), table.share
        whose = "" if share.owners is None else f"-{share.rank:05}"
        for place, first in enumerate(range(0, share.count, most)):
            file, span = f"rows/{number:03}{whose}-{place:05}", min(most, share.count - first)
            yield ShardRows(table, key, f"{file}.safetensors", first, span, width, share.rank)


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
    return Shard(file.file, file.bytes, file.sha256, piece.first, piece.span, count, piece.rank)


def _checked(parts: Bytes, check: Callable[[], None]) -> Bytes:
    for part in parts:
        check()
        yield part


def by_table(written: Iterable[tuple[ShardRows, Shard | None]]) -> dict[str, list[Shard]]:
    """Return the shards that were written by the key of their table, those of a table in order."""
    shards: dict[str, list[Shard]] = {}
    for piece, shard in written:
        if shard is not None:
            shards.setdefault(piece.key, []).append(shard)
    return shards


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
