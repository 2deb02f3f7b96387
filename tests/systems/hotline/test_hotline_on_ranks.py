"""Hotline on several ranks: the same popular rows, parts and results as on one, up to rounding."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from click_models import ClickModel, trainer_of
from hotrow.data import ClickBatch
from hotrow.inputs.rank_part import RankPart
from rank_processes import run
from rank_systems import Epoch, assert_like_alone, clicks, model, trained, whole

STEPS = 40
BUDGET = "3KiB"
DRIFT = 0.002  # of a table's rows by batch


def hotline(**changes: Any) -> hotrow.Hotline:
    return hotrow.Hotline(**{"batches_per_epoch": STEPS, "learned": 0.1, "grain": 48, **changes})


def static(room: int | None = None, device: str = "cpu") -> ClickModel:
    """A model; `room`: of one rank, as many rows as several can pin."""
    made = model("static", replicate=BUDGET, device=device)
    if room is not None:
        pins: Any = made.embedding.pins
        pins.room_for_pins = lambda: {4: room}
    return made


def slipstream() -> hotrow.Slipstream:
    return hotrow.Slipstream(target=0.3, watched=0.2, test=Epoch(50, 52), validate_every=9)


def every_kind(rank: int, world: int, device: str = "cpu") -> dict[str, Any]:
    drifting = clicks(drift=DRIFT)
    cases: dict[str, Any] = {
        "once": (hotline(floor=0), clicks().batches(0, STEPS)),
        "drift": (hotline(relearn=0, window=96), drifting.batches(0, STEPS)),
        "srrip": (hotline(log="srrip"), whole(0, STEPS)),
        "skipping": (hotline(floor=0, skip=slipstream()), clicks().batches(0, STEPS)),
    }
    room = 3 * 1024 // (4 * 8) if world == 1 else None
    return {
        name: trained(system, static(room, device), batches)
        for name, (system, batches) in cases.items()
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return every_kind(0, 1)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_ranks_trains_the_same_parts(world: int, alone: dict[str, Any]) -> None:
    assert len(alone["drift"]["record"]["learned"]) > 1
    assert alone["skipping"]["record"]["popular"] > 0
    for expected in alone.values():
        assert sum(first > 0 for first in expected["first"]) > STEPS // 2
    assert_same_parts(run(world, every_kind), alone)


@pytest.mark.gpu
def test_ranks_on_a_gpu_train_the_same_parts() -> None:
    expected = every_kind(0, 1, "cuda")
    assert_same_parts(run(2, every_kind, "cuda", timeout=280), expected)


def assert_same_parts(results: list[Any], alone: dict[str, Any]) -> None:
    for case, expected in alone.items():
        of_ranks = [result[case] for result in results]
        assert_like_alone(of_ranks, expected)
        for rank, found in enumerate(of_ranks):
            assert found["forwards"] == parts_of(found, RankPart(rank, len(of_ranks)))
            assert str(found["record"]) == str(expected["record"]), case  # NaN, too
            assert sum(rows for _, rows, _ in found["sent"]) > 0


def parts_of(found: dict[str, Any], part: RankPart) -> list[int]:
    """Return the samples of each forward pass of a rank, if batches were trained in two parts."""
    sizes = []
    for first, size in zip(found["first"], found["samples"], strict=True):
        spans = part.of_two(first, size)
        of_step = [high - low for low, high in spans]
        sizes += [x for x in of_step if x] if first else [sum(of_step)]
    return sizes


# -- shares of popular samples -----------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_parts_of_popular_samples_differ_by_one(ranks: int) -> None:
    for size in (0, 1, 5, 20, 21):
        for first in range(size + 1):
            spans = [RankPart(rank, ranks).of_two(first, size) for rank in range(ranks)]
            popular, others = ([span[k] for span in spans] for k in (0, 1))
            for parts, low, high in ((popular, 0, first), (others, first, size)):
                assert parts[0][0] == low
                assert parts[-1][1] == high
                assert all(a[1] == b[0] for a, b in pairwise(parts))
            counts = [b - a for a, b in popular]
            assert max(counts) - min(counts) <= 1
            totals = [(b - a) + (d - c) for (a, b), (c, d) in spans]
            expected = [RankPart(rank, ranks).of(size) for rank in range(ranks)]
            assert totals == [high - low for low, high in expected]


# -- models and losses that do not treat samples alone -----------------------------------


class Centred(ClickModel):
    def forward(self, batch: ClickBatch) -> Tensor:
        logits = super().forward(batch)
        return logits - logits.mean(0)


def weighted(predictions: Tensor, labels: Tensor) -> Tensor:
    """A mean in which clicks have a larger weight: parts do not add up to it."""
    weights = 1 + 9 * labels
    return (F.softplus(-predictions) * weights).sum() / weights.sum()


def refusals(rank: int, world: int) -> list[str]:
    embedding = static().embedding
    normed: Any = nn.Module()
    normed.embedding, normed.norm = embedding, nn.BatchNorm1d(3)
    cases: list[Any] = [
        lambda: trainer_of(normed, hotline()),
        lambda: trainer_of(Centred(embedding, 3), hotline()).run(clicks().batches(0, STEPS)),
        lambda: trainer_of(static(), hotline(), loss_fn=weighted).run(clicks().batches(0, STEPS)),
        lambda: trainer_of(model("static"), hotline()).run(clicks().batches(0, STEPS)),
    ]
    said = []
    for case in cases:
        try:
            list(case())
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_what_cannot_be_split_is_refused_on_all_ranks() -> None:
    first, second = run(2, refusals, group_timeout=20)
    assert first == second
    assert "is a BatchNorm1d" in first[0]
    assert "Centred does not treat each sample by itself" in first[1]
    assert "this loss_fn is no mean over samples" in first[2]
    assert "replicate=" in first[3]


def few_samples(rank: int, world: int) -> list[float]:
    """Batches of one sample: a rank has none to try the model on."""
    batches = [ClickBatch(x.dense[:1], x.sparse[:1], x.label[:1]) for x in whole(0, STEPS)]
    return [x.loss for x in trainer_of(static(), hotline()).run(batches)]


def test_a_rank_without_samples_takes_part() -> None:
    expected = few_samples(0, 1)
    for losses in run(2, few_samples):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
