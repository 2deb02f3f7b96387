"""Small tables, and batches that are cut into one part per rank; for tests of several ranks.

`run_cases` trains each case with all-fast and with its strategy on all ranks, and on one process
with whole batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import hotrow
from builders import ALL_RULES, Case, readout, tight_budget, variant
from hotrow.distributed import owners

Config = hotrow.EmbeddingBagConfig
TABLES = {
    "bags": [
        Config("a", 400, 4, ["f", "h"], padding_idx=3),
        Config("b", 300, 4, ["g"], pooling="mean", padding_idx=0),
        Config("c", 350, 6, ["g", "k"], pooling="mean"),
    ],
    "weighted": [Config("a", 400, 5, ["f", "h"]), Config("b", 300, 3, ["g"], padding_idx=1)],
    "unpooled": [
        Config("a", 400, 3, ["f"], pooling="none", padding_idx=0),
        Config("b", 300, 3, ["g", "h"], pooling="none"),
    ],
    "mixed": [Config("a", 500, 4, ["f"], pooling="none"), Config("b", 300, 4, ["g"])],
}
AXES: dict[str, Sequence[str]] = {
    "strategy": ["uncached", "static", "lru", "scratchpipe", "lookahead"],
    "victims": ["own", "random", "most-recent"],
    "rule": list(ALL_RULES),
    "tables": list(TABLES),
    "form": ["dense", "tuple", "kjt", "int32"],
    "room": ["tight", "chunked"],
    "ids": ["uneven", "one owner", "same", "one rank without", "hot", "few"],
    "loader": ["direct", "ahead", "depth 0", "depth 5"],
    "replicate": ["nothing", "hot rows", "one table"],
}
STEPS = 9  # more than any strategy holds at once
MOST = 48  # samples of a batch, of all ranks
# Up to rounding: of weights of about 0.1 to 1, after few steps.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@contextmanager
def few_shards() -> Iterator[None]:
    """Inside, small tables have several blocks of shards, and the last one is not full."""
    few: dict[str, Any] = {"SHARDS": 16, "_BITS": 4}
    few["_REVERSED"] = np.array([int(f"{k:04b}"[::-1], 2) for k in range(16)])
    with ExitStack() as patches:
        for name, value in few.items():
            patches.enter_context(patch.object(owners, name, value))
        yield


@dataclass(frozen=True)
class Batch:
    """Samples as plain facts, by feature: lengths of bags, ids, and weights if there are any."""

    lengths: dict[str, Tensor]  # [samples]
    ids: dict[str, Tensor]
    weights: dict[str, Tensor] | None

    def part(self, first: int, last: int) -> Batch:
        def cut(values: dict[str, Tensor]) -> dict[str, Tensor]:
            found = {}
            for name, each in values.items():
                edges = torch.nn.functional.pad(self.lengths[name].cumsum(0), (1, 0))
                found[name] = each[edges[first] : edges[last]]
            return found

        lengths = {name: each[first:last] for name, each in self.lengths.items()}
        return Batch(lengths, cut(self.ids), None if self.weights is None else cut(self.weights))

    def features(self, form: str) -> Any:
        """What a collection is called with; weights learn."""
        names = list(self.ids)
        if form == "dense":
            return torch.stack([self.ids[name] for name in names], 1)
        ids = torch.cat([self.ids[name] for name in names])
        lengths = torch.cat([self.lengths[name] for name in names])
        weights = None
        if self.weights is not None:
            weights = torch.cat([self.weights[name] for name in names]).requires_grad_()
        if form == "tuple":
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            return (ids, offsets) if weights is None else (ids, offsets, weights)
        ids = ids.int() if form == "int32" else ids
        return hotrow.KeyedJaggedTensor(names, ids, lengths=lengths, weights=weights)


def form_of(choice: dict[str, str]) -> str:
    """Weights need a jagged form, and so do features of several tables without pooling."""
    return "kjt" if choice["tables"] == "weighted" and choice["form"] == "dense" else choice["form"]


@cache
def _rows_of_first(name: str, rows: int, world: int) -> Tensor:
    owner, _ = owners.TableOwners(name, rows, world).find(torch.arange(rows).numpy())
    return torch.from_numpy((owner == 0).nonzero()[0])


def whole_batch(choice: dict[str, str], number: int, world: int) -> Batch:
    """The samples of all ranks."""
    draw = torch.Generator().manual_seed(1000 + number)
    tables = TABLES[choice["tables"]]
    size = 6 if choice["ids"] == "few" else MOST - 8 * (number % 3)
    size -= size % world
    smallest: dict[str, Any] = {}
    for table in tables:
        for name in table.feature_names:
            if name not in smallest or table.num_embeddings < smallest[name].num_embeddings:
                smallest[name] = table
    lengths, ids = {}, {}
    for name, table in smallest.items():
        rows = table.num_embeddings
        length = torch.randint(0, 5, (size,), generator=draw)
        length = torch.ones_like(length) if form_of(choice) == "dense" else length
        count = int(length.sum())
        drawn = (torch.rand(count, generator=draw) ** 2 * rows).long()
        if choice["ids"] == "one owner":
            mine = _rows_of_first(table.name, rows, world)
            drawn = mine[drawn % len(mine)]
        elif choice["ids"] == "hot":  # many gradients of one row
            is_hot = torch.rand(count, generator=draw) < 0.6
            drawn = drawn.masked_fill(is_hot, 5)
        lengths[name], ids[name] = length, drawn
    weights = None
    if choice["tables"] == "weighted":
        weights = {k: torch.rand(v.shape, generator=draw) + 0.1 for k, v in ids.items()}
    return Batch(lengths, ids, weights)


def parts(choice: dict[str, str], number: int, world: int) -> list[Batch]:
    """The part of each rank, side by side in the whole batch."""
    whole = whole_batch(choice, number, world)
    size = len(next(iter(whole.lengths.values())))
    if choice["ids"] == "same":  # the first part, which all ranks have
        return [whole.part(0, size // world)] * world
    edges = [size * rank // world for rank in range(world + 1)]
    if choice["ids"] in ("uneven", "hot") and world > 1:
        # Other sizes in every batch; sometimes the first rank has all samples, or none.
        inner = torch.randint(0, size + 1, (world - 1,), generator=_seeded(number))
        inner = inner * 0 + (number % 2) * size if number % 4 == 3 else inner
        edges = [0, *sorted(inner.tolist()), size]
    elif choice["ids"] == "one rank without" and world > 1:
        edges = [edges[rank + (rank == 1)] for rank in range(world)] + [size]
        edges[2] = edges[1]
    return [whole.part(first, last) for first, last in pairwise(edges)]


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def joined(batches: Sequence[Batch]) -> Batch:
    """One batch of all samples."""
    first = batches[0]

    def cat(values: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([each[name] for each in values]) for name in values[0]}

    weights = None
    if first.weights is not None:
        weights = cat([each.weights or {} for each in batches])
    return Batch(cat([x.lengths for x in batches]), cat([x.ids for x in batches]), weights)


def tables_of(embedding: Any) -> dict[str, Tensor]:
    """All rows with their state, and the steps of each table."""
    embedding.check()
    found = {
        table.name: torch.cat([chunk for _, chunk in embedding.rows(table.name)])
        for table in embedding.tables
    }
    return {**found, "steps": torch.tensor(embedding.optimizer.steps)}


def train(embedding: Any, batches: Sequence[Any], loader: str, scale: float = 1.0) -> list[Tensor]:
    """Train by a plain loop; return losses, and gradients of weights."""
    found = []
    depth = {"ahead": None, "depth 0": 0, "depth 5": 5}
    stream: Any = batches
    if loader != "direct":
        stream = hotrow.ahead(iter(batches), embedding, depth=depth[loader])
    for features in stream:
        loss = readout(embedding(features), scale)
        weights = None
        if isinstance(features, tuple):
            weights = features[2] if len(features) == 3 else None
        elif not isinstance(features, Tensor):
            weights = features.weights_or_none()
        if torch.is_tensor(loss) and loss.requires_grad:
            loss.backward()
        found.append(torch.as_tensor(loss).detach())
        if weights is not None:
            found.append(weights.grad.clone())
    return found


def build(choice: dict[str, str], strategy: Any = "all-fast", **options: Any) -> Any:
    return hotrow.EmbeddingBagCollection(
        TABLES[choice["tables"]], ALL_RULES[choice["rule"]], strategy=strategy, seed=3, **options
    )


def replicas_of(choice: dict[str, str], world: int) -> dict[str, Any]:
    """Options that keep some rows on every rank, which changes no bit."""
    tables, rule = TABLES[choice["tables"]], ALL_RULES[choice["rule"]]
    if choice["replicate"] == "nothing" or world == 1:
        return {}
    if choice["replicate"] == "hot rows":
        profile = {x.name: torch.arange(x.num_embeddings, 0, -1) for x in tables}
        return {"replicate": 1500, "profile": profile}
    widths = [(x.num_embeddings, x.embedding_dim) for x in tables]
    return {"replicate": min(4 * rows * (dim + rule.state_width(dim)) for rows, dim in widths)}


def run_cases(rank: int, world: int, choices: Sequence[dict[str, str]]) -> list[str]:
    """What went wrong on this rank."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    found = []
    for choice in choices:
        try:
            with few_shards():
                said = _run_case(rank, world, choice, alone)
        except BaseException as error:
            error.add_note(f"rank {rank} of {world}: {choice}")
            raise
        found += [] if said is None else [f"{choice}: {said}"]
    return found


