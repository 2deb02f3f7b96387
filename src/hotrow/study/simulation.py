"""What strategies would move for a run's trace: planned without rows, next to Belady's bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from hotrow.engine.evict import EVICTIONS
from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.run.config import RunConfig
from hotrow.run.strategy_names import find_named
from hotrow.sizing.machines import Machine
from hotrow.sizing.reuse import RowReuse, belady
from hotrow.sizing.simulator import Simulated, simulate
from hotrow.study.lookups import OfRun
from hotrow.study.sizing import StepModel, planning_ms_of
from hotrow.support.messages import did_you_mean

CACHING = [name for name, strategy in STRATEGIES.items() if strategy.has_slots]
# lru with another order of eviction. Orders that look ahead belong to lookahead.
ORDERS = {
    name: replace(STRATEGIES["lru"], name=name, eviction=eviction)
    for name, eviction in EVICTIONS.items()
    if not eviction.looks_ahead and eviction != STRATEGIES["lru"].eviction
}


def find_simulated(name: str) -> Strategy:
    """Return a strategy of rows. Systems that order or skip samples decide while training."""
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


def strategies_at(strategies: Sequence[Strategy], depths: Sequence[int]) -> list[Strategy]:
    """Return strategies with a number of batches known ahead: those that say none, with each."""
    return [
        replace(strategy, look_ahead=depth)
        for strategy in strategies
        for depth in (depths if strategy.look_ahead is None else [strategy.look_ahead])
    ]


@dataclass(frozen=True)
class Simulation:
    """One pass over a run's trace, for each strategy, number of slots and depth."""

    config: RunConfig
    trace: OfRun
    strategies: Sequence[Strategy]
    slots: Sequence[int]
    depths: Sequence[int]  # for strategies that do not say how many batches they know ahead
    batches: int
    warm_up: int
    machine: Machine | None = None
    dense_ms: float | None = None
    bound_rows: int = 1 << 28  # with more rows, the bound would take too much memory

    @property
    def choices(self) -> list[tuple[Strategy, int]]:
        return [
            (strategy, size)
            for size in self.slots
            for strategy in strategies_at(self.strategies, self.depths)
        ]

    @property
    def total_batches(self) -> int:
        """Batches of the trace, with those known ahead of the last one that counts."""
        ahead = max(strategy.look_ahead or 0 for strategy, _ in self.choices)
        return self.warm_up + self.batches + ahead

    def run(
        self, *, pins_ranks: bool, on_batch: Callable[[], None] = lambda: None
    ) -> tuple[list[dict[str, Any]], str]:
        """Return the facts of each choice, and in a sentence what was simulated. `pins_ranks`: pin
        the rows that are hottest by the law of the data."""
        config, trace, machine = self.config, self.trace, self.machine
        reuse = RowReuse(trace.num_rows) if trace.num_rows <= self.bound_rows else None
        simulated = simulate(
            self._watched(reuse),
            num_rows=trace.num_rows,
            choices=self.choices,
            warm_up=self.warm_up,
            counted=self.batches,
            hottest=trace.hottest if pins_ranks else None,
            on_batch=on_batch,
            as_trained=machine is not None and not machine.is_gpu,
        )
        first, model = simulated[0], None
        if machine is not None:
            model = StepModel(
                config,
                machine,
                lookups=first.lookups / first.batches,
                unique_rows=first.unique_rows / first.batches,
                num_rows=trace.num_rows,
                dense_ms=self.dense_ms,
            )
        floors: dict[str, int] = {}  # slots from which on batches fit with those in flight
        if reuse is not None:
            floors = {each.name: reuse.floor(each.hold.batches) for each in self.strategies}
        facts, least = [], self._bound(reuse)
        for size in self.slots:
            planned = [each for each in simulated if each.slots == size]
            facts += [_facts(each, model, config.row_bytes, floors) for each in planned]
            if size in least:
                facts.append(_bound_facts(planned[-1], least[size]))
        return facts, _conditions(first, trace.num_rows, model, floors)

    def _watched(self, reuse: RowReuse | None) -> Iterator[Tensor]:
        for batch in self.trace.batches(self.total_batches):
            rows = batch.rows
            if reuse is not None:
                reuse.add_rows(rows.unique().numpy())
            yield rows

    def _bound(self, reuse: RowReuse | None) -> dict[int, float]:
        """Return Belady's rows per batch by slots, without those in which a batch does not fit."""
        uses = None if reuse is None else reuse.next_uses()
        if uses is None:
            return {}
        curve = belady(uses, self.slots, first=self.warm_up, counted=self.batches)
        rows = zip(curve.slots.tolist(), curve.per_batch.tolist(), strict=True)
        return {size: least for size, least in rows if not math.isnan(least)}


def _conditions(
    simulated: Simulated, num_rows: int, model: StepModel | None, floors: Mapping[str, int]
) -> str:
    text = (
        f"{num_rows:,} rows, {simulated.lookups // simulated.batches:,} lookups and "
        f"{simulated.unique_rows // simulated.batches:,} unique rows per batch"
    )
    if model is not None:
        where = model.machine.gpu or "this machine's CPU"
        how = "with the dense part as given" if model.base.how == "given" else model.base.how
        text += f"; on {where} all-fast takes {model.base.ms:.3g} ms, {how}"
    if floors:
        named: dict[int, list[str]] = {}
        for name, slots in floors.items():
            named.setdefault(slots, []).append(name)
        parts = (f"{slots:,} for {', '.join(names)}" for slots, names in sorted(named.items()))
        text += f". Slots needed to hold the batches in flight: {'; '.join(parts)}"
    return text


def _facts(
    simulated: Simulated, model: StepModel | None, row_bytes: int, floors: Mapping[str, int]
) -> dict[str, Any]:
    moved = simulated.fetched_rows + simulated.loaded_rows + simulated.evicted_rows
    facts = {
        **asdict(simulated),
        "hit_rate": simulated.hit_rate,
        "rows_per_batch": simulated.rows_per_batch,
        "bytes_per_batch": moved * row_bytes / max(1, simulated.batches),
        "fits_from_slots": floors.get(simulated.strategy),
        "lookups_per_second": simulated.lookups_per_second,
    }
    # Chunked batches have no prediction: the cost model does not know chunks.
    if model is None or simulated.chunked_batches:
        return facts
    time = model.time(
        find_simulated(simulated.strategy),
        simulated.rows_per_batch,
        simulated.evicted_rows / max(1, simulated.batches),
        None if model.machine.is_gpu else planning_ms_of(simulated, model.machine),
    )
    return facts | {
        "machine": model.machine.name,
        "all_fast_ms": model.base.ms,
        "all_fast_is": model.base.how,
        "step_ms": time.ms,
        "planning_ms": time.planning_ms,
        "moving_ms": time.moving_ms,
        "of_all_fast": model.base.ms / time.ms,
        "samples_per_second": 1e3 * model.batch_size / time.ms,
        "limit": time.limit,
    }


def _bound_facts(simulated: Simulated, least: float) -> dict[str, Any]:
    """Return the facts of Belady's bound, with the slots of a strategy."""
    lookups, batches = simulated.lookups, simulated.batches
    return {
        "strategy": "belady",
        "slots": simulated.slots,
        "batches": batches,
        "lookups": lookups,
        "unique_rows": simulated.unique_rows,
        "fetched_rows": round(least * batches),
        "hit_rate": 1 - least * batches / max(1, lookups),
        "rows_per_batch": least,
    }
