"""Generated clicks with known truth. Knows nothing about rows, slots or strategies.

Batch k depends on the configuration and k alone, so any worker can make any batch at any time.

    uniform --Zipf--> rank --drift--> position --Scatter--> id --PlantedModel--> label

With counts of real tables `Counted` takes the place of Zipf and Scatter. What is real then is how
often each row is read, in each column by itself; which rows come together, what follows what within
minutes, and the clicks stay generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.data.counted import Counted
from hotrow.data.planted import Columns, Dense, PlantedModel, click_probability
from hotrow.data.scatter import Scatter
from hotrow.data.zipf import Zipf
from hotrow.inputs.batch import KeyedJaggedTensor
from hotrow.support.hashing import key_of
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

Number = TypeVar("Number", int, float)


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


@dataclass(frozen=True)
class ClickBatch:
    """Samples as a model reads them."""

    dense: Tensor  # [B, num_dense] float32
    sparse: Tensor | KeyedJaggedTensor  # [B, F] int64 where every feature has one lookup
    label: Tensor  # [B] float32

    def __len__(self) -> int:
        return len(self.label)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ClickBatch:
        return ClickBatch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            label=self.label.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> ClickBatch:
        """The batch in page-locked memory; the name is the one DataLoader looks for."""
        return ClickBatch(
            self.dense.pin_memory(), self.sparse.pin_memory(), self.label.pin_memory()
        )

    def clone(self) -> ClickBatch:
        """The batch in memory of its own: what a loader gives is a part of a larger block."""
        return ClickBatch(self.dense.clone(), self.sparse.clone(), self.label.clone())


class Drawn:
    """Ids and numbers of samples, batch by batch: what generated data of any kind is made of."""

    def __init__(
        self, config: SyntheticConfig, *, counts: Mapping[str, Counted] | None = None
    ) -> None:
        """`counts`: of some tables, by their names, in place of `skew`."""
        self.config = config
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

    def hottest(self, table: int, count: int, *, index: int = 0) -> Tensor:
        """The `count` ids of a table that batch `index` reads most often, hottest first."""
        ranks = np.arange(min(count, self._popularity[table].num_ranks))
        return torch.from_numpy(self._ids(ranks, table=table, index=index))

    def expected_counts(self, table: int, count: int) -> Tensor:
        """Lookups in one batch of the ids that `hottest` gives, in its order, [count] float64."""
        lookups = self.config.batch_size * self.config.lookups_per_table[table]
        return torch.from_numpy(lookups * self._popularity[table].probabilities(count))

    def expected_share(self, table: int, count: int) -> float:
        """Share of a table's lookups that read the `count` ids of `hottest`."""
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
            # A cluster is one band of popularity in every column: popular rows throughout, or rare
            # ones. Bands are equally likely, so each column by itself keeps its distribution.
            banded = (cluster + uniform) / config.num_clusters
            uniform = np.where(is_correlated, banded, uniform).reshape(-1)
            ids = self._ids(self._popularity[table].ranks(uniform), table=table, index=index)
            columns.append(ids.reshape(size, lookups))
        return dense, columns

    def _ids(self, ranks: NDArray[np.int64], *, table: int, index: int) -> NDArray[np.int64]:
        # Rows age: what is new enters at the top, and everything else moves down.
        num_ranks = self._popularity[table].num_ranks
        positions = ranks - int(index * self.config.drift * num_ranks) % num_ranks
        positions[positions < 0] += num_ranks
        return self._row_of[table](positions)


class SyntheticClicks(Drawn):
    """Batches of generated clicks, and the truth behind them.

    A map-style dataset of whole batches:
    `DataLoader(clicks, batch_size=None, sampler=range(100), num_workers=2)`.
    """

    def __init__(
        self, config: SyntheticConfig, *, counts: Mapping[str, Counted] | None = None
    ) -> None:
        """`counts`: of some tables, by their names, in place of `skew`."""
        super().__init__(config, counts=counts)
        self._planted = self._calibrated_model()

    def batch(self, index: int) -> ClickBatch:
        """Batch number `index`, the same whenever and wherever it is made."""
        rng = np.random.default_rng((self.config.seed, 1, index))
        dense, columns = self._features(rng, size=self.config.batch_size, index=index)
        probability = click_probability(self._planted.logits(dense, columns))
        is_click = rng.random(self.config.batch_size) < probability
        return ClickBatch(
            dense=torch.from_numpy(dense),
            sparse=self._sparse(columns),
            label=torch.from_numpy(is_click.astype(np.float32)),
        )

    __getitem__ = batch

    def batches(self, start: int, stop: int) -> Iterator[ClickBatch]:
        """Batches start, start + 1 ... stop - 1."""
        return map(self.batch, range(start, stop))

    def logits(self, batch: ClickBatch) -> Tensor:
        """What the planted model says of a batch, [B] float64: no score can rank it better."""
        return torch.from_numpy(self._planted.logits(batch.dense.numpy(), _columns(batch)))

    def best_auc(self, indices: Iterable[int]) -> float:
        """AUC of the planted model on these batches, which no trained model can expect to beat."""
        batches = [self.batch(index) for index in indices]
        scores = torch.cat([self.logits(batch) for batch in batches])
        labels = torch.cat([batch.label for batch in batches])
        from torchmetrics.functional.classification import binary_auroc  # slow to import

        return float(binary_auroc(scores, labels.long()))

    def _calibrated_model(self) -> PlantedModel:
        config = self.config
        rng = np.random.default_rng((config.seed, 0))
        dense, columns = self._features(rng, size=CALIBRATION_SAMPLES, index=0)
        model = PlantedModel.from_seed(
            config.seed, num_tables=len(config.rows), num_dense=config.num_dense
        )
        return model.calibrated(dense, columns, signal=config.signal, click_rate=config.click_rate)

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
