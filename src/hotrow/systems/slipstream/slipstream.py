"""Slipstream and random-drop, its control, as a user asks for them.

    slipstream = Slipstream(target=0.3, test=held_out)
    trainer = Trainer(model, loss_fn, ..., system=slipstream)
    for record in trainer.run(loader):      # an epoch
        ...
    print(slipstream.record.share)          # of the samples, that were left out

So they take batches as they come, whatever the collection's strategy. A system that orders or
splits samples has them as its `skip`, and binds them when it knows its hot rows:

    skip = slipstream.bound(embedding, hot, num_batches, ids=trainer.ids)   # a skip.Skip
    try:
        for segment in skip.segments(batches):      # the epoch's next ones, in one call or several
            ...                                     # trained before the next is asked for
        skip.note(test_loss)                        # whenever there is one
        skip.renew(hot)                             # other rows are hot now
        skip.begin(num_batches)                     # another epoch
    finally:
        skip.close()                                # no row stays frozen

Hotline evaluates on `test` whenever `validate_every` says; FAE when it switches, on its own test
samples if it has any.
`counted` and what else finds hot rows are then unused.
What is skipped, and when, is decided in skip.py.
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

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.engine.profile import Profile
from hotrow.inputs.batch import parse
from hotrow.inputs.held_batches import Kept
from hotrow.inputs.hotset import HotSet
from hotrow.inputs.samples import Take, check_both
from hotrow.inputs.tree import tensors_in
from hotrow.support.messages import did_you_mean, warn
from hotrow.support.units import parse_bytes
from hotrow.systems.calibrate import AccessCounts, HotReport, top_k
from hotrow.systems.fae.separate import check_evaluated_again
from hotrow.systems.slipstream.skip import (
    Ids,
    Join,
    Skip,
    SkipRandom,
    SkipRecord,
    SkipSettings,
    SkipStale,
    batches_per_epoch,
    rows_of,
)
from hotrow.systems.slipstream.staleness import Rows
from hotrow.training.trainer import Trainer

_VALIDATIONS = 10  # an epoch, unless somebody says how many


class _AsTheyCome(ABC):
    """Trains what a skip lets through, epoch by epoch. Each `run()` begins an epoch."""

    keeps_batches = True

    def __init__(self, batches_per_epoch: int | None, take: Take | None, join: Join | None) -> None:
        if batches_per_epoch is not None:
            _check_count("batches_per_epoch", batches_per_epoch, 1)
        check_both(take, join)
        self.batches_per_epoch = batches_per_epoch
        self._take, self._join = take, join
        self._skip: Skip | None = None
        self.epochs = 0  # of the last run that have ended

    @property
    @abstractmethod
    def record(self) -> SkipRecord:
        """What was decided, and what came of it."""

    def attach(self, trainer: Trainer[Any]) -> None:
        """Refuses a model whose rows are not one collection's."""
        why = f"{type(self).__name__} chooses samples by the rows"
        self._trainer, (self._embedding, self._ids) = trainer, trainer.one_collection(why)
        self._skip = None

    def passes(self, batches: Iterable[Any]) -> Generator[Iterable[Any]]:
        count, self.epochs = self._count(batches), 0
        stream = Kept(batches)
        try:
            for first in stream:
                where = [each.device for each in tensors_in(self._ids(first))]
                self._device = where[0] if where else torch.device("cpu")
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
        """Whether anything is asked for."""

    @abstractmethod
    def _epoch(self, batches: Iterator[Any], count: int | None) -> Iterator[Iterable[Any]]: ...

    def _count(self, batches: Iterable[Any]) -> int | None:
        """The batches of an epoch; None: nobody knows."""
        return self.batches_per_epoch or batches_per_epoch(batches) or None


