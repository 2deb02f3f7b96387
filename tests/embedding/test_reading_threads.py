"""Threads that read a collection beside one that trains it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hotrow
from builders import SCHEDULES, variant
from hotrow.embedding.row_verifier import RowVerifier
from hotrow.support.threads import _FEW_LOOKUPS, RowLock
from thread_checks import (
    STRATEGIES,
    batches,
    check_beside_training,
    collection,
    every_row,
    in_thread,
    probes,
    readers,
    run_all,
    train,
    vectors,
)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *SCHEDULES])
def test_threads_read_finished_steps_beside_training(strategy: str) -> None:
    chosen: Any = strategy
    if strategy in SCHEDULES:
        chosen = variant("lookahead", strategy, victims="random")
    check_beside_training(lambda: collection(chosen))


@pytest.mark.parametrize("strategy", ["lookahead", "scratchpipe", "hybrid"])
def test_state_dicts_of_another_thread_are_of_one_step(strategy: str) -> None:
    # Every step adds the same to every weight, so that a state of one step has one value.
    embedding = hotrow.EmbeddingBagCollection(
        [hotrow.EmbeddingBagConfig("a", 400, 4, ["f"], init=hotrow.Constant(0.0))],
        hotrow.SGD(lr=1.0), budget="90%", strategy=strategy,
    )  # fmt: skip
    ids = torch.arange(400).unsqueeze(1)

    def read() -> None:
        weights = embedding.state_dict()["embedding_bags.a.weight"]
        assert len(weights.unique()) == 1

    with readers(2, read):
        for mine in hotrow.ahead([ids] * 60, embedding):
            embedding(mine).values().sum().backward()


def test_rows_loaded_by_another_thread_are_whole() -> None:
    embedding = collection("lookahead")
    ids = torch.arange(50).repeat(4, 1).t().contiguous()
    stop = threading.Event()

    def load() -> None:
        for value in range(200):
            embedding.load_weights("shop", 0, torch.full((50, 6), float(value)))
        stop.set()

    thread = threading.Thread(target=load)
    embedding.load_weights("shop", 0, torch.zeros(50, 6))
    thread.start()
    while not stop.is_set():
        shop = vectors(embedding, ids)[:, -6:]
        assert len(shop.unique()) == 1
    thread.join()


# -- what a read costs -------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts calls of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


# Threads compete for Python's lock in each of these calls. Hashed maps need most of them.
@pytest.mark.parametrize(
    ("strategy", "most"), [("all-fast", 20), ("cpu", 20), ("hybrid", 20), ("lookahead", 150)]
)
def test_a_read_needs_few_calls_of_torch(strategy: str, most: int) -> None:
    embedding = collection(strategy)
    train(embedding)
    ids = probes()[0]
    vectors(embedding, ids)  # the first read builds what later ones need
    with Calls() as calls:
        vectors(embedding, ids)
    assert calls.count <= most


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reads_in_several_parts_have_the_same_bits(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = collection(strategy)
    train(embedding)
    wanted = [vectors(embedding, ids) for ids in probes()]
    monkeypatch.setattr("hotrow.engine.direct.ALL_AT_ONCE", 7)
    monkeypatch.setattr("hotrow.engine.host.rows.ALL_AT_ONCE", 7)
    assert all(map(torch.equal, [vectors(embedding, ids) for ids in probes()], wanted))


# -- threads that train ------------------------------------------------------------------


def test_a_second_thread_that_trains_is_refused_by_name() -> None:
    embedding = collection("lookahead")
    ids = batches(1)[0]
    waiting = embedding(ids).values().sum()
    error = in_thread(lambda: embedding(ids))
    assert isinstance(error, RuntimeError)
    assert "thread 'second'" in str(error)
    assert "'MainThread'" in str(error)
    assert "no_grad" in str(error)
    waiting.backward()
    assert in_thread(lambda: embedding(ids).values().sum().backward()) is None
    embedding(ids).values().sum().backward()


def test_a_thread_that_iterates_is_named_to_one_that_trains() -> None:
    embedding = collection("lookahead")
    stream = hotrow.ahead(batches(8), embedding)
    ids = next(stream)
    error = in_thread(lambda: embedding(ids))
    assert "iterates over hotrow.ahead" in str(error)
    error = in_thread(lambda: next(stream))
    assert "takes a batch from hotrow.ahead" in str(error)
    embedding(ids).values().sum().backward()
    stream.close()
    assert in_thread(lambda: train(embedding)) is None


def test_a_lookup_whose_graph_is_gone_is_not_waited_for() -> None:
    embedding = collection("lookahead")
    ids = batches(1)[0]
    embedding(ids)
    assert in_thread(lambda: embedding(ids).values().sum().backward()) is None


def test_eval_in_another_thread_does_not_end_training() -> None:
    alone, shared = collection("lookahead"), collection("lookahead")
    train(alone)

    def evaluate() -> None:
        shared.eval()
        ids = probes()[0]
        assert not shared(ids).values().requires_grad
        shared.train()

    def after_step(step: int) -> None:
        assert in_thread(evaluate) is None
        assert shared.training

    train(shared, after_step)
    assert torch.equal(every_row(shared), every_row(alone))
    shared.eval()
    assert not shared.training
    assert in_thread(lambda: shared(probes()[0])) is None


# -- the lock ----------------------------------------------------------------------------


def test_readers_share_and_writers_exclude() -> None:
    lock = RowLock(shared=True)
    together, inside = threading.Barrier(4, timeout=5), []

    def read() -> None:
        with lock.reading():
            together.wait()  # all four are inside

    run_all(*[read] * 4)

    def write() -> None:
        with lock.writing(), lock.writing(), lock.reading():
            inside.append(1)
            time.sleep(0.001)
            assert inside == [1]
            inside.clear()

    run_all(*[lambda: [write() for _ in range(20)]] * 6)


def test_small_reads_take_turns_and_large_ones_do_not() -> None:
    lock = RowLock(shared=True)
    small = lock.turn(_FEW_LOOKUPS - 1, beside_training=False)
    large = lock.turn(_FEW_LOOKUPS, beside_training=True)
    inside: list[int] = []

    def read() -> None:
        for _ in range(20):
            with small:
                inside.append(1)
                time.sleep(0.001)
                assert inside == [1]
                inside.clear()

    run_all(*[read] * 4)
    together = threading.Barrier(4, timeout=5)

    def read_large() -> None:
        with large:
            together.wait()  # all four are inside

    run_all(*[read_large] * 4)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("hold", [RowLock.reading, RowLock.writing])
def test_a_thread_that_holds_the_lock_does_not_wait_for_its_turn(shared: bool, hold: Any) -> None:
    lock = RowLock(shared=shared)
    has_turn, is_done = threading.Event(), threading.Event()

    def read_elsewhere() -> None:
        with lock.turn(1, beside_training=True):
            has_turn.set()
            assert is_done.wait(5)

    with hold(lock), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_elsewhere)
        assert has_turn.wait(5)
        with lock.turn(1, beside_training=True):
            is_done.set()
        reading.result()


def test_a_check_excludes_readers() -> None:
    """It does updates that rows on the host still owe, which a reader would do as well."""
    embedding, held = collection("hybrid"), []
    for group in embedding.groups:
        for name in ("check", "settle"):
            setattr(group, name, lambda: held.append(embedding.lock.is_held_here))
    embedding.check()
    RowVerifier(embedding).verify(1)
    assert all(held)
    assert len(held) == 4 * len(embedding.groups)


def test_a_writer_is_not_kept_waiting_by_readers_that_come_and_go() -> None:
    lock = RowLock(shared=True)

    def read() -> None:
        with lock.reading(), lock.reading():
            time.sleep(0.001)

    with readers(6, read):
        begun = time.perf_counter()
        for _ in range(50):
            with lock.writing():
                pass
        assert time.perf_counter() - begun < 5


def test_a_loop_that_is_refused_leaves_the_other_thread_alone() -> None:
    embedding = collection("lookahead")
    ids = batches(1)[0]
    waiting = embedding(ids).values().sum()
    error = in_thread(lambda: next(hotrow.ahead(batches(4), embedding)))
    assert "waits for its gradients" in str(error)
    waiting.backward()
    stream = hotrow.ahead(batches(4), embedding)
    assert len(list(stream)) == 4
    with pytest.raises(StopIteration):
        next(stream)
    assert in_thread(lambda: train(embedding)) is None


def test_checkpoints_are_saved_and_loaded_by_the_thread_that_trains(tmp_path: Any) -> None:
    embedding = collection("lookahead")
    stream = hotrow.ahead(batches(4), embedding)
    embedding(next(stream)).values().sum().backward()
    error = in_thread(lambda: hotrow.save_checkpoint(tmp_path, embedding, step=1))
    assert "saves a checkpoint" in str(error)
    assert "'MainThread'" in str(error)
    hotrow.save_checkpoint(tmp_path, embedding, step=1)
    error = in_thread(lambda: hotrow.load_checkpoint(tmp_path, embedding))
    assert "'MainThread'" in str(error)
    stream.close()
    assert in_thread(lambda: hotrow.save_checkpoint(tmp_path, embedding, step=2)) is None
    assert in_thread(lambda: hotrow.load_checkpoint(tmp_path, embedding)) is None
