"""Look-ahead beside the bound, on a few invented clicks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")


def test_every_depth_has_a_line(load: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    import pyarrow.parquet as pq

    script = load("bound")
    draw = np.random.default_rng(0)
    columns = {name: draw.integers(0, 4, 3000) for name in script.GLOBO[2:]}
    columns |= {"user_id": draw.geometric(0.004, 3000), "article_id": draw.geometric(0.02, 3000)}
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    monkeypatch.setitem(script.BATCH, "globo", 40)
    words = ["bound.py", "--globo", str(tmp_path / "clicks.parquet"), "--parts", "1", "20"]
    words += ["--results", str(tmp_path), "--depths", "2", "60"]
    monkeypatch.setattr("sys.argv", words)
    script.main()
    output = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output[2:]]
    assert "do not fit" in cells[0][3]
    names = ["belady", "belady, 2 batches held", "lookahead-2", "lookahead-60", "lru"]
    assert [cell[3] for cell in cells[1:]] == names
    over = [float(cell[5]) for cell in cells[1:]]
    assert over[0] == 1 <= over[1] <= over[3] <= over[2] < over[4]
    written = load("harness").read_results(tmp_path / "bound.jsonl")
    assert [line["run"] for line in written] == ["globo-1"] + ["globo-20"] * 5
    assert written[0]["missing_rows_per_batch"] is None
    assert [round(line["over_belady"], 3) for line in written[1:]] == over
