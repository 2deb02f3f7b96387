"""Tiny inputs for tests: tables, batches, models, and plain PyTorch twins."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import hotrow
from hotrow.engine.evict import EVICTIONS
from hotrow.engine.gpu.rows import gpu_rows
from hotrow.engine.rules import Hold
from hotrow.engine.stages import FIVE, FUSED, SPLIT
from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.kernels.dense_rules import DenseAdam, DenseSGD
from hotrow.kernels.rules import RowRule

RULES = {
    "sgd": hotrow.SGD(lr=0.1, weight_decay=0.01),
    "adagrad": hotrow.Adagrad(lr=0.1),
    "row-wise": hotrow.RowWiseAdagrad(lr=0.1),
    "adam": hotrow.Adam(lr=0.01),
    "adamw": hotrow.AdamW(lr=0.01, weight_decay=0.1),
}

# Rules that move rows in every step.
MOVING = {
    "dense-adam": DenseAdam(lr=0.01),
    "dense-sgd": DenseSGD(lr=0.05, momentum=0.9, weight_decay=0.01),
}
ALL_RULES: dict[str, RowRule] = {**RULES, **MOVING}


@dataclass(frozen=True)
class Case:
    """Tables and a stream of batches for them."""

    tables: list[hotrow.EmbeddingBagConfig]
    make: Callable[[torch.Generator], Any]  # one batch of ids
    # Each batch's features as {feature: (indices, offsets, weights or None)}, for the oracle.
    weighted: bool = False

    def batches(self, count: int, seed: int = 0) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [self.make(generator) for _ in range(count)]


def skewed(generator: torch.Generator, rows: int, count: int) -> Tensor:
    """Ids with a few hot ones among them, so that batches share rows."""
    return (torch.rand(count, generator=generator) ** 2.5 * rows).long()


def _dense(tables: Sequence[hotrow.EmbeddingBagConfig]) -> Callable[[torch.Generator], Tensor]:
    rows = [table.num_embeddings for table in tables for _ in table.feature_names]

    def make(generator: torch.Generator) -> Tensor:
        size = int(torch.randint(2, 9, (), generator=generator))
        return torch.stack([skewed(generator, n, size) for n in rows], dim=1)

    return make


def _jagged(
    tables: Sequence[hotrow.EmbeddingBagConfig], *, most: int, weighted: bool = False
) -> Callable[[torch.Generator], hotrow.KeyedJaggedTensor]:
    names = [name for table in tables for name in table.feature_names]
    rows = [table.num_embeddings for table in tables for _ in table.feature_names]

    def make(generator: torch.Generator) -> hotrow.KeyedJaggedTensor:
        size = int(torch.randint(2, 7, (), generator=generator))
        lengths = torch.randint(0, most, (len(names), size), generator=generator)
        values = [
            skewed(generator, n, int(each.sum())) for n, each in zip(rows, lengths, strict=True)
        ]
        ids = torch.cat(values)
        weights = torch.rand(ids.numel(), generator=generator) if weighted else None
        return hotrow.KeyedJaggedTensor(names, ids, lengths=lengths.flatten(), weights=weights)

    return make


def _case(
    *tables: hotrow.EmbeddingBagConfig, most: int | None = None, weighted: bool = False
) -> Case:
    listed = list(tables)
    if most is None:
        return Case(listed, _dense(listed))
    return Case(listed, _jagged(listed, most=most, weighted=weighted), weighted)


Table = hotrow.EmbeddingBagConfig
CASES = {
    "one-hot": _case(Table("a", 60, 4, ["f"]), Table("b", 40, 4, ["g"])),
    "multi-hot": _case(Table("a", 80, 5, ["f"]), Table("b", 30, 5, ["g"]), most=6, weighted=True),
    "mean": _case(Table("a", 80, 4, ["f"], pooling="mean"), Table("b", 30, 4, ["g"]), most=6),
    "unpooled": _case(
        Table("a", 70, 3, ["f"], pooling="none", padding_idx=0),
        Table("b", 30, 3, ["g"], pooling="none", padding_idx=2),
        most=5,
    ),
    "shared": _case(Table("a", 60, 4, ["f", "g", "h"]), Table("b", 20, 4, ["i"])),
    "two-widths": _case(Table("a", 60, 4, ["f"]), Table("b", 50, 6, ["g"]), most=5),
}


def readout(out: hotrow.Embedded, scale: float = 1.0) -> Tensor:
    """A loss in which every vector counts differently."""
    total: Any = 0
    for place, name in enumerate(out.keys()):
        vectors = out[name]
        slope = torch.linspace(-1, 1, vectors.shape[1]).to(vectors) + 0.3 * place
        total = total + (vectors * slope).tanh().sum() + vectors.square().sum() * 0.1
    return total * scale


# -- strategies under test ---------------------------------------------------------------


def shuffled(stages: Sequence[Any], cycle: int) -> Sequence[Any]:
    generator = torch.Generator().manual_seed(cycle)
    return [stages[i] for i in torch.randperm(len(stages), generator=generator)]


SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": {"overlapped": False},
    "fused": {"overlapped": True, "stages": FUSED},
    "split": {"overlapped": True, "stages": SPLIT},
    "five": {"overlapped": True, "stages": FIVE},
    "fused-shuffled": {"overlapped": True, "stages": FUSED, "order": shuffled},
    "split-shuffled": {"overlapped": True, "stages": SPLIT, "order": shuffled},
    "five-shuffled": {"overlapped": True, "stages": FIVE, "order": shuffled},
}


def variant(name: str, schedule: str = "", victims: str = "own") -> Strategy:
    strategy = STRATEGIES[name]
    if schedule:
        strategy = replace(strategy, **SCHEDULES[schedule])
    if victims != "own":
        strategy = replace(strategy, eviction=EVICTIONS[victims])
    return strategy


def unique_rows(case: Case, batches: Sequence[Any]) -> list[list[set[int]]]:
    """The ids of each batch, per width group; of several ranks, those that this one owns."""
    scout = hotrow.EmbeddingBagCollection(case.tables, hotrow.SGD(), strategy="all-fast")
    works = [scout.pipeline.prepare(batch).works for batch in batches]
    return [[set(w[g].moving.ids.ids.tolist()) for w in works] for g in range(len(scout.groups))]


def tight_budget(
    case: Case, batches: Sequence[Any], hold: Hold, *, part: float = 1.0, dense_map: bool = True
) -> hotrow.Budget:
    """As many slots as the hold needs at its worst, or a part of the largest batch."""
    shares = []
    for ids in unique_rows(case, batches):
        need = max(
            len(set().union(*ids[max(0, i - hold.past) : i + 1 + hold.future]))
            for i in range(len(ids))
        )
        if part < 1:
            need = int(part * max(map(len, ids)))
        shares.append(hotrow.Share(max(1, need), buffer_rows=64, dense_map=dense_map))
    return hotrow.Budget(tuple(shares), window_bytes=1 << 20)


def drifting_batches(period: int) -> list[Tensor]:
    """Batches for "one-hot" whose hot row changes: row 0 of both tables, later row 1.

    The last two batches of the second period use row 0 again. Pins that are learned once per
    period are released after them, while they are in flight.
    """
    batches = []
    for place in range(2 * period + 6):
        hot = torch.tensor([int(place >= period)] + [0] * (2 * period - 2 <= place < 2 * period))
        other = torch.arange(2 * place, 2 * place + 2)  # they fill the slots
        rows = torch.cat([hot, 2 + other % 58]), torch.cat([hot, 2 + other % 38])
        batches.append(torch.stack(rows, dim=1))
    return batches


def budget_with_pins(batches: Sequence[Tensor], hold: Hold, pins: int) -> hotrow.Budget:
    """As many slots as the hold may need, and some for pins."""
    slots = hold.batches * max(map(torch.numel, batches)) + pins
    share = hotrow.Share(slots, buffer_rows=64, dense_map=True)
    return hotrow.Budget((share,), window_bytes=1 << 20)


def budget_of(
    case: Case, batches: Sequence[Any], part: float, *, dense: bool = True
) -> hotrow.Budget:
    """Slots for the largest batch, an eighth more of it, and a part of all rows to be pinned."""
    budget = tight_budget(case, batches, variant("static").hold, dense_map=dense)
    widths: dict[int, int] = {}
    for table in case.tables:
        widths[table.embedding_dim] = widths.get(table.embedding_dim, 0) + table.num_embeddings
    shares = [
        replace(share, slots=2 * share.slots + 2 + int(part * rows))
        for share, rows in zip(budget.shares, widths.values(), strict=True)
    ]
    return replace(budget, shares=tuple(shares))


# -- running ---------------------------------------------------------------------------


@dataclass
class Outcome:
    losses: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def same_bits(self, other: Outcome) -> bool:
        """Every loss, weight and state value equal to the bit."""
        return (
            len(self.losses) == len(other.losses)
            and all(map(torch.equal, self.losses, other.losses))
            and self.weights.keys() == other.weights.keys()
            and all(torch.equal(self.weights[k], other.weights[k]) for k in self.weights)
            and self.state.keys() == other.state.keys()
            and all(torch.equal(self.state[k], other.state[k]) for k in self.state)
        )


def outcome(embedding: hotrow.EmbeddingBagCollection, losses: list[Tensor]) -> Outcome:
    embedding.check()
    state = {
        f"{table}.{name}": torch.as_tensor(value)
        for table, pieces in embedding.optimizer.state_dict()["state"].items()
        for name, value in pieces.items()
    }
    return Outcome(losses, dict(embedding.state_dict()), state)


def learn(
    embedding: hotrow.EmbeddingBagCollection, batches: Sequence[Any], **options: Any
) -> list[Tensor]:
    """Train by the plainest loop there is."""
    losses = []
    for batch in hotrow.ahead(batches, embedding, **options):
        loss = readout(embedding(batch))
        loss.backward()
        losses.append(loss.detach())
    return losses


def train(
    embedding: hotrow.EmbeddingBagCollection, batches: Sequence[Any], **options: Any
) -> Outcome:
    return outcome(embedding, learn(embedding, batches, **options))


def build(
    case: Case, rule: str = "sgd", strategy: str | Strategy = "all-fast", **options: Any
) -> hotrow.EmbeddingBagCollection:
    return hotrow.EmbeddingBagCollection(
        case.tables, ALL_RULES[rule], strategy=strategy, seed=3, **options
    )


def all_fast(case: Case, rule: str, batches: Sequence[Any], **options: Any) -> Outcome:
    return train(build(case, rule, **options), batches)


# By name: strategy, slots of each width, and whether the GPU's engine keeps the rows.
ENGINES: dict[str, tuple[str, int, bool]] = {
    "all-fast": ("all-fast", 0, False),
    "lookahead": ("lookahead", 60, False),
    "scratchpipe": ("scratchpipe", 90, False),
    "chunked": ("lookahead", 4, False),
    "hybrid": ("hybrid", 0, False),
    "static-hybrid": ("static-hybrid", 12, False),
    "device": ("all-fast", 0, True),
    "device-lookahead": ("lookahead", 60, True),
    "device-chunked": ("lookahead", 4, True),
}


def build_on(
    engine: str, tables: Sequence[Any], rule: Any, **options: Any
) -> hotrow.EmbeddingBagCollection:
    """Build a collection on one of ENGINES; where there is a GPU, those that can use it do."""
    strategy, slots, by_gpu = ENGINES[engine]
    options = {"seed": 3, "strategy": strategy, "engine": gpu_rows if by_gpu else None, **options}
    if slots:
        shares = [hotrow.Share(slots, 32, True) for _ in {table.embedding_dim for table in tables}]
        options.setdefault("budget", hotrow.Budget(tuple(shares), 1 << 14))
    if torch.cuda.is_available() and (by_gpu or "hybrid" in engine):
        options["device"] = "cuda"
    return hotrow.EmbeddingBagCollection(tables, rule, **options)


class Scores(nn.Module):
    """Scores samples by the sum of their vectors."""

    def __init__(self, embedding: hotrow.EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, batch: Tensor) -> Tensor:
        scores: Tensor = self.embedding(batch).values().sum(1)
        return scores


def score_trainer(embedding: hotrow.EmbeddingBagCollection, **options: Any) -> hotrow.Trainer[Any]:
    return hotrow.Trainer(
        Scores(embedding), lambda found, wanted: (found - wanted).square(), dense_optimizer=None,
        ids=lambda batch: batch, labels=lambda batch: batch[:, 0].float(),
        device=embedding.device, **options,
    )  # fmt: skip


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """For "one-hot": made in a loader's worker, so that it needs nothing from the parent."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(place)
        return torch.randint(40, (2,), generator=generator), torch.tensor(float(place % 2))


