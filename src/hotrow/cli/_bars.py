"""Progress over batches, for commands that print something else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def batches_bar() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # of a bar that goes away, a file would keep an empty line
    )


def busy_with(what: str) -> AbstractContextManager[object]:
    """Said meanwhile, where nobody knows how long it takes."""
    console = Console(stderr=True)
    return console.status(what) if console.is_terminal else nullcontext()
