"""Documents on a terminal, or as text in a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import rich.table
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text as StyledText

from hotrow.report.page import Bullets, Charts, Part, Table, Text, table_of

_GAP = 2  # between columns
_WRAPPED = 16  # cells: wider headings are wrapped
_FILE_WIDTH = 120


def screen() -> Console:
    """Return standard output. A file has room for wide tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def show_parts(
    parts: Sequence[Part], console: Console | None = None, *, quiet: bool = False
) -> None:
    """Print parts, without faint texts if `quiet`. Advice comes last, where it stays in view."""
    console = console or screen()
    advice = [part for part in parts if isinstance(part, Text) and part.kind == "advice"]
    others = [part for part in parts if part not in advice]
    for line in chain(_lines(others, console.width, quiet), _lines(advice, console.width, quiet)):
        console.print(line, soft_wrap=isinstance(line, StyledText))


def _lines(parts: Sequence[Part], width: int, quiet: bool) -> Iterator[RenderableType]:
    for part in parts:
        if isinstance(part, Text):
            if not (quiet and part.kind == "faint"):
                yield StyledText(part.text, style="bold" if part.kind == "advice" else "")
        elif isinstance(part, Bullets):
            yield from (StyledText(f"- {line}") for line in part.lines)
        elif isinstance(part, Table):
            yield from _tables(part, width)
        elif isinstance(part, Charts):
            for chart in part.drawn:
                if chart.cell:
                    yield StyledText(f"{chart.title}. {chart.note}" if chart.note else chart.title)
                    yield from _tables(table_of(chart), width)
        elif not part.is_folded and part.only != "page":
            inner = list(_lines(part.parts, width, quiet))
            if inner:
                yield StyledText(f"\n{part.title}", style="bold")
                yield from inner


def _tables(table: Table, width: int) -> Iterator[rich.table.Table]:
    """Yield as many tables as fit the width, each with the first column."""
    if not table.rows:
        return
    widths = [
        max(
            [
                _head_width(head),
                *(cell_len(line) for row in table.rows for line in row[place].splitlines()),
            ]
        )
        for place, head in enumerate(table.heads)
    ]
    left = list(range(1, len(widths)))
    while left:
        chosen, taken = [0], widths[0]
        while left and (len(chosen) == 1 or taken + _GAP + widths[left[0]] <= width):
            taken += _GAP + widths[left[0]]
            chosen.append(left.pop(0))
        yield _printed(table, chosen, [widths[place] for place in chosen], taken <= width)


def _printed(
    table: Table, columns: Sequence[int], widths: Sequence[int], fits: bool
) -> rich.table.Table:
    printed = rich.table.Table(
        box=None,
        padding=(0, _GAP, 0, 0),
        pad_edge=False,
        show_header=any(map(str.strip, table.heads)),
    )
    for place, width in zip(columns, widths, strict=True):
        head = table.heads[place]
        printed.add_column(
            StyledText(head),
            justify="left" if place == 0 or head in table.words else "right",
            overflow="fold",
            width=width if fits else None,
        )
    for number, row in enumerate(table.rows):
        cells = [
            StyledText(row[place], style="red" if (number, table.heads[place]) in table.bad else "")
            for place in columns
        ]
        printed.add_row(*cells, style="bold" if number in table.marked else "")
    return printed


def _head_width(head: str) -> int:
    longest = max(map(cell_len, head.split()), default=0)
    return max(longest, min(cell_len(head), _WRAPPED))
