"""Rows of one width, the hottest of them in fast memory and the others where the CPU updates them.

A batch is two at once. Its lookups of hot rows are of a small table that lies on the device whole,
in which a row's number is its slot; for `hybrid`, which has all the others, they are padding. The
vectors of both are added. Nothing moves from batch to batch: which rows are hot is known from a
profile, or learned in the first batches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.hybrid import HostPlan, HostRows, HostWork, in_any_order, refuse_capture
from hotrow.engine.profile import hottest, small_tables
from hotrow.engine.rows import RowGroup
from hotrow.engine.stages import Work
from hotrow.engine.uploads import TableScalars
from hotrow.inputs.batch import PADDING, Batch, Lookups
from hotrow.inputs.tables import WidthGroup
from hotrow.kernels.reference import SortedIds, bits_of, in_bits, sort_ids
from hotrow.kernels.triton.segments import Segments, segments_of
from hotrow.store.budget import Share
from hotrow.support.interrupts import uninterrupted
from hotrow.support.streams import capturing

_LEARN_AFTER = (16, 64, 256)  # batches
_CHUNK_ROWS = 1 << 18  # between store and slots at once


class HotPlan(HostPlan):
    """As HostPlan, whose rows are the cold ones; lookups of hot rows are sorted apart."""

    def __init__(
        self, keys: Tensor, slots: Tensor, hot: Segments, version: int, *cold: Any
    ) -> None:
        super().__init__(keys, *cold)
        self.slots = slots  # [L] int32: of each lookup; the null slot where its row is not hot
        self.hot = hot  # these sorted: its ids are slots
        self.version = version  # of the rows that were hot then

    def tensors(self) -> list[Tensor]:
        s = self.hot
        return [*super().tensors(), self.slots, s.order, s.rank, s.starts, s.ids, s.count]


class HotWork(HostWork):
    """One batch's lookups in one width group."""

    group: StaticHybridRows

    @cached_property
    def ids(self) -> SortedIds:  # type: ignore[override]
        """Of hot and cold rows alike, as they were when they were planned."""
        num_rows = self.group.layout.num_rows
        keys = self.looked_up().long()
        return sort_ids(torch.where(keys == num_rows, PADDING, keys), num_rows)


