"""How much fast memory a run needs: curves of its trace, the planner, and the cost model.

One pass over the trace gives the rows that `lru` fetches with any number of slots
(sizing/reuse.py). The planner gives, for some numbers of slots, how many times as many `static` and
look-ahead fetch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.embedding.arguments import usable_device
from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.run.config import EmbeddingSection, RunConfig
from hotrow.run.job import build, model_of, open_data, tables_of
from hotrow.run.serve_template import Tables
from hotrow.run.strategy_names import find_named
from hotrow.sizing.budgets import (
    LEFT,
    budget_for,
    buffer_part_of,
    geometric,
    plan_bytes_of,
)
from hotrow.sizing.cost import StepTime, Work, all_fast_ms, dense_ms, step_time
from hotrow.sizing.machines import THIS, Machine, find_machine, measure
from hotrow.sizing.reuse import LONGEST_HOLD
from hotrow.sizing.simulator import Simulated, simulate
from hotrow.study.lookups import OfRun
from hotrow.study.profiling import profile_lookups
from hotrow.support.messages import apart
from hotrow.support.records import SizedOption, SizeRecord
from hotrow.support.streams import synchronize
from hotrow.support.units import show_bytes

DEPTHS = (10, 50, 200)
_SMALLEST = 1024  # the fewest slots tried: one for so many rows
_TRIED = 31  # numbers of slots
_PLANNED = 3  # of them, those for which look-ahead is planned
_SAME = 1.01  # steps that differ by less are equally fast
_NEAR_BEST = 1.02
_FALLING = 8  # times fewer slots than are settled: from there on misses give the slope
_FAIR = 4  # times fewer slots than are settled: rows evicted by their uses stay longer
_TIMED = 12  # measurements of all-fast
_TIMED_BYTES = 1 << 30  # the most of generated tables with which all-fast is timed
_NOT_MEASURED = 0.25  # more error where the dense part is guessed
_GUESSED, _GIVEN, _MEASURED = "guessed", "given", "measured"

Rows = NDArray[np.float64]  # by slots


@dataclass(frozen=True)
class Base:
    """A step with every row in fast memory."""

    ms: float
    how: str  # measured, given, guessed
    spread: float = 0.0  # of measured steps: half of p20 to p80, over the median


def machine_of(name: str, config: RunConfig) -> Machine:
    """Return the machine of a name; "this" one is measured, with the run's device."""
    if name != THIS:
        return find_machine(name)
    return measure(usable_device(config.run.device))


def planning_ms_of(simulated: Simulated, machine: Machine) -> float:
    """Return the time to plan a batch here, without sorting, which all-fast does as well."""
    sorting = machine.sort_ns * simulated.lookups * 1e-6
    return max(0.0, 1e3 * simulated.planning_seconds - sorting) / max(1, simulated.batches)


class StepModel:
    """Predicts the steps of a run on a machine, from what its batches look up."""

    def __init__(
        self,
        config: RunConfig,
        machine: Machine,
        *,
        lookups: float,
        unique_rows: float,
        num_rows: int,
        dense_ms: float | None,
    ) -> None:
        """`dense_ms`: see `base_of`."""
        self.machine, self.batch_size = machine, config.data.batch_size
        self.work = Work(
            lookups=lookups,
            unique_rows=unique_rows,
            row_bytes=config.row_bytes,
            table_bytes=num_rows * config.row_bytes,
            vector_bytes=4 * config.model.row_width,
        )
        self.base = base_of(config, machine, self.work, given_ms=dense_ms)

    def time(
        self,
        strategy: Strategy,
        fetched: float,
        evicted: float | None = None,
        planning_ms: float | None = None,
    ) -> StepTime:
        """`evicted`: by default as many rows as are fetched, as when all slots are taken."""
        moved = fetched if evicted is None else evicted
        work = replace(self.work, fetched_rows=fetched, evicted_rows=moved)
        return step_time(
            self.machine, strategy, work, all_fast_ms=self.base.ms, planning_ms=planning_ms
        )


