"""Threads that read or drop what another one trains: shared by tests on a CPU and on a GPU."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.engine.rows import RowGroup

TABLES = [
    hotrow.EmbeddingBagConfig("user", 400, 4, ["user"]),
    hotrow.EmbeddingBagConfig("item", 300, 4, ["item", "last"]),
    hotrow.EmbeddingBagConfig("shop", 50, 6, ["shop"]),
]
STRATEGIES = [
    "uncached", "static", "lru", "scratchpipe", "lookahead",
    "all-fast", "cpu", "hybrid", "static-hybrid",
]  # fmt: skip
STEPS = 30
LEFT_AFTER = 4  # steps that are trained before an iterator is left
MOST_SECONDS = 60  # of threads that wait for each other


def collection(strategy: Any, device: str = "cpu", **options: Any) -> hotrow.EmbeddingBagCollection:
    return hotrow.EmbeddingBagCollection(
        TABLES, hotrow.Adam(lr=0.05), budget="60%", strategy=strategy, device=device, seed=3,
        **options,
    )  # fmt: skip


def batches(count: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [table.num_embeddings for table in TABLES for _ in table.feature_names]
    columns = [torch.randint(n, (count, 24), generator=generator) for n in sizes]
    return list(torch.stack(columns, dim=2).to(device))


def probes(device: str = "cpu") -> list[Tensor]:
    return batches(STEPS + 4, device)[STEPS:]


def vectors(embedding: hotrow.EmbeddingBagCollection, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return embedding(ids).values().cpu()


def step(embedding: Any, ids: Tensor) -> None:
    embedding(ids).values().square().mean().backward()


def train(
    embedding: hotrow.EmbeddingBagCollection,
    after_step: Callable[[int], None] = lambda number: None,
    data: list[Tensor] | None = None,
    device: str = "cpu",
) -> None:
    data = batches(STEPS, device) if data is None else data
    for number, ids in enumerate(hotrow.ahead(data, embedding)):
        step(embedding, ids)
        after_step(number)


def every_row(embedding: hotrow.EmbeddingBagCollection) -> Tensor:
    tables = [torch.cat([rows for _, rows in embedding.rows(t.name)]).flatten() for t in TABLES]
    return torch.cat(tables)


# -- threads -----------------------------------------------------------------------------


def run_all(*works: Callable[[], Any]) -> None:
    """Run functions in a thread each; fail if one raises, or if they wait for each other."""
    errors: list[BaseException] = []

    def run(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(x,), name=x.__name__, daemon=True) for x in works]
    for thread in threads:
        thread.start()
    last = time.monotonic() + MOST_SECONDS
    for thread in threads:
        thread.join(max(0.0, last - time.monotonic()))
    stuck = [thread for thread in threads if thread.is_alive()]
    if stuck:
        frames = sys._current_frames()
        stacks = [
            f"{x.name}:\n{''.join(traceback.format_stack(frames[x.ident or 0])[-6:])}"
            for x in stuck
        ]
        pytest.fail("threads wait for each other\n" + "\n".join(stacks), pytrace=False)
    if errors:
        raise errors[0]


def in_thread(work: Callable[[], Any]) -> BaseException | None:
    """Run a function in another thread; return what it raises."""

    def second() -> None:
        work()

    try:
        run_all(second)
    except BaseException as error:
        return error
    return None


@contextmanager
def readers(count: int, read: Callable[[], None]) -> Iterator[None]:
    """Threads that read again and again; what fails in one of them fails here."""
    stop, errors = threading.Event(), []

    def run() -> None:
        try:
            while not stop.is_set():
                read()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


class Steps:
    """Which step has ended, and what probes read after each one when no other thread reads."""

    def __init__(self, alone: hotrow.EmbeddingBagCollection, device: str = "cpu") -> None:
        self.probes = probes(device)
        self.history = [self._read(alone)]
        train(alone, lambda number: self.history.append(self._read(alone)), device=device)
        self.rows = every_row(alone)
        self.ended = 0
        self.reads = 0

    def _read(self, embedding: hotrow.EmbeddingBagCollection) -> list[Tensor]:
        return [vectors(embedding, ids) for ids in self.probes]

    def end(self, number: int) -> None:
        self.ended = number + 1

    def check(self, embedding: hotrow.EmbeddingBagCollection) -> None:
        """One read equals what was read alone, after a step between the call and its return."""
        place = self.reads % len(self.probes)
        first = self.ended
        found = vectors(embedding, self.probes[place])
        last = min(self.ended + 1, len(self.history) - 1)  # one may have ended, and not said so
        self.reads += 1
        assert any(torch.equal(found, self.history[n][place]) for n in range(first, last + 1)), (
            f"vectors of no step from {first} to {last}"
        )


def check_beside_training(make: Callable[[], Any], device: str = "cpu", count: int = 4) -> None:
    alone, shared = make(), make()
    steps = Steps(alone, device)
    with readers(count, lambda: steps.check(shared)):
        train(shared, steps.end, device=device)
    assert steps.reads >= count
    assert torch.equal(every_row(shared), steps.rows)


# -- iterators that are dropped ----------------------------------------------------------


class Owner:
    """Holds an iterator, and is part of a cycle."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.itself = stream, self


def begin(embedding: Any, data: list[Tensor]) -> Owner:
    """Train some steps; the iterator is open, and garbage if the caller does not keep it."""
    owner = Owner(hotrow.ahead(data, embedding))
    for _ in range(LEFT_AFTER):
        step(embedding, next(owner.stream))
    return owner


def collect_in_a_reader(embedding: Any, then: Callable[[], None] = lambda: None) -> None:
    """Collect garbage in a thread that reads while another one waits to write, and go on there."""
    reads = threading.Event()
    door = embedding.lock._door  # a writer that waits has closed it

    def read() -> None:
        with embedding.row_access.reading():
            reads.set()
            while door.acquire(blocking=False):
                door.release()
                time.sleep(0.001)
            gc.collect()
            then()

    def write() -> None:
        reads.wait()
        embedding.row_access.flush()

    run_all(read, write)


def is_planned(embedding: Any) -> bool:
    """Whether rows are still to move for batches that were planned."""
    flights = [group.flight for group in embedding.groups if isinstance(group, RowGroup)]
    return any(flight.uncollected or flight.in_transit for flight in flights)


def iterate(embedding: Any, data: list[Tensor]) -> None:
    train(embedding, data=data)


def check_training_goes_on(
    make: Callable[[], Any],
    go_on: Callable[[Any, list[Tensor]], None] = iterate,
    device: str = "cpu",
    known: int = 12,
    more: int = 12,
) -> None:
    """Rows end in the bits of a run that has closed its iterator, and are read rightly before."""
    closed, left = make(), make()
    *data, probe = batches(known + more + 1, device)
    begin(closed, data[:known]).stream.close()
    begin(left, data[:known])
    expected = vectors(closed, probe)

    def read() -> None:
        assert torch.equal(vectors(left, probe), expected)

    collect_in_a_reader(left, read)
    read()
    assert torch.equal(every_row(left), every_row(closed))
    go_on(closed, data[known:])
    go_on(left, data[known:])
    left.check()
    assert not is_planned(left)
    assert left.pipeline.iterator is None
    assert torch.equal(every_row(left), every_row(closed))
    assert torch.equal(vectors(left, probe), vectors(closed, probe))
