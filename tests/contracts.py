"""Engines under test, by name: each is one combination of parts.

`tight` builds a collection with as few slots as its batches need, and victims that show every
mistake. `all_fast` has every row in fast memory, with the same arithmetic: it says what is right.
Where there is no GPU, Triton's interpreter runs the GPU's engine on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from builders import CASES, Case, Late, Outcome, build, tight_budget, train, variant
from hotrow.engine.evict import EVICTIONS
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.host.hot import HotRows
from hotrow.engine.host.rows import HostRows, host_rows_engine
from hotrow.engine.strategy import STRATEGIES, Strategy, as_listed
from hotrow.engine.tuning import Tuning
from hotrow.inputs.tree import to_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of weights of about 0.1 to 1 and losses of about 1 to 10, after up to 40 steps.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
MULTI_HOT = CASES["multi-hot"]


def on_device(batches: Sequence[Any], device: torch.device = DEVICE) -> list[Any]:
    return [to_device(batch, device) for batch in batches]


def by_gpu(**parts: Any) -> dict[str, Any]:
    """Options of a collection whose engine is the GPU's, with other parts than usual."""
    return {"device": DEVICE, "engine": partial(gpu_rows, **parts)}


def on_host(result: Outcome) -> Outcome:
    return Outcome([loss.cpu() for loss in result.losses], result.weights, result.state)


def assert_like(found: Outcome, expected: Outcome) -> None:
    """Equal up to rounding."""
    found, expected = on_host(found), on_host(expected)
    for name in ("losses", "weights", "state"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **TOLERANCE)


@cache
def all_fast(case: str, rule: str, steps: int, device: str = "cpu") -> Outcome:
    """What training gives with every row in fast memory; `device` "gpu": by the GPU's engine."""
    options = by_gpu() if device == "gpu" else {"device": device}
    return train(build(CASES[case], rule, **options), CASES[case].batches(steps))


class LateWriter:
    """Writes nothing until a caller waits for it: later than any thread could be."""

    def __init__(self) -> None:
        self.asked: list[tuple[Tensor, Tensor, Tensor]] = []
        self.done = 0

    def write(self, store: Tensor, ids: Tensor, rows: Tensor) -> int:
        self.asked.append((store, ids, rows))
        return len(self.asked)

    def is_done(self, number: int) -> bool:
        return self.done >= number

    def wait(self, number: int) -> None:
        while self.done < number:
            store, ids, rows = self.asked[self.done]
            store[ids[ids >= 0]] = rows[ids >= 0]
            self.done += 1

    def wait_for_all(self) -> None:
        self.wait(len(self.asked))


# -- engines -----------------------------------------------------------------------------


class Engine:
    """Slots of a CPU."""

    steps = 12
    device = torch.device("cpu")
    interpreted = False  # Triton's interpreter runs its kernels
    has_slots = True

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def options(self) -> dict[str, Any]:
        """Options of every collection, made anew for each."""
        return {}

    def all_fast(
        self, case: Case = MULTI_HOT, rule: str = "adagrad", **options: Any
    ) -> hotrow.EmbeddingBagCollection:
        return build(case, rule, "all-fast", **self.options(), **options)

    def tight(
        self,
        case: Case = MULTI_HOT,
        rule: str = "adagrad",
        *,
        batches: Sequence[Any] | None = None,
        part: float = 1.0,
        dense_map: bool = True,
        **options: Any,
    ) -> hotrow.EmbeddingBagCollection:
        """`part` below 1: so small a part of the largest batch fits the slots."""
        batches = case.batches(self.steps) if batches is None else batches
        hold = self.strategy.hold
        budget = tight_budget(case, batches, hold, part=part, dense_map=dense_map)
        options = {"budget": budget, **self.options(), **options}
        return build(case, rule, options.pop("strategy", self.strategy), **options)

    def check(self, found: Outcome, expected: Outcome) -> None:
        assert found.same_bits(expected)


class GpuEngine(Engine):
    """Slots of a GPU, and one of the ways in which rows move."""

    steps = 30 if DEVICE.type == "cuda" else 6
    device = DEVICE
    interpreted = DEVICE.type == "cpu"

    def __init__(
        self, strategy: Strategy, fill: str, parts: Callable[[], dict[str, Any]] = dict
    ) -> None:
        super().__init__(replace(strategy, order=as_listed, pinned_part=0.0))
        self.fill, self.parts = fill, parts

    def options(self) -> dict[str, Any]:
        return {"fill": self.fill, **by_gpu(**self.parts())}


class HostEngine(Engine):
    """Rows in host memory, updates as late as a GPU's; either rows or pooled bags cross."""

    has_slots = False

    def __init__(self, name: str, form: str, *, hot: bool = False) -> None:
        """`hot`: a table is in fast memory, and GPU kernels update it where rows cross."""
        super().__init__(STRATEGIES[name])
        self.form, self.hot, self.exact = form, hot, form == "bags"
        self.interpreted = not self.exact
        self.steps = 12 if self.exact else 6

    def tight(
        self,
        case: Case = MULTI_HOT,
        rule: str = "adagrad",
        *,
        batches: Any = None,
        part: float = 1.0,
        **options: Any,
    ) -> hotrow.EmbeddingBagCollection:
        if self.hot:
            rows = {table.name: table.num_embeddings for table in case.tables}
            options = {"profile": {"b": torch.ones(rows["b"])}, **options}
            options = {"budget": room_for(case), **options}
        embedding = build(case, rule, self.strategy, **options)
        as_on_gpu(embedding, self.form, by_kernels=self.hot and not self.exact)
        return embedding

    def check(self, found: Outcome, expected: Outcome) -> None:
        if self.exact:
            assert found.same_bits(expected)
        else:
            assert_like(found, expected)


