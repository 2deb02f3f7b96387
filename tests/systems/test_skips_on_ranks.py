"""Slipstream and random-drop on several ranks skip what they skip on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import hotrow
from click_models import trainer_of
from hotrow.data import ClickBatch
from rank_processes import run
from rank_systems import Epoch, assert_like_alone, clicks, model, trained, whole

STEPS = 36


def slipstream(**changes: Any) -> hotrow.Slipstream:
    settings = {"target": 0.3, "watched": 0.2, "sample_rate": 0.1, "hot_budget": "60%"}
    settings |= {"test": Epoch(40, 42), "validate_every": 6, "recheck_every": 9}
    settings["batches_per_epoch"] = STEPS
    return hotrow.Slipstream(**{**settings, **changes})


SYSTEMS: dict[str, Callable[[], Any]] = {
    "random-drop": lambda: hotrow.RandomDrop(share=0.2, starting_batch=5),
    "slipstream": slipstream,
    "rows": lambda: slipstream(mode="rows"),
}


def every_system(rank: int, world: int, device: str = "cpu") -> dict[str, Any]:
    found = {
        name: trained(system(), model(device=device), clicks().batches(0, STEPS))
        for name, system in SYSTEMS.items()
    }
    found["list"] = trained(slipstream(), model("scratchpipe", device=device), whole(0, STEPS))
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return every_system(0, 1)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_ranks_skips_the_same(world: int, alone: dict[str, Any]) -> None:
    results = run(world, every_system)
    assert alone["random-drop"]["record"]["dropped"] == (STEPS - 5) * 48 // 5
    for case in ("slipstream", "list"):
        assert alone[case]["record"]["dropped"] > 100
    assert alone["rows"]["record"]["stale_rows"]
    assert_same_skips(results, alone)


@pytest.mark.gpu
def test_ranks_on_a_gpu_skip_the_same() -> None:
    expected = every_system(0, 1, "cuda")
    assert_same_skips(run(2, every_system, "cuda", timeout=280), expected)


def assert_same_skips(results: list[Any], alone: dict[str, Any]) -> None:
    for case, expected in alone.items():
        of_ranks = [result[case] for result in results]
        assert_like_alone(of_ranks, expected)
        assert_same_record(of_ranks[0]["record"], expected["record"])
        assert all(other["record"] == of_ranks[0]["record"] for other in of_ranks)


def assert_same_record(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Thresholds are of rows, which differ by rounding."""
    found, expected = dict(found), dict(expected)
    one, other = (x.pop("threshold") or {"tau": 0.0} for x in (found, expected))
    assert one["tau"] == pytest.approx(other["tau"], rel=1e-3)
    assert found == expected


class Named:
    """Samples with a text each, of which batches are cut and joined by functions of the user's."""

    def __init__(self, dense: Tensor, sparse: Tensor, label: Tensor, names: Any) -> None:
        self.dense, self.sparse, self.label, self.names = dense, sparse, label, names

    def at(self, places: Tensor) -> Named:
        tensors = (x[places] for x in (self.dense, self.sparse, self.label))
        return Named(*tensors, self.names[places.numpy()])

    @staticmethod
    def joined(parts: Sequence[Any]) -> Named:
        tensors = (torch.cat([getattr(x, y) for x in parts]) for y in ("dense", "sparse", "label"))
        return Named(*tensors, np.concatenate([x.names for x in parts]))


def named(rank: int, world: int) -> dict[str, Any]:
    texts = np.array([f"sample {k}" for k in range(48)])
    batches = [Named(x.dense, x.sparse, x.label, texts) for x in whole(0, 12)]
    take: Any = Named.at
    system = hotrow.RandomDrop(share=0.3, starting_batch=4, take=take, join=Named.joined)
    return trained(system, model(), batches, test=batches[:2])