# -- all-fast ------------------------------------------------------------------------------


def base_of(
    config: RunConfig,
    machine: Machine,
    work: Work,
    *,
    given_ms: float | None = None,
    most_bytes: int = _TIMED_BYTES,
) -> Base:
    """Return what a step of all-fast takes.

    `given_ms`: the time of the dense part. Without it, all-fast is timed on this machine, with
    tables of at most `most_bytes`, and guessed from the model's size for others.
    """
    if given_ms is not None:
        return Base(all_fast_ms(machine, work, dense_ms=given_ms), _GIVEN)
    timed = _timed(config, work, most_bytes) if machine.name == THIS else None
    if timed is not None:
        return timed
    guessed = guessed_dense_ms(config, machine)
    return Base(all_fast_ms(machine, work, dense_ms=guessed), _GUESSED)


def guessed_dense_ms(config: RunConfig, machine: Machine) -> float:
    """Guess the time of the dense part of a step from the model's size."""
    flops = 6.0 * _dense_weights(config) * config.data.batch_size
    return dense_ms(machine, flops * (1 + (config.model.num_steps or 0)))


def _timed(config: RunConfig, work: Work, most_bytes: int) -> Base | None:
    """Time some steps of the run; None: its tables are too large, and cannot be made smaller."""
    too_large = work.table_bytes / most_bytes
    if too_large > 1 and config.data.kind != "synthetic":
        return None
    if too_large > 1:
        config = replace(config, data=replace(config.data, scale=config.data.scale / too_large))
    is_gpu = config.run.device.startswith("cuda")
    # A GPU captures steps first, and is waited for after several steps only.
    together, warm_up = (20, 40) if is_gpu else (1, 3)
    steps = warm_up + together * _TIMED
    training = replace(config.training, steps=steps, eval_every=None, patience=None)
    # Without the run's budget and counts: they may not fit smaller tables.
    rows = EmbeddingSection(strategy="all-fast", optimizer=config.embedding.optimizer)
    job = build(replace(config, training=training, embedding=rows))
    marks = []
    for step, _ in enumerate(job.train(), start=1):
        if step >= warm_up and (step - warm_up) % together == 0:
            if is_gpu:
                synchronize(job.embedding.device)
            marks.append(perf_counter())
    seconds = np.diff(marks) / together
    low, middle, high = np.quantile(seconds, [0.2, 0.5, 0.8]).tolist()
    return Base(1e3 * middle, _MEASURED, (high - low) / 2 / middle)


def _dense_weights(config: RunConfig) -> int:
    """Count the weights of the model's matrices, built without the rows of its tables."""
    samples = open_data(config)
    model = model_of(config, samples, Tables(cast(Any, tables_of(config, samples))))
    return sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)


# -- what moves ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A strategy that the planner was run for, at some numbers of slots."""

    strategy: Strategy
    fetched: Rows = field(default_factory=lambda: np.zeros(0))  # by slots
    depth: int = 0
    planning_ms: float | None = None  # of a batch, where that was measured on the machine


