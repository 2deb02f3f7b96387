"""Batches of skewed ids in page-locked host memory, no batch twice. Knows no system.

Ranks follow a power law: a number between 1 and n + 1 with density x^-s, rounded down. It is a Zipf
distribution with a slightly lighter head, and the one that published figures use. Hot ids are
scattered by a seeded permutation, so that nothing can win by the order of ids. A trace that repeats
itself would soon be in any cache as a whole, so there are as many batches as steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from hostmem import HostMemory
from numpy.typing import NDArray
from torch import Tensor

from hotrow import KeyedJaggedTensor
from hotrow.data import ClickBatch
from hotrow.data.popularity import Scatter
from hotrow.support.hashing import key_of

DRAWS_AT_ONCE = 1 << 17  # threads spend their time outside Python, and arrays stay in the cache
LARGEST_LOOKUP = 1 << 20  # permutations up to this size are kept as tables
NUM_DENSE = 13
DENSE_BATCHES = 320  # of other inputs than ids; more than are held at once, as of a real loader


class Trace:
    """`steps` batches of `batch` samples with `hotness` ids per feature, or as many for each.

    `table_of` says which table each feature reads; by default there is one feature per table.
    """

    def __init__(
        self,
        rows: Sequence[int],
        *,
        steps: int,
        batch: int,
        skew: float,
        hotness: int | Sequence[int] = 1,
        table_of: Sequence[int] | None = None,
        seed: int = 0,
        lock: bool,
    ) -> None:
        table_of = range(len(rows)) if table_of is None else table_of
        self.rows, self.num_features = tuple(rows), len(table_of)
        hot = [hotness] * len(table_of) if isinstance(hotness, int) else hotness
        self.steps, self.is_dense = steps, hotness == 1
        # Sample by sample where it can be a dense input, else feature by feature.
        self._counts = [batch * count for count in hot]
        shape = (batch, len(hot)) if self.is_dense else (sum(self._counts),)
        self._memory = HostMemory(8 * steps * sum(self._counts))
        self.ids = self._memory.tensor((steps, *shape), torch.int64)
        columns = self.ids.unbind(2) if self.is_dense else self.ids.split(self._counts, 1)
        draw(columns, [rows[table] for table in table_of], table_of, skew=skew, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        self.dense = torch.randn(DENSE_BATCHES, batch, NUM_DENSE, generator=generator)
        self.label = (torch.rand(DENSE_BATCHES, batch, generator=generator) < 0.25).float()
        lengths = torch.tensor(hot).repeat_interleave(batch)
        self.offsets = F.pad(lengths.cumsum(0), (1, 0))
        if lock:
            self._memory.lock()
            self.dense, self.label = self.dense.pin_memory(), self.label.pin_memory()
            self.offsets = self.offsets.pin_memory()

    def batches(self, start: int, stop: int) -> Iterator[ClickBatch]:
        for step in range(start, stop):
            yield ClickBatch(
                dense=self.dense[step % DENSE_BATCHES],
                sparse=self._sparse(self.ids[step]),
                label=self.label[step % DENSE_BATCHES],
            )

    def _sparse(self, ids: Tensor) -> Tensor | KeyedJaggedTensor:
        if self.is_dense:
            return ids
        return KeyedJaggedTensor(feature_names(self.num_features), ids, offsets=self.offsets)

    def columns(self, step: int) -> Sequence[Tensor]:
        """The ids of a batch, by feature."""
        ids = self.ids[step]
        return ids.unbind(1) if self.is_dense else ids.split(self._counts)

    def unique_rows(self, step: int) -> int:
        """Rows one batch reads, each counted once, where every feature has its own table."""
        return sum(len(column.unique()) for column in self.columns(step))

    def close(self) -> None:
        self._memory.close()


def feature_names(count: int) -> list[str]:
    return [f"cat_{feature}" for feature in range(count)]


def draw(
    columns: Sequence[Tensor],  # one [steps, ids] per feature, written here
    rows: Sequence[int],
    table_of: Sequence[int],
    *,
    skew: float,
    seed: int,
) -> None:
    """Fill every column on all cores; what it gets depends on its own place alone."""
    jobs = []
    for feature, (column, num_rows) in enumerate(zip(columns, rows, strict=True)):
        scatter = permutation(num_rows, seed, table_of[feature])
        block = max(1, DRAWS_AT_ONCE // column.shape[1])
        for first in range(0, len(column), block):
            part = column[first : first + block].numpy()
            jobs.append(partial(_draw, part, num_rows, skew, scatter, (seed, feature, first)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in [pool.submit(each) for each in jobs]:
            job.result()


def _draw(
    out: NDArray[np.int64],
    num_rows: int,
    skew: float,
    scatter: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    key: tuple[int, ...],
) -> None:
    uniform = np.random.default_rng(key).random(out.size)
    out[...] = scatter(ranks(uniform, num_rows, skew)).reshape(out.shape)


def ranks(uniform: NDArray[np.float64], num_rows: int, skew: float) -> NDArray[np.int64]:
    """Rank (0 is the hottest) of each number in [0, 1)."""
    power = 1.0 - skew
    uniform *= (num_rows + 1) ** power - 1
    uniform += 1
    np.power(uniform, 1 / power, out=uniform)
    return np.minimum(uniform.astype(np.int64) - 1, num_rows - 1)


def permutation(
    num_rows: int, seed: int, table: int
) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Where the rows of each popularity lie in a table."""
    scatter = Scatter(num_rows, key=key_of(seed, "scatter", table))
    if num_rows > LARGEST_LOOKUP:
        return scatter
    return scatter(np.arange(num_rows)).take


