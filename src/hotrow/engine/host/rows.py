"""The engine of rows that stay in host memory: the CPU reads and updates them.

For each batch either its rows' vectors cross the link, once each, or its bags', pooled by the CPU:
whichever are fewer bytes. Gradients go back the same way. Only ids are sorted a batch ahead, on the
device. Rows that are hot can be on the device instead (`hot.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotrow.engine.arithmetic import HostPooling
from hotrow.engine.capture import AroundGraph
from hotrow.engine.counters import Counters, Overflow
from hotrow.engine.direct import chunks
from hotrow.engine.host.hot import HotRows, kernels, refuse_capture
from hotrow.engine.host.link import Link
from hotrow.engine.host.plan import HostPlan, HostSide, HostWork
from hotrow.engine.host.planning import HostPlanning, LargestBytes
from hotrow.engine.host.table import HostTable
from hotrow.engine.idle import idle_rows
from hotrow.engine.memory import ALL_AT_ONCE, FixedSlots
from hotrow.engine.mover import NoMoves
from hotrow.engine.planning import Outcome
from hotrow.engine.row_sums import HostSums
from hotrow.engine.rows import RowGroup, grads_by_row
from hotrow.engine.settings import Settings
from hotrow.engine.strategy import Strategy
from hotrow.engine.work import Work
from hotrow.inputs.batch import Lookups
from hotrow.inputs.tables import WidthGroup
from hotrow.kernels import reference
from hotrow.store.changed import FrozenRows
from hotrow.store.pinned import locked_group
from hotrow.store.ram import Store, host_rows, initialise
from hotrow.support.streams import capturing


class HostRows:
    """Rows of one width."""

    active = True  # False: another engine trains the same rows now
    expected_rows: int | None = None
    fill_choice: Any = None
    plan_room = FixedSlots()

    def __init__(self, settings: Settings, store: Store) -> None:
        layout, device = settings.layout, settings.device
        self.settings, self.layout, self.optimizer = settings, layout, settings.optimizer
        self.strategy, self.device, self.lock = settings.strategy, device, settings.lock
        self.lanes, self.dim, self.width = settings.lanes, settings.dim, settings.width
        self.state, self.output_dtype = settings.state_columns, settings.output_dtype
        self.store, self.mover, self.overflow = store, NoMoves(), Overflow(settings.dim)
        # Optimizer state stays where it is.
        cpu = torch.device("cpu")
        self.counters = Counters(layout, cpu, width=settings.width, moved_width=settings.dim)
        self.link = Link(settings.lanes, settings.dim)
        self.hot = HotRows(settings, store, 0 if settings.share is None else settings.share.slots)
        self.counters.count_loaded(self.hot.ids)
        self._peak = LargestBytes()
        self.planning = HostPlanning(settings, self.link, self.hot, self.counters, self._peak)
        self.table = HostTable(settings, store, self.link)
        self.idle = idle_rows(settings, store)
        self.capture = AroundGraph(settings.dim, settings.output_dtype, settings.device)

    # -- planning ----------------------------------------------------------------------

    def plan(self, work: HostWork) -> None:
        self.planning.plan(work)

    def confirm(self, work: HostWork) -> bool:
        """Learn how many rows a batch has. Raises on a bad id."""
        return self.planning.confirm(work) is Outcome.PLANNED

    def finish_planned(self) -> None:
        """No row moves."""

    def forget_window(self) -> None:
        """Nothing is decided ahead."""

    def go_direct(self, work: Work) -> bool:
        return False

    @property
    def sums(self) -> HostSums:
        """Sums gradients that wait for an optimizer's step."""
        return HostSums(self)

    def slots_hold(self, work: Work) -> bool:
        return False

    def pooling(self, output_dtype: torch.dtype) -> HostPooling:
        """Return what computes from vectors of other ranks, which are on the device."""
        if not self.link.exists:
            return HostPooling(output_dtype)
        from hotrow.engine.gpu.arithmetic import DevicePooling  # imports Triton

        return DevicePooling(output_dtype)

    def timed(self, work: Work | None) -> AbstractContextManager[None]:
        return nullcontext()

    # -- lookup ------------------------------------------------------------------------

    def lookup(self, work: HostWork, x: Lookups) -> Tensor:
        """Return one vector per bag, [bags, dim]. `x` has the weights."""
        if capturing():
            # A copy: a model may change what it gets.
            return self.capture.boundary_of(work).vectors.clone()
        if self.hot.is_learning_due:
            self.flush()
            self.counters.count_loaded(self.hot.learn())
        return self._vectors(self.planning.planned(work), x)

    def parts_of(self, x: Lookups) -> list[tuple[Lookups, Any]]:
        """Split the bags of a batch that is only read. Reads no row."""
        if self._reads_store:
            return [(part, None) for part in chunks(x, ALL_AT_ONCE)]
        return [(x, self.planning.sort_now(x.ids))]

    def read_parts(self, parts: list[tuple[Lookups, Any]]) -> Tensor:
        """Return one vector per bag of what `parts_of` gave. Several threads may read."""
        if self._reads_store:
            pieces = [self._read_part(x) for x, _ in parts] or [torch.zeros(0, self.dim)]
            joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            return joined.to(self.output_dtype)
        ((x, plan),) = parts
        plan = self.planning.current(plan)
        plan.is_trained = False
        return self._vectors(plan, x)

    @property
    def _reads_store(self) -> bool:
        """Whether vectors are read from the store without a plan: where nothing crosses a link."""
        return not self.link.exists and not self.hot.exists

    def _read_part(self, x: Lookups) -> Tensor:
        vectors, pads = torch.empty(x.ids.numel(), self.dim), self.planning.has_padding
        self.table.read_vectors(x.ids.clamp(min=0) if pads else x.ids, out=vectors)
        if pads:
            vectors.masked_fill_((x.ids < 0).unsqueeze(1), 0.0)
        if x.offsets is None:
            return vectors
        every = torch.arange(x.ids.numel())
        return reference.pool(vectors, every, x.offsets, x.weights, x.divisor)

    def _vectors(self, plan: HostPlan, x: Lookups) -> Tensor:
        """Return one vector per bag, [bags, dim], of the rows as they are now."""
        self.lanes.hand_over(plan.tensors())
        hot = self.hot.pool(plan, x)
        if hot is None:
            return self._cold_vectors(plan, x)
        return hot.add_(self._cold_vectors(plan, x)) if plan.num_rows else hot

    def _cold_vectors(self, plan: HostPlan, x: Lookups) -> Tensor:
        plan.rows_cross = self.rows_cross(plan, x.num_bags)
        if not plan.rows_cross:
            return self._pool_here(plan, x)
        there = self._collect(plan, cross=True)
        vectors: Tensor = kernels()[0].pool(
            there, plan.inverse, x.offsets, x.weights, x.divisor, self.dim, self.output_dtype
        )
        return vectors

    def rows_cross(self, plan: HostPlan, num_bags: int) -> bool:
        """Whether a batch's rows are fewer bytes than its bags, and what pooling here needs."""
        if not self.link.exists:
            return False
        order = 8 * plan.num_lookups
        rows = 2 * 4 * self.dim * plan.num_rows
        return rows <= 2 * self.output_dtype.itemsize * self.dim * num_bags + order

    def _collect(self, plan: HostPlan, *, cross: bool) -> Tensor:
        rows = self.table.collect(plan, cross=cross)
        self._peak.note("rows of a batch", rows)
        return rows

    def _pool_here(self, plan: HostPlan, x: Lookups) -> Tensor:
        side = self._host_side(plan, x)
        (weights,), ready = self.link.start_to_host(x.weights)
        rows = self._collect(plan, cross=False)
        ready.wait()
        pooled = reference.pool(rows, side.ids.inverse, side.offsets, weights, side.divisor)
        return self.link.to_device(pooled, self.output_dtype)

    def _host_side(self, plan: HostPlan, x: Lookups) -> HostSide:
        if plan.host_side is None:
            s = plan.segments
            copies, ready = self.link.start_to_host(
                s.order, s.starts, plan.inverse, x.offsets, x.divisor
            )
            ready.wait()
            order, starts, inverse, offsets, divisor = copies
            assert order is not None
            assert starts is not None
            assert inverse is not None
            ids = plan.sorted_by(order, starts, inverse, plan.ids)
            bag_of = replace(x, ids=ids.inverse, offsets=offsets).bag_of()
            plan.host_side = HostSide(ids, offsets, divisor, bag_of)
        return plan.host_side

    def weight_grads(self, work: HostWork, x: Lookups, grads: Tensor) -> Tensor:
        """Return the gradients of per-sample weights, from the rows before their update, [L]."""
        plan = self.planning.planned(work)
        hot = self.hot.weight_grads(plan, work.bag_of, x, grads)
        if hot is None:
            return self._cold_weight_grads(plan, work, x, grads)
        return hot.add_(self._cold_weight_grads(plan, work, x, grads)) if plan.num_rows else hot

    def _cold_weight_grads(
        self, plan: HostPlan, work: HostWork, x: Lookups, grads: Tensor
    ) -> Tensor:
        if plan.rows_cross:
            there = plan.there
            if there is None or plan.there_since != self.table.updates:
                there = self._collect(plan, cross=True)
            weight_grads: Tensor = kernels()[0].weight_grads(
                there, plan.inverse, work.bag_of, grads, self.dim
            )
            return weight_grads
        side = self._host_side(plan, x)
        (here,), ready = self.link.start_to_host(grads)
        rows = self._collect(plan, cross=False)
        ready.wait()
        assert here is not None
        sums = reference.weight_grads(rows, side.ids.inverse, side.bag_of, here.float())
        return sums.to(self.device)

    # -- update ------------------------------------------------------------------------

    def grads_by_row(self, work: HostWork, x: Lookups, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of a batch's rows that have a gradient, each once, and the gradients."""
        return grads_by_row(work, x, lambda x: self._row_grads(work, x, grads))

    def _row_grads(self, work: HostWork, x: Lookups, grads: Tensor) -> Tensor:
        """Return the gradient of each different row, hot or cold, [U, dim], on the device."""
        refuse_capture()
        plan = self.planning.planned(work)
        if plan.hot is not None:
            grads = grads.float() if x.divisor is None else grads.float() / x.divisor
            bag_of = replace(x, ids=work.ids.inverse).bag_of()
            return reference.sum_by_row(grads, bag_of, x.weights, work.ids)
        if self.device.type == "cpu" and not plan.rows_cross:
            return _sum_here(self._host_side(plan, x), grads, x.weights)
        return self._sum_there(plan, work, x, grads)

    def _sum_there(self, plan: HostPlan, work: HostWork, x: Lookups, grads: Tensor) -> Tensor:
        terms = (grads, work.bag_of, x.weights, x.divisor)
        # Padding has no gradient, and might be the longest of all sums; hot rows count as padding.
        padding = (
            self.layout.num_rows if self.planning.has_padding or plan.hot is not None else None
        )
        sums = kernels()[1].sum_by_row(*terms, plan.segments, padding=padding)
        self._peak.note("gradients of a batch", sums)
        summed: Tensor = sums[: plan.num_rows]
        return summed

    @torch.no_grad()
    def update_planned(self, work: Work, x: Lookups, grads: Tensor) -> bool:
        """Update a batch's rows from the gradients of its bags, in one go; False: not possible."""
        assert isinstance(work, HostWork)
        if capturing():
            boundary = self.capture.boundary_of(work)
            boundary.grads, boundary.used = grads, x.used
            return True
        if x.used is not None:
            return False
        plan = self.planning.planned(work)
        if plan.num_rows:  # first: their gradients have the longer way
            self._update_cold(plan, work, x, grads)
        self.hot.update(plan, work.bag_of, x, grads)
        return True

    def _update_cold(self, plan: HostPlan, work: HostWork, x: Lookups, grads: Tensor) -> None:
        if plan.rows_cross:
            self.table.send_home(plan, plan.ids, self._sum_there(plan, work, x, grads))
            return
        self.settle()
        numbers, side = self.table.numbers_now(), self._host_side(plan, x)
        (here, weights), ready = self.link.start_to_host(grads, x.weights, buffer=self.table.grads)

        def update(table: HostTable) -> None:
            ready.wait()
            assert here is not None
            table.update_rows(plan, plan.ids, _sum_here(side, here, weights), ready, numbers)

        self.table.owe(update, plan)

    def update(self, ids: Tensor, grads: Tensor, work: Work | None) -> None:
        """Make one optimizer step on unique rows, when their gradients have come to the host."""
        refuse_capture()
        is_hot = self.hot.update_rows(ids, grads)
        if is_hot is not None:
            self.table.send_home(None, ids[~is_hot].cpu(), grads[~is_hot])
            return
        plan = work.plan if isinstance(work, HostWork) else None
        if plan is not None and len(ids) < plan.num_rows:
            plan = None  # some of its rows have no gradient
        self.table.send_home(plan, ids.cpu() if plan is None else plan.ids, grads)

    # -- rows --------------------------------------------------------------------------

    chunk_rows = ALL_AT_ONCE
    is_settled = True

    def settle(self) -> None:
        """Do the update that is owed."""
        self.table.settle()

    @property
    def notes_changes(self) -> bool:
        """Whether every change of a row is noted in the store; those of hot rows are not."""
        return not self.hot.exists

    @property
    def num_slots(self) -> int:
        """Rows that fit fast memory."""
        return self.hot.num_slots

    def gather(self, ids: Tensor, out: Tensor) -> Tensor:
        """Copy the newest bytes of rows, each given once, into `out`."""
        self.settle()
        self.store.read(ids, out=out)
        self.hot.read(ids, out)
        return out

    def scatter(self, ids: Tensor, rows: Tensor) -> None:
        """Replace rows, each given once."""
        self.settle()
        self.table.expect_changes()
        self.store.note_changed(ids)
        self.store.write(ids, rows)  # of hot rows the store has an older state at most
        self.hot.write(ids, rows)

    def flush(self) -> None:
        """Bring the store up to date."""
        self.settle()
        self.table.expect_changes()
        self.hot.flush()

    def freeze(self, ids: Tensor | FrozenRows | None) -> None:
        """From the next step on, leave these rows and their state as they are; None: no row."""
        self.settle()  # what is owed is of a step before
        self.store.frozen.freeze(ids)
        self.hot.freeze()

    def replaced(self) -> None:
        """Rows were replaced in the store, while nothing was in flight."""
        self.expect_changes()
        self.hot.load()

    def expect_changes(self) -> None:
        """Another engine will change rows in the store."""
        self.table.expect_changes()

    def pin_rows(self, ids: Tensor) -> None:
        """Let these rows be hot, the first ones if slots are fewer; learn no more."""
        self.flush()
        self.counters.count_loaded(self.hot.choose(ids))

    # -- facts -------------------------------------------------------------------------

    def num_bytes(self) -> dict[str, int]:
        """Return what the largest batch so far has taken, hot rows, and what graphs take."""
        return {**self.hot.num_bytes(), **self._peak.parts, **self.capture.num_bytes()}

    def check(self) -> None:
        """Prove that buffers and slots are consistent."""
        self.table.check()
        self.hot.check()


def host_rows_engine(layout: WidthGroup, **options: Any) -> HostRows:
    """Build the engine of rows on the host; `options` are those of `Settings`."""
    settings = Settings(layout, **options)
    return HostRows(settings, _new_store(settings))


def _sum_here(side: HostSide, grads: Tensor, weights: Tensor | None) -> Tensor:
    """Return the gradient of each different row, summed by the host."""
    grads = grads.float() if side.divisor is None else grads.float() / side.divisor
    return reference.sum_by_row(grads, side.bag_of, weights, side.ids)


def _new_store(settings: Settings) -> Store:
    layout, device, width = settings.layout, settings.device, settings.width
    start, seed = settings.state_start, settings.seed
    if device.type == "cpu":
        store = Store(host_rows(layout.num_rows, width), untrained=layout.untrained)
        initialise(store.rows, layout, start, seed)
        return store
    # Training has no use for page-locked rows, but a GPU fills them in seconds.
    memory, left = locked_group(layout, width, start, seed)
    store = Store(memory.rows, untrained=layout.untrained)
    if memory.locked:
        from hotrow.engine.gpu.memory import initialise_on_gpu  # imports Triton

        initialise_on_gpu(store.rows, layout, start, seed, device, tables=left)
    else:
        initialise(store.rows, layout, start, seed, tables=left)
    return store


def host_rows_over(rows: RowGroup, strategy: Strategy) -> HostRows:
    """Build a second engine for the rows of another one."""
    settings = replace(rows.settings, strategy=strategy, share=None)
    return HostRows(settings, rows.store)
