"""Rows that leave in bulk: no batch reads them in the store before they are there.

tests/engine/test_contract.py has the loops of users.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import weakref
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

import contracts
import hotrow
from builders import (
    CASES,
    build,
    outcome,
    readout,
    score_trainer,
    tight_budget,
    train,
)
from contracts import DEVICE, LateWriter, by_gpu, looking_ahead
from hotrow.engine.gpu.mover_choice import LEVELS, Effort, Level
from hotrow.engine.strategy import Strategy
from hotrow.engine.tuning import Tuning
from hotrow.kernels.triton.fill import ALL
from hotrow.kernels.triton.words import LAST_USE
from hotrow.store.writer import Writer
from hotrow.support.streams import Mark

STEPS = 8
ONE_HOT = CASES["one-hot"]
VICTIMS = ("own", "random", "most-recent")
all_fast = partial(contracts.all_fast, steps=STEPS, device="gpu")


class Restless(Effort):
    """Another level for every batch."""

    turns = count()

    @property
    def level(self) -> Level:
        return LEVELS[next(self.turns) % len(LEVELS)]


def tight(
    case: str = "one-hot",
    rule: str = "sgd",
    victims: str = "own",
    *,
    roomier: float = 1.0,
    steps: int = STEPS,
    fill: str = "bulk",
    strategy: Strategy | None = None,
    **parts: Any,
) -> hotrow.EmbeddingBagCollection:
    strategy = strategy or looking_ahead(victims)
    budget = tight_budget(CASES[case], CASES[case].batches(steps), strategy.hold)
    shares = [replace(share, slots=int(roomier * share.slots)) for share in budget.shares]
    options = {"budget": replace(budget, shares=tuple(shares)), "fill": fill, **by_gpu(**parts)}
    return build(CASES[case], rule, strategy, **options)


# Every pair of a case, victims and a depth occurs.
CHOICES = [
    (case, rule, VICTIMS[(first + second) % 3], (1, 3, 8)[second])
    for first, (case, rule) in enumerate(
        [("one-hot", "adam"), ("multi-hot", "row-wise"), ("two-widths", "sgd")]
    )
    for second in range(3)
]


@pytest.mark.thinned(5)
@pytest.mark.parametrize(("case", "rule", "victims", "depth"), CHOICES)
def test_rows_that_leave_in_bulk_give_the_bits_of_all_fast(
    case: str, rule: str, victims: str, depth: int
) -> None:
    late = LateWriter()
    embedding = tight(case, rule, victims, writer=late)
    found = train(embedding, CASES[case].batches(STEPS), depth=depth)
    assert found.same_bits(all_fast(case, rule))
    assert embedding.traffic().chunked_batches == 0
    assert embedding.traffic().evicted_rows > STEPS
    assert late.done
    embedding.check()


@pytest.mark.parametrize("fill", ["bulk", pytest.param("zero-copy", marks=pytest.mark.slow)])
def test_fills_of_every_size_take_turns_with_the_same_bits(fill: str) -> None:
    late = LateWriter()
    embedding = tight("one-hot", "adam", "random", fill=fill, writer=late)
    embedding.groups[0].mover.effort = Restless()
    found = train(embedding, ONE_HOT.batches(STEPS), depth=3)
    assert found.same_bits(all_fast("one-hot", "adam"))
    assert embedding.traffic().evicted_rows > STEPS
    assert bool(late.done) == (fill == "bulk")


@pytest.mark.slow
def test_where_one_ranking_serves_many_batches_none_reads_too_early_either() -> None:
    """Many slots, so that rankings know last uses, and new ones are seldom made."""
    tables = [hotrow.EmbeddingBagConfig("t", 1500, 4, ["f"])]
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.rand(24, 1, generator=generator) ** 3 * 1500).long().to(DEVICE) for _ in range(70)
    ]
    budget = hotrow.Budget((hotrow.Share(360, 64, False),), window_bytes=1 << 16)
    tuning, results = Tuning(spare_victims=0, least_certain=0), []
    for strategy, options in (
        (looking_ahead("own"), {"budget": budget, "fill": "bulk"}),
        ("all-fast", {}),
    ):
        embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.Adagrad(), strategy=strategy, seed=3,
            **by_gpu(writer=LateWriter(), tuning=tuning), **options,
        )  # fmt: skip
        losses = []
        for part in (batches[:50], batches[50:]):  # a window that is forgotten
            for batch in hotrow.ahead(part, embedding, depth=7):
                loss = readout(embedding(batch))
                loss.backward()
                losses.append(loss.detach())
        results.append(outcome(embedding, losses))
        if options:
            planner, traffic = embedding.groups[0].planner, embedding.traffic()
            assert planner._known_use == LAST_USE
            assert planner._rankings < len(batches) * 2 / 3
            assert traffic.fetched_rows - traffic.made_rows > len(batches)  # rows come back
    assert results[0].same_bits(results[1])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("victims", VICTIMS)
def test_with_threads_of_their_own_they_do_too(victims: str) -> None:
    found = train(tight("one-hot", "adam", victims), ONE_HOT.batches(STEPS), depth=5)
    assert found.same_bits(all_fast("one-hot", "adam"))


@pytest.mark.slow
def test_rows_of_several_batches_go_together() -> None:
    steps = 14
    embedding = tight(roomier=2.0, steps=steps, writer=LateWriter())
    back, sent = embedding.groups[0].mover.back, list[int]()
    send = back._send

    def noted() -> None:
        if back._packet.filled:
            sent.append(back._packet.filled)
        send()

    back._send = noted
    train(embedding, ONE_HOT.batches(steps), depth=6)
    assert 0 < len(sent) < steps - 5  # batches that evict


class Busy(LateWriter):
    """Has written a job when it is asked for the third time, or waited for."""

    def is_done(self, number: int) -> bool:
        if self.asked_for.setdefault(number, 0) < 2:
            self.asked_for[number] += 1
            return False
        self.wait(number)
        return True

    def __init__(self) -> None:
        super().__init__()
        self.asked_for: dict[int, int] = {}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", ["one-hot", "two-widths"])
@pytest.mark.parametrize("writer", [LateWriter, Busy])
@pytest.mark.parametrize("waits", [False, True])
def test_rows_of_a_batch_leave_in_several_packets(
    case: str, writer: type[LateWriter], waits: bool
) -> None:
    """Some of them written by the device, while the CPU has no time."""
    late, tuning = writer(), Tuning(least_certain=0, most_packed=3, sorted_from=1)
    embedding = tight(case, "adam", "random", writer=late, tuning=tuning)
    parts = dict.fromkeys(["packed", "written"], 0)
    for group in embedding.groups:
        mover = group.mover
        mover._waits = waits
        launch, pack = mover._launch_fill, mover.back.pack

        def fill(b: Any, leaving: Any, blocks: int, span: Any = ALL, launch: Any = launch) -> None:
            parts["written"] += leaving is not None and span is not ALL
            launch(b, leaving, blocks, span)

        def packed(*given: Any, pack: Any = pack) -> None:
            parts["packed"] += 1
            pack(*given)

        mover._launch_fill, mover.back.pack = fill, packed
    found = train(embedding, CASES[case].batches(STEPS), depth=3)
    assert found.same_bits(all_fast(case, "adam"))
    assert parts["packed"] > STEPS
    assert bool(parts["written"]) == (writer is Busy and not waits)
    assert late.done
    embedding.check()


class PassesLate(Mark):
    """Has passed when it is asked for the fourth time, or waited for: as on a busy device."""

    asked = 0

    def wait(self) -> None:
        self.asked = 3

    def passed(self) -> bool:
        self.asked += 1
        return self.asked > 3


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there a mark is an event")
@pytest.mark.thinned(6)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("packed", "least"), [(40, 0), (3, 0), (7, 1)])
def test_rows_are_found_wherever_they_are_on_their_way(
    packed: int, least: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an evaluation, a flush, a batch that was not announced, and a loop after one that was
    left, while packets are being filled, copied and written."""
    monkeypatch.setattr("hotrow.support.streams.Lanes.mark", lambda self, name: PassesLate())
    monkeypatch.setattr("hotrow.engine.gpu.planner._is_done", lambda plan: plan.outcome is not None)
    tuning = Tuning(least_certain=least, most_packed=packed, sorted_from=1, spare_victims=0)
    found, batches = [], CASES["two-widths"].batches(12)
    for embedding in (
        tight(
            "two-widths",
            "adam",
            "random",
            roomier=1.3,
            steps=12,
            writer=LateWriter(),
            tuning=tuning,
        ),
        build(CASES["two-widths"], "adam", **by_gpu()),
    ):
        for group in embedding.groups:
            group.mover._waits = waits
        losses = []

        def step(batch: Any, embedding: Any = embedding, losses: Any = losses) -> None:
            loss = readout(embedding(batch))
            loss.backward()
            losses.append(loss.detach())

        stream = hotrow.ahead(batches[:9], embedding, depth=5)
        for number, batch in enumerate(stream):
            step(batch)
            if number % 3 == 1:
                with torch.no_grad():
                    losses.append(readout(embedding(batches[number * 5 % 12])))
            if number == 4:
                embedding.row_access.flush()
            if number == 6:
                break
        stream.close()
        step(batches[10])
        for batch in hotrow.ahead(batches[3:], embedding, depth=3):
            step(batch)
        embedding.check()
        found.append(outcome(embedding, losses))
    assert found[0].same_bits(found[1])


