"""What strategies would move for a run's trace: planned without rows, next to Belady's bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import Tensor

from hotrow.engine.evict import EVICTIONS
from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.run.config import RunConfig
from hotrow.run.strategy_names import find_named
from hotrow.sizing.cost import Work, step_time
from hotrow.sizing.machines import Machine
from hotrow.sizing.reuse import NEVER, Reuse, belady
from hotrow.sizing.simulator import Simulated, simulate
from hotrow.study.sizing import base_of, planning_ms_of, row_bytes_of
from hotrow.study.trace import Trace
from hotrow.support.messages import did_you_mean

_MOST_ROWS = 1 << 28  # up to here their last uses, 4 bytes each, are affordable
CACHING = [name for name, strategy in STRATEGIES.items() if strategy.has_slots]
# lru with another order of eviction. What looks ahead is lookahead's.
ORDERS = {
    name: replace(STRATEGIES["lru"], name=name, eviction=eviction)
    for name, eviction in EVICTIONS.items()
    if not eviction.looks_ahead and eviction != STRATEGIES["lru"].eviction
}


def find_simulated(name: str) -> Strategy:
    """Return a strategy of rows. What orders or leaves out samples is decided while training."""
    if strategy := STRATEGIES.get(name) or ORDERS.get(name):
        return strategy
    try:
        named = find_named(name)
    except ValueError:
        known = [*CACHING, *ORDERS]
        hint = did_you_mean(name, known)
        raise ValueError(
            f"there is no strategy {name!r}{hint}; simulated are {', '.join(known)}"
        ) from None
    rows = named.rows.name
    remedy = f"; its rows follow {rows}: give --strategy {rows}" if named.rows.has_slots else ""
    raise ValueError(
        f"--strategy {name}: which samples are trained, and when, is decided while training, so it "
        f"is not simulated{remedy}. Simulated are {', '.join(CACHING)}"
    )


class Simulation:
    """One pass over a run's trace, for each strategy, number of slots and depth."""

    def __init__(
        self,
        config: RunConfig,
        trace: Trace,
        *,
        strategies: Sequence[Strategy],
        slots: Sequence[int],
        depths: Sequence[int],
        batches: int,
        warm_up: int,
        machine: Machine | None = None,
        dense_ms: float | None = None,
    ) -> None:
        self._config, self._trace, self._strategies = config, trace, strategies
        self._batches, self._warm_up, self._slots = batches, warm_up, slots
        self._machine, self._dense_ms = machine, dense_ms
        self._choices = [
            (planned, size)
            for size in slots
            for strategy in strategies
            for planned in _at_depths(strategy, depths)
        ]
        # What is known ahead of the last batch that counts must be there.
        ahead = max(strategy.look_ahead or 0 for strategy, _ in self._choices)
        self.total_batches = warm_up + batches + ahead

    def run(self, *, pins_ranks: bool, on_batch: Callable[[], None]) -> None:
        """Fill `facts` and `conditions`. `pins_ranks`: pin the rows that are truly hottest."""
        config, trace, machine = self._config, self._trace, self._machine
        bound = _Bound(trace.num_rows)
        every = simulate(
            bound.watched(trace.batches(self.total_batches)),
            num_rows=trace.num_rows,
            choices=self._choices,
            warm_up=self._warm_up,
            counted=self._batches,
            hottest=trace.hottest if pins_ranks else None,
            on_batch=on_batch,
            as_trained=machine is not None and not machine.is_gpu,
        )
        timing = None
        if machine is not None:
            timing = _Timing(config, machine, every[0], trace.num_rows, self._dense_ms)
        least_rows = bound.rows_per_batch(self._slots, self._warm_up, self._batches)
        floors, row_bytes = bound.floors(self._strategies), row_bytes_of(config)
        facts = [_facts(simulated, timing, row_bytes, floors) for simulated in every]
        self.facts = list(_with_bound(facts, least_rows))
        self.conditions = _conditions(every[0], trace.num_rows, timing, floors)


class _Timing:
    """Predicted steps."""

    def __init__(
        self,
        config: RunConfig,
        machine: Machine,
        like: Simulated,
        num_rows: int,
        dense_ms: float | None,
    ) -> None:
        self.machine, self._batch_size = machine, config.data.batch_size
        self._vector_bytes = 4 * config.model.row_width
        self._row_bytes, self._num_rows = row_bytes_of(config), num_rows
        self.base = base_of(config, machine, self._work(like), given_ms=dense_ms)

    def _work(self, simulated: Simulated) -> Work:
        batches = max(1, simulated.batches)
        return Work(
            lookups=simulated.lookups / batches,
            unique_rows=simulated.unique_rows / batches,
            row_bytes=self._row_bytes,
            table_bytes=self._num_rows * self._row_bytes,
            fetched_rows=simulated.fetched_rows / batches,
            evicted_rows=simulated.evicted_rows / batches,
            vector_bytes=self._vector_bytes,
        )

    def facts(self, simulated: Simulated) -> dict[str, Any]:
        planning = None if self.machine.is_gpu else planning_ms_of(simulated, self.machine)
        time = step_time(
            self.machine,
            find_simulated(simulated.strategy),
            self._work(simulated),
            all_fast_ms=self.base.ms,
            planning_ms=planning,
        )
        return {
            "machine": self.machine.name,
            "all_fast_ms": self.base.ms,
            "all_fast_is": self.base.how,
            "step_ms": time.ms,
            "planning_ms": time.planning_ms,
            "moving_ms": time.moving_ms,
            "of_all_fast": self.base.ms / time.ms,
            "samples_per_second": 1e3 * self._batch_size / time.ms,
            "limit": time.limit,
        }