def is_left_out_of_forks(address: int) -> bool:
    """Whether the mapping of an address is not copied to children: "do not copy area on fork"."""
    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and line.startswith("VmFlags:"):
            flags = line
    return " dc" in flags


def pairwise(axes: dict[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Few combinations in which any two values of two axes meet, greedily."""
    names = list(axes)
    open_ = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in axes[a]
        for y in axes[b]
    }
    generator = torch.Generator().manual_seed(0)

    def pairs(choice: dict[str, str]) -> set[Any]:
        return {
            ((a, choice[a]), (b, choice[b])) for a, b in itertools.combinations(names, 2)
        } & open_

    while open_:
        tries = [
            {n: axes[n][int(torch.randint(len(axes[n]), (), generator=generator))] for n in names}
            for _ in range(60)
        ]
        forced = next(iter(sorted(open_)))
        tries = [{**each, **dict(forced)} for each in tries]
        best = max(tries, key=lambda each: len(pairs(each)))
        open_ -= pairs(best)
        yield best


# -- plain PyTorch twin ----------------------------------------------------------------


class PlainTables(nn.Module):
    """The same tables as whole tensors, looked up by torch's own functions."""

    def __init__(self, embedding: hotrow.EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = list(embedding.tables)
        self.weight = nn.ParameterDict(
            {
                key.split(".")[1]: nn.Parameter(value.clone())
                for key, value in embedding.state_dict().items()
            }
        )

    def forward(self, features: Any) -> hotrow.Embedded:
        columns = tuple(name for table in self.tables for name in table.feature_names)
        if isinstance(features, Tensor):
            size = features.shape[0]
            parts = {n: (features[:, i], torch.arange(size + 1)) for i, n in enumerate(columns)}
            weights: dict[str, Any] = dict.fromkeys(columns)
        else:
            offsets, values = features.offsets(), features.values()
            size = (offsets.numel() - 1) // len(columns)
            parts, weights = {}, {}
            for i, name in enumerate(features.keys()):
                mine = offsets[i * size : (i + 1) * size + 1]
                parts[name] = (values[mine[0] : mine[-1]], mine - mine[0])
                every = features.weights_or_none()
                weights[name] = None if every is None else every[mine[0] : mine[-1]]
        vectors = {}
        for table in self.tables:
            for name in table.feature_names:
                ids, offsets = parts[name]
                vectors[name] = self._lookup(table, ids, offsets, weights[name])
        batch = hotrow.inputs.batch.Batch(torch.empty(0), None, columns, size)
        return hotrow.Embedded(columns, vectors, batch, None)

    def _lookup(self, table: Any, ids: Tensor, offsets: Tensor, weights: Any) -> Tensor:
        weight, padding = self.weight[table.name], table.padding_idx
        if table.pooling == "none":
            return functional.embedding(ids, weight, padding_idx=padding, sparse=True)
        return functional.embedding_bag(
            ids, weight, offsets, mode=table.pooling, per_sample_weights=weights,
            include_last_offset=True, padding_idx=padding, sparse=True,
        )  # fmt: skip


def update_rows(
    rule: Any,
    weight: Tensor,
    state: Sequence[Tensor],
    rows: Tensor,
    grad: Tensor,
    *,
    rate: float,
    step: int,
) -> None:
    """A rule's update of some rows in plain torch."""
    if isinstance(rule, hotrow.SGD):
        weight[rows] -= rate * (grad + rule.weight_decay * weight[rows])
    elif isinstance(rule, hotrow.Adagrad):
        square = grad.square()
        state[0][rows] += square.mean(1, keepdim=True) if rule.row_wise else square
        weight[rows] -= rate * grad / (state[0][rows].sqrt() + rule.eps)
    else:
        assert isinstance(rule, hotrow.Adam)
        (mean, square), (beta1, beta2) = state, rule.betas
        first, second = 1 - beta1**step, 1 - beta2**step
        mean[rows] = beta1 * mean[rows] + (1 - beta1) * grad
        square[rows] = beta2 * square[rows] + (1 - beta2) * grad.square()
        size = (square[rows].sqrt() + rule.eps) / math.sqrt(second)  # SparseAdam corrects last
        if isinstance(rule, hotrow.AdamW):
            weight[rows] *= 1 - rate * rule.weight_decay
            size = (square[rows] / second).sqrt() + rule.eps
        weight[rows] -= rate * mean[rows] / first / size


class PlainRows:
    """Reference updates of the rows with gradients; torch.optim where it can."""

    def __init__(self, tables: PlainTables, rule: Any) -> None:
        self.tables, self.rule, self.step_count = tables, rule, 0
        params = list(tables.weight.values())
        self.torch: Any = None
        if type(rule) is hotrow.SGD and rule.weight_decay == 0:
            self.torch = torch.optim.SGD(params, lr=rule.lr)
        elif type(rule) is hotrow.Adagrad:
            self.torch = torch.optim.Adagrad(params, lr=rule.lr)
        elif type(rule) is hotrow.Adam:
            self.torch = torch.optim.SparseAdam(params, lr=rule.lr)
        self.state = {
            name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in tables.weight.items()
        }

    def step(self) -> None:
        self.step_count += 1
        for name, weight in self.tables.weight.items():
            if self.torch is None:
                grad = weight.grad.coalesce()
                rows, values = grad.indices()[0], grad.values()
                step = {"rate": self.rule.lr, "step": self.step_count}
                with torch.no_grad():
                    update_rows(self.rule, weight, self.state[name], rows, values, **step)
                weight.grad = None
        if self.torch is not None:
            self.torch.step()
            self.torch.zero_grad()


def train_plain(embedding: hotrow.EmbeddingBagCollection, batches: Sequence[Any]) -> PlainTables:
    """Train a plain twin from the collection's present weights."""
    plain = PlainTables(embedding)
    rows = PlainRows(plain, embedding.optimizer.rule)
    for batch in batches:
        readout(plain(batch)).backward()
        rows.step()
    return plain


def assert_close(embedding: hotrow.EmbeddingBagCollection, plain: PlainTables) -> None:
    for key, weight in embedding.state_dict().items():
        twin = plain.weight[key.split(".")[1]].data
        torch.testing.assert_close(weight, twin, rtol=2e-4, atol=2e-5)


class Late:
    """A worker that does nothing until a caller waits for it: later than any thread could be."""

    def __init__(self) -> None:
        self.queue: deque[LateJob] = deque()
        self.done: list[str] = []

    def ask(self, job: Callable[..., None], *args: Any) -> LateJob:
        self.queue.append(LateJob(self, job, args))
        return self.queue[-1]


class LateJob:
    def __init__(
        self, worker: Late, job: Callable[..., None], args: Any, *, is_done: bool = False
    ) -> None:
        self.worker, self.job, self.args, self.is_done = worker, job, args, is_done

    def result(self) -> None:
        while not self.is_done:
            first = self.worker.queue.popleft()
            first.job(*first.args)
            first.is_done = True
            self.worker.done.append(first.job.__name__)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Inside, an operation that waits for a GPU is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not find all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


EXACT = [
    name for name, each in STRATEGIES.items() if each.contract == "exact" and not each.everything
]
COMBINATIONS = list(
    pairwise(
        {
            "strategy": [*EXACT, "lookahead with profile", "static with profile"],
            "schedule": list(SCHEDULES),
            "victims": ["own", "random", "most-recent"],
            "budget": ["tight", "chunked", "roomy"],
            "rule": list(ALL_RULES),
            "case": list(CASES),
            "map": ["dense", "hash"],
        }
    )
)


def collection_of(
    choice: dict[str, str], batches: Sequence[Any], **options: Any
) -> hotrow.EmbeddingBagCollection:
    """The collection of one combination; "roomy" has room for pins."""
    case, (name, *profiled) = CASES[choice["case"]], choice["strategy"].split()
    strategy = variant(name, choice["schedule"], choice["victims"])
    part = 0.6 if choice["budget"] == "chunked" else 1.0
    is_dense = choice["map"] == "dense"
    budget = tight_budget(case, batches, strategy.hold, part=part, dense_map=is_dense)
    if choice["budget"] == "roomy":
        shares = [replace(share, slots=3 * share.slots) for share in budget.shares]
        budget = replace(budget, shares=tuple(shares))
    if profiled:
        options["profile"] = {t.name: torch.arange(t.num_embeddings, 0, -1) for t in case.tables}
    torch.manual_seed(0)
    return build(case, choice["rule"], strategy, budget=budget, **options)


def check_chunks(choice: dict[str, str], embedding: hotrow.EmbeddingBagCollection) -> None:
    """Batches passed in chunks where they had to, and only there; pins may take their room."""
    chunked = embedding.traffic().chunked_batches
    if choice["budget"] == "chunked":
        assert chunked > 0
    if choice["budget"] == "tight":
        assert chunked == 0 or embedding.strategy.pinned_part
