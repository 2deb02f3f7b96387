"""Every Triton kernel, and a few training steps, on small odd shapes: for compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python tests/engine/gpu/sanitize.py
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
    compute-sanitizer --tool racecheck python tests/engine/gpu/sanitize.py --only kernels

A plain program, because a sanitizer slows everything down: no test runner, few launches. Without
torch's caching allocator each tensor is an allocation of its own, and memcheck sees the first byte
past it; CUDA graphs cannot be captured then, so those steps are left out. On a machine without a
GPU it runs with TRITON_INTERPRET=1. Says at the end which kernels never ran, and fails if any.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hotrow
import hotrow.engine.tuning
import hotrow.support.streams
from hotrow.data import ClickBatch
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.kernels.triton import (
    fill,
    interact,
    lookup,
    maps,
    merge,
    norms,
    plan,
    ranking,
    segments,
    start,
    update,
    words,
)
from hotrow.models import DLRM
from hotrow.store.pinned import locked_rows

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
OWN_ALLOCATIONS = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"
FOLDER = Path(fill.__file__).parent
RULES = {
    "sgd": hotrow.SGD(lr=0.1),
    "adagrad": hotrow.Adagrad(lr=0.1),
    "row-wise": hotrow.RowWiseAdagrad(lr=0.1),
    "adam": hotrow.Adam(lr=0.01),
    "adamw": hotrow.AdamW(lr=0.01),
}
ROWS = (67, 5, 131)
STEPS = 4

_PARTS: dict[str, Callable[[], None]] = {}


def part(function: Callable[[], None]) -> Callable[[], None]:
    _PARTS[function.__name__] = function
    return function


# -- which kernels there are, and which of them ran ------------------------------------


def kernels_of(path: Path) -> set[str]:
    """Names that are launched: `kernel[grid](...)`."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    subscripts = (call.func for call in calls if isinstance(call.func, ast.Subscript))
    return {each.value.id for each in subscripts if isinstance(each.value, ast.Name)}


def watch_launches() -> tuple[set[str], set[str]]:
    """The kernels of the package, and a set to which those that are launched are added."""
    wanted, launched = set[str](), set[str]()
    classes = set()
    for path in sorted(FOLDER.glob("*.py")):
        module = importlib.import_module(f"hotrow.kernels.triton.{path.stem}")
        for name in kernels_of(path):
            wanted.add(f"{path.stem}.{name}")
            classes.add(type(getattr(module, name)))
    for each in classes:
        each.__getitem__ = _noting(each.__getitem__, launched)
    return wanted, launched


def _noting(launch: Any, launched: set[str]) -> Any:
    def noting(kernel: Any, grid: Any) -> Any:
        module = kernel.fn.__module__.rpartition(".")[2]
        launched.add(f"{module}.{kernel.fn.__name__}")
        return launch(kernel, grid)

    return noting


# -- kernels by themselves -------------------------------------------------------------


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def store_of(num_rows: int, width: int) -> Tensor:
    """Page-locked rows where there is a GPU."""
    rows = locked_rows(num_rows, width).rows if CUDA else torch.zeros(num_rows, width)
    return rows.copy_(torch.rand(num_rows, width))


@part
def kernels() -> None:
    for width in (1, 3, 24, 65, 192):
        rows_between(width)
    for size in (1, 63, 500):
        read_and_update(size, dim=5 if size == 63 else 16)
    for state in (0, 1, 3):
        rows = torch.zeros(7, 3 + state, device=DEVICE)
        begin = torch.full((state,), 0.5, device=DEVICE)
        for kind in ("constant", "uniform", "normal"):
            beginning = start.Beginning(kind, (-1.0, 2.0), padding=2)
            start.start_rows(rows, begin, beginning, (2**63 + 1, 7, 9), first_row=3)
        new = start.Unwritten(
            [0, 3, 9], [start.Beginning("other"), start.Beginning("uniform", (-1.0, 2.0), 1)],
            [(2**63 + 1, 7, 9)] * 2, [0.5] * begin.numel(), rows.device,
        )  # fmt: skip
        new.note(torch.tensor([4, -1, 8], device=rows.device))
    for batch, features, dim in ((1, 1, 16), (3, 5, 16), (17, 26, 64)):
        dense, vectors = (torch.randn(batch, n * dim, device=DEVICE) for n in (1, features))
        width = interact.width_of(features, dim, pad_to=64)
        out = interact.interact(dense, vectors, width)
        interact.interact_backward(torch.randn_like(out), dense, vectors)
    for dense_map in (False, True):
        map_of_rows(dense_map)
    for count in (0, 1, 70):
        norms_of_tables(count)
        victims_and_merged_lists(count)


def victims_and_merged_lists(count: int) -> None:
    counts = torch.zeros(words.COUNT_WORDS, dtype=torch.int32, device=DEVICE)
    counts[words.MOVES] = counts[words.EVICTED] = count
    leaving, slots = torch.randperm(count, device=DEVICE).int(), ints(*range(count))
    room = ints(*range(max(1, 2 * count)))
    if count:
        plan.sort_victims(leaving, slots, counts, count, 1000, room)
    first = merge.Pairs(ints(*range(count)), torch.rand(count, 5, device=DEVICE), None)
    merge.merge(first, merge.Pairs(ints(3, 200), torch.rand(2, 5, device=DEVICE), None), 300)


