"""One step per `backward()`: how gradients reach the rows.

Knows when gradients arrive and which rows they are for; where rows are is the groups' business.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from hotrow.distributed.exchange import Grads, OwnGrads, listed
from hotrow.embedding import dense_steps
from hotrow.embedding.row_grads import (
    GroupGrads,
    LookupCall,
    RowGrads,
    joined_grads,
    leave_to_graph,
    left_by_graph,
    sums_of,
    tables_in,
    whole_batches,
)
from hotrow.embedding.row_groups import Group, RowGroups
from hotrow.embedding.stand_ins import stand_in_of
from hotrow.embedding.waiting import WaitingGrads
from hotrow.embedding.wrappers import end_backward_together, threads_in_backward
from hotrow.engine.capture import GraphBoundary
from hotrow.engine.work import Work
from hotrow.inputs.batch import Lookups, no_lookups
from hotrow.support.interrupts import uninterrupted
from hotrow.support.messages import warn
from hotrow.support.streams import capturing
from hotrow.support.threads import TrainingThread

_NO_LOOKUPS = no_lookups(0)
_MOST_CHECKS = 64  # a loop may train rows alone, beside a dense part that is trained elsewhere
_NOT_NOTICED = (
    "ranks exchange gradients of rows at the end of backward(), and this one would not be noticed, "
    "so no row was changed. Call loss.backward() or torch.autograd.backward() in the thread that "
    "has looked the batch up; a function that was imported by `from torch.autograd import "
    "backward` before the collection was built is torch's own"
)


class Lookup(torch.autograd.Function):
    """Looks bags up and returns vectors as `by_feature` does. The backward pass finds which
    features have a gradient, and passes the gradients to the collection's pending step."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, weights: Tensor | None, work: Work, step: PendingStep, *leaves: Tensor
    ) -> tuple[Tensor | None, ...]:
        """`leaves` make autograd call back: one for all tables of the group, or one for each."""
        ctx.save_for_backward(*(() if weights is None else (weights,)))
        ctx.set_materialize_grads(False)
        ctx.work, ctx.step = work, step  # type: ignore[attr-defined]
        ctx.is_weighted = weights is not None  # type: ignore[attr-defined]
        ctx.call = step.begin_call()  # type: ignore[attr-defined]
        x = work.lookups
        with step.writing(), work.group.timed(work):
            return by_feature(work.group.lookup(work, replace(x, weights=weights)), x)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, whole: Tensor | None, *parts: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.step.end_call(ctx.call)
        grads, used = _of_bags(whole, parts, ctx.work.lookups)
        nothing: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if grads is None:
            return tuple(nothing)
        # Once: a checkpoint recomputes them and forgets. Not without need: modules that share this
        # lookup may have a backward pass each, after the first of which there are none.
        weights = ctx.saved_tensors[0] if ctx.is_weighted else None
        x = replace(ctx.work.lookups, weights=weights, used=used)
        if ctx.needs_input_grad[0]:
            with ctx.step.writing(), ctx.work.group.timed(ctx.work):
                weight_grads = ctx.work.group.weight_grads(ctx.work, x, grads)
            if used is not None:
                weight_grads = weight_grads.masked_fill(~x.used_lookups(), 0.0)
            nothing[0] = weight_grads
        used = _of_trained(used, ctx)
        if used is None or any(used):
            ctx.step.add(ctx.call, ctx.work, replace(x, used=used), grads)
        return tuple(nothing)


def _of_trained(used: tuple[bool, ...] | None, ctx: Any) -> tuple[bool, ...] | None:
    """Return which features have a gradient that is wanted; None: all of them."""
    # torch.autograd.grad(), and backward(inputs=...), may ask for some leaves alone.
    needed = ctx.needs_input_grad[3:]
    nodes = [node for node, _ in ctx.next_functions[-len(needed) :]]  # tensors alone have one
    try:
        wanted = [
            needs and torch._C._will_engine_execute_node(node) and _is_trained(node)
            for needs, node in zip(needed, nodes, strict=True)
        ]
    except RuntimeError as error:
        raise RuntimeError(
            "torch.autograd.grad() cannot return the gradient of a table, which is not one tensor; "
            "ask for those of other parameters, or of the vectors that a lookup returns"
        ) from error
    if all(wanted):
        return used
    features, x = ctx.work.group.layout.features, ctx.work.lookups
    tables = [features[x.feature_of(part)].table for part in range(len(x.part_sizes))]
    return tuple(
        wanted[table if len(wanted) > 1 else 0] and (used is None or used[part])
        for part, table in enumerate(tables)
    )


