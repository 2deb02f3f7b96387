"""What limits a run is said from what was measured, and nothing else."""

from __future__ import annotations

import math

import pytest

from hotrow.run.tally import limit_of
from hotrow.support.records import Times


def times(
    read: float, plan: float, rows: float, waited: float = math.nan, chunks: float = 0.0
) -> Times:
    """Of 100 steps that take a second together."""
    return Times(100, 1.0, read, plan, rows, waited, chunks)


@pytest.mark.parametrize(
    ("found", "part", "share"),
    [
        (times(0.5, 0.2, 0.1), "loader", 0.5),
        (times(0.1, 0.6, 0.1), "planning", 0.6),
        (times(0.1, 0.2, 0.5), "link", 0.5),
        (times(0.1, 0.2, 0.1), "dense part", 0.6),
    ],
)
def test_on_a_cpu_the_largest_part_limits(found: Times, part: str, share: float) -> None:
    limit = limit_of(found, device="cpu")
    assert limit is not None
    assert (limit.part, limit.share) == (part, pytest.approx(share))
    assert limit.is_to_be_told == (part != "dense part")
    assert "planning" in limit.message
    assert f"reading batches {found.read_seconds:.0%}" in limit.message


def test_what_all_fast_could_gain_is_bounded_by_what_was_measured() -> None:
    limit = limit_of(times(0.1, 0.25, 0.25), device="cpu")
    assert limit is not None
    assert limit.message.endswith("it would be 2.0 times as fast at most")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_batches_in_chunks_are_no_dense_part(device: str) -> None:
    """What is planned for them is in vain, so the budget is what to change."""
    found, remedy = times(0.1, 0.35, 0.0, 0.1, chunks=0.25), "budget='32%' would hold them"
    limit = limit_of(found, device=device, remedy=remedy)
    assert limit is not None
    assert (limit.part, limit.share) == ("chunks", pytest.approx(0.6))
    assert limit.message.startswith("limited by a budget too small for batches: ")
    assert limit.message.endswith(f". {remedy}")
    assert limit.is_to_be_told


def test_a_few_batches_in_chunks_are_not_what_limits() -> None:
    limit = limit_of(times(0.1, 0.3, 0.2, chunks=0.05), device="cpu", remedy="much helps much")
    assert limit is not None
    assert (limit.part, limit.share) == ("dense part", pytest.approx(0.35))
    assert "batches in chunks 5%" in limit.message
    assert limit.message.endswith("it would be 2.2 times as fast at most")


@pytest.mark.parametrize(
    ("found", "part", "share"),
    [
        (times(0.5, 0.2, 0.1, 0.9), "loader", 0.5),  # rows are late because their batch is
        (times(0.1, 0.6, 0.1, 0.1), "planning", 0.6),
        (times(0.1, 0.2, 0.6, 0.3), "link", 0.3),  # launches of moves do not count
        (times(0.1, 0.2, 0.1, 0.02), "dense part", 0.98),
    ],
)
def test_beside_a_gpu_rows_are_measured_on_it(found: Times, part: str, share: float) -> None:
    limit = limit_of(found, device="cuda:0")
    assert limit is not None
    assert (limit.part, limit.share) == (part, pytest.approx(share))


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert limit_of(None, device="cpu") is None
    assert limit_of(times(0.1, 0.1, 0.1), device="cuda") is None
