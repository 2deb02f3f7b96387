"""What TensorBoard shows of a run is what its records say, and nobody waits for it."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from test_arriving import Device
from typer.testing import CliRunner

from hotrow.cli import make_app
from hotrow.run.board import TensorBoard
from hotrow.run.config import load
from hotrow.run.files import read_run, read_steps
from hotrow.run.tally import STEPS_BEHIND
from hotrow.training.trainer import Trainer

SMALL = (
    "run.tensorboard=true",
    "data.rows=[400, 60, 5]",
    "data.batch_size=16",
    "data.samples=160",
    "data.eval_batches=4",
    "model.embedding_dim=4",
    "embedding.budget=60%",
    "training.eval_every=4",
    "training.check_equality=false",
)


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(*settings: str) -> Any:
    words = [word for each in (*SMALL, *settings) for word in ("--set", each)]
    return CliRunner().invoke(make_app(), ["train", *words])


def shown(folder: Path) -> dict[str, dict[int, float]]:
    """By tag and step."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {
        tag: {each.step: each.value for each in found.Scalars(tag)}
        for tag in found.Tags()["scalars"]
    }


def test_scalars_are_those_of_the_records() -> None:
    result = train()
    assert result.exit_code == 0, result.output
    found, steps = shown(Path("runs/default")), list(read_steps("runs/default"))
    expected = {
        "training/loss": {step.step: step.loss for step in steps},
        "training/samples_per_second": {s.step: s.samples / s.seconds for s in steps},
        "rows/hit_rate": {step.step: step.hit_rate for step in steps},
        "rows/fetched": {step.step: step.fetched_rows for step in steps},
        "learning_rate/rows": {step.step: 0.05 for step in steps},
        "learning_rate/dense": {step.step: 0.02 for step in steps},
    }
    for each in read_run("runs/default").evaluations:
        expected.setdefault("evaluation/auc", {})[each.step] = each.auc
        expected.setdefault("evaluation/log_loss", {})[each.step] = each.log_loss
        entropies = expected.setdefault("evaluation/normalised_entropy", {})
        entropies[each.step] = each.normalised_entropy
    assert len(steps) == 10
    assert list(expected["evaluation/auc"]) == [4, 8, 10]
    assert found.keys() == expected.keys()
    for tag, values in expected.items():
        assert found[tag] == pytest.approx(values, rel=1e-6), tag  # events hold single precision


def test_learning_rates_are_those_that_steps_were_taken_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates: dict[str, dict[int, float]] = {"rows": {}, "dense": {}}
    step = Trainer._train

    def watched(self: Trainer[Any], batch: Any) -> Any:
        assert self.dense_optimizer is not None
        optimizers = {"rows": self._collections[0].optimizer, "dense": self.dense_optimizer}
        for name, optimizer in optimizers.items():
            rates[name][self.step + 1] = float(optimizer.param_groups[0]["lr"])
        return step(self, batch)

    monkeypatch.setattr(Trainer, "_train", watched)
    schedule = ("warmup_steps=3", "decay_start=5", "decay_steps=4")
    train(*(f"training.schedule.{each}" for each in schedule))
    found = shown(Path("runs/default"))
    for name, values in rates.items():
        assert len(set(values.values())) > 5
        assert found[f"learning_rate/{name}"] == pytest.approx(values, rel=1e-6)


def test_a_late_loss_is_not_waited_for(tmp_path: Path) -> None:
    device, config = Device(), load(overrides=SMALL)
    with TensorBoard(tmp_path, config) as board:
        for step in range(1, STEPS_BEHIND + 3):
            board.step(device.record(step))
        assert device.asked == [1, 2]
    assert shown(tmp_path)["training/loss"] == pytest.approx(
        {step: step / 10 for step in range(1, STEPS_BEHIND + 3)}
    )


def test_without_being_asked_nothing_is_written() -> None:
    train("run.tensorboard=false")
    assert not list(Path("runs/default").glob("events.*"))


def test_without_tensorboard_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    result = train()
    assert result.exit_code == 2
    assert "pip install tensorboard, or" in result.stderr
    assert not Path("runs").exists()


@pytest.mark.filterwarnings("default")
def test_a_board_on_a_full_disk_costs_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2]

    def full(self: Any, event: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(EventFileWriter, "add_event", full)
    result = train()
    assert result.exit_code == 0, result.output
    assert result.stderr.count("TensorBoard shows no more of this run: ") == 1
    assert "No space left on device. Training goes on" in result.stderr
    assert read_run("runs/default").outcome == "finished"
    assert Path("runs/default/model").is_dir()
