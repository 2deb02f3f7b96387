"""A budget in bytes counts what plans take, whatever batches turn out to be."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import hotrow
from builders import Outcome, readout, train
from contracts import DEVICE, by_gpu
from hotrow.engine.gpu.mover_choice import FillChoice
from hotrow.engine.gpu.plan_buffers import BufferPool, PlanBuffers, plan_bytes
from hotrow.engine.tuning import Tuning
from hotrow.store.writer import why_not
from hotrow.support.streams import lanes_of
from hotrow.support.units import parse_bytes
from hotrow.training.static_inputs import InputForm, InputShape

ROWS, DIM, STEPS = 3000, 16, 7
NO_THREADS = pytest.mark.skipif(bool(why_not()), reason="no compiler for threads of C")


def tables(widths: tuple[int, ...] = (DIM,)) -> list[hotrow.EmbeddingBagConfig]:
    return [
        hotrow.EmbeddingBagConfig(f"t{place}", ROWS, dim, [f"f{place}"])
        for place, dim in enumerate(widths)
    ]


def build(
    budget: Any = "25%",
    *,
    rule: Any = None,
    widths: tuple[int, ...] = (DIM,),
    strategy: Any = "lookahead",
    tuning: Tuning = Tuning(plans_on_top=0, least_certain=0),  # noqa: B008  it is frozen
    **options: Any,
) -> hotrow.EmbeddingBagCollection:
    optimizer, options = rule or hotrow.SGD(lr=0.1), {**by_gpu(tuning=tuning), **options}
    return hotrow.EmbeddingBagCollection(
        tables(widths), optimizer, budget, strategy=strategy, seed=3, **options
    )


def dense(lookups: int, count: int = STEPS, features: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(lookups)
    draws = [torch.rand(lookups, features, generator=generator) for _ in range(count)]
    return [(draw**2 * ROWS).long().to(DEVICE) for draw in draws]


def jagged(lookups: int, count: int = STEPS) -> list[Any]:
    """About so many lookups each, and now and then a few more."""
    generator = torch.Generator().manual_seed(lookups)
    batches = []
    for number in range(count):
        size = lookups + lookups * (number % 4) // 60
        lengths = torch.full((8,), size // 8)
        lengths[0] += size - int(lengths.sum())
        values = (torch.rand(size, generator=generator) ** 2 * ROWS).long()
        batches.append(hotrow.KeyedJaggedTensor(["f0"], values.to(DEVICE), lengths=lengths))
    return batches


def train_within(
    embedding: hotrow.EmbeddingBagCollection, batches: list[Any], granted: int
) -> None:
    """Its memory is within the budget after every step, and its plans within what they have."""
    for batch in hotrow.ahead(batches, embedding):
        readout(embedding(batch)).backward()
        assert sum(embedding.memory().values()) <= granted, embedding.memory()
    for group in embedding.groups:
        pool = group.planning._buffers
        plans = group.planning.inputs.plans_at_once
        assert 0 < pool.num_bytes <= group.planning.plan_bytes(group.planner.capacity, plans)


SHAPES: dict[str, dict[str, Any]] = {
    "few-lookups": {"batches": dense(4)},
    "many-lookups": {"batches": dense(90)},
    "adam": {"batches": dense(90), "rule": hotrow.Adam()},
    "jagged": {"batches": jagged(80)},
    "staged": {"batches": dense(80), "fill": "staged"},
    "five-stages": {"batches": dense(40), "strategy": "scratchpipe"},
    "lru": {"batches": dense(90), "strategy": "lru"},
    "two-widths": {"batches": dense(40, features=2), "widths": (4, DIM)},
    "nearly-all-rows": {"batches": dense(90), "budget": "125%"},
    "bulk": {"batches": dense(90), "fill": "bulk"},
}
BULK = pytest.param("bulk", marks=[NO_THREADS, pytest.mark.slow])


@pytest.mark.slow  # by the interpreter
def test_a_small_budget_keeps_its_slots_and_plans_come_on_top() -> None:
    embedding = build(tuning=Tuning(plans_on_top=1 << 20))
    slots = embedding.num_slots
    assert train(embedding, dense(90)).same_bits(train(build(None, strategy="all-fast"), dense(90)))
    assert embedding.num_slots == slots
    other = build(tuning=Tuning(plans_on_top=1 << 20, small_budget=0))
    train(other, dense(90))
    assert other.num_slots < slots


@pytest.mark.thinned(5)
@pytest.mark.parametrize("shape", [*list(SHAPES)[:-1], BULK])
def test_everything_is_within_the_budget(shape: str) -> None:
    options = dict(SHAPES[shape])
    batches = options.pop("batches")
    embedding = build(**options)
    granted = parse_bytes(options.get("budget", "25%"), total=embedding.bytes_total)
    train_within(embedding, batches, granted)
    # And not far below, where rows are left that could have had slots.
    if embedding.num_slots < embedding.num_rows:
        assert sum(embedding.memory().values()) > 0.85 * granted


@pytest.mark.parametrize(("lengths", "spare"), [([5] * 16, 0), ([5] * 15 + [4], 1 / 3)])
def test_batches_with_a_fixed_number_of_ids_per_sample_get_no_spare_room(
    lengths: list[int], spare: float
) -> None:
    """What would be spare are known batches fewer."""
    count = sum(lengths)
    batch = hotrow.KeyedJaggedTensor(
        ["f0"], (torch.arange(count) * 7).to(DEVICE), lengths=torch.tensor(lengths)
    )
    embedding = build()
    readout(embedding(batch)).backward()
    (group,) = embedding.groups
    assert group.planner.capacity == int(count * (1 + spare))


@pytest.mark.filterwarnings("ignore:these ids are not the ones:UserWarning")
@pytest.mark.parametrize("widths", [(DIM,), (4, DIM)])
def test_gradients_that_wait_for_a_step_are_within_the_budget(widths: tuple[int, ...]) -> None:
    embedding = build("60%", widths=widths, update="step")
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    granted, most = int(0.6 * embedding.bytes_total), 0
    for number, batch in enumerate(hotrow.ahead(dense(90, features=len(widths)), embedding)):
        optimizer.zero_grad()
        readout(embedding(batch)).backward()
        parts = embedding.memory()
        assert parts["waiting gradients"] >= batch.unique().numel() * 4 * min(widths)
        assert sum(parts.values()) <= granted, parts
        most = max(most, parts["waiting gradients"])
        if number % 2:
            readout(embedding((batch + 1) % ROWS)).backward()  # those of both passes wait
            assert embedding.memory()["waiting gradients"] > 1.3 * most
            break
        optimizer.step()
    assert 0.85 * granted < sum(embedding.memory().values())


def all_fast(batches: list[Any], **options: Any) -> Outcome:
    return train(build(None, strategy="all-fast", **options), batches)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["many-lookups", "adam", "jagged", "staged", "two-widths", BULK])
def test_fewer_slots_give_the_bits_of_all_fast(shape: str) -> None:
    options = dict(SHAPES[shape])
    batches = options.pop("batches")
    embedding = build(**options)
    before, old = embedding.num_slots, [group.slots for group in embedding.groups]
    found = train(embedding, batches)
    assert embedding.num_slots < before
    assert all(group.slots is not one for group, one in zip(embedding.groups, old, strict=True))
    assert embedding.traffic().evicted_rows > 0
    options.pop("fill", None)
    assert found.same_bits(all_fast(batches, **options))


def test_slots_are_allocated_once_with_the_first_batch() -> None:
    """Before, rows are read and replaced in the store, and memory says what there will be."""
    embedding, plain = build(), build(None, strategy="all-fast")
    (group,) = embedding.groups
    first, second = dense(30, count=2)
    for module in (embedding, plain):
        module.load_weights("t0", 7, torch.ones(3, DIM))
        module.eval()
    with torch.no_grad():
        assert torch.equal(embedding(first).values(), plain(first).values())
    embedding.train()
    embedding.reserve_like(first)
    embedding.check()
    expected = embedding.num_slots, embedding.memory()
    assert len(group.slots) == 2 < embedding.num_slots  # stand-ins
    train(embedding, [first])
    slots = group.slots
    assert (len(slots) - 1, embedding.memory()) == expected
    train(embedding, [second])
    assert group.slots is slots


@pytest.mark.parametrize("announced", [True, False])
def test_slots_that_could_not_be_allocated_are_allocated_with_the_next_batch(
    announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One width has its slots when the memory for those of another is missing."""
    embedding = build(widths=(4, DIM))
    batches = dense(20, count=2, features=2)

    def step() -> None:
        for batch in hotrow.ahead(batches[:1], embedding) if announced else batches[:1]:
            readout(embedding(batch)).backward()

    def fail(share: Any) -> Any:
        raise torch.OutOfMemoryError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(embedding.groups[1].plan_room, "_build", fail)
        with pytest.raises(torch.OutOfMemoryError):
            step()
    step()
    assert [len(group.slots) - 1 for group in embedding.groups] == [
        group.num_slots for group in embedding.groups
    ]
    embedding.check()


