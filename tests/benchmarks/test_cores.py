"""Which cores the benchmarks' launching threads use."""

from __future__ import annotations

import os
import sys

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="cores are chosen on Linux only")


def test_fast_cores_are_those_near_the_fastest(load) -> None:
    cores = load("cores")
    assert cores.fast_cores({0: 1.0, 1: 2.0, 2: 1.1, 3: 1.2}) == {0, 2}


def test_there_are_enough_of_them_even_if_one_is_far_ahead(load) -> None:
    cores = load("cores")
    assert cores.fast_cores({0: 1.0, 1: 3.0, 2: 2.0}) == {0, 2}
    assert cores.fast_cores({5: 1.0}) == {5}


@linux
def test_threads_that_launch_are_on_them_and_back_afterwards(
    monkeypatch: pytest.MonkeyPatch, load
) -> None:
    cores = load("cores")
    before = os.sched_getaffinity(0)
    chosen = {min(before)}
    monkeypatch.setattr(cores, "fast_cores", lambda seconds: chosen)
    with cores.on_fast_cores():
        assert os.sched_getaffinity(0) == chosen
    assert os.sched_getaffinity(0) == before


@linux
def test_every_core_is_tried(load) -> None:
    cores = load("cores")
    assert cores.seconds_by_core(tries=1).keys() == os.sched_getaffinity(0)


def test_where_cores_cannot_be_chosen_steps_are_timed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, load
) -> None:
    cores = load("cores")

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(cores.os, "sched_setaffinity", refused, raising=False)
    with cores.on_fast_cores():
        pass
