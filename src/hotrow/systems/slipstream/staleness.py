"""Which rows have stopped changing, and which samples look up such rows.

Compares rows between two moments, and finds the threshold below which they count as stale. Does not
know what is skipped for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotrow.embedding.arguments import row_numbers
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.inputs.batch import parse
from hotrow.inputs.hotset import Places
from hotrow.inputs.tables import EmbeddingBagConfig, feature_order
from hotrow.kernels.reference import bits_of, in_bits
from hotrow.support.messages import apart

Rows = Mapping[str, Tensor]  # row numbers by table


class Snapshot:
    """A copy of the weights of some rows, in slow memory."""

    def __init__(self, embedding: EmbeddingBagCollection, rows: Rows) -> None:
        self._embedding, self._rows = embedding, rows
        self._then = {table: _copy(embedding, table, numbers) for table, numbers in rows.items()}

    @property
    def num_bytes(self) -> int:
        return sum(weights.nbytes for weights in self._then.values())

    def moved(self) -> dict[str, Tensor]:
        """Return the largest change of a component of each row until now, [n] by table.

        Rows are read chunk by chunk, so the comparison takes no second snapshot's memory.
        """
        changes = {}
        for table, rows in self._rows.items():
            then, moved = self._then[table], torch.empty(len(rows))
            for places, now in self._embedding.weights_at(table, rows):
                moved[places] = (now - then[places]).abs().amax(1)
            changes[table] = moved
        return changes


def _copy(embedding: EmbeddingBagCollection, table: str, rows: Tensor) -> Tensor:
    dim = next(config.embedding_dim for config in embedding.tables if config.name == table)
    copy = torch.empty(len(rows), dim)
    for places, weights in embedding.weights_at(table, rows):
        copy[places] = weights
    return copy


@dataclass(frozen=True)
class Looked:
    """What the samples of a batch look up, as row numbers; from `limit` on they read no row."""

    numbers: Tensor  # [B, F], or [L] where samples have any number of lookups
    offsets: Tensor | None  # [F * B + 1]: where each bag begins among L
    tables: Tensor  # [F]: place of each feature's table
    num_samples: int
    limit: int

    @property
    def is_real(self) -> Tensor:
        return self.numbers < self.limit

    def count(self, flags: Tensor) -> Tensor:
        """Return how many lookups of each sample are flagged, by feature, [B, F]."""
        if self.offsets is None:
            return flags.long()
        if not self.num_samples:
            return self.offsets.new_zeros(0, len(self.tables))
        sums = functional.pad(flags.cumsum(0), (1, 0))
        return sums[self.offsets].diff().view(-1, self.num_samples).t()


class StaleSamples(Places):
    """Finds samples of stale rows: all rows of a sample, or `least` of them if all are hot.

    With `each_table` so many of every table. Padding reads no row.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        device: torch.device,
        least: int | str = "all",
        *,
        each_table: bool = False,
    ) -> None:
        super().__init__(tables, ignores_padding=True)
        self.device, self._least, self._each_table = device, least, each_table
        self._features = feature_order(tables)
        self._stale: Tensor | None = None  # a bit for each row
        self._hot: Tensor | None = None

    def look(self, features: Any) -> Looked:
        """Return a batch's lookups. Ids outside their table read no row; planning raises later."""
        batch = parse(features, self._features, None).to(self.device)
        tables = self.columns_of(batch).tables
        return Looked(self.of(batch), batch.offsets, tables, batch.num_samples, self.num_rows)

    def number(self, rows: Rows) -> Tensor:
        """Return ascending numbers of rows, each once, on the host."""
        parts = [torch.empty(0, dtype=torch.int64)]  # if there is no table
        for table, given in rows.items():
            span = self.span(table)
            parts.append(row_numbers(table, given, span.stop - span.start).cpu() + span.start)
        numbers: Tensor = torch.cat(parts).unique()
        return numbers

    def by_table(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return rows by table from ascending numbers; tables without any are left out."""
        starts = [self.span(table.name).start for table in self.tables]
        cuts = torch.searchsorted(numbers, torch.tensor([*starts, self.num_rows])).tolist()
        return {
            table.name: numbers[low:high] - start
            for table, start, low, high in zip(self.tables, starts, cuts, cuts[1:], strict=False)
            if low < high
        }

    @property
    def needs_hot(self) -> bool:
        """Return whether `kept` depends on hot rows: if all rows are stale, all are hot."""
        return self._least != "all"

    def set_stale(self, numbers: Tensor) -> None:
        """Set which rows are stale."""
        self._stale = self._written(self._stale, numbers)

    def set_hot(self, numbers: Tensor) -> None:
        """Set which rows are hot."""
        self._hot = self._written(self._hot, numbers)

    def _written(self, bits: Tensor | None, numbers: Tensor) -> Tensor:
        """Return a bit for each row, set for these; in the memory of the old bits, since a captured
        launch reads them there."""
        new = bits_of(numbers.to(self.device), self.size)
        return new if bits is None else bits.copy_(new)

    def are_hot(self, looked: Looked) -> Tensor:
        """Return samples that read hot rows alone, and at least one, [B] bool."""
        assert self._hot is not None
        return _have_all(looked, in_bits(self._hot, looked.numbers))

    def have_stale(self, looked: Looked, flags: Tensor) -> Tensor:
        """Return samples with enough lookups that are flagged as stale, [B] bool."""
        if not isinstance(self._least, int):
            return _have_all(looked, flags)
        flagged = looked.count(flags)
        if not self._each_table:
            return flagged.sum(1) >= self._least
        per_table = flagged.new_zeros(len(flagged), len(self.tables) + 1)
        per_table.index_add_(1, looked.tables, flagged)
        # The last column is for features of no table.
        return (per_table[:, :-1] >= self._least).all(1)

    def kept(self, features: Any) -> Tensor:
        """Return which samples of a batch are not stale, [B] bool."""
        assert self._stale is not None
        looked = self.look(features)
        stale = self.have_stale(looked, in_bits(self._stale, looked.numbers))
        return ~(stale & self.are_hot(looked)) if self.needs_hot else ~stale


def _have_all(looked: Looked, flags: Tensor) -> Tensor:
    """Return samples whose lookups are all flagged, and which have at least one, [B] bool."""
    real = looked.count(looked.is_real).sum(1)
    return (looked.count(flags).sum(1) == real) & (real > 0)


@dataclass(frozen=True)
class Threshold:
    """The result of a search: rows whose components all moved less than `tau` are stale."""

    tau: float  # 0: no row is stale
    share: float  # of the sampled hot inputs, or lookups of hot rows, that are stale by `tau`
    iterations: int
    converged: bool  # to the target; if not, `share` is below it
    low: float  # the range it ended in
    high: float
    said: str


def find_threshold(
    share_at: Callable[[float], float],
    *,
    target: float,
    tolerance: float,
    within: tuple[float, float],
    iterations: int,
    what: str = "hot inputs",
) -> Threshold:
    """Bisect for a threshold at which `share_at`, a share of `what` that never falls, is near the
    target.

    Where rows of too many inputs were visited too seldom to reach the target, it is applied to the
    other inputs. Where the share jumps over the target, the threshold before the jump is taken.
    """
    low, high = within
    wanted, most, less = f"{target:.1%} ± {tolerance:.1%}", share_at(math.inf), ""
    if not most:
        said = (
            f"none of the sampled {what} can be stale: each is of rows that are not hot or were "
            f"visited too seldom, and {wanted} were asked for. Nothing is skipped; watch more "
            "batches (watched) or lower least_visits"
        )
        return Threshold(0.0, 0.0, 0, False, low, high, said)
    if most < target - tolerance:
        less = (
            f"; {wanted} were asked for, but {1 - most:.1%} are of rows that are not hot or were "
            f"visited too seldom, so {target:.1%} are taken of the others. Watch more batches "
            "(watched) or lower least_visits for more"
        )
        target, tolerance = target * most, tolerance * most
    while share_at(high) < target - tolerance:
        high *= 2
    if share_at(low) > target + tolerance:
        low = 0.0
    is_other = (low, high) != within
    beyond = f"; the range {list(within)} did not reach it, {[low, high]} does" if is_other else ""
    for done in range(1, iterations + 1):
        tau = (low + high) / 2
        share = share_at(tau)
        if abs(share - target) <= tolerance:
            said = f"rows that moved less than {tau:.3g} are stale: {share:.1%} of the sampled"
            said += f" {what}{beyond}{less}"
            return Threshold(tau, share, done, not less, low, high, said)
        low, high = (tau, high) if share < target else (low, tau)
    share, over = share_at(low), share_at(high)
    below, above = apart(low, high, digits=6)
    less_than, more_than = apart(share, over, digits=1, kind="%")
    said = (
        f"no threshold in {iterations} iterations makes {target:.1%} ± {tolerance:.1%} of the "
        f"sampled {what} stale: {below} makes {less_than}, and {above} {more_than}{beyond}. "
        + ("The smaller is taken" if share else f"Nothing is skipped; a target of {over:.2g} would")
    )
    return Threshold(low if share else 0.0, share, iterations, False, low, high, said + less)
