"""Captured steps of several ranks have the bits of eager ones.

On a CPU a stand-in for a CUDA graph launches again what was captured, from the vectors and to the
gradients at which it was cut. On a GPU graphs are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
import hotrow.distributed.shared_rows
import hotrow.embedding.pipeline
import hotrow.embedding.step
import hotrow.training.rank_turn
from click_models import click_batches
from hotrow.data import ClickBatch
from hotrow.engine.split_batch import Parted
from hotrow.support.streams import lanes_of
from hotrow.training import captured
from hotrow.training.captured import GraphSettings
from hotrow.training.ranked_step import RankedStep
from hotrow.training.shared_dense import SharedDense
from rank_processes import run

STEPS = 16
BUDGET = hotrow.Budget((hotrow.Share(140, 64, True), hotrow.Share(70, 64, True)), 1 << 14)
CAPTURING = (
    hotrow.distributed.shared_rows,
    hotrow.embedding.pipeline,
    hotrow.embedding.step,
    hotrow.training.rank_turn,
)
Table = hotrow.EmbeddingBagConfig


class Model(nn.Module):
    def __init__(self, device: str, *, strategy: str, unused: str = "", **options: Any) -> None:
        super().__init__()
        self.embedding = hotrow.EmbeddingBagCollection(
            [Table("a", 900, 4, ["f", "h"], padding_idx=3), Table("b", 200, 6, ["g"])],
            hotrow.Adam(lr=0.05),
            None if strategy == "all-fast" else BUDGET,
            strategy=strategy,
            device=device,
            seed=3,
            **options,
        )
        torch.manual_seed(0)
        layers = [nn.Linear(14 + 3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)]
        self.top = nn.Sequential(*layers).to(device)
        self.other = nn.Linear(3, 1).to(device)  # has a gradient in some batches alone
        self.unused, self.uses_other = unused, False
        self.joined: Any = None  # an accumulate() that a loop has entered

    def forward(self, batch: ClickBatch) -> Tensor:
        out = self.embedding(batch.sparse)
        parts = [out[name].detach() if name in self.unused else out[name] for name in "fhg"]
        hidden = self.top(torch.cat([*parts, batch.dense], dim=1))
        if self.uses_other:
            hidden = hidden + self.other(batch.dense)
        logits: Tensor = hidden.squeeze(1)
        return logits


def batches(rank: int, world: int, *, uneven: bool) -> Iterator[ClickBatch]:
    """Parts of batches; the last one is short, and some have no sample for the last rank."""
    for number, whole in enumerate(click_batches(STEPS, (900, 900, 200), size=24, last=9)):
        size = len(whole.label)
        edges = [size * r // world for r in range(world + 1)]
        if uneven and number % 5 == 4:
            edges = [*range(0, 2 * world, 2), size][: world + 1]
            edges = [0] * (world - 1) + [size, size] if number % 2 else edges
        low, high = edges[rank], edges[rank + 1]
        yield ClickBatch(whole.dense[low:high], whole.sparse[low:high], whole.label[low:high])


class Graphs:
    """Captures steps by stand-ins, and counts replays."""

    def __init__(self, model: Model) -> None:
        self.model, self.steps = model, list[RankedStep]()
        self._first: First | None = None

    @property
    def step(self) -> RankedStep:
        (step,) = self.steps
        return step

    def capture(self, launch: Any, pool: Any, priority: int) -> Any:
        """The first phase of a step comes first, then the second one."""
        if self._first is None:
            self._first = First(self, launch)
            return self._first
        first, self._first = self._first, None
        return Second(self, first, launch)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in CAPTURING:
                stack.enter_context(patch.object(module, "capturing", lambda: True))
            yield

    @contextmanager
    def without_effect(self) -> Iterator[None]:
        """A capture runs no kernel."""
        parts = (self.model.top, self.model.other, self.step._optimizer)
        before = [deepcopy(part.state_dict()) for part in parts]  # type: ignore[union-attr]
        with self.capturing():
            yield
        for part, state in zip(parts, before, strict=True):
            part.load_state_dict(state)  # type: ignore[union-attr]


class First:
    """Forward and backward."""

    def __init__(self, graphs: Graphs, launch: Any) -> None:
        self._graphs = graphs
        (self.phases,) = launch.args
        known = self.phases.gi_frame.f_locals
        self._batch, self._turn = known["batch"], known["split"]
        with graphs.without_effect():
            launch()

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        pipeline = self._graphs.model.embedding.pipeline
        planned = pipeline.planned[-1]  # of the batch in training
        self.phases = self._graphs.step._phases(self._batch, self._turn)
        with self._graphs.capturing(), patch.object(pipeline, "_find", lambda features: planned):
            next(self.phases)


class Second:
    """The update of weights."""

    def __init__(self, graphs: Graphs, first: First, launch: Any) -> None:
        self._graphs, self._first, (self._static, _) = graphs, first, launch.args
        with graphs.without_effect():
            launch()

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        landing = self._graphs.step.landing
        assert landing is not None
        with self._graphs.capturing():
            landing._loss.copy_(next(self._first.phases))
        self._first.phases.close()
        self._static.loss.copy_(landing._loss)


# -- what a loop does between two steps ------------------------------------------------------


def nothing(number: int, rank: int, model: Model) -> None:
    """An ordinary loop."""


def freeze(number: int, rank: int, model: Model) -> None:
    if number in (8, 11):
        model.embedding.requires_grad_(number == 11)


def accumulate(number: int, rank: int, model: Model) -> None:
    """Rows of three batches are updated together."""
    if number == 9:
        model.joined = model.embedding.accumulate()
        model.joined.__enter__()
    if number == 12:
        model.joined.__exit__(None, None, None)


def evaluate(number: int, rank: int, model: Model) -> None:
    if number in (7, 10):
        model.eval()
        with torch.no_grad():
            model.embedding(torch.tensor([[1, 2, 3]]).to(model.embedding.device))
        model.train()


def change_rate(number: int, rank: int, model: Model) -> None:
    for group in model.embedding.optimizer.param_groups:
        group["lr"] = 0.05 / (1 + number)


LOOPS = {loop.__name__: loop for loop in (nothing, freeze, accumulate, evaluate, change_rate)}


def parted(number: int, batch: ClickBatch) -> Any:
    """Return a batch in two parts, which no graph can train; every third one, and others whole."""

    def cut(batch: ClickBatch, low: int, high: int) -> ClickBatch:
        return ClickBatch(batch.dense[low:high], batch.sparse[low:high], batch.label[low:high])

    size = len(batch.label)
    return Parted(batch, size // 3, size, cut, lambda: True) if number % 3 == 1 else batch


def of_first_parts(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Return the rows of tables "a" and "b" that first parts look up."""
    every = [parted(*x) for x in enumerate(batches(rank, world, uneven=False))]
    ids = torch.cat([x.batch.sparse[: x.first] for x in every if isinstance(x, Parted)])
    return ids[:, :2].flatten(), ids[:, 2]


