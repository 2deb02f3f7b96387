"""On several ranks the strategies whose rows stay on the host train like all-fast, up to rounding.

rank_cases.py has the batches and the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import hotrow
import hotrow.engine.tuning as tuning
import rank_programs
import rank_steps
from builders import RULES, pairwise
from contracts import as_on_gpu
from hotrow.engine.host.rows import HostRows
from hotrow.engine.host.table import HostTable
from rank_cases import (
    STEPS,
    TABLES,
    TOLERANCE,
    build,
    few_shards,
    form_of,
    parts,
    replicas_of,
    tables_of,
    train,
)
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
    # One memory, or as on a GPU: updates wait until rows are read.
    "link": ["none", "bags", "bags", "rows"],
}
CHOICES = list(pairwise({name: list(values) for name, values in AXES.items()}))


def differences(
    rank: int, world: int, choices: Sequence[dict[str, str]], device: str = "cpu"
) -> list[str]:
    """Say what differs from all-fast on this rank."""
    said = []
    learns = patch.object(tuning, "DEFAULT", replace(tuning.DEFAULT, learn_after=(2, 5)))
    for choice in choices:
        with few_shards(), learns:
            try:
                difference = _difference(rank, world, choice, device)
            except BaseException as error:
                error.add_note(f"rank {rank} of {world}: {choice}")
                raise
        said += [] if difference is None else [f"{choice}: {difference}"]
    return said


def _difference(rank: int, world: int, choice: dict[str, str], device: str) -> str | None:
    by_step = [parts(choice, number, world)[rank] for number in range(STEPS)]

    def trained(embedding: Any, loader: str) -> dict[str, Tensor]:
        losses = train(embedding, [part.features(form_of(choice)) for part in by_step], loader)
        numbered = {f"loss or gradient {number}": x for number, x in enumerate(losses)}
        return {**numbered, **tables_of(embedding)}

    widths = {table.embedding_dim for table in TABLES[choice["tables"]]}
    budget = hotrow.Budget((hotrow.Share(40, 16, True),) * len(widths), 1 << 12)
    options = {"budget": budget, "device": device, **replicas_of(choice, world)}
    slow, fast = build(choice, choice["strategy"], **options), build(choice, device=device)
    if choice["link"] != "none" and choice["strategy"] != "cpu" and device == "cpu":
        as_on_gpu(slow, choice["link"])
    found = trained(slow, choice["loader"])
    expected = trained(fast, "direct" if device == "cpu" else "ahead")
    for name, value in found.items():
        if not torch.allclose(value.float(), expected[name].float(), **TOLERANCE):
            return f"{name} differs by {float((value - expected[name]).abs().max()):.3g}"
    if not owned(slow):
        return "rows were not on the host"
    learns = choice["strategy"] == "static-hybrid" and choice["ids"] != "one owner"
    if learns and not any(len(group.hot.ids) for group in owned(slow)):
        return "no row was hot"
    return None


def owned(embedding: Any) -> list[HostRows]:
    return [group for group in embedding.groups if isinstance(group, HostRows)]


def checked(world: int, function: Callable[..., Any], *args: Any, **options: Any) -> None:
    for said in run(world, function, *args, timeout=300, **options):
        assert not said, "\n".join(said)


def test_rows_on_the_host_train_like_all_fast() -> None:
    checked(2, differences, CHOICES[::3])


LATE = {
    "strategy": "hybrid", "rule": "adagrad", "tables": "bags", "form": "kjt", "ids": "hot",
    "loader": "ahead", "replicate": "nothing", "link": "bags",
}  # fmt: skip


def unsettled(rank: int, world: int) -> list[str]:
    """Owners send rows before the update that waits for them."""
    collect = HostTable.collect

    def early(self: HostTable, plan: Any, *, cross: bool) -> Tensor:
        with patch.object(HostTable, "settle", lambda self: None):
            return collect(self, plan, cross=cross)

    with patch.object(HostTable, "collect", early):
        return differences(rank, world, [LATE])


def test_rows_that_are_sent_too_early_are_found() -> None:
    assert any(run(2, unsettled))
    checked(2, differences, [LATE])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "first"), [(2, 1), (2, 2), (3, 0), (3, 1)])
def test_further_pairs_of_factors(world: int, first: int) -> None:
    checked(world, differences, CHOICES[first::3])


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_rows_on_the_host_beside_a_gpu(world: int) -> None:
    """Batches are on the GPU; weights that learn are not, and have no gradients there."""
    chosen = [{**x, "loader": "ahead"} for x in CHOICES if x["tables"] != "weighted"]
    checked(world, differences, [x for x in chosen if x["strategy"] != "cpu"], "cuda")


PROGRAMS = [0, 4, 6, 14, 17, 23, 35]  # with all that ranks can do


def test_programs_train_like_all_fast() -> None:
    checked(2, rank_programs.differences, PROGRAMS, plain=False, on_host=True)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "seeds"), [(2, range(40)), (3, range(40, 60))])
def test_further_programs(world: int, seeds: range) -> None:
    checked(world, rank_programs.differences, list(seeds), plain=False, on_host=True)


STEPPED = {
    of: rank_steps.cases(of, every=False, strategies=STRATEGIES) for of in ("torch", "convert")
}


@pytest.mark.parametrize("of", STEPPED)
def test_steps_of_optimizers(of: str) -> None:
    checked(2, rank_steps.differences, STEPPED[of][::14])


@pytest.mark.slow
@pytest.mark.parametrize("of", STEPPED)
def test_further_steps_of_optimizers(of: str) -> None:
    checked(2, rank_steps.differences, STEPPED[of][5::7])
