"""Documents: what a command shows on a terminal, on a page or as JSON.

A document has a title, parts (texts, tables, charts, sections of them), and facts. `terminal.py`
prints the parts, `page_of` makes an HTML page of them, and `--json` prints the facts. Pages need
nothing else: no network, no font, a script only for charts. The template escapes all texts.

    page("hotrow report: first", [paragraph("..."), charts([Chart(...)])])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from hotrow.report.charts import Chart, Line, library

if TYPE_CHECKING:
    from jinja2 import Template

NONE = "-"  # a cell without a value


@dataclass(frozen=True)
class Text:
    """One paragraph. `kind`: "advice" stands out, "faint" does not, "code" keeps its lines."""

    text: str
    kind: str = ""
    is_text = True


@dataclass(frozen=True)
class Bullets:
    lines: Sequence[str]
    is_bullets = True


@dataclass(frozen=True)
class Table:
    """Rows of texts. `words`: columns of text, aligned left. `bad`: highlighted cells, by row and
    column. `marked`: highlighted rows."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[str] = ()
    bad: Collection[tuple[int, str]] = ()
    marked: Collection[int] = ()
    is_table = True


@dataclass(frozen=True)
class Charts:
    """Charts side by side where there is room. `otherwise`: the text if no chart has a point."""

    charts: Sequence[Chart]
    otherwise: str = ""
    is_plain: bool = False  # drawn without a script
    is_charts = True

    @property
    def drawn(self) -> list[Chart]:
        return [chart for chart in self.charts if any(x["x"] for x in chart.figure()["data"])]


@dataclass(frozen=True)
class Section:
    """Parts below a heading. A folded section is for pages only."""

    title: str
    parts: Sequence[Part]
    is_folded: bool = False
    only: str = ""  # "page" or "terminal"; empty: both


Part: TypeAlias = Text | Bullets | Table | Charts | Section


@dataclass(frozen=True)
class Document:
    """`facts`: what `--json` prints, an object for each line."""

    title: str
    parts: Sequence[Part]
    facts: Sequence[Any] = ()


def number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else NONE


def rate(value: float, low: float, high: float) -> str:
    """Return a rate and its spread, with three digits each: 5.09M (4.9M-5.2M)."""
    return NONE if math.isnan(value) else f"{_short(value)} ({_short(low)}-{_short(high)})"


def _short(value: float) -> str:
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return names and values without a heading."""
    return Table(("", " "), list(facts.items()), words=("", " "))


def table_of(chart: Chart) -> Table:
    """Return the points of a chart of lines: a row for each, a column for each line."""
    lines = [series for series in chart.series if isinstance(series, Line)]
    columns = [dict(line.cells(chart.cell)) for line in lines]
    rows = [
        [f"{x:,}", *(column.get(x) or chart.gaps.get(x, NONE) for column in columns)]
        for x in dict.fromkeys(chain.from_iterable(columns))
    ]
    return Table([chart.x, *(line.name for line in lines)], rows)


def table_by_columns(
    columns: Mapping[str, Callable[[Any], str]], items: Iterable[Any], **options: Any
) -> Table:
    """Return a row for each item. `columns`: the heading and the text of each cell."""
    rows = [[cell(item) for cell in columns.values()] for item in items]
    return Table(list(columns), rows, **options)


# -- pages -----------------------------------------------------------------------------

paragraph, charts = Text, Charts  # for pages of one's own (docs/report.md)
NEEDS_PLOTLY = (
    "charts need plotly, which is not installed; pip install plotly, or ask for --text or --json"
)


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("hotrow.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html")


def page(title: str, parts: Sequence[Part]) -> str:
    """Return the whole page."""
    script = library() if _has_charts(parts) else None
    return _template().render(title=title, parts=parts, library=script) + "\n"


def page_of(document: Document) -> str:
    return page(document.title, document.parts)


def _has_charts(parts: Sequence[Part]) -> bool:
    for part in parts:
        if isinstance(part, Charts) and part.drawn and not part.is_plain:
            return True
        if isinstance(part, Section) and _has_charts(part.parts):
            return True
    return False
