"""Files of text in pieces of whole lines: plain, .gz or .zst. Knows nothing of columns.

Where pieces begin depends on the files alone, so that a second pass, or a resumed one, sees the
same pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotrow.data.prepared.arrow import pyarrow
from hotrow.data.prepared.fields import count_lines

PIECE_BYTES = 4 << 20
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_STARTS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
_OTHERS = {
    b"PK\x03\x04": "a .zip archive: unpack it first",
    b"BZh": "compressed by bzip2: unpack it, or use .gz or .zst",
    b"\xfd7zXZ": "compressed by xz: unpack it, or use .gz or .zst",
    b"\x04\x22\x4d\x18": "compressed by lz4: unpack it, or use .gz or .zst",
    b"PAR1": "a Parquet file, and no text",
}
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which Windows puts before texts


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


class TextFiles:
    """Several files, read one after the other."""

    def __init__(
        self, paths: Sequence[Path], *, header: bytes | None = None, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.paths = list(paths)
        self._header = header  # the first line of every file, or None
        self._piece_bytes = piece_bytes
        for path in self.paths:
            _check(path)

    def pieces(self, start: Place | None = None) -> Iterator[Piece]:
        headers = 0 if self._header is None else 1
        return file_by_file(len(self.paths), self._file, start, headers=headers)

    def _file(self, place: Place) -> Iterator[Piece]:
        path = self.paths[place.file]
        with _Stream(path) as stream:
            stream.skip(place.offset)
            # What follows the last end of line is kept for the next piece.
            rest = b""
            while True:
                more = stream.read(self._piece_bytes - len(rest))
                text = rest + more
                if not text:
                    return
                cut, bad = text.rfind(b"\n") + 1, ""
                if cut or len(text) < self._piece_bytes:
                    has_end = cut > 0
                    cut = cut if cut and more else len(text)  # the last line may lack its end
                    text, rest = text[:cut], text[cut:]
                    after = _after(place, text)
                else:
                    bad = f"longer than {self._piece_bytes:,} bytes, the most that is read"
                    size, rest, has_end = self._pass_by(stream, len(text))
                    after = replace(
                        place,
                        offset=place.offset + size,
                        file_line=place.file_line + 1,
                        line=place.line + 1,
                    )
                if not place.offset:
                    if not has_end:
                        self._check_line(text, place)
                    text = text.removeprefix(_MARK)
                piece = Piece(place, after, b"" if bad else text, stream.tell(), bad)
                place = piece.after
                if not piece.place.file_line:
                    self._check_header(piece)
                yield piece

    def _pass_by(self, stream: _Stream, size: int) -> tuple[int, bytes, bool]:
        """Read to the end of a line, of which `size` bytes are read, and keep nothing of it.
        Return its size, what was read behind it, and whether a line end was found."""
        while more := stream.read(self._piece_bytes):
            line, end, rest = more.partition(b"\n")
            size += len(line) + len(end)
            if end:
                return size, rest, True
        return size, b"", False

    def _check_line(self, text: bytes, place: Place) -> None:
        """A file without a line end is one line, or no text."""
        where = f"{self.paths[place.file]}, line {place.file_line + 1:,}"
        if b"\r" in text.rstrip(b"\r"):
            raise ValueError(f"{where}: lines end in \\r alone, as on old Macs; make it \\n")
        if len(text) >= self._piece_bytes:
            raise ValueError(
                f"{where}: no end of line within {self._piece_bytes:,} bytes; this is no text "
                "file of lines"
            )

    def _check_header(self, piece: Piece) -> None:
        if self._header is not None and piece.bad:
            raise ValueError(f"{self.paths[piece.place.file]}, line 1: {piece.bad}")
        first, _, _ = piece.data.partition(b"\n")
        if self._header is not None and first.rstrip(b"\r") != self._header:
            raise ValueError(
                f"{self.paths[piece.place.file]} begins with "
                f"{first[:80].decode(errors='replace')!r}; expected is the header "
                f"{self._header.decode()!r}"
            )


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


def _after(place: Place, text: bytes) -> Place:
    lines = count_lines(text) + (not text.endswith(b"\n"))
    return Place(place.file, place.offset + len(text), place.file_line + lines, place.line + lines)


def _check(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} does not exist" if not path.exists() else f"{path} is no file")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty")
    with path.open("rb") as file:
        start = file.read(8)
    for magic, what in _OTHERS.items():
        if start.startswith(magic):
            raise ValueError(f"{path} is {what}")
    for magic, suffix in _STARTS.items():
        if start.startswith(magic) and path.suffix != suffix:
            raise ValueError(f"{path} is compressed; give it a name that ends in {suffix}")
    # A .zst may begin otherwise, too.
    if path.suffix == ".gz" and not start.startswith(b"\x1f\x8b"):
        raise ValueError(f"{path} is not compressed by gzip, whatever its name says; rename it")


class _Stream:
    """A file's text, uncompressed where needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw = path.open("rb")
        self._text: Any = self._raw
        kind = _COMPRESSED.get(path.suffix)
        if kind:
            what = f"{path.suffix} files are read"
            self._text = pyarrow(what=what).CompressedInputStream(self._raw, kind)
        self._is_compressed = kind is not None

    def read(self, size: int) -> bytes:
        """`size` bytes, or fewer at the end of the file."""
        parts = []
        while size > 0:
            part = self._read(size)
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _read(self, size: int) -> bytes:
        try:
            return bytes(self._text.read(size))
        except OSError as error:
            if not self._is_compressed:
                raise
            raise ValueError(
                f"{self._path} cannot be uncompressed beyond byte {self.tell():,} of its "
                f"{self._path.stat().st_size:,}: {error}. It was cut off or damaged; get it again"
            ) from error

    def skip(self, size: int) -> None:
        if not self._is_compressed:
            self._raw.seek(size)
            return
        while size:
            found = len(self.read(min(size, 8 << 20)))
            if not found:
                raise ValueError(
                    f"{self._path} ends {size:,} bytes of text before the place where reading "
                    "stopped: it has changed; --restart prepares it anew"
                )
            size -= found

    def tell(self) -> int:
        return self._raw.tell()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()
