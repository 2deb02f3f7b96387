"""What all skips share: their settings, records and methods.

A skip stands between the order of batches and the window. It yields batches in segments, and all of
one must be trained before the next is asked for, because a decision looks at rows. stale.py has
Slipstream's skip, and slipstream.py random-drop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.inputs.hotset import HotSet
from hotrow.systems.slipstream.sifting import Ids
from hotrow.systems.slipstream.staleness import Rows, Threshold

MODES = ("samples", "rows")
_TOLERANCE = 0.08  # as published


@dataclass(frozen=True)
class SkipSettings:
    """How Slipstream skips. Names in brackets are those of the published code."""

    # Share of hot inputs to skip [target_drop_percentage]; in mode "rows", of lookups of hot rows.
    target: float = 0.3
    # Distance from the target at which a search may end; None: 0.08, or half of a small target.
    tolerance: float | None = None
    starting_batch: int = 0  # batches before the first snapshot [starting_minibatch]
    watched: float = 0.015  # share of the batches between the snapshots [minibatch_percentage]
    sample_rate: float = 0.01  # share of the batches that the search looks at
    search: tuple[float, float] = (0.0, 0.1)  # first range of thresholds
    iterations: int = 25  # of bisection
    stale_lookups: int | str = "all"  # lookups that make a sample stale [non_changing_index]
    each_table: bool = False  # so many lookups of every table, instead of in all
    mode: str = "samples"  # what is skipped: stale "samples", or the update of stale "rows"
    # Not published:
    least_visits: int = 1  # visits between the snapshots that a stale row needs
    recheck_every: int = 1000  # batches after which stale rows are decided again; 0: never
    patience: int = 3  # consecutive validation losses above the best that end skipping
    slack: float | None = None  # distance from the best that is tolerated; None: by their noise

    @classmethod
    def as_published(cls, **changes: Any) -> Self:
        """Return the published settings: unvisited rows count as stale, one decision is final."""
        return cls(**{"least_visits": 0, "recheck_every": 0, **changes})

    def __post_init__(self) -> None:
        for name in ("target", "tolerance", "watched", "sample_rate"):
            share = getattr(self, name)
            if (name, share) != ("tolerance", None) and not _is_number(share, most=1):
                _refuse(name, "a share between 0 and 1", share)
        least = {"starting_batch": 0, "least_visits": 0, "recheck_every": 0}
        for name, lowest in {**least, "iterations": 1, "patience": 1}.items():
            check_count(f"skipping: {name}", getattr(self, name), lowest)
        if self.target and self.allowed >= self.target:
            _refuse("tolerance", f"below the target of {self.target}", self.tolerance)
        if self.slack is not None and not _is_number(self.slack):
            _refuse("slack", "a number of at least 0", self.slack)
        if self.mode not in MODES:
            _refuse("mode", f"one of {', '.join(MODES)}", self.mode)
        if self.stale_lookups != "all":
            check_count("skipping: stale_lookups", self.stale_lookups, 1, or_else=", or 'all'")
        ends = tuple(self.search)
        if len(ends) != 2 or not all(map(_is_number, ends)) or not ends[0] < ends[1]:
            _refuse(
                "search", "two thresholds, the first of at least 0 and the smaller", self.search
            )
        object.__setattr__(self, "search", (float(ends[0]), float(ends[1])))

    @property
    def allowed(self) -> float:
        """Return the distance from the target at which a search may end."""
        return min(_TOLERANCE, self.target / 2) if self.tolerance is None else self.tolerance

    def snapshots(self, num_batches: int) -> tuple[int, int]:
        """Return after how many batches of an epoch the first and the second are taken."""
        between = round(self.watched * num_batches) + 1
        second = self.starting_batch + between
        if self.target and second >= num_batches:
            raise ValueError(
                f"skipping: the second snapshot comes after {second:,} batches (starting_batch="
                f"{self.starting_batch:,}, and {between:,} from watched={self.watched}), but there "
                f"are {num_batches:,}: none would be left to skip from"
            )
        return self.starting_batch, second


def _is_number(value: object, most: float = math.inf) -> bool:
    """Return whether this is a finite number from 0 to `most`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= most and value < math.inf  # type: ignore[operator]


def check_count(name: str, value: object, least: int, *, or_else: str = "") -> None:
    """Refuse anything but a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = f"a whole number of at least {least}{or_else}"
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def _refuse(name: str, wanted: str, value: object) -> None:
    raise ValueError(f"skipping: {name} must be {wanted}, not {value!r}")


@dataclass(frozen=True)
class SkipRecord:
    """Decisions of a skip, and their results."""

    mode: str
    first_batch: int = 0  # of each epoch, from which samples may be skipped
    offered: int = 0  # samples from there on, where samples may be dropped
    dropped: int = 0  # of those, not trained
    threshold: Threshold | None = None  # None: no search yet
    hot_rows: Mapping[str, int] = field(default_factory=dict)  # by table
    stale_rows: Mapping[str, int] = field(default_factory=dict)  # of the hot rows, now
    seldom_rows: Mapping[str, int] = field(default_factory=dict)  # visited too seldom
    snapshot_bytes: int = 0  # of slow memory, at most
    rechecks: int = 0
    moving_again: int = 0  # rows that were stale before a re-check and not after it
    stopped: str = ""  # why skipping has ended

    @property
    def share(self) -> float:
        return self.dropped / self.offered if self.offered else 0.0

    @property
    def dropped_hot(self) -> int:
        """Samples dropped because all their rows are hot and stale."""
        return self.dropped if self.mode == "samples" else 0


class Skip(Protocol):
    """Chooses what is trained."""

    @property
    def record(self) -> SkipRecord: ...

    def begin(self, num_batches: int) -> None:
        """Begin an epoch of so many batches."""

    def segments(self, batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
        """Yield what to train of the epoch's next batches; train a segment before the next."""

    def note(self, validation_loss: float) -> None:
        """Take the loss on samples that the model is not trained on."""

    def renew(self, hot: Rows | HotSet) -> None:
        """Set other hot rows, from the next batch on. Nothing may be in flight."""

    def close(self) -> None:
        """End a run: unfreeze all rows. `segments` can continue the epoch."""


class Bindable(Protocol):
    """A skip as a user writes it, before hot rows are known."""

    def bound(
        self, embedding: EmbeddingBagCollection, hot: Rows | HotSet, num_batches: int, *, ids: Ids
    ) -> Skip:
        """Return a skip for a first epoch of so many batches, whose `ids` the collection reads."""


def batches_per_epoch(batches: Iterable[Any]) -> int | None:
    """Return a loader's `batches_per_epoch`, or its length; None if it has neither."""
    count: int | None = getattr(batches, "batches_per_epoch", None)
    if count is None and isinstance(batches, Sized):
        with suppress(TypeError):  # a DataLoader of an IterableDataset
            count = len(batches)
    return count


def check_skip(skip: object) -> None:
    """Refuse an object that is no skip."""
    if skip is not None and (isinstance(skip, type) or not hasattr(skip, "bound")):
        raise TypeError(
            f"skip is what leaves out samples, such as hotrow.Slipstream(), not {skip!r}"
        )


def rows_of(hot: Rows | HotSet) -> Rows:
    """Return row numbers by table."""
    if isinstance(hot, HotSet):
        return {table.name: hot.rows(table.name) for table in hot.places.tables}
    return hot