def test_a_batch_that_did_not_wait_would_read_old_bits() -> None:
    """Or this file could not tell right from wrong."""
    embedding = tight("one-hot", "adam", "random", writer=LateWriter())
    embedding.groups[0].mover.back.let_read = lambda batch: None
    found = train(embedding, ONE_HOT.batches(STEPS), depth=3)
    assert not found.same_bits(all_fast("one-hot", "adam"))


def test_a_row_that_the_store_does_not_have_is_an_error() -> None:
    class Elsewhere(Writer):
        def write(self, store: Tensor, ids: Tensor, rows: Tensor) -> int:
            return super().write(store, ids + 10_000, rows)

    embedding = tight(writer=Elsewhere(1))
    with pytest.raises(RuntimeError, match=r"which the store does not have"):
        train(embedding, ONE_HOT.batches(STEPS), depth=3)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [4, 6])
def test_a_loop_after_one_that_was_left_finds_every_row(stop: int) -> None:
    """The batches that were known ahead do not come: others do."""
    batches, weights = ONE_HOT.batches(12), []
    embedding = tight("one-hot", "adam", "random", steps=12, writer=LateWriter())
    for each in (embedding, build(ONE_HOT, "adam", **by_gpu())):
        stream = hotrow.ahead(batches, each, depth=9)
        for step, batch in enumerate(stream):
            each(batch).values().sin().sum().backward()
            if step == stop:
                break
        stream.close()
        for batch in hotrow.ahead(batches[4::-1], each, depth=9):
            each(batch).values().sin().sum().backward()
        weights.append(each.state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])


