"""Several ranks count together what they train, and not what they read besides."""

from __future__ import annotations

import warnings
from typing import Any

import hotrow
from click_models import trainer_of
from hotrow.run.rank_records import rank_records, table_records
from rank_processes import run
from rank_systems import CONFIG, Epoch, model

STEPS = 9  # of those that a loader has
PINNED = "3KiB"


def stopped(trainer: hotrow.Trainer[Any], batches: Epoch) -> tuple[int, int, int]:
    """Train, and stop when later batches are known. Return the samples, the lookups that steps have
    counted, and those of all tables."""
    samples = lookups = 0
    for record in trainer.run(batches):
        samples += record.samples
        lookups += record.lookups
        if record.step == STEPS:
            break
    ranks = rank_records(trainer)
    assert trainer.shared is not None
    assert lookups == ranks[trainer.shared.rank].lookups
    assert sum(x.samples for x in ranks) == samples
    assert sum(x.unique_rows for x in ranks) == sum(x.served_rows for x in ranks)
    of_tables = sum(x.lookups for x in table_records(trainer).values())
    return samples, sum(x.lookups for x in ranks), of_tables


def counted(rank: int, world: int) -> dict[str, tuple[int, int, int]]:
    def pinning(system: Any) -> hotrow.Trainer[Any]:
        return trainer_of(model("static", replicate=PINNED), system)

    hotline = hotrow.Hotline(batches_per_epoch=20, learned=0.1, floor=0, grain=48)
    cases = {
        "lookahead": trainer_of(model("lookahead"), depth=4),
        "fae": pinning(hotrow.FAE(hot_budget=PINNED, sample_rate=0.5)),
        "hotline": pinning(hotline),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of small budgets
        return {name: stopped(trainer, Epoch(0, 20)) for name, trainer in cases.items()}


def test_what_is_trained_is_counted() -> None:
    for result in run(2, counted):
        for name, (samples, lookups, of_tables) in result.items():
            assert samples > 0
            assert lookups == of_tables == len(CONFIG.rows) * samples, name
