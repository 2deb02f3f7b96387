"""Options that several commands share, and checks of their values."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from hotrow.report.charts import library

RunFile = Annotated[
    Path | None, typer.Argument(help="TOML file of the run; without it, the built-in job.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; repeatable."),
]
JsonLinesFlag = Annotated[
    bool,
    typer.Option("--json", help="The same facts for machines, one object per line."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="The same facts for machines.")]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html",
        help="A page with charts, written beside; one that is there is replaced. Needs plotly.",
    ),
]

# Options of commands that read a trained model.
TrainedRun = Annotated[str, typer.Argument(help="The run's folder, or its name in --runs.")]
OtherData = Annotated[
    Path | None, typer.Option(help="Another prepared folder, with the tables that the model has.")
]
Split = Annotated[str, typer.Option(help="Samples to read: test, validation or train.")]
Runs = Annotated[Path, typer.Option(help="Folder of runs.")]

# Options of commands that read a trace.
Batches = Annotated[int, typer.Option(help="Batches that are counted.")]
WarmUp = Annotated[int, typer.Option(help="Batches before those, not counted.")]
DenseMs = Annotated[
    float | None,
    typer.Option(
        help="Milliseconds that the dense part of a step takes on --machine.",
        show_default="timed on this machine, guessed for others",
    ),
]

# Options of commands that predict several ranks.
RanksOption = Annotated[
    str | None,
    typer.Option(
        help="Predict so many ranks that share the rows: numbers with commas between, such as "
        "8,64,1024. data.batch_size is that of each rank here, and of all ranks in hotrow train. "
        "hotrow size needs --machine, too: the links of this machine are not known.",
        show_default="one rank",
    ),
]
LinksOption = Annotated[
    str | None,
    typer.Option(
        help="With --ranks: the link inside a machine and the one between machines, such as "
        "nvlink,ethernet.",
        show_default="the machine's",
    ),
]


def refuse_settings(settings: Sequence[str], refused: Mapping[str, str]) -> None:
    """Refuse settings that a command finds or names otherwise; `refused` says what to do."""
    for setting in settings:
        name = setting.partition("=")[0].strip()
        if name in refused:
            raise ValueError(f"--set {setting}: {refused[name]}")


def check_at_least(least: int, **given: int | None) -> None:
    """Refuse numbers that are too small; errors name the option."""
    for name, value in given.items():
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")


def check_dense_ms(value: float | None) -> None:
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"--dense-ms must be a number of at least 0, not {value:g}")


def read_slots(text: str, num_rows: int) -> list[int]:
    """Read numbers of slots, or percents of all rows, separated by commas."""
    return [_slots(part.strip(), num_rows) for part in text.split(",")]


def _slots(text: str, num_rows: int) -> int:
    try:
        is_share = text.endswith("%")
        count = int(float(text[:-1]) / 100 * num_rows) if is_share else int(text)
    except (ValueError, OverflowError):  # inf% overflows
        raise ValueError(
            f"--slots: cannot read {text!r}; write numbers or percent, such as 1%,5%,100000"
        ) from None
    if not 0 < count <= num_rows:
        raise ValueError(f"--slots: {text} makes {count:,} slots; there may be 1 to {num_rows:,}")
    return count


def read_depths(text: str) -> list[int]:
    """Read numbers of batches, separated by commas."""
    depths = []
    for part in text.split(","):
        try:
            depths.append(int(part))
        except ValueError:
            raise ValueError(
                f"--depths: cannot read {part.strip()!r}; write 50 or 50,200"
            ) from None
    check_at_least(0, depths=min(depths))
    return depths


def read_ranks(text: str) -> list[int]:
    """Read numbers of ranks, separated by commas; return them ascending."""
    from hotrow.study.rank_traffic import check_ranks  # not for commands without --ranks

    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--ranks: cannot read {text!r}; write 8 or 8,64,1024") from None
    check_ranks(ranks)
    return ranks


def needs_ranks(ranks: str | None, **given: object) -> None:
    """Refuse options that have no effect without --ranks."""
    for name, value in given.items():
        if ranks is None and value is not None:
            raise ValueError(f"--{name} belongs to --ranks; give numbers of ranks, such as 8,64")


def check_html(page: Path | None) -> None:
    """Check, before a long command starts, that a page can be drawn and written."""
    if page is not None and library() is None:
        raise ValueError(
            "--html needs plotly, which is not installed; pip install plotly, or leave --html out"
        )
    check_file("--html", page, such_as="page.html")


def check_file(option: str, path: Path | None, *, such_as: str) -> None:
    """Check, before a long command starts, that a file can be written."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file in it: {path / such_as}")
    check_folder(option, path.parent, of=path)


def check_folder(option: str, folder: Path | None, *, of: Path | None = None) -> None:
    """Make a folder, and check that files can be written to it."""
    if folder is None:
        return
    path = of or folder
    parent = next(place for place in (folder, *folder.parents) if place.exists())
    if not parent.is_dir():
        raise ValueError(f"{option} {path}: {parent} is no folder; name another place")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written ({error.strerror}); name another place"
        ) from None
