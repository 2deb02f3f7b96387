"""A run that has ended: open it with the model it trained, and write its scores. Shows nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hotrow.checkpoint import SavedModel
from hotrow.checkpoint.folder import IN_RUN, latest_in
from hotrow.run.config import RowOptimizerSection, RunConfig, from_settings
from hotrow.run.files import MODEL_FOLDER, RUN_FILE, STEPS_FILE, read_run
from hotrow.run.job import Job, build, open_data
from hotrow.run.resume import settings_of
from hotrow.run.source import AnyBatch, Description, Samples
from hotrow.sizing.budgets import AUTO
from hotrow.support.files import PARTIAL, make_durable
from hotrow.support.messages import few, warn
from hotrow.support.records import RunRecord
from hotrow.support.units import parse_bytes

_GROUP_SAMPLES = 1 << 20  # of a row group, which stay in memory until it is written


def open_trained(
    run: str | Path,
    *,
    runs: str | Path = "runs",
    data: str | Path | None = None,
    overrides: Iterable[str] = (),
) -> Job:
    """Return the job of a run, with its trained weights.

    `run` is the folder of a run, or its name in `runs`. `data` is a prepared folder to read instead
    of the run's own, and `overrides` change settings as they do for training.
    """
    folder = find_run(run, runs)
    _refuse_unended(folder)
    record = read_run(folder)
    settings = dict(record.settings)
    if data is not None:
        settings["data"] = settings.get("data", {}) | {"kind": "prepared", "folder": str(data)}
    config = from_settings(settings, overrides, where=str(folder / RUN_FILE))
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    saved = _saved(folder, record)
    try:
        samples = open_data(config)
    except ValueError as error:
        if config.data.kind == "prepared" and data is None:
            raise ValueError(f"{error}. If the data lie elsewhere now, say where: --data") from None
        raise
    if record.data:
        trained = Description.read(record.data, where=f"the record of run {record.name}")
        if texts := trained.differences(Description.of(samples)):
            raise ValueError(
                f"{config.data.folder or 'the generated data'} cannot be read by this model, which "
                f"was trained on other data: {few(texts, between='; ')}"
            )
    saved.verify()
    job = build(_without_row_state(config, samples), samples)
    saved.check(job.model)
    saved.load(job.model)
    job.trainer.step = record.summary.steps
    return job


def find_run(run: str | Path, runs: str | Path) -> Path:
    """Return the folder of a run, ended or not."""
    for file in (RUN_FILE, STEPS_FILE):
        for folder in (Path(run), Path(runs) / run):
            if (folder / file).is_file():
                return folder
    if Path(run).is_dir():
        return Path(run)  # readers say what it lacks
    known = [path.name for path in runs_in(Path(runs))]
    hint = f"; in {runs} there are {few(known)}" if known else f"; {runs} has none either"
    raise ValueError(f"there is no run {run}{hint}")


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder, ended or not, by name."""
    files = (path for name in (RUN_FILE, STEPS_FILE) for path in folder.glob(f"*/{name}"))
    return sorted({path.parent for path in files})


def settings_in(source: Path, runs: Path) -> RunConfig:
    """Return the settings of the run that a run folder, checkpoint or model belongs to."""
    parents = (source, *source.absolute().parents[:2])
    folder = next((path for path in parents if (path / STEPS_FILE).is_file()), None)
    folder = folder or find_run(source, runs)
    if not (folder / RUN_FILE).is_file():
        return settings_of(folder, ())
    return from_settings(read_run(folder).settings, where=str(folder / RUN_FILE))


def _refuse_unended(folder: Path) -> None:
    if (folder / RUN_FILE).is_file() or not (folder / STEPS_FILE).is_file():
        return
    raise ValueError(
        f"{folder} has not ended: it is under way, or was killed"
        + (
            ", and has no checkpoint to go on from: train it again"
            if not _has_checkpoint(folder)
            else f"; `hotrow train {folder} --resume` continues it"
        )
    )


def _has_checkpoint(folder: Path) -> bool:
    return latest_in(folder / IN_RUN) is not None


def _saved(folder: Path, record: RunRecord) -> SavedModel:
    place, has_diverged = folder / MODEL_FOLDER, record.outcome == "diverged"
    if not place.is_dir() and has_diverged:
        raise ValueError(
            f"{folder} has no model: its loss or its weights became NaN or infinite. Train it "
            "again with lower learning rates, training.schedule.warmup_steps or training.clip_norm"
        )
    if not place.is_dir() and record.outcome != "finished" and _has_checkpoint(folder):
        raise ValueError(
            f"{folder} has no model: it was stopped, or failed. `hotrow train {folder} --resume` "
            "continues from its last checkpoint"
        )
    if not place.is_dir():
        raise ValueError(
            f"{folder} has no model: it was trained with run.save = false, failed, or could not "
            "save it. Train it again"
        )
    if record.resumed_after and record.has_model is False:
        why = "it failed, was stopped at once, or could not save it"
        if has_diverged:
            why = "its loss or its weights became NaN or infinite"
        elif not record.settings.get("run", {}).get("save", True):
            why = "run.save was false then"
        warn(
            f"{place} is of before the run went on after step {record.resumed_after[-1]:,}, and "
            f"not of its end: {why}"
        )
    return SavedModel(place)


def _without_row_state(config: RunConfig, samples: Samples) -> RunConfig:
    """Return the run without optimizer state in rows: nothing is updated, and with Adam rows take a
    third of the memory.

    The budget stays the same in bytes, and holds more rows. "auto" was decided by the machine that
    trained; a tenth is enough for reading.
    """
    total = config.row_bytes * sum(rows for rows, _ in samples.tables.values())
    given = config.embedding.budget
    embedding = replace(
        config.embedding,
        optimizer=RowOptimizerSection(name="sgd", lr=0.0),
        budget=parse_bytes("10%" if given == AUTO else given, total=total),
    )
    return replace(config, embedding=embedding)


def write_scores(
    job: Job, batches: Iterable[AnyBatch], out: Path, *, group_samples: int = _GROUP_SAMPLES
) -> int:
    """Write the probability of a click for every sample as Parquet; return the number of samples.

    The file is written beside its place and renamed, so that it is there only when it is whole.
    """
    import pyarrow  # takes a while to import
    import pyarrow.parquet

    kinds = {"row": pyarrow.int64(), "score": pyarrow.float64(), "label": pyarrow.int8()}
    schema = pyarrow.schema(kinds)
    beside, done = out.with_name(out.name + PARTIAL), 0
    try:
        with pyarrow.parquet.ParquetWriter(beside, schema) as writer:
            for scores, labels in _groups(job, batches, group_samples):
                rows = torch.arange(done, done + len(scores))
                columns = [column.numpy() for column in (rows, scores, labels)]
                writer.write_table(pyarrow.table(columns, schema=schema))
                done += len(scores)
        make_durable(beside)
        os.replace(beside, out)
        make_durable(out.parent)
    finally:
        beside.unlink(missing_ok=True)
    return done


def _groups(job: Job, batches: Iterable[AnyBatch], samples: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the scores and labels of row groups."""
    scores: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        # In double precision, as evaluation ranks them.
        scores.append(job.trainer.predict(batch).double().sigmoid().cpu())
        labels.append(batch.label.cpu().to(torch.int8))
        if sum(map(len, scores)) >= samples:
            yield torch.cat(scores), torch.cat(labels)
            scores, labels = [], []
    if scores:
        yield torch.cat(scores), torch.cat(labels)
