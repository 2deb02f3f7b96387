"""What tests of data share."""

import pytest


@pytest.fixture(autouse=True)
def _no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests write many small files, and the machine stays on."""
    monkeypatch.setattr("os.fsync", lambda handle: None)
