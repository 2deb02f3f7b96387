"""Simulations of a run's trace."""

from __future__ import annotations

import pytest

from hotrow.engine.strategy import STRATEGIES
from hotrow.run.config import load
from hotrow.study.lookups import OfRun
from hotrow.study.simulation import Simulation


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
