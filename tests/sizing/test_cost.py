"""Predicted step times follow from ceilings and from what moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotrow.engine.strategy import STRATEGIES
from hotrow.sizing.cost import Work, all_fast_ms, dense_ms, form_of, rows_ms, step_time
from hotrow.sizing.machines import at, find_machine, machine_at, machines, measure

H200 = find_machine("h200")
WORK = Work(
    lookups=212_992, unique_rows=56_071, row_bytes=256, table_bytes=52e9, fetched_rows=7_848,
    evicted_rows=7_848,
)  # fmt: skip
MOVING = [name for name, each in STRATEGIES.items() if each.has_slots]


def ms(strategy: str, work: Work = WORK, fast: float = 0.6, **options: str) -> float:
    return step_time(H200, STRATEGIES[strategy], work, all_fast_ms=fast, **options).ms


def moving(rows: float) -> Work:
    return replace(WORK, fetched_rows=rows, evicted_rows=rows)


def test_a_curve_is_straight_in_logarithms_and_flat_beyond_its_ends() -> None:
    points = [[1.0, 10.0], [100.0, 1000.0], [400.0, 500.0]]
    assert at(points, 10) == pytest.approx(100)
    assert at(points, 200) == pytest.approx(1000 / 2**0.5)
    assert [at(points, 0.1), at(points, 1), at(points, 100), at(points, 9e9)] == pytest.approx(
        [10, 10, 1000, 500]
    )


def test_an_unknown_machine_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"no machine 'h20' \(did you mean 'h200'\?\).*'this'"):
        find_machine("h20")
    assert all(each.error > 0 and each.is_gpu for each in machines().values())


@pytest.mark.parametrize("strategy", MOVING)
def test_a_step_is_never_shorter_than_all_fasts_and_longer_the_more_moves(strategy: str) -> None:
    found = [ms(strategy, moving(rows)) for rows in (0, 1e3, 1e4, 1e5, 1e6)]
    assert found[0] >= 0.6
    assert found == sorted(found)
    assert found[-1] > 5 * found[0]


def test_what_overlaps_hides_moves_until_the_link_is_full() -> None:
    few, many = moving(8e3), moving(2e5)
    assert ms("lookahead", few) < ms("lru", few) < 2 * ms("lookahead", few)
    link = many.moved_rows / (at(H200.row_rates, 52e9 / 2**30) * at(H200.sorted_gain, 4e5)) / 1e3
    assert ms("lookahead", many) == pytest.approx(link)
    found = step_time(H200, STRATEGIES["lookahead"], many, all_fast_ms=0.6)
    assert found.limit == "link"


def test_wide_rows_are_limited_by_bytes() -> None:
    wide = replace(moving(1e5), row_bytes=1 << 14, table_bytes=2**30)
    assert ms("lookahead", wide, form="zero-copy") == pytest.approx(
        1e5 * 2**14 / (H200.link_gb * 1e6)
    )


def test_rows_that_were_never_written_are_not_read() -> None:
    made = replace(WORK, made_rows=7_000)
    assert made.moved_rows == WORK.moved_rows - 7_000
    assert ms("lookahead", made) < ms("lookahead")


@pytest.mark.parametrize(
    ("strategy", "fast", "wanted"),
    [("lookahead", 0.1, (H200.host_ms, "host")), ("all-fast", 0.6, (0.6, "dense part"))],
)
def test_the_longest_part_is_the_limit(strategy: str, fast: float, wanted: object) -> None:
    found = step_time(H200, STRATEGIES[strategy], moving(10), all_fast_ms=fast)
    assert (found.ms, found.limit) == wanted


def test_a_fill_has_the_form_that_a_collection_would_choose() -> None:
    lookahead = STRATEGIES["lookahead"]
    assert form_of(H200, lookahead) == "bulk"
    assert form_of(replace(H200, forms={}), lookahead) == "zero-copy"
    assert form_of(H200, STRATEGIES["lru"]) == "zero-copy"
    assert form_of(H200, STRATEGIES["scratchpipe"]) == "staged"
    assert form_of(H200, STRATEGIES["hybrid"]) == ""


def test_all_fast_is_the_dense_part_and_rows_in_fast_memory() -> None:
    # What was measured: dense 0.499 ms alone, and 0.583 ms with rows.
    work = replace(WORK, vector_bytes=128)
    assert all_fast_ms(H200, work, dense_ms=0.499) == pytest.approx(0.583, rel=0.1)
    assert dense_ms(H200, 112e9) == pytest.approx(0.499, rel=0.01)
    assert rows_ms(H200, work) == pytest.approx(0.07, rel=0.2)


def test_this_machine_is_measured() -> None:
    machine = measure(torch.device("cpu"))
    assert not machine.is_gpu
    assert machine.name == "this"
    for value in (machine.link_gb, machine.dense_tflops, machine.sort_ns, machine.memory_gib):
        assert value > 0
    assert machine_at(torch.device("cpu")).device == "cpu"
    names = ("lru", "lookahead", "hybrid", "static-hybrid", "all-fast")
    found = [step_time(machine, STRATEGIES[name], WORK, all_fast_ms=10.0).ms for name in names]
    assert all(each >= 10 for each in found)
    assert found[0] == found[1]  # nothing is beside training there
    given = step_time(machine, STRATEGIES["lru"], WORK, all_fast_ms=10.0, planning_ms=3.0)
    assert given.planning_ms == 3
    assert given.ms == pytest.approx(13 + given.moving_ms)
