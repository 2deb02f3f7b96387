"""How much fast memory a run needs: curves of its trace, the planner, and the cost model.

One pass over the trace tells what `lru` would fetch with any number of slots (sizing/reuse.py).
How much less, or more, `static` and look-ahead fetch, the planner tells for some numbers of slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.embedding.arguments import usable_device
from hotrow.embedding.collection import EmbeddingBagCollection, EmbeddingCollection
from hotrow.engine.strategy import STRATEGIES, Strategy
from hotrow.models import MODELS
from hotrow.run.config import EmbeddingSection, RunConfig
from hotrow.run.job import build, open_data, tables_of
from hotrow.run.source import Samples
from hotrow.run.strategy_names import find_named
from hotrow.sizing.budgets import (
    LEFT,
    Point,
    budget_for,
    buffer_part_of,
    first_reaching,
    geometric,
    plan_bytes_of,
)
from hotrow.sizing.ceilings import measure
from hotrow.sizing.cost import StepTime, Work, all_fast_ms, dense_ms, step_time
from hotrow.sizing.machines import THIS, Machine, find_machine
from hotrow.sizing.reuse import LONGEST_HOLD
from hotrow.sizing.simulator import Simulated, simulate
from hotrow.study.lookups import NO_ROW, OfRun
from hotrow.study.profiling import DataProfile, profile_lookups
from hotrow.support.messages import apart
from hotrow.support.records import SizedOption, SizeRecord
from hotrow.support.streams import synchronize
from hotrow.support.units import show_bytes

DEPTHS = (10, 50, 200)
_SMALLEST = 1024  # of the rows, one part of so many
_TRIED = 31  # numbers of slots
_PLANNED = 3  # of them, for which look-ahead is planned
_SAME = 1.01  # steps that differ by less are as fast
_NEAR_BEST = 1.02
_FALLING = 8  # times fewer slots than are settled: from there on it is told how misses fall
_FAIR = 4  # times fewer slots than are settled: rows that leave by their uses stay longer
_TIMED = 12  # times that are taken of all-fast
_TIMED_BYTES = 1 << 30  # generated tables with which all-fast is timed
_NOT_MEASURED = 0.25  # more error where the dense part is guessed
_GUESSED, _GIVEN, _MEASURED = "guessed", "given", "measured"


@dataclass(frozen=True)
class Base:
    """A step with every row in fast memory."""

    ms: float
    how: str  # measured, given, guessed
    spread: float = 0.0  # of the measured ones, from p20 to p80, halved, over the median


def machine_of(name: str, config: RunConfig) -> Machine:
    """By its name, or "this" one with the run's device."""
    if name != THIS:
        return find_machine(name)
    return measure(usable_device(torch.device(config.run.device)))


def row_bytes_of(config: RunConfig) -> int:
    width = config.model.row_width
    return 4 * (width + config.embedding.optimizer.rule().state_width(width))


# -- all-fast ------------------------------------------------------------------------------


def base_of(
    config: RunConfig, machine: Machine, work: Work, *, given_ms: float | None = None
) -> Base:
    """`given_ms`: what the dense part takes. Without it, all-fast is timed if that can be done
    here, and guessed from the model's size otherwise."""
    if given_ms is not None:
        return Base(all_fast_ms(machine, work, dense_ms=given_ms), _GIVEN)
    timed = _timed(config, work) if machine.name == THIS else None
    if timed is not None:
        return timed
    samples = open_data(config)
    flops = 6.0 * _dense_weights(config, samples) * config.data.batch_size
    flops *= 1 + (config.model.num_steps or 0)
    guessed = dense_ms(machine, flops)
    return Base(all_fast_ms(machine, work, dense_ms=guessed), _GUESSED)


