"""The disk that data are prepared on. The only module here that writes."""

from __future__ import annotations

import os

from hotrow.support import files as disk
from hotrow.support.files import PARTIAL, checksum, inside, make_durable, read_parts, why_wrong

__all__ = ["PARTIAL", "Disk", "checksum", "inside", "make_durable", "read_parts", "why_wrong"]


class Disk(disk.Disk):
    """The folder that `hotrow prepare` makes."""

    remedy = "What is finished is kept: make room and give the same command again to resume"

    def append(self, name: str, line: str) -> None:
        """Adds a line to a log; it is on the disk when this returns.

        It starts with an end of line, so that half a line before it spoils nothing.
        """
        self.extend(name, b"\n" + line.encode() + b"\n", durable=True)

    def extend(self, name: str, data: bytes | memoryview, *, durable: bool = False) -> None:
        """Adds to the end of a file; an error may leave a part of it there."""
        path = self.folder / name
        try:
            with path.open("ab") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
        except OSError as error:
            raise self.in_plain_words(error, path) from None
