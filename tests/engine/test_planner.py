"""What holds of every plan, whatever the batches, the room, the hold and the order of leaving."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import hotrow
from builders import (
    CASES,
    budget_with_pins,
    build,
    drifting_batches,
    outcome,
    readout,
    tight_budget,
    train,
    variant,
)
from hotrow.engine.evict import DOUBLED, EVICTIONS, Eviction
from hotrow.engine.planner import Plan, Planner
from hotrow.engine.rows import cpu_rows
from hotrow.engine.rules import Hold, Pins
from hotrow.engine.scratchpad import FREE, Scratchpad
from hotrow.engine.tuning import Tuning
from hotrow.kernels.reference import SortedIds, sort_ids

ROWS = 40
HOLDS = [Hold(0, 0), Hold(1, 0), Hold(0, 1), Hold(2, 1), Hold(3, 2)]
ORDERS = list(EVICTIONS)

few = settings(deadline=None, max_examples=25, derandomize=True)
several = settings(few, max_examples=50)


# -- runs: a stream of batches, and the planner that sees it -------------------------------


@dataclass(frozen=True)
class Run:
    """Everything a planner's decisions depend on."""

    batches: list[list[int]]  # ids, -1 for padding
    slots: int
    hold: Hold
    order: str
    dense_map: bool = True
    refetch: bool = False
    in_bulk: bool = True
    depth: int = 2  # batches known ahead
    bulk_part: int = 8
    last_number: int = 2**30
    pins: dict[int, tuple[str, int]] = field(default_factory=dict)  # before which batch, how many
    hot: Pins | None = None

    @property
    def tuning(self) -> Tuning:
        return Tuning(
            bulk_part=self.bulk_part, last_number=self.last_number, early_relearn=(3, 5, 8),
            ranked_in_no_time=0, ranked_per_row=0,
        )  # fmt: skip

    @property
    def eviction(self) -> Eviction:
        own = EVICTIONS[self.order]
        return replace(own, in_bulk=own.in_bulk and self.in_bulk)


@dataclass(frozen=True)
class Step:
    """One batch: what was, what is known to come, what was decided, and what is."""

    planner: Planner
    ids: set[int]
    known: list[set[int]]  # of the batches after this one, nearest first
    past: list[set[int]]  # of the batches planned before, oldest first
    before: dict[int, int]  # slot -> row
    pinned: set[int]  # rows, before
    plan: Plan | None
    after: dict[int, int]
    newly_pinned: set[int]  # rows

    @property
    def moves(self) -> list[tuple[int, int, int]]:
        """(slot, row that leaves, row that enters)"""
        if self.plan is None:
            return []
        moves = self.plan.moves
        return list(
            zip(moves.slots.tolist(), moves.leaving.tolist(), moves.entering.tolist(), strict=True)
        )

    @property
    def leaving(self) -> set[int]:
        return {row for _, row, _ in self.moves} - {FREE}

    @property
    def entering(self) -> set[int]:
        return {row for _, _, row in self.moves}

    @property
    def missing(self) -> set[int]:
        return self.ids - set(self.before.values())

    @property
    def held(self) -> set[int]:
        """Rows that may not leave because a batch in flight uses them, this one's included."""
        return self.ids.union(self.recent, *self.known[: self.planner.hold.future])

    @property
    def recent(self) -> set[int]:
        """Rows of the batches before that are still in flight."""
        count = self.planner.hold.past
        return set().union(*self.past[-count:]) if count else set()


def resident(pad: Scratchpad) -> dict[int, int]:
    return {slot: row for slot, row in enumerate(pad.row_of_slot.tolist()) if row != FREE}


def rows_in(pad: Scratchpad, slots: Tensor) -> set[int]:
    return set(pad.row_of_slot[slots].tolist())


def pin(planner: Planner, how: str, count: int) -> None:
    if how == "most used":
        planner.pin_most_used(count / planner.pad.num_slots)
    else:
        planner.pin(torch.tensor(sorted(resident(planner.pad))[:count], dtype=torch.int64))


