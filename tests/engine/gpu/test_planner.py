"""The planner on the device keeps the promises of planner.py, one kernel at a time: Triton's
interpreter runs it where there is no GPU."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import skewed
from hotrow.engine.evict import EVICTIONS, SlotFacts
from hotrow.engine.gpu import planner as device_planner
from hotrow.engine.gpu.plan_buffers import PlanBuffers
from hotrow.engine.gpu.planner import DevicePlan, DevicePlanner, Expected
from hotrow.engine.gpu.scratchpad import DeviceScratchpad
from hotrow.engine.planner import Planner
from hotrow.engine.rules import PINNED, Hold, Pins
from hotrow.engine.scratchpad import Scratchpad
from hotrow.engine.tuning import DEFAULT, Tuning
from hotrow.kernels.reference import sort_ids
from hotrow.kernels.triton import maps, ranking, window, words
from hotrow.kernels.triton import plan as kernels
from hotrow.kernels.triton.maps import FREE
from hotrow.kernels.triton.window import globalise
from map_kernels import leave, replace_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOMBSTONE = maps.TOMBSTONE.value
ROWS = 60
ONE_BEFORE = Hold(1, 0)
PADDING = -1  # in the batches of this file


# -- a stream of batches, and the planner that sees it -------------------------------------


@dataclass(frozen=True)
class Run:
    """All that a planner's decisions depend on."""

    batches: Sequence[Sequence[int]]
    slots: int
    order: str = "least-recent"
    hold: Hold = ONE_BEFORE
    dense_map: bool = True
    refetch: bool = False
    depth: int = 2  # batches known ahead
    pins: Pins | None = None
    rows: int = ROWS
    tuning: Tuning = DEFAULT

    def planner(self) -> DevicePlanner:
        pad = DeviceScratchpad(self.slots, 1, self.rows, DEVICE, dense_map=self.dense_map)
        return DevicePlanner(
            pad,
            hold=self.hold,
            eviction=EVICTIONS[self.order],
            refetch=self.refetch,
            pins=self.pins,
            window_bytes=1 << 12,
            tuning=self.tuning,
        )


@dataclass
class Step:
    """One batch: what was, what was decided, and what is."""

    run: Run
    lookups: list[int]
    plan: DevicePlan
    outcome: int
    before: dict[int, int]  # slot -> row
    after: dict[int, int]
    moves: list[tuple[int, int, int]]  # slot, row that leaves, row that enters
    past: list[set[int]] = field(default_factory=list)  # rows of batches planned before
    known: list[set[int]] = field(default_factory=list)  # and of those after

    @property
    def ids(self) -> set[int]:
        return set(self.lookups) - {PADDING}

    @property
    def missing(self) -> set[int]:
        return self.ids - set(self.before.values())

    @property
    def held(self) -> set[int]:
        """Rows that may not leave, this batch's included."""
        past = self.past[len(self.past) - self.run.hold.past :]
        return self.ids.union(*past, *self.known[: self.run.hold.future])

    @property
    def leaving(self) -> set[int]:
        return {row for _, row, _ in self.moves} - {FREE}


def write(planner: DevicePlanner, lookups: Sequence[int], ids: Tensor, counts: Tensor) -> None:
    """A batch's ids as a collection writes them; one that is no row's is noted."""
    values = torch.tensor([lookups], dtype=torch.int64, device=DEVICE).T.contiguous()
    rows = planner.pad.num_rows
    # One feature, whose padding is the row after the last.
    features = torch.tensor([[0, rows + 1, rows, 0]], device=DEVICE)
    values[values == PADDING] = rows
    globalise(
        values, ids, features, None, len(lookups), rows, counts[words.FIRST_BAD :]
    )  # fmt: skip


def expect(planner: DevicePlanner, lookups: Sequence[int]) -> Expected:
    batch = planner.admit(len(lookups), announced=True)
    planner.expect(batch, lambda ids, counts: write(planner, lookups, ids, counts), object())
    return batch


