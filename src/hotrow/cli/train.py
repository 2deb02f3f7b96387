"""`hotrow train`: one run, from its settings to its records."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from hotrow.checkpoint import save_model
from hotrow.checkpoint.folder import go_back
from hotrow.checkpoint.model import bytes_of
from hotrow.cli._declared import JsonLinesFlag, RunFile, Settings
from hotrow.cli._exits import DIVERGED, INTERRUPTED, UNEQUAL
from hotrow.cli._ranks import refuse_ranks
from hotrow.cli._show import JsonLines, Screen, Show, one_line_warnings
from hotrow.cli._stop import StopAfterStep
from hotrow.cli._threads import use_threads
from hotrow.embedding.row_verifier import CorruptRows, Shadow
from hotrow.run.board import Board, TensorBoard, check_board
from hotrow.run.config import RunConfig, is_data, load
from hotrow.run.files import MODEL_FOLDER, RunWriter, environment, now, refuse_busy
from hotrow.run.job import Job, all_fast, build, differences, open_data, total_steps
from hotrow.run.resume import Resumed, find_run_to_resume, has_ended, settings_of
from hotrow.run.resume import resume as go_on
from hotrow.run.saving import Saved, Saving, not_finite
from hotrow.run.strategy_names import find_named
from hotrow.run.tally import Tally, limit_of
from hotrow.run.tracing import ChromeTrace, Traced, Tracing, parse_traced
from hotrow.run.training import record_of, told_of
from hotrow.support.records import EvalRecord, Limit, RunRecord, StartRecord, TableRecord
from hotrow.support.units import show_bytes


def train(
    file: RunFile = None,
    settings: Settings = None,
    as_json: JsonLinesFlag = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", metavar="", help="Nothing but warnings and the summary."),
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(metavar="steps=N", help="Also write a Chrome trace of so many steps."),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder in which the run's folder is made.")] = Path(
        "runs"
    ),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            metavar="",
            help="Go on from a run's last checkpoint; FILE may also be the run's folder.",
        ),
    ] = False,
) -> None:
    """Train a model; it and its records are left in runs/NAME.

    Without a file it trains a small DLRM on generated clicks in under a minute, then trains it
    again with every row in fast memory and compares all bits.

    **Examples**

    - `hotrow train`

    - `hotrow train --set embedding.budget=2% --set embedding.strategy=lru`

    - `hotrow train run.toml --set training.steps=200 --json`

    - `hotrow train --set run.device=cuda`

    - `hotrow train --set model.kind=dcnv2`

    - `hotrow train --set model.kind=tbsm`

    - `hotrow train --set run.tensorboard=true`, then `tensorboard --logdir runs`

    - `hotrow train --trace steps=20`, then `hotrow report default`

    - `hotrow train`, then `hotrow evaluate default` and `hotrow predict default --out a.parquet`

    - `hotrow train run.toml --set checkpoint.every_steps=1000`, and when it was stopped
      `hotrow train run.toml --resume`, or `hotrow train runs/first --resume`

    **run.toml**, every key optional:

    ```
    [run]
    name = "first"
    device = "cuda"
    [data]
    rows = [1_000_000, 50_000, 100]
    skew = 1.1
    samples = 1_000_000
    [model]
    embedding_dim = 32
    [embedding]
    budget = "10%"
    strategy = "lookahead"
    [embedding.optimizer]
    name = "row-wise-adagrad"
    lr = 0.02
    [training]
    epochs = 1
    eval_every = 500
    ```

    `training.steps`, where it is given, takes the place of `epochs`. Without a file,
    `run.threads = 1` is set, and on generated data `training.eval_every = 64` and, where the
    strategy is exact, `training.check_equality = true`.

    The trained model goes to runs/NAME/model, as safetensors: dense weights, and those of all
    rows. `--set run.save=false` leaves it out.

    **While it runs**: samples/s, the bytes that move per second, hits (the share of lookups that
    caused no fetch), the share of a step in which training waited for rows, AUC and fast memory.
    At the end it says whether the loader, planning, the link or the dense part is what limits it.

    **--trace steps=20** profiles 20 steps, from the 68th on where the run is long enough;
    `steps=20,from=500` begins later. runs/NAME/trace.json.gz opens in ui.perfetto.dev or
    chrome://tracing, and stages have names in it: read, plan, confirm, fill (or send, collect,
    exchange, insert), write-back, train. The profiler slows those steps down.

    Ctrl-C ends the run after the step under way; its records and the model are kept, with a
    checkpoint, and the exit code is 130. SIGTERM does the same and exits with 0. A loss that
    is no number ends the run, too, which then exits with 3.
    """
    refuse_ranks("train")
    config, folder = _what_to_train(file, settings or (), runs, resume=resume)
    traced = None if trace is None else parse_traced(trace)
    if config.run.tensorboard:
        check_board()
    show: Show = JsonLines(quiet) if as_json else Screen(quiet)
    with one_line_warnings(show.warn):
        use_threads(config.run, show.warn)
        if folder is not None:
            refuse_busy(folder)
        samples = open_data(config)
        steps = total_steps(config, samples)
        traced = None if traced is None else traced.within(steps)
        samples.split("test")  # refuses one that is empty, before anything was trained
        if config.training.eval_every is not None:
            samples.split("validation")
        if folder is not None and has_ended(folder, config, steps):
            show.warn(
                f"{folder} has ended, and there is nothing to go on with; more training.epochs, "
                "training.steps or training.patience make it longer"
            )
            return
        if folder is None:
            before, job = None, build(config, samples)
        else:
            before = go_on(config, folder, samples, show.warn)
            job = before.job
        with (
            _writer(runs, config, folder, before) as run,
            _board(config, run.folder, job.done) as board,
            StopAfterStep() as stop,
        ):
            show.start(job, run.folder)
            if before is not None:
                show.resumed(before.step, before.checkpoint)
            if config.run.save:
                _warn_of_little_room(job, run.folder, show)
            tracing = _tracing(config, run.folder, traced)
            result = _run(job, _Telling(run, board, show, stop, tracing), steps, before)
            show.end(result.record, run.folder, result.model, result.saved)
    if result.unsaved is not None:
        raise result.unsaved
    if stop.asked:
        raise typer.Exit(0 if stop.to_terminate and result.saved is not None else INTERRUPTED)
    is_promised = find_named(config.embedding.strategy).contract == "exact"
    if result.record.summary.equal_to_all_fast is False and is_promised:
        raise typer.Exit(UNEQUAL)
    if result.record.outcome == "diverged":
        raise typer.Exit(DIVERGED)


def _what_to_train(
    file: Path | None, settings: Sequence[str], runs: Path, *, resume: bool
) -> tuple[RunConfig, Path | None]:
    """The run's settings, and the folder in which it goes on; None: it begins."""
    if file is not None and not file.is_file():
        folder = next((each for each in (file, runs / file) if each.is_dir()), None)
        if folder is not None and not is_data(folder):  # of data, load says what to do
            if resume:
                return settings_of(folder, settings), folder
            raise ValueError(f"{folder} is the folder of a run; with --resume it goes on")
    config = load(file, overrides=settings)
    if not resume and config.checkpoint.resume == "never":
        return config, None
    folder = find_run_to_resume(config, runs)
    if folder is None and resume:
        raise ValueError(
            f"there is no checkpoint of a run {config.run.name!r} in {runs} to go on from"
        )
    return config, folder


