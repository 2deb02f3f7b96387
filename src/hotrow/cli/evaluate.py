"""`hotrow evaluate`: how good a trained model is, on what its training has not seen."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hotrow.cli._declared import JsonFlag, OtherData, Runs, RunSettings, TrainedRun
from hotrow.cli._show import JsonLines, Screen, Show, counted, one_line_warnings
from hotrow.run.files import to_json
from hotrow.run.open_run import open_trained
from hotrow.run.source import Split
from hotrow.support.records import WORSE_THAN_CONSTANT, EvalRecord


def evaluate(
    run: TrainedRun,
    split: Annotated[
        str, typer.Option(help="Samples to evaluate: test, validation or train.")
    ] = "test",
    data: OtherData = None,
    settings: RunSettings = None,
    as_json: JsonFlag = False,
    runs: Runs = Path("runs"),
) -> None:
    """Evaluate the model that a run has trained.

    Settings are the run's own, and so are the results: on the same device the test split has the
    AUC and log-loss, to the bit, that the end of training had.

    **Examples**

    - `hotrow evaluate runs/default`

    - `hotrow evaluate default --split validation --json`

    - `hotrow evaluate kaggle --data prepared/next-week`

    - `hotrow evaluate big --set run.device=cpu --set embedding.budget=4GiB`

    - `hotrow evaluate big --set data.batch_size=16384 --set data.eval_batches=1000000`

    **What the numbers are**

    - AUC: how likely a click is ranked above a sample without one; 0.5 is chance

    - log-loss: the mean of -log(probability given to what happened); 0 is perfect

    - normalised entropy: log-loss over that of always saying the share of clicks; below 1 is
      better than knowing nothing

    `data.eval_batches` of the run holds for test and validation, too; without it, and of train, all
    samples count. Another folder must have been prepared into the same rows; what differs is told.
    Generated clicks are drawn batch by batch, so that another `data.batch_size` makes others of
    them.
    """
    show: Show = JsonLines() if as_json else Screen()
    with one_line_warnings(show.warn):
        job = open_trained(run, runs=runs, data=data, overrides=settings or ())
        part = job.samples.split(split)
        with counted(f"evaluating {split}", part.samples) as advance:
            found = job.trainer.evaluate(advance(part.batches))
    if as_json:
        about = {"split": split, "split_samples": part.total, **asdict(found)}
        typer.echo(to_json({"event": "evaluation", "run": run, **about}))
    else:
        Console(highlight=False).print(_table(split, part, found))


def _table(split: str, part: Split, found: EvalRecord) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    of_all = "" if part.samples == part.total else f" of {part.total:,} (data.eval_batches)"
    facts = {
        "split": split,
        "samples": f"{found.samples:,}{of_all}",
        "AUC": _shown(found.auc, log_loss=found.log_loss),
        "log-loss": _shown(found.log_loss, log_loss=found.log_loss),
        "normalised entropy": _shown(found.normalised_entropy, log_loss=found.log_loss),
    }
    if found.is_worse_than_constant:
        facts["normalised entropy"] += f", {WORSE_THAN_CONSTANT}"
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def _shown(number: float, *, log_loss: float) -> str:
    if math.isnan(number):
        return (
            "none: scores are no numbers" if math.isnan(log_loss) else "none: all labels are alike"
        )
    return f"{number:.6f}"