def _run_case(rank: int, world: int, choice: dict[str, str], alone: Any) -> str | None:
    by_step = [parts(choice, number, world) for number in range(STEPS)]
    form = form_of(choice)
    mine = [step[rank] for step in by_step]
    fast = build(choice)
    losses = train(fast, [part.features(form) for part in mine], "direct")
    expected = tables_of(fast)
    strategy = variant(choice["strategy"], victims=choice["victims"])
    case = Case(TABLES[choice["tables"]], lambda generator: None)
    room = 0.5 if choice["room"] == "chunked" else 1.0
    budget = tight_budget(case, [x.features(form) for x in mine], strategy.hold, part=room)
    # A bag must fit, and a rank that owns no row of a batch has room for one nevertheless.
    budget = replace(budget, shares=tuple(replace(x, slots=max(x.slots, 2)) for x in budget.shares))
    tight = build(choice, strategy, budget=budget, **replicas_of(choice, world))
    same = train(tight, [part.features(form) for part in mine], choice["loader"])
    outcome = tables_of(tight)
    for one, other in zip(same, losses, strict=True):
        if not torch.equal(one, other):
            return f"a loss or gradient differs from all-fast: {one} and {other}"
    for name, rows in outcome.items():
        if not torch.equal(rows, expected[name]):
            return f"{name} differs from all-fast"
    counts = torch.tensor([tight.traffic().evicted_rows, tight.traffic().chunked_batches])
    dist.all_reduce(counts)
    if not counts[0]:
        return "no row was evicted"
    is_chunked = choice["room"] == "chunked" and choice["replicate"] == "nothing"
    if is_chunked and choice["ids"] != "few" and not counts[1]:
        return "no batch passed in chunks"
    return _of_one_process(choice, by_step, expected, losses, alone) if rank == 0 else None


def _of_one_process(
    choice: dict[str, str],
    by_step: list[list[Batch]],
    expected: dict[str, Tensor],
    losses: list[Tensor],
    alone: Any,
) -> str | None:
    """Compare with whole batches on one process, whose loss is divided by the number of ranks."""
    world = len(by_step[0])
    whole = build(choice, process_group=alone)
    features = [joined(step).features(form_of(choice)) for step in by_step]
    train(whole, features, "direct", 1 / world)
    for name, rows in tables_of(whole).items():
        if not torch.allclose(rows.float(), expected[name].float(), **TOLERANCE):
            most = float((rows.float() - expected[name].float()).abs().max())
            return f"{name} differs from one process by {most:.3g}"
    return None
