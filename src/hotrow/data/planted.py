"""The hidden truth behind generated clicks. Knows nothing about how ids are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hotrow.support.hashing import hashed, key_of

Dense = NDArray[np.float32]  # [B, num_dense]
Columns = list[NDArray[np.int64]]  # one [B, lookups] per table

# Shares of the score's variance. Single ids carry most of it, as in click logs; pairs give a
# model's interaction something to find, and dense features its bottom part.
ID_SHARE, PAIR_SHARE, DENSE_SHARE = 0.6, 0.2, 0.2
LIKENESS_SHARE = 0.5  # of targets with a history: what both have in common


@dataclass(frozen=True)
class PlantedModel:
    """Log-odds of a click from each id, from pairs of columns, and from dense features.

    What an id contributes is a hash of (seed, table, id): a table of any size takes no memory.
    """

    keys: tuple[int, ...]  # one per table
    slope: Dense  # [num_dense], length 1
    scale: float = 1.0
    offset: float = 0.0

    @classmethod
    def from_seed(cls, seed: int, *, num_tables: int, num_dense: int) -> PlantedModel:
        slope = np.random.default_rng(key_of(seed, "slope", 0)).standard_normal(num_dense)
        slope /= max(float(np.linalg.norm(slope)), 1e-12)
        keys = tuple(key_of(seed, "effect", table) for table in range(num_tables))
        return cls(keys, slope.astype(np.float32))

    def calibrated(
        self, dense: Dense, columns: Columns, *, signal: float, click_rate: float
    ) -> PlantedModel:
        """The same model with this spread of log-odds and this share of clicks on a sample."""
        plain = replace(self, scale=1.0, offset=0.0).logits(dense, columns)
        scale, offset = _scaled(plain, signal=signal, click_rate=click_rate)
        return replace(self, scale=scale, offset=offset)

    def logits(self, dense: Dense, columns: Columns) -> NDArray[np.float64]:
        """Log-odds of a click, [B]."""
        hidden = [_hidden(ids, key=key) for ids, key in zip(columns, self.keys, strict=True)]
        score = math.sqrt(DENSE_SHARE) * (dense @ self.slope).astype(np.float64)
        for effect, _ in hidden:
            score += math.sqrt(ID_SHARE / len(hidden)) * effect
        for (_, left), (_, right) in zip(hidden[::2], hidden[1::2], strict=False):
            score += math.sqrt(PAIR_SHARE / (len(hidden) // 2)) * (left * right)
        return self.scale * score + self.offset


@dataclass(frozen=True)
class PlantedHistories:
    """Log-odds that a target follows its history: from the target alone, as of a click, and from
    how alike both are. What is alike has factors of one sign, a hash of each id: a target's is
    multiplied by the mean of the past ones', table by table."""

    target: PlantedModel
    keys: tuple[int, ...]  # one per table that changes from step to step
    tables: tuple[int, ...]  # which those are
    scale: float = 1.0
    offset: float = 0.0

    @classmethod
    def from_seed(
        cls, seed: int, *, num_tables: int, num_dense: int, changing: tuple[int, ...]
    ) -> PlantedHistories:
        target = PlantedModel.from_seed(seed, num_tables=num_tables, num_dense=num_dense)
        return cls(target, tuple(key_of(seed, "likeness", table) for table in changing), changing)

    def calibrated(
        self, dense: Dense, columns: Columns, lengths: NDArray[np.int64], *, signal: float,
        click_rate: float,
    ) -> PlantedHistories:  # fmt: skip
        """The same with this spread of log-odds and this share of targets that follow."""
        plain = replace(self, scale=1.0, offset=0.0).logits(dense, columns, lengths)
        scale, offset = _scaled(plain, signal=signal, click_rate=click_rate)
        return replace(self, scale=scale, offset=offset)

    def logits(
        self, dense: Dense, columns: Columns, lengths: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Log-odds, [B]. Columns are [B, steps + 1] with the target last, and before it so many
        real steps as `lengths` says."""
        score = math.sqrt(1 - LIKENESS_SHARE) * self.target.logits(
            dense, [ids[:, -1:] for ids in columns]
        )
        steps = columns[0].shape[1] - 1
        is_past = np.arange(steps) >= steps - lengths[:, None]
        for key, table in zip(self.keys, self.tables, strict=True):
            ids = columns[table]
            factors = _factors(ids, key=key)
            past = (factors[:, :-1] * is_past).sum(1) / np.sqrt(np.maximum(lengths, 1))
            score += math.sqrt(LIKENESS_SHARE / len(self.keys)) * (past * factors[:, -1])
        return self.scale * score + self.offset


def _factors(ids: NDArray[np.int64], *, key: int) -> NDArray[np.float32]:
    """Of each id, with variance 1 over random ids."""
    found = hashed(ids, key=key).view(np.int64).astype(np.float32)
    return found * np.float32(math.sqrt(3) / 2**63)


def _hidden(ids: NDArray[np.int64], *, key: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Effect and pair factor of each bag, [B] each, with variance 1 over random ids."""
    halves = hashed(ids, key=key).view(np.int32).reshape(*ids.shape, 2).astype(np.float32)
    per_bag = halves.sum(axis=1) * np.float32(math.sqrt(3 / ids.shape[1]) / 2**31)
    return per_bag[:, 0], per_bag[:, 1]


def _scaled(plain: NDArray[np.float64], *, signal: float, click_rate: float) -> tuple[float, float]:
    spread = float(plain.std())
    scale = signal / spread if spread > 0 else 0.0
    return scale, _offset_for(plain * scale, click_rate)


def _offset_for(logits: NDArray[np.float64], click_rate: float) -> float:
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(click_probability(logits + middle).mean()) < click_rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def click_probability(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logistic function, in a form that cannot overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))
