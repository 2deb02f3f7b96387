"""Pages that commands write beside what they print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotrow.cli._places import check_file
from hotrow.report.charts import library
from hotrow.support.files import Disk

HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html",
        help="A page with charts, written beside; one that is there is replaced. Needs plotly.",
    ),
]


def check_html(page: Path | None) -> None:
    """Before anything takes time: whether a page can be drawn, and written there."""
    if page is None:
        return
    if library() is None:
        raise ValueError(
            "--html needs plotly, which is not installed; pip install plotly, or leave --html out"
        )
    check_file("--html", page, such_as="page.html")


def write_html(page: Path | None, text: str) -> None:
    """Puts it in place whole."""
    if page is not None:
        Disk(page.parent).write(page.name, [text.encode()])
