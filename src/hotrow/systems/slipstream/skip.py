"""What is left out of training: nothing, samples or rows that have gone stale, or random samples.

Stands between the order of batches and the window. Batches are handed out in segments, and all of
one must have been trained before the next is asked for: a decision looks at rows.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.inputs import samples
from hotrow.inputs.batch import parse
from hotrow.inputs.hotset import HotSet
from hotrow.inputs.samples import Take
from hotrow.inputs.tree import map_tensors, tensors_in
from hotrow.support.messages import apart, warn
from hotrow.systems.slipstream.staleness import (
    Looked,
    Numbering,
    Rows,
    Snapshot,
    Threshold,
    find_threshold,
)
from hotrow.systems.sorting import Sorter

MODES = ("samples", "rows")
Ids = Callable[[Any], Any]  # a batch -> what its collection looks up
Join = Callable[[Sequence[Any]], Any]

_TOLERANCE = 0.08  # as published
_CHOICE = 2  # times as many inputs as are to be skipped must have been watched,
_LONGEST = 0.25  # or so large a share of the epoch's batches
_AHEAD = 2  # batches that are read after one is sifted and before it is asked for: nobody waits
_TOGETHER = 8  # batches at the most are sifted at once: launches cost the host more than the GPU,
_MOST_TOGETHER = 32 << 20  # or so many bytes of them, which are in fast memory until trained
_NOISE = 6  # times what losses vary by is no noise: it ends 1 in 25 runs of 30 where none falls


@dataclass(frozen=True)
class SkipSettings:
    """How Slipstream skips. Names in brackets are those of the published code."""

    # Share of hot inputs to skip [target_drop_percentage]; in mode "rows", of lookups of hot rows.
    target: float = 0.3
    # How far from it a search may end; None: 0.08, or half of a target for which that is too much.
    tolerance: float | None = None
    starting_batch: int = 0  # batches before the first snapshot [starting_minibatch]
    watched: float = 0.015  # share of the batches between the snapshots [minibatch_percentage]
    sample_rate: float = 0.01  # share of the batches that the search looks at
    search: tuple[float, float] = (0.0, 0.1)  # where thresholds are looked for, at first
    iterations: int = 25  # of bisection
    stale_lookups: int | str = "all"  # that make a sample stale [non_changing_index]
    each_table: bool = False  # so many of every table's, instead of in all
    mode: str = "samples"  # what is left out: stale "samples", or the update of stale "rows"
    # What was not published:
    least_visits: int = 1  # between the snapshots, of a row that may be stale
    recheck_every: int = 1000  # batches after which it is decided again what is stale; 0: never
    patience: int = 3  # validation losses above the best, one after the other, that end skipping
    slack: float | None = None  # how far above the best is not above it; None: by what they vary

    @classmethod
    def as_published(cls, **changes: Any) -> Self:
        """Rows nobody visited count as stale, and one decision is for good."""
        return cls(**{"least_visits": 0, "recheck_every": 0, **changes})

    def __post_init__(self) -> None:
        numbers = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("target", "tolerance", "watched", "sample_rate"):
            if name == "tolerance" and self.tolerance is None:
                continue
            if not _is_number(numbers[name]) or not 0 <= numbers[name] <= 1:
                _refuse(name, "a share between 0 and 1", numbers[name])
        for name in ("starting_batch", "least_visits", "recheck_every"):
            _refuse_below(0, name, numbers[name])
        for name in ("iterations", "patience"):
            _refuse_below(1, name, numbers[name])
        if self.target and self.allowed >= self.target:
            _refuse("tolerance", f"below the target of {self.target}", self.tolerance)
        if self.slack is not None and not (_is_number(self.slack) and 0 <= self.slack < math.inf):
            _refuse("slack", "a number of at least 0", self.slack)
        if self.mode not in MODES:
            _refuse("mode", f"one of {', '.join(MODES)}", self.mode)
        if self.stale_lookups != "all":
            _refuse_below(1, "stale_lookups", self.stale_lookups, or_else=", or 'all'")
        ends = tuple(self.search)
        if (
            len(ends) != 2
            or not all(map(_is_number, ends))
            or not 0 <= ends[0] < ends[1] < math.inf
        ):
            _refuse(
                "search", "two thresholds, the first of at least 0 and the smaller", self.search
            )
        object.__setattr__(self, "search", (float(ends[0]), float(ends[1])))

    @property
    def allowed(self) -> float:
        """How far from the target a search may end."""
        return min(_TOLERANCE, self.target / 2) if self.tolerance is None else self.tolerance

    def snapshots(self, num_batches: int) -> tuple[int, int]:
        """After how many batches of an epoch the first and the second are taken."""
        between = round(self.watched * num_batches) + 1
        second = self.starting_batch + between
        if self.target and second >= num_batches:
            raise ValueError(
                f"skipping: the second snapshot comes after {second:,} batches (starting_batch="
                f"{self.starting_batch:,}, and {between:,} from watched={self.watched}), but there "
                f"are {num_batches:,}: none would be left to skip from"
            )
        return self.starting_batch, second


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_below(least: int, name: str, value: object, *, or_else: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _refuse(name, f"a whole number of at least {least}{or_else}", value)


def _refuse(name: str, wanted: str, value: object) -> None:
    raise ValueError(f"skipping: {name} must be {wanted}, not {value!r}")


@dataclass(frozen=True)
class SkipRecord:
    """What was decided, and what came of it."""

    mode: str
    first_batch: int = 0  # from which on samples may be skipped, in each epoch
    offered: int = 0  # samples from there on; counted where samples may be dropped
    dropped: int = 0  # of them, that were not trained
    threshold: Threshold | None = None  # None: no search yet
    hot_rows: Mapping[str, int] = field(default_factory=dict)  # by table
    stale_rows: Mapping[str, int] = field(default_factory=dict)  # of those, now
    seldom_rows: Mapping[str, int] = field(default_factory=dict)  # visited too seldom to tell
    snapshot_bytes: int = 0  # of slow memory, at the most
    rechecks: int = 0
    moving_again: int = 0  # rows that were stale before a re-check and not after it
    stopped: str = ""  # why nothing is skipped any more

    @property
    def share(self) -> float:
        return self.dropped / self.offered if self.offered else 0.0

    @property
    def dropped_hot(self) -> int:
        """Samples dropped because their rows, which are all hot, are stale."""
        return self.dropped if self.mode == "samples" else 0


class Skip(Protocol):
    """Chooses what is trained."""

    @property
    def record(self) -> SkipRecord: ...

    def begin(self, num_batches: int) -> None:
        """An epoch of so many batches begins."""

    def segments(self, batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
        """What to train of the epoch's next batches; all of one segment before the next."""

    def note(self, validation_loss: float) -> None:
        """How well the model does on samples that it is not trained on."""

    def renew(self, hot: Rows | HotSet) -> None:
        """Other rows are hot from the next batch on. Nothing is in flight."""

    def close(self) -> None:
        """A run is over: no row stays frozen. `segments` goes on with the epoch."""


