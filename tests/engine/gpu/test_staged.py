"""Rows that go by way of the copy engine and the CPU: the bits of all-fast, however late they are.

Where there is no GPU, the engine runs on the CPU with Triton's interpreter; the thread that moves
rows is a real one there, too. tests/engine/test_contract.py has the loops of users.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import contracts
import hotrow
from builders import CASES, Late, LateJob, Outcome, build, shuffled, tight_budget, train, variant
from contracts import DEVICE, by_gpu
from hotrow.engine.gpu.memory import _why_not_bulk
from hotrow.engine.gpu.mover_choice import FillChoice, choose
from hotrow.engine.gpu.staged import Worker, shared_worker
from hotrow.engine.stages import FIVE, SPLIT, hold_of
from hotrow.engine.strategy import Strategy, as_listed
from hotrow.engine.tuning import Tuning
from hotrow.kernels.triton import fill as kernels
from hotrow.sizing.fill_rates import measure
from hotrow.store.ram import Store
from hotrow.support.streams import lanes_of

STEPS = 7
ONE_HOT = CASES["one-hot"]
SCHEDULES = {"lookahead": "split", "scratchpipe": "five"}
slow = pytest.mark.slow
each_name = pytest.mark.parametrize("name", [pytest.param("lookahead", marks=slow), "scratchpipe"])


def tight(
    name: str = "lookahead",
    victims: str = "most-recent",
    *,
    rule: str = "adagrad",
    steps: int = STEPS,
    order: Any = as_listed,
    **parts: Any,
) -> hotrow.EmbeddingBagCollection:
    """As few slots as the batches in flight need, and victims that show every mistake."""
    strategy = replace(variant(name, SCHEDULES.get(name, ""), victims), pinned_part=0.0)
    strategy = replace(strategy, order=order)
    budget = tight_budget(ONE_HOT, ONE_HOT.batches(steps), strategy.hold)
    options = {"budget": budget, "fill": "staged", **by_gpu(**parts)}
    return build(ONE_HOT, rule, strategy, **options)


def all_fast(rule: str = "adagrad", steps: int = STEPS) -> Outcome:
    return contracts.all_fast("one-hot", rule, steps, "gpu")


# -- the same bits -----------------------------------------------------------------------


@pytest.mark.thinned(5)
@pytest.mark.parametrize("depth", [4, 0])
@pytest.mark.parametrize("victims", ["random", "most-recent"])
@pytest.mark.parametrize("name", ["lookahead", "scratchpipe"])
def test_rows_that_come_late_are_waited_for(name: str, victims: str, depth: int) -> None:
    late = Late()
    embedding = tight(name, victims, rule="adam", steps=10, worker=late)
    found = train(embedding, ONE_HOT.batches(10), depth=depth)
    assert found.same_bits(all_fast("adam", 10))
    assert set(late.done) == {"write_rows", "_gather"}


class Disordered(Late):
    """Writes after the next batch's rows have been gathered, as two threads might."""

    def ask(self, job: Callable[..., None], *args: Any) -> LateJob:
        if job.__name__ == "write_rows":
            return super().ask(job, *args)
        job(*args)
        return LateJob(self, job, args, is_done=True)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there a mark is an event")
@each_name
def test_rows_gathered_before_they_are_written_give_wrong_bits(name: str) -> None:
    """Or this file could not tell right from wrong."""
    embedding = tight(name, steps=10, worker=Disordered())
    found = train(embedding, ONE_HOT.batches(10), depth=5)
    assert not found.same_bits(all_fast(steps=10))


@each_name
def test_the_order_of_stages_in_a_cycle_does_not_matter(name: str) -> None:
    found = train(tight(name, order=shuffled), ONE_HOT.batches(STEPS), depth=4)
    assert found.same_bits(all_fast())


def test_marks_of_batches_that_are_too_large_for_a_packet_do_not_pile_up() -> None:
    embedding = tight("scratchpipe", steps=10, tuning=Tuning(most_packed=1))
    train(embedding, ONE_HOT.batches(10), depth=4)
    assert 0 < len(embedding.groups[0].mover.staged._changed) < 5


@each_name
def test_a_batch_that_moves_more_than_a_packet_holds_moves_at_once(name: str) -> None:
    late, moved_at_once = Late(), list[int]()
    embedding = tight(name, worker=late, tuning=Tuning(most_packed=5))
    (group,) = embedding.groups
    fill = group.mover.fill

    def noted(work: Any) -> None:
        moved_at_once.append(work.plan.num_moves)
        fill(work)

    group.mover.fill = noted
    found = train(embedding, ONE_HOT.batches(STEPS), depth=4)
    assert found.same_bits(all_fast())
    assert moved_at_once, "no batch was too large"
    assert min(moved_at_once) > 5
    assert late.done, "no batch was small enough"


