"""A run in numbers while it is under way. Knows records, and nothing of what made them."""

from __future__ import annotations

import math

from hotrow.records import EvalRecord, StepRecord, Summary


class Tally:
    """Adds up step records and keeps evaluations."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluations: list[EvalRecord] = []
        self.samples = self.lookups = self.fetched_rows = self.bytes_moved = 0
        self.seconds = 0.0

    def add(self, record: StepRecord) -> None:
        self.losses.append(record.loss)
        self.samples += record.samples
        self.seconds += record.seconds
        self.lookups += record.lookups
        self.fetched_rows += record.fetched_rows
        self.bytes_moved += record.bytes_fetched + record.bytes_evicted

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def auc(self) -> float:
        return self.evaluations[-1].auc if self.evaluations else math.nan

    @property
    def hit_rate(self) -> float:
        return 1 - self.fetched_rows / self.lookups if self.lookups else 1.0

    def summary(
        self, *, fast_rows_share: float, equal_to_all_fast: bool | None, chunked_batches: int
    ) -> Summary:
        return Summary(
            steps=len(self.losses),
            samples=self.samples,
            seconds=self.seconds,
            samples_per_second=self.samples_per_second,
            loss=self.losses[-1] if self.losses else math.nan,
            auc=self.auc,
            log_loss=self.evaluations[-1].log_loss if self.evaluations else math.nan,
            lookups=self.lookups,
            hit_rate=self.hit_rate,
            fast_rows_share=fast_rows_share,
            chunked_batches=chunked_batches,
            bytes_moved=self.bytes_moved,
            equal_to_all_fast=equal_to_all_fast,
        )
