"""Rows of one width that never leave host memory: the CPU reads and updates them.

For each batch either its rows' vectors cross the link, once each, or its bags', pooled by the CPU:
whichever are fewer bytes, and the same way back. No slots, no look-ahead; only ids are sorted a
batch ahead, on the device. What one update does to a row is optim.py's business.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.gpu.id_check import IdCheck
from hotrow.engine.rows import RowGroup
from hotrow.engine.stages import Work
from hotrow.engine.strategy import Strategy
from hotrow.inputs.batch import Batch, Lookups, divisor_of, lookups_of, outline_of, spans_of
from hotrow.inputs.tables import WidthGroup
from hotrow.kernels import reference
from hotrow.kernels.reference import SortedIds, sort_ids
from hotrow.kernels.rules import SGD, Scalars, per_row
from hotrow.kernels.triton.segments import Segments, segments_of
from hotrow.store.budget import Share
from hotrow.store.pinned import locked_rows
from hotrow.store.ram import Store, host_rows
from hotrow.support.interrupts import uninterrupted
from hotrow.support.streams import Mark, capturing

_INT32_MAX = 2**31 - 1
_FACTS = 3  # unique ids, padded lookups, whether an id is bad; then each table's first lookup


class HostPlan:
    """A batch's lookups sorted by id. How many rows they are is known when `ready` has passed."""

    def __init__(self, keys: Tensor, segments: Segments, facts: Tensor, host_ids: Tensor) -> None:
        self.keys, self.segments = keys, segments  # on the device; padding is the largest key
        self.facts, self.host_ids = facts, host_ids  # on the host, when `ready` has passed
        self.inverse = torch.empty_like(segments.rank)  # [L] int32: of each lookup, its row here
        self.inverse[segments.order.long()] = segments.rank
        self.ready: Mark | None = None
        self.num_rows = -1  # different ones, without padding; -1: not known yet
        self.rows_cross = False  # or else the bags' vectors do
        self.there: Tensor | None = None  # [num_rows + 1, dim] on the device; the last is zero
        self.there_since = -1  # which updates `there` has seen
        self.host_side: _HostSide | None = None
        self.is_trained = True  # False: its rows are read and not updated

    @property
    def num_lookups(self) -> int:
        return self.keys.numel()

    def learn(self) -> bool:
        """Wait for the facts; False if an id is bad."""
        if self.ready is not None:
            self.ready.wait()
        unique, padded, bad = self.facts[:_FACTS].tolist()
        self.num_rows = unique - (padded > 0)
        return not bad

    @property
    def ids(self) -> Tensor:
        """The ids of its rows, [num_rows] int64, on the host."""
        return self.host_ids[: self.num_rows]

    def sorted_by(self, order: Tensor, starts: Tensor, inverse: Tensor, ids: Tensor) -> SortedIds:
        """The sorted lookups as the reference kernels read them, on either side."""
        real = self.num_lookups - int(self.facts[1])
        starts = starts[: self.num_rows + 1].long()
        return SortedIds(ids, order[:real].long(), starts, inverse.long())

    def tensors(self) -> list[Tensor]:
        """All that lies on the device."""
        s = self.segments
        return [self.keys, self.inverse, s.order, s.rank, s.starts, s.ids, s.count]


