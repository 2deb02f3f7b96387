"""How what modules look up follows from a batch: learned from one forward pass, then checked.

Each id tensor that a module was called with is searched for among the tensors of the batch: whole,
a column, or columns side by side; as a view or by value, perhaps of another type, perhaps shifted
by a constant. Knows tensors and calls; neither modules nor rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hotrow.inputs.calls import Call, JoinedCalls
from hotrow.inputs.tree import all_tensors_in

_MOST_COMPARED = 1 << 24  # elements, for columns side by side
_MOST_LESS = 1  # columns of a sequence without a position
_MOST_COLUMNS = 256  # that are searched for one by one


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same memory, element by element. Both must be alive."""
    if one.data_ptr() != other.data_ptr() or one.dtype != other.dtype:
        return False
    if one.shape == other.shape and one.stride() == other.stride():
        return True
    is_flat = one.is_contiguous() and other.is_contiguous()
    return is_flat and one.numel() == other.numel()


@dataclass(frozen=True)
class Selection:
    """Where ids are in a batch: `tensor` is the place of a tensor, of which columns are taken."""

    tensor: int
    axis: int = 0  # 0: the whole tensor
    first: int = 0
    last: int | None = None  # counted from the end; None: one column, which is no axis any more
    shift: int = 0
    least: int | None = None  # smaller ones become this: padding that is written as -1

    def of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return the ids of a batch with these tensors; None if it has no such tensor."""
        if self.tensor >= len(tensors):
            return None
        ids = tensors[self.tensor]
        if self.axis:
            if self.axis >= ids.dim() or self.first >= ids.shape[self.axis]:
                return None
            if self.last is None:
                ids = ids.select(self.axis, self.first)
            else:
                length = ids.shape[self.axis] - self.last - self.first
                ids = ids.narrow(self.axis, self.first, max(0, length))
        if ids.dtype not in (torch.int64, torch.int32):
            ids = ids.long()
        if self.least is not None:
            ids = ids.clamp(min=self.least)
        return ids + self.shift if self.shift else ids


@dataclass(frozen=True)
class Columns:
    """Ids of which each column is a selection of its own, such as fields with a constant each."""

    columns: tuple[Selection, ...]

    def of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        columns = [column.of(tensors) for column in self.columns]
        present = [column.reshape(-1) for column in columns if column is not None]
        if len(present) < len(columns) or len({len(column) for column in present}) > 1:
            return None
        return torch.stack(present, 1)


@dataclass(frozen=True)
class Positions:
    """The numbers of the columns of a tensor, for each sample: what position tables look up."""

    tensor: int
    first: int
    by_sample: bool  # for each sample; else once
    less: int = 0  # columns at the end without one

    def of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        if self.tensor >= len(tensors) or tensors[self.tensor].dim() < 2:
            return None
        size, width = tensors[self.tensor].shape[:2]
        columns = torch.arange(width - self.less, device=tensors[self.tensor].device) + self.first
        return columns.expand(size, len(columns)) if self.by_sample else columns


@dataclass(frozen=True)
class Fixed:
    """Ids that are the same in every batch, such as all rows of a table."""

    ids: Tensor

    def of(self, tensors: Sequence[Tensor]) -> Tensor | None:
        # Batches are read where they are, and uploaded later.
        return self.ids.to(tensors[0].device) if tensors else self.ids


@dataclass(frozen=True)
class Given:
    """Ids, or (ids, offsets), that a function of the user returns."""

    function: Callable[[Any], Any]


@dataclass(frozen=True)
class CallSource:
    """Where the ids and the offsets of a call come from."""

    call: Call  # one of its kind, without its tensors' meaning
    ids: Any
    offsets: Any = None

    def of(self, batch: Any, tensors: Sequence[Tensor]) -> Call | None:
        """Return the call that a batch with these tensors will lead to; None if the batch is
        another than before."""
        if isinstance(self.ids, Given):
            given = self.ids.function(batch)
            ids, offsets = given if isinstance(given, tuple | list) else (given, None)
        else:
            ids = self.ids.of(tensors)
            offsets = None if self.offsets is None else self.offsets.of(tensors)
        if ids is None or (offsets is None) != (self.call.offsets is None):
            return None
        if self.call.by_row and ids.dim() != 2:
            ids = ids.flatten(1) if ids.dim() > 1 else ids.unsqueeze(1)  # perhaps of no sample
        return replace(self.call, ids=ids, offsets=offsets)


class IdSources:
    """How the calls of a forward pass follow from its batch."""

    def __init__(self, functions: Mapping[str, Callable[[Any], Any]]) -> None:
        """`functions` return what a table is looked up with, by the table's name."""
        self._functions = dict(functions)
        self._calls: list[Call] = []
        self._candidates: list[list[tuple[Any, Any]]] | None = None  # of each call
        self.unknown: list[str] = []  # tables whose ids do not follow from the batch
        self._constants: dict[Any, Tensor] = {}  # of joined calls

    @property
    def are_certain(self) -> bool:
        """Whether there is one candidate for each call at most."""
        return self._candidates is not None and all(len(x) < 2 for x in self._candidates)

    @property
    def has_functions(self) -> bool:
        return bool(self._functions)

    @property
    def are_known(self) -> bool:
        return self._candidates is not None

    def learn(self, batch: Any, calls: Sequence[Call]) -> None:
        """Find what the calls of a forward pass were in their batch. Waits for a device."""
        tensors = all_tensors_in(batch)
        if self._candidates is None or [x.form for x in calls] != [x.form for x in self._calls]:
            self._candidates = [list(self._sources_of(call, tensors)) for call in calls]
        else:  # a second batch: which of the candidates hold there, too
            pairs = zip(calls, self._candidates, strict=True)
            self._candidates = [
                [x for x in candidates if _holds(x, call, batch, tensors)]
                for call, candidates in pairs
            ]
        self._calls = list(calls)
        unknown = [x.table for x, found in zip(calls, self._candidates, strict=True) if not found]
        self.unknown = list(dict.fromkeys(unknown))

    def _sources_of(self, call: Call, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, Any]]:
        if call.is_whole:
            yield Fixed(call.ids), None
            return
        if call.table in self._functions:
            yield Given(self._functions[call.table]), None
            return
        found = list(_found(call.ids, tensors))
        if call.offsets is None:
            yield from ((ids, None) for ids in found)
            return
        for offsets in _found(call.offsets, tensors):
            yield from ((ids, offsets) for ids in found)
            return

    def joined(self, batch: Any) -> JoinedCalls:
        """Return the calls that the forward pass of a batch will make, as far as they are known."""
        assert self._candidates is not None
        pairs = zip(self._calls, self._candidates, strict=True)
        sources = [CallSource(call, *found[0]) for call, found in pairs if found]
        tensors = all_tensors_in(batch)
        calls = [call for source in sources if (call := source.of(batch, tensors)) is not None]
        return JoinedCalls(calls, _whole(sources, calls, tensors), self._constants)


