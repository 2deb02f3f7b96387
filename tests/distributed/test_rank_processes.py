"""Processes of ranks: results in rank order, and no failure of a rank hangs the tests."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rank_processes import KILLED, Failed, run, started


@dataclass(frozen=True)
class Pair:
    rank: int
    values: Tensor


def gathered(rank: int, world: int, start: int, *, step: int = 1) -> list[int]:
    numbers: list[Any] = [None] * world
    dist.all_gather_object(numbers, start + step * rank)
    return numbers


def pids(rank: int, world: int) -> int:
    return os.getpid()


def summed(rank: int, world: int, pair: Pair) -> Pair:
    total = pair.values + rank
    dist.all_reduce(total)
    return Pair(rank, total)


def raising(rank: int, world: int, failing: list[int], seconds: float = 0) -> int:
    if rank in failing:
        time.sleep(seconds)
        raise ValueError(f"rank {rank} cannot")
    if seconds or len(failing) < world:
        dist.barrier()
    return rank


def hanging(rank: int, world: int) -> int:
    while rank:
        time.sleep(1)
    return rank


def killed(rank: int, world: int, number: int) -> int:
    if rank:
        os.kill(os.getpid(), number)
    dist.barrier()
    return rank


def exiting(rank: int, world: int) -> None:
    if rank:
        os._exit(3)


def warning(rank: int, world: int, text: str) -> None:
    warnings.warn(text, stacklevel=1)


def state(rank: int, world: int) -> tuple[int, float, bool]:
    return torch.get_num_threads(), float(torch.rand(1)), bool(torch.empty(9).isnan().all())


def grouped(rank: int, world: int) -> float:
    """Leave a group and a collective behind."""
    group = dist.new_group()
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    if rank:
        dist.broadcast(torch.ones(1), src=1, async_op=True)
    return ones.item()


def not_pickled(rank: int, world: int) -> Any:
    return lambda: rank


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_in_rank_order(world: int) -> None:
    expected = [7 + 2 * rank for rank in range(world)]
    assert run(world, gathered, 7, step=2) == [expected] * world


def test_arguments_and_results_may_be_tensors_and_classes_of_the_test() -> None:
    results = run(2, summed, Pair(0, torch.tensor([1.0, 2.0])))
    assert [result.rank for result in results] == [0, 1]
    for result in results:
        assert isinstance(result, Pair)
        assert torch.equal(result.values, torch.tensor([3.0, 5.0]))


def test_processes_are_kept_unless_a_test_needs_its_own() -> None:
    kept = run(2, pids)
    assert run(1, pids) == kept[:1]
    assert run(2, pids) == kept
    assert not set(run(2, pids, alone=True)) & set(kept)
    assert run(2, pids) == kept


def test_every_call_begins_alike() -> None:
    first, second = run(2, state)
    assert first == second
    assert first[0] == 1
    assert first[2]
    assert run(2, state) == [first, second]


def test_groups_that_are_left_behind_do_no_harm() -> None:
    before = run(2, pids)
    assert run(2, grouped) == [2.0, 2.0]
    run(2, gathered, 0)
    assert run(2, pids) == before


def test_an_error_names_its_rank_and_place() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"2 of 2 ranks failed") as failure:
        run(2, raising, [1], grace=0.5)
    text = str(failure.value)
    assert "rank 1: ValueError: rank 1 cannot" in text
    assert "in raising" in text
    assert "rank 0: timeout: " in text
    assert "in barrier" in text  # where rank 0 was
    assert time.monotonic() - began < 30
    assert run(2, gathered, 0) == [[0, 1]] * 2


def test_errors_of_all_ranks_leave_the_processes_alone() -> None:
    before = run(2, pids)
    with pytest.raises(AssertionError, match=r"rank 0: ValueError(.|\n)*rank 1: ValueError"):
        run(2, raising, [0, 1])
    found = run(2, raising, [0, 1], expect_errors=True)
    assert [(each.kind, each.message) for each in found] == [
        ("ValueError", "rank 0 cannot"),
        ("ValueError", "rank 1 cannot"),
    ]
    assert run(2, pids) == before


def test_expected_errors_stand_beside_results() -> None:
    first, second = run(2, raising, [1], expect_errors=True, alone=True, group_timeout=20)
    assert second.kind == "ValueError"
    # The process of rank 1 is gone, which rank 0 sees without waiting for its group's timeout.
    assert first.kind != "timeout"
    assert "rank_processes.py" in first.traceback


@pytest.mark.slow
def test_a_rank_that_hangs_is_stopped_with_its_stack() -> None:
    first, second = run(2, hanging, timeout=1, expect_errors=True)
    assert first == 0
    assert second.kind == "timeout"
    assert "in hanging" in second.traceback
    with pytest.raises(AssertionError, match="1 of 2 ranks failed\nrank 1: timeout: no answer"):
        run(2, hanging, timeout=1)
    assert run(2, gathered, 0) == [[0, 1]] * 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGABRT])
def test_signals_show_in_results(number: signal.Signals) -> None:
    first, second = run(2, killed, number, expect_errors=True, alone=True)
    assert isinstance(first, Failed)  # its group lost a rank
    if number == signal.SIGKILL:
        assert second == KILLED
    else:
        expected = {signal.SIGINT: "KeyboardInterrupt", signal.SIGABRT: "SIGABRT"}
        assert second.kind == expected[number]


def test_a_killed_rank_fails_the_call_and_a_new_one_takes_its_place() -> None:
    with pytest.raises(AssertionError, match="rank 1: killed"):
        run(2, killed, signal.SIGKILL)
    with pytest.raises(AssertionError, match="rank 1: exit: the process exited with code 3"):
        run(2, exiting)
    assert run(2, gathered, 0) == [[0, 1]] * 2


def test_a_test_can_kill_a_rank_while_it_runs() -> None:
    with started(2, hanging, alone=True) as running:
        os.kill(running.pids[1], signal.SIGKILL)
        assert running.results(expect_errors=True) == [0, KILLED]


def test_warnings_are_errors_as_in_tests() -> None:
    (result,) = run(1, warning, "beware", expect_errors=True)
    assert (result.kind, result.message) == ("UserWarning", "beware")
    run(1, warning, "a batch of 5 does not fit the 4 slots")  # one that tests ignore


def test_results_that_cannot_be_pickled_are_errors() -> None:
    with pytest.raises(AssertionError, match="not_pickled"):
        run(1, not_pickled)


def test_calls_are_not_nested() -> None:
    with started(1, pids) as running:
        with pytest.raises(RuntimeError, match="cannot be made during another one"):
            run(1, pids)
        running.results()
