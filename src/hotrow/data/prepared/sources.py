"""Files that become samples, piece by piece, by the name of their kind."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hotrow.data.prepared.arrow import open_parquet, pyarrow
from hotrow.data.prepared.columns import Columns, Csv, Parquet, read_columns
from hotrow.data.prepared.job import Settings
from hotrow.data.prepared.layouts import LAYOUTS, Layout
from hotrow.data.prepared.pieces import Piece, Place, Source, file_by_file
from hotrow.data.prepared.rows import BadLine, BadLines, Rows, Samples
from hotrow.data.prepared.taobao import Taobao
from hotrow.data.prepared.text import PIECE_BYTES, TextFiles, first_line, read_rows

_PIECE_SAMPLES = 1 << 14


class TextSource(Source):
    """Files of lines in one layout."""

    def __init__(self, layout: Layout, paths: Sequence[Path], *, piece_bytes: int) -> None:
        self.name, self.schema, self.key_dtype = layout.name, layout.schema, layout.key_dtype
        self._layout, self.describes = layout, layout.describes
        self._files = TextFiles(paths, header=layout.header, piece_bytes=piece_bytes)
        self.paths = self._files.paths
        self.first_line = self.header_lines = 0 if layout.header is None else 1

    def pieces(self, start: Place | None = None) -> Iterator[Piece]:
        return self._files.pieces(start)

    def parse(self, piece: Piece) -> Samples:
        layout = self._layout
        rows = read_rows(
            piece.data,
            layout.places,
            separator=layout.separator,
            width=layout.width,
            quotes=layout.quotes,
            skipped=0 if piece.place.file_line or piece.bad else self.header_lines,
        )
        samples = layout.samples(rows)
        if piece.bad:
            return replace(samples, bad=BadLines(1, (BadLine(0, piece.bad),)))
        return samples


class ParquetSource(Source):
    """Parquet files, by row groups."""

    name = "parquet"
    key_dtype = "uint64"
    first_line, header_lines = 1, 0  # as in CSV files, so that both are split alike

    def __init__(self, columns: Columns, paths: Sequence[Path]) -> None:
        self.paths, self._columns = list(paths), columns.used
        self._layout = Parquet(columns, paths)
        self.schema, self.describes = self._layout.schema, self._layout.describes

    def pieces(self, start: Place | None = None) -> Iterator[Piece]:
        return file_by_file(len(self.paths), self._file, start or Place(line=self.first_line))

    def _file(self, place: Place) -> Iterator[Piece]:
        """Each piece is a part of one row group; `offset` counts row groups."""
        path = self.paths[place.file]
        with open_parquet(path) as file:
            size, total = path.stat().st_size, max(1, file.metadata.num_rows)
            at = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if at + rows <= place.file_line:
                    at += rows
                    continue
                for batch in self._batches(file, path, group):
                    first, at = at, at + len(batch)
                    if first < place.file_line:
                        continue  # before a stop
                    after = Place(place.file, group, at, place.line + len(batch))
                    yield Piece(place, after, batch, size * at // total)
                    place = after

    def _batches(self, file: Any, path: Path, group: int) -> Iterator[Any]:
        arrow = pyarrow()
        try:
            yield from file.iter_batches(
                batch_size=_PIECE_SAMPLES, row_groups=[group], columns=self._columns
            )
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}, row group {group}: cannot be read: {error}") from error

    def parse(self, piece: Piece) -> Samples:
        batch = piece.data
        columns = {name: batch.column(name) for name in self._columns}
        try:
            return self._layout.samples(Rows(columns, np.arange(len(batch))))
        except ValueError as error:
            raise ValueError(f"{self.paths[piece.place.file]}: {error}") from error


KINDS = ("criteo", "avazu", "taobao", "parquet", "csv")


def open_source(
    kind: str, files: list[Path], *, out: Path, columns: Path | None, settings: Settings
) -> Source:
    """Files of a kind, as samples."""
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KINDS)}"
        raise ValueError(f"unknown kind of files {kind!r}; {hint}")
    described = kind in ("parquet", "csv")
    if columns is not None and not described:
        raise ValueError(f"the columns of {kind} are known; --columns is for parquet and csv")
    if kind == "taobao":
        skip = settings.bad_rows == "skip"
        return Taobao(files, out, seed=settings.seed, skip_bad=skip)
    if not described:
        return TextSource(LAYOUTS[kind], files, piece_bytes=PIECE_BYTES)
    if columns is None:
        raise ValueError(
            f"{kind} needs --columns: a TOML file that says which column is the label, which are "
            "dense and which are categories"
        )
    found = read_columns(columns)
    if kind == "parquet":
        return ParquetSource(found, files)
    TextFiles(files)  # are they there, before the first line is read
    layout = Csv(found, files[0], first_line(files[0]))
    return TextSource(layout, files, piece_bytes=PIECE_BYTES)
