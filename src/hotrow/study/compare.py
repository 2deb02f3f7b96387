"""Trains one run by several strategies in turn, and compares speed, quality and results.

    comparison = Comparison(config, choose(config, ["lookahead", "lru"]))
    for turn in comparison.run(Path("out")):
        print(turn)
    print(comparison.record("finished"))

One system is in memory at a time: it is built, trained, read and freed.
"""

from __future__ import annotations

import gc
import math
import shutil
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch

from hotrow.distributed.ranks import RankError
from hotrow.embedding.arguments import usable_device
from hotrow.inputs.rank_part import HeldBatches, whole_batches
from hotrow.inputs.tree import tensors_in
from hotrow.run.config import RunConfig
from hotrow.run.files import environment, now
from hotrow.run.job import open_data, total_steps, with_budget
from hotrow.run.rank_records import of_all_ranks
from hotrow.run.ranks import RunRanks
from hotrow.run.session import refuse_small_batches
from hotrow.run.source import AnyBatch, Samples
from hotrow.run.strategy_names import followed
from hotrow.run.tally import Tally
from hotrow.sizing.budgets import AUTO
from hotrow.study.likeness import Bits, Distance, Reference, Tolerance, bits_of, unlike
from hotrow.study.rank_turns import (
    Failure,
    agree,
    open_reference,
    shared_distance,
    why_not_shared,
)
from hotrow.study.systems import (
    SYSTEMS,
    OtherBatches,
    System,
    SystemKind,
    find_system,
    reordered,
)
from hotrow.support.host_memory import available_bytes
from hotrow.support.messages import few, many
from hotrow.support.records import (
    ComparisonRecord,
    EvalRecord,
    Figures,
    RankRecord,
    StepRecord,
)
from hotrow.support.streams import Mark, lanes_of
from hotrow.support.units import parse_bytes, show_bytes
from hotrow.systems.slipstream.skip import SkipRecord
from hotrow.systems.slipstream.slipstream import RandomDrop, Slipstream

REFERENCE = "all-fast"
BASELINE = "hybrid"
USUAL = (REFERENCE, BASELINE, "static", "lru", "scratchpipe", "lookahead")
_CONTROL_SEEDS = (1, 2)
_MOST_KEPT = 4 << 30  # bytes of batches in memory
_SPARE_BYTES = 1 << 28  # of the disk
_MUCH = 0.1  # share of a run's time
_SEEDS_DIFFER = 1e-3  # AUC: a smaller difference between two runs may come from their seeds


@dataclass
class Entry:
    """One strategy of a comparison, and its results so far."""

    kind: SystemKind
    repetitions: int
    is_optional: bool = False  # not asked for
    figures: Figures = field(init=False)  # without speeds and counts, which `record` adds
    rates: list[float] = field(default_factory=list)  # samples/s of timed steps
    whole_runs: list[float] = field(default_factory=list)  # samples/s of each repetition
    tally: Tally | None = None  # of the first repetition, as everything below
    quality: EvalRecord | None = None
    bits: Bits | None = None
    ranks: tuple[RankRecord, ...] = ()  # of several ranks
    distance: Distance | None = None  # from all-fast, where equal bits are not promised
    changes: list[str] = field(default_factory=list)  # repetitions that ended with other bits

    def __post_init__(self) -> None:
        kind, is_optional = self.kind, self.is_optional
        self.figures = Figures(
            kind.name, kind.summary, kind.contract, outcome="not run", is_optional=is_optional
        )

    @property
    def has_failed(self) -> bool:
        return bool(self.figures.message)

    @property
    def done(self) -> int:
        """Repetitions so far."""
        return len(self.whole_runs)

    def note(self, **results: Any) -> None:
        self.figures = replace(self.figures, **results)


@dataclass(frozen=True)
class Turn:
    """Progress of a comparison. `stage` is "reading" (batches, before any strategy), "building",
    "training", "evaluating", "comparing", "finished" or "failed"."""

    strategy: str
    repetition: int  # from 1 on
    repetitions: int
    stage: str
    steps: int = 0  # of this turn
    loss: float = math.nan
    samples_per_second: float = math.nan  # of a finished turn
    message: str = ""
    requested: int = 0  # bits that ranks have sent with the newest step; see `Trainer.hear`

    @property
    def is_over(self) -> bool:
        return self.stage in ("finished", "failed")


