import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Faults, inject_faults


@pytest.fixture(scope="module", autouse=True)
def _idle_machine() -> Iterator[None]:
    """Commands warn of a busy machine, which must not decide what tests see; none is lost here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The current folder, empty but for run.toml, if the module has the text of one."""
    monkeypatch.chdir(tmp_path)
    if text := getattr(request.module, "RUN_TOML", None):
        (tmp_path / "run.toml").write_text(text)
    return tmp_path


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Faults of the runs of a test."""
    return inject_faults(monkeypatch)
