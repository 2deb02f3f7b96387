"""On several ranks the strategies whose rows stay on the host train like all-fast, up to rounding.

rank_cases.py has the batches and the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import hotrow
import rank_programs
import rank_steps
import hotrow.engine.tuning as tuning
from hotrow.engine.host.rows import HostRows
from builders import RULES, pairwise
from rank_cases import STEPS, TABLES, TOLERANCE, build, few_shards, form_of, parts, replicas_of
from rank_cases import tables_of, train
from rank_processes import run

STRATEGIES = ("cpu", "hybrid", "static-hybrid")
AXES: dict[str, Sequence[str]] = {
    "strategy": STRATEGIES,
    "rule": list(RULES),
    "tables": list(TABLES),
    "form": ["dense", "tuple", "kjt"],
    "ids": ["uneven", "one owner", "same", "one rank without", "hot", "few"],
    "loader": ["direct", "ahead", "depth 0", "depth 5"],
    "replicate": ["nothing", "hot rows", "one table"],
}
CHOICES = list(pairwise({name: list(values) for name, values in AXES.items()}))


def differences(rank: int, world: int, choices: Sequence[dict[str, str]]) -> list[str]:
    """Say what differs from all-fast on this rank."""
    said = []
    for choice in choices:
        learns = patch.object(tuning, "DEFAULT", replace(tuning.DEFAULT, learn_after=(2, 5)))
        with few_shards(), learns:
            try:
                difference = _difference(rank, world, choice)
            except BaseException as error:
                error.add_note(f"rank {rank} of {world}: {choice}")
                raise
        said += [] if difference is None else [f"{choice}: {difference}"]
    return said


def _difference(rank: int, world: int, choice: dict[str, str]) -> str | None:
    by_step = [parts(choice, number, world)[rank] for number in range(STEPS)]

    def trained(embedding: Any, loader: str) -> dict[str, Tensor]:
        losses = train(embedding, [part.features(form_of(choice)) for part in by_step], loader)
        numbered = {f"loss or gradient {number}": x for number, x in enumerate(losses)}
        return {**numbered, **tables_of(embedding)}

    shares = [hotrow.Share(40, 16, True) for _ in {x.embedding_dim for x in TABLES[choice["tables"]]}]
    options = replicas_of(choice, world)
    slow = build(choice, choice["strategy"], budget=hotrow.Budget(tuple(shares), 1 << 12), **options)
    found, expected = trained(slow, choice["loader"]), trained(build(choice), "direct")
    for name, value in found.items():
        if not torch.allclose(value.float(), expected[name].float(), **TOLERANCE):
            return f"{name} differs by {float((value - expected[name]).abs().max()):.3g}"
    if not isinstance(slow.groups[0], HostRows):
        return "rows were not on the host"
    if choice["strategy"] == "static-hybrid" and choice["ids"] != "one owner" and not any(len(x.hot.ids) for x in owned(slow)):
        return "no row was hot"
    return None


def owned(embedding: Any) -> list[HostRows]:
    return [group for group in embedding.groups if isinstance(group, HostRows)]


@pytest.mark.parametrize("world", [2])
def test_rows_on_the_host_train_like_all_fast(world: int) -> None:
    for said in run(world, differences, CHOICES, timeout=300):
        assert not said, "\n".join(said)


PROGRAMS = [0, 1, 4, 5, 6, 9, 14, 16, 17, 22, 23, 26, 35]


def test_programs_train_like_all_fast() -> None:
    for said in run(2, rank_programs.differences, PROGRAMS, plain=False, on_host=True, timeout=300):
        assert not said, "\n".join(said)


@pytest.mark.parametrize("of", ["torch", "convert"])
def test_steps_of_optimizers(of: str) -> None:
    cases = rank_steps.cases(of, every=False, strategies=STRATEGIES)
    for said in run(2, rank_steps.differences, cases[::11], timeout=300):
        assert not said, "\n".join(said)
