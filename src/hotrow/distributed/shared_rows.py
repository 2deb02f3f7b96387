"""Rows of one width that all ranks share, as one rank sees them: it pools vectors that came from
their owners, and sums gradients before they go there.

What the rank owns is an ordinary group of rows, which the engine plans, moves and updates.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hotrow.distributed.arrivals import Arrival
from hotrow.distributed.owners import OWNED, GroupOwners, Route
from hotrow.engine.arithmetic import HostPooling
from hotrow.engine.capture import AroundGraph
from hotrow.engine.rows import grads_by_row
from hotrow.engine.split_batch import place_of
from hotrow.engine.work import SortedPart, SortedWork, Work
from hotrow.inputs.batch import Batch, Lookups, divisor_of, lookups_of, outline_of
from hotrow.kernels import reference
from hotrow.kernels.reference import SortedIds, sort_ids
from hotrow.support.streams import capturing


@dataclass(frozen=True)
class Parted:
    """Some of a batch's rows of one width, on their way from owners to ranks."""

    at_owner: Tensor  # places among the ids that ranks ask of this one, rank by rank
    here: Tensor  # places among the ids that this rank asks for, owner by owner
    sent: list[int]  # how many of them this rank sends to each
    received: list[int]  # and gets of each

    def to(self, device: torch.device) -> Parted:
        return replace(self, at_owner=self.at_owner.to(device), here=self.here.to(device))


@dataclass(frozen=True)
class Replicated:
    """The rows of one width that every rank has."""

    ids: Tensor | None  # ascending; None: there are none
    group: Any = None  # of these rows
    choice: int = 0  # how often others were chosen before

    def __post_init__(self) -> None:
        if self.ids is not None and not len(self.ids):
            object.__setattr__(self, "ids", None)


class SharedWork(SortedWork):
    """One batch's lookups of one width: what this rank looks up, and what all ranks ask of it."""

    group: SharedRows

    batch: Any = None  # what this rank looks up

    def __init__(self, group: SharedRows, lookups: Lookups, ids: SortedIds, route: Route) -> None:
        super().__init__(group, lookups, ids)
        self.route = route
        self.received: list[int] = []  # ids that each rank asks for
        self.inner: Any = None  # all of those, as the engine's work
        self.serial = 0  # of the exchange of these ids
        self.is_counted = False  # among what is trained
        # Rows that are sent before the batch is looked up, and then; None: all of them then.
        self.early: Parted | None = None
        self.late: Parted | None = None
        self.vectors: Tensor | None = None  # [U + 1, dim]: padding reads the last one, zeros
        self.version = -1  # of the rows, when the vectors came
        self._arrival: Arrival | None = None  # vectors that are on their way

    @property
    def moving(self) -> Work:
        inner: Work = self.inner
        return inner

    # -- vectors -----------------------------------------------------------------------

    def expect(self, arrival: Arrival, version: int) -> None:
        """Note that the vectors of owners are on their way; those of replicated rows are here."""
        self._arrival, self.version = arrival, version
        self.vectors = None

    def take_arrived(self) -> None:
        """Wait for the vectors that are on their way, if there are some."""
        arrival, self._arrival = self._arrival, None
        if arrival is None:
            return
        if self.vectors is None:
            self.vectors = self.group.vectors_in_order(self.route, arrival.wait())
        else:
            self.vectors[self.route.order.to(self.vectors.device)] = arrival.wait()

    def vectors_for(self, part: SharedPart) -> Tensor:
        """Return vectors for some samples. If others are still on their way, those of replicated
        rows are read now, and the rest are NaN: a part that reads one waits for them on a CPU."""
        if self._arrival is not None and self.vectors is None:
            group = self.group
            nan = torch.full((len(self.route.order), group.dim), torch.nan, device=group.device)
            self.vectors = group.vectors_in_order(self.route, nan)
        if self._arrival is not None and part.ids.inverse.device.type == "cpu":
            is_away = torch.zeros(len(self.ids.ids) + 1, dtype=torch.bool)
            is_away[self.route.order] = True
            if bool(is_away[part.ids.inverse].any()):
                self.take_arrived()
        assert self.vectors is not None
        return self.vectors

    def forget_vectors(self) -> None:
        self.vectors, self.version = None, -1

    # -- the device --------------------------------------------------------------------

    def arrive(self, batch: Batch) -> None:
        """The batch is on the device; what was made of its ids on the host follows."""
        self.batch, device = batch, self.group.device
        if self._ids.ids.device == device:
            return
        self._ids = SortedIds(*(x.to(device) for x in vars(self._ids).values()))
        x = self._lookups
        offsets, divisor = (y if y is None else y.to(device) for y in (x.offsets, x.divisor))
        self._lookups = replace(x, ids=x.ids.to(device), offsets=offsets, divisor=divisor)
        self.early = None if self.early is None else self.early.to(device)
        self.late = None if self.late is None else self.late.to(device)
        self.inner.arrive(self.inner.batch.to(device))


