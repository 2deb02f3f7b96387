"""Iterators of hotrow.ahead that are dropped without close(), in any thread and at any place."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import SCHEDULES, variant
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.rows import RowGroup
from hotrow.support.threads import may_wait
from test_reading_threads import STRATEGIES, batches, collection, every_row, in_thread, vectors

STEPS = 4  # trained before the iterator is left
MOST_SECONDS = 60  # of a test whose threads wait for each other


@pytest.fixture(autouse=True)
def _collected_by_hand() -> Iterator[None]:
    """Garbage is collected where a test says so."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Owner:
    """Holds an iterator, and is part of a cycle."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.itself = stream, self


def step(embedding: Any, ids: Tensor) -> None:
    embedding(ids).values().square().mean().backward()


def begin(embedding: Any, data: list[Tensor]) -> Owner:
    """Train some steps; the iterator is open."""
    owner = Owner(hotrow.ahead(data, embedding))
    for _ in range(STEPS):
        step(embedding, next(owner.stream))
    return owner


def abandon(embedding: Any, data: list[Tensor]) -> None:
    """Train some steps, and leave the open iterator to the garbage collector."""
    begin(embedding, data)


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


# -- no thread waits for itself ----------------------------------------------------------


def test_garbage_is_collected_in_a_reader_while_a_writer_waits() -> None:
    embedding = collection("lookahead")
    abandon(embedding, batches(12))
    collect_in_a_reader(embedding)
    assert is_planned(embedding)
    assert embedding.pipeline.iterator is not None
    assert embedding.pipeline.iterator() is None


def test_readers_of_two_collections_drop_each_others_iterators() -> None:
    first, second = collection("lookahead"), collection("lookahead")
    of_first, of_second = [begin(first, batches(12))], [begin(second, batches(12))]
    for owner in (*of_first, *of_second):
        owner.itself = None  # no cycle: the iterator goes with the last reference
    del owner
    together = threading.Barrier(2)

    def read_first() -> None:
        with first.row_access.reading():
            together.wait()
            of_second.clear()
            together.wait()

    def read_second() -> None:
        with second.row_access.reading():
            together.wait()
            of_first.clear()
            together.wait()

    run_all(read_first, read_second)
    for embedding in (first, second):
        assert embedding.pipeline.iterator() is None
        step(embedding, batches(1)[0])
        assert not is_planned(embedding)


def wrapped(stream: Any) -> Iterator[Tensor]:
    try:
        yield from stream  # closes it, too
    finally:
        stream.close()


def test_a_reader_drops_a_generator_that_closes_its_iterator() -> None:
    embedding = collection("lookahead")
    generators = [wrapped(hotrow.ahead(batches(12), embedding))]
    for _ in range(STEPS):
        step(embedding, next(generators[0]))
    collect_in_a_reader(embedding, then=generators.clear)
    assert is_planned(embedding)
    step(embedding, batches(1)[0])
    assert not is_planned(embedding)


def test_a_generator_that_closes_an_iterator_is_collected_in_a_reader() -> None:
    embedding = collection("lookahead")
    stream = hotrow.ahead(batches(12), embedding)  # is no garbage itself
    owner = Owner(wrapped(stream))
    for _ in range(STEPS):
        step(embedding, next(owner.stream))
    del owner
    collect_in_a_reader(embedding)
    assert is_planned(embedding)
    with pytest.raises(StopIteration):
        next(stream)
    for ids in stream:  # starts over
        step(embedding, ids)
    assert not is_planned(embedding)


def test_nothing_is_finished_in_the_midst_of_a_change() -> None:
    embedding = collection("lookahead")
    abandon(embedding, batches(12))
    with embedding.lock.writing():
        gc.collect()
        assert is_planned(embedding)
    step(embedding, batches(1)[0])
    assert not is_planned(embedding)


def test_nothing_is_finished_by_a_collection_of_garbage() -> None:
    """It may come inside of anything, such as the capture of a CUDA graph."""
    embedding = collection("lookahead")
    abandon(embedding, batches(12))
    gc.collect()
    assert is_planned(embedding)


def test_nor_if_the_iterator_goes_with_a_generator_that_is_collected() -> None:
    embedding = collection("lookahead")

    def steps() -> Iterator[None]:
        for ids in hotrow.ahead(batches(12), embedding):
            step(embedding, ids)
            yield

    owner = Owner(steps())
    for _ in range(STEPS):
        next(owner.stream)
    del owner
    gc.collect()
    assert embedding.pipeline.iterator is not None
    assert embedding.pipeline.iterator() is None
    assert is_planned(embedding)


def test_a_loop_that_is_left_closes_its_iterator_at_once() -> None:
    embedding = collection("lookahead")
    for ids in hotrow.ahead(batches(12), embedding):
        step(embedding, ids)
        break
    assert embedding.pipeline.iterator is None
    assert not is_planned(embedding)


def test_which_threads_may_wait() -> None:
    lock, found = collection("lookahead").lock, []
    assert may_wait()
    with lock.reading():
        assert not may_wait()
        assert in_thread(lambda: found.append(may_wait())) is None
    with lock.writing():
        assert not may_wait()

    class Garbage:
        def __del__(self) -> None:
            found.append(may_wait())
            in_thread(lambda: found.append(may_wait()))

    garbage: Any = Garbage()
    garbage.itself = garbage
    del garbage
    gc.collect()
    assert found == [True, False, True]
    assert may_wait()


# -- what comes after --------------------------------------------------------------------


def ways_on() -> dict[str, Callable[[Any, list[Tensor]], None]]:
    def iterate(embedding: Any, data: list[Tensor]) -> None:
        for ids in hotrow.ahead(data, embedding):
            step(embedding, ids)

    def look_up(embedding: Any, data: list[Tensor]) -> None:
        for ids in data:
            step(embedding, ids)

    def iterate_in_another_thread(embedding: Any, data: list[Tensor]) -> None:
        assert in_thread(lambda: iterate(embedding, data)) is None

    def look_up_in_another_thread(embedding: Any, data: list[Tensor]) -> None:
        assert in_thread(lambda: look_up(embedding, data)) is None

    def read_first(embedding: Any, data: list[Tensor]) -> None:
        embedding.state_dict()
        iterate(embedding, data)

    ways = (
        iterate, look_up, iterate_in_another_thread, look_up_in_another_thread, read_first
    )  # fmt: skip
    return {way.__name__: way for way in ways}


def check_training_goes_on(
    make: Callable[[], Any],
    go_on: Callable[[Any, list[Tensor]], None],
    device: str = "cpu",
    known: int = 12,
    more: int = 12,
) -> None:
    """Rows end in the bits of a run that has closed its iterator, and are read rightly before."""
    closed, left = make(), make()
    *data, probe = batches(known + more + 1, device)
    begin(closed, data[:known]).stream.close()
    abandon(left, data[:known])
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


@pytest.mark.thinned(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_goes_on_with_every_strategy(strategy: str) -> None:
    check_training_goes_on(lambda: collection(strategy), ways_on()["iterate"])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_goes_on_with_every_schedule(schedule: str) -> None:
    strategy = variant("lookahead", schedule, victims="random")
    check_training_goes_on(lambda: collection(strategy), ways_on()["iterate"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_threads.py does it on the GPU")
@pytest.mark.thinned(3)
@pytest.mark.parametrize("fill", ["zero-copy", "bulk", "staged"])
def test_training_goes_on_with_the_device_engine(fill: str) -> None:
    def make() -> hotrow.EmbeddingBagCollection:
        return collection("lookahead", fill=fill, engine=gpu_rows)

    check_training_goes_on(make, ways_on()["iterate"], known=8, more=2)


@pytest.mark.parametrize("way", ways_on())
def test_training_goes_on_in_every_way(way: str) -> None:
    check_training_goes_on(lambda: collection("lookahead"), ways_on()[way])


def test_an_engine_can_be_changed_afterwards() -> None:
    closed, left = collection("lookahead"), collection("lookahead")
    data = batches(16)
    begin(closed, data[:12]).stream.close()
    abandon(left, data[:12])
    with pytest.raises(RuntimeError, match=r"train_on_host\(\) while hotrow.ahead .* close\(\)"):
        left.train_on_host()  # the iterator is garbage, but still there
    collect_in_a_reader(left)
    for embedding in (closed, left):
        embedding.train_on_host()
        for ids in hotrow.ahead(data[12:], embedding):
            step(embedding, ids)
        embedding.train_in_slots()
    assert torch.equal(every_row(left), every_row(closed))


def test_checkpoints_can_be_saved_and_loaded_by_another_thread_afterwards(tmp_path: Any) -> None:
    embedding = collection("lookahead")
    abandon(embedding, batches(12))
    error = in_thread(lambda: hotrow.save_checkpoint(tmp_path, embedding, step=1))
    assert "iterates over hotrow.ahead" in str(error)
    collect_in_a_reader(embedding)
    assert in_thread(lambda: hotrow.save_checkpoint(tmp_path, embedding, step=1)) is None
    saved = every_row(embedding)
    step(embedding, batches(1)[0])
    assert in_thread(lambda: hotrow.load_checkpoint(tmp_path, embedding)) is None
    assert torch.equal(every_row(embedding), saved)


def test_batches_of_an_iterator_that_is_gone_can_be_trained() -> None:
    closed, left = collection("lookahead"), collection("lookahead")
    data = batches(12)
    owner = begin(closed, data)
    late = next(owner.stream)
    owner.stream.close()
    step(closed, late)
    owner = begin(left, data)
    late = next(owner.stream)
    waiting = left(late).values().square().mean()
    del owner
    collect_in_a_reader(left)
    waiting.backward()
    for embedding in (closed, left):
        step(embedding, late)
    assert torch.equal(every_row(left), every_row(closed))


def test_an_iterator_that_was_closed_does_not_end_the_next_one() -> None:
    embedding = collection("lookahead")
    first = begin(embedding, batches(12)).stream
    first.close()
    second = hotrow.ahead(batches(12), embedding)
    step(embedding, next(second))
    first.close()
    embedding.pipeline.leave(first)
    with pytest.raises(RuntimeError, match=r"another hotrow.ahead iterator .* call its close\(\)"):
        next(hotrow.ahead(batches(12), embedding))
    step(embedding, next(second))
    second.close()


def test_an_iterator_whose_close_was_interrupted_can_start_over() -> None:
    closed, left = collection("lookahead"), collection("lookahead")
    data = batches(12)
    streams = [begin(embedding, data).stream for embedding in (closed, left)]
    streams[0].close()
    streams[1]._running = None  # the first thing that close() does
    assert is_planned(left)
    for embedding, stream in zip((closed, left), streams, strict=True):
        for ids in stream:
            step(embedding, ids)
        assert not is_planned(embedding)
    assert torch.equal(every_row(left), every_row(closed))


def test_an_iterator_in_the_traceback_of_an_error_is_left_alike() -> None:
    closed, left = collection("lookahead"), collection("lookahead")
    data = batches(24)
    begin(closed, data[:12]).stream.close()

    def fail() -> None:
        stream, errors = hotrow.ahead(data[:12], left), []
        try:
            for number, ids in enumerate(stream):
                step(left, ids)
                if number == STEPS - 1:
                    raise OSError("the disk is full")
        except OSError as error:
            errors.append(error)  # holds this frame, which holds the list and the iterator

    fail()
    with pytest.raises(RuntimeError, match=r"another hotrow.ahead iterator"):
        next(hotrow.ahead(data, left))
    collect_in_a_reader(left)
    for embedding in (closed, left):
        ways_on()["iterate"](embedding, data[12:])
    assert torch.equal(every_row(left), every_row(closed))


def test_handlers_of_signals_are_put_back() -> None:
    handler = signal.getsignal(signal.SIGINT)
    embedding = collection("lookahead")
    owners = [begin(embedding, batches(12))]
    owners[0].itself = None
    assert signal.getsignal(signal.SIGINT) is not handler
    assert in_thread(owners.clear) is None  # signals are handled by the main thread alone
    assert is_planned(embedding)  # the thread that trains may be in the midst of something
    embedding.row_access.flush()
    assert signal.getsignal(signal.SIGINT) is handler
    abandon(embedding, batches(12))
    assert signal.getsignal(signal.SIGINT) is not handler
    gc.collect()
    embedding.row_access.flush()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_loop_over_an_iterator_that_lost_batches_warns() -> None:
    table = hotrow.EmbeddingBagConfig("t", 1000, 4, ["f"])
    embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), budget="50%")
    numbers = (torch.full((1, 1), n) for n in range(60))
    for _ in hotrow.ahead(numbers, embedding):
        break
    with pytest.warns(UserWarning, match=r"has dropped .* that it had read ahead.* depth=0"):
        first = next(iter(hotrow.ahead(numbers, embedding)))
    assert int(first) > 1
    one_by_one = (torch.full((1, 1), n) for n in range(60))
    for wanted in range(3):
        for batch in hotrow.ahead(one_by_one, embedding, depth=0):
            assert int(batch) == wanted
            break


def test_eval_in_another_thread_does_not_warn_the_one_that_trains() -> None:
    table = hotrow.EmbeddingBagConfig("t", 1000, 4, ["f"])
    embedding = hotrow.EmbeddingBagCollection([table], hotrow.SGD(), budget="50%")
    model = torch.nn.ModuleDict({"embedding": embedding})
    batches = [torch.full((1, 1), n) for n in range(8)]
    for number, batch in enumerate(hotrow.ahead(batches, model)):
        if number == 0:
            other = threading.Thread(target=model.eval)
            other.start()
            other.join()
        assert not model.training or number == 0
        embedding(batch).values().sum().backward()  # a warning would be an error