def choose(
    config: RunConfig, names: Sequence[str] | None = None, *, repeat: int = 3
) -> list[Entry]:
    """Return the entries of a comparison, by default of USUAL and the run's own strategy.

    All-fast is first: the others are compared with it. A strategy with random-drop follows the one
    with slipstream, and skips as many samples.
    """
    is_usual = names is None
    names = list(dict.fromkeys([*USUAL, config.embedding.strategy]) if names is None else names)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"strategy {name!r} is named twice")
    kinds = [find_system(name) for name in names]
    for control in [kind for kind in kinds if followed(kind.name) in names]:
        kinds.remove(control)
        before = [kind.name for kind in kinds].index(followed(control.name) or "")
        kinds.insert(before + 1, control)
    entries = [Entry(kind, repeat) for kind in kinds if kind.name != REFERENCE]
    is_optional = is_usual or REFERENCE not in names
    # If it was not asked for, once is enough to compare with.
    count = repeat if REFERENCE in names else 1
    return [Entry(SYSTEMS[REFERENCE], count, is_optional), *entries]


class Comparison:
    """`run` trains; `record` returns the results so far at any time."""

    def __init__(
        self,
        config: RunConfig,
        entries: Sequence[Entry],
        *,
        warm_up: int | None = None,
        most_kept: int | None = None,
        tolerance: Tolerance = Tolerance(),  # noqa: B008
        spare_bytes: int = _SPARE_BYTES,
        team: RunRanks | None = None,
        requests: Callable[[], int] = int,
    ) -> None:
        """`warm_up`: first steps of each repetition that are not timed, by default a tenth.
        `most_kept`: bytes of batches that may stay in memory. `spare_bytes`: of the disk, which
        all-fast's rows leave free. `team`: the ranks that train each strategy together; all of them
        take the same turns. `requests`: see `Trainer.hear`."""
        usable_device(config.run.device)  # raises if it is not
        self._team, self._requests = team or RunRanks(), requests
        refuse_small_batches(config, self._team.size)
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
        self._tolerance, self._spare_bytes = tolerance, spare_bytes
        self._started = now()
        self._notes: list[str] = []
        self._reference: Reference | None = None
        self._why_no_distance = ""
        self._left_out: dict[str, SkipRecord] = {}  # by strategies with slipstream
        self.rows_bytes = config.row_bytes * sum(rows for rows, _ in samples.tables.values())
        if config.embedding.budget == AUTO:  # on one rank it is known now
            raise ValueError(
                f'embedding.budget = "auto" leaves open what each of {self._team.size} ranks takes '
                "for each strategy: give bytes or a share, such as embedding.budget=10%"
            )
        owned = self.rows_bytes // self._team.size
        self.budget_bytes = parse_bytes(config.embedding.budget, total=owned)

    @property
    def total_steps(self) -> int:
        """Steps of all turns together, if none fails."""
        return self.steps * sum(entry.repetitions for entry in self.entries)

    def run(self, folder: Path | None) -> Generator[Turn]:
        """Train all strategies once, then all of them again, so that a disturbance of the machine
        affects all alike. A caller may stop early. `folder` is for rows that do not fit memory;
        of several ranks the first one has it."""
        self._folder = folder or Path()
        freezes = not gc.get_freeze_count()  # else the program has frozen objects, and keeps them
        if freezes:
            gc.freeze()  # later collections skip the objects that exist now
        try:
            yield from self._keep_batches()
            for repetition in range(1, max(entry.repetitions for entry in self.entries) + 1):
                for entry in self.entries:
                    if repetition <= entry.repetitions and not entry.has_failed:
                        yield from self._turn(entry, repetition)
                if repetition == 1:
                    yield from self._measure_rounding()
        finally:
            if freezes:
                gc.unfreeze()
            if self._reference is not None:
                self._reference.close()
                self._reference = None

    def _turn(self, entry: Entry, repetition: int) -> Iterator[Turn]:
        turn = Turn(entry.kind.name, repetition, entry.repetitions, "building")
        failure = None
        try:
            yield turn
            yield from self._train(entry, turn)
        except RankError:  # another rank has failed, and waits for nothing any more
            raise
        except Exception as error:  # the other strategies go on
            failure = Failure.of(error)
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        failure = agree(entry.kind.name, failure, self.config.run.device)
        if failure is not None:
            entry.note(message=failure.message, traceback=failure.traceback)
            yield replace(turn, stage="failed", message=entry.figures.message)

    def _train(self, entry: Entry, turn: Turn) -> Iterator[Turn]:
        reason = why_not_shared(entry.kind, self._team.size) or entry.kind.refuses(self.config)
        if reason is not None:
            raise ValueError(reason)
        system: Any = entry.kind.build(self.config, self._samples)
        self._follow(entry, system)
        if self._team.size > 1:
            system.hear(self._requests)
        is_gpu = system.device.type == "cuda"
        clock = _Clock(lanes_of(system.device).mark_here if is_gpu else None)
        tally, started = Tally(), perf_counter()
        for record in system.train():
            tally.add(record)
            clock.add(record)
            requested = system.requested if self._team.size > 1 else 0
            yield replace(
                turn, stage="training", steps=tally.steps, loss=tally.loss, requested=requested
            )
        tally.finish()
        self._note_evaluated(entry, system, perf_counter() - started)
        if isinstance(skip := getattr(system, "skip", None), Slipstream):
            self._left_out[entry.kind.name] = skip.record
        offered = self.steps * self.config.data.batch_size
        rates, whole_run = clock.speeds(self.warm_up, offered)
        turn = replace(turn, steps=tally.steps, loss=tally.loss)
        if self._team.size > 1 and not entry.ranks:
            entry.ranks = system.rank_records()
        quality = entry.quality
        if quality is None:
            yield replace(turn, stage="evaluating")
            quality = system.evaluate()
        yield replace(turn, stage="comparing")
        self._note(entry, turn.repetition, system, tally)
        entry.quality = quality
        entry.rates += rates
        entry.whole_runs.append(whole_run)
        yield replace(turn, stage="finished", samples_per_second=whole_run)

    def _follow(self, entry: Entry, system: System) -> None:
        """Skip as many samples at random as slipstream did, where both are compared."""
        skip, other = getattr(system, "skip", None), followed(entry.kind.name)
        if not isinstance(skip, RandomDrop) or not any(e.kind.name == other for e in self.entries):
            return
        record, target = self._left_out.get(other or ""), f"{self.config.system.target:.0%} of all"
        if record is None:
            count = f"{target} samples, since {other} failed"
        elif record.mode == "rows":
            count = f"{target} samples, since {other} leaves out updates of rows and no sample"
        else:
            skip.follow(record)
            count = f"as many samples as {other}: {record.dropped:,} of {record.offered:,}"
        self._notes = list(dict.fromkeys([*self._notes, f"{entry.kind.name} leaves out {count}"]))

    def _note_evaluated(self, entry: Entry, system: System, seconds: float) -> None:
        """Note evaluation during training, which counts for the speed and may be most of it."""
        samples, taken = getattr(system, "on_the_way", (0, 0.0))
        if not entry.done and taken > _MUCH * seconds:
            self._notes.append(
                f"{entry.kind.name} evaluated {samples:,} samples while it trained, in "
                f"{taken / seconds:.0%} of the time that its speed is of: data.eval_batches, or "
                "less held back, makes them fewer"
            )

    def _note(self, entry: Entry, repetition: int, system: System, tally: Tally) -> None:
        """Compare a trained system with all-fast, or with its own first repetition."""
        if entry.bits is not None:
            if changed := unlike(bits_of(system, tally.losses), entry.bits):
                entry.changes.append(f"repetition {repetition}: {few(changed, most=3)}")
            return
        is_reference = entry.kind.name == REFERENCE
        copy = self._make_reference() if is_reference else None
        bits = bits_of(system, tally.losses, copy=copy)
        if not is_reference:
            equal, note = self._likeness(entry, system, tally, bits)
            entry.note(equal=equal, equal_note=note)
        entry.note(memory=dict(system.memory()))
        entry.tally, entry.bits = tally, bits

    def _make_reference(self) -> Reference | None:
        """Keep all-fast's values, if a strategy does not promise equal bits and there is room."""
        if all(entry.kind.contract == "exact" for entry in self.entries):
            return None
        self._why_no_distance = self._team.from_first(
            lambda: _why_no_room(self._folder, self.rows_bytes, self._spare_bytes)
        )
        if self._why_no_distance:
            return None
        self._reference = open_reference(self._team, self._folder, self._tolerance)
        return self._reference

    def _likeness(self, entry: Entry, system: System, tally: Tally, bits: Bits) -> tuple[str, str]:
        first = self.entries[0]
        if first.bits is None:
            return "not compared", f"{REFERENCE} failed: {first.figures.message}"
        names = few(unlike(bits, first.bits), most=3)
        if not names:
            return "bits", ""
        if entry.kind.contract == "exact":
            return "no", f"other bits: {names}"
        if entry.kind.contract == "changed":
            return "no", "it changes the training, and says so"
        if self._reference is None:
            return "not compared", f"bits differ; {self._why_no_distance}"
        distance = shared_distance(self._team, self._reference, system, tally.losses)
        entry.distance = distance
        if distance is None:
            return "no", f"it has other things: {names}"
        return "tolerance" if self._tolerance.holds(distance) else "no", str(distance)

    def _measure_rounding(self) -> Iterator[Turn]:
        """Compare strategies beyond the tolerance with all-fast in another order of sums."""
        far = [
            (entry, entry.distance)
            for entry in self.entries
            if entry.distance is not None and not self._tolerance.holds(entry.distance)
        ]
        if not far or self._reference is None:
            return
        controls: list[Distance] = []
        for seed in _CONTROL_SEEDS:
            control = Entry(reordered(seed), 1)
            yield from self._turn(control, 1)
            if control.distance is not None:
                controls.append(control.distance)
        for entry, distance in far:
            if controls and self._tolerance.is_as_near(distance, controls):
                entry.note(equal="tolerance")
            rounding = (f". Rounding alone, by another order of samples: {c}" for c in controls)
            entry.note(equal_note=entry.figures.equal_note + "".join(rounding))

    def _keep_batches(self) -> Iterator[Turn]:
        """Read the batches once, if they fit memory, so that speeds do not depend on reading."""
        most, samples = self._most_kept, self._samples
        if most is None:
            most = min(_MOST_KEPT, (available_bytes() or 0) // 8) // self._team.place.local_size
        # All ranks keep them or none does: FAE shuffles kept batches in another order.
        most = min(map(int, self._team.do(lambda: str(most))))
        size, batches = 0, list[AnyBatch]()
        for batch in whole_batches(samples.batches(self.steps)):
            size += sum(part.numel() * part.element_size() for part in tensors_in(batch))
            if size > most:
                self._notes.append(
                    f"batches take more than {show_bytes(most)}: they are read anew in every "
                    "repetition, and the time that takes counts"
                )
                return
            batches.append(batch)
            yield Turn("", 0, 0, "reading", steps=len(batches))
        kept = OtherBatches(samples, lambda steps: HeldBatches(batches[:steps]))
        self._samples = cast(Samples, kept)

    # -- results -----------------------------------------------------------------------

    def record(self, outcome: str) -> ComparisonRecord:
        baseline = self._baseline()
        pace = statistics.median(baseline.whole_runs) if baseline is not None else math.nan
        return ComparisonRecord(
            name=self.config.run.name,
            started=self._started,
            outcome=outcome,
            settings=asdict(self.config),
            environment=environment(self.config.run.device) | self._team.facts(),
            steps=self.steps,
            repetitions=max(entry.repetitions for entry in self.entries),
            warm_up=self.warm_up,
            baseline=None if baseline is None else baseline.kind.name,
            budget_bytes=self.budget_bytes,
            rows_bytes=self.rows_bytes,
            tolerance={
                name: getattr(self._tolerance, name)
                for name in ("relative", "absolute", "outliers")
            },
            notes=(
                *self._notes,
                *_over_budget(self.entries, self.budget_bytes),
                *self._beside_controls(),
            ),
            strategies=tuple(self._figures(entry, pace) for entry in self.entries),
            ranks=self._team.size,
        )

    def _beside_controls(self) -> Iterator[str]:
        """Note whether dropping stale samples was better than dropping as many at random."""
        quality = {entry.kind.name: entry.quality for entry in self.entries}
        for control, random in quality.items():
            name = followed(control) or ""
            stale, record = quality.get(name), self._left_out.get(name)
            if stale is None or random is None or record is None or not record.dropped:
                continue
            apart = stale.auc - random.auc
            if math.isnan(apart):
                continue
            is_small = abs(apart) < _SEEDS_DIFFER
            size = "no more than seeds" if is_small else "more than seeds usually"
            yield (
                f"{name} ended with an AUC {abs(apart):.5f} {'below' if apart < 0 else 'above'} "
                f"{control}, which drops as many samples at random: {size} "
                f"differ by (about {_SEEDS_DIFFER}). In the study of docs/systems.md Slipstream "
                "was on average no better than random-drop: compare several values of run.seed"
            )

    def _baseline(self) -> Entry | None:
        """Return hybrid, else the first strategy that was asked for, else the first."""
        timed = [entry for entry in self.entries if entry.rates]
        by_name = [entry for entry in timed if entry.kind.name == BASELINE]
        asked = [entry for entry in timed if not entry.is_optional]
        return next(iter([*by_name, *asked, *timed]), None)

    def _figures(self, entry: Entry, pace: float) -> Figures:
        about = replace(entry.figures, outcome=self._outcome(entry), repetitions=entry.done)
        if entry.tally is None or entry.quality is None:
            return about
        slow, middle, fast = np.percentile(entry.rates or [math.nan], (20, 50, 80)).tolist()
        whole_run = statistics.median(entry.whole_runs)
        tally, samples = entry.tally, entry.tally.samples
        fast_bytes = sum(about.memory.values())
        total, moved = of_all_ranks(tally.summary(), entry.ranks), tally.rows_moved
        return replace(
            about,
            ranks=entry.ranks,
            timed_steps=len(entry.rates),
            samples_per_second=middle,
            slow_samples_per_second=slow,
            fast_samples_per_second=fast,
            whole_run=whole_run,
            slow_run=min(entry.whole_runs),
            fast_run=max(entry.whole_runs),
            speed_up=whole_run / pace if pace else math.nan,
            fast_bytes=fast_bytes,
            is_within_budget=entry.kind.is_bounded or fast_bytes <= self.budget_bytes,
            hit_rate=total.hit_rate,
            rows_per_sample=(sum(x.rows_moved for x in entry.ranks) or moved) / samples,
            bytes_per_sample=total.bytes_moved / samples,
            samples=samples,
            auc=entry.quality.auc,
            log_loss=entry.quality.log_loss,
            normalised_entropy=entry.quality.normalised_entropy,
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


def _over_budget(entries: Sequence[Entry], budget_bytes: int) -> Iterator[str]:
    """Note strategies whose fast memory exceeds the budget, because batches need it."""
    for entry in entries:
        over = sum(entry.figures.memory.values()) - budget_bytes
        if entry.kind.is_budgeted and over > 0:
            yield (
                f"{entry.kind.name} takes {show_bytes(over)} of fast memory beyond the budget of "
                f"{show_bytes(budget_bytes)}: batches need that much beside its slots"
            )


def _why_no_room(folder: Path, rows_bytes: int, spare_bytes: int) -> str:
    """Return why all-fast's rows have no room on the disk; empty: they have."""
    free = shutil.disk_usage(folder).free
    if rows_bytes + spare_bytes <= free:
        return ""
    return (
        f"to tell how far apart values are, {show_bytes(rows_bytes)} of all-fast's rows must lie "
        f"on the disk of {folder}, which has {show_bytes(free)} free"
    )


class _Clock:
    """Times steps. On a GPU it measures between marks in training's stream: work that overlaps
    training does not count, delays of training do, and the host does not wait."""

    def __init__(self, mark: Callable[[], Mark] | None = None) -> None:
        """`mark`: puts a mark into a GPU's stream; None: the host's times count."""
        self._mark = mark
        self._marks: list[Mark] = []
        self._seconds: list[float] = []
        self._samples: list[int] = []

    def add(self, record: StepRecord) -> None:
        self._samples.append(record.samples)
        if self._mark is None:
            self._seconds.append(record.seconds)
        else:
            self._marks.append(self._mark())

    def speeds(self, warm_up: int, offered: int) -> tuple[list[float], float]:
        """Return samples per second of each step after the warm-up, and of the whole run after it,
        where `offered` samples count, skipped ones included."""
        seconds = self._seconds
        if self._marks:
            self._marks[-1].wait()
            pairs = zip(self._marks[1:], self._marks, strict=False)
            seconds = [math.inf, *(after.since(before) for after, before in pairs)]
            warm_up = max(1, warm_up)  # no mark is before the first step
        timed = list(zip(self._samples, seconds, strict=True))[warm_up:]
        total = sum(taken for _, taken in timed)
        left = offered - sum(self._samples[:warm_up])
        rates = [samples / taken for samples, taken in timed if taken > 0]
        return rates, left / total if total > 0 else math.nan