class Slipstream(_AsTheyCome):
    """Leaves out samples whose rows have stopped changing, or the updates of such rows.

    `target` is the share of hot samples, those whose rows are all hot, to leave out; `mode`
    "samples" leaves them out whole, as published, "rows" trains them and leaves alone the rows that
    have stopped. For the other settings see `SkipSettings` in skip.py. Changes results.

    Hot are the most used rows that fit `hot_budget`: by `profile` (counts as a collection takes
    them) or, without one, by the ids of the first epoch's first batches, of which `counted` is
    the share; `hot` names them (row numbers by table). `test` are batches to evaluate on every
    `validate_every` steps: when their loss rises, all is trained again, for good. Without
    them nobody looks, and a warning says so; `validate_every=0` says that it is meant.

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
        if not 0 < counted < 1:
            raise ValueError(f"counted must be a share above 0 and below 1, not {counted!r}")
        if validate_every is not None:
            _check_count("validate_every", validate_every, 0)
        check_evaluated_again(test)
        if hot is not None and profile is not None:
            raise ValueError("hot names the hot rows, and profile would choose them: give one")
        self.hot_budget, self._profile, self._given, self._counted = (
            hot_budget, profile, hot, counted,
        )  # fmt: skip
        self.test, self._validate_every = test, validate_every
        self._is_told = False
        self.hot_report: HotReport | None = None  # of rows that it has chosen by counts

    @classmethod
    def as_published(cls, **options: Any) -> Self:
        """Rows nobody visited count as stale, and one decision an epoch is for good."""
        return cls(SkipSettings.as_published(), **options)

    @property
    def record(self) -> SkipRecord:
        """What was decided, and what came of it."""
        return SkipRecord(self.settings.mode) if self._skip is None else self._skip.record

    def bound(
        self, embedding: EmbeddingBagCollection, hot: Rows | HotSet, num_batches: int, *, ids: Ids,
        device: str | torch.device = "cpu", done: int = 0,
    ) -> SkipStale:  # fmt: skip
        """For epochs of so many batches, whose first `done` have been trained; `device` is where
        the loader's batches are. From now on `record` is its record."""
        starting = max(self.settings.starting_batch, done)
        skip = SkipStale(
            embedding, rows_of(hot), num_batches,
            replace(self.settings, starting_batch=starting), ids=ids,
            take=self._take, join=self._join, device=device, done=done,
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
        """Finds hot rows, if need be by training and counting some batches."""
        done, hot, profile = 0, self._given, self._profile
        if hot is None and profile is None:
            done = max(1, round(self._counted * count))
        starting = max(done, self.settings.starting_batch)
        # Before any is trained: there may be too few to skip from.
        replace(self.settings, starting_batch=starting).snapshots(count)
        if done:
            counts = AccessCounts(self._embedding.tables, self._device)
            yield self._counting(islice(batches, done), counts)
            hot = self._chosen(counts)
        elif hot is None and profile is not None:
            hot = self._chosen(AccessCounts.of_profile(self._embedding.tables, profile))
        assert hot is not None
        self.bound(self._embedding, hot, count, ids=self._ids, device=self._device, done=done)

    def _counting(self, batches: Iterable[Any], counts: AccessCounts) -> Iterator[Any]:
        for batch in batches:
            counts.add(parse(self._ids(batch), self._embedding.features, None))
            yield batch

    def _chosen(self, counts: AccessCounts) -> Rows:
        groups = self._embedding.groups
        sizes = {table.name: 4 * group.width for group in groups for table in group.layout.tables}
        budget = parse_bytes(self.hot_budget, total=self._embedding.bytes_total)
        chosen = top_k(counts, sizes, budget)
        self.hot_report = chosen.report
        return rows_of(chosen.hot)

    # -- validation --------------------------------------------------------------------

    def begin_to_validate(self, trainer: Trainer[Any], num_batches: int) -> None:
        """An epoch of so many batches begins, whoever trains it."""
        every = self._validate_every
        if self.test is None or not self._skips:
            if every != 0 and self._skips and not self._is_told:
                self._is_told = True
                warn(
                    "Slipstream has no test= batches, by whose loss it would notice that skipping "
                    "does harm: it goes on whatever happens. validate_every=0 says that it is meant"
                )
            every = 0
        self._trainer = trainer
        self._every = max(1, num_batches // _VALIDATIONS) if every is None else every
        self._next = trainer.step + self._every

    def validated(self, segment: Iterable[Any]) -> Iterator[Iterable[Any]]:
        """In parts, between which nothing is in flight and the model can be evaluated."""
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
                self._skip.note(self._trainer.mean_loss(self.test))


class RandomDrop(_AsTheyCome):
    """Leaves out samples at random: what leaving out stale ones must be compared with.

    As many as Slipstream has (`like=slipstream.record`), from the same batch of each epoch on, or
    a `share` from `starting_batch` on. An epoch is one `run()`, or `batches_per_epoch` of its
    batches. Changes results.
    """

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
            _check_count("starting_batch", starting_batch, 0)
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
        """Leave out as many as somebody else has by now, before anything was trained."""
        self._like = record

    @property
    def record(self) -> SkipRecord:
        """What came of it."""
        return SkipRecord("random") if self._skip is None else self._skip.record

    def bound(
        self, embedding: EmbeddingBagCollection, hot: Rows | HotSet, num_batches: int, *, ids: Ids
    ) -> SkipRandom:
        """For epochs of so many batches. From now on `record` is its record."""
        skip = SkipRandom.like(
            self._like, ids=ids, features=embedding.features, seed=self._seed, take=self._take,
            join=self._join,
        )  # fmt: skip
        self._skip = skip
        return skip

    @property
    def _skips(self) -> bool:
        return self._like.dropped > 0

    def _epoch(self, batches: Iterator[Any], count: int | None) -> Iterator[Iterable[Any]]:
        if self._skip is None:
            self.bound(self._embedding, {}, count or 0, ids=self._ids)
        else:
            self._skip.begin(count or 0)
        assert self._skip is not None
        yield from self._skip.segments(batches)


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


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
