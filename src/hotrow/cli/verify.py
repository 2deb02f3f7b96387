"""`hotrow verify`: whether prepared data are as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from hotrow.budget import show_bytes
from hotrow.cli._declared import JsonFlag
from hotrow.data.prepared import Prepared
from hotrow.run.files import to_json
from hotrow.told import many


def verify(
    folder: Annotated[Path, typer.Argument(help="The folder that `hotrow prepare` has made.")],
    as_json: JsonFlag = False,
) -> None:
    """Compare every file of a prepared folder with its checksum.

    Opening a folder compares sizes alone, and a run also the checksums of one that is small: those
    of terabytes take as long as it takes to read them. A file that has changed is named, and the
    exit code is 2.

    **Examples**

    - `hotrow verify prepared/kaggle`

    - `hotrow verify prepared/terabyte --json`
    """
    data = Prepared(folder)
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("verifying", total=data.num_bytes)
    with bar:
        data.verify(lambda size: bar.advance(task, size))
    files = len(data.manifest.files)
    if as_json:
        facts = {"event": "verified", "folder": str(folder), "files": files}
        typer.echo(to_json(facts | {"bytes": data.num_bytes}))
    else:
        told = f"{folder}: {many(files, 'file')}, {show_bytes(data.num_bytes)}, as written"
        Console(highlight=False).print(told, soft_wrap=True, markup=False)
