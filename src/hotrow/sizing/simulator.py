"""The planner over a trace of ids, without rows: hit rates and traffic in seconds."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hotrow.engine.planner import Planner
from hotrow.engine.rules import Pins
from hotrow.engine.scratchpad import Scratchpad
from hotrow.engine.strategy import Strategy
from hotrow.kernels.reference import SortedIds, sort_ids
from hotrow.store.budget import choose_map
from hotrow.support.records import Counted

_DENSE_MAP_ROWS = 1 << 26  # up to here the faster map is affordable
_CPU = torch.device("cpu")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Simulated(Counted):
    """What one strategy would move for the batches after the warm-up."""

    strategy: str
    slots: int
    depth: int
    batches: int = 0
    lookups: int = 0
    unique_rows: int = 0
    fetched_rows: int = 0
    evicted_rows: int = 0
    chunked_batches: int = 0
    planning_seconds: float = 0.0  # sorting the ids included
    loaded_rows: int = 0  # prefetched for pinning

    @property
    def rows_per_batch(self) -> float:
        """Rows fetched per batch, on average."""
        return self.fetched_rows / max(1, self.batches)

    @property
    def lookups_per_second(self) -> float:
        """Speed of planning."""
        return self.lookups / max(self.planning_seconds, 1e-9)


def simulate(
    trace: Iterable[Tensor],
    *,
    num_rows: int,
    choices: Sequence[tuple[Strategy, int]],
    depth: int = 50,
    warm_up: int = 0,
    counted: int | None = None,
    hottest: Callable[[int], Tensor] | None = None,
    on_batch: Callable[[], None] = lambda: None,
    as_trained: bool = False,
) -> list[Simulated]:
    """Plan every batch of `trace`, ids in [0, num_rows), for each strategy and number of slots.

    `depth` batches are known ahead where a strategy does not say how many. The first `warm_up`
    batches are not counted, then `counted` batches are (by default all); later ones are only known
    ahead. `hottest(n)` names the n rows to pin, for strategies that pin; without it `static` learns
    them. `as_trained`: choose the row map as training does, so that planning takes as long.
    """
    simulator = Simulator(num_rows, choices, depth=depth, hottest=hottest, as_trained=as_trained)
    end = math.inf if counted is None else warm_up + counted
    for ids in trace:
        simulator.feed(ids, counts=warm_up <= simulator.batches < end)
        on_batch()
    if simulator.batches <= warm_up:
        raise ValueError(
            f"the trace has {simulator.batches} batches, all of them warm-up; give more than "
            f"{warm_up}"
        )
    return simulator.results()


class Simulator:
    """Strategies that plan the same batches, which come one by one."""

    def __init__(
        self,
        num_rows: int,
        choices: Sequence[tuple[Strategy, int]],
        *,
        depth: int = 50,
        hottest: Callable[[int], Tensor] | None = None,
        as_trained: bool = False,
    ) -> None:
        """Take the arguments of `simulate`."""
        self.batches, self._num_rows = 0, num_rows
        self._lanes = []
        for strategy, slots in choices:
            # The map changes the speed only.
            is_dense = choose_map(slots, num_rows) if as_trained else num_rows <= _DENSE_MAP_ROWS
            self._lanes.append(_Lane(strategy, slots, num_rows, depth, hottest, dense_map=is_dense))

    def feed(self, ids: Tensor, *, counts: bool) -> None:
        """Make a batch known; `counts`: it is no warm-up."""
        start = time.perf_counter()
        found = sort_ids(ids, self._num_rows)
        seconds = time.perf_counter() - start
        for lane in self._lanes:
            lane.feed(_Known(found, seconds, counts=counts))
        self.batches += 1

    def results(self) -> list[Simulated]:
        """Plan the batches that count and are left; return the counts of each strategy."""
        for lane in self._lanes:
            lane.drain()
        return [lane.result() for lane in self._lanes]


@dataclass(frozen=True)
class _Known:
    ids: SortedIds
    sort_seconds: float
    counts: bool  # past the warm-up


class _Lane:
    """One strategy with its own slots, fed batch by batch."""

    def __init__(
        self,
        strategy: Strategy,
        slots: int,
        num_rows: int,
        depth: int,
        hottest: Callable[[int], Tensor] | None,
        *,
        dense_map: bool,
    ) -> None:
        if strategy.everything:
            raise ValueError(f"{strategy.name} moves nothing: there is nothing to simulate")
        if strategy.on_host and strategy.pinned_part:
            raise ValueError(
                f"{strategy.name} decides nothing from batch to batch: rows that are not hot are "
                "read and written every time, as with static, which can be simulated"
            )
        if strategy.on_host:
            raise ValueError(
                f"{strategy.name} has no slots: every row of a batch is read and written where it "
                "is, as often as with uncached; there is nothing to simulate"
            )
        pad = Scratchpad(slots, 0, num_rows, _CPU, dense_map=dense_map)
        pins = None
        if strategy.learns_pins or (strategy.pinned_part and hottest is not None):
            nothing = torch.empty(0, dtype=torch.int64)
            pins = Pins(strategy.pinned_part, hottest or (lambda _: nothing), hottest is None)
        self._planner = Planner(
            pad,
            hold=strategy.hold,
            eviction=strategy.eviction,
            refetch=strategy.refetch,
            pins=pins,
        )
        self._name = strategy.name
        wanted = depth if strategy.look_ahead is None else strategy.look_ahead
        self._depth = max(wanted, strategy.hold.future)
        self._known: deque[_Known] = deque()
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    def feed(self, batch: _Known) -> None:
        """Make a batch known, and plan the one that is `depth` batches older."""
        self._known.append(batch)
        self._timed(lambda: self._planner.expect(batch.ids), batch.counts)
        if len(self._known) > self._depth:
            self._plan(self._known.popleft())

    def drain(self) -> None:
        """Plan the batches left, as far as they count."""
        while any(batch.counts for batch in self._known):
            self._plan(self._known.popleft())

    def _plan(self, batch: _Known) -> None:
        plan = self._timed(lambda: self._planner.plan(batch.ids), batch.counts)
        if not batch.counts:
            return
        self._seconds += batch.sort_seconds
        unique = batch.ids.ids.numel()
        self._counts.update(batches=1, lookups=batch.ids.order.numel(), unique_rows=unique)
        if plan is None:  # the direct path: read and written once, kept in no slot
            self._counts.update(fetched_rows=unique, evicted_rows=unique, chunked_batches=1)
        else:
            leaving = int((plan.moves.leaving >= 0).sum())
            fetched = plan.moves.entering.numel() - plan.loaded
            self._counts.update(fetched_rows=fetched, evicted_rows=leaving, loaded_rows=plan.loaded)

    def _timed(self, do: Callable[[], Result], counts: bool) -> Result:
        start = time.perf_counter()
        result = do()
        self._seconds += counts * (time.perf_counter() - start)
        return result

    def result(self) -> Simulated:
        return Simulated(
            strategy=self._name,
            slots=self._planner.pad.num_slots,
            depth=self._depth,
            planning_seconds=self._seconds,
            **self._counts,
        )