@pytest.mark.thinned(5)
@pytest.mark.skipif(DEVICE.type == "cuda", reason="test_staged_on_gpu.py has it there")
@pytest.mark.parametrize("name", ["lookahead", "scratchpipe", "lru", "uncached"])
@pytest.mark.parametrize("most", [5, 1 << 16])
def test_a_store_that_is_not_page_locked_is_moved_by_the_host(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device must not touch the store at all."""
    embedding = tight(name, page_locked=False, tuning=Tuning(most_packed=most))
    expected, store = all_fast(), embedding.groups[0].store.rows.data_ptr()
    for kernel in ("fill", "gather", "scatter"):  # slots they may touch
        monkeypatch.setattr(kernels, kernel, _not_of(store, getattr(kernels, kernel)))
    assert embedding.fills()[4].form == "staged"
    assert train(embedding, ONE_HOT.batches(STEPS)).same_bits(expected)
    assert embedding.traffic().evicted_rows > 0


def _not_of(store: int, kernel: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        assert all(x.data_ptr() != store for x in args if isinstance(x, Tensor))
        kernel(*args)

    return run


@pytest.mark.slow
def test_batches_planned_again_do_not_count_on_being_held() -> None:
    """A row that one of them makes leave may be fetched by the next one.

    Plans are made a cycle earlier here than in FIVE, so that two batches are planned again.
    """
    stages = tuple(replace(each, cycle=each.cycle + (each.cycle > 0)) for each in FIVE)
    strategy = replace(variant("scratchpipe", victims="most-recent"), stages=stages)

    def batch(first: int, size: int = 4) -> Tensor:
        return torch.stack([torch.arange(first, first + size), torch.zeros(size).long()], dim=1)

    large, last, new = batch(0, 40), batch(28), batch(40)
    batches = [*(batch(4 * place) for place in range(8)), large, new, last, batch(44), last]
    expected = train(build(ONE_HOT, "sgd", **by_gpu()), batches)
    budget = hotrow.Budget((hotrow.Share(28, 64, True),), window_bytes=1 << 14)
    embedding = build(ONE_HOT, "sgd", strategy, budget=budget, **by_gpu(worker=Late()))
    with pytest.warns(UserWarning, match="a batch of 41 different rows does not fit the 28 slots"):
        found = train(embedding, batches)
    assert found.same_bits(expected)
    assert embedding.traffic().chunked_batches <= 2


# -- the thread --------------------------------------------------------------------------


class Failing(Worker):
    """The third job of one kind fails."""

    def __init__(self, job: str) -> None:
        super().__init__()
        self.fails, self.calls = job, itertools.count()

    def ask(self, job: Any, *args: Any) -> Any:
        def fail(*_: Any) -> None:
            raise OSError("no such page")

        is_third = job.__name__ == self.fails and next(self.calls) == 2
        return super().ask(fail if is_third else job, *args)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("job", ["_gather", "write_rows"])
@pytest.mark.parametrize("name", ["lookahead", "scratchpipe"])
def test_an_error_in_the_background_is_raised_in_the_loop(name: str, job: str) -> None:
    embedding = tight(name, worker=Failing(job))
    with pytest.raises(RuntimeError, match=r"in the background \(OSError: no such page\)"):
        train(embedding, ONE_HOT.batches(20))
    with pytest.raises(RuntimeError, match="no such page"):  # and never forgotten
        embedding.row_access.flush()


def test_the_thread_ends_with_the_last_reference() -> None:
    embedding = tight(worker=Worker())  # one that no other test holds
    train(embedding, ONE_HOT.batches(3))
    staged = embedding.groups[0].mover.staged
    thread, gone = next(iter(staged._worker._threads)), weakref.ref(staged)
    assert thread.is_alive()
    del embedding, staged
    assert gone() is None
    thread.join(timeout=10)
    assert not thread.is_alive()


@each_name
def test_where_there_is_no_compiler_threads_of_python_move_rows(name: str) -> None:
    worker = Worker(in_c=False)
    assert worker._writer is None
    found = train(tight(name, worker=worker), ONE_HOT.batches(STEPS))
    assert found.same_bits(all_fast())


def test_several_widths_share_one_thread_and_its_number_of_cores() -> None:
    threads = torch.get_num_threads()
    assert shared_worker() is shared_worker()
    worker = Worker(in_c=False)
    assert worker._count == max(1, min(2, threads // 2))
    for each in (worker, worker._others)[: worker._count]:
        assert each.submit(torch.get_num_threads).result() == 1
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert [torch.get_num_threads(), *found] == [threads, threads]


@pytest.mark.slow  # another process
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter's")
def test_a_program_ends_though_rows_are_on_their_way() -> None:
    script = """
        import time, torch, hotrow
        from functools import partial
        from hotrow.engine.gpu.rows import gpu_rows
        from hotrow.engine.gpu.staged import Worker
        class Slow(Worker):
            def _do(self, *args):
                time.sleep(0.1)
                super()._do(*args)
        table = hotrow.EmbeddingBagConfig("t", 100, 4, ["f"])
        budget = hotrow.Budget((hotrow.Share(8, 32, True),), window_bytes=4096)
        embedding = hotrow.EmbeddingBagCollection(
            [table], hotrow.SGD(), budget=budget, strategy="scratchpipe",
            engine=partial(gpu_rows, worker=Slow()),
        )
        batches = [torch.tensor([[3 * i % 100], [(3 * i + 1) % 100]]) for i in range(9)]
        for place, batch in enumerate(hotrow.ahead(batches, embedding)):
            embedding(batch).values().sum().backward()
            if place == 3:
                break
        print("the end", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("the end\n", "")


def test_what_is_asked_for_when_threads_have_ended_is_done_at_once() -> None:
    worker, found = Worker(), list[Any]()
    worker.shutdown()
    worker.ask(lambda *asked: found.append(asked), 1, 2, 3, ()).result()
    assert found == [(1, 2, 3, ())]


# -- the choice --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "bulk", "chosen"),
    [
        (3, True, FillChoice("zero-copy", "3 cores have enough to do")),
        (4, True, FillChoice("bulk", "the CPU writes rows back while it has time")),
        (16, False, FillChoice("zero-copy", "leaving rows cannot wait")),
    ],
)
def test_rows_go_back_in_bulk_where_there_are_cores_for_it(
    cores: int, bulk: bool, chosen: FillChoice
) -> None:
    assert choose(bulk=bulk, cores=cores) == chosen
    assert str(chosen) == f"{chosen.form} ({chosen.why})"


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (variant("lookahead"), ""),
        (variant("lookahead", victims="random"), "does not know which rows come again"),
        (variant("lru"), "does not know which rows come again"),
        (replace(variant("lookahead"), refetch=True), "fetches rows that are there"),
    ],
)
def test_bulk_is_tried_where_a_strategy_can_use_it(strategy: Strategy, reason: str) -> None:
    assert _why_not_bulk(strategy).endswith(reason)
    assert bool(_why_not_bulk(strategy)) == bool(reason)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="test_staged_on_gpu.py measures there")
