"""The files of a run are read back as they were written, and never replace an earlier run."""

import json
import math
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hotrow.cli._output import one_line_warnings
from hotrow.run.files import RunWriter, read_run, read_start, read_steps
from hotrow.run.tally import STEPS_BEHIND
from hotrow.support.records import StartRecord
from step_records import RUN, STEP, SUMMARY, Device, failing_step


def test_a_hit_is_a_lookup_without_a_fetch() -> None:
    assert STEP.hit_rate == 0.75
    assert replace(STEP, lookups=0, fetched_rows=0).hit_rate == 1.0


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    undecided = replace(RUN, summary=replace(SUMMARY, equal_to_all_fast=None))
    with RunWriter(tmp_path, name="first") as run:
        with pytest.raises(ValueError, match=r"has no run\.json"):
            read_run(run.folder)
        run.step(STEP)
        assert list(read_steps(run.folder)) == [STEP]
        run.step(replace(STEP, step=2))
        for record in (RUN, undecided):
            run.finish(record)
            assert read_run(tmp_path / "first") == record
    assert list(read_steps(tmp_path / "first")) == [STEP, replace(STEP, step=2)]
    assert sorted(path.name for path in run.folder.iterdir()) == ["run.json", "steps.jsonl"]


def test_the_start_of_a_run_is_written_and_replaced_when_it_is_resumed(tmp_path: Path) -> None:
    start = StartRecord(RUN.started, RUN.settings, RUN.environment, RUN.memory)
    with RunWriter(tmp_path, name="live") as run:
        assert read_start(run.folder) is None  # as in folders of earlier versions
        run.start(start)
        assert read_start(run.folder) == start
    with RunWriter.going_on(run.folder, after=0) as run:
        run.start(replace(start, memory={"slots": 2048}))
    assert read_start(run.folder) == replace(start, memory={"slots": 2048})


def test_an_earlier_run_is_never_overwritten(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        with RunWriter(tmp_path, name="again") as run:
            names.append(run.name)
    assert names == ["again", "again-2", "again-3"]


def test_nan_is_written_as_null(tmp_path: Path) -> None:
    with RunWriter(tmp_path, name="nan") as run:
        run.step(replace(STEP, loss=math.nan))
        run.finish(replace(RUN, summary=replace(SUMMARY, auc=math.nan)))
    assert "NaN" not in (run.folder / "run.json").read_text()
    assert math.isnan(next(read_steps(run.folder)).loss)
    assert math.isnan(read_run(run.folder).summary.auc)


def test_keys_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    with RunWriter(tmp_path, name="newer") as run:
        path = run.finish(RUN)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weather": "fine"}))
    assert read_run(run.folder) == RUN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "not a run record of format 1"),
        ("[]", "not a run record"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Inside, no file grows beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 1000])
def test_a_full_disk_loses_steps_and_raises_nothing(tmp_path: Path, size: int) -> None:
    """Half a line is removed; when there is space again, steps are written again."""
    warned: list[str] = []
    with one_line_warnings(warned.append), RunWriter(tmp_path, name="full") as run:
        warnings.simplefilter("default")
        with limited_files(size):
            for step in range(1, 9):
                run.step(replace(STEP, step=step))
        run.step(replace(STEP, step=9))
    steps = [record.step for record in read_steps(run.folder)]
    assert steps == [*range(1, len(steps)), 9]
    assert (len(steps) > 1) == (size > 0)
    first, last = warned
    assert f"step {len(steps)} was not recorded in {run.folder / 'steps.jsonl'}: " in first
    assert last.endswith(f"lacks {9 - len(steps)} steps")


def test_late_steps_are_written_in_order_and_all_at_the_end(tmp_path: Path) -> None:
    device = Device()
    with RunWriter(tmp_path, name="late") as run:
        for step in range(1, STEPS_BEHIND + 3):
            run.step(device.record(step))
        assert [record.step for record in read_steps(run.folder)] == [1, 2]
    records = list(read_steps(run.folder))
    assert [record.step for record in records] == list(range(1, STEPS_BEHIND + 3))
    assert [record.loss for record in records] == [record.step / 10 for record in records]


def test_a_device_that_fails_hides_no_earlier_error(tmp_path: Path) -> None:
    def run(error: BaseException | None) -> None:
        with RunWriter(tmp_path, name="failed") as writer:
            writer.step(failing_step(1))
            if error is not None:
                raise error

    with pytest.raises(KeyError, match="the first error"):
        run(KeyError("the first error"))
    with pytest.raises(RuntimeError, match="the device does not answer"):
        run(None)