class Bindable(Protocol):
    """A skip as a user asks for it, before it is known which rows are hot."""

    def bound(
        self, embedding: EmbeddingBagCollection, hot: Rows | HotSet, num_batches: int, *, ids: Ids
    ) -> Skip:
        """For a first epoch of so many batches, of which a collection looks up `ids`."""


@runtime_checkable
class Validating(Protocol):
    """A skip as a user asks for it, with samples to evaluate on, for a system that has none."""

    def begin_to_validate(self, trainer: Any, num_batches: int) -> None:
        """An epoch of so many batches begins."""

    def validated(self, segment: Iterable[Any]) -> Iterator[Iterable[Any]]:
        """A segment of what is bound, in parts, between which the model is evaluated."""


def batches_per_epoch(batches: Iterable[Any]) -> int | None:
    """As a loader says that goes through its data several times, or how many there are; None:
    nobody knows."""
    count: int | None = getattr(batches, "batches_per_epoch", None)
    if count is None and isinstance(batches, Sized):
        with suppress(TypeError):  # what a DataLoader of an IterableDataset says
            count = len(batches)
    return count


def check_skip(skip: object) -> None:
    """Refuses what cannot leave out samples."""
    can = hasattr(skip, "bound") or hasattr(skip, "segments")
    if skip is not None and (isinstance(skip, type) or not can):
        raise TypeError(
            f"skip is what leaves out samples, such as hotrow.Slipstream(), not {skip!r}"
        )


def begun(
    skip: Bindable | Skip,
    embedding: EmbeddingBagCollection,
    hot: Rows | HotSet,
    num_batches: int,
    ids: Ids,
) -> Skip:
    """A skip at the beginning of its first epoch."""
    if hasattr(skip, "bound"):
        return skip.bound(embedding, hot, num_batches, ids=ids)
    skip.begin(num_batches)
    return skip


