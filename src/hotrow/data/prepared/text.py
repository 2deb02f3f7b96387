"""Text files, plain, .gz or .zst: pieces of whole lines, and their columns, which Arrow reads."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

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
        """Yield whole lines; what follows the last line end is kept for the next piece."""
        path, rest = self.paths[place.file], b""
        with _Stream(path) as stream:
            stream.skip(place.offset)
            while text := rest + (more := stream.read(self._piece_bytes - len(rest))):
                cut, bad = text.rfind(b"\n") + 1, ""
                has_end = cut > 0
                if cut or len(text) < self._piece_bytes:
                    cut = cut if cut and more else len(text)  # the last line may lack its end
                    text, rest = text[:cut], text[cut:]
                    size, lines = len(text), _count_lines(text)
                else:
                    bad = f"longer than {self._piece_bytes:,} bytes, the most that is read"
                    size, rest, has_end = self._pass_by(stream, len(text))
                    lines = 1
                if not place.offset:
                    if not has_end:
                        self._check_line(text, place)
                    text = text.removeprefix(_MARK)
                    self._check_header(path, text, bad)
                after = Place(
                    place.file, place.offset + size, place.file_line + lines, place.line + lines
                )
                yield Piece(place, after, b"" if bad else text, stream.tell(), bad)
                place = after

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

    def _check_header(self, path: Path, text: bytes, bad: str) -> None:
        if self._header is None:
            return
        if bad:
            raise ValueError(f"{path}, line 1: {bad}")
        first = text.partition(b"\n")[0]
        if first.rstrip(b"\r") != self._header:
            raise ValueError(
                f"{path} begins with {first[:80].decode(errors='replace')!r}; expected is the "
                f"header {self._header.decode()!r}"
            )


def _count_lines(text: bytes) -> int:
    """Count lines, of which the last may lack its end; bytes.count takes four times as long if
    lines are short."""
    ends = np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    return int(ends) + (bool(text) and not text.endswith(b"\n"))


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
    for _ in range(skipped):
        text = text[text.find(b"\n") + 1 or len(text) :]
    num_lines, reasons = _count_lines(text), dict[int, str]()
    if is_odd := _is_odd(text, quotes):
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
        return Rows({name: pa.array([], pa.string()) for name in columns}, np.arange(0))
    names = [str(place) for place in range(width)]
    if text.startswith(_MARK):
        text = _MARK + text  # Arrow drops the first one
    table = arrow_csv.read_csv(
        pa.BufferReader(text),
        arrow_csv.ReadOptions(use_threads=False, column_names=names, block_size=len(text) + 1),
        arrow_csv.ParseOptions(
            delimiter=separator,
            quote_char='"' if is_odd else False,
            newlines_in_values=is_odd,
            ignore_empty_lines=False,
            invalid_row_handler=skip,
        ),
        arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
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
    """Return whether Arrow would read lines differently: one is empty, or there are quotes, or
    carriage returns within lines. Arrow cannot report bad lines that are not UTF-8."""
    if (quotes and b'"' in text) or text.startswith((b"\n", b"\r\n")) or b"\n\n" in text:
        return True
    returns = text.count(b"\r")
    if returns and (b"\n\r\n" in text or returns != text.count(b"\r\n") + text.endswith(b"\r")):
        return True
    try:
        return not (text.isascii() or text.decode())
    except UnicodeDecodeError:
        return True


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
        self._raw = path.open("rb")
        self._text: Any = pa.CompressedInputStream(self._raw, kind) if kind else self._raw

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


class TextSource(TextFiles, Source):
    """Files of lines. Subclasses say what the columns are, and make samples of them."""

    separator = ","
    quotes = False  # whether fields may be quoted
    header: bytes | None = None  # the first line of every file
    width: int  # columns of every line
    places: Mapping[str, int]  # of the columns that are used

    def __init__(self, paths: Sequence[Path], *, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__(paths, header=self.header, piece_bytes=piece_bytes)
        self.first_line = self.header_lines = 0 if self.header is None else 1

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
