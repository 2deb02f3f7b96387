"""Files that are there whole or not at all, and their checksums. The only module here that writes.

Everything is written beside its place, flushed to the disk and renamed, so that whatever has its
final name is complete, also after a full disk, a lost machine or `kill -9`.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from hotrow.data.prepared.format import FileRecord

PARTIAL = ".partial"
_READ_BYTES = 4 << 20


class Disk:
    """One folder on the real disk; tests put a full one in its place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, path: Path) -> IO[bytes]:
        return path.open("wb")

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> FileRecord:
        """Puts a file in place; what an error leaves behind is taken away."""
        path = self.folder / name
        beside = path.with_name(path.name + PARTIAL)
        digest, size = hashlib.sha256(), 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.open(beside) as file:
                for part in parts:
                    file.write(part)
                    digest.update(part)
                    size += len(part)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            _sync_folder(path.parent)
        except OSError as error:
            beside.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(
                    error.errno,
                    f"the disk is full: {path} was not written. What is finished is kept: make "
                    "room and give the same command again to resume",
                ) from error
            raise
        return FileRecord(name, size, digest.hexdigest())

    def append(self, name: str, line: str) -> None:
        """Adds a line to a log; it is on the disk when this returns."""
        path = self.folder / name
        with path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)  # a rename is durable once its folder is
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
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
        return f"{path} has changed since it was prepared: its SHA-256 is another"
    return None
