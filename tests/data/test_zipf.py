"""Ranks: the right distribution at every skew and size, without a table of every rank."""

import math

import numpy as np
import pytest

from hotrow.data.popularity import HEAD_RANKS, Zipf

SKEWS = [0.0, 0.5, 0.9, 1.0 - 1e-9, 1.0, 1.05, 1.2, 2.0]


def weights(num_ranks: int, skew: float) -> np.ndarray:
    return np.arange(1, num_ranks + 1, dtype=np.float64) ** -skew


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("num_ranks", [7, HEAD_RANKS, 5000])
def test_draws_pass_a_chi_square_test(skew, num_ranks):
    num_draws, num_bins = 200_000, min(num_ranks, 100)
    ranks = Zipf(num_ranks, skew).ranks(np.random.default_rng(1).random(num_draws))
    share = np.cumsum(weights(num_ranks, skew))
    bins = np.minimum((share / share[-1] * num_bins).astype(int), num_bins - 1)
    expected = np.bincount(bins, weights(num_ranks, skew), num_bins) / share[-1] * num_draws
    found = np.bincount(bins[ranks], minlength=num_bins)
    used = expected > 0
    chi_square = ((found[used] - expected[used]) ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    # Its mean is `freedom` and its variance twice that: five deviations never happen by chance.
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("skew", SKEWS)
def test_a_number_inside_the_interval_of_a_rank_gives_that_rank(skew):
    num_ranks = 300_000
    ends = np.concatenate([[0.0], np.cumsum(weights(num_ranks, skew))])
    rng = np.random.default_rng(2)
    ranks = rng.integers(num_ranks, size=20_000)
    inside = rng.uniform(0.01, 0.99, size=len(ranks))
    uniform = (ends[ranks] + inside * (ends[ranks + 1] - ends[ranks])) / ends[-1]
    assert np.array_equal(Zipf(num_ranks, skew).ranks(uniform), ranks)


@pytest.mark.parametrize("skew", SKEWS)
def test_the_weight_of_many_ranks_is_their_sum(skew):
    each = weights(200_000, skew)
    for count in (1, 10, HEAD_RANKS, HEAD_RANKS + 1, 200_000):
        assert Zipf(200_000, skew).weight(count) == pytest.approx(
            math.fsum(each[:count]), rel=1e-13
        )


def test_a_billion_ranks_at_skew_one_weigh_their_harmonic_number():
    euler_gamma = 0.57721566490153286
    harmonic = math.log(1e9) + euler_gamma + 0.5e-9
    assert Zipf(10**9, 1.0).weight(10**9) == pytest.approx(harmonic, rel=1e-13)


@pytest.mark.parametrize("skew", [0.5, 1.0, 1.2])
def test_shares_of_a_billion_ranks_are_found_again_in_the_draws(skew):
    zipf = Zipf(10**9, skew)
    ranks = zipf.ranks(np.random.default_rng(3).random(200_000))
    for count in (1, 1000, 10**6, 5 * 10**8):
        share = zipf.share(count)
        error = math.sqrt(share * (1 - share) / len(ranks))
        assert abs((ranks < count).mean() - share) < 5 * error + 1e-9


@pytest.mark.parametrize("skew", [0.0, 1.0, 2.75, 6.0, 50.0])
@pytest.mark.parametrize("num_ranks", [1, 2, HEAD_RANKS + 1, 10**12])
def test_ranks_stay_inside_the_table_even_where_a_number_rounds_up_to_one(skew, num_ranks):
    ranks = Zipf(num_ranks, skew).ranks(np.array([0.0, 0.5, 1 - 2**-53, 1.0]))
    assert ranks.min() >= 0
    assert ranks.max() < num_ranks


def test_all_ranks_together_have_all_the_probability():
    zipf = Zipf(5000, 1.05)
    assert zipf.share(5000) == zipf.share(10_000) == 1.0
    assert zipf.share(0) == 0.0
    assert zipf.probabilities(5000).sum() == pytest.approx(1.0)
    assert zipf.probabilities(20).sum() == pytest.approx(zipf.share(20))


@pytest.mark.parametrize(("num_ranks", "skew"), [(0, 1.0), (5, -0.1), (5, math.nan)])
def test_nonsense_is_refused(num_ranks, skew):
    with pytest.raises(ValueError, match=r"row|skew"):
        Zipf(num_ranks, skew)
