"""One run, from its settings to its records: train, evaluate, save, compare."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from hotrow.checkpoint import save_model
from hotrow.checkpoint.folder import go_back
from hotrow.checkpoint.model import bytes_of
from hotrow.embedding.row_verifier import CorruptRows, RowVerifier
from hotrow.run.board import TensorBoard, event_classes
from hotrow.run.config import RunConfig
from hotrow.run.files import (
    MODEL_FOLDER,
    FollowedRun,
    RunWriter,
    environment,
    now,
    refuse_busy,
)
from hotrow.run.job import (
    Job,
    all_fast,
    build,
    differences,
    open_data,
    record_of,
    told_of,
    total_steps,
)
from hotrow.run.rank_records import of_all_ranks, rank_records, table_records
from hotrow.run.ranks import RunRanks
from hotrow.run.resume import Begun, has_ended, resume
from hotrow.run.saving import Saved, Saving, not_finite
from hotrow.run.stopping import StopAfterStep
from hotrow.run.tally import Tally, limit_of
from hotrow.run.tracing import ChromeTrace, Traced
from hotrow.support.records import (
    EvalRecord,
    Limit,
    RankRecord,
    RunRecord,
    StartRecord,
    TableRecord,
    Times,
)
from hotrow.support.units import show_bytes

Advance = Callable[[Tally], None]


class Observer(Protocol):
    """Receives what happens in a run."""

    def warn(self, message: str) -> None: ...
    def start(self, job: Job, folder: Path) -> None: ...
    def progress(self, title: str, *, steps: int) -> AbstractContextManager[Advance]: ...
    def tell(self, event: str, **facts: Any) -> None: ...  # "resumed", "checkpoint", "differs"
    def end(self, result: Result) -> None: ...


@dataclass(frozen=True)
class Result:
    record: RunRecord
    folder: Path
    model: Path | None  # where it was saved
    saved: Saved | None  # the last checkpoint
    unsaved: OSError | None  # why the model or the last checkpoint was not saved
    command: str  # resumes the run


def train_run(
    config: RunConfig,
    *,
    runs: Path,
    folder: Path | None,
    traced: Traced | None,
    observer: Observer,
    stop: StopAfterStep,
    ranks: RunRanks | None = None,
) -> Result | None:
    """Train in a new folder of `runs`, or resume the run in `folder`; None: it has ended. Several
    ranks call this together; the first one writes the records."""
    ranks = ranks or RunRanks()
    if config.run.tensorboard:
        event_classes()  # raises if it is not installed
    if folder is not None:
        ranks.from_first(partial(_refuse_busy, folder))
    refuse_small_batches(config, ranks.size)
    samples = open_data(config)
    steps = total_steps(config, samples)
    traced = None if traced is None or not ranks.is_first else traced.within(steps)
    samples.split("test")  # refuses an empty split before training
    if config.training.eval_every is not None:
        samples.split("validation")
    if folder is None:
        begun = Begun(build(config, samples), Tally(), now())
    elif ranks.from_first(lambda: "ended" if has_ended(folder, config, steps) else ""):
        observer.warn(
            f"{folder} has ended, and there is nothing to go on with; more training.epochs, "
            "training.steps or training.patience make it longer"
        )
        return None
    else:
        begun = resume(config, folder, samples, observer.warn, ranks)
    job = begun.job
    with (
        _open_folder(runs, config.run.name, folder, job.done, ranks) as run,
        TensorBoard(run.folder, config, job.done)
        if config.run.tensorboard and ranks.is_first
        else nullcontext() as board,
        stop,
    ):
        ranks.check_folder(run.folder)
        observer.start(job, run.folder)
        if begun.checkpoint is not None:
            observer.tell("resumed", step=job.done, checkpoint=str(begun.checkpoint))
        if config.run.save and ranks.is_first:
            _warn_of_little_space(job, run.folder, observer)
        tracing = None
        if traced is not None:
            tracing = ChromeTrace(run.folder, traced, device=config.run.device)
        session = Session(begun, run, board, observer, stop, tracing, ranks)
        result = session.run(steps)
        observer.end(result)
    return result


def _refuse_busy(folder: Path) -> str:
    refuse_busy(folder)
    return ""


def refuse_small_batches(config: RunConfig, ranks: int) -> None:
    """Raise if some rank would never have a sample."""
    if config.data.batch_size < ranks:
        raise ValueError(
            f"data.batch_size is {config.data.batch_size:,}, and {ranks:,} ranks share each batch: "
            "give larger batches, or fewer ranks"
        )


def _open_folder(
    runs: Path, name: str, folder: Path | None, done: int, ranks: RunRanks
) -> RunWriter | FollowedRun:
    """Open the folder of a run, a new one or `folder`; the other ranks learn it from the first."""
    opened: list[RunWriter] = []

    def open_first() -> str:
        opened.append(
            RunWriter(runs, name=name) if folder is None else RunWriter.going_on(folder, after=done)
        )
        return str(opened[0].folder)

    place = ranks.from_first(open_first)
    return opened[0] if opened else FollowedRun(Path(place))


def _warn_of_little_space(job: Job, folder: Path, observer: Observer) -> None:
    needed, free = bytes_of(job.model), shutil.disk_usage(folder).free
    if free < needed:
        observer.warn(
            f"the model will take {show_bytes(needed, beside=free)}, and {folder} has "
            f"{show_bytes(free, beside=needed)} free: make room before the run ends, or it is not "
            "saved"
        )


class Session:
    """A run while it is trained. Its record says how far it got, whatever happens."""

    def __init__(
        self,
        begun: Begun,
        run: RunWriter | FollowedRun,
        board: TensorBoard | None,
        observer: Observer,
        stop: StopAfterStep,
        tracing: ChromeTrace | None,
        ranks: RunRanks,
    ) -> None:
        job = begun.job
        self._ranks = ranks
        self._job, self._run, self._config = job, run, job.config
        self._board, self._observer, self._stop, self._tracing = board, observer, stop, tracing
        self._tally, self._resumed_after = begun.tally, begun.resumed_after
        self._all_ranks = begun.ranks | {ranks.size}
        self._command = f"hotrow train {run.folder} --resume{ranks.option}"
        last = None if begun.checkpoint is None else Saved(begun.checkpoint, job.done)
        self._saving = Saving(
            job, run, self._tally, started=begun.started, resumed_after=self._resumed_after,
            ranks=self._all_ranks, last=last, warn=observer.warn, tell=observer.tell,
            is_first=ranks.is_first,
        )  # fmt: skip
        # One timer decides for all ranks.
        timed = self._saving.request if ranks.is_first else int
        job.trainer.hear(lambda: stop.requests() | timed())
        self._start = StartRecord(
            begun.started,
            settings=asdict(self._config),
            environment=environment(self._config.run.device) | ranks.facts(),
            memory=job.embedding.memory(),
        )
        self._outcome = "failed"
        self._is_equal: bool | None = None
        self._all_fast: Times | None = None  # of the steps that `_is_equal` compares
        self._model: Path | None = None
        self._unsaved: list[str] = []
        self._rank_records: tuple[RankRecord, ...] = ()  # gathered when all have trained
        self._tables: Mapping[str, TableRecord] = {}  # of all ranks; empty: there is one

    def run(self, steps: int) -> Result:
        """Train, evaluate, save and compare."""
        saving = self._saving
        try:
            self._run.start(self._start)
            self._train(steps)
            self._after_training()
        except KeyboardInterrupt:
            self._outcome = "interrupted"
            saving.abandon()
            if saving.last is not None:
                raise KeyboardInterrupt(_whole(saving.last, self._command)) from None
            raise
        except Exception as error:
            saving.end()
            if saving.last is not None and self._ranks.is_first:
                self._observer.warn(_how_to_resume(error, saving.last, self._command))
            raise
        finally:
            saving.end()
            unsaved = OSError("; ".join(self._unsaved)) if self._unsaved else None
            try:
                record = self._finish()
            except OSError as error:
                is_saved = self._model is not None
                saved = f"the model is in {self._model}" if is_saved else "the model was not saved"
                raise OSError(f"{error}; {saved}") from unsaved
        return Result(record, self._run.folder, self._model, saving.last, unsaved, self._command)

    def _train(self, steps: int) -> None:
        job, tally, training = self._job, self._tally, self._config.training
        every, verify_every = training.eval_every, training.verify_every
        verifier = RowVerifier(job.embedding, step=job.done) if verify_every else None
        is_verified = True  # all steps so far
        with (
            self._observer.progress("training", steps=steps) as advance,
            self._tracing or nullcontext() as tracing,
            closing(job.train()) as records,
        ):
            for record in records:
                if tracing is not None:
                    tracing.step(tally.steps + 1)
                tally.add(record)
                self._run.step(record)
                if self._board is not None:
                    self._board.step(record)
                tally.expected = job.known_steps
                if every and record.step % every == 0 and record.step != tally.expected:
                    self._evaluate()
                advance(tally)
                if verifier is not None and verify_every:
                    is_verified = record.step % verify_every == 0
                    if is_verified:
                        self._verify(verifier, record.step)  # before wrong rows are saved
                self._stop.agree(job.trainer.requested)
                self._saving.after_step(record.step)
                settled = _has_settled(tally.evaluations, training.patience)
                if self._stop.asked or settled or self._has_diverged():
                    break
        if verifier is not None:
            if not is_verified:  # the last rows are saved, too
                self._verify(verifier, record.step)
            verifier.end()
        tally.finish()
        limit = self._limit()
        if limit is not None and limit.is_to_be_told and self._ranks.is_first:
            self._observer.warn(limit.message)
        if self._has_diverged():
            self._saving.end()  # the last good checkpoint may still be written
            self._warn_of_divergence()

    def _verify(self, verifier: RowVerifier, step: int) -> None:
        """Verify the rows of all ranks; wrong rows of one raise on all."""
        wrong: list[CorruptRows] = []

        def verify() -> str:
            try:
                verifier.verify(step)
            except CorruptRows as error:
                wrong.append(error)
                return json.dumps([error.since, str(error)])
            return ""

        told = self._ranks.do(verify)
        for rank, text in enumerate(told):
            if text:
                since, why = json.loads(text)
                raise wrong[0] if wrong else CorruptRows(f"rank {rank}: {why}", since)

    def _after_training(self) -> None:
        self._stop.check()
        # Signals may have come after the last step.
        for requests in self._ranks.do(lambda: str(int(self._stop.requests()))):
            self._stop.agree(int(requests))
        self._rank_records = rank_records(self._job.trainer)
        if self._rank_records:
            self._tables = table_records(self._job.trainer)
        config, stop, warn = self._config, self._stop, self._observer.warn
        why_not = self._why_no_model()
        outcome = "interrupted" if stop.asked else "finished" if why_not is None else "diverged"
        self._save_last()
        place = self._run.folder / MODEL_FOLDER
        if config.run.save:  # first: a later failure does not lose the model
            self._outcome = "interrupted"  # the record of a run that is killed from here on
            with suppress(OSError):  # raised at the end, when it is tried again
                self._finish()  # before the disk may be full
            self._outcome = "failed"
            if why_not is None:
                self._save_model(place)
            else:
                warn(f"the model is not saved: {why_not}")
        if place.exists() and not (config.run.save and why_not is None):
            warn(f"{place} stays as it was before this run went on")
        if not stop.asked:
            self._evaluate(at_end=True)
        self._outcome = outcome
        if config.training.check_equality and not stop.asked:
            self._is_equal = self._is_equal_to_all_fast()

    def _save_last(self) -> None:
        """Save the last step of a run that was stopped, or that has checkpoints."""
        config, saving = self._config, self._saving
        is_on = config.checkpoint.every_steps or config.checkpoint.every_seconds
        if is_on or saving.last is not None or (self._stop.asked and config.run.save):
            try:
                saving.save(self._job.trainer.step)
            except OSError as error:
                self._unsaved.append(f"the last checkpoint was not saved: {error}")

    def _save_model(self, folder: Path) -> None:
        """Save the model. A full disk does not lose the record of the run."""
        try:
            self._ranks.from_first(lambda: _remove(folder))
            save_model(folder, self._job.model)
            self._model = folder
        except OSError as error:
            self._unsaved.append(f"the model was not saved: {error}")

    def _evaluate(self, *, at_end: bool = False) -> None:
        self._tally.evaluations.append(self._job.evaluate(at_end=at_end))
        if self._board is not None:
            self._board.evaluation(self._tally.evaluations[-1])

    def _warn_of_divergence(self) -> None:
        losses, last = self._tally.losses, self._saving.last
        first = next(step for step, loss in enumerate(losses, 1) if math.isnan(loss))
        message = (
            f"the loss is NaN since step {first:,}, and no later step would change that: training "
            "has ended. Lower learning rates, training.schedule.warmup_steps or "
            "training.clip_norm may help"
        )
        if last is not None:
            message += (
                f"; `{self._command} --set checkpoint.strict=false` with such settings continues "
                f"after step {last.step:,}"
            )
        self._observer.warn(message)

    def _has_diverged(self) -> bool:
        """Return whether the loss is NaN: from that step on, so are the dense weights."""
        return bool(self._tally.losses) and math.isnan(self._tally.loss)

    def _why_no_model(self) -> str | None:
        """Return why the model must not be saved; None: it can be."""
        if self._has_diverged():
            return "its loss is NaN"
        name = not_finite(self._job)  # the last loss is that of the weights before the last step
        return None if name is None else f"{name} holds NaN or infinite values"

    def _is_equal_to_all_fast(self) -> bool | None:
        """Train the same job with all rows in fast memory and compare all bits; None: stopped, or
        other numbers of ranks have trained parts of the run."""
        if len(self._all_ranks) > 1:
            numbers = " and ".join(map(str, sorted(self._all_ranks)))
            self._observer.warn(
                f"the run is not compared with all-fast: parts of it were trained on {numbers} "
                "ranks, which differ by rounding"
            )
            return None
        losses = self._tally.losses
        reference, tally = build(all_fast(self._config)), Tally()
        reference.trainer.hear(self._stop.requests)
        with (
            self._observer.progress("all-fast", steps=len(losses)) as advance,
            closing(reference.train()) as records,
        ):
            for record in records:
                tally.add(record)
                advance(tally)
                self._stop.agree(reference.trainer.requested)
                if self._stop.asked:
                    return None
                if tally.steps == len(losses):
                    break
        tally.finish()
        self._all_fast = tally.times()
        # As text, in which NaN equals NaN and floats have all digits.
        unequal = [] if repr(losses) == repr(tally.losses) else ["losses"]
        unequal += differences(self._job, reference)
        unequal = self._of_all_ranks(unequal)
        if unequal:
            self._observer.tell("differs", what=unequal)
        return not unequal

    def _of_all_ranks(self, names: list[str]) -> list[str]:
        """Return what differs on some rank. Each compares weights, and the rows that it owns."""
        every = [json.loads(text) for text in self._ranks.do(lambda: json.dumps(names))]
        return list(dict.fromkeys(name for of_rank in every for name in of_rank))

    def _finish(self) -> RunRecord:
        """Write the record of the run as it is now."""
        job, tally, start = self._job, self._tally, self._start
        embedding = job.embedding
        traffic = embedding.traffic()
        record = RunRecord(
            name=self._run.name,
            started=start.started,
            outcome=self._outcome,
            settings=start.settings,
            environment=start.environment,
            memory=embedding.memory(),
            summary=of_all_ranks(
                tally.summary(
                    fast_rows_share=embedding.num_slots / embedding.num_rows,
                    equal_to_all_fast=self._is_equal,
                    chunked_batches=traffic.chunked_batches,
                ),
                self._rank_records,
                tally.earlier,
            ),
            evaluations=tuple(tally.evaluations),
            data=job.samples.described(),
            resumed_after=self._resumed_after,
            saving=self._saving.figures(),
            has_model=self._model is not None,
            system=record_of(job.trainer.system),
            told=told_of(job.trainer.system),
            tables=self._tables
            or {
                name: TableRecord(
                    table.lookups, table.unique_rows, table.fetched_rows, table.evicted_rows
                )
                for name, table in traffic.per_table.items()
            },
            times=tally.times(),
            limit=self._limit(),
            ranks=self._rank_records,
        )
        self._run.finish(record)
        return record

    def _limit(self) -> Limit | None:
        remedy = self._job.embedding.remedy_for_chunks()
        return limit_of(
            self._tally.times(),
            device=self._config.run.device,
            remedy=remedy,
            all_fast=self._all_fast,
        )


def _remove(model: Path) -> str:
    """Remove the model of the same run, from before it was resumed."""
    if model.exists():
        shutil.rmtree(model)
    return ""


def _how_to_resume(error: Exception, saved: Saved, command: str) -> str:
    if isinstance(error, CorruptRows) and saved.step > error.since:
        text = f"the checkpoint of step {saved.step:,} in {saved.folder} may hold wrong rows"
        before = go_back(saved.folder.parent, error.since)
        if before is None:
            return f"{text}, and there is none of step {error.since:,} or before: train anew"
        return (
            f"{text}: `latest` beside it names {before.name} again, from which "
            f"`{command}` continues"
        )
    text = _whole(saved, command)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        text += ", also with a smaller embedding.budget"
    return text


def _whole(saved: Saved, command: str) -> str:
    return (
        f"the checkpoint of step {saved.step:,} is whole, in {saved.folder}; `{command}` continues "
        "from it"
    )


def _has_settled(evaluations: Sequence[EvalRecord], patience: int | None) -> bool:
    """Return whether the last `patience` evaluations are no better than the best before them."""
    if patience is None or len(evaluations) <= patience:
        return False
    aucs = [-1.0 if math.isnan(evaluation.auc) else evaluation.auc for evaluation in evaluations]
    return not max(aucs[-patience:]) > max(aucs[:-patience])
