"""Slipstream's skip: samples of rows that have stopped changing, or the updates of such rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotrow.embedding.collection import EmbeddingBagCollection
from hotrow.inputs.hotset import HotSet
from hotrow.inputs.samples import Join, Take
from hotrow.support.messages import apart, warn
from hotrow.systems.agreement import check_same
from hotrow.systems.slipstream.sifting import SIFTED_BYTES, BatchStream, Ids, Part, Refill, Sifter
from hotrow.systems.slipstream.skip import SkipRecord, SkipSettings, rows_of
from hotrow.systems.slipstream.staleness import (
    Looked,
    Rows,
    Snapshot,
    StaleSamples,
    Threshold,
    find_threshold,
)

ShareOf = Callable[[Tensor], float]  # which hot rows are stale -> share of inputs that are

_CHOICE = 2  # times the target: the share of inputs that must have been watched long enough,
_LONGEST = 0.25  # unless this share of the epoch's batches was watched
_NOISE = 6  # times the noise of losses is tolerated: ends 1 in 25 runs of 30 losses without a trend


class SkipStale:
    """Finds hot rows that have stopped changing. Skips samples that read no others, or the updates
    of such rows.

        batch 0          starting_batch          E + 1           recheck_every later
        | train          | train, count visits   | train what    | train all, as many as between
        |                |                       | is not stale  | the snapshots; search again
                         first snapshot          second, search

    `hot` are row numbers by table. Only samples whose rows are all hot are skipped. The samples
    left of several batches are joined to full ones. `device` is the loader's: visits are counted
    there, and samples are sifted there unless a GPU does it.
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
        sifted_bytes: int | None = None,
    ) -> None:
        """`take` and `join` are for batches that inputs/samples.py cannot cut. `done` batches of
        the first epoch have been trained, `starting_batch` at most. `sifted_bytes` is the size of
        batches that are sifted together beside training; 0: none; None: as the device asks."""
        self.settings = s = SkipSettings() if settings is None else settings
        self._embedding, self._ids = embedding, ids
        self._refill = Refill(ids, embedding.features, take, join)
        rule: dict[str, Any] = {"least": s.stale_lookups, "each_table": s.each_table}
        self._rule = StaleSamples(embedding.tables, torch.device(device), **rule)
        if sifted_bytes is None:
            sifted_bytes = SIFTED_BYTES if embedding.device.type == "cuda" else 0
        self._sifter, self._sifter_rule = None, self._rule
        if sifted_bytes and take is None and join is None and s.mode == "samples":
            self._sifter_rule = StaleSamples(embedding.tables, embedding.device, **rule)
            self._sifter = Sifter(
                embedding.lanes, ids, self._sifter_rule.kept, most_bytes=sifted_bytes
            )
        self._guard = LossGuard(s.patience, s.slack)
        self.record = SkipRecord(s.mode)
        self._take_hot(hot)
        self._stale: Tensor | None = None  # numbers of rows that are skipped, or in question
        self._is_skipping = False  # whether samples are dropped, or rows not updated, now
        self._freezes = False  # whether the collection has bits of frozen rows
        self._visits: Tensor | None = None  # of each hot row and of all others; None: not counted
        self._snapshot: Snapshot | None = None
        self._between = 0  # batches from one snapshot to the next
        self.begin(num_batches)
        self._position = done

    def begin(self, num_batches: int) -> None:
        """Begin an epoch, which decides again unless a guard has ended skipping."""
        self._position, self._num_batches = 0, num_batches
        self._begin_decision()

    def renew(self, hot: Rows | HotSet) -> None:
        """Set other hot rows, from the next batch on, and decide again."""
        self._take_hot(rows_of(hot))
        self._begin_decision()

    def _take_hot(self, hot: Rows) -> None:
        self._hot = self._rule.number(hot)
        self._hot_there = self._hot.to(self._rule.device)
        self._rule.set_hot(self._hot)
        self.record = replace(self.record, hot_rows=self._counts(self._hot), stale_rows={})

    def _begin_decision(self) -> None:
        """Schedule the first snapshot."""
        self._forget()
        here, left = self._position, self._num_batches - self._position
        s = replace(self.settings, starting_batch=max(0, self.settings.starting_batch - here))
        # Once samples were offered in an epoch, all later ones are.
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
        """Yield what to train of the epoch's next batches; train a segment before the next."""
        if not self.settings.target:
            yield batches
            return
        self._refill.clear()
        if self._sifter is not None:
            self._sifter.clear()
        is_frozen = self.settings.mode == "samples" or self._freezes
        if self._is_skipping and not is_frozen:  # a run was closed in between
            self._freeze()
        stream = BatchStream(batches)
        while stream.has_more():
            while self._position == self._until:
                self._then(stream)
            yield self._segment(stream)
        stream.end()

    def _segment(self, stream: BatchStream) -> Iterator[Any]:
        sifter = self._sifter
        # Its end may change on the way: rows are renewed, or a guard ends skipping.
        while self._position != self._until and stream.has_more():
            batch = stream.next()
            self._position += 1
            if sifter is not None and self._is_skipping and sifter.takes(batch):
                sifter.add(batch)
                if sifter.is_full:
                    yield from self._sifted(sifter.next())
                continue
            yield from self._rest_of_sifter()
            keep = self._keep(batch)
            if keep is not None:
                yield from self._made(self._refill.keep(batch, keep), batch)
            elif self._refill.is_empty:
                yield batch
            else:
                yield from self._made(self._refill.whole(batch), batch)
        yield from self._rest_of_sifter()
        if not stream.has_more():
            yield from self._made(self._refill.flush())

    def _rest_of_sifter(self) -> Iterator[Any]:
        while self._sifter is not None and self._sifter.waiting:
            yield from self._sifted(self._sifter.next())

    def _sifted(self, part: Part) -> Iterable[Any]:
        self._offer(part.size, part.size - part.kept)
        return self._made(self._refill.add(part))

    def _made(self, batches: Iterable[Any], of: Any = ()) -> Iterable[Any]:
        """Return batches that are made of sifted parts, or `of` another batch."""
        return batches if self._sifter is None else self._sifter.beside_training(batches, of)

    def _offer(self, size: int, dropped: int = 0) -> None:
        r = self.record
        self.record = replace(r, offered=r.offered + size, dropped=r.dropped + dropped)

    def _keep(self, batch: Any) -> Tensor | None:
        """Return which samples are trained, [B]; None: all, without looking at them."""
        if self._visits is not None:
            self._count_visits(self._look(batch))
        if self._position <= self.record.first_batch or self.settings.mode == "rows":
            return None
        if not self._is_skipping:
            self._offer(self._refill.count(batch))
            return None
        keep = self._rule.kept(self._ids(batch))
        self._offer(len(keep), len(keep) - int(keep.sum()))
        return keep

    def _look(self, batch: Any) -> Looked:
        return self._rule.look(self._ids(batch))

    def _count_visits(self, looked: Looked) -> None:
        assert self._visits is not None
        places = self._places(looked).flatten()
        places = torch.where(places < 0, len(self._hot), places)  # equal launches for any batch
        self._visits.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _places(self, looked: Looked) -> Tensor:
        """Return the place of each lookup's row among the hot ones; -1: it is not hot."""
        hot = self._hot_there
        if not len(hot):
            return torch.full_like(looked.numbers, -1)
        places = torch.searchsorted(hot, looked.numbers).clamp_(max=len(hot) - 1)
        return torch.where(hot[places] == looked.numbers, places, -1)

    # -- decisions ---------------------------------------------------------------------

    def _due(
        self, position: int | None, then: Callable[[BatchStream], None] = lambda _: None
    ) -> None:
        """Schedule what happens after so many of the epoch's batches; None: nothing."""
        self._until, self._then = position, then

    def _watch(self, stream: BatchStream) -> None:
        self._snapshot = Snapshot(self._embedding, self._rule.by_table(self._hot))
        most = max(self.record.snapshot_bytes, self._snapshot.num_bytes)
        self.record = replace(self.record, snapshot_bytes=most)
        size = len(self._hot) + 1
        self._visits = torch.zeros(size, dtype=torch.int32, device=self._rule.device)
        self._due(self._position + self._between, self._decide)

    def _decide(self, stream: BatchStream) -> None:
        assert self._visits is not None
        often = self._visits[:-1] >= self.settings.least_visits
        batches = stream.peek(self._sampled)
        looked = [self._look(batch) for batch in batches]
        places = [self._places(x) for x in looked]
        if self.settings.mode == "rows":
            share_of, total = _share_of_lookups(places)
        else:
            share_of, total = _share_of_samples(self._rule, looked, places)
        if total and self._watches_on(share_of(often)):
            return
        assert self._snapshot is not None
        moved = torch.cat([torch.empty(0), *self._snapshot.moved().values()])
        self._visits = self._snapshot = None
        if total:
            threshold = self._search(share_of, total, moved.to(often.device), often)
        else:
            threshold = self._nothing_hot(sum(map(self._refill.count, batches)))
        often = often.cpu()
        stale = self._hot[often & (moved < threshold.tau)]
        check_same(self._embedding, "which rows are stale", stale, threshold.tau)
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

    def _watches_on(self, most: float) -> bool:
        """Watch for as long again if the share of inputs that can be stale, `most`, is small."""
        more = min(self._between, self._longest - self._between)
        if not more or most >= min(1.0, _CHOICE * self.settings.target):
            return False
        self._between += more
        if self._position == self.record.first_batch:
            self.record = replace(self.record, first_batch=self._position + more)
        self._due(self._position + more, self._decide)
        return True

    def _search(self, share_of: ShareOf, total: int, moved: Tensor, often: Tensor) -> Threshold:
        s = self.settings
        what = "lookups of hot rows" if s.mode == "rows" else "hot inputs"
        return find_threshold(
            lambda tau: share_of(often & (moved < tau)),
            target=s.target,
            tolerance=s.allowed,
            within=s.search,
            iterations=s.iterations,
            what=f"{what} ({total:,})",
        )

    def _nothing_hot(self, size: int) -> Threshold:
        said = (
            f"none of {size:,} sampled inputs looks up "
            f"{'any hot row' if self.settings.mode == 'rows' else 'hot rows alone'}: nothing is "
            f"skipped. {len(self._hot):,} rows are hot: a larger hot_budget has more, unless "
            "popularity has drifted since they were chosen"
        )
        return Threshold(0.0, 0.0, 0, False, *self.settings.search, said)

    def _probe(self, stream: BatchStream) -> None:
        """Skip nothing and watch all hot rows again, for as long as at first."""
        self._pause()
        self._watch(stream)

    def _resume(self, stale: Tensor) -> None:
        """Skip, from the next batch on."""
        self._stale = stale
        self.record = replace(self.record, stale_rows=self._counts(stale))
        if not len(stale):
            self._pause()
            return
        self._is_skipping = True
        if self.settings.mode == "rows":
            self._freeze()
        else:
            self._rule.set_stale(stale)
            if self._sifter is not None:
                with self._embedding.lanes.on("sort"):
                    self._sifter_rule.set_stale(stale)
                    if self._sifter_rule.needs_hot:
                        self._sifter_rule.set_hot(self._hot)
        if self.settings.recheck_every:
            self._due(self._position + self.settings.recheck_every, self._probe)

    def _freeze(self) -> None:
        assert self._stale is not None
        self._embedding.freeze_rows(self._rule.by_table(self._stale))
        self._freezes = True

    def _pause(self) -> None:
        """Skip nothing. The bits of frozen rows stay where they are, for captured steps."""
        self._is_skipping = False
        if self._freezes:
            self._embedding.freeze_rows({})

    def _counts(self, numbers: Tensor) -> dict[str, int]:
        return {name: len(rows) for name, rows in self._rule.by_table(numbers).items()}

    def note(self, validation_loss: float) -> None:
        """End skipping for good if the loss has risen, from the next batch that is read."""
        is_skipping = self._stale is not None and len(self._stale) > 0
        best = self._guard.note(validation_loss, is_skipping=is_skipping)
        if best is None:
            return
        now, before = apart(validation_loss, best, digits=6)
        said = (
            f"validation loss rose to {now} from {before} while stale "
            f"{self.settings.mode} were skipped; from batch {self._position:,} on all are trained"
        )
        self.close()
        self._forget()
        self.record = replace(self.record, stopped=said, stale_rows={})
        warn(said)

    def close(self) -> None:
        """Unfreeze all rows, until `segments` continues the epoch."""
        if self._freezes:
            self._embedding.freeze_rows(None)
            self._freezes = False


