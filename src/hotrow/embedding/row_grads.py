"""Gradients of rows between a backward pass and an update: summed by row, joined over lookups, and
put together where a batch was trained in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotrow.embedding.row_groups import Group
from hotrow.engine.capture import GraphBoundary
from hotrow.engine.row_sums import RowSums
from hotrow.engine.split_batch import Place
from hotrow.engine.work import Work
from hotrow.inputs.batch import Lookups
from hotrow.kernels import reference
from hotrow.support.threads import Call


@dataclass(frozen=True)
class LookupCall:
    """When a lookup ran, and the backward pass it was recomputed in, -1 for none."""

    number: int
    inside: int
    open: Call | None = None  # until its gradients come


@dataclass
class RowGrads:
    """Gradients of one lookup."""

    call: LookupCall
    work: Work
    x: Lookups
    of_bags: Tensor | None  # [bags, dim], until they are summed
    of_rows: tuple[Tensor, Tensor] | None  # ids, each once, and their gradients [n, dim]
    open_pass: int | None  # the backward pass that has yet to end well; None: it has

    def summed(self) -> tuple[Tensor, Tensor]:
        """Return the sums by row."""
        if self.of_rows is None:
            assert self.of_bags is not None
            self.of_rows = self.work.group.grads_by_row(self.work, self.x, self.of_bags)
            self.of_bags = None
        return self.of_rows


class GroupGrads(NamedTuple):
    """Gradients of one width."""

    place: int  # of the group
    group: Any
    grads: list[RowGrads]


def sums_of(group: Group, waiting: list[RowGrads]) -> list[RowSums]:
    """Return the sums of each lookup."""
    return [
        RowSums(*each.of_rows, each.work)
        if each.of_bags is None and each.of_rows is not None
        else group.sums.of_batch(each.work, each.x, _present(each.of_bags))
        for each in waiting
    ]


def _present(grads: Tensor | None) -> Tensor:
    assert grads is not None
    return grads


def joined_grads(group: Group, waiting: list[RowGrads]) -> tuple[Tensor, Tensor, Work | None]:
    """Return unique ids of a group, their summed gradients, and the batch if there is only one."""
    if len(waiting) == 1:
        only = waiting[0]
        return *only.summed(), only.work
    every, grads = zip(*(each.summed() for each in waiting), strict=True)
    ids = reference.sort_ids(torch.cat(every), group.layout.num_rows)
    return ids.ids, reference.sum_pairs(torch.cat(grads), ids), None


def tables_in(
    by_group: Sequence[GroupGrads], num_groups: int, names: Sequence[str]
) -> tuple[str, ...]:
    """Return the tables whose vectors have a gradient: this step is theirs alone."""
    if len(by_group) == num_groups and all(
        row_grads.x.used is None and not row_grads.x.parts
        for _, _, waiting in by_group
        for row_grads in waiting
    ):
        return tuple(names)
    used = {
        group.layout.tables[group.layout.features[row_grads.x.feature_of(part)].table].name
        for _, group, waiting in by_group
        for row_grads in waiting
        for part in range(len(row_grads.x.part_sizes))
        if row_grads.x.used is None or row_grads.x.used[part]
    }
    return tuple(name for name in names if name in used)


def leave_to_graph(by_group: Sequence[GroupGrads]) -> None:
    """Leave gradients where the graph that is being captured ends: ranks exchange them after it."""
    for _, group, waiting in by_group:
        only = waiting[0]
        if len(waiting) > 1 or only.of_bags is None:
            raise RuntimeError("rows of several ranks are looked up more than once in the step")
        boundary = group.capture.boundary_of(only.work)
        boundary.grads, boundary.used = only.of_bags, only.x.used


def left_by_graph(boundaries: Sequence[tuple[Work, GraphBoundary]]) -> list[RowGrads]:
    """Return the gradients that a graph has left for one batch."""
    return [
        RowGrads(LookupCall(0, -1), work, replace(work.lookups, used=x.used), x.grads, None, None)
        for work, x in boundaries
        if x.grads is not None
    ]


def whole_batches(waiting: list[RowGrads]) -> list[RowGrads]:
    """Join the parts of each batch that was trained in parts."""
    whole: list[RowGrads] = []
    parts: dict[int, dict[int, list[RowGrads]]] = {}  # by batch, then by the part's first sample
    for row_grads in waiting:
        if row_grads.work.place is None:
            whole.append(row_grads)
        else:
            of_batch = parts.setdefault(id(row_grads.work.whole), {})
            of_batch.setdefault(row_grads.work.place.first, []).append(row_grads)
    for of_batch in parts.values():
        # If a part was looked up twice, so were the others, in the same order.
        for calls in zip_longest(*(of_batch[first] for first in sorted(of_batch))):
            whole.append(_side_by_side([part for part in calls if part is not None]))
    return sorted(whole, key=lambda x: x.call.number)


def _side_by_side(parts: list[RowGrads]) -> RowGrads:
    """Return gradients of a batch's bags from those of its parts; 0 for a part without any."""
    whole = parts[0].work.whole
    assert whole is not None
    x, weights, grads = whole.lookups, None, [part.of_bags for part in parts]
    if any(part.x.weights is not None for part in parts):
        given = [part.x.weights for part in parts]
        weights = _placed(given, [_place(part).lookups for part in parts], x.num_lookups)
    every = _placed(grads, [_place(part).bags for part in parts], x.num_bags)
    x = replace(x, weights=weights, used=_used_by_any(parts))
    return RowGrads(parts[0].call, whole, x, every, None, None)


def _used_by_any(parts: list[RowGrads]) -> tuple[bool, ...] | None:
    """Return which features have a gradient in some part of a batch; None: all."""
    by_part = [part.x.used for part in parts if part.x.used is not None]
    used = tuple(map(any, zip(*by_part, strict=True)))
    return None if len(by_part) < len(parts) or all(used) else used


def _place(grads: RowGrads) -> Place:
    assert grads.work.place is not None
    return grads.work.place


def _placed(values: Sequence[Tensor | None], places: Sequence[slice | Tensor], size: int) -> Tensor:
    parts = [(part, at) for part, at in zip(values, places, strict=True) if part is not None]
    first = parts[0][0]
    is_complete = sum(len(part) for part, _ in parts) == size
    if is_complete and all(isinstance(at, slice) for _, at in parts):
        return first if len(parts) == 1 else torch.cat([part for part, _ in parts])
    every = first.new_zeros(size, *first.shape[1:])
    for part, at in parts:
        every[at] = part.to(every.dtype)
    return every