def _timed(config: RunConfig, work: Work) -> Base | None:
    """Some steps of the run itself; None: its tables are too large, and cannot be made smaller."""
    too_large = work.table_bytes / _TIMED_BYTES
    if too_large > 1 and config.data.kind != "synthetic":
        return None
    if too_large > 1:
        data = replace(config.data, scale=config.data.scale / too_large)
        config = replace(config, data=data)
    is_gpu = config.run.device.startswith("cuda")
    # A GPU is waited for after several steps alone; it captures them before.
    at_once, warm_up = (20, 40) if is_gpu else (1, 3)
    steps = warm_up + at_once * _TIMED
    training = replace(config.training, steps=steps, eval_every=None, patience=None)
    # Without its budget and counts, which may be for this run as it is.
    rows = EmbeddingSection(strategy="all-fast", optimizer=config.embedding.optimizer)
    job = build(replace(config, training=training, embedding=rows))
    marks = []
    for step, _ in enumerate(job.train(), start=1):
        if step >= warm_up and (step - warm_up) % at_once == 0:
            if is_gpu:
                synchronize(job.embedding.device)
            marks.append(perf_counter())
    found = np.diff(marks) / at_once
    low, middle, high = np.quantile(found, [0.2, 0.5, 0.8]).tolist()
    return Base(1e3 * middle, _MEASURED, (high - low) / 2 / middle)


def _dense_weights(config: RunConfig, samples: Samples) -> int:
    """Of the model's matrices, without a row of its tables."""
    is_sequence = config.model.num_steps is not None
    tables = [
        replace(each, num_embeddings=2, padding_idx=1 if is_sequence else None)
        for each in tables_of(config, samples)
    ]
    kind = EmbeddingCollection if is_sequence else EmbeddingBagCollection
    rule = config.embedding.optimizer.rule()
    embedding = kind(tables=tables, optimizer=rule, strategy="all-fast")
    model = MODELS[config.model.kind](
        embedding,
        samples.num_dense,
        **config.model.arguments,
        generator=torch.Generator().manual_seed(0),
    )
    return sum(each.numel() for each in model.parameters() if each.dim() > 1)


# -- what moves ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A strategy that the planner was run for, at some numbers of slots."""

    strategy: Strategy
    depth: int
    fetched: NDArray[np.float64]  # by slots: times lru's, which is straight in their logarithm
    planning_ms: float | None  # of a batch, where that was measured on the machine in question


