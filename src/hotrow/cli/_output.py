"""Output of commands: documents, warnings, progress, and one JSON object per line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from hotrow.report.page import Document, page_of
from hotrow.report.terminal import show_parts
from hotrow.run.files import to_json
from hotrow.support.files import Disk


def show(document: Document, *, as_json: bool = False, html: Path | None = None) -> None:
    """Print a document for people, or its facts for machines; write its page to `html`."""
    if html is not None:
        Disk(html.parent).write(html.name, [page_of(document).encode()])
    if as_json:
        for line in document.facts:
            typer.echo(to_json(line))
        return
    show_parts(document.parts)
    if html is not None:
        typer.echo(f"page written to {html}")


def warn_people(message: str) -> None:
    typer.echo(f"warning: {message}", err=True)


@contextmanager
def one_line_warnings(warn: Callable[[str], None] = warn_people) -> Iterator[None]:
    """Print warnings inside as sentences, without the line of Python."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: warn(" ".join(str(message).split()))
        yield


class JsonLines:
    """One JSON object per line; progress at most once a second."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet, self._last = quiet, float("-inf")

    def warn(self, message: str) -> None:
        typer.echo(to_json({"event": "warning", "message": message}))

    def write(self, event: str, **facts: Any) -> None:
        if not self._quiet:
            typer.echo(to_json({"event": event, **facts}))

    def progress_is_due(self, *, now: bool = False) -> bool:
        """Return whether to write progress; `now`: in any case."""
        is_due = now or monotonic() - self._last >= 1
        if is_due:
            self._last = monotonic()
        return is_due


def progress_bar(console: Console, *columns: ProgressColumn | str, **options: Any) -> Progress:
    """Return a bar with a title, these columns, and the remaining time."""
    time = TimeRemainingColumn(compact=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), *columns, time, console=console, **options
    )


@contextmanager
def counting(title: str, total: int, *columns: str, quiet: bool = False) -> Iterator[Any]:
    """Show a bar on stderr if that is a terminal; yields `advance(count=1)`."""
    console = Console(stderr=True)
    # A transient bar would leave an empty line in a file.
    is_off = quiet or not console.is_terminal
    bar = progress_bar(console, MofNCompleteColumn(), *columns, transient=True, disable=is_off)
    task = bar.add_task(title, total=total)
    with bar:
        yield lambda count=1: bar.advance(task, count)


def counted(batches: Iterable[Any], advance: Callable[[int], None]) -> Iterator[Any]:
    """Yield batches, and count their samples after use."""
    for batch in batches:
        yield batch
        advance(len(batch))
