"""Text files, plain, .gz or .zst: pieces of whole lines, and their columns, which Arrow reads."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hotrow.data.prepared.arrow import pyarrow
from hotrow.data.prepared.pieces import (
    EXAMPLES,
    BadLine,
    BadLines,
    Piece,
    Place,
    Rows,
    Samples,
    Source,
    file_by_file,
)
from hotrow.support.messages import many

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
_MARK = b"\xef\xbb\xbf"  # of UTF-8; Windows puts it before texts


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
            # What follows the last line end is kept for the next piece.
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
        """Read to the end of a line whose first `size` bytes are read already, and keep none of it.
        Return its size, what was read after it, and whether a line end was found."""
        while more := stream.read(self._piece_bytes):
            line, end, rest = more.partition(b"\n")
            size += len(line) + len(end)
            if end:
                return size, rest, True
        return size, b"", False

    def _check_line(self, text: bytes, place: Place) -> None:
        """Refuse a file without a line end, unless it is one short line."""
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


def _count_lines(text: bytes) -> int:
    """Count lines; bytes.count takes four times as long if lines are short."""
    ends = np.frombuffer(text, np.uint8) == ord("\n")
    return int(np.count_nonzero(ends)) + _lacks_end(text)


def _lacks_end(text: bytes) -> bool:
    """Return whether the last line has no end, which the last one of a file may lack."""
    return bool(text) and not text.endswith(b"\n")


def read_rows(
    text: bytes,
    columns: Mapping[str, int],
    *,
    separator: str,
    width: int,
    quotes: bool = False,
    skipped: int = 0,
) -> Rows:
    """Return some columns of whole lines, by their places among `width` columns. With `quotes`
    fields may be quoted; without, quotes belong to the fields. The first `skipped` lines are left
    out. Lines with more or fewer columns are bad."""
    reader, arrow = pyarrow("csv", what="text is read"), pyarrow()
    for _ in range(skipped):
        text = text[text.find(b"\n") + 1 or len(text) :]
    is_end = np.frombuffer(text, np.uint8) == ord("\n")
    num_lines = int(np.count_nonzero(is_end)) + _lacks_end(text)
    reasons: dict[int, str] = {}
    has_empty = num_lines > 1 and bool((is_end[1:] & is_end[:-1]).any())
    if is_odd := has_empty or _is_odd(text, quotes):
        text = _rewritten(text, separator, width, quotes, reasons)
    bad: list[int] = []
    first: list[BadLine] = []

    def skip(row: Any) -> str:
        line = row.number - 1
        bad.append(line)
        if len(first) < EXAMPLES:
            reason = reasons.get(line) or _wrong_width(row.actual_columns, width)
            first.append(BadLine(line + skipped, reason))
        return "skip"

    if not text:
        return Rows({name: arrow.array([], arrow.string()) for name in columns}, np.arange(0))
    names = [str(place) for place in range(width)]
    if text.startswith(_MARK):
        text = _MARK + text  # Arrow drops the first one
    table = reader.read_csv(
        arrow.BufferReader(text),
        reader.ReadOptions(use_threads=False, column_names=names, block_size=len(text) + 1),
        reader.ParseOptions(
            delimiter=separator,
            quote_char='"' if is_odd else False,
            newlines_in_values=is_odd,
            ignore_empty_lines=False,
            invalid_row_handler=skip,
        ),
        reader.ConvertOptions(
            column_types=dict.fromkeys(names, arrow.string()),
            include_columns=[names[place] for place in columns.values()],
            strings_can_be_null=False,
            check_utf8=False,
        ),
    )
    arrays = {name: table.column(names[at]).combine_chunks() for name, at in columns.items()}
    lines = np.delete(np.arange(num_lines), bad) + skipped
    return Rows(arrays, lines, BadLines(len(bad), tuple(first)))


def _wrong_width(columns: int, width: int) -> str:
    return f"{many(columns, 'column')} instead of {width}"


def _is_odd(text: bytes, quotes: bool) -> bool:
    """Return whether Arrow would read lines differently: the first one is empty, or an empty one
    ends in a carriage return; or there are quotes, or carriage returns within lines. Arrow cannot
    report bad lines that are not UTF-8."""
    return (
        (quotes and b'"' in text)
        or text.startswith((b"\n", b"\r\n"))
        or (b"\r" in text and (b"\n\r\n" in text or _has_lone_return(text)))
        or not _is_utf8(text)
    )


def _has_lone_return(text: bytes) -> bool:
    return text.count(b"\r") != text.count(b"\r\n") + text.endswith(b"\r")


def _is_utf8(text: bytes) -> bool:
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False


def _rewritten(
    text: bytes, separator: str, width: int, quotes: bool, reasons: dict[int, str]
) -> bytes:
    """Return the same lines with quotes wherever Arrow needs them. Bad lines become one column; the
    first reasons are added to `reasons`. Slow: every line passes through Python."""
    lines, between = [], separator.encode()
    for number, line in enumerate(text.removesuffix(b"\n").split(b"\n")):
        line = line.removesuffix(b"\r")
        fields, reason = line.split(between), ""
        if not line.strip(b"\r"):
            reason = f"an empty line instead of {width} columns"
        elif quotes and b'"' in line:
            fields, reason = _without_quotes(line, separator)
        if not reason and len(fields) != width:
            reason = _wrong_width(len(fields), width)
        if reason:
            line = b"-"
            if len(reasons) < EXAMPLES:
                reasons[number] = reason
        elif b'"' in line or b"\r" in line:
            line = between.join(b'"%b"' % field.replace(b'"', b'""') for field in fields)
        lines.append(line)
    return b"\n".join(lines) + b"\n"


def _without_quotes(line: bytes, separator: str) -> tuple[list[bytes], str]:
    """Return the fields of a line, and what is wrong with its quotes, if anything."""
    decoded = line.decode("utf-8", errors="surrogateescape")
    try:
        fields = next(csv.reader([decoded], delimiter=separator, strict=True))
    except csv.Error as error:
        reason = str(error)
        if "end of data" in reason:
            reason = (
                "they do not close before its end, and a line end within quotes is not "
                "understood; write such texts as Parquet, or without it"
            )
        return [], f"its quotes are wrong: {reason}"
    return [field.encode("utf-8", errors="surrogateescape") for field in fields], ""


def _after(place: Place, text: bytes) -> Place:
    lines = _count_lines(text)
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
    # A .zst may begin differently, too.
    if path.suffix == ".gz" and not start.startswith(b"\x1f\x8b"):
        raise ValueError(f"{path} is not compressed by gzip, whatever its name says; rename it")


class _Stream:
    """The text of a file, decompressed if needed."""

    def __init__(self, path: Path) -> None:
        self._path, kind = path, _COMPRESSED.get(path.suffix)
        self._is_compressed = kind is not None
        arrow = pyarrow(what=f"{path.suffix} files are read") if kind else None
        self._raw = path.open("rb")
        self._text: Any = arrow.CompressedInputStream(self._raw, kind) if arrow else self._raw

    def read(self, size: int) -> bytes:
        """Return `size` bytes, or fewer at the end of the file."""
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
            skipped = len(self.read(min(size, 8 << 20)))
            if not skipped:
                raise ValueError(
                    f"{self._path} ends {size:,} bytes of text before the place where reading "
                    "stopped: it has changed; --restart prepares it anew"
                )
            size -= skipped

    def tell(self) -> int:
        return self._raw.tell()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()


def first_line(path: Path) -> bytes:
    """Return the first line of a file that may be compressed."""
    piece = next(TextFiles([path]).pieces(), None)
    if piece and piece.bad:
        raise ValueError(f"{path}, line 1: {piece.bad}")
    line: bytes = piece.data.partition(b"\n")[0] if piece else b""
    return line.rstrip(b"\r")


class TextSource(Source):
    """Files of lines. Subclasses say what the columns are, and make samples of them."""

    separator = ","
    quotes = False  # whether fields may be quoted
    header: bytes | None = None  # the first line of every file
    width: int  # columns of every line
    places: Mapping[str, int]  # of the columns that are used

    def __init__(self, paths: Sequence[Path], *, piece_bytes: int = PIECE_BYTES) -> None:
        self._files = TextFiles(paths, header=self.header, piece_bytes=piece_bytes)
        self.paths = self._files.paths
        self.first_line = self.header_lines = 0 if self.header is None else 1

    def pieces(self, start: Place | None = None) -> Iterator[Piece]:
        return self._files.pieces(start)

    def parse(self, piece: Piece) -> Samples:
        rows = read_rows(
            piece.data,
            self.places,
            separator=self.separator,
            width=self.width,
            quotes=self.quotes,
            skipped=0 if piece.place.file_line or piece.bad else self.header_lines,
        )
        samples = self.samples(rows)
        if piece.bad:
            return replace(samples, bad=BadLines(1, (BadLine(0, piece.bad),)))
        return samples

    @abstractmethod
    def samples(self, rows: Rows) -> Samples:
        """Return the samples of some lines."""
