"""One store, two engines in turn: rows in slots, or rows that the CPU reads and updates.

On a CPU every bit is that of all-fast; on a GPU the CPU's sums are in another order.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import (
    ALL_RULES,
    CASES,
    RULES,
    Case,
    Outcome,
    all_fast,
    budget_of,
    build,
    learn,
    outcome,
    readout,
)
from click_models import ClickModel, click_batches, trainer_of
from contracts import DEVICE, assert_like, by_gpu
from hotrow.data import ClickBatch
from hotrow.engine.host.rows import HostRows
from hotrow.engine.stages import LATE
from hotrow.training import captured as captured_module
from hotrow.training import static_inputs

STEPS = 12


def static(case: Case, rule: str, batches: Sequence[Any], **options: Any) -> Any:
    budget = budget_of(case, batches, 0.4, dense=rule != "adam")
    return build(case, rule, options.pop("strategy", "static"), budget=budget, **options)


def learn_in_turn(embedding: Any, batches: list[Any], *, turn: int = 3) -> Outcome:
    """Some batches in slots, some on the host, and so on; rows are pinned at first."""
    losses = []
    if embedding.strategy.name == "static":
        embedding.reserve_like(batches[0])
        embedding.pin_rows(_rows_of(embedding))
    for place, first in enumerate(range(0, len(batches), turn)):
        if place % 2:
            embedding.train_on_host()
        else:
            embedding.train_in_slots()
        embedding.check()
        losses += learn(embedding, batches[first : first + turn])
    return outcome(embedding, losses)


def _rows_of(embedding: Any) -> dict[str, Tensor]:
    return {table.name: torch.arange(0, table.num_embeddings, 3) for table in embedding.tables}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rule", ALL_RULES)
def test_engines_in_turn_give_the_bits_of_all_fast(rule: str, name: str) -> None:
    case = CASES[name]
    batches = case.batches(STEPS)
    found = learn_in_turn(static(case, rule, batches), batches)
    assert found.same_bits(all_fast(case, rule, batches))


@pytest.mark.parametrize("strategy", ["lru", "lookahead", "scratchpipe", "uncached"])
def test_any_strategy_with_slots_can_leave_rows_to_the_host(strategy: str) -> None:
    case = CASES["two-widths"]
    batches = case.batches(STEPS)
    budget = budget_of(case, batches, 1.0, dense=True)
    embedding = build(case, "adam", strategy, budget=budget)
    assert learn_in_turn(embedding, batches).same_bits(all_fast(case, "adam", batches))


@pytest.mark.parametrize("back", [True, False])
def test_state_that_does_not_move_with_its_rows_shows(back: bool) -> None:
    """What the published code does, which moves weights alone, gives other bits."""
    case = CASES["one-hot"]
    batches = case.batches(STEPS)
    embedding = static(case, "adagrad", batches)
    embedding.reserve_like(batches[0])
    embedding.pin_rows(_rows_of(embedding))
    losses = learn(embedding, batches[:4])
    (group,) = embedding.groups
    slots, store, dim, pad = group.slots, group.store.rows, group.dim, group.memory.pad

    def weights_alone(where: Tensor, ids: Tensor) -> None:
        slots[where, :dim] = store[ids, :dim]

    def flush_weights() -> None:
        taken = (pad.row_of_slot >= 0).nonzero().squeeze(1)
        store[pad.row_of_slot[taken], :dim] = slots[taken, :dim]

    if back:
        group.direct.load = weights_alone
    else:
        group.flush = flush_weights
    embedding.train_on_host()
    losses += learn(embedding, batches[4:8])
    embedding.train_in_slots()
    losses += learn(embedding, batches[8:])
    assert not outcome(embedding, losses).same_bits(all_fast(case, "adagrad", batches))


def test_both_engines_have_one_store_and_say_what_crossed() -> None:
    case = CASES["two-widths"]
    batches = case.batches(4)
    embedding = static(case, "adagrad", batches)
    embedding.reserve_like(batches[0])
    pinned = embedding.pin_rows(_rows_of(embedding))
    stores = [group.store for group in embedding.groups]
    size = sum(4 * 2 * table.embedding_dim * len(pinned.rows(table.name)) for table in case.tables)
    assert embedding.train_on_host() == size
    assert embedding.train_on_host() == 0
    assert [group.store for group in embedding.groups] == stores
    assert all(isinstance(group, HostRows) for group in embedding.groups)
    assert embedding.strategy.name == "hybrid"
    host = list(embedding.groups)
    assert embedding.train_in_slots() == size
    assert embedding.train_in_slots() == 0
    assert embedding.strategy.name == "static"
    embedding.train_on_host()
    assert list(embedding.groups) == host  # not made anew


def test_what_is_counted_goes_on_whoever_counts() -> None:
    case = CASES["one-hot"]
    batches = case.batches(STEPS)
    embedding = static(case, "adagrad", batches)
    slots, memory = embedding.num_slots, embedding.memory()
    lookups, seen = 0, 0
    for place, batch in enumerate(batches):
        if place % 2:
            embedding.train_on_host()
        else:
            embedding.train_in_slots()
        learn(embedding, [batch])
        lookups += batch.numel()
        traffic = embedding.traffic()
        assert traffic.lookups == lookups
        assert traffic.bytes_fetched >= seen
        seen = traffic.bytes_fetched
        assert embedding.num_slots == slots
        assert memory.items() <= embedding.memory().items()


def test_rows_are_the_newest_on_either_engine() -> None:
    case = CASES["one-hot"]
    batches = case.batches(9)
    embedding, plain = static(case, "adam", batches), build(case, "adam")
    for place, first in enumerate(range(0, 9, 3)):
        (embedding.train_on_host if place % 2 else embedding.train_in_slots)()
        for each in (embedding, plain):
            learn(each, batches[first : first + 3])
            each.eval()
        with torch.no_grad():
            assert torch.equal(embedding(batches[0]).values(), plain(batches[0]).values())
        assert outcome(embedding, []).same_bits(outcome(plain, []))
        for each in (embedding, plain):
            each.load_weights("a", 5, torch.full((3, 4), float(place)))
            each.train()
    embedding.train_in_slots()
    assert outcome(embedding, []).same_bits(outcome(plain, []))


def test_frozen_rows_stay_so_on_the_other_engine() -> None:
    case = CASES["one-hot"]
    batches = case.batches(9)
    embedding, plain = static(case, "adagrad", batches), build(case, "adagrad")
    frozen = [{"a": torch.arange(20)}, None, {"b": torch.arange(9)}]
    for place, rows in enumerate(frozen):
        for each in (embedding, plain):
            each.freeze_rows(rows)
        (embedding.train_in_slots if place % 2 else embedding.train_on_host)()
        for each in (embedding, plain):
            learn(each, batches[3 * place : 3 * place + 3])
    assert outcome(embedding, []).same_bits(outcome(plain, []))


@pytest.mark.parametrize("to_host", [True, False])
def test_a_backward_pass_from_before_a_change_is_refused(to_host: bool) -> None:
    case = CASES["one-hot"]
    batches = case.batches(2)
    embedding = static(case, "sgd", batches)
    if not to_host:
        embedding.train_on_host()
    loss = readout(embedding(batches[0]))
    (embedding.train_on_host if to_host else embedding.train_in_slots)()
    before = outcome(embedding, [])
    with pytest.raises(RuntimeError, match=r"call backward\(\) before"):
        loss.backward()
    assert outcome(embedding, []).same_bits(before)
    learn(embedding, batches)


def test_engines_change_at_a_standstill_alone() -> None:
    case = CASES["one-hot"]
    batches = case.batches(3)
    embedding = static(case, "sgd", batches)
    for _ in hotrow.ahead(batches, embedding):
        with pytest.raises(RuntimeError, match=r"train_on_host\(\) while hotrow"):
            embedding.train_on_host()
        break
    with (
        embedding.accumulate(),
        pytest.raises(RuntimeError, match=r"inside of accumulate\(\)"),
    ):
        embedding.train_on_host()
    embedding.train_on_host()
    with pytest.raises(RuntimeError, match=r"call train_in_slots\(\) before"):
        embedding.pin_rows({})
    for _ in hotrow.ahead(batches, embedding):
        with pytest.raises(RuntimeError, match=r"train_in_slots\(\) while hotrow"):
            embedding.train_in_slots()
        break
    with pytest.raises(ValueError, match="'all-fast' has no rows that come and go"):
        build(case).train_on_host()


def test_an_iterator_that_starts_over_follows_the_engine() -> None:
    case = CASES["one-hot"]
    batches = case.batches(4)
    embedding = static(case, "adam", batches)
    stream = hotrow.ahead(batches, embedding)
    losses = []
    for on_host in (False, True, False):
        (embedding.train_on_host if on_host else embedding.train_in_slots)()
        for batch in stream:
            loss = readout(embedding(batch))
            loss.backward()
            losses.append(loss.detach())
    assert outcome(embedding, losses).same_bits(all_fast(case, "adam", batches * 3))


def test_the_second_engine_goes_with_the_collection() -> None:
    case = CASES["one-hot"]
    batches = case.batches(3)
    embedding = static(case, "sgd", batches)
    embedding.train_on_host()
    learn(embedding, batches)
    gone = [weakref.ref(group) for group in embedding.every_group]
    assert len(gone) == 2
    del embedding
    gc.collect()
    assert [each() for each in gone] == [None, None]


# -- on a device -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [pytest.param("adagrad", marks=pytest.mark.slow), "adam"])
def test_engines_in_turn_on_a_device_train_like_all_fast(rule: str) -> None:
    """Rows that only the host has written are read, though the device could tell how they began."""
    case = CASES["two-widths"]
    batches = case.batches(6)
    expected = all_fast(case, rule, batches, **by_gpu())
    embedding = static(case, rule, batches, **by_gpu())
    assert all(group.memory.host.unwritten is not None for group in embedding.groups)
    embedding.pipeline.move_in(LATE)
    assert_like(learn_in_turn(embedding, batches, turn=2), expected)


def test_a_row_that_the_host_wrote_first_is_not_made_anew() -> None:
    case = CASES["one-hot"]
    batches = case.batches(2)
    embedding = static(case, "sgd", batches, **by_gpu())
    embedding.train_on_host()
    losses = learn(embedding, batches[:1])
    embedding.train_in_slots()
    losses += learn(embedding, batches[:1])  # fetches all of its rows
    expected = all_fast(case, "sgd", [batches[0], batches[0]], **by_gpu())
    assert_like(outcome(embedding, losses), expected)
    assert not torch.equal(losses[0], losses[1])


# -- captured steps ----------------------------------------------------------------------


def clicked_model(strategy: str) -> ClickModel:
    tables = [
        hotrow.EmbeddingBagConfig("a", 3000, 4, ["f", "h"]),
        hotrow.EmbeddingBagConfig("b", 500, 6, ["g"]),
    ]
    shares = [hotrow.Share(rows, buffer_rows=128, dense_map=True) for rows in (700, 250)]
    budget = hotrow.Budget(tuple(shares), window_bytes=1 << 20)
    embedding = hotrow.EmbeddingBagCollection(
        tables, hotrow.Adam(lr=0.05), budget, strategy=strategy, device=DEVICE, seed=3
    )
    return ClickModel(embedding, num_dense=3)


class InTurn:
    """Six batches on each engine, one after the other, without a copy in between."""

    def attach(self, trainer: Any) -> None:
        self.embedding = trainer.model.embedding

    def passes(self, batches: Any) -> Any:
        batches = list(batches)
        for place, first in enumerate(range(0, len(batches), 6)):
            (self.embedding.train_on_host if place % 2 else self.embedding.train_in_slots)()
            yield batches[first : first + 6]


SIZES = (3000, 3000, 500)  # rows of the features


def clicked(strategy: str, batches: list[ClickBatch], **options: Any) -> tuple[list[float], Any]:
    model = clicked_model(strategy)
    trainer = trainer_of(model, **options)
    losses = [float(record.loss) for record in trainer.run(batches)]
    model.embedding.check()
    return losses, {**model.embedding.state_dict(), **model.top.state_dict()}


def test_batches_of_one_shape_have_places_of_their_own_for_each_engine() -> None:
    model = clicked_model("static")
    (batch,) = click_batches(1, SIZES, size=32)
    keys = []
    for change in (model.embedding.train_in_slots, model.embedding.train_on_host):
        change()
        arrivals = [(model.embedding, model.embedding.pipeline.prepare(batch.sparse))]
        tensors = [batch.dense, batch.sparse, batch.label]
        engines = static_inputs.engines_of(arrivals)
        keys.append(static_inputs.InputForm(tensors, {}, (), engines).key)
    assert keys[0] != keys[1]


@pytest.mark.gpu
def test_captured_steps_of_two_engines_in_turn_give_the_bits_of_eager_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replays: list[int] = []
    captures: list[int] = []
    replay, capture = (
        captured_module._Graph.replay,
        captured_module.CapturedStep._capture,
    )
    monkeypatch.setattr(captured_module._Graph, "replay", _noted(replays, replay))
    monkeypatch.setattr(captured_module.CapturedStep, "_capture", _noted(captures, capture))
    batches = click_batches(60, SIZES, size=32)
    eager = clicked("static", batches, system=InTurn(), graphs=False)
    assert not replays
    captured = clicked("static", batches, system=InTurn())
    assert len(replays) >= 40
    # A change of engines captures nothing anew.
    assert len(captures) <= 2 * captured_module.GraphSettings().inputs
    assert captured[0] == eager[0]
    assert all(torch.equal(captured[1][key], eager[1][key]) for key in eager[1])
    fast = clicked("all-fast", batches)
    assert captured[0] == pytest.approx(fast[0], rel=1e-3)
    for key, weights in fast[1].items():
        torch.testing.assert_close(captured[1][key], weights, rtol=1e-2, atol=1e-3)


def _noted(calls: list[int], function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        calls.append(1)
        return function(*args)

    return noted


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_engines_in_turn_on_a_gpu_train_like_all_fast(rule: str, name: str) -> None:
    case = CASES[name]
    batches = case.batches(STEPS)
    embedding = static(case, rule, batches, device=DEVICE)
    embedding.pipeline.move_in(LATE)
    assert_like(learn_in_turn(embedding, batches), all_fast(case, rule, batches, device=DEVICE))
