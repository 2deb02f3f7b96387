"""The planner alone tells what training would move."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hotrow
from builders import skewed
from hotrow.engine.evict import DOUBLED, EVICTIONS
from hotrow.engine.strategy import STRATEGIES
from hotrow.sizing.simulator import Simulated, simulate

ROWS = 4000
CACHING = [name for name, strategy in STRATEGIES.items() if strategy.has_slots]


def trace(count: int = 60) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [skewed(generator, ROWS, 300) for _ in range(count)]


def test_the_map_that_training_would_have_decides_nothing() -> None:
    choices = [(STRATEGIES["lru"], 500), (STRATEGIES["lru"], 3000)]
    quick, real = (
        simulate(trace(), num_rows=ROWS, choices=choices, as_trained=as_trained)
        for as_trained in (False, True)
    )
    assert [each.fetched_rows for each in quick] == [each.fetched_rows for each in real]


@pytest.mark.parametrize("name", CACHING)
def test_a_simulation_moves_what_training_moves(name: str) -> None:
    # Learned pins start with small tables in training, which a trace knows nothing of.
    strategy = replace(STRATEGIES[name], pinned_part=0.0)
    (found,) = simulate(trace(), num_rows=ROWS, choices=[(strategy, 1800)], depth=9)
    table = hotrow.EmbeddingBagConfig("t", ROWS, 2, ["f"])
    budget = hotrow.Budget((hotrow.Share(1800, 900, True),), window_bytes=1 << 20)
    embedding = hotrow.EmbeddingBagCollection(
        [table], hotrow.SGD(), strategy=strategy, budget=budget
    )
    depth = found.depth if strategy.overlapped else None
    for ids in hotrow.ahead(trace(), embedding, depth=depth):
        embedding(ids).values().sum().backward()
    traffic = embedding.traffic()
    assert found.lookups == traffic.lookups == 60 * 300
    assert found.unique_rows == traffic.unique_rows
    # How fast the window fills differs at the start, so what leaves may differ a little.
    assert found.fetched_rows == pytest.approx(traffic.fetched_rows, rel=0.02)
    assert found.chunked_batches == traffic.chunked_batches == 0


def test_better_orders_knowing_ahead_and_pinning_save_fetches() -> None:
    worst = replace(STRATEGIES["lru"], eviction=EVICTIONS["most-recent"])
    strategies = [STRATEGIES["uncached"], worst, STRATEGIES["lru"], STRATEGIES["lookahead"]]
    choices = [(strategy, 900) for strategy in strategies]
    found = simulate(
        trace(120), num_rows=ROWS, choices=choices, depth=30, warm_up=60, hottest=torch.arange
    )
    uncached, most_recent, lru, lookahead = (each.rows_per_batch for each in found)
    assert uncached > lru > lookahead
    assert most_recent > lru
    assert [each.batches for each in found] == [60] * 4
    assert all(each.lookups_per_second > 0 for each in found)


def test_look_ahead_learns_no_pins_and_static_does() -> None:
    for name, pins in (("lookahead", False), ("static", True), ("lru", False)):
        assert STRATEGIES[name].learns_pins is pins
    unpinned = replace(STRATEGIES["lookahead"], pinned_part=0.0)
    choices = [(STRATEGIES["lookahead"], 900), (unpinned, 900)]
    usual, without = simulate(trace(120), num_rows=ROWS, choices=choices, depth=5)
    assert usual.fetched_rows == without.fetched_rows
    told = simulate(trace(120), num_rows=ROWS, choices=choices, depth=5, hottest=torch.arange)
    assert told[0].loaded_rows > 0 == told[1].loaded_rows
    assert told[0].fetched_rows < usual.fetched_rows  # pins are no misses


@pytest.mark.parametrize(
    ("name", "said"),
    [("lru", "the trace has 5 batches, all of them warm-up"), ("all-fast", "moves nothing")],
)
def test_what_cannot_be_simulated_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        simulate(trace(5), num_rows=ROWS, choices=[(STRATEGIES[name], 900)], warm_up=5)


def test_parts_of_a_trace_count_as_much_as_the_whole() -> None:
    def counted(warm_up: int, count: int | None, length: int = 120) -> Simulated:
        choices = [(STRATEGIES["lookahead"], 900)]
        (found,) = simulate(
            trace(length), num_rows=ROWS, choices=choices, depth=15, warm_up=warm_up, counted=count
        )
        return found

    whole, early, late = counted(30, None), counted(30, 20), counted(50, None)
    assert (whole.batches, early.batches, late.batches) == (90, 20, 70)
    assert whole.fetched_rows == early.fetched_rows + late.fetched_rows
    assert whole.lookups == early.lookups + late.lookups
    # What comes after the batches that are known ahead makes no difference.
    assert counted(30, 20, length=65).fetched_rows == early.fetched_rows


# -- beside a direct implementation ------------------------------------------------------


def fetched_directly(rows: list[int], slots: int, order: str, depth: int) -> int:
    """One row at a time, so that no two rows are alike to any order."""
    last_use: dict[int, int] = {}  # of what is there
    uses: dict[int, int] = {}
    fetched = 0
    for now, row in enumerate(rows):
        if row not in last_use:
            fetched += 1
            # An empty slot is the least recent of all, so the worst order leaves it empty.
            if len(last_use) == slots or (last_use and order == "most-recent"):
                ahead = rows[now + 1 : now + 1 + depth]

                def key(other: int, ahead: list[int] = ahead) -> tuple[int, ...]:
                    if order == "least-recent":
                        return (last_use[other],)
                    if order == "most-recent":
                        return (-last_use[other],)
                    if order == "farthest-next-use" and other in ahead:
                        return (1, -ahead.index(other))
                    if order == "farthest-next-use":
                        power = uses[other].bit_length() - 1
                        over = DOUBLED * (uses[other] - 2**power) // 2**power
                        return (0, last_use[other] + DOUBLED * power + over)
                    return (0, uses[other], last_use[other])

                victim = min(last_use, key=key)
                del last_use[victim], uses[victim]
            uses[row] = 0
        last_use[row] = now
        uses[row] += 1
    return fetched


@pytest.mark.parametrize("order", ["least-recent", "most-recent", "least-frequent"])
@settings(max_examples=25)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=40), st.integers(1, 7))
def test_every_order_fetches_what_a_direct_implementation_does(
    order: str, rows: list[int], slots: int
) -> None:
    eviction = replace(EVICTIONS[order], in_bulk=False)
    strategy = replace(STRATEGIES["lru"], eviction=eviction)
    ids = [torch.tensor([row]) for row in rows]
    (found,) = simulate(ids, num_rows=8, choices=[(strategy, slots)])
    assert found.fetched_rows == fetched_directly(rows, slots, order, 0)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=40), st.integers(1, 7), st.integers(0, 9))
def test_look_ahead_of_any_depth_fetches_what_a_direct_implementation_does(
    rows: list[int], slots: int, depth: int
) -> None:
    eviction = replace(EVICTIONS["farthest-next-use"], in_bulk=False)
    strategy = replace(STRATEGIES["lru"], eviction=eviction, look_ahead=depth)
    ids = [torch.tensor([row]) for row in rows]
    (found,) = simulate(ids, num_rows=8, choices=[(strategy, slots)])
    assert found.fetched_rows == fetched_directly(rows, slots, "farthest-next-use", depth)


def test_random_victims_are_fetched_no_more_than_all_and_no_less_than_new_rows() -> None:
    strategy = replace(STRATEGIES["lru"], eviction=EVICTIONS["random"])
    torch.manual_seed(0)
    (found,) = simulate(trace(), num_rows=ROWS, choices=[(strategy, 900)])
    new = len(torch.cat(trace()).unique())
    (recent,) = simulate(trace(), num_rows=ROWS, choices=[(STRATEGIES["lru"], 900)])
    assert new < recent.fetched_rows < found.fetched_rows < found.unique_rows
