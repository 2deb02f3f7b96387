"""Checkpoints of a run: when they are made, and what is done where one cannot be. Shows nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from hotrow.checkpoint import save_checkpoint
from hotrow.checkpoint.folder import IN_RUN
from hotrow.run.config import CheckpointSection
from hotrow.run.files import RunWriter, environment
from hotrow.run.job import Job
from hotrow.run.tally import Tally


def checkpoints_of(section: CheckpointSection, run: Path) -> Path:
    """Where the checkpoints of a run are."""
    return run / IN_RUN if section.folder is None else Path(section.folder) / run.name


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole."""

    folder: Path
    step: int
    seconds: float = math.nan


class Saving:
    """Saves a run as often as its settings say."""

    def __init__(
        self,
        job: Job,
        run: RunWriter,
        tally: Tally,
        *,
        started: str,
        resumed_after: tuple[int, ...] = (),
        last: Saved | None = None,
        warn: Callable[[str], None],
        tell: Callable[[Saved], None],
    ) -> None:
        self.last = last
        self._job, self._run, self._tally = job, run, tally
        self._section, self._warn, self._tell = job.config.checkpoint, warn, tell
        self._about = {"started": started, "resumed_after": list(resumed_after)}
        self._saved_at = monotonic()
        self.root = checkpoints_of(self._section, run.folder)

    def after_step(self, step: int) -> None:
        """Save if it is time. What fails is told, and training goes on, unless it shall stop."""
        if not self._is_due(step):
            return
        try:
            self.save(step)
        except OSError as error:
            self._saved_at = monotonic()
            kept = "there is none yet" if self.last is None else f"{self.last.folder} stays"
            message = f"the checkpoint of step {step:,} was not saved: {error}; {kept}"
            if self._section.on_error == "stop":
                raise OSError(f"{message}. checkpoint.on_error is 'stop'") from error
            self._warn(f"{message}. Training goes on")

    def _is_due(self, step: int) -> bool:
        steps, seconds = self._section.every_steps, self._section.every_seconds
        if steps is not None and step % steps == 0:
            return True
        return seconds is not None and monotonic() - self._saved_at >= seconds

    def save(self, step: int) -> Saved | None:
        """Now, if this step is not saved yet; None: the loss is no number, and none is replaced."""
        if self.last is not None and self.last.step == step:
            return self.last
        begun = perf_counter()
        self._run.sync()
        self._tally.finish()
        if math.isnan(self._tally.loss):
            return None
        job, section = self._job, self._section
        folder = save_checkpoint(
            self.root,
            job.model,
            step=step,
            extra=self._extra(),
            keep=section.keep,
            full_every=section.full_every,
            **parts_of(job),
        )
        self._saved_at = monotonic()
        self.last = Saved(folder, step, perf_counter() - begun)
        self._tell(self.last)
        return self.last

    def _extra(self) -> dict[str, Any]:
        config = self._job.config
        return {
            **self._about,
            "settings": asdict(config),
            "data": self._job.samples.described(),
            "evaluations": [asdict(each) for each in self._tally.evaluations],
            "environment": environment(device=config.run.device, threads=torch.get_num_threads()),
        }


def parts_of(job: Job) -> dict[str, Any]:
    dense = job.trainer.dense_optimizer
    return {} if dense is None else {"dense_optimizer": dense}
