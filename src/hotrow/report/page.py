"""Documents as HTML pages that need nothing else: no network, no font, a script only for charts.

    page("hotrow report: first", [paragraph("..."), charts([Chart(...)])])

The template escapes all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from hotrow.report.charts import library
from hotrow.report.document import Charts, Document, Part, Section, Text

if TYPE_CHECKING:
    from jinja2 import Template

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
