"""What ranks send each other for a run's batches, and what owners plan: without processes or rows.

`draw_exchange` draws the batches of all ranks: batch number t R + r of the trace is that of rank r
in step t. Bytes are counted as ranks send them, so they equal those of real runs.
`rank_popularity.py` computes the same from how popular rows are, for many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.distributed.owners import SHARDS, GroupOwners
from hotrow.distributed.replicas import choose_replicas
from hotrow.engine.strategy import Strategy
from hotrow.inputs.tables import EmbeddingBagConfig, group_by_width
from hotrow.run.config import RunConfig
from hotrow.sizing.simulator import Simulated, Simulator
from hotrow.study.lookups import OfRun

_MOST_INT32 = 2**31 - 1  # rows whose ids cross as four bytes

Rows = NDArray[np.int64]
Choices = Sequence[tuple[Strategy, int]]


@dataclass(frozen=True)
class Traffic:
    """What an average rank sends to all others in a step, in bytes, and how owners are loaded."""

    id_bytes: float
    mark_bytes: float  # which rows come early: a bit for each id
    early_bytes: float  # vectors that travel while the batch before trains
    late_bytes: float  # vectors that the forward pass waits for
    grad_bytes: float
    balance: float  # rows asked of the most loaded owner, over the mean
    replicated_rows: int = 0

    @property
    def sent_bytes(self) -> float:
        rows = self.early_bytes + self.late_bytes
        return self.id_bytes + self.mark_bytes + rows + self.grad_bytes


@dataclass(frozen=True)
class Exchanged:
    """What ranks exchange in an average step."""

    ranks: int
    lookups: float  # of a rank
    unique_rows: float
    asked_rows: float  # of an owner by all ranks, each row once for each rank
    plain: Traffic
    replicated: Traffic | None  # with rows that every rank has
    planned: Sequence[Sequence[Simulated]]  # of each choice, for each owner that was planned
    is_drawn: bool  # the batches of all ranks were drawn


class RankTables:
    """The tables of a run as ranks share them."""

    def __init__(self, config: RunConfig, trace: OfRun) -> None:
        width = config.model.row_width
        tables = [EmbeddingBagConfig(name, x, width, [name]) for name, x in trace.rows.items()]
        (self.layout,) = group_by_width(tables)
        self.trace, self.row_bytes, self.vector_bytes = trace, config.row_bytes, 4 * width
        self.id_bytes = 4 if self.layout.num_rows <= _MOST_INT32 else 8
        self.bases = np.array(self.layout.bases)

    def owners(self, ranks: int) -> GroupOwners:
        return GroupOwners(self.layout, ranks)

    @staticmethod
    def owned_rows(owners: GroupOwners) -> Rows:
        """Return how many rows each rank owns; of each table at least one."""
        counts = [np.maximum(table.counts, 1) for table in owners.tables]
        rows: Rows = np.sum(counts, axis=0)
        return rows

    def replicas(self, total: int) -> Tensor:
        """Return the ids of rows that `total` bytes replicate: the smallest tables, then the rows
        that are looked up most, as with a profile of the data."""
        profile = self.trace.profile(max(1, total // self.row_bytes))
        (ids,) = choose_replicas([self.layout], [self.row_bytes], total, profile)
        return ids


def check_ranks(ranks: Sequence[int]) -> None:
    for count in ranks:
        if not 1 <= count <= SHARDS:
            raise ValueError(
                f"--ranks: {count:,} is not between 1 and {SHARDS:,}, the shards that ranks own; "
                "write numbers of ranks such as 8,64,1024"
            )


def spread(owners: int, ranks: int) -> list[int]:
    """Return so many places among ranks, evenly spread."""
    count = min(owners, ranks)
    return [int((k + 0.5) * ranks / count) for k in range(count)]


def draw_exchange(
    tables: RankTables,
    ranks: int,
    *,
    batches: int,
    warm_up: int,
    choices: Choices = (),
    ahead: int = 0,
    planned: int = 2,
    replicas: Tensor | None = None,
    on_batch: Callable[[], None] = lambda: None,
) -> Exchanged:
    """Draw the batches of all ranks for `warm_up` steps, and for `batches` that are counted.

    `planned` owners plan `choices`; for these, `ahead` batches more are drawn. `on_batch` is called
    for each step of each of them.
    """
    owners = tables.owners(ranks)
    plain = _Tally(tables, ranks, None)
    tallies = [plain]
    if replicas is not None:
        tallies.append(_Tally(tables, ranks, replicas.numpy()))
    rows_of = tables.owned_rows(owners)
    chosen = spread(planned, ranks) if choices else []
    simulators = {owner: Simulator(int(rows_of[owner]), choices) for owner in chosen}
    is_read = np.zeros(tables.layout.num_rows, dtype=bool)  # by some rank, in the step before
    before: list[Rows] = []
    lookups = 0
    steps = _steps(tables.trace, ranks, warm_up + batches + (ahead if choices else 0))
    for step, drawn in enumerate(steps):
        counts = warm_up <= step < warm_up + batches
        now, asked = [], [list[Rows]() for _ in range(ranks)]
        for rank, ids in enumerate(drawn):
            unique = ids.unique()
            found, numbers = (x.numpy() for x in owners.find(unique))
            now.append(unique.numpy())
            for owner in simulators:
                asked[owner].append(numbers[found == owner])
            if counts:
                lookups += len(ids)
                # Before the first batch there is none beside which its rows could travel.
                late = is_read[now[rank]] if step else np.ones(len(unique), dtype=bool)
                for tally in tallies:
                    tally.add(rank, now[rank], found, late)
        for owner, simulator in simulators.items():
            simulator.feed(torch.from_numpy(np.concatenate(asked[owner])), counts=counts)
        for rows in before:
            is_read[rows] = False
        for rows in now:
            is_read[rows] = True
        before = now
        for tally in tallies:
            tally.end_step()
        for _ in simulators:
            on_batch()
    results = [simulator.results() for simulator in simulators.values()]
    return Exchanged(
        ranks=ranks,
        lookups=lookups / ranks / batches,
        unique_rows=plain.unique / ranks / batches,
        asked_rows=plain.unique / ranks / batches,
        plain=plain.traffic(),
        replicated=tallies[1].traffic() if replicas is not None else None,
        planned=list(zip(*results, strict=True)),
        is_drawn=True,
    )


def _steps(trace: OfRun, ranks: int, steps: int) -> Iterator[list[Tensor]]:
    """Yield the ids of all ranks, step by step."""
    drawn: list[Tensor] = []
    for batch in trace.batches(steps * ranks):
        drawn.append(batch.rows)
        if len(drawn) == ranks:
            yield drawn
            drawn = []


class _Tally:
    """Counts what crosses between ranks."""

    def __init__(self, tables: RankTables, ranks: int, replicas: Rows | None) -> None:
        self._tables, self._ranks, self._replicas = tables, ranks, replicas
        self.unique = 0
        self._away = self._early = self._marks = self._copied = 0
        self._asked = np.zeros(ranks)
        self._balances: list[float] = []

    def add(self, rank: int, unique: Rows, owner: Rows, late: NDArray[np.bool_]) -> None:
        """Count the different rows that a rank looks up: their owners, and which come late."""
        self.unique += len(unique)
        if self._replicas is not None:
            others = ~np.isin(unique, self._replicas)
            self._copied += len(unique) - int(others.sum())
            owner, late = owner[others], late[others]
        counts = np.bincount(owner, minlength=self._ranks)
        self._asked += counts
        is_away = owner != rank
        self._away += int(is_away.sum())
        self._early += int((is_away & ~late).sum())
        marks = -(-counts // 8)  # bytes between two ranks
        self._marks += int(marks.sum() - marks[rank])

    def end_step(self) -> None:
        if self._asked.any():
            self._balances.append(float(self._asked.max() / self._asked.mean()))
            self._asked[:] = 0

    def traffic(self) -> Traffic:
        steps = max(1, len(self._balances)) * self._ranks
        copies = self._copied * (self._ranks - 1)  # each goes to all others
        vector = self._tables.vector_bytes
        return Traffic(
            id_bytes=self._tables.id_bytes * self._away / steps,
            mark_bytes=self._marks / steps,
            early_bytes=vector * self._early / steps,
            late_bytes=vector * (self._away - self._early) / steps,
            # With the ids of replicated rows: those of others are known to their owners.
            grad_bytes=(vector * (self._away + copies) + self._tables.id_bytes * copies) / steps,
            balance=float(np.mean(self._balances)) if self._balances else 1.0,
            replicated_rows=0 if self._replicas is None else len(self._replicas),
        )
