"""Which rows have stopped changing, and which samples look up such rows.

Compares rows between two moments and looks for the threshold below which they count as stale; what
is left out of training for it is not its business.
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
from hotrow.inputs.tables import EmbeddingBagConfig, feature_order
from hotrow.kernels.reference import bits_of, in_bits
from hotrow.support.messages import apart, few

Rows = Mapping[str, Tensor]  # row numbers by table


class Snapshot:
    """The weights of some rows as they were, in slow memory."""

    def __init__(self, embedding: EmbeddingBagCollection, rows: Rows) -> None:
        self._embedding, self._rows = embedding, rows
        self._then = {table: _copy(embedding, table, mine) for table, mine in rows.items()}

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._then.values())

    def moved(self) -> dict[str, Tensor]:
        """The largest change of a component of each row until now, [n] by table.

        What rows are now is compared chunk by chunk, so a second snapshot takes no memory.
        """
        found = {}
        for table, rows in self._rows.items():
            then, moved = self._then[table], torch.empty(len(rows))
            for places, now in self._embedding.weights_at(table, rows):
                moved[places] = (now - then[places]).abs().amax(1)
            found[table] = moved
        return found


def _copy(embedding: EmbeddingBagCollection, table: str, rows: Tensor) -> Tensor:
    dim = next(each.embedding_dim for each in embedding.tables if each.name == table)
    copy = torch.empty(len(rows), dim)
    for places, weights in embedding.weights_at(table, rows):
        copy[places] = weights
    return copy


@dataclass(frozen=True)
class Looked:
    """What the samples of a batch look up, as numbers among the rows of all tables."""

    numbers: Tensor  # [B, F], or [L] where samples have any number of lookups; -1: no row is read
    offsets: Tensor | None  # [keys * B + 1]: where each bag begins among L
    places: Tensor  # [F]: of the features among those keys
    num_samples: int

    @property
    def is_real(self) -> Tensor:
        return self.numbers >= 0

    def count(self, flags: Tensor) -> Tensor:
        """How many lookups of each sample are flagged, by feature, [B, F]."""
        if self.offsets is None:
            return flags.long()
        if not self.num_samples:
            return self.offsets.new_zeros(0, len(self.places))
        sums = functional.pad(flags.cumsum(0), (1, 0))
        bags = sums[self.offsets].diff().view(-1, self.num_samples)
        return bags.index_select(0, self.places).t()


class Numbering:
    """Numbers the rows of all tables, whatever their width."""

    def __init__(self, tables: Sequence[EmbeddingBagConfig], device: torch.device) -> None:
        self.device, self.features = device, feature_order(tables)
        self.names = [table.name for table in tables]
        sizes = torch.tensor([table.num_embeddings for table in tables])
        self.bases = functional.pad(sizes.cumsum(0), (1, 0))
        self.num_rows = int(self.bases[-1])
        self._facts = {
            name: (int(base), table.num_embeddings, -1 if padding is None else padding)
            for table, base in zip(tables, self.bases, strict=False)
            for padding in (table.padding_idx,)
            for name in table.feature_names
        }
        self._known: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}
        owners = [t for t, table in enumerate(tables) for _ in table.feature_names]
        self._table_of = torch.tensor(owners, device=device)  # of each feature

    def look(self, features: Any) -> Looked:
        """The lookups of a batch. Ids that no table has read no row; planning names them."""
        batch = parse(features, self.features, None)
        values = batch.values.to(self.device)
        facts, places = self._of_keys(batch.keys)
        offsets = None
        if batch.offsets is not None:
            lengths = torch.tensor(batch.ends).diff().to(self.device)
            facts = facts.repeat_interleave(lengths, 1, output_size=len(values))
            offsets = batch.offsets.to(self.device)
        base, limit, padding = facts
        is_row = (values >= 0) & (values < limit) & (values != padding)
        numbers = torch.where(is_row, values + base, -1)
        return Looked(numbers, offsets, places, batch.num_samples)

    def _of_keys(self, keys: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Base, limit and padding of each key, [3, keys], and the features' places among them."""
        if keys not in self._known:
            nothing = (0, 0, -1)  # of a feature that this collection does not look up
            facts = torch.tensor([self._facts.get(key, nothing) for key in keys]).t().contiguous()
            places = torch.tensor([keys.index(name) for name in self.features])
            self._known[keys] = facts.to(self.device), places.to(self.device)
        return self._known[keys]

    def number(self, rows: Rows) -> Tensor:
        """Ascending numbers of rows, each once, on the host."""
        parts = [torch.empty(0, dtype=torch.int64)]  # if there is no table
        for table, given in rows.items():
            place = self._place(table)
            base, end = self.bases[place : place + 2].tolist()
            parts.append(row_numbers(table, given, end - base).cpu() + base)
        numbers: Tensor = torch.cat(parts).unique()
        return numbers

    def _place(self, table: str) -> int:
        if table not in self.names:
            raise KeyError(f"no table {table!r}; there are {few(self.names)}")
        return self.names.index(table)

    def by_table(self, numbers: Tensor) -> dict[str, Tensor]:
        """Row numbers from ascending ones among all tables; tables without one are left out."""
        cuts = torch.searchsorted(numbers, self.bases).tolist()
        found = {}
        for place, name in enumerate(self.names):
            if cuts[place] < cuts[place + 1]:
                found[name] = numbers[cuts[place] : cuts[place + 1]] - self.bases[place]
        return found

    def bits(self, numbers: Tensor) -> Tensor:
        return bits_of(numbers.to(self.device), self.num_rows)

    def are_in(self, bits: Tensor, looked: Looked) -> Tensor:
        """Of each lookup, whether its row has a bit."""
        return in_bits(bits, looked.numbers.clamp(min=0)) & looked.is_real

    def samples_with(
        self, looked: Looked, flags: Tensor, least: int | str, *, each_table: bool = False
    ) -> Tensor:
        """Samples with at least so many flagged lookups, or "all" of theirs and at least one, [B].

        `each_table`: so many of every table's.
        """
        flagged = looked.count(flags)
        if least == "all":
            real = looked.count(looked.is_real).sum(1)
            return (flagged.sum(1) == real) & (real > 0)
        assert isinstance(least, int)
        if not each_table:
            return flagged.sum(1) >= least
        per_table = flagged.new_zeros(len(flagged), len(self.names))
        return (per_table.index_add_(1, self._table_of, flagged) >= least).all(1)


@dataclass(frozen=True)
class Threshold:
    """What a search has found: rows whose components all moved less than `tau` are stale."""

    tau: float  # 0: none is
    share: float  # of the sampled hot inputs, or lookups of hot rows, that are stale by `tau`
    iterations: int
    converged: bool  # to what was asked for; if not, `share` is what can be had below it
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
    """Bisect for a threshold at which `share_at`, which never falls, is near the target; `what`
    it is a share of.

    Where no threshold reaches it, since the rows of too many were not watched long enough to be
    told, the target is taken of the others. Where the share jumps over it, the threshold before
    the jump is taken.
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
