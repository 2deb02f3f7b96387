"""Options that several commands have, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[
    Path | None, typer.Argument(help="TOML file of the run; without it a built-in job runs.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; repeatable."),
]
JsonLinesFlag = Annotated[
    bool,
    typer.Option("--json", metavar="", help="The same facts for machines, one object per line."),
]

# Of commands that read a trained model.
TrainedRun = Annotated[str, typer.Argument(help="The run's folder, or its name in --runs.")]
OtherData = Annotated[
    Path | None, typer.Option(help="Another prepared folder, with the tables that the model has.")
]
RunSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Change a setting of the run; repeatable."
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", metavar="", help="The same facts for machines.")]
Runs = Annotated[Path, typer.Option(help="Folder of runs.")]
