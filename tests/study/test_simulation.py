"""Simulations of a run's trace, and the model that predicts their steps."""

from __future__ import annotations

import pytest

from hotrow.engine.strategy import STRATEGIES
from hotrow.run.config import load
from hotrow.sizing.machines import find_machine
from hotrow.study.lookups import OfRun
from hotrow.study.simulation import Simulation
from hotrow.study.sizing import StepModel


@pytest.mark.parametrize("most", [464, 465])
def test_tables_too_large_to_track_have_no_bound(most: int) -> None:
    """The trace has 465 rows."""
    config = load(overrides=["data.rows=[400, 60, 5]", "data.batch_size=16"])
    simulation = Simulation(
        config,
        OfRun(config.data, repeats=False),
        strategies=[STRATEGIES["lru"]],
        slots=[200],
        depths=[2],
        batches=4,
        warm_up=2,
        bound_rows=most,
    )
    facts, conditions = simulation.run(pins_ranks=False)
    names = [line["strategy"] for line in facts]
    assert names == (["lru"] if most == 464 else ["lru", "belady"])
    assert (facts[0]["fits_from_slots"] is None) == (most == 464)
    assert ("Batches fit" in conditions) == (most > 464)


def test_rows_that_do_not_leave_take_no_time() -> None:
    config = load()
    model = StepModel(
        config,
        find_machine("h200"),
        lookups=2e5,
        unique_rows=5e4,
        num_rows=10**8,
        dense_ms=0.5,
    )
    lru = STRATEGIES["lru"]
    assert model.time(lru, 1e4, 0.0).ms < model.time(lru, 1e4).ms == model.time(lru, 1e4, 1e4).ms
