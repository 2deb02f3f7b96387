"""The programs of tests/embedding that step torch's optimizers, on several ranks.

With equal batches on all ranks, the average of their gradients is that of one: programs must mean
what they mean in plain torch. With batches of their own, ranks must have the bits of all-fast, and
with rows on the host its numbers up to rounding.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hotrow
from builders import variant

TIGHT = {
    "lookahead": variant("lookahead", victims="random"),
    "lru": variant("lru", victims="most-recent"),
    "scratchpipe": variant("scratchpipe", victims="random"),
    "uncached": variant("uncached"),
    "static": variant("static", victims="most-recent"),
}
ON_HOST = ("cpu", "hybrid", "static-hybrid")
MAKERS = ("SGD", "Adagrad", "SparseAdam")
# They load or save whole state dicts, which is refused on several ranks.
_REFUSED = ("saves_and_loads", "saving_and_loading", "shared_modules_and_subclasses")
# They need a batch of 16.
_FIXED = ("shapes_and_types", "functional_lookups")
_SIZES = (24, 7, 0, 15)  # of the batches of each rank; one never has a sample


@cache
def module(name: str) -> Any:
    """A test module, which pytest does not let others import by name."""
    path = Path(__file__).parent / "embedding" / f"{name}.py"
    spec = spec_from_file_location(f"of_ranks_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@contextmanager
def batches_of(tests: Any, rank: int, size: int | None) -> Iterator[None]:
    """Inside, programs train batches of a rank; without a size, those of one process."""
    made = tests.batches

    def batches(count: int) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(1 + 100 * rank)
        return iter([tests.batch(draw, size) for _ in range(count)])

    if size is not None:
        tests.batches = batches
    try:
        yield
    finally:
        tests.batches = made


def average(model: nn.Module, world: int) -> None:
    """Average the gradients of the dense part over ranks, as DistributedDataParallel does."""

    def averaged(grad: Tensor) -> Tensor:
        total = grad.detach().clone()
        dist.all_reduce(total)
        return grad + (total / world - grad).detach()  # keeps its graph

    for parameter in model.parameters():
        if getattr(parameter, "stands_for", None) is None:
            parameter.register_hook(averaged)


@dataclass(frozen=True)
class Case:
    """A program, and the one optimizer and strategy that it is run with."""

    of: str  # torch or convert
    program: str
    maker: str
    strategy: str


def programs(of: str) -> dict[str, Any]:
    if of == "torch":
        named = {x.__name__: (x, None) for x in module("test_torch_steps").PROGRAMS}
    else:
        named = module("test_convert").PROGRAMS
    return {name: x for name, x in named.items() if name not in _REFUSED}


def cases(of: str, *, every: bool, strategies: Sequence[str] = tuple(TIGHT)) -> list[Case]:
    """All combinations, or each program once, with optimizers and strategies in turn."""
    count = len(strategies)
    found = []
    for number, name in enumerate(programs(of)):
        for m, maker in enumerate(MAKERS):
            for s, strategy in enumerate(strategies):
                # Of three strategies, each meets all optimizers.
                turn = number % count if count % 3 else number // 3 % count
                if (number % 3, turn) == (m, s) or every:
                    found.append(Case(of, name, maker, strategy))
    return found


Outcome = list[Tensor]


class _Torch:
    """Programs of test_torch_steps.py."""

    def __init__(self, case: Case, world: int) -> None:
        self.tests, self.case, self.world = module("test_torch_steps"), case, world
        # Each rank has as many rows as one process has there: budgets are of these.
        sizes = {"a": (300, 8), "b": (200, 8), "c": (250, 16)}
        self.tests.SIZES.update({name: (rows * world, dim) for name, (rows, dim) in sizes.items()})
        self.program = programs("torch")[case.program][0]

    def train(self, strategy: Any) -> tuple[Outcome, Any]:
        rows = self.tests.Rows(strategy)
        average(rows, self.world)
        return self._run(rows), rows.embedding

    def train_plain(self) -> Outcome:
        rows = self.tests.Rows("all-fast")
        return self._run(self.tests.Plain(rows, sparse=self.case.maker == "SparseAdam"))

    def _run(self, model: Any) -> Outcome:
        found = [x.detach() for x in self.program(model, self.tests.MAKERS[self.case.maker])]
        found += [model.rows(name) for name in self.tests.SIZES]
        return found + [weight.detach() for weight in model.top.parameters()]


class _Convert:
    """Programs of test_convert.py."""

    def __init__(self, case: Case, world: int) -> None:
        self.tests, self.case, self.world = module("test_convert"), case, world
        self.program, self.of = programs("convert")[case.program]

    def train(self, strategy: Any) -> tuple[Outcome, Any]:
        share = hotrow.Share(30, buffer_rows=64, dense_map=True)
        widths = 1 if self.of in (self.tests.Tied, self.tests.Shared) else 2
        budget = hotrow.Budget((share,) * widths, window_bytes=1 << 14)
        plain = self.of(sparse=self.case.maker == "SparseAdam")
        model = self.tests.converted(plain, self.case.maker, budget=budget, strategy=strategy)
        average(model, self.world)
        found = self._run(model)
        return found, self.tests.hotrow_modules(model)[0].collection

    def train_plain(self) -> Outcome:
        return self._run(self.of(sparse=self.case.maker == "SparseAdam"))

    def _run(self, model: Any) -> Outcome:
        run = self.tests.Run(model, self.tests.MAKERS[self.case.maker])
        found = [x.detach().clone() for x in self.program(run)]
        for part in dict.fromkeys(model.modules()):
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                found.append(_weights_of(part))
        return found + [x.detach().clone() for x in run.dense]


def _weights_of(part: Any) -> Tensor:
    if hasattr(part, "weights"):
        return torch.cat([chunk for _, chunk in part.weights()])
    return part.weight.detach().clone()


def differences(rank: int, world: int, chosen: Sequence[Case]) -> list[str]:
    """What went wrong, on this rank; and how many cases had evicted rows."""
    found, evicted = [], 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")
        for case in chosen:
            try:
                said, has_evicted = _difference(rank, world, case)
            except BaseException as error:
                error.add_note(f"{case}, rank {rank} of {world}")
                raise
            evicted += has_evicted
            found += [] if said is None else [f"{case}: {said}"]
    if evicted < 0.9 * len(chosen):  # those that train a whole table have a budget for that
        found.append(f"rows were evicted in {evicted} of {len(chosen)} cases")
    return found


def _difference(rank: int, world: int, case: Case) -> tuple[str | None, bool]:
    form: Callable[..., Any] = _Torch if case.of == "torch" else _Convert
    run = form(case, world)
    size = 16 if case.program in _FIXED else _SIZES[rank % 4]
    on_host = case.strategy in ON_HOST
    tight: Any = case.strategy if on_host else TIGHT[case.strategy]
    with batches_of(run.tests, rank, size):
        expected, _ = run.train("all-fast")
        outcome, embedding = run.train(tight)
    embedding.check()
    has_evicted = on_host or embedding.traffic().evicted_rows > 0
    if said := _unlike(outcome, expected, 2e-5 if on_host else 0.0):
        return f"{case.strategy} and all-fast differ: {said}", has_evicted
    alike, _ = run.train(tight)
    if said := _unlike(alike, copy.deepcopy(run.train_plain()), 2e-5):
        return f"equal batches on all ranks and plain torch differ: {said}", has_evicted
    return None, has_evicted


def _unlike(found: Outcome, expected: Outcome, tolerance: float) -> str | None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.shape != other.shape:
            return f"item {number}: shapes {list(one.shape)} and {list(other.shape)}"
        # NaN is equal to itself here: a scaler's overflow makes some.
        same = (one == other) | (one.isnan() & other.isnan())
        if bool(same.all()):
            continue
        size = other.abs().max().clamp(min=1.0)
        most = float(((one - other).abs() / size).max())
        if not most <= tolerance:
            return f"item {number} of {len(found)}: by {most:.3g}"
    return None
