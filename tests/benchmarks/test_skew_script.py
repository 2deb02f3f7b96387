"""The check of profiles against plain counting can pass, and can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clicks import criteo_lines, write

pa = pytest.importorskip("pyarrow")


@pytest.fixture
def script(load: Any) -> Any:
    return load("skew")


def write_clicks(path: Path) -> None:
    import pyarrow.parquet as pq

    draw = np.random.default_rng(0)
    seconds = np.sort(draw.integers(0, 4 * 86_400, 5000))
    articles = draw.geometric(0.01, 5000) + seconds // 86_400 * 30
    pq.write_table(pa.table({"timestamp": seconds, "article_id": articles}), path)


def test_real_logs_are_counted_alike(
    script: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    write(tmp_path / "train.txt", criteo_lines(400))
    write_clicks(tmp_path / "clicks.parquet")
    words = ["skew.py", "--criteo", str(tmp_path / "train.txt")]
    monkeypatch.setattr("sys.argv", [*words, "--globo", str(tmp_path / "clicks.parquet")])
    script.main()
    output = capsys.readouterr().out
    assert "accesses of the hottest 1 % and 10 %" in output
    assert "clicks on the hottest of the day before" in output


def test_a_difference_is_an_error(script: Any) -> None:
    with pytest.raises(SystemExit, match=r"shares should be \[0.5\]"):
        script.same("shares", [0.4], [0.5], within=1e-3)


def test_speed_is_told(script: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(script, "KAGGLE_ROWS", (1000, 50))
    monkeypatch.setattr("sys.argv", ["skew.py", "--speed", "--batches", "6", "--memory", "40KB"])
    script.main()
    output = capsys.readouterr().out
    assert "24,576 lookups in" in output
    assert "lru" in output
