"""`hotrow export`: tables, or a whole model, for use without hotrow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotrow.checkpoint.tables import export_tables
from hotrow.cli._options import Runs
from hotrow.run.open_run import find_run, settings_in
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

    A run that has finished gives its model, any other run its newest checkpoint, or else its model.
    Rows are written in pieces, so that tables of any size need little memory. Weights that are NaN
    or infinite are refused.

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
    export_for_serving(settings_in(source, runs), source, serve)
    typer.echo(f"model written to {serve}; `import serve; serve.load()` there needs no hotrow")
