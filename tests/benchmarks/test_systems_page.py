"""The tables of docs/systems.md come from results, and nothing else on the page changes."""

from __future__ import annotations

from typing import Any

ENVIRONMENT = dict.fromkeys(("gpu", "driver", "cuda", "torch", "triton", "python", "hotrow"))


def line(run: str, system: str, **more: Any) -> dict[str, Any]:
    return {
        "run": run, "system": system, "command": f"python {run}.py", "commit": "abc",
        "date": "2026-11-15", "environment": {**ENVIRONMENT, "cores": 2}, **more,
    }  # fmt: skip


def timed(run: str, system: str, ms: float, **facts: Any) -> dict[str, Any]:
    step_ms = {"p20": ms, "p50": ms, "p80": ms}
    return line(
        run, f"hotrow-{system}", setting={"batch": 1000}, step_ms=step_ms, facts=facts
    )  # fmt: skip


def test_tables_replace_what_is_between_their_marks(load: Any) -> None:
    script = load("systems_page")
    page = "before\n<!-- table: targets -->\nold\n<!-- end -->\nafter\n"
    found = script.filled(page, {})
    assert found.startswith("before\n<!-- table: targets -->\n| shape |")
    assert found.endswith("<!-- end -->\nafter\n")
    assert "| terabyte | hotline | hybrid | 2.2 | not measured yet | - |" in found
    assert script.filled(found, {}) == found
    lines = [
        timed("terabyte", "hybrid", 4.0),
        timed("terabyte", "all-fast", 1.0),
        timed("terabyte", "hotline", 1.6),
    ]
    found = script.filled(found, {"published": lines})
    assert "| terabyte | hotline | hybrid | 2.2 | 2.50 | 4.00 |" in found
    assert "| kaggle | hotline | hybrid | 2.2 | not measured yet | - |" in found
    assert found.count("- `python terabyte.py`") == 1


def test_scratchpipe_stands_beside_the_rows_that_cross(load: Any) -> None:
    script = load("systems_page")
    lines = [
        timed("high-10", "static-hybrid", 9.0, bound_ms=None),
        timed("high-10", "scratchpipe", 3.0, bound_ms=1.5),
        timed("high", "all-fast", 1.0, bound_ms=None),
    ]
    found = script.scratchpipe({"scratchpipe": lines})
    assert "| high-10 | 9 (9-9) | 3.00 | - | 9.00 | 6.00 |" in found


def test_a_failed_strategy_and_a_distance_are_told(load: Any) -> None:
    script = load("systems_page")
    setting = {"steps": 10, "batch": 64, "rows_bytes": 2**20, "budget": "10%"}
    ran = {
        "outcome": "finished", "message": "", "hit_rate": 0.5, "rows_per_sample": 2.0,
        "samples": 640, "auc": 0.7, "log_loss": 0.5,
    }  # fmt: skip
    rounded = {
        "contract": "exact up to rounding", "equal": "no", "equal_note": "losses differ by 1e-3",
    }  # fmt: skip
    failed = {**ran, "contract": "exact", "outcome": "failed", "message": "x", "equal_note": ""}
    lines = [
        line("criteo", "hotline", setting=setting, facts={**ran, **rounded}),
        line("criteo", "lru", setting=setting, facts=failed),
    ]
    found = script.real("criteo")({"real": lines})
    assert "| hotline | exact up to rounding | 50.0% | 2.00 | 640 | 0.7000 | 0.5000 | no |" in found
    assert "- hotline: losses differ by 1e-3.\n" in found
    assert "| lru | exact | - | - | - | - | - | failed: x |" in found


def test_the_page_in_the_repository_is_of_the_results_beside_it(load: Any) -> None:
    script = load("systems_page")
    kept = script.PAGE.read_text()
    assert kept == script.filled(kept, script.read(script.HERE / "results"))
    assert {name for _, name, _ in script._PLACE.findall(kept)} == script.TABLES.keys()
