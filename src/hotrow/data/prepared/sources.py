"""The kinds of files that can be prepared, by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from hotrow.data.prepared.columns import Csv, ParquetSource, first_line, read_columns
from hotrow.data.prepared.layouts import LAYOUTS, Source, TextSource
from hotrow.data.prepared.settings import Settings
from hotrow.data.prepared.taobao import Taobao
from hotrow.data.prepared.text import PIECE_BYTES, TextFiles

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