class KeepAll:
    """Trains everything, batch by batch as it comes."""

    record = SkipRecord("nothing")

    def begin(self, num_batches: int) -> None: ...

    def segments(self, batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
        yield batches

    def note(self, validation_loss: float) -> None: ...

    def renew(self, hot: Rows | HotSet) -> None: ...

    def close(self) -> None: ...


class SkipStale:
    """Finds hot rows that have stopped changing, and skips samples with none but those, or their
    updates.

        batch 0          starting_batch          E + 1           recheck_every later
        | train          | train, count visits   | train what    | train all, as many as between
        |                |                       | is not stale  | the snapshots; search again
                         first snapshot          second, search

    `hot` are row numbers by table. Only samples whose rows are all hot are skipped. Samples that
    are left of several batches are joined to full ones. `device` is the loader's: where rows are
    watched and, if they are on no GPU, samples told apart.
    """

    def __init__(
        self,
        embedding: EmbeddingBagCollection,
        hot: Rows,
        num_batches: int,
        settings: SkipSettings | None = None,
        *,
        ids: Ids,
        take: Take | None = None,
        join: Join | None = None,
        device: str | torch.device = "cpu",
        done: int = 0,
    ) -> None:
        """`take` and `join` are for batches that inputs/samples.py does not know how to cut; `done`
        batches of the first epoch have been trained, `starting_batch` at most."""
        self.settings = SkipSettings() if settings is None else settings
        self._embedding, self._ids = embedding, ids
        self._all = Numbering(embedding.tables, torch.device(device))
        self._refill = _Refill(ids, embedding.features, take, join)
        self._sifter = None
        is_ours = take is None and join is None
        if _can_sift(embedding) and is_ours and self.settings.mode == "samples":
            self._sifter = _Sifter(embedding, self.settings, ids)
        self.record = SkipRecord(self.settings.mode)
        self._take_hot(hot)
        self._best, self._above = math.inf, 0  # validation losses
        self._noted: list[float] = []
        self._stale: Tensor | None = None  # numbers of rows that are skipped, or in question
        self._stale_bits: Tensor | None = None  # of them; None: no sample is left out now
        self._frozen: Tensor | None = None  # numbers of rows that are not updated now
        self._freezes = False  # whether the collection has bits of frozen rows
        self._visits: Tensor | None = None  # of each hot row and of all others; None: not counted
        self._snapshot: Snapshot | None = None
        self._between = 0  # batches from one snapshot to the next
        self.begin(num_batches)
        self._position = done

    def begin(self, num_batches: int) -> None:
        """A new epoch decides anew, unless a guard has ended skipping."""
        self._position, self._num_batches = 0, num_batches
        self._begin_anew()

    def renew(self, hot: Rows | HotSet) -> None:
        """Other rows are hot from the next batch on, and what is stale is decided anew."""
        self._take_hot(rows_of(hot))
        self._begin_anew()

    def _take_hot(self, hot: Rows) -> None:
        self._hot = self._all.number(hot)
        self._hot_there = self._hot.to(self._all.device)
        self._hot_bits: Tensor | None = None
        self.record = replace(self.record, hot_rows=self._counts(self._hot), stale_rows={})

    def _begin_anew(self) -> None:
        """The first snapshot comes when its batch has, or now."""
        self._forget()
        here, left = self._position, self._num_batches - self._position
        s = replace(self.settings, starting_batch=max(0, self.settings.starting_batch - here))
        # Once samples were offered in an epoch, all that follow are.
        is_first = here <= self.record.first_batch
        try:
            first, second = s.snapshots(left)
        except ValueError as error:
            if not here:
                warn(f"{error}; all are trained")
            if is_first:
                self.record = replace(self.record, first_batch=self._num_batches)
            return
        longest = min(int(_LONGEST * left), left - 1 - first)
        self._longest = max(second - first, longest)
        self._between = min(max(second - first, self._between), self._longest)
        self._sampled = max(1, math.ceil(s.sample_rate * left))
        if is_first:
            self.record = replace(self.record, first_batch=here + first + self._between)
        if s.target and not self.record.stopped:
            self._due(here + first, self._watch)

    def _forget(self) -> None:
        self._pause()
        self._stale = self._visits = self._snapshot = None
        self._due(None)

    # -- batches -----------------------------------------------------------------------

    def segments(self, batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
        """What to train of the epoch's next batches; all of one segment before the next."""
        if not self.settings.target:
            yield batches
            return
        self._refill.clear()
        if self._frozen is not None and not self._freezes:  # since a run was over
            self._freeze(self._frozen)
        stream = _Stream(batches)
        while stream.has_more():
            while self._position == self._until:
                self._then(stream)
            yield self._segment(stream)
        stream.end()

    def _segment(self, stream: _Stream) -> Iterator[Any]:
        sieve = None if self._sifter is None else _Sieve(self._sifter)
        # Where it ends may change on the way, when rows are renewed or a guard ends skipping.
        while self._position != self._until and stream.has_more():
            batch = stream.next()
            self._position += 1
            if sieve is not None and self._leaves_out and sieve.takes(batch):
                sieve.add(batch)
                if sieve.is_full:
                    yield from self._sifted(sieve.next())
                continue
            while sieve is not None and sieve.waiting:
                yield from self._sifted(sieve.next())
            keep = self._keep(batch)
            if keep is None and self._refill.is_empty:
                yield batch
            else:
                yield from self._made(self._refill.add(batch, keep), batch)
        while sieve is not None and sieve.waiting:
            yield from self._sifted(sieve.next())
        if not stream.has_more():
            yield from self._made(self._refill.flush())

    @property
    def _leaves_out(self) -> bool:
        """Whether samples of the next batch are, and it is looked at for nothing else."""
        return (
            self._stale_bits is not None
            and self._visits is None
            and self._position > self.record.first_batch
            and self.settings.mode == "samples"
        )

    def _sifted(self, part: _Part) -> Iterator[Any]:
        r = self.record
        dropped = r.dropped + part.size - part.kept
        self.record = replace(r, offered=r.offered + part.size, dropped=dropped)
        yield from self._made(self._refill.add_part(part))

    def _made(self, batches: Iterator[Any], of: Any = ()) -> Iterable[Any]:
        """Batches that are made of those that were sifted, or `of` another."""
        return batches if self._sifter is None else self._sifter.beside_training(batches, of)

    def _keep(self, batch: Any) -> Tensor | None:
        """Which samples are trained, [B]; None: all of them, and nobody asks why."""
        if self._visits is not None:
            self._count(self._look(batch))
        if self._position <= self.record.first_batch or self.settings.mode == "rows":
            return None
        size = parse(self._ids(batch), self._embedding.features, None).num_samples
        self.record = replace(self.record, offered=self.record.offered + size)
        if self._stale_bits is None:
            return None
        looked = self._look(batch)
        stale = self._have_stale(looked, self._all.are_in(self._stale_bits, looked))
        # All of them stale is all of them hot; a number of them leaves that open.
        keep = ~stale if self.settings.stale_lookups == "all" else ~(stale & self._are_hot(looked))
        dropped = size - int(keep.sum())
        self.record = replace(self.record, dropped=self.record.dropped + dropped)
        return keep

    def _look(self, batch: Any) -> Looked:
        return self._all.look(self._ids(batch))

    def _have_stale(self, looked: Looked, is_stale: Tensor) -> Tensor:
        s = self.settings
        return self._all.samples_with(looked, is_stale, s.stale_lookups, each_table=s.each_table)

    def _are_hot(self, looked: Looked) -> Tensor:
        if self._hot_bits is None:
            self._hot_bits = self._all.bits(self._hot)
        is_hot = self._all.are_in(self._hot_bits, looked)
        return self._all.samples_with(looked, is_hot, "all")

    def _count(self, looked: Looked) -> None:
        assert self._visits is not None
        places = self._places(looked).flatten()
        places = torch.where(places < 0, len(self._hot), places)  # as many launches for any batch
        self._visits.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _places(self, looked: Looked) -> Tensor:
        """Of each lookup, its row's place among the hot ones; -1: it is not."""
        hot = self._hot_there
        if not len(hot):
            return torch.full_like(looked.numbers, -1)
        places = torch.searchsorted(hot, looked.numbers).clamp_(max=len(hot) - 1)
        return torch.where(hot[places] == looked.numbers, places, -1)

    # -- decisions ---------------------------------------------------------------------

    def _due(self, position: int | None, then: Callable[[_Stream], None] | None = None) -> None:
        """What comes when so many of the epoch's batches have been trained; None: nothing."""
        self._until = position
        self._then = _nothing if then is None else then

    def _watch(self, stream: _Stream) -> None:
        self._take_snapshot(self._hot)
        size = len(self._hot) + 1
        self._visits = torch.zeros(size, dtype=torch.int32, device=self._all.device)
        self._due(self._position + self._between, self._decide)

    def _decide(self, stream: _Stream) -> None:
        assert self._visits is not None
        often = self._visits[:-1] >= self.settings.least_visits
        batches = stream.peek(self._sampled)
        share_of, total = self._shares(batches)
        if share_of is not None and self._is_to_watch_on(share_of(often)):
            return
        self._visits = None
        moved = self._moved()
        threshold = self._search(share_of, total, moved.to(often.device), often, batches)
        often = often.cpu()
        stale = self._hot[often & (moved < threshold.tau)]
        seldom = self._counts(self._hot[~often])
        self.record = replace(self.record, threshold=threshold, seldom_rows=seldom)
        before = self._stale
        if before is not None:
            self.record = replace(
                self.record,
                rechecks=self.record.rechecks + 1,
                moving_again=self.record.moving_again + int((~torch.isin(before, stale)).sum()),
            )
        self._due(None)
        self._resume(stale)
        if not threshold.converged and before is None:
            warn(threshold.said)

    def _is_to_watch_on(self, most: float) -> bool:
        """For as long again, where of the inputs `most` can be stale, and that leaves no choice."""
        more = min(self._between, self._longest - self._between)
        if not more or most >= min(1.0, _CHOICE * self.settings.target):
            return False
        self._between += more
        if self._position == self.record.first_batch:
            self.record = replace(self.record, first_batch=self._position + more)
        self._due(self._position + more, self._decide)
        return True

    def _shares(self, batches: Sequence[Any]) -> tuple[Callable[[Tensor], float] | None, int]:
        """(which hot rows are stale) -> the share of the batches' hot inputs, or of their lookups
        of hot rows, that is, and how many there are; None: there are none."""
        looked = [self._look(batch) for batch in batches]
        places = [self._places(each) for each in looked]
        of_rows = self.settings.mode == "rows"
        are_hot = [place >= 0 for place in places] if of_rows else [*map(self._are_hot, looked)]
        total = sum(int(each.sum()) for each in are_hot)

        def share_of(is_stale: Tensor) -> float:
            # One more, which is not stale, for lookups of other rows.
            is_stale = functional.pad(is_stale, (0, 1))
            found = [is_stale[place] for place in places]
            if not of_rows:
                found = [
                    self._have_stale(each, flags) & hot
                    for each, flags, hot in zip(looked, found, are_hot, strict=True)
                ]
            return sum(int(each.sum()) for each in found) / total

        return share_of if total else None, total

    def _search(
        self,
        share_of: Callable[[Tensor], float] | None,
        total: int,
        moved: Tensor,
        often: Tensor,
        batches: Sequence[Any],
    ) -> Threshold:
        s = self.settings
        of_rows = s.mode == "rows"
        if share_of is None:
            size = sum(self._look(batch).num_samples for batch in batches)
            said = (
                f"none of {size:,} sampled inputs looks up "
                f"{'any hot row' if of_rows else 'hot rows alone'}: nothing is skipped. "
                f"{len(self._hot):,} rows are hot: a larger hot_budget has more, unless popularity "
                "has drifted since they were chosen"
            )
            return Threshold(0.0, 0.0, 0, False, *s.search, said)
        return find_threshold(
            lambda tau: share_of(often & (moved < tau)),
            target=s.target,
            tolerance=s.allowed,
            within=s.search,
            iterations=s.iterations,
            what=f"{'lookups of hot rows' if of_rows else 'hot inputs'} ({total:,})",
        )

    def _probe(self, stream: _Stream) -> None:
        """Skip nothing and watch all hot rows once more, for as long as at first."""
        self._pause()
        self._watch(stream)

    def _take_snapshot(self, numbers: Tensor) -> None:
        self._snapshot = Snapshot(self._embedding, self._all.by_table(numbers))
        most = max(self.record.snapshot_bytes, self._snapshot.num_bytes)
        self.record = replace(self.record, snapshot_bytes=most)

    def _moved(self) -> Tensor:
        """Since the snapshot, which has served its purpose; in the order of its rows' numbers."""
        assert self._snapshot is not None
        moved, self._snapshot = self._snapshot.moved(), None
        return torch.cat([torch.empty(0), *moved.values()])

    def _resume(self, stale: Tensor) -> None:
        """Skip, from the next batch on."""
        self._stale = stale
        self.record = replace(self.record, stale_rows=self._counts(stale))
        if not len(stale):
            self._pause()
            return
        if self.settings.mode == "rows":
            self._freeze(stale)
        else:
            self._stale_bits = self._all.bits(stale)
            if self._sifter is not None:
                self._sifter.look_for(stale, self._hot)
        if self.settings.recheck_every:
            self._due(self._position + self.settings.recheck_every, self._probe)

    def _freeze(self, stale: Tensor) -> None:
        self._embedding.freeze_rows(self._all.by_table(stale))
        self._frozen, self._freezes = stale, True

    def _pause(self) -> None:
        """Skip nothing. Bits of frozen rows stay where they are, for captured steps."""
        self._stale_bits = self._frozen = None
        if self._freezes:
            self._embedding.freeze_rows({})

    def _counts(self, numbers: Tensor) -> dict[str, int]:
        return {name: len(rows) for name, rows in self._all.by_table(numbers).items()}

    def note(self, validation_loss: float) -> None:
        """Ends skipping, for good, when the loss has risen: from the next batch that is read."""
        s = self.settings
        if math.isfinite(validation_loss):
            self._noted.append(validation_loss)
        is_skipping = self._stale is not None and len(self._stale) > 0
        if not is_skipping:  # what it was when skipping began is what it must not rise above
            self._best, self._above = validation_loss, 0
            return
        slack = _NOISE * noise_of(self._noted) if s.slack is None else s.slack
        if validation_loss <= self._best + slack:  # not so if it is no number
            self._best, self._above = min(self._best, validation_loss), 0
            return
        self._above += 1
        if self._above < s.patience:
            return
        now, before = apart(validation_loss, self._best, digits=6)
        said = (
            f"validation loss rose to {now} from {before} while stale "
            f"{s.mode} were skipped; from batch {self._position:,} on all are trained"
        )
        self.close()
        self._forget()
        self.record = replace(self.record, stopped=said, stale_rows={})
        warn(said)

    def close(self) -> None:
        """No row stays frozen, until `segments` goes on with the epoch."""
        if self._freezes:
            self._embedding.freeze_rows(None)
            self._freezes = False


def _nothing(stream: _Stream) -> None: ...


class _Sifter:
    """Finds stale samples on a GPU, beside training; ids of a fixed number per sample alone."""

    def __init__(self, embedding: EmbeddingBagCollection, settings: SkipSettings, ids: Ids) -> None:
        self._settings, self._ids = settings, ids
        self._lanes = embedding.lanes
        self._all = Numbering(embedding.tables, embedding.device)
        self._stale_bits = self._all.bits(torch.empty(0, dtype=torch.int64))
        self._hot_bits = self._stale_bits.clone() if settings.stale_lookups != "all" else None
        self._sorter = Sorter(self._lanes, numbers=_TOGETHER)

    def look_for(self, stale: Tensor, hot: Tensor) -> None:
        """Numbers of the rows that are stale from the next batch on, and of hot ones."""
        # Where they are: what sorts was captured, and reads them there.
        with self._lanes.on("sort"):
            self._stale_bits.copy_(self._all.bits(stale))
            if self._hot_bits is not None:
                self._hot_bits.copy_(self._all.bits(hot))

    def takes(self, batch: Any) -> bool:
        return isinstance(self._ids(batch), Tensor)

    def alike(self, batch: Any) -> Any:
        """What batches have in common that can be sifted together; None: this can with no other."""
        return self._sorter.alike(batch)

    def sift(self, batches: Sequence[Any]) -> Callable[[], Iterator[_Part]]:
        """Launch it, for batches that are alike; what is returned gives what is left of each."""
        size, count = len(self._ids(batches[0])), len(batches)
        sorting = self._sorter.sort(batches, partial(self._keep, count))

        def parts() -> Iterator[_Part]:
            low = 0
            for kept in sorting.told():
                yield _Part(sorting.batch, count * size, low, low + kept, size)
                low += kept

        return parts

    def _keep(self, count: int, batch: Any) -> tuple[Tensor, Tensor]:
        """Which samples of so many batches in one are kept, and how many of each batch's."""
        s = self._settings
        looked = self._all.look(self._ids(batch))
        is_stale = self._all.are_in(self._stale_bits, looked)
        stale = self._all.samples_with(looked, is_stale, s.stale_lookups, each_table=s.each_table)
        if self._hot_bits is not None:  # a number of stale lookups leaves open if all are hot
            is_hot = self._all.are_in(self._hot_bits, looked)
            stale = stale & self._all.samples_with(looked, is_hot, "all")
        keep = ~stale
        return keep, keep.view(count, -1).sum(1)

    def beside_training(self, batches: Iterator[Any], of: Any) -> list[Any]:
        """What is made of sifted ones, or `of` another; training waits for it, since whoever gets
        it may read it at once. Plans would be in the way: they wait for steps before."""
        self._lanes.read_in("sort", tensors_in(of))
        with self._lanes.on("sort"):
            made = list(batches)
            mark = self._lanes.mark("sort")
        self._lanes.after("train", mark)
        there = [each for batch in made for each in tensors_in(batch) if each.is_cuda]
        self._lanes.hand_over(there, mark)
        return made


@dataclass(frozen=True)
class _Part:
    """What is left of a batch: its samples from `low` on, and below `high`, of several in one."""

    batch: Any
    total: int  # samples in that
    low: int
    high: int
    size: int  # samples of the batch, when it came

    @property
    def kept(self) -> int:
        return self.high - self.low


class _Sieve:
    """Batches that come one by one, and are sifted together where they look alike."""

    def __init__(self, sifter: _Sifter) -> None:
        self._sifter = sifter
        self.takes = sifter.takes
        self.waiting = 0  # batches that came and were not asked for
        self._gathered: list[Any] = []
        self._look: Any = None  # of those
        self._together = 1  # of them, at the most
        self._launched: deque[Callable[[], Iterator[_Part]]] = deque()
        self._parts: Iterator[_Part] = iter(())

    def add(self, batch: Any) -> None:
        look = self._sifter.alike(batch)
        if self._gathered and (look is None or look != self._look):
            self._launch()
        if not self._gathered:
            self._look, self._together = look, 1
            if look is not None:
                num_bytes = sum(each.nbytes for each in tensors_in(batch))
                self._together = min(_TOGETHER, max(1, _MOST_TOGETHER // max(1, num_bytes)))
        self._gathered.append(batch)
        self.waiting += 1
        if len(self._gathered) == self._together:
            self._launch()

    @property
    def is_full(self) -> bool:
        """Whether the next was sifted so long ago that nobody waits."""
        return self.waiting >= self._together + _AHEAD

    def next(self) -> _Part:
        """What is left of the batch that came first."""
        self.waiting -= 1
        part = next(self._parts, None)
        if part is None:
            if not self._launched:
                self._launch()
            self._parts = self._launched.popleft()()
            part = next(self._parts)
        return part

    def _launch(self) -> None:
        self._launched.append(self._sifter.sift(self._gathered))
        self._gathered = []


def _can_sift(embedding: EmbeddingBagCollection) -> bool:
    return embedding.device.type == "cuda"


def rows_of(hot: Rows | HotSet) -> Rows:
    """Row numbers by table."""
    if isinstance(hot, HotSet):
        return {table.name: hot.rows(table.name) for table in hot.places.tables}
    return hot


def noise_of(losses: Sequence[float]) -> float:
    """How far a loss typically is from the middle of those before and after it: what does not come
    of a trend, up or down, nor of a single step."""
    near = zip(losses, losses[1:], losses[2:], strict=False)
    apart = [abs(loss - (before + after) / 2) for before, loss, after in near]
    return statistics.median(apart) if apart else 0.0


class SkipRandom:
    """The control: as many samples left out, at random."""

    def __init__(
        self,
        dropped: int,
        offered: int,
        *,
        ids: Ids,
        features: tuple[str, ...],
        first_batch: int = 0,
        seed: int = 0,
        take: Take | None = None,
        join: Join | None = None,
    ) -> None:
        """`dropped` of `offered` samples, from `first_batch` of each epoch on; `features` are the
        collection's."""
        if not 0 <= dropped <= offered:
            _refuse("dropped", f"a number of samples from 0 to the {offered:,} offered", dropped)
        self._dropped, self._offered, self._first = dropped, offered, first_batch
        self._ids, self._features = ids, features
        self._refill = _Refill(ids, features, take, join)
        self._draw = torch.Generator().manual_seed(seed)
        self._position = 0
        self.record = SkipRecord("random", first_batch=first_batch)

    @classmethod
    def like(cls, record: SkipRecord, **options: Any) -> Self:
        """As many as a filter has dropped, from the same batch on."""
        return cls(record.dropped, record.offered, first_batch=record.first_batch, **options)

    def begin(self, num_batches: int) -> None:
        self._position = 0

    def segments(self, batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
        yield self._thinned(batches) if self._dropped else batches

    def _thinned(self, batches: Iterable[Any]) -> Iterator[Any]:
        self._refill.clear()
        for batch in batches:
            self._position += 1
            yield from self._refill.add(batch, self._keep(batch))
        yield from self._refill.flush()

    def _keep(self, batch: Any) -> Tensor | None:
        if self._position <= self._first:
            return None
        r, size = self.record, parse(self._ids(batch), self._features, None).num_samples
        # In whole numbers: after all that were offered, exactly as many are gone.
        due = (r.offered + size) * self._dropped // self._offered - r.dropped
        self.record = replace(r, offered=r.offered + size, dropped=r.dropped + due)
        keep = torch.ones(size, dtype=torch.bool)
        keep[torch.randperm(size, generator=self._draw)[:due]] = False
        return keep

    def note(self, validation_loss: float) -> None: ...

    def renew(self, hot: Rows | HotSet) -> None: ...

    def close(self) -> None: ...


class _Stream:
    """Batches, of which the next ones can be looked at; an error comes when all before have."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._source, self._read = iter(batches), deque[Any]()
        self._error: Exception | None = None

    def peek(self, count: int) -> list[Any]:
        """The next batches, or as many as there are; they come all the same."""
        while len(self._read) < count and self._error is None:
            try:
                self._read.append(next(self._source))
            except StopIteration:
                break
            except Exception as error:
                self._error = error
        return list(self._read)[:count]

    def has_more(self) -> bool:
        return bool(self.peek(1))

    def next(self) -> Any:
        self.peek(1)
        return self._read.popleft()

    def end(self) -> None:
        """All that came has been trained: now what ended it is raised."""
        if self._error is not None:
            raise self._error


class _Refill:
    """Joins what is left of batches to batches as large as before: of other sizes no step could be
    captured."""

    def __init__(
        self, ids: Ids, features: tuple[str, ...], take: Take | None, join: Join | None
    ) -> None:
        self._ids, self._features = ids, features
        self._take, self._join = take, join or samples.join
        self._is_ours = take is None and join is None
        self._pins = False  # what came was page-locked, and what is made of it has to be
        self.clear()

    def clear(self) -> None:
        """Samples that wait are lost with the run that was left, as batches are that it had read
        ahead; also where the same epoch goes on."""
        self._parts: list[Any] = []
        self._part: _Part | None = None  # the last one, where it lies among others
        self._count = self._size = 0  # samples in all of them, and in a batch

    @property
    def is_empty(self) -> bool:
        return not self._count

    def add(self, batch: Any, keep: Tensor | None) -> Iterator[Any]:
        """The batches that have come to be full; without `keep`, what is left over and the batch
        as it is."""
        if keep is None:
            yield from self.flush()
            yield batch
            return
        self._size = max(self._size, len(keep))
        self._pins = self._is_ours and samples.tensors_of(batch)[0].is_pinned()
        places = keep.nonzero().squeeze(1)
        self._settle()
        if len(places):
            whole = len(places) == len(keep)
            self._parts.append(batch if whole else self._cut(batch, places, len(keep)))
            self._count += len(places)
        if self._count >= max(1, self._size):  # an empty batch fills none
            yield from self._full()

    def add_part(self, part: _Part) -> Iterator[Any]:
        """`add` of what is left, in front of others or behind them in the same tensors."""
        self._size, self._pins = max(self._size, part.size), False
        if self._part is None or self._part.batch is not part.batch:
            self._settle()
            self._part = part
        self._part = replace(self._part, high=part.high)
        self._count += part.kept
        if self._count < max(1, self._size):
            return
        # Enough for one, and what is beyond it begins the next.
        end = part.high - (self._count - self._size)
        self._part, rest = replace(self._part, high=end), replace(self._part, low=end)
        # Alone in memory of its own, which comes again: launches are captured for where ids are.
        self._settle(copies=not self._parts)
        yield self._joined()
        self._parts, self._part, self._count = [], rest, rest.kept

    def _settle(self, *, copies: bool | None = None) -> None:
        """What came as a part of others stands for itself; None: copied where it is the smaller
        part, since a view would keep all the others in memory until more have come."""
        part, self._part = self._part, None
        if part is not None and part.kept:
            mine = samples.cut(part.batch, part.low, part.high, size=part.total)
            if 2 * part.kept < part.total if copies is None else copies:
                mine = map_tensors(mine, torch.clone)
            self._parts.append(mine)

    def _full(self) -> Iterator[Any]:
        joined, every = self._joined(), torch.arange(self._count)
        count, self._parts, self._count = self._count, [], 0
        cuts = [joined] if count == self._size else []
        if not cuts:
            cuts = [self._cut(joined, each, count) for each in every.split(self._size)]
            if count % self._size:
                self._parts, self._count = [cuts.pop()], count % self._size
        yield from map(self._made, cuts)

    def flush(self) -> Iterator[Any]:
        if self._count:
            self._settle()
            joined = self._joined()
            self._parts, self._count = [], 0
            yield self._made(joined)

    def _made(self, batch: Any) -> Any:
        return samples.pinned(batch) if self._pins else batch

    def _joined(self) -> Any:
        return self._parts[0] if len(self._parts) == 1 else self._join(self._parts)

    def _cut(self, batch: Any, places: Tensor, size: int) -> Any:
        if self._take is not None:
            cut = self._take(batch, places)
        else:
            cut = samples.take(batch, places, size=size)
        found = parse(self._ids(cut), self._features, None).num_samples
        if found != len(places):
            raise ValueError(
                f"of {len(places):,} samples taken out of {size:,} the ids have {found:,}; give "
                "take=, a function of a batch and places that makes a batch of the samples there"
            )
        return cut