def norms_of_tables(count: int) -> None:
    ids, grads = torch.arange(count, device=DEVICE).int(), torch.rand(count, 5, device=DEVICE)
    of_tables, marked = torch.zeros(3, device=DEVICE), torch.zeros(3, 1, 2, device=DEVICE)
    bases, places = ints(0, 40, 99, dtype=torch.int64), ints(2, 0, dtype=torch.int64)
    valid = None if count == 1 else grads[:, 0] < 0.5
    norms.table_norms(ids, grads, valid, bases, of_tables, marked, 2.0**-40, places)
    norms.judge(marked, of_tables, 2.0**-40, 1e-4, ints(0))


def rows_between(width: int) -> None:
    store, slots = store_of(11, width), torch.rand(6, width, device=DEVICE)
    moved, count = ints(4, 0, 2), ints(3)
    fill.fill(slots, store, moved, ints(10, -1, 3), ints(0, 7, 3), count, 2)
    fill.fill(slots, store, moved, None, ints(1, -1, 2), count, 1)
    fill.pack(slots, moved, count, torch.zeros(2, width, device=DEVICE))
    packed, ids, taken = torch.zeros(5, width, device=DEVICE), ints(0, 0, 0, 0, 0), ints(1)
    for _ in range(2):  # the second time there is no room for all of them
        fill.pack_more(slots, moved, ints(10, -1, 3), count, packed, ids, taken, ints(0))
    out = torch.zeros(3, width, device=DEVICE)
    fill.gather(store, ints(10, -1, 0, dtype=torch.int64), out)
    fill.scatter(store, ints(9, -1, 1), out)