class Sizing(StepModel):
    """What a run needs at every number of slots, from its trace."""

    def __init__(
        self,
        config: RunConfig,
        machine: Machine,
        *,
        batches: int,
        warm_up: int,
        depths: Sequence[int] = DEPTHS,
        dense_ms: float | None = None,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._batches, self._warm_up, self._depths = batches, warm_up, sorted(set(depths))
        self._on_batch = on_batch
        trace = OfRun(
            config.data,
            steps=config.model.num_steps,
            name=config.run.name,
            batches=warm_up + batches,
            repeats=False,
        )
        self._trace, self._num_rows = trace, trace.num_rows
        self.profile = profile_lookups(
            trace,
            slots=geometric(-(-trace.num_rows // _SMALLEST), trace.num_rows, _TRIED),
            first=warm_up,
            advance=lambda count: on_batch(),
        ).profile
        total, lru = self.profile.total, self.profile.curve("lru")
        self.slots: list[int] = lru.slots.tolist()
        self._lru = lru.per_batch
        super().__init__(
            config,
            machine,
            lookups=total.accesses / max(1, self.profile.batches),
            unique_rows=total.unique_rows,
            num_rows=trace.num_rows,
            dense_ms=dense_ms,
        )
        # Rows of the warm-up: with no more slots, the trace shows what lru fetches in the long run.
        self.settled_slots = float(total.distinct.value - self._lru[-1] * lru.batches)
        # With more, other strategies would keep rows that the trace reads for the first time.
        self.fair_slots = self.settled_slots / _FAIR
        self.error = math.hypot(machine.error, self.base.spread)
        if self.base.how == _GUESSED:
            self.error = math.hypot(self.error, _NOT_MEASURED)

    @property
    def most_bytes(self) -> float:
        """The largest budget that leaves the model its part of the machine's memory."""
        return (1 - LEFT) * self.machine.memory_gib * 2**30 or math.inf  # it may be unknown

    def _budget_bytes(self, slots: int, strategy: Strategy) -> int:
        if strategy.everything:
            return self._num_rows * self.work.row_bytes
        return budget_for(
            slots,
            row_bytes=self.work.row_bytes,
            num_rows=self._num_rows,
            buffer_part=buffer_part_of(strategy, torch.device(self.machine.device)),
            plan_bytes=plan_bytes_of(self.work.lookups) if self.machine.is_gpu else 0,
        )

    def least_recent(self) -> Rows:
        """Return the rows that a batch fetches with `lru` in the long run; NaN: it does not fit.

        A row that the trace reads for the first time was read before the trace began, longer ago
        than the warm-up, in which `settled_slots` different rows were read. With no more slots than
        that it was evicted, and is fetched. With more, misses go on falling as they fell before, by
        a power of the slots (Heaps' law), down to none with a slot for each row.
        """
        slots, rows = np.array(self.slots, dtype=np.float64), self._lru.copy()
        fits = ~np.isnan(rows)
        edge = max(self.settled_slots, float(slots[fits][0]))
        before = fits & (slots >= edge / _FALLING) & (slots <= edge) & (rows > 0)
        beyond = slots > edge
        if not beyond.any() or rows[-1] <= 0:
            return rows
        power = 0.0
        if before.sum() > 1:
            power = min(0.0, float(np.polyfit(np.log(slots[before]), np.log(rows[before]), 1)[0]))
        at_edge = float(np.interp(edge, slots[fits], rows[fits]))
        left = (self._num_rows - slots[beyond]) / max(1.0, self._num_rows - edge)
        rows[beyond] = at_edge * (slots[beyond] / edge) ** power * left
        return rows

    def options(self, planned: Planned, wanted_ms: float) -> Iterator[SizedOption]:
        """Yield the budgets that hold a strategy's batches and leave the model its memory."""
        # One batch more than must fit together: pinned rows take slots as well.
        held = min(planned.strategy.hold.batches + 1, LONGEST_HOLD)
        floor = min(self.profile.floors[held - 1], self._num_rows)
        for slots, rows in zip(self.slots, planned.fetched.tolist(), strict=True):
            if not math.isnan(rows) and slots >= floor:
                option = self.option(planned, slots, rows, wanted_ms)
                if option.budget_bytes <= self.most_bytes:
                    yield option

    def option(self, planned: Planned, slots: int, fetched: float, wanted_ms: float) -> SizedOption:
        strategy = planned.strategy
        time = self.time(strategy, fetched, planning_ms=planned.planning_ms)
        rate = 1e3 * self.batch_size / time.ms
        return SizedOption(
            strategy=strategy.name,
            budget_bytes=self._budget_bytes(slots, strategy),
            slots=slots,
            slot_share=slots / self._num_rows,
            pinned_share=1.0
            if strategy.everything
            else strategy.pinned_part * strategy.learns_pins,
            depth=planned.depth,
            fill=time.form,
            moved_rows=2 * fetched,
            step_ms=time.ms,
            planning_ms=time.planning_ms,
            moving_ms=time.moving_ms,
            of_all_fast=self.base.ms / time.ms,
            samples_per_second=rate,
            low_samples_per_second=rate / (1 + self.error),
            high_samples_per_second=rate * (1 + self.error),
            limit=time.limit,
            reaches=time.ms <= wanted_ms,
        )

    def planned(self, slots: Sequence[int]) -> Iterator[Planned]:
        """Run the planner with some numbers of slots: `lru`, `static`, look-ahead by depth."""
        ahead = STRATEGIES["lookahead"]
        strategies = [STRATEGIES["lru"], STRATEGIES["static"]]
        strategies += [replace(ahead, look_ahead=depth) for depth in self._depths]
        known = self._warm_up + self._batches + max(self._depths)
        simulated = simulate(
            (batch.rows for batch in self._trace.batches(known)),
            num_rows=self._num_rows,
            choices=[(strategy, size) for strategy in strategies for size in slots],
            warm_up=self._warm_up,
            counted=self._batches,
            on_batch=self._on_batch,
            as_trained=not self.machine.is_gpu,
        )
        recent = dict(zip(self.slots, self._lru.tolist(), strict=True))
        fewest = np.full(len(self.slots), np.inf)
        for place, strategy in enumerate(strategies):
            results = simulated[place * len(slots) : (place + 1) * len(slots)]
            over = [each.rows_per_batch / max(recent[each.slots], 1e-9) for each in results]
            planning = median(planning_ms_of(each, self.machine) for each in results)
            fetched = self._over_recent(slots, over, strategy)
            if strategy.overlapped:  # a larger depth never fetches more
                fetched = fewest = np.minimum(fetched, fewest)
            measured = None if self.machine.is_gpu else planning
            yield Planned(strategy, fetched, results[0].depth, measured)

    def _over_recent(
        self, planned: Sequence[int], over: Sequence[float], strategy: Strategy
    ) -> Rows:
        """Return rows by slots, from how many times lru's a strategy fetches at some of them.

        Between those slots the factor is straight in their logarithm. With more slots, look-ahead
        gains less: a third of its best gain by counting uses, and as much again for each turnover
        of the slots that it sees (fitted: docs/size.md has the data). More slots never fetch more.
        """
        slots, recent = np.array(self.slots, dtype=np.float64), self.least_recent()
        factor = np.interp(np.log(slots), np.log(planned), over)
        if strategy.overlapped:
            seen = (strategy.look_ahead or 0) * recent / slots
            gained = np.minimum(1.0, (1 + seen) / 3)
            last, beyond = self.slots.index(planned[-1]), slots > planned[-1]
            factor[beyond] = 1 - (1 - factor[beyond]) * gained[beyond] / gained[last]
        rows: Rows = np.fmin.accumulate(factor * recent)
        return rows


# -- the answer ----------------------------------------------------------------------------


def size(sizing: Sizing, *, reach: float) -> SizeRecord:
    """Return the smallest budget with `reach` of all-fast's speed, of any strategy."""
    wanted, work, rows = sizing.base.ms / reach, sizing.work, sizing.profile.total.rows
    everything = sizing.option(Planned(STRATEGIES["all-fast"]), rows, 0.0, wanted)
    options = [
        option
        for planned in sizing.planned(_worth_planning(sizing, wanted))
        for option in sizing.options(planned, wanted)
        if option.budget_bytes < everything.budget_bytes  # else all-fast takes no more
    ]
    best = [
        _best([option for option in options if option.strategy == name])
        for name in dict.fromkeys(option.strategy for option in options)
    ]
    chosen, notes = _choose(sizing, best, everything, reach)
    return SizeRecord(
        name=sizing.config.run.name,
        machine=asdict(sizing.machine),
        reach=reach,
        rows_bytes=int(work.table_bytes),
        num_rows=rows,
        batch_size=sizing.config.data.batch_size,
        lookups=work.lookups,
        unique_rows=work.unique_rows,
        all_fast_ms=sizing.base.ms,
        all_fast_is=sizing.base.how,
        error=sizing.error,
        chosen=chosen,
        best=(everything, *best),
        options=tuple(options),
        notes=(*notes, *_other_samples(sizing), *sizing.profile.notes),
    )


def _worth_planning(sizing: Sizing, wanted: float) -> list[int]:
    """Return slots around the answer, if look-ahead fetched what lru does, up to the most for which
    the trace is fair."""
    recent = sizing.least_recent()
    for name in ("lookahead", "lru"):
        options = list(sizing.options(Planned(STRATEGIES[name], recent), wanted))
        if options:
            break
    else:
        raise ValueError(
            "no budget leaves the model its part of memory: slots for the rows of two batches, "
            f"{sizing.profile.floors[1]:,} of {sizing.work.row_bytes:,} bytes, do not fit "
            f"{_memory(sizing)}; lower data.batch_size"
        )
    fair = max(1, sum(option.slots <= sizing.fair_slots for option in options))
    enough = (place for place, option in enumerate(options, start=1) if option.reaches)
    last = min(fair, next(enough, fair))
    return [option.slots for option in options[:last][::-2][:_PLANNED][::-1]]


def _best(options: Sequence[SizedOption]) -> SizedOption:
    """Return the smallest that reaches it, or is about as fast as any; then the smallest depth."""
    fastest = min(option.step_ms for option in options)
    enough = [option for option in options if option.reaches]
    enough = enough or [option for option in options if option.step_ms <= _NEAR_BEST * fastest]
    budget = min(option.budget_bytes for option in enough)
    smallest = [option for option in enough if option.budget_bytes == budget]
    quickest = min(option.step_ms for option in smallest)
    same = [option for option in smallest if option.step_ms <= _SAME * quickest]
    return min(same, key=lambda option: option.depth)


def _choose(
    sizing: Sizing, best: Sequence[SizedOption], everything: SizedOption, reach: float
) -> tuple[SizedOption, list[str]]:
    if not best:
        needed = show_bytes(everything.budget_bytes)
        return everything, [f"slots that are enough for batches need at least as much: {needed}"]
    fits = everything.budget_bytes <= sizing.most_bytes
    reaching = [option for option in best if option.reaches] + [everything] * fits
    if reaching:
        chosen = min(reaching, key=lambda option: (option.budget_bytes, option.step_ms))
        if chosen is not everything or len(reaching) > 1:
            return chosen, []
    nearest = min(best, key=lambda option: option.step_ms)
    least = f"{math.floor(100 * nearest.of_all_fast) / 100:g}"
    wanted, reached = apart(reach, nearest.of_all_fast, digits=0, kind="%")
    note = (
        f"with fewer slots than rows no strategy has {wanted} of all-fast's speed; nearest is "
        f"{nearest.strategy} with {reached} in {show_bytes(nearest.budget_bytes)}"
    )
    if not fits:
        return nearest, [f"{note}, and all rows do not fit {_memory(sizing)}"]
    return everything, [f"{note}: --reach {least} would take it"]


def _memory(sizing: Sizing) -> str:
    machine = sizing.machine
    memory = show_bytes(machine.memory_gib * 2**30)
    return f"{1 - LEFT:.0%} of the {memory} of {machine.gpu or 'this machine'}"


def _other_samples(sizing: Sizing) -> list[str]:
    named = find_named(sizing.config.embedding.strategy)
    if named.system is None and named.skip is None:
        return []
    return [
        f"{named.name} orders samples, or leaves some out; predicted is a run that trains all of "
        "them in their order"
    ]
