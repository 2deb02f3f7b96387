"""Generated clicks and sequences with known truth. Knows nothing about slots or strategies.

Batch k depends on the configuration and k alone, so any worker can make any batch at any time.

    uniform --Zipf--> rank --drift--> position --Scatter--> id --PlantedModel--> label

With counts of real tables `Counted` replaces Zipf and Scatter. Then each column by itself reads
each row as often as the real one; which rows come together, the order, and the clicks stay
generated.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data.batches import ClickBatch, SequenceBatch, positions
from hotrow.data.popularity import Counted, Scatter, Zipf
from hotrow.data.ranks import PartReader, RankPart, current_part, given_part
from hotrow.inputs.batch import KeyedJaggedTensor
from hotrow.support.hashing import hashed, key_of
from hotrow.support.messages import few
from hotrow.support.numbers import plain_fields

# Rows per table as published with the DLRM reference code (facebookresearch/dlrm): the Criteo
# Kaggle display-advertising set, and the Criteo Terabyte logs before any cap on the rows.
# fmt: off
KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)
TERABYTE_ROWS = (
    227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10,
    2209, 11938, 155, 4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36,
)
# fmt: on

CALIBRATION_SAMPLES = 8192

Dense = NDArray[np.float32]  # [B, num_dense]
Columns = list[NDArray[np.int64]]  # one [B, lookups] per table

# Shares of the score's variance. Single ids carry most of it, as in click logs; pairs give a
# model's interaction something to find, and dense features its bottom part.
ID_SHARE, PAIR_SHARE, DENSE_SHARE = 0.6, 0.2, 0.2
LIKENESS_SHARE = 0.5  # of targets with a history: what both have in common

Number = TypeVar("Number", int, float)
Batch = TypeVar("Batch", ClickBatch, SequenceBatch)


@dataclass(frozen=True)
class SyntheticConfig:
    """What the clicks look like.

    `SyntheticConfig(rows=(1_000_000, 50), skew=(1.05, 0.8), drift=1e-5)`
    """

    rows: tuple[int, ...]
    names: tuple[str, ...] = ()  # of the tables and their features; "cat_0", "cat_1" ... if empty
    lookups: int | tuple[int, ...] = 1  # per sample: one number for all tables, or one for each
    skew: float | tuple[float, ...] = 1.05  # Zipf exponent, likewise
    batch_size: int = 2048
    num_dense: int = 13
    drift: float = 0.0  # share of a table's rows by which its ranks move on from batch to batch
    correlated: float = 0.0  # share of the samples whose columns follow one cluster
    num_clusters: int = 64
    signal: float = 1.5  # standard deviation of the planted log-odds; the noise has 1.8
    click_rate: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        plain_fields(self)
        count = len(self.rows)
        if not count or min(self.rows) < 1:
            given = few(map(str, self.rows)) or "none"
            raise ValueError(f"rows must name one table or more, each of 1 row or more: {given}")
        if len(set(self.table_names)) != count:
            raise ValueError(f"names must be {count} different names, got {few(self.names)}")
        _at_least(1, lookups=min(self.lookups_per_table), batch_size=self.batch_size)
        _at_least(1, num_clusters=self.num_clusters)
        _at_least(0, skew=min(self.skew_per_table), num_dense=self.num_dense, drift=self.drift)
        _at_least(0, correlated=self.correlated, signal=self.signal, seed=self.seed)
        for name in ("correlated", "drift"):
            if (share := getattr(self, name)) > 1:
                raise ValueError(f"{name} is a share, at most 1, got {share}")
        if not 0 < self.click_rate < 1:
            raise ValueError(f"click_rate must be between 0 and 1, got {self.click_rate}")

    @property
    def table_names(self) -> tuple[str, ...]:
        return tuple(self.names) or tuple(f"cat_{table}" for table in range(len(self.rows)))

    @property
    def lookups_per_table(self) -> tuple[int, ...]:
        return _per_table("lookups", self.lookups, len(self.rows))

    @property
    def skew_per_table(self) -> tuple[float, ...]:
        return _per_table("skew", self.skew, len(self.rows))


def _per_table(name: str, value: Number | Sequence[Number], count: int) -> tuple[Number, ...]:
    if isinstance(value, int | float):
        return (value,) * count
    if len(value) != count:
        raise ValueError(f"{name} must be one number or {count}, one per table; got {len(value)}")
    return tuple(value)


def _at_least(limit: int, **values: float) -> None:
    for name, value in values.items():
        if not value >= limit:
            raise ValueError(f"{name} must be at least {limit}, got {value}")


class PlantedModel:
    """What decides about a click: each id, pairs of columns, and dense features.

    What an id contributes is a hash of (seed, table, id): a table of any size takes no memory.
    """

    def __init__(self, config: SyntheticConfig) -> None:
        slope = np.random.default_rng(key_of(config.seed, "slope", 0)).standard_normal(
            config.num_dense
        )
        slope /= max(float(np.linalg.norm(slope)), 1e-12)
        self._slope = slope.astype(np.float32)  # [num_dense], length 1
        self._keys = [key_of(config.seed, "effect", table) for table in range(len(config.rows))]

    def scores(self, dense: Dense, columns: Columns) -> NDArray[np.float64]:
        """Return log-odds of a click up to scale and offset, [B]."""
        hidden = [_hidden(ids, key=key) for ids, key in zip(columns, self._keys, strict=True)]
        score = math.sqrt(DENSE_SHARE) * (dense @ self._slope).astype(np.float64)
        for effect, _ in hidden:
            score += math.sqrt(ID_SHARE / len(hidden)) * effect
        for (_, left), (_, right) in zip(hidden[::2], hidden[1::2], strict=False):
            score += math.sqrt(PAIR_SHARE / (len(hidden) // 2)) * (left * right)
        return score


class PlantedHistories:
    """What decides whether a target follows its history: the target alone, as for a click, and how
    alike both are. Each id has a factor, a hash; for each table the target's factor is multiplied
    by the mean of the past ones."""

    def __init__(self, config: SyntheticConfig, changing: Sequence[int]) -> None:
        """`changing` are the tables that change from step to step."""
        self._target = PlantedModel(config)
        self._keys = {table: key_of(config.seed, "likeness", table) for table in changing}

    def scores(
        self, dense: Dense, columns: Columns, lengths: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return log-odds up to scale and offset, [B]. Columns are [B, steps + 1] with the target
        last; `lengths` says how many real steps come before it."""
        targets = [ids[:, -1:] for ids in columns]
        score = math.sqrt(1 - LIKENESS_SHARE) * self._target.scores(dense, targets)
        steps = columns[0].shape[1] - 1
        is_past = np.arange(steps) >= steps - lengths[:, None]
        for table, key in self._keys.items():
            factors = _factors(columns[table], key=key)
            past = (factors[:, :-1] * is_past).sum(1) / np.sqrt(np.maximum(lengths, 1))
            score += math.sqrt(LIKENESS_SHARE / len(self._keys)) * (past * factors[:, -1])
        return score


