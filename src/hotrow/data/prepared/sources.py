"""The kinds of files that can be prepared, by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from hotrow.data.prepared.layouts import LAYOUTS, Source, TextSource
from hotrow.data.prepared.work import PIECE_BYTES, Settings

KINDS = ("criteo", "avazu", "taobao", "parquet", "csv")


def open_source(
    kind: str, files: list[Path], *, columns: Path | None, settings: Settings
) -> tuple[Source, Settings]:
    """The source, and the settings as its kind takes them."""
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KINDS)}"
        raise ValueError(f"unknown kind of files {kind!r}; {hint}")
    if columns is not None and kind not in ("parquet", "csv"):
        raise ValueError(f"the columns of {kind} are known; --columns is for parquet and csv")
    return TextSource(LAYOUTS[kind], files, piece_bytes=PIECE_BYTES), settings
