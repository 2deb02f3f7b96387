"""Steps of `hybrid` and `static-hybrid` as graphs cut at the lookup: the same bits as eager ones.

Without a GPU a stand-in for a CUDA graph runs the dense part again, from the vectors and to the
gradients at which it was cut.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
import hotrow.embedding.step
import hotrow.engine.host.hot
import hotrow.engine.host.planning
import hotrow.engine.host.rows
import hotrow.training.captured
from click_models import click_batches
from hotrow.data import ClickBatch
from hotrow.engine.host.rows import host_rows_engine
from hotrow.engine.tuning import Tuning
from hotrow.support.streams import lanes_of
from hotrow.training.captured import GraphSettings
from hotrow.training.graphed import GraphedStep

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS, SIZE = 14, 32
Table = hotrow.EmbeddingBagConfig
RULES = {"sgd": hotrow.SGD(lr=0.1), "adagrad": hotrow.Adagrad(lr=0.1), "adam": hotrow.Adam(lr=0.05)}
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


class Model(nn.Module):
    def __init__(self, rule: str, *, unused: str = "", strategy: str = "hybrid") -> None:
        super().__init__()
        self.embedding = hotrow.EmbeddingBagCollection(
            [Table("a", 300, 4, ["f", "h"]), Table("b", 50, 6, ["g"])],
            RULES[rule],
            hotrow.Budget((hotrow.Share(60, 64, False), hotrow.Share(50, 64, False)), 0),
            strategy=strategy,
            device=DEVICE,
            seed=3,
            engine=partial(host_rows_engine, tuning=Tuning(learn_after=(2, 5, 10))),
        )
        torch.manual_seed(0)
        self.top = nn.Sequential(nn.Linear(14 + 3, 8), nn.ReLU(), nn.Linear(8, 1)).to(DEVICE)
        self.unused = unused  # features that have no gradient
        self.joined: Any = None  # an accumulate() that a test has entered

    def forward(self, batch: ClickBatch) -> Tensor:
        out = self.embedding(batch.sparse)
        parts = [out[name].detach() if name in self.unused else out[name] for name in "fhg"]
        vectors = torch.cat(parts, dim=1)
        logits: Tensor = self.top(torch.cat([vectors, batch.dense], dim=1)).squeeze(1)
        return logits


def batches() -> list[ClickBatch]:
    return click_batches(STEPS, (300, 300, 50), size=SIZE, last=SIZE // 3)


class StandIn:
    def __init__(self, launch: Callable[[], None], model: Model, replays: list[int]) -> None:
        self._launch, self._model, self._replays = launch, model, replays
        state = deepcopy(model.top.state_dict())
        self._run()  # a capture runs no kernel, only the host's part
        model.top.load_state_dict(state)
        replays.append(0)

    def _run(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            host = hotrow.engine.host
            for module in (hotrow.embedding.step, host.rows, host.planning, host.hot):
                patch.setattr(module, "capturing", lambda: True)
            self._launch()

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        self._replays[-1] += 1
        embedding = self._model.embedding
        arrival = embedding.pipeline.planned[-1]  # of the batch in training
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embedding.pipeline, "_find", lambda features: arrival)
            self._run()


def nothing(number: int, batch: ClickBatch, model: Model) -> None:
    """What a loop does to a batch before it trains it."""


def run(
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    *,
    captured: bool,
    unused: str = "",
    strategy: str = "hybrid",
    before: Callable[[int, ClickBatch, Model], None] = nothing,
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Losses, all weights, and how often graphs were replayed."""
    model, replays = Model(rule, unused=unused, strategy=strategy), list[int]()
    graphs = None
    if DEVICE.type == "cpu":
        graphs = GraphSettings(capture=lambda launch, *_: StandIn(launch, model, replays))
    else:
        real = hotrow.training.captured._Graph.replay

        def replay(self: Any) -> None:
            replays.append(1)
            real(self)

        monkeypatch.setattr(hotrow.training.captured._Graph, "replay", replay)
    optimizer = torch.optim.SGD(model.top.parameters(), lr=0.1)
    step = GraphedStep(
        model,
        F.binary_cross_entropy_with_logits,
        optimizer,
        labels=lambda batch: batch.label,
        lanes=lanes_of(DEVICE) if captured else None,
        graphs=graphs,
    )
    losses = []
    stream = hotrow.ahead(batches(), model, ids=lambda batch: batch.sparse, step=step)
    for number, batch in enumerate(stream):
        before(number, batch, model)
        losses.append(step(batch))
    model.embedding.check()
    weights = [*model.embedding.state_dict().values(), *model.top.state_dict().values()]
    state = model.embedding.optimizer.state_dict()["state"]
    weights += [each for one in state.values() for each in one.values() if isinstance(each, Tensor)]
    return losses, weights, (sum(replays), model.embedding.optimizer.steps)