def _writer(
    runs: Path, config: RunConfig, folder: Path | None, before: Resumed | None
) -> RunWriter:
    if folder is None or before is None:
        return RunWriter(runs, name=config.run.name)
    return RunWriter.going_on(folder, after=before.step)


def _board(config: RunConfig, folder: Path, done: int) -> Board:
    return TensorBoard(folder, config, done) if config.run.tensorboard else Board()


def _tracing(config: RunConfig, folder: Path, traced: Traced | None) -> Tracing:
    return Tracing() if traced is None else ChromeTrace(folder, traced, device=config.run.device)


def _warn_of_little_room(job: Job, folder: Path, show: Show) -> None:
    needed, free = bytes_of(job.model), shutil.disk_usage(folder).free
    if free < needed:
        show.warn(
            f"the model will take {show_bytes(needed, beside=free)}, and {folder} has "
            f"{show_bytes(free, beside=needed)} free: make room before the run ends, or it is not "
            "saved"
        )


@dataclass(frozen=True)
class _Telling:
    """Whom a run tells how it goes, and who may stop it."""

    run: RunWriter
    board: Board
    show: Show
    stop: StopAfterStep
    tracing: Tracing


@dataclass(frozen=True)
class _Result:
    record: RunRecord
    model: Path | None  # where it was saved
    saved: Saved | None  # the last checkpoint
    unsaved: OSError | None  # why one of both was not


