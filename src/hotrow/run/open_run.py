"""A run that has ended, opened again with the model it has trained. Shows nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from hotrow.checkpoint import SavedModel
from hotrow.checkpoint.folder import IN_RUN, latest_in
from hotrow.run.config import RowOptimizerSection, RunConfig
from hotrow.run.files import MODEL_FOLDER, RUN_FILE, STEPS_FILE, read_run
from hotrow.run.job import Job, build, open_data
from hotrow.run.source import Samples, why_other
from hotrow.sizing.budgets import AUTO
from hotrow.support import toml
from hotrow.support.messages import few, warn
from hotrow.support.records import RunRecord
from hotrow.support.units import parse_bytes


def open_trained(
    run: str | Path,
    *,
    runs: str | Path = "runs",
    data: str | Path | None = None,
    overrides: Iterable[str] = (),
) -> Job:
    """The job of a run, with its trained weights.

    `run` is a run's folder, or its name in `runs`; `data` is a prepared folder to take the place of
    the run's own, and `overrides` change settings as they do for training.
    """
    folder = find_run(run, runs)
    _refuse_unended(folder)
    record = read_run(folder)
    config = _settings(record, folder, data, overrides)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    saved = _saved(folder, record)
    samples = _open_data(config, data)
    _refuse_other_data(record, samples, config)
    saved.verify()
    job = build(_without_row_state(config, samples), samples)
    saved.check(job.model)
    saved.load(job.model)
    job.trainer.step = record.summary.steps
    return job


def find_run(run: str | Path, runs: str | Path) -> Path:
    """The folder of a run, ended or not."""
    for file in (RUN_FILE, STEPS_FILE):
        for folder in (Path(run), Path(runs) / run):
            if (folder / file).is_file():
                return folder
    if Path(run).is_dir():
        return Path(run)  # readers say what it lacks
    known = [path.name for path in runs_in(Path(runs))]
    there = f"; in {runs} there are {few(known)}" if known else f"; {runs} has none either"
    raise ValueError(f"there is no run {run}{there}")


def runs_in(folder: Path) -> list[Path]:
    """The runs that lie in a folder, ended or not, by name."""
    files = (path for name in (RUN_FILE, STEPS_FILE) for path in folder.glob(f"*/{name}"))
    return sorted({path.parent for path in files})


def _refuse_unended(folder: Path) -> None:
    if (folder / RUN_FILE).is_file() or not (folder / STEPS_FILE).is_file():
        return
    raise ValueError(
        f"{folder} has not ended: it is under way, or was killed"
        + (
            ", and has no checkpoint to go on from: train it again"
            if latest_in(folder / IN_RUN) is None
            else f"; `hotrow train {folder} --resume` goes on with it"
        )
    )


def settings_of_record(folder: Path) -> RunConfig:
    """The settings of a run that has ended."""
    return _settings(read_run(folder), folder, None, ())


def _settings(
    record: RunRecord, folder: Path, data: str | Path | None, overrides: Iterable[str]
) -> RunConfig:
    found = json.loads(json.dumps(record.settings))  # a copy to change
    where = str(folder / RUN_FILE)
    if data is not None:
        found.setdefault("data", {}).update(kind="prepared", folder=str(data))
    for text in overrides:
        toml.override(RunConfig, found, text)
        where = f"{folder / RUN_FILE} with --set"
    return toml.build(RunConfig, found, where=where, section="")


def _saved(folder: Path, record: RunRecord) -> SavedModel:
    place, has_diverged = folder / MODEL_FOLDER, record.outcome == "diverged"
    if not place.is_dir() and has_diverged:
        raise ValueError(
            f"{folder} has no model: its loss or its weights became NaN or infinite. Train it "
            "again with lower learning rates, training.schedule.warmup_steps or training.clip_norm"
        )
    if not place.is_dir():
        raise ValueError(
            f"{folder} has no model: it was trained with run.save = false, failed, or could not "
            "save it. Train it again"
        )
    if record.resumed_after and record.has_model is False:
        warn(
            f"{place} is of before the run went on after step {record.resumed_after[-1]:,}, and "
            f"not of its end: {_why_not_saved(record)}"
        )
    return SavedModel(place)


def _why_not_saved(record: RunRecord) -> str:
    if record.outcome == "diverged":
        return "its loss or its weights became NaN or infinite"
    if not record.settings.get("run", {}).get("save", True):
        return "run.save was false then"
    return "it failed, was stopped at once, or could not save it"


def _open_data(config: RunConfig, data: str | Path | None) -> Samples:
    try:
        return open_data(config)
    except ValueError as error:
        if config.data.kind == "prepared" and data is None:
            raise ValueError(f"{error}. If the data lie elsewhere now, say where: --data") from None
        raise


def _refuse_other_data(record: RunRecord, samples: Samples, config: RunConfig) -> None:
    try:
        other = why_other(record.data, samples.described()) if record.data else []
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the record of run {record.name} is damaged: what it says of its data lacks "
            f"something ({type(error).__name__} {error})"
        ) from error
    if other:
        what = config.data.folder or "the generated data"
        raise ValueError(
            f"{what} cannot be read by this model, which was trained on other data: "
            + few(other, between="; ")
        )


def _without_row_state(config: RunConfig, samples: Samples) -> RunConfig:
    """Nothing is updated, so rows need no state: with Adam a third of the memory is left.

    The budget stays what it was in bytes, in which more rows find room than before; "auto" was
    decided by the machine that trained, and a tenth serves those that only read.
    """
    width, rule = config.model.row_width, config.embedding.optimizer.rule()
    rows = sum(rows for rows, _ in samples.tables.values())
    total = 4 * (width + rule.state_width(width)) * rows
    given = config.embedding.budget
    embedding = replace(
        config.embedding,
        optimizer=RowOptimizerSection(name="sgd", lr=0.0),
        budget=parse_bytes("10%" if given == AUTO else given, total=total),
    )
    return replace(config, embedding=embedding)
