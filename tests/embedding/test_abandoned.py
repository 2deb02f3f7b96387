"""Iterators of hotrow.ahead that are dropped without close(), in any thread and at any place."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import SCHEDULES, variant
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.support.threads import may_wait
from thread_checks import (
    LEFT_AFTER,
    STRATEGIES,
    Owner,
    batches,
    begin,
    check_training_goes_on,
    collect_in_a_reader,
    collection,
    every_row,
    in_thread,
    is_planned,
    iterate,
    run_all,
    step,
)


@pytest.fixture(autouse=True)
def _collected_by_hand() -> Iterator[None]:
    """Garbage is collected where a test says so."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def embedding() -> hotrow.EmbeddingBagCollection:
    return collection("lookahead")


@pytest.fixture
def pair() -> tuple[Any, Any]:
    """Two equal collections: one whose iterator is closed, and one whose iterator is left."""
    return collection("lookahead"), collection("lookahead")


# -- no thread waits for itself ----------------------------------------------------------


def test_garbage_is_collected_in_a_reader_while_a_writer_waits(embedding: Any) -> None:
    begin(embedding, batches(12))
    collect_in_a_reader(embedding)
    assert is_planned(embedding)
    assert embedding.pipeline.iterator() is None


def test_readers_of_two_collections_drop_each_others_iterators(pair: tuple[Any, Any]) -> None:
    owners = [[begin(embedding, batches(12))] for embedding in pair]
    for (owner,) in owners:
        owner.itself = None  # no cycle: the iterator goes with the last reference
    del owner
    together = threading.Barrier(2)

    def reads(embedding: Any, others: list[Owner]) -> Callable[[], None]:
        def read() -> None:
            with embedding.row_access.reading():
                together.wait()
                others.clear()
                together.wait()

        return read

    run_all(reads(pair[0], owners[1]), reads(pair[1], owners[0]))
    for embedding in pair:
        assert embedding.pipeline.iterator() is None
        step(embedding, batches(1)[0])
        assert not is_planned(embedding)


def wrapped(stream: Any) -> Iterator[Tensor]:
    try:
        yield from stream  # closes it, too
    finally:
        stream.close()


def test_a_reader_drops_a_generator_that_closes_its_iterator(embedding: Any) -> None:
    generators = [wrapped(hotrow.ahead(batches(12), embedding))]
    for _ in range(LEFT_AFTER):
        step(embedding, next(generators[0]))
    collect_in_a_reader(embedding, then=generators.clear)
    assert is_planned(embedding)
    step(embedding, batches(1)[0])
    assert not is_planned(embedding)


def test_a_generator_that_closes_an_iterator_is_collected_in_a_reader(embedding: Any) -> None:
    stream = hotrow.ahead(batches(12), embedding)  # is no garbage itself
    owner = Owner(wrapped(stream))
    for _ in range(LEFT_AFTER):
        step(embedding, next(owner.stream))
    del owner
    collect_in_a_reader(embedding)
    assert is_planned(embedding)
    with pytest.raises(StopIteration):
        next(stream)
    for ids in stream:  # starts over
        step(embedding, ids)
    assert not is_planned(embedding)


def test_nothing_is_finished_in_the_midst_of_a_change(embedding: Any) -> None:
    begin(embedding, batches(12))
    with embedding.lock.writing():
        gc.collect()
        assert is_planned(embedding)
    step(embedding, batches(1)[0])
    assert not is_planned(embedding)


@pytest.mark.parametrize("in_generator", [False, True])
def test_nothing_is_finished_by_a_collection_of_garbage(embedding: Any, in_generator: bool) -> None:
    """It may come inside of anything, such as the capture of a CUDA graph."""

    def steps() -> Iterator[None]:
        for ids in hotrow.ahead(batches(12), embedding):
            step(embedding, ids)
            yield

    if in_generator:
        owner = Owner(steps())
        for _ in range(LEFT_AFTER):
            next(owner.stream)
        del owner
    else:
        begin(embedding, batches(12))
    gc.collect()
    assert embedding.pipeline.iterator() is None
    assert is_planned(embedding)


def test_a_loop_that_is_left_closes_its_iterator_at_once(embedding: Any) -> None:
    for ids in hotrow.ahead(batches(12), embedding):
        step(embedding, ids)
        break
    assert embedding.pipeline.iterator is None
    assert not is_planned(embedding)


def test_which_threads_may_wait(embedding: Any) -> None:
    lock, found = embedding.lock, []
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


def look_up(embedding: Any, data: list[Tensor]) -> None:
    for ids in data:
        step(embedding, ids)


def in_another_thread(go_on: Callable[[Any, list[Tensor]], None]) -> Any:
    def run(embedding: Any, data: list[Tensor]) -> None:
        assert in_thread(lambda: go_on(embedding, data)) is None

    return run


def read_first(embedding: Any, data: list[Tensor]) -> None:
    embedding.state_dict()
    iterate(embedding, data)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *SCHEDULES])
