"""Vectors of the next batch that travel while a batch trains.

```
ids of all ranks    batch 5: A B C      batch 6: B D E
BATCH 6   owner -> rank: B is late, because batch 5 may change it
ROWS 5    A B C, then D E of batch 6, while batch 5 trains
GRADS 5
ROWS 6    B
```
An owner sends a row early if no rank looks it up in the batch before. If anything but that batch
has changed rows since, all ranks drop what came early, and every row is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotrow.distributed.arrivals import Arrival
from hotrow.distributed.ranks import Channel, Pending, RankError
from hotrow.distributed.shared_rows import Parted, SharedWork
from hotrow.distributed.wire import Wire
from hotrow.support.streams import Lanes

_STAMPS = 255  # a row that was looked up so many batches before is sent late as well
_PAUSE = 32  # batches without early rows, after some were dropped


@dataclass
class _Batch:
    """A batch whose early rows are on their way."""

    serial: int
    replaced: int  # how often rows were replaced, not updated, when they were read
    arriving: list[Pending]  # of each width


class EarlyRows:
    """Sends the rows of the next batch that the current one does not change."""

    def __init__(
        self, wire: Wire, lanes: Lanes, writing: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._wire, self._lanes, self._writing = wire, lanes, writing
        self._stamps: dict[int, np.ndarray] = {}  # the last batch of each row that this rank owns
        self._batch: _Batch | None = None
        self._unstepped: set[int] = set()  # batches whose gradients came, and may change rows
        self._applied: set[int] = set()  # those whose gradients have just come
        self._changed_by: set[int] = set()  # batches that have changed rows since they were read
        self._pause = 0

    # -- which rows are late -----------------------------------------------------------

    def find_late(
        self,
        serial: int,
        works: Mapping[int, SharedWork],
        numbers: Mapping[int, Tensor],
        theirs: Sequence[Sequence[int]],
    ) -> None:
        """Tell ranks which of the rows they asked for are late. All ranks do this together.

        `works` and `numbers`, the ids that ranks ask of this one, are by the place of a group;
        `theirs`: how many ids of each group a rank asks for, by rank.
        """
        ranks = self._wire.ranks
        at_owner = {place: self._is_late(place, ids, serial) for place, ids in numbers.items()}
        parts = {
            place: late.split([counts[place] for counts in theirs])
            for place, late in at_owner.items()
        }
        told = [_packed([part[rank] for part in parts.values()]) for rank in range(ranks.size)]
        wanted = {place: works[place].route.counts for place in numbers}
        sizes = [sum(counts[rank] for counts in wanted.values()) for rank in range(ranks.size)]
        sent, received = list(map(len, told)), [-(-size // 8) for size in sizes]
        self._wire.count("ids", told[0].new_empty(1), sent)
        came = ranks.exchange(torch.cat(told), sent, received, ranks.training)
        by_owner = [
            _unpacked(bits, [counts[rank] for counts in wanted.values()])
            for rank, bits in enumerate(came.split(received))
        ]
        for k, place in enumerate(numbers):
            here = [parts[k] for parts in by_owner]
            work, there = works[place], parts[place]
            work.early, work.late = _parted(there, here, False), _parted(there, here, True)

    def _is_late(self, place: int, ids: Tensor, serial: int) -> Tensor:
        """Return which rows the batch before looks up as well."""
        if place not in self._stamps:
            rows = self._wire.groups[place].inner.layout.num_rows
            self._stamps[place] = np.zeros(rows, dtype=np.uint8)
        stamps, at = self._stamps[place], ids.numpy()
        late = stamps[at] == _stamp(serial - 1)
        stamps[at] = _stamp(serial)
        return torch.from_numpy(late)

    # -- changes of rows ---------------------------------------------------------------

    @contextmanager
    def applying(self, batches: set[int]) -> Iterator[None]:
        """Inside, rows are updated from the gradients of batches, by their serial numbers, or these
        wait for a step; 0: of several batches, or of rows that were not looked up by one."""
        self._unstepped, self._applied = _joined(self._unstepped, batches), batches
        try:
            yield
        finally:
            self._applied = set()

    def note_step(self, *, wait_on: bool) -> None:
        """Note that rows were updated; `wait_on`: the gradients go on waiting, as torch's do."""
        self._changed_by = _joined(self._changed_by, self._unstepped)
        if not wait_on:
            self._unstepped = set()

    def forget_grads(self) -> None:
        """Note that no gradients wait any more but those that have just come."""
        self._unstepped = self._applied

    # -- sending -----------------------------------------------------------------------

    def can_send(self, works: Sequence[SharedWork] | None) -> bool:
        """Whether this rank can send the early rows of the next batch: they are in their slots, and
        the batch before does not move them, as it moves idle rows of dense rules."""
        if self._pause:
            self._pause -= 1
            return False
        return works is not None and all(
            work.early is not None
            and work.inner.group.idle is None
            and work.inner.group.slots_hold(work.inner)
            for work in works
        )

    def send(self, serial: int, works: Sequence[SharedWork], replaced: int) -> None:
        """Begin to send the early rows of a batch, while the one before is about to train."""
        self._changed_by = set()
        self._lanes.after("rows", self._lanes.mark("train"))
        with self._writing(), torch.no_grad(), self._lanes.on("rows"):
            early = self._wire.ranks.early
            arriving = [self._begin(work, work.early, early) for work in works]
        self._lanes.keep_for("train", [pending.values for pending in arriving])
        self._batch = _Batch(serial, replaced, arriving)

    def _begin(self, work: SharedWork, rows: Parted | None, channel: Channel) -> Pending:
        """Begin to swap some rows of a batch, or all of them; the lock is held."""
        values = work.inner.group.lookup(work.inner, work.inner.lookups)
        if rows is None:
            sent, received = work.received, work.route.counts
            values = values[: sum(sent)]  # a plan for no id has room for one
        else:
            sent, received = rows.sent, rows.received
            values = values.index_select(0, rows.at_owner)
        self._wire.count("rows", values, sent)
        if rows is not None and rows is work.early:
            self._wire.count("early rows", values, sent)
        return self._wire.ranks.begin_exchange(values, sent, received, channel)

    # -- receiving ---------------------------------------------------------------------

    def holds(self, serial: int, replaced: int) -> bool:
        """Whether the early rows that this rank has sent of a batch are as they are now."""
        batch = self._batch
        if batch is None or batch.serial != serial:
            return False
        return batch.replaced == replaced and self._changed_by <= {serial - 1}

    def arrivals_of(
        self, works: Sequence[SharedWork], *, has_early: bool, beside: bool
    ) -> list[Arrival]:
        """Send what ranks ask for, and return the vectors that this one asks for, for each width:
        with `has_early` those that are on their way, and the late ones; else all are sent now.
        `beside`: training goes on with what needs none of them."""
        if not has_early:
            self.drop(for_some_time=True)
        batch, self._batch = self._batch, None
        training, found = self._wire.ranks.training, []
        if beside:
            self._lanes.after("rows", self._lanes.mark("train"))
        with self._writing(), torch.no_grad(), self._lanes.on("rows") if beside else nullcontext():
            for place, work in enumerate(works):
                messages: list[tuple[Tensor | None, Pending]]
                if batch is None:
                    messages = [(None, self._begin(work, None, training))]
                else:
                    assert work.early is not None
                    assert work.late is not None
                    late = self._begin(work, work.late, training)
                    messages = [(work.early.here, batch.arriving[place]), (work.late.here, late)]
                found.append(Arrival(len(work.route.order), messages))
        if beside:
            self._lanes.keep_for("train", [x for arrival in found for x in arrival.values])
        return found

    def drop(self, *, for_some_time: bool = False) -> None:
        """Forget early rows that came for nothing; `for_some_time`: and send none for a while."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self._pause = _PAUSE if for_some_time else 0
            for pending in batch.arriving:
                with suppress(RankError):  # a rank that is gone: the next exchange says so
                    pending.wait()


def _joined(some: set[int], others: set[int]) -> set[int]:
    """Return both, or that these are several batches: only one is ever asked for."""
    return some | others if len(some | others) < 3 else {0}


def _stamp(serial: int) -> int:
    return 1 + serial % _STAMPS


def _parted(at_owner: Sequence[Tensor], here: Sequence[Tensor], is_late: bool) -> Parted:
    """Return the rows that are late, or those that are not; of masks rank by rank."""
    there, mine = ([mask == is_late for mask in masks] for masks in (at_owner, here))
    places = [torch.cat(masks).nonzero().squeeze(1) for masks in (there, mine)]
    sent, received = ([int(mask.sum()) for mask in masks] for masks in (there, mine))
    return Parted(places[0], places[1], sent, received)


def _packed(bits: Sequence[Tensor]) -> Tensor:
    return torch.from_numpy(np.packbits(torch.cat(list(bits)).numpy()))


def _unpacked(packed: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    bits = torch.from_numpy(np.unpackbits(packed.numpy(), count=sum(sizes)).astype(bool))
    parts: Sequence[Tensor] = bits.split(list(sizes))
    return parts