class Cut:
    """Where a captured step is cut: vectors come from the host's rows, gradients go there."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors  # [bags, dim], read by the graph
        self.grads: Tensor | None = None  # likewise, written by it; None: it has no update
        self.used: tuple[bool, ...] | None = None  # the features that have gradients; None: all

    @property
    def num_bytes(self) -> int:
        both = [self.vectors] if self.grads is None else [self.vectors, self.grads]
        return sum(each.numel() * each.element_size() for each in both)


@dataclass(frozen=True)
class _HostSide:
    """What the host needs to pool bags, and to sum their gradients, by itself."""

    ids: SortedIds
    offsets: Tensor | None
    divisor: Tensor | None
    bag_of: Tensor


class HostWork(Work):
    """One batch's lookups in one width group; how many are unique, only the device knows."""

    group: HostRows
    berth: int  # where a captured step reads it
    number = 0  # in its pass
    plan: HostPlan | None  # type: ignore[assignment]

    def __init__(self, group: HostRows, batch: Batch) -> None:
        self.group, self.plan = group, None
        self.incoming = self.outgoing = None
        self.collected = self.inserted = False
        self.arrive(batch)

    def arrive(self, batch: Batch) -> None:
        self.batch = batch
        for name in ("lookups", "bag_of", "ids"):
            self.__dict__.pop(name, None)

    @cached_property
    def lookups(self) -> Lookups:  # type: ignore[override]
        """Without ids: checking those would wait for the device."""
        x = outline_of(self.batch, self.group.layout)
        return replace(x, divisor=divisor_of(self.batch, x, self.group.layout))

    @cached_property
    def bag_of(self) -> Tensor | None:
        """The bag of each lookup; None where each is its own."""
        return None if self.lookups.offsets is None else self.lookups.bag_of().int()

    @cached_property
    def ids(self) -> SortedIds:  # type: ignore[override]
        """For gradients that several batches share; waits for the device."""
        plan = self.plan
        if plan is None or plan.num_rows < 0:
            found = lookups_of(self.batch, self.group.layout)
            return sort_ids(found.ids, self.group.layout.num_rows)
        s = plan.segments
        unique = s.ids[: plan.num_rows].long()
        return plan.sorted_by(s.order, s.starts, plan.inverse, unique)

    def looked_up(self) -> Tensor:
        """As they were when they were planned."""
        return self.group.keys_of(self.batch)[0] if self.plan is None else self.plan.keys


