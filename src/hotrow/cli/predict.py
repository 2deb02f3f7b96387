"""`hotrow predict`: the scores of a trained model for every sample, as a Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotrow.cli._options import JsonFlag, OtherData, Runs, Settings, Split, TrainedRun
from hotrow.cli._output import JsonLines, counted, counting, one_line_warnings, show, warn_people
from hotrow.report.page import Document, Text
from hotrow.run.open_run import open_trained, write_scores
from hotrow.support.messages import many


def predict(
    run: TrainedRun,
    out: Annotated[Path, typer.Option("--out", "-o", help="The Parquet file to write.")],
    split: Split = "test",
    data: OtherData = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    settings: Settings = None,
    as_json: JsonFlag = False,
    runs: Runs = Path("runs"),
) -> None:
    """Score every sample of a split with the model that a run has trained.

    The file has three columns: `row`, the sample's number in its split, from 0 on; `score`, the
    probability of a click; and `label`. It is there when it is whole.

    **Examples**

    - `hotrow predict runs/default --out scores.parquet`

    - `hotrow predict kaggle --split validation --out validation.parquet --force`

    - `hotrow predict kaggle --data prepared/next-week --out next-week.parquet`

    - `hotrow predict big --out scores.parquet --set run.device=cpu`

    All of the split is scored, whatever `data.eval_batches` says.
    """
    _check_place(out, force=force)
    with one_line_warnings(JsonLines().warn if as_json else warn_people):
        job = open_trained(run, runs=runs, data=data, overrides=settings or ())
        part = job.samples.split(split, whole=True)
        with counting(f"scoring {split}", part.samples) as advance:
            done = write_scores(job, counted(part.batches, advance), out)
    facts = {"event": "prediction", "run": run, "split": split, "samples": done, "out": str(out)}
    text = Text(f"{many(done, 'score')} written to {out}")
    show(Document("", [text], [facts]), as_json=as_json)


def _check_place(out: Path, *, force: bool) -> None:
    if out.is_dir():
        raise ValueError(f"{out} is a folder; --out is the file to write")
    if out.suffix not in (".parquet", ".pq", ""):
        raise ValueError(
            f"scores are written as Parquet, and --out {out} ends in {out.suffix}; give "
            f"{out.with_suffix('.parquet')}, which pandas.read_parquet(...).to_csv(...) turns into "
            "CSV"
        )
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} is no folder; make it, or give another --out")
    if out.exists() and not out.is_file():
        raise ValueError(f"{out} is no file that could be replaced; give another --out")
    if out.exists() and not force:
        raise ValueError(f"{out} exists; --force replaces it")
