"""The page of results has a section for each suite, from what the suites write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ENVIRONMENT = {
    "gpu": None,
    "driver": None,
    "cuda": None,
    "torch": "2.13",
    "triton": "3.7",
    "python": "3.12",
    "cores": 2,
    "hotrow": "0.1.0",
}


def write(folder: Path, suite: str, *lines: dict) -> None:
    shared = {"environment": ENVIRONMENT, "commit": "abc", "date": "2026-11-15T00:00:00+00:00"}
    text = "".join(json.dumps({**shared, "system": "x", **line}) + "\n" for line in lines)
    (folder / f"{suite}.jsonl").write_text(text)


def compared(run: str, system: str, ms: float, **facts: float) -> dict:
    return {
        "run": run,
        "system": system,
        "setting": {
            "name": run, "budget": 0.1, "budget_bytes": 1, "rows": 10, "total_bytes": 2600,
        },
        "step_ms": {"p20": ms, "p50": ms, "p80": ms},
        "samples_per_second": 1e6 / ms,
        "hbm_bytes": {"tables": 2**30},
        "facts": facts,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    both = {"value": 50.0, "unit": "M rows/s", "facts": {"by_blocks": {"2": 20.0, "16": 50.0}}}
    ours = {"value": 48.0, "unit": "M rows/s", "facts": {"of_ceiling": 0.96}}
    write(
        tmp_path,
        "ceilings",
        {"run": "zero-copy both, rows of 256 bytes", **both},
        {"run": "hotrow fill, rows of 256 bytes", **ours},
    )
    moved = {"fetched_rows_per_step": 10_000, "evicted_rows_per_step": 10_000, "hit_rate": 0.96}
    write(
        tmp_path,
        "terabyte",
        compared("target", "hotrow-all-fast", 0.5),
        compared("target", "fbgemm-cached", 2.0),
        compared("target", "hotrow-lookahead", 0.8, **moved),
        compared("budget-2", "hotrow-lookahead", 1.0, **moved),
    )
    write(
        tmp_path,
        "belady",
        *(
            {
                "run": "target", "system": system, "slots": 100, "depth": depth,
                "useful_depth": 12.5, "missing_rows_per_batch": 8 * over, "over_belady": over,
            }
            for system, depth, over in (
                ("lru", None, 1.15), ("belady", None, 1.0), ("lookahead-400", 400, 1.0),
                ("lookahead-50", 50, 1.06),
            )
        ),
    )  # fmt: skip
    shared = {"slots": 100, "useful_depth": 12.5, "missing_rows_per_batch": 8.0}
    write(
        tmp_path,
        "bound",
        {"run": "globo-2", "system": "belady", "slots": 9, "largest_batch": 12,
         "missing_rows_per_batch": None},
        *(
            {"run": "globo-5", "system": system, "over_belady": over, **shared}
            for system, over in (("belady", 1.0), ("lookahead-50", 1.0625), ("lru", 1.5))
        ),
    )  # fmt: skip
    return tmp_path


def test_look_ahead_on_logs_has_a_line_for_each_number_of_slots(load, folder) -> None:
    render = load("render")
    lines = render.page(render.read(folder)).splitlines()
    fits = next(line for line in lines if line.startswith("| globo-5 "))
    assert fits == "| globo-5 | 100 | 12 | 8 | - | 1.062 | - | - | 1.500 |"
    assert any(line.startswith("| globo-2 | 9 | - | a batch of 12 rows does not") for line in lines)


def test_floors_and_shares_stand_beside_the_figures(load, folder) -> None:
    render = load("render")
    page = render.page(render.read(folder))
    assert "| hotrow fill, rows of 256 bytes | 48 M rows/s | - | 96% |" in page
    assert "2: 20, 16: 50" in page
    row = next(line for line in page.splitlines() if "0.8 (0.8-0.8)" in line)
    # Rows of 260 bytes count as those of 256: 20,000 of them at 50 M per second take 0.4 ms.
    assert "| 0.62 | 1.00 GiB | 96.0% | 0.40 (step: 2.00 times) | " in row
    budget = next(line for line in page.splitlines() if line.startswith("| budget-2 "))
    assert "| 0.50 |" in budget  # of the target's all-fast: the same tables and batches
    assert "No GPU, torch 2.13" in page


def test_look_ahead_stands_in_the_order_of_its_depth(load, folder) -> None:
    render = load("render")
    suites = render.read(folder)
    rows = [line.split(" | ") for line in render.belady(suites["belady"]).splitlines()]
    systems = [row[2] for row in rows if len(row) == 5][2:]
    assert systems == ["belady", "lookahead-50", "lookahead-400", "lru"]
    drawing = str(render.belady_figure(suites["belady"]))
    assert drawing.count("<circle") == 2
    assert "batches known ahead" in drawing


def test_the_command_writes_the_page_and_the_figure(load, folder, tmp_path, monkeypatch) -> None:
    out = tmp_path / "page" / "README.md"
    out.parent.mkdir()
    monkeypatch.setattr("sys.argv", ["render.py", "--results", str(folder), "--out", str(out)])
    load("render").main()
    assert "## Misses over Belady's bound" in out.read_text()
    assert (out.parent / "belady.svg").read_text().startswith("<svg")


def test_the_page_in_the_repository_is_of_the_results_beside_it(load) -> None:
    render = load("render")
    kept = render.HERE / "README.md"
    assert kept.read_text() == render.page(render.read(render.HERE / "results"))
