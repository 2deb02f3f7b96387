"""Rows that leave in bulk: nobody reads them in the store before they are there."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import weakref
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrow
import hotrow.embedding.collection
import hotrow.engine.gpu.bulk
import hotrow.engine.gpu.memory
import hotrow.engine.gpu.planner
from builders import CASES, RULES, Outcome, outcome, readout, tight_budget, train, variant
from hotrow.engine.evict import EVICTIONS
from hotrow.engine.gpu.mover_choice import LEVELS, Effort, Level
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.strategy import Strategy
from hotrow.kernels.triton.words import LAST_USE
from hotrow.store.writer import Writer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 9
VICTIMS = ("own", "random", "most-recent")


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(hotrow.embedding.collection, "_engine", lambda device: gpu_rows)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateWriter:
    writer = LateWriter()
    monkeypatch.setattr(hotrow.engine.gpu.bulk, "shared_writer", lambda: writer)
    return writer


class LateWriter:
    """Writes nothing until somebody waits for it: later than any thread could be."""

    def __init__(self) -> None:
        self.asked: list[tuple[Tensor, Tensor, Tensor]] = []
        self.done = 0

    def write(self, store: Tensor, ids: Tensor, rows: Tensor) -> int:
        self.asked.append((store, ids, rows))
        return len(self.asked)

    def wait(self, number: int) -> None:
        while self.done < number:
            store, ids, rows = self.asked[self.done]
            store[ids[ids >= 0]] = rows[ids >= 0]
            self.done += 1

    def wait_for_all(self) -> None:
        self.wait(len(self.asked))


class Restless(Effort):
    """Another level for every batch."""

    turns = count()

    @property
    def level(self) -> Level:
        return LEVELS[next(self.turns) % len(LEVELS)]


def looking_ahead(victims: str) -> Strategy:
    """Other victims than its own, though next uses are known: rows come back soon."""
    strategy = replace(variant("lookahead"), pinned_part=0.0)
    if victims == "own":
        return strategy
    return replace(strategy, eviction=replace(EVICTIONS[victims], looks_ahead=True))


def build(
    case: str, rule: str = "adagrad", strategy: str | Strategy = "all-fast", **options: Any
) -> hotrow.EmbeddingBagCollection:
    return hotrow.EmbeddingBagCollection(
        CASES[case].tables, RULES[rule], strategy=strategy, seed=3, device=DEVICE, **options
    )


def tight(
    case: str,
    rule: str,
    victims: str,
    *,
    roomier: float = 1.0,
    steps: int = STEPS,
    fill: str = "bulk",
) -> hotrow.EmbeddingBagCollection:
    strategy = looking_ahead(victims)
    budget = tight_budget(CASES[case], CASES[case].batches(steps), strategy.hold)
    shares = [replace(share, slots=int(roomier * share.slots)) for share in budget.shares]
    budget = replace(budget, shares=tuple(shares))
    return build(case, rule, strategy, budget=budget, fill=fill)


@cache
def all_fast(case: str, rule: str, steps: int = STEPS) -> Outcome:
    return train(build(case, rule), CASES[case].batches(steps))


# Every pair of a case, victims and a depth occurs.
CHOICES = [
    (case, rule, VICTIMS[(first + second) % 3], (1, 3, 8)[second])
    for first, (case, rule) in enumerate(
        [("one-hot", "adam"), ("multi-hot", "row-wise"), ("two-widths", "sgd")]
    )
    for second in range(3)
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("case", "rule", "victims", "depth"), CHOICES)
def test_rows_that_leave_in_bulk_give_the_bits_of_all_fast(
    case: str, rule: str, victims: str, depth: int, late: LateWriter
) -> None:
    embedding = tight(case, rule, victims)
    found = train(embedding, CASES[case].batches(STEPS), depth=depth)
    assert found.same_bits(all_fast(case, rule))
    assert embedding.traffic().chunked_batches == 0
    assert embedding.traffic().evicted_rows > STEPS
    assert late.done
    embedding.check()


@pytest.mark.parametrize("fill", ["bulk", "zero-copy"])
def test_fills_of_every_size_take_turns_with_the_same_bits(
    fill: str, late: LateWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hotrow.engine.gpu.memory, "Effort", Restless)
    embedding = tight("one-hot", "adam", "random", fill=fill)
    found = train(embedding, CASES["one-hot"].batches(STEPS), depth=3)
    assert found.same_bits(all_fast("one-hot", "adam"))
    assert embedding.traffic().evicted_rows > STEPS
    assert bool(late.done) == (fill == "bulk")
    embedding.check()


@pytest.mark.slow
def test_where_one_ranking_serves_many_batches_nobody_reads_too_early_either(
    late: LateWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many slots, so that rankings know last uses, and new ones are seldom made."""
    monkeypatch.setattr(hotrow.engine.gpu.planner, "_SPARE", 0)
    tables = [hotrow.EmbeddingBagConfig("t", 1500, 4, ["f"])]
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.rand(24, 1, generator=generator) ** 3 * 1500).long().to(DEVICE) for _ in range(70)
    ]
    budget = hotrow.Budget((hotrow.Share(360, 64, False),), window_bytes=1 << 16)
    strategy = looking_ahead("own")
    collections = [
        hotrow.EmbeddingBagCollection(
            tables, hotrow.Adagrad(), strategy=each, seed=3, device=DEVICE, **options
        )
        for each, options in (
            (strategy, {"budget": budget, "fill": "bulk"}),
            ("all-fast", {}),
        )
    ]
    embedding = collections[0]
    planner = embedding.groups[0].planner
    found = []
    for each in collections:
        losses = []
        for part in (batches[:50], batches[50:]):  # a window that is forgotten
            for batch in hotrow.ahead(part, each, depth=7):
                loss = readout(each(batch))
                loss.backward()
                losses.append(loss.detach())
        found.append(outcome(each, losses))
    assert planner._known_use == LAST_USE
    assert planner._rankings < len(batches) * 2 / 3
    traffic = embedding.traffic()
    assert traffic.fetched_rows - traffic.made_rows > len(batches)  # rows come back
    assert found[0].same_bits(found[1])


