"""Event files for TensorBoard, in the folder of a run. Needs tensorboard.

On a GPU values are written a few steps late, without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import Any, Self

from hotrow.run.config import RunConfig
from hotrow.run.tally import PendingRecords
from hotrow.support.messages import warn
from hotrow.support.records import EvalRecord, StepRecord


class TensorBoard:
    """Event files that `tensorboard --logdir runs` shows under the run's name."""

    def __init__(self, folder: Path, config: RunConfig, done: int = 0) -> None:
        self._event, self._summary, self._log, writer = event_classes()
        self._writer = writer(str(folder))
        self._config = config
        self._pending = PendingRecords(self._write)
        self._writes = True
        if done:  # TensorBoard drops later steps, which were written before the run was resumed
            log = self._log(status=self._log.START)
            event = self._event(wall_time=time(), step=done + 1, session_log=log)
            self._try(lambda: self._writer.add_event(event))

    def step(self, record: StepRecord) -> None:
        self._pending.add(record)

    def _write(self, record: StepRecord) -> None:
        rate = record.samples / record.seconds if record.seconds else math.nan
        scale = self._config.training.schedule.scale(record.step)
        scalars = {
            "training/loss": record.loss,
            "training/samples_per_second": rate,
            "rows/hit_rate": record.hit_rate,
            "rows/fetched": record.fetched_rows,
            # From the schedule: optimizers may keep theirs on a device.
            "learning_rate/rows": scale * self._config.embedding.optimizer.lr,
            "learning_rate/dense": scale * self._config.training.optimizer.lr,
        }
        if record.bytes_sent:
            scalars["sent/ids"] = record.bytes_of_ids
            scalars["sent/rows"] = record.bytes_of_rows
            scalars["sent/gradients"] = record.bytes_of_grads
            scalars["sent/waited"] = record.rank_seconds / record.seconds
        self._add(record.step, scalars)

    def evaluation(self, record: EvalRecord) -> None:
        self._add(
            record.step,
            {
                "evaluation/auc": record.auc,
                "evaluation/log_loss": record.log_loss,
                "evaluation/normalised_entropy": record.normalised_entropy,
            },
        )

    def _add(self, step: int, scalars: dict[str, float]) -> None:
        # One event for all values: an event costs as much as the launch of a small step.
        values = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()
        ]
        event = self._event(wall_time=time(), step=step, summary=self._summary(value=values))
        self._try(lambda: self._writer.add_event(event))

    def _try(self, write: Callable[[], None]) -> None:
        """Write; a full disk ends the event files, and not the training."""
        if not self._writes:
            return
        try:
            write()
        except OSError as error:
            self._writes = False
            warn(f"TensorBoard shows no more of this run: {error}. Training goes on")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._pending.finish()
        except RuntimeError:
            if error is None:  # else the failure of the device was reported
                raise
        finally:
            self._try(self._writer.close)


def event_classes() -> Any:
    """Return Event, Summary, SessionLog and EventFileWriter; a ValueError: none is installed."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise ValueError(
            "run.tensorboard needs tensorboard, which is not installed: pip install "
            "tensorboard, or set run.tensorboard=false"
        ) from error
    return Event, Summary, SessionLog, EventFileWriter
