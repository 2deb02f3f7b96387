"""Files that are there whole or not at all, and their checksums.

Everything is written beside its place, flushed to the disk and renamed, so that whatever has its
final name is complete, also after a full disk, a lost machine or `kill -9`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from hotrow.support.manifests import Count

PARTIAL = ".partial"
_READ_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20
_FLUSH_BYTES = 32 << 20


@dataclass(frozen=True)
class FileRecord:
    """A file of a folder, as it was written."""

    file: str  # relative to the folder
    bytes: Count
    sha256: str


class Digest(Protocol):
    def update(self, part: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class BlockSums:
    """SHA-256 of the CRC-32 of each MiB: more than twice as fast as that of all bytes, and as good
    against disks. (Against people neither helps: they can compute both.)"""

    def __init__(self) -> None:
        self._sums, self._crc, self._filled = hashlib.sha256(), 0, 0

    def update(self, part: bytes | memoryview, /) -> None:
        part = memoryview(part)
        while len(part):
            here = part[: _BLOCK_BYTES - self._filled]
            self._crc, part = zlib.crc32(here, self._crc), part[len(here) :]
            self._filled += len(here)
            if self._filled == _BLOCK_BYTES:
                self._sums.update(self._crc.to_bytes(4, "little"))
                self._crc = self._filled = 0

    def hexdigest(self) -> str:
        whole = self._sums.copy()
        if self._filled:
            whole.update(self._crc.to_bytes(4, "little"))
        return whole.hexdigest()


class Disk:
    """One folder on the real disk; tests put a full one in its place."""

    remedy = "make room, and try again"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, path: Path) -> IO[bytes]:
        return path.open("wb")

    def write(
        self,
        name: str,
        parts: Iterable[bytes | memoryview],
        *,
        durable: bool = True,
        digest: Digest | None = None,
    ) -> FileRecord:
        """Puts a file in place; what an error leaves behind is taken away.

        One that need not be durable is not waited for: a lost machine may lose it, which its
        checksum tells. A `digest` takes the place of SHA-256.
        """
        path = self.folder / name
        beside = path.with_name(path.name + PARTIAL)
        digest, size = digest or hashlib.sha256(), 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.open(beside) as file:
                begun = 0
                for part in parts:
                    file.write(part)
                    digest.update(part)
                    size += len(part)
                    if size - begun >= _FLUSH_BYTES:
                        begin_flush(file, begun, size)
                        begun = size
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            beside.replace(path)
            if durable:
                make_durable(path.parent)  # a rename is durable once its folder is
        except BaseException as error:  # Ctrl-C, too
            beside.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self.in_plain_words(error, path) from None
            raise
        return FileRecord(name, size, digest.hexdigest())

    def in_plain_words(self, error: OSError, path: Path) -> OSError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return error
        # Without a number, which would be printed before the words.
        return OSError(f"the disk is full: {path} was not written. {self.remedy}")


def begin_flush(file: IO[bytes], first: int, last: int) -> None:
    """Let the disk begin with some bytes while others are on their way, without waiting."""
    with suppress(OSError, AttributeError, ValueError):  # only a hint, and not for every file
        os.posix_fadvise(file.fileno(), first, last - first, os.POSIX_FADV_DONTNEED)


def make_durable(path: Path) -> None:
    """A file that was not waited for is on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """A folder, with those above it that are missing; names are on the disk when it returns."""
    if path.is_dir():
        return
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    make_durable(path.parent)


def read_parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            yield part


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    for part in read_parts(path):
        digest.update(part)
    return digest.hexdigest()


def inside(folder: Path, name: str) -> Path:
    """The path of a file a manifest names; links that lead out of the folder are refused."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} leads out of its folder")
    return path


def why_wrong(folder: Path, record: FileRecord, *, contents: bool) -> str | None:
    """What is wrong with a file; None if it is as it was written."""
    path = inside(folder, record.file)
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != record.bytes:
        return f"{path} has {size:,} bytes instead of {record.bytes:,}"
    if contents and checksum(path) != record.sha256:
        return f"{path} has changed since it was written: its SHA-256 differs"
    return None