def room_for(case: Case, slots: int = 1000) -> hotrow.Budget:
    """So many slots for each width, or all its rows."""
    rows: dict[int, int] = {}
    for table in case.tables:
        rows[table.embedding_dim] = rows.get(table.embedding_dim, 0) + table.num_embeddings
    shares = [hotrow.Share(min(slots, rows[dim]), 64, dense_map=True) for dim in sorted(rows)]
    return hotrow.Budget(tuple(shares), window_bytes=0)


def as_on_gpu(
    embedding: hotrow.EmbeddingBagCollection,
    form: str | None = None,
    *,
    late: bool = True,
    by_kernels: bool = False,
) -> hotrow.EmbeddingBagCollection:
    """Let rows or bags cross a link, as asked for, and updates wait until rows are read."""
    owned = embedding.groups[: len({table.embedding_dim for table in embedding.tables})]
    for group in owned:
        assert isinstance(group, HostRows)
        group.link.exists = late
        if form is not None:
            group.rows_cross = lambda *_: form == "rows"
        if by_kernels:
            assert isinstance(group.hot, HotRows)
            group.hot._by_kernels = True
    return embedding


# Hot rows are learned early, and move in small chunks.
LEARNS = {"engine": partial(host_rows_engine, tuning=Tuning(learn_after=(2, 4, 8), chunk_rows=7))}


def some_of(case: Case, part: float) -> dict[str, Tensor]:
    """A profile by which a part of the rows of every table is used, at random."""
    draw = torch.Generator().manual_seed(5)
    sizes = {table.name: table.num_embeddings for table in case.tables}
    return {name: (torch.rand(n, generator=draw) < part).long() for name, n in sizes.items()}


def hot(
    case: Case, rule: str = "sgd", part: float = 0.5, **options: Any
) -> hotrow.EmbeddingBagCollection:
    profile = options.pop("profile", some_of(case, part))
    options = {"budget": room_for(case), "profile": profile, **options}
    return build(case, rule, "static-hybrid", **options)


def learning(rule: str, slots: int, **options: Any) -> hotrow.EmbeddingBagCollection:
    options = {"budget": room_for(MULTI_HOT, slots), **LEARNS, **options}
    return build(MULTI_HOT, rule, "static-hybrid", **options)


def looking_ahead(victims: str) -> Strategy:
    """Other victims than its own, though next uses are known: rows come back soon."""
    strategy = replace(variant("lookahead"), pinned_part=0.0)
    if victims == "own":
        return strategy
    return replace(strategy, eviction=replace(EVICTIONS[victims], looks_ahead=True))


def late_worker() -> dict[str, Any]:
    return {"worker": Late()}


ENGINES: dict[str, Engine] = {
    **{
        f"cpu-{schedule}-{victims}": Engine(variant("lookahead", schedule, victims))
        for schedule, victims in [
            ("sequential", "most-recent"),
            ("fused", "random"),
            ("fused", "most-recent"),
            ("five-shuffled", "most-recent"),
        ]
    },
    "zero-copy": GpuEngine(variant("lookahead", victims="random"), "zero-copy"),
    "bulk": GpuEngine(looking_ahead("random"), "bulk", lambda: {"writer": LateWriter()}),
    "staged": GpuEngine(variant("lookahead", "split", "most-recent"), "staged", late_worker),
    "five": GpuEngine(variant("scratchpipe", victims="most-recent"), "staged", late_worker),
    "not-locked": GpuEngine(
        variant("lookahead", "split", "random"), "staged",
        lambda: {"page_locked": False, "worker": Late()},
    ),
    "hybrid-bags": HostEngine("hybrid", "bags"),
    "hybrid-rows": HostEngine("hybrid", "rows"),
    "static-hybrid-bags": HostEngine("static-hybrid", "bags", hot=True),
    "static-hybrid-rows": HostEngine("static-hybrid", "rows", hot=True),
}  # fmt: skip
CPU = [name for name in ENGINES if name.startswith("cpu")]
GPU = ["zero-copy", "bulk", "staged", "five", "not-locked"]
HOST = [name for name in ENGINES if "hybrid" in name]
_turns = itertools.count()


def engines(*names: str) -> list[Any]:
    """Engines as parameters. Of those that the interpreter runs, one is not slow: one of a GPU and
    one of the host take turns, and so do the engines of each."""
    names, turn = names or tuple(ENGINES), next(_turns)
    slow = [name for name in names if ENGINES[name].interpreted]
    families = [[name for name in slow if name in family] for family in (GPU, HOST)]
    families = [each for each in families if each]
    if families:
        members = families[turn % len(families)]
        slow.remove(members[turn // len(families) % len(members)])
    return [
        pytest.param(ENGINES[name], id=name, marks=[pytest.mark.slow] if name in slow else [])
        for name in names
    ]