def train(
    rank: int,
    world: int,
    device: str,
    *,
    is_captured: bool,
    loop: str = "nothing",
    uneven: bool = False,
    rank_alone: bool = False,
    in_parts: bool = False,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor], int]:
    """Return the losses, all weights with their state, and how many steps were replayed."""
    model = Model(device, **options)
    dense = SharedDense(model, {"embedding": model.embedding})
    optimizer = torch.optim.SGD([*model.top.parameters(), *model.other.parameters()], lr=0.1)
    graphs, replays, replay = Graphs(model), list[int](), captured._Graph.replay

    def counted(graph: Any) -> None:
        replays.append(1)
        replay(graph)

    is_captured = is_captured and not (rank_alone and rank)
    with patch.object(captured._Graph, "replay", counted):
        step = RankedStep(
            model,
            F.binary_cross_entropy_with_logits,
            optimizer,
            dense=dense,
            clip_norm=1.0,
            labels=lambda batch: batch.label,
            lanes=lanes_of(torch.device(device)) if is_captured else None,
            graphs=GraphSettings(capture=graphs.capture) if device == "cpu" else None,
        )
        graphs.steps.append(step)
        losses = []
        parts: Any = batches(rank, world, uneven=uneven)
        if in_parts:
            rows = [of_first_parts(r, world) for r in range(world)]
            model.embedding.pin_rows({"a": torch.cat([a for a, _ in rows]).unique(),
                                      "b": torch.cat([b for _, b in rows]).unique()})  # fmt: skip
            parts = [parted(number, batch) for number, batch in enumerate(parts)]
        for number, batch in enumerate(
            hotrow.ahead(parts, model, ids=lambda batch: batch.sparse, step=step)
        ):
            LOOPS[loop](number, rank, model)
            losses.append(step(batch).cpu())
    model.embedding.check()
    weights = [torch.cat([x.cpu() for _, x in model.embedding.rows(name)]) for name in "ab"]
    weights += [x.detach().cpu() for part in (model.top, model.other)
                for x in part.state_dict().values()]  # fmt: skip
    return losses, weights, len(replays)