def test_training_goes_on_with_every_strategy_and_schedule(strategy: str) -> None:
    chosen: Any = strategy
    if strategy in SCHEDULES:
        chosen = variant("lookahead", strategy, victims="random")
    check_training_goes_on(lambda: collection(chosen))


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_threads.py does it on the GPU")
@pytest.mark.slow  # Triton's interpreter
@pytest.mark.parametrize("fill", ["zero-copy", "bulk", "staged"])
def test_training_goes_on_with_the_device_engine(fill: str) -> None:
    def make() -> hotrow.EmbeddingBagCollection:
        return collection("lookahead", fill=fill, engine=gpu_rows)

    check_training_goes_on(make, known=8, more=2)


@pytest.mark.parametrize(
    "way", [look_up, in_another_thread(iterate), in_another_thread(look_up), read_first]
)
def test_training_goes_on_in_every_way(way: Any) -> None:
    check_training_goes_on(lambda: collection("lookahead"), way)


def test_an_engine_can_be_changed_afterwards(pair: tuple[Any, Any]) -> None:
    closed, left = pair
    data = batches(16)
    begin(closed, data[:12]).stream.close()
    begin(left, data[:12])
    with pytest.raises(RuntimeError, match=r"train_on_host\(\) while hotrow.ahead .* close\(\)"):
        left.train_on_host()  # the iterator is garbage, but still there
    collect_in_a_reader(left)
    for embedding in pair:
        embedding.train_on_host()
        iterate(embedding, data[12:])
        embedding.train_in_slots()
    assert torch.equal(every_row(left), every_row(closed))


def test_checkpoints_can_be_saved_and_loaded_by_another_thread_afterwards(
    embedding: Any, tmp_path: Any
) -> None:
    begin(embedding, batches(12))
    error = in_thread(lambda: hotrow.save_checkpoint(tmp_path, embedding, step=1))
    assert "iterates over hotrow.ahead" in str(error)
    collect_in_a_reader(embedding)
    assert in_thread(lambda: hotrow.save_checkpoint(tmp_path, embedding, step=1)) is None
    saved = every_row(embedding)
    step(embedding, batches(1)[0])
    assert in_thread(lambda: hotrow.load_checkpoint(tmp_path, embedding)) is None
    assert torch.equal(every_row(embedding), saved)


def test_batches_of_an_iterator_that_is_gone_can_be_trained(pair: tuple[Any, Any]) -> None:
    closed, left = pair
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
    for embedding in pair:
        step(embedding, late)
    assert torch.equal(every_row(left), every_row(closed))


def test_an_iterator_that_was_closed_does_not_end_the_next_one(embedding: Any) -> None:
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


def test_an_iterator_whose_close_was_interrupted_can_start_over(pair: tuple[Any, Any]) -> None:
    streams = [begin(embedding, batches(12)).stream for embedding in pair]
    streams[0].close()
    streams[1]._running = None  # the first thing that close() does
    assert is_planned(pair[1])
    for embedding, stream in zip(pair, streams, strict=True):
        for ids in stream:
            step(embedding, ids)
        assert not is_planned(embedding)
    assert torch.equal(every_row(pair[1]), every_row(pair[0]))


def test_an_iterator_in_the_traceback_of_an_error_is_left_alike(pair: tuple[Any, Any]) -> None:
    closed, left = pair
    data = batches(24)
    begin(closed, data[:12]).stream.close()

    def fail() -> None:
        stream, errors = hotrow.ahead(data[:12], left), []
        try:
            for number, ids in enumerate(stream):
                step(left, ids)
                if number == LEFT_AFTER - 1:
                    raise OSError("the disk is full")
        except OSError as error:
            errors.append(error)  # holds this frame, which holds the list and the iterator

    fail()
    with pytest.raises(RuntimeError, match=r"another hotrow.ahead iterator"):
        next(hotrow.ahead(data, left))
    collect_in_a_reader(left)
    for embedding in pair:
        iterate(embedding, data[12:])
    assert torch.equal(every_row(left), every_row(closed))


def test_handlers_of_signals_are_put_back(embedding: Any) -> None:
    handler = signal.getsignal(signal.SIGINT)
    owners = [begin(embedding, batches(12))]
    owners[0].itself = None
    assert signal.getsignal(signal.SIGINT) is not handler
    assert in_thread(owners.clear) is None  # signals are handled by the main thread alone
    assert is_planned(embedding)  # the thread that trains may be in the midst of something
    embedding.row_access.flush()
    assert signal.getsignal(signal.SIGINT) is handler
    begin(embedding, batches(12))
    assert signal.getsignal(signal.SIGINT) is not handler
    gc.collect()
    embedding.row_access.flush()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_loop_over_an_iterator_that_lost_batches_warns(embedding: Any) -> None:
    def numbers() -> Iterator[Tensor]:
        return (torch.full((1, 4), n) for n in range(50))

    source = numbers()
    for _ in hotrow.ahead(source, embedding):
        break
    with pytest.warns(UserWarning, match=r"has dropped .* that it had read ahead.* depth=0"):
        first = next(iter(hotrow.ahead(source, embedding)))
    assert int(first[0, 0]) > 1
    source = numbers()
    for wanted in range(3):
        for batch in hotrow.ahead(source, embedding, depth=0):
            assert int(batch[0, 0]) == wanted
            break