def _conditions(
    simulated: Simulated, num_rows: int, timing: _Timing | None, floors: Mapping[str, int]
) -> str:
    text = (
        f"{num_rows:,} rows, {simulated.lookups // simulated.batches:,} lookups and "
        f"{simulated.unique_rows // simulated.batches:,} unique rows per batch"
    )
    if timing is not None:
        where = timing.machine.gpu or "this machine's CPU"
        how = "with the dense part as given" if timing.base.how == "given" else timing.base.how
        text += f"; on {where} all-fast takes {timing.base.ms:.3g} ms, {how}"
    if floors:
        named: dict[int, list[str]] = {}
        for name, slots in floors.items():
            named.setdefault(slots, []).append(name)
        parts = (f"{slots:,} for {', '.join(names)}" for slots, names in sorted(named.items()))
        text += f". Batches fit, with those in flight, from so many slots on: {'; '.join(parts)}"
    return text


def _at_depths(strategy: Strategy, depths: Sequence[int]) -> list[Strategy]:
    """Return it at each depth, if it does not say itself how many batches it knows ahead."""
    if strategy.look_ahead is not None:
        return [strategy]
    return [replace(strategy, look_ahead=depth) for depth in depths]


class _Bound:
    """Belady's bound, of the batches that go by."""

    def __init__(self, num_rows: int) -> None:
        self._reuse = Reuse()
        self._last_use = None
        if num_rows <= _MOST_ROWS:
            self._last_use = np.full(num_rows, NEVER, dtype=np.int32)

    def floors(self, strategies: Iterable[Strategy]) -> dict[str, int]:
        """Return the slots in which batches fit with those in flight; empty: not known."""
        if self._last_use is None:
            return {}
        return {each.name: self._reuse.floor(each.hold.batches) for each in strategies}

    def watched(self, trace: Iterable[Tensor]) -> Iterator[Tensor]:
        for ids in trace:
            if self._last_use is not None:
                rows = np.unique(ids.numpy())
                self._reuse.add(self._last_use[rows])
                self._last_use[rows] = self._reuse.batches - 1
            yield ids

    def rows_per_batch(self, slots: Sequence[int], first: int, counted: int) -> dict[int, float]:
        """Return the bound by numbers of slots, without those in which a batch does not fit."""
        uses = self._reuse.next_uses()
        if self._last_use is None or uses is None:
            return {}
        curve = belady(uses, slots, first=first, counted=counted)
        rows = zip(curve.slots.tolist(), curve.per_batch.tolist(), strict=True)
        return {size: least for size, least in rows if not math.isnan(least)}


def _facts(
    simulated: Simulated, timing: _Timing | None, row_bytes: int, floors: Mapping[str, int]
) -> dict[str, Any]:
    moved = simulated.fetched_rows + simulated.loaded_rows + simulated.evicted_rows
    return {
        **asdict(simulated),
        "hit_rate": simulated.hit_rate,
        "rows_per_batch": simulated.rows_per_batch,
        "bytes_per_batch": moved * row_bytes / max(1, simulated.batches),
        "fits_from_slots": floors.get(simulated.strategy),
        "lookups_per_second": simulated.lookups_per_second,
        # Chunks take turns with computing, which no prediction knows: it would call them free.
        **({} if timing is None or simulated.chunked_batches else timing.facts(simulated)),
    }


def _with_bound(
    facts: Sequence[dict[str, Any]], least: Mapping[int, float]
) -> Iterator[dict[str, Any]]:
    """Yield the bound after the strategies of each number of slots."""
    for each, following in zip(facts, [*facts[1:], None], strict=True):
        yield each
        size = each["slots"]
        if size in least and (following is None or following["slots"] != size):
            lookups, batches = each["lookups"], each["batches"]
            yield {
                "strategy": "belady",
                "slots": size,
                "batches": batches,
                "lookups": lookups,
                "unique_rows": each["unique_rows"],
                "fetched_rows": round(least[size] * batches),
                "hit_rate": 1 - least[size] * batches / max(1, lookups),
                "rows_per_batch": least[size],
            }
