"""Runs that several ranks of the tests' processes train, as `hotrow train --ranks` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrow.cli._watch import OtherRank
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.in_models import collections_in
from hotrow.run import session
from hotrow.run.config import load
from hotrow.run.ranks import RunRanks
from hotrow.run.stopping import StopAfterStep


def train_shared(rank: int, world: int, runs: Path, *settings: str) -> dict[str, Any]:
    """Train one run; return its folder, all rows with their state, and the dense weights."""
    team, jobs = RunRanks(), []
    team.connect()
    config = load(overrides=settings)
    team.open(config.run.device)

    class Kept(OtherRank):
        def start(self, job: Any, folder: Path) -> None:
            jobs.append(job)

    result = session.train_run(
        config, runs=runs, folder=None, traced=None, observer=Kept(),
        stop=StopAfterStep(ranks=world, is_first=team.is_first), ranks=team,
    )  # fmt: skip
    assert result is not None
    (job,) = jobs
    found = {
        "folder": result.folder,
        "rows": all_rows(job.embedding),
        "dense": {name: x.detach().clone() for name, x in job.model.named_parameters()},
    }
    team.close()
    return found


def all_rows(embedding: EmbeddingBagCollection) -> dict[str, Tensor]:
    """Return all rows with their state, by table; several ranks call this together."""
    return {
        table.name: torch.cat([rows.clone() for _, rows in embedding.rows(table.name)])
        for table in embedding.tables
    }


def weights_in(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights of all rows of a model, by table."""
    return {
        table.name: torch.cat([x.clone() for _, x in embedding.weights(table.name)])
        for embedding in collections_in(model).values()
        for table in embedding.tables
    }