class StaticHybridRows(HostRows):
    """Rows of one width."""

    notes_changes = False  # of hot rows it cannot say it

    def __init__(self, layout: WidthGroup, **options: Any) -> None:
        """As RowGroup's; the share's slots are for hot rows."""
        super().__init__(layout, **options)
        self._unsummed = layout.num_rows  # hot rows count as padding
        self._version = self._batches = 0
        self._by_kernels = self.device.type == "cuda"
        self._table_scalars = TableScalars(
            partial(self.optimizer.table_scalars, self._names), self.lanes
        )
        # The cold rows of each batch so far, on the host, while it is learned which are hot.
        self._seen: list[Tensor] | None = [] if self.profile is None else None
        self._learned = 0  # how often
        self._take_in(self._hot_ids)
        self._count_loaded(self._hot_ids)

    def _make_rows(self, share: Share | None) -> None:
        assert share is not None
        super()._make_rows(None)
        room = share.slots
        if self.profile is None:
            hot = small_tables(self.layout, room // 2)
        else:
            hot = hottest(self.profile, self.layout, room)
            room = len(hot)  # rows never used need no slot
        self._hot_ids = hot.sort()[0]
        # The last stays zero: it is read for rows that are not hot.
        self.slots = torch.zeros(room + 1, self.width, device=self.device)

    # -- which rows are hot ------------------------------------------------------------

    def _take_in(self, ids: Tensor) -> None:
        """Let these rows be hot, given in order; the store has the newest bytes of all rows."""
        with uninterrupted():
            self.lanes.join()  # ids may be looked for just now
            self._hot_ids = ids
            self._ids_there = ids.to(self._key_type).to(self.device)
            # Slots are in the order of ids, so that those of a table lie side by side.
            slot_bases = torch.searchsorted(ids, self._bases)
            self._slot_bases = slot_bases.to(self.device)
            self._slot_edges = slot_bases.int().to(self.device)
            for first in range(0, len(ids), _CHUNK_ROWS):
                part = ids[first : first + _CHUNK_ROWS]
                self.slots[first : first + len(part)].copy_(self.store.rows.index_select(0, part))
            self._freeze_slots()
            self._version += 1
            self._held, self._updates = None, self._updates + 1
            self.lanes.join()

    def replaced(self) -> None:
        self._take_in(self._hot_ids)

    def pin_rows(self, ids: Tensor) -> None:
        """From now on let these rows be hot, the first ones if slots are fewer; learn no more."""
        self.flush()
        self._seen = None
        self._take_in(ids[: len(self.slots) - 1].cpu().sort()[0])
        self._count_loaded(self._hot_ids)

    def _learn(self) -> None:
        """Rows that at least two batches have used join the hot ones, the most used first."""
        assert self._seen is not None
        ids, uses = torch.cat(self._seen).unique(return_counts=True)
        is_hot, _ = self._slots_among(ids)  # since the last time
        ids, uses = ids[~is_hot], uses[~is_hot]
        room = len(self.slots) - 1 - len(self._hot_ids)
        order = torch.sort(uses, descending=True, stable=True)[1][:room]
        more = ids[order][uses[order] > 1]
        if len(more):
            self.flush()
            self._take_in(torch.cat([self._hot_ids, more]).sort()[0])
            self._count_loaded(self._hot_ids)
        self._learned += 1
        if self._learned == len(_LEARN_AFTER) or len(more) == room:
            self._seen = None

    def _find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The slot of each lookup, and the keys of those that have none; the others' are padding.

        Found by halving: a map would take as many bytes again.
        """
        ids, null = self._ids_there, len(self.slots) - 1
        if not len(ids):
            return torch.full_like(keys, null, dtype=torch.int32), keys
        place = torch.searchsorted(ids, keys).clamp_(max=len(ids) - 1)
        is_hot = ids.index_select(0, place) == keys
        cold = torch.where(is_hot, self.layout.num_rows, keys)
        return torch.where(is_hot, place, null).int(), cold

    # -- sorting -----------------------------------------------------------------------

    def work(self, batch: Batch) -> HotWork:
        return HotWork(self, batch)

    def _sort(self, keys: Tensor, bad: Tensor) -> HotPlan:
        version = self._version  # first: another thread may let other rows be hot meanwhile
        slots, cold = self._find(keys)
        hot = segments_of(slots)
        # Of each table, where its lookups begin among the sorted ones, and its different rows.
        edges = torch.searchsorted(hot.ids.index_select(0, hot.rank), self._slot_edges)
        rows = torch.cat([hot.rank, hot.count]).index_select(0, edges)
        facts = self._sorted(cold, bad, edges, rows)
        return HotPlan(keys, slots, hot, version, *facts)

    def _planned(self, work: HostWork) -> HotPlan:
        plan = work.plan = self._current(super()._planned(work))
        return plan

    def _current(self, plan: HostPlan) -> HotPlan:
        assert isinstance(plan, HotPlan)
        if plan.version != self._version:  # other rows are hot since
            self.lanes.hand_over(plan.tensors())
            plan = self._sort(plan.keys, torch.zeros((), device=self.device))
            plan.ready = self.lanes.mark("train")
            plan.learn()
        return plan

    # -- lookup ------------------------------------------------------------------------

    def lookup(self, work: HostWork, x: Lookups) -> Tensor:  # type: ignore[override]
        is_due = self._seen is not None and self._batches >= _LEARN_AFTER[self._learned]
        if is_due and not capturing():
            self._learn()
        return super().lookup(work, x)

    @property
    def _reads_store(self) -> bool:
        return False  # the newest bytes of hot rows are in slots

    def _vectors(self, plan: HostPlan, x: Lookups) -> Tensor:
        assert isinstance(plan, HotPlan)
        if not len(self._hot_ids):
            return super()._vectors(plan, x)
        self.lanes.hand_over(plan.tensors())
        if self._by_kernels:
            pooled: Tensor = self._triton[0].pool(
                self.slots, plan.slots, x.offsets, x.weights, x.divisor, self.dim, self.output_dtype
            )
        else:
            every = torch.arange(plan.num_lookups, device=self.device)
            pooled = self._pool(self.slots, plan.slots.long(), every, x).to(self.output_dtype)
        return pooled.add_(super()._vectors(plan, x)) if plan.num_rows else pooled

    def weight_grads(self, work: HostWork, x: Lookups, grads: Tensor) -> Tensor:  # type: ignore[override]
        plan = self._planned(work)
        if self._by_kernels:
            found: Tensor = self._triton[0].weight_grads(
                self.slots, plan.slots, work.bag_of, grads, self.dim
            )
        else:
            every = torch.arange(plan.num_lookups, device=self.device)
            vectors = self.kernels.take(self.slots, plan.slots.long(), self.dim)
            bag_of = replace(x, ids=plan.keys).bag_of()
            found = self.kernels.weight_grads(vectors, every, bag_of, grads.float())
        return found.add_(super().weight_grads(work, x, grads)) if plan.num_rows else found

    # -- update ------------------------------------------------------------------------

    def _update_planned(self, plan: HostPlan, work: HostWork, x: Lookups, grads: Tensor) -> None:
        assert isinstance(plan, HotPlan)
        if plan.num_rows:  # first: their gradients have the longer way
            super()._update_planned(plan, work, x, grads)
        if len(self._hot_ids):
            self._update_hot(plan, work, x, grads)

    def _update_hot(self, plan: HotPlan, work: HostWork, x: Lookups, grads: Tensor) -> None:
        null = len(self.slots) - 1
        if self._by_kernels:
            scalars, bases = self._scalars_there()
            self._triton[1].update_slots(
                self.slots, plan.hot.ids, plan.hot, grads, work.bag_of, x.weights, x.divisor,
                self.optimizer.rule, scalars, bases, null, self.dim, self._frozen_slots,
            )  # fmt: skip
            return
        hot = sort_ids(torch.where(plan.slots == null, PADDING, plan.slots).long(), null)
        grads = grads.float() if x.divisor is None else grads.float() / x.divisor
        bag_of = replace(x, ids=plan.keys).bag_of()
        self._step_on_slots(hot.ids, self.kernels.sum_by_row(grads, bag_of, x.weights, hot))

    def _step_on_slots(self, slots: Tensor, grads: Tensor) -> None:
        """One optimizer step from gradients already summed; each slot is given once."""
        if self._by_kernels:
            scalars, bases = self._scalars_there()
            self._triton[1].update_rows(
                self.slots, slots, slots, None, grads, self.optimizer.rule, scalars, bases,
                self.dim, frozen=self._frozen_slots,
            )  # fmt: skip
            return
        if self._frozen_slots is not None:
            moves = ~in_bits(self._frozen_slots, slots)
            slots, grads = slots[moves], grads[moves]
        rows = self.slots.index_select(0, slots)
        self._step(rows, grads, self._scalars(self._hot_ids[slots]))
        self.slots.index_copy_(0, slots, rows)

    def _scalars_there(self) -> tuple[Tensor, Tensor | None]:
        found = self._table_scalars
        found.push()
        return found.there, None if found.alike else self._slot_bases[:-1]

    def row_grads(self, work: HostWork, x: Lookups, grads: Tensor) -> Tensor:  # type: ignore[override]
        """The gradient of each unique row, hot or cold, [U, dim]; waits for the device."""
        refuse_capture()
        return RowGroup.row_grads(self, work, replace(x, ids=work.ids.inverse), grads.float())

    def update(self, ids: Tensor, grads: Tensor, work: Work | None) -> None:
        refuse_capture()
        slots, _ = self._find(ids.to(self._key_type))
        is_hot = slots != len(self.slots) - 1
        with torch.no_grad():
            self._step_on_slots(slots[is_hot].long(), grads[is_hot])
        self._send_home(None, ids[~is_hot].cpu(), grads[~is_hot])

    # -- rows in and out ---------------------------------------------------------------

    def gather(self, ids: Tensor, out: Tensor) -> Tensor:
        super().gather(ids, out)
        places, slots = self._slots_among(ids)
        out[places] = self.slots.index_select(0, slots).to(out.device)
        return out

    def scatter(self, ids: Tensor, rows: Tensor) -> None:
        super().scatter(ids, rows)  # of hot ones the store has an older state at most
        places, slots = self._slots_among(ids)
        self.slots.index_copy_(0, slots, rows[places].to(self.device))

    def _slots_among(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some ids, on the host, are hot, and their slots on the device."""
        if not len(self._hot_ids):
            return torch.zeros(len(ids), dtype=torch.bool), ids.new_empty(0).to(self.device)
        at = torch.searchsorted(self._hot_ids, ids)
        is_hot = at < len(self._hot_ids)
        is_hot &= self._hot_ids.index_select(0, at.clamp(max=len(self._hot_ids) - 1)) == ids
        return is_hot, at[is_hot].to(self.device)

    def flush(self) -> None:
        super().flush()
        with uninterrupted(), in_any_order():
            for first in range(0, len(self._hot_ids), _CHUNK_ROWS):
                ids = self._hot_ids[first : first + _CHUNK_ROWS]
                self.store.write(ids, self.slots[first : first + len(ids)].cpu())

    def freeze(self, ids: Tensor | None) -> None:
        super().freeze(ids)
        self._freeze_slots()

    def _freeze_slots(self) -> None:
        self._frozen_slots: Tensor | None = None
        moves = self.moving(self._hot_ids)
        if moves is not None:
            slots = (~moves).nonzero().squeeze(1)
            self._frozen_slots = bits_of(slots.to(self.device), len(self.slots))

    # ----------------------------------------------------------------------------------

    def _count_plan(self, plan: HostPlan) -> None:
        """Hot rows are looked up where they are."""
        lookups, cold = self._counts(plan)
        size = len(self._bases)
        hot_lookups, hot_rows = plan.facts[-2 * size :].view(2, size).diff()
        self._note_traffic(plan, lookups + hot_lookups, cold + hot_rows, cold)
        self._batches += 1
        if self._seen is not None:
            self._seen.append(plan.ids.clone())

    def memory(self) -> dict[str, int]:
        parts = {"slots": self.slots, "ids of slots": self._ids_there}
        if self._frozen_slots is not None:
            parts["which slots are frozen"] = self._frozen_slots
        sizes = {name: each.numel() * each.element_size() for name, each in parts.items()}
        return sizes | super().memory()

    def check(self) -> None:
        super().check()
        assert bool((self._hot_ids.diff() > 0).all()), "ids of slots in disorder"
        assert torch.equal(self._ids_there.cpu().long(), self._hot_ids), "the device knows others"
        assert not self.slots[-1].any(), "the padding slot was written to"
