"""`hotrow train`: one run, from its settings to its records."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Any, Self

import torch
import typer

from hotrow.cli._exits import INTERRUPTED, UNEQUAL
from hotrow.cli._show import JsonLines, Screen, Show, one_line_warnings
from hotrow.cli._tally import Tally
from hotrow.records import EvalRecord, RunRecord
from hotrow.run.config import load
from hotrow.run.files import RunWriter, environment, now
from hotrow.run.job import Job, all_fast, build, differences


def train(
    file: Annotated[
        Path | None, typer.Argument(help="TOML file of the run; without it a built-in job runs.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; repeatable."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", metavar="", help="The same facts for machines, one object per line."
        ),
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder in which the run's folder is made.")] = Path(
        "runs"
    ),
) -> None:
    """Train a model and leave its records in runs/NAME.

    Without a file it trains a small DLRM on generated clicks in under a minute, then trains it
    again with every row in fast memory and compares all bits.

    **Examples**

    - `hotrow train`

    - `hotrow train --set embedding.budget=2% --set embedding.strategy=lru`

    - `hotrow train run.toml --set training.steps=200 --json`

    - `hotrow train --set run.device=cuda`

    - `hotrow train --set model.kind=dcnv2`

    - `hotrow train --set model.kind=tbsm`

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
    `run.threads = 1`, `training.eval_every = 64` and `training.check_equality = true` are set.

    Ctrl-C ends the run after the step under way; its records are kept, and the exit code is 130.
    """
    config = load(file, overrides=settings or ())
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    show: Show = JsonLines() if as_json else Screen()
    with one_line_warnings(show.warn):
        job = build(config)
        with RunWriter(runs, name=config.run.name) as run, StopAfterStep() as stop:
            show.start(job, run.folder)
            record = _run(job, run, show, stop)
            show.end(record, run.folder)
    if stop.asked:
        raise typer.Exit(INTERRUPTED)
    if record.summary.equal_to_all_fast is False:
        raise typer.Exit(UNEQUAL)


class StopAfterStep:
    """The first Ctrl-C asks for an end after the step under way, the second one ends at once.

    A request to terminate counts as a Ctrl-C.
    """

    asked = False
    _signals = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> Self:
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:  # Python lets no other thread decide about signals
            self._before: list[Any] = [signal.signal(each, self._ask) for each in self._signals]
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        typer.echo("stopping after this step; Ctrl-C again stops at once", err=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_main:
            for each, before in zip(self._signals, self._before, strict=True):
                signal.signal(each, before)


def _run(job: Job, run: RunWriter, show: Show, stop: StopAfterStep) -> RunRecord:
    """Trains, evaluates and compares; whatever happens, the record says how far it came."""
    tally, started = Tally(), now()
    outcome, is_equal = "failed", None
    try:
        _train(job, tally, run, show, stop)
        outcome = "interrupted" if stop.asked else "finished"
        if not stop.asked:
            tally.evaluations.append(job.evaluate(at_end=True))
            if job.config.training.check_equality:
                is_equal = _is_equal_to_all_fast(job, tally.losses, show, stop)
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    finally:
        record = _record(job, tally, run.name, started, outcome, is_equal)
        run.finish(record)
    return record


def _train(job: Job, tally: Tally, run: RunWriter, show: Show, stop: StopAfterStep) -> None:
    every, steps = job.config.training.eval_every, job.total_steps
    with show.progress("training", steps=steps) as advance:
        for record in job.train():
            tally.add(record)
            run.step(record)
            if every and record.step % every == 0 and record.step < steps:
                tally.evaluations.append(job.evaluate())
            advance(tally)
            if stop.asked or _has_settled(tally.evaluations, job.config.training.patience):
                break
    tally.finish()
    if tally.losses and math.isnan(tally.loss):
        first = next(step for step, loss in enumerate(tally.losses, 1) if math.isnan(loss))
        show.warn(
            f"the loss is no number since step {first:,}: what was trained from there on is worth "
            "nothing. Lower learning rates, training.schedule.warmup_steps or training.clip_norm "
            "may help"
        )


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
    job: Job, tally: Tally, name: str, started: str, outcome: str, is_equal: bool | None
) -> RunRecord:
    embedding = job.embedding
    return RunRecord(
        name=name,
        started=started,
        outcome=outcome,
        settings=asdict(job.config),
        environment=environment(device=job.config.run.device, threads=torch.get_num_threads()),
        memory=embedding.memory(),
        summary=tally.summary(
            fast_rows_share=embedding.num_slots / embedding.num_rows,
            equal_to_all_fast=is_equal,
            chunked_batches=embedding.traffic().chunked_batches,
        ),
        evaluations=tuple(tally.evaluations),
    )
