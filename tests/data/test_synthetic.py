"""Generated clicks: pure functions of their number, with the skew, drift and truth asked for."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from hotrow.data import KAGGLE_ROWS, TERABYTE_ROWS, ClickBatch, SyntheticClicks, SyntheticConfig
from hotrow.inputs.batch import KeyedJaggedTensor

TINY = SyntheticConfig(rows=(5000, 40, 3, 100_000), batch_size=256, num_dense=4, seed=3)


def is_same(left: ClickBatch, right: ClickBatch) -> bool:
    return (
        torch.equal(left.dense, right.dense)
        and torch.equal(left.sparse, right.sparse)
        and torch.equal(left.label, right.label)
    )


def test_the_published_cardinalities_add_up():
    assert len(KAGGLE_ROWS) == len(TERABYTE_ROWS) == 26
    assert sum(KAGGLE_ROWS) == 33_762_577
    assert sum(TERABYTE_ROWS) == 882_774_559
    assert sum(min(rows, 40_000_000) for rows in TERABYTE_ROWS) == 204_184_588


def test_a_batch_depends_on_its_number_and_the_seed_alone():
    clicks = SyntheticClicks(TINY)
    in_order = list(clicks.batches(0, 4))
    assert is_same(clicks.batch(2), in_order[2])
    assert is_same(SyntheticClicks(TINY).batch(3), in_order[3])
    assert not is_same(in_order[0], in_order[1])
    other = SyntheticClicks(replace(TINY, seed=4))
    assert not torch.equal(other.batch(0).sparse, in_order[0].sparse)
    assert not torch.equal(other.hottest(0, 10), clicks.hottest(0, 10))
    loader = DataLoader(clicks, batch_size=None, sampler=range(4), num_workers=2)
    for made, wanted in zip(loader, in_order, strict=True):
        assert is_same(made, wanted)


def test_ids_stay_inside_their_tables():
    clicks = SyntheticClicks(replace(TINY, drift=0.3, correlated=0.5))
    limits = torch.tensor(TINY.rows)
    for batch in clicks.batches(0, 20):
        assert bool((batch.sparse >= 0).all())
        assert bool((batch.sparse < limits).all())


def test_the_hottest_ids_are_read_as_often_as_expected():
    clicks = SyntheticClicks(TINY)
    ids = torch.cat([batch.sparse[:, 0] for batch in clicks.batches(0, 100)])
    counts = torch.bincount(ids, minlength=5000)[clicks.hottest(0, 20)]
    expected = 100 * clicks.expected_counts(0, 20)
    assert ((counts - expected).abs() < 5 * expected.sqrt()).all()
    share = clicks.expected_share(0, 20)
    assert share == pytest.approx(float(expected.sum()) / len(ids))
    assert share == pytest.approx(float(counts.sum()) / len(ids), abs=0.02)
    assert torch.equal(clicks.hottest(0, 10_000).sort().values, torch.arange(5000))


def test_skew_can_differ_from_table_to_table():
    clicks = SyntheticClicks(SyntheticConfig(rows=(1000, 1000), skew=(0.0, 1.5)))
    assert clicks.expected_share(0, 10) == pytest.approx(0.01)
    assert clicks.expected_share(1, 10) > 0.75


def test_drift_moves_the_hot_set_and_nothing_else_does():
    still, moving = SyntheticClicks(TINY), SyntheticClicks(replace(TINY, drift=0.001))
    assert torch.equal(still.hottest(0, 50), still.hottest(0, 50, index=1000))
    first, later = moving.hottest(0, 50), moving.hottest(0, 50, index=4)
    # Four batches on, 5000 * 0.001 * 4 = 20 new rows stand before the others.
    assert torch.equal(later[20:], first[:30])
    assert not torch.isin(later[:20], first).any()
    ids = moving.batch(500).sparse[:, 0]
    hits_now = torch.isin(ids, moving.hottest(0, 50, index=500)).float().mean()
    hits_then = torch.isin(ids, first).float().mean()
    assert hits_now > 0.4
    assert hits_then < 0.2


def test_correlation_joins_columns_and_keeps_each_one_as_it_was():
    config = SyntheticConfig(rows=(2000, 2000), batch_size=4096, num_dense=0)
    share_of_pairs = []
    for correlated in (0.0, 1.0):
        clicks = SyntheticClicks(replace(config, correlated=correlated))
        hot = [torch.isin(clicks.batch(0).sparse[:, t], clicks.hottest(t, 20)) for t in (0, 1)]
        for column, is_hot in enumerate(hot):
            expected = clicks.expected_share(column, 20)
            assert float(is_hot.float().mean()) == pytest.approx(expected, abs=0.04)
        share_of_pairs.append(float((hot[0] & hot[1]).float().mean()))
    independent, together = share_of_pairs
    assert together > 1.5 * independent


def test_several_lookups_per_sample_come_as_a_jagged_tensor():
    clicks = SyntheticClicks(replace(TINY, lookups=(1, 3, 2, 5), names=("a", "b", "c", "d")))
    batch = clicks.batch(0)
    assert isinstance(batch.sparse, KeyedJaggedTensor)
    assert list(batch.sparse.keys()) == ["a", "b", "c", "d"]
    lengths = batch.sparse.lengths().view(4, 256)
    assert lengths.unique(dim=1).flatten().tolist() == [1, 3, 2, 5]
    first_of_d = 256 * (1 + 3 + 2)
    assert int(batch.sparse.offsets()[3 * 256]) == first_of_d
    assert int(batch.sparse.values()[256:first_of_d].max()) < 40
    assert torch.equal(batch.to("cpu").sparse.values(), batch.sparse.values())
    assert len(clicks.logits(batch)) == 256


@pytest.mark.parametrize("lookups", [1, 3])
def test_the_planted_model_explains_the_labels_it_made(lookups):
    clicks = SyntheticClicks(replace(TINY, batch_size=4096, lookups=lookups))
    batch = clicks.batch(5)
    logits = clicks.logits(batch)
    assert float(logits.std()) == pytest.approx(1.5, abs=0.15)
    assert float(batch.label.mean()) == pytest.approx(0.25, abs=0.03)
    assert float(logits.sigmoid().mean()) == pytest.approx(float(batch.label.mean()), abs=0.03)
    assert 0.7 < clicks.best_auc(range(3)) < 0.95


def test_more_signal_makes_clicks_easier_to_tell():
    aucs = [SyntheticClicks(replace(TINY, signal=s)).best_auc(range(8)) for s in (0.0, 1.0, 4.0)]
    assert aucs[0] == pytest.approx(0.5, abs=0.05)
    assert aucs[0] < aucs[1] < aucs[2]
    alone = SyntheticClicks(SyntheticConfig(rows=(100,), num_dense=0, batch_size=512))
    assert alone.batch(0).dense.shape == (512, 0)
    assert alone.best_auc(range(4)) > 0.7


def test_kaggle_shape_at_skew_1_05_has_the_locality_of_the_traffic_study():
    clicks = SyntheticClicks(SyntheticConfig(rows=KAGGLE_ROWS, batch_size=16_384))
    bases = torch.tensor((0, *KAGGLE_ROWS[:-1])).cumsum(0)
    unique = [(batch.sparse + bases).unique().numel() for batch in clicks.batches(0, 3)]
    assert sum(unique) / 3 == pytest.approx(75_112, rel=0.03)

    num_hot = sum(KAGGLE_ROWS) // 100
    counts = torch.cat([clicks.expected_counts(table, num_hot) for table in range(26)])
    share = float(counts.topk(num_hot).values.sum()) / (26 * 16_384)
    assert share == pytest.approx(0.945, abs=0.002)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": ()}, "rows must name one table or more"),
        ({"rows": (5, 0)}, "rows must name one table or more"),
        ({"names": ("a", "a", "b", "c")}, "4 different names"),
        ({"names": ("a",)}, "4 different names"),
        ({"lookups": (1, 2)}, "lookups must be one number or 4"),
        ({"lookups": 0}, "lookups must be at least 1"),
        ({"skew": -1.0}, "skew must be at least 0"),
        ({"skew": (1.0,) * 5}, "skew must be one number or 4"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"drift": float("nan")}, "drift must be at least 0"),
        ({"drift": 2}, "drift is a share, at most 1, got 2"),
        ({"correlated": 1.5}, "correlated is a share"),
        ({"click_rate": 1.0}, "click_rate must be between 0 and 1"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_nonsense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **settings)