def counts_by_rank(
    num_rows: int, skew: float, draws: float, *, seed: int, device: torch.device
) -> Tensor:
    """How often each rank of a table comes in so many draws, int32: drawn rank by rank."""
    generator = torch.Generator(device).manual_seed(seed)
    edges = torch.arange(1, num_rows + 2, dtype=torch.float64, device=device)
    edges = edges ** (1 - skew) if skew != 1 else edges.log()
    expected = draws * (edges.diff() / (edges[-1] - edges[0]))
    return torch.poisson(expected, generator=generator).int()


def hottest_ranks(rows: Sequence[int], skew: float, count: int) -> list[int]:
    """How many rows of each table are among the `count` that are read most, of all tables."""
    count = min(count, sum(rows))
    if skew == 0:
        assert len(set(rows)) == 1, "which of all rows are hot, where all are read alike?"
        return [count // len(rows)] * len(rows)
    heights = [abs(1 - skew) / abs((num_rows + 1) ** (1 - skew) - 1) for num_rows in rows]

    def above(log_rate: float) -> list[int]:
        found = [np.exp((np.log(height) - log_rate) / skew) for height in heights]
        return [int(min(n, max(0.0, x - 1))) for n, x in zip(rows, found, strict=True)]

    low, high = -60.0, 5.0  # of the rates of the last row taken, in logarithms
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(above(middle)) > count else (low, middle)
    return above(high)


def hottest_rows(
    rows: Sequence[int], skew: float, count: int, seed: int = 0
) -> list[NDArray[np.int64]]:
    """These rows themselves, by table, the hottest first: what a perfect profile would find."""
    ranks = hottest_ranks(rows, skew, count)
    return [
        permutation(num_rows, seed, table)(np.arange(many))
        for table, (num_rows, many) in enumerate(zip(rows, ranks, strict=True))
    ]


def share_of_lookups(num_rows: int, skew: float, hottest: int) -> float:
    """How many of a table's lookups go to so many rows, the hottest."""
    power = 1 - skew
    return float(((hottest + 1) ** power - 1) / ((num_rows + 1) ** power - 1))


def expected_rows(rows: Sequence[int], skew: float, draws: float) -> float:
    """Different rows that `draws` lookups in each table read, on average."""
    return sum(_expected_in_table(num_rows, skew, draws) for num_rows in rows)


def _expected_in_table(num_rows: int, skew: float, draws: float) -> float:
    # Ranks in bands, each narrow beside its rank, so that one probability stands for a band.
    edges = np.unique(np.geomspace(1, num_rows + 1, 4000).astype(np.int64)).astype(np.float64)
    weight, width = np.abs(np.diff(edges ** (1 - skew))), np.diff(edges)
    probability = weight / weight.sum() / width
    seen = -np.expm1(draws * np.log1p(-np.minimum(probability, 1 - 1e-12)))
    return float((width * seen).sum())


def steps_to_fill(slots: float, rows: Sequence[int], skew: float, draws_per_step: int) -> int:
    """Steps after which lookups have read as many different rows as there are slots."""
    low, high = 0, 1
    while expected_rows(rows, skew, high * draws_per_step) < slots and high < 1 << 20:
        high *= 2
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        if expected_rows(rows, skew, middle * draws_per_step) < slots:
            low = middle
        else:
            high = middle
    return high
