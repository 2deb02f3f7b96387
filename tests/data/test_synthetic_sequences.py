"""Generated sequences: like clicks in their ids, with a truth that needs the history."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from hotrow.data import Counted, SequenceBatch, SyntheticConfig, SyntheticSequences
from hotrow.inputs.tree import tensors_in

STEPS, ROWS = 6, (50, 400, 9)
NAMES = ("user", "item", "category")
CONFIG = SyntheticConfig(rows=ROWS, names=NAMES, batch_size=512, num_dense=2, click_rate=0.4)


def sequences(config: SyntheticConfig = CONFIG, **options: Any) -> SyntheticSequences:
    return SyntheticSequences(config, steps=STEPS, constant=("user",), **options)


def ids_of(batch: SequenceBatch) -> Tensor:
    return batch.sparse.values().view(len(ROWS), len(batch), STEPS + 1)


def test_steps_are_padded_in_front_and_users_stay_the_same() -> None:
    batch = sequences().batch(3)
    ids, lengths = ids_of(batch), batch.lengths
    assert set(lengths.tolist()) == set(range(1, STEPS + 1))
    is_padding = torch.arange(STEPS + 1) < STEPS - lengths[:, None]
    for found, rows in zip(ids, ROWS, strict=True):
        assert bool((found[is_padding] == rows).all())
        assert bool(((found >= 0) & (found < rows))[~is_padding].all())
    user = ids[0].masked_fill(is_padding, -1)
    assert torch.equal(user, ids[0][:, -1:].expand(-1, STEPS + 1).masked_fill(is_padding, -1))
    assert len(ids[1][~is_padding].unique()) > 50
    assert batch.dense.shape == (512, STEPS + 1, 3)
    torch.testing.assert_close(batch.dense[0, :, 0], torch.arange(7) / 7)
    assert not batch.dense[:, :-1, 1:].any()


def test_a_batch_is_known_by_its_number() -> None:
    left, right = sequences().batch(7), sequences()[7]
    pairs = zip(tensors_in(left), tensors_in(right), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(ids_of(left), ids_of(sequences().batch(8)))


def test_the_truth_ranks_better_than_the_target_alone_or_the_history_alone() -> None:
    drawn = sequences()
    batches = list(drawn.batches(0, 20))
    labels = torch.cat([batch.label for batch in batches])
    assert float(labels.mean()) == pytest.approx(0.4, abs=0.02)
    whole = torch.cat([drawn.logits(batch) for batch in batches])
    assert float(whole.std()) == pytest.approx(1.5, rel=0.1)
    alone = torch.cat(
        [drawn.logits(replace(batch, lengths=torch.zeros_like(batch.lengths))) for batch in batches]
    )
    aucs = [float(binary_auroc(each, labels.long())) for each in (whole, alone)]
    assert aucs[0] == pytest.approx(drawn.best_auc(range(20)))
    assert aucs[0] > 0.75
    assert 0.6 < aucs[1] < aucs[0] - 0.05


def test_what_stands_in_padding_changes_no_truth() -> None:
    drawn = sequences()
    batch = drawn.batch(0)
    ids = ids_of(batch).clone()
    ids[:, torch.arange(STEPS + 1) < STEPS - batch.lengths[:, None]] = 1
    named = dict(zip(NAMES, ids, strict=True))
    changed = SequenceBatch.from_ids(batch.dense, named, batch.label, batch.lengths)
    assert torch.equal(drawn.logits(batch), drawn.logits(changed))


def test_rows_are_read_as_often_as_counted() -> None:
    counts = np.arange(ROWS[1]) % 11
    drawn = sequences(counts={"item": Counted(counts)})
    read = torch.cat([ids_of(batch)[1].flatten() for batch in drawn.batches(0, 30)])
    found = torch.bincount(read[read < ROWS[1]], minlength=ROWS[1]).double().numpy()
    expected = found.sum() * counts / counts.sum()
    here = expected > 0
    assert not found[~here].any()
    assert 0.7 < ((found - expected)[here] ** 2 / expected[here]).sum() / here.sum() < 1.3
    hottest = drawn.hottest(1, 5)
    assert counts[hottest.numpy()].tolist() == [10] * 5
    expected_each = float(drawn.expected_counts(1, 5).mean())
    assert found[hottest.numpy()].mean() / 30 == pytest.approx(expected_each, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constant": ("shop",)}, "constant names 'shop'; the tables are user, item, category"),
        ({"constant": NAMES}, "all tables are constant"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"config": replace(CONFIG, lookups=2)}, "lookups must be 1 where steps are generated"),
    ],
)
def test_what_is_no_sequence_is_refused(options: dict[str, Any], message: str) -> None:
    options = {"config": CONFIG, "steps": 3, **options}
    with pytest.raises(ValueError, match=message):
        SyntheticSequences(**options)