def _share_of_lookups(places: Sequence[Tensor]) -> tuple[ShareOf, int]:
    """Return a function for the share of stale lookups among those of hot rows, and their number.

    `places` are those of the rows among the hot ones, -1 for others.
    """
    hot = torch.cat([place[place >= 0] for place in places])
    return lambda is_stale: int(is_stale[hot].sum()) / len(hot), len(hot)


def _share_of_samples(
    rule: StaleSamples, looked: Sequence[Looked], places: Sequence[Tensor]
) -> tuple[ShareOf, int]:
    """Return a function for the share of stale samples among hot ones, and their number."""
    are_hot = [rule.are_hot(x) for x in looked]
    total = sum(int(hot.sum()) for hot in are_hot)

    def share_of(is_stale: Tensor) -> float:
        is_stale = functional.pad(is_stale, (0, 1))  # one more, for lookups of other rows
        stale = [
            rule.have_stale(x, is_stale[place]) & hot
            for x, place, hot in zip(looked, places, are_hot, strict=True)
        ]
        return sum(int(flags.sum()) for flags in stale) / total

    return share_of, total


class LossGuard:
    """Notices that validation losses have risen since skipping began."""

    def __init__(self, patience: int, slack: float | None) -> None:
        self._patience, self._slack = patience, slack
        self._best, self._above = math.inf, 0
        self._losses: list[float] = []

    def note(self, loss: float, *, is_skipping: bool) -> float | None:
        """Take a loss; return the best one if `patience` losses in a row were above it."""
        if math.isfinite(loss):
            self._losses.append(loss)
        if not is_skipping:  # the loss when skipping begins is the one to compare with
            self._best, self._above = loss, 0
            return None
        slack = _NOISE * noise_of(self._losses) if self._slack is None else self._slack
        if loss <= self._best + slack:  # False for NaN
            self._best, self._above = min(self._best, loss), 0
            return None
        self._above += 1
        return self._best if self._above >= self._patience else None


def noise_of(losses: Sequence[float]) -> float:
    """Return the median distance of a loss from the mean of its neighbours, which neither a trend
    nor a single step changes."""
    near = zip(losses, losses[1:], losses[2:], strict=False)
    distances = [abs(loss - (before + after) / 2) for before, loss, after in near]
    return statistics.median(distances) if distances else 0.0
