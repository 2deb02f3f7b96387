"""Reading rows of other ranks outside of training: evaluation, and rows with their state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.distributed.owners import Route
from hotrow.distributed.ranks import SERIAL, Channel, Header, Headers, Op
from hotrow.distributed.wire import Wire
from hotrow.inputs.batch import Lookups
from hotrow.kernels.reference import SortedIds, sort_ids

_VECTORS, _WHOLE_ROWS = range(2)  # what is read


@dataclass(frozen=True)
class _Wanted:
    """Rows of each width that a rank reads."""

    routes: Sequence[Route]
    what: int


class Reads:
    """Reads rows of all ranks, each of which answers for its own. Changes no map or counter.

    Ranks that do something else meanwhile answer as well, so that each may read a different number
    of batches.
    """

    number = 0  # of the collection

    def __init__(
        self,
        wire: Wire,
        reading: Callable[[], AbstractContextManager[object]],
        settle_grads: Callable[[], None],
    ) -> None:
        self._wire, self._reading = wire, weakref.WeakMethod(reading)
        self._settle_grads = weakref.WeakMethod(settle_grads)

    def vectors(self, lookups: Sequence[Lookups], *, aside: bool) -> list[Tensor]:
        """Return one vector per bag of each width, as of one finished step."""
        ids = [
            sort_ids(x.ids.cpu(), group.layout.num_rows)
            for group, x in zip(self._wire.groups, lookups, strict=True)
        ]
        routes = [g.route(x.ids) for g, x in zip(self._wire.groups, ids, strict=True)]
        vectors = self._read(_Wanted(routes, _VECTORS), aside=aside)
        pooled = []
        for group, x, found, route, part in zip(
            self._wire.groups, lookups, ids, routes, vectors, strict=True
        ):
            here = SortedIds(*(y.to(group.device) for y in vars(found).values()))
            pooled.append(group.pool(group.vectors_in_order(route, part), here, x))
        return pooled

    def owned_rows(self, place: int, ids: Tensor) -> Tensor:
        """As `rows`, from the owners alone."""
        groups, none = self._wire.groups, torch.empty(0, dtype=torch.int64)
        routes = [x.owners.route(ids if k == place else none) for k, x in enumerate(groups)]
        rows = self._read(_Wanted(routes, _WHOLE_ROWS), aside=False)[place]
        return groups[place].rows_in_order(routes[place], rows)[:-1]

    def rows(self, place: int, ids: Tensor) -> Tensor:
        """Return rows of one width with their state, in the order of ids, which are given once and
        ascend."""
        none = torch.empty(0, dtype=torch.int64)
        groups = self._wire.groups
        routes = [x.route(ids if k == place else none) for k, x in enumerate(groups)]
        rows = self._read(_Wanted(routes, _WHOLE_ROWS), aside=False)[place]
        return groups[place].rows_in_order(routes[place], rows)[:-1]

    def _read(self, wanted: _Wanted, *, aside: bool) -> list[Tensor]:
        channel = self._wire.ranks.aside if aside else self._wire.ranks.training
        settle_grads = None if aside else self._settle_grads()
        if settle_grads is not None:  # the batch before may have had no gradient here
            settle_grads()
        counts = [
            [route.counts[rank] for route in wanted.routes] for rank in range(self._wire.ranks.size)
        ]
        header = Header(Op.READ, self.number, wanted.what, counts=counts)
        found: list[Tensor] = self._wire.ranks.run(header, wanted, channel)
        return found

    def perform(
        self, headers: Headers, doers: list[bool], wanted: _Wanted | None, channel: Channel
    ) -> list[Tensor]:
        size, groups = self._wire.ranks.size, self._wire.groups
        what = headers.column(SERIAL)[doers.index(True)]
        nothing = [0] * len(groups)
        theirs = [
            headers.words(r, 0, len(groups)) if does else nothing for r, does in enumerate(doers)
        ]
        routes = {} if wanted is None else dict(enumerate(wanted.routes))
        numbers = self._wire.send_numbers(range(len(groups)), routes, theirs, channel)
        found = []
        with torch.no_grad():
            own = self._rows_for(numbers, what)
        for place, rows in enumerate(own):
            sent = [counts[place] for counts in theirs]
            counts = routes[place].counts if routes else [0] * size
            found.append(self._wire.ranks.exchange(rows, sent, counts, channel))
        return found

    def _rows_for(self, numbers: dict[int, Tensor], what: int) -> list[Tensor]:
        """Read own rows of all widths as of one finished step."""
        found, groups = [], self._wire.groups
        parts = {k: groups[k].inner.parts_of(groups[k].reading_of(x)) for k, x in numbers.items()}
        reading = self._reading()
        assert reading is not None
        with reading():
            for place, group in enumerate(groups):
                inner = group.inner
                if what == _VECTORS:
                    found.append(inner.read_parts(parts[place]).float())
                    continue
                rows = torch.empty(len(numbers[place]), inner.width)
                found.append(self._gathered(inner, numbers[place], rows).to(group.device))
        return found

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
