"""Rows that a caller pins, at a standstill: the bits of all-fast, before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import (
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
    train,
    unique_rows,
    variant,
)
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.stages import LATE
from hotrow.inputs.hotset import popular

STEPS = 12
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def some_rows(case: Case, seed: int, part: float = 0.3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        table.name: torch.randperm(table.num_embeddings, generator=generator)[
            : int(part * table.num_embeddings)
        ]
        for table in case.tables
    }


def learn_with_pins(
    embedding: Any, batches: list[Any], hot: Sequence[dict[str, Tensor]]
) -> Outcome:
    """As many batches between two changes of pins, the first before any batch."""
    embedding.reserve_like(batches[0])
    losses, step = [], -(-len(batches) // len(hot))
    for place, rows in enumerate(hot):
        version = embedding.pins_version
        pinned = embedding.pin_rows(rows)
        assert embedding.pins_version != version
        assert pinned.num_rows > 0
        embedding.check()
        losses += learn(embedding, batches[place * step : (place + 1) * step])
    return outcome(embedding, losses)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_pins_in_the_middle_of_a_run_change_no_bit(rule: str, name: str) -> None:
    case = CASES[name]
    batches = case.batches(STEPS)
    hot = [some_rows(case, seed) for seed in range(3)]
    dense = rule != "adam"
    embedding = build(case, rule, "static", budget=budget_of(case, batches, 0.4, dense=dense))
    assert learn_with_pins(embedding, batches, hot).same_bits(all_fast(case, rule, batches))


@pytest.mark.parametrize("victims", ["random", "most-recent"])
@pytest.mark.parametrize("late", [False, True])
def test_pins_change_no_bit_whoever_leaves(victims: str, late: bool) -> None:
    case = CASES["two-widths"]
    batches = case.batches(STEPS)
    hot = [some_rows(case, seed) for seed in range(2)]
    strategy = variant("static", victims=victims)
    embedding = build(case, "adam", strategy, budget=budget_of(case, batches, 0.4, dense=True))
    if late:
        embedding.pipeline.move_in(LATE)
    assert learn_with_pins(embedding, batches, hot).same_bits(all_fast(case, "adam", batches))


def test_pins_stay_and_nothing_is_learned() -> None:
    case = CASES["one-hot"]
    batches = case.batches(40)
    embedding = build(case, "sgd", "static", budget=budget_of(case, batches, 0.4, dense=True))
    embedding.reserve_like(max(batches, key=len))
    rows = some_rows(case, 1, 0.2)
    embedding.pin_rows(rows)
    version = embedding.pins_version
    learn(embedding, batches)  # over several times at which counts would be looked at
    assert embedding.pins_version == version
    planner: Any = embedding.groups[0].planner
    held = planner.pad.row_of_slot[planner.pinned_slots]
    ids = torch.cat([rows["a"], rows["b"] + 60])
    assert torch.equal(held.sort()[0], ids.sort()[0])


def test_of_too_many_rows_every_table_keeps_the_first() -> None:
    case = CASES["one-hot"]
    batches = case.batches(STEPS)
    embedding = build(case, "sgd", "static", budget=budget_of(case, batches, 0.2, dense=True))
    embedding.reserve_like(max(batches, key=len))
    room = embedding.room_for_pins()[4]
    assert 10 < room < 100
    rows = {"a": torch.arange(59, -1, -1), "b": torch.arange(40)}
    pinned = embedding.pin_rows(rows)
    assert room - 2 < pinned.num_rows <= room
    for name, given in rows.items():
        kept = int(room / 100 * len(given))
        assert torch.equal(pinned.rows(name), given[:kept].sort()[0])


def test_rows_given_twice_take_one_slot_and_padding_that_is_read_is_pinned() -> None:
    case = CASES["unpooled"]
    batches = case.batches(STEPS)
    embedding = build(case, "sgd", "static", budget=budget_of(case, batches, 0.4, dense=True))
    embedding.reserve_like(batches[0])
    pinned = embedding.pin_rows({"a": torch.tensor([7, 0, 7, 3, 7, 3])})
    assert pinned.rows("a").tolist() == [0, 3, 7]  # 0 is padding
    assert pinned.rows("b").tolist() == [2]  # likewise
    assert int((embedding.groups[0].memory.pad.row_of_slot >= 0).sum()) == 4
    assert outcome(embedding, learn(embedding, batches)).same_bits(all_fast(case, "sgd", batches))


def test_gradients_that_come_after_pinning_are_not_lost() -> None:
    case = CASES["one-hot"]
    first, second = case.batches(2)
    embedding = build(
        case, "adam", "static", budget=budget_of(case, [first, second], 0.4, dense=True)
    )
    plain = build(case, "adam")
    losses = []
    for each in (embedding, plain):
        loss = readout(each(first))
        if each is embedding:
            each.pin_rows(some_rows(case, 0))
        loss.backward()
        losses.append([loss.detach(), *learn(each, [second])])
    assert outcome(embedding, losses[0]).same_bits(outcome(plain, losses[1]))


@pytest.mark.parametrize("strategy", ["lookahead", "lru", "all-fast", "hybrid"])
def test_other_strategies_choose_by_themselves(strategy: str) -> None:
    embedding = build(CASES["one-hot"], "sgd", strategy, budget=4096)
    with pytest.raises(ValueError, match="needs strategy='static'"):
        embedding.pin_rows({})


def test_rows_are_pinned_at_a_standstill_alone() -> None:
    case = CASES["one-hot"]
    batches = case.batches(3)
    embedding = build(case, "sgd", "static", budget=4096)
    for _ in hotrow.ahead(batches, embedding):
        with pytest.raises(RuntimeError, match="while hotrow"):
            embedding.pin_rows({})
        break
    embedding.pin_rows({})


def test_nobody_knows_how_large_batches_are_before_somebody_says_so() -> None:
    embedding = build(CASES["one-hot"], "sgd", "static", budget=4096)
    with pytest.raises(RuntimeError, match="reserve"):
        embedding.room_for_pins()
    with pytest.raises(RuntimeError, match="reserve"):
        embedding.pin_rows({"a": torch.tensor([1])})
    embedding.reserve(8)
    assert embedding.room_for_pins()[4] == embedding.num_slots - 18


# -- on both engines ---------------------------------------------------------------------


ON_DEVICE: dict[str, Any] = {"device": DEVICE, "engine": gpu_rows}


@pytest.fixture(params=[{}, ON_DEVICE], ids=["cpu", "device"])
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_a_batch_finds_pinned_rows_at_once(engine: dict[str, Any]) -> None:
    """Nothing is fetched for a batch of them, not even for the first after pinning."""
    case = CASES["one-hot"]
    batches = case.batches(3)
    budget = budget_of(case, batches, 1.0, dense=not engine)
    embedding = build(case, "adagrad", "static", budget=budget, **engine)
    embedding.reserve_like(batches[0])
    learn(embedding, batches[:1])
    before = embedding.traffic().fetched_rows
    pinned = embedding.pin_rows({"a": torch.arange(60), "b": torch.arange(40)})
    assert pinned.num_rows == 100
    for batch in batches:
        assert bool(popular(embedding.pipeline.prepare(batch).batch, pinned).all())
    learn(embedding, batches[1:])
    assert embedding.traffic().fetched_rows == before > 0


def test_pins_give_way_to_a_larger_batch_and_the_version_tells(engine: dict[str, Any]) -> None:
    case = CASES["one-hot"]
    generator = torch.Generator().manual_seed(0)
    small = [torch.randint(40, (2, 2), generator=generator) for _ in range(2)]
    large = [torch.randint(40, (30, 2), generator=generator) for _ in range(2)]
    budget = hotrow.Budget((hotrow.Share(40, 64, True),), window_bytes=1 << 20)
    embedding = build(case, "adam", "static", budget=budget, **engine)
    embedding.reserve_like(small[0])
    pinned = embedding.pin_rows({"a": torch.arange(40), "b": torch.arange(40)})
    assert pinned.num_rows > 30
    version = embedding.pins_version
    losses = learn(embedding, small)
    assert embedding.pins_version == version
    with pytest.warns(UserWarning, match="does not fit"):
        losses += learn(embedding, large)
    assert embedding.pins_version != version
    expected = all_fast(case, "adam", small + large, **engine)
    assert outcome(embedding, losses).same_bits(expected)


# -- a slot for every row ----------------------------------------------------------------


def whole_budget(case: Case, *, spare: int = 0, dense: bool = True) -> hotrow.Budget:
    """Return a budget with a slot for every row, and some more."""
    rows = Counter({table.embedding_dim: 0 for table in case.tables})
    for table in case.tables:
        rows[table.embedding_dim] += table.num_embeddings
    shares = [hotrow.Share(count + spare, 64, dense) for count in rows.values()]
    return hotrow.Budget(tuple(shares), window_bytes=1 << 20)


def count_rows(case: Case, batches: Sequence[Any]) -> int:
    """Return how many different rows the batches look up."""
    return sum(len(set().union(*ids)) for ids in unique_rows(case, batches))


SLOW = pytest.mark.slow  # Triton's interpreter


@pytest.mark.parametrize(
    ("name", "pins", "spare", "engine"),
    [
        *(
            (name, pins, spare, {})
            for name in ("one-hot", "two-widths")
            for pins in ("learned", "profile", "given")
            for spare in (0, 7)
        ),
        pytest.param("one-hot", "learned", 0, ON_DEVICE, marks=SLOW),
        pytest.param("two-widths", "profile", 0, ON_DEVICE, marks=SLOW),
        pytest.param("one-hot", "given", 0, ON_DEVICE, marks=SLOW),
    ],
)
def test_with_a_slot_for_every_row_none_leaves(
    name: str, pins: str, spare: int, engine: dict[str, Any]
) -> None:
    case = CASES[name]
    batches = case.batches(20 if pins == "learned" else 8)  # pins are learned after 16
    hot = {table.name: torch.arange(table.num_embeddings) % 2 for table in case.tables}
    budget = whole_budget(case, spare=spare, dense=not engine)
    profile = hot if pins == "profile" else None
    embedding = build(case, "adam", "static", budget=budget, profile=profile, **engine)
    if pins == "given":
        embedding.reserve_like(batches[0])
        embedding.pin_rows(some_rows(case, 0))
    found = train(embedding, batches)
    traffic = embedding.traffic()
    assert traffic.evicted_rows == 0
    assert traffic.fetched_rows <= count_rows(case, batches)  # each once, if it was not pinned
    assert found.same_bits(all_fast(case, "adam", batches, **engine))


def test_uncached_fetches_rows_anew_also_with_a_slot_for_every_row() -> None:
    case = CASES["one-hot"]
    batches = case.batches(12)
    embedding = build(case, "adam", "uncached", budget=whole_budget(case))
    found = train(embedding, batches)
    traffic = embedding.traffic()
    assert traffic.fetched_rows == traffic.unique_rows > count_rows(case, batches)
    assert found.same_bits(all_fast(case, "adam", batches))


def test_every_row_can_be_pinned_where_each_has_a_slot() -> None:
    case = CASES["one-hot"]
    embedding = build(case, "adam", "static", budget=whole_budget(case))
    embedding.reserve_like(case.batches(1)[0])
    every = {table.name: torch.arange(table.num_embeddings) for table in case.tables}
    assert embedding.pin_rows(every).num_rows == embedding.num_rows


# -- on a device -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule", "steps"),
    [
        ("one-hot", "adam", 6),
        pytest.param("two-widths", "adagrad", 6, marks=SLOW),
        pytest.param("multi-hot", "row-wise", 6, marks=SLOW),
        *(
            pytest.param(name, rule, STEPS, marks=pytest.mark.gpu)
            for name in CASES
            for rule in RULES
        ),
    ],
)
def test_pins_on_a_device_change_no_bit(name: str, rule: str, steps: int) -> None:
    case = CASES[name]
    batches = case.batches(steps)
    hot = [some_rows(case, seed) for seed in range(steps // 3)]
    strategy = variant("static", victims="random")
    budget = budget_of(case, batches, 0.4, dense=rule != "adam")
    embedding = build(case, rule, strategy, budget=budget, **ON_DEVICE)
    embedding.pipeline.move_in(LATE)
    found = learn_with_pins(embedding, batches, hot)
    assert found.same_bits(all_fast(case, rule, batches, **ON_DEVICE))