def differences(rank: int, world: int, device: str, cases: list[dict[str, Any]]) -> list[str]:
    found = []
    for case in cases:
        wanted, wanted_weights, eager = train(rank, world, device, is_captured=False, **case)
        losses, weights, replays = train(rank, world, device, is_captured=True, **case)
        same_losses = [x.equal(y) or bool(x.isnan() & y.isnan())
                       for x, y in zip(losses, wanted, strict=True)]  # fmt: skip
        same_weights = [x.equal(y) for x, y in zip(weights, wanted_weights, strict=True)]
        least = 0 if case.get("rank_alone") and rank else 1 if case.get("uneven") else STEPS - 12
        if not all(same_losses) or not all(same_weights) or replays < least or eager:
            found.append(f"{case}: {same_losses} {same_weights} {replays} replays")
        if case.get("rank_alone") and rank and replays:
            found.append("this rank has captured steps, and should run eagerly")
    return found


CASES: list[dict[str, Any]] = [
    {"strategy": "lookahead"},
    {"strategy": "all-fast"},
    {"strategy": "scratchpipe", "unused": "hg"},
    {"strategy": "lookahead", "replicate": "2KiB"},
    {"strategy": "lookahead", "uneven": True},
    {"strategy": "lookahead", "rank_alone": True},
    {"strategy": "hybrid"},
    {"strategy": "static-hybrid", "replicate": "2KiB"},
    {"strategy": "static", "replicate": "24KiB", "in_parts": True},
    *({"strategy": "lookahead", "loop": loop} for loop in LOOPS if loop != "nothing"),
]


def test_captured_steps_of_ranks_have_the_bits_of_eager_ones() -> None:
    for found in run(2, differences, "cpu", CASES, timeout=120):
        assert not found, "\n".join(found)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_captured_steps_of_ranks_on_one_gpu(world: int) -> None:
    for found in run(world, differences, "cuda", CASES, timeout=280):
        assert not found, "\n".join(found)


# -- weights that only some ranks use --------------------------------------------------------


def use_other(number: int, rank: int, model: Model) -> None:
    """From a step on the last rank uses a weight that the graphs of the first one do not have."""
    model.uses_other = number >= 10 and rank == 1


LOOPS["use_other"] = use_other


def test_weights_that_only_another_rank_uses_are_updated_beside_graphs() -> None:
    cases = [{"strategy": "lookahead", "loop": "use_other", "rank_alone": True}]
    for found in run(2, differences, "cpu", cases, timeout=60):
        assert not found, "\n".join(found)
