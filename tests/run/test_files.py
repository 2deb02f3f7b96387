"""What a run leaves on disk can be read back, and never replaces an earlier run."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from hotrow.run.files import RunWriter, environment, read_run, read_start, read_steps
from hotrow.support.records import EvalRecord, RunRecord, StartRecord, StepRecord, Summary

STEP = StepRecord(
    step=1,
    loss=0.5,
    samples=32,
    seconds=0.01,
    lookups=100,
    unique_rows=60,
    fetched_rows=25,
    evicted_rows=5,
    bytes_fetched=1600,
    bytes_evicted=320,
)
SUMMARY = Summary(
    steps=1,
    samples=32,
    seconds=0.01,
    samples_per_second=3200.0,
    loss=0.5,
    auc=0.7,
    log_loss=0.6,
    lookups=100,
    hit_rate=0.75,
    fast_rows_share=0.1,
    bytes_moved=1920,
    equal_to_all_fast=True,
)
RUN = RunRecord(
    name="first",
    started="2026-11-15T00:00:00+00:00",
    outcome="finished",
    settings={"run": {"name": "first"}},
    environment={"python": "3.12.0"},
    memory={"slots": 1024},
    summary=SUMMARY,
    evaluations=(EvalRecord(step=1, samples=32, auc=0.7, log_loss=0.6),),
)


def test_hit_rate_is_the_share_of_lookups_that_fetched_nothing() -> None:
    assert STEP.hit_rate == 0.75
    assert replace(STEP, lookups=0, fetched_rows=0).hit_rate == 1.0


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    with RunWriter(tmp_path, name="first") as run:
        run.step(STEP)
        run.step(replace(STEP, step=2))
        run.finish(RUN)
    assert read_run(tmp_path / "first") == RUN
    assert list(read_steps(tmp_path / "first")) == [STEP, replace(STEP, step=2)]


def test_steps_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    with RunWriter(tmp_path, name="live") as run:
        run.step(STEP)
        assert list(read_steps(run.folder)) == [STEP]


def test_what_a_run_began_with_is_known_from_the_start_and_when_it_goes_on(tmp_path: Path) -> None:
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


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    with RunWriter(tmp_path, name="killed") as run:
        run.step(STEP)
    with (run.folder / "steps.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert list(read_steps(run.folder)) == [STEP]


def test_nan_is_written_as_json_knows_it(tmp_path: Path) -> None:
    with RunWriter(tmp_path, name="nan") as run:
        run.step(replace(STEP, loss=math.nan))
        run.finish(replace(RUN, summary=replace(SUMMARY, auc=math.nan)))
    assert "NaN" not in (run.folder / "run.json").read_text()
    assert math.isnan(next(read_steps(run.folder)).loss)
    assert math.isnan(read_run(run.folder).summary.auc)


def test_not_compared_is_neither_equal_nor_different(tmp_path: Path) -> None:
    with RunWriter(tmp_path, name="open") as run:
        run.finish(replace(RUN, summary=replace(SUMMARY, equal_to_all_fast=None)))
    assert read_run(run.folder).summary.equal_to_all_fast is None


def test_keys_of_a_newer_version_are_left_out(tmp_path: Path) -> None:
    with RunWriter(tmp_path, name="newer") as run:
        path = run.finish(RUN)
    found = json.loads(path.read_text())
    found["weather"] = "fine"
    path.write_text(json.dumps(found))
    assert read_run(run.folder) == RUN


def test_the_record_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with RunWriter(tmp_path, name="whole") as run:
        run.finish(RUN)
    assert sorted(path.name for path in run.folder.iterdir()) == ["run.json", "steps.jsonl"]


def test_a_run_that_has_not_ended_is_named(tmp_path: Path) -> None:
    with (
        RunWriter(tmp_path, name="open") as run,
        pytest.raises(ValueError, match=r"has no run\.json"),
    ):
        read_run(run.folder)


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


def test_the_environment_names_versions_and_threads() -> None:
    found = environment(device="cpu", threads=2)
    assert found["threads"] == 2
    assert found["versions"]["torch"]
    assert found["versions"].keys() == {"hotrow", "torch", "numpy", "triton"}
