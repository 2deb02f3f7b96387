"""A run whose checkpoints are written while it trains saves what one that waits for them saves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from commands import SMALL, hotrow, settings
from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import saved_in
from hotrow.run.files import read_run
from hotrow.support.files import Disk

RUN_TOML = (
    SMALL.replace("160", "320").replace("[run]", "[run]\nsave = false")
    + "[checkpoint]\nevery_steps = 6\nkeep = 100\n"
)


class Slow(Disk):
    """A table's rows take some steps."""

    def open(self, path: Path) -> Any:
        if path.parent.name == "rows":
            time.sleep(0.03)
        return super().open(path)


@pytest.fixture(autouse=True)
def _slow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.checkpoint.saving.Disk", Slow)


def train(*given: str) -> Result:
    return hotrow("train", "run.toml", "--json", *settings(*given))


def saved(run: str) -> dict[str, dict[str, bytes]]:
    """Rows, dense weights and the dense optimizer of every checkpoint."""
    found = {}
    for folder in saved_in(Path("runs") / run / "checkpoints"):
        Checkpoint(folder).verify()
        files = [*(folder / "rows").iterdir(), folder / "dense.safetensors"]
        found[folder.name] = {path.name: path.read_bytes() for path in files}
    return found


@pytest.mark.filterwarnings("ignore:no threshold in")  # on so few samples
@pytest.mark.parametrize(
    "strategy",
    [
        "hotline",
        "fae",
        *[
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("lookahead", "static", "static-hybrid", "lookahead+slipstream")
        ],
    ],
)
def test_every_system_saves_the_same(strategy: str) -> None:
    settings = (f"embedding.strategy={strategy}", "checkpoint.full_every=2", "checkpoint.log=50%")
    if strategy in ("hotline", "fae"):
        settings += ("embedding.budget=90%",)
    for name, background in (("beside", "true"), ("waits", "false")):
        result = train(*settings, f"run.name={name}", f"checkpoint.background={background}")
        assert result.exit_code == 0, result.output
    assert saved("beside") == saved("waits")
    assert len(saved("beside")) >= 3


def test_a_wait_is_told_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.run.saving._SECONDS_TOLD", 1e-6)
    result = train("checkpoint.log=1", "embedding.budget=30%", "checkpoint.every_steps=2")
    assert result.exit_code == 0, result.output
    events = [json.loads(line) for line in result.stdout.splitlines()]
    told = [each["message"] for each in events if each["event"] == "warning"]
    assert any("1 B for rows that change while it is written were full" in each for each in told)
    assert any("training has waited" in each and "was due" in each for each in told)
    checkpoints = [each for each in events if each["event"] == "checkpoint"]
    assert sum(each["waited"] for each in checkpoints) > 0
    assert all(0 < each["pause"] < each["seconds"] for each in checkpoints[:-1])
    saving = read_run("runs/small").saving
    assert saving["saved"] == len(checkpoints) == 10
    assert saving["waited_seconds"] > 0
    assert 0 < saving["pause_seconds"] < saving["seconds"]


def test_a_mistake_in_the_thread_stops_the_run_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(Slow):
        def open(self, path: Path) -> Any:
            if "step-12" in str(path):
                raise ZeroDivisionError("by nobody")
            return super().open(path)

    monkeypatch.setattr("hotrow.checkpoint.saving.Disk", Broken)
    result = train()
    assert isinstance(result.exception, RuntimeError)
    assert "step 12 was not saved, because of a mistake of hotrow's (ZeroDivisionError: by" in str(
        result.exception
    )
    assert "runs/small/checkpoints/00001-step-6 stays" in str(result.exception)
    assert [path.name for path in saved_in(Path("runs/small/checkpoints"))] == ["00001-step-6"]


def test_a_second_ctrl_c_does_not_wait_for_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()

    class Stuck(Disk):
        def open(self, path: Path) -> Any:
            if "step-12" in str(path) and not goes_on.is_set():
                signal.raise_signal(signal.SIGINT)  # to stop after the step, and then at once
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGINT)
                goes_on.wait(20)
            return super().open(path)

    monkeypatch.setattr("hotrow.checkpoint.saving.Disk", Stuck)
    begun = time.monotonic()
    result = train("checkpoint.log=100%", "data.samples=3200")
    assert result.exit_code == 130, result.output
    assert time.monotonic() - begun < 15
    goes_on.set()
    root = Path("runs/small/checkpoints")
    for _ in range(200):
        if not list(root.glob("*.partial")):
            break
        time.sleep(0.02)
    assert sorted(path.name for path in root.iterdir()) == ["00001-step-6", "latest"]
