"""Hotline: popular samples of each batch are trained while the rows of the others arrive.

    hotline = Hotline()
    trainer = Trainer(model, loss_fn, ..., system=hotline)  # collections with strategy="static"
    for record in trainer.run(loader):                      # an epoch
        ...
    print(hotline.record.popular_share, hotline.record.learned)

Popular rows are learned from the first batches of each epoch, and again when popularity has
drifted; they are pinned. Exact up to rounding: the gradients of both parts of a batch are summed,
and every row and dense weight is updated once, as for a whole batch.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hotrow.embedding.ahead import features_of
from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.embedding.in_models import collections_in
from hotrow.engine.stages import LATE
from hotrow.inputs.batch import Batch, parse
from hotrow.inputs.held_batches import Kept
from hotrow.inputs.hotset import HotSet
from hotrow.inputs.samples import Take
from hotrow.inputs.tree import to_device
from hotrow.support.messages import setting, warn
from hotrow.systems.agreement import check_same
from hotrow.systems.calibrate import most_used_first, room_for_pins, row_bytes
from hotrow.systems.hotline.popularity import (
    LEARNED_PART,
    DecayedCounts,
    Learned,
    Learning,
    Log,
    SrripLog,
)
from hotrow.systems.hotline.split import GRAIN, Sorted, Splitter
from hotrow.systems.per_sample import refuse_mixed_samples
from hotrow.systems.slipstream.skip import (
    Bindable,
    Skip,
    SkipRecord,
    batches_per_epoch,
    check_count,
    check_skip,
)
from hotrow.systems.slipstream.slipstream import Slipstream
from hotrow.training.trainer import Trainer

LOGS = ("exact", "srrip")
_AHEAD = 2  # batches between sorting and planning, so that the host does not wait for a count
_WINDOW = 32  # batches over which the share of popular samples is smoothed
_ROUNDING = 1e-4  # relative error of the sum of a loss's parts
_MOST_COUNTED = 1 << 15  # lookups of a batch that are counted outside of learning phases
_KEPT = 7 / 8  # share of the pinned rows that stays when a batch did not fit beside them


@dataclass(frozen=True)
class HotlineRecord:
    """What was learned and split so far."""

    batches: int = 0
    split_batches: int = 0  # trained in two parts; the others were trained whole
    samples: int = 0  # of batches that were classified
    popular: int = 0  # of those samples
    parts: Mapping[int, int] = field(default_factory=dict)  # samples of first parts -> batches
    learned: tuple[Learned, ...] = ()  # when hot rows were chosen, and why
    pinned_rows: Mapping[str, int] = field(default_factory=dict)  # by table, now
    pinnings: int = 0
    mask_bytes: int = 0  # of fast memory, beside the budget, for classifying samples

    @property
    def popular_share(self) -> float:
        """Share of popular samples; NaN before any batch was classified."""
        return self.popular / self.samples if self.samples else math.nan

    @property
    def relearnings(self) -> int:
        """How often hot rows were chosen again because of drift."""
        return sum(choice.why != "learned" for choice in self.learned)


@dataclass(eq=False)
class _Member:
    """A collection whose popular rows are learned and pinned."""

    name: str
    embedding: EmbeddingBagCollection
    learning: Learning
    hot: HotSet | None = None  # pinned rows
    version: int = 0  # of the learned rows that are pinned
    pins: int = 0  # version of the collection's pins
    gave_way: int = 0  # how often pins had given way to a batch by then
    most: float = 1.0  # share of the room that may be pinned; less after a batch did not fit

    @property
    def is_due(self) -> bool:
        """Return whether other rows must be pinned, or fewer."""
        if not self.learning.version:
            return False
        return self.version != self.learning.version or self.pins != self.embedding.pins_version

    def pin(self) -> HotSet:
        """Pin the learned rows, as many as there is room for. Nothing may be in flight."""
        room, gave_way = self.embedding.room_for_pins(), self.embedding.pins.gave_way
        if self.hot is not None and self.gave_way != gave_way:
            now = self.hot.num_rows / max(1, sum(room.values()))
            self.most = min(self.most, now * _KEPT)
        room = {dim: int(self.most * count) for dim, count in room.items()}
        log = self.learning.log
        uses_of = log.of if isinstance(log, DecayedCounts) else None
        rows = most_used_first(self.embedding, self.learning.hot, uses_of, room)
        check_same(self.embedding, "what Hotline has learned", *rows.values())
        self.hot = self.embedding.pin_rows(rows)
        self.version, self.pins = self.learning.version, self.embedding.pins_version
        self.gave_way = gave_way
        return self.hot


class Hotline:
    """Trains each batch in two parts. Popular samples, whose rows are all pinned, go first while
    the rows of the others arrive.

    Rows are learned from a share, `learned`, of an epoch's batches. `log` counts them "exact"ly, or
    is Hotline's own "srrip", or a function of a collection that returns a `popularity.Log`. When
    the share of popular samples, smoothed over `window` samples (default: 32 batches), falls below
    `floor` of what it was, popularity has drifted. Rows are then learned again from a few batches,
    and from there on every batch is counted (of a large one its first samples), so that hourly
    drift is followed. `relearn=0` counts every batch from the beginning; `relearn=n` learns again
    from n batches and rests in between, as published.

    An epoch is one `run()`, or `batches_per_epoch` batches of one or several. `skip` skips samples
    before batches are split, by the pinned rows, and evaluates on its own `test`. `take` is for
    batches that are not made of tensors alone. Collections need `strategy="static"`; all-fast ones
    may be beside them.

    The loss must be a mean over samples, or one number for each, and the model must treat each
    sample by itself: a mean weighted by classes, or `x - x.mean(0)` in `forward`, gives other
    results for parts than for a whole batch. Both are tested on the first batch, before any is
    split; a ValueError says if the parts differ from the whole by more than rounding.
    """

    keeps_batches = True

    def __init__(
        self,
        *,
        log: str | Callable[[EmbeddingBagCollection], Log] = "exact",
        learned: float = LEARNED_PART,
        floor: float = 0.95,
        window: int | None = None,
        relearn: int | None = None,
        batches_per_epoch: int | None = None,
        grain: int = GRAIN,
        skip: Bindable | None = None,
        take: Take | None = None,
    ) -> None:
        """`grain`: the number of sizes of first parts."""
        if isinstance(log, str) and log not in LOGS:
            raise ValueError(f"log must be one of {', '.join(LOGS)}, or a function, not {log!r}")
        shares = all(isinstance(share, int | float) for share in (learned, floor))
        if not shares or not 0 < learned <= 1 or not 0 <= floor <= 1:
            raise ValueError(
                f"learned and floor are shares, up to 1; got learned={learned!r}, floor={floor!r}"
            )
        counts = {"window": window, "relearn": relearn, "batches_per_epoch": batches_per_epoch}
        for name, value in {**counts, "grain": grain}.items():
            if value is not None:
                check_count(name, value, 0 if name == "relearn" else 1)
        check_skip(skip)
        self._log, self._part, self._floor = log, learned, floor
        self._window, self._relearn, self._per_epoch = window, relearn, batches_per_epoch
        self._grain, self.skip, self.take = grain, skip, take
        self._bound: Skip | None = None
        self._members: list[_Member] = []
        self._needs_warning = True  # unless a batch was split, or a popular sample skipped
        self._skipped = 0  # popular samples that were skipped, as far as learning knows
        self._enough = 0  # classified samples after which a warning says that none is popular
        self._left = 0  # batches left of the current epoch
        self._is_over = False
        self.epochs = 0  # finished ones of the last run
        self._unchecked: Any = None  # the batch on which model and loss are tested
        self._parts: Counter[int] = Counter()
        self._record = HotlineRecord()

    @property
    def record(self) -> HotlineRecord:
        """What was learned and split so far."""
        learned = [choice for member in self._members for choice in member.learning.history]
        rows: dict[str, int] = {}
        for member in self._members:
            if member.hot is not None:
                rows |= member.hot.counts()
        return replace(
            self._record,
            parts=dict(sorted(self._parts.items())),
            learned=tuple(sorted(learned, key=lambda choice: choice.batch)),
            pinned_rows=rows,
            mask_bytes=self._splitter.mask_bytes if self._members else 0,
        )

    # -- the model ---------------------------------------------------------------------

    def attach(self, trainer: Trainer[Any]) -> None:
        """Bind to a trainer; refuse models that cannot be trained in parts."""
        _refuse_batch_statistics(trainer.model)
        named = collections_in(trainer.model)
        self._pinned = {name: rows for name, rows in named.items() if not rows.strategy.everything}
        if not self._pinned:
            raise ValueError(
                f"Hotline pins rows of collections with strategy='static' and a budget; "
                f"{type(trainer.model).__name__} has "
                + ("none but all-fast ones, whose rows are all there" if named else "none")
            )
        for name, embedding in self._pinned.items():
            strategy = embedding.strategy
            if not (strategy.has_slots and strategy.pinned_part and strategy.refetch):
                raise ValueError(
                    f"Hotline needs strategy='static', which keeps pinned rows and fetches all "
                    f"others; the collection {name or type(embedding).__name__!r} has "
                    f"{strategy.name!r}: build it with strategy='static' and a budget"
                )
        if self.skip is not None and len(self._pinned) > 1:
            raise ValueError(
                f"skip= chooses samples by the rows of one collection, and the model has "
                f"{len(self._pinned)}: {', '.join(map(repr, self._pinned))}; tables of any width "
                "can be in one"
            )
        for embedding in self._pinned.values():
            embedding.pipeline.move_in(LATE)
        if any(isinstance(part, _DropoutNd) and part.p > 0 for part in trainer.model.modules()):
            warn(
                "the model has dropout, whose masks are drawn for each part of a batch: results "
                "differ from those of whole batches, as they do by another seed"
            )
        self._trainer, self._named, self._ids = trainer, named, trainer.ids
        self._members, self._bound = [], None
        self._left = self._skipped = 0
        self._parts.clear()
        self._record = HotlineRecord()
        self._splitter = Splitter(named, trainer.ids, take=self.take, grain=self._grain)

    # -- passes ------------------------------------------------------------------------

    def passes(self, batches: Iterable[Any]) -> Generator[Iterable[Any]]:
        """Yield passes. Rows are pinned between two of them, when nothing is in flight."""
        count = batches_per_epoch(batches) if self._per_epoch is None else self._per_epoch
        if count is None:
            raise ValueError(
                f"Hotline learns from {self._part:.0%} of an epoch's batches, and how many an "
                "epoch has is not known: these have no len(); give batches_per_epoch="
            )
        stream, self.epochs = Kept(batches), 0
        try:
            for first in stream:
                if not self._left or self._per_epoch is None:
                    self._begin(first, count)
                epoch = chain([first], islice(stream, self._left - 1))
                yield from self._epoch(epoch)
                self.epochs += 1
            self._warn_if_none(1)
        finally:
            if self._bound is not None:
                self._bound.close()

    def _begin(self, first: Any, count: int) -> None:
        """Begin an epoch with its first batch."""
        self._left = count
        if not self._members:
            self._members = [self._make_member(name, first, count) for name in self._pinned]
            self._unchecked = first
        for member in self._members:
            member.learning.begin_epoch(count)
        if self._bound is not None:
            self._bound.begin(count)
        if isinstance(self.skip, Slipstream):
            self.skip.begin_to_validate(self._trainer, count)

    def _make_member(self, name: str, first: Any, count: int) -> _Member:
        embedding = self._pinned[name]
        part = self._trainer.whole.part_of(first)
        embedding.reserve_like(to_device(self._features(part, name), embedding.device))
        relearn = math.ceil(self._part * count) if self._relearn is None else self._relearn
        window = self._window or max(1, _WINDOW * self._parsed(first, name).num_samples)
        self._enough = window
        learning = Learning(
            _make_log(self._log, embedding),
            part=self._part,
            floor=self._floor,
            window=window,
            relearn=relearn,
            wakes=self._relearn is None,
        )
        return _Member(name, embedding, learning)

    def _epoch(self, batches: Iterator[Any]) -> Iterator[Iterable[Any]]:
        counted = self._counted(batches)
        if self.skip is None:
            yield from self._segment(counted)
            return
        if self._bound is None:
            # Skipping begins when hot rows are known.
            yield from self._segment(counted, until_pinned=True)
            if self._is_over:
                return
            self._bound = self._bind(self.skip)
            self._skipped = self._skipped_by_now  # in earlier use
        for segment in self._bound.segments(counted):
            skip = self.skip
            for part in skip.validated(segment) if isinstance(skip, Slipstream) else [segment]:
                yield from self._segment(iter(part))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._left -= 1
            yield batch

    def _bind(self, skip: Bindable) -> Skip:
        (member,) = self._members
        assert member.hot is not None
        ids = partial(self._features, name=member.name)
        return skip.bound(member.embedding, member.hot, max(1, self._left), ids=ids)

    def _segment(
        self, batches: Iterator[Any], *, until_pinned: bool = False
    ) -> Iterator[Iterable[Any]]:
        """Yield passes over some batches; a pass ends when other rows must be pinned."""
        self._is_over = False
        while not self._is_over:
            self._pin()
            if until_pinned and self._is_pinned:
                return
            yield self._pass(batches)

    @property
    def _is_pinned(self) -> bool:
        return all(member.hot is not None for member in self._members)

    def _pin(self) -> None:
        due = [member for member in self._members if member.is_due]
        for member in due:
            before, hot = member.hot, member.pin()
            is_same = before is not None and torch.equal(before.is_hot, hot.is_hot)
            if self._bound is not None and not is_same:
                self._bound.renew(hot)
        if due and self._is_pinned:
            if self._unchecked is not None:
                self._try(self._unchecked)
                self._unchecked = None
            pinned = {member.name: member.hot for member in self._members}
            self._splitter.pin({name: hot for name, hot in pinned.items() if hot is not None})
            self._record = replace(self._record, pinnings=self._record.pinnings + 1)

    def _try(self, batch: Any) -> None:
        """Refuse a model or a loss for which parts of the batch differ from the whole."""
        size = self._parsed(batch, self._members[0].name).num_samples
        refuse_mixed_samples(
            self._trainer, batch, size, lambda places: self._splitter.taken(batch, places, size)
        )
        _refuse_other_losses(self._trainer, batch)

    def _pass(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield sorted batches; whole ones while no rows are pinned."""
        waiting: deque[tuple[Callable[[], Sorted], list[int]]] = deque()
        is_pinned, failed = self._is_pinned, None
        try:
            for batch in batches:
                if is_pinned:
                    versions = [member.learning.version for member in self._members]
                    waiting.append((self._splitter.sort(batch), versions))
                self._learn(batch)
                if not is_pinned:
                    self._record = replace(self._record, batches=self._record.batches + 1)
                    yield batch
                elif len(waiting) > _AHEAD:
                    yield self._in_order(*waiting.popleft())
                if any(member.is_due for member in self._members):
                    break
            else:
                self._is_over = True
        except Exception as error:
            failed = error  # raised after the batches before it were trained
        while waiting:
            yield self._in_order(*waiting.popleft())
        if failed is not None:
            raise failed

    def _in_order(self, outcome: Callable[[], Sorted], versions: Sequence[int]) -> Any:
        """Return a sorted batch and note its popular samples; `versions` are of the hot rows."""
        result = outcome()
        # Skipped samples were popular: without them, popularity would seem to have drifted.
        skipped, self._skipped = self._skipped, self._skipped_by_now
        more = self._skipped - skipped
        for member, version in zip(self._members, versions, strict=True):
            popular = result.by_collection[member.name]
            member.learning.told(popular + more, result.samples + more, version=version)
        first, r = result.parted.first, self._record
        self._parts[first] += 1
        self._record = replace(
            r,
            batches=r.batches + 1,
            split_batches=r.split_batches + (first > 0),
            samples=r.samples + result.samples,
            popular=r.popular + result.popular,
        )
        self._needs_warning = self._needs_warning and not first and not more
        self._warn_if_none(self._enough)
        return result.parted

    @property
    def _skipped_by_now(self) -> int:
        """Return how many popular samples were skipped; 0 for a skip without a record."""
        record = getattr(self._bound, "record", None)
        return record.dropped_hot if isinstance(record, SkipRecord) else 0

    def _warn_if_none(self, enough: int) -> None:
        """Warn once if `enough` samples were classified and no batch had enough popular ones."""
        r = self._record
        if not self._needs_warning or r.samples < enough:
            return
        self._needs_warning = False
        rows = sum(member.hot.num_rows for member in self._members if member.hot is not None)
        why = (
            f"{'each of the others' if r.popular else 'each'} looks up some row that is not "
            f"among the {rows:,} pinned ones, as samples with many lookups do, and "
            "where popularity drifts"
            if rows
            else "no row is pinned, since the budget has no room for any beside a batch"
        )
        popular = f"no more than {r.popular:,}" if r.popular else "none"
        warn(
            f"{popular} of {r.samples:,} samples is popular: {why}. Batches are trained "
            "whole, which is right but gains nothing; a larger budget may, or "
            f"{setting('strategy', 'lookahead')} instead of Hotline"
        )

    # -- learning ----------------------------------------------------------------------

    def _learn(self, batch: Any) -> None:
        for member in self._members:
            parsed, learning = self._parsed(batch, member.name), member.learning
            if learning.looks:
                parsed = (parsed if learning.is_learning else _first_of(parsed)).to("cpu")
            if not learning.add(parsed) and member.hot is not None and not learning.is_learning:
                member.version = learning.version  # the same rows once more

    def _features(self, batch: Any, name: str) -> Any:
        return features_of(self._ids(batch), name, self._named)

    def _parsed(self, batch: Any, name: str) -> Batch:
        return parse(self._features(batch, name), self._pinned[name].features, None)


