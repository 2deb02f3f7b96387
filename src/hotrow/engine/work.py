"""One batch's lookups in one width group, and which batches are on their way to training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.split_batch import Place
from hotrow.inputs.batch import Batch, Lookups, divisor_of, lookups_of, outline_of
from hotrow.kernels.reference import SortedIds, sort_ids


class Work:
    """What engines, stages and the schedule know of a batch. Every engine has a kind of its own."""

    group: Any  # the engine that keeps the rows
    plan: Any = None  # the planner's answer; None: not planned, or the batch takes the direct path
    whole: Work | None = None  # the batch that this one is a part of
    place: Place | None = None  # and where it stands in it
    cargo: Any = None  # what the mover keeps between `collect` and `insert`
    collected = False  # leaving rows have been read
    inserted = False  # entering rows are in their slots
    announced = True  # the batch was expected, so batches before it hold its rows
    is_fixed = False  # launches are to be the same for all batches of one shape

    @property
    def moving(self) -> Work:
        """The work whose rows the engine moves: of several ranks, what they ask of this one."""
        return self

    @property
    def lookups(self) -> Lookups:
        """The lookups bag by bag, without their ids where those are on a device."""
        raise NotImplementedError

    @property
    def ids(self) -> SortedIds:
        """The lookups sorted by id; waits for the device if they are there."""
        raise NotImplementedError

    def looked_up(self) -> Tensor:
        """The ids as they were when the batch was planned."""
        raise NotImplementedError

    def count_distinct(self) -> int:
        """Count the different rows; waits for the device if ids are there."""
        return self.ids.ids.numel()

    def arrive(self, batch: Batch) -> None:
        """Take the batch's own tensors, which are on the device now."""

    def with_ids(self, x: Lookups) -> Lookups:
        """Return `x`, the lookups with weights, with ids that the direct path can read."""
        return x

    def reads_like(self, planned: Work) -> bool:
        """Whether both batches look up the same rows, bag by bag."""
        mine, theirs = self.lookups, planned.lookups
        if (mine.spans, mine.part_sizes) != (theirs.spans, theirs.part_sizes):
            return False
        if mine.offsets is None or theirs.offsets is None:
            if mine.offsets is not theirs.offsets:
                return False
        elif not torch.equal(mine.offsets, theirs.offsets):
            return False
        return torch.equal(self.looked_up(), planned.looked_up())


class DeferredWork(Work):
    """A batch whose ids a device checks and sorts; how many are unique is known later."""

    def __init__(self, group: Any, batch: Batch) -> None:
        self.group = group
        self.arrive(batch)

    def arrive(self, batch: Batch) -> None:
        self.batch = batch
        self._lookups: Lookups | None = None
        self._bag_of: Tensor | None = None
        self._sorted: SortedIds | None = None

    @property
    def lookups(self) -> Lookups:
        """The lookups without ids: reading those would wait for the device."""
        if self._lookups is None:
            self._lookups = self._outline()
        return self._lookups

    def _outline(self) -> Lookups:
        x = outline_of(self.batch, self.group.layout)
        return replace(x, divisor=divisor_of(self.batch, x, self.group.layout))

    @property
    def bag_of(self) -> Tensor | None:
        """The bag of each lookup; None where each is its own."""
        if self._bag_of is None and self.lookups.offsets is not None:
            self._bag_of = self.lookups.bag_of().int()
        return self._bag_of

    @property
    def ids(self) -> SortedIds:
        if self._sorted is None:
            self._sorted = self._sort()
        return self._sorted

    def _sort(self) -> SortedIds:
        ids = lookups_of(self.batch, self.group.layout).ids
        return sort_ids(ids, self.group.layout.num_rows)


class SortedWork(Work):
    """A batch whose ids the host has checked and sorted."""

    def __init__(self, group: Any, lookups: Lookups, ids: SortedIds) -> None:
        self.group, self._lookups, self._ids = group, lookups, ids

    @property
    def lookups(self) -> Lookups:
        return self._lookups

    @property
    def ids(self) -> SortedIds:
        return self._ids

    def looked_up(self) -> Tensor:
        return self._lookups.ids


class SortedPart(SortedWork):
    """Some samples of a planned batch. They are read by its plan and updated with it."""

    def __init__(self, whole: Work, lookups: Lookups, place: Place) -> None:
        ids = replace(whole.ids, inverse=whole.ids.inverse[place.lookups])
        super().__init__(whole.group, lookups, ids)
        self.whole, self.place = whole, place
        self.plan, self.collected, self.inserted = whole.plan, whole.collected, whole.inserted


class Flight:
    """Which planned batches have not moved their rows yet, and which rows may have left.

    The maps describe the state after all planned batches. `uncollected` and `in_transit` tell how
    far the bytes are behind.
    """

    rows_move = True

    def __init__(self, past: int) -> None:
        """`past`: how many later batches may be collected before a batch's rows may leave."""
        self.past = past
        self.newest_collected = -1  # number of the last plan whose leaving rows were read
        self.uncollected: list[Work] = []  # planned; no byte has moved
        self.in_transit: list[Work] = []  # collected, and not inserted

    def begin(self, work: Work) -> None:
        """A batch was planned."""
        self.uncollected.append(work)

    def collect(self, work: Work, *, inserted: bool) -> None:
        """The leaving rows of a batch were read; `inserted`: its rows are in their slots."""
        self.uncollected.remove(work)
        work.collected, work.inserted = True, inserted
        self.newest_collected = work.plan.number
        if not inserted:
            self.in_transit.append(work)

    def insert(self, work: Work) -> None:
        """The rows of a batch that was in transit are in their slots."""
        self.in_transit.remove(work)
        work.inserted = True

    def drop(self, work: Work) -> None:
        """A plan failed: the batch takes the direct path, or is planned again."""
        work.plan = None
        if work in self.uncollected:
            self.uncollected.remove(work)

    def holds(self, work: Work) -> bool:
        """Whether a batch's rows are in the slots that were planned for it."""
        if work.plan is None or not work.inserted:
            return False
        return self.newest_collected <= int(work.plan.number) + self.past

    def end(self, number: int) -> None:
        """No batch up to this number has its rows in slots: late gradients take the direct path."""
        self.newest_collected = number


class AtRest(Flight):
    """The flight of rows that never move: every row is in its own slot."""

    rows_move = False

    def __init__(self) -> None:
        super().__init__(past=0)

    def holds(self, work: Work) -> bool:
        return work.plan is not None
