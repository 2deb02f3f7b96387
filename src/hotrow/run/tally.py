"""A run in numbers while it is trained, and what limits it. Knows records alone."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from hotrow.support.records import (
    Counts,
    EvalRecord,
    LateStepRecord,
    Limit,
    StepRecord,
    Summary,
    Times,
)

_SETTLING = 16  # steps that are not timed: caches are cold, and graphs are captured
_TIMED = (
    "seconds", "read_seconds", "plan_seconds", "rows_seconds", "chunk_seconds", "rank_seconds",
)  # fmt: skip
_COUNTS = tuple(field.name for field in fields(Counts))
STEPS_BEHIND = 8  # more than a device lags behind the host


class PendingRecords:
    """Passes records on: at once, or a few steps later if the device still computes the loss."""

    def __init__(self, pass_on: Callable[[StepRecord], None]) -> None:
        self._pass_on = pass_on
        self._waiting: deque[StepRecord] = deque()

    def add(self, record: StepRecord) -> None:
        self._waiting.append(record)
        self._keep(STEPS_BEHIND if isinstance(record, LateStepRecord) else 0)

    def finish(self) -> None:
        """Pass on all records; waits for the device."""
        self._keep(0)

    def _keep(self, count: int) -> None:
        while len(self._waiting) > count:
            self._pass_on(self._waiting.popleft())


class Tally:
    """Adds up step records and keeps evaluations."""

    def __init__(self) -> None:
        self.steps = 0
        self.expected: int | None = None  # steps of the whole run, if known
        self.losses: list[float] = []  # fewer than steps, while a device still computes some
        self._pending = PendingRecords(lambda record: self.losses.append(record.loss))
        self.evaluations: list[EvalRecord] = []
        self.samples = self.lookups = self.fetched_rows = self.rows_moved = self.bytes_moved = 0
        self.bytes_sent = 0
        self.seconds = 0.0
        self._times = dict.fromkeys(_TIMED, 0.0)
        self._waits, self._waited = 0, 0.0
        self._untimed = _SETTLING  # first steps
        # What all ranks had counted before this process went on, and whether there were several.
        self.earlier, self.was_shared = Counts(), False

    def go_on(self, totals: Counts | None, *, is_shared: bool) -> None:
        """Go on in a new process, with what all ranks have counted so far; None: what one rank's
        steps have. `is_shared`: steps are no longer timed as those of before, which other numbers
        of ranks may have trained."""
        if totals is not None:
            self.was_shared = True
            for name in _COUNTS:
                setattr(self, name, getattr(totals, name))
        self.earlier = self.counts
        if is_shared or self.was_shared:
            self._untimed = self.steps + _SETTLING
            self._times = dict.fromkeys(_TIMED, 0.0)
            self._waits, self._waited = 0, 0.0

    @property
    def counts(self) -> Counts:
        """What all ranks had counted before, and this one since."""
        return Counts(**self.facts(*_COUNTS))

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self._pending.add(record)
        self.samples += record.samples
        self.seconds += record.seconds
        self.lookups += record.lookups
        self.fetched_rows += record.fetched_rows
        self.rows_moved += record.fetched_rows + record.loaded_rows + record.evicted_rows
        self.bytes_moved += record.bytes_fetched + record.bytes_evicted
        self.bytes_sent += record.bytes_sent
        if self.steps > self._untimed:
            for name in _TIMED:
                self._times[name] += getattr(record, name)
            if not math.isnan(record.waited):
                self._waits += 1
                self._waited += record.waited

    def finish(self) -> None:
        """Add the losses that are still missing; waits for the device."""
        self._pending.finish()

    @property
    def loss(self) -> float:
        """The newest loss that is known."""
        return self.losses[-1] if self.losses else math.nan

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def auc(self) -> float:
        return self.evaluations[-1].auc if self.evaluations else math.nan

    @property
    def log_loss(self) -> float:
        return self.evaluations[-1].log_loss if self.evaluations else math.nan

    @property
    def hit_rate(self) -> float:
        return 1 - self.fetched_rows / self.lookups if self.lookups else 1.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_moved / self.seconds if self.seconds else 0.0

    @property
    def waited(self) -> float:
        """Share of a step in which training waited for rows; NaN: not measured yet."""
        return self._waited / self._waits if self._waits else math.nan

    def times(self) -> Times | None:
        timed = self.steps - self._untimed
        if timed < _SETTLING:
            return None
        return Times(timed, **self._times, waited=self.waited)

    def facts(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def summary(
        self,
        *,
        fast_rows_share: float = math.nan,
        equal_to_all_fast: bool | None = None,
        chunked_batches: int = 0,
    ) -> Summary:
        with contextlib.suppress(RuntimeError):  # a device that has failed does not answer
            self.finish()
        return Summary(
            **self.facts("steps", "samples", "seconds", "samples_per_second", "loss", "auc"),
            **self.facts("log_loss", "lookups", "hit_rate", "bytes_moved", "bytes_sent"),
            fast_rows_share=fast_rows_share,
            chunked_batches=chunked_batches,
            equal_to_all_fast=equal_to_all_fast,
        )


# -- what a run waits for most ---------------------------------------------------------

# The host is the limit of a GPU only if one thing takes at least half of its time. How long
# training waits for rows is measured on the GPU.
_PART_OF_HOST, _WAITED = 0.5, 0.15
_CHUNKS = 0.1  # smallest share of a step that is worth advice

_ADVICE = {
    "loader": "Data that hotrow prepare has written are read fastest",
    "planning": (
        "A smaller embedding.depth looks less far ahead, and strategies static and lru decide less"
    ),
    "link": (
        "A larger embedding.budget moves fewer rows, and so does embedding.profile = true where "
        "rows were counted; hotrow compare tries other strategies"
    ),
    "ranks": (
        "Larger batches exchange less often; hotrow report shows whether all ranks wait for one, "
        "and one rank exchanges nothing"
    ),
}


def limit_of(
    times: Times | None, *, device: str, remedy: str = "", all_fast: Times | None = None
) -> Limit | None:
    """Return what limits a run; None: too little was measured. `remedy` says which budget would
    hold the batches that were trained in chunks, if there were any. `all_fast`: times of the same
    steps with every row in fast memory, if they were measured."""
    if times is None or times.seconds <= 0:
        return None
    return _on_cpu(times, remedy, all_fast) if device == "cpu" else _on_gpu(times, remedy)


def _on_cpu(times: Times, remedy: str, all_fast: Times | None) -> Limit:
    """On a CPU parts run one after the other: the largest one limits."""
    shares = {
        "loader": times.read_seconds / times.seconds,
        "planning": times.plan_seconds / times.seconds,
        "link": times.rows_seconds / times.seconds,
        "chunks": times.chunk_seconds / times.seconds,
        "ranks": times.rank_seconds / times.seconds,
    }
    shares["dense part"] = 1 - sum(shares.values())
    in_chunks = f", batches in chunks {shares['chunks']:.0%}" if remedy else ""
    if times.rank_seconds:
        in_chunks += f", waiting for other ranks {shares['ranks']:.0%}"
    measured = (
        f"of a step, training took {shares['dense part']:.0%}, planning {shares['planning']:.0%}, "
        f"moving rows {shares['link']:.0%}, reading batches {shares['loader']:.0%}{in_chunks}"
    )
    if all_fast is not None and all_fast.seconds > 0:
        faster = times.seconds / times.steps * all_fast.steps / all_fast.seconds
        gain = f"it was {faster:.1f} times as fast"
    else:
        faster = 1 / (1 - shares["planning"] - shares["link"] - shares["chunks"])
        gain = f"it would be about {faster:.1f} times as fast"
    advice = _ADVICE | {
        "chunks": remedy,
        "dense part": f"With every row in fast memory {gain}",
    }
    if remedy and shares["chunks"] >= _CHUNKS:
        # Planning and moving rows for chunks is in vain.
        shares["chunks"] += shares.pop("planning") + shares.pop("link")
    part = max(shares, key=shares.__getitem__)
    text = advice[part]
    if part in ("planning", "link"):
        text += ". Here both memories are RAM; a GPU plans, and moves rows, beside training"
    return _limit(part, shares[part], measured, text)


def _on_gpu(times: Times, remedy: str) -> Limit | None:
    reading, planning = times.read_seconds / times.seconds, times.plan_seconds / times.seconds
    chunks = times.chunk_seconds / times.seconds
    if reading >= _PART_OF_HOST:
        text = f"the host waited for batches for {reading:.0%} of a step"
        return _limit("loader", reading, text, _ADVICE["loader"])
    if remedy and chunks >= _CHUNKS and chunks + planning >= _PART_OF_HOST:
        text = f"the host was busy with batches in chunks for {chunks + planning:.0%} of a step"
        return _limit("chunks", chunks + planning, text, remedy)
    if planning >= _PART_OF_HOST:
        text = f"the host was launching plans for {planning:.0%} of a step"
        return _limit("planning", planning, text, _ADVICE["planning"])
    ranks = times.rank_seconds / times.seconds
    if ranks >= _PART_OF_HOST:
        text = f"the host waited for other ranks for {ranks:.0%} of a step"
        return _limit("ranks", ranks, text, _ADVICE["ranks"])
    if math.isnan(times.waited):
        return None
    text = f"training waited for rows for {times.waited:.0%} of a step"
    if times.waited >= _WAITED:
        return _limit("link", times.waited, text, _ADVICE["link"])
    return _limit("dense part", 1 - times.waited, text, "A larger budget would hardly help")


def _limit(part: str, share: float, measured: str, advice: str) -> Limit:
    limit = Limit(part, share, "")
    return replace(limit, message=f"limited by {limit.name}: {measured}. {advice}")
