"""A run that goes on from its last checkpoint. Shows nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hotrow.checkpoint import Checkpoint
from hotrow.checkpoint.folder import IN_RUN, LATEST, latest_in, saved_in, why_not_latest
from hotrow.checkpoint.loading import RowsReplaced
from hotrow.checkpoint.manifest import CHECKPOINT_FILE, MODEL_FILE, NewerFormat
from hotrow.run.config import RunConfig
from hotrow.run.files import MODEL_FOLDER, read_run, read_steps
from hotrow.run.job import Job, build
from hotrow.run.saving import checkpoints_of, parts_of
from hotrow.run.source import Samples, why_other
from hotrow.run.strategy_names import find_named
from hotrow.run.tally import Tally
from hotrow.support import toml
from hotrow.support.messages import few
from hotrow.support.records import EvalRecord

# What the bits of a run depend on; everything else may be another when it goes on. A folder of
# data is known by what is in it.
_DECIDING = (
    "run.seed", "data.", "model.", "embedding.optimizer.", "training.optimizer.",
    "training.schedule.", "training.clip_norm", "system.",
)  # fmt: skip
_ELSEWHERE = ("data.folder", "data.eval_batches")


@dataclass(frozen=True)
class Resumed:
    """A run as its checkpoint has left it."""

    job: Job
    checkpoint: Path
    tally: Tally
    started: str
    resumed_after: tuple[int, ...]  # this time, too

    @property
    def step(self) -> int:
        return self.job.done


def find_run_to_resume(config: RunConfig, runs: Path) -> Path | None:
    """The folder of the newest run of this name that has a checkpoint."""
    pattern = re.compile(re.escape(config.run.name) + r"(?:-(\d+))?")
    found = [
        (int(match[1] or 1), path)
        for path in (runs.iterdir() if runs.is_dir() else ())
        if (match := pattern.fullmatch(path.name))
        and latest_in(checkpoints_of(config.checkpoint, path)) is not None
    ]
    return max(found)[1] if found else None


def has_ended(run: Path, config: RunConfig, steps: int) -> bool:
    """Whether a run has ended by itself, and settings as they are now make it no longer."""
    try:
        record = read_run(run)
    except ValueError:
        return False
    if record.outcome != "finished":
        return False
    if config.run.save and not (run / MODEL_FOLDER / MODEL_FILE).is_file():
        return False  # there was no room for it
    then, now = record.settings.get("training", {}), config.training
    # It may have settled, or have left samples out, and so have taken fewer; or have begun an epoch
    # anew, and taken more.
    is_as_long = all(then.get(key) == getattr(now, key) for key in ("epochs", "steps", "patience"))
    is_counted = find_named(config.embedding.strategy).contract != "changed"
    return is_as_long or (is_counted and record.summary.steps >= steps)


def settings_of(run: Path, overrides: Iterable[str]) -> RunConfig:
    """The settings that a run's newest whole checkpoint was saved with."""
    found, folder = _settings_in(run)
    for text in overrides:
        toml.override(RunConfig, found, text)
    return toml.build(RunConfig, found, where=f"the settings of {folder}", section="")


def _settings_in(run: Path) -> tuple[dict[str, Any], Path]:
    """Of the newest checkpoint that has any; `resume` tells what is wrong with the others."""
    errors = []
    for folder in _newest_first(run / IN_RUN):
        try:
            return _plain(_about(Checkpoint(folder))["settings"]), folder
        except NewerFormat:
            raise
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise _none_is_whole(run / IN_RUN, errors)
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


def resume(config: RunConfig, run: Path, samples: Samples, warn: Callable[[str], None]) -> Resumed:
    """The job of a run with all that its newest whole checkpoint has; damaged ones are told."""
    root = checkpoints_of(config.checkpoint, run)
    if (why_not := why_not_latest(root)) is not None:
        warn(why_not)
    errors = []
    for folder in _newest_first(root):
        try:
            found = Checkpoint(folder)
            about = _about(found)
            with _believed(found):
                _refuse_other(about, found, config, samples)
            job = build(config, samples, done=found.step, position=_position(about, found))
            found.check(job.model, parts_of(job))
        except NewerFormat:
            raise
        except _Other as error:
            raise ValueError(str(error)) from None
        except ValueError as error:
            errors.append(str(error))
            warn(f"{folder} cannot be used: {error}")
            continue
        try:
            _load(job, found)
            with _believed(found):
                _tell_what_is_not_kept(config, about, job, warn)
                tally = _tally(run, about, found.step, warn)
                resumed_after = (*about["resumed_after"], found.step)
        except ValueError as error:
            # The next one is for a job of its own, in which no row was replaced.
            why = error.why if isinstance(error, RowsReplaced) else error
            errors.append(str(why))
            warn(f"{folder} cannot be used: {why}")
            continue
        return Resumed(job, folder, tally, about["started"], resumed_after)
    if not errors:
        raise ValueError(
            f"{run} has checkpoints in {run / IN_RUN}, and none in {root}, where "
            "checkpoint.folder looks for them: leave that out, or move them there"
        )
    raise _none_is_whole(root, errors)


