"""`hotrow predict`: what a trained model says of every sample, as a Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hotrow.cli._declared import JsonFlag, OtherData, Runs, RunSettings, TrainedRun
from hotrow.cli._show import JsonLines, Screen, Show, counted, one_line_warnings
from hotrow.run.files import to_json
from hotrow.run.open_run import open_trained
from hotrow.run.predictions import check_arrow, write_scores
from hotrow.support.messages import many


def predict(
    run: TrainedRun,
    out: Annotated[Path, typer.Option("--out", "-o", help="The Parquet file to write.")],
    split: Annotated[
        str, typer.Option(help="Samples to score: test, validation or train.")
    ] = "test",
    data: OtherData = None,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="Replace the file if it is there.")
    ] = False,
    settings: RunSettings = None,
    as_json: JsonFlag = False,
    runs: Runs = Path("runs"),
) -> None:
    """Score every sample of a split with the model that a run has trained.

    The file has three columns: `row`, the sample's number in its split, from 0 on; `score`, the
    probability of a click; and `label`. It is there when it is whole. pyarrow writes it:
    `pip install pyarrow`.

    **Examples**

    - `hotrow predict runs/default --out scores.parquet`

    - `hotrow predict kaggle --split validation --out validation.parquet --force`

    - `hotrow predict kaggle --data prepared/next-week --out next-week.parquet`

    - `hotrow predict big --out scores.parquet --set run.device=cpu`

    All of the split is scored, whatever `data.eval_batches` says.
    """
    check_arrow()
    _check_place(out, force=force)
    show: Show = JsonLines() if as_json else Screen()
    with one_line_warnings(show.warn):
        job = open_trained(run, runs=runs, data=data, overrides=settings or ())
        part = job.samples.split(split, whole=True)
        with counted(f"scoring {split}", part.samples) as advance:
            done = write_scores(job, advance(part.batches), out)
    if as_json:
        facts = {"event": "prediction", "run": run, "split": split, "samples": done}
        typer.echo(to_json(facts | {"out": str(out)}))
    else:
        Console(highlight=False).print(f"{many(done, 'score')} written to {out}", soft_wrap=True)


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
