"""Reading rows of other ranks outside of training: evaluation, and rows with their state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hotrow.distributed.owners import Route
from hotrow.distributed.ranks import SERIAL, Channel, Header, Headers, Op
from hotrow.distributed.wire import Wire
from hotrow.inputs.batch import Lookups
from hotrow.kernels.reference import SortedIds, sort_ids

_VECTORS, _WHOLE_ROWS, _WITH_FROZEN, _ROWS_NOW = range(4)  # what is read
_MOVED = -1  # instead of a step: rows were replicated, or no longer, since routes were found


@dataclass(frozen=True)
class _Wanted:
    """Rows of each width that a rank reads."""

    routes: Sequence[Route]
    what: int


class Rows(Protocol):
    """What is asked of a rank's own rows."""

    steps: int  # how often rows were updated

    def reading(self) -> AbstractContextManager[object]: ...


class Reads:
    """Reads rows of all ranks, each of which answers for its own. Changes no map or counter.

    Ranks that do something else meanwhile answer as well, so that each may read a different number
    of batches.
    """

    number = 0  # of the collection

    def __init__(self, wire: Wire, rows: Rows, settle_grads: Callable[[], None]) -> None:
        """`rows` own this object, so they are referred to weakly."""
        self._wire, self._rows = wire, weakref.ref(rows)
        self._settle_grads = weakref.WeakMethod(settle_grads)

    @property
    def steps(self) -> int:
        """How often this rank's rows were updated."""
        rows = self._rows()
        assert rows is not None
        return rows.steps

    def vectors(self, lookups: Sequence[Lookups], *, aside: bool) -> list[Tensor]:
        """Return one vector per bag of each width, as of one finished step."""
        ids = [
            sort_ids(x.ids.cpu(), group.layout.num_rows)
            for group, x in zip(self._wire.groups, lookups, strict=True)
        ]

        def wanted() -> _Wanted:
            pairs = zip(self._wire.groups, ids, strict=True)
            return _Wanted([group.route(x.ids) for group, x in pairs], _VECTORS)

        vectors = self._read(wanted, aside=aside)
        pooled = []
        for group, x, found, part in zip(self._wire.groups, lookups, ids, vectors, strict=True):
            here = SortedIds(*(y.to(group.device) for y in vars(found).values()))
            pooled.append(group.pooling.pool(part, here, x))
        return pooled

    def rows(
        self, place: int, ids: Tensor, *, aside: bool = False, of_owners: bool = False
    ) -> Tensor:
        """Return rows of one width with their state as of now, in the order of ids, which are given
        once and ascend. `of_owners`: as owners have stored them, and not from replicas."""
        every = self._only(place, ids)
        pairs = list(zip(self._wire.groups, every, strict=True))

        def wanted() -> _Wanted:
            routes = [x.route_to_owners(y) if of_owners else x.route(y) for x, y in pairs]
            return _Wanted(routes, _WHOLE_ROWS if of_owners else _ROWS_NOW)

        return self._read(wanted, aside=aside)[place][:-1]

    def rows_to_replicate(self, place: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of one width from their owners, with their state, in the order of ids, which
        are given once and ascend; and which of them are frozen."""
        pairs = zip(self._wire.groups, self._only(place, ids), strict=True)
        wanted = _Wanted([group.route_to_owners(x) for group, x in pairs], _WITH_FROZEN)
        found = self._read(lambda: wanted, aside=False)[place][:-1]
        return found[:, :-1], found[:, -1] > 0

    def _only(self, place: int, ids: Tensor) -> list[Tensor]:
        """Return the ids of each width where one width alone is read."""
        none = torch.empty(0, dtype=torch.int64)
        return [ids if number == place else none for number in range(len(self._wire.groups))]

    def _read(self, find: Callable[[], _Wanted], *, aside: bool) -> list[Tensor]:
        """Read rows by the routes that `find` returns, which is called again if rows that they lead
        to are replicated meanwhile, or no longer."""
        channel = self._wire.ranks.aside if aside else self._wire.ranks.training
        settle_grads = None if aside else self._settle_grads()
        if settle_grads is not None:  # the batch before may have had no gradient here
            settle_grads()
        found: list[Tensor] | None = None
        while found is None:
            wanted = find()
            counts = [
                [route.counts[rank] for route in wanted.routes]
                for rank in range(self._wire.ranks.size)
            ]
            header = Header(Op.READ, self.number, wanted.what, counts=counts)
            found = self._wire.ranks.run(header, wanted, channel)
        return found

    def perform(
        self, headers: Headers, doers: list[bool], wanted: _Wanted | None, channel: Channel
    ) -> list[Tensor] | None:
        """Answer what ranks ask for; return what this one wants, in the order of its ids, with a
        row of zeros behind. None: a rank has to find its routes again."""
        ranks, groups = self._wire.ranks, self._wire.groups
        what = headers.column(SERIAL)[doers.index(True)]
        nothing = [0] * len(groups)
        theirs = [
            headers.words(r, 0, len(groups)) if does else nothing for r, does in enumerate(doers)
        ]
        routes = {} if wanted is None else dict(enumerate(wanted.routes))
        numbers = self._wire.send_numbers(range(len(groups)), routes, theirs, channel, kind=None)
        while True:
            step, own, replicas = self._own_rows(numbers, routes, what)
            if channel is ranks.training:
                break
            # Other threads may train meanwhile: all rows are to be of one step.
            steps = set(ranks.numbers(step, channel))
            if _MOVED in steps:
                return None
            if len(steps) == 1:
                break
        found = []
        for place, (group, rows) in enumerate(zip(groups, own, strict=True)):
            sent = [counts[place] for counts in theirs]
            counts = routes[place].counts if routes else [0] * ranks.size
            if what == _WITH_FROZEN:
                self._wire.count("pins", rows, sent)
            came = ranks.exchange(rows, sent, counts, channel)
            if wanted is not None:
                found.append(group.in_order(routes[place], came, replicas[place]))
        return found

    def _own_rows(
        self, numbers: dict[int, Tensor], routes: dict[int, Route], what: int
    ) -> tuple[int, list[Tensor], dict[int, Tensor | None]]:
        """Read the rows that ranks ask for, and replicas for this rank, as of one finished step;
        return its number as well, or that a route leads to replicas of before."""
        groups, rows = self._wire.groups, self._rows()
        assert rows is not None
        read = (self._vectors, self._whole_rows, self._with_frozen, self._rows_now)[what]
        with rows.reading(), torch.no_grad():
            own = [read(groups[place].inner, ids) for place, ids in numbers.items()]
            if not all(groups[place].is_current(way) for place, way in routes.items()):
                return _MOVED, own, {}
            replicas = {
                place: None if way.replicas is None else read(groups[place].replicas, way.replicas)
                for place, way in routes.items()
            }
            return rows.steps, own, replicas

    @staticmethod
    def _vectors(group: Any, numbers: Tensor) -> Tensor:
        here = numbers.to(group.device)
        x = Lookups(here, None, None, (len(numbers),), by_sample=True)
        vectors: Tensor = group.read_parts(group.parts_of(x))
        return vectors.float()

    def _whole_rows(self, group: Any, numbers: Tensor) -> Tensor:
        rows = torch.empty(len(numbers), group.width)
        return self._gathered(group, numbers, rows).to(group.device)

    def _rows_now(self, group: Any, numbers: Tensor) -> Tensor:
        rows = self._whole_rows(group, numbers)
        if group.idle is not None:
            group.idle.catch_up(rows, numbers)
            group.idle.note_now(rows, numbers)
        return rows

    def _with_frozen(self, group: Any, numbers: Tensor) -> Tensor:
        """Return rows with their state, and whether they are frozen as a last column."""
        is_frozen = group.store.frozen.among(numbers).float().unsqueeze(1)
        return torch.cat([self._whole_rows(group, numbers), is_frozen.to(group.device)], 1)

    @staticmethod
    def _gathered(inner: Any, numbers: Tensor, out: Tensor) -> Tensor:
        """Read rows with their state; ranks may ask for the same ones."""
        ids = sort_ids(numbers, inner.layout.num_rows)
        step = max(int(inner.chunk_rows), 1024)
        unique = torch.empty(len(ids.ids), out.shape[1])
        for first in range(0, len(unique), step):
            part = slice(first, first + step)
            inner.gather(ids.ids[part], out=unique[part])
        return unique[ids.inverse]
