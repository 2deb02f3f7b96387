"""Benchmarks are scripts: their folder is put on the path, as Python does for a script."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a benchmark by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def run(
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """Runs a benchmark as a command and returns what it prints."""

    def run(name: str, *words: str | Path, main: Callable[[], object] | None = None) -> str:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *map(str, words)])
        threads, code = torch.get_num_threads(), 0
        try:
            (main or load(name).main)()
        except SystemExit as ended:
            code = ended.code
        finally:
            torch.set_num_threads(threads)
        output = capsys.readouterr().out
        assert not code, output
        return output

    return run
