"""What it costs that hotrow.ahead watches its loader for buffers that are filled again.

    python benchmarks/watched.py
    python benchmarks/watched.py --device cuda --batch 8192

Trains a small model on batches that lie in memory of their own, with all checks and without them,
in turns. "watched" is a generator, whose first batches are copied and whose others are watched;
"list" needs no watching, and has the comparison of ids alone. Times are medians of rounds, per
step, after the batches that are copied; "first" are those; "more" is the median of the rounds'
ratios. "inside" is the share of a step that the host spends in the checks, which says more where
other programs run. A refilling loader is beside them. On a CPU, processor time is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hotrow
from hotrow.data import ClickBatch
from hotrow.embedding.ahead import Ahead
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.pipeline import Pipeline, PlannedBatch
from hotrow.inputs import held_batches as kept
from hotrow.inputs.held_batches import Kept

FEATURES, NUM_DENSE, DIM = 26, 13, 16
FIRST = 64  # batches that are copied in any case


class Model(nn.Module):
    def __init__(self, rows: int, device: str) -> None:
        super().__init__()
        tables = [
            hotrow.EmbeddingBagConfig(f"t{place}", rows, DIM, [f"f{place}"])
            for place in range(FEATURES)
        ]
        self.embedding = EmbeddingBagCollection(
            tables, hotrow.SGD(lr=0.01), "20%", device=device, seed=0
        )
        self.top = nn.Sequential(
            nn.Linear(FEATURES * DIM + NUM_DENSE, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, batch: ClickBatch) -> Tensor:
        vectors = self.embedding(batch.sparse).values()
        logits: Tensor = self.top(torch.cat([batch.dense, vectors], 1)).squeeze(1)
        return logits


def made(count: int, rows: int, size: int, *, locked: bool) -> list[ClickBatch]:
    draw = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        ids = (torch.rand(size, FEATURES, generator=draw) ** 4 * rows).long()
        dense = torch.rand(size, NUM_DENSE, generator=draw)
        label = torch.randint(0, 2, (size,), generator=draw).float()
        batch = ClickBatch(dense, ids, label)
        batches.append(batch.pin_memory() if locked else batch)
    return batches


class Checks:
    """The host's seconds inside of the checks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.thread_time() - begun

        return run

    @contextmanager
    def measured(self) -> Iterator[None]:
        places: list[tuple[Any, str]] = [(kept._Given, "take"), (Kept, "check"), (torch, "clone")]
        before = [getattr(owner, name) for owner, name in places]
        is_as_read: Any = PlannedBatch.is_as_read
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, self.timed(function))
        PlannedBatch.is_as_read = property(self.timed(is_as_read.fget))  # type: ignore[method-assign]
        try:
            yield
        finally:
            PlannedBatch.is_as_read = is_as_read  # type: ignore[method-assign]
            for (owner, name), function in zip(places, before, strict=True):
                setattr(owner, name, function)


@contextmanager
def unchecked(is_off: bool) -> Iterator[None]:
    """Inside, ids are not compared with those that were planned."""
    prepare: Any = Pipeline.prepare
    if is_off:

        def without(self: Any, features: Any, device: Any = None, *, held: bool = False) -> Any:
            return prepare(self, features, device)

        Pipeline.prepare = without  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pipeline.prepare = prepare  # type: ignore[method-assign]


def refilling(batches: list[ClickBatch]) -> Iterator[ClickBatch]:
    room = batches[0].pin_memory() if batches[0].label.is_pinned() else batches[0].clone()
    for batch in batches:
        room.sparse.copy_(batch.sparse)  # type: ignore[union-attr]
        room.dense.copy_(batch.dense)
        room.label.copy_(batch.label)
        yield room


LOADERS: dict[str, Callable[[list[ClickBatch]], Any]] = {
    "list": list,
    "watched": lambda batches: (batch for batch in batches),
    "refilling": refilling,
}


def seconds(
    model: Model, step: Any, batches: list[ClickBatch], kind: str, *, checks: bool, depth: int
) -> tuple[float, float, float]:
    """Per step: of the first batches, of all others, and of these inside of the checks."""
    device = model.embedding.device

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    skipped = max(FIRST, 2 * depth + 16)
    loader = LOADERS[kind](batches)
    is_kept = not checks and kind != "refilling"
    watch = Checks()
    with unchecked(not checks), watch.measured():
        stream = Ahead(loader, model, lambda b: b.sparse, depth=depth, step=step, is_kept=is_kept)
        begun = now()
        for number, batch in enumerate(stream):
            if number == skipped:
                middle, watch.seconds = now(), 0.0
            step(batch)
        ended, inside = now(), watch.seconds
    later = len(batches) - skipped
    return (middle - begun) / skipped, (ended - middle) / later, inside / later


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--batch", type=int, default=None, help="samples; 8192 on a GPU, 2048")
    options.add_argument("--rows", type=int, default=100_000, help="of each of 26 tables")
    options.add_argument("--steps", type=int, default=300, help="of a round")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--depth", type=int, default=8, help="batches known ahead")
    asked = options.parse_args()
    on_gpu = asked.device.startswith("cuda")
    size = asked.batch or (8192 if on_gpu else 2048)
    if asked.steps <= (least := max(FIRST, 2 * asked.depth + 16)):
        raise SystemExit(f"--steps must be more than the {least} batches that are copied at first")
    batches = made(asked.steps, asked.rows, size, locked=on_gpu)
    model = Model(asked.rows, asked.device).to(asked.device)
    lr = torch.tensor(0.01, device=asked.device) if on_gpu else 0.01
    dense = torch.optim.SGD(model.parameters(), lr=lr, fused=on_gpu or None)
    step = hotrow.graphed(model, functional.binary_cross_entropy_with_logits, dense)
    cases = [("list", False), ("list", True), ("watched", False), ("watched", True)]
    cases.append(("refilling", True))
    found: dict[tuple[str, bool], list[tuple[float, ...]]] = {case: [] for case in cases}
    for turn in range(asked.rounds + 1):
        place = turn % len(cases)
        for kind, checks in cases[place:] + cases[:place]:
            times = seconds(model, step, batches, kind, checks=checks, depth=asked.depth)
            if turn:  # the first warms up
                found[kind, checks].append(times)
    print(f"{asked.device}, {size:,} samples of {FEATURES} ids, {asked.rounds} rounds")
    print(
        f"{'loader':>10} {'checks':>7} {'ms per step':>12} {'more':>7} {'first':>8} {'inside':>7}"
    )
    for kind, checks in cases:
        first, later, inside = (
            statistics.median(each) for each in zip(*found[kind, checks], strict=True)
        )
        more = ""
        if checks and (kind, False) in found:
            pairs = zip(found[kind, True], found[kind, False], strict=True)
            more = f"{statistics.median(on[1] / off[1] for on, off in pairs) - 1:+.1%}"
        said = f"{kind:>10} {'on' if checks else 'off':>7} {1e3 * later:>12.3f} {more:>7}"
        print(f"{said} {1e3 * first:>8.3f} {inside / later:>7.2%}")


if __name__ == "__main__":
    main()