class HostRows(RowGroup):
    """Rows of one width."""

    plans_later = can_be_cut = True

    def __init__(self, layout: WidthGroup, *, store: Store | None = None, **options: Any) -> None:
        """As RowGroup's; there is no share of a budget. `store`: of rows that exist already."""
        self._given = store
        super().__init__(layout, **options)
        self.everything = True  # that is looked up is found without a planner
        self.traffic, self.loaded = self.traffic.cpu(), self.loaded.cpu()
        self.moved_floats = self.dim  # optimizer state stays where it is
        limits, paddings = zip(
            *((table.num_embeddings, table.skipped_idx) for table in layout.tables), strict=True
        )
        facts = [
            [layout.bases[f.table], limits[f.table], paddings[f.table], f.column]
            for f in layout.features
        ]
        self._pads = any(each is not None for each in paddings)
        # Padding has no gradient, and might be the longest of all sums.
        self._unsummed = layout.num_rows if self._pads else None
        # Base, limit, padding and column of each feature, [4, F]. Laid out here: on the device a
        # kernel would do it, for which no lane waits.
        listed = [[-1 if each is None else each for each in one] for one in facts]
        self._features = torch.tensor(listed).t().contiguous().to(self.device)
        self._bases = torch.tensor([*layout.bases, layout.num_rows])
        self._key_type = torch.int32 if layout.num_rows < _INT32_MAX else torch.int64
        self._bases_there = self._bases.to(self._key_type).to(self.device)
        self._names = tuple(table.name for table in layout.tables)
        self._settings_of: Any = None
        self._settings: tuple[Scalars, bool] = ({}, True)

        rows, dim, width = self.store.rows, self.dim, self.width
        self._columns = [_Columns(rows[:, :dim])]
        if width > dim:
            self._columns.append(_Columns(rows[:, dim:]))
        # Without one nothing is copied, and nothing has to be waited for.
        self.has_link = self.compares_later = self.device.type == "cuda"
        self._id_check = IdCheck(self._features.t().contiguous(), layout.num_rows)
        self._rows, self._grads, self._bags = (_Room(dim, locked=self.has_link) for _ in range(3))
        self._state = _Room(width - dim, locked=False)
        self._held: HostPlan | None = None  # whose rows the room for rows holds, as the store does
        self._rows_sent = self._bags_sent = self.lanes.mark("train")
        self._updates = 0
        # An update whose gradients are on their way; a function that does not keep these rows.
        self._owed: Callable[[HostRows], None] | None = None
        self._largest: dict[str, int] = {}
        # Of the newest graph, by the berth of its batch; graphs hold them, and they go with them.
        self._cuts: weakref.WeakValueDictionary[int, Cut] = weakref.WeakValueDictionary()

    def _make_rows(self, share: Share | None) -> None:
        assert share is None
        self.slots = torch.zeros(1, self.width)  # none
        self._is_locked = False
        if self._given is not None:
            self.store = self._given
            return
        if self.device.type == "cpu":
            self.store = Store(host_rows(self.layout.num_rows, self.width))
            return
        # Training has no use for locked rows, but a GPU fills them in seconds.
        found = locked_rows(self.layout.num_rows, self.width)
        self.store, self._is_locked = Store(found.rows), found.locked

    def _initialise(self, state: list[float], seed: int) -> None:
        if self._given is not None:
            return
        if not self._is_locked:
            super()._initialise(state, seed)
            return
        from hotrow.engine.gpu.start import initialise_on_gpu  # brings Triton along

        initialise_on_gpu(self.store.rows, self.layout, state, seed, self.device)

    @classmethod
    def over(cls, rows: RowGroup, strategy: Strategy) -> HostRows:
        """A second engine for the rows of another one."""
        made = cls(
            rows.layout, store=rows.store, optimizer=rows.optimizer, strategy=strategy, share=None,
            device=rows.device, seed=0, profile=None, output_dtype=rows.output_dtype,
            lock=rows.lock,
        )  # fmt: skip
        made.changed = rows.changed
        return made

    # -- sorting -----------------------------------------------------------------------

    def work(self, batch: Batch) -> HostWork:
        return HostWork(self, batch)

    def expect(self, work: Work, values: Tensor) -> None:
        """Nothing is decided ahead."""

    def plan(self, work: HostWork) -> bool:  # type: ignore[override]
        """Sort a batch's ids; what came out is known at `confirm`."""
        work.plan = self._sort(*self.keys_of(work.batch))
        return True

    def keys_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The ids looked up, [L], padding the largest, and whether one is bad; nobody waits."""
        values = batch.values
        features = self._features.to(values.device)
        if batch.offsets is None:
            if len(self.layout.features) < len(batch.keys):
                values = values.index_select(1, features[3])
        else:
            spans = spans_of(batch, self.layout)
            values = torch.cat([values[low:high] for low, high in spans])
            lengths = torch.tensor([high - low for low, high in spans])
            lengths = lengths.to(values.device, non_blocking=True)
            features = torch.repeat_interleave(features, lengths, 1, output_size=len(values))
        base, limit, padding, _ = features
        bad = ((values < 0) | (values >= limit)).any()
        keys = values + base
        if self._pads:
            keys = torch.where(values == padding, self.layout.num_rows, keys)
        return keys.flatten().to(self._key_type), bad

    def _sort(self, keys: Tensor, bad: Tensor) -> HostPlan:
        return HostPlan(keys, *self._sorted(keys, bad))

    def _sorted(self, keys: Tensor, bad: Tensor, *more: Tensor) -> tuple[Segments, Tensor, Tensor]:
        """Segments, and on their way to the host facts, with `more` behind them, and unique ids."""
        segments = segments_of(keys)
        ordered = segments.ids.index_select(0, segments.rank)
        edges = torch.searchsorted(ordered, self._bases_there)
        padded = keys.numel() - edges[-1:]
        counts = [segments.count, padded, bad.view(1), edges, *more]
        facts = torch.cat([each.long() for each in counts])
        (host_facts, host_ids), _ = self._start_to_host(facts, segments.ids.long())
        assert host_facts is not None
        assert host_ids is not None
        return segments, host_facts, host_ids

    def mark_planned(self, work: HostWork, mark: Mark) -> None:  # type: ignore[override]
        if work.plan is not None and work.plan.ready is None:
            work.plan.ready = mark

    def confirm(self, work: HostWork) -> bool:  # type: ignore[override]
        """Learn how many rows a batch has. Raises on a bad id."""
        plan = work.plan
        if plan is None or plan.num_rows >= 0:
            return True
        if not plan.learn():
            work.plan = None
            lookups_of(work.batch, self.layout)  # says which
            raise AssertionError("a plan found an id that no table has, and nobody else does")
        self._count_plan(plan)
        return True

    def fill(self, work: Work) -> None:
        """Rows are read when they are looked up, so that they are the newest."""
        work.collected = work.inserted = True

    def slots_hold(self, work: Work) -> bool:
        return False

    def forget_window(self) -> None: ...

    def timed(self, work: Work | None) -> AbstractContextManager[None]:
        """Rows are never too many for slots that are not there."""
        return nullcontext()

    # -- lookup ------------------------------------------------------------------------

    def compare(self, work: HostWork) -> None:  # type: ignore[override]
        batch, plan = work.batch, work.plan
        if not self.compares_later or plan is None or not batch.given or capturing():
            return
        places = None
        if batch.offsets is not None:
            names = [batch.keys.index(feature.name) for feature in self.layout.features]
            places = torch.tensor(names).to(self.device, non_blocking=True)
        self._id_check.launch(batch.given, places, batch.num_samples, plan.keys, None, work.number)

    def note_number(self, work: HostWork, number: int) -> None:  # type: ignore[override]
        work.number = number

    def take_changed(self) -> int | None:
        return self._id_check.take()

    def lookup(self, work: HostWork, x: Lookups) -> Tensor:  # type: ignore[override]
        if capturing():
            return self._cuts[work.berth].vectors.clone()  # a model may change what it gets
        return self._vectors(self._planned(work), x)

    # -- captured steps, cut at the lookup ---------------------------------------------

    def cut(self, work: HostWork) -> Cut:
        """Where a step of this batch will be cut, made anew: it is about to be captured."""
        shape = (work.lookups.num_bags, self.dim)
        made = Cut(torch.zeros(shape, dtype=self.output_dtype, device=self.device))
        self._cuts[work.berth] = made
        return made

    def bring(self, work: HostWork, cut: Cut) -> None:
        """Vectors to where the graph reads them."""
        self.compare(work)
        cut.vectors.copy_(self.lookup(work, work.lookups))

    def take_home(self, work: HostWork, cut: Cut) -> None:
        """Gradients from where the graph has put them, if it has."""
        if cut.grads is not None:
            x = replace(work.lookups, used=cut.used)
            if not self.update_at_once(work, x, cut.grads):
                self.update(*self.grads_by_row(work, x, cut.grads), work)

    @property
    def _reads_store(self) -> bool:
        """Whether vectors are read from the store without a plan: where nothing crosses a link."""
        return not self.has_link

    def _vectors_of(self, ids: Tensor) -> Tensor:
        self.settle()
        vectors = torch.empty(ids.numel(), self.dim, dtype=torch.float32, device="cpu")
        self._columns[0].read(ids.clamp(min=0) if self._skips else ids, out=vectors)
        if self._skips:
            vectors.masked_fill_((ids < 0).unsqueeze(1), 0.0)
        return vectors

    def parts_of(self, x: Lookups) -> list[tuple[Lookups, Any]]:
        if self._reads_store:
            return [*super().parts_of(x)]
        keys = torch.where(x.ids < 0, self.layout.num_rows, x.ids).to(self._key_type)
        plan = self._sort(keys, torch.zeros((), device=keys.device))
        plan.ready = self.lanes.mark("train")
        plan.learn()
        return [(x, plan)]

    def read_parts(self, parts: list[tuple[Lookups, Any]]) -> Tensor:
        if self._reads_store:
            return super().read_parts(parts).to(self.output_dtype)
        ((x, plan),) = parts
        plan = self._current(plan)
        plan.is_trained = False
        return self._vectors(plan, x)

    def _current(self, plan: HostPlan) -> HostPlan:
        """A plan that suits the rows as they are kept now."""
        return plan

    def _planned(self, work: HostWork) -> HostPlan:
        """A batch's plan, made now if there is none."""
        if work.plan is None:
            self.plan(work)
            self.mark_planned(work, self.lanes.mark("train"))
        self.confirm(work)
        assert work.plan is not None
        return work.plan

    def _vectors(self, plan: HostPlan, x: Lookups) -> Tensor:
        """One vector per bag, [bags, dim], of the rows as they are now."""
        self.lanes.hand_over(plan.tensors())
        plan.rows_cross = self.rows_cross(plan, x.num_bags)
        if not plan.rows_cross:
            return self._pool_here(plan, x)
        there = self._collect(plan, cross=True)
        pooled: Tensor = self._triton[0].pool(
            there, plan.inverse, x.offsets, x.weights, x.divisor, self.dim, self.output_dtype
        )
        return pooled

    def rows_cross(self, plan: HostPlan, num_bags: int) -> bool:
        """Whether a batch's rows are fewer bytes than its bags, and what pooling here needs."""
        if not self.has_link:
            return False
        order = 8 * plan.num_lookups
        rows = 2 * 4 * self.dim * plan.num_rows
        return rows <= 2 * self.output_dtype.itemsize * self.dim * num_bags + order

    @cached_property
    def _triton(self) -> tuple[Any, Any]:
        """Kernels of the device. Not at import: a CPU has no need of Triton."""
        from hotrow.kernels.triton import lookup, update

        return lookup, update

    def _collect(self, plan: HostPlan, *, cross: bool) -> Tensor:
        """The rows of a batch, and zeros: here, or on the device where they `cross`."""
        self.settle()
        count = plan.num_rows
        if plan.is_trained:
            self._rows_sent.wait()
            self._held = None  # until all of these have been read
            rows = self._rows.take(count + 1)
        else:  # other threads may read, too
            rows = torch.empty(count + 1, self.dim, pin_memory=self.device.type == "cuda")
        rows[count].zero_()  # what padding reads
        there = torch.empty(rows.shape, device=self.device) if cross else rows
        # In one go: the cores lose more by starting again and again than the link would gain.
        self._columns[0].read(plan.ids, out=rows[:count])
        if cross:
            there.copy_(rows, non_blocking=True)
        if plan.is_trained:
            if cross:
                self._rows_sent = self.lanes.mark("train")
                plan.there, plan.there_since = there, self._updates
            self._held = plan
        self._note_bytes("rows of a batch", there)
        return there

    def _pool_here(self, plan: HostPlan, x: Lookups) -> Tensor:
        side = self._host_side(plan, x)
        (weights,), ready = self._start_to_host(x.weights)
        rows = self._collect(plan, cross=False)
        ready.wait()
        pooled = reference.pool(rows, side.ids.inverse, side.offsets, weights, side.divisor)
        return self._to_device(pooled, self.output_dtype)

    def _host_side(self, plan: HostPlan, x: Lookups) -> _HostSide:
        if plan.host_side is None:
            s = plan.segments
            found, ready = self._start_to_host(
                s.order, s.starts, plan.inverse, x.offsets, x.divisor
            )
            ready.wait()
            order, starts, inverse, offsets, divisor = found
            assert order is not None
            assert starts is not None
            assert inverse is not None
            ids = plan.sorted_by(order, starts, inverse, plan.ids)
            bag_of = replace(x, ids=ids.inverse, offsets=offsets).bag_of()
            plan.host_side = _HostSide(ids, offsets, divisor, bag_of)
        return plan.host_side

    def weight_grads(self, work: HostWork, x: Lookups, grads: Tensor) -> Tensor:  # type: ignore[override]
        plan = self._planned(work)
        if plan.rows_cross:
            there = plan.there
            if there is None or plan.there_since != self._updates:
                there = self._collect(plan, cross=True)
            found: Tensor = self._triton[0].weight_grads(
                there, plan.inverse, work.bag_of, grads, self.dim
            )
            return found
        side = self._host_side(plan, x)
        (here,), ready = self._start_to_host(grads)
        rows = self._collect(plan, cross=False)
        ready.wait()
        assert here is not None
        sums = reference.weight_grads(rows, side.ids.inverse, side.bag_of, here.float())
        return sums.to(self.device)

    # -- update ------------------------------------------------------------------------

    def row_grads(self, work: HostWork, x: Lookups, grads: Tensor) -> Tensor:  # type: ignore[override]
        """The gradient of each unique row, [U, dim], on the device."""
        refuse_capture()
        plan = self._planned(work)
        if self.device.type == "cpu" and not plan.rows_cross:
            return self._sum_here(plan, x, grads, x.weights)
        return self._sum_there(plan, work, x, grads)

    def _sum_there(self, plan: HostPlan, work: HostWork, x: Lookups, grads: Tensor) -> Tensor:
        terms = (grads, work.bag_of, x.weights, x.divisor)
        sums = self._triton[1].sum_by_row(*terms, plan.segments, padding=self._unsummed)
        self._note_bytes("gradients of a batch", sums)
        summed: Tensor = sums[: plan.num_rows]
        return summed

    def _sum_here(
        self, plan: HostPlan, x: Lookups, grads: Tensor, weights: Tensor | None
    ) -> Tensor:
        side, grads = self._host_side(plan, x), grads.float()
        if side.divisor is not None:
            grads = grads / side.divisor
        return reference.sum_by_row(grads, side.bag_of, weights, side.ids)

    @torch.no_grad()
    def update_at_once(  # type: ignore[override]
        self, work: HostWork, x: Lookups, grads: Tensor
    ) -> bool:
        if capturing():
            cut = self._cuts[work.berth]
            cut.grads, cut.used = grads, x.used
        elif x.used is not None:
            return False
        else:
            self._update_planned(self._planned(work), work, x, grads)
        return True

    def _update_planned(self, plan: HostPlan, work: HostWork, x: Lookups, grads: Tensor) -> None:
        if plan.rows_cross:
            self._send_home(plan, plan.ids, self._sum_there(plan, work, x, grads))
            return
        self.settle()
        settings = self._settings_now()
        self._host_side(plan, x)
        (here, weights), ready = self._start_to_host(grads, x.weights, room=self._grads)

        def update(rows: HostRows) -> None:
            ready.wait()
            assert here is not None
            sums = rows._sum_here(plan, x, here, weights)
            rows._update_rows(plan, plan.ids, sums, ready, settings)

        self._owe(update, plan)

    def update(self, ids: Tensor, grads: Tensor, work: Work | None) -> None:
        """One optimizer step on unique rows, when their gradients have come to the host."""
        refuse_capture()
        plan = work.plan if isinstance(work, HostWork) else None
        if plan is not None and len(ids) < plan.num_rows:
            plan = None  # some of its rows have no gradient
        self._send_home(plan, ids.cpu() if plan is None else plan.ids, grads)

    def _send_home(self, plan: HostPlan | None, ids: Tensor, grads: Tensor) -> None:
        """`grads` of rows set out for the host, where an update waits for them; `ids` are there."""
        self.settle()
        settings = self._settings_now()
        here = grads
        if self.has_link:
            here = self._grads.take(len(grads)).copy_(grads, non_blocking=True)
        arrived = self.lanes.mark("train")
        self._owe(lambda rows: rows._update_rows(plan, ids, here, arrived, settings), plan)

    def _owe(self, update: Callable[[HostRows], None], plan: HostPlan | None) -> None:
        """To be done before any row is read, by whoever reads it.

        Until then the device goes on, with the dense part's optimizer for instance. `backward()`
        may also end in a thread of autograd's own, whose cores would be others than the reader's.
        """
        self._owed = update
        self._updates += 1
        if plan is not None:
            plan.there = None
        if not self.has_link:
            self.settle()  # the gradients are autograd's own, and may change

    @torch.no_grad()
    def settle(self) -> None:
        """Do the update that is owed."""
        if self._owed is not None:
            with uninterrupted():
                owed, self._owed = self._owed, None
                owed(self)

    def _update_rows(
        self,
        plan: HostPlan | None,
        ids: Tensor,
        grads: Tensor,
        arrived: Mark,
        settings: tuple[Scalars, bool],
    ) -> None:
        # What the lookup has read is still there, if nobody has written since.
        is_held = plan is not None and self._held is plan
        self._held = None
        if not is_held:
            self._rows_sent.wait()
        moves = self.moving(ids)
        values = [self._rows.take(len(ids))]
        if moves is not None:
            ids = ids[moves]
            values = [values[0][moves] if is_held else values[0][: len(ids)]]
        if self.changed is not None:
            self.changed.note(ids)
        if len(self._columns) > 1:
            values.append(self._state.take(len(ids)))
        with in_any_order():
            for columns, out in list(zip(self._columns, values, strict=True))[is_held:]:
                columns.read(ids, out=out)
            arrived.wait()
            if moves is not None:
                grads = grads[moves]
            self._step_on(ids, values, grads, settings)
            self.store.will_write(ids)
            for columns, changed in zip(self._columns, values, strict=True):
                columns.write(ids, changed)

    def _step_on(
        self, ids: Tensor, values: list[Tensor], grads: Tensor, settings: tuple[Scalars, bool]
    ) -> None:
        scalars, alike = settings
        rule, weights = self.optimizer.rule, values[0]
        if type(rule) is SGD and alike and not scalars["decay"].any():
            # The same without passes over zeros; the gradients are ours.
            weights.sub_(grads.mul_(float(scalars["lr"][0].float())))
            return
        # A row's state follows its weights.
        state = [
            values[1][:, place.start - self.dim : place.stop - self.dim]
            for place in self.state.values()
        ]
        rule.update(
            weights, grads, state, per_row(scalars, None if alike else self.layout.table_of(ids))
        )

    def _settings_now(self) -> tuple[Scalars, bool]:
        """The rule's numbers for each table, and whether all tables have the same."""
        values = self.optimizer.table_scalars(self._names)
        if values is not self._settings_of:
            self._settings_of = values
            scalars = self.optimizer.scalars(self._names)
            self._settings = scalars, all(each == values[0] for each in values)
        return self._settings

    # -- across the link ---------------------------------------------------------------

    def _start_to_host(
        self, *tensors: Tensor | None, room: _Room | None = None
    ) -> tuple[list[Tensor | None], Mark]:
        """Tensors on their way to the host, the first into `room`, and when they are there."""
        here: list[Tensor | None] = list(tensors)
        if self.has_link:
            locked = self.device.type == "cuda"
            for place, tensor in enumerate(tensors):
                if tensor is None:
                    continue
                if room is not None and place == 0:
                    out = room.take(len(tensor), tensor.dtype)
                else:  # torch keeps page-locked memory, and knows when it may be used again
                    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=locked)
                here[place] = out.copy_(tensor, non_blocking=True)
        return here, self.lanes.mark("train")

    def _to_device(self, pooled: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.has_link:
            return pooled.to(dtype)
        self._bags_sent.wait()
        here = self._bags.take(len(pooled), dtype).copy_(pooled)
        there = torch.empty(here.shape, dtype=dtype, device=self.device)
        there.copy_(here, non_blocking=True)
        self._bags_sent = self.lanes.mark("train")
        return there

    # -- rows in and out ---------------------------------------------------------------

    def gather(self, ids: Tensor, out: Tensor) -> Tensor:
        self.settle()
        return self.store.read(ids, out=out)

    def scatter(self, ids: Tensor, rows: Tensor) -> None:
        self.settle()
        self._held, self._updates = None, self._updates + 1
        if self.changed is not None:
            self.changed.note(ids)
        self.store.write(ids, rows)

    def flush(self) -> None:
        self.settle()
        self._held, self._updates = None, self._updates + 1  # others may change rows from now on

    def freeze(self, ids: Tensor | None) -> None:
        self.settle()  # what is owed is of a step before
        super().freeze(ids)

    @property
    def _frozen_on(self) -> torch.device:
        return torch.device("cpu")

    # ----------------------------------------------------------------------------------

    def _count_plan(self, plan: HostPlan) -> None:
        """Every row of a batch is read, and written, across the link."""
        lookups, rows = self._counts(plan)
        self._note_traffic(plan, lookups, rows, rows)

    def _counts(self, plan: HostPlan) -> tuple[Tensor, Tensor]:
        """Lookups and different rows of each table."""
        edges = plan.facts[_FACTS : _FACTS + len(self._bases)]
        return edges.diff(), torch.searchsorted(plan.ids, self._bases).diff()

    def _note_traffic(self, plan: HostPlan, lookups: Tensor, rows: Tensor, moved: Tensor) -> None:
        counts = torch.stack([lookups, rows, moved, moved], dim=1)
        self.traffic += counts
        self._note(counts.sum(0).tolist())
        self._largest["sorted ids"] = max(
            self._largest.get("sorted ids", 0),
            sum(each.numel() * each.element_size() for each in plan.tensors()),
        )

    def _note_bytes(self, what: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self._largest[what] = max(self._largest.get(what, 0), size)

    def memory(self) -> dict[str, int]:
        """What the largest batch so far has taken, and captured steps take."""
        cuts = sum(each.num_bytes for each in self._cuts.values())
        return {**self._largest, **({"vectors of captured steps": cuts} if cuts else {})}

    def check(self) -> None:
        """Prove that what is held of the last batch is what the store has."""
        self.settle()
        if self._held is not None:
            ids = self._held.ids
            held = self._rows.take(len(ids))
            assert torch.equal(held.nan_to_num(), self.store.rows[ids, : self.dim].nan_to_num()), (
                "rows have changed since they were read, and nobody said so"
            )


class _Room:
    """Host memory that is used again and again; page-locked, the link is twice as fast."""

    def __init__(self, width: int, *, locked: bool) -> None:
        self._width, self._locked = width, locked
        self._memory = torch.empty(0, width)

    def take(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[count, width]; what was there last, if it was as large."""
        if len(self._memory) < count or self._memory.dtype != dtype:
            size = (count + count // 8, self._width)
            with torch.inference_mode(False):  # it serves training, too, whoever asks first
                self._memory = torch.empty(size, dtype=dtype, pin_memory=self._locked)
        return self._memory[:count]


class _Columns:
    """Some columns of all rows, read and written by all cores."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        # torch writes element by element, so the larger the faster.
        width, stride, first = rows.shape[1], rows.stride(0), rows.storage_offset()
        is_even = all(each % 4 == 0 for each in (width, stride, first))
        self._largest = torch.complex128 if is_even else rows.dtype
        self._to = rows.view(self._largest)

    def read(self, ids: Tensor, out: Tensor) -> None:
        torch.index_select(self._rows, 0, ids, out=out)

    def write(self, ids: Tensor, values: Tensor) -> None:
        self._to.index_copy_(0, ids, values.view(self._largest))


@contextmanager
def in_any_order() -> Iterator[None]:
    """Every row is written once, so all cores may: torch's deterministic form takes one."""
    mode = torch.get_deterministic_debug_mode()
    if mode:
        torch.set_deterministic_debug_mode(0)
    try:
        yield
    finally:
        if mode:
            torch.set_deterministic_debug_mode(mode)


def refuse_capture() -> None:
    if capturing():
        raise RuntimeError("rows are updated by the CPU, by the gradients of one lookup alone")
