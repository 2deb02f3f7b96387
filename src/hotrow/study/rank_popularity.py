"""What many ranks exchange, computed from how popular rows are instead of drawn.

A batch looks up row i with probability q_i = 1 - (1 - p_i)^n, where n lookups of its table are
drawn with p_i each. Expected bytes and loads of owners are sums over rows: the hottest of each
table one by one with their real owners, the others in bins of equal popularity.

Owners that are planned get batches drawn from the same law: a hot row is in a step with the
probability that some rank looks it up, and of the other rows, of which an owner has every R-th,
as many are drawn as all ranks are expected to look up there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.distributed.owners import GroupOwners
from hotrow.sizing.simulator import Simulator
from hotrow.study.lookups import Popularity
from hotrow.study.rank_traffic import Choices, Exchanged, RankTables, Rows, Traffic, spread

_HEAD = 1 << 18  # the hottest rows of a table, which are looked at one by one
_BINS = 2048  # of the others
_DRAWS = 32  # steps in which owners' loads scatter around what is expected
_MANY = 64  # rows between two ranks: their marks are rounded up by 7/16 of a byte on average

Amounts = NDArray[np.float64]


@dataclass(frozen=True)
class _Table:
    """Rows of a table: the hottest, and bins of the others."""

    popularity: Popularity
    hot: Rows  # [H] ids among all tables, hottest first
    hot_read: Amounts  # [H] probability that a batch looks a row up
    bin_rows: Amounts  # [B] rows that are not hot
    bin_read: Amounts  # [B] the probability for each of them
    tail_share: float  # of the table's lookups, those that read them

    @property
    def tail_rows(self) -> int:
        return self.popularity.law.num_ranks - len(self.hot)

    @property
    def read(self) -> Amounts:
        return np.concatenate([self.hot_read, self.bin_read])

    @property
    def rows(self) -> Amounts:
        return np.concatenate([np.ones(len(self.hot)), self.bin_rows])


def _table(popularity: Popularity, base: int, most: int) -> _Table:
    law, lookups = popularity.law, popularity.lookups
    head = min(law.num_ranks, most)
    hot = popularity.hottest(head).numpy() + base
    ends = np.unique(np.geomspace(head, law.num_ranks, _BINS).astype(np.int64))
    rows = np.diff(ends).astype(np.float64)
    shares = np.diff([law.share(int(end)) for end in ends])
    each = np.divide(shares, rows, out=np.zeros(len(rows)), where=rows > 0)
    return _Table(
        popularity,
        hot,
        _read(law.probabilities(head), lookups),
        rows,
        _read(each, lookups),
        float(shares.sum()),
    )


def _read(chances: Amounts, lookups: float) -> Amounts:
    """Return the probabilities that a batch looks rows up, from those of one lookup."""
    with np.errstate(divide="ignore"):  # a table of one row
        found: Amounts = -np.expm1(lookups * np.log1p(-np.minimum(chances, 1.0)))
    return found


class Popularities:
    """The rows of a run by their popularity, for any number of ranks."""

    def __init__(self, tables: RankTables, *, seed: int = 0, replicas: int = 0) -> None:
        """`replicas`: how many rows may be replicated."""
        self.tables, self._seed = tables, seed
        given = tables.trace.popularities()
        self._tables = [
            _table(x, base, max(_HEAD, replicas))
            for x, base in zip(given.values(), tables.bases.tolist(), strict=True)
        ]
        self.lookups = sum(x.lookups for x in given.values())
        self._every = np.concatenate([x.read for x in self._tables])
        self._rows = np.concatenate([x.rows for x in self._tables])
        self.unique_rows = float(self._rows @ self._every)

    def owner_rows(self, ranks: int) -> float:
        """Return how many different rows an owner is asked for in a step."""
        return float(self._rows @ _some(self._every, ranks)) / ranks

    def exchange(
        self,
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
        """Return what `draw_exchange` returns; steps are drawn for the owners that plan."""
        owners, results = self.tables.owners(ranks), []
        plain, loads = self._traffic(ranks, owners, None)
        if choices:
            by_load = np.argsort(loads, kind="stable")
            for place in spread(planned, ranks):
                owner = _Owner(self._tables, owners, int(by_load[place]), self._seed)
                simulator = Simulator(owner.num_rows, choices)
                for step, ids in enumerate(owner.steps(warm_up + batches + ahead)):
                    simulator.feed(ids, counts=warm_up <= step < warm_up + batches)
                    on_batch()
                results.append(simulator.results())
        return Exchanged(
            ranks=ranks,
            lookups=self.lookups,
            unique_rows=self.unique_rows,
            asked_rows=self.unique_rows,
            plain=plain,
            replicated=None if replicas is None else self._traffic(ranks, owners, replicas)[0],
            planned=list(zip(*results, strict=True)),
            is_drawn=False,
        )

    def _traffic(
        self, ranks: int, owners: GroupOwners, replicas: Tensor | None
    ) -> tuple[Traffic, Amounts]:
        """Return what a rank sends, and how many rows are asked of each owner."""
        loads, spreads = np.zeros(ranks), np.zeros(ranks)
        asked = early = copied = 0.0  # rows of a rank
        for table in self._tables:
            read, others = table.hot_read, np.ones(len(table.hot), dtype=bool)
            if replicas is not None:
                others = ~np.isin(table.hot, replicas.numpy())
                copied += float(read[~others].sum())
            hot, read = table.hot[others], read[others]
            order = np.argsort(hot)
            owner = owners.find(torch.from_numpy(hot[order]))[0].numpy()
            loads += ranks * np.bincount(owner, read[order], ranks)
            spreads += ranks * np.bincount(owner, (read * (1 - read))[order], ranks)
            rest = float(table.bin_rows @ table.bin_read)
            loads, spreads = loads + rest, spreads + rest
            asked += float(read.sum()) + rest
            early += float(read @ (1 - read) ** ranks)
            early += float((table.bin_rows * table.bin_read) @ (1 - table.bin_read) ** ranks)
        away = 1 - 1 / ranks
        tables, copies = self.tables, copied * (ranks - 1)
        marks = (ranks - 1) * _mark_bytes(asked / ranks)
        return (
            Traffic(
                id_bytes=tables.id_bytes * asked * away,
                mark_bytes=marks,
                early_bytes=tables.vector_bytes * early * away,
                late_bytes=tables.vector_bytes * (asked - early) * away,
                grad_bytes=tables.vector_bytes * (asked * away + copies) + tables.id_bytes * copies,
                balance=self._balance(loads, spreads),
                replicated_rows=0 if replicas is None else len(replicas),
            ),
            loads,
        )

    def _balance(self, loads: Amounts, spreads: Amounts) -> float:
        """Return the largest load over the mean, an average of steps that scatter."""
        draw = np.random.default_rng((self._seed, len(loads)))
        steps = loads + np.sqrt(spreads) * draw.standard_normal((_DRAWS, len(loads)))
        return float((steps.max(1) / np.maximum(steps.mean(1), 1e-9)).mean())


def _some(read: Amounts, ranks: int) -> Amounts:
    """Return the probabilities that some rank looks rows up."""
    found: Amounts = -np.expm1(ranks * np.log1p(-np.minimum(read, 1 - 1e-16)))
    return found


def _mark_bytes(rows: float) -> float:
    """Return the bytes of a bit for each of so many rows, on average, whole for each message."""
    if rows > _MANY:
        return rows / 8 + 7 / 16
    found, chance = 0.0, math.exp(-rows)  # as rows are few of many, by Poisson's law
    for count in range(1, 4 * _MANY):
        chance *= rows / count
        found += chance * -(-count // 8)
    return found


class _Owner:
    """The rows of one owner, and the steps in which ranks ask for them."""

    def __init__(self, tables: list[_Table], owners: GroupOwners, rank: int, seed: int) -> None:
        self._ranks, self._rng = owners.ranks, np.random.default_rng((seed, owners.ranks, rank))
        self._chances: list[Amounts] = []
        self._tails: list[tuple[_Table, int]] = []  # and the number of their first row here
        self.num_rows = 0
        for table in tables:
            order = np.argsort(table.hot)
            is_owned = np.empty(len(order), dtype=bool)
            is_owned[order] = owners.find(torch.from_numpy(table.hot[order]))[0].numpy() == rank
            self._chances.append(_some(table.hot_read[is_owned], self._ranks))
            self.num_rows += int(is_owned.sum())
        for table in tables:
            if table.tail_rows:
                self._tails.append((table, self.num_rows))
                self.num_rows += -(-table.tail_rows // self._ranks)
        self.num_rows = max(1, self.num_rows)
        self._hot = np.concatenate(self._chances)

    def steps(self, count: int) -> Iterator[Tensor]:
        """Yield the different rows that ranks ask for, step by step."""
        for _ in range(count):
            rows = [np.flatnonzero(self._rng.random(len(self._hot)) < self._hot)]
            rows += [self._drawn(table, first) for table, first in self._tails]
            yield torch.from_numpy(np.concatenate(rows))

    def _drawn(self, table: _Table, first: int) -> Rows:
        law = table.popularity.law
        expected = table.popularity.lookups * table.tail_share  # an R-th of R ranks' lookups
        share = (
            1 - table.tail_share + table.tail_share * self._rng.random(self._rng.poisson(expected))
        )
        ranks = law.ranks(share) - len(table.hot)
        np.maximum(ranks, 0, out=ranks)
        rows: Rows = np.unique(ranks // self._ranks) + first
        return rows
