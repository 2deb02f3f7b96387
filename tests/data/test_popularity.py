"""How popular rows are: ranks by Zipf's law or by counts, and permutations of rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.data import Counted, SyntheticClicks, SyntheticConfig
from hotrow.data.popularity import HEAD_RANKS, Scatter, Zipf
from hotrow.support.hashing import hashed, key_of

SKEWS = [0.0, 0.5, 0.9, 1.0 - 1e-9, 1.0, 1.05, 1.2, 2.0]


def weights(num_ranks: int, skew: float) -> np.ndarray:
    return np.arange(1, num_ranks + 1, dtype=np.float64) ** -skew


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("num_ranks", [7, HEAD_RANKS, 5000, 300_000])
def test_a_number_inside_the_interval_of_a_rank_gives_that_rank(
    skew: float, num_ranks: int
) -> None:
    ends = np.concatenate([[0.0], np.cumsum(weights(num_ranks, skew))])
    rng = np.random.default_rng(2)
    ranks = rng.integers(num_ranks, size=20_000)
    inside = rng.uniform(0.01, 0.99, size=len(ranks))
    uniform = (ends[ranks] + inside * (ends[ranks + 1] - ends[ranks])) / ends[-1]
    assert np.array_equal(Zipf(num_ranks, skew).ranks(uniform), ranks)


@pytest.mark.parametrize("skew", SKEWS)
def test_the_weight_of_many_ranks_is_their_sum(skew: float) -> None:
    each = weights(200_000, skew)
    for count in (1, 10, HEAD_RANKS, HEAD_RANKS + 1, 200_000):
        assert Zipf(200_000, skew).weight(count) == pytest.approx(
            math.fsum(each[:count]), rel=1e-13
        )


def test_a_billion_ranks_at_skew_one_weigh_their_harmonic_number() -> None:
    euler_gamma = 0.57721566490153286
    harmonic = math.log(1e9) + euler_gamma + 0.5e-9
    assert Zipf(10**9, 1.0).weight(10**9) == pytest.approx(harmonic, rel=1e-13)


@pytest.mark.parametrize("skew", [0.5, 1.0, 1.2])
def test_shares_of_a_billion_ranks_are_found_again_in_the_draws(skew: float) -> None:
    zipf = Zipf(10**9, skew)
    ranks = zipf.ranks(np.random.default_rng(3).random(200_000))
    for count in (1, 1000, 10**6, 5 * 10**8):
        share = zipf.share(count)
        error = math.sqrt(share * (1 - share) / len(ranks))
        assert abs((ranks < count).mean() - share) < 5 * error + 1e-9


@pytest.mark.parametrize("skew", [0.0, 1.0, 2.75, 6.0, 50.0])
@pytest.mark.parametrize("num_ranks", [1, 2, HEAD_RANKS + 1, 10**12])
def test_ranks_stay_inside_the_table_even_where_a_number_rounds_up_to_one(
    skew: float, num_ranks: int
) -> None:
    ranks = Zipf(num_ranks, skew).ranks(np.array([0.0, 0.5, 1 - 2**-53, 1.0]))
    assert ranks.min() >= 0
    assert ranks.max() < num_ranks


def test_all_ranks_together_have_all_the_probability() -> None:
    zipf = Zipf(5000, 1.05)
    assert zipf.share(5000) == zipf.share(10_000) == 1.0
    assert zipf.share(0) == 0.0
    assert zipf.probabilities(5000).sum() == pytest.approx(1.0)
    assert zipf.probabilities(20).sum() == pytest.approx(zipf.share(20))


@pytest.mark.parametrize(("num_ranks", "skew"), [(0, 1.0), (5, -0.1), (5, math.nan)])
def test_ranks_that_make_no_sense_are_refused(num_ranks: int, skew: float) -> None:
    with pytest.raises(ValueError, match=r"row|skew"):
        Zipf(num_ranks, skew)


# -- Permutations ------------------------------------------------------------------------


@given(num_rows=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_every_row_is_reached_once(num_rows: int, key: int) -> None:
    ids = Scatter(num_rows, key=key)(np.arange(num_rows))
    assert np.array_equal(np.sort(ids), np.arange(num_rows))
    if num_rows > 20:
        assert not np.array_equal(ids, Scatter(num_rows, key=key ^ 1)(np.arange(num_rows)))


def test_the_first_positions_spread_over_the_whole_table() -> None:
    num_rows = 10_131_227
    ids = np.sort(Scatter(num_rows, key=7)(np.arange(10_000)))
    per_tenth = np.bincount(ids * 10 // num_rows, minlength=10)
    assert per_tenth.min() > 800
    assert per_tenth.max() < 1200
    gaps = np.diff(ids) / (num_rows / 10_000)
    assert gaps.std() == pytest.approx(1.0, abs=0.1)  # as between points thrown at random


def test_ids_beyond_the_range_of_floats_survive() -> None:
    ids = Scatter(2**40 + 3, key=1)(np.arange(2**40 - 1000, 2**40))
    assert len(np.unique(ids)) == 1000
    assert ids.min() >= 0
    assert ids.max() < 2**40 + 3


def test_every_use_of_a_seed_has_a_key_of_its_own() -> None:
    keys = {
        key_of(seed, purpose, table)
        for seed in range(20)
        for purpose in ("scatter", "effect", "slope")
        for table in range(30)
    }
    assert len(keys) == 20 * 3 * 30


def test_each_bit_of_a_hash_is_set_half_of_the_time() -> None:
    bits = np.unpackbits(hashed(np.arange(20_000), key=3).view(np.uint8).reshape(-1, 8), axis=1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02


# -- Counts ------------------------------------------------------------------------------


def drawn(counted: Counted, draws: int = 200_000) -> np.ndarray:
    uniform = np.random.default_rng(0).random(draws)
    return np.bincount(counted.rows(counted.ranks(uniform)), minlength=counted.num_rows)


def chi_squared(found: np.ndarray, expected: np.ndarray) -> float:
    """Over its number of terms: about 1 where both are alike."""
    here = expected > 0
    assert not found[~here].any()
    return float(((found - expected)[here] ** 2 / expected[here]).sum() / here.sum())


def test_rows_come_as_often_as_they_were_counted() -> None:
    counts = np.random.default_rng(1).zipf(1.3, 300).clip(max=10_000) * (np.arange(300) % 7 > 0)
    counted = Counted(counts)
    expected = 200_000 * counts / counts.sum()
    assert 0.7 < chi_squared(drawn(counted), expected) < 1.3
    hottest = np.sort(counts)[::-1]
    np.testing.assert_allclose(counted.probabilities(5), hottest[:5] / counts.sum())
    assert counted.share(5) == pytest.approx(hottest[:5].sum() / counts.sum())
    assert counted.share(10**9) == 1.0


def test_rows_that_are_not_named_share_the_rest() -> None:
    counted = Counted([500, 300], [7, 2], num_rows=12, total=1000)
    expected = np.full(12, 200_000 * 0.2 / 10)
    expected[[7, 2]] = 200_000 * 0.5, 200_000 * 0.3
    assert chi_squared(drawn(counted), expected) < 2
    assert counted.rows(np.array([0, 1, 2])).tolist() == [7, 2, 0]
    assert counted.share(1) == 0.5
    assert counted.share(7) == pytest.approx(0.9)
    assert counted.probabilities(4).tolist() == pytest.approx([0.5, 0.3, 0.02, 0.02])
    assert counted.probabilities(99).sum() == pytest.approx(1.0)


def test_the_ends_of_the_interval_are_ranks() -> None:
    ends = np.array([0.0, np.nextafter(1, 0), 1.0])
    assert Counted([3, 1]).ranks(ends).tolist() == [0, 1, 1]
    assert Counted([3], [4], num_rows=9, total=5).ranks(ends).tolist() == [0, 8, 8]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1, -1],), {}, "counts must be whole numbers of at least 0"),
        (([1.5, 2.0],), {}, "counts must be whole numbers"),
        (([0, 0],), {}, "all counts are 0"),
        (([],), {}, "give one count for each row"),
        (([1, 2], [3]), {"num_rows": 9}, r"\[2\] counts, \[1\] rows"),
        (([1, 2], [3, 9]), {"num_rows": 9}, "rows must be between 0 and 8"),
        (([1, 2], [3, 3]), {"num_rows": 9}, "a row is named twice"),
        (([5, 2],), {"total": 6}, "add up to 7, which exceeds 6"),
        (([5, 2],), {"total": 9}, "2 of 9 accesses are left"),
    ],
)
def test_counts_that_make_no_sense_are_refused(
    arguments: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Counted(*arguments, **options)


def test_clicks_have_the_marginals_of_the_counts() -> None:
    counts = np.array([0, 900, 50, 30, 20, 0])
    config = SyntheticConfig(rows=(6, 100), names=("a", "b"), batch_size=4096)
    clicks = SyntheticClicks(config, counts={"a": Counted(counts)})
    ids = np.concatenate([batch.sparse[:, 0].numpy() for batch in clicks.batches(0, 20)])
    assert chi_squared(np.bincount(ids, minlength=6), len(ids) * counts / 1000) < 2.5
    assert clicks.hottest(0, 3).tolist() == [1, 2, 3]
    assert clicks.expected_share(0, 1) == 0.9


def test_popularity_drifts_over_the_rows_that_were_counted() -> None:
    config = SyntheticConfig(rows=(50,), names=("a",), batch_size=512, drift=0.02)
    counts = np.arange(50)
    clicks = SyntheticClicks(config, counts={"a": Counted(counts)})
    assert clicks.hottest(0, 1, index=0).tolist() == [49]
    first, later = clicks.batch(0), clicks.batch(30)
    assert not {0} & set(first.sparse.flatten().tolist() + later.sparse.flatten().tolist())
    assert clicks.hottest(0, 10, index=0).tolist() != clicks.hottest(0, 10, index=30).tolist()


def test_counts_must_fit_the_tables() -> None:
    config = SyntheticConfig(rows=(6,), names=("a",))
    with pytest.raises(ValueError, match="counts of 'b'; the tables are a"):
        SyntheticClicks(config, counts={"b": Counted([1])})
    with pytest.raises(ValueError, match="'a' has 6 rows, and counts of 2"):
        SyntheticClicks(config, counts={"a": Counted([1, 2])})