def unannounced(planner: DevicePlanner, lookups: Sequence[int]) -> Expected:
    batch = planner.admit(len(lookups), announced=False)
    planner.counts_of(batch).copy_(planner.fresh_counts)
    write(planner, lookups, planner.window_ids[batch.row], planner.counts_of(batch))
    return batch


def buffers_for(planner: DevicePlanner) -> PlanBuffers:
    return PlanBuffers(max(1, planner.capacity), planner.pad.id_type, DEVICE)


def outcome_of(planner: DevicePlanner, plan: DevicePlan) -> int:
    device_planner._wait(DEVICE)
    return planner.read(plan)


def resident(planner: DevicePlanner) -> dict[int, int]:
    rows = planner.pad.row_of_slot.tolist()
    return {slot: row for slot, row in enumerate(rows) if row != FREE}


def moves_of(plan: DevicePlan) -> list[tuple[int, int, int]]:
    b, count = plan.buffers, plan.num_moves
    parts = (b.move_slots[:count], b.leaving[:count], b.entering[:count])
    return list(zip(*(part.tolist() for part in parts), strict=True))


def steps(run: Run, planner: DevicePlanner | None = None) -> Iterator[Step]:
    """Plan every batch; one that does not fit is passed over, as if it went the direct way."""
    planner = planner or run.planner()
    unread, known = iter(run.batches), deque[tuple[list[int], Expected]]()
    past: list[set[int]] = []

    def read_on() -> None:
        while len(known) <= run.depth and (lookups := next(unread, None)) is not None:
            known.append((list(lookups), expect(planner, lookups)))

    read_on()
    while known:
        lookups, batch = known.popleft()
        before = resident(planner)
        plan = planner.plan(batch, buffers_for(planner))
        outcome = outcome_of(planner, plan)
        if outcome == words.NO_ROOM:
            again = unannounced(planner, lookups)
            if planner.resume(again, plan, retry=True):
                outcome = words.PLANNED
        step = Step(run, lookups, plan, outcome, before, resident(planner), moves_of(plan))
        step.past, step.known = list(past), [set(each) - {PADDING} for each, _ in known]
        planner.check()
        yield step
        # A batch without slots is trained alone: nothing before it is in flight afterwards.
        past = [*past, step.ids] if outcome == words.PLANNED else []
        read_on()


def check(step: Step) -> None:
    """What holds of every plan."""
    run, b = step.run, step.plan.buffers
    resident_held = {row for row in step.before.values() if row in step.held}
    room = run.slots - len(resident_held)
    if step.outcome == words.NO_ROOM:
        assert len(step.missing) > room, "it would have fitted"
        assert step.after == step.before
        return
    assert step.outcome == words.PLANNED
    assert len(step.missing) <= room, "it does not fit"
    # Ids: sorted, each once, padding last, and every lookup finds its own.
    segments = step.plan.segments()
    unique = sorted(step.ids) + [run.rows] * (PADDING in step.lookups)
    assert step.plan.num_unique == len(unique)
    assert segments.ids[: len(unique)].tolist() == unique
    order, rank = segments.order.tolist(), segments.rank.tolist()
    as_sorted = [
        run.rows if step.lookups[place] == PADDING else step.lookups[place] for place in order
    ]
    assert as_sorted == [unique[each] for each in rank] == sorted(as_sorted)
    # Slots.
    by_row = {row: slot for slot, row in step.after.items()} | {PADDING: run.slots}
    assert b.lookup_slots[: len(step.lookups)].tolist() == [by_row[row] for row in step.lookups]
    assert b.row_slots[: len(step.ids)].tolist() == [by_row[row] for row in sorted(step.ids)]
    # Moves: what is missing enters, in the order of ids; what leaves was there and is not held.
    entering = [new for _, old, new in step.moves if old != new]
    assert entering == sorted(step.missing)
    assert len({slot for slot, _, _ in step.moves}) == len(step.moves)
    assert all(step.before.get(slot, FREE) == old for slot, old, _ in step.moves)
    changed = {slot: new for slot, _, new in step.moves}
    assert step.after == {**step.before, **changed}
    again = {new for _, old, new in step.moves if old == new}
    recent = set().union(*step.past[len(step.past) - run.hold.past :])
    assert again == ((step.ids - step.missing - recent) if run.refetch else set())
    assert not (step.leaving - again) & step.held, "a held row left"
    assert step.plan.num_evicted == len(step.leaving)


