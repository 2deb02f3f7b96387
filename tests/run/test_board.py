"""TensorBoard shows what the records of a run say, and training does not wait for it."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from commands import SMALL_SETTINGS, refused, settings, succeeds
from hotrow.run.board import TensorBoard
from hotrow.run.config import load
from hotrow.run.files import read_run, read_steps
from hotrow.run.job import build
from hotrow.run.tally import STEPS_BEHIND
from hotrow.support.records import StepRecord
from step_records import Device

SMALL = (*SMALL_SETTINGS, "run.tensorboard=true")


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(folder: Path) -> dict[str, dict[int, float]]:
    """Return scalars by tag and step."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {scalar.step: scalar.value for scalar in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def test_scalars_are_those_of_the_records() -> None:
    succeeds("train", *settings(*SMALL))
    scalars, steps = shown(Path("runs/default")), list(read_steps("runs/default"))
    evaluations = read_run("runs/default").evaluations
    expected = {
        "training/loss": {step.step: step.loss for step in steps},
        "training/samples_per_second": {s.step: s.samples / s.seconds for s in steps},
        "rows/hit_rate": {step.step: step.hit_rate for step in steps},
        "rows/fetched": {step.step: step.fetched_rows for step in steps},
        "learning_rate/rows": {step.step: 0.05 for step in steps},
        "learning_rate/dense": {step.step: 0.02 for step in steps},
        "evaluation/auc": {e.step: e.auc for e in evaluations},
        "evaluation/log_loss": {e.step: e.log_loss for e in evaluations},
        "evaluation/normalised_entropy": {e.step: e.normalised_entropy for e in evaluations},
    }
    assert len(steps) == 10
    assert list(expected["evaluation/auc"]) == [4, 8, 10]
    assert scalars.keys() == expected.keys()
    for tag, values in expected.items():
        assert scalars[tag] == pytest.approx(values, rel=1e-6), tag  # events hold single precision


def test_learning_rates_are_those_that_steps_were_taken_with(tmp_path: Path) -> None:
    schedule = ("warmup_steps=3", "decay_start=5", "decay_steps=4")
    job = build(load(overrides=[*SMALL, *(f"training.schedule.{part}" for part in schedule)]))
    rates: dict[str, dict[int, float]] = {"rows": {}, "dense": {}}
    with TensorBoard(tmp_path, job.config) as board:
        for record in job.train():
            board.step(record)
            for name, optimizer in zip(rates, job.optimizers, strict=True):
                rates[name][record.step + 1] = float(optimizer.param_groups[0]["lr"])  # of the next
    scalars = shown(tmp_path)
    for name, values in rates.items():
        del values[11]
        assert len(set(values.values())) > 4
        given = {step: rate for step, rate in scalars[f"learning_rate/{name}"].items() if step > 1}
        assert given == pytest.approx(values, rel=1e-6)


def test_a_late_loss_is_not_waited_for(tmp_path: Path) -> None:
    device, config = Device(), load(overrides=SMALL)
    with TensorBoard(tmp_path, config) as board:
        for step in range(1, STEPS_BEHIND + 3):
            board.step(device.record(step))
        assert device.asked == [1, 2]
    assert shown(tmp_path)["training/loss"] == pytest.approx(
        {step: step / 10 for step in range(1, STEPS_BEHIND + 3)}
    )


def test_bytes_sent_to_other_ranks_are_shown(tmp_path: Path) -> None:
    record = StepRecord(1, 0.5, 8, 0.1, 8, 8, 0, 0, 0, 0, bytes_of_rows=64, rank_seconds=0.025)
    with TensorBoard(tmp_path, load(overrides=SMALL)) as board:
        board.step(record)
    sent = {tag: values for tag, values in shown(tmp_path).items() if tag.startswith("sent/")}
    assert sent.pop("sent/waited") == pytest.approx({1: 0.25})
    assert sent == {"sent/ids": {1: 0}, "sent/rows": {1: 64}, "sent/gradients": {1: 0}}


def test_event_files_are_written_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    assert "pip install tensorboard, or" in refused("train", *settings(*SMALL))
    assert not Path("runs").exists()
    succeeds("train", *settings(*SMALL_SETTINGS))
    assert not list(Path("runs/default").glob("events.*"))


@pytest.mark.filterwarnings("default")
def test_a_full_disk_ends_event_files_and_not_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2]

    def full(self: Any, event: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(EventFileWriter, "add_event", full)
    result = succeeds("train", *settings(*SMALL))
    assert result.stderr.count("TensorBoard shows no more of this run: ") == 1
    assert "No space left on device. Training goes on" in result.stderr
    assert read_run("runs/default").outcome == "finished"
    assert Path("runs/default/model").is_dir()