def _position(about: Mapping[str, Any], found: Checkpoint) -> int:
    position = about.get("position", found.step)  # which older ones do not have
    if not isinstance(position, int) or position < 0:
        raise ValueError(f"{found.folder} says that its run goes on with batch {position!r}")
    return position


@contextmanager
def _believed(found: Checkpoint) -> Iterator[None]:
    """What a checkpoint says of its run may be anybody's, and of any shape."""
    try:
        yield
    except (ArithmeticError, LookupError, AttributeError, TypeError) as error:
        raise ValueError(
            f"what {found.folder} says of its run lacks something: {type(error).__name__} {error}"
        ) from error


class _Other(ValueError):
    """The checkpoint is whole, and not of this run."""


def _newest_first(root: Path) -> list[Path]:
    """The latest, and then those before it."""
    found, latest = saved_in(root), latest_in(root)
    return list(reversed(found[: found.index(latest) + 1])) if latest in found else []


def _about(found: Checkpoint) -> dict[str, Any]:
    about = found.state.get("extra")
    wanted = {"started", "resumed_after", "settings", "data", "evaluations", "environment"}
    if (
        not isinstance(about, dict)
        or not wanted <= about.keys()
        or not isinstance(about["settings"], dict)
    ):
        raise ValueError(
            f"{found.folder} was not saved by `hotrow train`, but by another training loop; "
            "hotrow.load_checkpoint reads it there"
        )
    return about


def _refuse_other(
    about: Mapping[str, Any], found: Checkpoint, config: RunConfig, samples: Samples
) -> None:
    data, here = about["data"], samples.described()
    if unlike := why_other(data, here):
        raise _Other(f"{found.folder} was trained on other data: {few(unlike, between='; ')}")
    for section in ("embedding", "training"):
        settings = (about["settings"], asdict(config))
        then, now = (each[section]["optimizer"]["name"] for each in settings)
        if then != now:
            raise _Other(
                f"{found.folder} was saved with {section}.optimizer.name = {then!r}, and {now!r} "
                "cannot go on with that one's state"
            )
    if not config.checkpoint.strict:
        return
    unlike = [
        f"{key} is {_said(now)}, and was {_said(then)}"
        for key, then, now in _differences(about["settings"], config)
    ]
    if "samples" in data and "samples" in here and data["samples"] != here["samples"]:
        unlike.append("data.folder holds other samples than it held")
    if unlike:
        raise _Other(
            f"{found.folder} was saved with other settings: {few(unlike, between='; ')}. Give "
            "those, or go on all the same with checkpoint.strict=false"
        )


def _differences(saved: Any, config: RunConfig) -> list[tuple[str, Any, Any]]:
    then = _flat(asdict(RunConfig())) | _flat(_plain(saved))  # what is new had its default
    now = _flat(_plain(asdict(config)))
    return [
        (key, then.get(key), value)
        for key, value in now.items()
        if key.startswith(_DECIDING) and key not in _ELSEWHERE and then.get(key) != value
    ]


def _plain(settings: Any) -> Any:
    """As TOML would have them: lists, and no tuples."""
    return json.loads(json.dumps(settings))


def _said(value: Any) -> str:
    return "left out" if value is None else repr(value)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
    return found


def _load(job: Job, found: Checkpoint) -> None:
    """Settings of optimizers stay those of the run, which are the same if it is strict."""
    groups = [group for each in job.optimizers for group in each.param_groups]
    before = [{key: _kept(value) for key, value in group.items()} for group in groups]
    found.load(job.model, parts_of(job))
    groups = [group for each in job.optimizers for group in each.param_groups]
    for group, settings in zip(groups, before, strict=True):
        settings["initial_lr"] = _kept(settings["lr"])  # of which schedules take a part
        for key, value in settings.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            elif key != "params":
                group[key] = value


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tally(run: Path, about: Mapping[str, Any], step: int, warn: Callable[[str], None]) -> Tally:
    """What was recorded before."""
    tally = Tally()
    try:
        for record in read_steps(run):
            if record.step > step:
                break
            tally.add(record)
    except (OSError, ValueError, TypeError, KeyError) as error:
        warn(f"the records of steps in {run} cannot be read: {error}")
    if tally.steps != step:
        warn(f"{run} has records of {tally.steps:,} steps, and goes on after step {step:,}")
    tally.evaluations = [EvalRecord(**each) for each in about["evaluations"]]
    return tally


def _tell_what_is_not_kept(
    config: RunConfig, about: Mapping[str, Any], job: Job, warn: Callable[[str], None]
) -> None:
    now, then = config.embedding.strategy, about["settings"]["embedding"]["strategy"]
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
    before, device = about["settings"]["run"], config.run
    if before["device"].split(":")[0] != device.device.split(":")[0]:
        warn(f"it was trained on {before['device']}, and goes on up to rounding")
    elif before["threads"] != device.threads:
        warn("run.threads is another, which can change the last bits")
