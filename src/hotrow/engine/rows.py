"""All that belongs to the rows of one width: store, scratchpad, planner, traffic.

The planned way moves rows ahead of training. The direct way needs no plan: it finds each row
where it is now, in its slot or in the store, and passes through a bounded buffer. Evaluation,
batches larger than the slots and late gradients take it, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotrow.engine.planner import Pins, Plan, Planner
from hotrow.engine.profile import Profile, hottest, small_tables
from hotrow.engine.scratchpad import FREE, Scratchpad
from hotrow.engine.split_batch import place_of
from hotrow.engine.stages import Part, Work
from hotrow.engine.strategy import Strategy
from hotrow.inputs.batch import Batch, Lookups, lookups_of
from hotrow.inputs.tables import WidthGroup
from hotrow.kernels import reference
from hotrow.kernels.reference import Moves, SortedIds, bits_of, in_bits, places
from hotrow.kernels.rules import RowSettings, per_row
from hotrow.store.budget import SLOT_STATE_BYTES, Share
from hotrow.store.changed import ChangedRows
from hotrow.store.ram import Store, host_rows, initialise
from hotrow.support.clock import Part as Timed
from hotrow.support.clock import Sum, named
from hotrow.support.host_memory import check_fits
from hotrow.support.interrupts import uninterrupted
from hotrow.support.messages import warn
from hotrow.support.streams import Mark, lanes_of
from hotrow.support.threads import RowLock

_MOST_LOOKUPS = 1 << 16  # that are read together, so that what is computed on the way stays small

# Lookups that are read together, and their ids sorted if a row is to be read only once.
ReadPart = tuple[Lookups, SortedIds | None]


class RowGroup:
    """Rows of one width."""

    plans_later = False  # what became of a plan is known when it was launched
    compares_later = False  # a device finds out whether ids are still those that were planned
    can_be_captured = False  # a step without the host
    can_be_cut = False  # all of a step but lookup and update
    berths = 0  # where batches of captured steps land
    aside = False  # another engine trains the same rows now
    # Different ones of a batch, before the first is planned; None: nobody has said.
    expected_rows: int | None = None
    frozen: Tensor | None = None  # a bit for each row that no step changes; None: there is none
    untrained: Tensor | None = None  # ids of padding rows, which no step changes; None: none
    notes_changes = True  # this engine can say which rows it has written
    changed: ChangedRows | None = None  # where it does; None: nobody asks
    why_no_snapshot: str | None = None  # why not all that writes rows says so; None: it does
    fill_choice: Any = None  # how a device moves rows, where it can do so in several ways
    # What to ask for to have so many slots instead of those; None: the budget is not in bytes.
    setting_for: Callable[[int, int], str] | None = None

    def __init__(
        self,
        layout: WidthGroup,
        *,
        optimizer: RowSettings,
        strategy: Strategy,
        share: Share | None,
        device: torch.device,
        seed: int,
        profile: Profile | None,
        window_bytes: int = 0,
        output_dtype: torch.dtype = torch.float32,
        fill: str = "auto",
        lock: RowLock | None = None,
    ) -> None:
        """`share` is None when every row lives in fast memory. `lock` is held by callers: to
        write by all that changes rows or maps, to read by `read_parts` and `gather`."""
        self.lock = lock or RowLock(shared=False)
        self.window_bytes, self.output_dtype, self.fill_form = window_bytes, output_dtype, fill
        self.layout, self.optimizer, self.strategy = layout, optimizer, strategy
        self.device, self.profile = device, profile
        self.kernels = reference
        self.lanes = lanes_of(device)
        self.dim = layout.dim
        self.width = layout.dim + optimizer.rule.state_width(layout.dim)
        self.state = optimizer.rule.state_columns(layout.dim)
        self.moved_floats = self.width  # of a row that moves
        self.everything = share is None
        self._skips = layout.skips
        if layout.untrained:
            self.untrained = torch.tensor(layout.untrained, device=self._frozen_on)
        self._make_rows(share)
        start = optimizer.rule.start_of_state()
        columns = [start] * (self.width - self.dim)
        self._initialise(columns, seed)
        self.moved = [0, 0, 0, 0]  # lookups, unique rows, rows fetched, rows evicted
        # The same per table.
        self.traffic = torch.zeros(len(layout.tables), 4, dtype=torch.int64, device=device)
        self.loaded_rows = 0  # fetched to be pinned, before any lookup asked for them
        self.loaded = torch.zeros(len(layout.tables), dtype=torch.int64, device=device)
        self.direct_batches = 0
        self.needed_slots = 0  # by batches that passed in chunks
        self.chunk_time = Sum()
        self._chunks = Timed("chunks", self.chunk_time)
        self.newest_collected = -1  # number of the last plan whose victims were read
        self.uncollected: list[Work] = []  # planned; slot -> row says so, the bytes not yet
        self.in_transit: list[Work] = []  # collected, and not inserted
        self._buffer_is_free = Lock()  # held by the thread that reads through the buffer

    def _initialise(self, state: list[float], seed: int) -> None:
        initialise(self.store.rows, self.layout, state, seed)

    def _make_rows(self, share: Share | None) -> None:
        if share is None:
            if self.device.type == "cpu":
                check_fits(self.layout.num_rows, self.width)
            # The last row stays zero: padding reads it.
            rows = torch.zeros(self.layout.num_rows + 1, self.width, device=self.device)
            self.slots, self.store = rows, Store(rows[:-1])
        else:
            self.store = Store(host_rows(self.layout.num_rows, self.width))
            self._make_scratchpad(share)

    def _make_scratchpad(self, share: Share) -> None:
        self.pad = Scratchpad(
            share.slots, self.width, self.layout.num_rows, self.device, dense_map=share.dense_map
        )
        self.slots = self.pad.slots
        self.buffer = torch.zeros(share.buffer_rows + 1, self.width, device=self.device)
        hold = self.strategy.hold
        self._past = hold.past
        self.planner = Planner(
            self.pad,
            hold=hold,
            eviction=self.strategy.eviction,
            refetch=self.strategy.refetch,
            pins=self._pins(),
        )

    def _pins(self) -> Pins | None:
        layout, profile, part = self.layout, self.profile, self.strategy.pinned_part
        if part and profile is not None:
            return Pins(part, lambda count: hottest(profile, layout, count))
        if not self.strategy.learns_pins:
            return None
        return Pins(part, lambda count: small_tables(layout, count // 2), learned=True)

    # -- pinned rows -------------------------------------------------------------------

    @property
    def room_for_pins(self) -> int | None:
        """Rows that can be pinned beside batches an eighth larger than any so far; None: nobody
        knows how large they are."""
        slots, largest = self.pad.num_slots, self.planner.largest_batch or self.expected_rows
        if largest is None:
            return None
        if self.pad.has_every_row:
            return slots  # no batch needs room beside the pins
        largest = max(1, largest)  # a batch without a lookup tells nothing of the next
        return max(0, slots - self.planner.hold.batches * min(slots, -(-largest * 9 // 8)))

    def pin_rows(self, ids: Tensor) -> None:
        """Empty the slots, pin these rows, hottest first, and load them. Nothing is in flight."""
        self.flush()
        assert not self.uncollected, "batches are planned whose rows have not moved yet"
        ids = ids.to(self.device)
        slots = self.planner.pin_rows(ids)
        self.newest_collected = self.planner.last_number  # late gradients take the direct way
        self._load(slots, ids)
        self._count_loaded(ids)

    def reload(self) -> None:
        """All rows that have slots, once more from the store, where others have changed them."""
        taken = (self.pad.row_of_slot != FREE).nonzero().squeeze(1)
        self._load(taken, self.pad.row_of_slot[taken])

    def replaced(self) -> None:
        """Others have replaced rows in the store, while nothing was in flight."""
        if not self.everything:
            self.expect_changes()
            self.reload()

    def count_resident(self) -> int:
        """Rows that have slots."""
        return int((self.pad.row_of_slot != FREE).sum())

    def expect_changes(self) -> None:
        """Others will change rows in the store: none may count as known without being read."""

    def _load(self, slots: Tensor, ids: Tensor) -> None:
        """Rows from the store to slots."""
        for part in torch.arange(ids.numel()).split(self.chunk_rows):
            rows = self._buffer(part.numel())
            self.slots.index_copy_(0, slots[part], self.store.read(ids[part], out=rows))

    # -- the planned way ---------------------------------------------------------------

    def work(self, batch: Batch) -> Work:
        """Check a batch's ids and sort them."""
        lookups = lookups_of(batch, self.layout)
        return Work(self, lookups, self.kernels.sort_ids(lookups.ids, self.layout.num_rows))

    def part(self, work: Work, batch: Batch, part: Batch, first: int) -> Work:
        """Some samples of a planned batch, from `first` on."""
        place = place_of(batch, part, first, self.layout)
        return Part(work, lookups_of(part, self.layout), place)

    def expect(self, work: Work, values: Tensor) -> None:
        """A batch is known that will be planned later; `values` are its indices."""
        if not self.everything:
            self.planner.expect(work.ids)

    def plan(self, work: Work) -> bool:
        """Plan a batch; False if it has to go the direct way."""
        if self.everything:
            null = work.ids.ids.new_tensor([self.layout.num_rows])
            work.plan = Plan(0, torch.cat([work.ids.ids, null]), _NO_MOVES)
            work.collected = work.inserted = True
            self._count(work.ids)
            return True
        work.plan = self.planner.plan(work.ids)
        if work.plan is None:
            self._tell_of_chunks(work.ids.ids)
            self.count_direct(work)
            return False
        self.uncollected.append(work)
        moves, wanted = work.plan.moves, work.plan.moves.slots.numel() - work.plan.loaded
        self._count(work.ids, fetched=moves.entering[:wanted], evicted=moves.leaving)
        if work.plan.loaded:
            self._count_loaded(moves.entering[wanted:])
        return True

    def free_berth(self, berth: int) -> None:
        """No batch will land there again."""

    def forget_window(self) -> None:
        """The batches expected will not come."""
        if not self.everything:
            self.planner.forget_window()

    @property
    def most_ahead(self) -> int | None:
        """Batches that may be expected at once; None: any number."""
        return None

    def mark_planned(self, work: Work, mark: Mark) -> None:
        """Where the plan will be known; here it already is."""

    def confirm(self, work: Work) -> bool:
        """Learn what became of a plan, here `plan` has said it; False if it halted others."""
        return True

    def compare(self, work: Work) -> None:
        """Launch a comparison of a batch's ids with those that were planned, where a device does
        it; elsewhere that was done by value."""

    def note_number(self, work: Work, number: int) -> None:
        """A batch is yielded, which has this number in its pass."""

    def take_changed(self) -> int | None:
        """The number of a batch whose ids a device has found changed, once; None: of none."""
        return None

    def take_back(self, work: Work) -> None:
        """A batch before this one failed to be planned; here no batch is planned behind it."""

    def _tell_of_chunks(self, ids: Tensor) -> None:
        """A batch of these rows has no room."""
        self.needed_slots = max(self.needed_slots, self._slots_for(ids))
        if self.direct_batches:
            return
        advice = self.remedy("it")
        if self.needed_slots <= self.pad.num_slots and self.planner.pins is not None:
            advice = "Pinned rows give way to the next ones of its size"
        warn(
            f"a batch of {ids.numel():,} different rows does not fit the {self.pad.num_slots:,} "
            f"slots of width {self.dim} beside those in flight; it passes through in chunks, which "
            f"is right but slow. {advice}"
        )

    def _slots_for(self, ids: Tensor) -> int:
        """Those that would have held a batch beside the ones in flight."""
        planner, rows = self.planner, ids.numel()
        others = planner.hold.batches - 1
        near = planner.known_ahead(others)
        together = torch.cat([ids, *near]).unique().numel()
        if planner.wanted_slots <= rows:  # nothing was in flight: those to come tell what would be
            if near:
                together += (together - rows) * (others - len(near)) // len(near)
            elif not self.needed_slots:  # nobody has told how many rows batches share
                together += others * max(rows, planner.largest_batch)
        return int(min(max(together, planner.wanted_slots), self.layout.num_rows))

    def remedy(self, what: str) -> str:
        """What would hold batches that passed in chunks."""
        if self.needed_slots <= self.pad.num_slots:
            return f"A larger budget would hold {what}"
        if self.setting_for is None:
            return f"{self.needed_slots:,} slots would hold {what}"
        return f"{self.setting_for(self.needed_slots, self.pad.num_slots)} would hold {what}"

    def fill(self, work: Work) -> None:
        assert work.plan is not None
        self.store.will_write(work.plan.moves.leaving)
        self.kernels.fill(self.slots, self.store.rows, work.plan.moves)
        self._mark_collected(work)
        work.inserted = True

    def collect(self, work: Work) -> None:
        assert work.plan is not None
        moves = work.plan.moves
        # Rows travel through the buffer, half of it for each direction. More than it holds, as in
        # a first batch, move at once: whatever a batch collects may leave and enter by then.
        if moves.slots.numel() > self.chunk_rows // 2:
            self.fill(work)
            return
        leaving = moves.leaving >= 0
        work.outgoing = self.slots.index_select(0, moves.slots[leaving])
        entering = torch.empty(moves.entering.numel(), self.width)
        work.incoming = self.store.read(moves.entering, out=entering)
        # A row that is fetched anew has its newest bytes in the slot until it is written back.
        again = moves.entering == moves.leaving
        work.incoming[again] = self.slots[moves.slots[again]]
        self._mark_collected(work)
        self.in_transit.append(work)

    def exchange(self, work: Work) -> None:
        """Rows that were collected change sides; here one memory serves both."""

    def write_back(self, work: Work) -> None:
        """Put leaving rows that were collected into the store."""
        assert work.plan is not None
        leaving, work.outgoing, rows = work.plan.moves.leaving, None, work.outgoing
        if rows is not None:
            with named("write-back"):
                self.store.write(leaving[leaving >= 0], rows)

    def insert(self, work: Work) -> None:
        assert work.plan is not None
        assert work.incoming is not None
        self.write_back(work)
        self.slots.index_copy_(0, work.plan.moves.slots, work.incoming)
        work.incoming = None
        work.inserted = True
        self.in_transit.remove(work)

    def _mark_collected(self, work: Work) -> None:
        assert work.plan is not None
        self.uncollected.remove(work)
        work.collected = True
        self.newest_collected = work.plan.number

    def finish_planned(self) -> None:
        """Move the rows of all planned batches, though these will not be trained.

        The maps already say that they have moved. Errors of plans are dropped: they belong to
        batches that will not be yielded.
        """
        with uninterrupted():
            with self.lanes.on("rows"):
                for work in list(self.in_transit):
                    self.insert(work)
            for work in list(self.uncollected):
                with suppress(Exception):
                    self.confirm(work)
                if work.plan is not None and not work.collected:
                    with self.lanes.on("rows"):
                        self.fill(work)

    def slots_hold(self, work: Work) -> bool:
        """Whether a batch's rows are in the slots that were planned for it."""
        if work.plan is None or not work.inserted or self.aside:
            return False
        return self.everything or self.newest_collected <= work.plan.number + self._past

    # -- the direct way ----------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether rows can be found without moving any: then several threads may read."""
        return not self.in_transit

    def settle(self) -> None:
        """Finish what is between collect and insert: no row may be nowhere."""
        if not self.in_transit:
            return
        with uninterrupted():
            for work in list(self.in_transit):
                self.insert(work)

    def locate(self, ids: Tensor) -> Tensor:
        """The slot that holds each row's newest bytes now, -1 if the store does."""
        slots = self._slots_of(ids)
        # The maps describe the future: take back what was planned and not yet done.
        for work in reversed(self.uncollected):
            move_slots, leaving, entering = self._moves_of(work)
            if move_slots.numel():
                slots = torch.where(places(ids, entering) >= 0, FREE, slots)
                place = places(ids, leaving)
                slots = torch.where(place >= 0, move_slots[place], slots)
        return slots

    def _slots_of(self, ids: Tensor) -> Tensor:
        return self.pad.map.lookup(ids)

    def _moves_of(self, work: Work) -> tuple[Tensor, Tensor, Tensor]:
        assert work.plan is not None
        return work.plan.moves.slots, work.plan.moves.leaving, work.plan.moves.entering

    def note_changes(self) -> None:
        """Remember which rows are written from now on."""
        if self.changed is None:
            self.changed = self._changed_rows()
        self.changed.clear()  # where they are: captured steps note there

    def _changed_rows(self) -> ChangedRows:
        return ChangedRows(self.layout.num_rows)

    def gather(self, ids: Tensor, out: Tensor) -> Tensor:
        """Copy the newest bytes of rows, each given once, into `out`."""
        if self.everything:
            return self.store.read(ids, out=out)
        self.settle()
        slots = self.locate(ids)
        here = slots != FREE
        out[here] = self.slots.index_select(0, slots[here])
        out[~here] = self.store.rows.index_select(0, ids[~here])
        return out

    def scatter(self, ids: Tensor, rows: Tensor) -> None:
        """Replace rows, each given once, wherever they are now."""
        if self.changed is not None:
            self.changed.note(ids)
        if self.everything:
            self.store.write(ids, rows)
            return
        self.settle()
        self.store.note(ids)
        slots = self.locate(ids)
        here = slots != FREE
        with uninterrupted():
            self.slots.index_copy_(0, slots[here], rows[here])
            self.store.write(ids[~here], rows[~here])

    def flush(self) -> None:
        """Bring the store up to date."""
        if self.everything:
            return
        self.settle()
        rows = self.pad.row_of_slot.clone()
        for work in reversed(self.uncollected):
            assert work.plan is not None
            rows[work.plan.moves.slots] = work.plan.moves.leaving
        taken = (rows != FREE).nonzero().squeeze(1)
        for part in taken.split(self.chunk_rows):
            self.store.write(rows[part], self.slots.index_select(0, part))

    @property
    def chunk_rows(self) -> int:
        """Rows that pass through the buffer at once."""
        return _MOST_LOOKUPS if self.everything else self.buffer.shape[0] - 1

    # -- lookup and update -------------------------------------------------------------

    def timed(self, work: Work | None) -> AbstractContextManager[None]:
        """The time of what a batch does is that of chunks, if it passes in those."""
        return self._chunks if work is not None and work.plan is None else _UNTIMED

    def lookup(self, work: Work, x: Lookups) -> Tensor:
        """One vector per bag, [bags, dim], by the plan while it holds. `x` has the weights."""
        if not self.slots_hold(work):
            return self.read(x)
        assert work.plan is not None
        return self._pool(self.slots, work.plan.row_slots, work.ids.inverse, x)

    def read(self, x: Lookups) -> Tensor:
        """One vector per bag, [bags, dim], the direct way."""
        return self.read_parts(self.parts_of(x))

    def parts_of(self, x: Lookups) -> list[ReadPart]:
        """Split bags into parts whose vectors fit the buffer. Reads no row."""
        if x.offsets is None:  # the vectors are the result, and pass through nothing
            return [(part, None) for part in _chunks(x, _MOST_LOOKUPS)]
        return [
            (part, self._sort_part(part) if part.ids.numel() > self.chunk_rows else None)
            for part in _chunks(x, self.chunk_rows)
        ]

    def _sorted_parts(self, x: Lookups) -> list[tuple[Lookups, SortedIds]]:
        """As `parts_of`, with the ids of every part sorted."""
        return [(part, self._sort_part(part)) for part in _chunks(x, self.chunk_rows)]

    def _sort_part(self, part: Lookups) -> SortedIds:
        """Sort the ids of a part. Raises if a single bag has more rows than fit."""
        ids = self.kernels.sort_ids(part.ids, self.layout.num_rows)
        if not self.everything:
            count, most = ids.ids.numel(), max(self.chunk_rows, self.pad.num_slots)
            if count > most:
                raise ValueError(_bag_too_large(part, count, most, self.layout))
        return ids

    def read_parts(self, parts: list[ReadPart]) -> Tensor:
        """One vector per bag, [bags, dim], of what `parts_of` gave. Several threads may read."""
        return self._joined([self._read_part(part, ids) for part, ids in parts])

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.zeros(0, self.dim, device=self.device)

    def _read_part(self, x: Lookups, ids: SortedIds | None) -> Tensor:
        """One vector per bag. Without sorted ids a row is copied once for every lookup, which takes
        less time than sorting them."""
        if ids is not None:
            vectors = functional.pad(self._vectors_of(ids.ids), (0, 0, 0, 1))  # padding reads 0
            return self.kernels.pool(vectors, ids.inverse, x.offsets, x.weights, x.divisor)
        vectors = self._vectors_of(x.ids)
        if x.offsets is None:
            return vectors
        every = torch.arange(x.ids.numel(), device=self.device)
        return self.kernels.pool(vectors, every, x.offsets, x.weights, x.divisor)

    def _vectors_of(self, ids: Tensor) -> Tensor:
        """Copy the newest vectors of rows, [n, dim]. Ids may repeat; padding gives zeros."""
        if self.everything:
            return self.kernels.take(self.slots, self._or_null(ids), self.dim)
        self.settle()
        null, is_padding = self.pad.null_slot, ids < 0 if self._skips else None
        slots = self.locate(ids if is_padding is None else ids.clamp(min=0))
        if is_padding is not None:
            slots.masked_fill_(is_padding, null)
        is_away = slots == FREE
        away = is_away.nonzero().squeeze(1)
        vectors = self.kernels.take(self.slots, slots.masked_fill_(is_away, null), self.dim)
        if away.numel():
            rows = self.kernels.take(self.store.rows, ids.index_select(0, away), self.dim)
            vectors.index_copy_(0, away, rows)
        return vectors

    def _or_null(self, ids: Tensor) -> Tensor:
        """Ids, where every row is in its own slot; padding reads the one behind them."""
        return torch.where(ids < 0, self.layout.num_rows, ids) if self._skips else ids

    def _pool(self, rows: Tensor, index: Tensor, inverse: Tensor, x: Lookups) -> Tensor:
        if rows.shape[1] == self.dim:
            return self.kernels.pool(rows, index[inverse], x.offsets, x.weights, x.divisor)
        vectors = self.kernels.take(rows, index, self.dim)
        return self.kernels.pool(vectors, inverse, x.offsets, x.weights, x.divisor)

    def _pass_through(
        self, parts: list[tuple[Lookups, SortedIds]]
    ) -> Iterator[tuple[Lookups, SortedIds, Tensor]]:
        """Of each part: lookups, ids, and their rows followed by zeros, which padding reads. Rows
        last until the next part."""
        if not parts:
            return
        largest = max(ids.ids.numel() for _, ids in parts) + 1
        with self._own_buffer(largest) as buffer:
            for part, ids in parts:
                count = ids.ids.numel()
                rows = buffer[: count + 1]
                self.gather(ids.ids, out=rows[:count])
                rows[count].zero_()
                yield part, ids, rows

    def weight_grads(self, work: Work, x: Lookups, grads: Tensor) -> Tensor:
        """Gradients of the per-sample weights, from the rows before their update, [L]."""
        if self.slots_hold(work):
            assert work.plan is not None
            vectors = self.kernels.take(self.slots, work.plan.row_slots, self.dim)
            return self.kernels.weight_grads(vectors, work.ids.inverse, x.bag_of(), grads)
        pieces, first = [], 0
        for part, ids, rows in self._pass_through(self._sorted_parts(x)):
            mine = grads[first : first + part.num_bags]
            vectors = rows[:, : self.dim]
            pieces.append(self.kernels.weight_grads(vectors, ids.inverse, part.bag_of(), mine))
            first += part.num_bags
        return torch.cat(pieces) if pieces else grads.new_zeros(0)

    def row_grads(self, work: Work, x: Lookups, grads: Tensor) -> Tensor:
        """The gradient of each unique row of a batch, [U, dim]."""
        if x.divisor is not None:
            grads = grads / x.divisor
        return self.kernels.sum_by_row(grads, x.bag_of(), x.weights, work.ids)

    def grads_by_row(self, work: Work, x: Lookups, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of a batch's rows that have a gradient, each once, and the gradients.

        A row that only features without a gradient look up has none.
        """
        if x.used is None:
            return work.ids.ids, self.row_grads(work, x, grads)
        used, ids = x.used_lookups(), work.ids
        if x.weights is not None:
            x = replace(x, weights=x.weights.masked_fill(~used, 0.0))  # 0 times NaN would be NaN
        sums = self.row_grads(work, x, grads)
        before = functional.pad(used[ids.order].cumsum(0), (1, 0))
        has_grad = before[ids.starts].diff() > 0
        return ids.ids[has_grad], sums[has_grad]

    def update_at_once(self, work: Work, x: Lookups, grads: Tensor) -> bool:
        """Update a batch's rows from the gradients of its bags, if that needs no sum in between."""
        return False

    def update(self, ids: Tensor, grads: Tensor, work: Work | None) -> None:
        """One optimizer step on unique rows; `work` if all of them are one batch's."""
        slots = None
        if work is not None and self.slots_hold(work):
            assert work.plan is not None
            slots = work.plan.row_slots[:-1]
            if ids.numel() < slots.numel():  # the others have no gradient
                slots = slots[torch.searchsorted(work.ids.ids, ids)]
        moves = self.moving(ids)
        if moves is not None:
            ids, grads = ids[moves], grads[moves]
            slots = None if slots is None else slots[moves]
        if self.changed is not None:
            self.changed.note(ids)
        if self.everything:
            self.store.will_write(ids)  # slots are the store
        columns = self._scalars(ids)
        for first in range(0, ids.numel(), self.chunk_rows):
            part = slice(first, first + self.chunk_rows)
            mine = {key: each[part] if len(each) > 1 else each for key, each in columns.items()}
            rows = self._buffer(ids[part].numel())
            if slots is None:
                self.gather(ids[part], out=rows)
            else:
                torch.index_select(self.slots, 0, slots[part], out=rows)
            self._step(rows, grads[part], mine)
            if slots is None:
                self.scatter(ids[part], rows)
            else:
                self.slots.index_copy_(0, slots[part], rows)

    def moving(self, ids: Tensor) -> Tensor | None:
        """Return a mask of the rows that a step changes; None: all of them."""
        moves = None if self.frozen is None else ~in_bits(self.frozen, ids)
        trained = self.trained(ids)
        return trained if moves is None else moves if trained is None else moves & trained

    def trained(self, ids: Tensor) -> Tensor | None:
        """Return a mask of the rows that are not untrained padding; None: all of them."""
        if self.untrained is None:
            return None
        return ~torch.isin(ids, self.untrained.to(ids.device))

    def freeze(self, ids: Tensor | None) -> None:
        """From the next step on, leave these rows and their state as they are; None: no row.

        At one place for as long as some row is frozen, so that a captured step follows.
        """
        if ids is None:
            self.frozen = None
            return
        size = self.layout.num_rows + 1  # padding has an id, too
        if self.frozen is None:
            self.frozen = torch.zeros(-(-size // 32), dtype=torch.int32, device=self._frozen_on)
        bits_of(ids.to(self._frozen_on), size, out=self.frozen)

    def freeze_like(self, other: RowGroup) -> None:
        """The rows that another engine over the same store leaves as they are."""
        if other.frozen is None or self.frozen is None:
            bits = other.frozen
            self.frozen = None if bits is None else bits.to(self._frozen_on, copy=True)
        else:
            self.frozen.copy_(other.frozen)

    @property
    def _frozen_on(self) -> torch.device:
        """Where rows are updated."""
        return self.device

    def _buffer(self, count: int) -> Tensor:
        # A single bag may be larger than the buffer, though not than the slots.
        if self.everything or count > len(self.buffer):
            return torch.empty(count, self.width, device=self.device)
        return self.buffer[:count]

    @contextmanager
    def _own_buffer(self, count: int) -> Iterator[Tensor]:
        """A buffer that no other thread has: the first one has the budget's, others a new one."""
        is_first = self._buffer_is_free.acquire(blocking=False)
        try:
            if is_first:
                yield self._buffer(count)
            else:
                yield torch.empty(count, self.width, device=self.device)
        finally:
            if is_first:
                self._buffer_is_free.release()

    def _scalars(self, ids: Tensor) -> dict[str, Tensor]:
        scalars = self.optimizer.scalars([table.name for table in self.layout.tables])
        alike = all(bool((values == values[0]).all()) for values in scalars.values())
        return per_row(scalars, None if alike else self.layout.table_of(ids))

    def _step(self, rows: Tensor, grads: Tensor, columns: dict[str, Tensor]) -> None:
        state = [rows[:, place] for place in self.state.values()]
        self.optimizer.rule.update(rows[:, : self.dim], grads, state, columns)

    # -- counting ----------------------------------------------------------------------

    def note_wait(self, share: float) -> None:
        """For which part of a step training has waited for rows."""

    def count_direct(self, work: Work) -> None:
        """A batch goes the direct way: rows outside the slots are read and written there."""
        self.direct_batches += 1
        outside = work.ids.ids[self.locate(work.ids.ids) == FREE]
        self._count(work.ids, fetched=outside, evicted=outside)

    def _count(
        self, ids: SortedIds, *, fetched: Tensor | None = None, evicted: Tensor | None = None
    ) -> None:
        self._note([ids.order.numel(), ids.ids.numel(), _rows_in(fetched), _rows_in(evicted)])
        bases = ids.ids.new_tensor([*self.layout.bases, self.layout.num_rows])
        edges = torch.searchsorted(ids.ids, bases)
        self.traffic[:, 0] += ids.starts[edges].diff()
        self.traffic[:, 1] += edges.diff()
        for column, moved in ((2, fetched), (3, evicted)):
            if moved is not None:
                tables = self.layout.table_of(moved[moved >= 0])
                self.traffic[:, column] += torch.bincount(tables, minlength=len(self.traffic))

    def _count_loaded(self, ids: Tensor) -> None:
        self.loaded_rows += ids.numel()
        bases = ids.new_tensor([*self.layout.bases, self.layout.num_rows])
        # By sorting them, which nobody has to wait for.
        self.loaded += torch.searchsorted(ids.sort()[0], bases).diff().to(self.loaded.device)

    def bytes_of(self, fetched: int, evicted: int, loaded: int) -> tuple[int, int]:
        """Bytes that came, and that left, with so many rows."""
        size = 4 * self.moved_floats
        return fetched * size + loaded * 4 * self.width, evicted * size

    def _note(self, moved: list[int]) -> None:
        self.moved = [before + more for before, more in zip(self.moved, moved, strict=True)]

    def made_rows(self) -> int:
        """Rows that entered slots without being read."""
        return 0

    def memory(self) -> dict[str, int]:
        """Bytes of fast memory by part."""
        if self.everything:
            return {"rows": self.slots.numel() * 4}
        return {
            "slots": self.slots.numel() * 4,
            "slot state": self.pad.num_slots * SLOT_STATE_BYTES,
            "row-to-slot map": self.pad.map.num_bytes,
            "buffer": self.buffer.numel() * 4,
        }

    def check(self) -> None:
        if not self.everything:
            self.planner.check()


_UNTIMED: AbstractContextManager[None] = nullcontext()
_NONE = torch.empty(0, dtype=torch.int64)
_NO_MOVES = Moves(_NONE, _NONE, _NONE)


def _rows_in(ids: Tensor | None) -> int:
    return 0 if ids is None else int((ids >= 0).sum())


def _chunks(x: Lookups, limit: int) -> Iterator[Lookups]:
    """Whole bags, at most `limit` lookups at a time, or a single bag with more."""
    if x.num_bags and x.ids.numel() <= limit:
        yield x
        return
    if x.offsets is None:
        for part in x.ids.split(limit) if x.num_bags else ():
            yield replace(x, ids=part, bags_per_feature=(part.numel(),))
        return
    low = 0
    while low < x.num_bags:
        end = int(torch.searchsorted(x.offsets, x.offsets[low] + limit, right=True)) - 1
        end = max(low + 1, end)
        lookups = slice(int(x.offsets[low]), int(x.offsets[end]))
        yield Lookups(
            ids=x.ids[lookups],
            offsets=x.offsets[low : end + 1] - x.offsets[low],
            weights=None if x.weights is None else x.weights[lookups],
            divisor=None if x.divisor is None else x.divisor[low:end],
            bags_per_feature=(end - low,),
            by_sample=x.by_sample,
        )
        low = end


def _bag_too_large(bag: Lookups, size: int, limit: int, layout: WidthGroup) -> str:
    table = layout.tables[int(layout.table_of(bag.ids.max()))]
    return (
        f"one sample looks up {size:,} different rows of table {table.name!r}, but the budget has "
        f"room for {limit:,} rows of this width at once; a budget {size / limit:.1f} times as "
        "large is the smallest that works"
    )
