"""A forked child frees nothing of what it does not have."""

from __future__ import annotations

import gc
import mmap
import os
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import hotrow
from hotrow.store.pinned import locked_rows
from hotrow.store.ram import host_rows

# Python warns of forks beside threads, which is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
ROWS, WIDTH = 250_000, 16


def status_of_child(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def collection(strategy: str) -> hotrow.EmbeddingBagCollection:
    table = hotrow.EmbeddingBagConfig("item", ROWS, WIDTH, ["item"])
    return hotrow.EmbeddingBagCollection([table], hotrow.SGD(), budget="10%", strategy=strategy)


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        spans = [line.split()[0].split("-") for line in lines]
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


@pytest.mark.parametrize("kind", ["store", "locked"])
def test_a_child_has_no_part_in_rows_and_frees_nothing_in_their_place(kind: str) -> None:
    released: list[int] = []
    locked = locked_rows(ROWS, WIDTH, register=lambda *_: "", unregister=released.append)
    kept = [host_rows(ROWS, WIDTH) if kind == "store" else locked.rows]
    first, size = kept[0].data_ptr(), kept[0].nbytes

    def work() -> None:
        assert not is_mapped(first)
        locked.close()
        assert released == []
        mine: list[np.ndarray] = []
        for _ in range(1000):  # until one lies where the rows did
            memory = mmap.mmap(-1, size // 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mine.append(np.frombuffer(memory, dtype=np.uint8))
            if first <= mine[-1].ctypes.data < first + size:
                break
        else:
            raise AssertionError("no mapping lies where the rows did")
        kept.clear()
        gc.collect()
        assert not mine[-1].any()

    assert status_of_child(work) == 0
    assert locked.locked
    assert not kept[0].any()


@pytest.mark.parametrize(("strategy", "closes"), [("lookahead", False), ("scratchpipe", True)])
def test_what_is_read_ahead_is_not_finished_in_a_child(strategy: str, closes: bool) -> None:
    embedding = collection(strategy)
    ids = [torch.randint(ROWS, (64, 1)) for _ in range(60)]

    def batches() -> Iterator[torch.Tensor]:
        ahead = hotrow.ahead(ids, embedding)
        try:
            yield from ahead
        finally:
            if closes:  # as a Trainer does
                ahead.close()

    kept = [batches()]
    for _ in range(3):
        embedding(next(kept[0])).values().sum().backward()

    def work() -> None:
        kept.clear()
        gc.collect()

    assert status_of_child(work) == 0
    assert sum(1 for _ in kept[0]) == 57
