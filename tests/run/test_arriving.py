"""Nobody waits for a device to learn a loss, and records stay in order."""

import json
import math
from pathlib import Path

import pytest
from test_files import STEP

from hotrow.cli._watch import RunLines, Screen, progress_facts
from hotrow.run.files import RunWriter, read_steps
from hotrow.run.tally import STEPS_BEHIND, PendingRecords, Tally
from hotrow.support.records import LateStepRecord, StepRecord


class Device:
    """Says which steps' losses were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def record(self, step: int) -> StepRecord:
        def late() -> float:
            self.asked.append(step)
            return step / 10

        return LateStepRecord(step, late, 32, 0.01, 100, 60, 25, 5, 1600, 320)  # type: ignore[arg-type]


def test_a_loss_that_is_there_is_handed_on_at_once() -> None:
    found: list[StepRecord] = []
    PendingRecords(found.append).add(STEP)
    assert found == [STEP]


def test_a_late_loss_is_read_some_steps_later() -> None:
    device, tally = Device(), Tally()
    for step in range(1, STEPS_BEHIND + 3):
        tally.add(device.record(step))
    assert device.asked == [1, 2]
    assert tally.steps == STEPS_BEHIND + 2
    assert tally.losses == [0.1, 0.2]
    assert tally.loss == 0.2
    tally.finish()
    assert device.asked == list(range(1, STEPS_BEHIND + 3))


def test_a_summary_knows_the_last_loss() -> None:
    device, tally = Device(), Tally()
    for step in range(1, 4):
        tally.add(device.record(step))
    found = tally.summary(fast_rows_share=1.0, equal_to_all_fast=None, chunked_batches=0)
    assert (found.steps, found.loss) == (3, 0.3)


def test_a_device_that_failed_does_not_take_the_summary_along() -> None:
    def fail() -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    tally = Tally()
    tally.add(Device().record(1))
    tally.finish()
    tally.add(LateStepRecord(2, fail, 32, 0.01, 100, 60, 25, 5, 1600, 320))  # type: ignore[arg-type]
    found = tally.summary(fast_rows_share=1.0, equal_to_all_fast=None, chunked_batches=0)
    assert (found.steps, found.loss) == (2, 0.1)


def test_showing_progress_asks_the_device_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    device, tally = Device(), Tally()
    for show in (Screen(), RunLines()):
        with show.progress("training", steps=3) as advance:
            tally.add(device.record(1))
            advance(tally)
    assert device.asked == []
    assert math.isnan(tally.loss)
    assert not any("loss" in each for each in progress_facts(tally))
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line)["loss"] is None


def test_steps_are_written_in_order_and_all_at_the_end(tmp_path: Path) -> None:
    device = Device()
    with RunWriter(tmp_path, name="late") as run:
        for step in range(1, STEPS_BEHIND + 3):
            run.step(device.record(step))
        assert [each.step for each in read_steps(run.folder)] == [1, 2]
    found = list(read_steps(run.folder))
    assert [each.step for each in found] == list(range(1, STEPS_BEHIND + 3))
    assert [each.loss for each in found] == [each.step / 10 for each in found]


def test_an_error_is_not_hidden_by_a_device_that_no_longer_answers(tmp_path: Path) -> None:
    def fail() -> float:
        raise RuntimeError("the device does not answer")

    def run() -> None:
        with RunWriter(tmp_path, name="failed") as writer:
            writer.step(LateStepRecord(1, fail, 32, 0.01, 100, 60, 25, 5, 1600, 320))  # type: ignore[arg-type]
            raise KeyError("the first error")

    with pytest.raises(KeyError, match="the first error"):
        run()


def test_a_device_that_fails_at_the_end_is_heard(tmp_path: Path) -> None:
    def fail() -> float:
        raise RuntimeError("the device does not answer")

    writer = RunWriter(tmp_path, name="failed")
    writer.step(LateStepRecord(1, fail, 32, 0.01, 100, 60, 25, 5, 1600, 320))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="does not answer"), writer:
        pass
