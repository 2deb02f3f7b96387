"""Drawn clicks beside counts, tried on a few invented ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script(load: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = load("counted")
    monkeypatch.setattr(found, "BATCH", 1000)
    return found


def test_rows_come_as_often_as_they_were_counted(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    lines = ["a,x,60", "a,y,40", "b,p,50", "b,q,30"]
    path.write_text("Field,Value,Total\n" + "\n".join(lines) + "\n")
    counts = script.read_counts(path)
    assert {name: each.tolist() for name, each in counts.items()} == {"a": [60, 40], "b": [50, 30]}
    whole, part = script.compare(counts, {"a": 3, "b": 200}, batches=20)
    assert (whole.counted, part.counted) == (2, 2)
    assert whole.share == whole.drawn_share == 1.0
    assert part.share == 0.8  # the other 198 rows have the rest of 100
    assert part.drawn_share == pytest.approx(0.8, abs=0.01)
    assert part.top_share == pytest.approx(0.8)
    assert part.drawn_top_share == pytest.approx(0.8, abs=0.01)
    assert whole.drawn_top_share == pytest.approx(0.6, abs=0.02)
    assert part.chi_squared < 6


def test_other_files_are_refused(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="has no columns Field and Total"):
        script.read_counts(path)