def checked(run: Run, planner: DevicePlanner | None = None) -> list[Step]:
    seen = list(steps(run, planner))
    for step in seen:
        check(step)
    return seen


def some_batches(count: int, size: int, *, rows: int = ROWS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [skewed(generator, rows, size).tolist() for _ in range(count)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tiny batches take several programs each, and a ranking serves several of them."""
    for module in (kernels, ranking, window):
        monkeypatch.setattr(module, "BLOCK", 16)
        monkeypatch.setattr(module, "LANES", 8, raising=False)


def test_keys_order_slots_as_on_a_cpu() -> None:
    uses = torch.cat([torch.arange(600), torch.tensor([1023, 1024, 20000, 32766, 32767])])
    last = torch.randint(0, 3000, uses.shape, generator=torch.Generator().manual_seed(0))
    facts = SlotFacts(last.int(), torch.full_like(uses, words.NEVER).int(), uses.int())
    state = torch.zeros(words.STATE_WORDS, dtype=torch.int32, device=DEVICE)
    state[words.CLOCK] = 4000
    for name in ("least-recent", "least-frequent", "farthest-next-use"):
        if name == "least-frequent":  # which tells fewer uses apart on a device
            facts = replace(facts, uses=facts.uses.clamp(max=511))
        on_device = (facts.last_use, facts.next_use, facts.uses.short())
        found = ranking.rank_keys(
            tuple(each.to(DEVICE) for each in on_device), uses.to(DEVICE), state, 1, name,
            words.FIRST_USE if name == "farthest-next-use" else words.NOTHING,
        )  # fmt: skip
        key = EVICTIONS[name].key(facts)
        order = key.argsort(stable=True)
        assert torch.equal(found.cpu().long().argsort(stable=True), order)


# -- every plan ----------------------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("order", "dense_map"),
    [*((order, True) for order in EVICTIONS), ("farthest-next-use", False), ("random", False)],
    ids=str,
)
@pytest.mark.usefixtures("small_blocks")
def test_a_plan_finds_what_is_there_and_fetches_what_is_not(order: str, dense_map: bool) -> None:
    tuning = Tuning(spare_victims=16)
    run = Run(some_batches(6, 18), slots=36, order=order, dense_map=dense_map, tuning=tuning)
    seen = checked(run)
    assert any(step.leaving for step in seen)
    assert any(step.ids - step.missing for step in seen[1:])


# Four rows each: the first four batches have none in common, the last two were there before.
APART = [list(range(first, first + 4)) for first in (0, 4, 8, 12, 16, 8, 20, 0)]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("dense_map", [True, False], ids=["dense", "hash"])
@pytest.mark.parametrize(("past", "slots"), [(0, 4), (1, 8), (3, 16)])
def test_rows_of_batches_in_flight_stay_and_no_others(
    past: int, slots: int, dense_map: bool
) -> None:
    """As many slots as the hold needs: all fits. One fewer, and it does not."""
    for room in (slots, slots - 1):
        run = Run(APART, room, order="most-recent", hold=Hold(past, 0), dense_map=dense_map)
        seen = checked(run)
        assert all(step.outcome == words.PLANNED for step in seen) is (room == slots)


@pytest.mark.parametrize(
    ("hold", "shorter"),
    [(Hold(1, 0), Hold(0, 0)), (Hold(3, 0), Hold(2, 0)), (Hold(0, 2), Hold(0, 1))],
    ids=str,
)
def test_a_hold_that_is_too_short_shows(hold: Hold, shorter: Hold) -> None:
    run = Run(APART, slots=16, order="most-recent", hold=hold, depth=3)
    assert checked(run)
    planner = run.planner()
    planner.hold = shorter
    with pytest.raises(AssertionError, match="a held row left"):
        checked(run, planner)


@pytest.mark.parametrize("hold", [Hold(0, 0), Hold(1, 0)], ids=str)
def test_rows_are_fetched_anew_where_nothing_is_cached(hold: Hold) -> None:
    run = Run(some_batches(6, 10), slots=24, hold=hold, refetch=True)
    assert any(old == new for step in checked(run) for _, old, new in step.moves)


def test_padding_reads_the_null_slot_and_moves_nothing() -> None:
    run = Run([[3, PADDING, 3, 5], [PADDING] * 3, [5, PADDING]], slots=4)
    seen = checked(run)
    assert [len(step.moves) for step in seen] == [2, 0, 0]


def test_a_batch_without_lookups_is_planned() -> None:
    for batches in ([[1, 2], [], [2, 3]], [[], [1, 2]]):
        seen = checked(Run(batches, slots=6))
        assert all(step.outcome == words.PLANNED for step in seen)


batch_lists = st.lists(
    st.lists(st.integers(PADDING, 19), min_size=1, max_size=9), min_size=2, max_size=6
)


@settings(deadline=None, max_examples=8, derandomize=True, phases=[Phase.generate])
@given(
    batches=batch_lists,
    slots=st.integers(4, 18),
    order=st.sampled_from(list(EVICTIONS)),
    hold=st.sampled_from([Hold(0, 0), Hold(1, 0), Hold(3, 2)]),
    refetch=st.booleans(),
    depth=st.integers(2, 4),
)
def test_any_stream_is_planned_as_well_as_it_fits(
    batches: list[list[int]], slots: int, order: str, hold: Hold, refetch: bool, depth: int
) -> None:
    run = Run(
        batches, slots=slots, order=order, hold=hold, refetch=refetch, depth=depth, rows=20,
        dense_map=(slots + len(batches)) % 4 != 0,
    )  # fmt: skip
    checked(run)


# -- the hashed map ------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 12, pytest.param(90, marks=pytest.mark.slow)])
def test_a_hash_knows_every_row_and_no_other_whatever_comes_and_goes(slots: int) -> None:
    generator = torch.Generator().manual_seed(slots)
    row_of_slot = torch.full((slots,), FREE, dtype=torch.int32, device=DEVICE)
    found = maps.DeviceMap(row_of_slot, 10_000, dense=False)
    every = torch.arange(4 * slots + 8, dtype=torch.int32, device=DEVICE)
    tombstones, most = 0, 0
    for _ in range(40):
        resident = row_of_slot.tolist()
        count = int(torch.randint(1, slots + 1, (1,), generator=generator))
        if tombstones + count >= found.size - slots:  # as a plan that would fail
            found.rebuild()
            tombstones = 0
        absent = [row for row in every.tolist() if row not in resident]
        chosen = torch.randperm(slots, generator=generator)[:count]
        entering = torch.tensor(absent)[torch.randperm(len(absent), generator=generator)[:count]]
        left = replace_rows(found, chosen.int().to(DEVICE), entering.int().to(DEVICE))
        tombstones += int(left.sum())
        most = max(most, tombstones)
        assert tombstones == int((found.table == TOMBSTONE).sum())
        expected = torch.full_like(every, FREE)
        there = (row_of_slot != FREE).nonzero().squeeze(1)
        expected[row_of_slot[there].long()] = there.int()
        assert torch.equal(found.lookup(every), expected)
        assert found.count() == there.numel()
    assert most > 0 or slots < 90


def test_a_place_that_nobody_has_gone_past_is_empty_again() -> None:
    row_of_slot = torch.arange(64, dtype=torch.int32, device=DEVICE)
    found = maps.DeviceMap(row_of_slot, 10_000, dense=False)
    found.rebuild()
    buckets = found.table.view(-1, maps.PLACES.value)
    had_empty = (buckets == -1).any(dim=1)
    before = buckets.clone()
    slots = torch.arange(32, dtype=torch.int32, device=DEVICE)
    left = torch.zeros_like(slots)
    leave[(1,)](slots, row_of_slot, found.table, left, 32, found.size, found.bits, BLOCK=32)
    changed = buckets != before
    assert int(changed.sum()) == 32
    assert (buckets[had_empty][changed[had_empty]] == -1).all()
    assert (buckets[~had_empty][changed[~had_empty]] == TOMBSTONE).all()
    assert int(left.sum()) == int(changed[~had_empty].sum())


def test_a_hash_that_is_churned_is_rebuilt_and_never_loses_a_row() -> None:
    """Few slots, new rows in every batch: tombstones pile up until a rebuild."""
    batches = [[(17 * turn + 3 * x) % 600 for x in range(24)] for turn in range(24)]
    run = Run(batches, slots=60, dense_map=False, rows=600, tuning=Tuning(tombstone_part=100))
    planner = run.planner()
    most, counted = 0, []
    for step in steps(run, planner):
        check(step)
        there = int((planner.pad.map.table == TOMBSTONE).sum())
        assert int(planner.state[words.TOMBSTONES]) == there
        most = max(most, there)
        counted.append(there)
    assert planner._rebuilds > 0
    assert most > 0
    assert any(after < before for before, after in itertools.pairwise(counted))
    # More tombstones than places that are still empty, and a search would never end.
    assert most + run.slots < planner.pad.map.size


def test_a_plan_that_would_leave_no_place_empty_is_made_after_a_rebuild() -> None:
    run = Run([[0, 1, 2], [3, 4, 5]], slots=6, dense_map=False)
    planner = run.planner()
    expected = [expect(planner, lookups) for lookups in run.batches]
    assert outcome_of(planner, planner.plan(expected[0], buffers_for(planner))) == words.PLANNED
    planner.state[words.TOMBSTONES] = planner.pad.map.size - run.slots - 3  # as if they were there
    plan = planner.plan(expected[1], buffers_for(planner))
    assert outcome_of(planner, plan) == words.NO_ROOM
    assert planner.resume(unannounced(planner, run.batches[1]), plan, retry=True)
    assert planner._rebuilds == 1
    assert planner.pad.map.count() == 6
    assert int(planner.state[words.TOMBSTONES]) == 0


def test_a_rebuild_leaves_no_tombstone_and_every_row() -> None:
    run = Run(some_batches(6, 8), slots=20, dense_map=False)
    planner = run.planner()
    assert list(steps(run, planner))
    rows = planner.pad.row_of_slot
    taken = (rows != FREE).nonzero().squeeze(1)
    planner.pad.map.rebuild()
    assert not (planner.pad.map.table == TOMBSTONE).any()
    assert torch.equal(planner.pad.map.lookup(rows[taken]).long(), taken)
    absent = torch.tensor(sorted(set(range(ROWS)) - set(rows[taken].tolist())), device=DEVICE)
    assert (planner.pad.map.lookup(absent.to(rows.dtype)) == FREE).all()


# -- plans that fail -----------------------------------------------------------------------


def facts(planner: DevicePlanner) -> list[Tensor]:
    """All that planning decides by, but for the ranking."""
    pad = planner.pad
    kept = (pad.row_of_slot, pad.map.table, planner.last_use, planner.uses)
    return [each.clone() for each in kept] + [planner.state[words.CLOCK].clone()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize("dense_map", [True, False], ids=["dense", "hash"])
def test_a_bad_id_halts_all_that_was_planned_behind_it_until_it_is_resumed(
    dense_map: bool,
) -> None:
    run = Run([[1, 2, 3], [2, 4], [5, ROWS + 1, 6], [7, 8], [1, 9]], 12, dense_map=dense_map)
    planner = run.planner()
    expected = [expect(planner, lookups) for lookups in run.batches]
    good = [planner.plan(each, buffers_for(planner)) for each in expected[:2]]
    before = facts(planner)
    bad = planner.plan(expected[2], buffers_for(planner))
    later = [planner.plan(each, buffers_for(planner)) for each in expected[3:]]
    assert [outcome_of(planner, plan) for plan in good] == [words.PLANNED] * 2
    assert outcome_of(planner, bad) == words.BAD_ID
    assert int(bad.buffers.status[words.FIRST_BAD]) == 1  # which lookup it was
    assert [outcome_of(planner, plan) for plan in later] == [words.NOT_PLANNED] * 2
    assert same(facts(planner), before)
    with pytest.raises(AssertionError, match="planning has halted"):
        planner.check()
    assert not planner.resume(expected[2], bad, retry=False)
    planner.check()
    for lookups in run.batches[3:]:
        again = planner.plan(unannounced(planner, lookups), buffers_for(planner))
        assert outcome_of(planner, again) == words.PLANNED
    assert set(resident(planner).values()) == {1, 2, 3, 4, 7, 8, 9}
    planner.check()


def test_a_batch_that_does_not_fit_changes_no_map_and_halts_those_behind_it() -> None:
    run = Run([[0, 1], list(range(10, 20)), [2, 3]], slots=8)
    planner = run.planner()
    expected = [expect(planner, lookups) for lookups in run.batches]
    assert outcome_of(planner, planner.plan(expected[0], buffers_for(planner))) == words.PLANNED
    maps = [planner.pad.row_of_slot.clone(), planner.pad.map.table.clone()]
    large = planner.plan(expected[1], buffers_for(planner))
    behind = planner.plan(expected[2], buffers_for(planner))
    assert outcome_of(planner, large) == words.NO_ROOM
    assert outcome_of(planner, behind) == words.NOT_PLANNED
    assert same(maps, [planner.pad.row_of_slot, planner.pad.map.table])
    again = unannounced(planner, run.batches[1])
    assert not planner.resume(again, large, retry=True)
    assert same(maps, [planner.pad.row_of_slot, planner.pad.map.table])
    again = unannounced(planner, run.batches[2])
    assert outcome_of(planner, planner.plan(again, buffers_for(planner))) == words.PLANNED
    assert set(resident(planner).values()) == {0, 1, 2, 3}


def test_a_ranking_that_ran_dry_is_made_anew_before_a_batch_is_given_up() -> None:
    run = Run([[0, 1, 2], [3, 4, 5]], slots=6)
    planner = run.planner()
    expected = [expect(planner, lookups) for lookups in run.batches]
    assert outcome_of(planner, planner.plan(expected[0], buffers_for(planner))) == words.PLANNED
    planner._prepare_victims = lambda announced: None  # type: ignore[method-assign]
    planner.state[words.END] = planner.state[words.HEAD]  # nobody is left in the ranking
    plan = planner.plan(expected[1], buffers_for(planner))
    assert outcome_of(planner, plan) == words.NO_ROOM
    assert planner.resume(unannounced(planner, [3, 4, 5]), plan, retry=True)
    assert plan.outcome == words.PLANNED
    assert set(resident(planner).values()) == {0, 1, 2, 3, 4, 5}
    planner.check()


# -- the window ----------------------------------------------------------------------------


def test_a_window_that_grows_keeps_the_ids_of_batches_that_wait() -> None:
    small, large = [[1, 2], [3, 4], [5]], list(range(20, 40))
    planner = Run([], slots=50).planner()
    waiting = [expect(planner, lookups) for lookups in small]
    capacity = planner.capacity
    waiting.append(expect(planner, large))
    assert planner.capacity > capacity
    for lookups, batch in zip([*small, large], waiting, strict=True):
        assert planner.ids_of(batch).tolist() == lookups
        plan = planner.plan(batch, buffers_for(planner))
        assert outcome_of(planner, plan) == words.PLANNED
        assert set(lookups) <= set(resident(planner).values())


def test_a_full_window_is_refused() -> None:
    planner = Run([], slots=10).planner()
    planner.window_bytes = 0
    for _ in range(planner.hold.future + 4):
        expect(planner, [1, 2])
    with pytest.raises(RuntimeError, match=r"the window of \d batches is full"):
        expect(planner, [1, 2])


def test_a_batch_that_nobody_announced_leaves_those_that_wait_alone() -> None:
    planner = Run([], slots=20).planner()
    waiting = expect(planner, [1, 2, 3])
    plan = planner.plan(unannounced(planner, [7, 8]), buffers_for(planner))
    assert outcome_of(planner, plan) == words.PLANNED
    assert set(resident(planner).values()) == {7, 8}
    assert planner.ids_of(waiting).tolist() == [1, 2, 3]


def test_what_a_known_batch_uses_leaves_last() -> None:
    """Four slots are full; of the four rows in them, the batch after next uses one."""
    batches = [[0, 1, 2, 3], [4], [5], [6], [0]]
    for order, stays in (("farthest-next-use", True), ("least-recent", False)):
        seen = list(steps(Run(batches, slots=4, order=order, hold=Hold(0, 0), depth=4)))
        assert (0 not in seen[-1].missing) is stays


# -- numbers, pins -------------------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("order", ["farthest-next-use", "least-recent"])
def test_numbers_that_start_over_change_no_decision(order: str) -> None:
    run = Run(some_batches(12, 8), slots=20, order=order)
    expected = [(step.moves, step.plan.number) for step in steps(run)]
    run = replace(run, tuning=Tuning(last_number=7))
    planner = run.planner()
    found = [(step.moves, step.plan.number) for step in steps(run, planner)]
    assert planner._origin > 0
    assert found == expected


def test_hot_rows_are_pinned_from_the_start_and_stay() -> None:
    pins = Pins(0.5, lambda count: torch.arange(40, 40 + count))
    run = Run(some_batches(8, 6, rows=30), slots=24, order="most-recent", pins=pins)
    planner = run.planner()
    planner.reserve(6)
    slots, ids = planner.hottest()
    assert ids.tolist() == list(range(40, 52))
    for step in steps(run, planner):
        assert step.outcome == words.PLANNED
        assert {step.after[slot] for slot in slots.tolist()} == set(range(40, 52))


def test_rows_used_most_are_pinned_while_running() -> None:
    pins = Pins(0.25, lambda count: torch.zeros(0, dtype=torch.int64), learned=True)
    batches = [[0, 1, 10 + turn, 30 + turn] for turn in range(20)]
    run = Run(batches, slots=16, order="most-recent", pins=pins)
    planner = run.planner()
    for step in steps(run, planner):
        assert step.outcome == words.PLANNED
    pinned = planner.pad.row_of_slot[planner.last_use == PINNED].tolist()
    assert set(pinned) == {0, 1}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("order", ["least-recent", "most-recent"])
@pytest.mark.parametrize("past", [1, 3])
def test_a_released_pin_leaves_after_the_newest_batch_and_not_before(past: int, order: str) -> None:
    """The newest batch may use the pinned row, and trains `past` batches later."""
    run = Run([], slots=past + 2, order=order, hold=Hold(past, 0))
    planner = run.planner()

    def plan(*rows: int) -> list[int]:
        made = planner.plan(unannounced(planner, rows), buffers_for(planner))
        assert outcome_of(planner, made) == words.PLANNED
        return [leaves for _, leaves, _ in moves_of(made)]

    planner.reserve(past + 2)
    plan(*range(past + 2))
    planner.last_use[planner.pad.row_of_slot == 0] = PINNED
    for _ in range(past + 1):
        plan(0)
    planner.pin_most_used(0)  # releases all pins
    planner.check()
    for row in range(20, 20 + past):
        assert 0 not in plan(row)
    assert 0 in plan(30, 31)


def test_pins_give_way_to_a_batch_that_does_not_fit() -> None:
    pins = Pins(1.0, lambda count: torch.arange(40, 40 + count))
    planner = Run([], slots=10, pins=pins).planner()
    planner.reserve(1)
    planner.hottest()
    large = list(range(8))
    plan = planner.plan(unannounced(planner, large), buffers_for(planner))
    assert outcome_of(planner, plan) == words.NO_ROOM
    assert not planner.resume(unannounced(planner, large), plan, retry=True)
    plan = planner.plan(unannounced(planner, large), buffers_for(planner))
    assert outcome_of(planner, plan) == words.PLANNED


# -- next to the planner on the host -------------------------------------------------------


def misses_on_the_host(run: Run) -> int:
    pad = Scratchpad(run.slots, 0, run.rows, torch.device("cpu"), dense_map=True)
    planner = Planner(pad, hold=run.hold, eviction=EVICTIONS[run.order])
    batches = [sort_ids(torch.tensor(each), run.rows) for each in run.batches]
    total, read = 0, 0
    for place, ids in enumerate(batches):
        while read <= min(place + run.depth, len(batches) - 1):
            planner.expect(batches[read])
            read += 1
        plan = planner.plan(ids)
        assert plan is not None
        total += plan.moves.entering.numel()
    return total


@pytest.mark.parametrize(
    "order", [pytest.param("least-recent", marks=pytest.mark.slow), "farthest-next-use"]
)
def test_as_many_rows_are_fetched_as_the_planner_on_the_host_would(order: str) -> None:
    run = Run(
        some_batches(24, 40, rows=1200), slots=300, order=order, rows=1200, depth=6,
        tuning=Tuning(spare_victims=64),
    )  # fmt: skip
    planner, found = run.planner(), 0
    for step in steps(run, planner):
        assert step.outcome == words.PLANNED
        found += len(step.missing)
    assert planner._rankings <= len(run.batches) // 2  # which were some batches old, then
    assert found == pytest.approx(misses_on_the_host(run), rel=0.02)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("refetch", [False, True])
@pytest.mark.parametrize("room", [1, 4, 5])
def test_a_plan_with_more_rows_than_it_has_room_for_fails_and_writes_no_further(
    room: int, refetch: bool
) -> None:
    run = Run([[0, 1, 2, 1], [3, 4, 5, 0, 1, 3]], slots=20, refetch=refetch)
    planner = run.planner()
    expected = [expect(planner, lookups) for lookups in run.batches]
    assert outcome_of(planner, planner.plan(expected[0], buffers_for(planner))) == words.PLANNED
    capacity, id_type = planner.capacity, planner.pad.id_type
    buffers = PlanBuffers(capacity, id_type, DEVICE, uniques=capacity)
    whole = [getattr(buffers, name) for name in ("ids", "row_slots", "move_slots", "entering")]
    for each in (*whole, buffers.starts):
        each.fill_(-7)
    buffers.uniques = room  # the rest must stay as it is
    rows = planner.pad.row_of_slot.clone()
    plan = planner.plan(expected[1], buffers)
    outcome = outcome_of(planner, plan)
    assert outcome == (words.PLANNED if room == 5 else words.NO_ROOM)
    assert int(buffers.status[words.UNIQUE]) == 5
    assert all((each[room:] == -7).all() for each in whole)
    assert (buffers.starts[room + 1 :] == -7).all()
    if room < 5:
        assert torch.equal(planner.pad.row_of_slot, rows)
        again = unannounced(planner, run.batches[1])
        assert planner.resume(again, plan, retry=True, larger=buffers_for(planner))
        assert planner._rebuilds == 0
        assert planner._may_keep_last == (run.order == "farthest-next-use")


def test_equal_streams_give_equal_plans() -> None:
    run = Run(some_batches(6, 12), slots=24, order="farthest-next-use", dense_map=False)

    def decisions() -> list[Any]:
        return [(step.moves, step.plan.buffers.lookup_slots.tolist()) for step in steps(run)]

    assert decisions() == decisions()