def _run(job: Job, telling: _Telling, steps: int, before: Resumed | None) -> _Result:
    """Trains, evaluates, saves and compares; whatever happens, the record says how far it came."""
    tally, started, stop = Tally(), now(), telling.stop
    resumed_after: tuple[int, ...] = ()
    outcome, is_equal, model, unsaved, last = "failed", None, None, None, None
    if before is not None:
        tally, started, resumed_after = before.tally, before.started, before.resumed_after
        last = Saved(before.checkpoint, before.step)
    saving = Saving(
        job, telling.run, tally, started=started, resumed_after=resumed_after, last=last,
        warn=telling.show.warn, tell=telling.show.saved,
    )  # fmt: skip

    start = StartRecord(
        started,
        settings=asdict(job.config),
        environment=environment(device=job.config.run.device, threads=torch.get_num_threads()),
        memory=job.embedding.memory(),
    )

    def finish() -> RunRecord:
        record = _record(
            job, tally, telling.run.name, start, outcome, is_equal, resumed_after,
            saving.figures(), model is not None,
        )  # fmt: skip
        telling.run.finish(record)
        return record

    try:
        telling.run.start(start)
        _train(job, tally, telling, steps, saving)
        why_not = _why_no_model(job, tally)
        ended = "finished" if why_not is None else "diverged"
        ended = "interrupted" if stop.asked else ended
        place = telling.run.folder / MODEL_FOLDER
        unsaved = _save_last(job, saving, stop)
        if job.config.run.save:  # first: whatever fails from here on, what was trained is kept
            outcome = "interrupted"  # if nobody gets any further
            with contextlib.suppress(OSError):  # told at the end, when it is tried again
                finish()  # before the disk may be full
            outcome = "failed"
            if why_not is None:
                model, unsaved_model = _save(job, place)
                unsaved = _both(unsaved, unsaved_model)
            else:
                telling.show.warn(f"the model is not saved: {why_not}")
        if place.exists() and not (job.config.run.save and why_not is None):
            telling.show.warn(f"{place} stays as it was before this run went on")
        if not stop.asked:
            _evaluate(job, tally, telling, at_end=True)
        outcome = ended
        if job.config.training.check_equality and not stop.asked:
            is_equal = _is_equal_to_all_fast(job, tally.losses, telling.show, stop)
    except KeyboardInterrupt:
        outcome = "interrupted"
        saving.abandon()
        if saving.last is not None:
            raise KeyboardInterrupt(_whole(telling.run.folder, saving.last)) from None
        raise
    except Exception as error:
        saving.end()
        if saving.last is not None:
            telling.show.warn(_how_to_go_on(error, telling.run.folder, saving.last))
        raise
    finally:
        saving.end()
        try:
            record = finish()
        except OSError as error:
            saved = "the model was not saved" if model is None else f"the model is in {model}"
            raise OSError(f"{error}; {saved}") from unsaved
    return _Result(record, model, saving.last, unsaved)


def _save_last(job: Job, saving: Saving, stop: StopAfterStep) -> OSError | None:
    """A run that was stopped, or has checkpoints, leaves one of its last step."""
    has_some = job.config.checkpoint.is_on or saving.last is not None
    if not (has_some or (stop.asked and job.config.run.save)):
        return None
    try:
        saving.save(job.trainer.step)
    except OSError as error:
        return OSError(f"the last checkpoint was not saved: {error}")
    return None


def _how_to_go_on(error: Exception, folder: Path, saved: Saved) -> str:
    if isinstance(error, CorruptRows) and saved.step > error.since:
        said = f"the checkpoint of step {saved.step:,} in {saved.folder} may hold wrong rows"
        before = go_back(saved.folder.parent, error.since)
        if before is None:
            return f"{said}, and there is none of step {error.since:,} or before: train anew"
        return (
            f"{said}: `latest` beside it names {before.name} again, from which "
            f"`hotrow train {folder} --resume` goes on"
        )
    said = _whole(folder, saved)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        said += ", also with a smaller embedding.budget"
    return said


def _whole(folder: Path, saved: Saved) -> str:
    return (
        f"the checkpoint of step {saved.step:,} is whole, in {saved.folder}; "
        f"`hotrow train {folder} --resume` goes on from it"
    )


def _save(job: Job, folder: Path) -> tuple[Path | None, OSError | None]:
    """A disk that is full takes no record of what was trained with it."""
    try:
        if folder.exists():  # of the same run, before it went on
            shutil.rmtree(folder)
        save_model(folder, job.model)
    except OSError as error:
        return None, OSError(f"the model was not saved: {error}")
    return folder, None


def _both(one: OSError | None, other: OSError | None) -> OSError | None:
    return OSError(f"{one}; {other}") if one and other else one or other


def _evaluate(job: Job, tally: Tally, telling: _Telling, *, at_end: bool = False) -> None:
    tally.evaluations.append(job.evaluate(at_end=at_end))
    telling.board.evaluation(tally.evaluations[-1])


