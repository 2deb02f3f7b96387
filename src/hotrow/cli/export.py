"""`hotrow export`: tables, or a whole model, for those who have no hotrow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotrow.checkpoint.tables import export_tables
from hotrow.cli._options import Runs
from hotrow.run.files import RUN_FILE, STEPS_FILE
from hotrow.run.open_run import find_run, settings_of_record
from hotrow.run.resume import settings_of
from hotrow.run.serving import export_for_serving


def export(
    source: Annotated[
        Path, typer.Argument(help="A run's folder or name, a checkpoint, or a saved model.")
    ],
    to: Annotated[
        str | None, typer.Option(help="Tables as files: safetensors, parquet or npz.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The folder to make.")] = None,
    serve: Annotated[
        Path | None, typer.Option(help="The folder to make of the whole model of a run.")
    ] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Write tables, or a model that loads without hotrow.

    Of a run that has finished its model is taken, of others the newest checkpoint, or else the
    model. Rows pass in pieces, so that tables of any size are written with little memory. Weights
    that are no numbers are refused.

    **Tables** (`--to`): a file for each (npz: one for all), and `dense.safetensors`, everything
    else. `hotrow.checkpoint.tables.import_tables` reads them back into a model.

    **A model to serve** (`--serve`): `serve.py`, with the model's source and a small loader; the
    tables are mapped into memory from their files. It needs torch and numpy alone.

    **Examples**

    - `hotrow export first --to parquet --out tables`

    - `hotrow export runs/first/checkpoints/00012-step-12000 --to npz --out tables`

    - `hotrow export first --serve served`, then `import serve; model = serve.load()`
    """
    if (to is None) == (serve is None):
        raise ValueError("say what is wanted: --to safetensors, parquet or npz; or --serve FOLDER")
    if not source.exists():
        source = runs / source if (runs / source).exists() else find_run(source, runs)
    if serve is None:
        if out is None:
            raise ValueError("say where the tables go: --out FOLDER")
        export_tables(source, out, to=to or "")
        typer.echo(f"tables written to {out}")
        return
    run = _run_of(source, runs)
    has_ended = (run / RUN_FILE).is_file()
    config = settings_of_record(run) if has_ended else settings_of(run, ())
    export_for_serving(config, source, serve)
    typer.echo(f"model written to {serve}; `import serve; serve.load()` there needs no hotrow")


def _run_of(source: Path, runs: Path) -> Path:
    """The run to which a checkpoint or model belongs, whose settings say how it is built."""
    for folder in (source, *source.absolute().parents[:2]):
        if (folder / STEPS_FILE).is_file():
            return folder
    return find_run(source, runs)
