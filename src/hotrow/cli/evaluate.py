"""`hotrow evaluate`: the quality of a trained model on samples that it was not trained on."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from hotrow.cli._options import JsonFlag, OtherData, Runs, Settings, Split, TrainedRun
from hotrow.cli._output import JsonLines, counted, counting, one_line_warnings, show, warn_people
from hotrow.report.page import Document, facts_table
from hotrow.run.open_run import open_trained
from hotrow.support.records import WORSE_THAN_CONSTANT, EvalRecord


def evaluate(
    run: TrainedRun,
    split: Split = "test",
    data: OtherData = None,
    settings: Settings = None,
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

    The run's `data.eval_batches` limits the test and validation splits here, too; the train split
    is read in full. Another folder must have been prepared into the same rows; differences are
    named. Generated clicks are drawn batch by batch: another `data.batch_size` draws different
    samples.
    """
    with one_line_warnings(JsonLines().warn if as_json else warn_people):
        job = open_trained(run, runs=runs, data=data, overrides=settings or ())
        part = job.samples.split(split)
        with counting(f"evaluating {split}", part.samples) as advance:
            record = job.trainer.evaluate(counted(part.batches, advance))
    of_all = "" if part.samples == part.total else f" of {part.total:,} (data.eval_batches)"
    named = {
        "split": split,
        "samples": f"{record.samples:,}{of_all}",
        "AUC": _shown(record.auc, record),
        "log-loss": _shown(record.log_loss, record),
        "normalised entropy": _shown(record.normalised_entropy, record),
    }
    if record.is_worse_than_constant:
        named["normalised entropy"] += f", {WORSE_THAN_CONSTANT}"
    facts = {"event": "evaluation", "run": run, "split": split, "split_samples": part.total}
    show(Document("", [facts_table(named)], [facts | asdict(record)]), as_json=as_json)


def _shown(value: float, record: EvalRecord) -> str:
    if math.isnan(value):
        why = "scores are NaN" if math.isnan(record.log_loss) else "all labels are alike"
        return f"none: {why}"
    return f"{value:.6f}"