def play(run: Run) -> Iterator[Step]:
    """Plan every batch of a run; a batch that does not fit is passed over."""
    torch.manual_seed(0)
    pad = Scratchpad(run.slots, 1, ROWS, torch.device("cpu"), dense_map=run.dense_map)
    planner = Planner(
        pad, hold=run.hold, eviction=run.eviction, refetch=run.refetch, pins=run.hot,
        tuning=run.tuning,
    )  # fmt: skip
    batches = [sort_ids(torch.tensor(ids, dtype=torch.int64), ROWS) for ids in run.batches]
    sets = [set(batch.ids.tolist()) for batch in batches]
    past: list[set[int]] = []
    expected = 0
    for place, batch in enumerate(batches):
        while expected <= place + run.depth and expected < len(batches):
            planner.expect(batches[expected])
            expected += 1
        if place in run.pins:
            pin(planner, *run.pins[place])
        before, pinned = resident(pad), rows_in(pad, planner.pinned_slots)
        plan = planner.plan(batch)
        known = sets[place + 1 : place + 1 + run.depth]
        newly = rows_in(pad, planner.pinned_slots) - pinned
        ids, after = sets[place], resident(pad)
        yield Step(planner, ids, known, list(past), before, pinned, plan, after, newly)
        if plan is not None:
            past.append(sets[place])
        else:
            past.clear()  # it is trained alone: when the next one is planned, nothing is in flight


def hot_rows(first: int, learned: bool) -> Pins:
    """Every other row from `first` on is said to be hot, as many as may be."""
    return Pins(0.5, lambda count: torch.arange(first, ROWS, 2)[:count], learned=learned)


def need(batches: list[list[int]], hold: Hold) -> int:
    """Slots that the hold needs at its worst."""
    sets = [set(ids) - {-1} for ids in batches]
    return max(
        len(set().union(*sets[max(0, i - hold.past) : i + 1 + hold.future]))
        for i in range(len(sets))
    )


streams = st.lists(st.lists(st.integers(-1, ROWS - 1), max_size=7), min_size=1, max_size=12)


@st.composite
def runs(
    draw: st.DrawFn,
    *,
    fits: bool = False,
    pins: bool = False,
    orders: list[str] = ORDERS,
    holds: list[Hold] = HOLDS,
    **fixed: Any,
) -> Run:
    """`fits`: at least the slots that the hold needs, exactly that many often."""
    batches, hold = draw(streams), draw(st.sampled_from(holds))
    room = draw(st.sampled_from([0, 0, 1, 5, 12] if fits else [-6, -3, -1, 0, 0, 1, 5, 12]))
    chosen = {
        "slots": max(1, need(batches, hold) + room),
        "order": draw(st.sampled_from(orders)),
        "dense_map": draw(st.booleans()),
        "refetch": draw(st.booleans()),
        "depth": hold.future + draw(st.integers(0, 4)),
        "bulk_part": draw(st.sampled_from([1, 2, 8])),
    }
    if pins:
        how = st.tuples(st.sampled_from(["given", "most used"]), st.integers(0, 12))
        chosen["pins"] = draw(st.dictionaries(st.integers(1, 13), how, max_size=3))
        chosen["hot"] = draw(st.none() | st.builds(hot_rows, st.integers(0, 9), st.booleans()))
    return Run(batches=batches, hold=hold, **{**chosen, **fixed})


# -- every plan ----------------------------------------------------------------------------