class SharedPart(SortedPart):
    """Some samples of a batch whose rows several ranks share."""

    whole: SharedWork

    @property
    def vectors(self) -> Tensor | None:
        return self.whole.vectors


class SharedPlanning:
    """What a pipeline asks of the planning of rows that ranks share."""

    def __init__(self, group: SharedRows) -> None:
        self._group, self._layout = group, group.layout

    @property
    def _inner(self) -> Any:
        """The engine's planning, which is another one when slots are allocated."""
        return self._group.inner.planning

    def input_device(self, device: torch.device | None) -> None:
        """Ids may be anywhere: they are sorted on the host."""

    def copies_to_compare(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return copies of a batch's ids, which are compared by value when they are looked up."""
        return tuple(map(torch.clone, tensors))

    def work(self, group: SharedRows, batch: Batch) -> SharedWork:
        lookups = lookups_of(batch.to("cpu"), self._layout)
        ids = sort_ids(lookups.ids, self._layout.num_rows)
        work = SharedWork(group, lookups, ids, group.route(ids.ids))
        work.batch = batch
        return work

    def part(self, work: Work, batch: Batch, part: Batch, first: int) -> Work:
        """Return some samples of a planned batch, from `first` on."""
        place, lookups = place_of(batch, part, first, self._layout), work.lookups
        x = outline_of(part, self._layout)
        divisor = divisor_of(part, x, self._layout)
        return SharedPart(work, replace(x, ids=lookups.ids[place.lookups], divisor=divisor), place)

    def expect(self, work: SharedWork, values: Tensor) -> None:
        """The ids that ranks ask for will be planned later."""
        inner = work.inner
        values = self._group.asked_for(inner)
        self._inner.expect(inner, values.to(self._group.device, non_blocking=True))

    def compare(self, work: Work) -> None:
        """Ids were compared by value."""

    def note_number(self, work: SharedWork, number: int) -> None:
        self._inner.note_number(work.inner, number)


class SharedRows:
    """Rows of one width that all ranks share."""

    active = True
    capture: AroundGraph | None = None

    def __init__(
        self, owners: GroupOwners, replicated: Tensor | None, output_dtype: torch.dtype
    ) -> None:
        """`replicated`: ids of rows that every rank has, ascending."""
        self.layout, self.owners, self.output_dtype = owners.layout, owners, output_dtype
        self._replicas = Replicated(replicated)

    def use(self, inner: Any, replicas: Any = None) -> None:
        """Take the group of the rows that this rank owns, and of the replicated rows; others may
        be taken later, such as those with other state."""
        self.inner = inner
        self._replicas = replace(self._replicas, group=replicas)
        self.dim, self.width, self.device = inner.dim, inner.width, inner.device
        self.pooling: HostPooling = inner.pooling(self.output_dtype)
        if self.capture is None:
            self.capture = AroundGraph(self.dim, self.output_dtype, self.device)

    @property
    def planning(self) -> SharedPlanning:
        """Not kept: it refers to this object."""
        return SharedPlanning(self)

    # -- rows that every rank has ------------------------------------------------------

    @property
    def replicated(self) -> Tensor | None:
        """The ids of the rows that every rank has, ascending; None: there are none."""
        return self._replicas.ids

    @property
    def replicas(self) -> Any:
        """The group of the rows that every rank has."""
        return self._replicas.group

    def replicate(self, ids: Tensor) -> None:
        """Keep other rows on every rank, by their ids, ascending; `use_replicas` takes their group.
        Routes from before do not lead to them."""
        self._replicas = Replicated(ids, choice=self._replicas.choice + 1)

    def use_replicas(self, group: Any) -> None:
        self._replicas = replace(self._replicas, group=group)

    def is_current(self, route: Route) -> bool:
        """Whether a route leads to the rows that every rank has now."""
        return route.choice == self._replicas.choice

    # -- what ranks ask of this one ----------------------------------------------------

    def work_of(self, numbers: Tensor) -> Work:
        """Return the engine's work for ids that ranks ask for."""
        batch = Batch(numbers.view(-1, 1), None, (OWNED,), len(numbers))
        work: Work = self.inner.planning.work(self.inner, batch)
        return work

    @staticmethod
    def asked_for(inner: Any) -> Tensor:
        """Return the ids of the engine's work, [n, 1]."""
        values: Tensor
        values = inner.batch.values if hasattr(inner, "batch") else inner.lookups.ids.view(-1, 1)
        return values

    def reading_of(self, numbers: Tensor) -> Lookups:
        """Return the lookups of ids that are only read."""
        return Lookups(numbers.to(self.device), None, None, (len(numbers),), by_sample=True)

    # -- lookup and gradients ----------------------------------------------------------

    def timed(self, work: Work | None) -> AbstractContextManager[None]:
        return nullcontext()

    def route(self, ids: Tensor) -> Route:
        """Return the way of ascending ids to the owners of their rows."""
        chosen = self._replicas  # read once: another thread may choose others
        if chosen.ids is None:
            return self.route_to_owners(ids)
        at = torch.searchsorted(chosen.ids, ids).clamp_(max=len(chosen.ids) - 1)
        is_here = chosen.ids[at] == ids
        others = (~is_here).nonzero().squeeze(1)
        way = self.owners.route(ids[others])
        here = is_here.nonzero().squeeze(1)
        return Route(others[way.order], way.numbers, way.counts, here, at[here], chosen.choice)

    def route_to_owners(self, ids: Tensor) -> Route:
        """Return the way of ascending ids to the owners of their rows, also of replicated ones."""
        return self.owners.route(ids)._replace(choice=self._replicas.choice)

    def vectors_in_order(self, route: Route, vectors: Tensor) -> Tensor:
        """Return vectors, which came owner by owner, in the order of ids; zeros follow them."""
        replicas = None
        if route.replicas is not None:
            x = self.reading_of(route.replicas)
            replicas = self.replicas.read_parts(self.replicas.parts_of(x))
        return self.in_order(route, vectors, replicas)

    @staticmethod
    def in_order(route: Route, vectors: Tensor, replicas: Tensor | None) -> Tensor:
        count = len(vectors) + (0 if replicas is None else len(replicas))
        ordered = vectors.new_zeros(count + 1, vectors.shape[1])
        ordered[route.order.to(vectors.device)] = vectors
        if replicas is not None and route.here is not None:
            ordered[route.here.to(vectors.device)] = replicas.to(vectors.dtype)
        return ordered

    def lookup(self, work: SharedWork | SharedPart, x: Lookups) -> Tensor:
        """Return one vector per bag, [bags, dim]. `x` has the weights."""
        if capturing():
            # A copy: a model may change what it gets.
            assert self.capture is not None
            return self.capture.boundary_of(work).vectors.clone()
        vectors = work.vectors
        if isinstance(work, SharedPart):
            vectors = work.whole.vectors_for(work)
        assert vectors is not None
        return self.pooling.pool(vectors, work.ids, x)

    def weight_grads(self, work: SharedWork | SharedPart, x: Lookups, grads: Tensor) -> Tensor:
        """Return the gradients of per-sample weights, from the rows before their update, [L]."""
        if work.vectors is None:
            raise RuntimeError(
                "gradients of per-sample weights came too long after their lookup: on several "
                "ranks, call backward() within eight lookups"
            )
        inverse, grads = work.ids.inverse, grads.float()
        return reference.weight_grads(work.vectors, inverse, x.bag_of(), grads)

    def grads_by_row(self, work: SharedWork, x: Lookups, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of a batch's rows that have a gradient, each once, and the gradients."""

        return grads_by_row(work, x, lambda x: self.pooling.row_grads(work.ids, x, grads))

    def update_planned(self, work: SharedWork, x: Lookups, grads: Tensor) -> bool:
        """Rows are updated by their owners."""
        return False