def _first_of(batch: Batch) -> Batch:
    """Return so few samples that counting them is faster than a step on a GPU."""
    most = max(1, _MOST_COUNTED // max(1, len(batch.keys)))
    if batch.offsets is not None or batch.num_samples <= most:
        return batch
    return replace(batch, values=batch.values[:most], num_samples=most)


def _make_log(
    log: str | Callable[[EmbeddingBagCollection], Log], embedding: EmbeddingBagCollection
) -> Log:
    if not isinstance(log, str):
        return log(embedding)
    sizes, budget = row_bytes(embedding), room_for_pins(embedding)
    if log == "srrip":
        return SrripLog.within(embedding.tables, sizes, budget)
    return DecayedCounts(embedding.tables, sizes, budget)


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise ValueError(
                f"Hotline trains each batch in two parts, and {name or 'the model'} is a "
                f"{type(module).__name__}: the statistics of a part are not those of the batch, so "
                "results would not be those of whole batches. LayerNorm looks at each sample by "
                "itself; or train by another strategy, such as 'lookahead'"
            )


def _refuse_other_losses(trainer: Trainer[Any], batch: Any) -> None:
    """Refuse a loss whose parts do not add up, as far as one batch shows."""
    predictions, labels = trainer.predict(batch), trainer.labels(batch)
    if not isinstance(predictions, Tensor) or not 1 < len(labels) == len(predictions):
        return
    labels = labels.to(predictions.device)
    # Sums of coarser numbers would be too coarse.
    predictions = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    if labels.ndim == 1:  # sorted, so that a class with a larger weight is in one part
        order = labels.argsort(stable=True)
        predictions, labels = predictions[order], labels[order]
    size, first = len(labels), len(labels) // 2
    cuda = [predictions.device] if predictions.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(cuda):
        whole, *parts = [
            float(trainer.loss_fn(predictions[low:high], labels[low:high]).mean())
            * ((high - low) / size)
            for low, high in ((0, size), (0, first), (first, size))
        ]
    if math.isfinite(whole) and not abs(whole - sum(parts)) <= _ROUNDING * sum(map(abs, parts)):
        raise ValueError(
            f"Hotline trains each batch in two parts, and this loss_fn is no mean over samples: of "
            f"{size:,} it gives {whole:.6g}, and the shares of {first:,} and {size - first:,} of "
            f"them, {parts[0]:.6g} and {parts[1]:.6g}, make {sum(parts):.6g}, so results would not "
            "be those of whole batches. One number for each sample (reduction='none') can be "
            "split; or train by another strategy, such as 'lookahead'"
        )