def check(run: Run, step: Step, balance: int) -> int:
    """What holds of every plan. `balance`: rows resident before, by the moves so far."""
    step.planner.check()
    # Pinned rows never leave their slots. Held rows leave only to be fetched anew.
    kept = {slot: row for slot, row in step.before.items() if row in step.pinned}
    assert kept.items() <= step.after.items()
    assert not step.leaving & step.pinned
    assert not step.leaving & (step.held - step.ids)
    assert step.leaving & step.entering <= step.ids
    # A row leaves the slot it was in, and moves lead from what was to what is.
    assert all(step.before.get(slot, FREE) == leaves for slot, leaves, _ in step.moves)
    assert {**step.before, **{slot: row for slot, _, row in step.moves}} == step.after
    balance += len(step.moves) - sum(leaves != FREE for _, leaves, _ in step.moves)
    assert balance == len(step.after)
    if step.plan is None:
        return balance
    # No slot has two rows, each id has a slot that holds it, and padding reads the one behind.
    *slots, padding = step.plan.row_slots.tolist()
    assert len(set(slots)) == len(slots) == len(step.ids)
    assert [step.after[slot] for slot in slots] == sorted(step.ids)
    assert padding == run.slots
    assert len({slot for slot, _, _ in step.moves}) == len(step.moves)
    if not run.refetch:  # rows enter exactly when they are absent
        hot = step.newly_pinned if not step.past else set()  # they come with the first batch
        assert step.entering == step.missing | (hot - set(step.before.values()))
        assert not step.leaving & step.held
    elif not run.pins and run.hot is None and not run.hold.future:
        assert step.entering == step.ids - step.recent  # all enter anew but those held
    else:
        assert not step.entering & step.pinned
    return balance


REFETCHING = runs(refetch=True, holds=[Hold(0, 0), Hold(1, 0), Hold(3, 0)])


@settings(few, max_examples=120)
@given(runs(pins=True) | REFETCHING)
def test_every_plan_keeps_its_promises(run: Run) -> None:
    balance = 0
    for step in play(run):
        balance = check(run, step, balance)


@pytest.mark.parametrize("hold", [Hold(1, 0), Hold(2, 1)], ids=str)
def test_a_hold_that_is_too_short_shows(hold: Hold) -> None:
    """Or these tests could not tell right from wrong."""
    batches = [[4 * n, 4 * n + 1, 4 * n + 2] for n in (0, 1, 2, 3, 0, 4, 1, 5)]
    run = Run(batches, slots=need(batches, hold), hold=hold, order="most-recent", depth=3)
    shorter = replace(run, hold=Hold(hold.past - 1, hold.future))
    steps = [replace(step, planner=longer(step.planner, hold)) for step in play(shorter)]
    assert any(step.leaving & (step.held - step.ids) for step in steps)
    for step in play(run):
        assert not step.leaving & step.held


def longer(planner: Planner, hold: Hold) -> Any:
    return SimpleNamespace(hold=hold)


# -- batches that do not fit ---------------------------------------------------------------


@several
@given(runs(fits=True))
def test_the_slots_that_the_hold_needs_are_enough(run: Run) -> None:
    assert all(step.plan is not None for step in play(run))


@several
@given(runs())
def test_the_first_batch_that_does_not_fit_has_truly_no_room(run: Run) -> None:
    for step in play(run):
        rows = set(step.before.values())
        room = run.slots - len(rows & step.held)
        assert (step.plan is None) == (len(step.missing) > room)
        if step.plan is None:
            return  # what it would have held is another matter


@pytest.mark.parametrize("hold", HOLDS, ids=str)
@settings(few, phases=[Phase.generate])
@given(data=st.data())
def test_a_batch_that_does_not_fit_changes_nothing(hold: Hold, data: st.DataObject) -> None:
    run = data.draw(runs(holds=[hold], slots=5))
    before: list[Any] | None = None
    for step in play(run):
        if step.plan is None and before is not None:
            assert all(map(torch.equal, before, state_of(step.planner)))
        before = state_of(step.planner)


def state_of(planner: Planner) -> list[Tensor]:
    """All that later decisions depend on."""
    slots = planner.pad.map.lookup(torch.arange(ROWS))
    last_use, uses = planner.last_use.clone(), planner.uses.clone()
    return [planner.pad.row_of_slot.clone(), slots, last_use, uses]


