"""What watching a loader costs, tried on tiny batches."""

from __future__ import annotations

from typing import Any

import pytest


def test_checks_are_timed_and_can_be_left_out(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("watched")
    monkeypatch.setattr(script, "FEATURES", 2)
    sizes = {"batch": 4, "rows": 4000, "steps": 70, "rounds": 1, "depth": 1}
    options = [f"--{name}={size}" for name, size in sizes.items()]
    monkeypatch.setattr("sys.argv", ["watched.py", "--device=cpu", *options])
    script.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    inside = {(kind, checks): float(rest[-1].rstrip("%")) for kind, checks, *rest in lines}
    assert inside["watched", "on"] > inside["watched", "off"]
