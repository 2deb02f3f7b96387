"""Files in pieces, which become samples. Where pieces begin depends on the files alone, so that a
second pass, or a resumed one, sees the same pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotrow.data.prepared.format import Schema
from hotrow.data.prepared.rows import Samples

if TYPE_CHECKING:
    from hotrow.data.prepared.job import Watch
    from hotrow.data.prepared.parallel import Cores
    from hotrow.data.prepared.spool import Disk


@dataclass(frozen=True)
class Place:
    """A position in the source, at the start of a line."""

    file: int = 0
    offset: int = 0  # bytes of text before it in its file
    file_line: int = 0  # lines before it in its file
    line: int = 0  # lines before it in all files, of headers only the first file's


@dataclass(frozen=True)
class Piece:
    """Whole lines of one file; or one line that is too long, which is not kept."""

    place: Place
    after: Place  # of what follows in the same file
    data: Any  # bytes, for text
    read_bytes: int  # of its file as it lies on the disk, up to the end of this piece
    bad: str = ""  # what is wrong with the line, where it was not kept

    @property
    def lines(self) -> int:
        return self.after.file_line - self.place.file_line


class Source(ABC):
    """Files that become samples, piece by piece."""

    name: str
    schema: Schema
    key_dtype: str
    paths: list[Path]
    describes: Mapping[str, Any]  # what else decides about its samples
    times = False  # whether samples' "lines" are times, of which quantiles make splits
    first_line: int  # the number of the first sample, by which it is split
    header_lines: int  # of each file

    def ready(self, disk: Disk, cores: Cores, watch: Watch) -> None:  # noqa: B027
        """Do what must be done before there are pieces; here nothing."""

    @abstractmethod
    def pieces(self, start: Place | None = None) -> Iterator[Piece]:
        """Return the pieces of all files from a place on."""

    @abstractmethod
    def parse(self, piece: Piece) -> Samples:
        """Return the samples of a piece; several threads ask at once."""


def file_by_file(
    count: int, read: Callable[[Place], Iterator[Piece]], start: Place | None, *, headers: int = 0
) -> Iterator[Piece]:
    """The pieces of so many files from `start` on; `read` gives those of one, from its place on.
    Each file begins with so many lines of `headers`."""
    place = start or Place()
    for number in range(place.file, count):
        if number > place.file:
            place = Place(number, 0, 0, place.line - headers)
        for piece in read(place):
            yield piece
            place = piece.after