def _holds(candidate: tuple[Any, Any], call: Call, batch: Any, tensors: Sequence[Tensor]) -> bool:
    found = CallSource(call, *candidate).of(batch, tensors)
    if found is None or found.ids.numel() != call.ids.numel():
        return False
    pairs = zip(found.tensors, call.tensors, strict=True)
    return all(torch.equal(x.reshape(-1).long(), y.reshape(-1).long()) for x, y in pairs)


def _whole(
    sources: Sequence[CallSource], calls: Sequence[Call], tensors: Sequence[Tensor]
) -> Tensor | None:
    """Return the tensor whose columns are the ids of all calls, in their order; None: there is
    none."""
    if not calls or len(calls) < len(sources) or not all(call.is_single for call in calls):
        return None
    columns = [source.ids for source in sources]
    if not all(
        isinstance(x, Selection)
        and x.axis == 1
        and not x.shift
        and x.last in (None, len(columns) - x.first - 1)
        for x in columns
    ):
        return None
    tensor = tensors[columns[0].tensor]
    is_all = [x.first for x in columns] == list(range(tensor.shape[1])) and tensor.dim() == 2
    is_one = len({x.tensor for x in columns}) == 1
    return tensor if is_all and is_one and tensor.dtype == torch.int64 else None


def _found(ids: Tensor, tensors: Sequence[Tensor]) -> Iterator[Any]:
    """Yield where ids are among tensors: as a view, else by value, else shifted by a constant."""
    usable = [
        (place, tensor.to(ids.device))
        for place, tensor in enumerate(tensors)
        if tensor.layout == torch.strided
        and tensor.dim()
        and tensor.numel()
        and not tensor.is_complex()
    ]
    by_value = [x for place, tensor in usable for x in _by_value(ids, place, tensor)]
    views = [x for x in by_value if _is_view(x, ids, tensors)]
    if views or by_value:
        yield from views[:1] or by_value
        return
    if ids.numel() == 0:
        return
    yield from (x for place, tensor in usable for x in _positions(ids, place, tensor))
    raised = [
        replace(x, least=0)
        for place, tensor in usable
        if bool((tensor < 0).any())
        for x in _by_value(ids, place, tensor.clamp(min=0))
    ]
    if raised:
        yield from raised
        return
    shifted = [x for place, tensor in usable for x in _by_value(ids, place, tensor, may_shift=True)]
    if not shifted and ids.dim() == 2 and 1 < ids.shape[1] <= _MOST_COLUMNS:
        yield from _column_by_column(ids, tensors)
    yield from shifted


