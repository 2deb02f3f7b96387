"""Budgets that are enough, and `budget="auto"`."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import hotrow
from hotrow.engine.strategy import STRATEGIES
from hotrow.inputs.tables import EmbeddingBagConfig, WidthGroup, group_by_width
from hotrow.sizing.budgets import auto_budget, budget_for, geometric, plan_bytes_of
from hotrow.sizing.machines import find_machine
from hotrow.store.budget import Budget, share_out
from hotrow.support.units import show_bytes

CPU = torch.device("cpu")
ROWS = 500_000
TABLE = EmbeddingBagConfig("item", ROWS, 64, ["item"])


def slots_of(total: int) -> int:
    return share(total, [256], [ROWS]).shares[0].slots


def share(total: int, row_bytes: list[int], num_rows: list[int]) -> Budget:
    parts = [1 / len(row_bytes)] * len(row_bytes)
    return share_out(total, row_bytes=row_bytes, num_rows=num_rows, parts=parts, buffer_part=1 / 64)


def zipf(skew: float, rows: int = ROWS) -> torch.Tensor:
    return 1e9 / torch.arange(1, rows + 1).double() ** skew


def auto(profile: dict[str, torch.Tensor] | None, free: int | None = None) -> int:
    groups = group_by_width([TABLE])
    return auto_budget(
        lambda total: share(total, [256], [ROWS]), groups, [256],
        strategy=STRATEGIES["lookahead"], device=CPU, profile=profile,
        machine=find_machine("h200"), free_bytes=free,
    )  # fmt: skip


@pytest.mark.parametrize("slots", [1, 40, 12_345, ROWS])
def test_a_budget_for_slots_is_the_smallest_that_has_them(slots: int) -> None:
    found = budget_for(slots, row_bytes=256, num_rows=ROWS, buffer_part=1 / 64)
    assert slots_of(found) >= slots
    assert slots < 40 or slots_of(found - 1) < slots


def test_plans_take_their_part_of_a_large_budget_and_come_on_top_of_a_small_one() -> None:
    budget = partial(budget_for, row_bytes=256, num_rows=2_000_000, buffer_part=1 / 64)
    plans = plan_bytes_of(50_000)
    assert budget(1_000_000, plan_bytes=plans) == budget(1_000_000) + plans
    assert budget(10_000, plan_bytes=plans) == budget(10_000)


def test_numbers_grow_by_about_the_same_factor() -> None:
    assert geometric(1000, 1_000_000, 7) == [
        1000,
        3162,
        10_000,
        31_623,
        100_000,
        316_228,
        1_000_000,
    ]
    assert geometric(1, 3, 9) == [1, 2, 3]
    assert geometric(7, 5, 9) == [5]


def test_the_more_skewed_a_profile_the_less_is_enough() -> None:
    found = [auto({"item": zipf(skew)}) for skew in (0.5, 1.05, 1.3, 1.6)]
    assert slots_of(found[0]) == ROWS
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 20
    # Two batches fit, so that rows arrive while others train.
    expected = -torch.expm1(-8192 * zipf(1.6) / zipf(1.6).sum())
    assert slots_of(found[-1]) >= 2 * float(expected.sum())


def test_no_more_is_taken_than_what_is_free_without_the_models_part() -> None:
    free = 100 << 20
    assert auto({"item": zipf(0.5)}, free) == int(0.7 * free)
    assert auto(None, 4 << 30) == auto({"item": zipf(0.5)})  # all rows, and not a byte more


def test_where_memory_is_short_of_what_is_enough_all_that_may_be_is_taken() -> None:
    """And not the least with which nothing is much slower than so."""
    enough = auto({"item": zipf(1.05)})
    for part in (0.5, 0.95):
        free = int(part * enough / 0.7)
        assert auto({"item": zipf(1.05)}, free) == int(0.7 * free)
    assert auto({"item": zipf(1.05)}, 4 << 30) == enough


def test_auto_needs_enough_memory_and_a_gpu_or_a_profile() -> None:
    with pytest.raises(ValueError, match=f"70% of the {show_bytes(9000)} that are free.*smallest"):
        auto({"item": zipf(1.0)}, 9000)
    with pytest.raises(ValueError, match=r"device='cpu', and no profile=.*hotrow size"):
        hotrow.EmbeddingBagCollection([TABLE], hotrow.SGD(), budget="auto")


def test_a_collection_decides_by_its_profile_and_trains() -> None:
    tables = [
        EmbeddingBagConfig("item", 50_000, 8, ["item"]),
        EmbeddingBagConfig("user", 20_000, 4, ["user"]),
    ]
    found = []
    for skew in (1.0, 2.5):
        profile = {"item": zipf(skew, 50_000), "user": zipf(skew, 20_000)}
        embedding = hotrow.EmbeddingBagCollection(
            tables, hotrow.SGD(), budget="auto", profile=profile
        )
        embedding(torch.tensor([[1, 2], [3, 4]])).values().sum().backward()
        found.append(sum(group.memory.pad.num_slots for group in embedding.groups))
    assert found[0] > 4 * found[1] > 0


def test_strategies_without_a_budget_leave_auto_aside() -> None:
    embedding = hotrow.EmbeddingBagCollection(
        [EmbeddingBagConfig("t", 100, 4, ["f"])], hotrow.SGD(), budget="auto", strategy="all-fast"
    )
    assert embedding.memory()


def test_groups_of_several_widths_get_their_parts() -> None:
    tables = [TABLE, EmbeddingBagConfig("user", 10_000, 16, ["user"])]
    groups: list[WidthGroup] = list(group_by_width(tables))
    sizes = [4 * group.dim for group in groups]
    rows = [group.num_rows for group in groups]
    found = auto_budget(
        lambda total: share(total, sizes, rows), groups, sizes,
        strategy=STRATEGIES["lookahead"], device=CPU, profile={"item": zipf(1.3)},
        machine=find_machine("h200"),
    )  # fmt: skip
    assert 0 < found < 256 * ROWS
