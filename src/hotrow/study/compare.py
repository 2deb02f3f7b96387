"""Strategies side by side: one run, trained by each of them in turn, again and again.

    comparison = Comparison(config, choose(config, ["lookahead", "lru"]))
    for turn in comparison.run(Path("out")):
        print(turn)
    print(comparison.record("finished"))

Knows no screen. One system is in memory at a time: built, trained, looked at, let go.
"""

from __future__ import annotations

import gc
import math
import statistics
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch

from hotrow.embedding.arguments import usable_device
from hotrow.inputs.tree import tensors_in
from hotrow.run.config import RunConfig
from hotrow.run.files import environment, now
from hotrow.run.job import open_data, total_steps, with_budget
from hotrow.run.source import AnyBatch, Samples
from hotrow.run.strategy_names import followed
from hotrow.run.tally import Tally
from hotrow.study.likeness import (
    ABSOLUTE,
    OUTLIERS,
    RELATIVE,
    Bits,
    Distance,
    Reference,
    bits_of,
    room_for_reference,
)
from hotrow.study.systems import SYSTEMS, System, SystemKind, find_system, reordered
from hotrow.support.host_memory import available_bytes
from hotrow.support.messages import few, many
from hotrow.support.records import ComparisonRecord, EvalRecord, Figures, StepRecord
from hotrow.support.streams import Mark, lanes_of
from hotrow.support.units import parse_bytes, show_bytes
from hotrow.systems.slipstream.skip import SkipRecord
from hotrow.systems.slipstream.slipstream import RandomDrop, Slipstream

REFERENCE = "all-fast"
CONTROLS = (1, 2)  # seeds
BASELINE = "hybrid"
USUAL = (REFERENCE, BASELINE, "static", "lru", "scratchpipe", "lookahead")
_MOST_KEPT = 4 << 30  # bytes of batches that are kept in memory
_MUCH = 0.1  # of a run's time
_SEEDS_DIFFER = 1e-3  # AUC: a smaller difference between two runs may come from their seed
_EXPECTED = (ValueError, OSError, MemoryError, torch.OutOfMemoryError)  # no traceback is wanted


@dataclass
class Entry:
    """One strategy of a comparison, and what is known of it so far."""

    kind: SystemKind
    repetitions: int
    is_optional: bool = False  # nobody asked for it
    done: int = 0  # repetitions
    message: str = ""  # why it failed
    traceback: str = ""
    rates: list[float] = field(default_factory=list)  # samples/s of timed steps
    whole_runs: list[float] = field(default_factory=list)  # samples/s of each repetition
    tally: Tally | None = None  # of the first repetition, as all below
    quality: EvalRecord | None = None
    memory: dict[str, int] = field(default_factory=dict)
    bits: Bits | None = None
    equal: str = "not compared"
    equal_note: str = ""
    distance: Distance | None = None  # from all-fast, where no bits are promised
    changes: list[str] = field(default_factory=list)  # repetitions that ended in other bits

    @property
    def has_failed(self) -> bool:
        return bool(self.message)


@dataclass(frozen=True)
class Turn:
    """Where a comparison is: `stage` is "reading" (of batches, before any strategy's turn),
    "building", "training", "evaluating", "comparing", "finished" or "failed"."""

    strategy: str
    repetition: int  # from 1 on
    repetitions: int
    stage: str
    steps: int = 0  # of this turn
    loss: float = math.nan
    samples_per_second: float = math.nan  # of a turn that has finished
    message: str = ""


def usual_strategies(config: RunConfig) -> list[str]:
    """What is compared if nobody says what: the run's own strategy is among it."""
    mine = config.embedding.strategy
    return [*USUAL, *([] if mine in USUAL else [mine])]


