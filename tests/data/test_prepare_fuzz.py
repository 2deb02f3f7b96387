"""Logs and prepared folders of any bytes: read right, refused line by line, or a ValueError."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clicks import criteo_lines
from fuzzing import changed, damaged, fuzzed
from hotrow.data.prepared import Prepared
from hotrow.data.prepared.format import MANIFEST
from hotrow.data.prepared.pieces import Piece, Place
from hotrow.data.prepared.sources import Avazu, Criteo
from hotrow.data.prepared.text import TextSource
from preparing import SMALL_LOG, prepared, small_log

values = st.sampled_from(["", "-", "0", "1", "-1", "9" * 25, "1e9", "nan", " 1", "\r", '"', "\0"])
values |= st.text(max_size=12) | st.integers(-(2**70), 2**70).map(str)


def avazu_lines(count: int) -> list[list[str]]:
    return [
        [str(line), str(line % 2), f"141021{line % 24:02}", *(f"{line}c{c}" for c in range(21))]
        for line in range(count)
    ]


@fuzzed
@given(data=st.data(), kind=st.sampled_from(["criteo", "avazu"]), piece=st.integers(300, 5000))
def test_lines(data: st.DataObject, kind: str, piece: int, tmp_path: Path) -> None:
    layout = Criteo if kind == "criteo" else Avazu
    lines = criteo_lines(6) if kind == "criteo" else avazu_lines(6)
    for line in data.draw(st.lists(st.sampled_from(lines), max_size=2)):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(values)
    head = b"" if layout.header is None else layout.header + b"\n"
    text = head + "".join(layout.separator.join(line) + "\n" for line in lines).encode()
    if data.draw(st.booleans()):
        text = damaged(text, data)
    (tmp_path / "log").write_bytes(text)
    with suppress(ValueError):
        source = layout([tmp_path / "log"], piece_bytes=piece)
        for found in source.pieces():
            assert_as_line_by_line(source, found)


def assert_as_line_by_line(source: TextSource, piece: Piece) -> None:
    """Whatever else is in a piece, a line means what it means alone."""
    found = source.parse(piece)
    single = piece.data.removesuffix(b"\n").split(b"\n")
    skipped = source.header_lines if not piece.place.file_line else 0
    assert np.isfinite(found.dense).all()
    assert np.isin(found.label, (0, 1)).all()
    good = dict(zip(found.lines.tolist(), range(len(found.lines)), strict=True))
    for number, line in enumerate(single[skipped:], skipped):
        alone = source.parse(Piece(Place(file_line=1), Place(), line + b"\n", 0))
        assert len(alone.lines) == (number in good), line
        if len(alone.lines):
            at = good[number]
            assert alone.label[0] == found.label[at]
            assert np.array_equal(alone.dense[0], found.dense[at])
            assert all(alone.keys[name][0] == found.keys[name][at] for name in found.keys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    return prepared("csv", root / "out", small_log(root / "log.csv"), toml=SMALL_LOG).folder


@fuzzed
@given(data=st.data())
def test_prepared_folders(data: st.DataObject, folder: Path) -> None:
    path = folder / MANIFEST
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        text = json.dumps(changed(json.loads(whole), data)).encode()
    else:
        text = damaged(whole, data)
    try:
        path.write_bytes(text)
        with suppress(ValueError):
            found = Prepared(folder)
            found.verify()
    finally:
        path.write_bytes(whole)
