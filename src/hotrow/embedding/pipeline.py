"""Planned batches: what `hotrow.ahead`, captured steps and lookups need of a collection.

Knows which batches are planned and which pass is running; how rows move is the groups' business.
Uses the members of an engine that `engine/rows.py` lists under batches and planning.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hotrow.distributed.exchange import Shared
from hotrow.embedding.arguments import refuse_replicas
from hotrow.embedding.plan_memory import PlanMemory
from hotrow.embedding.row_groups import Group, RowGroups
from hotrow.embedding.step import PendingStep
from hotrow.embedding.torch_surface import weights_count
from hotrow.engine.capture import GraphBoundary
from hotrow.engine.schedule import at_once
from hotrow.engine.stages import Stage
from hotrow.engine.work import Work
from hotrow.inputs.batch import (
    Batch,
    compared,
    count_ids,
    elsewhere,
    identity,
    parse,
    versions_of,
    weights_of,
)
from hotrow.inputs.calls import JoinedCalls
from hotrow.support.messages import warn
from hotrow.support.streams import capturing
from hotrow.support.threads import TrainingThread

_RECENT = 8  # batches among which equal ids in new tensors are searched


_CHANGED = (
    "its ids were changed after they were read, in a way that torch's versions do not see (.data, "
    "numpy, or a loader that fills its buffers again), so its step looked up and updated the rows "
    "of the ids before. Change ids where batches are made, by operations that torch sees, or in a "
    "copy (ids.clone()), and train again from before that batch"
)


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """One batch as one collection knows it."""

    features: Any
    # Its tensors when it was planned. Keeping them keeps their memory from being reused.
    compared: tuple[Tensor, ...]
    versions: tuple[Any, ...]  # of these tensors
    batch: Batch
    works: tuple[Work, ...]  # one per width group
    copies: tuple[Tensor, ...] = ()  # of the tensors; empty where a device compares ids
    shared: Shared | None = None  # the batch as all ranks know it, if there are several
    # Vectors that modules have not taken yet, by the number of their call, and in which pass.
    served: dict[Any, Any] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[Any, ...]:
        return identity(self.features, self.compared, self.versions)

    @property
    def is_unchanged(self) -> bool:
        """Whether its ids are unchanged, by the versions of their tensors."""
        return all(
            now == then or tensor.is_inference()
            for tensor, now, then in zip(
                self.compared, versions_of(self.compared), self.versions, strict=True
            )
        )

    @property
    def is_as_read(self) -> bool:
        """Whether the ids equal those that were planned: numpy, and `.data`, change a tensor
        without a new version."""
        if isinstance(self.features, JoinedCalls):
            return self.features.is_as_joined(self.batch.keys)
        return not self.copies or all(map(torch.equal, self.compared, self.copies))

    def reads_like(self, other: PlannedBatch) -> bool:
        """Whether both look up the same rows; reads the ids, so it waits for a device."""
        pairs = zip(self.works, other.works, strict=True)
        return all(work.reads_like(planned) for work, planned in pairs)


def _is_same_empty(tensors: tuple[Tensor, ...], planned: PlannedBatch) -> bool:
    """Whether the tensors of a batch without ids look as those of a planned one."""
    if len(tensors) != len(planned.compared):
        return False
    return all(
        (x.shape, x.data_ptr()) == (y.shape, y.data_ptr())
        # A part of larger memory has its version, which changes when a loader fills that again.
        and (x._version == version or (not x.numel() and x.untyped_storage().nbytes() > 0))
        for x, y, version in zip(tensors, planned.compared, planned.versions, strict=True)
    )


def _known(
    features: Any, known: deque[PlannedBatch], unseen: PlannedBatch | None, *, shared: bool
) -> PlannedBatch | None:
    """Return the planned batch that is looked up; `unseen`: the newest, until it was found;
    `shared`: several ranks look it up, and all find it or none."""
    if not known:
        return None
    try:
        tensors = compared(features)
        wanted = identity(features, tensors, versions_of(tensors))
    except (AttributeError, IndexError, TypeError):
        return None  # not ids at all; parsing raises an error with the reason
    # The newest first: a loader may return the same tensors again.
    planned = next((x for x in reversed(known) if x.identity == wanted), None)
    if shared and not count_ids(features):
        planned = _find_empty(tensors, known, unseen)
    return planned if planned is not None and planned.is_as_read else None


def _find_empty(
    tensors: tuple[Tensor, ...], known: deque[PlannedBatch], unseen: PlannedBatch | None
) -> PlannedBatch | None:
    """Return the planned batch that is looked up, of those without ids.

    Memory does not tell them apart if none has any. Other ranks have ids, and know which batch it
    is or plan another one; this rank must not take one for the other."""
    recomputes = torch._C._current_graph_task_id() != -1
    same = [x for x in reversed(known) if _is_same_empty(tensors, x)]
    for planned in same:
        pairs = zip(tensors, planned.compared, strict=True)
        if any(x.numel() for x in tensors) or all(x is y for x, y in pairs):
            return planned
    newest = next(iter(same), None)
    return newest if recomputes or newest is unseen else None


def _overlaps(rows: RowGroups) -> bool:
    """Whether a batch that is read ahead has its rows in slots while the one before trains."""
    if rows.strategy.on_host:  # the CPU reads rows when they are looked up
        return False
    return rows.strategy.overlapped and rows.strategy.reads_ahead_on(rows.device)


class Pipeline:
    """Plans the batches of a collection, and keeps the newest ones until they are looked up."""

    def __init__(
        self,
        rows: RowGroups,
        step: PendingStep,
        thread: TrainingThread,
        features: tuple[str, ...],
    ) -> None:
        self._rows, self._step, self.thread = rows, step, thread
        self._features = features
        if rows.exchange is not None:
            rows.exchange.serve(rows.useful_depth)
        self.planned: deque[PlannedBatch] = deque()
        self.forget_planned()
        self._memory = PlanMemory(rows)
        self.is_weighted: bool | None = None  # None: weights are used where a batch has them
        self.iterator: Callable[[], Any] | None = None  # a weak reference to the running one
        self._warned = False
        self._unseen: PlannedBatch | None = None  # the newest, until it is looked up
        self.is_learning = False  # the batch was not planned, on purpose

    # -- batches -----------------------------------------------------------------------

    def prepare(self, features: Any, *args: Any, **options: Any) -> PlannedBatch:
        """Check a batch of ids; several ranks exchange them. Arguments are those of `_prepared`."""
        planned = self._checked(features, *args, **options)
        if self._rows.exchange is None:
            return planned
        is_ahead = options.get("held", False) and _overlaps(self._rows)
        return self._announced(planned, 0, is_ahead=is_ahead) or planned

    def _checked(self, features: Any, *args: Any, **options: Any) -> PlannedBatch:
        """Prepare what this rank looks up; raise on all ranks if it cannot be looked up."""
        try:
            return self._prepared(features, *args, **options)
        except Exception as error:
            if self._rows.exchange is not None:
                self._rows.exchange.announce(error=error)
            raise

    def _announced(
        self, planned: PlannedBatch, same_as: int, *, is_ahead: bool = False
    ) -> PlannedBatch | None:
        """Exchange the ids of a batch with other ranks; None: all look up the same as before."""
        exchange = self._rows.exchange
        assert exchange is not None
        works: Any = planned.works
        shared = exchange.announce(works, same_as=same_as, is_ahead=is_ahead)
        return None if shared is None else replace(planned, shared=shared)

    def end_batches(self, error: Exception | None = None) -> bool:
        """Tell other ranks of an error, or of the end. Return whether no rank has a batch."""
        exchange = self._rows.exchange
        assert exchange is not None
        return exchange.announce(error=error, ended=error is None) is None

    def _prepared(
        self,
        features: Any,
        device: torch.device | None = None,
        *,
        held: bool = False,
        only: Group | None = None,
    ) -> PlannedBatch:
        """`device`: where the batch is, None: anywhere. If it is `held` until it is looked up, its
        ids are compared then with what they are now. `only`: the one group that it looks up."""
        groups = self._rows.lookup_groups if only is None else [only]
        first = self._rows.lookup_groups[0].planning  # all groups have the same kind of engine
        is_joined = isinstance(features, JoinedCalls)
        if is_joined:
            features.check_offsets()
        batch = parse(features, self._features, first.input_device(device))
        tensors = compared(features)
        if held and not is_joined:
            batch = replace(batch, given=tensors)
        works = tuple(group.planning.work(group, batch) for group in groups)
        if weights_count(self.is_weighted, features):
            for work in works:
                weights_of(features, work.lookups, work.group.layout)  # raises if they do not fit
        copies = first.copies_to_compare(tensors) if held and not is_joined else ()
        return PlannedBatch(features, tensors, versions_of(tensors), batch, works, copies)

    def expect(self, planned: PlannedBatch) -> None:
        """Announce a batch that will be planned after those already expected."""
        rows = self._rows
        if rows.strategy.on_host:
            return
        with rows.lock.writing():
            self._memory.allocate_slots(planned.works)
            with rows.lanes.on("plan"):
                values = planned.batch.values
                if rows.exchange is None:
                    values = self._memory.staged(values)
                for work in planned.works:
                    work.group.planning.expect(work, values)

    def upload(self, planned: PlannedBatch, features: Any) -> PlannedBatch:
        """Return the same batch with `features`, its ids on the device."""
        batch = elsewhere(features, planned.batch)
        for work in planned.works:
            work.arrive(batch)
        tensors = compared(features)
        return replace(
            planned,
            features=features,
            compared=tensors,
            versions=versions_of(tensors),
            batch=batch,
            copies=(),
            served={},
        )

    def part(self, planned: PlannedBatch, features: Any, first: int) -> PlannedBatch:
        """Return the samples of a planned batch from `first` on; `features` are their ids."""
        part = parse(features, self._features, self._rows.device)
        works = [x.group.planning.part(x, planned.batch, part, first) for x in planned.works]
        tensors = compared(features)
        return PlannedBatch(features, tensors, versions_of(tensors), part, tuple(works))

    def arrive(self, planned: PlannedBatch, number: int | None = None) -> None:
        """Let `forward` find a batch; `number` is its position in the pass."""
        self.planned.append(planned)
        self._unseen = planned
        if number is not None:
            for work in planned.works:
                work.group.planning.note_number(work, number)

    def done_with(self, planned: PlannedBatch) -> None:
        """Forget a batch that `forward` will not see again."""
        if planned in self.planned:
            self.planned.remove(planned)

    def forget_planned(self) -> None:
        """Forget all batches. A new list: another thread may be reading the old one."""
        # On a device, the plans of remembered batches keep their buffers.
        self.planned = deque(
            maxlen=max(group.planning.remembered_batches for group in self._rows.groups)
        )

    def find_or_plan(self, features: Any) -> PlannedBatch:
        """Return the plan of a batch that is about to be trained."""
        return self._find(features) or self._plan_now(features)

    def _find(self, features: Any) -> PlannedBatch | None:
        planned = _known(features, self.planned, self._unseen, shared=self._rows.is_shared)
        if planned is not None:
            self._unseen = None
            for work in planned.works:
                work.group.planning.compare(work)
        return planned

    def plan_call(self, call: JoinedCalls, group: Group, *, is_first: bool) -> PlannedBatch:
        """Plan what a module looks up in a group, or let it take the direct path: while batches
        are planned, and the first time, when slots are not allocated."""
        refuse_replicas(self._rows.is_shared or self._rows.is_alone)
        planned = self.prepare(call, self._rows.device, only=group)
        self._start(planned, direct=is_first or self.finish_abandoned() is not None)
        return planned

    def _plan_now(self, features: Any) -> PlannedBatch:
        """Plan ids that were not announced, or read them directly while others are planned."""
        refuse_replicas(self._rows.is_shared or self._rows.is_alone)
        exchange = self._rows.exchange
        planned = self._checked(features, self._rows.device)
        # The model may have built the same ids anew; a loop may have taken several batches.
        every = islice(reversed(self.planned), _RECENT)
        known = next((recent for recent in every if planned.reads_like(recent)), None)
        if exchange is not None:  # ranks agree on it
            same_as = 0 if known is None or known.shared is None else known.shared.serial
            announced = self._announced(planned, same_as)
            known, planned = (None, announced) if announced is not None else (known, planned)
        if known is not None:
            return known
        running = self.finish_abandoned() is not None
        if running and not self._warned and not self.is_learning:
            self._warned = True
            warn(
                "these ids are not the ones hotrow.ahead planned for this batch; ids= gave others, "
                "or they were changed in place since. They are looked up directly, which is right "
                "but slower; let ids= return what the model looks up"
            )
        self._start(planned, direct=running)
        return planned

    def _start(self, planned: PlannedBatch, *, direct: bool) -> None:
        rows = self._rows
        rows.lanes.trains_here()
        with rows.lock.writing():
            works = [work.moving for work in planned.works]
            outside = [work for work in works if direct and work.group.go_direct(work)]
            if len(outside) < len(works):
                self._memory.allocate_slots(planned.works)
        if rows.exchange is not None and rows.device.type != "cpu":
            for shared in planned.works:
                shared.arrive(planned.batch)
        at_once([work for work in works if work not in outside], rows.lanes)

    def fetch(self, planned: PlannedBatch, *, waits: bool = True) -> None:
        """Get the vectors of a batch from the ranks that own its rows; not `waits`: begin to."""
        rows, exchange = self._rows, self._rows.exchange
        if planned.shared is not None and exchange is not None and not capturing():
            exchange.fetch(planned.shared, rows.version, rows.version - rows.steps, waits=waits)

    def settle_grads(self) -> None:
        """Take part where other ranks exchange gradients of a batch that has none here."""
        if self._rows.exchange is not None:
            self._rows.exchange.settle_grads()

    def end_backward(self) -> None:
        """Do what the end of a backward pass does that reaches no row of this rank."""
        if self._rows.exchange is not None:
            self._step.end_of_backward()

    # -- memory for plans --------------------------------------------------------------

    def reserve(self, batch_size: int, lookups: Mapping[str, int] | None = None) -> None:
        self._memory.reserve(self._features, batch_size, lookups)

    def reserve_like(self, features: Any) -> None:
        works = [work.moving for work in self.prepare(features).works]
        with self._rows.lock.writing():
            self._memory.make_room(works)
        for work in works:
            work.group.expected_rows = work.count_distinct()

    # -- passes of hotrow.ahead --------------------------------------------------------

    def enter(self, iterator: Any) -> None:
        """Begin the pass of an iterator; raise if another one is running."""
        running = self.finish_abandoned()
        if running is iterator:  # its close() was interrupted
            self.leave(iterator)
        elif running is not None:
            raise RuntimeError(
                "another hotrow.ahead iterator is running on this collection; two would move "
                "each other's rows. For validation inside its loop call the model directly, "
                "without ahead; else finish the first one's loop, or call its close()"
            )
        refuse_replicas(self._rows.is_shared or self._rows.is_alone)
        self.thread.iterate()
        for group in self._rows.every_group:
            group.planning.take_changed()  # of a pass that ended with an error
        self.iterator = weakref.ref(iterator)

    def leave(self, iterator: Any, *, waits: bool = True) -> None:
        """End the pass of an iterator, unless another one has entered since. If the caller must
        not wait for the lock, the next call that trains ends it."""
        entered = self.iterator
        if entered is None or entered() is not iterator:
            return
        if waits:
            self._end_pass(entered)
        else:
            self.iterator = lambda: None

    def finish_abandoned(self) -> Any:
        """End the pass of an iterator that is gone; return the one that is running, if any.

        A garbage collection takes an iterator away without `leave`. Until its pass is ended, rows
        are found as while it was running.
        """
        entered = self.iterator
        if entered is None:
            return None
        running = entered()
        if running is None and not capturing():
            self._end_pass(entered)
            try:
                self.refuse_changed_ids(waits=True)
            except RuntimeError as error:  # about an earlier batch, not about this call
                warn(str(error))
        return running

    def _end_pass(self, entered: Callable[[], Any]) -> None:
        """Move the rows of planned batches, and forget batches that were only expected."""
        rows = self._rows
        with rows.lock.writing():
            if self.iterator is not entered:
                return  # another thread was first
            self.thread.end_iteration()
            self.forget_planned()
            self.iterator = None
            if not sys.is_finalizing():  # else no step follows, and threads that move rows are gone
                if rows.exchange is not None:
                    rows.exchange.forget_ahead()
                rows.lanes.join()
                for group in rows.groups:
                    group.finish_planned()
                rows.lanes.join()
            with rows.lanes.on("plan"):
                for group in rows.groups:
                    group.forget_window()
        # Freed memory of a collection may be reused: these launches must come first.
        rows.lanes.join()

    def refuse_changed_ids(self, *, waits: bool = False) -> None:
        """Raise if a device has found ids, so far, that differ from the planned ones."""
        if waits:
            self._rows.lanes.mark("train").wait()
        numbers = [group.planning.take_changed() for group in self._rows.every_group]
        number = min((n for n in numbers if n is not None), default=None)
        if number is not None:
            raise RuntimeError(f"batch {number:,} of this pass, counted from 0: {_CHANGED}")

    def refuse_if_running(self, what: str) -> None:
        """Raise unless training stands still: no iterator runs, and no update is pending."""
        running = self.finish_abandoned()
        self.thread.check(f"calls {what}" if what.endswith("()") else f"is {what}")
        if running is not None:
            raise RuntimeError(
                f"{what} while hotrow.ahead is running: rows are on their way to where batches "
                "were planned to find them. Finish its loop, or call its close()"
            )
        if self._step.is_open:
            raise RuntimeError(f"{what} inside of accumulate(), whose rows are not updated yet")

    def check_thread(self, what: str) -> None:
        """Raise if another thread trains; `what` says what the current one is about to do."""
        self.finish_abandoned()
        self.thread.check(what)

    @property
    def updates_at_once(self) -> bool:
        """Whether gradients reach rows unseen: nothing scales or checks them."""
        return self._step.at_once

    def end_captured(self, boundaries: Sequence[tuple[Work, GraphBoundary]]) -> None:
        """Exchange the gradients that a graph has left for a batch, as `backward()` does."""
        self._step.end_captured(boundaries)

    # -- stages ------------------------------------------------------------------------

    def move_in(self, stages: tuple[Stage, ...]) -> None:
        """From the next batch on, move rows in other stages that hold the same batches' rows."""
        before = self._rows.strategy
        strategy = replace(before, stages=stages, overlapped=True)
        if strategy.hold != before.hold:
            raise ValueError(
                f"rows of {strategy.hold} would have to stay in these stages; the slots were "
                f"planned for {before.hold}"
            )
        self._rows.strategy = strategy

    def useful_depth(self) -> int:
        """Return how many batches ahead are worth knowing, within the budget's bytes for ids. On
        several ranks all have to know equally many: what they agreed on with the newest batch."""
        exchange = self._rows.exchange
        return self._rows.useful_depth() if exchange is None else exchange.agreed_depth
