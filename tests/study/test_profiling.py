"""A profile is what counting a trace by hand gives, or within the error that is stated."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.data.popularity import Scatter, Zipf
from hotrow.engine.profile import check_profile
from hotrow.engine.strategy import STRATEGIES
from hotrow.inputs.tables import EmbeddingBagConfig
from hotrow.sizing.simulator import simulate
from hotrow.study.lookups import NO_ROW, LookupBatch
from hotrow.study.profiling import HOT_PARTS, DataProfile, profile_lookups
from hotrow.study.tracked_rows import BYTES_PER_ROW, CountedRows, choose, coverage, zipf_fit


@dataclass
class InMemory:
    """Batches that are at hand."""

    rows: dict[str, int]
    given: list[LookupBatch]
    batch_size: int = 0
    name: str = "a trace"
    num_batches: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_batches = len(self.given)

    def batches(self) -> Iterator[LookupBatch]:
        return iter(self.given)


ROWS = {"user": 6, "item": 30}


def skewed(batches: int, size: int, rows: dict[str, int], *, seed: int = 0) -> InMemory:
    """[size, tables] ids each."""
    draw = np.random.default_rng(seed)
    bases = np.cumsum([0, *rows.values()])
    laws = [Zipf(count, 1.05) for count in rows.values()]
    places = [Scatter(count, key=number) for number, count in enumerate(rows.values())]
    found = []
    for _ in range(batches):
        columns = [
            place(law.ranks(draw.random(size))) + base
            for law, place, base in zip(laws, places, bases, strict=False)
        ]
        ids = np.stack(columns, axis=1).reshape(-1).astype(np.int32)
        found.append(LookupBatch(ids, size))
    return InMemory(rows, found, size)


def jagged(batches: int, samples: int, rows: dict[str, int], *, seed: int = 0) -> InMemory:
    """From none to three ids of each table in a sample, some of them padding."""
    draw = np.random.default_rng(seed)
    bases = np.cumsum([0, *rows.values()])
    found = []
    for _ in range(batches):
        lengths = draw.integers(0, 4, (len(rows), samples))
        parts = [
            np.minimum(draw.geometric(0.2, int(many)) - 1, count - 1) + base
            for many, count, base in zip(lengths.sum(1), rows.values(), bases, strict=False)
        ]
        ids = np.concatenate(parts).astype(np.int64)
        ids[draw.random(len(ids)) < 0.1] = NO_ROW
        found.append(LookupBatch(ids, samples, lengths))
    return InMemory(rows, found, samples)


def samples_of(batch: LookupBatch) -> list[list[int]]:
    if batch.lengths is None:
        return batch.ids.reshape(batch.samples, -1).tolist()
    values, found = batch.ids.tolist(), [[] for _ in range(batch.samples)]
    for lengths in batch.lengths.tolist():
        for sample, many in enumerate(lengths):
            found[sample] += values[:many]
            del values[:many]
    return [[row for row in each if row != NO_ROW] for each in found]


def all_ids(batch: LookupBatch) -> list[int]:
    return [row for row in batch.ids.tolist() if row != NO_ROW]


def hottest_of(counts: Counter[int], many: int) -> set[int]:
    return set(sorted(counts, key=lambda row: (-counts[row], row))[:many])


MAKERS = [skewed, jagged]


@pytest.mark.parametrize("make", MAKERS)
def test_counts_of_a_table_are_those_of_its_lookups(make: Any) -> None:
    trace = make(10, 20, ROWS)
    found = profile_lookups(trace)
    every = [row for batch in trace.given for row in all_ids(batch)]
    tables = [[row for row in every if row < 6], [row - 6 for row in every if row >= 6]]
    for told, ids, (name, rows) in zip(found.profile.tables, tables, ROWS.items(), strict=True):
        counts = Counter(ids)
        assert (told.name, told.rows, told.accesses) == (name, rows, len(ids))
        assert told.distinct.value == len(counts)
        assert told.lookups_per_sample == len(ids) / 200
        ordered = sorted(counts.values(), reverse=True)
        for many, share in zip(told.coverage.rows, told.coverage.share, strict=True):
            assert share == pytest.approx(sum(ordered[:many]) / len(ids))
        kept = found.counts[name]
        assert dict(zip(kept[0].tolist(), kept[1].tolist(), strict=True)) == counts
    assert found.profile.total.accesses == len(every)
    assert found.profile.is_exact
    unique = [len(set(all_ids(batch))) for batch in trace.given]
    assert found.profile.total.unique_rows == np.mean(unique)
    assert found.profile.floors[0] == max(unique)
    check_profile(
        found.counts, [EmbeddingBagConfig(name, rows, 4, [name]) for name, rows in ROWS.items()]
    )


@pytest.mark.parametrize("make", MAKERS)
def test_working_sets_are_the_rows_of_batches_side_by_side(make: Any) -> None:
    trace = make(11, 4, ROWS)
    found = profile_lookups(trace).profile
    assert [each.batches for each in found.total.working_sets] == [1, 2, 4, 8]
    for told, of_items in zip(
        found.total.working_sets, found.table("item").working_sets, strict=True
    ):
        size = told.batches
        windows = [trace.given[at : at + size] for at in range(0, 11 - size + 1, size)]
        rows = [{row for batch in window for row in all_ids(batch)} for window in windows]
        assert told.mean.value == np.mean([len(each) for each in rows])
        assert told.most == max(len(each) for each in rows)
        items = [len({row for row in each if row >= 6}) for each in rows]
        assert of_items.mean.value == pytest.approx(np.mean(items))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("timed", [False, True])
def test_drift_is_what_the_hot_rows_of_before_are_worth(make: Any, timed: bool) -> None:
    trace = make(12, 10, ROWS)
    periods = [number // 3 for number in range(12) for _ in range(10)]
    if timed:  # within batches, and not of one length
        periods = np.sort(np.random.default_rng(1).integers(0, 5, 120)).tolist()
        for number, batch in enumerate(trace.given):
            mine = np.array(periods[10 * number : 10 * number + 10])
            trace.given[number] = LookupBatch(batch.ids, batch.samples, batch.lengths, mine)
    found = profile_lookups(trace, hot_part=0.2, periods=4).profile
    samples = [each for batch in trace.given for each in samples_of(batch)]
    for told, low, high in ((found.total, 0, 36), (found.table("item"), 6, 36)):
        many = int(0.2 * (high - low))
        counts = [
            Counter(
                row
                for sample, when in zip(samples, periods, strict=True)
                if when == period
                for row in sample
                if low <= row < high
            )
            for period in sorted(set(periods))
        ]
        hot = [hottest_of(each, many) for each in counts]

        def worth(period: int, of: int, counts: Any = counts, hot: Any = hot) -> float:
            return sum(counts[period][row] for row in hot[of]) / counts[period].total()

        later = range(1, len(counts))
        assert told.drift.hot_rows == many
        assert told.drift.own == pytest.approx([worth(p, p) for p in range(len(counts))])
        assert told.drift.previous == pytest.approx([worth(p, p - 1) for p in later])
        assert told.drift.first == pytest.approx([worth(p, 0) for p in later])


@pytest.mark.parametrize("make", MAKERS)
def test_all_hot_samples_read_nothing_but_the_hottest_rows(make: Any) -> None:
    trace = make(10, 20, ROWS)
    told = profile_lookups(trace).profile.all_hot
    samples = [each for batch in trace.given for each in samples_of(batch)]
    counts = Counter(row for sample in samples for row in sample)
    assert told.rows.tolist() == sorted({max(1, int(part * 36)) for part in HOT_PARTS})
    for many, share in zip(told.rows.tolist(), told.samples, strict=True):
        hot = hottest_of(counts, many)
        assert share == np.mean([set(sample) <= hot for sample in samples])


def test_static_slots_fetch_what_the_planner_fetches() -> None:
    draw = np.random.default_rng(0)
    weights = 1 / np.arange(1, 201)
    batches = [
        draw.choice(200, 20, replace=False, p=weights / weights.sum()).astype(np.int32)
        for _ in range(30)
    ]
    trace = InMemory({"t": 200}, [LookupBatch(ids, 20) for ids in batches], 20)
    slots = [30, 60, 110]
    found = profile_lookups(trace, slots=slots, first=5)
    rows, counts = found.counts["t"]
    ranked = rows[torch.argsort(-counts, stable=True)]
    planned = simulate(
        [torch.from_numpy(ids).long() for ids in batches],
        num_rows=200,
        choices=[(STRATEGIES["static"], each) for each in slots],
        warm_up=5,
        hottest=lambda many: ranked[:many],
    )
    assert found.profile.curve("static").misses.tolist() == [p.fetched_rows for p in planned]
    with pytest.raises(ValueError, match="no curve of 'fifo'; there are lru, static, belady"):
        found.profile.curve("fifo")


# -- sampled -----------------------------------------------------------------------------

LARGE = {"a": 60_000, "b": 20_000, "c": 50}


@pytest.fixture(scope="module")
def large() -> tuple[InMemory, DataProfile]:
    trace = skewed(25, 2000, LARGE)
    return trace, profile_lookups(trace, first=8).profile


def test_whether_a_batch_fits_is_known_where_rows_are_sampled(
    large: tuple[InMemory, DataProfile],
) -> None:
    trace, exact = large
    floor = exact.floors[0]
    slots = [floor - 1, floor, floor + 200]
    theirs = profile_lookups(trace, first=8, slots=slots).profile.curve("lru")
    found = profile_lookups(trace, memory_bytes=1 << 18, first=8, slots=slots).profile
    assert found.floors[0] == floor
    for policy in ("lru", "static"):
        assert np.isnan(found.curve(policy).misses).tolist() == [True, False, False]
    mine = found.curve("lru")
    assert (mine.low[1:] <= theirs.misses[1:]).all()
    assert (theirs.misses[1:] <= mine.high[1:]).all()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_sampled_is_within_its_error(
    large: tuple[InMemory, DataProfile], seed: int
) -> None:
    trace, exact = large
    found = profile_lookups(trace, memory_bytes=1 << 20, first=8, seed=seed).profile
    assert 0.03 < found.sampled_part < 0.2
    assert found.followed_rows < 20_000
    assert found.total.accesses == exact.total.accesses
    assert found.total.unique_rows == exact.total.unique_rows
    for mine, theirs in zip(
        (found.total, *found.tables), (exact.total, *exact.tables), strict=True
    ):
        assert abs(mine.distinct.value - theirs.distinct.value) <= mine.distinct.error
        share, error = mine.coverage.share, mine.coverage.error
        assert (np.abs(share - theirs.coverage.share) <= error + 0.004).all()
        assert mine.zipf.skew == pytest.approx(theirs.zipf.skew, abs=0.05)
        assert mine.working_sets[0] == theirs.working_sets[0]  # of a batch: counted, not estimated
        for few, all_rows in zip(mine.working_sets, theirs.working_sets, strict=True):
            assert abs(few.mean.value - all_rows.mean.value) <= few.mean.error + 1e-9
        assert mine.drift.previous == pytest.approx(theirs.drift.previous, abs=0.1)
    assert any("no error of their own" in note for note in found.notes)
    assert 0 < found.total.distinct.error < 0.15 * found.total.distinct.value
    for policy in ("lru", "belady"):
        mine, theirs = found.curve(policy), exact.curve(policy)
        fits = ~np.isnan(mine.misses) & ~np.isnan(theirs.misses)
        assert fits.sum() >= 4
        assert (mine.low[fits] <= theirs.misses[fits]).all()
        assert (theirs.misses[fits] <= mine.high[fits]).all()
    assert found.curve("static").misses[fits] == pytest.approx(
        exact.curve("static").misses[fits], rel=0.15
    )
    known = ~np.isnan(found.all_hot.samples)
    assert known.any()
    assert (found.all_hot.samples[known] <= exact.all_hot.samples[known] + 0.01).all()


def test_memory_stays_below_what_was_granted_though_every_row_is_read() -> None:
    rows, batches = 100_000, 50
    ids = np.random.default_rng(0).permutation(rows).astype(np.int32).reshape(batches, -1)
    trace = InMemory({"t": rows}, [LookupBatch(each, len(each)) for each in ids], ids.shape[1])
    for memory, exact in ((8 * BYTES_PER_ROW * rows // 7 + 8, True), (2 << 20, False)):
        tracemalloc.start()
        found = profile_lookups(trace, memory_bytes=memory).profile
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found.is_exact is exact
        assert peak < memory + (1 << 20)  # and a batch's own
    assert found.total.distinct.value == pytest.approx(rows, rel=0.05)


def test_what_cannot_be_profiled_is_refused() -> None:
    with pytest.raises(ValueError, match="--memory has room for 9 of 80,050 rows, too few"):
        profile_lookups(skewed(2, 10, LARGE), memory_bytes=1000)
    with pytest.raises(ValueError, match="there is an id 5; the tables have 5 rows"):
        profile_lookups(InMemory({"t": 5}, [LookupBatch(np.array([1, 5]), 2)], 2))


def test_the_bound_is_left_out_where_it_does_not_fit() -> None:
    trace = skewed(80, 10, {"t": 100})
    found = profile_lookups(trace, memory_bytes=6000).profile
    assert found.is_exact
    assert [each.policy for each in found.curves] == ["lru", "static"]
    assert found.notes[0].startswith("no bound by Belady: what 80 batches use next")


@given(st.sets(st.integers(0, 999), min_size=1, max_size=40), st.integers(0, 3))
@settings(max_examples=15)
def test_a_row_is_followed_always_or_never_and_no_place_is_shared(ids: set[int], seed: int) -> None:
    hot = np.array([3, 17, 900])
    followed = choose(np.array([1000]), 200, hot, np.array([9, 2, 5]), seed=seed)
    every = followed.read(np.arange(1000))
    assert len(np.unique(every.places)) == len(every.places)
    assert {3, 17, 900} <= set(followed.read_rows(np.ones(len(followed.counts)))[1].tolist())
    wanted = np.array(sorted(ids))
    some = followed.read(wanted)
    assert set(some.places.tolist()) <= set(every.places.tolist())
    again = followed.read(np.concatenate([wanted, wanted]))
    assert again.places.tolist() == some.places.tolist()
    assert again.counts.tolist() == (2 * some.counts).tolist()


@pytest.mark.parametrize("skew", [0.0, 0.6, 1.05, 1.4])
def test_the_fit_finds_the_law_that_was_drawn_from(skew: float) -> None:
    ranks = Zipf(5000, skew).ranks(np.random.default_rng(0).random(300_000))
    counts = np.bincount(ranks)
    counted = CountedRows(counts[counts > 0], int(counts.sum()))
    fit = zipf_fit(coverage(counted, 5000), counted)
    assert fit.skew == pytest.approx(skew, abs=0.15 if skew == 0 else 0.03)
    assert fit.error < 0.03


def test_a_table_without_a_choice_of_rows_has_no_law() -> None:
    counted = CountedRows(np.array([7]), 7)
    assert np.isnan(zipf_fit(coverage(counted, 1), counted).skew)
    curve = coverage(CountedRows(np.empty(0, np.int64), 0), 10)
    assert curve.share.tolist() == [0] * len(curve.rows)