def test_pins_give_way_to_batches_that_do_not_fit() -> None:
    planner = planner_of(slots=8)
    planner.plan(ids_of(*range(8)))
    planner.pin(torch.arange(8))
    assert planner.plan(ids_of(8, 9)) is None
    assert planner.plan(ids_of(8, 9)) is not None


def test_one_batch_that_does_not_fit_does_not_end_pinning() -> None:
    pins = Pins(0.5, lambda count: torch.arange(count), learned=True)
    planner = planner_of(20, hold=Hold(1, 0), pins=pins)
    planner.plan(ids_of(0, 1))
    assert planner.pinned_slots.numel() == 10
    assert planner.plan(ids_of(*range(30))) is None
    for _ in range(40):
        planner.plan(ids_of(0, 1))
    assert planner.pinned_slots.numel() == 2


def test_the_coldest_pins_give_way_first() -> None:
    planner = planner_of(slots=8)
    planner.plan(ids_of(*range(8)))
    hottest_first = torch.tensor([3, 1, 4, 0, 5, 2, 6, 7])
    planner.pin(hottest_first)
    assert planner.plan(ids_of(8)) is None
    assert torch.equal(planner.pinned_slots, hottest_first[:6])


# -- who leaves ----------------------------------------------------------------------------


def key_of(order: str, step: Step, history: list[tuple[set[int], set[int]]], row: int) -> Any:
    """The smaller, the sooner a row should leave; from what batches used and fetched."""
    number = len(history)
    last = max(n for n in range(number) if row in history[n][0])
    entered = max(n for n in range(number) if row in history[n][1])
    uses = sum(row in used for used, _ in history[entered:])
    upcoming = [place for place, ids in enumerate(step.known) if row in ids]
    if order == "least-recent":
        return last
    if order == "most-recent":
        return -last
    if order == "farthest-next-use" and upcoming:
        return (1, -upcoming[0])
    if order == "farthest-next-use":
        power = uses.bit_length() - 1
        return (0, last + DOUBLED * power + DOUBLED * (uses - 2**power) // 2**power)
    return (0, uses, last)


def assert_right_rows_leave(run: Run) -> None:
    history: list[tuple[set[int], set[int]]] = []
    for step in play(run):
        may_leave = set(step.before.values()) - step.held
        keys = {row: key_of(run.order, step, history, row) for row in may_leave}
        stay = may_leave - step.leaving
        if step.leaving and stay:
            latest = max(keys[row] for row in step.leaving)
            assert latest <= min(keys[row] for row in stay)
        history.append((step.ids, step.entering))


RANKED = [name for name in ORDERS if name != "random"]


@pytest.mark.parametrize("order", RANKED)
@settings(few, max_examples=40)
@given(data=st.data())
def test_the_rows_that_leave_are_first_in_their_order(order: str, data: st.DataObject) -> None:
    run = data.draw(runs(orders=[order], fits=True, refetch=False, in_bulk=False))
    assert_right_rows_leave(run)


@several
@given(runs(orders=["least-recent"], fits=True, refetch=False))
def test_a_ranking_in_bulk_is_exact_for_least_recent(run: Run) -> None:
    assert_right_rows_leave(run)


@few
@given(runs(orders=["least-recent", "least-frequent", "farthest-next-use"], refetch=False))
def test_no_row_leaves_while_a_slot_is_free(run: Run) -> None:
    for step in play(run):
        if step.leaving:
            assert len(step.after) == run.slots


def test_a_row_whose_use_became_known_since_does_not_leave_by_an_old_ranking() -> None:
    one_ranking = Tuning(bulk_part=1, ranked_in_no_time=0, ranked_per_row=0)
    planner = planner_of(8, "farthest-next-use", tuning=one_ranking)
    pad = planner.pad
    planner.plan(ids_of(*range(8)))
    planner.plan(ids_of(8))
    old = sorted(set(resident(pad).values()) - {8})
    planner.expect(ids_of(*old[:3], *old[4:]))
    plan = planner.plan(ids_of(9))
    assert plan is not None
    assert plan.moves.leaving.tolist() == [old[3]]


@pytest.mark.parametrize(("per_row", "leaves_at_once"), [(16, True), (0, False)])
def test_a_row_that_came_after_a_ranking_leaves_if_a_new_one_takes_little(
    per_row: int, leaves_at_once: bool
) -> None:
    tuning = Tuning(bulk_part=1, ranked_in_no_time=0, ranked_per_row=per_row)
    planner = planner_of(8, "farthest-next-use", tuning=tuning)
    pad = planner.pad
    planner.plan(ids_of(*range(8)))
    planner.plan(ids_of(*range(8)))
    for row in (8, 9):  # used once each, where the others were used twice
        planner.plan(ids_of(row))
    assert (8 not in resident(pad).values()) is leaves_at_once


def test_what_was_popular_once_leaves_in_the_end() -> None:
    planner = planner_of(2, "farthest-next-use")
    pad = planner.pad
    for _ in range(8):
        planner.plan(ids_of(0))
    for number in range(3 * DOUBLED - 1):
        planner.plan(ids_of(1 + number % 2))
        assert 0 in resident(pad).values()
    for number in range(2):
        planner.plan(ids_of(3 + number))
    assert 0 not in resident(pad).values()


@cache
def fewest_fetches(stream: tuple[int, ...], slots: int) -> int:
    """Over all choices of who leaves, for batches of one row each."""
    best = {frozenset[int](): 0}
    for row in stream:
        after: dict[frozenset[int], int] = {}
        for rows, cost in best.items():
            if row in rows:
                choices = [rows]
            elif len(rows) < slots:
                choices = [rows | {row}]
            else:
                choices = [rows - {other} | {row} for other in rows]
            for choice in choices:
                paid = cost + (row not in rows)
                after[choice] = min(paid, after.get(choice, paid))
        best = after
    return min(best.values())


@several
@given(st.lists(st.integers(0, 6), min_size=1, max_size=14), st.integers(1, 4))
def test_farthest_next_use_fetches_as_few_rows_as_any_choice_could(
    stream: list[int], slots: int
) -> None:
    run = Run(
        batches=[[row] for row in stream], slots=slots, hold=Hold(0, 0),
        order="farthest-next-use", in_bulk=False, depth=len(stream),
    )  # fmt: skip
    fetched = sum(len(step.moves) for step in play(run))
    assert fetched == fewest_fetches(tuple(stream), slots)


def test_least_recent_fetches_more_than_the_fewest_on_a_loop() -> None:
    stream = [0, 1, 2, 3] * 4
    run = Run([[row] for row in stream], slots=3, hold=Hold(0, 0), order="least-recent")
    assert sum(len(step.moves) for step in play(run)) > fewest_fetches(tuple(stream), 3)


# -- what changes no decision ----------------------------------------------------------------


def decisions(run: Run) -> list[list[tuple[int, int, int]] | None]:
    return [None if step.plan is None else step.moves for step in play(run)]


@several
@given(runs(pins=True))
def test_the_form_of_the_map_changes_no_decision(run: Run) -> None:
    dense, hashed = (replace(run, dense_map=dense_map) for dense_map in (True, False))
    assert decisions(dense) == decisions(hashed)


@several
@given(runs(pins=True, hot=None, in_bulk=False))  # learned pins go by the number
def test_renumbering_changes_no_decision(run: Run) -> None:
    soon = replace(run, last_number=run.hold.batches + run.depth + 2)
    assert decisions(soon) == decisions(run)


def test_renumbering_happens_and_keeps_numbers_small_and_pins() -> None:
    run = Run(
        [[n % ROWS] for n in range(50)], slots=8, hold=Hold(1, 0), order="least-recent",
        last_number=10, hot=Pins(0.5, lambda count: torch.arange(30, 30 + count)),
    )  # fmt: skip
    for step in play(run):
        assert step.planner.number <= 10
        step.planner.check()
    assert step.pinned == {30, 31, 32, 33}


# A batch that still waits for its gradients must not take other rows' slots for its own.
@pytest.mark.parametrize("strategy", ["lru", "scratchpipe", "lookahead"])
def test_renumbering_changes_no_bit_of_late_gradients(strategy: str) -> None:
    case = CASES["one-hot"]
    batches = case.batches(40)

    def run(embedding: hotrow.EmbeddingBagCollection) -> Any:
        """Every tenth batch's gradients arrive nine batches later."""
        losses, kept = [], None
        for place, batch in enumerate(hotrow.ahead(batches, embedding)):
            loss = readout(embedding(batch))
            if place % 10 == 0:
                kept = loss
            elif place % 10 == 9:
                assert kept is not None
                kept.backward()
                losses.append(kept.detach())
        return outcome(embedding, losses)

    right = run(build(case, "adagrad"))
    engine = partial(cpu_rows, tuning=Tuning(last_number=23))
    chosen = variant(strategy, victims="random")
    budget = tight_budget(case, batches, chosen.hold)
    assert run(build(case, "adagrad", chosen, budget=budget, engine=engine)).same_bits(right)


# -- pins ----------------------------------------------------------------------------------


def planner_of(
    slots: int, order: str = "least-recent", hold: Hold = HOLDS[0], **options: Any
) -> Planner:
    pad = Scratchpad(slots, 1, ROWS, torch.device("cpu"), dense_map=True)
    return Planner(pad, hold=hold, eviction=EVICTIONS[order], **options)


def ids_of(*rows: int) -> SortedIds:
    return sort_ids(torch.tensor(rows, dtype=torch.int64), ROWS)


@pytest.mark.parametrize(
    ("part", "turns"),
    [
        (0.1, [([(1, 2), (1, 3), (2, 4), (1, 5), (2, 6), (3, 7)], {1, 2})]),  # those used most
        (0.5, [([(1, 2), (3, 4), (1, 5)], {1})]),  # and none that were used once
        (0.05, [([(1,)] * 6 + [(2,)], {1}), ([(2,)] * 4, {2})]),  # older uses count half
    ],
)
def test_re_pinning_by_use_pins_the_rows_used_most(part: float, turns: Any) -> None:
    planner = planner_of(slots=20)
    for batches, pinned in turns:
        for rows in batches:
            planner.plan(ids_of(*rows))
        planner.pin_most_used(part)
        assert rows_in(planner.pad, planner.pinned_slots) == pinned


@few
@given(runs(pins=True))
def test_pins_leave_room_for_the_largest_hold(run: Run) -> None:
    largest = 0
    for step in play(replace(run, pins={})):
        largest = max(largest, len(step.ids))
        if step.newly_pinned:
            pinned = step.planner.pinned_slots.numel()
            assert run.slots - pinned >= run.hold.batches * largest


def test_a_re_pin_lets_the_others_go() -> None:
    planner = planner_of(slots=4)
    planner.plan(ids_of(0, 1, 2, 3))
    planner.pin(torch.tensor([0, 1]))
    planner.pin(torch.tensor([2]))
    (kept,) = rows_in(planner.pad, planner.pinned_slots)
    planner.plan(ids_of(kept))
    plan = planner.plan(ids_of(4, 5, 6))
    assert plan is not None
    assert set(plan.moves.leaving.tolist()) == {0, 1, 2, 3} - {kept}


@pytest.mark.parametrize("order", ["least-recent", "most-recent"])
@pytest.mark.parametrize("hold", HOLDS, ids=str)
def test_a_released_pin_leaves_after_the_newest_batch_and_not_before(
    hold: Hold, order: str
) -> None:
    """The newest batch may use the pinned row, and trains `hold.past` batches later."""
    planner = planner_of(hold.past + 2, order, hold)
    pad = planner.pad
    planner.plan(ids_of(*range(hold.past + 2)))
    planner.pin(pad.map.lookup(torch.tensor([0])))
    for _ in range(hold.past + 1):
        planner.plan(ids_of(0))
    planner.pin(torch.empty(0, dtype=torch.int64))
    planner.check()
    for row in range(20, 20 + hold.past):
        plan = planner.plan(ids_of(row))
        assert plan is not None
        assert 0 not in plan.moves.leaving.tolist()
    plan = planner.plan(ids_of(30, 31))
    assert plan is not None, "the slot of a released pin is never free again"
    assert 0 in plan.moves.leaving.tolist()


def test_rows_known_to_be_hot_come_with_the_first_batch_and_are_pinned() -> None:
    pins = Pins(0.4, lambda count: torch.tensor([30, 2, 31, 32, 33, 34])[:count])
    planner = planner_of(10, hold=Hold(1, 0), pins=pins)
    pad = planner.pad
    plan = planner.plan(ids_of(1, 2))
    assert plan is not None
    assert set(plan.moves.entering.tolist()) == {1, 2, 30, 31, 32}
    assert pad.row_of_slot[planner.pinned_slots].tolist() == [30, 2, 31, 32]
    planner.check()


# -- the window of known batches -----------------------------------------------------------


def test_a_planned_batch_is_no_longer_expected_and_others_are() -> None:
    planner, first = planner_of(slots=4), ids_of(1)
    for batch in (first, ids_of(2)):
        planner.expect(batch)
    for planned in (first, ids_of(3)):  # the second was not expected
        planner.plan(planned)
        assert [each.tolist() for each in planner.window] == [[2]]


@pytest.mark.parametrize("rows", [(), (-1, -1)], ids=["empty", "padding"])
def test_a_batch_without_rows_moves_nothing(rows: tuple[int, ...]) -> None:
    planner = planner_of(slots=2)
    planner.plan(ids_of(0, 1))
    plan = planner.plan(ids_of(*rows))
    assert plan is not None
    assert plan.moves.slots.numel() == 0
    assert plan.row_slots.tolist() == [2]


# -- with rows -----------------------------------------------------------------------------


# With five stages a row that is fetched anew is read before it is written back: its newest bytes
# are in the slot. Within one pass the hold hides a mistake, as every batch but the first is known
# when the one before it is planned.
@pytest.mark.parametrize("schedule", ["sequential", "fused", "five"])
@pytest.mark.parametrize("strategy", ["uncached", "static"])
def test_rows_fetched_anew_keep_their_updates_over_several_passes(
    strategy: str, schedule: str
) -> None:
    case = CASES["one-hot"]
    batches = case.batches(30)
    passes = [batches[:10], batches[10:20], batches[20:]]
    right = build(case, "adagrad")
    chosen = variant(strategy, schedule)
    budget = tight_budget(case, batches, chosen.hold)
    embedding = build(case, "adagrad", chosen, budget=budget)
    for each in passes:
        assert train(embedding, each).same_bits(train(right, each))


# A released pin that leaves too early is collected before the batches in flight have updated it.
@pytest.mark.parametrize("victims", ["own", "most-recent", "random"])
@pytest.mark.parametrize("schedule", ["fused", "split", "five", "five-shuffled"])
def test_learned_pins_that_are_released_lose_no_update(schedule: str, victims: str) -> None:
    case, batches = CASES["one-hot"], drifting_batches(16)
    strategy = variant("static", schedule, victims)
    budget = budget_with_pins(batches, strategy.hold, pins=2)
    embedding = build(case, "adagrad", strategy, budget=budget)
    result = train(embedding, batches)
    planner: Any = embedding.groups[0].planner
    assert rows_in(planner.pad, planner.pinned_slots) == {1, 61}
    assert planner.pins_version >= 3  # two re-pins
    assert embedding.traffic().chunked_batches == 0
    assert result.same_bits(train(build(case, "adagrad"), batches))
