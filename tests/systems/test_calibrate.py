"""Hot rows within a budget, by counted accesses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import no_synchronisation
from hotrow.inputs.batch import Batch, parse
from hotrow.inputs.hotset import HotSet
from hotrow.inputs.tables import feature_order
from hotrow.systems.calibrate import (
    GRID,
    AccessCounts,
    RandEmBox,
    by_threshold,
    exact_rows,
    most_used_first,
    sampled,
    student_t,
    top_k,
)

Table = hotrow.EmbeddingBagConfig


def tables_of(*sizes: int, **options: Any) -> list[Table]:
    return [Table(f"t{i}", n, 4, [f"f{i}"], **options) for i, n in enumerate(sizes)]


def counted(*counts: list[int] | Tensor) -> AccessCounts:
    """A table for each list, every row read as often as it says."""
    tables = tables_of(*(len(each) for each in counts))
    found = AccessCounts(tables)
    values = [
        torch.arange(len(each)).repeat_interleave(torch.as_tensor(each).long()) for each in counts
    ]
    # Bags, one of all ids for each feature: tables need not be read equally often.
    ends = torch.tensor([0, *(len(each) for each in values)]).cumsum(0)
    found.add(parse((torch.cat(values), ends), feature_order(tables), None))
    return found


def bytes_of(counts: AccessCounts, each: int = 10) -> dict[str, int]:
    return {table.name: each for table in counts.places.tables}


def rows_of(chosen: Any) -> list[list[int]]:
    return [chosen.hot.rows(name).tolist() for name in chosen.rows]


# -- the sampler -------------------------------------------------------------------------


def dense_batches(total: int, size: int) -> Iterator[Batch]:
    for ids in torch.arange(total).unsqueeze(1).split(size):
        yield Batch(ids, None, ("f",), len(ids))


def drawn_of(total: int, size: int, rate: float = 0.1, seed: int = 0) -> Tensor:
    return torch.cat([x.values for x in sampled(dense_batches(total, size), rate, seed=seed)])


def test_each_sample_is_drawn_once_at_the_most() -> None:
    drawn = drawn_of(50_000, 100, 0.2)
    assert len(drawn.unique()) == len(drawn)
    assert len(drawn) == pytest.approx(10_000, abs=5 * math.sqrt(8000))
    # From everywhere, as often from each tenth.
    parts = torch.bincount(drawn.flatten() // 5000)
    assert (parts - 1000).abs().max() < 5 * math.sqrt(800)
    assert drawn_of(250, 100, 1.0).flatten().tolist() == list(range(250))


def test_a_seed_draws_the_same_samples_at_every_batch_size() -> None:
    assert torch.equal(drawn_of(5000, 7), drawn_of(5000, 640))
    assert not torch.equal(drawn_of(5000, 7), drawn_of(5000, 7, seed=1))


def test_drawn_bags_keep_their_ids() -> None:
    lengths = torch.tensor([2, 0, 1, 3, 1, 0, 2, 2])  # two features, four samples
    values = torch.arange(int(lengths.sum()))
    ids = hotrow.KeyedJaggedTensor(["f", "g"], values, lengths=lengths)
    batch = parse(ids, ("f", "g"), None)
    (drawn,) = sampled([batch], 0.5, seed=3)
    assert 0 < drawn.num_samples < 4
    bags = values.split(lengths.tolist())
    whole = [(bags[i].tolist(), bags[4 + i].tolist()) for i in range(4)]
    assert drawn.offsets is not None
    found = drawn.values.split(drawn.offsets.diff().tolist())
    size = drawn.num_samples
    places = [whole.index((found[i].tolist(), found[size + i].tolist())) for i in range(size)]
    assert places == sorted(set(places))


class ManyThreads(AccessCounts):
    _LARGE, _ALONE = 1, 600


def test_threads_count_like_one_and_name_an_id_that_no_table_has() -> None:
    """Features of a table are counted together."""
    tables = [
        hotrow.EmbeddingBagConfig("a", 50, 4, ["f", "i"], padding_idx=3),
        hotrow.EmbeddingBagConfig("b", 20, 4, ["g"]),
        hotrow.EmbeddingBagConfig("c", 30, 4, ["j"]),
    ]
    keys = ("f", "i", "g", "j")
    values = torch.randint(20, (300, 4), generator=torch.Generator().manual_seed(0))
    batch = Batch(values, None, keys, 300)
    alone = AccessCounts(tables)
    alone.add(batch, times=3)
    counts = ManyThreads(tables)
    assert [part.keys for part in counts._parts_of(batch)] == [("f", "i"), ("g", "j")]
    counts.add(batch, times=3)
    assert torch.equal(counts.flat, alone.flat)
    assert counts.num_samples == 300
    values[7, 2] = 20
    with pytest.raises(ValueError, match=r"sample 7.*20"):
        counts.add(batch)
    assert counts.num_samples == 300
    assert torch.equal(counts.flat, alone.flat)


@pytest.mark.parametrize("rate", [0.0, 1.1, -0.2])
def test_a_rate_that_draws_nothing_or_too_much_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate must be more than 0 and at most 1"):
        next(sampled([], rate))


# -- counts ------------------------------------------------------------------------------


def test_every_access_is_counted() -> None:
    tables = [Table("a", 4, 4, ["f", "g"]), Table("b", 3, 8, ["h"], padding_idx=1)]
    counts = AccessCounts(tables)
    counts.add(parse(torch.tensor([[0, 3, 1], [0, 0, 2], [1, 3, 2]]), ("f", "g", "h"), None))
    assert counts.of("a").tolist() == [3, 1, 0, 2]
    assert counts.of("b").tolist() == [0, 0, 2]  # padding reads nothing
    lengths = torch.tensor([2, 0, 1, 1, 3, 0])
    ids = torch.tensor([3, 3, 0, 2, 2, 0, 1])
    counts.add(parse(hotrow.KeyedJaggedTensor(["f", "g", "h"], ids, lengths=lengths), ("f",), None))
    assert counts.of("a").tolist() == [4, 1, 1, 4]
    assert counts.of("b").tolist() == [1, 0, 3]
    assert counts.accesses() == {"a": 10, "b": 4}
    assert counts.num_samples == 5


def test_counts_add_up_over_batches_that_do_not_divide() -> None:
    """The published profiler drops what is left over when cores share the samples."""
    ids = torch.randint(0, 50, (1003, 2))
    whole, parts = AccessCounts(tables_of(50, 50)), AccessCounts(tables_of(50, 50))
    whole.add(Batch(ids, None, ("f0", "f1"), 1003))
    for part in ids.split(16):
        parts.add(Batch(part, None, ("f0", "f1"), len(part)))
    assert torch.equal(whole.flat, parts.flat)
    assert int(whole.flat.sum()) == 2006
    assert torch.equal(whole.of("t1"), torch.bincount(ids[:, 1], minlength=50))
    assert (whole.num_samples, parts.num_samples) == (1003, 1003)


def test_large_ids_and_counts_stay_apart() -> None:
    counts = AccessCounts(tables_of(2**24 + 2))
    ids = torch.tensor([2**24, 2**24 + 1, 2**24 + 1]).unsqueeze(1)
    counts.add(Batch(ids, None, ("f0",), 3))
    counts.add(Batch(ids[:1], None, ("f0",), 1), times=2**24)
    assert counts.of("t0")[-2:].tolist() == [2**24 + 1, 2]


def test_a_bad_id_is_named_and_nothing_is_counted() -> None:
    counts = AccessCounts(tables_of(5, 5))
    with pytest.raises(ValueError, match=r"'f1', sample 1: id 5 is outside table 't1'"):
        counts.add(Batch(torch.tensor([[0, 0], [1, 5]]), None, ("f0", "f1"), 2))
    assert int(counts.flat.sum()) == 0


@pytest.mark.gpu
def test_a_gpu_counts_without_being_waited_for_and_tells_bad_ids_later() -> None:
    ids = torch.randint(0, 50, (999, 2))
    here, there = AccessCounts(tables_of(50, 50)), AccessCounts(tables_of(50, 50), "cuda")
    here.add(Batch(ids, None, ("f0", "f1"), 999))
    on_gpu = Batch(ids.cuda(), None, ("f0", "f1"), 999)
    there.add(on_gpu)
    with no_synchronisation():
        there.add(on_gpu)
    assert torch.equal(there.flat.cpu(), 2 * here.flat)
    chosen = top_k(there, bytes_of(there), 200)
    assert torch.equal(chosen.hot.is_hot.cpu(), top_k(here, bytes_of(here), 200).hot.is_hot)
    there.add(Batch(torch.tensor([[50, 0]], device="cuda"), None, ("f0", "f1"), 1))
    with pytest.raises(ValueError, match="are in no table"):
        _ = there.flat


# -- Rand-Em Box -------------------------------------------------------------------------


# From published tables of Student's t distribution; with many degrees of freedom it is normal.
@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [
        (0.975, 1, 12.7062047), (0.975, 2, 4.3026527), (0.95, 3, 2.3533634),
        (0.975, 10, 2.2281389), (0.9995, 10, 4.5868939), (0.99, 30, 2.4572615),
        (0.9995, 34, 3.6007), (0.9995, 40, 3.5509658), (0.5, 7, 0.0), (0.025, 10, -2.2281389),
        (0.975, 1000, 1.9623391),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(
    probability: float, freedom: int, quantile: float
) -> None:
    assert student_t(probability, freedom) == pytest.approx(quantile, abs=1e-4)


@pytest.mark.parametrize(("probability", "freedom"), [(0.0, 3), (1.0, 3), (0.9, 0)])
def test_there_is_no_such_quantile(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        student_t(probability, freedom)


def scattered(part: float, num_rows: int = 200_000) -> Tensor:
    """Counts of which a part is 1, anywhere."""
    return (torch.rand(num_rows) < part).long()


# The rarest are 20 rows of 200,000, of which fewer than four are drawn on average.
@pytest.mark.parametrize("part", [1e-4, 0.01, 0.5])
def test_the_estimate_is_at_least_the_exact_count_in_99_of_100_trials(part: float) -> None:
    counts = scattered(part)
    exact = exact_rows(counts, 1)
    estimates = [RandEmBox(seed=seed)(counts, 1) for seed in range(400)]
    assert sum(exact <= high for high in estimates) >= 396
    # And it tells something: not all rows.
    assert sum(estimates) / 400 < exact + 5 * math.sqrt(exact * 200_000 / 35_840) + 60


def test_none_found_is_not_none_there() -> None:
    counts = torch.zeros(10_000_000, dtype=torch.int64)
    counts[:20] = 5  # of 35,840 counters drawn, hardly ever one of these
    assert not (counts[RandEmBox()._drawn(len(counts))] == 5).any()
    assert RandEmBox()(counts, 5) > 20


def test_a_small_table_is_counted() -> None:
    counts = scattered(0.3, num_rows=35 * 1024)
    assert RandEmBox()(counts, 1) == exact_rows(counts, 1)


def test_stretches_go_around_the_end() -> None:
    drawn = RandEmBox(chunks=4000, chunk_rows=8)._drawn(40)
    assert (drawn.min(), drawn.max()) == (0, 39)
    assert torch.bincount(drawn.flatten()).float().std() < 80  # each row 800 times, or nearly
    steps = drawn.diff(dim=1)
    assert bool(((steps == 1) | (steps == -39)).all())


# -- top-K -------------------------------------------------------------------------------


def test_the_most_used_rows_of_all_tables_are_hot() -> None:
    counts = counted([5, 0, 9], [7, 1])
    chosen = top_k(counts, bytes_of(counts), 30)
    assert rows_of(chosen) == [[0, 2], [0]]
    assert (chosen.rows, chosen.hot_bytes) == ({"t0": 2, "t1": 1}, 30)
    assert chosen.covered == pytest.approx(21 / 22)
    assert (chosen.threshold, chosen.notes) == (None, ())


@pytest.mark.parametrize(
    ("counts", "row_bytes", "budget", "small", "rows"),
    [
        (([5, 0, 9], [0, 0]), (10, 10), 49, 0, [[0, 2], []]),  # what was not read stays cold
        (([2, 2, 2, 2], [2, 2]), (10, 10), 50, 0, [[0, 1, 2, 3], [0]]),  # in order
        (([10, 3], [12, 4]), (10, 40), 61, 0, [[0, 1], [0]]),  # 1.0, 0.3; 0.3, 0.1 per byte
        (([9, 8, 7, 1], [0, 0]), (10, 10), 40, 20, [[0, 1], [0, 1]]),  # a small table
    ],
)
def test_top_k_by_hand(counts: Any, row_bytes: Any, budget: int, small: int, rows: Any) -> None:
    sizes = dict(zip(("t0", "t1"), row_bytes, strict=True))
    assert rows_of(top_k(counted(*counts), sizes, budget, small_table_bytes=small)) == rows


def test_rows_of_one_width_are_cut_by_their_use_whatever_their_table() -> None:
    """Both tables of a width have room for five rows together, and the third for two."""
    tables = [Table("t0", 6, 4, ["f0"]), Table("t1", 6, 4, ["f1"]), Table("t2", 6, 8, ["f2"])]
    embedding = hotrow.EmbeddingBagCollection(tables, hotrow.SGD(), strategy="all-fast")
    uses = {"t0": [1, 9, 8, 0, 0, 2], "t1": [7, 3, 6, 4, 5, 0], "t2": [1, 2, 3, 4, 5, 6]}
    hot = HotSet.of(tables, {name: torch.arange(6) for name in uses})
    found = most_used_first(embedding, hot, lambda name: torch.tensor(uses[name]), {4: 5, 8: 2})
    assert {name: rows.tolist() for name, rows in found.items()} == {
        "t0": [1, 2], "t1": [0, 2, 4], "t2": [5, 4],
    }  # fmt: skip
    found = most_used_first(embedding, hot, None, {4: 7, 8: 0})  # in any order
    assert [len(rows) for rows in found.values()] == [6, 1, 0]


# -- by threshold ------------------------------------------------------------------------


def test_the_smallest_share_that_fits_is_found() -> None:
    # Shares 0.5, 0.3, 0.1 and ten of 0.01.
    counts = counted([50, 30, 10] + [1] * 10)
    for budget, rows in ((10, 1), (20, 2), (30, 3), (120, 3), (129, 3)):
        chosen = by_threshold(counts, bytes_of(counts), budget, small_table_bytes=0)
        assert chosen.hot.num_rows == rows
        threshold = chosen.threshold
        assert threshold is not None
        smaller = [each for each in GRID if each < threshold]
        # One step further on the grid would not have fitted.
        assert (counts.of("t0") >= 100 * smaller[0]).sum() * 10 > budget
    assert chosen.covered == pytest.approx(0.9)


def test_shares_are_of_each_table_alone() -> None:
    # As often as others by number, but a small share of its table.
    counts = counted([500, 300, 20] + [10] * 18, [20, 20] + [0] * 20)
    chosen = by_threshold(counts, bytes_of(counts), 45, small_table_bytes=0)
    assert rows_of(chosen) == [[0, 1], [0, 1]]


def test_the_grid_reaches_the_budget_on_a_skewed_table() -> None:
    uses = (1e5 / torch.arange(1, 100_001) ** 1.05).long()[torch.randperm(100_000)]
    counts = counted(uses)
    for budget_rows in (300, 1000, 5000):
        chosen = by_threshold(counts, bytes_of(counts), budget_rows * 10, small_table_bytes=0)
        # A step of the grid is a factor of 1.26 in counts, and nearly that in rows.
        assert budget_rows / 1.3 < chosen.hot.num_rows <= budget_rows
        best = top_k(counts, bytes_of(counts), chosen.hot_bytes)
        assert chosen.covered == pytest.approx(best.covered, abs=1e-3)


def test_rand_em_box_finds_nearly_the_same_and_keeps_the_budget() -> None:
    uses = (1e5 / torch.arange(1, 200_001) ** 1.05).long()[torch.randperm(200_000)]
    counts = counted(uses)
    exact = by_threshold(counts, bytes_of(counts), 100_000)
    for seed in range(10):
        chosen = by_threshold(counts, bytes_of(counts), 100_000, estimate=RandEmBox(seed=seed))
        assert 0.5 * exact.hot_bytes < chosen.hot_bytes <= 100_000


def test_an_estimate_that_misses_hot_rows_does_not_break_the_budget() -> None:
    uses = torch.zeros(1_000_000, dtype=torch.int64)
    uses[:5000] = 2  # side by side, so that no stretch may hold one
    counts = counted(uses)
    budget = 40_000
    too_few = 0
    for seed in range(5):
        box = RandEmBox(seed=seed)
        too_few += box(counts.of("t0"), 1) * 10 <= budget
        chosen = by_threshold(counts, bytes_of(counts), budget, estimate=box, small_table_bytes=0)
        assert chosen.hot_bytes <= budget
    assert too_few


def test_small_tables_are_hot_as_published_and_cost_their_bytes() -> None:
    counts = counted([50, 30, 10] + [1] * 200, [0, 0, 0])
    chosen = by_threshold(counts, bytes_of(counts), 50, small_table_bytes=30)
    assert rows_of(chosen) == [[0, 1], [0, 1, 2]]
    assert chosen.hot_bytes == 50


def test_padding_is_never_hot_and_takes_no_bytes() -> None:
    counts = AccessCounts(tables_of(3, 40, padding_idx=0))
    chosen = by_threshold(counts, bytes_of(counts), 20, small_table_bytes=20)
    assert rows_of(chosen) == [[1, 2], []]


# -- budgets and counts that decide nothing ----------------------------------------------

CHOICES = [by_threshold, top_k]


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("budget", [0, 9, 50, 10**12])
def test_a_budget_for_every_row_or_none(choose: Any, budget: int) -> None:
    counts = counted([5, 0, 9], [0, 0])
    chosen = choose(counts, bytes_of(counts), budget)
    (note,) = chosen.notes
    if budget < 10:
        assert rows_of(chosen) == [[], []]
        assert f"of {budget} bytes holds no row (the smallest takes 10)" in note
        assert chosen.covered == 0
    else:
        assert rows_of(chosen) == [[0, 1, 2], [0, 1]]
        assert "holds every row (50 bytes): all rows are hot, and no sample is cold" in note


@pytest.mark.parametrize("choose", CHOICES)
def test_where_nothing_was_read_nothing_is_hot_by_count(choose: Any) -> None:
    counts = AccessCounts(tables_of(100, 5))
    chosen = choose(counts, bytes_of(counts), 200, small_table_bytes=50)
    assert rows_of(chosen) == [[], [0, 1, 2, 3, 4]]
    assert math.isnan(chosen.covered)
    (note,) = chosen.notes
    assert note.startswith("no access was counted to a table that is not hot as a whole")
    (note,) = choose(counts, bytes_of(counts), 200, small_table_bytes=0).notes
    assert note == "no access was counted: no row is hot by its count"


@pytest.mark.parametrize("choose", CHOICES)
def test_small_tables_beyond_the_budget_must_earn_it(choose: Any) -> None:
    counts = counted([50, 30] + [0] * 20, [9, 1, 1])
    chosen = choose(counts, bytes_of(counts), 20, small_table_bytes=1000)
    assert chosen.hot_bytes <= 20
    assert "the 2 tables of 1,000 bytes at most take 250 together" in chosen.notes[0]


def test_rows_used_alike_that_do_not_all_fit_are_left_to_top_k() -> None:
    counts = counted([1], [1], [1])
    chosen = by_threshold(counts, bytes_of(counts), 20, small_table_bytes=0)
    assert chosen.hot.num_rows == 0
    assert "no share of a table's accesses up to 1 leaves few enough rows" in chosen.notes[0]
    assert top_k(counts, bytes_of(counts), 20).hot.num_rows == 2


def test_a_threshold_above_the_published_grid_is_told() -> None:
    counts = counted([50, 30, 10] + [1] * 10)
    (note,) = by_threshold(counts, bytes_of(counts), 20, small_table_bytes=0).notes
    assert "the published search ends at 0.001" in note


@pytest.mark.parametrize(
    ("row_bytes", "budget", "message"),
    [
        ({}, 10, "row_bytes does not say what a row of table 't0' takes"),
        ({"t0": 0}, 10, "row_bytes of table 't0' must be at least 1, not 0"),
        ({"t0": 4}, -1, "a hot budget cannot be -1 bytes"),
    ],
)
def test_bad_bytes_are_refused(row_bytes: Any, budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        top_k(counted([1, 2]), row_bytes, budget)
