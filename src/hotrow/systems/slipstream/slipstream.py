"""Slipstream and random-drop, its control, as a user writes them.

    slipstream = Slipstream(target=0.3, test=held_out)
    trainer = Trainer(model, loss_fn, ..., system=slipstream)
    for record in trainer.run(loader):      # an epoch
        ...
    print(slipstream.record.share)          # share of the samples that were skipped

Used so, they take batches in the loader's order, with any strategy. A system that orders or splits
samples has them as its `skip`, and calls `bound` when it knows its hot rows (skip.py says what
follows). Hotline evaluates on `test` every `validate_every` steps; FAE when it switches, on its own
test samples if it has any. Settings that find hot rows, such as `counted`, are then unused.
stale.py decides what is skipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from inspect import signature
from itertools import chain, islice
from typing import Any, Self

import torch
from torch import Tensor

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.engine.profile import Profile
from hotrow.inputs.batch import parse
from hotrow.inputs.held_batches import Kept
from hotrow.inputs.hotset import HotSet
from hotrow.inputs.samples import Join, Take, check_both
from hotrow.inputs.tree import tensors_in
from hotrow.support.messages import did_you_mean, warn
from hotrow.support.units import parse_bytes
from hotrow.systems.calibrate import AccessCounts, bytes_of_rows, row_bytes, top_k
from hotrow.systems.fae.separate import check_evaluated_again
from hotrow.systems.slipstream.sifting import Ids, Refill
from hotrow.systems.slipstream.skip import (
    Skip,
    SkipRecord,
    SkipSettings,
    batches_per_epoch,
    check_count,
    rows_of,
)
from hotrow.systems.slipstream.stale import SkipStale
from hotrow.systems.slipstream.staleness import Rows
from hotrow.training.trainer import Trainer

_VALIDATIONS = 10  # per epoch, by default


class _StreamingSkip(ABC):
    """Trains what a skip keeps, epoch by epoch. Each `run()` begins an epoch."""

    keeps_batches = True
    _mode: str  # of the record

    def __init__(self, batches_per_epoch: int | None, take: Take | None, join: Join | None) -> None:
        if batches_per_epoch is not None:
            check_count("batches_per_epoch", batches_per_epoch, 1)
        check_both(take, join)
        self.batches_per_epoch = batches_per_epoch
        self.take, self._join = take, join
        self._skip: Skip | None = None
        self.epochs = 0  # finished ones of the last run

    @property
    def record(self) -> SkipRecord:
        """Decisions, and their results."""
        return SkipRecord(self._mode) if self._skip is None else self._skip.record

    def attach(self, trainer: Trainer[Any]) -> None:
        """Bind to a trainer; refuse a model without exactly one collection."""
        why = f"{type(self).__name__} chooses samples by the rows"
        self._trainer, (self._embedding, self._ids) = trainer, trainer.one_collection(why)
        self._skip = None

    def passes(self, batches: Iterable[Any]) -> Generator[Iterable[Any]]:
        count = self.batches_per_epoch or batches_per_epoch(batches) or None  # None: unknown
        stream, self.epochs = Kept(batches), 0
        try:
            for first in stream:
                devices = [tensor.device for tensor in tensors_in(self._ids(first))]
                self._device = devices[0] if devices else torch.device("cpu")
                rest = stream if count is None else islice(stream, count - 1)
                epoch = chain([first], rest)
                yield from self._epoch(epoch, count) if self._skips else [epoch]
                self.epochs += 1
        finally:
            if self._skip is not None:
                self._skip.close()

    @property
    @abstractmethod
    def _skips(self) -> bool:
        """Return whether anything is to be skipped."""

    @abstractmethod
    def _epoch(self, batches: Iterator[Any], count: int | None) -> Iterator[Iterable[Any]]: ...


class Slipstream(_StreamingSkip):
    """Skips samples whose rows have stopped changing, or the updates of such rows.

    `target` is the share of hot samples, whose rows are all hot, to skip. Mode "samples" skips
    them, as published; "rows" trains them and freezes the rows that have stopped. For the other
    settings see `SkipSettings` in skip.py. Changes results.

    Hot rows are the most used ones that fit `hot_budget`: by `profile` (counts as a collection
    takes them) or, without one, by the ids of the first epoch's first batches, of which `counted`
    is the share. `hot` names them instead (row numbers by table). `test` has batches to evaluate on
    every `validate_every` steps: when their loss rises, skipping ends for good. Without them a
    warning says that skipping is not checked; `validate_every=0` turns it off.

    An epoch is one `run()`, or `batches_per_epoch` of its batches. `take` and `join` are for
    batches that are not made of tensors alone.
    """

    def __init__(
        self,
        settings: SkipSettings | None = None,
        *,
        hot_budget: str | float = "256MB",
        profile: Profile | None = None,
        hot: Rows | None = None,
        counted: float = 0.05,
        test: Iterable[Any] | None = None,
        validate_every: int | None = None,
        batches_per_epoch: int | None = None,
        take: Take | None = None,
        join: Join | None = None,
        **changes: Any,
    ) -> None:
        """`changes` are settings by name: `Slipstream(target=0.2, mode="rows")`."""
        super().__init__(batches_per_epoch, take, join)
        if settings is not None and not isinstance(settings, SkipSettings):
            raise TypeError(f"settings go by their names, such as target=0.3; got {settings!r}")
        self.settings = _changed(settings or SkipSettings(), changes)
        self._mode = self.settings.mode
        if not 0 < counted < 1:
            raise ValueError(f"counted must be a share above 0 and below 1, not {counted!r}")
        if validate_every is not None:
            check_count("validate_every", validate_every, 0)
        check_evaluated_again(test)
        if hot is not None and profile is not None:
            raise ValueError("hot names the hot rows, and profile would choose them: give one")
        self.hot_budget, self._profile = hot_budget, profile
        self._given, self._counted = hot, counted
        self.test, self._validate_every = test, validate_every
        self._has_warned = False

    @classmethod
    def as_published(cls, **options: Any) -> Self:
        """Return the published settings: unvisited rows count as stale, one decision per epoch."""
        return cls(SkipSettings.as_published(), **options)

    def bound(
        self, embedding: EmbeddingBagCollection, hot: Rows | HotSet, num_batches: int, *, ids: Ids,
        device: str | torch.device = "cpu", done: int = 0,
    ) -> SkipStale:  # fmt: skip
        """Return a skip for epochs of so many batches, the first `done` of which were trained.

        `device` is where the loader's batches are. From now on `record` is the skip's.
        """
        starting = max(self.settings.starting_batch, done)
        skip = SkipStale(
            embedding, rows_of(hot), num_batches,
            replace(self.settings, starting_batch=starting), ids=ids,
            take=self.take, join=self._join, device=device, done=done,
        )  # fmt: skip
        self._skip = skip
        return skip

    @property
    def _skips(self) -> bool:
        return self.settings.target > 0

    def _epoch(self, batches: Iterator[Any], count: int | None) -> Iterator[Iterable[Any]]:
        if count is None:
            raise ValueError(
                "Slipstream must know how many batches an epoch has, and these do not say (no "
                "len()); give batches_per_epoch="
            )
        self.begin_to_validate(self._trainer, count)
        if self._skip is not None:
            self._skip.begin(count)
        else:
            yield from self._bind(batches, count)
        assert self._skip is not None
        for segment in self._skip.segments(batches):
            yield from self.validated(segment)

    # -- hot rows ----------------------------------------------------------------------

    def _bind(self, batches: Iterator[Any], count: int) -> Iterator[Iterable[Any]]:
        """Find hot rows, if necessary by counting some batches while they are trained."""
        tables, hot, done = self._embedding.tables, self._given, 0
        if self._profile is not None:
            hot = self._chosen(AccessCounts.of_profile(tables, self._profile))
        elif hot is None:
            done = max(1, round(self._counted * count))
        starting = max(done, self.settings.starting_batch)
        # Raises before training if there are too few batches.
        replace(self.settings, starting_batch=starting).snapshots(count)
        if hot is None:
            counts = AccessCounts(tables, self._device)
            yield self._counting(islice(batches, done), counts)
            hot = self._chosen(counts)
        self.bound(self._embedding, hot, count, ids=self._ids, device=self._device, done=done)

    def _counting(self, batches: Iterable[Any], counts: AccessCounts) -> Iterator[Any]:
        for batch in batches:
            counts.add(parse(self._ids(batch), self._embedding.features, None))
            yield batch

    def _chosen(self, counts: AccessCounts) -> Rows:
        budget = parse_bytes(self.hot_budget, total=bytes_of_rows(self._embedding))
        return rows_of(top_k(counts, row_bytes(self._embedding), budget).hot)

    # -- validation --------------------------------------------------------------------

    def begin_to_validate(self, trainer: Trainer[Any], num_batches: int) -> None:
        """Begin an epoch of so many batches, for this or another system."""
        every = self._validate_every
        if self.test is None or not self._skips:
            if every != 0 and self._skips and not self._has_warned:
                self._has_warned = True
                warn(
                    "Slipstream has no test= batches, so it cannot notice that skipping does harm: "
                    "it goes on whatever happens. validate_every=0 turns this warning off"
                )
            every = 0
        self._trainer = trainer
        self._every = max(1, num_batches // _VALIDATIONS) if every is None else every
        self._next = trainer.step + self._every

    def validated(self, segment: Iterable[Any]) -> Iterator[Iterable[Any]]:
        """Yield a segment in parts; evaluate the model between them, when nothing is in flight."""
        if not self._every:
            yield segment
            return
        batches = iter(segment)
        for first in batches:
            left = self._next - self._trainer.step
            yield chain([first], islice(batches, max(0, left - 1)))
            if self._trainer.step >= self._next:
                self._next = self._trainer.step + self._every
                assert self._skip is not None
                assert self.test is not None
                self._skip.note(self._trainer.mean_loss(self.test, whole=True))


class RandomDrop(_StreamingSkip):
    """Skips samples at random: the control for skipping stale ones.

    As many as Slipstream has (`like=slipstream.record`), from the same batch of each epoch on, or
    a `share` from `starting_batch` on. An epoch is one `run()`, or `batches_per_epoch` of its
    batches. Changes results.
    """

    _mode = "random"

    def __init__(
        self,
        share: float | None = None,
        *,
        like: SkipRecord | None = None,
        starting_batch: int = 0,
        seed: int = 0,
        batches_per_epoch: int | None = None,
        take: Take | None = None,
        join: Join | None = None,
    ) -> None:
        super().__init__(batches_per_epoch, take, join)
        if (share is None) == (like is None):
            raise ValueError(
                "RandomDrop takes a share of the samples, or like=, a record: give one"
            )
        if like is None:
            assert share is not None
            if not isinstance(share, int | float) or not 0 <= share < 1:
                raise ValueError(f"share must be at least 0 and below 1, not {share!r}")
            check_count("starting_batch", starting_batch, 0)
            part = Fraction(share).limit_denominator(1_000_000)
            like = SkipRecord(
                "random", starting_batch, offered=part.denominator, dropped=part.numerator
            )
        elif not isinstance(like, SkipRecord):
            raise TypeError(f"like is a record, such as slipstream.record, not {like!r}")
        elif starting_batch:
            raise ValueError("like= says from which batch on; leave starting_batch out")
        elif not like.dropped:
            why = (
                "mode 'rows' leaves out updates and no sample"
                if like.mode == "rows"
                else f"of {like.offered:,} samples none was left out"
            )
            warn(f"nothing is left out at random, as like= says: {why}. RandomDrop(0.1) leaves out")
        self._like, self._seed = like, seed

    def follow(self, record: SkipRecord) -> None:
        """Skip as many as another record says; call it before training."""
        self._like = record

    def bound(
        self, embedding: EmbeddingBagCollection, hot: Rows | HotSet, num_batches: int, *, ids: Ids
    ) -> Self:
        """Begin anew, as a skip for epochs of any length."""
        self._refill = Refill(ids, embedding.features, self.take, self._join)
        self._draw = torch.Generator().manual_seed(self._seed)
        self._random = SkipRecord(self._mode, first_batch=self._like.first_batch)
        self._position, self._skip = 0, self
        return self

    @property
    def record(self) -> SkipRecord:
        """How many samples were skipped."""
        return SkipRecord(self._mode) if self._skip is None else self._random

    @property
    def _skips(self) -> bool:
        return self._like.dropped > 0

    def _epoch(self, batches: Iterator[Any], count: int | None) -> Iterator[Iterable[Any]]:
        if self._skip is None:
            self.bound(self._embedding, {}, count or 0, ids=self._ids)
        self.begin(count or 0)
        yield from self.segments(batches)

    def begin(self, num_batches: int) -> None:
        """Begin an epoch."""
        self._position = 0

    def segments(self, batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
        """Yield what to train of the epoch's next batches."""
        yield self._thinned(batches) if self._skips else batches

    def _thinned(self, batches: Iterable[Any]) -> Iterator[Any]:
        self._refill.clear()
        for batch in batches:
            self._position += 1
            if self._position <= self._like.first_batch:
                yield from self._refill.whole(batch)
            else:
                yield from self._refill.keep(batch, self._keep(batch))
        yield from self._refill.flush()

    def _keep(self, batch: Any) -> Tensor:
        """Return which samples are trained, [B]."""
        r, like, size = self._random, self._like, self._refill.count(batch)
        # In whole numbers, so that exactly `dropped` are gone after `offered`.
        due = (r.offered + size) * like.dropped // like.offered - r.dropped
        self._random = replace(r, offered=r.offered + size, dropped=r.dropped + due)
        keep = torch.ones(size, dtype=torch.bool)
        keep[torch.randperm(size, generator=self._draw)[:due]] = False
        return keep

    def note(self, validation_loss: float) -> None: ...

    def renew(self, hot: Rows | HotSet) -> None: ...

    def close(self) -> None: ...


def _changed(settings: SkipSettings, changes: dict[str, Any]) -> SkipSettings:
    known = tuple(vars(settings))
    for name in changes:
        if name not in known:
            every = (*known, *signature(Slipstream).parameters)
            raise TypeError(
                f"Slipstream has no {name!r}{did_you_mean(name, every)}; its settings are "
                f"{', '.join(known)}"
            )
    return replace(settings, **changes)