def choose(
    config: RunConfig, names: Sequence[str] | None = None, *, repeat: int = 3
) -> list[Entry]:
    """The strategies of a comparison, all-fast first: the others are compared with it. One with
    random-drop comes after the one with slipstream, as many of whose samples it leaves out."""
    is_usual = names is None
    names = usual_strategies(config) if names is None else names
    for name in names:
        if list(names).count(name) > 1:
            raise ValueError(f"strategy {name!r} is named twice")
    kinds = [find_system(name) for name in names]
    for kind in [each for each in kinds if followed(each.name) in names]:
        kinds.remove(kind)
        kinds.insert(1 + [each.name for each in kinds].index(followed(kind.name) or ""), kind)
    entries = [Entry(kind, repeat) for kind in kinds if kind.name != REFERENCE]
    is_optional = is_usual or REFERENCE not in names
    # Where nobody asked for it, once is enough to compare with.
    count = repeat if REFERENCE in names else 1
    return [Entry(SYSTEMS[REFERENCE], count, is_optional), *entries]


class Comparison:
    """`run` trains; `record` tells at any time what is known."""

    def __init__(
        self,
        config: RunConfig,
        entries: Sequence[Entry],
        *,
        warm_up: int | None = None,
        most_kept: int | None = None,
    ) -> None:
        """`warm_up`: first steps of each repetition that no speed is of; a tenth if left out.
        `most_kept`: bytes of batches that may stay in memory."""
        usable_device(torch.device(config.run.device))  # or says why not
        samples = open_data(config)
        config = with_budget(config, samples)
        self.config, self.entries = config, list(entries)
        self.steps = total_steps(config, samples)
        self.warm_up = min(max(3, self.steps // 10), self.steps - 1) if warm_up is None else warm_up
        if not 0 <= self.warm_up < self.steps:
            raise ValueError(
                f"a warm-up of {many(self.warm_up, 'step')} leaves none of {self.steps:,} to be "
                "timed"
            )
        self._samples, self._most_kept = samples, most_kept
        self._started = now()
        self._notes: list[str] = []
        self._reference: Reference | None = None
        self._why_no_distance = ""
        self._left_out: dict[str, SkipRecord] = {}  # by strategies with slipstream
        width = config.model.row_width
        width += config.embedding.optimizer.rule().state_width(width)
        self.rows_bytes = sum(4 * width * rows for rows, _ in samples.tables.values())
        self.budget_bytes = parse_bytes(config.embedding.budget, total=self.rows_bytes)

    @property
    def total_steps(self) -> int:
        """Of all turns together, if none fails."""
        return self.steps * sum(entry.repetitions for entry in self.entries)

    def run(self, folder: Path) -> Generator[Turn]:
        """All strategies once, then all of them again: what disturbs a machine for a while
        disturbs them alike. Whoever leaves early has what is done by then. `folder` is for what
        does not fit memory meanwhile."""
        self._folder = folder
        gc.freeze()  # what is there already need not be searched whenever a system goes
        try:
            yield from self._keep_batches()
            for repetition in range(1, max(entry.repetitions for entry in self.entries) + 1):
                for entry in self.entries:
                    if repetition <= entry.repetitions and not entry.has_failed:
                        yield from self._turn(entry, repetition)
                if repetition == 1:
                    yield from self._measure_rounding()
        finally:
            gc.unfreeze()
            if self._reference is not None:
                self._reference.close()
                self._reference = None

    def _turn(self, entry: Entry, repetition: int) -> Iterator[Turn]:
        turn = Turn(entry.kind.name, repetition, entry.repetitions, "building")
        try:
            yield turn
            yield from self._train(entry, turn)
        except Exception as error:  # whatever it is, the others go on
            # As text: the error itself holds on to the system by its frames.
            expected = isinstance(error, _EXPECTED)
            said = " ".join(str(error).split())
            entry.message = said if expected and said else f"{type(error).__name__}: {said}"
            entry.traceback = "" if expected else traceback.format_exc()
        finally:
            _let_go()
        if entry.has_failed:
            yield replace(turn, stage="failed", message=entry.message)

    def _train(self, entry: Entry, turn: Turn) -> Iterator[Turn]:
        if (reason := entry.kind.refuses(self.config)) is not None:
            raise ValueError(reason)
        system = entry.kind.build(self.config, self._samples)
        self._follow(entry, system)
        tally, clock, started = Tally(), _Clock(system.device), perf_counter()
        for record in system.train():
            tally.add(record)
            clock.add(record)
            yield replace(turn, stage="training", steps=tally.steps, loss=tally.loss)
        tally.finish()
        self._note_evaluated(entry, system, perf_counter() - started)
        if isinstance(skip := getattr(system, "skip", None), Slipstream):
            self._left_out[entry.kind.name] = skip.record
        rates = clock.rates(self.warm_up)
        whole_run = clock.whole_run(self.warm_up, self.steps * self.config.data.batch_size)
        turn = replace(turn, steps=tally.steps, loss=tally.loss)
        if entry.quality is None:
            yield replace(turn, stage="evaluating")
            quality = system.evaluate()
        else:
            quality = entry.quality
        yield replace(turn, stage="comparing")
        self._note(entry, turn.repetition, system, tally)
        entry.quality = quality
        entry.rates += rates
        entry.whole_runs.append(whole_run)
        entry.done += 1
        yield replace(
            turn,
            stage="finished",
            samples_per_second=whole_run,
        )

    def _follow(self, entry: Entry, system: System) -> None:
        """Leave out as many samples at random as slipstream has, where both are compared."""
        skip, other = getattr(system, "skip", None), followed(entry.kind.name)
        if not isinstance(skip, RandomDrop) or not any(e.kind.name == other for e in self.entries):
            return
        found, target = self._left_out.get(other or ""), f"{self.config.system.target:.0%} of all"
        if found is None:
            said = f"{target} samples, since {other} failed"
        elif found.mode == "rows":
            said = f"{target} samples, since {other} leaves out updates of rows and no sample"
        else:
            skip.follow(found)
            said = f"as many samples as {other}: {found.dropped:,} of {found.offered:,}"
        self._notes = list(dict.fromkeys([*self._notes, f"{entry.kind.name} leaves out {said}"]))

    def _note_evaluated(self, entry: Entry, system: System, seconds: float) -> None:
        """What a system evaluates while it trains is a part of its speed, and may be most of it."""
        samples, taken = getattr(system, "on_the_way", (0, 0.0))
        if not entry.done and taken > _MUCH * seconds:
            self._notes.append(
                f"{entry.kind.name} evaluated {samples:,} samples while it trained, in "
                f"{taken / seconds:.0%} of the time that its speed is of: data.eval_batches, or "
                "less held back, makes them fewer"
            )

    def _note(self, entry: Entry, repetition: int, system: System, tally: Tally) -> None:
        """What a system has become, and how like it is to all-fast or to itself before."""
        if entry.bits is not None:
            unlike = bits_of(system, tally.losses).unlike(entry.bits)
            if unlike:
                entry.changes.append(f"repetition {repetition}: {few(unlike, most=3)}")
            return
        is_reference = entry.kind.name == REFERENCE
        copy = self._make_reference() if is_reference else None
        bits = bits_of(system, tally.losses, copy=copy)
        if not is_reference:
            entry.equal, entry.equal_note = self._likeness(entry, system, tally, bits)
        entry.tally, entry.memory, entry.bits = tally, dict(system.memory()), bits

    def _make_reference(self) -> Reference | None:
        """Values are needed for strategies that do not promise bits."""
        if all(entry.kind.contract == "exact" for entry in self.entries):
            return None
        reason = room_for_reference(self._folder, self.rows_bytes)
        if reason is not None:
            self._why_no_distance = reason
            return None
        self._reference = Reference(self._folder)
        return self._reference

    def _likeness(self, entry: Entry, system: System, tally: Tally, bits: Bits) -> tuple[str, str]:
        first = self.entries[0]
        if first.bits is None:
            return "not compared", f"{REFERENCE} failed: {first.message}"
        unlike = bits.unlike(first.bits)
        if not unlike:
            return "bits", ""
        if entry.kind.contract == "exact":
            return "no", f"other bits: {few(unlike, most=3)}"
        if entry.kind.contract == "changed":
            return "no", "it changes the training, and says so"
        if self._reference is None:
            return "not compared", f"bits differ; {self._why_no_distance}"
        distance = entry.distance = self._reference.distance(system, tally.losses)
        if distance is None:
            return "no", f"it has other things: {few(unlike, most=3)}"
        return "tolerance" if distance.is_tolerable else "no", str(distance)

    def _measure_rounding(self) -> Iterator[Turn]:
        """Where some are beyond the tolerance: how far all-fast is from itself in another order of
        sums, and whether they are about as near."""
        far = [
            (entry, entry.distance)
            for entry in self.entries
            if entry.distance is not None and not entry.distance.is_tolerable
        ]
        if not far or self._reference is None:
            return
        controls: list[Distance] = []
        for seed in CONTROLS:
            control = Entry(reordered(seed), 1)
            yield from self._turn(control, 1)
            if control.distance is not None:
                controls.append(control.distance)
        for entry, distance in far:
            if controls and distance.is_as_near(controls):
                entry.equal = "tolerance"
            for each in controls:
                entry.equal_note += f". Rounding alone, by another order of samples: {each}"

    def _keep_batches(self) -> Iterator[Turn]:
        """The same batches for everybody, from memory if they fit: no speed is that of the data."""
        most, samples = self._most_kept, self._samples
        if most is None:
            most = min(_MOST_KEPT, (available_bytes() or 0) // 8)
        size, batches = 0, []
        for batch in samples.batches(self.steps):
            size += sum(each.numel() * each.element_size() for each in tensors_in(batch))
            if size > most:
                self._notes.append(
                    f"batches take more than {show_bytes(most)}: they are read anew in every "
                    "repetition, and the time that takes counts"
                )
                return
            batches.append(batch)
            yield Turn("", 0, 0, "reading", steps=len(batches))
        self._samples = cast(Samples, _Kept(samples, batches))

    # -- what is known -----------------------------------------------------------------

    def record(self, outcome: str) -> ComparisonRecord:
        baseline = self._baseline()
        pace = statistics.median(baseline.whole_runs) if baseline is not None else math.nan
        device = self.config.run.device
        return ComparisonRecord(
            name=self.config.run.name,
            started=self._started,
            outcome=outcome,
            settings=asdict(self.config),
            environment=environment(device=device, threads=torch.get_num_threads()),
            steps=self.steps,
            repetitions=max(entry.repetitions for entry in self.entries),
            warm_up=self.warm_up,
            baseline=None if baseline is None else baseline.kind.name,
            budget_bytes=self.budget_bytes,
            rows_bytes=self.rows_bytes,
            tolerance={"relative": RELATIVE, "absolute": ABSOLUTE, "outliers": OUTLIERS},
            notes=(*self._notes, *self._over_budget(), *self._beside_controls()),
            strategies=tuple(self._figures(entry, pace) for entry in self.entries),
        )

    def _over_budget(self) -> Iterator[str]:
        """Who has rows in fast memory by the budget, and takes more for what goes with them."""
        for entry in self.entries:
            over = sum(entry.memory.values()) - self.budget_bytes
            if entry.kind.is_budgeted and over > 0:
                yield (
                    f"{entry.kind.name} takes {show_bytes(over)} of fast memory beyond the budget "
                    f"of {show_bytes(self.budget_bytes)}: batches need that much beside its slots"
                )

    def _beside_controls(self) -> Iterator[str]:
        """Say whether dropping stale samples was better than dropping as many at random."""
        quality = {entry.kind.name: entry.quality for entry in self.entries}
        for control in quality:
            name = followed(control) or ""
            mine, other, record = quality.get(name), quality[control], self._left_out.get(name)
            if mine is None or other is None or record is None or not record.dropped:
                continue
            apart = mine.auc - other.auc
            if math.isnan(apart):
                continue
            size = "no more" if abs(apart) < _SEEDS_DIFFER else "more"
            differ = "differ by" if abs(apart) < _SEEDS_DIFFER else "usually differ by"
            yield (
                f"{name} ended with an AUC {abs(apart):.5f} {'below' if apart < 0 else 'above'} "
                f"{control}, which drops as many samples at random: {size} than seeds {differ} "
                f"(about {_SEEDS_DIFFER}). In the study of docs/systems.md Slipstream was on "
                "average no better than random-drop: compare several values of run.seed"
            )

    def _baseline(self) -> Entry | None:
        """hybrid; or else the first that was asked for; or else what there is."""
        timed = [entry for entry in self.entries if entry.rates]
        by_name = [entry for entry in timed if entry.kind.name == BASELINE]
        asked = [entry for entry in timed if not entry.is_optional]
        return next(iter([*by_name, *asked, *timed]), None)

    def _figures(self, entry: Entry, pace: float) -> Figures:
        kind = entry.kind
        about = Figures(
            kind.name,
            kind.summary,
            kind.contract,
            outcome=self._outcome(entry),
            message=entry.message,
            traceback=entry.traceback,
            repetitions=entry.done,
            is_optional=entry.is_optional,
        )
        if entry.tally is None or entry.quality is None:
            return about
        slow, middle, fast = _percentiles(entry.rates)
        whole_run = statistics.median(entry.whole_runs)
        tally, samples = entry.tally, entry.tally.samples
        fast_bytes = sum(entry.memory.values())
        return replace(
            about,
            timed_steps=len(entry.rates),
            samples_per_second=middle,
            slow_samples_per_second=slow,
            fast_samples_per_second=fast,
            whole_run=whole_run,
            slow_run=min(entry.whole_runs),
            fast_run=max(entry.whole_runs),
            speed_up=whole_run / pace if pace else math.nan,
            memory=entry.memory,
            fast_bytes=fast_bytes,
            is_within_budget=kind.is_bounded or fast_bytes <= self.budget_bytes,
            hit_rate=tally.hit_rate,
            rows_per_sample=tally.rows_moved / samples,
            bytes_per_sample=tally.bytes_moved / samples,
            samples=samples,
            auc=entry.quality.auc,
            log_loss=entry.quality.log_loss,
            normalised_entropy=entry.quality.normalised_entropy,
            equal=entry.equal,
            equal_note=entry.equal_note,
            repeatable=None if entry.done < 2 else not entry.changes,
            repeat_note="; ".join(entry.changes),
        )

    def _outcome(self, entry: Entry) -> str:
        if entry.has_failed:
            return "failed"
        if entry.done < entry.repetitions:
            return "unfinished" if entry.done else "not run"
        assert entry.tally is not None
        return "diverged" if math.isnan(entry.tally.loss) else "finished"


class _Kept:
    """Samples whose training batches are in memory."""

    def __init__(self, samples: Samples, batches: list[AnyBatch]) -> None:
        self._rest, self._batches = samples, batches

    def batches(self, steps: int) -> Iterator[AnyBatch]:
        yield from self._batches[:steps]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)  # it would read them again, and leave out others
        return getattr(self._rest, name)


class _Clock:
    """What steps take. On a GPU from one mark in training's lane to the next: what overlaps with
    training costs nothing, what delays it counts, and nobody waits."""

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], Mark] | None = None
        if device.type == "cuda":
            self._mark = lanes_of(device).mark_here
        self._marks: list[Mark] = []
        self._seconds: list[float] = []
        self._samples: list[int] = []

    def add(self, record: StepRecord) -> None:
        self._samples.append(record.samples)
        if self._mark is None:
            self._seconds.append(record.seconds)
        else:
            self._marks.append(self._mark())

    def rates(self, warm_up: int) -> list[float]:
        """Samples per second of each step but the first ones."""
        return [samples / taken for samples, taken in self._timed(warm_up) if taken > 0]

    def whole_run(self, warm_up: int, offered: int) -> float:
        """Samples per second of all of them together, where so many were offered in the run. What
        is left out counts as done."""
        timed = self._timed(warm_up)
        seconds = sum(taken for _, taken in timed)
        before = sum(self._samples[: len(self._samples) - len(timed)])
        return (offered - before) / seconds if seconds > 0 else math.nan

    def _timed(self, warm_up: int) -> list[tuple[int, float]]:
        """Samples and seconds of each step but the first ones."""
        seconds = self._seconds
        if self._marks:
            self._marks[-1].wait()
            pairs = zip(self._marks[1:], self._marks, strict=False)
            seconds = [math.inf, *(after.since(before) for after, before in pairs)]
            warm_up = max(1, warm_up)  # nothing is before the first
        return list(zip(self._samples, seconds, strict=True))[warm_up:]


def _percentiles(rates: Sequence[float]) -> tuple[float, float, float]:
    if not rates:
        return math.nan, math.nan, math.nan
    slow, middle, fast = np.percentile(rates, (20, 50, 80))
    return float(slow), float(middle), float(fast)


def _let_go() -> None:
    """The memory of a system that nobody holds any more is free when this returns."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
