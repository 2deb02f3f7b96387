"""Lookups of single modules: what each of them is called with, table by table.

Several modules may share a collection. Where `hotrow.ahead` has planned what all of them look up,
the first call looks up everything at once, and each module takes its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotrow.embedding.id_sources import same_memory
from hotrow.embedding.pipeline import Pipeline, PlannedBatch
from hotrow.embedding.row_groups import Group, RowGroups
from hotrow.embedding.step import Lookup, PendingStep
from hotrow.inputs.batch import lookups_of
from hotrow.inputs.calls import Call, JoinedCalls
from hotrow.support.late_flag import LateFlag
from hotrow.support.messages import warn
from hotrow.support.streams import capturing

_MOST_RECORDED = 1024  # calls
_CHECKED_NOW = 16  # batches whose computed ids a GPU compares at once; later ones without a wait


class CallLookups:
    """Looks up what modules are called with; a part of their collection."""

    def __init__(
        self,
        rows: RowGroups,
        step: PendingStep,
        pipeline: Pipeline,
        features: tuple[str, ...],
        leaves: Callable[[Group], Sequence[Tensor]],
    ) -> None:
        """`leaves` are what makes autograd call back for the rows of a group."""
        self._rows, self._step, self._pipeline = rows, step, pipeline
        self._columns, self._leaves = features, leaves
        self._recorded: list[Call] = []  # calls of the first forward pass
        self._records, self._recorded_in = True, 0
        self._changed: LateFlag | None = None  # allocated with the first comparison
        self._checks, self._warned = 0, False

    def begin_pass(self) -> None:
        """A pass of `hotrow.ahead` begins, perhaps over batches of another kind."""
        self._checks = 0

    # -- recording ---------------------------------------------------------------------

    def record(self) -> None:
        """Record the calls of the next forward pass."""
        self._recorded, self._records, self._recorded_in = [], True, self._passes()

    def take_recorded(self) -> list[Call]:
        """Return the calls that were recorded, and record no more."""
        calls, self._recorded, self._records = self._recorded, [], False
        return calls

    def _note(self, call: Call) -> bool:
        """Record a call; return whether it belongs to the first forward pass."""
        if self._records and self._passes() > self._recorded_in:  # gradients have come since
            self._records = False
            if self._rows.can_resize:
                self._pipeline.reserve_like(JoinedCalls(self._recorded))
        if self._records and len(self._recorded) < _MOST_RECORDED:
            self._recorded.append(call)
        return self._records

    def _passes(self) -> int:
        """Return how often gradients have come; on several ranks to any of them."""
        exchange = self._rows.exchange
        if exchange is None:
            return self._step.passes
        exchange.settle_grads()  # the newest ones
        return exchange.passes

    @property
    def moment(self) -> tuple[int, int]:
        """What changes with every backward pass, and with every update of rows."""
        return self._step.passes, self._rows.version

    # -- lookups -----------------------------------------------------------------------

    def read(self, call: Call) -> Tensor:
        """Return the vectors of bags as of one finished step; change no map, hold or counter."""
        thread = self._pipeline.thread
        call.check_offsets()
        turn = self._rows.turn(call.ids.numel(), beside_training=thread.is_elsewhere)
        with turn, torch.no_grad():
            batch = JoinedCalls([call]).as_batch(self._columns)
            return self._rows.read_table(
                call.table, lambda x: lookups_of(batch, x.layout), aside=thread.is_elsewhere
            )

    def look_up(self, call: Call) -> Tensor:
        """Return the vectors of bags, whose rows the backward pass will train."""
        self._pipeline.finish_abandoned()
        self._pipeline.thread.look_up()
        is_first = self._note(call)
        vectors = self._planned(call)
        if vectors is None:
            vectors = self._alone(call, is_first=is_first)  # raises if ids are wrong
            self._warn_of_others(call)
        return vectors

    def _alone(self, call: Call, *, is_first: bool) -> Tensor:
        """Look up what no plan has."""
        if capturing():
            raise RuntimeError(f"the ids of module {call.table!r} are not those of a planned batch")
        joined = JoinedCalls([call])
        group = self._rows.lookup_groups[self._rows.place_of(call.table)]
        planned = self._pipeline.plan_call(joined, group, is_first=is_first)
        return self._parts(planned, joined)[0]

    def _parts(self, planned: PlannedBatch, joined: JoinedCalls) -> dict[int, Tensor]:
        """Look up all calls of a batch; return vectors by the number of a call."""
        parts: dict[int, Tensor] = {}
        self._pipeline.fetch(planned)
        for work in planned.works:
            numbers = joined.in_order(tuple(x.key for x in work.group.layout.features))
            if not numbers:
                continue
            _, *vectors = Lookup.apply(None, work, self._step, *self._leaves(work.group))  # type: ignore[no-untyped-call]
            parts.update(zip(numbers, vectors, strict=True))
        return parts

    # -- planned batches ---------------------------------------------------------------

    def _planned(self, call: Call) -> Tensor | None:
        """Return vectors by the plan of a batch; None if no plan has this call."""
        found = self._find(call)
        if found is None:
            return None
        planned, number = found
        now, served = (self._step.passes, self._rows.version, capturing()), planned.served
        if (
            number not in served
            or served["pass"] != now
            or any(leaf.requires_grad != trained for leaf, trained in served[call.table])
        ):
            served.clear()
            served.update(self._parts(planned, self._checked(planned)))
            served["pass"] = now
            for work in planned.works:  # what is frozen may change before the other modules look up
                leaves = [(leaf, leaf.requires_grad) for leaf in self._leaves(work.group)]
                for place, table in enumerate(work.group.layout.tables):
                    served[table.name] = leaves[place : place + 1]
        vectors: Tensor = served.pop(number)
        return vectors

    def _find(self, call: Call) -> tuple[PlannedBatch, int] | None:
        """Return the planned batch that expects a call, and the call's number in it."""
        newest = True
        for planned in reversed(self._pipeline.planned):
            joined = planned.features
            if not isinstance(joined, JoinedCalls):
                continue
            numbers = joined.by_table.get(call.table, [])
            # Those that were not taken yet first: a module may be called with equal ids twice.
            numbers = sorted(numbers, key=lambda k: k not in planned.served)
            # A view of the batch is certain; a GPU only assumes that computed ids are the same.
            for by_content in (False, True) if newest else (False,):
                for number in numbers:
                    if self._is_same(call, joined, number, by_content=by_content):
                        return planned, number
            newest = False
        return None

    def _is_same(self, call: Call, joined: JoinedCalls, number: int, *, by_content: bool) -> bool:
        """Whether a call is the one that was expected."""
        expected = joined.calls[number]
        if call.form != expected.form or call.num_bags != expected.num_bags:
            return False
        pairs = list(zip(call.tensors, expected.tensors, strict=True))
        if any(given.numel() != tensor.numel() for given, tensor in pairs):
            return False
        is_same = all(same_memory(given, tensor) for given, tensor in pairs)
        if not is_same and (not by_content or capturing()):
            return False  # a graph would compare with memory that is free when it is replayed
        if call.ids.device.type == "cpu" and expected.count is None:
            return joined.equals(number, call, self._columns)
        return is_same or self._is_equal(pairs)

    def _is_equal(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Compare tensors on a GPU: at once in the first batches, later without a wait."""
        flat = [(given.reshape(-1), tensor.reshape(-1)) for given, tensor in pairs]
        differs = torch.stack([(given != tensor).any() for given, tensor in flat]).any()
        self._checks += 1
        if self._checks <= _CHECKED_NOW and not capturing():
            return not bool(differs)
        self._note_changed(differs)
        return True

    def _note_changed(self, differs: Tensor) -> None:
        if self._changed is None:
            self._changed = LateFlag(self._rows.device)
        self._changed.add(differs)

    def _checked(self, planned: PlannedBatch) -> JoinedCalls:
        """Let a GPU compare ids with those that were planned; return the calls of a batch."""
        joined: JoinedCalls = planned.features
        works: Sequence[Any] = planned.works
        is_fixed = capturing() or any(work.is_fixed for work in works)
        if not is_fixed and self._rows.device.type != "cuda":
            return joined
        again = joined.again().as_batch(self._columns)
        if again.offsets is None:
            for work in works:
                work.batch = replace(work.batch, given=(again.values,))
                work.group.planning.compare(work)
        elif is_fixed:
            # What was joined before a capture is at addresses of its own batch: a graph joins ids
            # where they land, and compares them with the plan in its buffers.
            again = replace(again, given=(again.values, again.edges))
            for work in works:
                work.arrive(again)
                work.group.planning.compare(work)
        else:
            then = planned.batch
            self._note_changed(torch.ne(again.values, then.values).any())
            if again.offsets is not None and then.offsets is not None:
                self._note_changed(torch.ne(again.offsets, then.offsets).any())
        return joined

    def refuse_changed(self, *, waits: bool = False) -> None:
        """Raise if a GPU has found ids, so far, that differ from those that were planned."""
        if self._changed is not None and self._changed.is_set(waits=waits):
            raise RuntimeError(
                "the ids of a module in one of the last batches were not those that hotrow.ahead "
                "planned, so its step looked up and updated other rows. Ids that a model computes "
                "in another way from batch to batch, such as random negatives, belong into the "
                "batch; or say how: hotrow.ahead(loader, model, ids={module: function})"
            )

    def _warn_of_others(self, call: Call) -> None:
        """Warn once of a call that was planned with other ids."""
        expected = [getattr(x.features, "calls", ()) for x in self._pipeline.planned]
        is_expected = any(other.form == call.form for calls in expected for other in calls)
        if is_expected and not self._warned:
            self._warned = True
            warn(
                f"module {call.table!r} was called with other ids than hotrow.ahead has planned. "
                "They are looked up directly, which is right but slower. Say what it will look up: "
                f"hotrow.ahead(loader, model, ids={{{call.table!r}: lambda batch: ...}})"
            )
