"""The checkpoints of a run: when they are saved, and what happens if one fails. Shows nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from hotrow.checkpoint import Save, begin_checkpoint, save_checkpoint
from hotrow.checkpoint.folder import IN_RUN, latest_in, step_of
from hotrow.checkpoint.parts import dense_state
from hotrow.checkpoint.saving import abandon_save_in
from hotrow.distributed.ranks import RankError
from hotrow.run.config import CheckpointSection
from hotrow.run.files import FollowedRun, RunWriter, environment
from hotrow.run.job import Job
from hotrow.run.rank_records import totals_of
from hotrow.run.stopping import Request
from hotrow.run.tally import Tally
from hotrow.support.files import make_folder
from hotrow.support.manifests import Count
from hotrow.support.records import Counts, EvalRecord
from hotrow.support.units import show_bytes

_SECONDS_TOLD = 1.0  # warn if training waited at least this long; the record has shorter waits


def checkpoints_of(section: CheckpointSection, run: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run / IN_RUN if section.folder is None else Path(section.folder) / run.name


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says of its run, beside weights and the states of optimizers."""

    started: str
    resumed_after: list[int]
    settings: dict[str, Any]
    data: dict[str, Any]
    evaluations: list[EvalRecord]
    environment: dict[str, Any]
    position: Count | None = None  # the next batch; None: as many as steps (earlier versions)
    ranks: list[int] = field(default_factory=list)  # numbers of ranks that have trained parts of it
    totals: Counts | None = None  # of all ranks; None: one rank's, which records of steps have


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint."""

    folder: Path
    step: int
    seconds: float = math.nan
    pause: float = math.nan  # the part of `seconds` in which training stopped
    waited: float = 0.0  # seconds for which training waited because the log was full


class Saving:
    """Saves a run as often as its settings say."""

    def __init__(
        self,
        job: Job,
        run: RunWriter | FollowedRun,
        tally: Tally,
        *,
        started: str,
        resumed_after: tuple[int, ...] = (),
        ranks: Iterable[int] = (),
        last: Saved | None = None,
        warn: Callable[[str], None],
        tell: Callable[..., None],  # `event`, and its facts
        is_first: bool = True,  # of several ranks
    ) -> None:
        self.last, self._position = last, job.position
        self._job, self._run, self._tally = job, run, tally
        self._section, self._warn, self._tell = job.config.checkpoint, warn, tell
        self._started, self._resumed_after = started, list(resumed_after)
        self._ranks = sorted(ranks)
        self._saved_at = monotonic()
        self._under_way: Save | None = None
        self._warned: set[str] = set()
        self._figures = {"saved": 0, "seconds": 0.0, "pause_seconds": 0.0, "waited_seconds": 0.0}
        self.root = checkpoints_of(self._section, run.folder)
        if self._section.folder is not None and is_first:
            self._make_folder()

    def _make_folder(self) -> None:
        """Make the folder of `checkpoint.folder`, and a link to it in the folder of the run."""
        try:
            make_folder(self.root)
        except OSError as error:  # now, and not after hours
            message = f"checkpoints cannot be written to {self.root}: {error.strerror}"
            if self._section.on_error == "stop":
                raise OSError(f"{message}; give another checkpoint.folder") from error
            self._warn(f"{message}. Training goes on, and tries again when one is due")
        link = self._run.folder / IN_RUN
        with suppress(OSError):  # it has earlier checkpoints, or the file system has no links
            if link.is_symlink():
                link.unlink()
            link.symlink_to(self.root.resolve())

    def after_step(self, step: int) -> None:
        """Save if it is time. A failure warns, or raises if `on_error` is "stop"."""
        if self._under_way is not None and self._under_way.done:
            self._finish()
        if not self._is_due(step):
            return
        if self._under_way is not None:
            self._wait_for_previous(step)
        try:
            self._save(step, background=self._section.background)
        except OSError as error:
            self._failed(step, error)

    def _is_due(self, step: int) -> bool:
        steps = self._section.every_steps
        if steps is not None and step % steps == 0:
            return True
        return bool(self._job.trainer.requested & Request.SAVE)

    def request(self) -> int:
        """Return `Request.SAVE` if a timed checkpoint is due on this rank."""
        seconds = self._section.every_seconds
        is_over = self._under_way is None  # seconds count from the end of the previous one
        is_due = seconds is not None and is_over and monotonic() - self._saved_at >= seconds
        return Request.SAVE * is_due

    def save(self, step: int) -> None:
        """Save now, unless this step is saved already or the loss is NaN."""
        self.end()
        self._save(step, background=False)

    def end(self) -> None:
        """Wait for a save in the background; a failure only warns."""
        if self._under_way is not None:
            self._finish(may_stop=False)

    def abandon(self) -> None:
        """Stop a save in the background: it leaves no checkpoint."""
        abandon_save_in(self.root)
        self._under_way = None

    def figures(self) -> dict[str, float]:
        """Return how often this process has saved, and the time it took; empty: never."""
        return dict(self._figures) if self._figures["saved"] else {}

    def _save(self, step: int, *, background: bool) -> None:
        position = self._job.position  # the end of an epoch is known after its last step
        if self.last is not None and self.last.step == step and self._position == position:
            return
        begun = perf_counter()
        self._run.sync()
        self._tally.finish()
        if math.isnan(self._tally.loss):
            return
        if (name := not_finite(self._job)) is not None:  # the loss of the next step will be NaN
            self._warn(
                f"the checkpoint of step {step:,} was not saved: {name} holds NaN or infinite "
                f"values; {self._kept()}"
            )
            return
        self._position = position
        options: dict[str, Any] = {
            "step": step,
            "extra": asdict(self._state(position)),
            "keep": self._section.keep,
            "full_every": self._section.full_every,
            "dense_optimizer": self._job.dense_optimizer,
        }
        if not background:
            try:
                folder = save_checkpoint(self.root, self._job.model, **options)
            except RankError:
                self._note_whole(step, pause=perf_counter() - begun)
                raise
            seconds = perf_counter() - begun
            self._note(Saved(folder, step, seconds, seconds))
            return
        save = self._under_way = begin_checkpoint(
            self.root, self._job.model, log=self._section.log, **options
        )
        save.pause = perf_counter() - begun
        if save.why_at_once is not None:
            reason = f"training stops while checkpoints are written: {save.why_at_once}"
            self._warn_once("at once", reason)
            self._finish()

    def _state(self, position: int) -> RunState:
        config = self._job.config
        return RunState(
            self._started,
            self._resumed_after,
            settings=asdict(config),
            data=self._job.samples.described(),
            evaluations=self._tally.evaluations,
            environment=environment(config.run.device),
            position=position,
            ranks=self._ranks,
            totals=totals_of(self._job.trainer, self._tally),
        )

    def _wait_for_previous(self, step: int) -> None:
        assert self._under_way is not None
        before, begun = self._under_way.step, perf_counter()
        self._under_way.join()
        seconds = perf_counter() - begun
        self._figures["waited_seconds"] += seconds
        if seconds >= _SECONDS_TOLD:
            self._warn_once(
                "before",
                f"the checkpoint of step {before:,} was not written yet when that of step {step:,} "
                f"was due, and training has waited {seconds:.1f} s for it. Larger "
                "checkpoint.every_steps, or every_seconds, which counts from one's end, let it go "
                "on",
            )
        self._finish()

    def _finish(self, *, may_stop: bool = True) -> None:
        """Wait for the save in the background, and note its result."""
        save = self._under_way
        assert save is not None
        save.join()
        self._under_way = None  # not before: Ctrl-C during the wait abandons it
        try:
            folder = save.wait()
        except OSError as error:
            self._failed(save.step, error, may_stop=may_stop)
            return
        except RankError as error:
            self._lost_ranks(save, error, may_stop=may_stop)
            return
        except Exception as error:
            message = (
                f"the checkpoint of step {save.step:,} was not saved, because of a mistake of "
                f"hotrow's ({type(error).__name__}: {error}); {self._kept()}. With "
                "checkpoint.background = false training waits for it. Please report this"
            )
            if may_stop:
                raise RuntimeError(message) from error
            self._warn(message)
            return
        if save.waited >= _SECONDS_TOLD:
            self._warn_once(
                "log",
                f"training has waited {save.waited:.1f} s for the checkpoint of step "
                f"{save.step:,}: {show_bytes(save.log_bytes)} for rows that change while it is "
                "written were full. A larger checkpoint.log would hold more of them",
            )
        self._note(
            Saved(folder, save.step, save.pause + save.seconds, save.pause, waited=save.waited)
        )

    def _note(self, saved: Saved) -> None:
        self._saved_at = monotonic()
        self.last = saved
        self._figures["saved"] += 1
        self._figures["seconds"] += saved.seconds
        self._figures["pause_seconds"] += saved.pause
        self._figures["waited_seconds"] += saved.waited
        self._tell("checkpoint", **asdict(saved) | {"folder": str(saved.folder)})

    def _failed(self, step: int, error: OSError, *, may_stop: bool = True) -> None:
        self._saved_at = monotonic()
        message = f"the checkpoint of step {step:,} was not saved: {error}; {self._kept()}"
        if self._section.on_error == "stop" and may_stop:
            raise OSError(f"{message}. checkpoint.on_error is 'stop'") from error
        self._warn(f"{message}. Training goes on" if may_stop else message)

    def _lost_ranks(self, save: Save, error: RankError, *, may_stop: bool) -> None:
        if not self._note_whole(save.step, save.pause, save.seconds):
            self._warn(
                f"the checkpoint of step {save.step:,} was not saved: ranks were lost while it was "
                f"written; {self._kept()}"
            )
        if may_stop:
            raise error

    def _note_whole(self, step: int, pause: float, seconds: float = 0.0) -> bool:
        """Return whether a checkpoint is whole all the same: ranks may be lost when it is."""
        latest = latest_in(self.root)
        is_whole = latest is not None and step_of(latest.name) == step
        if latest is not None and is_whole:
            self._note(Saved(latest, step, pause + seconds, pause))
        return is_whole

    def _kept(self) -> str:
        return "there is none yet" if self.last is None else f"{self.last.folder} stays"

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(message)


def not_finite(job: Job) -> str | None:
    """Return the name of a dense weight that is NaN or infinite; None: there is none. The loss of a
    step does not tell: it is that of the weights before the step."""
    for name, weight in dense_state(job.model).items():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            return name
    return None
