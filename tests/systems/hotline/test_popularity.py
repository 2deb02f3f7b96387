"""Popular rows learned while batches go by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow.inputs.batch import Batch
from hotrow.inputs.hotset import HotSet, popular
from hotrow.systems.calibrate import AccessCounts, top_k
from hotrow.systems.hotline.popularity import DecayedCounts, Learning, Log, SrripLog

Table = hotrow.EmbeddingBagConfig


def table_of(rows: int, padding_idx: int | None = None) -> list[Table]:
    return [Table("t", rows, 4, ["f"], padding_idx=padding_idx)]


def batch_of(ids: Sequence[int] | Tensor) -> Batch:
    values = torch.as_tensor(ids).unsqueeze(1)
    return Batch(values, None, ("f",), len(values))


def zipf(alpha: float, rows: int) -> Tensor:
    """The probability of each row, hot ones scattered."""
    mass = torch.arange(1, rows + 1, dtype=torch.float64) ** -alpha
    return (mass / mass.sum())[torch.randperm(rows)]


def drawn(mass: Tensor, count: int) -> Tensor:
    draws = torch.rand(count, dtype=torch.float64)
    return torch.searchsorted(mass.cumsum(0), draws).clamp_(max=len(mass) - 1)


# -- SRRIP -------------------------------------------------------------------------------


class PlainSrrip:
    """The definition, access by access."""

    def __init__(self, log: SrripLog) -> None:
        sets, ways = log.tags.shape
        self.set_of = log.set_of
        self.tags = [[-1] * ways for _ in range(sets)]
        self.values = [[3] * ways for _ in range(sets)]

    def read(self, row: int) -> None:
        number = int(self.set_of(torch.tensor(row)))
        tags, values = self.tags[number], self.values[number]
        if row in tags:
            values[tags.index(row)] = 0
            return
        while 3 not in values:
            values[:] = [value + 1 for value in values]
        way = values.index(3)
        tags[way], values[way] = row, 2


@pytest.mark.parametrize(("sets", "ways"), [(1, 1), (1, 3), (5, 4), (8, 16), (64, 2)])
@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.5])
def test_all_sets_at_once_are_as_one_access_after_the_other(
    sets: int, ways: int, alpha: float
) -> None:
    rows = 3 * sets * ways + 5
    ids = drawn(zipf(alpha, rows), 1500)
    log = SrripLog(table_of(rows), sets=sets, ways=ways)
    plain = PlainSrrip(log)
    for part in ids.split(400):
        log.add(batch_of(part))
        for row in part.tolist():
            plain.read(row)
        assert log.tags.tolist() == plain.tags
        assert log.values.tolist() == plain.values
    assert 1 < len(ids.unique()) <= rows  # rows did leave and come


def test_a_case_worked_by_hand() -> None:
    log = SrripLog(table_of(9), sets=1, ways=2)
    steps = [
        (4, [4, -1], [2, 3]),  # the first empty way
        (5, [4, 5], [2, 2]),
        (4, [4, 5], [0, 2]),  # a hit
        (6, [4, 6], [1, 2]),  # all grow by 1; the second way is at 3
        (7, [4, 7], [2, 2]),
        (8, [8, 7], [2, 3]),  # both at 3: the first
    ]
    for row, tags, values in steps:
        log.add(batch_of([row]))
        assert (log.tags.tolist(), log.values.tolist()) == ([tags], [values])
    assert log.hot().rows("t").tolist() == [7, 8]
    log.clear()
    log.add(batch_of(torch.empty(0, dtype=torch.int64)))
    assert log.hot().num_rows == 0
    log.add(batch_of([4, 4, 4, 5]))  # the same row again is a hit
    assert (log.tags.tolist(), log.values.tolist()) == ([[4, 5]], [[0, 2]])


# Access mass covered: SRRIP and exact counts, 1 M accesses to 1 M rows, 16 ways. The figures are
# of an earlier simulation with draws and set numbers of its own; both vary by less than 0.005.
@pytest.mark.parametrize(
    ("alpha", "sets", "srrip", "exact"),
    [
        pytest.param(0.8, 1024, 0.299, 0.396, marks=pytest.mark.slow),
        pytest.param(1.0, 1024, 0.649, 0.706, marks=pytest.mark.slow),
        (1.0, 4096, 0.760, 0.783),
        (1.2, 1024, 0.902, 0.917),
    ],
)
def test_skewed_accesses_are_covered_as_known(
    alpha: float, sets: int, srrip: float, exact: float
) -> None:
    mass = zipf(alpha, 1_000_000)
    batch = batch_of(drawn(mass, 1_000_000))
    log, counts = SrripLog(table_of(1_000_000), sets=sets), AccessCounts(table_of(1_000_000))
    log.add(batch)
    counts.add(batch)
    most_used = top_k(counts, {"t": 16}, sets * 16 * 16).hot
    assert float(mass[log.hot().mask("t")].sum()) == pytest.approx(srrip, abs=0.01)
    assert float(mass[most_used.mask("t")].sum()) == pytest.approx(exact, abs=0.005)


def test_rows_of_all_tables_share_the_tags() -> None:
    tables = [Table("a", 5, 4, ["f"]), Table("b", 5, 8, ["g"], padding_idx=0)]
    log = SrripLog(tables, sets=2, ways=16)
    log.add(Batch(torch.tensor([[1, 1], [4, 0]]), None, ("f", "g"), 2))
    hot = log.hot()
    assert (hot.rows("a").tolist(), hot.rows("b").tolist()) == ([1, 4], [1])
    log.clear()
    assert log.hot().num_rows == 0


def test_tags_are_as_many_as_rows_fit_the_budget() -> None:
    tables = [Table("a", 500, 4, ["f"]), Table("b", 500, 8, ["g"])]
    log = SrripLog.within(tables, {"a": 16, "b": 32}, 32 * 100)
    assert log.tags.shape == (6, 16)
    assert SrripLog.within(tables, {"a": 16, "b": 32}, 32 * 5).tags.shape == (1, 5)
    with pytest.raises(ValueError, match=r"31 bytes holds no row of the widest table, .* 32"):
        SrripLog.within(tables, {"a": 16, "b": 32}, 31)


def test_logs_refuse_sizes_that_hold_nothing() -> None:
    with pytest.raises(ValueError, match="needs sets and ways"):
        SrripLog(table_of(5), sets=0)
    with pytest.raises(ValueError, match="keep must be 0 to 1"):
        DecayedCounts(table_of(5), {"t": 16}, 100, keep=1.5)
    with pytest.raises(ValueError, match="outside table 't'"):
        SrripLog(table_of(5), sets=1).add(batch_of([5]))


# -- decayed counts ----------------------------------------------------------------------


def test_old_accesses_weigh_less() -> None:
    log = DecayedCounts(table_of(4), {"t": 10}, 20, keep=0.5, every=2)
    for ids in ([0, 0, 0, 0], [1], [1, 2], [2, 2]):
        log.add(batch_of(ids))
    # (4, 1, 0) halved, then (0, 1, 3) more, halved.
    assert log.of("t").tolist() == [1.0, 0.75, 1.5, 0.0]
    assert log.hot().rows("t").tolist() == [0, 2]


def test_without_a_period_only_drift_decays() -> None:
    log = DecayedCounts(table_of(3), {"t": 10}, 10, keep=0.25)
    for _ in range(100):
        log.add(batch_of([0, 1, 1]))
    assert log.of("t").tolist() == [100, 200, 0]
    log.decay()
    assert log.of("t").tolist() == [25, 50, 0]
    for _ in range(9):
        log.decay()
    assert log.hot().num_rows == 0  # forgotten for good, and no row that was counted
    log.add(batch_of([0]))
    log.clear()
    assert log.of("t").sum() == 0


# -- learning ----------------------------------------------------------------------------


class Given:
    """A log with given hot rows."""

    def __init__(self, *hot: Sequence[int]) -> None:
        self.rows = list(hot)
        self.asked: list[str] = []

    def add(self, batch: Batch) -> None:
        self.asked.append("add")

    def decay(self) -> None:
        self.asked.append("decay")

    def clear(self) -> None:
        self.asked.append("clear")

    def hot(self) -> HotSet:
        rows = self.rows.pop(0) if len(self.rows) > 1 else self.rows[0]
        return HotSet.of(table_of(100), {"t": torch.tensor(rows, dtype=torch.int64)})


def step(learning: Learning, share: float, size: int = 100) -> bool:
    learning.told(round(share * size), size)
    return learning.add(batch_of([0] * size))


def test_the_first_twentieth_is_learned_from() -> None:
    learning = Learning(Given([], [1, 2]), window=400)
    learning.begin_epoch(41)
    assert [step(learning, 0.0) for _ in range(4)] == [False, False, True, False]
    assert learning.hot.rows("t").tolist() == [1, 2]
    assert learning.version == 1
    (learned,) = learning.history
    assert (learned.batch, learned.why, learned.rows_in, learned.rows_out) == (3, "learned", 2, 0)
    assert math.isnan(learned.popular_share)


# What chance does to a share is no drift: 0.78 is two samples of 100 fewer than 0.8. What does not
# come back is tried for eight times, then taken; what nearly comes back is taken at once, since
# halving counts again would lose them. Where no sample is popular it is tried ever less often.
@pytest.mark.parametrize(
    ("shares", "window", "size", "chosen", "why"),
    [
        ([0.8] * 200, 400, 100, [1], "drift"),
        ([0.8] * 10 + [0.78] * 50, 400, 100, [1], "drift"),
        ([0.8] * 10 + [0.78] * 50, 40_000, 10_000, [1, 13], "drift"),
        ([0.9] * 5 + [0.5] + [0.9] * 50 + [0.5], 100, 100, [1, 6, 57], "drift"),
        ([0.9] * 5 + [0.5] * 50 + [0.2], 100, 100, [1, *range(6, 14), 56], "drift"),
        ([0.9] * 5 + [0.85] * 50, 10_000, 10_000, [1, 6], "drift"),
        ([0.0] * 70, 100, 100, [1, 2, 4, 8, 16, 32, 64], "none"),
    ],
)
def test_hot_rows_are_chosen_again_when_the_popular_share_has_fallen(
    shares: list[float], window: int, size: int, chosen: list[int], why: str
) -> None:
    log = Given([], [1], [2], [3])
    learning = Learning(log, window=window)
    learning.begin_epoch(20)
    for share in shares:
        step(learning, share, size)
    assert [choice.batch for choice in learning.history] == chosen
    assert all((choice.rows_in, choice.rows_out) == (1, 1) for choice in learning.history[1:3])
    assert [choice.why for choice in learning.history] == ["learned"] + [why] * (len(chosen) - 1)
    assert log.asked.count("decay") == len(chosen) - 1


def test_numbers_that_belong_to_an_older_hot_set_are_left_out() -> None:
    learning = Learning(Given([], [1]), window=100)
    learning.begin_epoch(20)
    learning.add(batch_of([0]))
    learning.told(0, 100, version=0)
    learning.told(0, 0)  # nor does an empty batch tell anything
    assert math.isnan(learning.popular_share)
    learning.told(70, 100, version=1)
    assert learning.popular_share == 0.7


def test_learning_phases_may_be_the_only_time_that_is_counted() -> None:
    log = Given([], [1], [2])
    learning = Learning(log, window=100, relearn=3)
    learning.begin_epoch(40)
    found = [step(learning, share) for share in [0, 0] + [0.9] * 4 + [0.2] * 3 + [0.9]]
    assert found == [False, True, *[False] * 6, True, False]
    assert log.asked == ["clear", "add", "add", "decay", "clear", "add", "add", "add"]
    assert learning.hot.rows("t").tolist() == [2]


def test_every_epoch_begins_with_learning() -> None:
    learning = Learning(Given([], [1], [1, 2]), window=400)
    for _ in range(2):
        learning.begin_epoch(20)
        for _ in range(20):
            step(learning, 0.8)
    assert [(each.batch, each.rows_in) for each in learning.history] == [(1, 1), (21, 1)]


def drifting(batches: int, size: int) -> list[Tensor]:
    """Ids of which 95 of 100 are among 50 rows; halfway these are 50 others."""
    found = []
    for number in range(batches):
        base = 0 if number < batches // 2 else 500
        hot = base + torch.randint(0, 50, (size,))
        found.append(torch.where(torch.rand(size) < 0.95, hot, torch.randint(0, 1000, (size,))))
    return found


def logs(budget_rows: int) -> dict[str, Log]:
    tables, budget = table_of(1000), budget_rows * 16
    return {
        "decayed by drift": DecayedCounts(tables, {"t": 16}, budget),
        "decayed regularly": DecayedCounts(tables, {"t": 16}, budget, every=8),
        "srrip": SrripLog.within(tables, {"t": 16}, budget),
    }


@pytest.mark.parametrize("kind", logs(1))
@pytest.mark.parametrize("relearn", [0, 4])
def test_the_popular_share_comes_back_when_the_hot_set_moves(kind: str, relearn: int) -> None:
    learning = Learning(logs(64)[kind], relearn=relearn)
    learning.begin_epoch(200)
    shares = []
    for ids in drifting(200, 256):
        is_popular = popular(batch_of(ids), learning.hot)
        shares.append(float(is_popular.float().mean()))
        learning.told(int(is_popular.sum()), len(ids))
        learning.add(batch_of(ids))
    settled = sum(shares[50:100]) / 50
    assert settled > (0.9 if kind != "srrip" else 0.85)
    assert shares[100] < 0.15  # the hot set has moved
    assert sum(shares[150:]) / 50 > settled - 0.03
    assert any(each.why == "drift" for each in learning.history)


def test_a_hot_set_that_stays_is_not_chosen_again_and_again() -> None:
    """And counts that do not decay cover more than those that do."""
    mass = zipf(0.8, 20_000)
    shares = {}
    for every in (0, 16):
        log = DecayedCounts(table_of(20_000), {"t": 16}, 500 * 16, every=every)
        learning = Learning(log)
        learning.begin_epoch(1000)
        for _ in range(1000):
            batch = batch_of(drawn(mass, 256))
            learning.told(int(popular(batch, learning.hot).sum()), 256)
            learning.add(batch)
        shares[every] = float(mass[learning.hot.mask("t")].sum())
        assert len(learning.history) < 12
    assert shares[0] > shares[16] + 0.02


def test_what_has_drifted_once_is_followed_from_then_on() -> None:
    """Popularity moves on every 60 batches; a log that rests is late each time."""
    tables = [hotrow.EmbeddingBagConfig("a", 4000, 4, ["a"])]
    draw = torch.Generator().manual_seed(0)
    shares = {}
    for wakes in (False, True):
        log = DecayedCounts(tables, {"a": 1}, 40)
        learning = Learning(log, relearn=40, floor=0.95, window=512, wakes=wakes)
        learning.begin_epoch(800)
        total = 0
        for number in range(800):
            rows = torch.randint(40, (64, 1), generator=draw) + 40 * (number // 60)
            batch = Batch(rows, None, ("a",), 64)
            mine = int(popular(batch, learning.hot).sum())
            total += mine
            learning.told(mine, 64)
            learning.add(batch)
        shares[wakes] = total / (800 * 64)
    assert shares[False] < 0.5
    assert shares[True] > shares[False] + 0.2
