"""Which stream waits for which, without a GPU."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from hotrow.support.streams import Lanes

_numbers = count(1)


class Stream:
    def __init__(self, name: str) -> None:
        self.name, self.cuda_stream = name, next(_numbers)
        self.after: set[str] = {name}  # whose work it comes after


class Event:
    def __init__(self, stream: Any) -> None:
        self.event, self._done = self, set(stream.after)

    def wait(self, stream: Any) -> None:
        stream.after |= self._done


class FakeLanes(Lanes):
    _event: Any = Event


@pytest.fixture
def lanes() -> Lanes:
    made: Any = FakeLanes(torch.device("cpu"))
    made._streams = {name: Stream(name) for name in ("sort", "plan", "rows", "back")}
    return made  # type: ignore[no-any-return]


def stand_on(lanes: Any, stream: Stream, *, trains: bool = False) -> Stream:
    """Let the current thread launch there."""
    lanes.here.outside = stream
    if trains:
        lanes._training[stream.cuda_stream] = stream
    return stream


EVERY = {"sort", "plan", "rows", "back", "train"}


def test_all_lanes_wait_for_each_other_after_a_join(lanes: Any) -> None:
    train = stand_on(lanes, Stream("train"), trains=True)
    lanes.join()
    for stream in (train, *lanes._streams.values()):
        assert stream.after == EVERY


def test_a_thread_that_reads_is_joined_with_the_one_that_trains(lanes: Any) -> None:
    train = stand_on(lanes, Stream("train"), trains=True)
    reader = stand_on(lanes, Stream("reader"))
    lanes.join()
    assert reader.after == EVERY | {"reader"}
    reader.after.add("read")
    lanes.read_here()
    for stream in (train, *lanes._streams.values()):
        assert "read" in stream.after


def test_the_newest_mark_of_training_is_of_the_stream_it_trains_on(lanes: Any) -> None:
    train = stand_on(lanes, Stream("train"), trains=True)
    lanes.here.trained_on = train
    wanted = lanes.mark("train")
    stand_on(lanes, Stream("reader"))
    lanes.mark("train")
    lanes.read_here()
    assert lanes.newest("train") is wanted
