import os

import pytest


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other programs do meanwhile is told to users, and must not decide what tests see."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