def test_measuring_tries_every_form_and_leaves_the_store_as_it_was() -> None:
    rows, state = torch.zeros(1400, 4), torch.random.get_rng_state()
    forms = ("zero-copy", "bulk", "staged")
    found = measure(Store(rows), DEVICE, lanes_of(DEVICE), 16, forms)
    assert tuple(found) == forms
    assert all(rate > 0 for rate in found.values())
    assert not rows.any()
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "fill", "form"),
    [
        ("lookahead", "staged", "staged"),
        ("scratchpipe", "auto", "staged"),
        ("scratchpipe", "zero-copy", "zero-copy"),
        ("lru", "auto", "zero-copy"),
        ("uncached", "bulk", "zero-copy"),
    ],
)
def test_the_chosen_form_is_reported(name: str, fill: str, form: str) -> None:
    embedding = build(ONE_HOT, strategy=name, budget=4_000, fill=fill, **by_gpu())
    choice = embedding.fills()[4]
    assert isinstance(choice, FillChoice)
    assert choice.form == form
    assert (embedding.memory().get("rows on their way", 0) > 0) is (form != "zero-copy")
    assert build(ONE_HOT, **by_gpu()).fills() == {}


def test_a_form_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="fill must be one of auto, zero-copy, bulk, staged, not"):
        build(ONE_HOT, fill="stagd")


def test_packets_take_their_bytes_from_the_slots() -> None:
    tables = [hotrow.EmbeddingBagConfig("t", 40_000, 16, ["f"])]
    memory, slots = {}, {}
    for fill in ("zero-copy", "staged"):
        embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.SGD(), "10%", strategy="lookahead", fill=fill, **by_gpu()
        )
        memory[fill], slots[fill] = sum(embedding.memory().values()), embedding.num_slots
        packets = embedding.memory().get("rows on their way", 0)
    assert 0 < packets < 0.12 * memory["zero-copy"]
    assert slots["staged"] < slots["zero-copy"]
    # A slot's state takes less than it is counted for.
    assert memory["staged"] <= 1.02 * memory["zero-copy"] < 0.1 * embedding.bytes_total


def test_rows_that_are_staged_hold_one_batch_more() -> None:
    assert hold_of(SPLIT) == hotrow.engine.planner.Hold(past=2, future=0)
    embedding = build(ONE_HOT, strategy="lookahead", budget=4_000, fill="staged", **by_gpu())
    assert embedding.strategy.stages is SPLIT
    assert embedding.strategy.name == "lookahead"