def _train(job: Job, tally: Tally, telling: _Telling, steps: int, saving: Saving) -> None:
    every, show = job.config.training.eval_every, telling.show
    verify_every = job.config.training.verify_every
    shadow = Shadow([job.embedding], step=job.done) if verify_every else None
    is_verified = True  # what was trained so far
    with show.progress("training", steps=steps) as advance, telling.tracing as tracing:
        for record in job.train():
            tracing.step(tally.steps + 1)
            tally.add(record)
            telling.run.step(record)
            telling.board.step(record)
            tally.expected = job.known_steps
            if every and record.step % every == 0 and record.step != tally.expected:
                _evaluate(job, tally, telling)
            advance(tally)
            if shadow is not None and verify_every:
                is_verified = record.step % verify_every == 0
                if is_verified:
                    shadow.verify(record.step)  # before what is wrong is saved
            saving.after_step(record.step)
            settled = _has_settled(tally.evaluations, job.config.training.patience)
            if telling.stop.asked or settled or _has_diverged(tally):
                break
    if shadow is not None:
        if not is_verified:  # the last rows are saved, too
            shadow.verify(record.step)
        shadow.end()
    tally.finish()
    limit = _limit(job, tally)
    if limit is not None and limit.is_to_be_told:
        show.warn(limit.message)
    if _has_diverged(tally):
        saving.end()  # the last good one may be on its way
        first = next(step for step, loss in enumerate(tally.losses, 1) if math.isnan(loss))
        message = (
            f"the loss is no number since step {first:,}, which no step after it would mend: "
            "training has ended. Lower learning rates, training.schedule.warmup_steps or "
            "training.clip_norm may help"
        )
        if saving.last is not None:
            message += (
                f"; `hotrow train {telling.run.folder} --resume --set checkpoint.strict=false` "
                f"with such settings goes on after step {saving.last.step:,}"
            )
        show.warn(message)


def _has_diverged(tally: Tally) -> bool:
    """Whether the loss is no number: the dense weights are none either, from that step on."""
    return bool(tally.losses) and math.isnan(tally.loss)


def _why_no_model(job: Job, tally: Tally) -> str | None:
    """None: nothing is wrong with it."""
    if _has_diverged(tally):
        return "its loss is no number"
    name = not_finite(job)  # the loss of the last step is that of weights before it
    return None if name is None else f"{name} holds values that are no numbers"


def _has_settled(evaluations: Sequence[EvalRecord], patience: int | None) -> bool:
    """Whether the last `patience` evaluations were no better than the best one before them."""
    if patience is None or len(evaluations) <= patience:
        return False
    aucs = [-1.0 if math.isnan(each.auc) else each.auc for each in evaluations]
    return not max(aucs[-patience:]) > max(aucs[:-patience])


def _is_equal_to_all_fast(
    job: Job, losses: list[float], show: Show, stop: StopAfterStep
) -> bool | None:
    """Trains the same job with every row in fast memory and compares all bits of both."""
    reference, tally = build(all_fast(job.config)), Tally()
    with show.progress("all-fast", steps=len(losses)) as advance:
        for record in reference.train():
            tally.add(record)
            advance(tally)
            if stop.asked:
                return None
            if tally.steps == len(losses):
                break
    tally.finish()
    # As text, in which a NaN equals a NaN and floats are written to their last bit.
    unlike = [] if repr(losses) == repr(tally.losses) else ["losses"]
    unlike += differences(job, reference)
    if unlike:
        show.differs(unlike)
    return not unlike


def _record(
    job: Job,
    tally: Tally,
    name: str,
    start: StartRecord,
    outcome: str,
    is_equal: bool | None,
    resumed_after: tuple[int, ...],
    saving: dict[str, float],
    has_model: bool,
) -> RunRecord:
    embedding = job.embedding
    traffic = embedding.traffic()
    return RunRecord(
        name=name,
        started=start.started,
        outcome=outcome,
        settings=start.settings,
        environment=start.environment,
        memory=embedding.memory(),
        summary=tally.summary(
            fast_rows_share=embedding.num_slots / embedding.num_rows,
            equal_to_all_fast=is_equal,
            chunked_batches=traffic.chunked_batches,
        ),
        evaluations=tuple(tally.evaluations),
        data=job.samples.described(),
        resumed_after=resumed_after,
        saving=saving,
        has_model=has_model,
        system=record_of(job.trainer.system),
        told=told_of(job.trainer.system),
        tables={
            name: TableRecord(each.lookups, each.unique_rows, each.fetched_rows, each.evicted_rows)
            for name, each in traffic.per_table.items()
        },
        times=tally.times(),
        limit=_limit(job, tally),
    )


def _limit(job: Job, tally: Tally) -> Limit | None:
    remedy = job.embedding.remedy_for_chunks()
    return limit_of(tally.times(), device=job.config.run.device, remedy=remedy)