def _is_trained(node: Any) -> bool:
    """Whether a stand-in was not frozen since the lookup: torch drops its gradient then."""
    leaf: Any = getattr(node, "variable", None)
    return stand_in_of(leaf) is None or bool(leaf.requires_grad)


def by_feature(vectors: Tensor, x: Lookups) -> tuple[Tensor | None, ...]:
    """Split the vectors of bags: all features side by side, or None, then those of each feature.

    All share memory, but autograd takes none for a view, so that each can be changed in place.
    The caller must return either the first one or the others, never both.
    """
    sizes, dim = x.part_sizes, vectors.shape[1]
    if len(sizes) == 1:
        return None, vectors
    if not x.by_sample:
        return None, *torch.unsafe_split_with_sizes(vectors, list(sizes))
    whole = torch.ops.aten._unsafe_view(vectors, (sizes[0], len(sizes) * dim))
    return whole, *torch.unsafe_split(whole, dim, 1)


def _of_bags(
    whole: Tensor | None, parts: Sequence[Tensor | None], x: Lookups
) -> tuple[Tensor | None, tuple[bool, ...] | None]:
    """Join the gradients of what `by_feature` returned: [bags, dim], and which features have one.

    None stands for all features, as with a gradient of all of them side by side.
    """
    sizes = x.part_sizes
    given = next((part for part in parts if part is not None), None)
    if given is None:
        if whole is None:
            return None, None
        return whole.reshape(x.num_bags, whole.shape[1] // len(sizes)).contiguous(), None
    used = tuple(part is not None for part in parts)
    if not all(used):
        zero = given.new_zeros(())
        pairs = zip(parts, sizes, strict=True)
        parts = [zero.expand(n, given.shape[1]) if part is None else part for part, n in pairs]
    grads = given
    if len(sizes) > 1:
        every: Any = parts
        if not x.by_sample:
            grads = torch.cat(every)
        elif (joined := _joined_already(every)) is not None:
            grads = joined
        else:
            grads = torch.stack(every, 1).flatten(0, 1)
    if whole is not None:
        grads = grads + whole.reshape(grads.shape)
    return grads.contiguous(), None if whole is not None or all(used) else used


def _joined_already(parts: Sequence[Tensor]) -> Tensor | None:
    """Return parts [n, dim] that lie side by side in memory as bags [n * parts, dim]; None: they do
    not. Those of `torch.cat(vectors, 1)` do, and need not be copied."""
    first, count = parts[0], len(parts)
    bags, dim = first.shape
    step = dim * first.element_size()
    form, memory = ((bags, dim), (count * dim, 1)), first.untyped_storage().data_ptr()
    for number, part in enumerate(parts):
        if (
            part.data_ptr() != first.data_ptr() + number * step
            or (part.shape, part.stride()) != form
            or part.untyped_storage().data_ptr() != memory
        ):
            return None
    return first.as_strided((bags * count, dim), (dim, 1))


class _Promise:
    """A callback of autograd: called when a backward pass succeeds, and freed when it fails."""

    def __init__(self, step: PendingStep, number: int) -> None:
        self._step, self._number = step, number

    def __call__(self) -> None:
        self._step.end_of_pass(self._number)


class PendingStep:
    """Gradients that wait for the end of `backward()`, which is one step.

    They are kept by id, so it does not matter when, or in how many batches, they were made.
    """

    def __init__(self, rows: RowGroups, on_nonfinite: str, thread: TrainingThread) -> None:
        self._rows, self._on_nonfinite, self._thread = rows, on_nonfinite, thread
        self._lock, self._optimizer = rows.lock, rows.optimizer
        self.grad_scale: Any = None
        self._accumulating = 0
        self._waiting: list[RowGrads] = []
        # Autograd's engine alone holds the promises: those that are freed belong to failed passes.
        self._open: dict[int, weakref.ref[_Promise]] = {}
        self._calls = 0
        self.passes = 0  # how often gradients have come: vectors of before are not given again
        # Steps of dense optimizers when the newest gradients came, and at the newest update.
        self._added_at, self._updated_at = 0, -1
        self._checks_left = _MOST_CHECKS  # for passes without an optimizer step in between
        # For the step of an optimizer; None: the end of a backward pass is the step.
        self.for_step: WaitingGrads | None = None
        self._fuses = False  # the step comes at once, so the end of the pass may update rows
        if rows.exchange is not None:
            rows.exchange.update_by(self._apply, rows.optimizer)
            end_backward_together(self.end_of_backward)
        self._stream: torch.cuda.Stream | None = None  # where the newest gradients were made

    @property
    def is_accumulating(self) -> bool:
        return self._accumulating > 0

    @property
    def is_open(self) -> bool:
        """Gradients wait for an update."""
        self._forget_failed()
        return self.is_accumulating or bool(self._waiting)

    def begin_call(self) -> LookupCall:
        """Note a lookup; inside a backward pass it is a recomputation."""
        self._calls += 1
        if self._rows.exchange is not None:  # a rank without a gradient makes its step later
            self._optimizer.expect_step()
        self._free_zeroed()
        inside = torch._C._current_graph_task_id()
        if inside != -1:
            # A checkpoint may run a backward pass of its own in here: the outer one is the step.
            self._promise(inside)
            return LookupCall(self._calls, inside)
        return LookupCall(self._calls, inside, self._thread.open_call())

    def _free_zeroed(self) -> None:
        """Free gradients of before. torch has no hook for `zero_grad()`, which most loops call
        before a lookup, or between it and `backward()`."""
        if self.for_step is not None:
            self.for_step.free_zeroed()

    def end_call(self, call: LookupCall) -> None:
        """Note that gradients of a lookup have come."""
        if call.open is not None:
            self._thread.close_call(call.open)

    def add(self, call: LookupCall, work: Work, x: Lookups, grads: Tensor) -> None:
        current = torch._C._current_graph_task_id() if call.inside == -1 else call.inside
        self.passes += 1
        self._free_zeroed()
        self._note_repetition()
        self._promise(current)
        row_grads = RowGrads(call, work, x, grads, None, current)
        # Parts of a batch are joined first, bag by bag.
        waits = self._accumulating or not (self.at_once or self.for_step is not None)
        if work.whole is None and waits:
            row_grads.summed()  # they may wait for long, and bags' gradients are larger
        self._waiting.append(row_grads)
        if grads.is_cuda:
            self._stream = torch.cuda.current_stream(grads.device)

    def _note_repetition(self) -> None:
        """Warn once where torch would add gradients up, but rows make a step of each pass.

        That is so if a dense optimizer has gradients in this pass, and no optimizer has stepped
        since the pass before. With a GradScaler there is no warning, because it skips steps.
        """
        if self.for_step is not None:
            return
        steps = dense_steps.count()
        if self._updated_at == steps and self._checks_left and not self._has_scaler:
            self._checks_left -= 1
            if dense_steps.are_in_this_pass():
                self._checks_left = 0
                warn(
                    "a second backward() came without an optimizer step in between. Every "
                    "backward() updates the rows, so they made two steps where the dense part "
                    "makes one. To make one step of several backward passes, run them inside "
                    "`with embedding.accumulate():`"
                )
        self._added_at = steps

    def _promise(self, number: int) -> None:
        self._forget_failed()
        if number not in self._open:
            promise = _Promise(self, number)
            self._open[number] = weakref.ref(promise)
            torch.autograd.Variable._execution_engine.queue_callback(promise)

    def _forget_failed(self) -> None:
        failed = {number for number, promise in self._open.items() if promise() is None}
        if failed:
            self._waiting = [x for x in self._waiting if x.open_pass not in failed]
            self._open = {n: promise for n, promise in self._open.items() if n not in failed}

    def end_of_pass(self, number: int) -> None:
        with uninterrupted():  # or gradients of this pass would be left to the next one
            del self._open[number]
            if self._rows.exchange is not None and not (
                self._accumulating or self._thread.is_among(threads_in_backward)
            ):
                self._waiting = [x for x in self._waiting if x.open_pass != number]
                raise RuntimeError(_NOT_NOTICED)
            for row_grads in self._waiting:
                if row_grads.open_pass == number:
                    row_grads.open_pass = None
            self._forget_failed()
            if self._rows.exchange is not None:
                return  # `end_of_backward` exchanges gradients
            if not self._accumulating and not self._open:  # a pass inside a pass is part of it
                # If a model has no dense weights on the device, torch calls back from its last
                # thread, on the stream of that thread: a graph would lack the update.
                with torch.cuda.stream(self._stream):
                    self.finish()

    def end_of_backward(self, failed: bool = False) -> None:
        """Exchange gradients with other ranks when `backward()` has ended, perhaps without any of
        this rank. `failed`: rows of another collection were not updated."""
        exchange = self._rows.exchange
        assert exchange is not None
        self._forget_failed()
        if self._thread.is_elsewhere or self._accumulating or self._open:
            return
        if failed:
            self._waiting.clear()
            exchange.owes_grads = False
        elif self._waiting or exchange.owes_grads:
            with uninterrupted(), torch.cuda.stream(self._stream):
                self.finish()

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Inside, the end of a backward pass updates rows, although they wait for a step."""
        before, self._fuses = self._fuses, True
        try:
            yield
        finally:
            self._fuses = before

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._forget_failed()
        before = len(self._waiting)
        self._accumulate(1)
        try:
            yield
            with uninterrupted():
                self._forget_failed()
                if self._accumulating == 1:
                    self.finish()
        except BaseException:
            del self._waiting[before:]
            raise
        finally:
            self._accumulate(-1)

    def _accumulate(self, more: int) -> None:
        self._accumulating += more
        if self._rows.exchange is not None:
            self._rows.exchange.is_accumulating = self.is_accumulating

    def writing(self) -> AbstractContextManager[object]:
        """Inside, no other thread reads or changes rows. The thread that captures a step has the
        lock already, and autograd may run in another thread."""
        return nullcontext() if capturing() else self._lock.writing()

    @torch.no_grad()  # waiting gradients may have graphs, as of learned per-sample weights
    def finish(self) -> None:
        """Update every row that has a gradient, once."""
        exchange = self._rows.exchange
        if exchange is None:
            with self.writing():
                self._apply_all(*self._take())
            return
        by_group, tables = self._take()
        if capturing():
            leave_to_graph(by_group)
            return
        joined = {place: joined_grads(group, x) for place, group, x in by_group}
        grads = {
            place: Grads(ids, _unscaled(x, self.grad_scale), work)
            for place, (ids, x, work) in joined.items()
        }
        exchange.send_grads(grads, tables)  # calls `_apply` with what came

    def end_captured(self, boundaries: Sequence[tuple[Work, GraphBoundary]]) -> None:
        """Exchange the gradients that a graph has left at its boundaries."""
        self._optimizer.expect_step()
        self.passes += 1
        with uninterrupted():
            self._waiting += left_by_graph(boundaries)
            self.finish()

    def _take(self) -> tuple[list[GroupGrads], tuple[str, ...]]:
        """Take the gradients that wait, by group, and the tables that have one."""
        waiting = sorted(self._waiting, key=lambda x: x.call.number)
        self._waiting.clear()
        if not waiting:
            return [], ()
        if any(not (x.work.whole or x.work).moving.group.active for x in waiting):
            raise RuntimeError(
                "gradients came of a lookup from before train_on_host() or train_in_slots(), and "
                "no row was changed: call backward() before these"
            )
        if any(x.work.whole is not None for x in waiting):
            waiting = whole_batches(waiting)
        by_group = [
            GroupGrads(place, group, row_grads)
            for place, group in enumerate(self._rows.lookup_groups)
            if (row_grads := [x for x in waiting if x.work.group is group])
        ]
        names = self._optimizer.names
        return by_group, tables_in(by_group, len(self._rows.lookup_groups), names)

    def _apply(
        self, own: Sequence[OwnGrads], tables: Collection[str], silent: Sequence[int]
    ) -> None:
        """Update the rows that this rank owns, from the gradients of all ranks; those that are
        `silent` had no backward pass."""
        if self.for_step is not None and silent:
            raise RuntimeError(
                f"{listed(silent)} did not call backward() for a batch, and other ranks did; with "
                "update='step' every rank calls it for each batch that it looks up, before its "
                "optimizer steps"
            )
        by_group = []
        for x in own:
            grads = RowGrads(LookupCall(0, -1), x.work, _NO_LOOKUPS, None, (x.ids, x.grads), None)
            if x.work is not None:
                grads = RowGrads(grads.call, x.work, x.work.lookups, x.grads, None, None)
            by_group.append(GroupGrads(x.place, self._rows.groups[x.place], [grads]))
        self._apply_all(by_group, tuple(tables))

    def _apply_all(self, by_group: Sequence[GroupGrads], tables: tuple[str, ...]) -> None:
        """Update rows, or let their gradients wait for the step of an optimizer."""
        if not tables:
            return
        if self.for_step is not None and not self._fuses:
            with self.writing():
                self.for_step.add(
                    {place: sums_of(group, x) for place, group, x in by_group}, tables
                )
            self.for_step.publish()
            return
        if self.at_once:
            with self.writing(), uninterrupted():
                if capturing():  # nothing has run yet; a replay counts
                    self._optimizer.capture_step(tables)
                else:
                    self._count_step(tables)
                for _, group, row_grads in by_group:
                    only = row_grads[0]
                    if (
                        len(row_grads) > 1
                        or only.of_bags is None
                        or not group.update_planned(only.work, only.x, only.of_bags)
                    ):
                        _update(group, *joined_grads(group, row_grads))
            return
        updates = [(group, *joined_grads(group, row_grads)) for _, group, row_grads in by_group]
        if self._rows.exchange is None:  # else each rank has unscaled its own
            updates = [
                (group, ids, _unscaled(x, self.grad_scale), work) for group, ids, x, work in updates
            ]
        if self._skip(updates):
            return
        with self.writing(), uninterrupted():
            self._count_step(tables)
            for update in updates:
                _update(*update)

    @property
    def skips_late(self) -> bool:
        """Whether a device may skip a step that the host has counted: no value needs it."""
        return self._on_nonfinite == "propagate" and not self._optimizer.rule.state_names

    @torch.no_grad()
    def step(self, tables: Sequence[str], is_skipped: Tensor | None = None) -> None:
        """Update the rows of some tables from the gradients that wait for an optimizer's step.
        Nothing changes if `is_skipped`, which the host does not read, is not 0."""
        assert self.for_step is not None
        if self._on_nonfinite != "propagate" and self._refuse(self.for_step.bad_row(tables)):
            return
        with self.writing(), uninterrupted():
            if capturing():  # nothing has run yet; a replay counts
                self._optimizer.capture_step(tuple(tables))
            else:
                self._count_step(tuple(tables))
            self.for_step.step(tables, is_skipped)

    def _count_step(self, tables: tuple[str, ...]) -> None:
        self._optimizer.count_step(tables)
        self._rows.version += 1
        self._rows.steps += 1
        self._updated_at = self._added_at
        if self._rows.exchange is not None:
            wait_on = self.for_step is not None and not self._fuses
            self._rows.exchange.early.note_step(wait_on=wait_on)

    @property
    def at_once(self) -> bool:
        """Whether sums go from backward to the update unseen: nothing scales or checks them."""
        if self.for_step is not None and not self._fuses:
            return False
        return self.grad_scale is None and self._on_nonfinite == "propagate"

    @property
    def _has_scaler(self) -> bool:
        return hasattr(self.grad_scale, "get_scale")

    def _skip(self, updates: Sequence[tuple[Group, Tensor, Tensor, Work | None]]) -> bool:
        """Whether a gradient is not finite and the update is to be skipped."""
        # A GradScaler relies on it.
        if self._on_nonfinite == "propagate" and not self._has_scaler:
            return False
        every = (_bad_row(group, ids, grads) for group, ids, grads, _ in updates)
        return self._refuse(next((bad for bad in every if bad is not None), None))

    def _refuse(self, bad: tuple[str, float] | None) -> bool:
        """Whether a step is skipped for a row whose gradient is not finite, on any rank. Raises
        where that is an error."""
        exchange = self._rows.exchange
        if exchange is not None:
            found = exchange.first_of("" if bad is None else f"{bad[0]}|{bad[1]}")
            if found is not None:
                row, value = found[1].rsplit("|", 1)
                bad = f"{row} of rank {found[0]}", float(value)
        if bad is not None and self._on_nonfinite == "error":
            raise _not_finite(max(self._optimizer.steps) + 1, *bad)
        return bad is not None


def _bad_row(group: Group, ids: Tensor, grads: Tensor) -> tuple[str, float] | None:
    """Return the first row whose gradient is not finite, and what it holds; None: there is none."""
    finite = torch.isfinite(grads)
    trained = group.store.frozen.trained(ids)
    if trained is not None:  # gradients of padding are dropped
        finite |= ~trained.unsqueeze(1)
    if bool(finite.all()):
        return None
    bad = int((~finite).any(dim=1).int().argmax())
    return group.layout.describe(int(ids[bad])), float(grads[bad][~finite[bad]][0])


def _unscaled(grads: Tensor, scale: Any) -> Tensor:
    """Divide by a number, a tensor or what a GradScaler has; None: by nothing."""
    if scale is None:
        return grads
    unscaled: Tensor = grads / getattr(scale, "get_scale", lambda: scale)()
    return unscaled


def _not_finite(update: int, row: str, value: float) -> FloatingPointError:
    return FloatingPointError(
        f"update {update}: the gradient of {row} holds {value}; no row was changed. "
        "on_nonfinite='skip' leaves such updates out"
    )


def _update(group: Group, ids: Tensor, grads: Tensor, work: Work | None) -> None:
    with group.timed(work):
        group.update(ids, grads, work)