def test_batches_that_nobody_announced_are_counted_too() -> None:
    embedding = build()
    for batch in dense(90):
        readout(embedding(batch)).backward()
        assert sum(embedding.memory().values()) <= embedding.bytes_total // 4
    embedding.check()


def test_slots_given_by_hand_are_as_many_as_were_asked_for() -> None:
    budget = hotrow.Budget((hotrow.Share(400, 64, True),), window_bytes=4096)
    embedding = build(budget)
    slots = embedding.groups[0].slots
    train(embedding, dense(90))
    assert embedding.num_slots == 400
    assert embedding.groups[0].slots is slots


@pytest.mark.slow  # by the interpreter
def test_what_is_left_of_the_budget_becomes_slots() -> None:
    embedding = build()
    before, unused = embedding.num_slots, sum(embedding.memory().values())
    train_within(embedding, dense(4), embedding.bytes_total // 4)
    assert embedding.num_slots > 1.02 * before
    assert unused < sum(embedding.memory().values()) > 0.95 * (embedding.bytes_total // 4)


@pytest.mark.slow
def test_what_was_reserved_is_what_there_will_be() -> None:
    embedding, other = build(), build()
    embedding.reserve(90)
    slots, memory = embedding.num_slots, embedding.memory()
    assert memory["plans"] > 0
    assert sum(memory.values()) <= embedding.bytes_total // 4
    for each in (embedding, other):
        train(each, dense(90))
        assert (each.num_slots, each.memory()) == (slots, memory)


@pytest.mark.slow
def test_more_than_was_reserved_is_counted_when_it_comes() -> None:
    embedding = build()
    embedding.reserve(10, {"f0": 2})
    train_within(embedding, dense(90), embedding.bytes_total // 4)
    assert embedding.groups[0].planner.capacity == 90


def test_what_cannot_be_reserved_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1 sample, not 0"):
        build().reserve(0)
    with pytest.raises(ValueError, match="no feature 'g'; there are 'f0'"):
        build().reserve(4, {"g": 2})


@pytest.mark.slow
def test_slots_stay_when_rows_have_them() -> None:
    """A larger batch that comes later makes the window shorter."""
    embedding = build()
    train(embedding, dense(30))
    (group,) = embedding.groups
    slots, window = group.slots, group.planner.window_bytes
    found = sum(embedding.memory().values())
    train(embedding, dense(34))
    assert group.slots is slots
    assert group.planner.window_bytes < window
    assert sum(embedding.memory().values()) <= max(found, embedding.bytes_total // 4)


def test_plans_that_take_too_much_leave_half_of_the_slots_and_say_so() -> None:
    embedding, other = build("12%"), build("12%")
    before = embedding.num_slots
    with pytest.warns(UserWarning, match="more than half of the slots") as caught:
        embedding.reserve(500)
    assert embedding.num_slots == -(-before // 2)
    text = str(caught[0].message)
    assert "of the budget of 22.5 KiB, plans of batches with 500 lookups take 88.1 KiB" in text
    assert f"{embedding.num_slots:,} slots are kept" in text
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.reserve(10)  # fits


def test_waiting_gradients_are_among_what_takes_too_much() -> None:
    embedding = build("12%", update="step")
    with pytest.warns(UserWarning, match="more than half of the slots") as caught:
        embedding.reserve(500)
    # 88.1 KiB of plans, and for each of 500 rows a gradient of 16 floats with its id.
    assert "plans and waiting gradients of batches with 500 lookups take 121.3 KiB" in str(
        caught[0].message
    )


def test_a_budget_as_large_as_the_warning_says_is_enough() -> None:
    with pytest.warns(UserWarning, match="times as large") as caught:
        build("20%").reserve(160)
    factor = float(str(caught[0].message).split("A budget ")[1].split()[0])
    assert 1 < factor < 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(f"{20 * (factor + 0.1)}%").reserve(160)


# -- different rows ------------------------------------------------------------------------


def repeated(lookups: int, distinct: int, count: int = STEPS, seed: int = 0) -> list[torch.Tensor]:
    """Batches of so many lookups in so many rows, other ones each time."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        rows = torch.randperm(ROWS, generator=generator)[:distinct]
        ids = torch.cat([rows, rows[torch.randint(distinct, (lookups,), generator=generator)]])
        batches.append(ids[:lookups, None].to(DEVICE))
    return batches


@pytest.mark.slow  # by the interpreter
def test_plans_have_room_for_as_many_rows_as_batches_have() -> None:
    few, many = build(), build()
    for embedding, batches in ((few, repeated(90, 12)), (many, repeated(90, 90))):
        train_within(embedding, batches, embedding.bytes_total // 4)
    assert few.memory()["plans"] < 0.6 * many.memory()["plans"]
    assert few.num_slots > many.num_slots


@pytest.mark.slow
def test_a_batch_with_more_rows_than_plans_have_room_for_is_planned_again() -> None:
    batches = [*repeated(60, 8, 4), *repeated(60, 60, 2, seed=1), *repeated(60, 8, 4, seed=2)]
    embedding = build("60%")
    found = train(embedding, batches)
    assert found.same_bits(train(build(None, strategy="all-fast"), batches))
    assert embedding.traffic().chunked_batches == 0
    (group,) = embedding.groups
    assert group.planning.inputs.uniques(60) == 60
    assert group.planner._rebuilds == 0
    assert sum(embedding.memory().values()) < 1.1 * 0.6 * embedding.bytes_total
    embedding.check()


@pytest.mark.slow  # by the interpreter
def test_rows_that_turn_out_to_be_fewer_give_slots_back() -> None:
    embedding = build()
    embedding.reserve(90)
    reserved = embedding.num_slots
    train_within(embedding, repeated(90, 12), embedding.bytes_total // 4)
    assert embedding.num_slots > reserved


# -- buffers -------------------------------------------------------------------------------


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_bytes_are_counted_beforehand(id_type: torch.dtype, tells: bool) -> None:
    buffers = PlanBuffers(37, id_type, DEVICE, uniques=20, tells=tells)
    assert buffers.num_bytes == plan_bytes(37, 20, id_type)
    assert plan_bytes(1000, 1000, torch.int32) - plan_bytes(0, 0, torch.int32) == 36_000


def take(pool: BufferPool, capacity: int, berth: int | None = None) -> PlanBuffers:
    return pool.take(capacity, capacity, berth)


def test_berths_take_over_what_eager_steps_had() -> None:
    pool = BufferPool(lanes_of(DEVICE), torch.int32)
    eager = [take(pool, 8) for _ in range(3)]
    for each in eager:
        pool.give_back(each, None)
    mine = {berth: take(pool, 8, berth) for berth in range(4)}
    assert [mine[berth] for berth in range(3)] == eager
    assert pool.num_sets == 4
    for berth, each in mine.items():
        pool.give_back(each, berth)
    assert all(take(pool, 8, berth) is each for berth, each in mine.items())
    short = take(pool, 5)  # nothing is left for whoever has no berth
    assert pool.num_bytes == 4 * plan_bytes(8, 8, torch.int32) + plan_bytes(5, 5, torch.int32)
    assert short not in mine.values()


def test_buffers_of_a_berth_that_is_gone_serve_others() -> None:
    pool = BufferPool(lanes_of(DEVICE), torch.int32)
    there, used = take(pool, 8, 1), take(pool, 8, 2)
    pool.give_back(there, 1)
    assert take(pool, 8, 1) is there
    pool.give_back(there, 1)
    pool.free_berth(1)
    pool.free_berth(2)
    pool.give_back(used, 2)
    assert {id(take(pool, 8, 3)), id(take(pool, 8))} == {id(there), id(used)}
    assert pool.num_sets == 2


def test_what_is_too_small_goes() -> None:
    pool = BufferPool(lanes_of(DEVICE), torch.int32)
    pool.give_back(take(pool, 8), None)
    assert take(pool, 9).capacity == 9
    gc.collect()
    assert pool.num_bytes == 0


@pytest.mark.slow  # by the interpreter
def test_old_batches_do_not_keep_buffers() -> None:
    """However many of them somebody keeps; late gradients are right all the same."""
    batches = dense(60, count=12)

    def losses(embedding: hotrow.EmbeddingBagCollection) -> dict[str, torch.Tensor]:
        found = [readout(embedding(batch)) for batch in hotrow.ahead(batches, embedding, depth=4)]
        torch.stack(found).sum().backward()
        return dict(embedding.state_dict())

    strategy = replace(hotrow.STRATEGIES["lookahead"], pinned_part=0.0)
    embedding = build(strategy=strategy)
    found, expected = losses(embedding), losses(build(None, strategy="all-fast"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    (group,) = embedding.groups
    assert group.planning._buffers.num_sets <= group.planning.inputs.plans_at_once == 5


@pytest.mark.parametrize("apart", [1, 100])
def test_a_shape_that_comes_seldom_has_one_berth(apart: int) -> None:
    """Each berth keeps the buffers of a plan for itself."""
    batch, lanes = torch.zeros(3, 1, device=DEVICE), lanes_of(DEVICE)
    form, shape = InputForm([batch], {}, ()), InputShape(6)
    for landed in range(0, 20 * apart, apart):
        berth = shape.next_input(batch, form, landed, lanes)
        assert berth is not None
        berth.take(form, landed)
        berth.waits = False  # it is trained at once
    assert len(shape.inputs) == (6 if apart == 1 else 1)


def test_batches_of_a_seldom_shape_that_wait_have_berths_of_their_own() -> None:
    batch, lanes = torch.zeros(3, 1, device=DEVICE), lanes_of(DEVICE)
    form, shape = InputForm([batch], {}, ()), InputShape(6)
    for landed in range(0, 300, 100):
        berth = shape.next_input(batch, form, landed, lanes)
        assert berth is not None
        berth.take(form, landed)
    assert len({id(each) for each in shape.inputs}) == 3


def test_no_slot_is_given_up_for_packets_where_every_row_has_one() -> None:
    embedding = build("190%", fill="bulk")
    assert embedding.fills() == {DIM: FillChoice("zero-copy", "every row has a slot")}
    train(embedding, dense(20, count=2))
    assert embedding.num_slots == ROWS
    assert embedding.traffic().evicted_rows == 0
