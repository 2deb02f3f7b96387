"""Ids that single modules look up, joined to one batch of the collection that serves them all.

Knows tensors and tables' names; neither modules nor rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hotrow.inputs.batch import Batch
from hotrow.support.streams import capturing

_MOST_CONSTANTS = 16  # tensors that batches of the same shapes share


def _filled(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers on a device, by launches alone: a graph cannot copy what the host had in
    ordinary memory."""
    return torch.cat([torch.full((1,), number, device=device) for number in numbers])


@dataclass(frozen=True)
class Call:
    """What a module is called with: ids of any shape, and which of them form a bag.

    Without `offsets` every id is a bag of its own, or every row of a 2-D tensor if `by_row`.
    """

    table: str
    ids: Tensor
    offsets: Tensor | None = None  # where bags begin
    has_end: bool = False  # the last offset is the number of ids
    by_row: bool = False
    is_whole: bool = False  # the ids are all rows of the table
    # For captured steps: [1] int64 on the device, how many ids there are before padding.
    count: Tensor | None = None

    @property
    def num_bags(self) -> int:
        if self.offsets is not None:
            return len(self.offsets) - self.has_end
        return len(self.ids) if self.by_row else self.ids.numel()

    @property
    def is_single(self) -> bool:
        """Whether every bag has one id."""
        return self.offsets is None and self.num_bags == self.ids.numel()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.ids,) if self.offsets is None else (self.ids, self.offsets)

    @property
    def form(self) -> tuple[object, ...]:
        """What distinguishes calls beside their tensors."""
        return self.table, self.offsets is None, self.has_end, self.by_row, self.is_whole

    def bag_starts(self) -> Tensor:
        """Return where each bag begins, without the end."""
        if self.offsets is not None:
            return self.offsets[: self.num_bags].long()
        width = self.ids.shape[1] if self.by_row else 1
        return torch.arange(self.num_bags, device=self.ids.device) * width

    def check_offsets(self) -> None:
        """Raise if offsets are not those of bags; waits for a device."""
        if self.offsets is not None and self.has_end and not len(self.offsets):
            raise ValueError(
                f"module {self.table!r}: with include_last_offset there is at least one offset"
            )
        if self.offsets is None or not len(self.offsets):
            return
        edges = torch.cat([self.offsets.long(), self.offsets.new_tensor([self.ids.numel()])])
        first, *lengths = torch.cat([edges[:1], edges.diff()]).tolist()
        if first != 0:
            raise ValueError(f"module {self.table!r}: offsets must start at 0, not {first}")
        if min(lengths) < 0 or (self.has_end and lengths[-1]):
            raise ValueError(
                f"module {self.table!r}: offsets must not fall, and must not pass the number of "
                f"ids, {self.ids.numel()}" + (", with which they end" if self.has_end else "")
            )