def read_and_update(size: int, *, dim: int) -> None:
    ids = torch.randint(9, (size,), device=DEVICE, dtype=torch.int32)  # 9: long and short runs
    rows = torch.rand(12, dim, device=DEVICE)
    offsets = ints(0, 0, size // 3, size, dtype=torch.int64)
    bag_of = torch.repeat_interleave(torch.arange(3, device=DEVICE), offsets.diff()).int()
    weights, divisor = torch.rand(size, device=DEVICE), torch.rand(3, 1, device=DEVICE) + 1
    lookup.pool(rows, ids, None, None, None, dim, torch.bfloat16)
    lookup.pool(rows, ids, offsets, weights, divisor, dim)
    lookup.weight_grads(rows, ids, bag_of, torch.rand(3, dim, device=DEVICE), dim)
    found = segments.segments_of(ids)
    grads = torch.rand(3, dim, device=DEVICE)
    update.sum_by_row(grads, bag_of, weights, divisor, found)
    row_slots = torch.randperm(11, device=DEVICE).int().repeat(-(-size // 11))[:size]
    bases = ints(0, 4, dtype=torch.int64)
    for rule in RULES.values():
        wide = torch.rand(12, dim + rule.state_width(dim), device=DEVICE)
        scalars = torch.full((2, update.NUM_SCALARS[type(rule).__name__]), 0.5, device=DEVICE)
        terms = (grads, bag_of, None, None)
        update.update_slots(wide, row_slots, found, *terms, rule, scalars, bases, 11, dim)
        each = torch.rand(4, dim, device=DEVICE)
        update.update_rows(wide, ints(3, 11, 0, 7), ints(1, 2, 5, 8), ints(3), each, rule, scalars,
                           bases, dim, 11)  # fmt: skip


def map_of_rows(dense: bool) -> None:
    row_of_slot = ints(5, -1, 99, 0, 41)
    row_map = maps.DeviceMap(row_of_slot, 100, dense=dense)
    row_map.rebuild()
    if dense:
        row_map.table[ints(5, 99, 0, 41).long()] = ints(0, 2, 3, 4)
    assert row_map.lookup(ints(99, 98, 0, 5)).tolist() == [2, -1, 3, 0]
    state = torch.zeros(words.STATE_WORDS, dtype=torch.int32, device=DEVICE)
    last_use = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    ranking.hold(ints(99, 7, 100), 2, last_use, state, row_map, 100)
    assert last_use.tolist() == [0, 0, 2, 0, 0]


# -- training --------------------------------------------------------------------------


def clicks(steps: int = STEPS, size: int = 23) -> Iterator[ClickBatch]:
    """The last one is short."""
    for step in range(steps):
        count = 7 if step == steps - 1 else size
        ids = [(torch.rand(count) ** 3 * rows).long() for rows in ROWS]
        yield ClickBatch(torch.rand(count, 3), torch.stack(ids, 1), torch.rand(count).round())


def collection(
    strategy: str, rule: str, budget: Any = "40%", **options: Any
) -> hotrow.EmbeddingBagCollection | None:
    """None where a strategy is not for this device."""
    tables = [
        hotrow.EmbeddingBagConfig(f"t{i}", rows, 5, [f"f{i}"], pooling="mean" if i else "sum")
        for i, rows in enumerate(ROWS)
    ]
    try:
        return hotrow.EmbeddingBagCollection(
            tables,
            RULES[rule],
            None if strategy == "all-fast" else budget,
            strategy=strategy,
            device=DEVICE,
            seed=0,
            engine=None if hotrow.STRATEGIES[strategy].on_host else gpu_rows,
            **options,
        )
    except ValueError as reason:
        if "trains on the CPU alone" not in str(reason):
            raise
        return None


def by_hand(slots: int, *, dense_map: bool) -> hotrow.Budget:
    return hotrow.Budget((hotrow.Share(slots, 40, dense_map),), window_bytes=1 << 14)


def train(embedding: hotrow.EmbeddingBagCollection, batches: Any, features: Any) -> None:
    for batch in hotrow.ahead(batches, embedding, ids=features):
        embedding(features(batch)).values().square().sum().backward()
    embedding.check()
    if CUDA:
        torch.cuda.synchronize()


@part
def strategies() -> None:
    """Each strategy with another rule, both kinds of map, and slots that do not always do."""
    rules = list(RULES) * 3
    for number, name in enumerate(hotrow.STRATEGIES):
        for slots, dense_map in ((90, False), (150, True)):
            embedding = collection(name, rules[number], by_hand(slots, dense_map=dense_map))
            if embedding is not None:
                train(embedding, clicks(), lambda batch: batch.sparse)
    hotrow.engine.tuning.DEFAULT = hotrow.engine.tuning.Tuning(least_certain=0)
    for form in ("bulk", "staged"):
        embedding = collection("lookahead", "adam", by_hand(100, dense_map=False), fill=form)
        assert embedding is not None
        train(embedding, clicks(), lambda batch: batch.sparse)


@part
def bags() -> None:
    """Jagged lookups with weights; and an id that no table has."""

    def batches() -> Iterator[hotrow.KeyedJaggedTensor]:
        for _ in range(STEPS):
            lengths = torch.randint(4, (len(ROWS) * 9,))
            values = torch.cat(
                [
                    torch.randint(rows, (int(mine.sum()),))
                    for rows, mine in zip(ROWS, lengths.split(9), strict=True)
                ]
            )
            weights = torch.rand(values.numel(), requires_grad=True)
            names = [f"f{i}" for i in range(len(ROWS))]
            yield hotrow.KeyedJaggedTensor(names, values, lengths=lengths, weights=weights)

    tables = [hotrow.EmbeddingBagConfig(f"t{i}", n, 5, [f"f{i}"]) for i, n in enumerate(ROWS)]
    embedding = hotrow.EmbeddingBagCollection(
        tables, RULES["sgd"], by_hand(90, dense_map=False), device=DEVICE, engine=gpu_rows
    )
    train(embedding, batches(), lambda batch: batch)
    bad = ClickBatch(torch.rand(2, 3), torch.tensor([[1, 2, 3], [0, 9, 1]]), torch.zeros(2))
    try:
        train(embedding, [bad], lambda batch: batch.sparse)
    except (ValueError, IndexError):
        return
    raise AssertionError("an id that no table has was trained")


@part
def captured() -> None:
    """Steps as CUDA graphs, compiled by nobody."""
    embedding = collection("lookahead", "sgd", by_hand(100, dense_map=False))
    assert embedding is not None
    model = DLRM(embedding, 3, (8, 5), (8, 1), generator=torch.Generator().manual_seed(3))
    model = model.to(DEVICE)
    lr = torch.tensor(0.1, device=DEVICE) if CUDA else 0.1
    trainer: hotrow.Trainer[ClickBatch] = hotrow.Trainer(
        model,
        F.binary_cross_entropy_with_logits,
        dense_optimizer=torch.optim.SGD(model.parameters(), lr=lr, fused=CUDA),
        ids=lambda batch: batch.sparse,
        device=DEVICE,
    )
    losses = [record.loss for record in trainer.run(clicks(steps=12 if CUDA else 3))]
    assert all(loss == loss for loss in losses)


# --------------------------------------------------------------------------------------


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--only", nargs="+", choices=_PARTS, default=list(_PARTS), metavar="PART")
    chosen = made.parse_args().only
    warnings.simplefilter("ignore")  # of chunks and the like: batches here are meant not to fit
    torch.manual_seed(0)
    wanted, launched = watch_launches()
    if OWN_ALLOCATIONS:
        hotrow.support.streams.Recorder._comes_again = lambda self, key: False  # type: ignore[method-assign]
    for name in chosen:
        if name == "captured" and OWN_ALLOCATIONS:
            continue
        started = time.perf_counter()
        _PARTS[name]()
        if CUDA:
            torch.cuda.synchronize()
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    missing = sorted(wanted - launched)
    print(f"{len(wanted) - len(missing)} of {len(wanted)} kernels ran on {DEVICE}")
    if missing and chosen == list(_PARTS):
        raise SystemExit(f"never launched: {', '.join(missing)}")


if __name__ == "__main__":
    main()
