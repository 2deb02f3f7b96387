"""A run in numbers while it is under way. Knows records, and nothing of what made them."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from hotrow.run.pending_records import Arriving
from hotrow.support.records import EvalRecord, StepRecord, Summary, Times

_SETTLING = 16  # steps before times are added up: caches are cold, and graphs are captured


class Tally:
    """Adds up step records and keeps evaluations."""

    def __init__(self) -> None:
        self.steps = 0
        self.expected: int | None = None  # steps of the whole run, where that is known
        self.losses: list[float] = []  # of fewer steps, while some are on their way from a device
        self._arriving = Arriving(lambda record: self.losses.append(record.loss))
        self.evaluations: list[EvalRecord] = []
        self.samples = self.lookups = self.fetched_rows = self.rows_moved = self.bytes_moved = 0
        self.seconds = 0.0
        self._times = Times(0, 0.0, 0.0, 0.0, 0.0)
        self._waits, self._waited = 0, 0.0

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self._arriving.add(record)
        self.samples += record.samples
        self.seconds += record.seconds
        self.lookups += record.lookups
        self.fetched_rows += record.fetched_rows
        self.rows_moved += record.fetched_rows + record.loaded_rows + record.evicted_rows
        self.bytes_moved += record.bytes_fetched + record.bytes_evicted
        if self.steps > _SETTLING:
            before = self._times
            self._times = Times(
                before.steps + 1,
                before.seconds + record.seconds,
                before.read_seconds + record.read_seconds,
                before.plan_seconds + record.plan_seconds,
                before.rows_seconds + record.rows_seconds,
                chunk_seconds=before.chunk_seconds + record.chunk_seconds,
            )
            if not math.isnan(record.waited):
                self._waits += 1
                self._waited += record.waited

    def finish(self) -> None:
        """Takes in the losses that are still on their way; waits for the device."""
        self._arriving.finish()

    @property
    def loss(self) -> float:
        """The newest that has arrived."""
        return self.losses[-1] if self.losses else math.nan

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def auc(self) -> float:
        return self.evaluations[-1].auc if self.evaluations else math.nan

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
        if self._times.steps < _SETTLING:
            return None
        return replace(self._times, waited=self.waited)

    def summary(
        self, *, fast_rows_share: float, equal_to_all_fast: bool | None, chunked_batches: int
    ) -> Summary:
        with contextlib.suppress(RuntimeError):  # a device that has failed does not answer
            self.finish()
        return Summary(
            steps=self.steps,
            samples=self.samples,
            seconds=self.seconds,
            samples_per_second=self.samples_per_second,
            loss=self.loss,
            auc=self.auc,
            log_loss=self.evaluations[-1].log_loss if self.evaluations else math.nan,
            lookups=self.lookups,
            hit_rate=self.hit_rate,
            fast_rows_share=fast_rows_share,
            chunked_batches=chunked_batches,
            bytes_moved=self.bytes_moved,
            equal_to_all_fast=equal_to_all_fast,
        )
