"""What happens to rows when planning is cut off: by a bad id, Ctrl-C, or for want of memory.

Of batches that nobody announced, because there plan and fill follow each other at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
import hotrow.engine.gpu.plan_buffers
import hotrow.engine.gpu.planner
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.rows import cpu_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TABLES = [
    hotrow.EmbeddingBagConfig("a", 60, 4, ["f"]),
    hotrow.EmbeddingBagConfig("b", 50, 6, ["g"]),
]
ENGINES = {"device": gpu_rows, "cpu": cpu_rows}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    if request.param == "cpu" and DEVICE.type == "cuda":
        pytest.skip("the CPU's engine is for CPUs")
    return ENGINES[request.param]


def batch(*rows: tuple[int, int]) -> Tensor:
    return torch.tensor(rows, device=DEVICE)


def trained(cut_off: Callable[[Any], None], **options: Any) -> tuple[list[float], list[Tensor]]:
    """Losses and rows after steps around one that is cut off."""
    embedding = hotrow.EmbeddingBagCollection(
        TABLES, hotrow.SGD(lr=0.5), seed=3, device=DEVICE, **options
    )
    losses = []

    def step(ids: Tensor) -> None:
        loss = embedding(ids).values().square().sum()
        loss.backward()
        losses.append(loss.item())

    step(batch((1, 1), (2, 2)))
    cut_off(embedding)
    step(batch((5, 5), (6, 6)))
    step(batch((7, 7), (8, 8)))
    embedding.check()
    return losses, list(embedding.state_dict().values())


def assert_nothing_is_lost(cut_off: Callable[[Any], None], engine: Any = gpu_rows) -> None:
    shares = (hotrow.Share(12, 16, True), hotrow.Share(12, 16, True))
    budget = hotrow.Budget(shares, window_bytes=1 << 12)
    losses, rows = trained(cut_off, strategy="all-fast", engine=engine)
    for strategy in ("lookahead",) if engine is gpu_rows else ("lru", "lookahead"):
        found, found_rows = trained(cut_off, strategy=strategy, budget=budget, engine=engine)
        assert found == losses
        assert all(map(torch.equal, found_rows, rows))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("bad", [(5, 99), (99, 5)])
def test_a_bad_id_in_one_width_leaves_the_other_s_rows_alone(
    engine: Any, bad: tuple[int, int]
) -> None:
    def cut_off(embedding: Any) -> None:
        with pytest.raises(ValueError, match="id 99 is outside table"):
            embedding(batch((6, 6), bad))

    assert_nothing_is_lost(cut_off, engine)


def test_ctrl_c_while_a_batch_is_planned(engine: Any) -> None:
    pressed = [True]

    def interrupted(*args: Any, **options: Any) -> Any:
        group = engine(*args, **options)
        plan = group.plan

        def planned(work: Any) -> None:
            plan(work)
            if not pressed[0]:
                pressed[0] = True
                os.kill(os.getpid(), signal.SIGINT)

        group.plan = planned
        return group

    def cut_off(embedding: Any) -> None:
        pressed[0] = False
        with pytest.raises(KeyboardInterrupt):
            embedding(batch((5, 5), (6, 6)))

    assert_nothing_is_lost(cut_off, interrupted)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("failing", [1, 2])
def test_no_memory_for_the_plan_of_one_width(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [0]
    make = hotrow.engine.gpu.plan_buffers.PlanBuffers.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("there is no memory")
        make(self, *args, **options)

    monkeypatch.setattr(hotrow.engine.gpu.plan_buffers.PlanBuffers, "__init__", made)

    def cut_off(embedding: Any) -> None:
        left[0] = failing  # larger batches need larger buffers, in both widths
        with pytest.raises(torch.OutOfMemoryError):
            embedding(batch((5, 5), (6, 6), (7, 7)))
        left[0] = 0

    assert_nothing_is_lost(cut_off)


def test_a_plan_that_failed_is_no_mistake_while_it_is_not_confirmed() -> None:
    rows = torch.arange(60, device=DEVICE)[:, None]
    batches = (
        [rows[i : i + 4] for i in range(4)] + [rows[:40]] + [rows[i : i + 4] for i in range(4)]
    )
    embedding = hotrow.EmbeddingBagCollection(
        TABLES[:1],
        hotrow.SGD(lr=0.1),
        hotrow.Budget((hotrow.Share(20, 32, True),), 1 << 14),
        device=DEVICE,
        engine=gpu_rows,
    )

    def train() -> None:
        for ids in hotrow.ahead(batches, embedding):
            embedding(ids).values().sum().backward()
            embedding.check()

    with pytest.warns(UserWarning, match="does not fit the 20 slots"):
        train()


def test_more_slots_than_can_be_numbered_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.engine.gpu.scratchpad._MOST_SLOTS", 49)
    with pytest.raises(ValueError, match="60 rows of one width are to be in fast memory at once"):
        hotrow.EmbeddingBagCollection(
            TABLES[:1], hotrow.SGD(lr=0.1), strategy="all-fast", device=DEVICE, engine=gpu_rows
        )
