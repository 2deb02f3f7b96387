"""A run that is resumed from its last checkpoint. Shows nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import IN_RUN, LATEST, latest_in, saved_in, why_not_latest
from hotrow.checkpoint.loading import RowsReplaced
from hotrow.checkpoint.manifest import CHECKPOINT_FILE, MODEL_FILE, NewerFormat
from hotrow.run.config import RunConfig, from_settings
from hotrow.run.files import MODEL_FOLDER, read_run, read_start, read_steps
from hotrow.run.job import Job, build
from hotrow.run.ranks import RunRanks
from hotrow.run.saving import RunState, checkpoints_of
from hotrow.run.source import Description, Samples
from hotrow.run.strategy_names import find_named
from hotrow.run.tally import Tally
from hotrow.support.manifests import in_words
from hotrow.support.messages import few, many
from hotrow.support.toml import flat

# The settings that decide the bits of a run; all others may change when it is resumed. A folder of
# data is recognized by its contents.
_DECIDING = (
    "run.seed", "data.", "model.", "embedding.optimizer.", "training.optimizer.",
    "training.schedule.", "training.clip_norm", "system.",
)  # fmt: skip
_NOT_DECIDING = ("data.folder", "data.eval_batches")


@dataclass(frozen=True)
class Begun:
    """A run to be trained: a new one, or with the state of a checkpoint."""

    job: Job
    tally: Tally
    started: str
    checkpoint: Path | None = None
    resumed_after: tuple[int, ...] = ()  # steps, with that of this checkpoint
    ranks: frozenset[int] = frozenset()  # the numbers of ranks that have trained parts of it


def find_run_to_resume(config: RunConfig, runs: Path) -> Path | None:
    """Return the folder of the newest run of this name that has a checkpoint."""
    return next((path for path in _runs(config, runs) if _has_checkpoint(config, path)), None)


def find_restarted(config: RunConfig, runs: Path, launch: str | None) -> Path | None:
    """Return the folder in which a launch of torchrun began before it was restarted; None: it has
    no checkpoint yet, and the run begins anew."""
    for path in _runs(config, runs):
        if launch is not None and _launch_of(path) == launch:
            return path if _has_checkpoint(config, path) else None
    return None


def _launch_of(run: Path) -> Any:
    try:
        start = read_start(run)
    except ValueError:  # damaged
        return None
    return None if start is None else start.environment.get("launch")


def _runs(config: RunConfig, runs: Path) -> list[Path]:
    """Return the folders of runs of this name, the newest first."""
    pattern = re.compile(re.escape(config.run.name) + r"(?:-(\d+))?")
    folders = [
        (int(match[1] or 1), path)
        for path in (runs.iterdir() if runs.is_dir() else ())
        if (match := pattern.fullmatch(path.name))
    ]
    return [path for _, path in sorted(folders, reverse=True)]


def _has_checkpoint(config: RunConfig, run: Path) -> bool:
    return latest_in(checkpoints_of(config.checkpoint, run)) is not None


def has_ended(run: Path, config: RunConfig, steps: int) -> bool:
    """Return whether a run has finished, and the new settings make it no longer."""
    try:
        record = read_run(run)
    except ValueError:
        return False
    if record.outcome != "finished":
        return False
    if config.run.save and not (run / MODEL_FOLDER / MODEL_FILE).is_file():
        return False  # the disk was full
    then, now = record.settings.get("training", {}), config.training
    # A run that settled or skipped samples took fewer steps; one that restarted an epoch took more.
    is_as_long = all(then.get(key) == getattr(now, key) for key in ("epochs", "steps", "patience"))
    is_counted = find_named(config.embedding.strategy).contract != "changed"
    return is_as_long or (is_counted and record.summary.steps >= steps)


def settings_of(run: Path, overrides: Iterable[str]) -> RunConfig:
    """Return the settings of the newest checkpoint that can be read; `resume` warns of others."""
    root, errors = run / IN_RUN, []
    for folder in _newest_first(root):
        try:
            settings = _state(Checkpoint(folder)).settings
        except NewerFormat:
            raise
        except ValueError as error:
            errors.append(str(error))
            continue
        return from_settings(settings, overrides, where=f"the settings of {folder}")
    if errors:
        raise _none_is_whole(root, errors)
    if saved_in(run) or (run / CHECKPOINT_FILE).is_file():
        raise ValueError(
            f"{run} is no run: give the folder of the run that it belongs to. Of its checkpoints "
            f"the one is taken that the file {LATEST!r} beside them names"
        )
    raise ValueError(
        f"{run} has no checkpoint to go on from; checkpoint.every_steps = 1000 saves some"
    )


def _none_is_whole(root: Path, errors: list[str]) -> ValueError:
    return ValueError(f"no checkpoint in {root} can be used: {few(errors, most=2, between='; ')}")


def resume(
    config: RunConfig,
    run: Path,
    samples: Samples,
    warn: Callable[[str], None],
    ranks: RunRanks | None = None,
) -> Begun:
    """Build a job with the state of the newest whole checkpoint; warn of damaged ones. Several
    ranks call this together."""
    ranks = ranks or RunRanks()
    root = checkpoints_of(config.checkpoint, run)
    if (why_not := why_not_latest(root)) is not None:
        warn(why_not)
    errors = []
    names = ranks.from_first(lambda: json.dumps([path.name for path in _newest_first(root)]))
    for folder in (root / name for name in json.loads(names)):
        try:
            return _resume(_open(folder, ranks), config, run, samples, warn, ranks.size)
        except NewerFormat:
            raise
        except _OtherRun as error:
            raise ValueError(str(error)) from None
        except ValueError as error:
            # The next one gets a new job, in which no row was replaced.
            why = error.why if isinstance(error, RowsReplaced) else error
            errors.append(str(why))
            warn(f"{folder} cannot be used: {why}")
    if not errors:
        raise ValueError(
            f"{run} has checkpoints in {run / IN_RUN}, and none in {root}, where "
            "checkpoint.folder looks for them: leave that out, or move them there"
        )
    raise _none_is_whole(root, errors)


def _open(folder: Path, ranks: RunRanks) -> Checkpoint:
    opened: list[Checkpoint] = []

    def read() -> str:
        opened.append(Checkpoint(folder))
        return opened[0].manifest.checksum

    if len(set(ranks.do(read))) > 1:
        raise ValueError("ranks see different checkpoints: all of them must see the same folder")
    return opened[0]


def _resume(
    checkpoint: Checkpoint,
    config: RunConfig,
    run: Path,
    samples: Samples,
    warn: Callable[[str], None],
    size: int,  # how many ranks go on
) -> Begun:
    step, state = checkpoint.step, _state(checkpoint)
    before = from_settings(state.settings, where=f"the settings of {checkpoint.folder}")
    _refuse_other_run(checkpoint.folder, state, before, config, samples)
    job = build(config, samples, done=step, position=state.position)
    checkpoint.check(job.model, {"dense_optimizer": job.dense_optimizer})
    _load(job, checkpoint)
    _warn_of_changes(before, config, warn)
    saved_by = checkpoint.manifest.ranks
    if saved_by != size:
        warn(
            f"it was trained on {many(saved_by, 'rank')}, and goes on with {size:,}: results go on "
            "up to rounding"
        )
    tally = _tally(run, step, warn)
    tally.evaluations = state.evaluations
    tally.go_on(state.totals, is_shared=size > 1)
    after = (*state.resumed_after, step)
    ranks = frozenset({*state.ranks, saved_by})
    return Begun(job, tally, state.started, checkpoint.folder, after, ranks)


def _state(checkpoint: Checkpoint) -> RunState:
    try:
        return msgspec.convert(checkpoint.state.get("extra"), RunState)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{checkpoint.folder} was not saved by `hotrow train`, but by another training loop "
            f"({in_words(error)}); hotrow.load_checkpoint reads it there"
        ) from None


class _OtherRun(ValueError):
    """The checkpoint is whole, and not of this run."""


def _newest_first(root: Path) -> list[Path]:
    """Return the latest checkpoint, and then those before it."""
    folders, latest = saved_in(root), latest_in(root)
    return list(reversed(folders[: folders.index(latest) + 1])) if latest in folders else []


def _refuse_other_run(
    folder: Path, state: RunState, before: RunConfig, config: RunConfig, samples: Samples
) -> None:
    data = Description.read(state.data, where=str(folder))
    now = Description.of(samples)
    if texts := data.differences(now):
        raise _OtherRun(f"{folder} was trained on other data: {few(texts, between='; ')}")
    for section in ("embedding", "training"):
        then, name = (getattr(run, section).optimizer.name for run in (before, config))
        if then != name:
            raise _OtherRun(
                f"{folder} was saved with {section}.optimizer.name = {then!r}, and {name!r} "
                "cannot go on with that one's state"
            )
    if not config.checkpoint.strict:
        return
    settings = dict(flat(asdict(before)))
    texts = [
        f"{key} is {_said(value)}, and was {_said(settings[key])}"
        for key, value in flat(asdict(config))
        if key.startswith(_DECIDING) and key not in _NOT_DECIDING and settings[key] != value
    ]
    if None not in (data.samples, now.samples) and data.samples != now.samples:
        texts.append("data.folder holds other samples than it held")
    if texts:
        raise _OtherRun(
            f"{folder} was saved with other settings: {few(texts, between='; ')}. Give "
            "those, or go on all the same with checkpoint.strict=false"
        )


def _said(value: Any) -> str:
    return "left out" if value is None else repr(list(value) if type(value) is tuple else value)


def _load(job: Job, checkpoint: Checkpoint) -> None:
    """Load all state. The optimizers keep the settings of the run, which may be new ones."""

    def groups() -> list[dict[str, Any]]:
        return [group for optimizer in job.optimizers for group in optimizer.param_groups]

    before = [{key: _copy(value) for key, value in group.items()} for group in groups()]
    checkpoint.load(job.model, {"dense_optimizer": job.dense_optimizer})
    for group, settings in zip(groups(), before, strict=True):
        settings["initial_lr"] = _copy(settings["lr"])  # which schedules multiply
        for key, value in settings.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            elif key != "params":
                group[key] = value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tally(run: Path, step: int, warn: Callable[[str], None]) -> Tally:
    """Add up the steps that were recorded before."""
    tally = Tally()
    try:
        for record in read_steps(run):
            if record.step > step:
                break
            tally.add(record)
    except (OSError, ValueError) as error:
        warn(f"the records of steps in {run} cannot be read: {error}")
    if tally.steps != step:
        warn(f"{run} has records of {tally.steps:,} steps, and continues after step {step:,}")
    return tally


def _warn_of_changes(before: RunConfig, config: RunConfig, warn: Callable[[str], None]) -> None:
    """Warn of state that is not saved, and of settings that change the last bits."""
    then, now = before.embedding.strategy, config.embedding.strategy
    named = find_named(now)
    if named.contract == "changed":
        warn(
            f"which samples {now} has trained is not kept: it goes on with the beginning of that "
            "epoch, and learns anew what it leaves out or orders by"
        )
    elif named.system is not None:
        warn(f"{now} learns its popular rows anew; results are the same up to rounding")
    elif named.contract != find_named(then).contract:
        warn(f"rows were trained by {then}, and {now} goes on; {named.contract} from here on")
    if before.run.device.split(":")[0] != config.run.device.split(":")[0]:
        warn(f"it was trained on {before.run.device}, and goes on up to rounding")
    elif before.run.threads != config.run.threads:
        warn("run.threads is another, which can change the last bits")