def _column_by_column(ids: Tensor, tensors: Sequence[Tensor]) -> Iterator[Columns]:
    """Yield the selections that the columns of ids are, if each of them is one."""
    columns = [
        [x for x in _found(ids[:, k], tensors) if isinstance(x, Selection)]
        for k in range(ids.shape[1])
    ]
    if all(columns):
        yield Columns(tuple([found[0] for found in columns]))


def _is_view(selection: Selection, ids: Tensor, tensors: Sequence[Tensor]) -> bool:
    found = selection.of(tensors)
    return found is not None and same_memory(found, ids)


def _by_value(
    ids: Tensor, place: int, tensor: Tensor, *, may_shift: bool = False
) -> Iterator[Selection]:
    """Yield the selections of a tensor that have the values of ids."""
    wanted, values = ids.reshape(-1).long(), tensor.detach()
    if values.is_floating_point() and not bool(values.isfinite().all()):
        values = values.nan_to_num(-1.0)
    values = values.long()
    if not wanted.numel():
        if not values.numel():
            yield Selection(place)
        return

    def shift_of(columns: Tensor) -> Tensor:
        """Return what ids are more than each column, [columns]; columns are [n, columns]."""
        return wanted[0] - columns[0]

    def matches(columns: Tensor) -> Tensor:
        shift = shift_of(columns) if may_shift else 0
        return (columns + shift == wanted.unsqueeze(1)).all(0)

    if values.numel() == wanted.numel():
        columns = values.reshape(-1, 1)
        if bool(matches(columns)):
            yield Selection(place, shift=int(shift_of(columns)) if may_shift else 0)
            return
    for axis in range(1, values.dim()):
        columns = values.movedim(axis, -1).flatten(0, -2)
        if len(columns) == wanted.numel():
            for column in matches(columns).nonzero().flatten().tolist():
                shift = int(shift_of(columns)[column]) if may_shift else 0
                yield Selection(place, axis, column, shift=shift)
    if values.dim() < 2:
        return
    size, width = len(values), values.shape[1]
    part, rest = divmod(wanted.numel() * width, values.numel())
    if rest or not 0 < part < width or values.numel() * part > _MOST_COMPARED:
        return
    windows = values.unfold(1, part, 1).movedim(-1, 2)  # [size, windows, part, ...]
    columns = windows.movedim(1, -1).flatten(0, -2)
    assert len(columns) == wanted.numel() or size == 0
    for first in matches(columns).nonzero().flatten().tolist():
        shift = int(shift_of(columns)[first]) if may_shift else 0
        if part > 1:
            yield Selection(place, 1, first, width - first - part, shift)


def _positions(ids: Tensor, place: int, tensor: Tensor) -> Iterator[Positions]:
    if tensor.dim() < 2 or ids.dim() > 2 or ids.numel() < 2:
        return
    size, width = tensor.shape[:2]
    first, count = int(ids.reshape(-1)[0]), ids.shape[-1]
    less = width - count
    if not 0 <= less <= _MOST_LESS:  # an input and a target share a sequence, shifted by one
        return
    columns = torch.arange(count, device=ids.device) + first
    if ids.numel() == count and torch.equal(ids.reshape(-1).long(), columns):
        yield Positions(place, first, by_sample=False, less=less)
    elif ids.shape == (size, count) and torch.equal(ids.long(), columns.expand(size, count)):
        yield Positions(place, first, by_sample=True, less=less)