def both(monkeypatch: pytest.MonkeyPatch, rule: str = "adam", **given: Any) -> Any:
    """Eager and captured steps give the same bits; returns what the captured ones gave."""
    losses, weights, (replays, steps) = run(monkeypatch, rule, captured=False, **given)
    assert replays == 0
    found, found_weights, (replays, found_steps) = run(monkeypatch, rule, captured=True, **given)
    assert steps == found_steps
    assert all(map(torch.equal, found, losses))
    assert all(map(torch.equal, found_weights, weights))
    return found, found_weights, (replays, steps)


@pytest.mark.parametrize("strategy", ["hybrid", "static-hybrid"])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_cut_at_the_lookup_gives_the_bits_of_an_eager_one(
    monkeypatch: pytest.MonkeyPatch, rule: str, strategy: str
) -> None:
    found, _, (replays, steps) = both(monkeypatch, rule, strategy=strategy)
    assert replays >= STEPS - 8
    assert steps == [STEPS] * 2
    if strategy == "static-hybrid":
        others, _, _ = run(monkeypatch, rule, captured=True)
        torch.testing.assert_close(found, others, rtol=1e-4, atol=1e-5)


def test_rows_without_a_gradient_are_not_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, (replays, steps) = run(monkeypatch, "adam", captured=True, unused="fhg")
    assert replays
    assert steps == [0, 0]


@pytest.mark.parametrize("strategy", ["hybrid", "static-hybrid"])
def test_features_without_a_gradient_leave_their_rows_alone(
    monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    _, weights, (replays, steps) = both(monkeypatch, strategy=strategy, unused="hg")
    assert replays >= STEPS - 8
    assert steps == [STEPS, 0]
    start = Model("adam").embedding.state_dict().values()
    is_same = [torch.equal(*pair) for pair in zip(start, weights, strict=False)]
    assert is_same == [False, True]
    only_h = torch.ones(300, dtype=torch.bool)
    for batch in batches():
        assert isinstance(batch.sparse, Tensor)
        only_h[batch.sparse[:, 0]] = False
    assert torch.equal(next(iter(start))[only_h], weights[0][only_h])


def freeze(number: int, batch: ClickBatch, model: Model) -> None:
    if number in (6, 9):
        model.requires_grad_(number == 9)
        model.top.requires_grad_(True)


def accumulate(number: int, batch: ClickBatch, model: Model) -> None:
    if number == 9:
        model.joined = model.embedding.accumulate()
        model.joined.__enter__()
    if number == 11:
        model.joined.__exit__(None, None, None)


@pytest.mark.parametrize(("before", "steps"), [(freeze, STEPS - 3), (accumulate, STEPS - 1)])
def test_rows_that_are_frozen_for_a_while_or_updated_together_are_seen(
    monkeypatch: pytest.MonkeyPatch, before: Any, steps: int
) -> None:
    _, _, (replays, found) = both(monkeypatch, before=before)
    assert replays
    assert found == [steps] * 2


def change_ids(number: int, batch: ClickBatch, model: Model) -> None:
    if number == 10:
        assert isinstance(batch.sparse, Tensor)
        batch.sparse.add_(1).remainder_(50)


def replace_dense(number: int, batch: ClickBatch, model: Model) -> None:
    if number == 10:
        object.__setattr__(batch, "dense", torch.log1p(batch.dense))


def scale(number: int, batch: ClickBatch, model: Model) -> None:
    model.embedding.grad_scale = 2.0 if number in (10, 11) else None


@pytest.mark.parametrize("before", [change_ids, replace_dense, scale])
@pytest.mark.filterwarnings("ignore:.*ids:UserWarning")  # changed ones are planned on the spot
def test_what_a_loop_does_to_a_batch_is_seen(monkeypatch: pytest.MonkeyPatch, before: Any) -> None:
    found, _, (replays, _) = both(monkeypatch, "adagrad", before=before)
    assert replays >= STEPS - 11  # those before and after
    others, _, _ = run(monkeypatch, "adagrad", captured=True)
    assert not all(map(torch.equal, others, found))


def test_places_of_cuts_go_with_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Model] = []

    def before(number: int, batch: ClickBatch, model: Model) -> None:
        kept.append(model)
        if number == STEPS - 1:
            assert model.embedding.memory()["vectors of captured steps"] > 0

    run(monkeypatch, "sgd", captured=True, before=before)
    gc.collect()
    assert "vectors of captured steps" not in kept[0].embedding.memory()
