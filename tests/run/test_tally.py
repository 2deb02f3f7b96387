"""Losses are read when they are there; the limit of a run follows from measured times."""

import json
import math
from dataclasses import replace

import pytest

from hotrow.cli._watch import RunLines, Screen, progress_facts
from hotrow.run.tally import STEPS_BEHIND, Tally, limit_of
from hotrow.support.records import Counts, Times
from step_records import STEP, Device, failing_step


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


def test_a_summary_has_the_last_loss_also_if_the_device_fails() -> None:
    device, tally = Device(), Tally()
    summaries = []
    for record in (device.record(1), device.record(2), failing_step(3)):
        tally.add(record)
        summaries.append(tally.summary())
    assert [(summary.steps, summary.loss) for summary in summaries] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.2),
    ]


def test_progress_does_not_wait_for_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    device, tally = Device(), Tally()
    for show in (Screen(), RunLines()):
        with show.progress("training", steps=3) as advance:
            tally.add(device.record(1))
            advance(tally)
    assert device.asked == []
    assert math.isnan(tally.loss)
    assert not any("loss" in fact for fact in progress_facts(tally))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["loss"] is None


@pytest.mark.parametrize(("ranks", "was_shared"), [(1, False), (1, True), (2, False)])
def test_steps_of_other_numbers_of_ranks_do_not_say_what_limits_a_run(
    ranks: int, was_shared: bool
) -> None:
    tally, totals = Tally(), Counts(lookups=9_000, fetched_rows=900, bytes_sent=70)
    for step in range(1, 41):
        tally.add(replace(STEP, step=step, rank_seconds=0.009))
    tally.go_on(totals if was_shared else None, is_shared=ranks > 1)
    assert tally.earlier == (totals if was_shared else Counts(4_000, 1_000, 40 * 30, 40 * 1_920))
    limit = limit_of(tally.times(), device="cpu")
    if ranks == 1 and not was_shared:
        assert limit is not None  # as before
        assert limit.part == "ranks"
        return
    assert limit is None
    for step in range(41, 81):
        tally.add(replace(STEP, step=step, read_seconds=0.006))
    found = tally.times()
    assert found is not None
    assert (found.steps, found.rank_seconds) == (24, 0)
    assert found.seconds == pytest.approx(24 * STEP.seconds)
    limit = limit_of(found, device="cpu")
    assert limit is not None
    assert limit.part == "loader"
    assert tally.lookups == tally.earlier.lookups + 4_000


def times(
    read: float,
    plan: float,
    rows: float,
    waited: float = math.nan,
    chunks: float = 0.0,
    ranks: float = 0.0,
) -> Times:
    """Return the times of 100 steps that take a second together."""
    return Times(100, 1.0, read, plan, rows, waited, chunks, ranks)


@pytest.mark.parametrize(
    ("device", "measured", "part", "share"),
    [
        ("cpu", times(0.5, 0.2, 0.1), "loader", 0.5),
        ("cpu", times(0.1, 0.6, 0.1), "planning", 0.6),
        ("cpu", times(0.1, 0.2, 0.5), "link", 0.5),
        ("cpu", times(0.1, 0.2, 0.1), "dense part", 0.6),
        ("cpu", times(0.1, 0.1, 0.1, ranks=0.4), "ranks", 0.4),
        ("cpu", times(0.1, 0.1, 0.1, ranks=0.2), "dense part", 0.5),
        ("cuda:0", times(0.1, 0.1, 0.1, ranks=0.6), "ranks", 0.6),
        ("cuda:0", times(0.1, 0.1, 0.1, 0.02, ranks=0.4), "dense part", 0.98),
        ("cuda:0", times(0.5, 0.2, 0.1, 0.9), "loader", 0.5),  # rows are late like their batch
        ("cuda:0", times(0.1, 0.6, 0.1, 0.1), "planning", 0.6),
        ("cuda:0", times(0.1, 0.2, 0.6, 0.3), "link", 0.3),  # launches of moves do not count
        ("cuda:0", times(0.1, 0.2, 0.1, 0.02), "dense part", 0.98),
    ],
)
def test_the_largest_part_limits(device: str, measured: Times, part: str, share: float) -> None:
    limit = limit_of(measured, device=device)
    assert limit is not None
    assert (limit.part, limit.share) == (part, pytest.approx(share))
    assert limit.is_to_be_told == (part != "dense part")
    assert limit.message.startswith(f"limited by {limit.name}: ")
    is_said = measured.rank_seconds > 0 and (device == "cpu" or part == "ranks")
    assert (
        "waiting for other ranks" in limit.message or "waited for other" in limit.message
    ) == is_said
    assert device != "cpu" or f"reading batches {measured.read_seconds:.0%}" in limit.message


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_batches_in_chunks_limit_with_the_planning_for_them(device: str) -> None:
    measured, remedy = times(0.1, 0.35, 0.0, 0.1, chunks=0.25), "budget='32%' would hold them"
    limit = limit_of(measured, device=device, remedy=remedy)
    assert limit is not None
    assert (limit.part, limit.share) == ("chunks", pytest.approx(0.6))
    assert limit.message.startswith("limited by a budget too small for batches: ")
    assert limit.message.endswith(f". {remedy}")
    assert limit.is_to_be_told


def test_a_few_batches_in_chunks_are_not_the_limit() -> None:
    limit = limit_of(times(0.1, 0.3, 0.2, chunks=0.05), device="cpu", remedy="much helps much")
    assert limit is not None
    assert (limit.part, limit.share) == ("dense part", pytest.approx(0.35))
    assert "batches in chunks 5%" in limit.message
    # Planning, moving and chunks are what all-fast would save.
    assert limit.message.endswith("it would be about 2.2 times as fast")


def test_a_measured_all_fast_replaces_the_estimate() -> None:
    all_fast = replace(times(0.1, 0.0, 0.0), steps=50, seconds=0.25)
    limit = limit_of(times(0.1, 0.2, 0.1), device="cpu", all_fast=all_fast)
    assert limit is not None
    assert limit.message.endswith("With every row in fast memory it was 2.0 times as fast")


def test_without_measurements_there_is_no_limit() -> None:
    assert limit_of(None, device="cpu") is None
    assert limit_of(times(0.1, 0.1, 0.1), device="cuda") is None
