"""A small run that one rank and several ones train, and the comparison of two of them."""

from __future__ import annotations

import pytest
import torch

from commands import SMALL
from hotrow.run.files import read_run, read_steps
from hotrow.run.job import same_bits
from hotrow.run.open_run import open_trained

RUN_TOML = (
    SMALL.replace("160", "112").replace("400", "1200").replace('"small"', '"small"\nthreads = 1')
    + """
[training]
epochs = 2
eval_every = 4
"""
)


def weights_of(run: str) -> dict[str, torch.Tensor]:
    model = open_trained(f"runs/{run}").model
    return {key: weight.clone() for key, weight in model.state_dict().items()}


def losses_of(run: str) -> list[float]:
    return [record.loss for record in read_steps(f"runs/{run}")]


def assert_same(run: str, other: str, *, exact: bool) -> None:
    """Compare all weights and losses of two runs: their bits, or up to rounding."""
    left, right = weights_of(run), weights_of(other)
    assert left.keys() == right.keys()
    for key, weight in left.items():
        if exact:
            assert same_bits(weight, right[key]), key
        else:
            torch.testing.assert_close(weight, right[key], rtol=1e-4, atol=1e-5)
    steps = [x.samples for x in read_steps(f"runs/{run}")]
    assert steps == [x.samples for x in read_steps(f"runs/{other}")]
    if exact:
        assert repr(losses_of(run)) == repr(losses_of(other))
        assert read_run(f"runs/{run}").evaluations == read_run(f"runs/{other}").evaluations
    else:
        assert losses_of(run) == pytest.approx(losses_of(other), rel=1e-4)
        ours, theirs = (read_run(f"runs/{name}").evaluations for name in (run, other))
        assert [x.samples for x in ours] == [x.samples for x in theirs]
        assert [x.auc for x in ours] == pytest.approx([x.auc for x in theirs], abs=0.02)
