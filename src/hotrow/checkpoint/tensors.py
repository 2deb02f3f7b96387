"""safetensors files, written and read in pieces.

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