def test_with_threads_of_their_own_they_do_too() -> None:
    for victims in VICTIMS:
        embedding = tight("one-hot", "adamw", victims)
        found = train(embedding, CASES["one-hot"].batches(STEPS), depth=5)
        assert found.same_bits(all_fast("one-hot", "adamw"))


def test_rows_of_several_batches_go_together(late: LateWriter) -> None:
    steps = 18
    embedding = tight("one-hot", "sgd", "own", roomier=2.0, steps=steps)
    (group,) = embedding.groups
    sent = []
    real = group.mover.back._send

    def send() -> None:
        if group.mover.back._packet.filled:
            sent.append(group.mover.back._packet.filled)
        real()

    group.mover.back._send = send
    found = train(embedding, CASES["one-hot"].batches(steps), depth=6)
    assert found.same_bits(all_fast("one-hot", "sgd", steps))
    evicting = steps - 5
    assert 0 < len(sent) < evicting


def test_a_batch_that_did_not_wait_would_read_old_bits(
    late: LateWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or this file could not tell right from wrong."""
    monkeypatch.setattr(hotrow.engine.gpu.bulk.WriteBack, "let_read", lambda self, batch: None)
    embedding = tight("one-hot", "adam", "random")
    found = train(embedding, CASES["one-hot"].batches(STEPS), depth=3)
    assert not found.same_bits(all_fast("one-hot", "adam"))


def test_evaluation_and_a_second_loop_find_every_row(late: LateWriter) -> None:
    batches = CASES["one-hot"].batches(STEPS)
    embedding, expected = tight("one-hot", "adam", "own"), build("one-hot", "adam")
    for each in (embedding, expected):
        for part in (batches[:5], batches[5:]):
            for batch in hotrow.ahead(part, each):
                each(batch).values().sin().sum().backward()
                with torch.no_grad():
                    each.eval()
                    each(batches[0].to(DEVICE))
                    each.train()
    for table in embedding.tables:
        for (_, one), (_, other) in zip(
            embedding.rows(table.name), expected.rows(table.name), strict=False
        ):
            count = min(len(one), len(other))
            assert torch.equal(one[:count], other[:count])


def test_a_row_that_the_store_does_not_have_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Writer.write

    def write(self: Writer, store: Tensor, ids: Tensor, rows: Tensor) -> int:
        return real(self, store, ids + 10_000, rows)

    monkeypatch.setattr(Writer, "write", write)
    monkeypatch.setattr(hotrow.engine.gpu.bulk, "shared_writer", Writer)  # others keep theirs whole
    embedding = tight("one-hot", "sgd", "own")
    with pytest.raises(RuntimeError, match=r"which the store does not have"):
        train(embedding, CASES["one-hot"].batches(STEPS), depth=3)


def test_strategies_that_look_not_ahead_write_rows_at_once() -> None:
    embedding = build("one-hot", "sgd", "lru", budget=4_000, fill="bulk")
    (group,) = embedding.groups
    assert group.mover.back is None
    assert "does not know which rows come again" in str(embedding.fills())


@pytest.mark.parametrize("stop", [4, 7])
def test_a_loop_after_one_that_was_left_finds_every_row(stop: int, late: LateWriter) -> None:
    """The batches that were known ahead do not come: others do."""
    batches = CASES["one-hot"].batches(14)
    embedding = tight("one-hot", "adam", "random", steps=14)
    expected = build("one-hot", "adam")
    for each in (embedding, expected):
        stream = hotrow.ahead(batches, each, depth=9)
        for step, batch in enumerate(stream):
            each(batch).values().sin().sum().backward()
            if step == stop:
                break
        stream.close()
        for batch in hotrow.ahead(batches[6::-1], each, depth=9):
            each(batch).values().sin().sum().backward()
    for table in embedding.tables:
        one, other = (
            torch.cat([rows.clone() for _, rows in each.rows(table.name)])
            for each in (embedding, expected)
        )
        assert torch.equal(one, other)


def test_where_few_batches_are_known_rows_are_written_at_once(
    late: LateWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that may be read soon would be waited for."""
    for least, in_bulk in ((1, True), (4, False)):
        monkeypatch.setattr(hotrow.engine.gpu.bulk, "_LEAST_CERTAIN", least)
        late.asked.clear()
        late.done = 0
        embedding = tight("one-hot", "sgd", "own")
        found = train(embedding, CASES["one-hot"].batches(STEPS), depth=3)
        assert bool(late.asked) == in_bulk
        assert found.same_bits(all_fast("one-hot", "sgd"))


def test_rows_that_are_fetched_anew_are_written_at_once(late: LateWriter) -> None:
    strategy = replace(looking_ahead("own"), refetch=True)
    batches = CASES["one-hot"].batches(STEPS)
    budget = tight_budget(CASES["one-hot"], batches, strategy.hold)
    embedding = build("one-hot", "sgd", strategy, budget=budget, fill="bulk")
    assert embedding.groups[0].mover.back is None
    assert train(embedding, batches, depth=3).same_bits(all_fast("one-hot", "sgd"))


# -- memory --------------------------------------------------------------------------------


class Scores(nn.Module):
    def __init__(self, embedding: hotrow.EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding = embedding
        self.dense = nn.Linear(8, 1, device=DEVICE)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.dense(self.embedding(batch[0]).values()).squeeze(1)


def loop(embedding: hotrow.EmbeddingBagCollection, *, stop: int = STEPS) -> None:
    for step, batch in enumerate(hotrow.ahead(CASES["one-hot"].batches(STEPS), embedding)):
        readout(embedding(batch)).backward()
        if step == stop:
            break


def loop_of_a_trainer(embedding: hotrow.EmbeddingBagCollection) -> None:
    model = Scores(embedding)
    trainer: hotrow.Trainer[Any] = hotrow.Trainer(
        model,
        nn.functional.binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.SGD(model.dense.parameters(), lr=0.1),
        ids=lambda batch: batch[0],
        labels=lambda batch: batch[1],
        device=DEVICE,
    )
    batches = [(ids, (ids[:, 0] % 2).float()) for ids in CASES["one-hot"].batches(STEPS)]
    for record in trainer.run(batches):
        assert record.loss > 0
    trainer.evaluate(batches[:2])


WAYS = {
    "a loop": loop,
    "a loop that is left": lambda embedding: loop(embedding, stop=5),
    "a trainer": loop_of_a_trainer,
}


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_given_back_with_the_last_reference(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hotrow.engine.gpu.bulk, "shared_writer", Writer
    )  # one that no other test holds
    embedding = tight("one-hot", "adagrad", "own")
    WAYS[way](embedding)
    (group,) = embedding.groups
    back = group.mover.back
    assert any(load.job for load in back._loads)
    gone = [weakref.ref(each) for each in (embedding, group, group.store, back, back._writer)]
    rows = weakref.ref(group.store.rows)
    del embedding, group, back
    assert [each() for each in (*gone, rows)] == [None] * 6


def test_the_first_collection_of_a_program_is_given_back_too() -> None:
    """Nobody collects here: what torch imports for it must not hold it."""
    script = """
        import gc, sys, weakref
        gc.disable()
        import torch, hotrow, hotrow.embedding.collection
        device = sys.argv[1]
        if device == "cpu":
            from hotrow.engine.gpu.rows import gpu_rows
            hotrow.embedding.collection._engine = lambda device: gpu_rows
        table = hotrow.EmbeddingBagConfig("t", 100, 4, ["f"])
        budget = hotrow.Budget((hotrow.Share(16, 32, True),), window_bytes=4096)
        embedding = hotrow.EmbeddingBagCollection(
            [table], hotrow.SGD(), budget=budget, fill="bulk", device=device
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
