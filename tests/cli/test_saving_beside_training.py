"""Checkpoints that are written while a run trains equal those that training waits for."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typer.testing import Result

from commands import SMALL, Faults, events, hotrow, settings
from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import saved_in
from hotrow.checkpoint.saving import being_saved
from hotrow.checkpoint.writing import Prepared
from hotrow.distributed.ranks import RankError
from hotrow.run.files import read_run
from hotrow.run.session import StopAfterStep

RUN_TOML = (
    SMALL.replace("160", "320").replace("[run]", "[run]\nsave = false")
    + "[checkpoint]\nevery_steps = 6\nkeep = 100\n"
)
CHECKPOINTS = Path("runs/small/checkpoints")
pytestmark = pytest.mark.usefixtures("folder")


def slow(path: Path) -> None:
    """The rows of a table take some steps."""
    if path.parent.name == "rows":
        time.sleep(0.03)


@pytest.fixture(autouse=True)
def _slow(faults: Faults) -> None:
    faults.at_open = slow


def train(*given: str) -> Result:
    return hotrow("train", "run.toml", "--json", *settings(*given))


def wait_for_the_thread() -> None:
    """Wait until the thread that an interrupted run has left behind has ended."""
    save = being_saved[CHECKPOINTS.resolve()]
    save.join()
    assert isinstance(save.error, InterruptedError)


def saved(run: str) -> dict[str, dict[str, bytes]]:
    """Return rows, dense weights and the dense optimizer of every checkpoint."""
    checkpoints = {}
    for folder in saved_in(Path("runs") / run / "checkpoints"):
        Checkpoint(folder).verify()
        files = [*(folder / "rows").iterdir(), folder / "dense.safetensors"]
        checkpoints[folder.name] = {path.name: path.read_bytes() for path in files}
    return checkpoints


@pytest.mark.filterwarnings("ignore:no threshold in")  # on so few samples
@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    "strategy", ["hotline", "fae", "lookahead", "static", "static-hybrid", "lookahead+slipstream"]
)
def test_every_system_saves_the_same(strategy: str) -> None:
    given = (f"embedding.strategy={strategy}", "checkpoint.full_every=2", "checkpoint.log=50%")
    if strategy in ("hotline", "fae"):
        given += ("embedding.budget=90%",)
    for name, background in (("beside", "true"), ("waits", "false")):
        result = train(*given, f"run.name={name}", f"checkpoint.background={background}")
        assert result.exit_code == 0, result.output
    assert saved("beside") == saved("waits")
    assert len(saved("beside")) >= 3


def test_a_wait_is_warned_of_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.run.saving._SECONDS_TOLD", 1e-6)
    result = train("checkpoint.log=1", "embedding.budget=30%", "checkpoint.every_steps=2")
    assert result.exit_code == 0, result.output
    lines = events(result)
    warnings = [line["message"] for line in lines if line["event"] == "warning"]
    full = "1 B for rows that change while it is written were full"
    assert any(full in text for text in warnings)
    assert any("training has waited" in text and "was due" in text for text in warnings)
    checkpoints = [line for line in lines if line["event"] == "checkpoint"]
    assert sum(line["waited"] for line in checkpoints) > 0
    assert all(0 < line["pause"] < line["seconds"] for line in checkpoints[:-1])
    saving = read_run("runs/small").saving
    assert saving["saved"] == len(checkpoints) == 10
    assert saving["waited_seconds"] > 0
    assert 0 < saving["pause_seconds"] < saving["seconds"]


@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_lost_ranks_are_no_mistake_and_the_newest_whole_checkpoint_is_named(
    is_whole: bool, background: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Prepared.write

    def written(self: Prepared, *given: Any) -> Path:
        if self.step != 12:
            return write(self, *given)
        if is_whole:
            write(self, *given)
        raise RankError("rank 0 of 2 lost the others")

    monkeypatch.setattr(Prepared, "write", written)
    result = train(f"checkpoint.background={background}")
    assert isinstance(result.exception, RankError)
    assert "mistake" not in result.output
    is_said = "step 12 was not saved: ranks were lost while it was written; " in result.output
    assert is_said == (background == "true" and not is_whole)
    step = 12 if is_whole else 6
    assert f"the checkpoint of step {step} is whole" in result.output
    assert Path("runs/small/checkpoints/latest").read_text().endswith(f"step-{step}")


def test_a_bug_in_the_thread_stops_the_run_and_says_so(faults: Faults) -> None:
    def broken(path: Path) -> None:
        if "step-12" in str(path):
            raise ZeroDivisionError("by zero")
        slow(path)

    faults.at_open = broken
    error = train().exception
    assert isinstance(error, RuntimeError)
    message = "step 12 was not saved, because of a mistake of hotrow's (ZeroDivisionError: by"
    assert message in str(error)
    assert "runs/small/checkpoints/00001-step-6 stays" in str(error)
    assert [path.name for path in saved_in(CHECKPOINTS)] == ["00001-step-6"]


def test_a_second_ctrl_c_does_not_wait_for_a_save(
    faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressed, heard, goes_on = threading.Event(), threading.Event(), threading.Event()
    ask = StopAfterStep._ask

    def hear(stop: StopAfterStep, number: int, frame: FrameType | None) -> None:
        heard.set()
        ask(stop, number, frame)

    def stuck(path: Path) -> None:
        if "step-12" in str(path) and not pressed.is_set():
            pressed.set()
            signal.raise_signal(signal.SIGINT)  # to stop after the step, and then at once
            assert heard.wait(20)  # two signals that the main thread has not seen are one
            os.kill(os.getpid(), signal.SIGINT)
            goes_on.wait(20)

    monkeypatch.setattr(StopAfterStep, "_ask", hear)
    faults.at_open = stuck
    result = train("checkpoint.log=100%", "data.samples=3200")
    assert result.exit_code == 130, result.output
    goes_on.set()
    wait_for_the_thread()
    assert sorted(path.name for path in CHECKPOINTS.iterdir()) == ["00001-step-6", "latest"]


def test_ctrl_c_while_a_save_begins_leaves_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    start, starts = threading.Thread.start, itertools.count(1)

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "hotrow-checkpoint" and next(starts) == 2:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    result = train("checkpoint.log=100%")
    assert result.exit_code == 130, result.output
    wait_for_the_thread()
    assert sorted(path.name for path in CHECKPOINTS.iterdir()) == ["00001-step-6", "latest"]