def test_batches_of_any_class_are_cut_by_the_users_function() -> None:
    expected = named(0, 1)
    assert sum(expected["samples"]) == 48 * 12 - int(48 * 8 * 0.3)
    assert_like_alone(run(2, named), expected)


# -- ranks that read different batches ---------------------------------------------------


def sampled(rank: int, world: int, seed: int) -> DataLoader[Any]:
    """A loader whose sampler gives each rank other batches."""
    batches = list(map(clicks(seed=seed).batch, range(STEPS)))
    sampler = DistributedSampler(batches, num_replicas=world, rank=rank, seed=seed)  # type: ignore[arg-type, var-annotated]
    return DataLoader(batches, batch_size=None, sampler=sampler)  # type: ignore[arg-type]


def unlike(rank: int, world: int) -> list[str]:
    drop: dict[str, Any] = {"share": 0.2, "starting_batch": 3}
    parts = list(clicks().batches(0, 4))
    last = whole(0, 6)
    last[5].dense[:, 2] += rank  # one number of each sample
    cases: list[tuple[Any, Any]] = [
        (hotrow.RandomDrop(**drop), sampled(rank, world, seed=2)),
        (hotrow.RandomDrop(**drop), parts),
        (hotrow.RandomDrop(**drop), last),
        (slipstream(), list(map(clicks(seed=rank).batch, range(STEPS)))),
        (slipstream(test=parts, batches_per_epoch=STEPS), clicks().batches(0, STEPS)),
        (hotrow.RandomDrop(**drop), whole(0, 6 + rank)),
    ]
    said = []
    for system, batches in cases:
        trainer = trainer_of(model(), system)
        try:
            for _ in trainer.run(batches):
                pass
            said.append("nothing")
        except RuntimeError as error:
            said.append(f"{trainer.step}: {error}")
    return said


def test_ranks_that_read_different_batches_raise_on_all() -> None:
    results = run(2, unlike, group_timeout=20)
    assert results[0] == results[1]
    steps = [int(said.split(":")[0]) for said in results[0]]
    assert steps[0] == steps[1] == steps[3] == 0
    for place, (step, said) in enumerate(zip(steps, results[0], strict=True)):
        what = "what test= gives" if place == 4 else f"a batch for step {step + 1}"
        assert f": rank 1 has other data than rank 0: {what} differs" in said
        assert "without a sampler of its own such as DistributedSampler" in said
    assert steps[2] == 4  # joined from what is left of batches 4 and 5
    assert steps[4] == 6


def stale_elsewhere(rank: int, world: int) -> str:
    """A rank that has read other rows than the others."""
    trainer = trainer_of(model(), slipstream(validate_every=0))
    embedding: Any = trainer.model.embedding
    weights_at = embedding.weights_at
    embedding.weights_at = lambda table, rows: (
        (places, weights * (1 + rank * embedding.steps_seen))
        for places, weights in weights_at(table, rows)
    )
    embedding.steps_seen = 0
    try:
        for record in trainer.run(clicks().batches(0, STEPS)):
            embedding.steps_seen = record.step
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_never_skip_different_samples() -> None:
    first, second = run(2, stale_elsewhere, group_timeout=20)
    assert first == second
    assert first.startswith("rank 1 has other data than rank 0: which rows are stale differs")


class Uneven:
    """Whole batches, some of fewer samples than there are ranks."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        for number, batch in enumerate(whole(0, 12)):
            size = (48, 1, 2, 47)[number % 4]
            yield ClickBatch(batch.dense[:size], batch.sparse[:size], batch.label[:size])


def uneven(rank: int, world: int) -> dict[str, Any]:
    return trained(hotrow.RandomDrop(share=0.3, starting_batch=4), model(), Uneven())


def test_batches_may_have_fewer_samples_than_there_are_ranks() -> None:
    expected, results = uneven(0, 1), run(2, uneven)
    assert min(expected["samples"]) == 1
    assert_like_alone(results, expected)
