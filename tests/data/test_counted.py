"""Generated clicks that read rows as often as real ones did."""

from __future__ import annotations

import numpy as np
import pytest

from hotrow.data import Counted, SyntheticClicks, SyntheticConfig


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


def test_rows_that_nobody_named_share_the_rest() -> None:
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
def test_counts_that_make_no_sense_are_refused(arguments, options, message: str) -> None:
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