@pytest.mark.parametrize(
    ("least", "refetch", "in_bulk"), [(1, False, True), (4, False, False), (0, True, False)]
)
def test_rows_that_may_be_read_soon_are_written_at_once(
    least: int, refetch: bool, in_bulk: bool
) -> None:
    """They would be waited for; rows that are fetched anew leave and enter the same slot."""
    late, strategy = LateWriter(), replace(looking_ahead("own"), refetch=refetch)
    embedding = tight(strategy=strategy, writer=late, tuning=Tuning(least_certain=least))
    assert embedding.fills()[4].form == ("zero-copy" if refetch else "bulk")
    found = train(embedding, ONE_HOT.batches(STEPS), depth=3)
    assert bool(late.asked) == in_bulk
    assert found.same_bits(all_fast("one-hot", "sgd"))


# -- memory ------------------------------------------------------------------------------


def test_memory_is_given_back_after_a_trainer() -> None:
    embedding = tight("one-hot", "adagrad", writer=Writer(1))  # one that no other test holds
    trainer = score_trainer(embedding)
    assert len(list(trainer.run(ONE_HOT.batches(STEPS)))) == STEPS
    trainer.mean_loss(ONE_HOT.batches(2))
    del trainer
    (group,) = embedding.groups
    back = group.mover.back
    assert any(load.there is not None for load in back._loads)
    gone = [weakref.ref(each) for each in (embedding, group, group.store, back, back._writer)]
    rows = weakref.ref(group.store.rows)
    del embedding, group, back
    assert [each() for each in (*gone, rows)] == [None] * 6


@pytest.mark.slow  # another process
def test_the_first_collection_of_a_program_is_given_back_too() -> None:
    """No garbage collection runs here: what torch imports for it must not hold it."""
    script = """
        import gc, sys, weakref
        gc.disable()
        import torch, hotrow
        from hotrow.engine.gpu.rows import gpu_rows
        table = hotrow.EmbeddingBagConfig("t", 100, 4, ["f"])
        budget = hotrow.Budget((hotrow.Share(16, 32, True),), window_bytes=4096)
        embedding = hotrow.EmbeddingBagCollection(
            [table], hotrow.SGD(), budget=budget, fill="bulk", device=sys.argv[1], engine=gpu_rows
        )
        for batch in hotrow.ahead([torch.arange(i, i + 4)[:, None] for i in range(9)], embedding):
            embedding(batch).values().sum().backward()
        embedding.row_access.flush()
        (group,) = embedding.groups
        gone = [weakref.ref(each) for each in (embedding, group, group.store)]
        del embedding, group
        print([each() for each in gone])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), DEVICE.type],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == "[None, None, None]\n"