class JoinedCalls:
    """The calls of modules in one forward pass, as one batch.

    If every table is called once with as many ids, the batch is dense. Otherwise it is jagged:
    tables in their order, and the calls of each in theirs.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        whole: Tensor | None = None,
        constants: dict[Any, Tensor] | None = None,
    ) -> None:
        """`whole`: a tensor whose columns are the ids of the calls, in their order. `constants`:
        what depends on shapes alone; batches share it."""
        self.calls, self._whole = tuple(calls), whole
        self._constants = {} if constants is None else constants
        self._batch: Batch | None = None
        self._offsets: dict[int, Tensor] = {}  # of calls on a CPU, as they were joined

    def again(self) -> JoinedCalls:
        """Return the same calls, to be joined as they are now."""
        return JoinedCalls(self.calls, self._whole, self._constants)

    def padded(self, memory: Mapping[int, tuple[Tensor, Tensor]]) -> JoinedCalls:
        """Return the same calls with padding behind some ids; `memory` has the longer tensor, and
        how many ids there are, by the address of ids."""
        calls = []
        for call in self.calls:
            ids, count = memory.get(call.ids.data_ptr(), (call.ids, None))
            calls.append(call if call.offsets is None else replace(call, ids=ids, count=count))
        is_padded = any(call.count is not None for call in calls)
        return JoinedCalls(calls, None, self._constants) if is_padded else self

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """What a captured step reads of other batches' memory, and must keep alive."""
        return tuple(self._constants.values())

    @cached_property
    def num_ids(self) -> int:
        return sum(call.ids.numel() for call in self.calls)

    @cached_property
    def sizes(self) -> set[int]:
        """The lengths of all calls' inputs; that of the batch is among them."""
        return {
            call.num_bags if call.offsets is not None else len(call.ids)
            for call in self.calls
            if call.ids.dim() and not call.is_whole
        }

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of all calls."""
        return tuple(tensor for call in self.calls for tensor in call.tensors)

    def check_offsets(self) -> None:
        for call in self.calls:
            call.check_offsets()

    def as_batch(self, columns: tuple[str, ...]) -> Batch:
        """Return the batch, whose features are named like their tables. Its memory is its own, but
        for `whole` on a GPU."""
        if self._batch is None:
            self._batch = self._dense(columns) if self.is_dense(columns) else self._jagged(columns)
            for number, call in enumerate(self.calls):
                if call.offsets is not None and call.offsets.device.type == "cpu":
                    self._offsets[number] = call.offsets.clone()
        return self._batch

    def is_dense(self, columns: tuple[str, ...]) -> bool:
        tables = [call.table for call in self.calls]
        if sorted(tables) != sorted(columns) or not all(call.is_single for call in self.calls):
            return False
        return len({call.num_bags for call in self.calls}) == 1

    def _dense(self, columns: tuple[str, ...]) -> Batch:
        is_ordered = [call.table for call in self.calls] == list(columns)
        values = self._whole if is_ordered else None
        if values is None:
            by_table = {call.table: call.ids.reshape(-1) for call in self.calls}
            values = torch.stack([by_table[name] for name in columns], 1)
        elif values.device.type == "cpu":
            # A copy: what the user changes later is noticed by comparing.
            values = torch.empty_like(values, pin_memory=values.is_pinned()).copy_(values)
        return Batch(values.long(), None, columns, len(values))

    def _jagged(self, columns: tuple[str, ...]) -> Batch:
        by_table = [[self.calls[k] for k in self.by_table.get(name, ())] for name in columns]
        ordered = [call for calls in by_table for call in calls]
        ends, values = [0], torch.cat([call.ids.reshape(-1) for call in ordered]).long()
        for calls in by_table:
            ends.append(ends[-1] + sum(call.ids.numel() for call in calls))
        if any(call.count is not None for call in ordered):
            values, offsets = self._packed(ordered, values)
        else:
            offsets = self._joined_offsets(ordered)
        return Batch(
            values,
            offsets,
            columns,
            1,
            tuple(ends),
            calls=tuple(tuple(call.num_bags for call in calls) for calls in by_table),
            varies=any(call.offsets is not None for call in ordered),
        )

    def _joined_offsets(self, ordered: Sequence[Call]) -> Tensor:
        """Return where each bag begins among the ids of all calls, and the end."""

        def join() -> Tensor:
            starts, first = [], 0
            for call in ordered:
                starts.append(call.bag_starts() + first)
                first += call.ids.numel()
            return torch.cat([*starts, torch.full((1,), first, device=starts[0].device)])

        if any(call.offsets is not None for call in ordered):
            return join()
        shapes = tuple((call.num_bags, call.ids.numel()) for call in ordered)
        return self._constant((ordered[0].ids.device, shapes), join)

    def _packed(self, ordered: Sequence[Call], values: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids without the padding between calls, which comes last, and the offsets of bags.
        Launches alone, equal for all batches of a shape."""
        sizes = [call.ids.numel() for call in ordered]
        firsts = [sum(sizes[:k]) for k in range(len(sizes))]
        both = self._constant(
            (values.device, "places", tuple(sizes)),
            lambda: torch.stack([_filled(x, values.device) for x in (sizes, firsts)]),
        )
        pairs = list(zip(ordered, both[0].split(1), strict=True))
        counts = torch.cat([size if call.count is None else call.count for call, size in pairs])
        ends = counts.cumsum(0)
        starts = ends - counts
        bags = [call.bag_starts() + starts[k] for k, call in enumerate(ordered)]
        place = torch.arange(len(values), device=values.device)
        owner = torch.searchsorted(ends, place, right=True).clamp_(max=len(ordered) - 1)
        source = place + (both[1] - starts).index_select(0, owner)
        packed = values.index_select(0, source.clamp_(max=len(values) - 1))
        return packed, torch.cat([*bags, ends[-1:]])

    def _constant(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        """Return what depends on shapes alone. What is made in a graph has values in its replays
        alone."""
        known = self._constants.get(key)
        if known is None:
            known = make()
            if not capturing():
                if len(self._constants) >= _MOST_CONSTANTS:
                    self._constants.clear()
                self._constants[key] = known
        return known

    def ids_of(self, number: int, columns: tuple[str, ...]) -> Tensor:
        """Return the ids of a call as they were joined, [ids]."""
        batch, call = self.as_batch(columns), self.calls[number]
        place = columns.index(call.table)
        if batch.offsets is None:
            return batch.values[:, place]
        before = [x for x in self.calls[:number] if x.table == call.table]
        first = batch.ends[place] + sum(x.ids.numel() for x in before)
        return batch.values[first : first + call.ids.numel()]

    def is_as_joined(self, columns: tuple[str, ...]) -> bool:
        """Whether the tensors of all calls still have the ids that were joined; reads them."""
        return all(self.equals(number, call, columns) for number, call in enumerate(self.calls))

    def equals(self, number: int, call: Call, columns: tuple[str, ...]) -> bool:
        """Whether a call has the ids, and the offsets, that one of these had when it was joined;
        reads them. Offsets of a GPU are not compared."""
        ids = self.ids_of(number, columns)
        if not torch.equal(call.ids.reshape(-1).to(ids), ids):
            return False
        offsets = self._offsets.get(number)
        if offsets is None or call.offsets is None:
            return True
        return torch.equal(call.offsets.to(offsets), offsets)

    @cached_property
    def by_table(self) -> Mapping[str, list[int]]:
        """The numbers of the calls of each table."""
        numbers: dict[str, list[int]] = {}
        for number, call in enumerate(self.calls):
            numbers.setdefault(call.table, []).append(number)
        return numbers

    def in_order(self, columns: Sequence[str]) -> list[int]:
        """Return the numbers of the calls in the order in which they are looked up; `columns` are
        the tables of one width."""
        return [number for name in columns for number in self.by_table.get(name, ())]
