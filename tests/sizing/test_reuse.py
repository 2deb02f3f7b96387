"""One pass tells what slots of any number would fetch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.engine.evict import EVICTIONS
from hotrow.engine.strategy import STRATEGIES
from hotrow.sizing.reuse import NEVER, Reuse, belady, fewest_misses, next_uses_of
from hotrow.sizing.simulator import simulate

Batches = list[list[int]]
ROWS = 8


def traces(rows: int = 3, batches: int = 9) -> st.SearchStrategy[Batches]:
    one = st.sets(st.integers(0, ROWS - 1), min_size=1, max_size=rows).map(sorted)
    return st.lists(one, min_size=1, max_size=batches)


def reuse_of(batches: Batches, slots: list[int], first: int = 0) -> Reuse:
    reuse, last_use = Reuse(slots, first=first), np.full(ROWS, NEVER, dtype=np.int32)
    for number, batch in enumerate(batches):
        reuse.add(last_use[batch])
        last_use[batch] = number
    return reuse


def least_recent_by_hand(batches: Batches, slots: int, orders: tuple[tuple[int, ...], ...]) -> int:
    """Rows fetched where those of batch b become recent in the order orders[b]."""
    stack: list[int] = []  # most recent first
    fetched = 0
    for batch, order in zip(batches, orders, strict=True):
        resident = set(stack[:slots])
        fetched += len(set(batch) - resident)
        stack = [*order, *(row for row in stack if row not in batch)]
    return fetched


@settings(max_examples=60)
@given(traces(rows=2, batches=6), st.integers(2, 6))
def test_misses_of_least_recent_are_the_mean_over_all_orders_of_equals(
    batches: Batches, slots: int
) -> None:
    orders = itertools.product(*(itertools.permutations(batch) for batch in batches))
    tried = [least_recent_by_hand(batches, slots, each) for each in orders]
    curve = reuse_of(batches, [slots]).least_recent()
    assert curve.misses[0] == pytest.approx(np.mean(tried), abs=1e-9)
    assert curve.low[0] <= min(tried)
    assert max(tried) <= curve.high[0]


@settings(max_examples=40)
@given(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=40))
def test_without_equals_the_planner_fetches_what_the_curve_says(rows: list[int]) -> None:
    batches, slots = [[row] for row in rows], list(range(1, ROWS))
    curve = reuse_of(batches, slots).least_recent()
    trace = [torch.tensor(batch) for batch in batches]
    choices = [(STRATEGIES["lru"], each) for each in slots]
    found = simulate(trace, num_rows=ROWS, choices=choices)
    assert curve.misses.tolist() == [each.fetched_rows for each in found]
    assert curve.low.tolist() == curve.high.tolist() == curve.misses.tolist()


@settings(max_examples=40)
@given(traces(), st.integers(0, 4))
def test_the_planner_stays_within_the_bounds_of_its_orders(batches: Batches, first: int) -> None:
    slots = [3, 4, 5, 7]
    reuse = reuse_of(batches, slots, first)
    if first >= len(batches):
        assert reuse.least_recent().batches == 0
        return
    trace = [torch.tensor(batch) for batch in batches]
    found = simulate(
        trace, num_rows=ROWS, choices=[(STRATEGIES["lru"], each) for each in slots], warm_up=first
    )
    fetched, curve = np.array([each.fetched_rows for each in found]), reuse.least_recent()
    assert (curve.low <= fetched).all()
    assert (fetched <= curve.high).all()
    assert curve.unique_rows == found[0].unique_rows
    assert curve.batches == found[0].batches


def belady_by_hand(batches: Batches, slots: int) -> list[int]:
    """Row by row, with the whole future in view."""
    resident: set[int] = set()
    misses = []

    def next_use(row: int, after: int) -> int:
        later = (n for n in range(after + 1, len(batches)) if row in batches[n])
        return next(later, len(batches))

    for number, batch in enumerate(batches):
        misses.append(len(set(batch) - resident))
        others = sorted(resident - set(batch), key=lambda row: next_use(row, number))
        resident = set(batch) | set(others[: slots - len(batch)])
    return misses


def fewest_by_trying(batches: Batches, slots: int, past: int = 0) -> list[int]:
    """Fewest rows fetched up to each batch, over all contents that slots can have."""
    reached = {frozenset[int](): 0}  # contents -> fewest fetches
    totals = []
    for number, batch in enumerate(batches):
        after: dict[frozenset[int], int] = {}
        held = frozenset(itertools.chain(*batches[max(0, number - past) : number + 1]))
        for content, fetched in reached.items():
            needed, others = held, sorted(content - held)
            for kept in range(min(len(others), slots - len(needed)) + 1):
                for stay in itertools.combinations(others, kept):
                    new = needed | frozenset(stay)
                    cost = fetched + len(set(batch) - content)
                    after[new] = min(after.get(new, cost), cost)
        reached = after
        totals.append(min(reached.values()))
    return totals


@pytest.mark.parametrize("block", [1, 5, 256])
def test_the_bound_does_not_depend_on_how_residents_are_counted(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotrow.sizing.reuse._BLOCK", block)
    generator = np.random.default_rng(block)
    batches = [np.unique(generator.zipf(1.2, 30) % 200) for _ in range(80)]
    misses = fewest_misses(next_uses_of(batches, num_rows=200), [40, 70])
    by_hand = [belady_by_hand([batch.tolist() for batch in batches], slots) for slots in (40, 70)]
    assert misses.tolist() == by_hand


@settings(max_examples=60)
@given(traces(), st.integers(3, 7), st.integers(0, 2))
def test_nothing_can_fetch_less_than_beladys_bound(batches: Batches, slots: int, past: int) -> None:
    arrays = [np.array(batch) for batch in batches]
    misses = fewest_misses(next_uses_of(arrays, num_rows=ROWS), [slots], past=past)[0]
    if slots < reuse_of(batches, []).floor(past + 1):
        assert np.isnan(misses).all()
    else:
        assert misses.cumsum().tolist() == fewest_by_trying(batches, slots, past)


@pytest.mark.parametrize("name", ["least-recent", "most-recent", "random", "farthest-next-use"])
def test_no_order_of_the_planner_beats_the_bound(name: str) -> None:
    generator = np.random.default_rng(0)
    batches = [np.unique(generator.zipf(1.3, 40) % 300) for _ in range(60)]
    uses = next_uses_of(batches, num_rows=300)
    least = belady(uses, [60, 90])
    strategy = replace(
        STRATEGIES["lru"], eviction=replace(EVICTIONS[name], in_bulk=False), look_ahead=60
    )
    trace = [torch.from_numpy(batch) for batch in batches]
    found = simulate(trace, num_rows=300, choices=[(strategy, 60), (strategy, 90)])
    fetched = np.array([each.fetched_rows for each in found])
    assert (fetched >= least.misses).all()
    if name == "farthest-next-use":
        assert fetched.tolist() == least.misses.tolist()


@given(traces(batches=12), st.integers(1, 6))
def test_working_sets_are_the_rows_of_consecutive_batches(batches: Batches, count: int) -> None:
    reuse = reuse_of(batches, [])
    windows = [batches[n : n + count] for n in range(len(batches) - count + 1)]
    sizes = [len(set(itertools.chain(*each))) for each in windows]
    assert reuse.working_sets(count).tolist() == sizes
    # Where a trace is shorter than the hold, all of it is held.
    assert reuse.floor(count) == max(sizes, default=len(set(itertools.chain(*batches))))


def test_slots_too_few_for_a_batch_have_no_figure() -> None:
    reuse = reuse_of([[0, 1, 2], [0]], [2, 3])
    assert np.isnan(reuse.least_recent().misses).tolist() == [True, False]
    uses = reuse.next_uses()
    assert uses is not None
    assert np.isnan(fewest_misses(uses, [3, 2])[:, 0]).tolist() == [False, True]
    assert np.isnan(belady(uses, [2, 3]).misses).tolist() == [True, False]


def test_next_uses_are_kept_only_while_they_fit() -> None:
    reuse = Reuse(next_uses_bytes=300)
    for number in range(10):
        reuse.add(np.full(1, number - 1, dtype=np.int32))
    assert reuse.next_uses() is None
    assert reuse.floor(2) == 1


def test_a_curve_counts_from_a_batch_on() -> None:
    batches = [[0, 1], [2], [0, 1], [2], [0]]
    whole, late = (reuse_of(batches, [2, 3], first).least_recent() for first in (0, 2))
    assert whole.misses.tolist() == [5.5, 3]
    assert late.misses.tolist() == [2.5, 0]
    assert late.ratio.tolist() == [2.5 / 4, 0]
    assert late.per_batch.tolist() == [2.5 / 3, 0]
    bound = belady(next_uses_of([np.array(b) for b in batches], num_rows=3), [2], first=2)
    assert bound.misses.tolist() == [2]