class Sizing:
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
        self.config, self.machine = config, machine
        self._batches, self._warm_up, self._depths = batches, warm_up, sorted(set(depths))
        self._on_batch = on_batch
        self.row_bytes = row_bytes_of(config)
        self.profile = self._profiled()
        self._num_rows = self.profile.total.rows
        self.base = base_of(config, machine, self.work(0.0), given_ms=dense_ms)
        self.error = math.hypot(machine.error, self.base.spread)
        if self.base.how == _GUESSED:
            self.error = math.hypot(self.error, _NOT_MEASURED)

    def _lookups(self, batches: int) -> OfRun:
        """So many that are all different, where data are generated; a folder's, again and again."""
        data, known = self.config.data, self._warm_up + self._batches + max(self._depths)
        if data.kind != "prepared":
            data = replace(data, samples=max(data.samples, known * data.batch_size))
        steps = self.config.model.num_steps
        return OfRun(data, steps=steps, name=self.config.run.name, batches=batches)

    def _trace(self, batches: int) -> Iterator[Tensor]:
        for batch in self._lookups(batches).batches():
            yield torch.from_numpy(batch.ids[batch.ids != NO_ROW]).long()

    def _profiled(self) -> DataProfile:
        lookups = self._lookups(self._warm_up + self._batches)
        num_rows = sum(lookups.rows.values())
        slots = geometric(-(-num_rows // _SMALLEST), num_rows, _TRIED)
        found = profile_lookups(
            lookups,
            slots=slots,
            first=self._warm_up,
            advance=lambda count: self._on_batch(),
        )
        return found.profile

    def work(self, fetched: float) -> Work:
        total = self.profile.total
        return Work(
            lookups=total.accesses / max(1, self.profile.batches),
            unique_rows=total.unique_rows,
            row_bytes=self.row_bytes,
            table_bytes=total.rows * self.row_bytes,
            fetched_rows=fetched,
            evicted_rows=fetched,  # once all slots are taken
            vector_bytes=4 * self.config.model.row_width,
        )

    @property
    def most_bytes(self) -> float:
        """The largest budget that leaves the model its part of the machine's memory."""
        return (1 - LEFT) * self.machine.memory_gib * 2**30 or math.inf  # it may not be known

    def budget_bytes(self, slots: int, strategy: Strategy) -> int:
        device = torch.device(self.machine.device)
        return budget_for(
            slots,
            row_bytes=self.row_bytes,
            num_rows=self._num_rows,
            buffer_part=buffer_part_of(strategy, device),
            plan_bytes=plan_bytes_of(self.work(0).lookups) if self.machine.is_gpu else 0,
        )

    @property
    def settled_slots(self) -> float:
        """Rows of the warm-up: up to so many slots a trace tells what lru fetches for good."""
        curve, distinct = self.profile.curve("lru"), self.profile.total.distinct.value
        return float(distinct - curve.per_batch[-1] * curve.batches)

    @property
    def fair_slots(self) -> float:
        """Up to so many it tells what others fetch: with more, rows would have stayed that it reads
        for the first time."""
        return self.settled_slots / _FAIR

    def least_recent(self) -> NDArray[np.float64]:
        """Rows that a batch fetches with `lru` in the long run, by slots; NaN: it does not fit.

        A row that the trace reads for the first time was read before, in truth, but longer ago than
        the warm-up, in which `settled_slots` different rows were read. So with no more slots it has
        left, and is fetched. With more, misses go on falling as they fell before, by a power of the
        slots (Heaps' law), and to none with a slot for each row.
        """
        slots, found = np.array(self.slots, dtype=np.float64), self._lru.copy()
        edge = max(self.settled_slots, float(slots[~np.isnan(found)][0]))
        before = (~np.isnan(found)) & (slots >= edge / _FALLING) & (slots <= edge) & (found > 0)
        beyond = slots > edge
        if not beyond.any() or self._lru[-1] <= 0:
            return found
        power = 0.0
        if before.sum() > 1:
            power = min(0.0, float(np.polyfit(np.log(slots[before]), np.log(found[before]), 1)[0]))
        there = float(np.interp(edge, slots[~np.isnan(found)], found[~np.isnan(found)]))
        left = (self._num_rows - slots[beyond]) / max(1.0, self._num_rows - edge)
        found[beyond] = there * (slots[beyond] / edge) ** power * left
        return found

    @property
    def _lru(self) -> NDArray[np.float64]:
        return self.profile.curve("lru").per_batch

    @property
    def slots(self) -> list[int]:
        found: list[int] = self.profile.curves[0].slots.tolist()
        return found

    def points(
        self, strategy: Strategy, fetched: NDArray[np.float64], *, planning_ms: float | None = None
    ) -> Iterator[Point]:
        # One batch more than must fit together, since pinned rows are in the way.
        held = min(strategy.hold.batches + 1, LONGEST_HOLD)
        floor = min(self.profile.floors[held - 1], self._num_rows)
        for slots, rows in zip(self.slots, fetched.tolist(), strict=True):
            budget = self.budget_bytes(slots, strategy)
            if math.isnan(rows) or slots < floor or budget > self.most_bytes:
                continue
            yield Point(slots, budget, rows, self.time(strategy, rows, planning_ms))

    def time(
        self, strategy: Strategy, fetched: float, planning_ms: float | None = None
    ) -> StepTime:
        return step_time(
            self.machine,
            strategy,
            self.work(fetched),
            all_fast_ms=self.base.ms,
            planning_ms=planning_ms,
        )

    def planned(self, slots: Sequence[int]) -> Iterator[Planned]:
        """By the planner, with some numbers of slots: `lru`, `static`, and look-ahead at each
        depth."""
        ahead = STRATEGIES["lookahead"]
        strategies = [STRATEGIES["lru"], STRATEGIES["static"]]
        strategies += [replace(ahead, look_ahead=depth) for depth in self._depths]
        found = simulate(
            self._trace(self._warm_up + self._batches + max(self._depths)),
            num_rows=self._num_rows,
            choices=[(strategy, each) for strategy in strategies for each in slots],
            warm_up=self._warm_up,
            counted=self._batches,
            on_batch=self._on_batch,
            as_trained=not self.machine.is_gpu,
        )
        recent = dict(zip(self.slots, self._lru.tolist(), strict=True))
        nearer = np.full(len(self.slots), np.inf)
        for place, strategy in enumerate(strategies):
            mine = found[place * len(slots) : (place + 1) * len(slots)]
            over = [each.rows_per_batch / max(recent[each.slots], 1e-9) for each in mine]
            planning = median(planning_ms_of(each, self.machine) for each in mine)
            fetched = self._over_recent(slots, over, strategy)
            if strategy.overlapped:  # who sees more never fetches more
                fetched = nearer = np.minimum(fetched, nearer)
            yield Planned(
                strategy,
                mine[0].depth,
                fetched,
                None if self.machine.is_gpu else planning,
            )

    def _over_recent(
        self, planned: Sequence[int], over: Sequence[float], strategy: Strategy
    ) -> NDArray[np.float64]:
        """Rows by slots, of those that lru fetches so many times at some of them.

        Between them the factor is straight in the logarithm of slots. With more, look-ahead gains
        less: a third of what it can by heeding uses, and as much for all batches in which slots are
        replaced that it sees (fitted: docs/size.md says to what). More slots never fetch more.
        """
        slots, recent = np.array(self.slots, dtype=np.float64), self.least_recent()
        factor = np.interp(np.log(slots), np.log(planned), over)
        if strategy.overlapped:
            seen = (strategy.look_ahead or 0) * recent / slots
            gained = np.minimum(1.0, (1 + seen) / 3)
            last, there = self.slots.index(planned[-1]), slots > planned[-1]
            factor[there] = 1 - (1 - factor[there]) * gained[there] / gained[last]
        found: NDArray[np.float64] = np.fmin.accumulate(factor * recent)
        return found


def planning_ms_of(found: Simulated, machine: Machine) -> float:
    """What it took here to plan a batch, without sorting, which all-fast does, too."""
    sorting = machine.sort_ns * found.lookups * 1e-6
    return max(0.0, 1e3 * found.planning_seconds - sorting) / max(1, found.batches)


# -- the answer ----------------------------------------------------------------------------


def size(sizing: Sizing, *, reach: float) -> SizeRecord:
    """The smallest budget with `reach` of all-fast's speed, of any strategy."""
    wanted = sizing.base.ms / reach
    everything = _everything(sizing, wanted)
    options = []
    for each in sizing.planned(_worth_planning(sizing, wanted)):
        points = sizing.points(each.strategy, each.fetched, planning_ms=each.planning_ms)
        options += [
            _option(sizing, each.strategy, each.depth, point, wanted)
            for point in points
            if point.budget_bytes < everything.budget_bytes  # else all-fast takes no more
        ]
    best = [
        _best([each for each in options if each.strategy == name])
        for name in dict.fromkeys(each.strategy for each in options)
    ]
    chosen, notes = _choose(sizing, best, everything, reach)
    work = sizing.work(0.0)
    return SizeRecord(
        name=sizing.config.run.name,
        machine=asdict(sizing.machine),
        reach=reach,
        rows_bytes=int(work.table_bytes),
        num_rows=sizing.profile.total.rows,
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
    """Slots about where the answer is, if look-ahead fetched what lru does, or the most that the
    trace is fair to."""
    recent = sizing.least_recent()
    points = list(sizing.points(STRATEGIES["lookahead"], recent))
    points = points or list(sizing.points(STRATEGIES["lru"], recent))
    if not points:
        raise ValueError(
            "no budget leaves the model its part of memory: slots for the rows of two batches, "
            f"{sizing.profile.floors[1]:,} of {sizing.row_bytes:,} bytes, do not fit "
            f"{_memory(sizing)}; lower data.batch_size"
        )
    sizes, found = [each.slots for each in points], first_reaching(points, wanted)
    fair = max(1, sum(each <= sizing.fair_slots for each in sizes))
    last = fair if found is None else min(fair, sizes.index(found.slots) + 1)
    return sizes[:last][::-2][:_PLANNED][::-1]


def _option(
    sizing: Sizing, strategy: Strategy, depth: int, point: Point, wanted: float
) -> SizedOption:
    rate = 1e3 * sizing.config.data.batch_size / point.time.ms
    return SizedOption(
        strategy=strategy.name,
        budget_bytes=point.budget_bytes,
        slots=point.slots,
        slot_share=point.slots / sizing.profile.total.rows,
        pinned_share=strategy.pinned_part if strategy.learns_pins else 0.0,
        depth=depth,
        fill=point.time.form,
        moved_rows=2 * point.fetched_rows,
        step_ms=point.time.ms,
        planning_ms=point.time.planning_ms,
        moving_ms=point.time.moving_ms,
        of_all_fast=sizing.base.ms / point.time.ms,
        samples_per_second=rate,
        low_samples_per_second=rate / (1 + sizing.error),
        high_samples_per_second=rate * (1 + sizing.error),
        limit=point.time.limit,
        reaches=point.time.ms <= wanted,
    )


def _everything(sizing: Sizing, wanted: float) -> SizedOption:
    rows = sizing.profile.total.rows
    time = sizing.time(STRATEGIES["all-fast"], 0.0)
    point = Point(rows, rows * sizing.row_bytes, 0.0, time)
    return replace(_option(sizing, STRATEGIES["all-fast"], 0, point, wanted), pinned_share=1.0)


def _best(options: Sequence[SizedOption]) -> SizedOption:
    """The smallest that reaches it, or that is about as fast as any; then the smallest depth."""
    fastest = min(each.step_ms for each in options)
    enough = [each for each in options if each.reaches]
    enough = enough or [each for each in options if each.step_ms <= _NEAR_BEST * fastest]
    budget = min(each.budget_bytes for each in enough)
    there = [each for each in enough if each.budget_bytes == budget]
    quickest = min(each.step_ms for each in there)
    same = [each for each in there if each.step_ms <= _SAME * quickest]
    return min(same, key=lambda each: each.depth)


def _choose(
    sizing: Sizing, best: Sequence[SizedOption], everything: SizedOption, reach: float
) -> tuple[SizedOption, list[str]]:
    if not best:
        needed = show_bytes(everything.budget_bytes)
        return everything, [f"slots that are enough for batches need at least as much: {needed}"]
    fits = everything.budget_bytes <= sizing.most_bytes
    reaching = [each for each in best if each.reaches] + [everything] * fits
    if reaching:
        chosen = min(reaching, key=lambda each: (each.budget_bytes, each.step_ms))
        if chosen is not everything or len(reaching) > 1:
            return chosen, []
    nearest = min(best, key=lambda each: each.step_ms)
    least = f"{math.floor(100 * nearest.of_all_fast) / 100:g}"
    wanted, found = apart(reach, nearest.of_all_fast, digits=0, kind="%")
    told = (
        f"with fewer slots than rows no strategy has {wanted} of all-fast's speed; nearest is "
        f"{nearest.strategy} with {found} in {show_bytes(nearest.budget_bytes)}"
    )
    if not fits:
        return nearest, [f"{told}, and all rows do not fit {_memory(sizing)}"]
    return everything, [f"{told}: --reach {least} would take it"]


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
