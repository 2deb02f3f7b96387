"""What each batch needs: its slots, the rows to fetch, the rows to evict.

Sees ids only, never a row's bytes, so it is also a simulator. The maps it changes describe the
future: a row planned in is a hit for the next batch, before its bytes have arrived.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from hotrow.engine.evict import NEVER, Eviction, SlotFacts
from hotrow.engine.rules import OLDEST, PINNED, Hold, Pins, PlannerRules
from hotrow.engine.scratchpad import FREE, Scratchpad
from hotrow.engine.tuning import DEFAULT, Tuning
from hotrow.kernels.reference import Moves, SortedIds


@dataclass(frozen=True)
class Plan:
    """All that was decided for one batch."""

    number: int
    row_slots: Tensor  # [U + 1] int64: the slot of each unique id, then the padding slot
    moves: Moves
    loaded: int = 0  # the last moves: of rows to be pinned, which this batch need not look up


class Planner(PlannerRules):
    """Decides for the slots of one scratchpad, batch after batch."""

    def __init__(
        self,
        pad: Scratchpad,
        *,
        hold: Hold,
        eviction: Eviction,
        refetch: bool = False,
        pins: Pins | None = None,
        tuning: Tuning = DEFAULT,
    ) -> None:
        super().__init__(
            pad, hold=hold, eviction=eviction, refetch=refetch, pins=pins, tuning=tuning
        )
        self.pad = pad
        self.window: deque[Tensor] = deque()  # unique ids of the batches after that one
        shape, device = (pad.num_slots,), pad.slots.device
        self.last_use = torch.full(shape, OLDEST, dtype=torch.int32, device=device)
        self.next_use = torch.full(shape, NEVER, dtype=torch.int32, device=device)
        self.uses = torch.zeros(shape, dtype=torch.int32, device=device)
        self.pinned_slots = torch.empty(0, dtype=torch.int64, device=device)  # hottest first
        self._hottest_pinned = False
        self._queue = self._queue_use = self._queue_next = self.pinned_slots
        self._planned_since = 0  # rows, since the last ranking

    def expect(self, ids: SortedIds) -> None:
        """A batch that will be planned after those already expected."""
        if self.eviction.looks_ahead:
            # A ranking may be some batches old: what was of no use then may be now.
            slots = self.pad.map.lookup(ids.ids)
            slots = slots[slots != FREE]
            known = self.next_use.index_select(0, slots)
            self.next_use[slots] = known.clamp(max=self.number + len(self.window))
        self.window.append(ids.ids)

    def known_ahead(self, count: int) -> list[Tensor]:
        """The rows of the next batches, so many at most."""
        return list(islice(self.window, count))

    def forget_window(self) -> None:
        """The batches expected will not come."""
        self.window.clear()

    def plan(self, ids: SortedIds) -> Plan | None:
        """Decide for the next batch; None, and nothing changed, if its rows do not fit."""
        if self.window and self.window[0] is ids.ids:
            self.window.popleft()
        self._renumber()
        slots = self.pad.map.lookup(ids.ids)
        hit = slots != FREE
        hits, missing = slots[hit], ids.ids[~hit]
        upcoming = self._known_to_be_used()
        held = torch.cat([hits, *upcoming])
        before = self.last_use[held]
        self._use(hits, self.number)
        for ahead, soon in enumerate(upcoming, start=1):
            self._use(soon, self.number + ahead)
        self._planned_since += ids.ids.numel()
        victims = self._take_victims(missing.numel())
        self.note_missing(missing.numel())
        if victims is None:
            in_use = (self.last_use >= self.number - self.hold.past) & (self.last_use != PINNED)
            pinned = self.last_use[hits] == PINNED
            self.wanted_slots = missing.numel() + int(in_use.sum()) + int(pinned.sum())
            self.last_use[held] = before
            self._make_room(missing.numel())
            return None
        leaving = self.pad.replace(victims, missing)
        self._use(victims, self.number, fresh=True)
        self.uses[hits] += 1
        slots[~hit] = victims
        moves = Moves(victims, leaving, missing)
        if self.refetch:
            again = hits[before[: hits.numel()] < self.number - self.hold.past]
            rows = self.pad.row_of_slot[again]
            moves = _joined(moves, Moves(again, rows, rows))
        self.largest_batch = max(self.largest_batch, ids.ids.numel())
        self.number += 1
        loads = self._repin(self.pins) if self.pins is not None else None
        if loads is not None:
            moves = _joined(moves, loads)
        null = slots.new_tensor([self.pad.null_slot])
        return Plan(
            number=self._origin + self.number - 1,
            row_slots=torch.cat([slots, null]),
            moves=moves,
            loaded=0 if loads is None else loads.slots.numel(),
        )

    def _use(self, slots: Tensor, number: int, *, fresh: bool = False) -> None:
        if fresh:
            self.uses[slots] = 1
            self.last_use[slots] = number
        else:
            self.last_use[slots] = self.last_use[slots].clamp(min=number)

    def _known_to_be_used(self) -> list[Tensor]:
        """The slots of the next batches, as many as the hold looks at."""
        count = min(self.hold.future, len(self.window))
        slots = [self.pad.map.lookup(self.window[ahead]) for ahead in range(count)]
        return [each[each != FREE] for each in slots]

    def _take_victims(self, count: int) -> Tensor | None:
        if not self.eviction.in_bulk or self._is_cheap_to_rank():
            self._drop(self._queue.numel())
        victims = self._pop(count)
        if victims is None:
            self._rank(count)
            victims = self._pop(count)
        return victims

    def _is_cheap_to_rank(self) -> bool:
        """Whether a new ranking takes little beside what was planned since the last one, in which
        rows that came later are not, however far their next use is."""
        if not self.eviction.looks_ahead:
            return False
        tuning = self.tuning
        most = tuning.ranked_in_no_time + tuning.ranked_per_row * self._planned_since
        looked_at = self.pad.num_slots + sum(ids.numel() for ids in self.window)
        return looked_at <= most

    def _pop(self, count: int) -> Tensor | None:
        """The next victims of the last ranking that are still what they were then."""
        unused = self.last_use.index_select(0, self._queue) == self._queue_use
        if self.eviction.looks_ahead:
            unused &= self.next_use.index_select(0, self._queue) == self._queue_next
        places = unused.nonzero().squeeze(1)
        if places.numel() < count:
            return None
        chosen = places[:count]
        victims = self._queue[chosen]
        self._drop(int(chosen[-1]) + 1 if count else 0)
        return victims

    def _drop(self, count: int) -> None:
        self._queue = self._queue[count:]
        self._queue_use, self._queue_next = self._queue_use[count:], self._queue_next[count:]

    def _rank(self, count: int) -> None:
        """Order the slots that may leave, for this batch and, in bulk, for the next ones."""
        self._planned_since = 0
        if self.eviction.looks_ahead:
            self._find_next_uses()
        keys = self.eviction.key(SlotFacts(self.last_use, self.next_use, self.uses))
        may_leave = self.last_use < self.number - self.hold.past
        last = torch.iinfo(torch.int64).max
        keys = keys.masked_fill(~may_leave, last)
        bulk = self.pad.num_slots // self.tuning.bulk_part if self.eviction.in_bulk else 0
        keys, slots = torch.topk(keys, min(max(count, bulk), keys.numel()), largest=False)
        self._queue = slots[keys != last]
        self._queue_use = self.last_use[self._queue]
        self._queue_next = self.next_use[self._queue]

    def _find_next_uses(self) -> None:
        self.next_use.fill_(NEVER)
        if not self.window:
            return
        slots = self.pad.map.lookup(torch.cat(list(self.window)))
        sizes = torch.tensor([ids.numel() for ids in self.window], device=slots.device)
        batch = torch.arange(len(self.window), dtype=torch.int32, device=slots.device)
        number = torch.repeat_interleave(batch + (self.number + 1), sizes)
        here = (slots != FREE).nonzero().squeeze(1)
        self.next_use.scatter_reduce_(0, slots[here], number[here], "amin")

    def _renumber(self) -> None:
        if self.number + len(self.window) < self.tuning.last_number:
            return
        shift = self.number - self.hold.batches
        free = self.last_use != PINNED
        self.last_use[free] = (self.last_use[free] - shift).clamp(min=OLDEST)
        self._drop(self._queue.numel())
        self.next_use.fill_(NEVER)  # found anew with the next ranking
        self.number -= shift
        self._origin += shift

    # -- pinned slots ------------------------------------------------------------------

    def pin(self, slots: Tensor) -> None:
        """Keep these slots' rows, hottest first, until the next re-pin; others are let go."""
        self._release(self.pinned_slots)
        self.pinned_slots = slots
        self.last_use[slots] = PINNED
        self.pins_version += 1

    def pin_rows(self, ids: Tensor) -> Tensor:
        """Empty the slots and pin these rows, hottest first, for good; returns their slots.

        Nothing is in flight. The caller fills the slots.
        """
        slots = torch.arange(ids.numel(), device=ids.device)
        self.pad.clear()
        self.pad.replace(slots, ids)
        self.pinned_slots = slots[:0]
        self.last_use.fill_(OLDEST)
        self.next_use.fill_(NEVER)
        self.uses.zero_()
        self._drop(self._queue.numel())
        self.window.clear()
        self.number += self.hold.past + 1  # no batch before this one has its rows in slots
        self.stop_learning()
        self._hottest_pinned = True
        self.pin(slots)
        return slots

    def pin_most_used(self, part: float) -> None:
        """Re-pin by the uses counted while running; older uses count half next time."""
        count = self.count_pins(part, self.largest_batch)
        uses, slots = self.uses.topk(count)
        self.pin(slots[uses > 1])
        self.uses >>= 1

    def _repin(self, pins: Pins) -> Moves | None:
        """With the first batch fetch and pin what is known to be hot; later, what was learned."""
        if not self._hottest_pinned:
            self._hottest_pinned = True
            return self._pin_hottest(pins)
        if self.is_relearn_due(self.number):
            self.pin_most_used(pins.part)
        return None

    def _pin_hottest(self, pins: Pins) -> Moves:
        hot = pins.hottest(self.count_pins(pins.part, self.largest_batch)).to(self.last_use.device)
        absent = hot[self.pad.map.lookup(hot) == FREE]
        free = (self.pad.row_of_slot == FREE).nonzero().squeeze(1)[: absent.numel()]
        absent = absent[: free.numel()]
        leaving = self.pad.replace(free, absent)
        slots = self.pad.map.lookup(hot)
        self.pin(slots[slots != FREE])
        return Moves(free, leaving, absent)

    def _make_room(self, count: int) -> None:
        """After a batch that did not fit: the coldest pins give way, and no batch is in flight.

        Such a batch goes the direct way, alone; when the next one is planned it has been trained,
        and all before it. Numbers left out in between say so.
        """
        keep = max(0, self.pinned_slots.numel() - 2 * max(1, count))
        gives_way = keep < self.pinned_slots.numel()
        self.pins_version += gives_way
        self.pins_gave_way += gives_way
        self._release(self.pinned_slots[keep:])
        self.pinned_slots = self.pinned_slots[:keep]
        self.number += self.hold.past

    def _release(self, slots: Tensor) -> None:
        # A pinned slot's true last use is not known: as if used by the newest batch.
        self.last_use[slots] = self.number - 1

    # ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove the state consistent; for tests and long runs."""
        self.pad.check()
        assert bool((self.last_use[self.pinned_slots] == PINNED).all()), "a pin was lost"
        assert int((self.last_use == PINNED).sum()) == self.pinned_slots.numel(), "a stray pin"
        free = self.pad.row_of_slot == FREE
        assert bool((self.last_use[free] == OLDEST).all()), "a free slot was used"


def _joined(first: Moves, second: Moves) -> Moves:
    return Moves(
        torch.cat([first.slots, second.slots]),
        torch.cat([first.leaving, second.leaving]),
        torch.cat([first.entering, second.entering]),
    )