def _factors(ids: NDArray[np.int64], *, key: int) -> NDArray[np.float32]:
    """Return a factor for each id, with variance 1 over random ids."""
    signed = hashed(ids, key=key).view(np.int64).astype(np.float32)
    return signed * np.float32(math.sqrt(3) / 2**63)


def _hidden(ids: NDArray[np.int64], *, key: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the effect and the pair factor of each bag, [B], with variance 1 over random ids."""
    halves = hashed(ids, key=key).view(np.int32).reshape(*ids.shape, 2).astype(np.float32)
    per_bag = halves.sum(axis=1) * np.float32(math.sqrt(3 / ids.shape[1]) / 2**31)
    return per_bag[:, 0], per_bag[:, 1]


def click_probability(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logistic function, in a form that cannot overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))


class Generated(Generic[Batch]):
    """Batches of generated data, by their numbers, and the truth behind them."""

    _scores: Callable[..., NDArray[np.float64]]  # true log-odds, up to scale and offset

    def __init__(
        self, config: SyntheticConfig, *, counts: Mapping[str, Counted] | None = None
    ) -> None:
        """`counts` replace `skew` for some tables, by name."""
        self.config, self._scale, self._offset = config, 1.0, 0.0
        given = counts or {}
        for name in given:
            if name not in config.table_names:
                raise ValueError(
                    f"there are counts of {name!r}; the tables are {few(config.table_names)}"
                )
        self._popularity: list[Zipf | Counted] = []
        self._row_of: list[Callable[[NDArray[np.int64]], NDArray[np.int64]]] = []
        for table, (name, num_rows) in enumerate(zip(config.table_names, config.rows, strict=True)):
            counted = given.get(name)
            if counted is None:
                self._popularity.append(Zipf(num_rows, config.skew_per_table[table]))
                self._row_of.append(Scatter(num_rows, key=key_of(config.seed, "scatter", table)))
                continue
            if counted.num_rows != num_rows:
                raise ValueError(
                    f"table {name!r} has {num_rows:,} rows, and counts of {counted.num_rows:,}"
                )
            self._popularity.append(counted)
            self._row_of.append(counted.rows)

    @abstractmethod
    def batch(self, index: int) -> Batch:
        """Return batch number `index`, the same whenever and wherever it is made."""

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """Return the true log-odds of a batch, [B] float64: no score can rank it better."""

    def _calibrate(self, *sample: Any) -> None:
        """Give log-odds the spread, and clicks the share, that the configuration asks for."""
        scores, config = self._scores(*sample), self.config
        spread = float(scores.std())
        self._scale = config.signal / spread if spread > 0 else 0.0
        low, high = -50.0, 50.0
        for _ in range(60):
            middle = (low + high) / 2
            clicks = click_probability(scores * self._scale + middle)
            low, high = (middle, high) if clicks.mean() < config.click_rate else (low, middle)
        self._offset = (low + high) / 2

    def _logits(self, *parts: Any) -> NDArray[np.float64]:
        return self._scale * self._scores(*parts) + self._offset

    def __getitem__(self, index: int) -> Batch:
        return self.batch(index)

    def batches(
        self, start: int, stop: int, *, rank: int | None = None, ranks: int | None = None
    ) -> PartReader[Batch]:
        """Return batches start, start + 1 ... stop - 1; of each, the part of this rank, as a
        `Loader` does. `batch` returns whole batches on every rank."""

        def read(part: RankPart) -> Iterator[Batch]:
            return (part.cut(self.batch(index)) for index in range(start, stop))

        return PartReader(read, given_part(rank, ranks) or current_part())

    def best_auc(self, indices: Iterable[int]) -> float:
        """Return the AUC of the truth on these batches; no trained model can expect to beat it."""
        batches = [self.batch(index) for index in indices]
        scores = torch.cat([self.logits(batch) for batch in batches])
        labels = torch.cat([batch.label for batch in batches])
        from torchmetrics.functional.classification import binary_auroc  # slow to import

        return float(binary_auroc(scores, labels.long()))

    def hottest(self, table: int, count: int, *, index: int = 0) -> Tensor:
        """Return the `count` ids of a table that batch `index` reads most, hottest first."""
        ranks = np.arange(min(count, self._popularity[table].num_ranks))
        return torch.from_numpy(self._ids(ranks, table=table, index=index))

    def expected_counts(self, table: int, count: int) -> Tensor:
        """Return the lookups in one batch of each id of `hottest`, [count] float64."""
        lookups = self.config.batch_size * self.config.lookups_per_table[table]
        return torch.from_numpy(lookups * self._popularity[table].probabilities(count))

    def popularity(self, table: int) -> Zipf | Counted:
        """Return how popular the rows of a table are, the first of `hottest` first."""
        return self._popularity[table]

    def expected_share(self, table: int, count: int) -> float:
        """Return the share of a table's lookups that read the `count` ids of `hottest`."""
        return self._popularity[table].share(count)

    def _features(
        self, rng: np.random.Generator, *, size: int, index: int
    ) -> tuple[Dense, Columns]:
        config = self.config
        dense = rng.standard_normal((size, config.num_dense), dtype=np.float32)
        is_correlated = rng.random((size, 1)) < config.correlated
        cluster = rng.integers(config.num_clusters, size=(size, 1))
        columns = []
        for table, lookups in enumerate(config.lookups_per_table):
            uniform = rng.random((size, lookups))
            # A cluster is one band of popularity in every column: only popular rows, or only rare
            # ones. Bands are equally likely, so each column by itself keeps its distribution.
            banded = (cluster + uniform) / config.num_clusters
            uniform = np.where(is_correlated, banded, uniform).reshape(-1)
            ids = self._ids(self._popularity[table].ranks(uniform), table=table, index=index)
            columns.append(ids.reshape(size, lookups))
        return dense, columns

    def _ids(self, ranks: NDArray[np.int64], *, table: int, index: int) -> NDArray[np.int64]:
        # Rows age: new ones enter at the top, and all others move down.
        num_ranks = self._popularity[table].num_ranks
        positions = ranks - int(index * self.config.drift * num_ranks) % num_ranks
        positions[positions < 0] += num_ranks
        return self._row_of[table](positions)


class SyntheticClicks(Generated[ClickBatch]):
    """Batches of generated clicks, and the truth behind them.

    A map-style dataset of whole batches:
    `DataLoader(clicks, batch_size=None, sampler=range(100), num_workers=2)`.
    """

    def __init__(
        self, config: SyntheticConfig, *, counts: Mapping[str, Counted] | None = None
    ) -> None:
        """`counts` replace `skew` for some tables, by name."""
        super().__init__(config, counts=counts)
        self._scores = PlantedModel(config).scores
        rng = np.random.default_rng((config.seed, 0))
        self._calibrate(*self._features(rng, size=CALIBRATION_SAMPLES, index=0))

    def batch(self, index: int) -> ClickBatch:
        rng = np.random.default_rng((self.config.seed, 1, index))
        dense, columns = self._features(rng, size=self.config.batch_size, index=index)
        probability = click_probability(self._logits(dense, columns))
        is_click = rng.random(self.config.batch_size) < probability
        return ClickBatch(
            dense=torch.from_numpy(dense),
            sparse=self._sparse(columns),
            label=torch.from_numpy(is_click.astype(np.float32)),
        )

    def logits(self, batch: ClickBatch) -> Tensor:
        return torch.from_numpy(self._logits(batch.dense.numpy(), _columns(batch)))

    def _sparse(self, columns: Columns) -> Tensor | KeyedJaggedTensor:
        if all(column.shape[1] == 1 for column in columns):
            return torch.from_numpy(np.concatenate(columns, axis=1))
        lookups = torch.tensor(self.config.lookups_per_table)
        return KeyedJaggedTensor(
            keys=self.config.table_names,
            values=torch.from_numpy(np.concatenate([column.reshape(-1) for column in columns])),
            lengths=lookups.repeat_interleave(len(columns[0])),
        )


def _columns(batch: ClickBatch) -> Columns:
    if isinstance(batch.sparse, Tensor):
        return [column.unsqueeze(1).numpy() for column in batch.sparse.T]
    ends = batch.sparse.offsets()[:: len(batch)]
    values = torch.split(batch.sparse.values(), ends.diff().tolist())
    return [column.view(len(batch), -1).numpy() for column in values]


class SyntheticSequences(Generated[SequenceBatch]):
    """Batches of generated sequences, and the truth behind them.

    Each step is drawn by itself, like the ids of a click; `constant` tables have one id for all
    steps of a sample. A history has 1 to `steps` steps, all lengths being as likely. Whether a
    target follows depends on the target, and on what it has in common with the history.

    The padding id is the number of a table's rows. The numbers of a step are its position and
    `num_dense` more, which are 0 except for the target.
    """

    def __init__(
        self,
        config: SyntheticConfig,
        *,
        steps: int,
        constant: Sequence[str] = (),
        counts: Mapping[str, Counted] | None = None,
    ) -> None:
        """`constant` names the tables whose id is the same at all steps."""
        names = config.table_names
        for name in constant:
            if name not in names:
                raise ValueError(f"constant names {name!r}; the tables are {few(names)}")
        if set(names) <= set(constant):
            raise ValueError("all tables are constant, so that no step differs from another")
        if any(count != 1 for count in config.lookups_per_table):
            raise ValueError(
                f"lookups must be 1 where steps are generated, each with one id of a table; got "
                f"{config.lookups}"
            )
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        lookups = tuple(1 if name in constant else steps + 1 for name in names)
        super().__init__(replace(config, lookups=lookups), counts=counts)
        self.steps = steps
        rng = np.random.default_rng((config.seed, 0))
        changing = [table for table, name in enumerate(names) if name not in constant]
        self._scores = PlantedHistories(config, changing).scores
        self._calibrate(*self._drawn(rng, size=CALIBRATION_SAMPLES, index=0))

    def batch(self, index: int) -> SequenceBatch:
        config, steps = self.config, self.steps
        rng = np.random.default_rng((config.seed, 1, index))
        dense, columns, lengths = self._drawn(rng, size=config.batch_size, index=index)
        logits = self._logits(dense, columns, lengths)
        label = rng.random(config.batch_size) < click_probability(logits)
        is_padding = np.arange(steps + 1) < steps - lengths[:, None]
        numbers = np.zeros((config.batch_size, steps + 1, 1 + config.num_dense), np.float32)
        numbers[:, :, 0] = positions(steps)
        numbers[:, steps, 1:] = dense
        named = zip(config.table_names, config.rows, columns, strict=True)
        return SequenceBatch.from_ids(
            torch.from_numpy(numbers),
            {name: torch.from_numpy(np.where(is_padding, rows, ids)) for name, rows, ids in named},
            torch.from_numpy(label.astype(np.float32)),
            torch.from_numpy(lengths),
        )

    def logits(self, batch: SequenceBatch) -> Tensor:
        ids = batch.sparse.values().view(len(self.config.rows), len(batch), -1)
        dense = batch.dense[:, self.steps, 1:].numpy()
        return torch.from_numpy(self._logits(dense, list(ids.numpy()), batch.lengths.numpy()))

    def expected_counts(self, table: int, count: int) -> Tensor:
        """Return the steps in one batch, without padding, that read the ids of `hottest`."""
        steps = self.config.batch_size * (1 + (1 + self.steps) / 2)
        return torch.from_numpy(steps * self._popularity[table].probabilities(count))

    def _drawn(
        self, rng: np.random.Generator, *, size: int, index: int
    ) -> tuple[Dense, Columns, NDArray[np.int64]]:
        dense, columns = self._features(rng, size=size, index=index)
        lengths = rng.integers(1, self.steps + 1, size)
        wide = (size, self.steps + 1)
        return dense, [np.broadcast_to(ids, wide) for ids in columns], lengths
