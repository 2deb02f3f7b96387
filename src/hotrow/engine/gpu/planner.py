"""The planner on the device: the decisions of planner.py, made by kernels, without the host.

The host launches a plan and reads what became of it later, from page-locked memory. A plan that
fails halts all that were launched behind it, before any map has changed, until `resume`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.evict import Eviction
from hotrow.engine.gpu.plan_buffers import PlanBuffers
from hotrow.engine.gpu.scratchpad import DeviceScratchpad
from hotrow.engine.rules import OLDEST, Hold, Pins, PlannerRules
from hotrow.engine.tuning import DEFAULT, Tuning
from hotrow.kernels.triton import plan as kernels
from hotrow.kernels.triton import ranking, words
from hotrow.kernels.triton.maps import FREE
from hotrow.kernels.triton.segments import Segments
from hotrow.kernels.triton.window import enter_window, leave_window
from hotrow.support.streams import Mark, Recorder, synchronize

_MOST_BATCHES = 264  # that a window may hold
_LEAST_RANKED = 8  # batches that a ranking should serve
NEVER = PINNED = words.NEVER


@dataclass
class DevicePlan:
    """What was launched for one batch. `outcome` is known when the device has come there."""

    number: int
    lookups: int
    buffers: PlanBuffers
    ranking: int  # which ranking its victims come from
    rebuild: int  # and since which rebuild its tombstones count
    known: int = 0  # batches after it whose ids were known
    ready: Mark | None = None
    outcome: int | None = None
    num_unique: int = 0
    num_moves: int = 0
    num_evicted: int = 0
    soonest: int = NEVER  # in how many batches the first of the leaving rows is used again

    @property
    def certain(self) -> int:
        """The last batch that is known to use none of the leaving rows."""
        return self.number + min(self.known, self.soonest - 1)

    def segments(self) -> Segments:
        b, count = self.buffers, self.lookups
        most = min(count, b.uniques)
        return Segments(
            order=b.order[:count],
            rank=b.rank[:count],
            starts=b.starts[: most + 1],
            ids=b.ids[:most],
            count=b.counts[words.UNIQUE : words.UNIQUE + 1],
        )


@dataclass(eq=False)
class Expected:
    """A batch whose ids wait in a row of the window, which may change when the window grows."""

    row: int
    lookups: int


class DevicePlanner(PlannerRules):
    """Decides for the slots of one scratchpad, batch after batch."""

    def __init__(
        self,
        pad: DeviceScratchpad,
        *,
        hold: Hold,
        eviction: Eviction,
        refetch: bool = False,
        pins: Pins | None = None,
        window_bytes: int = 0,
        tracks_slots: bool = True,
        tuning: Tuning = DEFAULT,
    ) -> None:
        super().__init__(
            pad, hold=hold, eviction=eviction, refetch=refetch, pins=pins, tuning=tuning
        )
        self.pad, self.window_bytes = pad, window_bytes
        device, slots = pad.slots.device, len(pad.slots) - 1 if tracks_slots else 0
        self.device, self._tracks_slots = device, tracks_slots
        self.last_use = torch.full((slots,), OLDEST, dtype=torch.int32, device=device)
        self.next_use = torch.full((slots,), NEVER, dtype=torch.int32, device=device)
        self.uses = torch.zeros(slots, dtype=torch.int16, device=device)
        self.state = torch.zeros(words.STATE_WORDS, dtype=torch.int32, device=device)
        self.window: deque[Expected] = deque()
        self.has_started = False  # rows may have slots
        self.capacity = 0
        self.lookup_bytes = 0  # what the window gives up for each lookup that batches grow by
        self.generation = 0  # of the tensors that `reserve` makes
        self.recorder = Recorder(device)
        self.on_plan: Callable[[DevicePlan], None] = lambda plan: None  # launched after each plan
        self.fresh_counts = torch.zeros(words.COUNT_WORDS, dtype=torch.int32, device=device)
        self.fresh_counts[words.FIRST_BAD] = words.NO_BAD_ID
        self.fresh_counts[words.SOONEST] = NEVER
        self._unread: deque[DevicePlan] = deque()
        self._queue_left = 0
        self._most_taken = 0  # places of the queue that one plan has passed, lately
        self._rankings = 0
        self._sorts = 0  # most rows that leave in the order of ids; 0: they are not sorted
        # The ranking of the newest plan that was read, how far that plan came, and how long the
        # queue was.
        self._read_head, self._read_end = (0, 0), int(NEVER)
        # Which use is kept in `next_use`. The last one need not be found anew for each ranking, and
        # is enough while there are slots that no known batch uses.
        self._known_use = words.FIRST_USE if eviction.looks_ahead else words.NOTHING
        self._may_keep_last = eviction.name == "farthest-next-use"
        self._is_kept = False  # `next_use` is right
        self._is_fresh = False  # nothing is known of the newest ranking yet
        self._tombstones = 0
        self._rebuilds = 0

    # -- ids of batches to come --------------------------------------------------------

    @property
    def slot_facts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.last_use, self.next_use, self.uses

    def reserve(self, lookups: int) -> None:
        """Make room for batches of so many lookups; waits for the device only when it grows."""
        lookups = max(1, lookups)
        if lookups <= self.capacity:
            return
        self.recorder.forget()
        before, self.capacity = self.capacity, -(-lookups * 9 // 8) if self.capacity else lookups
        if before:
            grown = (self.capacity - before) * self.lookup_bytes
            self.window_bytes = max(0, self.window_bytes - grown)
        rows, bulk = self._window_rows(self.capacity), self._queue_size(self.capacity)
        kept = [self.ids_of(each).clone() for each in self.window]
        counts = [self.counts_of(each).clone() for each in self.window]
        shape = (rows + 1, self.capacity)  # the last for a batch that was not announced
        self.window_ids = torch.full(
            shape, self.pad.num_rows, dtype=self.pad.id_type, device=self.device
        )
        self.window_counts = self.fresh_counts.repeat(rows + 1, 1)
        # Captured launches read and write at fixed places.
        self.incoming_ids = torch.full_like(self.window_ids[0], self.pad.num_rows)
        self.plan_ids = torch.full_like(self.window_ids[0], self.pad.num_rows)
        self.incoming_counts, self.plan_counts = (
            self.fresh_counts.clone(),
            self.fresh_counts.clone(),
        )
        self.generation += 1
        for row, (each, ids, count) in enumerate(zip(self.window, kept, counts, strict=True)):
            self.window_ids[row, : ids.numel()] = ids
            self.window_counts[row] = count
            each.row = row
        self._next_row = len(self.window) % rows
        self.state[words.ROW_IN] = self._next_row
        self.state[words.ROW_OUT] = 0
        self.queue = torch.zeros(bulk, dtype=torch.int32, device=self.device)
        self._drop_ranking()
        self.scratch = torch.empty(
            kernels.scratch_words(self.capacity, bulk), dtype=torch.int32, device=self.device
        )

    def _window_rows(self, capacity: int) -> int:
        rows = self.window_bytes // max(1, capacity * self.pad.id_type.itemsize)
        return max(len(self.window) + 1, self.hold.future + 4, min(rows, _MOST_BATCHES))

    def _queue_size(self, capacity: int) -> int:
        slots = self.pad.num_slots if self._tracks_slots else 0
        return min(slots, max(slots // self.tuning.bulk_part, 4 * capacity + kernels.BLOCK))

    def bytes_for(self, lookups: int) -> dict[str, int]:
        """What `reserve` takes for batches of so many lookups."""
        queue, row = self._queue_size(lookups), lookups * self.pad.id_type.itemsize
        # One row for a batch that was not announced, one on its way in, and one that is planned.
        return {
            "look-ahead ids": (self._window_rows(lookups) + 1) * row,
            "planning": 2 * row + 4 * (kernels.scratch_words(lookups, queue) + queue),
        }

    @property
    def depth(self) -> int:
        """Batches that the window's bytes can hold."""
        return self.window_ids.shape[0] - 1 if self.capacity else _MOST_BATCHES

    def ids_of(self, batch: Expected) -> Tensor:
        return self.window_ids[batch.row, : batch.lookups]

    def counts_of(self, batch: Expected) -> Tensor:
        return self.window_counts[batch.row]

    def admit(self, lookups: int, *, announced: bool) -> Expected:
        """Return a place for a batch's ids; the caller writes them and then calls `expect`.

        One that is not announced has to be planned next.
        """
        self.reserve(lookups)
        row = self.depth
        if announced:
            if len(self.window) >= self.depth:
                raise RuntimeError(f"the window of {len(self.window)} batches is full")
            row, self._next_row = self._next_row, (self._next_row + 1) % self.depth
        return Expected(row, lookups)

    def expect(
        self,
        batch: Expected,
        write_ids: Callable[[Tensor, Tensor], None],
        key: Any,
        announce: Callable[[Tensor, Tensor, Tensor, Tensor | None], None] | None = None,
    ) -> None:
        """A batch that will be planned after those already expected.

        `write_ids(ids, counts)` writes its ids; the same launches every time for one `key`.
        `announce(window, window_counts, state, next_use)` does that and all the rest at once,
        where no first uses have to be found.
        """

        def launch() -> None:
            if announce is not None and self._known_use != words.FIRST_USE:
                marks = self.next_use if self._known_use == words.LAST_USE else None
                announce(self.window_ids[:-1], self.window_counts, self.state, marks)
                return
            self.incoming_counts.copy_(self.fresh_counts)
            write_ids(self.incoming_ids, self.incoming_counts)
            if self.eviction.looks_ahead:
                ranking.expect(
                    self.incoming_ids[None], 0, 1, self._word(words.EXPECTED), 0, self.next_use,
                    self.pad.map, self.pad.num_rows, self._known_use,
                )  # fmt: skip
            enter_window(
                self.incoming_ids, self.incoming_counts, self.window_ids[:-1], self.window_counts,
                self.state,
            )  # fmt: skip

        full_key = ("expect", batch.lookups, self.generation, self._known_use, key)
        self.recorder.run(full_key, launch)
        self.window.append(batch)

    def known_ahead(self, count: int) -> list[Tensor]:
        """The rows of the next batches, so many at most; waits for the device."""
        known = [self.ids_of(each).long() for each in islice(self.window, count)]
        return [ids[ids < self.pad.num_rows] for ids in known]

    def forget_window(self) -> None:
        """The batches expected will not come."""
        self.window.clear()
        if self.capacity:
            self.window_counts.copy_(self.fresh_counts.expand_as(self.window_counts))
        self._is_kept = False
        self._next_row = 0
        self._word(words.EXPECTED).copy_(self._word(words.CLOCK))
        self._word(words.ROW_OUT).zero_()
        self._word(words.ROW_IN).zero_()

    def _word(self, word: int) -> Tensor:
        return self.state[word : word + 1]

    def rehearse(
        self,
        buffers: PlanBuffers,
        announce: Callable[[Tensor, Tensor, Tensor, Tensor | None], None],
    ) -> None:
        """Launch all that planning may ever launch, with nothing to plan: what is launched for the
        first time is compiled, which takes up to a second. Before the first batch is expected."""
        halted, state = self.state.clone(), self.state.clone()
        halted[words.HALT] = 1  # plans change nothing
        plan = DevicePlan(0, self.capacity, buffers, 0, 0)
        batch, row = Expected(0, self.capacity), self.window_ids[:1]
        counts = self.fresh_counts[None].clone()
        before, kinds = self._known_use, [self._known_use]
        if self._may_keep_last:
            kinds.append(words.LAST_USE)
        for self._known_use in kinds:
            marks = self.next_use if self._known_use == words.LAST_USE else None
            self.state.copy_(halted)
            self.plan_counts.copy_(self.fresh_counts)
            for self._sorts in (0, kernels.BLOCK):
                self._launch_kernels(batch, plan)
            self.on_plan(plan)
            if self.eviction.looks_ahead:
                ranking.expect(
                    row, 0, 1, self._word(words.CLOCK), 1, self.next_use, self.pad.map,
                    self.pad.num_rows, self._known_use,
                )  # fmt: skip
            if self._tracks_slots:
                if self.eviction.name != "random":  # of torch's kernels, and a draw changes seeds
                    self._launch_ranking(announced=True)
                ranking.hold(
                    row[0], 1, self.last_use, self.state, self.pad.map, self.pad.num_rows
                )  # fmt: skip
            self.state.copy_(state)
            announce(row, counts, self.state, marks)
            enter_window(row[0], counts[0], row, counts, self.state)
            leave_window(self.plan_ids, counts[0], row, counts, self.fresh_counts, self.state)
            row.fill_(self.pad.num_rows)  # `hold` must find no row of the batch
        self._known_use, self._sorts = before, 0
        self.state.copy_(state)
        # Batches that were not announced may have been planned before: what is known of uses was
        # overwritten, and so was the queue.
        self._is_kept = False
        self._drop_ranking()
        if self.pad.map.hashed:
            self.pad.map.rebuild()

    # -- planning ----------------------------------------------------------------------

    def plan(self, batch: Expected, buffers: PlanBuffers) -> DevicePlan:
        """Launch the plan of the next batch."""
        announced = bool(self.window) and self.window[0] is batch
        if announced:
            self.window.popleft()
        self._read_finished()
        self._choose_sorts()
        self._renumber()
        for ahead, later in enumerate(list(self.window)[: self.hold.future], start=1):
            ranking.hold(
                self.ids_of(later), ahead, self.last_use, self.state, self.pad.map,
                self.pad.num_rows,
            )  # fmt: skip
        self._prepare_victims(announced=announced)
        self._repin()
        number = self._origin + self.number
        # A batch in between moves the numbers of those that were announced.
        known = len(self.window) if announced else 0
        plan = DevicePlan(number, batch.lookups, buffers, self._rankings, self._rebuilds, known)
        self._launch(batch, plan, announced=announced)
        if not announced and self.window:
            self._drop_ranking()
            self._is_kept = False
        self.number += 1
        self._unread.append(plan)
        return plan

    def _choose_sorts(self) -> None:
        """Sort rows that leave where many move: few are not faster then."""
        usual = int(self._mean_missing)
        if usual < self.tuning.sorted_from:
            self._sorts = 0
        elif not 1.05 * usual < self._sorts < 2 * usual:  # it is captured: change it seldom
            self._sorts = -(-int(1.4 * usual) // kernels.BLOCK) * kernels.BLOCK

    def _launch(self, batch: Expected, plan: DevicePlan, *, announced: bool) -> None:
        if not announced:
            self.plan_ids[: batch.lookups].copy_(self.ids_of(batch))
            self.plan_counts.copy_(self.counts_of(batch))

        def launch() -> None:
            if announced:
                leave_window(
                    self.plan_ids, self.plan_counts, self.window_ids[:-1], self.window_counts,
                    self.fresh_counts, self.state,
                )  # fmt: skip
            else:
                self._word(words.EXPECTED).add_(1)
            self._launch_kernels(batch, plan)
            self.on_plan(plan)

        kind = (announced, batch.lookups, self.generation, self._known_use, self._sorts)
        self.recorder.run(("plan", *kind, plan.buffers.number), launch)

    def _launch_kernels(self, batch: Expected, plan: DevicePlan) -> None:
        b, count = plan.buffers, batch.lookups
        kernels.plan(
            self.plan_ids[:count],
            plan.segments(),
            b.row_slots,
            b.lookup_slots,
            (b.move_slots, b.leaving, b.entering),
            self.plan_counts,
            b.counts,
            b.status,
            self.scratch[: kernels.scratch_words(count, self.queue.numel())],
            told=b.told,
            state=self.state,
            slot_facts=self.slot_facts,
            queue=self.queue,
            row_map=self.pad.map,
            num_rows=self.pad.num_rows,
            past=self.hold.past,
            refetch=self.refetch,
            known_use=self._known_use,
            capacity=self.capacity,
            sorts=min(count, b.uniques, self._sorts),
        )

    def read(self, plan: DevicePlan) -> int:
        """What became of a plan; waits for the device if it has not come there."""
        if plan.outcome is None:
            if plan.ready is not None:
                plan.ready.wait()
            self._note(plan)
        assert plan.outcome is not None
        return plan.outcome

    def _read_finished(self) -> None:
        while self._unread and _is_done(self._unread[0]):
            self._note(self._unread.popleft())

    def _note(self, plan: DevicePlan) -> None:
        if plan.outcome is not None:
            return
        status = plan.buffers.status.tolist()
        counts, state = status[:8], status[8:]
        plan.outcome = counts[words.OUTCOME]
        if plan.outcome != words.PLANNED:
            return
        plan.num_unique, plan.num_moves = counts[words.UNIQUE], counts[words.MOVES]
        plan.num_evicted = counts[words.EVICTED] + counts[words.AGAIN]
        plan.soonest = counts[words.SOONEST]
        missing = counts[words.MISSING]
        self.largest_batch = max(self.largest_batch, plan.num_unique)
        self.note_missing(missing)
        self._note_head(plan, state[words.HEAD], state[words.END], missing)
        if plan.rebuild == self._rebuilds:
            self._tombstones = state[words.TOMBSTONES]

    def _note_head(self, plan: DevicePlan, head: int, end: int, missing: int) -> None:
        """Learn how far a plan came in the queue, which ended there."""
        ranking, before = self._read_head
        if plan.ranking < ranking or (plan.ranking == ranking and head < before):
            return  # the direct path reads plans in flight, the newest first
        before = before if ranking == plan.ranking else 0
        self._read_head, self._read_end = (plan.ranking, head), end
        # Also where a newer ranking was made: if each plan makes one, nothing else is learned.
        self._most_taken = max(head - before, int(0.9 * self._most_taken))
        if plan.ranking == self._rankings:
            self._queue_left = end - head
            if self._is_fresh and end - head < _LEAST_RANKED * missing:
                self._may_keep_last = False
            self._is_fresh = False

    def resume(
        self,
        batch: Expected,
        plan: DevicePlan,
        *,
        retry: bool,
        larger: PlanBuffers | None = None,
    ) -> bool:
        """After a plan that failed, with nothing else running; True if it has been planned now.

        It may have failed for want of room for its rows, of places in the map, or of slots in a
        ranking that may still leave. All that can be mended before it is given up.
        """
        self.clear_halt()
        is_rebuilt = False
        while retry:
            status = plan.buffers.status.tolist()
            taken = status[words.COUNT_WORDS + words.TOMBSTONES] + status[words.MISSING]
            is_full = self.pad.map.hashed and taken >= self.pad.map.size - self.pad.num_slots
            if larger is not None:
                plan.buffers, larger = larger, None
            elif is_full and not is_rebuilt:
                self._rebuild()
                is_rebuilt = True
            else:
                self._may_keep_last = False  # there were too few that no known batch uses
                retry = False
            self._rank(announced=False)
            plan.outcome, plan.number = None, self._origin + self.number
            plan.ranking, plan.rebuild = self._rankings, self._rebuilds
            self._launch(batch, plan, announced=False)
            plan.ready = None
            _wait(self.device)
            self._note(plan)
            if plan.outcome == words.PLANNED:
                self.number += 1
                return True
            self.state[words.HALT] = 0
        missing = int(plan.buffers.status[words.MISSING])
        self.note_missing(missing)
        floor = self.state[words.CLOCK] - self.hold.past
        in_use = (self.last_use >= floor) & (self.last_use != PINNED)
        # Of those that are there, what batches in flight do not use would come on top.
        self.wanted_slots = missing + int(in_use.sum())
        self._make_room(missing)
        return False

    def clear_halt(self) -> None:
        """What comes next is planned again."""
        self.state[words.HALT] = 0
        self._take_clock()
        self._unread.clear()

    def _prepare_victims(self, *, announced: bool) -> None:
        most = min(self.capacity, self.pad.num_slots)
        usual = self._most_taken or most
        since = sum(plan.ranking == self._rankings for plan in self._unread)
        # A plan finds enough of them only if they are still there: keep a few batches' worth.
        if (
            not self.eviction.in_bulk
            or self._queue_left < (since + 2) * usual + self.tuning.spare_victims
        ):
            self._rank(announced=announced)
        # Some more, and searches for absent rows take longer. A plan that would leave no place
        # empty fails, and is made again after a rebuild.
        if (
            self.pad.map.hashed
            and self._tombstones > self.pad.map.size // self.tuning.tombstone_part
        ):
            self._rebuild()

    def _rebuild(self) -> None:
        self.pad.map.rebuild()
        self._word(words.TOMBSTONES).zero_()
        self._rebuilds += 1
        self._tombstones = 0

    def _rank(self, *, announced: bool) -> None:
        """Order the slots that may leave, for this batch and, in bulk, for the next ones."""
        if self.eviction.looks_ahead:
            self._find_uses()
        if self.eviction.name == "random":
            self._launch_ranking(announced=announced)  # a graph would draw its numbers elsewhere
        else:
            key = ("rank", announced, self.generation, self._known_use)
            self.recorder.run(key, lambda: self._launch_ranking(announced=announced))
        # Few slots may leave where batches in flight hold most: as many as in the last ranking,
        # until a plan of this one is read.
        self._queue_left = min(self.queue.numel(), self._read_end)
        self._rankings += 1
        self._is_fresh = True

    def _launch_ranking(self, *, announced: bool) -> None:
        if self.eviction.name == "random":
            keys = torch.randint(1 << 30, self.last_use.shape, device=self.device)
            may_leave = self.last_use < self.state[words.CLOCK] - self.hold.past
            keys = torch.where(may_leave, keys, NEVER)
        else:
            keys = ranking.rank_keys(
                self.slot_facts, self.pad.row_of_slot, self.state, self.hold.past,
                self.eviction.name, self._known_use,
            )  # fmt: skip
        keys, slots = torch.topk(keys, self.queue.numel(), largest=False)
        self.queue.copy_(slots)
        clock, expected = self._word(words.CLOCK), self._word(words.EXPECTED)
        self._word(words.HEAD).zero_()
        self._word(words.END).copy_((keys != NEVER).sum())
        self._word(words.FLOOR).copy_(clock - self.hold.past)
        # This batch was among those expected, if it was announced.
        self._word(words.KNOWN).copy_(expected - 1 if announced else expected)

    def _drop_ranking(self) -> None:
        """The next plan makes a new one, whatever plans that are still unread tell of this one."""
        self._queue_left = 0
        self._rankings += 1

    def _find_uses(self) -> None:
        """What known batches use, from their ids; kept since then, if it is the last use."""
        kind = words.LAST_USE if self._may_keep_last else words.FIRST_USE
        if kind == self._known_use == words.LAST_USE and self._is_kept:
            return
        self._known_use, self._is_kept = kind, True
        self.next_use.fill_(NEVER if kind == words.FIRST_USE else OLDEST)
        if self.window:
            ranking.expect(
                self.window_ids[:-1], self.window[0].row, len(self.window),
                self._word(words.CLOCK), 1, self.next_use, self.pad.map, self.pad.num_rows, kind,
            )  # fmt: skip

    def useful_depth(self) -> int:
        return max(0, min(super().useful_depth(), self.depth - 2))

    def _renumber(self) -> None:
        if self.number + len(self.window) < self.tuning.last_number:
            return
        shift = self.number - self.hold.batches - len(self._unread)
        shifted = (self.last_use - shift).clamp_(min=OLDEST)
        self.last_use.copy_(torch.where(self.last_use == PINNED, PINNED, shifted))
        self.state[words.CLOCK] -= shift
        self.state[words.EXPECTED] -= shift
        self._drop_ranking()
        self._is_kept = False
        self.number -= shift
        self._origin += shift

    # -- pinned slots ------------------------------------------------------------------

    @property
    def _largest(self) -> int:
        """Rows of the largest batch so far, or what the first one may have."""
        return self.largest_batch or min(self.capacity, self.pad.num_slots)

    def _repin(self) -> None:
        if self.pins is not None and self.is_relearn_due(self._origin + self.number):
            self.pin_most_used(self.pins.part)

    def pin_most_used(self, part: float) -> None:
        """Re-pin by the uses counted while running; older uses count half next time."""
        self._release(self.last_use == PINNED)
        self.pins_version += 1
        count = self.count_pins(part, self._largest)
        if count:
            uses, slots = self.uses.topk(count)
            self.last_use[slots] = torch.where(uses > 1, PINNED, self.last_use[slots])
        self.uses >>= 1

    def hottest(self) -> tuple[Tensor, Tensor]:
        """Slots and ids of what is known to be hot beforehand, mapped and pinned; once, at first.

        Nothing has been planned yet: the caller fills the slots.
        """
        assert self.pins is not None
        ids = self.pins.hottest(self.count_pins(self.pins.part, self._largest)).to(
            self.device, self.pad.id_type
        )
        return self._pin_first(ids), ids

    def _pin_first(self, ids: Tensor) -> Tensor:
        """The first slots, which are free like all others, for these rows."""
        slots = torch.arange(ids.numel(), device=self.device)
        self.pad.row_of_slot[slots] = ids
        if self.pad.map.hashed:
            self.pad.map.rebuild()
        else:
            self.pad.map.table[ids.long()] = slots.int()
        self.last_use[slots] = PINNED
        self.pins_version += 1
        return slots

    def pin_rows(self, ids: Tensor) -> Tensor:
        """Empty the slots and pin these rows, hottest first, for good; returns their slots.

        Nothing is in flight. The caller fills the slots.
        """
        self.has_started = True
        self.reserve(1)
        for plan in self._unread:
            self.read(plan)
        self.forget_window()
        self.pad.clear()
        self._rebuild()  # no tombstone is left
        self.last_use.fill_(OLDEST)
        self.next_use.fill_(NEVER)
        self.uses.zero_()
        self.clear_halt()
        self._skip_numbers(self.hold.past + 1)  # no batch before has its rows in slots
        self.stop_learning()
        return self._pin_first(ids.to(self.device, self.pad.id_type))

    def _skip_numbers(self, count: int) -> None:
        self.state[words.CLOCK] += count
        self._take_clock()

    def _release(self, pinned: Tensor) -> None:
        # A pinned slot's true last use is not known: as if used by the newest batch.
        self.last_use.copy_(torch.where(pinned, self.state[words.CLOCK] - 1, self.last_use))

    def _make_room(self, count: int) -> None:
        """After a batch that did not fit: the coldest pins give way, and no batch is in flight."""
        # Ties: later pins give way first, because pins are stored hottest first.
        pinned = (self.last_use == PINNED).nonzero().squeeze(1).flip(0)
        coldest = self.uses[pinned].sort(stable=True)[1][: 2 * max(1, count)]
        release = torch.zeros_like(self.last_use, dtype=torch.bool)
        release[pinned[coldest]] = True
        self._release(release)
        self.pins_version += coldest.numel() > 0
        self.pins_gave_way += coldest.numel() > 0
        self._skip_numbers(self.hold.past)

    def _take_clock(self) -> None:
        self._drop_ranking()  # batches may have other numbers now
        self._is_kept = False
        self.number = int(self.state[words.CLOCK])
        self.state[words.EXPECTED] = self.number + len(self.window)

    @property
    def num_bytes(self) -> dict[str, int]:
        facts = sum(each.element_size() for each in (*self.slot_facts, self.pad.row_of_slot))
        state = facts * self.pad.num_slots
        if not self.capacity:
            return {"slot state": state}
        here = (self.scratch, self.queue, self.incoming_ids, self.plan_ids)
        plan = sum(each.nbytes for each in here)
        return {"slot state": state, "look-ahead ids": self.window_ids.nbytes, "planning": plan}

    def check(self, *, may_halt: bool = False) -> None:
        """Prove the state consistent; for tests and long runs."""
        self.pad.check()
        free = self.pad.row_of_slot == FREE
        assert bool((self.last_use[free] == OLDEST).all()), "a free slot was used"
        assert may_halt or int(self.state[words.HALT]) == 0, "planning has halted"


def _is_done(plan: DevicePlan) -> bool:
    return plan.outcome is not None or (plan.ready is not None and plan.ready.passed())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        synchronize(device)
